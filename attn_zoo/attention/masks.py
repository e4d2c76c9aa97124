"""Masks and score biases: the only place that makes them, so that every variant means the same by them.

`key_padding_mask` is bool `[B, S]` with True = padding. A keep mask is bool with True = may be seen. Causal masks are
aligned bottom right: query i sees keys j <= i + S - L.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


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


def blank_padding(tokens: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Zero keys or values `[B, G, S, D]`, or hidden states `[B, S, E]`, at padded positions.

    A weight of zero does not hide a NaN or an infinity (0 * inf = NaN), in the output or in the gradients; a zero in
    its place does. It costs one pass over the keys and one over the values, little beside L passes of attention.
    """
    if key_padding_mask is None:
        return tokens
    mask = key_padding_mask[..., None]  # [B, S, 1]
    return tokens.masked_fill(mask if tokens.dim() == 3 else mask[:, None], 0.0)


def finite_padding(tokens: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Zero what harms at padded positions of hidden states `[B, S, E]` that are projected as queries too.

    The gradient of a weight sums over all tokens, and 0 * NaN = NaN. So NaN, infinities, and large numbers become 0:
    their products may overflow, and so may exp(score - log-sum-exp), which kernels compute again in backward, where
    rounding leaves more than some 88 between the two. All others stay, so that a padded query gets what any other
    would. On a CPU one pass, which only reads, mostly shows that there is nothing to do.
    """
    if key_padding_mask is None or not tokens.numel():
        return tokens
    wide = torch.promote_types(tokens.dtype, torch.float32)  # of the scores
    most = min(torch.finfo(tokens.dtype).max ** 0.5, torch.finfo(wide).eps ** -0.5)
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        least, largest = torch.aminmax(tokens.detach())
        if -most <= float(least) and float(largest) <= most:  # neither is so where a NaN is
            return tokens
    is_harmless = tokens.detach().abs() <= most  # NaN is not
    return torch.where(is_harmless | ~key_padding_mask[..., None], tokens, 0.0)


def alibi_slopes(num_heads: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the head slopes `[H]` of ALiBi (Press et al. 2022, arXiv 2108.12409, section 3).

    For a power of two the slopes are the geometric series from 2^(-8/H); otherwise the series of the next lower power
    is filled up with every other slope of the next higher one, as the authors do.

    >>> alibi_slopes(2).tolist()
    [0.0625, 0.00390625]
    """
    given = num_heads, torch.device(device), dtype
    # Making them copies from the host, which is waited for and which no CUDA graph may hold. A compiler ignores caches,
    # and what a mode makes (fake tensors, for one) is of no use outside it.
    is_traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    return _make_slopes(*given) if is_traced else _kept_slopes(*given)


def _make_slopes(num_heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    def series(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / count) for head in range(count)]

    lower = 1 << (num_heads.bit_length() - 1)
    slopes = series(lower) + series(2 * lower)[0::2][: num_heads - lower]
    return torch.tensor(slopes, device=device, dtype=dtype)


@cache
def _kept_slopes(num_heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # a call with a graph may come later
        return _make_slopes(num_heads, device, dtype)


def alibi_bias(
    num_heads: int, query_len: int, key_len: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the additive bias `[1, H, L, S]`: minus slope times distance, positions aligned bottom right.

    Bidirectional attention uses the absolute distance; under a causal mask that is the published form.
    """
    wide = torch.promote_types(dtype, torch.float32)  # a distance above 2048 is no float16, one above 256 no bfloat16
    slopes = alibi_slopes(num_heads, device, wide)
    return score_bias(range(query_len), query_len, key_len, slopes=slopes, dtype=wide, device=device).to(dtype)


def score_bias(
    rows: range,
    query_len: int,
    key_len: int,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    slopes: Tensor | None = None,
    num_keys: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return what is added to the scaled scores of some rows, minus infinity where a key is hidden.

    Kernels ask for a few rows at a time, so that no `[L, S]` mask need be stored at long lengths.

    Args:
        rows: consecutive queries.
        query_len: L.
        key_len: S.
        is_causal: hide keys j > i + S - L.
        key_padding_mask: bool `[B, S]`, True = padding.
        slopes: `[H]` of ALiBi, or None for no distance bias.
        num_keys: only the first so many keys; None means all S.
        dtype: of the result; computed in float32 at least.
        device: of the result.

    Returns:
        `[B or 1, H or 1, len(rows) or 1, num_keys]`: a dimension is 1 where nothing depends on it.

    >>> score_bias(range(1, 3), 3, 3, is_causal=True).tolist()
    [[[[0.0, 0.0, -inf], [0.0, 0.0, 0.0]]]]
    """
    num_keys = key_len if num_keys is None else num_keys
    wide = torch.promote_types(dtype, torch.float32)
    key_at = torch.arange(num_keys, device=device)
    query_at = torch.arange(rows.start, rows.stop, device=device)[:, None] + (key_len - query_len)
    bias = torch.zeros(1, 1, 1, num_keys, dtype=wide, device=device)
    if slopes is not None:
        bias = -slopes.to(wide)[None, :, None, None] * (query_at - key_at).abs().to(wide)
    if is_causal:
        bias = bias.masked_fill(key_at > query_at, float("-inf"))
    if key_padding_mask is not None:
        bias = bias.masked_fill(key_padding_mask[:, None, None, :num_keys], float("-inf"))
    return bias.to(dtype)
