"""Running a plan: resume, stale and retried records, time limit, Ctrl-C, environments; with an engine that fakes."""

import io
import itertools
import os
import signal
import time
from dataclasses import replace

import pytest

from attn_zoo import api
from attn_zoo.console import print_standing, print_summary
from attn_zoo.errors import StoreError
from attn_zoo.folder import read_run
from attn_zoo.matrix.drive.progress import LiveProgress, PlainProgress, Progress, make_progress, span
from attn_zoo.matrix.drive.run_plan import Forecasts, Session, _leave_terminal, _signals, run, standing, time_left
from attn_zoo.matrix.plan.expand import make_plan
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.matrix.plan.schema import parse_matrix
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Memory, Record, Score, Timing
from tests.matrix.conftest import environment, make_matrix, tiny_plan


def timing(ms: float) -> Timing:
    return Timing(
        samples_ms=(ms,),
        median_ms=ms,
        q1_ms=ms,
        q3_ms=ms,
        low_ms=ms,
        high_ms=ms,
        first_ms=ms,
        num_warmup=1,
        inner_loops=1,
        timer="perf_counter",
    )


class FakeEngine:
    """Answers at once: status by length, or a function called before each cell."""

    is_remote = False
    jobs = 1

    def __init__(self, before=None, statuses=None, duration_s=1.0, call_ms=1.0):
        self.before, self.statuses, self.duration_s, self.call_ms = before, statuses or {}, duration_s, call_ms
        self.started, self.lanes, self.logs = [], [], []

    def run(self, lanes, settings, control):
        self.lanes, self.settings = lanes, settings
        for items, _ in lanes:
            for item in items:
                if not control.may_start(item):
                    continue
                control.started(item)
                self.started.append(item.cell.id)
                if self.before:
                    self.before(item)
                if control.should_stop():
                    continue
                status = self.statuses.get(item.cell.seq_len, "ok")
                record = Record(cell=item.cell, status=status, environment=settings.environment)
                control.finished(replace(record, duration_s=self.duration_s, timing=timing(self.call_ms)))


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setattr("attn_zoo.measure.environment.capture_environment", environment)


def test_resume_runs_only_what_is_missing(tmp_path):
    plan, store = tiny_plan(["fake_ok"], seq_len=[16, 32, 64]), Store(tmp_path / "run")
    first = FakeEngine()
    assert run(make_plan(plan.matrix, only=["*L16/*"]), store, engine=first).counts == {"ok": 1}
    second = FakeEngine()
    summary = run(plan, store, engine=second)
    assert [name.split("/")[3] for name in second.started] == ["L32", "L64"]
    assert (summary.counts, summary.new, summary.left, summary.exit_code) == ({"ok": 3}, 2, (), 0)
    (lane,) = second.lanes
    assert [record.cell.seq_len for record in lane[1]] == [16], "the lane's earlier records reach the engine"
    noted = {path: path.read_bytes() for path in store.folder.rglob("*.json")}
    third = FakeEngine()
    assert run(plan, store, engine=third).new == 0
    assert third.started == []
    assert {path: path.read_bytes() for path in store.folder.rglob("*.json")} == noted


def test_only_what_is_left_is_estimated_and_the_engine_gets_it(tmp_path):
    full, store, engine = tiny_plan(["fake_ok"], seq_len=[16, 32, 64]), Store(tmp_path / "run"), FakeEngine()
    plan = make_plan(full.matrix, has_estimates=False)
    assert {item.estimate_s for item in plan.cells} == {None}
    run(make_plan(full.matrix, only=["*L16/*"]), store, engine=FakeEngine())
    run(plan, store, engine=engine)
    (lane,) = engine.lanes
    assert tuple(lane[0]) == full.cells[1:]


def test_refused_cells_become_records_without_a_worker(tmp_path):
    plan, engine = tiny_plan(["fake_modest"], seq_len=[16], is_causal=[True, False]), FakeEngine()
    summary = run(plan, Store(tmp_path / "run"), engine=engine)
    assert summary.counts == {"unsupported": 1, "ok": 1}
    assert summary.exit_code == 0
    assert len(engine.started) == 1
    refused = next(item for item in Store(tmp_path / "run").records() if item.status == "unsupported")
    assert refused.reason == "no causal form"
    assert refused.environment == environment().digest


