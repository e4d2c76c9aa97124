"""Causal sums of products of keys and values, with decay: the linear recurrence behind several mechanisms.

    out_i = q_i S_i,   S_i = gamma S_{i-1} + k_i v_i^T,   S_0 = start
One position after another it is recurrent. Here C positions are taken at a time (Hua et al. 2022, arXiv 2202.10447,
section 3.2; Sun et al. 2023, arXiv 2307.08621, equation 7): inside a chunk by its C x C weights, between chunks by the
state S, of which one is kept for each chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_zoo.kernels.chunked_recurrence import chunk_sizes, memories, split_chunks
from attn_zoo.kernels.own_dtype import in_own_dtype


@in_own_dtype
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
    count, size = chunk_sizes(length, chunk_len)
    if start is None:
        start = value.new_zeros(*key.shape[:2], key.shape[3], value.shape[3])
    query, key, value = (split_chunks(x, count, size) for x in (query, key, value))  # [B, H, n, C, D or V]
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
        before, last = memories((gamma**chunk_end)[None], parts, start)
        carried = (query @ before) * gamma ** (at + 1)
    return (weights @ value + carried).flatten(2, 3)[:, :, :length], last


def chunked_sums_flops(length: int, chunk_len: int, key_dim: int, value_dim: int) -> int:
    """Count the matrix products of one head: weights and values of chunks, and making and reading of states."""
    size = min(chunk_len, length)
    rows = -(-length // size) * size
    return 2 * rows * (size * (key_dim + value_dim) + 2 * key_dim * value_dim)
