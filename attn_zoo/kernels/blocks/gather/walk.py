"""Block-sparse attention by gathering keys and values, a few blocks of queries at a time.

Time and memory are linear in the length, forward and backward: a piece gathers its key and value blocks into a buffer
that stays in the cache, runs dense attention on it, and is forgotten. Saved for backward are the inputs alone (16-bit
types on a CPU: the output and one log-sum-exp per query too); backward gathers again, and adds into the gradients of
the keys by `index_add_`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attn_zoo.kernels.blocks.call import BlockCall
from attn_zoo.kernels.blocks.gather.dense_piece import (
    Dropout,
    Piece,
    Scratch,
    attend,
    attend_backward,
    has_fused,
    wide_dtype,
)
from attn_zoo.kernels.blocks.gather.pieces import Group, Part, pieces_of
from attn_zoo.kernels.blocks.pattern import BlockPattern
from attn_zoo.kernels.dropout_draws import keep_share
from attn_zoo.kernels.trace import note_path


@dataclass(frozen=True)
class _Step:
    """One piece with its place.

    Args:
        blocks: where its queries are among the blocks of the part.
        source: rows of the gathered keys, or None for dense rows, which see the leading keys in place.
        piece: what to compute.
        is_dead: queries that see nothing, or None.
    """

    blocks: slice
    source: Tensor | None
    piece: Piece
    is_dead: Tensor | None


class _Walk:
    """Goes through the pieces of one call, forward and backward in the same order."""

    def __init__(self, call: BlockCall) -> None:
        self.call, self.pattern = call, call.pattern.per_head(call.query.shape[1])
        self._dropout: Dropout | None = None
        if call.seed is not None:
            generator = torch.Generator(call.query.device).manual_seed(int(call.seed))
            self._dropout = Dropout(keep_share(call.dropout_p), generator)
        self.is_fused = has_fused(call.query, self._dropout) and not call.has_lse
        self._pieces = pieces_of(call, self.pattern, has_scores=not self.is_fused)
        self._scratch = Scratch()

    def groups(self) -> Iterator[tuple[Group, Tensor, Tensor]]:
        """Yield groups of sequences with their keys and values as rows that can be gathered."""
        call, blocks, size = self.call, self.pattern.num_key_blocks, self.pattern.block_size
        for group in self._pieces.groups():
            keys, values = (group.read_keys(x, blocks, size, call.padding) for x in (call.key, call.value))
            yield group, keys, values

    def parts(self, group: Group, *results: Tensor) -> Iterator[tuple[Part, list[Tensor]]]:
        """Yield the parts of a group, each with the blocks of every result to write to, which are kept afterwards."""
        for part in self._pieces.parts(group):
            places, copies = [], []
            for index, result in enumerate(results):
                place = part.place(result)
                if place is None:
                    shape = (part.num_blocks, part.size, *result.shape[3:])
                    place = self._scratch.take(f"result {index}", shape, result)
                    copies.append((result, place))
                places.append(place)
            yield part, places
            for result, place in copies:
                part.write(result, place)

    def steps(self, part: Part, group: Group, keys: Tensor, values: Tensor) -> Iterator[_Step]:
        """Yield the pieces of a part; each is valid until the next."""
        queries, sources = part.read(self.call.query), self._pieces.source(group, part)
        for rows in part.pieces:
            mask, masked, is_dead = self._pieces.mask(part, rows)
            blocks = part.blocks(rows)
            source = None if sources is None else sources[blocks].view(-1)
            piece = Piece(
                query=queries[blocks],
                key=self._near("key", keys, source, group),
                read_value=partial(self._near, "value", values, source, group),
                mask=mask,
                masked=masked,
                scale=self.call.scale,
                dropout=self._dropout,
                is_fused=self.is_fused,
                scratch=self._scratch,
            )
            yield _Step(blocks, source, piece, is_dead)

    def _near(self, name: str, keys: Tensor, source: Tensor | None, group: Group) -> Tensor:
        """Return the keys (or values) that the queries of a piece see, `[sequences * blocks, keys, D]`."""
        pattern, head_dim = self.pattern, self.call.query.shape[-1]
        if source is None:
            return _leading(keys, group, head_dim, pattern)
        near = self._scratch.take(name, (source.shape[0], keys.shape[1]), keys)
        torch.index_select(keys, 0, source, out=near)
        return near.view(-1, pattern.table.shape[-1] * pattern.block_size, head_dim)


def gather_forward(call: BlockCall) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the log-sum-exp of the scores `[B, H, L]` where it is wanted or backward needs it.

    Where a query sees nothing, a wanted one is minus infinity.
    """
    note_path("block_sparse.gather")
    walk, query = _Walk(call), call.query
    output = torch.empty_like(query)
    lse: Tensor | None = None
    if walk.is_fused or call.has_lse:
        lse = query.new_empty(query.shape[:3], dtype=wide_dtype(query.dtype))
    for group, keys, values in walk.groups():
        for part, places in walk.parts(group, output, *(() if lse is None else (lse,))):
            for step in walk.steps(part, group, keys, values):
                attend(step.piece, *(place[step.blocks] for place in places))
                if step.is_dead is not None:
                    places[0][step.blocks].masked_fill_(step.is_dead, 0.0)
                    if call.has_lse:
                        places[1][step.blocks].masked_fill_(step.is_dead[..., 0], float("-inf"))
    return output, lse


