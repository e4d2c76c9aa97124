"""Repeats of cells: rounds over the matrix, parts that survive the run, one record in the end, failures not hidden."""

import io
import json
import os
import signal
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from attn_zoo.errors import StoreError
from attn_zoo.matrix.drive.progress import PlainProgress, Progress
from attn_zoo.matrix.drive.run_plan import Session, run, standing, time_left
from attn_zoo.matrix.drive.supervise import run_lane
from attn_zoo.matrix.drive.worker_pool import Control, Settings, WorkerPool
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.matrix.store.store import Repeats, Store
from attn_zoo.records import Memory, Record, Timing
from attn_zoo.statistics.pooling import pool_records
from tests.matrix.conftest import environment, tiny_plan


def timing(ms: float) -> Timing:
    ends: dict[str, Any] = dict.fromkeys(("median_ms", "q1_ms", "q3_ms", "low_ms", "high_ms", "first_ms"), ms)
    return Timing(samples_ms=(ms,) * 4, num_warmup=1, inner_loops=1, timer="perf_counter", **ends)


class FakeEngine:
    """Answers at once; the time of a cell doubles from repeat to repeat.

    Args:
        fails: statuses by (length, repeat).
        stop_at: (length, repeat) during which Ctrl-C is pressed twice.
    """

    jobs = 1

    def __init__(self, fails=None, stop_at=None, is_remote=False):
        self.fails, self.stop_at, self.is_remote = fails or {}, stop_at, is_remote
        self.visited: list[tuple[int, int]] = []
        self.lanes: list[list[PlannedCell]] = []

    def run(self, lanes, settings, control):
        self.lanes = [list(items) for items, _ in lanes]
        for items, _ in lanes:
            for item in items:
                if not (control.is_wanted(item) and control.may_start(item)):
                    continue
                control.started(item)
                place = (item.cell.seq_len, item.repeat)
                if place == self.stop_at:
                    os.kill(os.getpid(), signal.SIGINT)
                    os.kill(os.getpid(), signal.SIGINT)
                if control.should_stop():
                    return
                self.visited.append(place)
                status = self.fails.get(place, "ok")
                times = timing(2.0**item.repeat) if status == "ok" else None
                reason = "" if times else "because"
                record = Record(cell=item.cell, status=status, reason=reason, environment=settings.environment)
                control.finished(replace(record, timing=times, duration_s=1.0))


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setattr("attn_zoo.measure.environment.capture_environment", environment)


def plan_of(lengths=(16, 32), repeats=3, **changes):
    return tiny_plan(["fake_ok"], seq_len=list(lengths), repeats=repeats, **changes)


def parts_of(store: Store) -> list[str]:
    return sorted(path.name.partition("-")[2] for path in store.folder.glob("parts/*"))


def test_rounds_over_the_matrix_then_one_record_each_and_no_parts(tmp_path):
    store, engine, stream = Store(tmp_path / "run"), FakeEngine(), io.StringIO()
    summary = run(plan_of(), store, engine=engine, progress=PlainProgress(stream))
    assert engine.visited == [(16, 0), (32, 0), (16, 1), (32, 1), (16, 2), (32, 2)], "far apart in time"
    assert (summary.counts, summary.new, summary.left) == ({"ok": 2}, 2, ())
    for record in store.records():
        assert record.timing is not None
        assert record.timing.process_sizes == (4, 4, 4)
        assert record.timing.samples_ms == (1.0,) * 4 + (2.0,) * 4 + (4.0,) * 4
        assert record.timing.low_ms < 1.0 < 4.0 < record.timing.high_ms
        assert record.duration_s == 3.0
    assert not (store.folder / "parts").exists()
    assert not (store.folder / "replaced").exists()
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("2 cells, 6 measurements with their repeats, about ")
    assert lines[1].startswith("[1/6] fake_ok/scaling/fwd/L16/fp32/H1/D8/seed0  repeat 1 of 3: 1 ms")
    assert lines[6].startswith("[6/6] fake_ok/scaling/fwd/L32/fp32/H1/D8/seed0  repeat 3 of 3: 2 ms (")
    assert "by 3 processes" in lines[6]


def test_groups_may_differ_in_their_repeats(tmp_path):
    few, many = plan_of([64], repeats=1), plan_of([16], repeats=2)
    engine = FakeEngine()
    run(replace(few, cells=(*many.cells, *few.cells)), Store(tmp_path / "run"), engine=engine)
    assert engine.visited == [(16, 0), (64, 0), (16, 1)]


