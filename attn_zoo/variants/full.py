"""Full attention: exact softmax over all pairs of positions.

Vaswani et al. 2017, "Attention Is All You Need", arXiv 1706.03762, equation 1.
    out = softmax(Q K^T / sqrt(D)) V
Cost: time O(B H L S D); memory O(B H L S) as written, O(B H L) beyond inputs and outputs by the fused kernels
(Dao et al. 2022, arXiv 2205.14135), which never store the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.decode import KVCache
from attn_zoo.attention.masks import keep_mask, zero_padded_rows
from attn_zoo.attention.oracle import attention_weights, expand_kv_heads
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class FullConfig(VariantConfig):
    """No options yet."""


def full_flops(shape: Shape) -> int:
    """Count both matrix products; under a causal mask only the visible half."""
    pairs = shape.query_len * shape.key_len
    return 4 * shape.batch_size * shape.num_heads * shape.head_dim * pairs // (2 if shape.is_causal else 1)


@register_attention(
    "full",
    config=FullConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=True,
        key_padding_mask=True,
        decode="kv_cache",
        grouped_query=True,
        is_exact=True,
    ),
    complexity=Complexity(
        time="B H L S D",
        memory="B H L",
        time_exponent=2,
        memory_exponent=1,
        sequential_ops="1",
        max_path="1",
        flops=full_flops,
    ),
    reference=Reference(
        title="Attention Is All You Need",
        authors="Vaswani et al.",
        year=2017,
        url="https://arxiv.org/abs/1706.03762",
        equation="1",
    ),
)
class FullAttention(AbstractAttention):
    """Exact attention."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        keep = keep_mask(
            query.shape[-2],
            key.shape[-2],
            is_causal=self.build.is_causal,
            key_padding_mask=key_padding_mask,
            device=query.device,
        )
        key, value = (expand_kv_heads(x, query.shape[1]) for x in (key, value))
        if keep is not None and key_padding_mask is not None:
            keep = keep | key_padding_mask.all(-1)[:, None, None, None]
        output = scaled_dot_product_attention(query, key, value, keep, self.build.dropout_p if self.training else 0.0)
        return zero_padded_rows(output, key_padding_mask)

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        weights = attention_weights(query, key, is_causal=self.build.is_causal, key_padding_mask=key_padding_mask)
        return weights @ expand_kv_heads(value, query.shape[1])

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> KVCache:
        return KVCache.empty(batch_size, self.build.num_kv_heads, self.build.head_dim, device=device, dtype=dtype)

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, KVCache]:
        state = state.append(key, value)
        key, value = (expand_kv_heads(x, query.shape[1]) for x in (state.keys, state.values))
        return scaled_dot_product_attention(query, key, value), state