def test_what_ran_with_data_that_are_not_here_is_neither_stale_nor_refused(tmp_path):
    """Whoever forgets to say where they are."""
    group = {"variants": ["full", "linformer"], "task": "byte_lm", "level": "short", "seeds": [0, 1, 2]}
    plan = make_plan(parse_matrix({"name": "test", "accuracy": [group]}, "test.toml"))
    assert [item.refusal and item.refusal[0] for item in plan.cells] == ["data"] * 3 + ["causal"] * 3
    cells = [replace(item.cell, data_digest="of the files") for item in plan.cells]
    store, stream = Store(tmp_path / "run"), io.StringIO()
    with store.writing(plan.matrix.model_dump(mode="json"), environment(), planned=cells):
        store.write(Record(cell=cells[0], status="ok"))
        store.write(Record(cell=cells[1], status="crashed", reason="signal"))
        for cell in cells[3:5]:
            store.write(Record(cell=cell, status="unsupported", reason="linformer: no causal form"))
    now = api.status(store.folder)
    assert (len(now.done), len(now.left), now.stale) == (4, 2, ())
    engine = FakeEngine()
    summary = run(plan, store, engine=engine, retry_statuses=["crashed"], progress=PlainProgress(stream))
    counts = {"ok": 1, "crashed": 1, "unsupported": 3}
    assert (summary.counts, summary.new, summary.exit_code) == (counts, 1, 1)
    assert engine.lanes == []
    assert "cells that wait for data that are not here: 2; say where they are (--data-dir" in stream.getvalue()
    summary = run(plan, store, engine=engine, time_limit_min=0)
    assert (len(summary.left), summary.stopped) == (1, None), "it is not the limit that left it"
    assert {cell.key for cell in store.info().planned or ()} == {cell.key for cell in cells}


def test_more_repeats_measure_nothing_anew_which_is_said(tmp_path):
    store, stream = Store(tmp_path / "run"), io.StringIO()
    for repeats in (1, 3):
        plan = tiny_plan(["fake_ok"], seq_len=[16, 32], repeats=repeats)
        engine = FakeEngine()
        run(plan, store, engine=engine, progress=PlainProgress(stream))
    assert engine.started == []
    text = "cells that keep a record of fewer processes than `repeats` says now: 2; --retry ok measures"
    assert stream.getvalue().count(text) == 1
    run(plan, store, engine=FakeEngine(), retry_statuses=["ok"], progress=PlainProgress(stream))
    run(plan, store, engine=engine, progress=PlainProgress(stream))
    assert engine.started == []
    assert stream.getvalue().count(text) == 1


def test_cells_without_energy_are_counted_once_for_each_reason(tmp_path):
    class Reading(FakeEngine):
        def run(self, lanes, settings, control):
            for items, _ in lanes:
                for item, reason in zip(items, ("a reason", "a reason", "another", ""), strict=True):
                    control.finished(Record(cell=item.cell, status="ok", timing=timing(1.0), energy_reason=reason))

    stream = io.StringIO()
    plan = tiny_plan(["fake_ok"], seq_len=[16, 32, 64, 128])
    run(plan, Store(tmp_path / "run"), engine=Reading(), progress=PlainProgress(stream))
    assert stream.getvalue().splitlines()[-2:] == [
        "cells without energy: 2; a reason",
        "cells without energy: 1; another",
    ]


def test_retry_runs_only_the_named_statuses_again(tmp_path):
    plan, store = tiny_plan(["fake_ok"], seq_len=[16, 32, 64]), Store(tmp_path / "run")
    summary = run(plan, store, engine=FakeEngine(statuses={32: "timeout", 64: "crashed"}))
    assert summary.exit_code == 1
    again = FakeEngine()
    summary = run(plan, store, engine=again, retry_statuses=["timeout"])
    assert [name.split("/")[3] for name in again.started] == ["L32"]
    assert summary.counts == {"ok": 2, "crashed": 1}
    assert len(list((store.folder / "replaced").iterdir())) == 1