def test_a_run_that_is_stopped_loses_the_running_repeat_only(tmp_path):
    plan, store = plan_of(), Store(tmp_path / "run")
    summary = run(plan, store, engine=FakeEngine(stop_at=(32, 1)))
    assert (summary.new, len(summary.left), summary.num_repeats, summary.exit_code) == (0, 2, 3, 130)
    assert parts_of(store) == ["1.json", "1.json", "2.json"]
    now = standing(plan.cells, store.records(), store.repeats.count())
    assert sorted(now.begun.values()) == [1, 2]
    engine, stream = FakeEngine(), io.StringIO()
    summary = run(plan, store, engine=engine, progress=PlainProgress(stream))
    assert engine.visited == [(32, 1), (16, 2), (32, 2)]
    assert stream.getvalue().startswith("2 cells, 6 measurements with their repeats, 3 of them done before")
    assert (summary.counts, summary.exit_code) == ({"ok": 2}, 0)
    times = [record.timing for record in store.records()]
    assert [one.samples_ms[::4] for one in times if one] == [(1.0, 2.0, 4.0)] * 2, "as if it had not been stopped"
    assert parts_of(store) == []


def test_a_retry_that_is_stopped_goes_on_with_its_own_repeats(tmp_path):
    plan, store = plan_of(), Store(tmp_path / "run")
    run(plan, store, engine=FakeEngine())
    old = {record.cell.key: record for record in store.records()}
    summary = run(plan, store, engine=FakeEngine(stop_at=(32, 1)), retry_statuses=["ok"])
    assert (summary.new, summary.num_repeats, summary.num_again) == (0, 3, 2)
    assert {record.cell.key: record for record in store.records()} == old
    engine = FakeEngine()
    summary = run(plan, store, engine=engine, retry_statuses=["ok"])
    assert engine.visited == [(32, 1), (16, 2), (32, 2)]
    assert (summary.new, summary.left, parts_of(store)) == (2, (), [])
    assert len(list((store.folder / "replaced").iterdir())) == 2


def test_a_failure_in_the_first_repeat_is_final(tmp_path):
    store, engine = Store(tmp_path / "run"), FakeEngine(fails={(32, 0): "gate_failed"})
    stream = io.StringIO()
    summary = run(plan_of(), store, engine=engine, progress=PlainProgress(stream))
    assert engine.visited == [(16, 0), (32, 0), (16, 1), (16, 2)]
    assert summary.counts == {"ok": 1, "gate_failed": 1}
    failed = next(record for record in store.records() if record.status != "ok")
    assert failed.reason == "because"
    assert "[4/6]" in stream.getvalue(), "what is not repeated counts as done"
    assert "[6/6]" in stream.getvalue()


def test_a_failure_in_a_later_repeat_is_the_result_and_the_others_are_kept_aside(tmp_path):
    plan, store = plan_of(), Store(tmp_path / "run")
    engine = FakeEngine(fails={(32, 1): "crashed"})
    assert run(plan, store, engine=engine).counts == {"ok": 1, "crashed": 1}
    assert engine.visited == [(16, 0), (32, 0), (16, 1), (32, 1), (16, 2)]
    failed = next(record for record in store.records() if record.status != "ok")
    assert (failed.reason, failed.timing) == ("repeat 2 of 3: because", None)
    assert parts_of(store) == []
    (kept,) = (store.folder / "replaced").iterdir()
    assert Record.from_dict(json.loads(kept.read_text())).timing == timing(1.0)
    again = FakeEngine()
    assert run(plan, store, engine=again, retry_statuses=["crashed"]).counts == {"ok": 2}
    assert again.visited == [(32, 0), (32, 1), (32, 2)], "a retry begins anew"


def test_parts_of_another_environment_do_not_count_and_are_kept_aside(tmp_path, monkeypatch):
    plan, store = plan_of([16]), Store(tmp_path / "run")
    run(plan, store, engine=FakeEngine(stop_at=(16, 1)))
    monkeypatch.setattr("attn_zoo.measure.environment.capture_environment", lambda: environment(threads=1))
    with pytest.raises(StoreError, match="another environment"):
        run(plan, store, engine=FakeEngine())
    assert parts_of(store) == ["1.json"]
    engine = FakeEngine()
    run(plan, store, engine=engine, allow_mixed_env=True)
    assert engine.visited == [(16, 0), (16, 1), (16, 2)]
    assert len(list((store.folder / "replaced").iterdir())) == 1


