"""Block-sparse attention by gathering keys and values, a few blocks of queries at a time.

Time and memory are linear in the length, forward and backward: a piece gathers its key and value blocks into a buffer
that stays in the cache, runs dense attention on it, and is forgotten. Saved for backward are the inputs, the output and
one log-sum-exp per query; backward gathers again and adds into the gradients of the keys by `index_add_`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attn_zoo.kernels.block_chunk import Dropout, Piece, Scratch, attend, attend_backward, has_fused, wide_dtype
from attn_zoo.kernels.block_pattern import BlockPattern
from attn_zoo.kernels.block_pieces import Chunk, Group, Pieces
from attn_zoo.kernels.trace import note_path

__all__ = ["gather_attention"]


@dataclass(frozen=True)
class _Plan:
    """What forward and backward share beside tensors."""

    pattern: BlockPattern
    scale: float
    slopes: Tensor | None
    dropout_p: float
    seed: int


@dataclass(frozen=True)
class _Step:
    """One piece with its place.

    Args:
        chunk: its queries.
        source: rows of the gathered keys, or None for dense rows, which see the leading keys in place.
        piece: what to compute.
        is_dead: queries that see nothing, or None.
    """

    chunk: Chunk
    source: Tensor | None
    piece: Piece
    is_dead: Tensor | None


class _Walk:
    """Goes through the pieces of one call, forward and backward in the same order."""

    def __init__(self, plan: _Plan, query: Tensor, padding: Tensor | None) -> None:
        self._plan, self._query, self._padding = plan, query, padding
        self._dropout: Dropout | None = None
        if plan.dropout_p:
            self._dropout = Dropout(plan.dropout_p, torch.Generator(query.device).manual_seed(plan.seed))
        self._is_fused = {dense: has_fused(query, self._dropout, is_dense=dense) for dense in (True, False)}
        has_scores = not self._is_fused[True]
        self._pieces = Pieces(query, plan.pattern, padding, plan.slopes, has_scores=has_scores)
        self._scratch = Scratch()

    def groups(self, key: Tensor, value: Tensor) -> Iterator[tuple[Group, Tensor, Tensor]]:
        """Yield groups of sequences with their keys and values as rows that can be gathered."""
        blocks, size = self._plan.pattern.num_key_blocks, self._plan.pattern.block_size
        for group in self._pieces.groups():
            keys, values = (group.read_keys(x, blocks, size, self._padding) for x in (key, value))
            yield group, keys, values

    def steps(self, group: Group, keys: Tensor, values: Tensor) -> Iterator[_Step]:
        """Yield the pieces of a group; each is valid until the next."""
        for chunk in self._pieces.chunks():
            source = self._pieces.source(group, chunk)
            mask, is_dead = self._pieces.mask(group, chunk)
            piece = Piece(
                query=group.read(self._query, chunk.start, chunk.stop, chunk.size),
                key=self._near("key", keys, source, group),
                value=self._near("value", values, source, group),
                mask=mask,
                scale=self._plan.scale,
                dropout=self._dropout,
                is_fused=self._is_fused[source is None],
                scratch=self._scratch,
            )
            yield _Step(chunk, source, piece, is_dead)

    def _near(self, name: str, keys: Tensor, source: Tensor | None, group: Group) -> Tensor:
        """Return the keys (or values) that the queries of a piece see, `[sequences * blocks, keys, D]`."""
        pattern, head_dim = self._plan.pattern, self._query.shape[-1]
        if source is None:
            return _leading(keys, group, head_dim, pattern)
        near = self._scratch.take(name, (len(source), keys.shape[1]), keys)
        torch.index_select(keys, 0, source, out=near)
        return near.view(-1, pattern.table.shape[-1] * pattern.block_size, head_dim)


class _GatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, plan: _Plan) -> Tensor:
        note_path("block_sparse.gather")
        walk = _Walk(plan, query, padding)
        output = torch.empty_like(query)
        lse = torch.empty(query.shape[:3], dtype=wide_dtype(query.dtype), device=query.device)
        for group, keys, values in walk.groups(key, value):
            for step in walk.steps(group, keys, values):
                out, out_lse = attend(step.piece)
                if step.is_dead is not None:
                    out = out.masked_fill(step.is_dead, 0.0)
                group.write(output, step.chunk.start, out)
                if out_lse is not None:
                    group.write(lse, step.chunk.start, out_lse)
        ctx.save_for_backward(query, key, value, padding, output, lse)
        ctx.plan = plan
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, padding, output, lse = ctx.saved_tensors
        plan: _Plan = ctx.plan
        if grad_output.stride(-1) != 1:  # the gradient of a sum, for instance, is one number expanded
            grad_output = grad_output.contiguous()
        pattern, wide = plan.pattern, wide_dtype(query.dtype)
        walk = _Walk(plan, query, padding)
        grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
        for group, keys, values in walk.groups(key, value):
            key_sum, value_sum = (torch.zeros_like(x, dtype=wide) for x in (keys, values))
            for step in walk.steps(group, keys, values):
                chunk = step.chunk
                out, out_lse, grad = (
                    group.read(x, chunk.start, chunk.stop, chunk.size) for x in (output, lse, grad_output)
                )
                if step.is_dead is not None:
                    grad = grad.masked_fill(step.is_dead, 0.0)
                part, key_part, value_part = attend_backward(grad, step.piece, out, out_lse)
                group.write(grad_query, chunk.start, part)
                for total, addend in ((key_sum, key_part), (value_sum, value_part)):
                    if step.source is None:
                        _leading(total, group, query.shape[-1], pattern).add_(addend)
                    else:
                        total.index_add_(0, step.source, addend.reshape(len(step.source), -1).to(wide))
            for result, total in ((grad_key, key_sum), (grad_value, value_sum)):
                group.write(result, 0, total.view(len(total), pattern.block_size, -1))
        return grad_query, grad_key, grad_value, None, None


def _leading(keys: Tensor, group: Group, head_dim: int, pattern: BlockPattern) -> Tensor:
    """Return the keys that dense rows see, `[sequences, keys, D]`: a view."""
    return keys.view(group.num_sequences, -1, head_dim)[:, : pattern.dense_key_len]


def gather_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: BlockPattern,
    *,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    slopes: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute block-sparse attention by gathering; see `block_sparse_attention` for arguments and result."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # The fused kernel wants features side by side.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    # The seed comes from PyTorch's generator, as dropout does; the draws that follow are repeatable from it.
    seed = int(torch.randint(1 << 62, ())) if dropout_p else 0
    output: Tensor = _GatherAttention.apply(
        query, key, value, key_padding_mask, _Plan(pattern, scale, slopes, dropout_p, seed)
    )
    return output
