"""The expressions of ListOps: drawn many trees at a time, and read to some depth only.

Nangia and Bowman 2018, "ListOps: A Diagnostic Dataset for Latent Tree Learning", arXiv 1804.06028, as drawn by Long
Range Arena (Tay et al. 2020, arXiv 2011.04006; google-research/long-range-arena, lra_benchmarks/data/listops.py):
    a node at depth < max_depth is an operator with probability 1/4, else a digit; at max_depth always a digit
    an operator is one of MIN, MAX, MED, SM and has 2 to max_args arguments, all choices uniform
    MED of an even count is the mean of the two middle values, truncated; SM is the sum modulo 10
    the length counts one token per digit and two per operator (its name and the closing bracket)
    kept are trees with min_len < length < max_len

A plain recursion takes about a millisecond per kept tree. Here all trees of a chunk grow one depth at a time as arrays,
a tree is given up the moment it is certain to be too long, and only kept trees get operator names, digits and values.

What ListOps yields to a reader who stops short: an oracle of depth k knows every name and digit that stands at most k
operators below the root, and of everything deeper only that its value lies in 0 .. 9. Intervals pass upward: through
MIN, MAX and MED, which are monotone, ends go to ends; SM is known where every argument is, and else lies in 0 .. 9. The
oracle answers the label that is most frequent in training for the root's operator and interval. Depth 0 reads the root
alone. MIN and MAX are often decided by a few arguments near the root: at the settings of Long Range Arena one level
gives 46 % and two give 64 %, so an accuracy of 60 % says nothing about nine levels of nesting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attn_zoo.tasks.abstract_task import Split
from attn_zoo.tasks.floors.lookup_rules import lookup_floor
from attn_zoo.tasks.generated.draws import Draws, Ints

PAD = 0
DIGIT = 1
"""Token id of digit 0; digit v is `DIGIT + v`."""
CLOSE = 15
VOCAB_SIZE = 16

OPERATORS = {"[MIN": 11, "[MAX": 12, "[MED": 13, "[SM": 14}
_OPERATOR_BYTES = 64  # of 256: probability 1/4, exactly


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


_MIN, _MAX, _MED, _SM = OPERATORS.values()

Bounds = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Lowest and highest value `[N, O]` of each tree with each operator at its root."""


@dataclass(frozen=True, slots=True)
class Trees:
    """Kept trees, one after the other.

    Args:
        tokens: ids of all trees, concatenated in prefix order.
        lengths: of each tree `[N]`.
        values: of each tree `[N]`, 0 to 9.
        by_root: value that each tree would have with each operator of the grammar at its root `[N, O]`; of a digit,
            itself.
    """

    tokens: NDArray[np.uint8]
    lengths: Ints
    values: NDArray[np.uint8]
    by_root: NDArray[np.uint8]


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

    def only(self, kept: Ints) -> _Depth:
        """Return the nodes of some trees, given in ascending order, which get the numbers 0, 1, ... instead."""
        begin, end = np.searchsorted(self.tree, kept), np.searchsorted(self.tree, kept, side="right")
        first, last = np.searchsorted(self.operators, begin), np.searchsorted(self.operators, end)
        owner, _ = _runs(end - begin)
        operator_owner, operator_place = _runs(last - first)
        moved_by = np.cumsum(end - begin) - (end - begin) - begin
        index = first[operator_owner] + operator_place
        return _Depth(owner, self.operators[index] + moved_by[operator_owner], self.arity[index])


