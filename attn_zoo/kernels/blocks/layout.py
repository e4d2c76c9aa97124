"""What static patterns are made from: frozen records of integers, each turned into a `BlockPattern` once and kept.

A new pattern is one such record: subclass `PatternLayout` beside the variant that uses it and write `make`; every path,
torch's compiler and the count of pairs follow. Two are here because several mechanisms are made of them: `BlockLayout`
(window, random and global blocks) and `TokenLayout` (windows, dilation, strides and global tokens).

Random blocks come from a counter: the same on every machine, in every process, in training and in evaluation. Each
number is a hash of what it is for, (key..., counter), so no generator has state to share, restore or disturb. The hash
is SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 14).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.kernels.blocks.pattern import BlockPattern, TokenRule, make_pattern
from attn_zoo.kernels.held import held


class PatternLayout(ABC):
    """A record that a pattern is made from: a frozen dataclass whose fields are integers and booleans.

    So it is a key to keep the pattern by, and an argument of the operator that torch's compiler sees.
    """

    classes: ClassVar[dict[str, type[PatternLayout]]] = {}  # by the name that the operator is given

    def __init_subclass__(cls) -> None:
        cls.name = f"{cls.__module__}:{cls.__qualname__}"
        PatternLayout.classes[cls.name] = cls

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @abstractmethod
    def make(self, device: str) -> BlockPattern:
        """Return the pattern, with its table on `device`."""

    def pattern(self, device: str = "cpu") -> BlockPattern:
        """Return what `make` does, made once."""
        return held(_kept_pattern(self, device))

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of the fields, in order."""
        return tuple(cls.__dataclass_fields__)

    @property
    def mean_pairs(self) -> float:
        """Visible (query, key) pairs of a head, for counts of operations."""
        pattern = self.pattern()
        return pattern.num_pairs / pattern.num_heads


@lru_cache(maxsize=64)
def _kept_pattern(layout: PatternLayout, device: str) -> BlockPattern:
    return layout.make(device)


