"""Pooling over consecutive windows of positions: means, or weighted sums (convolution whose stride is its kernel).

mean: out[w] = sum_{unpadded j in window w} tokens[j] / their number
weighted: out[w] = sum_{unpadded j in window w} weight[j mod width] tokens[j]
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_zoo.kernels.trace import note_path


def pool_windows(
    tokens: Tensor, width: int, weight: Tensor | None = None, *, key_padding_mask: Tensor | None = None
) -> Tensor:
    """Pool `tokens` over windows of `width` positions, the last of which may be shorter.

    Args:
        tokens: `[B, G, S, D]`.
        width: positions in a window.
        weight: `[G or 1, width]` for weighted sums, in the dtype of `tokens`; None for means.
        key_padding_mask: bool `[B, S]`, True = left out, whatever is stored there (NaN and infinity too).

    Returns:
        `[B, G, ceil(S / width), D]`; zero for a window that holds only padding.

    >>> pool_windows(torch.tensor([1.0, 3.0, 5.0]).reshape(1, 1, 3, 1), 2).flatten().tolist()
    [2.0, 5.0]
    """
    note_path("pool.mean" if weight is None else "pool.weighted")
    length = tokens.shape[2]
    if key_padding_mask is not None:
        tokens = tokens.masked_fill(key_padding_mask[:, None, :, None], 0.0)
    whole = length // width * width
    parts = []
    if whole:
        parts.append(_sum(tokens[:, :, :whole].unflatten(2, (-1, width)), weight))
    if whole < length:  # taken apart, so that nothing long is copied to make it fit
        parts.append(_sum(tokens[:, :, None, whole:], weight))
    sums = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
    if weight is not None:
        return sums
    counts = window_counts(length, width, key_padding_mask=key_padding_mask, device=tokens.device)
    return (sums / counts.clamp(min=1)[:, None, :, None]).to(tokens.dtype)


def _sum(windows: Tensor, weight: Tensor | None) -> Tensor:
    """Return `[B, G, n, D]` from windows `[B, G, n, width, D]`."""
    if weight is None:
        return windows.sum(dim=3, dtype=torch.promote_types(windows.dtype, torch.float32))
    row = weight[:, None, None, : windows.shape[3]]  # [G or 1, 1, 1, width]
    return (row @ windows).squeeze(3)


def window_counts(key_len: int, width: int, *, key_padding_mask: Tensor | None, device: torch.device) -> Tensor:
    """Return how many unpadded positions each window holds, int64 `[B or 1, ceil(S / width)]`."""
    window = torch.arange(key_len, device=device) // width
    valid = torch.ones(1, key_len, device=device) if key_padding_mask is None else ~key_padding_mask
    counts = torch.zeros(valid.shape[0], -(-key_len // width), dtype=torch.long, device=device)
    return counts.scatter_add_(1, window.expand(valid.shape), valid.long())


def window_matrix(
    key_len: int, width: int, weight: Tensor | None, *, key_padding_mask: Tensor | None, like: Tensor
) -> Tensor:
    """Return the dense `[B or 1, G or 1, S, ceil(S / width)]` that `pool_windows` amounts to, for the reference.

    Dtype and device are those of `like`. O(S^2 / width) memory.
    """
    position = torch.arange(key_len, device=like.device)
    window = torch.arange(-(-key_len // width), device=like.device)
    inside = (position[:, None] // width == window)[None, None]  # [1, 1, S, windows]
    if key_padding_mask is not None:
        inside = inside & ~key_padding_mask[:, None, :, None]
    if weight is not None:
        return inside.to(like.dtype) * weight[None, :, position % width, None]
    return (inside.double() / inside.sum(-2, keepdim=True).clamp(min=1)).to(like.dtype)
