"""Long-short attention: each query sees a window of keys, and r summaries that each head makes of the whole sequence.

Zhu et al. 2021, "Long-Short Transformer: Efficient Transformers for Language and Vision", arXiv 2107.02192, section 3,
the form without a causal mask.
    out_i = softmax(q_i [K', K_N(i)]^T / sqrt(D)) [V', V_N(i)]
    long range    P = softmax(X W_P) over the tokens, [L, r] for each head;   K', V' = LN_g(P^T K), LN_g(P^T V)
    short range   N(i) = the segment of w tokens that i stands in, and w / 2 tokens on either side of it
    K, V = LN_l(X W_K), LN_l(X W_V)   (DualLN: without it K' would be much smaller than K)
Symbols: the paper's n is our L; w is `window_size`, r is `proj_len`, C is what divides both w / 2 and r: the tokens of
the blocks it is computed in.
Cost: time O(B H L (w + r) D); memory O(B H L (D + r)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.masks import finite_padding, masked_softmax
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention
from attn_zoo.kernels.blocks.call import Backend
from attn_zoo.kernels.blocks.layout import PatternLayout
from attn_zoo.kernels.blocks.pattern import BlockPattern, make_pattern
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer


@dataclass(frozen=True, kw_only=True, slots=True)
class LongShortConfig(VariantConfig):
    """How far a query sees, and how much it is told of the rest.

    Args:
        window_size: w, tokens of a segment; its queries see half as many more on either side. Even.
        proj_len: r, summaries of the sequence. In Long Range Arena the paper takes w = 8 and r = 32; numbers that share
            a larger divisor are computed in larger blocks, which is faster.
        backend: `"gather"` runs anywhere, `"flex"` is FlexAttention on a GPU, `"triton"` are our own kernels on a GPU;
            `"auto"` takes one on a GPU where it can serve the call. A named one runs or is refused.
    """

    window_size: int = 128
    proj_len: int = 64
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if self.window_size < 2 or self.window_size % 2:
            raise ValueError(f"window_size: expected an even number, at least 2; got {self.window_size}")
        if self.proj_len < 1:
            raise ValueError(f"proj_len: expected at least 1; got {self.proj_len}")

    def narrow(self, capabilities: Capabilities) -> Capabilities:
        """Return less for FlexAttention, which has no dropout."""
        if self.backend != "flex":
            return capabilities
        return capabilities.without(attention_dropout="backend 'flex' has none")

    def layout(self, query_len: int) -> LongShortLayout:
        """Return which summaries and keys are seen in a sequence of `query_len` tokens."""
        return LongShortLayout(query_len=query_len, window_size=self.window_size, proj_len=self.proj_len)

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return segments so short that there are many, in larger and in the smallest blocks."""
        return {"window_size": 16, "proj_len": 8}, {"window_size": 6, "proj_len": 4}