def test_what_a_killed_run_left_beside_a_record_is_tidied_away(tmp_path):
    plan, store = plan_of([16]), Store(tmp_path / "run")
    run(plan, store, engine=FakeEngine(stop_at=(16, 2)))
    (first, second) = sorted((store.folder / "parts").iterdir())
    contents = first.read_text(), second.read_text()
    run(plan, store, engine=FakeEngine())
    (store.folder / "parts").mkdir()
    for path, text in zip((first, second), contents, strict=True):
        path.write_text(text)
    (store.folder / "parts" / ".half.tmp").write_text("{")
    engine = FakeEngine()
    run(plan, store, engine=engine)
    assert engine.visited == []
    assert not (store.folder / "parts").exists()


def test_a_damaged_part_and_what_comes_after_it_is_measured_again(tmp_path):
    plan, store = plan_of([16], repeats=4), Store(tmp_path / "run")
    run(plan, store, engine=FakeEngine(stop_at=(16, 3)))
    key = plan.cells[0].cell.key
    (store.folder / "parts" / f"{key}-2.json").write_text("{")
    engine = FakeEngine()
    run(plan, store, engine=engine)
    assert engine.visited == [(16, 1), (16, 2), (16, 3)]
    assert len(list((store.folder / "replaced").iterdir())) == 2


def test_what_is_timed_in_turns_goes_on_with_as_many_repeats_of_each(tmp_path):
    """A run may be killed when it has stored the repeat of one and not yet of the other: no pair."""
    plan = tiny_plan(["fake_ok", "fake_loud"], seq_len=[16], repeats=3, isolation="interleaved")
    store = Store(tmp_path / "run")
    run(plan, store, engine=FakeEngine(stop_at=(16, 2)))
    assert parts_of(store) == ["1.json", "1.json", "2.json", "2.json"]
    (store.folder / "parts" / f"{plan.cells[1].cell.key}-2.json").unlink()
    engine = FakeEngine()
    run(plan, store, engine=engine)
    assert engine.visited == [(16, 1), (16, 1), (16, 2), (16, 2)]
    assert len(list((store.folder / "replaced").iterdir())) == 1


def test_repeats_that_end_in_another_order_for_each_of_a_bundle_are_pairs(tmp_path):
    """On a cluster two processes of a bundle may be under way at once."""

    class TwoAtOnce(FakeEngine):
        def run(self, lanes, settings, control):
            for repeat, begins in ((0, "01"), (1, "10")):
                item = lanes[0][0][repeat]
                for began in begins:
                    record = Record(cell=item.cell, status="ok", timing=timing(2.0 ** int(began)), bundle=f"b{began}")
                    control.finished(replace(record, started=f"2026-01-01T00:00:0{began}+00:00"))

    plan = tiny_plan(["fake_ok", "fake_loud"], seq_len=[16], repeats=2, isolation="interleaved")
    store = Store(tmp_path / "run")
    run(plan, store, engine=TwoAtOnce(is_remote=True))
    assert {record.bundle for record in store.records()} == {"b0 b1"}
    assert {record.timing.samples_ms[::4] for record in store.records() if record.timing} == {(1.0, 2.0)}


def test_a_matrix_with_fewer_repeats_still_runs_the_last_one(tmp_path):
    store = Store(tmp_path / "run")
    run(plan_of([16], repeats=4), store, engine=FakeEngine(stop_at=(16, 3)))
    engine = FakeEngine()
    run(plan_of([16], repeats=2), store, engine=engine)
    assert engine.visited == [(16, 1)]
    (record,) = store.records()
    assert record.timing is not None
    assert record.timing.process_sizes == (4, 4)


def test_nothing_is_overwritten(tmp_path):
    parts = Repeats(tmp_path)
    (item,) = plan_of([16]).cells
    record = Record(cell=item.cell, status="ok", timing=timing(1.0))
    parts.write(record, 1)
    with pytest.raises(StoreError, match="there is this repeat already; nothing is overwritten"):
        parts.write(record, 1)
    assert parts.count() == {item.cell.key: 1}


