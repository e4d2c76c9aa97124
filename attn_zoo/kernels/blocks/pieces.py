"""How a block-sparse computation is cut into small dense pieces, and the mask that a piece needs, if any."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_zoo.kernels.blocks.call import BlockCall, wide_dtype
from attn_zoo.kernels.blocks.pattern import BlockPattern
from attn_zoo.kernels.held import held

# Gathered keys of one piece, per thread: four blocks of queries of the usual pattern. Smaller pieces have their fixed
# cost too often, and larger ones leave a small cache: on an EPYC with 512 KiB a core, forward took 1.1 times as long
# with four times as much; on a Xeon with 2 MiB the bare operations took the same.
_CPU_PIECE_BYTES = 1 << 19
_GPU_PIECE_BYTES = 1 << 26
_MAX_PIECES = 16  # kept, with their masks
_MAX_MASKS = 4  # of each: rows at the ends alone are partial in the usual patterns
_MAX_MASK_BYTES = 1 << 22
_MIN_DENSE_ROWS = 64  # with 32, products were a quarter slower


@dataclass(frozen=True)
class Group:
    """Sequences (pairs of batch entry and head) that are computed together: `x[batch, head]` is a view.

    Args:
        batch: slice of the batch.
        head: slice of the heads.
        shape: how many of each.
    """

    batch: slice
    head: slice
    shape: tuple[int, int]

    @property
    def num_sequences(self) -> int:
        """Pairs of batch entry and head."""
        return self.shape[0] * self.shape[1]

    def cut(self, count: int) -> Iterator[Group]:
        """Yield groups of at most `count` sequences, in order: some whole batch entries, or some heads of one."""
        by_batch, by_head = max(1, count // self.shape[1]), min(count, self.shape[1])
        for entry in range(self.batch.start, self.batch.stop, by_batch):
            batch = slice(entry, min(entry + by_batch, self.batch.stop))
            for first in range(self.head.start, self.head.stop, by_head):
                head = slice(first, min(first + by_head, self.head.stop))
                yield Group(batch, head, (batch.stop - batch.start, head.stop - head.start))

    def place(self, tensor: Tensor, start: int, stop: int, size: int) -> Tensor | None:
        """Return tokens start .. stop - 1 as blocks `[sequences * blocks, size, ...]` side by side in place, if so."""
        part = tensor[self.batch, self.head, start:stop]
        if (stop - start) % size or not part.is_contiguous():
            return None
        return part.view(-1, size, *part.shape[3:])

    def read(self, tensor: Tensor, start: int, stop: int, size: int) -> Tensor:
        """Return tokens start .. stop - 1 as blocks `[sequences * blocks, size, ...]`, a ragged end filled with 0."""
        part = tensor[self.batch, self.head, start:stop].flatten(0, 1)
        missing = -part.shape[1] % size
        if missing:
            part = pad(part, (0, 0) * (part.dim() - 2) + (0, missing))
        return part.reshape(-1, size, *part.shape[2:])

    def write(self, tensor: Tensor, start: int, blocks: Tensor) -> None:
        """Write `[sequences * blocks, size, ...]` to the tokens from `start` on; what is beyond the end is dropped."""
        tokens = blocks.reshape(*self.shape, -1, *blocks.shape[2:])
        target = tensor[self.batch, self.head, start : start + tokens.shape[2]]
        target.copy_(tokens[:, :, : target.shape[2]])

    def read_keys(self, tensor: Tensor, num_blocks: int, size: int, padding: Tensor | None) -> Tensor:
        """Return keys or values as rows that can be gathered, `[sequences * num_blocks, size * D]`.

        Padding is zeroed, because a NaN or infinity there would survive a weight of zero.
        """
        part = tensor[self.batch, self.head]
        if padding is not None:
            part = part.masked_fill(padding[self.batch, None, :, None], 0.0)
        part = part.flatten(0, 1)
        missing = num_blocks * size - part.shape[1]
        part = pad(part, (0, 0, 0, missing)) if missing else part
        return part.reshape(self.num_sequences * num_blocks, -1)


@dataclass(frozen=True)
class Part:
    """Query tokens start .. stop - 1 of some sequences, in blocks of `size`, and the pieces they are computed in.

    Args:
        group: the sequences.
        start: first query token.
        stop: end (exclusive) of the query tokens.
        size: tokens in a block; of dense rows, all of them.
        pieces: listed rows of the pattern, of one piece after the other; None stands for dense rows. Several sequences
            have one piece only.
    """

    group: Group
    start: int
    stop: int
    size: int
    pieces: tuple[slice | None, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of queries, a ragged last one of each sequence included."""
        return self.group.num_sequences * -(-(self.stop - self.start) // self.size)

    def blocks(self, rows: slice | None) -> slice:
        """Return where the blocks of a piece are among those of the part."""
        count = self.group.num_sequences
        return slice(0, count) if rows is None else slice(rows.start * count, rows.stop * count)

    def read(self, tensor: Tensor) -> Tensor:
        """Return the tokens as blocks `[sequences * blocks, size, ...]`, a ragged end filled with 0; maybe a view."""
        return self.group.read(tensor, self.start, self.stop, self.size)

    def place(self, tensor: Tensor) -> Tensor | None:
        """Return the tokens as contiguous blocks in place, or None where they do not lie so."""
        return self.group.place(tensor, self.start, self.stop, self.size)

    def write(self, tensor: Tensor, blocks: Tensor) -> None:
        """Write blocks to the tokens."""
        self.group.write(tensor, self.start, blocks)


class _Mask(NamedTuple):
    """A mask for all heads, which queries see nothing, and the blocks of a piece that it is for."""

    bias: Tensor
    is_dead: Tensor | None
    blocks: slice


def _is_alike(call: BlockCall, pattern: BlockPattern) -> bool:
    """Whether masks are the same for all batch entries and calls of these sizes."""
    has_one_table = pattern.indices.shape[0] == 1 and not pattern.is_dynamic
    return has_one_table and call.padding is None and call.slopes is None and not pattern.has_empty_rows


def pieces_of(call: BlockCall, pattern: BlockPattern, *, has_scores: bool) -> Pieces:
    """Return how a call is cut; kept, with its masks, where it depends on sizes only. For arguments see `Pieces`."""
    query = call.query
    budget = _CPU_PIECE_BYTES * call.num_threads if query.device.type == "cpu" else _GPU_PIECE_BYTES
    if not _is_alike(call, pattern):
        return Pieces(call, pattern, has_scores=has_scores, budget=budget)
    key = (pattern, query.shape, query.dtype, query.device, has_scores, budget)
    pieces = _kept_pieces.get(key)
    if pieces is None:
        if len(_kept_pieces) >= _MAX_PIECES:
            _kept_pieces.clear()
        pieces = _kept_pieces[key] = Pieces(call, pattern, has_scores=has_scores, budget=budget)
    return held(pieces)


_kept_pieces: dict[Hashable, Pieces] = {}


class Pieces:
    """Cuts a call into groups of sequences, parts and pieces; forward and backward see the same ones in order.

    Args:
        call: on one device.
        pattern: of the call, with a table for each head or one for all.
        has_scores: the scores of a piece will exist in memory, so a piece of dense rows must be kept small too.
        budget: bytes that a piece may gather.
    """

    def __init__(self, call: BlockCall, pattern: BlockPattern, *, has_scores: bool, budget: int) -> None:
        query = call.query
        self.pattern, self.padding, self.slopes = pattern, call.padding, call.slopes
        self._wide, self._has_scores = wide_dtype(query.dtype), has_scores
        batch_size, num_heads = query.shape[:2]
        self._whole = Group(slice(0, batch_size), slice(0, num_heads), (batch_size, num_heads))
        size, device = pattern.block_size, query.device
        self._is_full = pattern.full_rows
        self._within = torch.arange(size, dtype=torch.int32, device=device)
        self._has_distance = pattern.is_causal or self.slopes is not None or pattern.rule is not None
        self._has_own_masks = not _is_alike(call, pattern)
        self._masks: dict[Hashable, _Mask] = {}  # of all heads: the same for every sequence
        if self.padding is not None:
            missing = pattern.num_key_blocks * size - pattern.key_len
            self._is_key = pad(~self.padding, (0, missing), value=False)

        token_bytes = query.shape[-1] * query.element_size()
        row_bytes = max(1, pattern.table.shape[-1] * size * token_bytes)
        self._dense_end = min(pattern.num_dense_rows * size, pattern.query_len)
        dense_bytes = pattern.dense_key_len * token_bytes if self._dense_end else 0
        # The fused kernel keeps one thread busy with a sequence in backward, so there are as many of them as threads.
        least = 1 if has_scores or not dense_bytes else call.num_threads
        listed_bytes = max(row_bytes * pattern.num_rows, 1)
        self._num_sequences = max(least, budget // max(listed_bytes, dense_bytes))
        # Listed rows of one sequence are enough for all threads, and blocks side by side need no copy.
        self._num_together = max(1, min(self._num_sequences, budget // listed_bytes))
        self._num_rows = max(1, budget // (row_bytes * self._num_together))
        self._dense_step = max(1, self._dense_end)
        if has_scores or self.slopes is not None:
            score_bytes = self._num_sequences * pattern.key_len * query.element_size()
            self._dense_step = min(self._dense_step, max(_MIN_DENSE_ROWS, budget // score_bytes))

    def groups(self) -> Iterator[Group]:
        """Yield the groups of sequences whose keys are read together."""
        return self._whole.cut(self._num_sequences)

    def parts(self, group: Group) -> Iterator[Part]:
        """Yield dense rows of all sequences of the group, then listed rows of some after others."""
        pattern, step, size = self.pattern, self._num_rows, self.pattern.block_size
        for start in range(0, self._dense_end, self._dense_step):
            stop = min(start + self._dense_step, self._dense_end)
            yield Part(group, start, stop, stop - start, (None,))
        rows = tuple(slice(row, min(row + step, pattern.num_rows)) for row in range(0, pattern.num_rows, step))
        if rows:
            for some in group.cut(self._num_together):
                yield Part(some, self._dense_end, pattern.query_len, size, rows)

    def source(self, group: Group, part: Part) -> Tensor | None:
        """Return the rows of `Group.read_keys` that each block of a part gathers, int64 `[sequences * blocks, K]`.

        None stands for the leading keys of each sequence, which dense rows see in place.
        """
        if part.pieces[0] is None:
            return None
        some = part.group
        table = self._table(self.pattern.table, some, slice(None))
        if group.num_sequences > 1:
            before = (some.batch.start - group.batch.start) * group.shape[1] + some.head.start - group.head.start
            sequence = torch.arange(before, before + some.num_sequences, device=self._within.device)
            table = table + sequence.view(*some.shape, 1, 1) * self.pattern.num_key_blocks
        return table.flatten(0, 2)

    @staticmethod
    def _table(table: Tensor, group: Group, rows: slice) -> Tensor:
        """Return some rows of a table for a group, `[batch or 1, heads or 1, rows, slots]`."""
        table = table if table.shape[0] == 1 else table[group.batch]
        return table[:, :, rows] if table.shape[1] == 1 else table[:, group.head, rows]

    def mask(self, part: Part, rows: slice | None) -> tuple[Tensor | None, slice, Tensor | None]:
        """Return the additive mask of a piece, the blocks that it is for, and which queries of the piece see nothing.

        Most pieces of a bidirectional pattern need no mask, and others for the rows at the ends only. Shapes are
        `[blocks or 1, size or 1, keys]` and `[sequences * blocks, size or 1, 1]`; None where nothing is hidden.
        """
        group = part.group
        is_full = rows is None or all(self._is_full[rows])
        if is_full and not self._has_distance and self.padding is None:
            return None, slice(None), None
        if self._has_own_masks:
            bias, is_dead = self._make_mask(part, rows, group)
            return self._by_block(bias, group), slice(None), None if is_dead is None else self._by_block(is_dead, group)
        # A mask of rows that are full serves all of them; dense rows are named by where they start.
        at = (part.start, rows is None, None if is_full or rows is None else rows.start)
        mask = self._masks.get(at)
        if mask is None:
            mask = self._common_mask(part, rows)
            if mask.bias.numel() * mask.bias.element_size() <= _MAX_MASK_BYTES:
                if len(self._masks) >= _MAX_MASKS:
                    self._masks.clear()
                self._masks[at] = mask
        held(mask)
        is_dead = None if mask.is_dead is None else self._by_block(mask.is_dead, group)
        return self._by_block(mask.bias, group), mask.blocks, is_dead

    def _common_mask(self, part: Part, rows: slice | None) -> _Mask:
        """Return the mask of a piece for all heads; where positions do not matter, only for rows that need one."""
        if rows is None or self._has_distance or not self._has_scores or self._num_together > 1:
            return _Mask(*self._make_mask(part, rows, self._whole), slice(None))
        partial = [row for row in range(rows.start, rows.stop) if not self._is_full[row]]
        masked = slice(partial[0], partial[-1] + 1)
        blocks = slice(masked.start - rows.start, masked.stop - rows.start)
        return _Mask(*self._make_mask(part, masked, self._whole), blocks)

    def _make_mask(self, part: Part, rows: slice | None, group: Group) -> tuple[Tensor, Tensor | None]:
        """Return the additive mask of some rows, and which queries see nothing.

        Both are `[batch or 1, heads or 1, blocks or 1, size or 1, keys or 1]`.
        """
        pattern, size = self.pattern, part.size
        is_full = rows is None or all(self._is_full[rows])
        keep: Tensor | None = None  # [batch or 1, heads or 1, blocks or 1, size or 1, keys]
        if rows is None:
            positions = torch.arange(pattern.dense_key_len, dtype=torch.int32, device=self._within.device)
            positions = positions[None, None, None]
        else:
            table = self._table(pattern.table, group, rows).int()
            positions = (table[..., None] * pattern.block_size + self._within).flatten(-2)
            if not is_full:
                is_entry = self._table(pattern.is_entry, group, rows).repeat_interleave(pattern.block_size, -1)
                keep = (is_entry & (positions < pattern.key_len))[:, :, :, None]
        # From here on positions are [batch or 1, heads or 1, blocks or 1, keys].
        if self.padding is not None:
            entry = torch.arange(group.batch.start, group.batch.stop, device=positions.device).view(-1, 1, 1, 1)
            keep = _both(keep, self._is_key[entry, positions.long()][:, :, :, None])
        bias: Tensor | None = None
        if self._has_distance:
            start, num_blocks = part.start, 1
            if rows is not None:
                start, num_blocks = part.start + rows.start * size, rows.stop - rows.start
            if keep is None and self.slopes is None and rows is not None:
                # Only the last block of each row straddles the diagonal, and under a rule all full rows look alike, so
                # one row's mask serves all.
                positions, num_blocks = positions[:1, :1, :1], 1
            start += pattern.key_len - pattern.query_len
            standing = torch.arange(start, start + num_blocks * size, dtype=torch.int32, device=positions.device)
            standing, positions = standing.view(num_blocks, size, 1), positions[:, :, :, None]
            if pattern.is_causal:
                keep = _both(keep, standing >= positions)
            if pattern.rule is not None:
                keep = _both(keep, pattern.rule.is_visible(standing, positions))
            if self.slopes is not None:
                slopes = self.slopes[group.head, None, None, None].to(self._wide)
                bias = -slopes * (standing - positions).abs().to(self._wide)
        is_dead: Tensor | None = None
        # Under a rule, the filling of a ragged last block may see none of its keys.
        may_be_dead = self.padding is not None or (not is_full and (pattern.rule is not None or pattern.has_empty_rows))
        if keep is not None and may_be_dead:
            is_dead = ~keep.any(-1, keepdim=True)
            keep = keep | is_dead  # what such a query gets is zeroed afterwards
        if bias is None:
            bias = torch.zeros((), dtype=self._wide, device=positions.device)
        return (bias if keep is None else torch.where(keep, bias, float("-inf"))), is_dead

    @staticmethod
    def _by_block(mask: Tensor, group: Group) -> Tensor:
        """Turn `[batch or 1, heads or 1, blocks or 1, ...]` into `[sequences * blocks or 1, ...]`.

        One block stands for all only where one mask does: masks of dense rows have one block anyway.
        """
        if mask.shape[:3] == (1, 1, 1):
            return mask[0, 0]
        if mask.shape[1] > group.shape[1]:  # of all heads
            mask = mask[:, group.head]
        return mask.expand(*group.shape, *mask.shape[2:]).flatten(0, 2)


def _both(keep: Tensor | None, other: Tensor) -> Tensor:
    return other if keep is None else keep & other
