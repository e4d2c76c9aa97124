"""Broken variants that go wrong beyond some length only, across a block, or with other numbers of keys than queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.errors import UnsupportedError
from attn_zoo.registry import VariantConfig
from tests.conformance.broken import Broken, Softmax, dressed, last_row_zeroed
from tests.conformance.broken_claims import DECODE, SoundDecode


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks(VariantConfig):
    block_size: int = 48


class LeaksAtALateBlock(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        keep = super().keep(query, key, mask)
        if keep is None or not self.build.is_causal or key.shape[-2] <= 256:
            return keep
        keep = keep.clone()
        keep[..., 255, 256] = True
        return keep


class LeaksAtTheThirdBlock(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        keep = super().keep(query, key, mask)
        start = 2 * self.config.block_size
        if keep is None or not self.build.is_causal or key.shape[-2] <= start:
            return keep
        keep = keep.clone()
        keep[..., start - 1, start] = True
        return keep


class NoCausalMaskBeyond200(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        return None if query.shape[-2] > 200 else super().keep(query, key, mask)


class NoCausalMaskOfWholeBlocks(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        return None if query.shape[-2] % 512 == 0 else super().keep(query, key, mask)


class GradientToFutureBeyond256(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        mean = value.mean(-2, keepdim=True)
        return output + 1e-3 * (mean - mean.detach()) if query.shape[-2] > 256 else output


class HalvesGradientBeyond128(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        value = 0.5 * value + 0.5 * value.detach() if query.shape[-2] > 128 else value
        return super().attend(query, key, value, mask)


class LosesGradientOfLateKeys(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        key = torch.cat([key[..., :512, :], key[..., 512:, :].detach()], dim=-2)
        return super().attend(query, key, value, mask)


class ForgetsRaggedEndOfManyBlocks(Softmax):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        output = super().forward(query, key, value)
        return last_row_zeroed(output) if query.shape[-2] > 256 and query.shape[-2] % 64 else output


class DiffersBeyond512(Softmax):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        output = super().forward(query, key, value)
        return output * (1 + 1e-9) if query.shape[-2] > 512 else output


class ForgetsATokenBehindABlock(Softmax):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        length = query.shape[-2]
        if length > self.config.block_size and length % self.config.block_size == 1:
            return super().forward(query, key[:, :, :-1], value[:, :, :-1])
        return super().forward(query, key, value)


class MixesBatchBeyond200(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        return output + 1e-6 * output.mean(0, keepdim=True) if query.shape[-2] > 200 else output


class PrefersLateKeysBeyond200(Softmax):
    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        if scores.shape[-1] > 200:
            scores = scores + 1e-6 * torch.arange(scores.shape[-1], dtype=scores.dtype)
        return super().weights(scores, keep)


class AlignsTopLeft(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        keep = super().keep(query, key, mask)
        if keep is None or not self.build.is_causal:
            return keep
        square = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        return square if mask is None else square & ~mask[:, None, None]


class SeesOneMoreOfManyKeys(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        offset = key.shape[-2] - query.shape[-2]
        if not self.build.is_causal or offset < 8:
            return super().keep(query, key, mask)
        keep = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(offset + 1)
        return keep if mask is None else keep & ~mask[:, None, None]


class MeanBeforeTheFirstKey(Softmax):
    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        weights = super().weights(scores, keep)
        is_blind = torch.arange(scores.shape[-2], device=scores.device)[:, None] < scores.shape[-2] - scores.shape[-1]
        return torch.where(is_blind, 1.0 / scores.shape[-1], weights) if self.build.is_causal else weights


class TakesOtherLengthsUndeclared(Softmax):
    def _check_sizes(self, query: Tensor, keys: Tensor, mask: Tensor | None) -> None:
        super()._check_sizes(query, query if query.shape[-2] != keys.shape[-2] else keys, mask)


class SoundButShort(Softmax):
    """A table of positions may end somewhere. Itself sound."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        if build.max_seq_len > 600:
            raise UnsupportedError("max_seq_len", f"its table has 600 positions; got {build.max_seq_len}")


