"""BigBird: each block of queries sees a window, some random blocks and a few global blocks.

Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", arXiv 2007.14062, section 2, appendix D.
    out_i = softmax(q_i K_N(i)^T / sqrt(D)) V_N(i),   N(i) = keys in window(i), random(i) and global blocks
Symbols: the paper's b is `block_size` C, its g, w and r are counted in blocks here as in its appendix D.
Cost: time O(B H L (g + w + r) C D), memory beyond inputs and outputs O(B H L): global rows take L g C of the pairs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attn_zoo.attention import AbstractAttention, BuildContext
from attn_zoo.attention.masks import alibi_bias, alibi_slopes, blank_padding, masked_softmax, zero_padded_rows
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention
from attn_zoo.kernels.blocks.call import Backend
from attn_zoo.kernels.blocks.layout import BlockLayout
from attn_zoo.kernels.cached_launch import remembered
from attn_zoo.metadata import NEVER, Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class BigBirdConfig(VariantConfig):
    """The paper's base model in mode itc (appendix E, table 8).

    Its base model in mode etc has b = 84, 256 extra tokens, and no random blocks.

    Args:
        block_size: b, tokens in a block; the last block of a sequence may be shorter.
        num_window_blocks: w, blocks around a query's own and itself among them: odd. Clipped at both ends, not wrapped.
        num_global_blocks: g, blocks that see and are seen by all.
        num_random_blocks: r, further blocks for each row and head; a row with fewer candidates takes them all.
        mode: `"itc"`, the first g blocks of the sequence are the global ones; `"etc"`, g * b extra tokens are.
        random: `"uniform"`, as the paper; `"permutation"`, which also puts each block into exactly r rows, where the
            blocks that are not global are at least w + r, else as `"uniform"`.
        backend: `"gather"` runs anywhere, `"flex"` is FlexAttention on a GPU, `"triton"` are our own kernels on a GPU;
            `"auto"` takes one on a GPU where it can serve the call. A named one runs or is refused.
    """

    block_size: int = 64
    num_window_blocks: int = 3
    num_global_blocks: int = 2
    num_random_blocks: int = 3
    mode: Literal["itc", "etc"] = "itc"
    random: Literal["uniform", "permutation"] = "uniform"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size: expected at least 1; got {self.block_size}")
        if self.num_window_blocks < 1 or self.num_window_blocks % 2 == 0:
            raise ValueError(f"num_window_blocks: expected an odd number, 1 at least; got {self.num_window_blocks}")
        if min(self.num_global_blocks, self.num_random_blocks) < 0:
            least = min(self.num_global_blocks, self.num_random_blocks)
            raise ValueError(f"num_global_blocks, num_random_blocks: expected at least 0; got {least}")
        if self.mode == "etc" and self.num_global_blocks == 0:
            raise ValueError("num_global_blocks: mode 'etc' is made of extra global blocks; expected at least 1; got 0")

    def narrow(self, capabilities: Capabilities) -> Capabilities:
        """Return less where random blocks are drawn by permutation, for extra tokens, and for FlexAttention."""
        if self.random == "permutation":
            capabilities = capabilities.without(
                causal="random='permutation' leaves the last blocks too few later rows to be drawn by"
            )
        if self.mode == "etc":
            positions = tuple(position for position in capabilities.positions if position != "alibi")
            capabilities = replace(capabilities, positions=positions)
        if self.backend == "flex":
            capabilities = capabilities.without(attention_dropout="backend 'flex' has none")
        return capabilities

    def claim(self, complexity: Complexity) -> Complexity:
        """Return longer paths where no token sees all and is seen by all: the extra ones of mode etc are keys alone.

        Nor does a global one of the causal form see what comes after it. There random blocks help with long ways only:
        of N earlier blocks one is drawn from the last d with probability d / N, so up to d = sqrt(N) or so the window
        alone leads back, step by step.
        """
        near = "L / C" if self.num_window_blocks > 1 else NEVER
        path, causal = ("log L", "sqrt(L)") if self.num_random_blocks else (near, near)
        if self.mode == "itc" and self.num_global_blocks:
            path = "2"
        return replace(complexity, max_path=path if path == causal else f"{path} (causal: {causal})")

    @property
    def num_extra_tokens(self) -> int:
        """Tokens that mode etc adds before the sequence."""
        return self.num_global_blocks * self.block_size if self.mode == "etc" else 0

    def layout(
        self, query_len: int, *, is_causal: bool = False, num_heads: int = 1, seed: int = 0, layer_index: int = 0
    ) -> BlockLayout:
        """Return which blocks there are in a sequence of `query_len` tokens; the last three decide the random ones."""
        return BlockLayout(
            query_len=query_len,
            block_size=self.block_size,
            num_window_blocks=self.num_window_blocks,
            num_global_blocks=self.num_global_blocks,
            num_random_blocks=self.num_random_blocks,
            num_extra_tokens=self.num_extra_tokens,
            is_permuted=self.random == "permutation",
            is_causal=is_causal,
            num_heads=num_heads,
            seed=seed,
            layer_index=layer_index,
        )

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return both modes and both kinds of random blocks, with blocks small enough to leave keys unseen."""
        small: dict[str, Any] = {"block_size": 8, "num_global_blocks": 1, "num_random_blocks": 1}
        return small, small | {"mode": "etc"}, small | {"random": "permutation", "num_random_blocks": 2}

    @classmethod
    def budgets(cls, seq_len: int) -> tuple[dict[str, Any], ...]:
        """Return more and more random blocks; the last takes all there are, so every key is seen."""
        base = {"block_size": 8, "num_global_blocks": 1, "mode": "itc", "random": "uniform"}
        blocks = -(-seq_len // 8)
        return tuple(base | {"num_random_blocks": count} for count in (1, max(1, blocks // 2), blocks))


def bigbird_mask(layout: BlockLayout) -> Tensor:
    """Return bool `[H, L, S]`, True = may be seen: the paper's matrix A, from its definition and the random blocks."""
    key_block = torch.arange(layout.key_len) // layout.block_size
    query_block = key_block[layout.num_extra_tokens :, None]
    is_window = (query_block - key_block).abs() <= layout.num_window_blocks // 2
    is_global = (key_block < layout.num_global_blocks) | (query_block < layout.num_global_blocks)
    is_random = torch.zeros(layout.num_heads, layout.num_key_blocks, layout.num_key_blocks, dtype=torch.bool)
    drawn, counts = layout.draw()
    for head in range(layout.num_heads):
        for row, count in enumerate(counts):
            is_random[head, layout.num_leading + row, drawn[head, row, :count]] = True
    keep = is_window | is_global | is_random[:, query_block, key_block]
    return keep.tril(layout.key_len - layout.query_len) if layout.is_causal else keep


def bigbird_flops(shape: Shape) -> int:
    """Count a multiply and an add for each visible pair and feature, in both matrix products."""
    config: BigBirdConfig = shape.config or BigBirdConfig()
    pairs = config.layout(shape.query_len, is_causal=shape.is_causal).mean_pairs
    return round(4 * shape.batch_size * shape.num_heads * shape.head_dim * pairs)


def bigbird_bytes(shape: Shape, itemsize: int) -> int:
    """Count queries, keys, values and the keys and values of extra tokens read once and the output written once."""
    config: BigBirdConfig = shape.config or BigBirdConfig()
    extra = 2 * shape.num_kv_heads * config.num_extra_tokens * shape.head_dim
    return shape.io_bytes(itemsize) + extra * itemsize


@register_attention(
    "bigbird",
    config=BigBirdConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        grouped_query=True,
        positions=("none", "rotary", "alibi"),
        why={
            "cross_attention": "window and global blocks are places in one sequence, and two sequences share none",
            "decode": "random blocks and the last block depend on the length, which decoding changes at every step",
        },
    ),
    complexity=Complexity(
        time="B H L (g + w + r) C D",
        memory="B H L D",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1",
        max_path="2 (causal: sqrt(L))",
        flops=bigbird_flops,
        backward_ratio=2.5,  # five matrix products for two: the scores are recomputed
        bytes=bigbird_bytes,
    ),
    reference=Reference(
        title="Big Bird: Transformers for Longer Sequences",
        authors="Zaheer et al.",
        year=2020,
        url="https://arxiv.org/abs/2007.14062",
        equation="AT in section 2; appendix D",
        code="https://github.com/google-research/bigbird",
        deviations=(
            "Global blocks in mode itc are the first g; the authors' code takes the first and the last block.",
            "The window is clipped at both ends of the sequence; the paper's figure of rolled blocks wraps around.",
            "Random blocks never repeat a window or global block, and are the same in training and in evaluation.",
            "They come from the whole sequence; the authors' code takes its first 1024 tokens or 2 r + 5 blocks.",
            "Dropout acts on attention weights; the authors' block-sparse code has none.",
            "Mode etc learns keys and values of extra tokens in each layer; nothing they gather reaches the next one.",
            "So in mode etc random blocks alone join distant positions, in a number of layers that grows as log L.",
            "Mode etc as in the paper, with tokens that live through all layers: put them first and use mode itc.",
            "The causal form is ours, the paper has an encoder only: window and global parts are cut to j <= i.",
            "There global blocks gather nothing from behind them, so paths lead through random blocks too.",
            "In the causal form random blocks are drawn from the past, and paths grow as sqrt(L).",
            "Padding is hidden exactly; the authors add -10000 to its scores.",
        ),
    ),
)
class BigBirdAttention(AbstractAttention):
    """Window, random and global blocks.

    Args:
        config: the pattern.
        build: sizes and direction; `seed` and `layer_index` decide the random blocks.
    """

    config: BigBirdConfig

    def __init__(self, config: BigBirdConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self._layouts: dict[Hashable, BlockLayout] = {}  # by length: to make one takes the host as long as a launch
        if config.mode == "etc":
            shape = (build.num_kv_heads, config.num_extra_tokens, build.head_dim)
            self.extra_key = nn.Parameter(torch.randn(shape) * 0.02)  # as the authors start all embeddings
            self.extra_value = nn.Parameter(torch.randn(shape) * 0.02)

    def _layout(self, query_len: int) -> BlockLayout:
        if torch.compiler.is_compiling():  # a dictionary that grows would be a side effect of the graph
            return self._new_layout(query_len)
        return remembered(self._layouts, query_len, partial(self._new_layout, query_len))

    def _new_layout(self, query_len: int) -> BlockLayout:
        build = self.build
        return self.config.layout(
            query_len,
            is_causal=build.is_causal,
            num_heads=build.num_heads,
            seed=build.seed,
            layer_index=build.layer_index,
        )

    def _prepared(
        self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Put extra tokens before keys and values, and give each query head its own."""
        mask = key_padding_mask
        if self.config.mode == "etc":
            extra = (x.to(key.dtype).expand(key.shape[0], -1, -1, -1) for x in (self.extra_key, self.extra_value))
            key, value = (torch.cat(pair, dim=2) for pair in zip(extra, (key, value), strict=True))
            if mask is not None:
                mask = torch.cat([mask.new_zeros(mask.shape[0], self.config.num_extra_tokens), mask], dim=1)
        num_heads = self.build.num_heads
        return expand_kv_heads(key, num_heads), expand_kv_heads(value, num_heads), mask

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        build = self.build
        key, value, mask = self._prepared(key, value, key_padding_mask)
        output = block_sparse_attention(
            query,
            key,
            value,
            self._layout(query.shape[2]),
            key_padding_mask=mask,
            dropout_p=build.dropout_p if self.training else 0.0,
            slopes=alibi_slopes(build.num_heads, query.device) if build.position == "alibi" else None,
            backend=self.config.backend,
        )
        # Extra tokens are seen by all; else a row that sees padding only is zero already.
        return zero_padded_rows(output, key_padding_mask) if self.config.mode == "etc" else output

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute exact softmax attention under the dense mask of the definition, without dropout."""
        build = self.build
        key, value, mask = self._prepared(key, value, key_padding_mask)
        keep = bigbird_mask(self._layout(query.shape[2])).to(query.device)
        if mask is not None:
            keep = keep & ~mask[:, None, None]
        scores = query @ blank_padding(key, mask).transpose(-1, -2) * build.head_dim**-0.5  # [B, H, L, S]
        if build.position == "alibi":
            scores = scores + alibi_bias(build.num_heads, query.shape[2], query.shape[2], query.device, query.dtype)
        return zero_padded_rows(masked_softmax(scores, keep) @ blank_padding(value, mask), key_padding_mask)
