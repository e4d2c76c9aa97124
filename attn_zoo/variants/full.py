"""Full attention: exact softmax over all pairs of positions.

Vaswani et al. 2017, "Attention Is All You Need", arXiv 1706.03762, equation 1.
    out = softmax(Q K^T / sqrt(D)) V
The paper's d_k is our head_dim D. With ALiBi (Press et al. 2022, arXiv 2108.12409) -slope_h |i - j| is added to the
scores.
Cost: time O(B H L S D); memory O(B H L S) as written, O(B H L) beyond inputs and outputs by the fused kernels
(Dao et al. 2022, arXiv 2205.14135), which never store the scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_zoo.attention import AbstractAttention, BuildContext
from attn_zoo.attention.decode import KVCache
from attn_zoo.attention.masks import alibi_bias, alibi_slopes, blank_padding, score_bias
from attn_zoo.attention.oracle import attention_weights, expand_kv_heads
from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.exact.backends import Backend
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class FullConfig(VariantConfig):
    """Which kernel computes it; the result is the same.

    Args:
        backend: `"auto"` takes the fastest exact kernel for the device, dtype and shape (the rule is in
            `attn_zoo.kernels.exact.backends`); `"math"` is the equation as written, with dense scores; the others are
            kernels of torch, and of xformers. For padding on a GPU, in bfloat16: `"unmasked"` counts it and takes it
            out of what a kernel without a mask gives; `"varlen"` is torch's flash kernel on keys packed without it.
            A named kernel runs or is refused: nothing takes its place. Torch's kernels have no second derivatives;
            `"math"` has, as has the reference.
    """

    backend: Backend = "auto"

    def narrow(self, capabilities: Capabilities) -> Capabilities:
        """Return less: FlexAttention has no dropout and compiles for every length; xformers is given no mask."""
        if self.backend == "flex":
            return capabilities.without(
                attention_dropout="backend 'flex' has none", decode="backend 'flex' compiles for every length"
            )
        if self.backend == "xformers":
            return capabilities.without(key_padding_mask="backend 'xformers' is offered without masks only")
        return capabilities

    def claim(self, complexity: Complexity) -> Complexity:
        """Return memory that grows with the square where the scores are kept."""
        return replace(complexity, memory_exponent=2) if self.backend == "math" else complexity


def full_flops(shape: Shape) -> int:
    """Count a multiply and an add for each visible pair and feature, in both matrix products."""
    query_len, key_len = shape.query_len, shape.key_len
    pairs = query_len * key_len
    if shape.is_causal:  # the rows that see something see key_len, key_len - 1, ... keys, counted from the last
        num_rows = min(query_len, key_len)
        pairs = num_rows * key_len - num_rows * (num_rows - 1) // 2
    return 4 * shape.batch_size * shape.num_heads * shape.head_dim * pairs


def full_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count the keys and values of all positions so far."""
    return 2 * shape.batch_size * shape.num_kv_heads * shape.key_len * shape.head_dim * itemsize


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
        positions=("none", "rotary", "alibi"),
        is_exact=True,
        is_permutation_invariant=True,
        is_padding_invariant=True,
        why={
            "dtypes": "the result would not be exact in fewer bits",
            "devices": "only there is known which kernel runs",
        },
    ),
    complexity=Complexity(
        time="B H L S D",
        memory="B H L (backend math: B H L S)",
        time_exponent=2,
        memory_exponent=1,
        sequential_ops="1",
        max_path="1",
        flops=full_flops,
        backward_ratio=2.5,  # five matrix products for two: the scores are recomputed
        state_bytes=full_state_bytes,
    ),
    reference=Reference(
        title="Attention Is All You Need",
        authors="Vaswani et al.",
        year=2017,
        url="https://arxiv.org/abs/1706.03762",
        equation="1",
        code="https://github.com/tensorflow/tensor2tensor",
    ),
)
class FullAttention(AbstractAttention):
    """Exact attention.

    Args:
        config: which kernel.
        build: sizes and direction.

    Raises:
        UnsupportedError: ALiBi across two sequences.
    """

    config: FullConfig

    def __init__(self, config: FullConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        if build.position == "alibi" and build.is_cross:
            raise UnsupportedError("positions", "full: ALiBi is a distance within one sequence; is_cross has two")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        is_causal = self.build.is_causal
        if (
            is_causal and (num_blind := query.shape[2] - key.shape[2]) > 0
        ):  # more queries than keys: the first of them stand before every key
            seeing = self.forward(query[:, :, num_blind:], key, value, key_padding_mask=key_padding_mask)
            return pad(seeing, (0, 0, num_blind, 0))
        dropout_p = self.build.dropout_p if self.training else 0.0
        return self._attend(
            query, key, value, is_causal=is_causal, key_padding_mask=key_padding_mask, dropout_p=dropout_p
        )

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        key_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        slopes = None
        if self.build.position == "alibi":
            slopes = alibi_slopes(self.build.num_heads, query.device, torch.promote_types(query.dtype, torch.float32))
        return exact_attention(
            query,
            key,
            value,
            score_bias=score_bias,
            is_causal=is_causal,
            key_padding_mask=key_padding_mask,
            slopes=slopes,
            dropout_p=dropout_p,
            backend=self.config.backend,
        )

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute equation 1 as written, without dropout."""
        bias = None
        if self.build.position == "alibi":
            bias = alibi_bias(query.shape[1], query.shape[2], key.shape[2], query.device, query.dtype)
        weights = attention_weights(
            query, key, is_causal=self.build.is_causal, key_padding_mask=key_padding_mask, bias=bias
        )
        return weights @ expand_kv_heads(blank_padding(value, key_padding_mask), query.shape[1])

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> KVCache:
        """Return an empty cache of keys and values."""
        self._require_state()
        return KVCache.empty(batch_size, self.build.num_kv_heads, self.build.head_dim, device=device, dtype=dtype)

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, KVCache]:
        """Attend from one new position to all in the cache; it may hold `max_seq_len` positions."""
        return self.prefill(query, key, value, state)

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, KVCache]:
        """Attend from new positions to all in the cache and to those of them that came before."""
        if state is None:
            state = self.init_state(query.shape[0], device=query.device, dtype=query.dtype)
        if state.length + query.shape[2] > self.build.max_seq_len:
            length = state.length + query.shape[2]
            raise ValueError(f"expected at most max_seq_len = {self.build.max_seq_len} tokens; this makes {length}")
        state = state.append(key, value)
        return self._attend(query, state.keys, state.values, is_causal=query.shape[2] > 1), state
