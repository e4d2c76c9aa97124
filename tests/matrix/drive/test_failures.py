"""Every way a cell can end, in real processes: a named outcome, a reason, and the next cell is not disturbed."""

import json
import os
import signal
import time
from dataclasses import replace

import psutil
import pytest

from attn_zoo.discovery import providers
from attn_zoo.matrix.drive.engines.local import LocalEngine
from attn_zoo.matrix.drive.engines.process import Ended
from attn_zoo.matrix.drive.engines.ray import RayEngine
from attn_zoo.matrix.drive.run_plan import Engine, run
from attn_zoo.matrix.drive.supervise import run_lane
from attn_zoo.matrix.drive.worker_pool import Control, Settings, WorkerPool
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Record
from attn_zoo.registry import all_or_nothing
from tests.matrix.conftest import RAY_VARIABLES, tiny_plan, training_plan
from tests.test_discovery import install

ON_RAY = [
    "fake_segfault",
    "fake_hang",
    "fake_killed",
    "fake_bug",
    "fake_nan",
    "fake_train_nan",
]
NAMES = [
    "fake_segfault",
    "fake_abort",
    "fake_hang",
    "fake_exit",
    "fake_hard_exit",
    "fake_device_memory",
    "fake_killed",
    "fake_bug",
    "fake_nan",
    "fake_half_character",
    "fake_scribbler",
    "fake_forger",
    "fake_lost",
    "fake_daemon",
    "fake_picky",
    "fake_loud",
    "fake_train_nan",
]
IN_TURNS = {
    "fake_exit",
    "fake_bug",
    "fake_nan",
    "fake_half_character",
    "fake_lost",
    "fake_daemon",
    "fake_picky",
    "fake_loud",
}
"""Whose process lives on: they share one, which tells of each all the same."""
LONGER = 1100
"""Tried of none that ran out of memory or of time before."""
STATUS = {
    "fake_segfault": ("crashed", "SIGSEGV", -signal.SIGSEGV),
    "fake_abort": ("crashed", "SIGABRT", -signal.SIGABRT),
    "fake_hang": ("timeout", "stopped after its limit of 6 s", -signal.SIGKILL),
    "fake_exit": ("error", "called sys.exit(3)", None),
    "fake_hard_exit": ("crashed", "exit code 0 and no result", 0),
    "fake_device_memory": ("oom_device", "Tried to allocate 20.00 GiB", None),
    "fake_killed": ("crashed", "SIGKILL (2 attempts)", -signal.SIGKILL),
    "fake_bug": ("error", "KeyError", None),
    "fake_half_character": ("error", "ValueError: \\udcff", None),
    "fake_scribbler": ("error", "something wrote on the pipe of its answers", -signal.SIGTERM),
    "fake_forger": ("error", "it gave an answer that is no record (worker: cell: ", -signal.SIGTERM),
    "fake_lost": ("ok", "", None),
    "fake_daemon": ("ok", "", None),
    "fake_nan": ("gate_failed", "not finite", None),
    "fake_picky": ("unsupported", "at most 800 tokens", None),
    "fake_loud": ("ok", "", None),
    "fake_train_nan": ("diverged", "at step 1", None),
}


def descendants():
    return psutil.Process().children(recursive=True)


def longer_of(names):
    """Return the variants that are asked for a third length too."""
    return [name for name in names if name in ("fake_device_memory", "fake_hang")]


PLUG_INS = {
    "zoo_plugin_raises": "raise ValueError('broken')",
    "zoo_plugin_exits": "raise SystemExit",
    "zoo_plugin_ends": "import os; os._exit(3)",
}
HANGS = """
import time
with open({notes!r}, "a") as file:
    file.write("imported ")
while True:
    time.sleep(60)
"""


