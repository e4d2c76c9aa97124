"""Many queries, few keys: stretches of queries become sequences of their own, so that a GPU's backward is spread out.

Fused kernels compute the gradients of a tile of keys in one program that walks over all queries. With k = 256 keys and
16 heads that is 32 programs on 132 multiprocessors, whatever the length. Softmax goes row by row, so each stretch of
queries may attend by itself, to a copy of the few keys; gradients of the copies are added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from attn_zoo.kernels.trace import note_path

GPU_PROGRAMS = 264  # two for each of 132 multiprocessors
KEY_TILE = 128
MIN_QUERIES = 1024  # of a part: its gradients are added up, and that must cost little beside computing them


def num_parts(query: Tensor, key: Tensor) -> int:
    """Return into how many stretches to cut the queries: a power of two that divides their number; 1 on a CPU.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, G, S, D]`.
    """
    if not query.is_cuda:
        return 1
    length = query.shape[2]
    programs = query.shape[0] * query.shape[1] * -(-key.shape[2] // KEY_TILE)
    parts = 1
    while parts * programs < GPU_PROGRAMS and length % (2 * parts) == 0 and length // (2 * parts) >= MIN_QUERIES:
        parts *= 2
    return parts


def attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor], parts: int
) -> Tensor:
    """Return `attend(query, key, value)`, computed with `parts` times as many, shorter sequences.

    Args:
        query: `[B, H, L, D]`; no copy is made where positions are contiguous across sequences (one sequence, or heads
            interleaved as projections leave them).
        key: `[B, G, S, D]`.
        value: `[B, G, S, D]`.
        attend: attention without a mask over positions of the query.
        parts: divides L.

    Returns:
        `[B, H, L, D]`.
    """
    if parts == 1:
        return attend(query, key, value)
    note_path("few_keys.parts")
    batch_size, heads, length, head_dim = query.shape
    short = query.unflatten(2, (parts, -1)).transpose(1, 2)  # [B, parts, H, L / parts, D]
    repeated = (x[:, None].expand(-1, parts, -1, -1, -1).flatten(0, 1) for x in (key, value))
    output: Tensor = attend(short.reshape(-1, heads, length // parts, head_dim), *repeated)
    output = output.unflatten(0, (batch_size, parts)).transpose(1, 2)
    return output.reshape(batch_size, heads, length, head_dim)
