"""Masks and score biases: the only place that makes them, so that every variant means the same by them.

`key_padding_mask` is bool `[B, S]` with True = padding. A keep mask is bool with True = may be seen. Causal masks are
aligned bottom right: query i sees keys j <= i + S - L.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["alibi_bias", "alibi_slopes", "causal_keep", "keep_mask", "masked_softmax", "zero_padded_rows"]


def causal_keep(query_len: int, key_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Return bool `[L, S]`: True where key j <= i + S - L.

    >>> causal_keep(2, 3).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    return torch.ones(query_len, key_len, dtype=torch.bool, device=device).tril(key_len - query_len)


def keep_mask(
    query_len: int, key_len: int, *, is_causal: bool, key_padding_mask: Tensor | None, device: torch.device | str
) -> Tensor | None:
    """Return bool `[B or 1, 1, L or 1, S]`, True = may be seen, or None where everything may be.

    Args:
        query_len: L.
        key_len: S.
        is_causal: hide later keys.
        key_padding_mask: bool `[B, S]`, True = padding.
        device: of the result.
    """
    keep = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
    if is_causal:
        causal = causal_keep(query_len, key_len, device)[None, None]
        keep = causal if keep is None else keep & causal
    return keep


def masked_softmax(scores: Tensor, keep: Tensor | None) -> Tensor:
    """Softmax over the last dimension among kept entries; a row with none kept is all zero, not NaN.

    Args:
        scores: `[..., S]`.
        keep: bool, broadcastable to `scores`, or None.
    """
    if keep is None:
        return scores.softmax(-1)
    # A finite fill keeps rows without any kept key (and their gradients) free of NaN; the product then zeroes them.
    filled = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    return filled.softmax(-1) * keep.to(scores.dtype)


def zero_padded_rows(output: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Zero `[B, H, L, D]` for batch entries whose keys are all padding."""
    if key_padding_mask is None:
        return output
    return output.masked_fill(key_padding_mask.all(-1)[:, None, None, None], 0.0)


def alibi_slopes(num_heads: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the head slopes `[H]` of ALiBi (Press et al. 2022, arXiv 2108.12409, section 3).

    For a power of two the slopes are the geometric series from 2^(-8/H); otherwise the series of the next lower power
    is filled up with every other slope of the next higher one, as the authors do.

    >>> alibi_slopes(2).tolist()
    [0.0625, 0.00390625]
    """

    def series(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / count) for head in range(count)]

    lower = 1 << (num_heads.bit_length() - 1)
    slopes = series(lower) + series(2 * lower)[0::2][: num_heads - lower]
    return torch.tensor(slopes, device=device, dtype=dtype)


def alibi_bias(
    num_heads: int, query_len: int, key_len: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the additive bias `[1, H, L, S]`: minus slope times distance, positions aligned bottom right.

    Bidirectional attention uses the absolute distance; under a causal mask that is the published form.
    """
    queries = torch.arange(key_len - query_len, key_len, device=device)
    distance = (queries[:, None] - torch.arange(key_len, device=device)[None, :]).abs().to(dtype)
    return -alibi_slopes(num_heads, device, dtype)[None, :, None, None] * distance
