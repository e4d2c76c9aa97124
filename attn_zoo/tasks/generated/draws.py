"""Random numbers for generated tasks, many rows at a time, the same on every machine and with every numpy.

Numpy keeps its raw bit streams equal across releases; its distributions it may change. So only the raw bits are taken
from it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Draws", "Ints"]

Ints = NDArray[np.int64]


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

    def _raw(self, shape: tuple[int, ...]) -> NDArray[np.uint64]:
        words: NDArray[np.uint64] = self._generator.random_raw(int(np.prod(shape)))
        return words.reshape(shape)

    def uniform(self, *shape: int) -> NDArray[np.float64]:
        """Return numbers uniform in [0, 1), multiples of 2^-53."""
        return (self._raw(shape) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def below(self, bound: int | Ints, *shape: int) -> Ints:
        """Return integers uniform in 0 .. bound - 1 (relative bias below bound / 2^32).

        Args:
            bound: one for all, or an array that broadcasts to `shape`.
            shape: of the result.
        """
        high = self._raw(shape) >> np.uint64(32)
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
        """Return `[rows, count]`: in each row, indices drawn one after the other without replacement.

        The chance of an index is proportional to its weight among those that are left. (With E exponential, the
        indices in increasing order of E / weight are such a sequence: Efraimidis and Spirakis 2006.)

        Args:
            weights: positive, `[S]`.
            count: at most S.
            rows: of the result.
        """
        times = -np.log1p(-self.uniform(rows, len(weights))) / weights
        first = np.argpartition(times, count - 1, axis=1)[:, :count]
        order = np.argsort(np.take_along_axis(times, first, 1), axis=1)
        return np.take_along_axis(first, order, 1)
