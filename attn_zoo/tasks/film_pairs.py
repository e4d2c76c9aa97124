"""Pairs of reviews, of one film or of two, made so that nothing but the pairing itself tells the two kinds apart.

Positive pairs: within each film and class of sentiment, reviews stand in a random ring, and each is paired with the
next (two reviews make one pair). Negative pairs: the same first reviews and the same second reviews, matched anew with
another film's. So in both kinds

* every review stands equally often first and equally often second: no text alone, no film's fame tells anything;
* both reviews of a pair have the same sentiment, each as often as in the other kind;
* the second review is, among all of its class, the next in length to the one it replaces: lengths do not tell.

Where the next in length is of the same film, the pair is left out, the positive one with the negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attn_zoo.tasks.generated.draws import Draws, Ints

__all__ = ["Pairs", "film_pairs"]

_RING, _TIES, _ORDER = range(3)  # streams of random numbers


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of rows in random order, as many with label 1 as with label 0.

    Args:
        first: row of the first review `[N]`.
        second: row of the second `[N]`.
        labels: 1 for one film, 0 for two, `[N]`.
    """

    first: Ints
    second: Ints
    labels: NDArray[np.uint8]


def _rings(rows: Ints, films: Ints, classes: NDArray[np.integer], draws: Draws) -> tuple[Ints, Ints]:
    """Return each review beside the next of its film and class."""
    order = rows[np.lexsort((draws.uniform(len(rows)), classes[rows], films[rows]))]
    group = np.stack([films[order], classes[order].astype(np.int64)])
    starts = np.flatnonzero(np.concatenate([[True], (group[:, 1:] != group[:, :-1]).any(0)]))
    sizes = np.diff(np.append(starts, len(order)))
    start_of, size_of = np.repeat(starts, sizes), np.repeat(sizes, sizes)
    place = np.arange(len(order)) - start_of
    second = order[start_of + (place + 1) % size_of]
    keep = (size_of > 2) | ((size_of == 2) & (place == 0))
    return order[keep], second[keep]


def _matched_anew(
    first: Ints, second: Ints, films: Ints, classes: NDArray[np.integer], lengths: Ints, draws: Draws
) -> tuple[NDArray[np.bool_], Ints]:
    """Return which pairs can stay, and for each of these the second review of its negative pair."""
    stays = np.ones(len(first), bool)
    ties = draws.uniform(len(first))
    while True:
        pairs = np.flatnonzero(stays)
        order = pairs[np.lexsort((ties[pairs], lengths[second[pairs]], classes[second[pairs]]))]
        other = np.empty(len(first), np.int64)
        for label in np.unique(classes[second[order]]):
            ring = order[classes[second[order]] == label]
            other[ring] = second[np.roll(ring, -1)]
        clash = films[other[pairs]] == films[first[pairs]]
        if not clash.any():
            return stays, other[pairs]
        stays[pairs[clash]] = False


def film_pairs(
    rows: Ints, films: Ints, classes: NDArray[np.integer], lengths: Ints, *, max_pairs: int, seed: int, stream: int
) -> Pairs:
    """Return pairs made of the given reviews.

    Args:
        rows: indices of the reviews to use.
        films: film of every review, as a number, also of those not used.
        classes: sentiment of every review.
        lengths: of every review.
        max_pairs: no more than so many; 0 takes all.
        seed: of the drawing.
        stream: number of this set of pairs.

    >>> films, classes = np.array([0, 0, 1, 1]), np.zeros(4, np.int64)
    >>> pairs = film_pairs(np.arange(4), films, classes, np.arange(4), max_pairs=0, seed=0, stream=0)
    >>> bool(((films[pairs.first] == films[pairs.second]) == pairs.labels).all())
    True
    """
    first, second = _rings(rows, films, classes, Draws(seed, stream, _RING))
    if max_pairs:
        some = np.argsort(Draws(seed, stream, _ORDER, 0).uniform(len(first)), kind="stable")[: max_pairs // 2]
        first, second = first[some], second[some]
    stays, other = _matched_anew(first, second, films, classes, lengths, Draws(seed, stream, _TIES))
    first, second = first[stays], second[stays]
    labels = np.repeat(np.array([1, 0], np.uint8), len(first))
    order = np.argsort(Draws(seed, stream, _ORDER, 1).uniform(len(labels)), kind="stable")
    return Pairs(np.tile(first, 2)[order], np.concatenate([second, other])[order], labels[order])