@dataclass(frozen=True, kw_only=True)
class TokenLayout(PatternLayout):
    """A window of tokens, dilated or not, strides and leading global tokens, for one length L = S.

    A query at i sees a key at j if |i - j| <= reach and i - j is a multiple of `dilation`, or if i - j is a multiple of
    `stride`, or if i or j is global. Linear in the length, but for strides: every row sees L / stride blocks.

    Args:
        query_len: L, tokens.
        block_size: tokens in a block; a small one gathers fewer keys in vain, a large one has more to do at a time.
        reach: tokens on either side.
        dilation: of the window.
        stride: 0 for none.
        num_global_tokens: leading tokens that see and are seen by all.
        is_causal: hide later keys.
    """

    query_len: int
    block_size: int
    reach: int
    dilation: int = 1
    stride: int = 0
    num_global_tokens: int = 0
    is_causal: bool = False

    @property
    def rule(self) -> TokenRule:
        """Which tokens see each other."""
        return TokenRule(self.reach, self.dilation, self.stride, self.num_global_tokens)

    @property
    def mean_pairs(self) -> float:
        """Visible pairs of a head, exact."""
        return self.rule.num_pairs(self.query_len, is_causal=self.is_causal)

    def make(self, device: str) -> BlockPattern:
        """Return the pattern: each row lists the blocks that hold a key it sees, as far as they are not global."""
        num_blocks = -(-self.query_len // self.block_size)
        num_global = -(-min(self.num_global_tokens, self.query_len) // self.block_size)
        offsets = self.rule.offsets(num_blocks, self.block_size, is_causal=self.is_causal)
        blocks = torch.arange(num_global, num_blocks, device=device)[:, None] - torch.tensor(offsets, device=device)
        return make_pattern(
            blocks[None],
            (blocks >= num_global) & (blocks < num_blocks),
            query_len=self.query_len,
            key_len=self.query_len,
            block_size=self.block_size,
            num_global=num_global,
            num_dense_rows=num_global,
            is_causal=self.is_causal,
            rule=self.rule,
        )


@dataclass(frozen=True, slots=True)
class Candidates:
    """Key blocks that each row may draw: `first <= block < end[row]`, but not its window from low to high.

    Args:
        first: lowest block that may be drawn.
        low: start of each row's window, int64 `[R]`, at least `first`.
        high: end (exclusive) of each row's window, int64 `[R]`.
        end: end (exclusive) of what each row may draw, int64 `[R]`.
    """

    first: int
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    end: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How many blocks each row may draw, int64 `[R]`."""
        counts: NDArray[np.int64] = self.low - self.first + np.maximum(self.end - self.high, 0)
        return counts


@dataclass(frozen=True, kw_only=True)
class BlockLayout(PatternLayout):
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
        num_heads: H; each draws random blocks of its own.
        seed: names the draw, together with the layer, the head and the length.
        layer_index: likewise.
    """

    query_len: int
    block_size: int
    num_window_blocks: int
    num_global_blocks: int
    num_random_blocks: int
    num_extra_tokens: int = 0
    is_permuted: bool = False
    is_causal: bool = False
    num_heads: int = 1
    seed: int = 0
    layer_index: int = 0

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

    def draw(self, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """Return the random blocks `[H, R, r]` of the listed rows, and how many each row has, int32 `[R]`.

        Args:
            device: of the result; the blocks are the same everywhere.
        """
        rows, count = len(self.candidates.low), self.num_random_blocks
        key = (self.seed, self.layer_index, self.num_key_blocks)
        if self.is_permuted and rows >= self.num_window_blocks + count:
            if self.is_causal:
                raise ValueError(
                    "is_permuted: expected False where is_causal is True: a permutation draws from the future too"
                )
            reach = self.num_window_blocks // 2
            blocks = permuted_blocks(key, self.num_heads, count, self.num_key_blocks, self.num_leading, reach)
            return torch.from_numpy(blocks).to(device), torch.full((rows,), count, dtype=torch.int32, device=device)
        return uniform_blocks(key, self.num_heads, count, self.candidates, device)

    def make(self, device: str) -> BlockPattern:
        """Return the pattern, in O(rows (window + random))."""
        low, high = (torch.from_numpy(x).to(device)[:, None] for x in (self.candidates.low, self.candidates.high))
        window = low + torch.arange(self.num_window_blocks, device=device)
        drawn, counts = self.draw(device)
        slots = torch.arange(drawn.shape[-1], device=device)
        # Column by column in memory, as sorting works on whole columns.
        columns = [window.int().expand(self.num_heads, -1, -1).movedim(-1, 0), drawn.int().movedim(-1, 0)]
        return make_pattern(
            torch.cat(columns).movedim(0, -1),
            torch.cat([window < high, slots < counts[:, None]], dim=-1),
            query_len=self.query_len,
            key_len=self.key_len,
            block_size=self.block_size,
            num_global=self.num_leading,
            num_dense_rows=self.num_dense_rows,
            is_causal=self.is_causal,
        )

    @property
    def mean_pairs(self) -> float:
        """Visible (query, key) pairs of a head.

        Exact but for a shorter last block: how many random blocks are that one depends on the draw, and counts as its
        mean.
        """
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


_GOLDEN = 0x9E3779B97F4A7C15
_LOW_64 = (1 << 64) - 1
_NUM_ROUNDS = 4  # products of a few random matchings are already close to a uniform permutation


def _signed(word: int) -> int:
    """Return the 64 bits of `word` as torch's int64 holds them: products and sums wrap around alike."""
    word &= _LOW_64
    return word - (1 << 64) if word >> 63 else word


def _shift(state: Tensor, places: int, out: Tensor | None = None) -> Tensor:
    """Shift to the right and fill with zeros: torch's own shift repeats the sign."""
    shifted = torch.bitwise_right_shift(state, places, out=out)
    return shifted.bitwise_and_((1 << (64 - places)) - 1)


def _mix(state: Tensor) -> Tensor:
    """Mix in place and return the same tensor: a second one holds what is shifted, and no other is made."""
    shifted = _shift(state, 30)
    state.bitwise_xor_(shifted).mul_(_signed(0xBF58476D1CE4E5B9))
    state.bitwise_xor_(_shift(state, 27, out=shifted)).mul_(_signed(0x94D049BB133111EB))
    return state.bitwise_xor_(_shift(state, 31, out=shifted))


def _streams(key: Sequence[int], last: Tensor) -> Tensor:
    """Return where the streams named by `key` and one more word each start, int64 as `last`."""
    state = torch.tensor([_signed(key[0])], device=last.device)
    for word in (*(torch.tensor([_signed(word)], device=last.device) for word in key[1:]), last):
        # Mixed again after the word goes in: streams of neighbouring words must not be shifts of one another.
        state = _mix(_mix(state + _signed(_GOLDEN)) ^ word)
    return state


def counter_bits(key: Sequence[int], counters: Tensor) -> Tensor:
    """Return 64 random bits for each counter in the stream named by `key`.

    Args:
        key: non-negative integers below 2^64; every change of one gives an unrelated stream. For `(seed,)` it is
            SplitMix64's own for that seed.
        counters: int64 of any shape; 0 is the first number of the stream.

    >>> [number % 2**64 for number in counter_bits((1234567,), torch.arange(2)).tolist()]
    [6457827717110365317, 3203168211198807973]
    """
    start = torch.tensor([_signed(key[0])], device=counters.device)
    if len(key) > 1:
        start = _streams(key[:-1], torch.tensor([_signed(key[-1])], device=counters.device))
    return _mix((counters + 1) * _signed(_GOLDEN) + start)


def uniform_blocks(
    key: Sequence[int], num_heads: int, num_random: int, candidates: Candidates, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Draw for each head and row a uniform subset of its candidates, without replacement (Floyd's algorithm).

    Args:
        key: names the stream; the head's number is appended to it.
        num_heads: H.
        num_random: blocks to draw; a row with fewer candidates takes them all.
        candidates: what each of R rows may draw.
        device: where to draw; the blocks are the same everywhere.

    Returns:
        Blocks, int32 `[H, R, width]`, of which the first `counts[row]` are drawn; and the counts, int32 `[R]`. The
        width is `num_random`, or less where no row has so many candidates. Each column lies together in memory.
    """
    num_random = min(num_random, int(candidates.counts.max(initial=0)))
    sizes = (candidates.counts, candidates.low - candidates.first, candidates.high - candidates.low)
    total, before, skipped = (torch.from_numpy(size).to(device) for size in sizes)
    counts = total.clamp(max=num_random)
    is_short = bool((candidates.counts < num_random).any())
    starts = _streams(key, torch.arange(num_heads, device=device))[:, None]
    first_counters = torch.arange(len(total), device=device) * num_random
    blocks = torch.empty(num_random, num_heads, len(total), dtype=torch.int32, device=device)
    ranks: list[Tensor] = []
    for draw in range(num_random):
        last = total - counts + draw
        bits = _mix((first_counters + (draw + 1)) * _signed(_GOLDEN) + starts)
        # Scaled to 0 .. last; the bias is below last / 2^32.
        rank = _shift(_shift(bits, 32, out=bits).mul_(last + 1), 32)
        for earlier in ranks:  # Floyd: a rank up to `last`, or `last` itself, which is new, if that is taken
            rank = torch.where(earlier == rank, last, rank)
        ranks.append(rank)
        block = rank + candidates.first + skipped * (rank >= before)
        blocks[draw] = block * (draw < counts) if is_short else block  # what is not drawn is 0
    return blocks.movedim(0, -1), counts.int()


def _order(key: Sequence[int], count: int) -> NDArray[np.int64]:
    """Return a random order of `0 .. count - 1`."""
    return np.argsort(counter_bits(key, torch.arange(count)).numpy().view(np.uint64), kind="stable")


def permuted_blocks(
    key: Sequence[int], num_heads: int, num_random: int, num_blocks: int, first: int, reach: int
) -> NDArray[np.int64]:
    """Draw `num_random` permutations of the blocks `first .. num_blocks - 1`, so that all are drawn equally often.

    Each row gets `num_random` different blocks outside its window, and each block is in exactly `num_random` rows. The
    start is a family of cyclic shifts, which never meet a window or each other; rounds of random pairings then swap the
    images of two rows wherever the result stays valid.

    Args:
        key: names the stream; the head's number is appended to it.
        num_heads: H.
        num_random: number of permutations.
        num_blocks: key blocks.
        first: first block that takes part; rows are the same blocks.
        reach: blocks of window on either side of a row's own.

    Returns:
        int64 `[H, num_blocks - first, num_random]`.

    Raises:
        ValueError: fewer than `2 * reach + 1 + num_random` blocks take part, so that no such family need exist.
    """
    rows = num_blocks - first
    spare = rows - (2 * reach + 1)
    if spare < num_random:
        raise ValueError(f"num_random: expected at most {spare} for {rows} blocks and a reach of {reach}")
    numbers = np.arange(rows, dtype=np.int64)
    images = np.empty((num_heads, rows, num_random), dtype=np.int64)
    for head in range(num_heads):
        offsets = _order((*key, head, 0), spare)
        images[head] = (numbers[:, None] + reach + 1 + offsets[None, :num_random]) % rows
        for turn in range(_NUM_ROUNDS * num_random):
            draw = turn % num_random
            order = _order((*key, head, 1 + turn), rows)
            left, right = order[: rows // 2], order[rows - rows // 2 :]
            old_left, old_right = images[head, left, draw], images[head, right, draw]
            others = np.delete(images[head], draw, axis=1)
            is_valid = (
                (np.abs(old_right - left) > reach)
                & (np.abs(old_left - right) > reach)
                & (others[left] != old_right[:, None]).all(1)
                & (others[right] != old_left[:, None]).all(1)
            )
            images[head, left, draw] = np.where(is_valid, old_right, old_left)
            images[head, right, draw] = np.where(is_valid, old_left, old_right)
    return images + first
