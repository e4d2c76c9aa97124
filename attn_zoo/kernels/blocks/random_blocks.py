"""Random blocks from a counter: the same on every machine, in every process, in training and in evaluation.

Each number is a hash of what it is for, (key..., counter), so no generator has state to share, restore or disturb. The
hash is SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 14).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
