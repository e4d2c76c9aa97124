"""Exact attention to few keys with a gradient: stretches of queries side by side, as sequences of their own.

Fused kernels compute the gradients of a tile of keys in one program that walks over all queries. With k = 256 keys and
16 heads that is 32 programs on 132 multiprocessors, whatever the length. So the queries are cut into stretches, each of
which gets a copy of the few keys; gradients of the copies are added in a fixed order. A forward alone needs none of
this: there kernels go over the queries in parallel.

In eager mode all of it is one node of autograd, which calls torch's operators and their gradients by hand
(`attend_by_operator`), and only long sequences are cut: below, a call waits for the host, which has the more to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_zoo.kernels.exact.operators import Operator
from attn_zoo.kernels.once_differentiable import once_differentiable
from attn_zoo.kernels.trace import note_path

GPU_PROGRAMS = 264  # two for each of 132 multiprocessors
KEY_TILE = 128
MIN_QUERIES = 1024  # of a stretch: its gradients are added up, and that must cost little beside computing them
MIN_RATIO = 4  # of the queries to the copies of the keys

# Queries in eager mode. On an H100 whole sequences take 15 us longer for every 1024 queries, and forward and backward
# of Linformer take the host about as long as 32 768 of them; parts cost it half as much again.
MIN_EAGER_QUERIES = 32_768


def num_parts(query: Tensor, key: Tensor) -> int:
    """Return into how many stretches a GPU should cut the queries: a power of two that divides their number.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, G, S, D]`.
    """
    batch_size, num_heads, length, _ = query.shape
    key_len = key.shape[2]
    if not torch.compiler.is_compiling() and length < MIN_EAGER_QUERIES:
        return 1
    programs = batch_size * num_heads * -(-key_len // KEY_TILE)
    parts = 1
    while (
        _is_known(MIN_RATIO * 2 * parts * key_len <= length)
        and parts * programs < GPU_PROGRAMS
        and length % (2 * parts) == 0
        and length // (2 * parts) >= MIN_QUERIES
    ):
        parts *= 2
    return parts


def _is_known(condition: bool) -> bool:
    """Tell whether a condition on sizes holds, under the compiler for every size that may come.

    To ask it about a length that varies would have it compile twice, for lengths on either side.
    """
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads sympy

    return bool(statically_known_true(condition))


def split(query: Tensor, key: Tensor, value: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `[B * parts, H, L / parts, D]` and as many copies of keys and values `[B * parts, G, S, D]`.

    Queries are not copied where positions are contiguous across sequences: one sequence, or heads interleaved as
    projections leave them.
    """
    return _stretches(query, parts), key.repeat_interleave(parts, 0), value.repeat_interleave(parts, 0)


def _stretches(rows: Tensor, parts: int) -> Tensor:
    """Return `[B * parts, H, L / parts, D]` of `[B, H, L, D]`."""
    batch_size, num_heads, length, head_dim = rows.shape
    length //= parts
    apart = rows.view(batch_size, num_heads, parts, length, head_dim).transpose(1, 2)
    return apart.reshape(batch_size * parts, num_heads, length, head_dim)


def _joined(stretches: Tensor, parts: int) -> Tensor:
    """Undo `_stretches`."""
    count, num_heads, length, head_dim = stretches.shape
    apart = stretches.view(count // parts, parts, num_heads, length, head_dim).transpose(1, 2)
    return apart.reshape(count // parts, num_heads, parts * length, head_dim)


def _added(copies: Tensor, parts: int) -> Tensor:
    """Return the sums `[B, G, S, D]` of what belongs to the copies of keys or values."""
    return copies.view(copies.shape[0] // parts, parts, *copies.shape[1:]).sum(1)


def attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor], parts: int
) -> Tensor:
    """Return `attend(query, key, value)`, computed with `parts` times as many, shorter sequences.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, G, S, D]`.
        value: `[B, G, S, D]`.
        attend: attention without a mask over positions of the query.
        parts: divides L.

    Returns:
        `[B, H, L, D]`.
    """
    note_path("few_keys.parts")
    return _joined(attend(*split(query, key, value, parts)), parts)


class _ByOperator(torch.autograd.Function):
    """All stretches by one operator. Keeps its inputs, which it splits again, and the results."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, operator: Operator, dropout_p: float, parts: int
    ) -> Tensor:
        results = operator.forward(*split(query, key, value, parts), dropout_p, False, True)
        ctx.save_for_backward(query, key, value, *results)
        ctx.operator, ctx.dropout_p, ctx.parts = operator, dropout_p, parts
        return _joined(results[0], parts).detach()  # not a view, to which nobody could add in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.parts
        query, key, value, *results = ctx.saved_tensors
        inputs = _stretches(grad, parts), *split(query, key, value, parts)
        of_query, of_key, of_value = ctx.operator.backward(*inputs, ctx.dropout_p, *results)
        return _joined(of_query, parts), _added(of_key, parts), _added(of_value, parts), None, None, None


def attend_by_operator(
    query: Tensor, key: Tensor, value: Tensor, operator: Operator, *, dropout_p: float, parts: int
) -> Tensor:
    """Return attention in parts as `attend_in_parts`, by an operator that serves the calls that `split` makes.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, H, S, D]`.
        value: `[B, H, S, D]`.
        operator: the kernel's.
        dropout_p: probability of dropping a weight.
        parts: divides L.
    """
    note_path("few_keys.parts")
    output: Tensor = _ByOperator.apply(query, key, value, operator, dropout_p, parts)
    return output
