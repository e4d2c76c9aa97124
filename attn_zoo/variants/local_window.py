"""Local attention: each query sees the keys in a window around it, by exact softmax.

Beltagy, Peters, Cohan 2020, "Longformer: The Long-Document Transformer", arXiv 2004.05150, section 3.1, "sliding
window", without its global tokens and its dilation.
    out_i = softmax(q_i K_N(i)^T / sqrt(D)) V_N(i),   N(i) = {j : |i - j| <= W}, causal {j : i - W <= j <= i}
Symbols: the paper's w counts both sides, w = 2 W; our W is `window_size`.
Cost: time O(B H L W D), memory beyond inputs and outputs O(B H L); decode state O(B G W D).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.decode import KVCache
from attn_zoo.attention.masks import alibi_bias, alibi_slopes, blank_padding, keep_mask, masked_softmax
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention
from attn_zoo.kernels.blocks.call import Backend
from attn_zoo.kernels.blocks.layout import TokenLayout
from attn_zoo.metadata import NEVER, Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalWindowConfig(VariantConfig):
    """How far a query sees.

    Args:
        window_size: W, positions on either side of a query (its past alone in the causal form), itself not counted.
        backend: `"gather"` runs anywhere, `"flex"` is FlexAttention on a GPU, `"triton"` are our own kernels on a GPU;
            `"auto"` takes one on a GPU where it can serve the call. A named one runs or is refused.
    """

    window_size: int = 128
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if self.window_size < 0:
            raise ValueError(f"window_size: expected at least 0; got {self.window_size}")

    def narrow(self, capabilities: Capabilities) -> Capabilities:
        """Return less for FlexAttention, which has no dropout."""
        if self.backend != "flex":
            return capabilities
        return capabilities.without(attention_dropout="backend 'flex' has none")

    def claim(self, complexity: Complexity) -> Complexity:
        """Return that no two tokens ever meet where each sees itself alone."""
        return complexity if self.window_size else replace(complexity, max_path=NEVER)

    @property
    def block_size(self) -> int:
        """Tokens of the blocks it is computed in: a power of two from 16 to 64, at most about half the window."""
        return max(16, min(64, 1 << max(0, (self.window_size // 2).bit_length() - 1)))

    def layout(self, query_len: int, *, is_causal: bool = False) -> TokenLayout:
        """Return which keys each query sees in a sequence of `query_len` tokens."""
        return TokenLayout(query_len=query_len, block_size=self.block_size, reach=self.window_size, is_causal=is_causal)

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return a window of parts of blocks, one of whole blocks, and one of the nearest neighbours."""
        return {"window_size": 5}, {"window_size": 32}, {"window_size": 1}

    @classmethod
    def budgets(cls, seq_len: int) -> tuple[dict[str, Any], ...]:
        """Return wider and wider windows; the last holds the whole sequence."""
        return tuple({"window_size": size} for size in (seq_len // 8, seq_len // 2, seq_len - 1))


def local_window_flops(shape: Shape) -> int:
    """Count a multiply and an add for each visible pair and feature, in both matrix products."""
    config: LocalWindowConfig = shape.config or LocalWindowConfig()
    pairs = config.layout(shape.query_len, is_causal=shape.is_causal).mean_pairs
    return round(4 * shape.batch_size * shape.num_heads * shape.head_dim * pairs)


def local_window_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count the keys and values of the window and of the latest position."""
    config: LocalWindowConfig = shape.config or LocalWindowConfig()
    length = min(shape.key_len, config.window_size + 1)
    return 2 * shape.batch_size * shape.num_kv_heads * length * shape.head_dim * itemsize


@register_attention(
    "local_window",
    config=LocalWindowConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        decode="kv_cache",
        grouped_query=True,
        is_padding_invariant=True,
        positions=("none", "rotary", "alibi"),
        why={"cross_attention": "a window is a place in one sequence, and positions of two sequences do not compare"},
    ),
    complexity=Complexity(
        time="B H L W D",
        memory="B H L D",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1",
        max_path="L / W",
        flops=local_window_flops,
        backward_ratio=2.5,  # five matrix products for two: the scores are recomputed
        state_bytes=local_window_state_bytes,
    ),
    reference=Reference(
        title="Longformer: The Long-Document Transformer",
        authors="Beltagy et al.",
        year=2020,
        url="https://arxiv.org/abs/2004.05150",
        equation="section 3.1, sliding window",
        code="https://github.com/allenai/longformer",
        deviations=(
            "No global tokens and no dilation: this is the control that sees nothing far away.",
            "All layers have the same window; the paper's language models widen it with depth.",
        ),
    ),
)
class LocalWindowAttention(AbstractAttention):
    """Exact softmax attention to a window.

    Args:
        config: the variant's options.
        build: sizes and direction.
    """

    config: LocalWindowConfig

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return self._attend(query, key, value, key_padding_mask, self.build.dropout_p if self.training else 0.0)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        build, config = self.build, self.config
        key, value = (expand_kv_heads(x, build.num_heads) for x in (key, value))
        return block_sparse_attention(
            query,
            key,
            value,
            config.layout(query.shape[2], is_causal=build.is_causal),
            key_padding_mask=key_padding_mask,
            dropout_p=dropout_p,
            slopes=alibi_slopes(build.num_heads, query.device) if build.position == "alibi" else None,
            backend=config.backend,
        )

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute exact softmax attention under the dense band, without dropout."""
        length = query.shape[2]
        key, value = (expand_kv_heads(blank_padding(x, key_padding_mask), query.shape[1]) for x in (key, value))
        scores = query @ key.mT * query.shape[-1] ** -0.5  # [B, H, L, L]
        if self.build.position == "alibi":
            scores = scores + alibi_bias(query.shape[1], length, length, query.device, query.dtype)
        position = torch.arange(length, device=query.device)
        keep = (position[:, None] - position).abs() <= self.config.window_size
        further = keep_mask(
            length, length, is_causal=self.build.is_causal, key_padding_mask=key_padding_mask, device=query.device
        )
        return masked_softmax(scores, keep if further is None else keep & further) @ value

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> KVCache:
        """Return an empty cache, which will never hold more than the window and the latest position."""
        self._require_state()
        return KVCache.empty(batch_size, self.build.num_kv_heads, self.build.head_dim, device=device, dtype=dtype)

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, KVCache]:
        """Attend from one new position to the window before it and to itself, O(B H W D)."""
        state.require_fitting(key, value)
        kept = min(state.length, self.config.window_size)
        past = (x[:, :, state.length - kept : state.length] for x in (state.key, state.value))
        keys, values = (torch.cat(pair, dim=2) for pair in zip(past, (key, value), strict=True))
        state = KVCache(keys, values, kept + 1)
        keys, values = (expand_kv_heads(x, self.build.num_heads) for x in (keys, values))
        scores = query * self.build.head_dim**-0.5 @ keys.mT  # [B, H, 1, W + 1]
        if self.build.position == "alibi":
            scores = scores + alibi_bias(self.build.num_heads, 1, kept + 1, query.device, query.dtype)
        return scores.softmax(-1) @ values, state

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, KVCache]:
        """Attend from new positions to the window before each, by the blocks of `forward`."""
        if state is None:
            state = self.init_state(query.shape[0], device=query.device, dtype=query.dtype)
        state.require_fitting(key, value)
        past = min(state.length, self.config.window_size)
        keys, values = (
            torch.cat([old[:, :, state.length - past : state.length], new], dim=2)
            for old, new in ((state.key, key), (state.value, value))
        )
        output = self._attend(pad(query, (0, 0, past, 0)), keys, values)[:, :, past:]
        kept = min(keys.shape[2], self.config.window_size + 1)
        keys, values = (x[:, :, -kept:].clone() for x in (keys, values))  # a view would keep the prompt alive
        return output, KVCache(keys, values, kept)
