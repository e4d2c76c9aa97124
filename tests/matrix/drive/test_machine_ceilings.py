"""Ceilings of a run: measured in a process of its own, before and after, and the fastest stored by the driver."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from attn_zoo.errors import FolderError
from attn_zoo.matrix.claimed_costs import Claims, claims
from attn_zoo.matrix.drive import machine_ceilings as module
from attn_zoo.matrix.drive import run_plan as runner
from attn_zoo.matrix.drive.machine_ceilings import ceilings_text, note_ceilings
from attn_zoo.matrix.drive.progress import PlainProgress, Progress
from attn_zoo.matrix.store.lock import wait_for_lock
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Ceilings, Record
from tests.matrix.conftest import environment, run_cell, tiny_plan, training_plan
from tests.matrix.drive.test_run_plan import FakeEngine

MACHINE = environment()


def ceiling(**changes) -> Ceilings:
    fields = {"device": "cpu", "dtype": "float32", "threads": 1, "matmul_flops_per_s": 1e11, "copy_bytes_per_s": 1e10}
    return Ceilings(**{**fields, "environment": MACHINE.digest, **changes})


@pytest.fixture
def store(tmp_path) -> Store:
    found = Store(tmp_path / "run")
    with found.writing({"name": "test"}, MACHINE):
        return found


@pytest.fixture
def asked(monkeypatch) -> list[tuple[tuple[str, int | None], list[str]]]:
    """Stand in for the process that measures; note what it was asked."""
    calls = []

    def measure(place, dtypes, _should_stop):
        calls.append((place, dtypes))
        return [ceiling(threads=place[1], dtype=dtype, environment="") for dtype in dtypes]

    monkeypatch.setattr(module, "_measure", measure)
    return calls


def run_once(plan, store, said=None, **how):
    note_ceilings(plan.cells, store, MACHINE.digest, (said if said is not None else []).append, lambda: False, **how)


def test_the_real_process_measures_this_machine_and_leaves_the_driver_alone(store):
    said: list[str] = []
    began = time.monotonic()
    run_once(tiny_plan(["fake_ok"], dtypes=["float32", "float64"], seq_len=[16]), store, said)
    assert time.monotonic() - began < module.LIMIT_S
    found = {one.dtype: one for one in store.ceilings()}
    assert set(found) == {"float32", "float64"}
    for one in found.values():
        assert 1e8 < one.matmul_flops_per_s < 1e15
        assert 1e8 < one.copy_bytes_per_s < 1e13
        assert (one.environment, one.threads, one.peak_flops_per_s) == (MACHINE.digest, 1, None)
        assert one.measured.endswith("+00:00")
    assert said[0] == "measuring the ceilings of this machine ..."
    assert len(said) == 3


def test_each_device_dtype_and_thread_count_is_measured_once(store, asked):
    run_once(tiny_plan(["fake_ok"], dtypes=["float32", "float64"]), store)
    run_once(tiny_plan(["fake_ok"], dtypes=["float32", "float64"]), store)
    assert asked == [(("cpu", 1), ["float32", "float64"])]
    run_once(tiny_plan(["fake_ok"], dtypes=["float32", "bfloat16"], threads=2), store)
    run_once(tiny_plan(["fake_ok"], dtypes=["float32", "bfloat16"]), store)
    assert asked[1:] == [(("cpu", 2), ["bfloat16", "float32"]), (("cpu", 1), ["bfloat16"])]
    assert len(store.ceilings()) == 5


def test_the_fastest_stays_and_other_machines_add_their_own(store, asked):
    store.add_ceilings([ceiling(matmul_flops_per_s=7.0, copy_bytes_per_s=2.0, flags=("loaded_host",))])
    store.add_ceilings([ceiling(matmul_flops_per_s=5.0, copy_bytes_per_s=3.0), ceiling(environment="other")])
    own = ceiling(matmul_flops_per_s=7.0, copy_bytes_per_s=3.0, flags=("loaded_host",))
    assert sorted(store.ceilings(), key=lambda one: one.matmul_flops_per_s) == [own, ceiling(environment="other")]
    run_once(tiny_plan(["fake_ok"]), store)
    assert asked == []
    said: list[str] = []
    run_once(tiny_plan(["fake_ok"]), store, said, is_done=True)
    assert asked == [(("cpu", 1), ["float32"])]
    assert said[0] == "measuring the ceilings of this machine again ..."
    assert {one.matmul_flops_per_s for one in store.ceilings()} == {1e11}
    assert not list(store.folder.glob(".ceilings*.tmp"))


def test_what_was_measured_within_the_last_minute_is_not_measured_again(store, asked):
    now = datetime.now(UTC)
    for seconds, num_asked in ((20, 0), (100, 1)):
        store.add_ceilings([ceiling(measured=(now - timedelta(seconds=seconds)).isoformat(), matmul_flops_per_s=2e11)])
        run_once(tiny_plan(["fake_ok"]), store, is_done=True)
        assert len(asked) == num_asked
        (store.folder / "ceilings.json").unlink()


def test_only_timings_that_will_run_need_them(store, asked):
    run_once(training_plan(["fake_ok"]), store)
    run_once(tiny_plan(["fake_modest"], is_causal=[True]), store)  # all refused
    assert asked == []
    assert store.ceilings() == ()


def test_a_run_measures_before_and_after_and_says_so(tmp_path, monkeypatch, asked):
    monkeypatch.setattr("attn_zoo.measure.environment.capture_environment", environment)
    monkeypatch.setattr(runner, "note_ceilings", note_ceilings)
    stream, store, order = io.StringIO(), Store(tmp_path / "run"), []
    engine = FakeEngine(before=lambda _: order.append(len(asked)))
    runner.run(tiny_plan(["fake_ok"]), store, engine=engine, progress=PlainProgress(stream))
    assert set(order) == {1}
    lines = stream.getvalue().splitlines()
    assert lines[1] == "measuring the ceilings of this machine ..."
    assert lines[2].strip() == "cpu float32, 1 thread: products 0.1 TFLOP/s, copies 10 GB/s"
    assert lines[3].startswith("[1/2]")
    assert lines[-2] == "measuring the ceilings of this machine again ..."
    assert len(asked) == 2
    runner.run(tiny_plan(["fake_ok"]), store, engine=FakeEngine())
    assert len(asked) == 2, "nothing was timed"
    remote = FakeEngine()
    remote.is_remote = True
    runner.run(tiny_plan(["fake_ok"], dtypes=["float64"]), store, engine=remote)
    assert len(asked) == 2, "a driver cannot speak for the nodes of a cluster"


def test_a_process_that_fails_is_a_message_and_the_run_goes_on(store, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(
        module, "spawn_environment", lambda _: {**os.environ, "PYTHONPATH": "/nowhere", "PYTHONHOME": "/"}
    )
    run_once(tiny_plan(["fake_ok"]), store, said)
    assert len(said) == 2
    assert said[1].startswith("no ceilings of cpu: ")
    assert store.ceilings() == ()


def test_ctrl_c_and_the_limit_end_it(store, monkeypatch):
    said: list[str] = []
    plan = tiny_plan(["fake_ok"])
    asked_to_stop = iter([False])
    note_ceilings(plan.cells, store, MACHINE.digest, said.append, lambda: next(asked_to_stop, True))
    assert said[-1] == "no ceilings of cpu: stopped"
    monkeypatch.setattr(module, "LIMIT_S", 0.4)
    run_once(plan, store, said)
    assert said[-1] == "no ceilings of cpu: not done within 0.4 s"
    assert store.ceilings() == ()


def test_who_waits_for_another_shard_says_so_and_hears_that_it_is_to_stop(store, asked):
    said: list[str] = []
    plan = tiny_plan(["fake_ok"])
    with wait_for_lock(store.folder / ".lock-ceilings"):
        note_ceilings(plan.cells, store, MACHINE.digest, said.append, lambda: len(said) > 0)
    assert said[0] == "another shard measures the ceilings of its machine; waiting for it ..."
    assert f"in use by another run: process {os.getpid()} since " in said[1]
    assert said[1].endswith("nothing new is measured")
    assert asked == []
    note_ceilings(plan.cells, store, MACHINE.digest, said.append, lambda: False)
    assert len(asked) == 1, "free"


def test_where_the_run_is_over_nothing_is_begun_or_said(store, asked):
    said: list[str] = []
    note_ceilings(tiny_plan(["fake_ok"]).cells, store, MACHINE.digest, said.append, lambda: True)
    assert (said, asked) == ([], [])


def test_a_driver_that_waits_to_note_those_of_a_node_hears_ctrl_c(store, monkeypatch):
    said: list[str] = []
    progress = Progress()
    monkeypatch.setattr(progress, "say", said.append)
    session = runner.Session(store, progress, None, [], [], 1, {})
    asked_to_stop = iter([False, True])
    monkeypatch.setattr(session, "is_over", lambda: next(asked_to_stop))
    with wait_for_lock(store.folder / ".lock-ceilings"):
        session.measured([ceiling()])
    assert said[0].endswith("nothing new is noted")
    assert store.ceilings() == ()
    session.measured([ceiling()])
    assert store.ceilings() == (ceiling(),), "free"


@pytest.mark.parametrize("text", ["{", "[]", '{"ceilings": 3}', '{"ceilings": [{"device": "cpu"}]}'])
def test_a_damaged_file_is_named_and_left_alone(store, asked, text):
    path = store.folder / "ceilings.json"
    path.write_text(text)
    with pytest.raises(FolderError, match=r"ceilings\.json"):
        store.ceilings()
    said: list[str] = []
    run_once(tiny_plan(["fake_ok"]), store, said)
    assert len(said) == 1
    assert "nothing new is measured" in said[0]
    assert path.read_text() == text
    assert asked == []


def test_the_text_names_what_is_doubtful():
    gpu = ceiling(device="cuda", threads=None, idle_watts=76.4, flags=("throttled",), dtype="bfloat16")
    assert ceilings_text(gpu) == "cuda bfloat16: products 0.1 TFLOP/s, copies 10 GB/s, idle 76 W (throttled)"


def test_records_get_their_least_traffic_and_the_cost_of_their_backward():
    (item, *_) = tiny_plan(["full"], seq_len=[16]).cells
    record = run_cell(item.cell, budget_s=0.01)
    assert record.flops == 4 * 16 * 16 * 8
    assert record.min_bytes == 4 * 16 * 8 * 4  # four tensors of one head in float32
    assert record.backward_ratio == 2.5
    own = claims(tiny_plan(["fake_ok"], seq_len=[16]).cells[0].cell)
    assert own == Claims(time_exponent=2, memory_exponent=2), "without a formula there are none but exponents"
    mixer = claims(replace(item.cell, scope="mixer"))
    assert (mixer.flops, mixer.projection_flops) == (record.flops + 4 * 2 * 16 * 8 * 8, 4 * 2 * 16 * 8 * 8)
    old = json.loads(record.to_json())
    del old["min_bytes"], old["backward_ratio"]
    assert Record.from_dict(old).backward_ratio is None
