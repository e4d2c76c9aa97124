"""The record of a block-sparse pattern: which blocks of keys each block of queries sees, in space O(blocks seen).

Rows and columns that are dense stay out of the table, so that it has one small width: leading query blocks that see
every key (`num_dense_rows`), and leading key blocks that every other row sees (`num_global`). A table may belong to a
layout and be kept, or be made of the data in every call (`is_dynamic`): then nothing on the way reads it on the host.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from attn_zoo.kernels.cached_launch import kind_of, remembered

_sizes: dict[Hashable, Hashable] = {}


@dataclass(frozen=True, slots=True)
class TokenRule:
    """Which tokens see each other inside the blocks that a pattern lists.

    A query at position i sees the key at position j if one of these holds:

    * |i - j| <= reach, and i - j is a multiple of `dilation`;
    * `stride` is not 0, and i - j is a multiple of it;
    * i or j is below `num_global_tokens`.

    Args:
        reach: tokens on either side.
        dilation: of the window; 1 leaves none out.
        stride: period of the tokens seen at any distance; 0 for none.
        num_global_tokens: leading tokens that see and are seen by all.
    """

    reach: int
    dilation: int = 1
    stride: int = 0
    num_global_tokens: int = 0

    def is_visible(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        """Return where a query sees a key, bool; both positions broadcast."""
        distance = query_at - key_at
        visible = distance.abs() <= self.reach
        if self.dilation > 1:
            visible = visible & (distance % self.dilation == 0)
        if self.stride:
            visible = visible | (distance % self.stride == 0)
        if self.num_global_tokens:
            visible = visible | (query_at < self.num_global_tokens) | (key_at < self.num_global_tokens)
        return visible

    def offsets(self, num_blocks: int, block_size: int, *, is_causal: bool) -> list[int]:
        """Return how many blocks before a query's own the blocks with visible keys stand, without global tokens."""
        offset = np.arange(0 if is_causal else 1 - num_blocks, num_blocks)
        low, high = offset * block_size - (block_size - 1), offset * block_size + (block_size - 1)  # distances
        near, far = np.maximum(low, -self.reach), np.minimum(high, self.reach)
        is_met = (near <= far) & (far // self.dilation > (near - 1) // self.dilation)
        if self.stride:
            is_met |= high // self.stride > (low - 1) // self.stride
        return [int(value) for value in offset[is_met]]

    def num_pairs(self, length: int, *, is_causal: bool) -> int:
        """Return how many pairs of `length` positions see each other.

        >>> TokenRule(1).num_pairs(4, is_causal=False), TokenRule(1).num_pairs(4, is_causal=True)
        (10, 7)
        """
        num_global = min(self.num_global_tokens, length)
        others = length - num_global
        distance = np.arange(1, max(others, 1))
        is_seen = (distance <= self.reach) & (distance % self.dilation == 0)
        if self.stride:
            is_seen |= distance % self.stride == 0
        past = int((others - distance[is_seen]).sum())
        if is_causal:  # a global query sees its past, and every other query the global keys
            return others + past + num_global * (num_global + 1) // 2 + num_global * others
        return others + 2 * past + num_global * (length + others)


@dataclass(frozen=True, eq=False)
class BlockPattern:
    """Which key blocks each query block sees. Query i stands at key position i + S - L (aligned bottom right).

    Listed row r is query block `num_dense_rows + r`. It sees the key blocks `0 .. num_global - 1` and its entries of
    the table; with none of either it sees nothing, and its output is zero. Under `is_causal` every row, dense or
    listed, sees only keys at or before its own position.

    Args:
        query_len: L, tokens.
        key_len: S, tokens; where positions matter (`is_causal`, `rule`), `S - L` is a multiple of the block size.
        block_size: C, tokens in a block; the last one may be shorter.
        num_global: leading key blocks that all listed rows see.
        num_dense_rows: leading query blocks that see all keys.
        indices: int32 `[B or 1, P, R, W]`: key blocks of R listed rows, for P heads: 1, or a divisor of H, each table
            then serving as many heads side by side. Ascending among the first `counts`, zero beyond; none below
            `num_global`, none twice, and under `is_causal` none beyond the row's own block.
        counts: int32 `[B or 1, P, R]`.
        is_causal: hide keys after the query's own position.
        rule: hides tokens inside the blocks. Then `L == S`, the table has the blocks that hold a visible key and no
            others, and dense rows and global columns are those with global tokens.
        is_dynamic: the table is made of the data. Nothing reads it on the host, and nothing made of it is kept.
    """

    query_len: int
    key_len: int
    block_size: int
    num_global: int
    num_dense_rows: int
    indices: Tensor
    counts: Tensor
    is_causal: bool = False
    rule: TokenRule | None = None
    is_dynamic: bool = False

    @cached_property
    def sizes(self) -> Hashable:
        """Stands for all that a launch can depend on: every field but the entries of the table, whose shape counts.

        Patterns alike in these have the same one, an object, which is told from others faster than what it stands for.
        """
        numbers = self.query_len, self.key_len, self.block_size, self.num_global, self.num_dense_rows
        return remembered(_sizes, (*numbers, self.is_causal, self.rule, *kind_of(self.indices, self.counts)), object)

    @property
    def num_query_blocks(self) -> int:
        """Blocks of queries, the ragged last one included."""
        return -(-self.query_len // self.block_size)

    @property
    def num_key_blocks(self) -> int:
        """Blocks of keys, the ragged last one included."""
        return -(-self.key_len // self.block_size)

    @property
    def num_heads(self) -> int:
        """P, heads with a table of their own."""
        return self.indices.shape[1]

    @property
    def num_rows(self) -> int:
        """R, listed rows."""
        return self.indices.shape[2]

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
        """int64 `[B or 1, P, R, num_global + W]`, 1 wide at least: the entries, the global columns before them."""
        if self.num_global + self.indices.shape[-1] == 0:
            return torch.zeros_like(self.counts, dtype=torch.long)[..., None]
        columns = torch.arange(self.num_global, device=self.indices.device)
        return torch.cat([columns.expand(*self.counts.shape, -1), self.indices.long()], dim=-1)

    @cached_property
    def is_entry(self) -> Tensor:
        """Which slots of `table` are entries rather than filling, bool `[B or 1, P, R, num_global + W]`."""
        slots = torch.arange(self.table.shape[-1], device=self.table.device)
        return slots < (self.counts + self.num_global)[..., None]

    @cached_property
    def is_full_row(self) -> Tensor:
        """Rows without filling and without a ragged block, which need no mask: bool `[B or 1, P, R]`, on the CPU.

        Under a `rule` they need one, the same for all: their blocks stand alike around the row's own.
        """
        is_full = self.is_entry.all(-1)
        if self.rule is not None:
            offsets = self.rule.offsets(self.num_key_blocks, self.block_size, is_causal=self.is_causal)
            is_full = is_full & (self.rule.num_global_tokens == 0 and self.indices.shape[-1] == len(offsets))
        if self.key_len % self.block_size:
            is_full = is_full & (self.table != self.num_key_blocks - 1).all(-1)
        return is_full.cpu()

    @cached_property
    def full_rows(self) -> list[bool]:
        """Which of the R listed rows are full in all tables; none of a dynamic pattern, which would have to be read."""
        if self.is_dynamic:
            return [False] * self.num_rows
        full: list[bool] = self.is_full_row.flatten(0, 1).all(0).tolist()
        return full

    @cached_property
    def has_empty_rows(self) -> bool:
        """Whether a row may see nothing; of a dynamic pattern without global columns it always may."""
        return self.num_global == 0 and (self.is_dynamic or bool((self.counts == 0).any()))

    @cached_property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs, summed over the tables."""
        num_tables = self.counts.shape[0] * self.num_heads
        if self.rule is not None:
            return num_tables * self.rule.num_pairs(self.query_len, is_causal=self.is_causal)
        size, ragged = self.block_size, self.key_len % self.block_size
        rows = torch.arange(self.num_rows, device=self.counts.device)
        queries = (self.query_len - (self.num_dense_rows + rows) * size).clamp(max=size)  # tokens of each listed row
        keys = (self.counts.long() + self.num_global) * size
        if ragged:
            keys = keys - (self.is_entry & (self.table == self.num_key_blocks - 1)).sum(-1) * (size - ragged)
        pairs = int((queries * keys).sum())
        dense = min(self.num_dense_rows * size, self.query_len)
        if not self.is_causal:
            return pairs + num_tables * dense * self.key_len
        # Of its own block, a query sees the keys up to itself: half of the square, and the diagonal.
        sees_own = (self.is_entry & (self.table == (rows + self.row_offset)[:, None])).any(-1)
        hidden = int((sees_own * (queries * (queries - 1) // 2)).sum())
        past = self.key_len - self.query_len
        return pairs - hidden + num_tables * (dense * past + dense * (dense + 1) // 2)

    @cached_property
    def shows_all(self) -> bool:
        """Whether L = S and every query sees every key, or every one up to its own; False of a dynamic pattern."""
        is_narrow = self.num_global + self.indices.shape[-1] < self.num_key_blocks and self.num_rows
        if self.is_dynamic or is_narrow or self.query_len != self.key_len:
            return False
        all_pairs = self.query_len * (self.query_len + 1) // 2 if self.is_causal else self.query_len**2
        return self.num_pairs == self.counts.shape[0] * self.num_heads * all_pairs

    def to(self, device: torch.device | str) -> BlockPattern:
        """Return the same pattern with its table on `device`."""
        return replace(self, indices=self.indices.to(device), counts=self.counts.to(device))

    def per_head(self, num_heads: int) -> BlockPattern:
        """Return the same pattern with one table for all heads, or one for each of `num_heads`."""
        if self.num_heads in (1, num_heads):
            return self
        group = num_heads // self.num_heads
        return replace(
            self,
            indices=self.indices.repeat_interleave(group, 1),
            counts=self.counts.repeat_interleave(group, 1),
        )

    @cached_property
    def transposed(self) -> tuple[Tensor, Tensor]:
        """The table by key block, without the global columns: rows and starts, as of `transpose_table`."""
        return transpose_table(self.indices, self.counts, self.num_key_blocks)

    def to_dense(self) -> Tensor:
        """Return bool `[B or 1, P, L, S]`, True = may be seen. Quadratic: for tests and references."""
        device = self.indices.device
        shape = (*self.counts.shape[:2], self.num_query_blocks, self.num_key_blocks)
        blocks = torch.zeros(shape, dtype=torch.int32, device=device)
        blocks[:, :, self.num_dense_rows :].scatter_add_(3, self.table, self.is_entry.int())
        blocks[:, :, : self.num_dense_rows] = 1
        size = self.block_size
        dense = blocks.bool().repeat_interleave(size, 2).repeat_interleave(size, 3)
        dense = dense[:, :, : self.query_len, : self.key_len]
        if self.rule is not None:
            at = torch.arange(self.key_len, device=device)
            dense = dense & self.rule.is_visible(at[:, None], at)
        return dense.tril(self.key_len - self.query_len) if self.is_causal else dense


def transpose_table(indices: Tensor, counts: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Turn lists of columns by row into lists of rows by column: O(entries) space, and nothing waits for the device.

    Args:
        indices: int32 `[..., R, W]`, of which the first `counts` of each row are entries.
        counts: int32 `[..., R]`.
        num_columns: number of columns N.

    Returns:
        rows: int32 `[..., R * W]`, the lists one after the other, each ascending; zero beyond the last.
        starts: int32 `[..., N + 1]`, where the list of each column starts and the last one ends.
    """
    width = indices.shape[-1]
    is_entry = torch.arange(width, device=indices.device) < counts[..., None]
    column, order = torch.where(is_entry, indices, num_columns).flatten(-2).sort(dim=-1, stable=True)
    bounds = torch.arange(num_columns + 1, dtype=torch.int32, device=indices.device)
    starts = torch.searchsorted(column, bounds.expand(*column.shape[:-1], -1).contiguous(), out_int32=True)
    rows = torch.where(column < num_columns, order // max(width, 1), 0).int()
    return rows, starts


_WIDEST_NETWORK = 16  # columns; the network takes their square, sorting by row does not


def make_pattern(
    blocks: Tensor,
    is_entry: Tensor,
    *,
    query_len: int,
    key_len: int,
    block_size: int,
    num_global: int = 0,
    num_dense_rows: int = 0,
    is_causal: bool = False,
    rule: TokenRule | None = None,
    is_dynamic: bool = False,
    is_sorted: bool = False,
) -> BlockPattern:
    """Sort lists of key blocks into a `BlockPattern`, on the device of the lists.

    Args:
        blocks: key blocks `[P, R, width]` or `[B, P, R, width]` in any order, none twice in a row; integers.
        is_entry: bool, which of them count; broadcasts to `blocks`.
        query_len: L.
        key_len: S.
        block_size: tokens in a block.
        num_global: leading key blocks that all listed rows see; no entry may be below.
        num_dense_rows: leading query blocks that see all keys.
        is_causal: hide later keys.
        rule: hides tokens inside the blocks; see `BlockPattern`.
        is_dynamic: the lists are made of the data: they are not checked, which would wait for the device, and the
            table is as wide as they are. Else it is as narrow as its longest list.
        is_sorted: the lists are ascending, what counts of each comes first, and nothing has to be sorted.

    Raises:
        ValueError: `S - L` is no multiple of the block size, but should be. If not dynamic: an entry is out of range or
            occurs twice, or a causal row does not end in its own block.
    """
    if (is_causal or rule is not None) and (key_len - query_len) % block_size:
        raise ValueError(f"key_len - query_len: expected a multiple of {block_size}; got {key_len - query_len}")
    num_key_blocks = -(-key_len // block_size)
    lists = blocks if blocks.dim() == 4 else blocks[None]
    counts = is_entry.sum(-1, dtype=torch.int32)
    if is_dynamic and is_sorted:
        indices = (lists * is_entry).int().contiguous()
    else:
        columns = _sorted_columns(lists, is_entry, num_key_blocks)
        if not is_dynamic:
            first_row = num_dense_rows + (key_len - query_len) // block_size
            _check(columns, counts, range(num_global, num_key_blocks), first_row if is_causal else None)
            columns = columns[: int(counts.max()) if counts.numel() else 0]
        kept = [column * (column < num_key_blocks) for column in columns]
        indices = torch.stack(kept, -1) if kept else lists.new_zeros((*lists.shape[:3], 0), dtype=torch.int32)
    return BlockPattern(
        query_len=query_len,
        key_len=key_len,
        block_size=block_size,
        num_global=num_global,
        num_dense_rows=num_dense_rows,
        indices=indices,
        counts=counts.expand(lists.shape[:3]).contiguous(),
        is_causal=is_causal,
        rule=rule,
        is_dynamic=is_dynamic,
    )


def _check(columns: list[Tensor], counts: Tensor, allowed: range, first_row: int | None) -> None:
    """Raise if a list holds what it must not; `first_row` is the block of the first causal row."""
    if not columns:
        if first_row is not None and counts.numel():
            raise ValueError("blocks: under a causal mask each row's last entry must be the block it stands in")
        return
    num_inside = torch.zeros_like(columns[0])
    rows = torch.arange(columns[0].shape[-1], device=counts.device) + (first_row or 0)
    is_low, is_double, ends_elsewhere = (torch.zeros_like(num_inside, dtype=torch.bool) for _ in range(3))
    for place, column in enumerate(columns):
        is_kept = counts > place
        num_inside += column < allowed.stop
        is_low |= column < allowed.start
        if place:
            is_double |= (column == columns[place - 1]) & is_kept
        if first_row is not None:
            ends_elsewhere |= (column != rows) & (counts == place + 1)
    # What does not count became the end of what is allowed, so as many lie inside as count.
    if (is_low | (num_inside != counts)).any():
        raise ValueError(f"blocks: expected key blocks {allowed.start} .. {allowed.stop - 1}")
    if is_double.any():
        raise ValueError("blocks: expected none twice in a row")
    if first_row is not None and (ends_elsewhere | (counts == 0)).any():
        raise ValueError("blocks: under a causal mask each row's last entry must be the block it stands in")


def _sorted_columns(blocks: Tensor, is_entry: Tensor, beyond: int) -> list[Tensor]:
    """Return the columns of `blocks` `[B, P, R, width]`, int32 `[B, P, R]` each, after every row was sorted.

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
