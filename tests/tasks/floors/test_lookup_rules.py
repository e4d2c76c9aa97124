"""Floors are computed once for the same data, and again when the data change; a vote finds where answers stand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attn_zoo.registry import tasks
from attn_zoo.tasks.abstract_task import IGNORED_LABEL, Split
from attn_zoo.tasks.floors import lookup_rules
from attn_zoo.tasks.floors.lookup_rules import floors_of, lookup_floor, majority_floor, vote_floor


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path))


def test_floors_are_computed_once_and_kept(monkeypatch):
    task_class = tasks["induction"]
    calls = []
    original = task_class.floors

    def counted(task):
        calls.append(task)
        return original(task)

    monkeypatch.setattr(task_class, "floors", counted)
    first = floors_of(task_class("short"))
    assert floors_of(task_class("short")) == first == original(task_class("short"))
    assert len(calls) == 1


def test_another_version_of_the_data_gets_its_own_floors(monkeypatch):
    task_class = tasks["induction"]
    monkeypatch.setattr(task_class, "floors", lambda self: {"rule": 0.25})
    assert floors_of(task_class("short")) == {"rule": 0.25}
    monkeypatch.setattr(task_class, "floors", lambda self: {"rule": 0.5})
    assert floors_of(task_class("short")) == {"rule": 0.25}
    monkeypatch.setattr(task_class, "version", task_class.version + 1)
    assert floors_of(task_class("short")) == {"rule": 0.5}


def test_the_majority_is_that_of_train():
    train, test = np.array([1, 1, 0]), np.array([0, 0, 1, 1, 1])
    assert majority_floor(train, test) == 0.6
    assert lookup_floor(train, train, test, test) == 1.0


NUM_SYMBOLS = 8


def rows_with(places, *, seed, count=3_000, length=20, padded=20, later=2):
    """Return rows of symbols (tokens from 1) whose two last positions ask: for `places[i]`, and for `later` at once."""
    symbols = np.random.default_rng(seed).integers(NUM_SYMBOLS, size=(count, length))
    tokens = np.zeros((count, padded), np.uint8)
    tokens[:, :length] = symbols + 1
    labels = np.full((count, padded), IGNORED_LABEL, np.int16)
    labels[:, length - 2] = symbols[np.arange(count), places[:count]]
    labels[:, length - 1] = symbols[:, later]
    lengths = torch.full((count,), length, dtype=torch.int32)
    return Split(tokens=torch.from_numpy(tokens), lengths=lengths, labels=torch.from_numpy(labels))


def options_of(tokens):
    return tokens.astype(np.int64) - 1


def voted(train, test) -> float:
    return vote_floor(train, test, options_of, NUM_SYMBOLS)


def test_a_vote_finds_where_answers_stand():
    """The second question is always for place 2; the first for place 3 in seven of ten rows and else for place 11."""
    places = np.where(np.random.default_rng(0).random(6_000) < 0.7, 3, 11)
    score = voted(rows_with(places, seed=1), rows_with(places[3_000:], seed=2))
    # Right where place 3 is the answer, or holds the same symbol by chance.
    assert score == pytest.approx((1.0 + 0.7 + 0.3 / 8) / 2, abs=0.02)


def test_a_vote_does_not_find_what_stands_beside_a_mark_that_moves():
    places = np.random.default_rng(3).integers(20, size=6_000)
    train, test = rows_with(places, seed=4), rows_with(places[3_000:], seed=5)
    # A symbol of a row at random is the answer in 1 of 20, and else by chance; its most frequent one a little more.
    first = 2 * voted(train, test) - 1.0
    assert 0.125 < first < 0.3


def test_a_vote_is_at_chance_where_no_place_says_anything():
    train, test = (rows_with(np.zeros(3_000, int), seed=seed) for seed in (6, 7))
    for split in (train, test):
        is_label = split.labels != IGNORED_LABEL
        order = torch.randperm(int(is_label.sum()), generator=torch.Generator().manual_seed(0))
        split.labels[is_label] = split.labels[is_label][order]
    assert voted(train, test) == pytest.approx(1 / 8, abs=0.025)


def test_each_length_has_votes_of_its_own_and_padding_has_none():
    train = rows_with(np.full(3_000, 4), seed=8), rows_with(np.full(3_000, 9), seed=9, length=12)
    test = rows_with(np.full(500, 4), seed=10, count=500), rows_with(np.full(500, 9), seed=11, count=500, length=12)
    both, asked = (
        Split(**{name: torch.cat([part.tensors()[name] for part in parts]) for name in parts[0].tensors()})
        for parts in (train, test)
    )
    assert voted(both, asked) == 1.0
    assert voted(train[0], asked) < 0.7, "rows of 12 were not seen: all votes weigh the same"
    assert voted(train[0], test[0]) == 1.0


def test_places_that_are_seldom_seen_share_their_votes(monkeypatch):
    """600 rows of 20 places, each with 30 symbols: 600 options lie behind a weight, or, if more are asked, 20 times."""
    few = rows_with(np.full(600, 5), seed=12, count=600), rows_with(np.full(600, 5), seed=13, count=600)
    assert voted(*few) == 1.0
    monkeypatch.setattr(lookup_rules, "_FEWEST_SEEN", 600 * 20)
    assert voted(*few) < 0.5


def test_votes_do_not_depend_on_how_many_rows_are_looked_at_at_once(monkeypatch):
    places = np.random.default_rng(14).integers(3, 6, size=6_000)
    parts = rows_with(places, seed=15), rows_with(places[3_000:], seed=16)
    whole = voted(*parts)
    monkeypatch.setattr(lookup_rules, "_TOKENS_AT_ONCE", 20 * 7)
    assert voted(*parts) == whole
    monkeypatch.setattr(lookup_rules, "_MOST_TOKENS", 20 * 1_000)  # every third row of train
    assert voted(*parts) == pytest.approx(whole, abs=0.03)
