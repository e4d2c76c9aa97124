"""Luna: a memory of M rows attends to the sequence (pack), the sequence to what was packed (unpack).

Ma et al. 2021, "Luna: Linear Unified Nested Attention", arXiv 2106.01540, section 3.
    Y_P = Attn(P, X)   (pack),   Y_X = Attn(X, Y_P)   (unpack),   Attn(Q, C) = softmax(Q W_Q (C W_C)^T / sqrt(D)) C W_C
    P' = LayerNorm(Y_P + P), which is the memory of the next layer; that of the first layer is learned, and normalised.
The norm acts where a layer receives the memory, so that the last layer has none it would not use. Symbols: the paper's
n is our L, its l is M = `packed_len`; W = H D is the width of the memory.
Cost: time O(B H L M D); memory O(B L W + B M W).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attn_zoo.attention import AbstractMixer, BuildContext, Mixed
from attn_zoo.attention.masks import blank_padding, finite_padding, score_bias
from attn_zoo.attention.oracle import attention_weights
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer


@dataclass(frozen=True, kw_only=True, slots=True)
class LunaConfig(VariantConfig):
    """The size of the memory.

    Args:
        packed_len: M, rows of the memory. The paper takes 16, 128 and 256.
    """

    packed_len: int = 128

    def __post_init__(self) -> None:
        if self.packed_len < 1:
            raise ValueError(f"packed_len: expected at least 1; got {self.packed_len}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return a memory shorter than the sequences."""
        return {"packed_len": 8}, {"packed_len": 3}


def _sizes(shape: Shape) -> tuple[int, int]:
    """Return M and W."""
    config: LunaConfig = shape.config or LunaConfig()
    return config.packed_len, shape.num_heads * shape.head_dim


def luna_flops(shape: Shape) -> int:
    """Count both products of both attentions."""
    packed_len, width = _sizes(shape)
    return 4 * shape.batch_size * width * packed_len * (shape.query_len + shape.key_len)


def luna_projection_flops(shape: Shape) -> int:
    """Count query, context and output projection of every position, and both projections of the memory."""
    packed_len, width = _sizes(shape)
    rows = (2 * shape.query_len + shape.key_len) * shape.embed_dim + 2 * packed_len * width
    return 2 * shape.batch_size * width * rows


def luna_bytes(shape: Shape, itemsize: int) -> int:
    """Count inputs, output, the norm and the first memory. What passes between layers is left out."""
    packed_len, width = _sizes(shape)
    return shape.io_bytes(itemsize) + (2 if shape.layer_index else packed_len + 2) * width * itemsize


