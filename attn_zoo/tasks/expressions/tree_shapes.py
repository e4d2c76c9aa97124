"""Shapes of ListOps trees, many at a time: all trees of a chunk grow one depth at a time as arrays.

A tree is given up the moment it is certain to be too long.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["OPERATORS", "Bits", "Depth", "Grammar", "grow"]

OPERATORS = {"[MIN": 11, "[MAX": 12, "[MED": 13, "[SM": 14}
_OPERATOR_BYTES = 64  # of 256: probability 1/4, exactly

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """Parameters of the distribution.

    Args:
        max_depth: of a tree, the root being at depth 1; so at most `max_depth - 1` nested operators.
        max_args: most arguments of an operator; the fewest are 2.
        min_len: lengths must be above this.
        max_len: lengths must be below this.
        operators: that are drawn, of `OPERATORS`, each as often.
    """

    max_depth: int = 10
    max_args: int = 10
    min_len: int = 500
    max_len: int = 2000
    operators: tuple[str, ...] = tuple(OPERATORS)


class Bits:
    """Random integers from a raw bit stream: numpy keeps those equal across releases, its distributions it may change.

    Args:
        seed: of the level.
        stream: further integers that name this stream, such as split and chunk.
    """

    def __init__(self, seed: int, *stream: int) -> None:
        self._generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=stream))

    def bytes(self, count: int) -> NDArray[np.uint8]:
        """Return `count` uniform bytes."""
        return self._generator.random_raw(-(-count // 8)).astype("<u8", copy=False).view(np.uint8)[:count]

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return `count` uniform words of 64 bits."""
        return self._generator.random_raw(count)

    def below(self, bound: int, count: int) -> NDArray[np.uint8]:
        """Return `count` integers uniform in 0 .. bound - 1 (bound at most 256; relative bias below bound / 2^32)."""
        words = self._generator.random_raw(-(-count // 2)).astype("<u8", copy=False).view("<u4")[:count]
        return ((words.astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).astype(np.uint8)


@dataclass(slots=True)
class Depth:
    """All nodes of one depth, in order; the arguments of its operators are, in order, the nodes of the next depth."""

    tree: Ints  # tree of each node
    operators: Ints  # indices of the nodes that are operators
    arity: Ints  # arguments of each operator

    @property
    def starts(self) -> Ints:
        """Index, among the nodes of the next depth, of each operator's first argument."""
        return np.cumsum(self.arity) - self.arity

    def only(self, kept: Ints) -> Depth:
        """Return the nodes of some trees, given in ascending order, which get the numbers 0, 1, ... instead."""
        begin, end = np.searchsorted(self.tree, kept), np.searchsorted(self.tree, kept, side="right")
        first, last = np.searchsorted(self.operators, begin), np.searchsorted(self.operators, end)
        owner, _ = _runs(end - begin)
        operator_owner, operator_place = _runs(last - first)
        moved_by = np.cumsum(end - begin) - (end - begin) - begin
        index = first[operator_owner] + operator_place
        return Depth(owner, self.operators[index] + moved_by[operator_owner], self.arity[index])


def _runs(counts: Ints) -> tuple[Ints, Ints]:
    """Return, for `counts[i]` items of each i one after the other, their i and their place among those of it."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def grow(bits: Bits, num_roots: int, grammar: Grammar) -> tuple[list[Depth], Ints]:
    """Draw the shapes of `num_roots` trees; return their depths and lengths (a lower bound for trees given up)."""
    lengths = np.ones(num_roots, np.int64)
    tree = np.arange(num_roots)
    depths: list[Depth] = []
    for depth in range(1, grammar.max_depth + 1):
        is_last = depth == grammar.max_depth
        found = np.zeros(0, np.int64) if is_last else np.flatnonzero(bits.bytes(len(tree)) < _OPERATOR_BYTES)
        arity = bits.below(grammar.max_args - 1, len(found)).astype(np.int64) + 2
        owner = tree[found]
        lengths += np.bincount(owner, 1 + arity, num_roots).astype(np.int64)  # a digit becomes name, arguments, bracket
        depths.append(Depth(tree, found, arity))
        # Arguments of trees that are already too long are not drawn: their nodes so far go when the chunk is filtered.
        arity = np.where(lengths[owner] < grammar.max_len, arity, 0)
        tree = np.repeat(owner, arity)
    return depths, lengths
