"""Broken variants that carry something between layers, or choose by the data what they attend to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attn_zoo.attention import AbstractMixer, BuildContext, Mixed
from attn_zoo.attention.oracle import expand_kv_heads
from tests.conformance.broken import Broken, Softmax

CARRY = {"has_carry": True, "positions": ("none",), "key_padding_mask": True}


class SoundCarry(AbstractMixer):
    """Adds what it is given to every token, and passes on the mean of the tokens beside it. Itself sound."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.scale = nn.Parameter(torch.ones(build.embed_dim))

    def init_carry(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.ones(batch_size, self.build.embed_dim, device=device, dtype=dtype)

    def pooled(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        keep = hidden.new_ones(hidden.shape[:2]) if mask is None else (~mask).to(hidden.dtype)
        hidden = hidden if mask is None else hidden.masked_fill(mask[..., None], 0.0)
        return hidden.sum(1) / keep.sum(1, keepdim=True).clamp(min=1.0)

    def passed_on(self, carry: Tensor, pooled: Tensor) -> Tensor:
        return carry + pooled

    def used(self, carry: Tensor) -> Tensor:
        return carry

    def forward(
        self,
        hidden: Tensor,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        carry: Tensor | None = None,
    ) -> Mixed:
        assert carry is not None
        pooled = self.pooled(hidden, key_padding_mask)
        output = (self.used(carry) + pooled)[:, None] * self.scale
        return Mixed(output.expand_as(hidden), self.passed_on(carry, pooled))

    def reference(
        self,
        hidden: Tensor,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        carry: Tensor | None = None,
    ) -> Mixed:
        assert carry is not None
        pooled = SoundCarry.pooled(self, hidden, key_padding_mask)
        output = (carry + pooled)[:, None] * self.scale
        return Mixed(output.expand_as(hidden), carry + pooled)


class CarryMixesBatch(SoundCarry):
    def passed_on(self, carry: Tensor, pooled: Tensor) -> Tensor:
        return super().passed_on(carry, pooled) + 1e-6 * pooled.mean(0)


class CarryIsNotUsed(SoundCarry):
    def used(self, carry: Tensor) -> Tensor:
        return torch.ones_like(carry)


class CarryIsNotPassedOn(SoundCarry):
    def passed_on(self, carry: Tensor, pooled: Tensor) -> Tensor:
        return carry


class CarryReadsPadding(SoundCarry):
    def forward(self, hidden: Tensor, **keywords: Any) -> Mixed:
        output = super().forward(hidden, **keywords)
        assert output.carry is not None
        return Mixed(output.hidden, output.carry + 1e-6 * hidden.mean(1))


class CarryPoolsZeroTimesNan(SoundCarry):
    def pooled(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        keep = hidden.new_ones(hidden.shape[:2]) if mask is None else (~mask).to(hidden.dtype)
        return (hidden * keep[..., None]).sum(1) / keep.sum(1, keepdim=True).clamp(min=1.0)


class CarryDiffersFromItsReference(SoundCarry):
    def passed_on(self, carry: Tensor, pooled: Tensor) -> Tensor:
        return super().passed_on(carry, pooled) * (1 + 1e-6)


class SoundRouting(Softmax):
    """Each query sees the half of its past with the largest scores: a choice that rounding may flip. Itself sound."""

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        key = expand_kv_heads(key, query.shape[1])
        scores: Tensor = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        keep = self.keep(query, key, None)
        return scores if keep is None else scores.masked_fill(~keep, -torch.inf)

    def route(self, query: Tensor, key: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        scores = self.scores(query, key)
        rank = scores.argsort(-1, descending=True).argsort(-1)
        return rank < (scores.isfinite().sum(-1, keepdim=True) + 1) // 2

    def seen(self, routing: Tensor) -> Tensor:
        return routing

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        seen = self.seen(self.route(query, key))
        weights = self.scores(query, key).masked_fill(~seen, -torch.inf).softmax(-1)
        return weights @ expand_kv_heads(value, query.shape[1])

    def reference(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        routing: Tensor | None = None,
    ) -> Tensor:
        routing = self.route(query, key) if routing is None else routing
        weights = self.scores(query, key).masked_fill(~routing, -torch.inf).softmax(-1)
        return weights @ expand_kv_heads(value, query.shape[1])


class SeesOneMoreThanItChose(SoundRouting):
    def seen(self, routing: Tensor) -> Tensor:
        more = routing.clone()
        more[..., -1, 0] = True
        return more


class SortsByTheFuture(Softmax):
    """Which keys a query may see depends on all keys of the sequence, but no later one is among them. Itself sound."""

    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        keep = super().keep(query, key, mask)
        if keep is None:
            return keep
        size = key.detach().square().sum((1, 3))  # [B, S]
        is_large = size > size.median(-1, keepdim=True).values
        own = torch.eye(key.shape[-2], dtype=torch.bool, device=key.device)[-query.shape[-2] :]
        return keep & (is_large[:, None, None] | own)


class SortsByTheFutureUndeclared(SortsByTheFuture):
    pass


class MaskedButLeaks(SortsByTheFuture):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key, value, mask) + 1e-6 * value.mean(-2, keepdim=True)


CONTRACT = (
    Broken(cls=CarryMixesBatch, check="carry", also=frozenset({"matches_reference"}), capabilities=CARRY),
    Broken(cls=CarryIsNotUsed, check="carry", also=frozenset({"matches_reference"}), capabilities=CARRY),
    Broken(cls=CarryIsNotPassedOn, check="carry", also=frozenset({"matches_reference"}), capabilities=CARRY),
    Broken(cls=CarryReadsPadding, check="carry", also=frozenset({"matches_reference"}), capabilities=CARRY),
    Broken(cls=CarryPoolsZeroTimesNan, check="carry", also=frozenset({"padding_content"}), capabilities=CARRY),
    Broken(cls=CarryDiffersFromItsReference, check="carry", also=frozenset({"matches_reference"}), capabilities=CARRY),
    Broken(
        cls=SeesOneMoreThanItChose,
        check="matches_reference",
        also=frozenset({"odd_lengths", "batch_and_head_sizes"}),
        capabilities={"causal": True},
    ),
    Broken(cls=SortsByTheFutureUndeclared, check="causality", capabilities={"causal": True}),
    Broken(cls=MaskedButLeaks, check="causality", capabilities={"causal": "masked"}),
)
