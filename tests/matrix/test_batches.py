"""Processes that start together and wait their turn, for real: they load before anything is measured, and all end."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from attn_zoo.matrix import crew as module
from attn_zoo.matrix.crew import Crew, Settings
from attn_zoo.matrix.engines.process import WorkerProcess
from attn_zoo.matrix.runner import run
from attn_zoo.matrix.store import Store
from tests.matrix.conftest import VARIANT_FILE, tiny_plan


class Watched(WorkerProcess):
    """Notes every process, and who was alive and still loading when one was asked."""

    made: list[Watched]
    loading: list[int]
    waiting: list[int]

    def __init__(self, log, threads):
        super().__init__(log, threads)
        self.seen = psutil.Process(self._process.pid)
        Watched.made.append(self)

    def run(self, request, limits_s, should_stop):
        Watched.loading.append(sum(each.is_starting() for each in Watched.made))
        Watched.waiting.append(sum(each.is_waiting for each in Watched.made))
        return super().run(request, limits_s, should_stop)


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    Watched.made, Watched.loading, Watched.waiting = [], [], []
    monkeypatch.setattr(module, "WorkerProcess", Watched)
    monkeypatch.setattr(module, "num_cores", lambda: 3)
    monkeypatch.setattr(module, "available_bytes", lambda: 2**40)


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


def test_nobody_loads_while_one_measures_and_nobody_is_left(tmp_path):
    summary = run(tiny_plan(["fake_ok"], seq_len=[16, 24, 32, 48], isolation="cell"), Store(tmp_path / "run"))
    assert summary.counts == {"ok": 4}
    assert Watched.loading == [0, 0, 0, 0]
    assert Watched.waiting == [3, 2, 1, 1], "three started together, then one for the last cell"
    assert num_alive() == 0


def test_one_that_waits_uses_no_processor_and_dies_with_the_crew(tmp_path):
    items = tiny_plan(["fake_ok"], seq_len=[16, 24, 32]).cells
    with Crew(Settings(logs=tmp_path, variant_files=(VARIANT_FILE,)), lambda: False, lambda: False, items) as crew:
        crew.ask(items[:1], isolation="cell", attempt=1, data_dir=None, checkpoint_dir=None, weights_dir=None)
        first, *others = Watched.made
        assert not first.seen.is_running(), "what it measured leaves with it"
        before = [processor_s(each) for each in others]
        time.sleep(0.5)
        assert [processor_s(each) for each in others] == before
    assert num_alive() == 0


def test_a_death_while_waiting_is_no_fate_of_a_cell(tmp_path, monkeypatch):
    class Killed(Watched):
        def run(self, request, limits_s, should_stop):
            answer = super().run(request, limits_s, should_stop)
            if self is Watched.made[0]:
                os.kill(Watched.made[1].seen.pid, signal.SIGKILL)
                wait_until_dead(Watched.made[1])
            return answer

    monkeypatch.setattr(module, "WorkerProcess", Killed)
    summary = run(tiny_plan(["fake_ok"], seq_len=[16, 24, 32], isolation="cell"), Store(tmp_path / "run"))
    assert summary.counts == {"ok": 3}
    assert len(Watched.made) == 4
    assert num_alive() == 0


def test_a_crash_of_one_cell_leaves_the_waiting_ones_fit(tmp_path):
    summary = run(tiny_plan(["fake_segfault", "fake_ok"], seq_len=[1024], isolation="cell"), Store(tmp_path / "run"))
    assert summary.counts == {"crashed": 1, "ok": 1}
    assert len(Watched.made) == 2
    assert num_alive() == 0


def test_a_stop_ends_those_that_wait_and_those_that_still_load(tmp_path):
    items = tiny_plan(["fake_ok"], seq_len=[16, 24, 32]).cells
    begin = time.monotonic()
    settings = Settings(logs=tmp_path, variant_files=(VARIANT_FILE,))
    with Crew(settings, lambda: True, lambda: True, items) as crew:  # stopped while the first three load
        answer = crew.ask(items[:1], isolation="cell", attempt=1, data_dir=None, checkpoint_dir=None, weights_dir=None)
    assert getattr(answer, "why", None) == "stopped"
    assert len(Watched.made) == 3
    assert num_alive() == 0
    assert time.monotonic() - begin < 60


def test_a_gate_is_asked_once_in_a_run_and_its_no_reaches_every_cell(tmp_path):
    names = ["fake_ok", "fake_nan"]
    store = Store(tmp_path / "run")
    run(tiny_plan(names, seq_len=[900, 1000, 1024], isolation="cell"), store)
    found = list(store.scan().records.values())
    sound = [record for record in found if record.cell.variant == "fake_ok"]
    assert {record.status for record in sound} == {"ok"}
    assert len({record.gate for record in sound}) == 1, "the record says the same of every cell"
    assert {"matches_oracle", "own_rows"} <= set(sound[0].gate)
    broken = [record for record in found if record.cell.variant == "fake_nan"]
    assert [record.status for record in broken] == ["gate_failed"] * 3
    assert len({record.reason for record in broken}) == 1
