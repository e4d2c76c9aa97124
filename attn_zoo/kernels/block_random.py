"""Random blocks from a counter: the same on every machine, in every process, in training and in evaluation.

Each number is a hash of what it is for, (key..., counter), so no generator has state to share, restore or disturb. The
hash is SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 14).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Candidates", "counter_bits", "permuted_blocks", "uniform_blocks"]

_GOLDEN = 0x9E3779B97F4A7C15
_LOW_64 = (1 << 64) - 1
_NUM_ROUNDS = 4  # products of a few random matchings are already close to a uniform permutation


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


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix in place and return the same array: a second array holds what is shifted, and no other is made."""
    shifted = np.right_shift(state, np.uint64(30))
    state ^= shifted
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= np.right_shift(state, np.uint64(27), out=shifted)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= np.right_shift(state, np.uint64(31), out=shifted)
    return state


def _stream(key: Sequence[int]) -> np.uint64:
    """Return where the stream named by `key` starts."""
    state = key[0] & _LOW_64
    for word in key[1:]:
        start = np.array([(state + _GOLDEN) & _LOW_64], dtype=np.uint64)
        # Mixed again after the word goes in: streams of neighbouring words must not be shifts of one another.
        state = int(_mix(np.array([int(_mix(start)[0]) ^ (word & _LOW_64)], dtype=np.uint64))[0])
    return np.uint64(state)


def counter_bits(key: Sequence[int], counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each counter in the stream named by `key`.

    Args:
        key: non-negative integers below 2^64; every change of one gives an unrelated stream. For `(seed,)` it is
            SplitMix64's own for that seed.
        counters: uint64 of any shape; 0 is the first number of the stream.

    >>> counter_bits((1234567,), np.arange(2, dtype=np.uint64)).tolist()
    [6457827717110365317, 3203168211198807973]
    """
    return _mix((counters + np.uint64(1)) * np.uint64(_GOLDEN) + np.array([_stream(key)])).reshape(counters.shape)


def _below(bits: NDArray[np.uint64], bound: NDArray[np.int64]) -> NDArray[np.int64]:
    """Scale 64 random bits to `0 .. bound - 1`, in place; the bias is below bound / 2^32."""
    bits >>= np.uint64(32)
    bits *= bound.astype(np.uint64)
    bits >>= np.uint64(32)
    return bits.view(np.int64)


def uniform_blocks(
    key: Sequence[int], num_heads: int, num_random: int, candidates: Candidates
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw for each head and row a uniform subset of its candidates, without replacement (Floyd's algorithm).

    Args:
        key: names the stream; the head's number is appended to it.
        num_heads: H.
        num_random: blocks to draw; a row with fewer candidates takes them all.
        candidates: what each of R rows may draw.

    Returns:
        Blocks, int64 `[H, R, width]`, of which the first `counts[row]` are drawn; and the counts, int64 `[R]`. The
        width is `num_random`, or less where no row has so many candidates. Each column lies together in memory.
    """
    total = candidates.counts
    num_random = min(num_random, int(total.max(initial=0)))
    counts = np.minimum(total, num_random)
    streams = np.array([_stream((*key, head)) for head in range(num_heads)], dtype=np.uint64)[:, None]
    first_counters = np.arange(len(total), dtype=np.uint64) * np.uint64(num_random)
    ranks = np.empty((num_random, num_heads, len(total)), dtype=np.int64)
    for draw in range(num_random):
        last = total - counts + draw  # Floyd: a rank up to this one, or this one itself if that is taken
        steps = (first_counters + np.uint64(draw + 1)) * np.uint64(_GOLDEN)
        rank = _below(_mix(steps + streams), last + 1)
        is_taken = np.zeros(rank.shape, dtype=bool)
        for earlier in ranks[:draw]:
            is_taken |= earlier == rank
        np.copyto(rank, last, where=is_taken)
        np.copyto(rank, -1, where=draw >= counts)
        ranks[draw] = rank
    before, skipped = candidates.low - candidates.first, candidates.high - candidates.low
    for rank in ranks:
        is_drawn = rank >= 0
        np.add(rank, skipped, out=rank, where=rank >= before)
        rank += candidates.first
        rank *= is_drawn  # what is not drawn is 0
    return np.moveaxis(ranks, 0, -1), counts


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
        offsets = np.argsort(counter_bits((*key, head, 0), np.arange(spare, dtype=np.uint64)), kind="stable")
        images[head] = (numbers[:, None] + reach + 1 + offsets[None, :num_random]) % rows
        for turn in range(_NUM_ROUNDS * num_random):
            draw = turn % num_random
            order = np.argsort(counter_bits((*key, head, 1 + turn), numbers.astype(np.uint64)), kind="stable")
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