def test_an_interrupted_retry_loses_no_record_and_the_same_call_goes_on(tmp_path, capsys):
    plan, store = tiny_plan(["fake_ok"], seq_len=[16, 32, 64]), Store(tmp_path / "run")
    run(plan, store, engine=FakeEngine())
    before = {path.name: path.read_bytes() for path in (store.folder / "cells").iterdir()}
    summary = run(plan, store, engine=FakeEngine(), retry_statuses=["ok"], time_limit_min=0)
    assert (len(summary.left), summary.num_again, summary.counts) == (3, 3, {})
    assert {path.name: path.read_bytes() for path in (store.folder / "cells").iterdir()} == before
    assert not (store.folder / "replaced").exists()

    def press(item):
        if item.cell.seq_len == 32:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    summary = run(plan, store, engine=FakeEngine(before=press, duration_s=2.0), retry_statuses=["ok"])
    assert (summary.new, len(summary.left), summary.num_again, summary.exit_code) == (1, 2, 2, 130)
    now = api.status(store.folder)
    assert (len(now.done), len(now.left), now.num_again) == (1, 2, 2)
    print_standing(now, [], store.folder, [])
    assert "1 done, 2 left; kept until measured again: 2 old records" in capsys.readouterr().out
    assert {record.cell.seq_len: record.duration_s for record in store.records()} == {16: 2.0, 32: 1.0, 64: 1.0}
    last = FakeEngine(duration_s=3.0)
    summary = run(plan, store, engine=last, retry_statuses=["ok"])
    assert [name.split("/")[3] for name in last.started] == ["L32", "L64"], "what it has measured again already, stays"
    assert (summary.counts, summary.left) == ({"ok": 3}, ())
    assert {path.name.partition("-")[0] for path in (store.folder / "replaced").iterdir()} == {
        name.removesuffix(".json") for name in before
    }
    assert not (store.folder / "again").exists()
    anew = FakeEngine()
    run(plan, store, engine=anew, retry_statuses=["ok"])
    assert len(anew.started) == 3, "nothing is left of the first retry, so this is another"


def test_the_status_says_roughly_how_long_what_is_left_takes(tmp_path):
    plan, store = tiny_plan(["fake_ok"], seq_len=[16, 32, 64], repeats=2), Store(tmp_path / "run")
    costs = [item.estimate_s or 0.0 for item in plan.cells]
    run(plan, store, engine=FakeEngine(), time_limit_min=0)
    assert api.status(store.folder).left_s == pytest.approx(sum(costs))
    refused = replace(plan.cells[0], refusal=("dtypes", "none"))
    assert time_left([refused], [], {}) == 0.0
    run(replace(plan, cells=plan.cells[:1]), store, engine=FakeEngine())
    assert api.status(store.folder).left_s == pytest.approx(costs[1] + costs[2])
    run(plan, store, engine=FakeEngine())
    assert api.status(store.folder).left_s == 0.0


def test_an_interrupted_retry_goes_on_without_saying_so_and_beside_another(tmp_path):
    plan, store = tiny_plan(["fake_ok"], seq_len=[16, 32]), Store(tmp_path / "run")
    run(plan, store, engine=FakeEngine(statuses={32: "timeout"}))
    run(plan, store, engine=FakeEngine(), retry_statuses=["timeout"], time_limit_min=0)
    part = replace(plan, cells=plan.cells[:1], shard=(1, 2))
    run(part, store, engine=FakeEngine(), retry_statuses=["ok"], time_limit_min=0)
    assert api.status(store.folder).num_again == 2
    engine = FakeEngine()
    run(replace(plan, cells=plan.cells[1:], shard=(2, 2)), store, engine=engine)
    assert [name.split("/")[3] for name in engine.started] == ["L32"]
    assert store.marked_again() == {plan.cells[0].cell.key}


def test_a_shard_that_has_not_run_is_named_until_it_has(tmp_path, capsys):
    matrix, store = tiny_plan(["fake_ok"], seq_len=[16, 32, 64]).matrix, Store(tmp_path / "run")
    for number in (1, 2):
        summary = run(make_plan(matrix, shard=(number, 3)), store, engine=FakeEngine())
    assert (summary.left, summary.exit_code) == ((), 0)
    print_summary(summary)
    now = api.status(store.folder)
    print_standing(now, [], store.folder, [])
    assert capsys.readouterr().out.count("shard 3 of 3 has not run here") == 2
    assert (len(now.done), now.left) == (2, ())
    run(replace(make_plan(matrix), cells=(), is_whole=False), store, engine=FakeEngine(), retry_statuses=["error"])
    assert api.status(store.folder).missing_shards, "running records again is no shard"
    assert run(make_plan(matrix, shard=(3, 3)), store, engine=FakeEngine()).missing_shards == ""


