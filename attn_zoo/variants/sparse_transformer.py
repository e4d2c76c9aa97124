"""Sparse Transformer: any two tokens are two steps apart, over blocks near a query and blocks far away.

Child, Gray, Radford and Sutskever 2019, "Generating Long Sequences with Sparse Transformers", arXiv 1904.10509,
sections 4.2 and 4.3. A head attends to both sets of a factorisation at once (section 4.2, a merged head):
    out_i = softmax(q_i K_N(i)^T / sqrt(D)) V_N(i)
    fixed    N(i) = {j : same stretch of l tokens} and {j : in the summary of any stretch}
    strided  N(i) = {j : less than l away}         and {j : any number of strides l away}
Both are counted in blocks of C tokens: the summary of a stretch is one block of it, that of head h the h-th from its
end, and distance is that of blocks. Causal: j <= i. With l near sqrt(L C) a query sees about 2 sqrt(L C) keys.
Symbols: the paper's n is our L, its c our `block_size` C, its stride l is `stride_blocks` blocks.
Cost: time O(B H L sqrt(L C) D), memory beyond inputs and outputs O(B H L), and O(H (L / C)^(3/2)) for the pattern.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.masks import alibi_bias, alibi_slopes, blank_padding, masked_softmax
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention
from attn_zoo.kernels.blocks.call import Backend
from attn_zoo.kernels.blocks.layout import PatternLayout
from attn_zoo.kernels.blocks.pattern import BlockPattern, make_pattern
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseTransformerConfig(VariantConfig):
    """The factorisation.

    Args:
        block_size: C, tokens in a block; the last block of a sequence may be shorter.
        stride_blocks: l / C, blocks in a stretch; 0 for the whole number nearest to sqrt(L / C), as the paper chooses l
            near sqrt(L). Any other makes time quadratic in lengths far beyond it.
        pattern: `"fixed"`, which the paper takes for text, or `"strided"`, for images and sound.
        backend: `"gather"` runs anywhere, `"flex"` is FlexAttention on a GPU, `"triton"` are our own kernels on a GPU;
            `"auto"` takes one on a GPU where it can serve the call. A named one runs or is refused.
    """

    block_size: int = 64
    stride_blocks: int = 0
    pattern: Literal["fixed", "strided"] = "fixed"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size: expected at least 1; got {self.block_size}")
        if self.stride_blocks < 0:
            raise ValueError(f"stride_blocks: expected at least 1, or 0 for sqrt(L / C); got {self.stride_blocks}")

    def narrow(self, capabilities: Capabilities) -> Capabilities:
        """Return less for FlexAttention, which has no dropout."""
        if self.backend != "flex":
            return capabilities
        return capabilities.without(attention_dropout="backend 'flex' has none")

    def claim(self, complexity: Complexity) -> Complexity:
        """Return that time is quadratic where stretches do not grow with the sequence."""
        if not self.stride_blocks:
            return complexity
        return replace(complexity, time="B H L (l + L C / l) D", time_exponent=2)

    def layout(self, query_len: int, *, is_causal: bool = False, num_heads: int = 1) -> FactorisedLayout:
        """Return which blocks are seen in a sequence of `query_len` tokens."""
        num_blocks = -(-query_len // self.block_size)
        return FactorisedLayout(
            query_len=query_len,
            block_size=self.block_size,
            stride=self.stride_blocks or max(1, round(math.sqrt(num_blocks))),
            is_fixed=self.pattern == "fixed",
            num_heads=num_heads if self.pattern == "fixed" else 1,  # what is strided is so alike in all heads
            is_causal=is_causal,
        )

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return both patterns, and a stride that divides no length."""
        return {"block_size": 2}, {"block_size": 4, "pattern": "strided"}, {"block_size": 5, "stride_blocks": 3}

    @classmethod
    def budgets(cls, seq_len: int) -> tuple[dict[str, Any], ...]:
        """Return longer and longer stretches; the last holds the whole sequence."""
        blocks = -(-seq_len // 8)
        return tuple({"block_size": 8, "stride_blocks": count} for count in (3, max(1, blocks // 2), blocks))


@dataclass(frozen=True, kw_only=True)
class FactorisedLayout(PatternLayout):
    """Blocks near a query, and blocks by which it reaches all others, for one length L = S.

    Args:
        query_len: L, tokens.
        block_size: tokens in a block.
        stride: blocks in a stretch.
        is_fixed: stretches stand at fixed places and have summaries; else all is by distance from the query.
        num_heads: H; each has a summary of its own.
        is_causal: hide later keys.
    """

    query_len: int
    block_size: int
    stride: int
    is_fixed: bool
    num_heads: int = 1
    is_causal: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence, the ragged last one included."""
        return -(-self.query_len // self.block_size)

    def make(self, device: str) -> BlockPattern:
        """Return the pattern, in O(H (L / C) (l / C + L / l))."""
        num_blocks = self.num_blocks
        row = torch.arange(num_blocks, device=device)[:, None]
        if self.is_fixed:
            near = row // self.stride * self.stride + torch.arange(self.stride, device=device)
            stretch = torch.arange(-(-num_blocks // self.stride), device=device)
            head = torch.arange(self.num_heads, device=device)[:, None, None]
            place = self.stride - 1 - head % self.stride
            # A last stretch that ends before its summary is known by its last block.
            far = (stretch * self.stride + place).clamp(max=num_blocks - 1)  # [H, 1, stretches]
            is_far = (stretch != row // self.stride).expand(self.num_heads, -1, -1)
        else:
            near = row + torch.arange(1 - self.stride, self.stride, device=device)
            distance = torch.arange(self.stride, max(self.stride, num_blocks), self.stride, device=device)
            far = (row + torch.cat([-distance, distance]))[None]
            is_far = torch.ones_like(far, dtype=torch.bool)
        near, far = near.expand(len(far), -1, -1), far.expand(-1, num_blocks, -1)
        blocks = torch.cat([near, far], dim=-1)  # [H or 1, rows, near and far]
        is_entry = torch.cat([torch.ones_like(near, dtype=torch.bool), is_far], dim=-1)
        is_entry &= (blocks >= 0) & (blocks <= (row if self.is_causal else num_blocks - 1))
        return make_pattern(
            blocks,
            is_entry,
            query_len=self.query_len,
            key_len=self.query_len,
            block_size=self.block_size,
            is_causal=self.is_causal,
        )

    @property
    def mean_pairs(self) -> float:
        """Visible (query, key) pairs of a head, exact, in O(l / C + L / l): no table is made for it."""
        length, size, stride = self.query_len, self.block_size, self.stride
        count = max(0, self.num_blocks - 1)  # blocks before the last one, which has what is left
        if not self.is_fixed:
            left = length - count * size
            distance = np.array(
                [*range(1, min(stride, count + 1)), *range(stride, count + 1, stride)], dtype=np.float64
            )
            own, past = count * size**2 + left**2, float((((count - distance) * size + left) * size).sum())
            return past + (own + length) / 2 if self.is_causal else own + 2 * past
        start = np.arange(0, length, stride * size, dtype=np.float64)
        tokens = np.minimum(length - start, stride * size)  # of each stretch
        if self.is_causal:  # every earlier stretch is whole
            return float((tokens * (tokens + 1) / 2 + tokens * np.arange(len(start)) * size).sum())
        place = stride - 1 - np.arange(self.num_heads)[:, None] % stride
        summary = np.minimum(length - np.minimum(start + place * size, count * size), size)  # tokens, [H, stretches]
        return float((tokens * (tokens + summary.sum(1, keepdims=True) - summary)).sum() / self.num_heads)


def sparse_transformer_mask(layout: FactorisedLayout) -> Tensor:
    """Return bool `[H or 1, L, L]`, True = may be seen: the two sets of the paper, merged, from their definition."""
    block = torch.arange(layout.query_len) // layout.block_size
    query, key, stride = block[:, None], block, layout.stride
    if layout.is_fixed:
        summary = stride - 1 - torch.arange(layout.num_heads)[:, None] % stride  # of each head, its place in a stretch
        last = int(block.max()) if len(block) else 0
        is_summary = key == (key // stride * stride + summary).clamp(max=last)  # [H, L]
        keep = (query // stride == key // stride) | is_summary[:, None]
    else:
        keep = (((query - key).abs() < stride) | ((query - key) % stride == 0))[None]
    return keep.tril() if layout.is_causal else keep


def sparse_transformer_flops(shape: Shape) -> int:
    """Count a multiply and an add for each visible pair and feature, in both matrix products."""
    config: SparseTransformerConfig = shape.config or SparseTransformerConfig()
    layout = config.layout(shape.query_len, is_causal=shape.is_causal, num_heads=shape.num_heads)
    return round(4 * shape.batch_size * shape.num_heads * shape.head_dim * layout.mean_pairs)


@register_attention(
    "sparse_transformer",
    config=SparseTransformerConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        grouped_query=True,
        positions=("none", "rotary", "alibi"),
        why={
            "cross_attention": "stretches are places in one sequence, and two sequences share none",
            "decode": "stretches grow with the sequence, which decoding makes longer at every step",
        },
    ),
    complexity=Complexity(
        time="B H L sqrt(L C) D",
        memory="B H L D",
        time_exponent=1.5,
        memory_exponent=1,
        sequential_ops="1",
        max_path="2",
        flops=sparse_transformer_flops,
        backward_ratio=2.5,  # five matrix products for two: the scores are recomputed
    ),
    reference=Reference(
        title="Generating Long Sequences with Sparse Transformers",
        authors="Child et al.",
        year=2019,
        url="https://arxiv.org/abs/1904.10509",
        equation="sections 4.2 and 4.3, merged heads",
        code="https://github.com/openai/sparse_attention",
        deviations=(
            "Attention only: none of the paper's residual blocks, initialisation or recomputed layers.",
            "Strides and windows are of whole blocks: a strided query sees blocks where the paper's sees tokens.",
            "A stretch has by default sqrt(L / C) blocks, so near and far are as many; the paper's l is a setting.",
            "A summary is one block of a stretch; the paper's may be longer.",
            "The form without a causal mask is ours, the paper has a decoder only: both sets reach to either side.",
            "There a last stretch that ends before its summary is known by its last block.",
            "Decoding step by step is refused, as a stretch grows with the sequence; the paper's is fixed.",
        ),
    ),
)
class SparseTransformerAttention(AbstractAttention):
    """Blocks near a query, and summaries or strides by which it reaches all others.

    Args:
        config: the factorisation.
        build: sizes and direction.
    """

    config: SparseTransformerConfig

    def _layout(self, query_len: int) -> FactorisedLayout:
        return self.config.layout(query_len, is_causal=self.build.is_causal, num_heads=self.build.num_heads)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        build = self.build
        key, value = (expand_kv_heads(x, build.num_heads) for x in (key, value))
        return block_sparse_attention(
            query,
            key,
            value,
            self._layout(query.shape[2]),
            key_padding_mask=key_padding_mask,
            dropout_p=build.dropout_p if self.training else 0.0,
            slopes=alibi_slopes(build.num_heads, query.device) if build.position == "alibi" else None,
            backend=self.config.backend,
        )

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute exact softmax attention under the dense mask of the definition, without dropout."""
        build, length = self.build, query.shape[2]
        key, value = (expand_kv_heads(blank_padding(x, key_padding_mask), build.num_heads) for x in (key, value))
        scores = query @ key.mT * build.head_dim**-0.5  # [B, H, L, L]
        if build.position == "alibi":
            scores = scores + alibi_bias(build.num_heads, length, length, query.device, query.dtype)
        keep = sparse_transformer_mask(self._layout(length)).to(query.device)
        if key_padding_mask is not None:
            keep = keep & ~key_padding_mask[:, None, None]
        return masked_softmax(scores, keep) @ value