def gather_backward(
    call: BlockCall,
    grad_output: Tensor,
    output: Tensor | None,
    lse: Tensor | None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    Args:
        call: as in `gather_forward`.
        grad_output: `[B, H, L, D]`, features side by side.
        output: what `gather_forward` returned; not read, and None may be, where no log-sum-exp is needed.
        lse: what it returned beside it; likewise.
        grad_lse: of a wanted log-sum-exp, or None.
    """
    walk = _Walk(call)
    pattern, head_dim = walk.pattern, call.query.shape[-1]
    saved = (output, lse) if walk.is_fused and output is not None and lse is not None else ()
    grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (call.query, call.key, call.value))
    for group, keys, values in walk.groups():
        totals = [_zeros(group, result, keys, pattern) for result in (grad_key, grad_value)]
        leading = [_leading(total, group, head_dim, pattern) for total in totals]
        for part, (place,) in walk.parts(group, grad_query):
            blocks = [part.read(x) for x in (grad_output, *saved)]
            lse_blocks = None if grad_lse is None else part.read(grad_lse)
            for step in walk.steps(part, group, keys, values):
                grad, *forward = (x[step.blocks] for x in blocks)
                if step.is_dead is not None:
                    grad = grad.masked_fill(step.is_dead, 0.0)
                sums = leading if step.source is None else None
                further = None if lse_blocks is None else lse_blocks[step.blocks]
                if further is not None and step.is_dead is not None:
                    further = further.masked_fill(step.is_dead[..., 0], 0.0)
                gradients = attend_backward(grad, step.piece, place[step.blocks], sums, further, *forward)
                if step.source is not None:
                    for total, rows in zip(totals, gradients, strict=True):
                        total.index_add_(0, step.source, rows.view(-1, keys.shape[1]).to(total.dtype))
        for result, total in zip((grad_key, grad_value), totals, strict=True):
            if total.data_ptr() != result[group.batch, group.head].data_ptr():
                group.write(result, 0, total.view(total.shape[0], pattern.block_size, -1))
    return grad_query, grad_key, grad_value


def _zeros(group: Group, result: Tensor, rows: Tensor, pattern: BlockPattern) -> Tensor:
    """Return zeros like the rows of keys, in the wide dtype: in place of the result where that is laid out so."""
    wide = wide_dtype(result.dtype)
    place = group.place(result, 0, pattern.key_len, pattern.block_size)
    if place is None or result.dtype != wide:
        return torch.zeros_like(rows, dtype=wide)
    return place.view(rows.shape).zero_()


def _leading(keys: Tensor, group: Group, head_dim: int, pattern: BlockPattern) -> Tensor:
    """Return the keys that dense rows see, `[sequences, keys, D]`: a view."""
    return keys.view(group.num_sequences, -1, head_dim)[:, : pattern.dense_key_len]