def luna_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count the five projections with their biases."""
    _, width = _sizes(shape)
    return (3 * width * shape.embed_dim + 2 * width**2 + 4 * width + shape.embed_dim) * itemsize


@register_mixer(
    "luna",
    config=LunaConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=False,
        cross_attention=False,
        key_padding_mask=True,
        is_permutation_invariant=True,
        is_padding_invariant=True,
        has_carry=True,
        positions=("none",),
        dropout_unit="summaries",
        why={
            "causal": "each row of the memory mixes all positions; the paper's causal form is another mechanism, "
            "without softmax and without a memory that passes between layers",
            "cross_attention": "the memory passes along the layers of one stack",
            "decode": "a new position changes every row of the memory",
            "grouped_query": "keys and values are one projection for each head",
            "positions": "rows of the memory have no position to turn by or to measure a distance from",
        },
    ),
    complexity=Complexity(
        time="B H L M D",
        memory="B L W",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1",
        max_path="1",
        flops=luna_flops,
        projection_flops=luna_projection_flops,
        backward_ratio=2.5,  # five matrix products for two: the scores are recomputed
        bytes=luna_bytes,
        projection_bytes=luna_projection_bytes,
    ),
    reference=Reference(
        title="Luna: Linear Unified Nested Attention",
        authors="Ma et al.",
        year=2021,
        url="https://arxiv.org/abs/2106.01540",
        equation="section 3",
        code="https://github.com/XuezheMax/fairseq-apollo",
        deviations=(
            "Keys and values are one projection (W_K = W_V), as in the authors' code.",
            "The learned memory of the first layer has no sinusoidal positions added, as it has in the authors' code.",
            "It is normalised, as in most of the authors' set-ups of Long Range Arena; the paper has no norm there.",
            "All rows of the memory are read, whatever the length; the authors' code hides those beyond the length.",
            "The norm of the memory comes after its residual in models that normalise first, too.",
            "No dropout on what is added to the memory: a mixer knows only dropout on attention weights.",
            "Packing has as many heads as unpacking, where the authors' code has a number for each.",
            "The initialisation is that of all models; the authors' code draws most projections smaller.",
        ),
    ),
)
class Luna(AbstractMixer):
    """Pack and unpack attention around a memory that passes from layer to layer.

    Args:
        config: size of the memory.
        build: sizes; the first memory is in `shared`, and every layer normalises what it receives.
    """

    config: LunaConfig

    def __init__(self, config: LunaConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        width = build.num_heads * build.head_dim
        self.pack_query_proj = nn.Linear(width, width)
        self.pack_context_proj = nn.Linear(build.embed_dim, width)
        self.query_proj = nn.Linear(build.embed_dim, width)
        self.context_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, build.embed_dim)
        rows = torch.randn(config.packed_len, width) * width**-0.5
        self.memory: nn.Parameter = build.shared.setdefault("luna memory", nn.Parameter(rows))
        self.memory_norm = nn.LayerNorm(width)

    def init_carry(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the learned memory `[B, M, W]`: one for all layers of a model, and read by the first of them."""
        del device
        return self.memory.to(dtype).expand(batch_size, -1, -1)

    def _heads(self, rows: Tensor, projection: nn.Linear) -> Tensor:
        heads: Tensor = projection(rows).unflatten(-1, (self.build.num_heads, -1)).transpose(1, 2)
        return heads  # [B, H, L or M, D]

    def _mix(self, hidden: Tensor, mask: Tensor | None, carry: Tensor | None, attend: Any) -> Mixed:
        """Pack and unpack with `attend(query, context, mask)` over heads."""
        assert carry is not None  # the contract starts from `init_carry`
        hidden = finite_padding(hidden, mask)
        memory = self.memory_norm(carry)
        query, context = self._heads(memory, self.pack_query_proj), self._heads(hidden, self.pack_context_proj)
        packed = attend(query, context, mask).transpose(1, 2).flatten(2)  # Y_P [B, M, W]
        query, context = self._heads(hidden, self.query_proj), self._heads(packed, self.context_proj)
        mixed: Tensor = self.out_proj(attend(query, context, None).transpose(1, 2).flatten(2))
        return Mixed(mixed, packed + memory)

    def forward(
        self,
        hidden: Tensor,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        carry: Tensor | None = None,
    ) -> Mixed:
        """Pack and unpack; shapes as in `AbstractMixer.forward`.

        Args:
            hidden: `[B, L, E]`.
            context: refused by the contract.
            key_padding_mask: bool `[B, L]`, True = padding.
            carry: `[B, M, W]`, of the layer before; not yet normalised.

        Returns:
            Hidden states `[B, L, E]` and the carry of the next layer `[B, M, W]`.
        """
        del context
        return self._mix(hidden, key_padding_mask, carry, self._attend)

    def _attend(self, query: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        dropout_p = self.build.dropout_p if self.training else 0.0
        return exact_attention(
            query, context, context, score_bias=score_bias, key_padding_mask=mask, dropout_p=dropout_p
        )

    def reference(
        self,
        hidden: Tensor,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        carry: Tensor | None = None,
    ) -> Mixed:
        """Compute the same with dense weights, without dropout; from the learned memory where `carry` is None."""
        del context
        if carry is None:
            carry = self.init_carry(len(hidden), device=hidden.device, dtype=hidden.dtype)

        def attend(query: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
            return attention_weights(query, context, key_padding_mask=mask) @ blank_padding(context, mask)

        return self._mix(hidden, key_padding_mask, carry, attend)