def _runs(counts: Ints) -> tuple[Ints, Ints]:
    """Return, for `counts[i]` items of each i one after the other, their i and their place among those of it."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _grow(draws: Draws, num_roots: int, grammar: Grammar) -> tuple[list[_Depth], Ints]:
    """Draw the shapes of `num_roots` trees; return their depths and lengths (a lower bound for trees given up)."""
    lengths = np.ones(num_roots, np.int64)
    tree = np.arange(num_roots)
    depths: list[_Depth] = []
    for depth in range(1, grammar.max_depth + 1):
        is_last = depth == grammar.max_depth
        places = np.zeros(0, np.int64) if is_last else np.flatnonzero(draws.bytes(len(tree)) < _OPERATOR_BYTES)
        arity = draws.small(grammar.max_args - 1, len(places)).astype(np.int64) + 2
        owner = tree[places]
        lengths += np.bincount(owner, 1 + arity, num_roots).astype(np.int64)  # a digit becomes name, arguments, bracket
        depths.append(_Depth(tree, places, arity))
        # Arguments of trees that are already too long are not drawn: their nodes so far go when the chunk is filtered.
        arity = np.where(lengths[owner] < grammar.max_len, arity, 0)
        tree = np.repeat(owner, arity)
    return depths, lengths


def is_operator(tokens: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Tell which tokens open an operator."""
    return np.asarray((tokens > DIGIT + 9) & (tokens != CLOSE))