@pytest.fixture(params=["local", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore")])])
def outcome(request, tmp_path):
    """All misbehaving variants in one run: a length at which they behave, then one at which they do not.

    On Ray those that end a process each in its own way, so that the same is expected of both engines. Beside them,
    packages are installed that misbehave when they are imported.
    """
    names: list[str] = NAMES
    engine: Engine = LocalEngine()
    if request.param == "ray":
        names = ON_RAY
    store, before = Store(tmp_path / "run"), set(descendants())
    timings = tiny_plan([name for name in names if name not in IN_TURNS and "train" not in name], isolation="lane")
    longer = tiny_plan(longer_of(names), isolation="lane", seq_len=[LONGER])
    in_turns = tiny_plan([name for name in names if name in IN_TURNS], isolation="interleaved")
    trainings = training_plan([name for name in names if "train" in name])
    hang = "fake_hang", 1024
    cells = [
        replace(item, timeout_s=6) if (item.cell.variant, item.cell.seq_len) == hang else item
        for plan in (timings, longer, in_turns, trainings)
        for item in plan.cells
    ]
    files = tuple(sorted({*timings.variant_files, *trainings.variant_files}))
    with pytest.MonkeyPatch.context() as patch:
        (tmp_path / "site").mkdir()
        patch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.syspath_prepend(str(tmp_path / "site"))
        patch.setattr(providers, "_tried", {})
        install(tmp_path / "site", **PLUG_INS, zoo_plugin_hangs=HANGS.format(notes=str(tmp_path / "notes")))
        assert len(providers.discover("attn_zoo.variants", all_or_nothing, timeout_s=2)) == 4
        if request.param == "ray":
            for name, value in RAY_VARIABLES.items():
                patch.setenv(name, value)
            pytest.importorskip("ray", reason="the ray engine is optional: pip install 'attn-zoo[ray]'")
            engine = RayEngine()
        summary = run(replace(timings, cells=tuple(cells), variant_files=files), store, engine=engine)
    time.sleep(0.3)
    return store, summary, [process for process in descendants() if process not in before], names


def long(store):
    """Return the records of what did misbehave, by variant."""
    return {item.cell.variant: item for item in store.records() if item.cell.seq_len not in (16, LONGER)}


def each_failure_has_its_name_and_reason(outcome):
    store, _, _, names = outcome
    records = long(store)
    assert set(records) == set(names)
    for name, record in records.items():
        status, reason, code = STATUS[name]
        assert (record.status, record.exit_code) == (status, code), (name, record.reason)
        assert reason in record.reason
        assert (record.timing is None) == (status != "ok")
        assert json.loads(record.to_json())["status"] == status


def the_next_cell_is_ok_each_time(outcome):
    store, summary, _, names = outcome
    short = {item.cell.variant: item.status for item in store.records() if item.cell.seq_len == 16}
    timed = [name for name in names if "train" not in name]
    assert short == {name: "gate_failed" if name == "fake_nan" else "ok" for name in timed}
    num_cells = len(timed) + len(names) + len(longer_of(names))
    assert (summary.new, summary.left, summary.exit_code) == (num_cells, (), 1)


def longer_lengths_are_not_tried_after_out_of_memory_or_a_time_out(outcome):
    store, _, _, names = outcome
    found = {item.cell.variant: item for item in store.records() if item.cell.seq_len == LONGER}
    expected = {
        "fake_device_memory": ("skipped_after_oom", "not started: length 1024 of the lane ended in oom_device"),
        "fake_hang": ("timeout", "not started: length 1024 of the lane timed out"),
    }
    assert {name: (record.status, record.reason) for name, record in found.items()} == {
        name: expected[name] for name in longer_of(names)
    }


def a_package_that_hangs_at_import_is_not_tried_again_by_workers(outcome):
    store, *_ = outcome
    assert (store.folder.parent / "notes").read_text() == "imported "


def records_say_what_was_measured_and_how(outcome):
    store, *_ = outcome
    record = next(item for item in store.records() if item.cell.variant == "fake_segfault" and item.status == "ok")
    assert record.timing is not None
    assert record.timing.median_ms > 0
    assert len(record.timing.samples_ms) >= 5
    assert record.memory is not None
    assert "matches_oracle" in record.gate
    assert record.isolation == "lane"
    assert record.environment in store.info().environments
    assert record.duration_s > 0
    assert record.started.startswith("20")


def crashes_keep_the_stack_of_the_variant(outcome):
    store, *_ = outcome
    record = next(item for item in store.records() if item.status == "crashed" and "SEGV" in item.reason)
    assert "misbehaving.py" in record.trace
    assert "about to read address 0" in (store.logs / f"{record.cell.key}.log").read_text()
    bug = next(item for item in store.records() if item.cell.variant == "fake_bug" and item.status == "error")
    assert "in misbehave" in bug.trace


def killed_cells_are_tried_twice_and_others_once(outcome):
    store, *_ = outcome
    attempts = {name: record.attempt for name, record in long(store).items()}
    assert attempts.pop("fake_killed") == 2
    assert set(attempts.values()) == {1}


def nothing_is_left_running(outcome):
    _, _, orphans, _ = outcome
    assert [process.pid for process in orphans] == []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        line = " ".join(process.info["cmdline"] or [])
        assert f"attn_zoo.matrix.cell.worker {os.getpid()}" not in line, "a worker or its child outlived the run"


def test_every_failure_has_its_name_and_disturbs_no_other_cell(outcome):
    """One test for each engine: the run takes half a minute, and workers of xdist would each make their own."""
    for check in (
        each_failure_has_its_name_and_reason,
        the_next_cell_is_ok_each_time,
        longer_lengths_are_not_tried_after_out_of_memory_or_a_time_out,
        a_package_that_hangs_at_import_is_not_tried_again_by_workers,
        records_say_what_was_measured_and_how,
        crashes_keep_the_stack_of_the_variant,
        killed_cells_are_tried_twice_and_others_once,
        nothing_is_left_running,
    ):
        check(outcome)


def test_a_process_that_does_not_start_in_time_says_nothing_of_longer_lengths(tmp_path, monkeypatch):
    """It is the machine's doing, such as a disk that is slow at first."""
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")  # of each Python that starts
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("attn_zoo.matrix.drive.engines.process.START_TIMEOUT_S", 0.5)
    store = Store(tmp_path / "run")
    run(tiny_plan(["fake_ok"], seq_len=[16, 32]), store)
    reasons = {(record.status, record.reason) for record in store.records()}
    assert reasons == {("crashed", "the process was not ready within 120 s of its start")}


def test_a_kill_of_a_process_that_had_most_of_the_memory_is_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("attn_zoo.matrix.drive.engines.process.resident_bytes", lambda _: 2**60)
    store = Store(tmp_path / "run")
    run(tiny_plan(["fake_killed"], seq_len=[1024], timeout_s=120), store)
    (record,) = store.records()
    assert (record.status, record.attempt) == ("oom_host", 1)
    assert record.host


def test_what_an_earlier_cell_of_its_process_took_makes_no_kill_out_of_memory(tmp_path, monkeypatch):
    plan = tiny_plan(["fake_killed"], seq_len=[16, 1024], isolation="lane")
    settings = Settings(logs=tmp_path, variant_files=plan.variant_files)
    answers = []
    with WorkerPool(settings, Control()) as pool:
        for item, taken in zip(plan.cells, (2**60, 0), strict=True):
            monkeypatch.setattr("attn_zoo.matrix.drive.engines.process.resident_bytes", lambda _, taken=taken: taken)
            answers.append(pool.ask([item], keeps=True, isolation="lane", attempt=1))
    sound, ended = answers
    assert not isinstance(sound, Ended)
    assert isinstance(ended, Ended)
    assert (ended.exit_code, ended.was_memory) == (-signal.SIGKILL, False)


def test_a_source_that_changes_under_a_run_is_not_measured_as_the_old_one(tmp_path):
    plan = tiny_plan(["fake_ok"], seq_len=[16])
    planned = replace(plan, cells=tuple(replace(x, cell=replace(x.cell, variant_digest="old")) for x in plan.cells))
    store = Store(tmp_path / "run")
    run(planned, store)
    (record,) = store.records()
    assert (record.status, record.timing) == ("error", None)
    assert record.reason.startswith("fake_ok: its source, or a package that it imports, was changed while the matrix")


class Ending(Control):
    """A driver that was told to end just when its worker was."""

    def __init__(self, is_ending: bool):
        self.is_ending = is_ending
        self.records: list[Record] = []

    def is_over(self):
        return self.is_ending

    def finished(self, record):
        self.records.append(record)


@pytest.mark.parametrize("is_ending", [True, False])
def test_workers_that_are_ended_with_the_run_leave_no_record(is_ending, tmp_path):
    control = Ending(is_ending)
    plan = tiny_plan(["fake_terminated"], seq_len=[1024], timeout_s=60)
    settings = Settings(logs=tmp_path, variant_files=plan.variant_files)
    with WorkerPool(settings, control, plan.cells) as pool:
        run_lane(plan.cells, pool)
    found = [(record.status, record.reason) for record in control.records]
    assert found == ([] if is_ending else [("crashed", "the process was ended by SIGTERM (2 attempts)")])
