"""The record of a block-sparse pattern: which blocks of keys each block of queries sees, in space O(blocks seen).

Rows and columns that are dense stay out of the table, so that it has one fixed, small width and so that its transpose
has too: leading query blocks that see every key (`num_dense_rows`), and leading key blocks that every other row sees
(`num_global`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["BlockPattern", "band_pairs", "make_pattern"]


def band_pairs(length: int, reach: int, *, is_causal: bool) -> int:
    """Return how many pairs of `length` positions are at most `reach` apart; under a causal mask, only to the past.

    >>> band_pairs(4, 1, is_causal=False), band_pairs(4, 1, is_causal=True)
    (10, 7)
    """
    near = min(reach, length - 1)
    past = length * near - near * (near + 1) // 2
    return length + past * (1 if is_causal else 2)


@dataclass(frozen=True, eq=False)
class BlockPattern:
    """Which key blocks each query block sees. Query i stands at key position i + S - L (aligned bottom right).

    Listed row r is query block `num_dense_rows + r`. It sees the key blocks `0 .. num_global - 1` and its entries of
    the table. Under `is_causal` every row, dense or listed, sees only keys at or before its own position, and the last
    entry of a listed row is the block it stands in.

    Args:
        query_len: L, tokens.
        key_len: S, tokens; `S - L` is a multiple of the block size.
        block_size: tokens in a block; the last one may be shorter.
        num_global: leading key blocks that all listed rows see.
        num_dense_rows: leading query blocks that see all keys.
        indices: int32 `[P, R, W]`: key blocks of P heads (1 means the same for all) and R listed rows, ascending among
            the first `counts`, zero beyond; none below `num_global`, none twice.
        counts: int32 `[P, R]`.
        is_causal: hide keys after the query's own position.
        reach: hide keys further than this from the query's own position, in tokens; None hides none. Then `L == S`,
            nothing is global, and a row lists all blocks that hold a key within reach, and no others.
    """

    query_len: int
    key_len: int
    block_size: int
    num_global: int
    num_dense_rows: int
    indices: Tensor
    counts: Tensor
    is_causal: bool = False
    reach: int | None = None

    @property
    def num_query_blocks(self) -> int:
        """Blocks of queries, the ragged last one included."""
        return -(-self.query_len // self.block_size)

    @property
    def num_key_blocks(self) -> int:
        """Blocks of keys, the ragged last one included."""
        return -(-self.key_len // self.block_size)

    @property
    def num_rows(self) -> int:
        """R, listed rows."""
        return self.indices.shape[1]

    @property
    def row_offset(self) -> int:
        """Key block in which the first listed row stands."""
        return self.num_dense_rows + (self.key_len - self.query_len) // self.block_size

    @property
    def dense_key_len(self) -> int:
        """Keys that dense rows can see: under a causal mask only those up to the last dense row."""
        last = self.num_dense_rows * self.block_size + self.key_len - self.query_len
        return min(last, self.key_len) if self.is_causal else self.key_len

    @cached_property
    def table(self) -> Tensor:
        """int64 `[P, R, num_global + W]`: the entries with the global columns before them."""
        columns = torch.arange(self.num_global, device=self.indices.device)
        return torch.cat([columns.expand(*self.counts.shape, -1), self.indices.long()], dim=-1)

    @cached_property
    def is_entry(self) -> Tensor:
        """Which slots of `table` are entries rather than filling, bool `[P, R, num_global + W]`."""
        slots = torch.arange(self.table.shape[-1], device=self.table.device)
        return slots < (self.counts + self.num_global)[..., None]

    @cached_property
    def is_full_row(self) -> Tensor:
        """Rows without filling and without a ragged block, which need no mask: bool `[P, R]`, on the CPU.

        Under a `reach` they need one, the same for all: their blocks stand alike around the row's own.
        """
        is_full = self.is_entry.all(-1)
        if self.reach is not None:
            blocks = -(-self.reach // self.block_size)
            is_full = is_full & (self.counts == (1 if self.is_causal else 2) * blocks + 1)
        if self.key_len % self.block_size:
            is_full = is_full & (self.table != self.num_key_blocks - 1).all(-1)
        return is_full.cpu()

    @cached_property
    def full_rows(self) -> list[bool]:
        """Which of the R listed rows are full in all heads: made once, because making it waits for the device."""
        found: list[bool] = self.is_full_row.all(0).tolist()
        return found

    @cached_property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs, summed over the P heads of the table."""
        if self.reach is not None:
            return self.counts.shape[0] * band_pairs(self.query_len, self.reach, is_causal=self.is_causal)
        size, ragged = self.block_size, self.key_len % self.block_size
        heads = self.counts.shape[0]
        rows = torch.arange(self.num_rows, device=self.counts.device)
        queries = (self.query_len - (self.num_dense_rows + rows) * size).clamp(max=size)  # tokens of each listed row
        keys = (self.counts.long() + self.num_global) * size
        if ragged:
            keys = keys - (self.is_entry & (self.table == self.num_key_blocks - 1)).sum(-1) * (size - ragged)
        pairs = int((queries * keys).sum())
        dense = min(self.num_dense_rows * size, self.query_len)
        if not self.is_causal:
            return pairs + heads * dense * self.key_len
        # Of its own block, a query sees the keys up to itself: half of the square, and the diagonal.
        hidden = int((queries * (queries - 1) // 2).sum()) * heads
        past = self.key_len - self.query_len
        return pairs - hidden + heads * (dense * past + dense * (dense + 1) // 2)

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that are equal exactly for equal patterns, on every machine."""
        head: tuple[int, ...] = (
            self.query_len,
            self.key_len,
            self.block_size,
            self.num_global,
            self.num_dense_rows,
            self.is_causal,
        )
        head += () if self.reach is None else (self.reach,)
        state = hashlib.sha256(repr((*head, tuple(self.indices.shape))).encode())
        for tensor in (self.counts, self.indices):
            state.update(tensor.cpu().numpy().astype("<i4").tobytes())
        return state.hexdigest()[:16]

    def to(self, device: torch.device | str) -> BlockPattern:
        """Return the same pattern with its table on `device`."""
        return replace(self, indices=self.indices.to(device), counts=self.counts.to(device))

    def transpose(self) -> tuple[Tensor, Tensor]:
        """Return the table by key block: listed rows that see it, int32 `[P, key blocks, W']`, and their counts.

        Rows are ascending, zero beyond the counts. Global columns are not in the table, hence have none.
        """
        return transpose_table(self.indices, self.counts, self.num_key_blocks)

    @cached_property
    def transposed(self) -> tuple[Tensor, Tensor]:
        """What `transpose` returns, made once: making it waits for the device."""
        return self.transpose()

    def to_dense(self) -> Tensor:
        """Return bool `[P, L, S]`, True = may be seen. Quadratic: for tests and small examples."""
        heads, rows, _ = self.indices.shape
        blocks = torch.zeros(heads, self.num_query_blocks, self.num_key_blocks, dtype=torch.int32)
        listed = blocks[:, self.num_dense_rows :]
        listed.scatter_add_(2, self.table.cpu(), self.is_entry.int().cpu())
        blocks[:, : self.num_dense_rows] = 1
        assert rows == listed.shape[1]  # every query block is dense or listed
        size = self.block_size
        dense = blocks.bool().repeat_interleave(size, 1).repeat_interleave(size, 2)
        dense = dense[:, : self.query_len, : self.key_len]
        if self.reach is not None:
            dense = dense.triu(-self.reach).tril(self.reach)
        return dense.tril(self.key_len - self.query_len) if self.is_causal else dense


def transpose_table(indices: Tensor, counts: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Turn lists of columns by row into lists of rows by column, by sorting: O(entries) space.

    Args:
        indices: int32 `[P, R, W]`, of which the first `counts` of each row are entries.
        counts: int32 `[P, R]`.
        num_columns: number of columns C.

    Returns:
        int32 `[P, C, W']`, ascending, zero beyond the counts; and the counts, int32 `[P, C]`.
    """
    heads, _, width = indices.shape
    is_entry = torch.arange(width, device=indices.device) < counts[..., None]
    head, row, slot = is_entry.nonzero(as_tuple=True)  # in order of head, then row
    column = head * num_columns + indices[head, row, slot].long()
    column, order = column.sort(stable=True)
    column_counts = torch.bincount(column, minlength=heads * num_columns)
    starts = column_counts.cumsum(0) - column_counts
    place = torch.arange(len(column), device=column.device) - starts[column]
    widest = int(column_counts.max()) if len(column) else 0
    result = torch.zeros(heads * num_columns, widest, dtype=torch.int32, device=indices.device)
    result[column, place] = row[order].int()
    return result.view(heads, num_columns, widest), column_counts.view(heads, num_columns).int()


_WIDEST_NETWORK = 16  # columns; the network takes their square, sorting by row does not


def make_pattern(
    blocks: Tensor,
    is_entry: Tensor,
    *,
    query_len: int,
    key_len: int,
    block_size: int,
    num_global: int,
    num_dense_rows: int,
    is_causal: bool,
    reach: int | None = None,
) -> BlockPattern:
    """Sort lists of key blocks into a `BlockPattern`, as narrow as its longest list, on the device of the lists.

    Args:
        blocks: key blocks `[P, R, width]` in any order, none twice in a row; integers.
        is_entry: bool `[P, R, width]`, or `[R, width]` if alike for all P, which of them count.
        query_len: L.
        key_len: S.
        block_size: tokens in a block.
        num_global: leading key blocks that all listed rows see; no entry may be below.
        num_dense_rows: leading query blocks that see all keys.
        is_causal: hide later keys.
        reach: hide keys further away than this, in tokens.

    Raises:
        ValueError: an entry is out of range or occurs twice, or a causal row does not end in its own block.
    """
    num_key_blocks = -(-key_len // block_size)
    if (key_len - query_len) % block_size:
        raise ValueError(f"key_len - query_len: expected a multiple of {block_size}; got {key_len - query_len}")
    counts = is_entry.sum(-1, dtype=torch.int32)  # [R] or [P, R]
    width = int(counts.max()) if counts.numel() else 0
    columns = _sorted_columns(blocks, is_entry, num_key_blocks)
    num_inside = torch.zeros_like(counts).expand(blocks.shape[:2]).clone()
    rows = torch.arange(blocks.shape[1], device=blocks.device) + num_dense_rows + (key_len - query_len) // block_size
    is_low, is_double, ends_elsewhere = (torch.zeros_like(num_inside, dtype=torch.bool) for _ in range(3))
    for place, column in enumerate(columns):
        is_kept = counts > place
        num_inside += column < num_key_blocks
        is_low |= column < num_global
        if place:
            is_double |= (column == columns[place - 1]) & is_kept
        if is_causal:
            ends_elsewhere |= (column != rows) & (counts == place + 1)
    # What does not count became num_key_blocks, so as many lie inside as count.
    if (is_low | (num_inside != counts)).any():
        raise ValueError(f"blocks: expected key blocks {num_global} .. {num_key_blocks - 1}")
    if is_double.any():
        raise ValueError("blocks: expected none twice in a row")
    if is_causal and (ends_elsewhere | (counts == 0)).any():
        raise ValueError("blocks: under a causal mask each row's last entry must be the block it stands in")
    kept = [column * (column < num_key_blocks) for column in columns[:width]]
    return BlockPattern(
        query_len=query_len,
        key_len=key_len,
        block_size=block_size,
        num_global=num_global,
        num_dense_rows=num_dense_rows,
        indices=torch.stack(kept, dim=-1) if kept else blocks.new_zeros((*blocks.shape[:2], 0), dtype=torch.int32),
        counts=counts.expand(blocks.shape[:2]).contiguous(),
        is_causal=is_causal,
        reach=reach,
    )


def _sorted_columns(blocks: Tensor, is_entry: Tensor, beyond: int) -> list[Tensor]:
    """Return the columns of `blocks` `[P, R, width]`, int32 `[P, R]` each, after every row was sorted.

    Few columns are sorted whole against whole by a network (odd-even transposition), far faster than row by row.

    Args:
        blocks: lists by row.
        is_entry: which of them count.
        beyond: stands for those that do not, and so comes last.
    """
    columns = [torch.where(is_entry[..., at], blocks[..., at].int(), beyond) for at in range(blocks.shape[-1])]
    if len(columns) > _WIDEST_NETWORK:
        return list(torch.stack(columns, dim=-1).sort(dim=-1).values.unbind(-1))
    for turn in range(len(columns)):
        for left in range(turn % 2, len(columns) - 1, 2):
            low, high = columns[left], columns[left + 1]
            columns[left], columns[left + 1] = torch.minimum(low, high), torch.maximum(low, high)
    return columns
