"""What ListOps yields to a reader who stops short: accuracies of oracles that read a tree to a depth only.

An oracle of depth k knows every name and digit that stands at most k operators below the root, and of everything deeper
only that its value lies in 0 .. 9. Intervals pass upward: through MIN, MAX and MED, which are monotone, ends go to
ends; SM is known where every argument is, and else lies in 0 .. 9. The oracle answers the label that is most frequent
in training for the root's operator and interval. Depth 0 reads the root alone.

Why it matters: MIN and MAX are often decided by a few arguments near the root. At the settings of Long Range Arena one
level gives 46 % and two give 64 %, so an accuracy of 60 % says nothing about nine levels of nesting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attn_zoo.tasks.abstract_task import Split
from attn_zoo.tasks.expressions.grammar import CLOSE, DIGIT, OPERATORS, is_operator, medians
from attn_zoo.tasks.floors.lookup_rules import lookup_floor
from attn_zoo.tasks.generated.draws import Ints

_ROWS = 2_048  # trees at once: a few hundred megabytes at 2000 tokens
_MIN, _MAX, _MED, _SM = OPERATORS.values()


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


def _features(split: Split, depths: Sequence[int], num_rows: int) -> dict[int, tuple[Ints, Ints, Ints]]:
    """Return operator, low and high end of each root as an oracle of each depth knows them."""
    parts: dict[int, list[tuple[Ints, Ints, Ints]]] = {depth: [] for depth in depths}
    for tokens in _chunks(split, num_rows):
        nodes = _depths(tokens, max(depths))
        roots = nodes[0].tokens.astype(np.int64)
        for depth in depths:
            parts[depth].append((roots, *_intervals(nodes[: depth + 1])))
    return {
        depth: (
            np.concatenate([part[0] for part in chunks]),
            np.concatenate([part[1] for part in chunks]),
            np.concatenate([part[2] for part in chunks]),
        )
        for depth, chunks in parts.items()
    }


def has_whole_trees(split: Split) -> bool:
    """Tell whether no row was cut: each is one digit, or ends with a closing bracket."""
    ends = split.tokens[range(len(split)), split.lengths.long() - 1]
    return bool(((ends == CLOSE) | (split.lengths == 1)).all())


def ladder(train: Split, test: Split, depths: Sequence[int], *, num_train: int = 25_000) -> list[Rung]:
    """Return what reading to each depth gives; the first `num_train` examples of train fit the table of answers.

    Raises:
        ValueError: a row is cut short, so that it is no tree.
    """
    if not (has_whole_trees(train) and has_whole_trees(test)):
        raise ValueError("expected whole trees: a row does not end with a closing bracket")
    rungs = []
    num_train = min(num_train, len(train))
    known, asked = _features(train, depths, num_train), _features(test, depths, len(test))
    for depth in depths:
        fitted, wanted = ((root * 100 + low * 10 + high) for root, low, high in (known[depth], asked[depth]))
        labels = train.labels[:num_train].numpy(), test.labels.numpy()
        is_certain = asked[depth][1] == asked[depth][2]
        rungs.append(Rung(depth, lookup_floor(fitted, labels[0], wanted, labels[1]), float(is_certain.mean())))
    return rungs
