"""Nyström attention: the matrix of softmax attention, approximated from m landmarks.

Xiong et al. 2021, "Nyströmformer", arXiv 2102.03902, equations 13 to 15.
    out = F A^+ (B V) + conv(V),   F = softmax(Q K_m^T / sqrt(D)),  A = softmax(Q_m K_m^T / sqrt(D)),
                                   B = softmax(Q_m K^T / sqrt(D))
Landmarks Q_m and K_m are means over segments of ceil(L / m) positions. The pseudoinverse A^+ is iterated,
    Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4,   Z_0 = A^T / (|A|_1 |A|_inf)
Where each position is a landmark, F = A = B, and F A^+ B = A: softmax attention is computed, as in the authors' code.
conv is one filter over positions for each head. F and B are never stored: both are exact attention, of queries to
landmarks and of landmarks to keys, by the kernels of `full`. Symbols: the paper's n is our L, its d_q our D.
Cost: time O(B H (L m D + m^3)); memory O(B H (L D + m^2)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attn_zoo.attention import AbstractAttention, BuildContext
from attn_zoo.attention.masks import blank_padding, masked_softmax, score_bias, zero_padded_rows
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.kernels.compress.compression import pool_windows, window_counts
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class NystromConfig(VariantConfig):
    """The paper's choices.

    Args:
        num_landmarks: m. Of a sequence that is no longer every position is a landmark, and attention is exact.
        pinv_iterations: of the pseudoinverse; the paper takes six. More come nearer to A^+ and need not come nearer to
            softmax attention: small singular values of A, left out by few iterations, turn up in A^+ as large ones.
        conv_len: positions that the filter of the skip connection sees, an odd number; 0 for none. The authors take 35
            on Long Range Arena.
    """

    num_landmarks: int = 64
    pinv_iterations: int = 6
    conv_len: int = 35

    def __post_init__(self) -> None:
        for name, value in (("num_landmarks", self.num_landmarks), ("pinv_iterations", self.pinv_iterations)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1; got {value}")
        if self.conv_len < 0 or (self.conv_len and self.conv_len % 2 == 0):
            raise ValueError(f"conv_len: expected an odd number of positions, or 0 for none; got {self.conv_len}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return few landmarks, with and without the skip connection."""
        return {"num_landmarks": 12, "conv_len": 5}, {"num_landmarks": 7, "conv_len": 0}

    @classmethod
    def budgets(cls, seq_len: int) -> tuple[dict[str, Any], ...]:
        """Return more and more landmarks, up to one at each position."""
        counts = (max(1, seq_len // 8), max(1, seq_len // 2), seq_len)
        return tuple({"num_landmarks": count, "conv_len": 0} for count in counts)


def _segments(shape: Shape) -> int:
    """Return how many segments there are: no more than m, as all but the last are equally long."""
    config: NystromConfig = shape.config or NystromConfig()
    return -(-shape.key_len // -(-shape.key_len // config.num_landmarks))


def _attending_flops(shape: Shape) -> int:
    """Count the exact attentions: F and B, or softmax attention where each position is a landmark."""
    count = _segments(shape)
    num_attentions = 1 if count == shape.key_len else 2
    return num_attentions * 4 * shape.batch_size * shape.num_heads * shape.key_len * count * shape.head_dim


def nystrom_flops(shape: Shape) -> int:
    """Count the exact attentions, A, four products for each iteration, A^+ (B V), and the filter."""
    config: NystromConfig = shape.config or NystromConfig()
    count, dim, length = _segments(shape), shape.head_dim, shape.key_len
    inverting = 4 * count**2 * dim + 8 * config.pinv_iterations * count**3 if count < length else 0
    size = _chunk_len(config.conv_len)
    filtering = 2 * -(-length // size) * size * (size + config.conv_len - 1) * dim if config.conv_len else 0
    return _attending_flops(shape) + shape.batch_size * shape.num_heads * (inverting + filtering)


def nystrom_bytes(shape: Shape, itemsize: int) -> int:
    """Count queries, keys, values and the filter read once and the output written once."""
    config: NystromConfig = shape.config or NystromConfig()
    return shape.io_bytes(itemsize) + shape.num_heads * config.conv_len * itemsize


def nystrom_backward_ratio(shape: Shape) -> float:
    """Return 2.5 for the exact attentions, which recompute their scores, and 2 for the rest."""
    return 2.0 + 0.5 * _attending_flops(shape) / nystrom_flops(shape)


@register_attention(
    "nystrom",
    config=NystromConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=False,
        cross_attention=False,
        key_padding_mask=True,
        grouped_query=True,
        dropout_unit="summaries",
        why={
            "causal": "a landmark is the mean of a segment, later positions included",
            "cross_attention": "landmarks of queries and keys are means over the same segments of one sequence",
            "decode": "a new position changes the landmarks",
            "positions": "a bias by distance needs keys with a position, and a landmark has none",
        },
    ),
    complexity=Complexity(
        time="B H (L m D + m^3)",
        memory="B H (L D + m^2)",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1",
        max_path="1",
        flops=nystrom_flops,
        bytes=nystrom_bytes,
        backward_ratio=nystrom_backward_ratio,
    ),
    reference=Reference(
        title="Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention",
        authors="Xiong et al.",
        year=2021,
        url="https://arxiv.org/abs/2102.03902",
        equation="13-15",
        code="https://github.com/mlpen/Nystromformer",
        deviations=(
            "The last segment may be shorter, and landmarks fewer than m; the authors' code needs a multiple of m.",
            "Padded positions count for nothing; the authors' code takes them as zeros in the means.",
            "Z_0 has the norms of each matrix for itself; by default the authors' code takes those of the whole batch.",
            "The pseudoinverse is computed in float32 at least.",
            "Dropout, which the authors' code does not have here, drops weights of F.",
            "Not in the paper: grouped heads, rotary positions (landmarks are means of turned queries and keys).",
        ),
    ),
)
class NystromAttention(AbstractAttention):
    """Attention by landmarks.

    Args:
        config: the variant's options.
        build: sizes.
    """

    config: NystromConfig

    def __init__(self, config: NystromConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.filter: nn.Parameter | None = None
        if config.conv_len:  # as torch draws a convolution's
            bound = config.conv_len**-0.5
            self.filter = nn.Parameter(torch.empty(build.num_heads, config.conv_len).uniform_(-bound, bound))

    def _landmarks(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Return means over segments of queries `[B, H, L, D]` or keys, `[B, H or G, m, D]`."""
        return pool_windows(tokens, self._width(tokens.shape[2]), key_padding_mask=mask)

    def _width(self, length: int) -> int:
        return -(-length // self.config.num_landmarks)

    def _empty(self, mask: Tensor | None) -> Tensor | None:
        """Return bool `[B, m]`, True = a segment of padding only, or None without padding."""
        if mask is None:
            return None
        return window_counts(mask.shape[1], self._width(mask.shape[1]), key_padding_mask=mask, device=mask.device) == 0

    def _inverse(self, query_marks: Tensor, key_marks: Tensor, empty: Tensor | None) -> Tensor:
        """Return A^+ `[B, H, m, m]`, zero in rows and columns of empty segments; in float32 at least."""
        wide = torch.promote_types(query_marks.dtype, torch.float32)
        scores = query_marks.to(wide) @ key_marks.to(wide).mT * self.build.head_dim**-0.5
        matrix = masked_softmax(scores, None if empty is None else ~empty[:, None, None, :])
        if empty is not None:
            matrix = matrix.masked_fill(empty[:, None, :, None], 0.0)
        return pseudoinverse(matrix, self.config.pinv_iterations)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        note_path("nystrom")
        mask, dropout_p = key_padding_mask, self.build.dropout_p if self.training else 0.0
        key, value = (blank_padding(x, mask) for x in (key, value))
        summaries, key_marks, empty = value, key, mask
        if self._width(key.shape[2]) > 1:
            query_marks, key_marks = self._landmarks(query, mask), self._landmarks(key, mask)
            empty = self._empty(mask)
            summaries = exact_attention(query_marks, key, value, score_bias=score_bias, key_padding_mask=mask)  # B V
            key_marks = expand_kv_heads(key_marks, self.build.num_heads)
            inverse = self._inverse(query_marks, key_marks, empty)
            summaries = (inverse @ summaries.to(inverse.dtype)).to(value.dtype)  # A^+ (B V) [B, H, m, D]
        output = exact_attention(
            query, key_marks, summaries, score_bias=score_bias, key_padding_mask=empty, dropout_p=dropout_p
        )
        if self.filter is None:
            return output
        return output + filtered(expand_kv_heads(value, self.build.num_heads), self.filter.to(value.dtype))

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute equation 13 with dense matrices, in float32 at least; A^+ is what the iteration has reached."""
        mask, num_heads, dtype = key_padding_mask, query.shape[1], query.dtype
        query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
        key, value = (blank_padding(x, mask) for x in (key, value))
        query_marks, key_marks = self._landmarks(query, mask), self._landmarks(key, mask)
        key, key_marks, value = (expand_kv_heads(x, num_heads) for x in (key, key_marks, value))
        empty = self._empty(mask)
        scale = self.build.head_dim**-0.5
        seen = None if mask is None else ~mask[:, None, None, :]
        filled = None if empty is None else ~empty[:, None, None, :]
        to_marks = masked_softmax(query @ key_marks.mT * scale, filled)  # F [B, H, L, m]
        from_marks = masked_softmax(query_marks @ key.mT * scale, seen)  # B [B, H, m, L]
        if self._width(key.shape[2]) == 1:
            output = to_marks @ value
        else:
            output = to_marks @ self._inverse(query_marks, key_marks, empty) @ (from_marks @ value)
        if self.filter is not None:
            near = pad(value, (0, 0, self.config.conv_len // 2, self.config.conv_len // 2))
            windows = near.unfold(2, self.config.conv_len, 1)  # [B, H, L, D, conv_len]
            output = output + (windows * self.filter.to(output.dtype)[:, None, None, :]).sum(-1)
        return zero_padded_rows(output, mask).to(dtype)


def filtered(value: Tensor, taps: Tensor) -> Tensor:
    """Filter values `[B, H, L, D]` along their positions by `[H, K]`, K odd, centred; zero lies beyond both ends.

    As products of chunks with bands of the filter, [C, C + K - 1], and not as torch's convolution with a group for each
    head: on a CPU its gradient of the filter was off by 1 to 6 % at some lengths (512, 8192), and it crashed at others
    (torch 2.13 with oneDNN, float32, K = 35).
    """
    length, num_taps = value.shape[2], taps.shape[1]
    size = _chunk_len(num_taps)
    count = -(-length // size)
    near = pad(value, (0, 0, num_taps // 2, (count + 1) * size - length - num_taps // 2)).unflatten(2, (-1, size))
    windows = torch.cat((near[:, :, :-1], near[:, :, 1:, : num_taps - 1]), dim=3)  # [B, H, n, C + K - 1, D]
    width = size + num_taps - 1  # each row of a band is the one before, shifted by one
    band = pad(taps, (0, size)).repeat(1, size)[:, : size * width].unflatten(1, (size, width))
    result: Tensor = (band[:, None] @ windows).flatten(2, 3)[:, :, :length]
    return result


def _chunk_len(num_taps: int) -> int:
    return max(64, num_taps - 1)


def pseudoinverse(matrix: Tensor, iterations: int) -> Tensor:
    """Iterate towards the Moore-Penrose inverse of weights `[..., m, m]` (Razavi et al. 2014); of zeros it is zero.

    Each step takes an error I - A Z to about its third power; singular values that are too small for the number of
    steps are left out, as a truncated inverse would.
    """
    flat = matrix.flatten(0, -3)
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    norms = flat.sum(-2).amax(-1) * flat.sum(-1).amax(-1)  # the largest column and row: no weight is negative
    inverse = flat.mT / norms.clamp(min=torch.finfo(flat.dtype).tiny)[:, None, None]
    for _ in range(iterations):
        product = flat @ inverse
        inner = torch.baddbmm(15 * one, product, 7 * one - product, alpha=-1)
        inverse = inverse @ torch.baddbmm(13 / 4 * one, product, inner, alpha=-1 / 4)
    return inverse.view_as(matrix)
