"""The splits of a ListOps level, drawn: distinct trees, none in two splits, and balanced ones where a level asks.

Trees are drawn in chunks of a fixed number of roots, each from the stream (seed, split, chunk), and kept in order: the
first examples of a split do not depend on how many follow. Test is drawn first, then validation, then train; a tree
that occurred before is left out.

Balanced: every pair (root operator, label) has the same number of examples in every split, so that neither the most
frequent label nor the root operator says anything. Trees are drawn as always and taken or left. The operator of a root
is independent of everything below it, so a tree may be taken with any of them: it goes to the pair, among those that it
has with one operator or another, that still lacks most examples (of several, the first operator), and is left if none
lacks any. What that cannot balance: a large MIN or a small MAX is likely only with few arguments, so deeper floors
(`attn_zoo.tasks.expressions.partial_reading`) are still above guessing. Examples are shuffled at the end, for rare
pairs fill last.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from attn_zoo.tasks.abstract_task import Split, SplitName
from attn_zoo.tasks.expressions.grammar import OPERATORS, Bits, Bounds, Grammar, Trees, draw_trees

__all__ = ["STREAMS", "ListOpsLevel", "generate_splits", "padded"]

STREAMS: dict[SplitName, int] = {"test": 0, "validation": 1, "train": 2}
"""Number of each split's stream, in the order of drawing."""

_ROOTS_PER_CHUNK = 16_384
_SHUFFLE = 2**32 - 1  # a chunk that is never drawn

Row = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class ListOpsLevel:
    """One level.

    Args:
        grammar: distribution of the trees.
        num_train: examples.
        num_validation: examples.
        num_test: examples.
        seed: of the drawing.
        is_balanced: as many examples for every pair of root operator and label.
        is_release: read from published files instead of drawn.

    Raises:
        ValueError: a balanced split cannot have that many examples.
    """

    grammar: Grammar = field(default_factory=Grammar)
    num_train: int = 96_000
    num_validation: int = 2_000
    num_test: int = 2_000
    seed: int = 0
    is_balanced: bool = False
    is_release: bool = False

    def __post_init__(self) -> None:
        for name in STREAMS if self.is_balanced else ():
            if self.count(name) % self.num_pairs:
                raise ValueError(f"{name}: expected a multiple of {self.num_pairs} examples; got {self.count(name)}")

    @property
    def num_pairs(self) -> int:
        """How many pairs of root operator and label there are."""
        return 10 * len(self.grammar.operators)

    def count(self, name: SplitName) -> int:
        """Return the number of examples of a split."""
        return {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}[name]


def padded(rows: Sequence[Row], values: NDArray[np.uint8], width: int) -> Split:
    """Return rows as a split, cut on the right to `width` and filled with padding."""
    lengths = np.array([min(len(row), width) for row in rows], np.int16)
    tokens = np.zeros((len(rows), int(lengths.max(initial=1))), np.uint8)
    for row, target, length in zip(rows, tokens, lengths, strict=True):
        target[:length] = row[:length]
    return Split(tokens=torch.from_numpy(tokens), lengths=torch.from_numpy(lengths), labels=torch.from_numpy(values))


def _is_new(row: Row, seen: set[bytes]) -> bool:
    """Tell whether a tree did not occur before, and note that it did now."""
    mark = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
    if mark in seen:
        return False
    seen.add(mark)
    return True


def _chunks(
    level: ListOpsLevel, stream: int, wanted: Callable[[Bounds], NDArray[np.bool_]] | None = None
) -> Iterator[tuple[Trees, list[Row]]]:
    """Yield drawn trees, also one by one, for ever."""
    for chunk in itertools.count():
        trees = draw_trees(Bits(level.seed, stream, chunk), _ROOTS_PER_CHUNK, level.grammar, wanted)
        yield trees, np.split(trees.tokens, np.cumsum(trees.lengths)[:-1])


def _natural(level: ListOpsLevel, stream: int, count: int, seen: set[bytes]) -> Iterator[tuple[Row, int]]:
    """Yield the first `count` new trees with their values."""
    found = 0
    for trees, rows in _chunks(level, stream):
        for row, value in zip(rows, trees.values.tolist(), strict=False):  # of no trees there is one empty row
            if found == count:
                return
            if _is_new(row, seen):
                found += 1
                yield row, value


def _balanced(level: ListOpsLevel, stream: int, count: int, seen: set[bytes]) -> Iterator[tuple[Row, int]]:
    """Yield `count` new trees with their values, as many of every pair."""
    ids = [OPERATORS[name] for name in level.grammar.operators]
    each = np.arange(len(ids))
    lacking = np.full((len(ids), 10), count // level.num_pairs)
    taken: list[tuple[Row, int]] = []

    def wanted(bounds: Bounds) -> NDArray[np.bool_]:
        low, high = bounds
        open_below = np.concatenate([np.zeros((len(ids), 1), np.int64), np.cumsum(lacking > 0, axis=1)], axis=1)
        is_open = open_below[each, high.astype(np.int64) + 1] > open_below[each, low]
        return np.asarray(is_open.any(axis=1))

    for trees, rows in _chunks(level, stream, wanted):
        # In the end few trees are of any use: one by one are looked at those that some pair wants.
        for index in np.flatnonzero(lacking[each, trees.by_root].any(axis=1)):
            values = trees.by_root[index]
            best = int(lacking[each, values].argmax())
            row, value = rows[index].copy(), int(values[best])
            row[0] = ids[best]
            if lacking[best, value] and _is_new(row, seen):
                lacking[best, value] -= 1
                taken.append((row, value))
        if not lacking.any():
            break
    order = Bits(level.seed, stream, _SHUFFLE).words(count).argsort(kind="stable")
    yield from (taken[index] for index in order)


def generate_splits(level: ListOpsLevel) -> dict[SplitName, Split]:
    """Draw the three splits of a level."""
    draw = _balanced if level.is_balanced else _natural
    seen: set[bytes] = set()
    splits: dict[SplitName, Split] = {}
    for name, stream in STREAMS.items():
        rows, values = zip(*draw(level, stream, level.count(name), seen), strict=True)
        splits[name] = padded(rows, np.array(values, np.uint8), level.grammar.max_len)
    return splits
