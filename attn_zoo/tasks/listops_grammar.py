"""The grammar of ListOps, drawn many trees at a time.

Nangia and Bowman 2018, "ListOps: A Diagnostic Dataset for Latent Tree Learning", arXiv 1804.06028, as drawn by Long
Range Arena (Tay et al. 2020, arXiv 2011.04006; google-research/long-range-arena, lra_benchmarks/data/listops.py):
    a node at depth < max_depth is an operator with probability 1/4, else a digit; at max_depth always a digit
    an operator is one of MIN, MAX, MED, SM and has 2 to max_args arguments, all choices uniform
    MED of an even count is the mean of the two middle values, truncated; SM is the sum modulo 10
    the length counts one token per digit and two per operator (its name and the closing bracket)
    kept are trees with min_len < length < max_len

A plain recursion takes about a millisecond per kept tree. Here all trees of a chunk grow one depth at a time as arrays,
a tree is given up the moment it is certain to be too long, and only kept trees get operator names, digits and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["CLOSE", "DIGIT", "OPERATORS", "PAD", "VOCAB_SIZE", "Bits", "Grammar", "Trees", "draw_trees"]

PAD = 0
DIGIT = 1
"""Token id of digit 0; digit v is `DIGIT + v`."""
OPERATORS = {"[MIN": 11, "[MAX": 12, "[MED": 13, "[SM": 14}
CLOSE = 15
VOCAB_SIZE = 16

_MIN, _MAX, _MED, _SM = OPERATORS.values()
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
    """

    max_depth: int = 10
    max_args: int = 10
    min_len: int = 500
    max_len: int = 2000


@dataclass(frozen=True, slots=True)
class Trees:
    """Kept trees, one after the other.

    Args:
        tokens: ids of all trees, concatenated in prefix order.
        lengths: of each tree `[N]`.
        values: of each tree `[N]`, 0 to 9.
    """

    tokens: NDArray[np.uint8]
    lengths: Ints
    values: NDArray[np.uint8]


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

    def below(self, bound: int, count: int) -> NDArray[np.uint8]:
        """Return `count` integers uniform in 0 .. bound - 1 (bound at most 256; relative bias below bound / 2^32)."""
        words = self._generator.random_raw(-(-count // 2)).astype("<u8", copy=False).view("<u4")[:count]
        return ((words.astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).astype(np.uint8)


@dataclass(slots=True)
class _Depth:
    """All nodes of one depth, in order; the arguments of its operators are, in order, the nodes of the next depth."""

    tree: Ints  # tree of each node
    operators: Ints  # indices of the nodes that are operators
    arity: Ints  # arguments of each operator

    @property
    def starts(self) -> Ints:
        """Index, among the nodes of the next depth, of each operator's first argument."""
        return np.cumsum(self.arity) - self.arity

    def only(self, new_tree: Ints) -> _Depth:
        """Return the nodes of the trees that have a new number (0 or more)."""
        keep = new_tree[self.tree] >= 0
        keep_operators = keep[self.operators]
        return _Depth(
            new_tree[self.tree[keep]],
            (np.cumsum(keep) - 1)[self.operators[keep_operators]],
            self.arity[keep_operators],
        )


def _grow(bits: Bits, num_roots: int, grammar: Grammar) -> tuple[list[_Depth], Ints]:
    """Draw the shapes of `num_roots` trees; return their depths and lengths (a lower bound for trees given up)."""
    lengths = np.ones(num_roots, np.int64)
    tree = np.arange(num_roots)
    depths: list[_Depth] = []
    for depth in range(1, grammar.max_depth + 1):
        is_last = depth == grammar.max_depth
        found = np.zeros(0, np.int64) if is_last else np.flatnonzero(bits.bytes(len(tree)) < _OPERATOR_BYTES)
        arity = bits.below(grammar.max_args - 1, len(found)).astype(np.int64) + 2
        owner = tree[found]
        lengths += np.bincount(owner, 1 + arity, num_roots).astype(np.int64)  # a digit becomes name, arguments, bracket
        depths.append(_Depth(tree, found, arity))
        # Arguments of trees that are already too long are not drawn: their nodes so far go when the chunk is filtered.
        arity = np.where(lengths[owner] < grammar.max_len, arity, 0)
        tree = np.repeat(owner, arity)
    return depths, lengths


def _median(arguments: NDArray[np.uint8], starts: Ints, arity: Ints) -> NDArray[np.uint8]:
    """Return the truncated median of each run of `arity` arguments from `starts`."""
    columns = np.arange(int(arity.max(initial=2)))
    inside = columns < arity[:, None]
    rows = np.where(inside, arguments[np.where(inside, starts[:, None] + columns, 0)], 255).astype(np.uint8)
    rows.sort(axis=1)
    each = np.arange(len(rows))
    middle = rows[each, arity // 2].astype(np.int64) + rows[each, (arity - 1) // 2]
    return (middle // 2).astype(np.uint8)


def _evaluate(depth: _Depth, names: NDArray[np.uint8], arguments: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the value of each operator of `depth`, given the values of the nodes one deeper."""
    starts = depth.starts
    value = np.minimum.reduceat(arguments, starts)
    value = np.where(names == _MAX, np.maximum.reduceat(arguments, starts), value)
    value = np.where(names == _SM, np.add.reduceat(arguments.astype(np.int64), starts) % 10, value).astype(np.uint8)
    is_median = names == _MED
    value[is_median] = _median(arguments, starts[is_median], depth.arity[is_median])
    return value


def draw_trees(bits: Bits, num_roots: int, grammar: Grammar) -> Trees:
    """Draw `num_roots` trees and return those whose length is within bounds, in order."""
    depths, lengths = _grow(bits, num_roots, grammar)
    kept = (grammar.min_len < lengths) & (lengths < grammar.max_len)
    new_tree = np.where(kept, np.cumsum(kept) - 1, -1)
    depths, lengths = [depth.only(new_tree) for depth in depths], lengths[kept]

    names, values, spans = [], [], []
    for depth in depths:
        value = bits.below(10, len(depth.tree))
        names.append((bits.below(len(OPERATORS), len(depth.operators)) + _MIN).astype(np.uint8))
        values.append(value)
        spans.append(np.ones(len(depth.tree), np.int64))
    for index in reversed(range(len(depths) - 1)):  # from the leaves up: values and lengths
        depth = depths[index]
        if len(depth.operators):
            values[index][depth.operators] = _evaluate(depth, names[index], values[index + 1])
            spans[index][depth.operators] = 2 + np.add.reduceat(spans[index + 1], depth.starts)

    tokens = np.zeros(int(lengths.sum()), np.uint8)
    place = np.cumsum(lengths) - lengths
    for depth, name, value, span, below in zip(depths, names, values, spans, [*spans[1:], None], strict=True):
        tokens[place] = value + DIGIT  # operators are overwritten
        at = place[depth.operators]
        tokens[at] = name
        tokens[at + span[depth.operators] - 1] = CLOSE
        if below is not None:  # each argument follows its operator's name and the arguments before it
            before = np.cumsum(below) - below
            place = np.repeat(at + 1 - before[depth.starts], depth.arity) + before
    return Trees(tokens, lengths, values[0])
