"""Global pooling: every position receives the mean of all values, whatever its query. The control without attention.

Zhang, Xiong, Su 2018, "Accelerating Neural Transformer via an Average Attention Network", arXiv 1805.00631, equation 1,
without its feed-forward network and its gate.
    out_i = W_O (1 / n) sum_j (W_V x_j + b_V) + b_O,   n unpadded positions j; causal: those j <= i
Weights are uniform, so a model learns only what sums over its tokens tell. Pooling first, W_V mean(x) + b_V, is the
same and projects one row. Symbols: the paper's y_k are our hidden states x_j.
Cost: time O(B L E + B E^2), causal O(B L E^2); memory O(B L E); decode state O(B E).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import register_mixer


@dataclass(frozen=True, slots=True)
class PoolingState:
    """What decoding keeps.

    Args:
        total: sum of the values so far, `[B, 1, H D]`, in float32 at least.
        length: positions so far.
    """

    total: Tensor
    length: int = 0


def global_pooling_flops(shape: Shape) -> int:
    """Count the sum: one addition for each position and feature."""
    return shape.batch_size * shape.embed_dim * shape.key_len


def global_pooling_projection_flops(shape: Shape) -> int:
    """Count both projections of what was pooled, one row for all positions or, causal, one for each."""
    num_rows = shape.query_len if shape.is_causal else 1
    return 4 * shape.batch_size * num_rows * shape.embed_dim * shape.num_heads * shape.head_dim


def global_pooling_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count both projections with their biases."""
    width = shape.num_heads * shape.head_dim
    return (2 * width * shape.embed_dim + width + shape.embed_dim) * itemsize


def global_pooling_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count one sum, whatever the length; it is kept in 4 bytes at least."""
    return shape.batch_size * shape.num_heads * shape.head_dim * max(4, itemsize)


@register_mixer(
    "global_pooling",
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        decode="recurrent",
        is_permutation_invariant=True,
        is_padding_invariant=True,
        is_control=True,
        positions=("none",),
        dropout_unit="tokens",
        why={
            "cross_attention": "every query would receive the same, whatever it asks, so nothing attends",
            "grouped_query": "it has no heads to group",
            "positions": "it has no queries and keys to rotate, and no scores to bias",
        },
    ),
    complexity=Complexity(
        time="B L E + B E^2 (causal: B L E^2)",
        memory="B L E",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1 (causal: log L)",
        max_path="1",
        flops=global_pooling_flops,
        projection_flops=global_pooling_projection_flops,
        backward_ratio=1.0,  # an addition for each position and feature again
        projection_bytes=global_pooling_projection_bytes,
        state_bytes=global_pooling_state_bytes,
    ),
    reference=Reference(
        title="Accelerating Neural Transformer via an Average Attention Network",
        authors="Zhang et al.",
        year=2018,
        url="https://arxiv.org/abs/1805.00631",
        equation="1",
        code="https://github.com/bzhangGo/transformer-aan",
        deviations=(
            "It is no approximation of softmax attention: no budget makes the two equal.",
            "No feed-forward network and no gate after the mean; a value and an output projection instead.",
            "The paper has the causal form only; the mean over all positions is ours.",
            "Dropout on attention weights drops positions for all queries alike.",
        ),
    ),
)
class GlobalPooling(AbstractMixer):
    """The mean over all positions, or over those so far, between two projections.

    Args:
        config: there are no options.
        build: sizes and direction.
    """

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        width = build.num_heads * build.head_dim
        self.value_proj = nn.Linear(build.embed_dim, width)
        self.out_proj = nn.Linear(width, build.embed_dim)

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Pool, then project; shapes as in `AbstractMixer.forward`."""
        del context  # the contract refuses one
        is_causal, length = self.build.is_causal, hidden.shape[1]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        note_path("pool.running" if is_causal else "pool.all")

        def pool(tokens: Tensor) -> Tensor:  # [B, L or 1, E]
            return tokens.cumsum(1, dtype=wide) if is_causal else tokens.sum(1, keepdim=True, dtype=wide)

        has_dropout = self.training and self.build.dropout_p > 0
        if key_padding_mask is None and not has_dropout:
            counts = torch.arange(1, length + 1, device=hidden.device, dtype=wide)[:, None] if is_causal else length
            value = self.value_proj((pool(hidden) / counts).to(hidden.dtype))
        else:
            seen = hidden.new_ones(1, length, 1, dtype=wide)
            tokens = hidden
            if key_padding_mask is not None:
                tokens = hidden.masked_fill(key_padding_mask[..., None], 0.0)
                seen = (~key_padding_mask[..., None]).to(wide)
            count = pool(seen).clamp(min=1.0)
            if has_dropout:
                seen = seen * dropout(seen.new_ones(len(hidden), length, 1), self.build.dropout_p)
                tokens = tokens * seen.to(tokens.dtype)
            # The share is 1 but where dropout acts or where all is padding: there the bias of nothing is nothing.
            pooled, share = pool(tokens) / count, (pool(seen) / count).to(hidden.dtype)
            value = linear(pooled.to(hidden.dtype), self.value_proj.weight) + share * self.value_proj.bias
        mixed: Tensor = self.out_proj(value)  # [B, L or 1, E]
        return mixed.expand(-1, length, -1)

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the equation with its weights written out as a matrix `[L, L]`, without dropout."""
        del context
        length = hidden.shape[1]
        weights = hidden.new_ones(1, length, length)
        if self.build.is_causal:
            weights = weights.tril()
        if key_padding_mask is not None:
            hidden = hidden.masked_fill(key_padding_mask[..., None], 0.0)
            weights = weights * (~key_padding_mask[:, None]).to(weights.dtype)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1.0)
        mixed: Tensor = self.out_proj(weights @ self.value_proj(hidden))
        return mixed

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> PoolingState:
        """Return the sum over nothing."""
        self._require_state(key_padding_mask, context)
        wide = torch.promote_types(dtype or self.value_proj.weight.dtype, torch.float32)
        return PoolingState(torch.zeros(batch_size, 1, self.out_proj.in_features, device=device, dtype=wide))

    def step(self, hidden: Tensor, state: PoolingState) -> tuple[Tensor, PoolingState]:
        """Add one position `[B, 1, E]` to the sum and return the mean, projected, O(B E^2)."""
        return self.prefill(hidden, state)

    def prefill(self, hidden: Tensor, state: PoolingState | None = None) -> tuple[Tensor, PoolingState]:
        """Add positions `[B, n, E]` to the sum one after another and return each mean, projected, O(B n E^2)."""
        if state is None:
            state = self.init_state(hidden.shape[0], device=hidden.device, dtype=hidden.dtype)
        self._require_batch(hidden, state.total)
        value: Tensor = self.value_proj(hidden)
        totals = state.total + value.cumsum(1, dtype=state.total.dtype)
        length = state.length + hidden.shape[1]
        counts = torch.arange(state.length + 1, length + 1, device=hidden.device)[:, None]
        mixed: Tensor = self.out_proj((totals / counts).to(hidden.dtype))
        return mixed, PoolingState(totals[:, -1:].clone(), length)  # a view would keep all of them alive
