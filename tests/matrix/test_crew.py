"""A lane keeps its process; a GPU's next process starts early, a CPU's never; and where the time went."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_zoo.matrix import crew as module
from attn_zoo.matrix.crew import Crew, Settings
from attn_zoo.matrix.engines.process import Ended
from attn_zoo.records import Cell, Record, Status
from tests.matrix.conftest import tiny_plan


class FakeProcess:
    """Answers at once; notes its life."""

    made: list[FakeProcess]
    status: Status = "ok"
    is_dying = False

    def __init__(self, log, threads):
        self.log, self.threads, self.waited_s = log, threads, 0.25
        self.requests, self.is_closed = [], False
        FakeProcess.made.append(self)

    def run(self, request, limits_s, should_stop):
        self.requests.append((request, limits_s, len(FakeProcess.made)))
        if FakeProcess.is_dying:
            return Ended("exit", -11)
        cells = [Cell.from_dict(data) for data in request["cells"]]
        return [Record(cell=cell, status=FakeProcess.status, phases={"timing": 2.0}) for cell in cells]

    def close(self):
        self.is_closed = True


@pytest.fixture
def start(monkeypatch, tmp_path):
    FakeProcess.made, FakeProcess.status = [], "ok"
    monkeypatch.setattr(module, "WorkerProcess", FakeProcess)
    return lambda: Crew(Settings(logs=tmp_path), lambda: False, lambda: False)


def planned(device="cpu", **changes):
    items = tiny_plan(["fake_ok"], seq_len=[16, 24, 32], **changes).cells
    return [replace(item, cell=replace(item.cell, device=device)) for item in items]


def test_a_lane_keeps_its_process_until_a_failure(start):
    crew, items = start(), planned(isolation="lane")
    crew.ask(items[:1], keeps=True, has_next=True)
    crew.ask(items[1:2], keeps=True, has_next=True)
    assert [len(process.requests) for process in FakeProcess.made] == [2]
    FakeProcess.status = "error"
    crew.ask(items[2:], keeps=True, has_next=True)
    assert FakeProcess.made[0].is_closed
    FakeProcess.status = "ok"
    crew.ask(items[:1], keeps=True)
    assert len(FakeProcess.made) == 2
    crew.close()
    assert all(process.is_closed for process in FakeProcess.made)


def test_on_a_gpu_the_next_process_starts_while_one_measures_and_on_a_cpu_never(start):
    crew, items = start(), planned("cuda")
    for item in items:
        crew.ask([item], has_next=item is not items[-1])
    started_when_asked = [process.requests[0][2] for process in FakeProcess.made]
    assert started_when_asked == [2, 3, 3], "each finds its successor started; the last has none"
    assert all(len(process.requests) == 1 and process.is_closed for process in FakeProcess.made)
    FakeProcess.made = []
    crew, items = start(), planned("cpu")
    for item in items:
        crew.ask([item], has_next=item is not items[-1])
    assert [process.requests[0][2] for process in FakeProcess.made] == [1, 2, 3]


def test_a_process_with_other_threads_is_not_used(start):
    crew, items = start(), planned("cuda")
    crew.ask(items[:1], has_next=True)
    other = replace(items[1], cell=replace(items[1].cell, threads=2))
    crew.ask([other])
    assert [(process.threads, len(process.requests)) for process in FakeProcess.made] == [(1, 1), (1, 0), (2, 1)]
    assert all(process.is_closed for process in FakeProcess.made)


def test_a_spare_that_nobody_needed_is_ended(start):
    crew, items = start(), planned("cuda")
    crew.ask(items[:1], has_next=True)
    crew.close()
    assert [process.is_closed for process in FakeProcess.made] == [True, True]


def test_what_a_request_costs_is_shared_by_its_cells(start, monkeypatch):
    now = iter([0.0, 1.0, 3.0, 13.0])  # made, asked, process spawned, answered
    monkeypatch.setattr("attn_zoo.matrix.crew.time.monotonic", lambda: next(now))
    found = start().ask(planned()[:2])
    assert not isinstance(found, Ended)
    for record in found:
        # Of 13 s, 2 cells measured 2 s each; the process took 2.25 s to start.
        assert record.phases == {"timing": 2.0, "driver": 0.5, "start": 1.125, "exchange": 2.875}
        assert record.overhead_s == 4.5
    assert sum(sum(record.phases.values()) for record in found) == 13.0


def test_an_end_without_an_answer_is_handed_on(start, monkeypatch):
    monkeypatch.setattr(FakeProcess, "is_dying", True)
    crew = start()
    assert crew.ask(planned()[:1]) == Ended("exit", -11)
