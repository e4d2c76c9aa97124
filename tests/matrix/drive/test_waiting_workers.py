"""Processes that start together and wait their turn, for real: they load before anything is measured, and all end."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace

import psutil
import pytest

from attn_zoo.matrix.drive import worker_pool as module
from attn_zoo.matrix.drive.engines.process import Ended, WorkerProcess
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.drive.worker_pool import Control, Settings, WorkerPool
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Record
from tests.matrix.conftest import VARIANT_FILE, tiny_plan


class Stopped(Control):
    def is_over(self):
        return True

    def should_stop(self):
        return True


class Watched(WorkerProcess):
    """Notes every process, and who was alive and still loading when one was asked."""

    made: list[Watched]
    loading: list[int]
    waiting: list[int]

    def __init__(self, log, threads, mark=""):
        super().__init__(log, threads)
        self.seen = psutil.Process(self._process.pid)
        Watched.made.append(self)

    def run(self, order, limits_s, should_stop):
        Watched.loading.append(sum(each.is_starting() for each in Watched.made))
        Watched.waiting.append(sum(each.is_waiting for each in Watched.made))
        return super().run(order, limits_s, should_stop)


def watch(monkeypatch, cores):
    Watched.made, Watched.loading, Watched.waiting = [], [], []
    monkeypatch.setattr(module, "WorkerProcess", Watched)
    monkeypatch.setattr(module, "num_cores", lambda: cores)
    monkeypatch.setattr(module, "available_bytes", lambda: 2**40)


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    watch(monkeypatch, cores=2)


def is_alive(process):
    try:
        return process.seen.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_dead(process):
    end = time.monotonic() + 10
    while is_alive(process):
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.05)


def num_alive():
    return sum(map(is_alive, Watched.made))


def processor_s(process):
    times = process.seen.cpu_times()
    return times.user + times.system


@dataclass
class Outcome:
    records: list[Record]
    made: int
    loading: list[int]
    waiting: list[int]
    alive: int

    def of(self, name):
        return [record for record in self.records if record.cell.variant == name]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Five cells with a process each: one that crashes, two that are sound, two that the gate refuses."""
    lengths = {"fake_segfault": [900], "fake_ok": [16, 24], "fake_nan": [16, 24]}
    plans = [tiny_plan([name], seq_len=lengths[name], isolation="cell") for name in lengths]
    cells = tuple(item for plan in plans for item in plan.cells)
    store = Store(tmp_path_factory.mktemp("batches") / "run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("attn_zoo.matrix.drive.run_plan.note_ceilings", lambda *_, **__: None)
        watch(monkeypatch, cores=3)
        run(replace(plans[0], cells=cells), store)
        return Outcome(store.records(), len(Watched.made), Watched.loading, Watched.waiting, num_alive())


def test_nobody_loads_while_one_measures_and_nobody_is_left(outcome):
    assert len(outcome.records) == 5
    assert outcome.loading == [0] * 5
    assert outcome.waiting == [3, 2, 1, 2, 1], "three started together, then two for the last cells"
    assert outcome.alive == 0


def test_a_crash_of_one_cell_leaves_the_waiting_ones_fit(outcome):
    assert [record.status for record in outcome.of("fake_segfault")] == ["crashed"]
    assert {record.status for record in outcome.of("fake_ok")} == {"ok"}
    assert outcome.made == 5


def test_a_gate_is_asked_once_in_a_run_and_its_no_reaches_every_cell(outcome):
    sound, broken = outcome.of("fake_ok"), outcome.of("fake_nan")
    assert len({record.gate for record in sound}) == 1, "the record says the same of every cell"
    assert {"matches_oracle", "own_rows"} <= set(sound[0].gate)
    assert [record.status for record in broken] == ["gate_failed"] * 2
    assert len({record.reason for record in broken}) == 1


def test_a_lane_goes_on_in_another_process_after_a_capture_that_failed(tmp_path):
    settings = Settings(logs=tmp_path, variant_files=(VARIANT_FILE,))
    for name, num_processes in (("fake_ok", 1), ("fake_capture", 2)):
        Watched.made = []
        items = tiny_plan([name], seq_len=[900, 901], isolation="lane").cells
        with WorkerPool(settings, Control()) as pool:
            for item in items:
                answer = pool.ask([item], keeps=True, isolation="lane", attempt=1)
                assert not isinstance(answer, Ended)
                assert [record.status for record in answer] == ["ok"]
        assert len(Watched.made) == num_processes


def test_one_that_waits_uses_no_processor_and_dies_with_the_crew(tmp_path):
    items = tiny_plan(["fake_ok"], seq_len=[16, 24]).cells
    settings = Settings(logs=tmp_path, variant_files=(VARIANT_FILE,))
    with WorkerPool(settings, Control(), items) as pool:
        pool.ask(items[:1], isolation="cell", attempt=1)
        first, other = Watched.made
        assert not first.seen.is_running(), "what it measured leaves with it"
        before = processor_s(other)
        time.sleep(0.5)
        assert processor_s(other) == before
    assert num_alive() == 0


def test_a_death_while_waiting_is_no_fate_of_a_cell(tmp_path, monkeypatch):
    class Killed(Watched):
        def run(self, order, limits_s, should_stop):
            answer = super().run(order, limits_s, should_stop)
            if self is Watched.made[0]:
                os.kill(Watched.made[1].seen.pid, signal.SIGKILL)
                wait_until_dead(Watched.made[1])
            return answer

    monkeypatch.setattr(module, "WorkerProcess", Killed)
    summary = run(tiny_plan(["fake_ok"], seq_len=[16, 24], isolation="cell"), Store(tmp_path / "run"))
    assert summary.counts == {"ok": 2}
    assert len(Watched.made) == 3
    assert num_alive() == 0


def test_a_stop_ends_those_that_wait_and_those_that_still_load(tmp_path):
    items = tiny_plan(["fake_ok"], seq_len=[16, 24]).cells
    begin = time.monotonic()
    settings = Settings(logs=tmp_path, variant_files=(VARIANT_FILE,))
    with WorkerPool(settings, Stopped(), items) as pool:  # stopped while the first two load
        answer = pool.ask(items[:1], isolation="cell", attempt=1)
    assert getattr(answer, "why", None) == "stopped"
    assert len(Watched.made) == 2
    assert num_alive() == 0
    assert time.monotonic() - begin < 60