def test_a_repeat_that_comes_after_the_failure_of_another_changes_nothing(tmp_path):
    """On a cluster several are under way at once."""

    class AllTheSame(FakeEngine):
        def run(self, lanes, settings, control):
            super().run(lanes, settings, control)
            control.finished(Record(cell=lanes[0][0][0].cell, status="ok", timing=timing(1.0)))

    store = Store(tmp_path / "run")
    run(plan_of([16]), store, engine=AllTheSame(is_remote=True, fails={(16, 1): "crashed"}))
    assert [record.status for record in store.records()] == ["crashed"]


def test_the_budget_of_a_cell_is_shared_by_its_repeats_and_its_estimate_covers_all():
    (one,), (three,) = (plan_of([16], repeats=count, budget_s=0.6).cells for count in (1, 3))
    assert (one.budget_s, three.budget_s) == (0.6, pytest.approx(0.2))
    assert one.estimate_s is not None
    assert three.estimate_s is not None
    assert three.estimate_s > one.estimate_s, "three starts"


def test_the_next_repeat_is_forecast_without_what_only_the_first_one_does(tmp_path):
    """By a run and by `status` alike."""
    (item,) = plan_of([16], repeats=3).cells
    phases = {"start": 1.0, "gate": 8.0, "probe": 16.0, "timing": 2.0, "memory": 4.0, "count": 0.5, "exchange": 0.25}
    first = Record(cell=item.cell, status="ok", timing=timing(1.0), duration_s=30.5, phases=phases)
    repeats = {item.cell.key: [first]}
    session = Session(Store(tmp_path / "run"), Progress(), None, [item], [], 1, repeats)
    assert session.left_s() == 2 * 3.25
    assert time_left([item], [], repeats) == 2 * 3.25


def test_what_one_repeat_alone_has_is_kept_when_the_others_began_in_the_same_second(tmp_path):
    (item,) = plan_of([16], repeats=2).cells
    plain = Record(cell=item.cell, status="ok", timing=timing(1.0), started="2026-01-01T00:00:00+00:00", gate=("own",))
    first = replace(plain, memory=Memory(peak_bytes=1), gate=("finite", "own"), energy_joules=2.0, bundle="b")
    session = Session(Store(tmp_path / "run"), Progress(), None, [item], [], 1, {item.cell.key: [first]})
    session.finished(replace(plain, bundle="a"))
    (record,) = session.new
    assert (record.gate, record.energy_joules, record.bundle) == (("finite", "own"), 2.0, "b a")


def test_records_of_two_environments_are_not_pooled():
    (item,) = plan_of([16]).cells
    records = [Record(cell=item.cell, status="ok", environment=name, timing=timing(1.0)) for name in "ab"]
    with pytest.raises(ValueError, match="one environment"):
        pool_records(records)


def test_real_processes_repeat_times_only(tmp_path):
    store = Store(tmp_path / "run")
    assert run(plan_of([16], repeats=2, timeout_s=300), store).counts == {"ok": 1}
    (record,) = store.records()
    assert record.timing is not None
    assert len(record.timing.process_sizes) == 2
    assert sum(record.timing.process_sizes) == len(record.timing.samples_ms)
    assert record.memory is not None, "weighed once, by the first"
    assert record.gate[:1] != ("own_shape",), "the gate was passed by the first"
    assert record.isolation == "cell"


def test_a_cell_that_fails_in_a_lane_is_not_repeated(tmp_path):
    plan = plan_of([16, 900], isolation="lane", repeats=2, timeout_s=300)
    bad = [replace(item, cell=replace(item.cell, variant="fake_bug")) for item in plan.cells]
    digest = tiny_plan(["fake_bug"], seq_len=[16]).cells[0].cell.variant_digest
    bad = [replace(item, cell=replace(item.cell, variant_digest=digest)) for item in bad]
    rounds = [replace(item, repeat=repeat) for repeat in range(2) for item in bad]

    class Collector(Control):
        records: ClassVar[list[Record]] = []

        def finished(self, record):
            self.records.append(record)

    files = plan.variant_files
    control, settings = Collector(), Settings(logs=tmp_path, variant_files=files)
    with WorkerPool(settings, control, rounds) as pool:
        run_lane(rounds, pool)
    assert [(record.cell.seq_len, record.status) for record in Collector.records] == [
        (16, "ok"),
        (900, "error"),
        (16, "ok"),
    ]
    first, _, again = Collector.records
    assert (first.isolation, again.isolation) == ("lane", "lane")
    assert first.memory is not None
    assert first.gate[:1] != ("own_shape",)
    assert again.timing is not None
    assert (again.memory, again.gate[:1]) == (None, ("own_shape",)), "times only"
