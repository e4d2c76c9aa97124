"""The multi-head mixer: projections shared by every variant that consumes heads, so that they are identical for all.

Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2:
    out = Concat(head_1 .. head_H) W_O,   head_i = attention(X W_Q, X W_K, X W_V)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attn_zoo.attention.contract import AbstractAttention, AbstractMixer, evaluating, product_dtype
from attn_zoo.attention.masks import finite_padding
from attn_zoo.attention.rotary import require_pairs, rotate
from attn_zoo.metadata import Request


@dataclass(frozen=True, slots=True)
class MixerState:
    """Decode state of a multi-head mixer.

    Args:
        attention: state of the attention inside; None in cross-attention.
        position: of the next token.
        key: projected context `[B, G, S, D]`, in cross-attention only.
        value: likewise.
        key_padding_mask: of the context.
    """

    attention: Any
    position: int = 0
    key: Tensor | None = None
    value: Tensor | None = None
    key_padding_mask: Tensor | None = None


class MultiHeadMixer(AbstractMixer):
    """Project hidden states to heads, attend, project back.

    Args:
        attention: what acts on the heads, built for the same context.
    """

    def __init__(self, attention: AbstractAttention) -> None:
        super().__init__(attention.config, attention.build)
        build = attention.build
        if build.position == "rotary":
            require_pairs(build.head_dim)
        self.attention = attention
        self.query_proj = nn.Linear(build.embed_dim, build.num_heads * build.head_dim)
        self.key_proj = nn.Linear(build.embed_dim, build.num_kv_heads * build.head_dim)
        self.value_proj = nn.Linear(build.embed_dim, build.num_kv_heads * build.head_dim)
        self.out_proj = nn.Linear(build.num_heads * build.head_dim, build.embed_dim)

    def _heads(self, hidden: Tensor, projection: nn.Linear, num_heads: int) -> Tensor:
        projected: Tensor = projection(hidden)
        heads: Tensor = projected.unflatten(-1, (num_heads, self.build.head_dim))
        return heads.transpose(1, 2)  # [B, H, L, D]

    def _project(
        self, hidden: Tensor, context: Tensor | None, mask: Tensor | None = None, position: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        build = self.build
        keys = finite_padding(hidden if context is None else context, mask)
        if context is None:
            hidden = keys
        query = self._heads(hidden, self.query_proj, build.num_heads)
        key = self._heads(keys, self.key_proj, build.num_kv_heads)
        value = self._heads(keys, self.value_proj, build.num_kv_heads)
        if build.position == "rotary":
            query, key = rotate(query, position), rotate(key, position)
        return query, key, value

    def _merge(self, heads: Tensor) -> Tensor:
        merged: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))  # [B, L, E]
        return merged

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Mix positions through the attention; shapes as in `AbstractMixer.forward`."""
        query, key, value = self._project(hidden, context, key_padding_mask)
        return self._merge(self.attention(query, key, value, key_padding_mask=key_padding_mask))

    def route(self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Any:
        """Return what the attention chooses for the projected heads."""
        query, key, _ = self._project(hidden, context, key_padding_mask)
        return self.attention.route(query, key, key_padding_mask=key_padding_mask)

    def reference(
        self,
        hidden: Tensor,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        routing: Any = None,
    ) -> Tensor:
        """Mix positions through the attention's readable reference, under `routing` where one is given."""
        query, key, value = self._project(hidden, context, key_padding_mask)
        given = {} if routing is None else {"routing": routing}
        return self._merge(self.attention.reference(query, key, value, key_padding_mask=key_padding_mask, **given))

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> MixerState:
        """Return the empty state; in cross-attention the context is projected here, once.

        Any variant that can attend across can decode across: one query at a time needs no state but the context's
        keys and values.
        """
        weight = self.key_proj.weight
        dtype = product_dtype(dtype or weight.dtype, weight.device)
        if not self.build.is_cross:
            if key_padding_mask is not None or context is not None:
                self._require_state(key_padding_mask, context)
            return MixerState(self.attention.init_state(batch_size, device=device, dtype=dtype))
        if context is None or context.shape[0] != batch_size:
            got = "none" if context is None else list(context.shape)
            raise ValueError(f"context: expected [B, S, E] with B = {batch_size} to decode across; got {got}")
        self._check(context.new_empty(batch_size, 1, self.build.embed_dim), context, key_padding_mask, None)
        _, key, value = self._project(context[:, :1], context, key_padding_mask)
        return MixerState(None, key=key, value=value, key_padding_mask=key_padding_mask)

    def step(self, hidden: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        """Mix one new position `[B, 1, E]`; return its output and the new state."""
        return self._advance(hidden, state, self.attention.step)

    def prefill(self, hidden: Tensor, state: MixerState | None = None) -> tuple[Tensor, MixerState]:
        """Mix n new positions `[B, n, E]` from a state; in cross-attention that holds the context."""
        if state is None:
            state = self.init_state(hidden.shape[0], device=hidden.device, dtype=hidden.dtype)
        return self._advance(hidden, state, self.attention.prefill)

    def _advance(
        self, hidden: Tensor, state: MixerState, attend: Callable[..., tuple[Tensor, Any]]
    ) -> tuple[Tensor, MixerState]:
        """Project the new positions, attend by `step` or `prefill`, and merge."""
        position = state.position + hidden.shape[1]
        if state.key is not None and state.value is not None:
            query = self._heads(hidden, self.query_proj, self.build.num_heads)
            if self.build.position == "rotary":
                query = rotate(query, state.position)
            with evaluating(self.attention):  # decoding drops nothing
                output = self.attention(query, state.key, state.value, key_padding_mask=state.key_padding_mask)
            return self._merge(output), replace(state, position=position)
        if not self.build.is_cross:
            self._refuse(Request(is_causal=self.build.is_causal, needs_decode=True))
        query, key, value = self._project(hidden, None, position=state.position)
        output, inner = attend(query, key, value, state.attention)
        return self._merge(output), MixerState(inner, position)