@dataclass(frozen=True, kw_only=True)
class LongShortLayout(PatternLayout):
    """All summaries, which stand before the keys, and the blocks of the own segment and beside it.

    Args:
        query_len: L, tokens.
        window_size: w.
        proj_len: r.
    """

    query_len: int
    window_size: int
    proj_len: int

    @property
    def block_size(self) -> int:
        """C, tokens of a block: segments, their halves and all summaries are so many whole blocks."""
        return math.gcd(self.window_size // 2, self.proj_len)

    def make(self, device: str) -> BlockPattern:
        """Return the pattern, in O(L w / C^2)."""
        half, num_blocks = self.window_size // 2 // self.block_size, -(-self.query_len // self.block_size)
        row = torch.arange(num_blocks, device=device)[:, None]
        own = row // (2 * half) * (2 * half) - half + torch.arange(4 * half, device=device)
        num_global = self.proj_len // self.block_size
        return make_pattern(
            (own + num_global)[None],
            (own >= 0) & (own < num_blocks),
            query_len=self.query_len,
            key_len=self.proj_len + self.query_len,
            block_size=self.block_size,
            num_global=num_global,
        )


def long_short_mask(length: int, window_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return bool `[L, L]`, True = in the window, from its definition."""
    at = torch.arange(length, device=device)
    start = at[:, None] // window_size * window_size
    return (at >= start - window_size // 2) & (at < start + window_size + window_size // 2)


def _options(shape: Shape) -> LongShortConfig:
    return shape.config or LongShortConfig()


def _products(shape: Shape) -> tuple[float, float]:
    """Return the FLOPs of making both summaries, and of both products of the attention."""
    options, per_row = _options(shape), shape.batch_size * shape.num_heads * shape.head_dim
    pairs = options.layout(shape.query_len).mean_pairs
    return 4 * per_row * options.proj_len * shape.query_len, 4 * per_row * pairs


def long_short_flops(shape: Shape) -> int:
    """Count what makes the summaries, and attention to them and to the window."""
    return round(sum(_products(shape)))


def long_short_backward_ratio(shape: Shape) -> float:
    """Return 2 for the summaries and 2.5 for the attention, which recomputes its scores."""
    summing, attending = _products(shape)
    return (2.0 * summing + 2.5 * attending) / (summing + attending)


def _num_projected(shape: Shape) -> int:
    """Count the weights of the four projections and of W_P."""
    width = shape.num_heads * shape.head_dim
    return shape.embed_dim * (4 * width + shape.num_heads * _options(shape).proj_len)


def long_short_projection_flops(shape: Shape) -> int:
    """Count the five projections of every position."""
    return 2 * shape.batch_size * shape.query_len * _num_projected(shape)


def long_short_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count the weights of the projections, and the biases of all but W_P."""
    width = shape.num_heads * shape.head_dim
    return (_num_projected(shape) + 3 * width + shape.embed_dim) * itemsize


def long_short_bytes(shape: Shape, itemsize: int) -> int:
    """Count input, output, and both norms."""
    return shape.io_bytes(itemsize) + 4 * shape.num_heads * shape.head_dim * itemsize


@register_mixer(
    "long_short",
    config=LongShortConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=False,
        cross_attention=False,
        key_padding_mask=True,
        is_padding_invariant=True,
        positions=("none",),
        dropout_unit="summaries",
        why={
            "causal": "each summary is of all positions; the paper's causal form, with summaries of every segment, is "
            "another mechanism, quadratic in long sequences",
            "cross_attention": "a window is a place in one sequence, and positions of two sequences do not compare",
            "decode": "a new position changes every summary",
            "grouped_query": "keys and values are one projection for each head",
            "positions": "summaries have no position to turn by or to measure a distance from",
            "is_permutation_invariant": "windows are made of neighbours",
        },
    ),
    complexity=Complexity(
        time="B H L (w + r) D",
        memory="B H L (D + r)",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1",
        max_path="1",
        flops=long_short_flops,
        projection_flops=long_short_projection_flops,
        backward_ratio=long_short_backward_ratio,
        bytes=long_short_bytes,
        projection_bytes=long_short_projection_bytes,
    ),
    reference=Reference(
        title="Long-Short Transformer: Efficient Transformers for Language and Vision",
        authors="Zhu et al.",
        year=2021,
        url="https://arxiv.org/abs/2107.02192",
        equation="section 3",
        code="https://github.com/NVIDIA/transformer-ls",
        deviations=(
            "W_P has no bias, as the softmax over the tokens undoes one; the authors' code has it.",
            "Summaries are made of normalised keys and values, and normalised again, as in the authors' code.",
            "Padded tokens are in no summary, as in the authors' code, and the last segment may be shorter.",
            "No convolution of values is added, and no class token has an attention of its own, as code of theirs can.",
            "The causal form is not here.",
        ),
    ),
)
class LongShort(AbstractMixer):
    """A window and summaries of everything, in one softmax.

    Args:
        config: sizes of both.
        build: sizes; never causal.
    """

    config: LongShortConfig

    def __init__(self, config: LongShortConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        width = build.num_heads * build.head_dim
        self.query_proj = nn.Linear(build.embed_dim, width)
        self.key_proj = nn.Linear(build.embed_dim, width)
        self.value_proj = nn.Linear(build.embed_dim, width)
        self.share_proj = nn.Linear(build.embed_dim, build.num_heads * config.proj_len, bias=False)  # W_P
        self.local_norm = nn.LayerNorm(width)
        self.global_norm = nn.LayerNorm(width)
        self.out_proj = nn.Linear(width, build.embed_dim)

    def _heads(self, rows: Tensor) -> Tensor:
        heads: Tensor = rows.unflatten(-1, (self.build.num_heads, -1)).transpose(1, 2)
        return heads

    def _mix(self, hidden: Tensor, mask: Tensor | None, attend: Callable[..., Tensor]) -> Tensor:
        """Make keys, values and their summaries, and attend with `attend(query, keys, values, mask)` over heads.

        The keys `[B, H, r + L, D]` have the summaries before them, and so have values and mask.
        """
        hidden = finite_padding(hidden, mask)
        query = self._heads(self.query_proj(hidden))  # [B, H, L, D]
        scores = self._heads(self.share_proj(hidden)).mT  # [B, H, r, L]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        keep = None if mask is None else ~mask[:, None, None]
        shares = masked_softmax(scores, keep).to(query.dtype)  # P^T
        both = []
        for projection in (self.key_proj, self.value_proj):
            own = self._heads(self.local_norm(projection(hidden))).to(query.dtype)
            summary = (shares @ own).transpose(1, 2).flatten(2)  # [B, r, H D]
            both.append(torch.cat([self._heads(self.global_norm(summary)).to(own.dtype), own], dim=2))
        if mask is not None:  # where nothing is real, there is nothing to sum up
            mask = torch.cat([mask.all(-1, keepdim=True).expand(-1, self.config.proj_len), mask], dim=-1)
        output: Tensor = self.out_proj(attend(query, *both, mask).transpose(1, 2).flatten(2))
        return output

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Attend by blocks; shapes as in `AbstractMixer.forward`."""
        del context  # the contract refuses one
        return self._mix(hidden, key_padding_mask, self._attend)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return block_sparse_attention(
            query,
            key,
            value,
            self.config.layout(query.shape[2]),
            key_padding_mask=mask,
            dropout_p=self.build.dropout_p if self.training else 0.0,
            backend=self.config.backend,
        )

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the same with a dense mask of the window, without dropout."""
        del context

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            length = query.shape[2]
            window = long_short_mask(length, self.config.window_size, query.device)
            keep = torch.cat([window.new_ones(length, self.config.proj_len), window], dim=1)
            if mask is not None:
                keep = keep & ~mask[:, None, None]
            return masked_softmax(query @ key.mT * self.build.head_dim**-0.5, keep) @ value

        return self._mix(hidden, key_padding_mask, attend)
