"""Several trainings at once: how many, with how many threads, beside no timing; and every way such a run can end."""

import io
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from attn_zoo.errors import StoreError
from attn_zoo.matrix.drive.engines import local
from attn_zoo.matrix.drive.engines.local import LocalEngine, crowding
from attn_zoo.matrix.drive.progress import LiveProgress, PlainProgress
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.drive.worker_pool import Control, Settings
from attn_zoo.matrix.plan.expand import Plan
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Record
from tests.matrix.conftest import TINY_TRAINING, prepare_process, tiny_plan, training_plan
from tests.processes import is_gone, start_process, wait_for


class Notes(Control):
    """A driver that takes notes and breaks if two call it at once."""

    def __init__(self):
        self.records: list[Record] = []
        self.said: list[str] = []
        self.stop = False
        self.inside = 0

    def check(self):
        self.inside += 1
        time.sleep(0.001)
        assert self.inside == 1, "two threads in the driver"
        self.inside -= 1

    def is_over(self):
        self.check()
        return self.stop

    def may_start(self, *bundle):
        self.check()
        return not self.stop

    def started(self, item):
        self.check()

    def should_stop(self):
        self.check()
        return self.stop

    def finished(self, record):
        self.check()
        self.records.append(record)

    def say(self, text):
        self.said.append(text)


class FakeLanes:
    """Stands in for `run_lane`: notes what runs beside what."""

    def __init__(self, wait_for: int = 1, fail_on: str = ""):
        self.lock = threading.Lock()
        self.running: set[str] = set()
        self.together: list[frozenset[str]] = []
        self.barrier = threading.Barrier(wait_for, timeout=20)
        self.fail_on = fail_on
        self.settings: list[Settings] = []

    def __call__(self, items, pool, prior=()):
        item, control = items[0], pool.control
        with self.lock:
            self.running.add(item.cell.id)
            self.together.append(frozenset(self.running))
            self.settings.append(pool.settings)
        if item.cell.kind == "accuracy":
            if item.cell.variant == self.fail_on:
                with self.lock:
                    self.running.discard(item.cell.id)
                raise StoreError("disk full")
            if self.fail_on:
                while not control.should_stop():
                    time.sleep(0.01)
            else:
                self.barrier.wait()
        if control.may_start(item):
            control.finished(Record(cell=item.cell, status="ok"))
        with self.lock:
            self.running.discard(item.cell.id)


def lanes_of(*plans: Plan):
    return [([item], []) for plan in plans for item in plan.cells]


def test_so_many_trainings_at_once_and_timings_alone(monkeypatch, tmp_path):
    fake, notes = FakeLanes(wait_for=3), Notes()
    monkeypatch.setattr(local, "run_lane", fake)
    trainings = training_plan(["fake_train_ok"], seeds=[0, 1, 2, 3, 4, 5])
    LocalEngine(3).run(lanes_of(trainings, tiny_plan(["fake_ok"])), Settings(logs=tmp_path), notes)
    assert len(notes.records) == 8
    assert max(len(names) for names in fake.together) == 3, "the barrier lets nobody pass before three are there"
    for names in fake.together:
        assert len(names) == 1 or all("/accuracy/" in name for name in names)
    assert [record.num_jobs for record in notes.records] == [1, 1, 3, 3, 3, 3, 3, 3]


def test_a_training_on_several_devices_shares_them_with_no_other(monkeypatch, tmp_path):
    fake, notes = FakeLanes(), Notes()
    monkeypatch.setattr(local, "run_lane", fake)
    wide = training_plan(["fake_train_ok"], seeds=[0, 1, 2], data_parallel=2)
    LocalEngine(3).run(lanes_of(wide), Settings(logs=tmp_path), notes)
    assert [len(names) for names in fake.together] == [1, 1, 1]
    assert {record.num_jobs for record in notes.records} == {1}


