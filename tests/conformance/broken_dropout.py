"""Variants whose dropout is another than was asked for, and sound ones that drop something else than single weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout

from attn_zoo.attention.oracle import expand_kv_heads
from tests.conformance.broken import Broken, Softmax, SoftmaxMixer


class Drops(Softmax):
    """Softmax whose weights are multiplied in training. Itself sound."""

    @property
    def p(self) -> float:
        return self.build.dropout_p if self.training else 0.0

    def factors(self, weights: Tensor) -> Tensor:
        return dropout(torch.ones_like(weights), self.p)

    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        weights = super().weights(scores, keep)
        return weights * self.factors(weights) if self.p else weights


class DropsHalfTheRate(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return dropout(torch.ones_like(weights), self.p / 2)


class DropsHalfAndRescalesByTheWhole(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return (torch.rand_like(weights) >= self.p / 2) / (1 - self.p)


class DropsAtMostHalf(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return dropout(torch.ones_like(weights), min(self.p, 0.5))


class RescalesWithoutDropping(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return torch.full_like(weights, 1 / (1 - self.p))


class DropsShortSequencesOnly(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return super().factors(weights) if weights.shape[-1] < 100 else torch.ones_like(weights)


class DropsHalfTheRateBeyond256Tokens(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return dropout(torch.ones_like(weights), self.p if weights.shape[-1] <= 256 else self.p / 2)


class DropsHalfTheRateIn16Bits(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return dropout(torch.ones_like(weights), self.p / 2 if weights.dtype == torch.bfloat16 else self.p)


class DropsInOneHead(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        factors = super().factors(weights)
        factors[:, 1:] = 1
        return factors


class DropsLongSequencesInEvaluation(Softmax):
    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        is_on = self.training or scores.shape[-1] > 100
        return dropout(super().weights(scores, keep), self.build.dropout_p, is_on)


class OneMaskForAllHeads(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return super().factors(weights[:, :1])


class OneMaskForAGroup(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return expand_kv_heads(super().factors(weights[:, : self.build.num_kv_heads]), weights.shape[1])


class DropsHalfTheRateAcross(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return dropout(torch.ones_like(weights), self.p / 2 if self.build.is_cross else self.p)


class OneMaskForAllEntries(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return super().factors(weights[:1])


class OneMaskForAllQueries(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return super().factors(weights[..., :1, :])


class OneMaskForAllKeys(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return super().factors(weights[..., :1])


class RepeatsMasksOfBlocks(Drops):
    """As a kernel that seeds its draws by the position in a block."""

    def factors(self, weights: Tensor) -> Tensor:
        length = weights.shape[-2]
        return super().factors(weights[..., : min(length, 32), :]).repeat(1, 1, -(-length // 32), 1)[:, :, :length]


class FollowsWithTheOppositeMask(Drops):
    """The second half of the batch keeps what the first drops: the right share, but not independent."""

    def factors(self, weights: Tensor) -> Tensor:
        half = torch.rand_like(weights[::2])
        draws = torch.stack([half, 1 - half], dim=1).flatten(0, 1)[: len(weights)]
        return (draws >= self.p) / (1 - self.p)


class DropsItsOutputs(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return dropout(super().attend(query, key, value, mask), self.build.dropout_p, self.training)


class DividesByWhatIsLeft(Drops):
    """Right in the mean; nothing by nothing where all of a row was dropped."""

    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        weights = super().weights(scores, keep)
        return weights / weights.sum(-1, keepdim=True) if self.p > 0.9 else weights


class SameMaskInEveryLongCall(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        if weights.shape[-1] < 100:
            return super().factors(weights)
        draws = torch.rand(weights.shape, generator=torch.Generator().manual_seed(0), dtype=weights.dtype)
        return (draws >= self.p) / (1 - self.p)


class SoundDropsMixer(SoftmaxMixer):
    """Drops weights of hidden states; the rate is that of a factor."""

    factor = 1.0

    def factors(self, weights: Tensor) -> Tensor:
        return dropout(torch.ones_like(weights), self.factor * self.build.dropout_p)

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        weights: Tensor = (0.1 * hidden @ hidden.transpose(-1, -2) * hidden.shape[-1] ** -0.5).softmax(-1)
        if self.training and self.build.dropout_p:
            weights = weights * self.factors(weights)
        output: Tensor = weights @ hidden
        return output


class MixerDropsHalfTheRate(SoundDropsMixer):
    factor = 0.5


class MixerDropsTheSameForAllEntries(SoundDropsMixer):
    def factors(self, weights: Tensor) -> Tensor:
        return super().factors(weights[:1])


class MixerDropsTheSameForAllQueries(SoundDropsMixer):
    def factors(self, weights: Tensor) -> Tensor:
        return super().factors(weights[:, :1])


class SoundTokens(Drops):
    def factors(self, weights: Tensor) -> Tensor:
        return super().factors(weights[..., :1, :])


class SoundOutputs(DropsItsOutputs):
    pass


class SoundSummaries(Softmax):
    """Attends to means of three neighbours, whose weights are dropped: fewer draws than keys."""

    size = 3

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        def means(tokens: Tensor) -> Tensor:
            count = -(-tokens.shape[2] // self.size)
            parts = [part.mean(2) for part in tokens.tensor_split(count, dim=2)]
            return torch.stack(parts, dim=2)

        scores = query @ means(key).transpose(-1, -2) * query.shape[-1] ** -0.5
        return dropout(scores.softmax(-1), self.build.dropout_p, self.training) @ means(value)


class SoundDifference(Softmax):
    """Two maps, one of them halved and subtracted, each with dropout of its own; then a norm, so not linear in them."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        maps = [dropout((sign * scores).softmax(-1), self.build.dropout_p, self.training) for sign in (1, -1)]
        output = (maps[0] - 0.5 * maps[1]) @ value
        return output / (4.0 + output.square().mean(-1, keepdim=True)).sqrt()


