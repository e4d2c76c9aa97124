"""Causal sums of products of keys and values, with decay: the linear recurrence behind several mechanisms.

    out_i = q_i S_i,   S_i = gamma S_{i-1} + k_i v_i^T,   S_0 = start
One position after another it is recurrent. Here C positions are taken at a time (Hua et al. 2022, arXiv 2202.10447,
section 3.2; Sun et al. 2023, arXiv 2307.08621, equation 7): inside a chunk by its C x C weights, between chunks by the
state S, of which one is kept for each chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def chunked_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    chunk_len: int,
    decay: Tensor | None = None,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return sum_{j <= i} gamma^{i-j} (q_i k_j) v_j + gamma^i q_i S_0 for every position i = 1 .. L, and S_L.

    Args:
        query: `[B, H, L, D]`; the dtype should be float32 at least, as sums run over the whole sequence.
        key: `[B, H, L, D]`, zero where padded.
        value: `[B, H, L, V]`.
        chunk_len: C, positions of a chunk.
        decay: gamma of each head, `[H]`, 0 < gamma <= 1; None means 1.
        start: S_0, `[B, H, D, V]`; None means zero.

    Returns:
        `[B, H, L, V]`, and the state after the last position `[B, H, D, V]`.
    """
    length = query.shape[2]
    # A minimum would stay one in every shape that the compiler reasons about.
    size = chunk_len if chunk_len < length else length  # noqa: FURB136
    count = (length + size - 1) // size
    if start is None:
        start = value.new_zeros(*key.shape[:2], key.shape[3], value.shape[3])
    query, key, value = (_split(x, count, size) for x in (query, key, value))  # [B, H, n, C, D or V]
    weights = query @ key.mT  # [B, H, n, C, C]
    if decay is None:
        weights = weights.tril()
        states = torch.cat([start[:, :, None], key.mT @ value], dim=2).cumsum(2)
        before, last = states[:, :, :-1], states[:, :, -1]
        carried = query @ before
    else:
        gamma = decay.to(query.dtype)[:, None, None, None]  # [H, 1, 1, 1]
        at = torch.arange(size, device=query.device)[:, None]  # position in its chunk, [C, 1]
        chunk = torch.arange(count, device=query.device)[:, None, None]
        chunk_end = (length - chunk * size).clamp(max=size)  # the last chunk may be shorter, [n, 1, 1]
        weights = weights * (gamma ** (at - at.mT).clamp(min=0)).tril()
        parts = (key * gamma ** (chunk_end - 1 - at).clamp(min=0)).mT @ value  # [B, H, n, D, V]
        before = _states(parts, start, gamma**size)
        last = gamma[..., 0] ** chunk_end[-1] * before[:, :, -1] + parts[:, :, -1]
        carried = (query @ before) * gamma ** (at + 1)
    return (weights @ value + carried).flatten(2, 3)[:, :, :length], last


def chunked_sums_flops(length: int, chunk_len: int, key_dim: int, value_dim: int) -> int:
    """Count the matrix products of one head: weights and values of chunks, and making and reading of states."""
    size = min(chunk_len, length)
    rows = -(-length // size) * size
    return 2 * rows * (size * (key_dim + value_dim) + 2 * key_dim * value_dim)


def _states(parts: Tensor, start: Tensor, decay: Tensor) -> Tensor:
    """Return S_0 .. S_{n-1} of S_i = decay S_{i-1} + part_i, `[B, H, n, D, V]`, in O(sqrt(n)) steps.

    Groups of at least sqrt(n) parts are summed side by side, then the groups one after another.

    Args:
        parts: `[B, H, n, D, V]`.
        start: S_0 `[B, H, D, V]`.
        decay: `[H, 1, 1, 1]`.
    """
    count, size = parts.shape[2], 1
    while size * size < count:
        size *= 2
    groups = _split(parts, (count + size - 1) // size, size)
    inside = [torch.zeros_like(groups[:, :, :, 0])]  # of each group, from zero
    for index in range(size):
        inside.append(decay * inside[-1] + groups[:, :, :, index])
    starts, whole = [start], decay[..., 0] ** size
    for total in inside.pop().unbind(2)[:-1]:
        starts.append(whole * starts[-1] + total)
    age = torch.arange(size, device=parts.device)[:, None, None]
    from_start = decay[..., None] ** age * torch.stack(starts, 2)[:, :, :, None]
    return (torch.stack(inside, 3) + from_start).flatten(2, 3)[:, :, :count]


def _split(rows: Tensor, count: int, size: int) -> Tensor:
    """Return `[B, H, L, ...]` as `[B, H, n, C, ...]`, filled up with zeros."""
    missing = count * size - rows.shape[2]
    if missing:  # torch copies even for nothing
        rows = pad(rows, (*(0, 0) * (rows.dim() - 3), 0, missing))
    return rows.reshape(*rows.shape[:2], count, size, *rows.shape[3:])