def test_one_job_is_one_after_the_other_in_the_order_of_the_plan(monkeypatch, tmp_path):
    fake, notes = FakeLanes(), Notes()
    monkeypatch.setattr(local, "run_lane", fake)
    lanes = lanes_of(training_plan(["fake_train_ok"], seeds=[0, 1]), tiny_plan(["fake_ok"]))
    LocalEngine().run(lanes, Settings(logs=tmp_path), notes)
    assert [record.cell.id for record in notes.records] == [items[0].cell.id for items, _ in lanes]
    assert {record.num_jobs for record in notes.records} == {1}
    assert all(len(names) == 1 for names in fake.together)
    assert {settings.threads for settings in fake.settings} == {None}


def test_cores_are_shared_out_and_too_many_threads_are_said(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "num_cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for threads, jobs, share, said in ((None, 4, 2, 0), (None, 16, 1, 1), (3, 2, 4, 0), (5, 2, 4, 1)):
        fake, notes = FakeLanes(), Notes()
        monkeypatch.setattr(local, "run_lane", fake)
        changes = {} if threads is None else {"threads": threads}
        plan = training_plan(["fake_train_ok"], seeds=list(range(jobs)), **changes)
        LocalEngine(jobs).run(lanes_of(plan), Settings(logs=tmp_path), notes)
        assert {settings.threads for settings in fake.settings} == {share}
        assert len(notes.said) == said, (threads, jobs)
    cells = training_plan(["fake_train_ok"], seeds=[0, 1, 2], threads=5).cells
    expected = "2 trainings at once may use 10 threads on 8 cores: they will slow each other down"
    assert crowding(cells, 2, 8) == expected
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # what the user set for this process
    fake = FakeLanes()
    monkeypatch.setattr(local, "run_lane", fake)
    LocalEngine(2).run(lanes_of(training_plan(["fake_train_ok"], seeds=[0, 1])), Settings(logs=tmp_path), Notes())
    assert {settings.threads for settings in fake.settings} == {1}


def test_an_error_in_one_lane_ends_the_others_and_is_raised(monkeypatch, tmp_path):
    fake, notes = FakeLanes(fail_on="fake_train_slow"), Notes()
    monkeypatch.setattr(local, "run_lane", fake)
    plan = training_plan(["fake_train_ok", "fake_train_slow", "fake_train_hang"])
    with pytest.raises(StoreError, match="disk full"):
        LocalEngine(2).run(lanes_of(plan), Settings(logs=tmp_path), notes)
    assert notes.records == []
    assert fake.running == set()


NAMES = ["fake_train_meets", "fake_train_segfault", "fake_train_killed", "fake_train_hang"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Two at once."""
    folder = tmp_path_factory.mktemp("jobs")
    store = Store(folder / "run")
    meeting = training_plan(NAMES[:1], seeds=[1]).cells
    trainings = training_plan(NAMES, keep_weights=True)
    limits = {"fake_train_hang": 5.0}
    cells = [replace(item, timeout_s=limits.get(item.cell.variant, 120.0)) for item in trainings.cells]
    os.environ["FAKE_MARKS"] = str(folder)
    before = set(psutil.Process().children(recursive=True))
    try:
        summary = run(replace(trainings, cells=(*meeting, *cells)), store, engine=LocalEngine(2))
    finally:
        del os.environ["FAKE_MARKS"]
    left = [process for process in psutil.Process().children(recursive=True) if process not in before]
    return store, summary, {record.cell.variant: record for record in store.records()}, left


def test_every_training_ends_in_its_own_status_and_disturbs_no_other(outcome):
    _, summary, records, left = outcome
    assert {name: record.status for name, record in records.items()} == {
        "fake_train_meets": "ok",  # both of them: they did run at once
        "fake_train_segfault": "crashed",
        "fake_train_killed": "ok",
        "fake_train_hang": "timeout",
    }
    assert summary.counts == {"ok": 3, "crashed": 1, "timeout": 1}
    assert records["fake_train_killed"].attempt == 2
    assert (summary.new, summary.left, summary.exit_code) == (5, (), 1)
    assert left == []
    assert {name: record.num_jobs for name, record in records.items()} == dict.fromkeys(NAMES, 2)


def test_threads_are_held_to_the_share_and_weights_are_kept(outcome):
    store, _, records, _ = outcome
    share = min(max(1, len(os.sched_getaffinity(0)) // 2), torch.get_num_threads())
    log = (store.logs / f"{records['fake_train_meets'].cell.key}.log").read_text()
    assert f"{share} threads" in log
    kept = {path.stem for path in store.weights.iterdir()}
    trained = [record for record in store.records() if record.score is not None]
    assert kept == {record.cell.key for record in trained if record.cell.seed == 0}, "as the matrix asks"


def slow_plan(num_steps: int) -> Plan:
    overrides = {**TINY_TRAINING, "num_steps": num_steps}
    return training_plan(["fake_train_slow"], seeds=[0, 1], overrides=overrides)


def run_it(folder: Path, num_steps: int) -> int:
    """What the process to be ended does."""
    prepare_process()
    return run(slow_plan(num_steps), Store(folder), progress=PlainProgress(), engine=LocalEngine(2)).exit_code


def run_and_end(folder: Path, num_steps: int, way: str) -> int | None:
    """Start the run, end it when both trainings have come further than before, and return its exit code."""

    def saved() -> set[tuple[Path, int]]:
        return {(path, path.stat().st_mtime_ns) for path in (folder / "checkpoints").rglob("*.safetensors")}

    before, errors = saved(), folder.with_name("errors")
    runner = start_process(run_it, folder, num_steps, errors=errors)
    assert runner.pid is not None
    try:
        wait_for(lambda: len(saved() - before) == 2 or not runner.is_alive())
        started = psutil.Process(runner.pid).children(recursive=True)  # workers, and a keeper for each
        assert sum("attn_zoo.matrix.cell.worker" in each.cmdline() for each in started) == 2
        if way == "kill -9":
            runner.kill()
        else:
            for _ in range(2):
                os.kill(runner.pid, signal.SIGINT)
                time.sleep(0.3)
        runner.join(60)
    finally:
        runner.kill()
    assert "Traceback" not in errors.read_text()
    wait_for(lambda: all(is_gone(each) for each in started))
    return runner.exitcode


@pytest.mark.slow
def test_a_run_with_several_trainings_can_be_ended_and_goes_on(tmp_path):
    folder, num_steps = tmp_path / "run", 30
    assert run_and_end(folder, num_steps, "kill -9") == -signal.SIGKILL
    assert run_and_end(folder, num_steps, "Ctrl-C twice") == 130
    store = Store(folder)
    before = {record.cell.key for record in store.records()}
    assert len(before) < 2
    summary = run(slow_plan(num_steps), store, engine=LocalEngine(2))
    assert (summary.counts, summary.new, summary.left) == ({"ok": 2}, 2 - len(before), ())
    assert store.scan().problems == {}


def test_the_time_limit_ends_all_of_them_without_a_record(tmp_path):
    store = Store(tmp_path / "run")
    before = set(psutil.Process().children(recursive=True))
    plan = training_plan(["fake_train_hang"], seeds=[0, 1, 2])
    summary = run(plan, store, engine=LocalEngine(2), time_limit_min=3 / 60)
    assert (summary.new, len(summary.left), summary.stopped, summary.exit_code) == (0, 3, "time limit", 0)
    assert [process for process in psutil.Process().children(recursive=True) if process not in before] == []


def test_the_live_picture_names_every_running_cell(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    progress = LiveProgress(Terminal())
    items = training_plan(["fake_train_ok"], seeds=list(range(10))).cells
    progress.begin(10, 0, 10, 0.0)
    for item in items[:2]:
        progress.started(item, 0.0)
    now = time.monotonic()
    lines = progress._picture(now)
    assert [line.split()[0] for line in lines] == [items[0].cell.id, items[1].cell.id, "[0/10]"]
    assert lines[-1] == "[0/10] 2 running, time left unknown"
    progress.finished(Record(cell=items[0].cell, status="ok"))
    (line,) = progress._picture(now)
    assert line.startswith(f"[2/10] {items[1].cell.id}")
    for item in items[2:]:
        progress.started(item, 60.0)
    lines = progress._picture(time.monotonic())
    assert len(lines) == LiveProgress.MAX_SHOWN + 2
    assert lines[-2] == "  and 1 more"
    assert lines[-1].startswith("[1/10] 9 running, about ")
    progress.end()