def medians(values: NDArray[np.integer], starts: Ints, arity: Ints) -> Ints:
    """Return the truncated median of each run of `arity` values (0 to 9) from `starts`."""
    columns = np.arange(int(arity.max(initial=2)))
    inside = columns < arity[:, None]
    rows = np.where(inside, values[np.where(inside, starts[:, None] + columns, 0)], 99).astype(np.int8)
    rows.sort(axis=1)
    each = np.arange(len(rows))
    result: Ints = (rows[each, arity // 2].astype(np.int64) + rows[each, (arity - 1) // 2]) // 2
    return result


def _evaluate(depth: _Depth, names: NDArray[np.uint8], arguments: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the value of each operator of `depth`, given the values of the nodes one deeper."""
    starts = depth.starts
    value = np.minimum.reduceat(arguments, starts)
    value = np.where(names == _MAX, np.maximum.reduceat(arguments, starts), value)
    value = np.where(names == _SM, np.add.reduceat(arguments.astype(np.int64), starts) % 10, value).astype(np.uint8)
    is_median = names == _MED
    value[is_median] = medians(arguments, starts[is_median], depth.arity[is_median])
    return value


class _Drawn:
    """Depths of kept trees with names and digits, drawn from the root down."""

    def __init__(self, draws: Draws, grammar: Grammar) -> None:
        self.ids = np.array([OPERATORS[name] for name in grammar.operators], np.uint8)
        self.depths: list[_Depth] = []
        self.names: list[NDArray[np.uint8]] = []
        self.values: list[NDArray[np.uint8]] = []
        self._draws = draws

    def add(self, depth: _Depth) -> None:
        self.depths.append(depth)
        self.values.append(self._draws.small(10, len(depth.tree)))
        self.names.append(self.ids[self._draws.small(len(self.ids), len(depth.operators))])

    def root_bounds(self) -> Bounds:
        """Return lowest and highest value `[N, O]` of each tree with each operator, as far as two depths tell."""
        num_trees = len(self.depths[0].tree)
        low, high = np.zeros((num_trees, len(self.ids)), np.uint8), np.full((num_trees, len(self.ids)), 9, np.uint8)
        root, below = self.depths[:2]
        if len(root.operators):
            for name, bound, unknown, best in ((_MIN, high, 9, np.minimum), (_MAX, low, 0, np.maximum)):
                known = self.values[1].copy()
                known[below.operators] = unknown
                for column in np.flatnonzero(self.ids == name):
                    bound[root.operators, column] = best.reduceat(known, root.starts)
        return low, high

    def keep(self, kept: Ints) -> None:
        """Forget the other trees."""
        for index, depth in enumerate(self.depths):
            mask = np.isin(depth.tree, kept)
            self.values[index] = self.values[index][mask]
            self.names[index] = self.names[index][mask[depth.operators]]
            self.depths[index] = depth.only(kept)


def draw_trees(
    draws: Draws, num_roots: int, grammar: Grammar, wanted: Callable[[Bounds], NDArray[np.bool_]] | None = None
) -> Trees:
    """Draw `num_roots` trees and return those whose length is within bounds, in order.

    `wanted` is told between which values each tree can lie with each operator at its root, `[N, O]` twice, and says
    which trees to go on with. That saves nine tenths of the time where hardly any is wanted.
    """
    shapes, lengths = _grow(draws, num_roots, grammar)
    kept = np.flatnonzero((grammar.min_len < lengths) & (lengths < grammar.max_len))
    drawn = _Drawn(draws, grammar)
    for shape in shapes[:2]:
        drawn.add(shape.only(kept))
    if wanted is not None:
        chosen = np.flatnonzero(wanted(drawn.root_bounds()))
        drawn.keep(chosen)
        kept = kept[chosen]
    for shape in shapes[2:]:
        drawn.add(shape.only(kept))
    return _finished(drawn, lengths[kept])


def _finished(drawn: _Drawn, lengths: Ints) -> Trees:
    """Evaluate the trees and write them down."""
    depths, names, values = drawn.depths, drawn.names, drawn.values
    spans = [np.ones(len(depth.tree), np.int64) for depth in depths]
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
    by_root = np.repeat(values[0][:, None], len(drawn.ids), axis=1)
    for column, operator in enumerate(drawn.ids):
        if len(roots := depths[0].operators):
            by_root[roots, column] = _evaluate(depths[0], np.full(len(roots), operator), values[1])
    return Trees(tokens, lengths, values[0], by_root)


_NUM_FITTED = 25_000  # of train, from the first: a table of answers has a few hundred entries
_ROWS = 2_048  # trees at once: a few hundred megabytes at 2000 tokens


@dataclass(frozen=True, slots=True)
class Rung:
    """What reading to one depth gives.

    Args:
        depth: operators below the root that are read.
        accuracy: on test, as a fraction.
        certain_frac: share of the test trees whose value the interval leaves no doubt about.
    """

    depth: int
    accuracy: float
    certain_frac: float


@dataclass(frozen=True, slots=True)
class _Nodes:
    """All nodes of some trees at one depth, in order; arguments are, in order, the nodes of the next depth."""

    tokens: NDArray[np.uint8]
    operators: Ints  # indices of the nodes that are operators
    arity: Ints


def _nesting(tokens: NDArray[np.uint8]) -> NDArray[np.int16]:
    """Return how many operators are around each token."""
    opens = is_operator(tokens)
    steps = opens.astype(np.int8) - (tokens == CLOSE).view(np.int8)
    return np.asarray(np.cumsum(steps, dtype=np.int16) - opens, np.int16)


def _depths(tokens: NDArray[np.uint8], deepest: int) -> list[_Nodes]:
    """Return the nodes at depths 0 to `deepest` of trees that stand one after the other."""
    nesting, is_close = _nesting(tokens), tokens == CLOSE
    kept = np.flatnonzero((nesting <= deepest) & ~is_close)
    nesting, tokens = nesting[kept], tokens[kept]
    depths: list[_Nodes] = []
    below = np.flatnonzero(nesting == 0)
    for depth in range(deepest + 1):
        here, names = below, tokens[below]
        operators = np.flatnonzero(is_operator(names))
        below = np.flatnonzero(nesting == depth + 1)
        # An argument belongs to the last operator of this depth that stands before it.
        owner = np.searchsorted(here[operators], below) - 1
        depths.append(_Nodes(names, operators, np.bincount(owner, minlength=len(operators))))
    return depths


def _intervals(depths: Sequence[_Nodes]) -> tuple[Ints, Ints]:
    """Return the interval of each root where the operators of the last of `depths` are unknown."""
    lows = highs = np.zeros(0, np.int64)
    for index in reversed(range(len(depths))):
        nodes = depths[index]
        low = nodes.tokens.astype(np.int64) - DIGIT
        high = low.copy()
        if index == len(depths) - 1:
            low[nodes.operators], high[nodes.operators] = 0, 9
        elif len(nodes.operators):
            low[nodes.operators], high[nodes.operators] = _through(nodes, lows, highs)
        lows, highs = low, high
    return lows, highs


def tree_values(tokens: NDArray[np.uint8]) -> Ints:
    """Return the value of each of some trees that stand one after the other, every operator with an argument."""
    return _intervals(_depths(tokens, int(_nesting(tokens).max())))[0]


def _through(nodes: _Nodes, lows: Ints, highs: Ints) -> tuple[Ints, Ints]:
    """Return the interval of each operator's value, given those of its arguments."""
    starts = np.cumsum(nodes.arity) - nodes.arity
    names = nodes.tokens[nodes.operators]
    low, high = np.minimum.reduceat(lows, starts), np.minimum.reduceat(highs, starts)
    is_max, is_med, is_sum = names == _MAX, names == _MED, names == _SM
    low[is_max], high[is_max] = np.maximum.reduceat(lows, starts)[is_max], np.maximum.reduceat(highs, starts)[is_max]
    least, most = np.add.reduceat(lows, starts)[is_sum], np.add.reduceat(highs, starts)[is_sum]
    low[is_sum], high[is_sum] = np.where(least == most, least % 10, 0), np.where(least == most, most % 10, 9)
    for ends, result in ((lows, low), (highs, high)):
        result[is_med] = medians(ends, starts[is_med], nodes.arity[is_med])
    return low, high


def _chunks(split: Split, count: int) -> Iterator[NDArray[np.uint8]]:
    """Yield the tokens of the first `count` trees, some trees at a time, without padding."""
    for start in range(0, count, _ROWS):
        tokens = split.tokens[start : min(start + _ROWS, count)].numpy()
        lengths = split.lengths[start : min(start + _ROWS, count)].numpy()
        yield tokens[np.arange(tokens.shape[1]) < lengths[:, None]]


def _features(split: Split, depths: Sequence[int], num_rows: int) -> dict[int, Ints]:
    """Return what an oracle of each depth knows of each root: 100 times its token, 10 times the low end, the high."""
    parts: dict[int, list[Ints]] = {depth: [] for depth in depths}
    for tokens in _chunks(split, num_rows):
        nodes = _depths(tokens, max(depths))
        roots = nodes[0].tokens.astype(np.int64)
        for depth in depths:
            low, high = _intervals(nodes[: depth + 1])
            parts[depth].append(roots * 100 + low * 10 + high)
    return {depth: np.concatenate(chunks) for depth, chunks in parts.items()}


def has_whole_trees(split: Split) -> bool:
    """Tell whether no row was cut: each is one digit, or ends with a closing bracket."""
    ends = split.tokens[range(len(split)), split.lengths.long() - 1]
    return bool(((ends == CLOSE) | (split.lengths == 1)).all())


def ladder(train: Split, test: Split, depths: Sequence[int]) -> list[Rung]:
    """Return what reading to each depth gives.

    Raises:
        ValueError: a row is cut short, so that it is no tree.
    """
    if not (has_whole_trees(train) and has_whole_trees(test)):
        raise ValueError("expected whole trees: a row does not end with a closing bracket")
    rungs = []
    num_train = min(_NUM_FITTED, len(train))
    labels = train.labels[:num_train].numpy(), test.labels.numpy()
    known, asked = _features(train, depths, num_train), _features(test, depths, len(test))
    for depth in depths:
        accuracy = lookup_floor(known[depth], labels[0], asked[depth], labels[1])
        is_certain = asked[depth] // 10 % 10 == asked[depth] % 10
        rungs.append(Rung(depth, accuracy, float(is_certain.mean())))
    return rungs
