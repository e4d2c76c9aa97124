"""Floors are computed once for the same data, and again when the data change."""

from __future__ import annotations

import numpy as np
import pytest

from attn_zoo.registry import tasks
from attn_zoo.tasks.floors.lookup_rules import floors_of, lookup_floor, majority_floor


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