def test_a_run_of_all_leaves_no_shard_out_and_one_of_a_part_says_nothing_of_them(tmp_path):
    matrix, store = tiny_plan(["fake_ok"], seq_len=[16, 32]).matrix, Store(tmp_path / "run")
    assert run(make_plan(matrix, shard=(1, 2)), store, engine=FakeEngine()).missing_shards
    assert run(make_plan(matrix, only=["*L16/*"]), store, engine=FakeEngine()).missing_shards
    assert run(make_plan(matrix), store, engine=FakeEngine()).missing_shards == ""


def test_records_of_changed_sources_are_stale_and_of_other_matrices_other(tmp_path):
    plan, store = tiny_plan(["fake_ok"], seq_len=[16]), Store(tmp_path / "run")
    run(plan, store, engine=FakeEngine())
    changed = replace(
        plan, cells=tuple(replace(item, cell=replace(item.cell, variant_digest="1")) for item in plan.cells)
    )
    found = standing(changed.cells, store.records())
    assert [record.cell.seq_len for record in found.stale] == [16]
    assert len(found.left) == 1
    assert found.done == found.other == ()
    elsewhere = standing(tiny_plan(["full"], seq_len=[16]).cells, store.records())
    assert len(elsewhere.other) == 1
    engine = FakeEngine()
    assert run(changed, store, engine=engine).counts == {"ok": 1}
    assert len(store.records()) == 2, "the stale record is kept"


@pytest.fixture
def ten_seconds(monkeypatch):
    """What makes a cell take ten seconds, by a clock that runs only then."""
    clock = [1000.0]
    monkeypatch.setattr("attn_zoo.matrix.drive.run_plan.time.monotonic", lambda: clock[0])
    return lambda _: clock.__setitem__(0, clock[0] + 10.0)


def test_a_time_limit_counts_on_the_growth_of_calls_not_on_that_of_what_is_around_them(tmp_path, ten_seconds):
    plan = tiny_plan(["full"], seq_len=[16, 32, 64, 128], timeout_s=600)
    engine = FakeEngine(before=ten_seconds, duration_s=10.0, call_ms=5.0)
    assert run(plan, Store(tmp_path / "run"), engine=engine, time_limit_min=0.7).stopped is None
    assert len(engine.started) == 4, "40 s, and at 128 tokens a few calls of 80 ms"


def test_time_limit_leaves_what_would_not_fit_and_says_so(tmp_path, ten_seconds):
    plan = tiny_plan(["fake_ok", "full"], seq_len=[16, 32, 64, 128], timeout_s=600)
    engine = FakeEngine(before=ten_seconds, duration_s=10.0, call_ms=1250.0)
    summary = run(plan, Store(tmp_path / "run"), engine=engine, time_limit_min=0.75)
    # 16 takes 10 s, all of it calls, so 32 is expected to take 40 s and does not fit into 45 s.
    assert engine.started == ["fake_ok/scaling/fwd/L16/fp32/H1/D8/seed0", "full/scaling/fwd/L16/fp32/H1/D8/seed0"]
    assert summary.stopped == "time limit"
    assert [item.cell.seq_len for item in summary.left] == [32, 64, 128, 32, 64, 128]
    assert summary.exit_code == 0
    noted = read_run(tmp_path / "run")
    assert (noted.planned, len(noted.left), noted.stopped) == (8, 6, "time limit")
    rest = run(plan, Store(tmp_path / "run"), engine=FakeEngine())
    assert rest.counts == {"ok": 8}
    assert rest.stopped is None
    noted = read_run(tmp_path / "run")
    assert (noted.planned, noted.left, noted.stopped) == (8, (), "")


