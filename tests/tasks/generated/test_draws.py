"""Random draws: fixed on every machine, uniform, without replacement where promised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_zoo.tasks.generated.draws import Draws, shuffled


def test_the_stream_is_fixed_for_good():
    """Values written down once: if they change, every generated task changes under the same version."""
    draws = Draws(0, 1, 2)
    assert draws.below(1_000, 4).tolist() == [53, 568, 587, 861]
    assert draws.uniform(2).tolist() == [0.6598924665176878, 0.9486435205057366]
    assert draws.distinct(5, 3, 2).tolist() == [[2, 4, 0], [1, 3, 2]]


def test_streams_differ_and_repeat():
    one, same, other = Draws(0, 1), Draws(0, 1), Draws(0, 2)
    first = one.below(2**31, 8).tolist()
    assert first == same.below(2**31, 8).tolist() != other.below(2**31, 8).tolist()


def test_below_is_uniform_and_takes_a_bound_for_each():
    draws = Draws(3)
    counts = np.bincount(draws.below(7, 70_000), minlength=7)
    assert abs(counts - 10_000).max() < 5 * 10_000**0.5
    bounds = np.array([1, 2, 3])
    values = draws.below(bounds, 5_000, 3)
    assert values.max(0).tolist() == [0, 1, 2]
    assert values.min() == 0


def test_distinct_draws_every_arrangement_equally_often():
    rows = Draws(4).distinct(4, 2, 24_000)
    assert (rows[:, 0] != rows[:, 1]).all()
    counts = np.bincount(rows[:, 0] * 4 + rows[:, 1], minlength=16).reshape(4, 4)
    assert counts.diagonal().sum() == 0
    assert abs(counts[~np.eye(4, dtype=bool)] - 2_000).max() < 5 * 2_000**0.5


def test_distinct_can_be_a_permutation_but_no_more():
    assert np.sort(Draws(5).distinct(6, 6, 10), axis=1).tolist() == [list(range(6))] * 10
    with pytest.raises(ValueError, match="at most 6 different values; got 7"):
        Draws(5).distinct(6, 7, 1)


def test_weighted_follows_the_weights_step_by_step():
    """First draw proportional to the weights, second to what is left: written out for three items."""
    weights = np.array([6.0, 3.0, 1.0])
    rows = Draws(6).weighted(weights, 2, 50_000)
    assert (rows[:, 0] != rows[:, 1]).all()
    found = np.bincount(rows[:, 0] * 3 + rows[:, 1], minlength=9).reshape(3, 3) / 50_000
    for first in range(3):
        for second in range(3):
            share = weights[second] / (weights.sum() - weights[first])
            expected = 0.0 if first == second else weights[first] / 10 * share
            assert found[first, second] == pytest.approx(expected, abs=0.012)


def test_weighted_can_take_all():
    assert np.sort(Draws(7).weighted(np.array([1.0, 0.1, 5.0]), 3, 20), axis=1).tolist() == [[0, 1, 2]] * 20


# Orders

PINNED_ORDER = [1, 3, 8, 6, 2, 11, 0, 7, 5, 4, 10, 9]


def test_an_order_is_pinned():
    """These numbers must never change: splits of stored results rest on them."""
    assert shuffled(12, 0, 1).tolist() == PINNED_ORDER
    assert shuffled(12, 0, 0).tolist() != PINNED_ORDER
    assert shuffled(12, 1, 1).tolist() != PINNED_ORDER


@given(st.integers(0, 200), st.integers(0, 5))
def test_an_order_has_everything_once(count, seed):
    assert sorted(shuffled(count, seed)) == list(range(count))
