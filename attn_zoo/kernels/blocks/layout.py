"""Patterns of window, random and global blocks: what several block-sparse mechanisms are made of.

A `BlockLayout` says which parts there are; `layout_pattern` turns it into the engine's `BlockPattern`, once per layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from attn_zoo.kernels.blocks.pattern import BlockPattern, band_pairs, make_pattern
from attn_zoo.kernels.blocks.random_blocks import Candidates, permuted_blocks, uniform_blocks

__all__ = ["BlockLayout", "band_layout", "layout_pattern"]


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Window, random and global blocks for one length. Blocks are counted in keys, extra tokens included.

    Args:
        query_len: L, tokens.
        block_size: tokens in a block; the last one may be shorter.
        num_window_blocks: odd; the query's own block and as many on either side, clipped at the ends.
        num_global_blocks: leading key blocks that every row sees.
        num_random_blocks: further blocks of each row and head; a row with fewer candidates takes them all.
        num_extra_tokens: keys before the sequence, a multiple of the block size. Without them the global blocks are the
            sequence's own first ones, and their rows are dense.
        is_permuted: draw permutations, where there are enough blocks, so that all blocks are drawn equally often.
        is_causal: hide later keys; random blocks are drawn from the past.
        reach: hide keys further than this from the query, in tokens; for windows alone, of blocks that hold them all.
    """

    query_len: int
    block_size: int
    num_window_blocks: int
    num_global_blocks: int
    num_random_blocks: int
    num_extra_tokens: int = 0
    is_permuted: bool = False
    is_causal: bool = False
    reach: int | None = None

    @property
    def key_len(self) -> int:
        """S, tokens."""
        return self.query_len + self.num_extra_tokens

    @property
    def num_key_blocks(self) -> int:
        """Blocks of keys, the ragged last one included."""
        return -(-self.key_len // self.block_size)

    @property
    def num_leading(self) -> int:
        """Global blocks that there really are, in a sequence that may be shorter."""
        return min(self.num_global_blocks, self.num_key_blocks)

    @property
    def num_dense_rows(self) -> int:
        """Leading query blocks that see all keys."""
        return 0 if self.num_extra_tokens else self.num_leading

    @cached_property
    def candidates(self) -> Candidates:
        """The window of each listed row, and what the row may draw."""
        rows, reach = np.arange(self.num_leading, self.num_key_blocks), self.num_window_blocks // 2
        end = rows + 1 if self.is_causal else np.full_like(rows, self.num_key_blocks)
        low, high = np.maximum(rows - reach, self.num_leading), np.minimum(rows + reach + 1, end)
        return Candidates(self.num_leading, low, high, end)

    def draw(self, num_heads: int, key: tuple[int, ...], device: str = "cpu") -> tuple[Tensor, Tensor]:
        """Return the random blocks `[H, R, r]` of the listed rows, and how many each row has, int32 `[R]`.

        Args:
            num_heads: H; each draws its own.
            key: names the draw, such as (seed, layer); head and length are added to it.
            device: of the result; the blocks are the same everywhere.
        """
        rows, count, stream = len(self.candidates.low), self.num_random_blocks, (*key, self.num_key_blocks)
        if self.is_permuted and rows >= self.num_window_blocks + count:
            reach = self.num_window_blocks // 2
            blocks = permuted_blocks(stream, num_heads, count, self.num_key_blocks, self.num_leading, reach)
            return torch.from_numpy(blocks).to(device), torch.full((rows,), count, dtype=torch.int32, device=device)
        return uniform_blocks(stream, num_heads, count, self.candidates, device)

    @cached_property
    def mean_pairs(self) -> float:
        """Visible (query, key) pairs of a head.

        Exact but for a shorter last block: how many random blocks are that one depends on the draw, and counts as its
        mean.
        """
        if self.reach is not None:
            return band_pairs(self.query_len, self.reach, is_causal=self.is_causal)
        size, last = self.block_size, self.key_len
        low, high, end = self.candidates.low, self.candidates.high, self.candidates.end
        dense = min(self.num_dense_rows * size, self.query_len)
        queries = np.minimum(size, self.query_len - dense - np.arange(len(low)) * size)
        window = np.minimum(high * size, last) - low * size
        total = self.candidates.counts
        drawable = total * size - np.where(high < end, np.maximum(end * size - last, 0), 0)
        drawn = np.minimum(total, self.num_random_blocks) / np.maximum(total, 1) * drawable
        pairs = float((queries * (self.num_leading * size + window + drawn)).sum())
        if not self.is_causal:
            return pairs + dense * last
        # Of its own block, a query sees the keys up to itself.
        return pairs + dense * (dense + 1) // 2 - int((queries * (queries - 1) // 2).sum())


def band_layout(length: int, reach: int, block_size: int, *, is_causal: bool) -> BlockLayout:
    """Return the layout of a band: each query sees the keys at most `reach` tokens away.

    Args:
        length: L, tokens of queries and keys.
        reach: tokens on either side.
        block_size: tokens in a block; a small one gathers fewer keys in vain, a large one has more to do at a time.
        is_causal: only to the past.
    """
    reach = min(reach, length - 1)
    return BlockLayout(
        query_len=length,
        block_size=block_size,
        num_window_blocks=2 * -(-reach // block_size) + 1,
        num_global_blocks=0,
        num_random_blocks=0,
        is_causal=is_causal,
        reach=reach,
    )


@lru_cache(maxsize=64)
def layout_pattern(layout: BlockLayout, num_heads: int, key: tuple[int, ...], device: str = "cpu") -> BlockPattern:
    """Return the pattern of a layout, made in O(rows (window + random)) and kept.

    Args:
        layout: which blocks.
        num_heads: H; each draws its own random blocks.
        key: names the draw, such as (seed, layer).
        device: of the pattern's tensors.
    """
    low, high = (torch.from_numpy(x).to(device)[:, None] for x in (layout.candidates.low, layout.candidates.high))
    window = low + torch.arange(layout.num_window_blocks, device=device)
    drawn, counts = layout.draw(num_heads, key, device)
    slots = torch.arange(drawn.shape[-1], device=device)
    return make_pattern(
        torch.cat([window.int().expand(num_heads, -1, -1).movedim(-1, 0), drawn.int().movedim(-1, 0)]).movedim(0, -1),
        torch.cat([window < high, slots < counts[:, None]], dim=-1),
        query_len=layout.query_len,
        key_len=layout.key_len,
        block_size=layout.block_size,
        num_global=layout.num_leading,
        num_dense_rows=layout.num_dense_rows,
        is_causal=layout.is_causal,
        reach=layout.reach,
    )
