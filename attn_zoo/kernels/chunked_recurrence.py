"""Recurrences whose memory decays by the data, computed a chunk of positions at a time, and what comes before them.

    S_t = alpha_t S_{t-1} + ...,   0 < alpha_t <= 1 of each head
Decays are kept as logarithms and summed before they are raised, so that a decay to nothing divides nothing (Dao and Gu
2024, arXiv 2405.21060, section 6).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def chunk_sizes(length: int, chunk_len: int) -> tuple[int, int]:
    """Return the number of chunks of a sequence, and the positions of each: all, where these are less than a chunk."""
    # A minimum would stay one in every shape that the compiler reasons about.
    size = chunk_len if chunk_len < length else length  # noqa: FURB136
    return (length + size - 1) // size, size


def split_chunks(rows: Tensor, count: int, size: int) -> Tensor:
    """Return `[B, H, L, ...]` as `[B, H, count, size, ...]`, filled up with zeros."""
    missing = count * size - rows.shape[2]
    if missing:  # torch copies even for nothing
        rows = pad(rows, (*(0, 0) * (rows.dim() - 3), 0, missing))
    return rows.reshape(*rows.shape[:2], count, size, *rows.shape[3:])


def decay_in_chunk(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decay that a chunk has seen by each position, and between each two.

    Logarithms are summed from each position on, as in the authors' `segsum`. Differences of sums from the start of the
    chunk would be cheaper, but after tokens that forget almost all those sums are in the hundreds: what float32 rounds
    off there is an error of every decay behind them. In the backward the gradient of such a token, which is next to
    nothing, would be a difference of large sums likewise.

    Args:
        log_decay: log alpha, `[B, H, n, C]`, finite and at most 0.

    Returns:
        alpha_1 .. alpha_t, `[B, H, n, C, 1]`, and alpha_{i+1} .. alpha_t, `[B, H, n, C, C]`, 0 for i > t. The last row
        is what is left at the end of the chunk.
    """
    size = log_decay.shape[-1]
    is_seen = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    since = log_decay[..., None].where(is_seen.tril(-1), 0.0).cumsum(-2)  # [B, H, n, C, C]
    return log_decay.cumsum(-1)[..., None].exp(), since.masked_fill(~is_seen, float("-inf")).exp()


def memories(factor: Tensor, addition: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return S_0 .. S_{n-1} of S_{i+1} = P_i S_i + R_i, `[B, H, n, D, V]`, and S_n, in O(sqrt(n)) steps.

    Groups of at least sqrt(n) steps are composed side by side, then the groups one after another.

    Args:
        factor: P: matrices `[B, H, n, D, D]`, or numbers, one for each column of a memory, `[B, H, n, 1, V]`, or one
            for all, `[B, H, n, 1, 1]`; B may be 1.
        addition: R, `[B, H, n, D, V]`.
        start: S_0, `[B, H, D, V]`.
    """
    is_numbers = factor.shape[-2] == 1
    times = torch.mul if is_numbers else torch.matmul

    def step(factor: Tensor, addition: Tensor, memory: Tensor) -> Tensor:
        return torch.addcmul(addition, factor, memory) if is_numbers else factor @ memory + addition

    count, size = factor.shape[2], group_size(factor.shape[2])
    num_groups = (count + size - 1) // size
    factors, additions = (split_chunks(x, num_groups, size).unbind(3) for x in (factor, addition))
    up_to = [(factors[0], additions[0])]  # each step of a group, with all steps of the group before it
    for later, added in zip(factors[1:], additions[1:], strict=True):
        product, total = up_to[-1]
        up_to.append((times(later, product), step(later, added, total)))
    groups, starts = up_to.pop(), [start]
    for whole, added in zip(*(x.unbind(2)[:-1] for x in groups), strict=True):
        starts.append(step(whole, added, starts[-1]))
    first = torch.stack(starts, 2)  # before each group
    before = torch.stack([first, *(step(product, total, first) for product, total in up_to)], 3)
    before = before.flatten(2, 3)[:, :, :count]
    return before, step(factor[:, :, -1], addition[:, :, -1], before[:, :, -1])


def group_size(count: int) -> int:
    """Return the smallest power of two whose square is at least `count`.

    >>> [group_size(count) for count in (1, 2, 5, 16, 17)]
    [1, 2, 4, 4, 8]
    """
    size = 1
    while size * size < count:
        size *= 2
    return size


def memories_products(count: int, key_dim: int, value_dim: int) -> int:
    """Return the multiply-adds of `memories` with matrices, for one head."""
    size = group_size(count)
    num_groups = -(-count // size)
    return key_dim**2 * (num_groups * (size - 1) * (key_dim + 2 * value_dim) + num_groups * value_dim)


def short_convolution(rows: Tensor, weights: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Convolve each feature by itself with the positions before it, and return the tail for those that follow.

    Written out as a sum of products: torch's convolution by groups has a wrong gradient at some lengths on a CPU.

    Args:
        rows: `[B, n, W]`.
        weights: `[K, W]`, that of the position itself last.
        tail: the K - 1 positions before, `[B, K - 1, W]`; None means zeros.

    Returns:
        `[B, n, W]`, and the last K - 1 positions `[B, K - 1, W]`.
    """
    length, before = rows.shape[1], len(weights) - 1
    seen = pad(rows, (0, 0, before, 0)) if tail is None else torch.cat([tail, rows], dim=1)
    mixed = seen[:, :length] * weights[0]
    for offset in range(1, before + 1):
        mixed = torch.addcmul(mixed, seen[:, offset : offset + length], weights[offset])
    return mixed, seen[:, length:].clone()  # a view would keep all of it
