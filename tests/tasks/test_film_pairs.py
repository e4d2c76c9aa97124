"""Pairs of reviews: true to their label, and no hint but the pairing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_zoo.tasks.imdb_pairs import film_pairs

PINNED = [
    [6, 7, 4, 2, 1, 2, 1, 6, 0, 7, 5, 0, 4, 5],
    [1, 5, 7, 0, 2, 6, 3, 7, 5, 0, 2, 1, 3, 6],
    [0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1],
]


def pairs_of(films, classes, lengths, *, rows=None, max_pairs=0, seed=0):
    films, classes, lengths = np.array(films), np.array(classes), np.array(lengths)
    rows = np.arange(len(films)) if rows is None else np.array(rows)
    return film_pairs(rows, films, classes, lengths, max_pairs=max_pairs, seed=seed, stream=0)


def drawn(num_reviews=3_000, num_films=150, seed=0):
    draw = np.random.default_rng(seed)
    films = draw.integers(num_films, size=num_reviews)
    # Films differ in how long their reviews are, and in how well they are liked.
    lengths = (draw.lognormal(6, 0.4, size=num_reviews) * (1 + 5 * films / num_films)).astype(int)
    classes = (draw.random(num_reviews) < films / num_films).astype(int)
    return films, classes, lengths


reviews = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1), st.integers(1, 9)), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(reviews, st.integers(0, 3))
def test_every_pair_is_what_its_label_says(rows, seed):
    films, classes, lengths = map(np.array, zip(*rows, strict=True))
    pairs = pairs_of(films, classes, lengths, seed=seed)
    assert ((films[pairs.first] == films[pairs.second]) == pairs.labels.astype(bool)).all()
    assert (classes[pairs.first] == classes[pairs.second]).all()
    assert (pairs.first != pairs.second).all()
    for side in (pairs.first, pairs.second):  # each review as often in one kind as in the other
        assert Counter(side[pairs.labels == 1].tolist()) == Counter(side[pairs.labels == 0].tolist())
        assert max(Counter(side[pairs.labels == 1].tolist()).values(), default=0) <= 1
    unordered = {frozenset(pair) for pair in zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)}
    assert len(unordered) >= len(pairs.labels) // 2  # at worst a negative pair meets its mirror image


def test_hardly_a_pair_is_lost():
    films, classes, lengths = drawn()
    sizes = Counter(zip(films.tolist(), classes.tolist(), strict=True)).values()
    possible = sum(size if size > 2 else size - 1 for size in sizes)
    found = int(pairs_of(films, classes, lengths).labels.sum())
    assert 0.95 * possible <= found <= possible


def test_lengths_do_not_tell():
    """Lengths of two reviews of one film are alike here; matched without care, their difference would give it away."""
    films, classes, lengths = drawn()
    pairs = pairs_of(films, classes, lengths)
    gap = abs(lengths[pairs.first] - lengths[pairs.second])
    same, other = gap[pairs.labels == 1], gap[pairs.labels == 0]
    assert abs(np.median(same) - np.median(other)) < 0.03 * np.median(same)
    careless = abs(lengths[pairs.first] - np.random.default_rng(0).permutation(lengths[pairs.second]))
    assert np.median(careless) > 1.1 * np.median(same)


def test_order_is_shuffled_and_pinned_by_the_seed():
    films, classes, lengths = drawn(400, 40)
    one, two, other = (pairs_of(films, classes, lengths, seed=seed) for seed in (0, 0, 1))
    assert (one.first == two.first).all()
    assert (one.labels == two.labels).all()
    assert len(one.first) != len(other.first) or (one.first != other.first).any()
    assert 0.3 < one.labels[: len(one.labels) // 2].mean() < 0.7


def test_pairs_are_pinned():
    """These must never change without a new version of the task: stored results rest on them."""
    pairs = pairs_of([0, 0, 0, 1, 1, 2, 2, 2], [0] * 8, [5, 3, 8, 1, 9, 4, 7, 2])
    assert [pairs.first.tolist(), pairs.second.tolist(), pairs.labels.tolist()] == PINNED


def test_only_the_given_rows_are_used_and_no_more_pairs_than_asked_for():
    films, classes, lengths = drawn()
    pairs = pairs_of(films, classes, lengths, rows=np.arange(0, 3_000, 2), max_pairs=200)
    assert not (np.concatenate([pairs.first, pairs.second]) % 2).any()
    assert 190 <= len(pairs.labels) <= 200


@pytest.mark.parametrize("films", [[0], [0, 1, 2], [5, 5, 5, 5]])
def test_where_there_are_no_pairs_there_are_none(films):
    """No film has two reviews, or there is no other film."""
    assert len(pairs_of(films, [0] * len(films), [1] * len(films)).labels) == 0
