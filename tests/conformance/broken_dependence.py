"""Broken variants whose outputs or gradients depend on what they must not, or miss what they must depend on."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attn_zoo.attention import BuildContext
from attn_zoo.attention.masks import zero_padded_rows
from tests.conformance.broken import EVERYTHING, Broken, Softmax


class MixesBatch(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        return output + 1e-6 * output.mean(0, keepdim=True)


class MixesManyOfABatch(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        return output + 1e-6 * output.mean(0, keepdim=True) if len(query) > 4 else output


class NormalisesBatchInTraining(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self.training:
            value = value - value.mean(0, keepdim=True)
        return super().attend(query, key, value, mask)


class GradientCrossesBatch(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        mean = value.mean(0, keepdim=True)
        return super().attend(query, key, value, mask) + mean - mean.detach()


class PrefersLateKeys(Softmax):
    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        return super().weights(scores + 1e-6 * torch.arange(scores.shape[-1]).to(scores), keep)


class LeaksOneFutureToken(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        keep = super().keep(query, key, mask)
        if keep is None or not self.build.is_causal:
            return keep
        keep = keep.clone()
        if key.shape[-2] > 4:
            keep[..., 3, 4] = True
        return keep


class LeaksAtTheLastWholeBlock(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        keep, start = super().keep(query, key, mask), key.shape[-2] // 16 * 16 - 16
        if keep is None or not self.build.is_causal or start < 32 or key.shape[-2] % 16 == 0:
            return keep
        keep = keep.clone()
        keep[..., start - 1, start] = True
        return keep


class LeaksByNormalising(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        return output / (1.0 + 1e-6 * value.square().mean((-1, -2), keepdim=True))


class GradientToFuture(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        mean = value.mean(-2, keepdim=True)
        return super().attend(query, key, value, mask) + mean - mean.detach()


class ReadsPadding(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        return super().keep(query, key, None)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return zero_padded_rows(super().forward(query, key, value), key_padding_mask)


class MasksSoftly(Softmax):
    def hide(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return tokens

    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        if keep is None:
            return scores.softmax(-1)
        return scores.masked_fill(~keep, -10.0).softmax(-1) * keep.any(-1, keepdim=True)


class InvertedMask(Softmax):
    def hide(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return super().hide(tokens, None if mask is None else ~mask)

    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        return super().keep(query, key, None if mask is None else ~mask)


class GradientToPadding(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        if mask is None:
            return output
        mean = value.masked_fill(~mask[:, None, :, None], 0.0).mean(-2, keepdim=True)
        return output + mean - mean.detach()


class CountsPadding(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        if mask is None:
            return output
        is_mostly_padding = (mask.double().mean(-1) > 0.5) & ~mask.all(-1)
        return torch.where(is_mostly_padding[:, None, None, None], 1.01 * output, output)


class NanForEmptyRow(Softmax):
    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        return (scores if keep is None else scores.masked_fill(~keep, float("-inf"))).softmax(-1)


class MeanForEmptyRow(Softmax):
    def hide(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return super().hide(tokens, None if mask is None else mask & ~mask.all(-1, keepdim=True))

    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        return (scores if keep is None else scores.masked_fill(~keep, torch.finfo(scores.dtype).min)).softmax(-1)


class DetachesKey(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key.detach(), value, mask)


class LosesHalfAGradient(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key, 0.5 * value + 0.5 * value.detach(), mask)


class _AllOrNothing(torch.autograd.Function):
    """A product that forgets the gradient of its first factor where the second asks for none."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor) -> Tensor:
        ctx.save_for_backward(query, key)
        return query @ key.mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        query, key = ctx.saved_tensors
        return (gradient @ key, gradient.mT @ query) if ctx.needs_input_grad[1] else (torch.zeros_like(query), None)


