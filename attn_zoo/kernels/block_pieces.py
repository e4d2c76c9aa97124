"""How a block-sparse computation is cut into small dense pieces, and the mask that a piece needs, if any."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_zoo.kernels.block_chunk import wide_dtype
from attn_zoo.kernels.block_pattern import BlockPattern

__all__ = ["Chunk", "Group", "Pieces"]

# Gathered keys of one piece, per thread: the size of a second-level cache. With a quarter of it forward took 1.5 times
# as long (float32, two threads), as every piece has its fixed cost; with two and four times as much it was no faster.
_CPU_PIECE_BYTES = 1 << 20
_GPU_PIECE_BYTES = 1 << 26


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
class Chunk:
    """Query tokens start .. stop - 1, in blocks of `size`, all blocks seeing equally many keys.

    Args:
        start: first query token.
        stop: end (exclusive) of the query tokens.
        size: tokens in a block.
        rows: listed rows of the pattern that these are, or None for dense rows.
    """

    start: int
    stop: int
    size: int
    rows: slice | None


class Pieces:
    """Cuts a call into groups of sequences and chunks of rows; forward and backward see the same pieces in order.

    Args:
        query: `[B, H, L, D]`; only sizes, dtype and device matter.
        pattern: on the same device.
        padding: bool `[B, S]`, True = padding, or None.
        slopes: ALiBi's `[H]`, or None.
        has_scores: the scores of a piece will exist in memory, so a piece of dense rows must be kept small too.
    """

    def __init__(
        self, query: Tensor, pattern: BlockPattern, padding: Tensor | None, slopes: Tensor | None, *, has_scores: bool
    ) -> None:
        self.pattern, self.padding, self.slopes = pattern, padding, slopes
        self._wide = wide_dtype(query.dtype)
        self._sizes = query.shape[:2]
        size, device = pattern.block_size, query.device
        self._sources: tuple[Group, Tensor] | None = None
        self._is_full = pattern.is_full_row.all(0).tolist()  # of rows, in all heads
        self._within = torch.arange(size, dtype=torch.int32, device=device)
        if padding is not None:
            self._is_key = pad(~padding, (0, pattern.num_key_blocks * size - pattern.key_len), value=False)

        budget = _CPU_PIECE_BYTES * torch.get_num_threads() if device.type == "cpu" else _GPU_PIECE_BYTES
        token_bytes = query.shape[-1] * query.element_size()
        row_bytes = max(1, pattern.table.shape[-1] * size * token_bytes)
        self._dense_end = min(pattern.num_dense_rows * size, pattern.query_len)
        dense_bytes = pattern.dense_key_len * token_bytes if self._dense_end else 0
        # Dense rows of one sequence keep one thread busy in backward, so there are as many sequences as threads.
        least = torch.get_num_threads() if dense_bytes and device.type == "cpu" else 1
        self._num_sequences = max(least, budget // max(row_bytes * pattern.num_rows, dense_bytes, 1))
        self._num_rows = max(1, budget // (row_bytes * self._num_sequences))
        self._dense_step = max(1, self._dense_end)
        if has_scores or slopes is not None:
            self._dense_step = min(self._dense_step, max(1, 4 * budget // (self._num_sequences * pattern.key_len)))

    def groups(self) -> Iterator[Group]:
        """Yield the groups of sequences: several heads, several whole batch entries, or one pair."""
        (batch_size, num_heads), count = self._sizes, self._num_sequences
        by_batch, by_head = max(1, count // num_heads), min(count, num_heads)
        for entry in range(0, batch_size, by_batch):
            entries = slice(entry, min(entry + by_batch, batch_size))
            for head in range(0, num_heads, by_head):
                heads = slice(head, min(head + by_head, num_heads))
                yield Group(entries, heads, (entries.stop - entry, heads.stop - head))

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks of query tokens of one group: dense rows, then listed rows."""
        pattern, step, size = self.pattern, self._num_rows, self.pattern.block_size
        for start in range(0, self._dense_end, self._dense_step):
            stop = min(start + self._dense_step, self._dense_end)
            yield Chunk(start, stop, stop - start, None)
        for row in range(0, pattern.num_rows, step):
            rows = slice(row, min(row + step, pattern.num_rows))
            first = self._dense_end + row * size
            yield Chunk(first, min(first + step * size, pattern.query_len), size, rows)

    def source(self, group: Group, chunk: Chunk) -> Tensor | None:
        """Return the rows of `Group.read_keys` that a chunk gathers, int64 `[sequences * blocks * K]`.

        None stands for the leading keys of each sequence, which dense rows see in place.
        """
        if chunk.rows is None:
            return None
        if self._sources is None or self._sources[0] != group:
            table = self._table(self.pattern.table, group, slice(None))
            first = torch.arange(group.num_sequences, device=table.device) * self.pattern.num_key_blocks
            self._sources = group, (table + first.view(*group.shape, 1, 1)).flatten(0, 1)
        return self._sources[1][:, chunk.rows].flatten()

    @staticmethod
    def _table(table: Tensor, group: Group, rows: slice) -> Tensor:
        return table[:, rows] if table.shape[0] == 1 else table[group.head, rows]

    def mask(self, group: Group, chunk: Chunk) -> tuple[Tensor | None, Tensor | None]:
        """Return the additive mask of a piece and which of its queries see nothing, or None where nothing is hidden.

        Most pieces of a bidirectional pattern need neither. Their shapes are `[sequences * blocks or 1, size or 1,
        keys]` and `[sequences * blocks, size or 1, 1]`.
        """
        pattern, rows = self.pattern, chunk.rows
        is_full = rows is None or all(self._is_full[rows])
        has_distance = pattern.is_causal or self.slopes is not None or pattern.reach is not None
        if is_full and self.padding is None and not has_distance:
            return None, None
        keep: Tensor | None = None  # [batch or 1, heads or 1, blocks or 1, size or 1, keys]
        if rows is None:
            positions = torch.arange(pattern.dense_key_len, dtype=torch.int32, device=self._within.device)[None, None]
        else:
            table = self._table(pattern.table, group, rows).int()
            positions = (table[..., None] * pattern.block_size + self._within).flatten(-2)  # [heads or 1, blocks, keys]
            if not is_full:
                is_entry = self._table(pattern.is_entry, group, rows).repeat_interleave(pattern.block_size, -1)
                keep = (is_entry & (positions < pattern.key_len))[None, :, :, None]
        if self.padding is not None:
            is_key = self._is_key[group.batch][:, positions.long()][:, :, :, None]
            keep = _both(keep, is_key)
        bias: Tensor | None = None
        if has_distance:
            offset, num_blocks = pattern.key_len - pattern.query_len, -(-(chunk.stop - chunk.start) // chunk.size)
            if keep is None and self.slopes is None and rows is not None:
                # Only the last block of each row straddles the diagonal, and a band looks alike from every row that is
                # full, so one row's mask serves all.
                positions, num_blocks = positions[:1, :1], 1
            standing = torch.arange(chunk.start, chunk.start + num_blocks * chunk.size, device=positions.device)
            standing = (standing + offset).int().view(num_blocks, chunk.size, 1)
            distance = standing - positions[:, :, None]  # [heads or 1, blocks, size, keys]
            if pattern.is_causal:
                keep = _both(keep, (distance >= 0)[None])
            if pattern.reach is not None:
                keep = _both(keep, (distance.abs() <= pattern.reach)[None])
            if self.slopes is not None:
                slopes = self.slopes[group.head, None, None, None].to(self._wide)
                bias = -slopes * distance.abs().to(self._wide)
        is_dead: Tensor | None = None
        # Under a band, the filling of a ragged last block may stand beyond the reach of every key.
        if keep is not None and (self.padding is not None or (pattern.reach is not None and not is_full)):
            is_dead = ~keep.any(-1, keepdim=True)
            keep = keep | is_dead  # what such a query gets is zeroed afterwards
            is_dead = self._by_block(is_dead, group)
        if bias is None:
            bias = torch.zeros((), dtype=self._wide, device=positions.device)
        elif bias.dim() == 4:
            bias = bias[None]
        mask = bias if keep is None else torch.where(keep, bias, float("-inf"))
        return self._by_block(mask, group), is_dead

    @staticmethod
    def _by_block(mask: Tensor, group: Group) -> Tensor:
        """Turn `[batch or 1, heads or 1, blocks or 1, ...]` into `[sequences * blocks or 1, ...]`.

        One block stands for all only where one mask does: masks of dense rows have one block anyway.
        """
        if mask.shape[:3] == (1, 1, 1):
            return mask[0, 0]
        return mask.expand(*group.shape, *mask.shape[2:]).flatten(0, 2)


def _both(keep: Tensor | None, other: Tensor) -> Tensor:
    return other if keep is None else keep & other
