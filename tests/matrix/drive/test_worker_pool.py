"""A lane keeps its process; several start at once, on a CPU before anything is measured; and where the time went."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_zoo.matrix.drive import worker_pool as module
from attn_zoo.matrix.drive.engines.process import Ended
from attn_zoo.matrix.drive.worker_pool import Control, Settings, WorkerPool
from attn_zoo.records import Record, Status
from tests.matrix.conftest import tiny_plan, training_plan


class FakeProcess:
    """Answers at once; notes its life."""

    made: list[FakeProcess]
    status: Status = "ok"
    is_dying = False

    def __init__(self, log, threads, mark=""):
        self.log, self.threads, self.waited_s = log, threads, 0.25
        self.orders, self.is_closed, self.is_waiting = [], False, True
        self.verdicts: dict[str, str] = {}
        FakeProcess.made.append(self)

    def is_starting(self, wait_s=0.0):
        return False

    def run(self, order, limits_s, should_stop):
        self.orders.append((order, limits_s, len(FakeProcess.made)))
        self.verdicts = {f"by {len(FakeProcess.made)}": "held"}
        self.is_fit = FakeProcess.status == "ok"
        if FakeProcess.is_dying:
            return Ended("exit", -11)
        return [Record(cell=cell, status=FakeProcess.status, phases={"timing": 2.0}) for cell in order.cells]

    def close(self):
        self.is_closed = True


@pytest.fixture
def start(monkeypatch, tmp_path):
    FakeProcess.made, FakeProcess.status = [], "ok"
    monkeypatch.setattr(module, "WorkerProcess", FakeProcess)
    monkeypatch.setattr(module, "num_cores", lambda: 2)
    monkeypatch.setattr(module, "available_bytes", lambda: 2**40)
    return lambda ahead=(): WorkerPool(Settings(logs=tmp_path), Control(), ahead)


def planned(device="cpu", **changes):
    items = tiny_plan(["fake_ok"], seq_len=[16, 24, 32], **changes).cells
    return [replace(item, cell=replace(item.cell, device=device)) for item in items]


def test_a_lane_keeps_its_process_until_a_failure(start):
    pool, items = start(), planned(isolation="lane")
    pool.ask(items[:1], keeps=True, has_next=True)
    pool.ask(items[1:2], keeps=True, has_next=True)
    assert [len(process.orders) for process in FakeProcess.made] == [2]
    FakeProcess.status = "error"
    pool.ask(items[2:], keeps=True, has_next=True)
    assert FakeProcess.made[0].is_closed
    FakeProcess.status = "ok"
    pool.ask(items[:1], keeps=True)
    assert len(FakeProcess.made) == 2
    pool.close()
    assert all(process.is_closed for process in FakeProcess.made)


def test_on_a_gpu_the_next_process_starts_while_one_measures(start):
    pool, items = start(), planned("cuda")
    for item in items:
        pool.ask([item], has_next=item is not items[-1])
    started_when_asked = [process.orders[0][2] for process in FakeProcess.made]
    assert started_when_asked == [2, 3, 3], "each finds its successor started; the last has none"
    assert all(len(process.orders) == 1 and process.is_closed for process in FakeProcess.made)


def num_started_at_each_order(pool, items):
    """Return how many processes had been started when each cell was asked for."""
    FakeProcess.made = []
    for item in items:
        pool.ask([item])
    return [order[2] for process in FakeProcess.made for order in process.orders]


def test_on_a_cpu_as_many_processes_start_at_once_as_there_are_cores_and_cells(start, monkeypatch):
    items = planned()
    assert num_started_at_each_order(start(items), items) == [2, 2, 3]
    monkeypatch.setattr(module, "num_cores", lambda: 64)
    assert num_started_at_each_order(start(items), items) == [3, 3, 3]
    assert num_started_at_each_order(start(), items) == [1, 2, 3], "what is not known to come is not started for"
    many = tiny_plan(["fake_ok"], seq_len=list(range(16, 36))).cells
    assert num_started_at_each_order(start(many), many)[0] == module.MAX_STARTING
    monkeypatch.setattr(module, "available_bytes", lambda: int(2 * module.WAITING_BYTES / module.WAITING_FRAC))
    assert num_started_at_each_order(start(items), items) == [3, 3, 3], "one measures, two wait"
    monkeypatch.setattr(module, "available_bytes", lambda: module.WAITING_BYTES)
    assert num_started_at_each_order(start(items), items) == [1, 2, 3]


def test_only_cells_that_the_processes_suit_are_started_for(start, monkeypatch):
    monkeypatch.setattr(module, "num_cores", lambda: 64)
    first, second, third = planned()
    other = replace(second, cell=replace(second.cell, threads=2))
    assert num_started_at_each_order(start([first, other, third]), [first, other, third]) == [1, 2, 3]
    assert [process.threads for process in FakeProcess.made] == [1, 2, 1]
    gpu = replace(second, cell=replace(second.cell, device="cuda"))
    assert num_started_at_each_order(start([first, gpu]), [first, gpu]) == [1, 2]
    training = training_plan(["fake_train_ok"], seeds=[0, 1]).cells
    assert num_started_at_each_order(start(training), training) == [1, 2]


def test_a_lane_needs_one_process_and_the_next_lane_another(start):
    items = tiny_plan(["fake_ok", "fake_slow"], seq_len=[16, 24], isolation="lane").cells
    lanes = [[item for item in items if item.cell.variant == name] for name in ("fake_ok", "fake_slow")]
    pool = start(items)
    for lane in lanes:
        for item in lane:
            pool.ask([item], keeps=True)
        pool.end_lane()
    assert [len(process.orders) for process in FakeProcess.made] == [2, 2]
    assert [process.orders[0][2] for process in FakeProcess.made] == [2, 2]
    assert all(process.is_closed for process in FakeProcess.made)


def test_one_that_died_while_it_waited_is_replaced(start):
    items = planned()
    with start(items) as pool:
        pool.ask(items[:1])
        FakeProcess.made[1].is_waiting = False
        pool.ask(items[1:2])
    assert [len(process.orders) for process in FakeProcess.made] == [1, 0, 1, 0]
    assert all(process.is_closed for process in FakeProcess.made)


def test_verdicts_of_the_gate_go_to_the_processes_after(start):
    items = planned()
    pool = start()
    for item in items:
        pool.ask([item])
    told = [process.orders[0][0].verdicts for process in FakeProcess.made]
    assert told == [{}, {"by 1": "held"}, {"by 1": "held", "by 2": "held"}]
    start().ask(items[:1])
    assert FakeProcess.made[-1].orders[0][0].verdicts == {}, "another run asks its gates again"


def test_a_process_with_other_threads_is_not_used(start):
    pool, items = start(), planned("cuda")
    pool.ask(items[:1], has_next=True)
    other = replace(items[1], cell=replace(items[1].cell, threads=2))
    pool.ask([other])
    assert [(process.threads, len(process.orders)) for process in FakeProcess.made] == [(1, 1), (1, 0), (2, 1)]
    assert all(process.is_closed for process in FakeProcess.made)


def test_a_spare_that_nobody_needed_is_ended(start):
    pool, items = start(), planned("cuda")
    pool.ask(items[:1], has_next=True)
    pool.close()
    assert [process.is_closed for process in FakeProcess.made] == [True, True]


def test_what_an_order_costs_is_shared_by_its_cells(start, monkeypatch):
    now = iter([0.0, 1.0, 1.0, 3.0, 3.0, 13.0])  # made, asked, taking, taken, going on, answered
    monkeypatch.setattr("attn_zoo.matrix.drive.worker_pool.time.monotonic", lambda: next(now))
    found = start().ask(planned()[:2])
    assert not isinstance(found, Ended)
    for record in found:
        # Of 13 s, 2 cells measured 2 s each; the process took 2.25 s to start.
        assert record.phases == {"timing": 2.0, "driver": 0.5, "start": 1.125, "exchange": 2.875}
        assert record.overhead_s == 4.5
    assert sum(sum(record.phases.values()) for record in found) == 13.0


def test_cells_whose_processes_started_together_share_that_time(start, monkeypatch):
    items = planned()[:2]
    now = iter([0.0, 0.0, 0.0, 6.0, 6.0, 16.0, 17.0, 17.0, 17.0, 20.0])  # 6 s to start two, 10 s and 3 s to answer
    monkeypatch.setattr("attn_zoo.matrix.drive.worker_pool.time.monotonic", lambda: next(now))
    pool = start(items)
    found = [record for item in items for record in pool.ask([item])]
    assert [record.phases["start"] for record in found] == [3.25, 3.25]
    assert [record.phases["driver"] for record in found] == [0.0, 1.0]
    assert sum(sum(record.phases.values()) for record in found) == 20.0


def test_an_end_without_an_answer_is_handed_on(start, monkeypatch):
    monkeypatch.setattr(FakeProcess, "is_dying", True)
    pool = start()
    assert pool.ask(planned()[:1]) == Ended("exit", -11)