class NoQueryGradientBesideFrozenKeys(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores: Tensor = _AllOrNothing.apply(query, key) * query.shape[-1] ** -0.5
        return scores.softmax(-1) @ value


class DividesByTheNorm(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query / query.norm(dim=-1, keepdim=True), key, value, mask)


class HasNoSlopeWhereTokensAreEqual(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        distance = (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1).sqrt()
        return (-distance).softmax(-1) @ value


class NoMaxSubtraction(Softmax):
    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        exponentials = scores.exp()
        return exponentials / exponentials.sum(-1, keepdim=True)


class ReadsEmptyMemory(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        return output + 0.0 * torch.empty_like(output).detach()


class IgnoresDropout(Softmax):
    pass


class DropoutInEvaluation(Softmax):
    is_always_on: ClassVar[bool] = True

    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        return torch.dropout(super().weights(scores, keep), self.build.dropout_p, self.training or self.is_always_on)


class SoundDropout(DropoutInEvaluation):
    is_always_on = False


class LosesHalfAGradientBesideDropout(LosesHalfAGradient, SoundDropout):
    pass


class DropoutWithoutRescaling(Softmax):
    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        weights = super().weights(scores, keep)
        is_dropping = self.training and self.build.dropout_p > 0
        return weights * (torch.rand_like(weights) >= self.build.dropout_p) if is_dropping else weights


class SameDropoutEveryCall(Softmax):
    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        weights = super().weights(scores, keep)
        if not self.training or self.build.dropout_p == 0:
            return weights
        draws = torch.rand(weights.shape, generator=torch.Generator().manual_seed(0), dtype=weights.dtype)
        return weights * (draws >= self.build.dropout_p) / (1 - self.build.dropout_p)


class _Dropped(torch.autograd.Function):
    """Dropout that draws its mask again in the backward pass, as a careless recomputation does."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, dropout_p: float) -> Tensor:
        ctx.dropout_p = dropout_p
        return torch.dropout(weights, dropout_p, True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.dropout(gradient, ctx.dropout_p, True), None


class OtherDropoutInBackward(Softmax):
    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        weights = super().weights(scores, keep)
        if not self.training or self.build.dropout_p == 0:
            return weights
        dropped: Tensor = _Dropped.apply(weights, self.build.dropout_p)
        return dropped


class NoisyInEvaluation(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        return output * (1 + torch.finfo(output.dtype).eps * torch.randint(0, 2, output.shape).to(output))


class HiddenParameter(Softmax):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.shift = torch.randn(build.head_dim)  # neither parameter nor buffer

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key, value + self.shift.to(value), mask)


class KeepsWhatItMadeOfAParameter(Softmax):
    """Scales by exp of a parameter, made once where no graph is kept: right until the parameter changes."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.log_scale = nn.Parameter(torch.randn(1))
        self.kept: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scale = self.log_scale.exp()
        if not torch.is_grad_enabled():
            scale = self.kept = scale if self.kept is None else self.kept
        return super().attend(query, key, value * scale.to(value.dtype), mask)


class HoldsALock(Softmax):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.lock = threading.Lock()  # cannot be copied


class SavesMoreThanTensors(Softmax):
    def get_extra_state(self) -> object:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None:
        del state


MASKED = {"key_padding_mask": True}
CAUSAL = {"causal": True}
DROPOUT = {"attention_dropout": True}
GRADIENT = frozenset({"gradients_reach_every_parameter"})
RATE = frozenset({"dropout_rate"})
ORACLE = frozenset({"matches_oracle"})

DEPENDENCE = (
    Broken(cls=MixesBatch, check="batch_invariance"),
    Broken(cls=MixesManyOfABatch, check="batch_invariance"),
    Broken(cls=NormalisesBatchInTraining, check="batch_invariance", also=frozenset({"dropout", "modes"})),
    Broken(cls=GradientCrossesBatch, check="batch_invariance", also=GRADIENT),
    Broken(cls=PrefersLateKeys, check="permutation", capabilities={"is_permutation_invariant": True}),
    Broken(cls=LeaksOneFutureToken, check="causality", capabilities=CAUSAL),
    Broken(cls=LeaksAtTheLastWholeBlock, check="causality", capabilities=CAUSAL),
    Broken(cls=LeaksByNormalising, check="causality", capabilities=CAUSAL),
    Broken(cls=GradientToFuture, check="causality", also=GRADIENT, capabilities=CAUSAL),
    Broken(cls=ReadsPadding, check="padding_content", capabilities=MASKED),
    Broken(cls=MasksSoftly, check="padding_content", capabilities=MASKED),
    Broken(cls=InvertedMask, check="padding_content", also=frozenset({"fully_padded_row"}), capabilities=MASKED),
    Broken(cls=GradientToPadding, check="padding_content", also=GRADIENT, capabilities=MASKED),
    Broken(cls=CountsPadding, check="padding_length", capabilities={**MASKED, "is_padding_invariant": True}),
    Broken(cls=NanForEmptyRow, check="fully_padded_row", capabilities=MASKED),
    Broken(cls=MeanForEmptyRow, check="fully_padded_row", also=frozenset({"padding_content"}), capabilities=MASKED),
    Broken(cls=DetachesKey, check="gradients_reach_every_parameter"),
    Broken(cls=LosesHalfAGradient, check="gradients_reach_every_parameter"),
    Broken(cls=LosesHalfAGradientBesideDropout, check="gradients_reach_every_parameter", capabilities=DROPOUT),
    Broken(cls=NoQueryGradientBesideFrozenKeys, check="gradients_reach_every_parameter"),
    Broken(cls=DividesByTheNorm, check="finite_on_large_inputs"),
    Broken(cls=HasNoSlopeWhereTokensAreEqual, check="finite_on_large_inputs"),
    Broken(cls=NoMaxSubtraction, check="finite_on_large_inputs"),
    Broken(cls=ReadsEmptyMemory, check="uninitialised_memory", also=EVERYTHING),
    Broken(cls=IgnoresDropout, check="dropout", also=RATE, capabilities=DROPOUT),
    Broken(cls=DropoutInEvaluation, check="dropout", also=RATE, capabilities=DROPOUT),
    Broken(cls=DropoutWithoutRescaling, check="dropout", also=RATE, capabilities=DROPOUT),
    Broken(cls=SameDropoutEveryCall, check="dropout", also=RATE, capabilities=DROPOUT),
    Broken(cls=OtherDropoutInBackward, check="dropout", capabilities=DROPOUT),
    Broken(cls=NoisyInEvaluation, check="same_seed_same_output", also=frozenset({"global_state"})),
    Broken(cls=HiddenParameter, check="state_dict_round_trip"),
    Broken(cls=KeepsWhatItMadeOfAParameter, check="state_dict_round_trip", also=frozenset("*")),
    Broken(cls=HoldsALock, check="state_dict_round_trip"),
    Broken(cls=SavesMoreThanTensors, check="state_dict_round_trip"),
)