def test_a_cell_that_exceeds_the_time_limit_is_stopped_without_a_record(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("attn_zoo.matrix.drive.run_plan.time.monotonic", lambda: clock[0])
    engine = FakeEngine(before=lambda item: clock.__setitem__(0, 100.0))
    summary = run(tiny_plan(["fake_ok"]), Store(tmp_path / "run"), engine=engine, time_limit_min=1)
    assert (summary.new, len(summary.left), summary.stopped) == (0, 2, "time limit")


def test_a_time_limit_that_is_over_before_the_first_cell_is_why_nothing_ran(tmp_path):
    summary = run(tiny_plan(["full"]), Store(tmp_path / "run"), time_limit_min=0)
    assert (summary.new, summary.stopped) == (0, "time limit")
    assert read_run(tmp_path / "run").stopped == "time limit"


def test_ctrl_c_once_ends_after_the_running_cell(tmp_path):
    stream = io.StringIO()
    engine = FakeEngine(before=lambda item: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    plan = tiny_plan(["fake_ok"], seq_len=[16, 32, 64])
    summary = run(plan, Store(tmp_path / "run"), engine=engine, progress=PlainProgress(stream))
    assert len(engine.started) == 1
    assert (summary.new, len(summary.left), summary.exit_code) == (1, 2, 130)
    assert "The same command goes on from here" in stream.getvalue()
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_twice_ends_at_once(tmp_path):
    def twice(item):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    summary = run(tiny_plan(["fake_ok"]), Store(tmp_path / "run"), engine=FakeEngine(before=twice))
    assert (summary.new, len(summary.left), summary.exit_code) == (0, 2, 130)


def test_another_environment_is_refused_before_anything_runs(tmp_path, monkeypatch):
    plan, store = tiny_plan(["fake_ok"], seq_len=[16, 32]), Store(tmp_path / "run")
    run(make_plan(plan.matrix, only=["*L16/*"]), store, engine=FakeEngine())
    monkeypatch.setattr("attn_zoo.measure.environment.capture_environment", lambda: environment(threads=1))
    engine = FakeEngine()
    with pytest.raises(StoreError, match="another environment"):
        run(plan, store, engine=engine)
    assert engine.started == []
    run(plan, store, engine=engine, allow_mixed_env=True)
    assert {record.environment for record in store.records()} == set(store.info().environments)
    assert len(store.info().environments) == 2


def test_a_failing_disk_stops_the_run_and_keeps_what_there_was(tmp_path, monkeypatch):
    plan, store = tiny_plan(["fake_ok"], seq_len=[16, 32, 64]), Store(tmp_path / "run")

    def fill(item):
        if item.cell.seq_len == 32:
            monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left")))

    with pytest.raises(StoreError, match="cannot be written") as caught:
        run(plan, store, engine=FakeEngine(before=fill))
    assert caught.value.exit_code == 4
    monkeypatch.undo()
    assert [record.cell.seq_len for record in store.records()] == [16]


class TestProgress:
    def records(self):
        (item,) = tiny_plan(["fake_ok"], seq_len=[16]).cells
        base = Record(cell=item.cell, status="ok", duration_s=61.0)
        score = Score(
            metric="accuracy",
            value=0.5,
            validation=0.5,
            num_examples=2,
            chance=0.1,
            best_step=1,
            num_steps=1,
            num_params=1,
            train_s=1.0,
            tokens_per_s=1.0,
        )
        return item, [
            replace(base, timing=replace(timing(16), low_ms=4.0, high_ms=64.0), memory=Memory(peak_bytes=2**20)),
            replace(base, score=score),
            replace(base, status="error", reason="\x1b[31mred\nalert"),
        ]

    def test_plain_lines_without_a_terminal(self, monkeypatch):
        stream = io.StringIO()
        progress = make_progress(stream)
        assert type(progress) is PlainProgress
        item, records = self.records()
        monkeypatch.setattr(time, "monotonic", itertools.count().__next__)  # a second passes between any two looks
        progress.begin(3, 0, 3, 5000.0)
        for record in records:
            progress.started(item, 100.0)
            progress.tick()
            progress.finished(record)
        progress.end()
        lines = stream.getvalue().splitlines()
        assert lines[0] == "3 cells, about 1 h 23 min left"
        what = "16 ms (95 %: 4 to 64), peak 1 MiB  [1 min 01 s]  about 1 min 39 s left"
        assert lines[1] == f"[1/3] fake_ok/scaling/fwd/L16/fp32/H1/D8/seed0  {what}"
        assert "accuracy 0.500 (chance: 0.100)" in lines[2]
        assert "error: ?[31mred" in lines[3], "control characters of foreign text are not shown"
        assert lines[3].endswith("]"), "nothing is left"
        assert "\x1b" not in stream.getvalue()

    def test_one_live_line_on_a_terminal(self, monkeypatch):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        stream = Terminal()
        progress = make_progress(stream)
        assert isinstance(progress, LiveProgress)
        item, records = self.records()
        progress.begin(3, 1, 3, 130.0)
        progress.started(item, 125.0)
        progress.tick()
        progress.finished(records[0])
        progress.say("careful")
        progress.end()
        text = stream.getvalue()
        assert "[2/3] fake_ok/scaling/fwd/L16/fp32/H1/D8/seed0  0.0 s, about 2 min 05 s left in" in text
        assert "careful" in text
        assert text.count("left") == text.count("left in") + 1, "below, and once in the first line"
        monkeypatch.setenv("NO_COLOR", "1")
        assert type(make_progress(Terminal())) is PlainProgress

    def test_spans(self):
        assert [span(value) for value in (0, 9.94, 59, 60, 3599, 7322)] == [
            "0.0 s",
            "9.9 s",
            "59 s",
            "1 min 00 s",
            "59 min 59 s",
            "2 h 02 min",
        ]


def test_a_matrix_of_refusals_only_needs_no_engine(tmp_path):
    plan = make_plan(make_matrix(["fake_modest"], is_causal=True))
    assert run(plan, Store(tmp_path / "run"), engine=FakeEngine()).counts == {"unsupported": 2}


def test_what_the_driver_does_for_a_cell_does_not_grow_with_the_cells_that_wait(tmp_path, monkeypatch):
    (first,) = tiny_plan(["fake_ok"], seq_len=[16]).cells
    items = [replace(first, cell=replace(first.cell, seed=seed)) for seed in range(3000)]
    asked: list[PlannedCell] = []

    def seconds(_forecasts: Forecasts, item: PlannedCell) -> float:
        asked.append(item)
        return 1.0

    monkeypatch.setattr(Forecasts, "seconds", seconds)
    told: list[float] = []
    progress = Progress()
    monkeypatch.setattr(progress, "started", lambda _, eta_s: told.append(eta_s))
    session = Session(Store(tmp_path / "run"), progress, None, items, [], 1, {})
    for item in items[:200]:
        session.started(item)
    assert len(asked) <= 3 * len(items), "not once for each cell that begins"
    assert told == pytest.approx([3000.0] * 200, rel=0.05)


def test_a_signal_that_whoever_started_us_wants_ignored_stays_ignored():
    """As a shell's `command &` does with Ctrl-C, and `nohup` with the end of the terminal."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard: list[int] = []
    for ignored in ((signal.SIGINT,), (signal.SIGHUP,), (signal.SIGINT, signal.SIGHUP)):
        heard.clear()
        # Those that started the tests may want some ignored too.
        wanted = {number: signal.SIG_IGN if number in ignored else signal.SIG_DFL for number in numbers}
        before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            with _signals(lambda number, _: heard.append(number)):
                for number in numbers:
                    signal.raise_signal(number)
        finally:
            for number, old in before.items():
                signal.signal(number, old)
        assert heard == [number for number in numbers if number not in ignored]


def test_a_terminal_that_ends_lets_the_running_cell_end(tmp_path):
    """It is told twice: by the shell that ends, and by the system."""

    def twice(item):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)

    plan, before = tiny_plan(["fake_ok"], seq_len=[16, 32, 64]), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        summary = run(plan, Store(tmp_path / "run"), engine=FakeEngine(before=twice))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (summary.new, len(summary.left), summary.exit_code) == (1, 2, 130)


def test_what_is_said_to_a_terminal_that_is_gone_goes_nowhere(tmp_path):
    master, terminal = os.openpty()
    there = os.fstat(terminal)
    _leave_terminal([terminal])
    assert os.fstat(terminal).st_rdev == there.st_rdev, "it is still there"
    os.close(master)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(terminal, b"x")
    with (tmp_path / "log").open("wb") as log:
        kept = os.fstat(log.fileno())
        _leave_terminal([terminal, log.fileno()])
        assert os.fstat(log.fileno()) == kept
    assert os.write(terminal, b"x") == 1
    os.close(terminal)
    _leave_terminal([terminal])  # closed
