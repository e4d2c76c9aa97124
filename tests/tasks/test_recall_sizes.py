"""Generated recall tasks of any size that their parts admit, against the plain solutions."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.tasks.copying import Copying, DelayPart
from attn_zoo.tasks.generated.draws import Draws
from attn_zoo.tasks.induction import Induction, InductionPart
from attn_zoo.tasks.mqar import MultiQueryRecall, RecallPart
from attn_zoo.tasks.needle import Needle, NeedlePart
from attn_zoo.tasks.selective_copying import CopyPart, SelectiveCopying
from tests.tasks.oracles import solver_of

COUNTS = {"num_train": 24, "num_validation": 6, "num_test": 12}


def solved(task: Any, rows: Any) -> bool:
    solve = solver_of(task)
    for tokens, labels in zip(rows.tokens.tolist(), rows.labels.tolist(), strict=True):
        if solve(tokens) != {place: label for place, label in enumerate(labels) if label != IGNORED_LABEL}:
            return False
    return True


@given(pairs=st.integers(1, 15), slack=st.integers(0, 30), seed=st.integers(0, 9), data=st.data())
@settings(max_examples=30, deadline=None)
def test_recall_of_any_size_is_solved(pairs, slack, seed, data):
    length = 4 * pairs + 2 * slack
    distance = data.draw(st.sampled_from([0, *range(2 * pairs, length - 2 * pairs + 1)]))
    part = RecallPart(seq_len=length, num_pairs=pairs, distance=distance, **COUNTS)
    task = MultiQueryRecall("short")
    assert solved(task, task.draw(Draws(seed), part, 5))


@given(needles=st.integers(1, 8), slack=st.integers(20, 60), band=st.integers(0, 3), seed=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_haystack_of_any_size_is_solved(needles, slack, band, seed):
    part = NeedlePart(
        seq_len=needles + slack, depth_percent=12.5 + 25 * band, band_percent=25, num_needles=needles, **COUNTS
    )
    task = Needle("short")
    rows = task.draw(Draws(seed), part, 5)
    assert solved(task, rows)
    assert ((rows.tokens > 16).sum(1) == needles + 1).all()  # no needle lies upon another; one question


@given(count=st.integers(1, 20), slack=st.integers(0, 40), seed=st.integers(0, 9), data=st.data())
@settings(max_examples=30, deadline=None)
def test_copies_of_any_size_are_solved(count, slack, seed, data):
    length = 2 * count + slack
    selective, plain = SelectiveCopying("short"), Copying("short")
    assert solved(selective, selective.draw(Draws(seed), CopyPart(seq_len=length, num_tokens=count, **COUNTS), 5))
    part = DelayPart(seq_len=length, num_tokens=count, delay=data.draw(st.integers(0, slack)), **COUNTS)
    assert solved(plain, plain.draw(Draws(seed), part, 5))


@given(length=st.integers(3, 80), seed=st.integers(0, 9), data=st.data())
@settings(max_examples=30, deadline=None)
def test_induction_at_any_distance_is_solved(length, seed, data):
    distance = data.draw(st.sampled_from([0, *range(2, length)]))
    task = Induction("short")
    assert solved(task, task.draw(Draws(seed), InductionPart(seq_len=length, distance=distance, **COUNTS), 5))