class ForgetsManyKeysOfFewQueries(SoundDecode):
    """Wrong where there are more than 256 keys and another number of queries: under a causal mask, and across."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if query.shape[-2] != key.shape[-2] > 256:
            value = torch.cat([torch.zeros_like(value[..., :8, :]), value[..., 8:, :]], dim=-2)
        return super().attend(query, key, value, mask)


class SoundWithKinks(Softmax):
    """Rectified scores have a kink, rounded ones jump: a finite difference across either says nothing. Itself sound."""

    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        weights = scores.relu() + 1e-3 * scores.detach().round().abs() + 1.0
        weights = weights if keep is None else weights * keep
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


class SoundButNeedsAKey(Softmax):
    """Refuses queries that stand before every key. Itself sound."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        if self.build.is_causal and query.shape[-2] > key.shape[-2]:
            raise UnsupportedError("causal", "a query before every key sees nothing")
        return super().forward(query, key, value, key_padding_mask=key_padding_mask)


CAUSAL = {"causal": True}
OFFSET = {"causal": True, "cross_attention": True, "key_padding_mask": True}
NUMBERS = frozenset({"matches_reference", "matches_oracle"})
GRADIENT = frozenset({"gradients_reach_every_parameter"})


LENGTHS = (
    dressed(LeaksAtALateBlock, "causality", also=NUMBERS, capabilities=CAUSAL),
    dressed(LeaksAtTheThirdBlock, "causality", also=NUMBERS | {"odd_lengths"}, capabilities=CAUSAL, config=Blocks),
    dressed(NoCausalMaskBeyond200, "causality", also=NUMBERS, capabilities=CAUSAL),
    dressed(NoCausalMaskOfWholeBlocks, "causality", also=NUMBERS, capabilities=CAUSAL),
    dressed(GradientToFutureBeyond256, "causality", also=NUMBERS | GRADIENT, capabilities=CAUSAL),
    dressed(HalvesGradientBeyond128, "gradients_reach_every_parameter", also=NUMBERS),
    dressed(LosesGradientOfLateKeys, "gradients_reach_every_parameter"),
    dressed(ForgetsRaggedEndOfManyBlocks, "matches_reference", exact="matches_oracle", is_known_bare=False),
    dressed(DiffersBeyond512, "matches_reference", exact="matches_oracle", is_known_bare=False),
    dressed(
        ForgetsATokenBehindABlock,
        "odd_lengths",
        exact="matches_oracle",
        is_known_bare=False,
        also=NUMBERS,
        config=Blocks,
    ),
    dressed(MixesBatchBeyond200, "batch_invariance", also=NUMBERS),
    dressed(
        PrefersLateKeysBeyond200,
        "permutation",
        also=NUMBERS,
        capabilities={"is_permutation_invariant": True},
    ),
    dressed(AlignsTopLeft, "cross_attention", is_known_bare=False, also=NUMBERS, capabilities=OFFSET),
    dressed(SeesOneMoreOfManyKeys, "causality", also=NUMBERS | {"cross_attention"}, capabilities=OFFSET),
    dressed(MeanBeforeTheFirstKey, "cross_attention", is_known_bare=False, also=NUMBERS, capabilities=OFFSET),
    dressed(ForgetsManyKeysOfFewQueries, "cross_attention", capabilities={**OFFSET, **DECODE}),
    dressed(TakesOtherLengthsUndeclared, "cross_attention", capabilities=CAUSAL),
)

SOUND_LENGTHS = (
    Broken(cls=SoundButShort, check="", capabilities={"causal": True, "is_exact": True}),
    Broken(cls=SoundWithKinks, check="", capabilities=CAUSAL),
    Broken(cls=SoundButNeedsAKey, check="", capabilities={**OFFSET, "is_exact": True}),
)