class SoundLatents(SoftmaxMixer):
    """Eight means of tokens attend to all, then to each other, and the tokens to them: draws multiply."""

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        def attend(query: Tensor, keys: Tensor) -> Tensor:
            weights = (query @ keys.mT * query.shape[-1] ** -0.5).softmax(-1)
            return dropout(weights, self.build.dropout_p, self.training) @ keys

        latents = torch.stack([part.mean(1) for part in hidden.tensor_split(min(8, hidden.shape[1]), dim=1)], dim=1)
        latents = attend(latents, hidden)
        return attend(hidden, attend(latents, latents))


RATE = "dropout_rate"
ON = {"attention_dropout": True}
BOTH = frozenset({"dropout", "modes"})
MIXER = {**ON, "positions": ("none",)}

RATES = (
    Broken(cls=DropsHalfTheRate, check=RATE, capabilities=ON),
    Broken(cls=DropsHalfAndRescalesByTheWhole, check=RATE, also=BOTH, capabilities=ON),
    Broken(cls=DropsAtMostHalf, check=RATE, capabilities=ON),
    Broken(cls=RescalesWithoutDropping, check=RATE, also=BOTH, capabilities=ON),
    Broken(cls=DropsShortSequencesOnly, check=RATE, capabilities=ON),
    Broken(cls=DropsLongSequencesInEvaluation, check=RATE, capabilities=ON),
    Broken(cls=DropsHalfTheRateBeyond256Tokens, check=RATE, capabilities=ON),
    Broken(cls=DropsHalfTheRateIn16Bits, check=RATE, capabilities={**ON, "dtypes": ("float64", "bfloat16")}),
    Broken(cls=DropsInOneHead, check=RATE, capabilities=ON),
    Broken(cls=OneMaskForAllHeads, check=RATE, capabilities=ON),
    Broken(cls=OneMaskForAGroup, check=RATE, capabilities={**ON, "grouped_query": True}),
    Broken(cls=DropsHalfTheRateAcross, check=RATE, capabilities={**ON, "cross_attention": True}),
    Broken(cls=OneMaskForAllEntries, check=RATE, also=BOTH, capabilities=ON),
    Broken(cls=OneMaskForAllQueries, check=RATE, capabilities=ON),
    Broken(cls=OneMaskForAllKeys, check=RATE, capabilities=ON),
    Broken(cls=RepeatsMasksOfBlocks, check=RATE, capabilities=ON),
    Broken(cls=FollowsWithTheOppositeMask, check=RATE, capabilities=ON),
    Broken(cls=DropsItsOutputs, check=RATE, capabilities=ON),
    Broken(cls=DividesByWhatIsLeft, check=RATE, capabilities=ON),
    Broken(cls=SameMaskInEveryLongCall, check=RATE, capabilities=ON),
    Broken(cls=MixerDropsHalfTheRate, check=RATE, capabilities=MIXER),
    Broken(cls=MixerDropsTheSameForAllEntries, check=RATE, also=BOTH, capabilities=MIXER),
    Broken(cls=MixerDropsTheSameForAllQueries, check=RATE, capabilities=MIXER),
)

SOUND_DROPOUT = (
    Broken(cls=Drops, check="", capabilities={**ON, "causal": True, "cross_attention": True, "grouped_query": True}),
    Broken(cls=SoundTokens, check="", capabilities={**ON, "dropout_unit": "tokens", "causal": True}),
    Broken(cls=SoundOutputs, check="", capabilities={**ON, "dropout_unit": "outputs"}),
    Broken(cls=SoundSummaries, check="", capabilities={**ON, "dropout_unit": "summaries"}),
    Broken(cls=SoundDifference, check="", capabilities=ON),
    Broken(cls=SoundDropsMixer, check="", capabilities=MIXER),
    Broken(cls=SoundLatents, check="", capabilities={**MIXER, "dropout_unit": "summaries"}),
)
