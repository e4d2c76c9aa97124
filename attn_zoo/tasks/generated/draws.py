"""What drawn data share: random numbers, numbers of examples, and no example twice.

Numpy keeps its raw bit streams equal across releases; its distributions it may change. So only the raw bits are taken
from it, and the numbers are the same on every machine and with every numpy.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attn_zoo.tasks.abstract_task import SplitName

Ints = NDArray[np.int64]

STREAMS: dict[SplitName, int] = {"test": 0, "validation": 1, "train": 2}
"""Number of each split's stream, in the order of drawing."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSizes:
    """How many examples of each split are drawn."""

    num_train: int
    num_validation: int
    num_test: int

    def count(self, name: SplitName) -> int:
        """Return the number of examples of a split."""
        count: int = getattr(self, f"num_{name}")
        return count


class Unseen:
    """Tell whether an example is new, and remember it: in a level no example occurs twice."""

    def __init__(self) -> None:
        self._marks: set[bytes] = set()

    def __call__(self, row: NDArray[np.integer]) -> bool:
        """Return whether `row` was not asked for before."""
        count = len(self._marks)
        self._marks.add(hashlib.blake2b(row.tobytes(), digest_size=16).digest())
        return len(self._marks) > count


class Draws:
    """A stream of random numbers.

    Args:
        seed: of the level.
        stream: further integers that name this stream, such as split, part and chunk.

    >>> Draws(0, 1).below(10, 5).tolist() == Draws(0, 1).below(10, 5).tolist()
    True
    """

    def __init__(self, seed: int, *stream: int) -> None:
        self._generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=stream))

    def words(self, *shape: int) -> NDArray[np.uint64]:
        """Return uniform words of 64 bits."""
        words: NDArray[np.uint64] = self._generator.random_raw(int(np.prod(shape)))
        return words.reshape(shape)

    def bytes(self, count: int) -> NDArray[np.uint8]:
        """Return `count` uniform bytes, eight from each word."""
        return self.words(-(-count // 8)).astype("<u8", copy=False).view(np.uint8)[:count]

    def small(self, bound: int, count: int) -> NDArray[np.uint8]:
        """Return `count` integers uniform in 0 .. bound - 1, two from each word.

        The bound is at most 256; the relative bias is below bound / 2^32.
        """
        halves = self.words(-(-count // 2)).astype("<u8", copy=False).view("<u4")[:count]
        return ((halves.astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).astype(np.uint8)

    def uniform(self, *shape: int) -> NDArray[np.float64]:
        """Return numbers uniform in [0, 1), multiples of 2^-53."""
        return (self.words(*shape) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def below(self, bound: int | Ints, *shape: int) -> Ints:
        """Return integers uniform in 0 .. bound - 1 (relative bias below bound / 2^32).

        Args:
            bound: one for all, or an array that broadcasts to `shape`.
            shape: of the result.
        """
        high = self.words(*shape) >> np.uint64(32)
        return ((high * np.asarray(bound, np.uint64)) >> np.uint64(32)).astype(np.int64)

    def distinct(self, bound: int, count: int, rows: int) -> Ints:
        """Return `[rows, count]`: in each row, `count` different integers of 0 .. bound - 1 in random order.

        Raises:
            ValueError: there are fewer than `count`.
        """
        if count > bound:
            raise ValueError(f"expected at most {bound} different values; got {count}")
        # The first steps of a Fisher-Yates shuffle, one step for all rows at once.
        pool = np.tile(np.arange(bound, dtype=np.int32), (rows, 1))
        row = np.arange(rows)
        for step in range(count):
            other = step + self.below(bound - step, rows)
            picked = pool[row, other]
            pool[row, other] = pool[:, step]
            pool[:, step] = picked
        return pool[:, :count].astype(np.int64)

    def weighted(self, weights: NDArray[np.float64], count: int, rows: int) -> Ints:
        """Return `[rows, count]`: in each row, indices of positive `weights` `[S]` drawn without replacement.

        The chance of an index is proportional to its weight among those that are left. (With E exponential, the
        indices in increasing order of E / weight are such a sequence: Efraimidis and Spirakis 2006.)
        """
        times = -np.log1p(-self.uniform(rows, len(weights))) / weights
        first = np.argpartition(times, count - 1, axis=1)[:, :count]
        order = np.argsort(np.take_along_axis(times, first, 1), axis=1)
        return np.take_along_axis(first, order, 1)


def shuffled(count: int, seed: int, *stream: int) -> Ints:
    """Return 0 .. count - 1 in a random order that is the same on every machine."""
    return np.argsort(Draws(seed, *stream).uniform(count), kind="stable").astype(np.int64)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class RowStreams:
    """One stream of random numbers per example: SplitMix64 (Steele, Lea, Flood 2014), which counts and mixes.

    Examples drawn together do not depend on each other.

    Args:
        seed: of the data.
        stream: names the split.
        index: of each example in it, `[B]`.
    """

    def __init__(self, seed: int, stream: int, index: Ints) -> None:
        (base,) = np.random.SeedSequence(seed, spawn_key=(stream,)).generate_state(1, np.uint64)
        self._state = _mixed(base + _mixed((index.astype(np.uint64) + np.uint64(1)) * _GOLDEN))

    def only(self, rows: Ints) -> RowStreams:
        """Return the streams of some examples, at their present state, independent of this object."""
        chosen = object.__new__(RowStreams)
        chosen._state = self._state[rows]
        return chosen

    def branches(self, rows: Ints, numbers: Ints) -> RowStreams:
        """Return further streams of some examples, one for each number, example after example; leave this one alone."""
        branches = object.__new__(RowStreams)
        steps = _mixed((numbers.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        branches._state = _mixed(self._state[rows][:, None] ^ steps).ravel()
        return branches

    def words(self, rows: Ints, count: int) -> NDArray[np.uint64]:
        """Return the next `count` words of some examples, `[rows, count]`."""
        steps = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        words = self._state[rows][:, None] + steps
        self._state[rows] = words[:, -1]
        return _mixed(words)

    def below(self, rows: Ints, bound: Ints | int, count: int) -> Ints:
        """Return integers uniform in 0 .. bound - 1 `[rows, count]` (relative bias below bound / 2^32)."""
        scale = np.asarray(bound, np.uint64).reshape(-1, 1)
        return (((self.words(rows, count) >> np.uint64(32)) * scale) >> np.uint64(32)).astype(np.int64)

    def uniform(self, rows: Ints, count: int) -> NDArray[np.float64]:
        """Return numbers uniform in [0, 1) `[rows, count]`."""
        return (self.words(rows, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
