"""What Pathfinder's pictures are drawn with: a random stream each, and a record of what is taken.

All pictures of a batch take their next step together, each from its own stream, so that a picture does not depend on
the others of its batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attn_zoo.tasks.contours.geometry import NUM_DEGREES, Tables
from attn_zoo.tasks.contours.scene import Bytes, Ints, Scene

__all__ = ["Field", "Streams"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Streams:
    """One stream of random numbers per picture: SplitMix64 (Steele, Lea, Flood 2014), which counts and mixes.

    Args:
        seed: of the data.
        stream: names the split.
        index: of each picture in it, `[B]`.
    """

    def __init__(self, seed: int, stream: int, index: Ints) -> None:
        (base,) = np.random.SeedSequence(seed, spawn_key=(stream,)).generate_state(1, np.uint64)
        self._state = _mixed(base + _mixed((index.astype(np.uint64) + np.uint64(1)) * _GOLDEN))

    def only(self, rows: Ints) -> Streams:
        """Return the streams of some pictures, at their present state, independent of this object."""
        chosen = object.__new__(Streams)
        chosen._state = self._state[rows]
        return chosen

    def branches(self, rows: Ints, numbers: Ints) -> Streams:
        """Return further streams of some pictures, one for each number, picture after picture; leave this one alone."""
        branches = object.__new__(Streams)
        steps = _mixed((numbers.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        branches._state = _mixed(self._state[rows][:, None] ^ steps).ravel()
        return branches

    def words(self, rows: Ints, count: int) -> NDArray[np.uint64]:
        """Return the next `count` words of some pictures, `[rows, count]`."""
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


class Field:
    """What is taken in each picture: `occupied`, and `blocked`, which is that grown by the margin; both `[B, canvas]`.

    Growing a maximum is the maximum of what was grown, so `blocked` is kept up to date paddle by paddle.
    """

    def __init__(self, tables: Tables, count: int) -> None:
        self.tables = tables
        self.occupied = np.tile(tables.occupied, (count, 1))
        self.blocked = np.tile(tables.blocked, (count, 1))

    def copy(self) -> Field:
        """Return the same, independent of this object."""
        copy = object.__new__(Field)
        copy.tables, copy.occupied, copy.blocked = self.tables, self.occupied.copy(), self.blocked.copy()
        return copy

    def take(self, rows: Ints, other: Field) -> None:
        """Make some pictures what they are in another field."""
        self.occupied[rows], self.blocked[rows] = other.occupied[rows], other.blocked[rows]

    def merge(self, rows: Ints, places: Ints, directions: Ints) -> None:
        """Take the room of one paddle in each of some pictures."""
        at = places[:, None] + self.tables.mask.offsets[directions]
        levels = np.minimum(self.tables.mask.levels[directions], self.tables.is_inside[at])
        _raise(self.occupied, rows, at, levels)
        # What the halo adds outside the window is blocked anyway, and so is, by the forbidden border, what it reaches
        # from there.
        at = places[:, None] + self.tables.halo.offsets[directions]
        _raise(self.blocked, rows, at, self.tables.halo.levels[directions])

    def extend(
        self, scene: Scene, streams: Streams, rows: Ints, pivots: Ints, directions: Ints
    ) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """Look for the next paddle after the last pivot and direction of some pictures.

        Returns:
            The next pivots, the directions found, and whether one was found, each `[rows]`.
        """
        tables = self.tables
        pivots = tables.hops(pivots, directions)
        free = (255 - self.blocked[rows[:, None], pivots[:, None] + tables.circle]) / 255.0
        cumulative = np.cumsum(tables.weights[directions] * free, 1)
        total = cumulative[:, -1]
        choice = np.zeros(len(rows), np.int64)
        found = np.zeros(len(rows), np.bool_)
        uniform = streams.uniform(rows, 1 + scene.paddle_retries)
        pending = np.flatnonzero(total >= 1e-4)
        for attempt in range(uniform.shape[1]):
            drawn = (cumulative[pending] > (uniform[pending, attempt] * total[pending])[:, None]).argmax(1)
            at = (pivots[pending] + tables.circle[drawn])[:, None] + tables.crash.offsets[NUM_DEGREES + drawn]
            fits = (self.occupied[rows[pending, None], at] <= tables.crash.levels[NUM_DEGREES + drawn]).all(1)
            choice[pending], found[pending] = drawn, fits
            pending = pending[~fits]
        return pivots, NUM_DEGREES + choice, found


def _raise(field: Bytes, rows: Ints, at: Ints, levels: Bytes) -> None:
    """Raise cells to levels; a cell that occurs twice in a row has the same level."""
    field[rows[:, None], at] = np.maximum(field[rows[:, None], at], levels)
