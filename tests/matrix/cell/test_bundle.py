"""Cells timed in turns: one record each, whatever becomes of the others; pairs by round; several processes pooled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_zoo.discovery.global_state import changes, read_state
from attn_zoo.matrix.cell.trial import Trial
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.store.store import Store
from attn_zoo.measure.timing import Sampling
from attn_zoo.records import Record, Timing
from attn_zoo.statistics.pooling import pool_records
from tests.matrix.conftest import run_cells_in_turns, tiny_plan

TURNS = {"isolation": "interleaved", "seq_len": [1024]}


def ran(folder: Path, names: Sequence[object], **changes) -> dict[str, Record]:
    """Run one bundle in real processes; return its records by label."""
    store = Store(folder / "run")
    run(tiny_plan(list(names), **{**TURNS, **changes}), store)
    return {record.cell.label: record for record in store.records()}


def cells(names: Sequence[object], **changes):
    return [item.cell for item in tiny_plan(list(names), **{**TURNS, **changes}).cells]


def test_each_member_has_a_record_of_its_own_with_samples_of_both_processes(tmp_path):
    found = ran(tmp_path, ["fake_bug", "full", "fake_ok", "fake_nan", "fake_picky"], passes=["fwd_bwd"], repeats=2)
    statuses = {name: record.status for name, record in found.items()}
    assert statuses == {
        "full": "ok",
        "fake_ok": "ok",
        "fake_bug": "error",
        "fake_nan": "gate_failed",
        "fake_picky": "unsupported",
    }
    assert len({record.bundle.split()[0] for record in found.values()}) == 1
    assert found["full"].bundle.startswith("attention/fwd_bwd/L1024/")
    assert {record.isolation for record in found.values()} == {"interleaved"}
    full = found["full"]
    assert full.timing is not None
    assert full.memory is not None
    assert {"matches_oracle", "own_rows"} <= set(full.gate)
    assert full.kernels != ()
    assert full.flops == full.counted_flops
    assert full.duration_s > 0
    assert {"driver", "start", "exchange", "build", "gate", "timing", "memory"} <= set(full.phases)
    assert full.overhead_s == pytest.approx(
        sum(full.phases.values()) - full.phases["timing"] - full.phases["memory"], abs=1e-6
    )
    assert "in misbehave" in found["fake_bug"].trace
    sound = {name: record for name, record in found.items() if record.status == "ok"}
    (bundle,) = {record.bundle for record in sound.values()}
    assert len(set(bundle.split())) == 2, "samples of two processes are no pairs"
    for record in sound.values():
        assert record.timing is not None
        sizes = record.timing.process_sizes
        assert len(sizes) == 2
        assert sum(sizes) == len(record.timing.samples_ms)
        assert record.timing.low_ms <= record.timing.median_ms <= record.timing.high_ms
        assert "matches_oracle" in record.gate
        assert record.memory is not None
        assert json.loads(record.to_json())["timing"]["process_sizes"] == list(sizes)
    assert {len(found[name].bundle.split()) for name in statuses.keys() - sound.keys()} == {1}


def test_a_member_that_ends_the_process_takes_the_blame_and_the_others_begin_anew(tmp_path):
    found = ran(tmp_path, ["fake_ok", "fake_segfault", "fake_memory_error", "fake_killed"])
    assert "SIGSEGV" in found["fake_segfault"].reason
    assert "misbehaving.py" in found["fake_segfault"].trace
    sound = found["fake_ok"]
    assert (sound.status, found["fake_segfault"].status) == ("ok", "crashed")
    assert found["fake_segfault"].bundle == sound.bundle != ""
    failed = found["fake_memory_error"]
    assert (failed.status, failed.isolation, failed.bundle) == ("oom_host", "cell", ""), "so the failure is its own"
    assert "an allocation of 16 TiB failed" in failed.reason
    assert (found["fake_killed"].status, found["fake_killed"].attempt) == ("crashed", 2), "perhaps it was another's"


def test_all_are_weighed_before_a_call_of_one_is_captured(monkeypatch):
    """A capture that fails may leave memory in disorder."""
    done = []
    for name in ("weigh", "finish"):
        step = getattr(Trial, name)

        def noted(self, *given, name=name, step=step):
            done.append((name, self.record.cell.label))
            return step(self, *given)

        monkeypatch.setattr(Trial, name, noted)
    records = run_cells_in_turns(cells(["full", "fake_ok"]), budget_s=0.01)
    assert [record.status for record in records] == ["ok", "ok"]
    assert all(record.memory is not None for record in records)
    assert done == [(name, label) for name in ("weigh", "finish") for label in ("full", "fake_ok")]


def test_a_member_that_hangs_is_timed_out_alone_and_its_longer_lengths_are_not_tried(tmp_path):
    store = Store(tmp_path / "run")
    plan = tiny_plan(["fake_ok", "fake_hang"], isolation="interleaved", seq_len=[900, 1000], timeout_s=6)
    run(plan, store)
    found = {(record.cell.label, record.cell.seq_len): record for record in store.records()}
    assert {found["fake_ok", length].status for length in (900, 1000)} == {"ok"}
    assert {found["fake_hang", length].status for length in (900, 1000)} == {"timeout"}
    assert found["fake_hang", 1000].reason == "not started: length 900 of the lane timed out"


def test_all_share_their_inputs_and_one_round_is_one_round(monkeypatch):
    seen: list[int] = []
    prepare = Trial.prepare

    def noting(self, *arguments, **keywords):
        prepare(self, *arguments, **keywords)
        seen.append(self.inputs[0].data_ptr())

    monkeypatch.setattr(Trial, "prepare", noting)
    told: list[int] = []
    names = ["full", "fake_ok", "fake_loud"]
    found = run_cells_in_turns(cells(names, seq_len=[64]), tell=told.append, bundle="b")
    assert [record.status for record in found] == ["ok"] * 3
    assert len(set(seen)) == 1
    assert set(told) == {0, 1, 2}
    assert {record.bundle for record in found} == {"b"}


def test_a_repeat_takes_times_only_but_still_checks_the_output():
    (record,) = run_cells_in_turns(cells(["full"]), is_repeat=True)
    assert record.timing is not None
    assert record.memory is None
    assert record.gate == ("own_shape", "own_rows", "own_last")
    (wrong,) = run_cells_in_turns(cells(["fake_nan"]), is_repeat=True)
    assert (wrong.status, wrong.timing) == ("gate_failed", None)


def test_a_device_that_an_error_left_unusable_ends_the_process(monkeypatch):
    monkeypatch.setattr("attn_zoo.matrix.cell.trial._tidy", lambda device: False)
    found = run_cells_in_turns(cells(["fake_ok", "fake_bug", "full"]))
    assert [(record.cell.label, record.status) for record in found] == [("fake_bug", "error")]


@pytest.mark.parametrize("names", [["full"], ["full", "fake_ok"]])
def test_a_call_that_fails_while_samples_are_taken_is_an_error_of_its_own_cell(names, monkeypatch):
    take = Sampling.take
    calls: list[Sampling] = []

    def failing(self, *arguments):
        calls.append(self)
        if self is calls[0]:
            raise ValueError("late")
        take(self, *arguments)

    monkeypatch.setattr(Sampling, "take", failing)
    found = sorted((record.status, record.reason) for record in run_cells_in_turns(cells(names)))
    assert found == [("error", "ValueError: late"), *[("ok", "")] * (len(names) - 1)]


def timing(samples: list[float], **changes) -> Timing:
    base = {"median_ms": 1.0, "q1_ms": 1.0, "q3_ms": 1.0, "low_ms": 1.0, "high_ms": 1.0, "first_ms": 9.0}
    rest = {"num_warmup": 3, "inner_loops": 1, "timer": "perf_counter"}
    return Timing(samples_ms=tuple(samples), **{**base, **rest, **changes})


def test_pooling_keeps_order_sums_times_and_widens_the_interval():
    (cell,) = cells(["full"])
    first = Record(cell=cell, status="ok", duration_s=2.0, kernels=("a",), phases={"gate": 1.0, "timing": 0.5})
    records = [
        replace(first, timing=timing([1.0] * 10, flags=("unstable",))),
        replace(first, timing=timing([2.0] * 10), kernels=("b",), attempt=2, phases={"timing": 0.5}),
        replace(first, timing=timing([3.0] * 4), kernels=("a",)),
    ]
    whole = pool_records(records)
    assert whole.timing is not None
    assert whole.timing.samples_ms == (1.0,) * 10 + (2.0,) * 10 + (3.0,) * 4
    assert whole.timing.process_sizes == (10, 10, 4)
    assert whole.timing.median_ms == pytest.approx(6 ** (1 / 3)), "the geometric mean of 1, 2 and 3"
    assert whole.timing.low_ms < 1.0
    assert whole.timing.high_ms > 3.0, "another process may well lie outside the range of three"
    assert whole.timing.flags == ("unstable", "kernels_differ")
    assert whole.timing.first_ms == 9.0
    assert (whole.duration_s, whole.attempt, whole.kernels) == (6.0, 2, ("a", "b"))
    assert whole.phases == {"gate": 2.0, "timing": 1.5}
    assert pool_records(records[:1]) == records[0]


@pytest.mark.gpu
def test_peers_on_the_gpu_are_timed_in_turns(tmp_path):
    changes = {"device": "cuda", "dtypes": ["bfloat16"], "head_dim": 64, "num_heads": 4, "repeats": 2}
    found = ran(tmp_path, ["full", "linformer"], passes=["fwd_bwd"], timeout_s=120, budget_s=0.2, **changes)
    for record in found.values():
        assert record.status == "ok", record.reason + record.trace
        assert record.timing is not None
        assert record.timing.timer == "cuda_event"
        assert len(record.timing.process_sizes) == 2
        assert record.memory is not None
    assert torch.cuda.is_available()


@pytest.mark.parametrize(
    ("name", "what", "others"),
    [
        ("fake_threads", "the number of threads: 1 to 2", ["full", "fake_ok"]),
        ("fake_threads", "the number of threads: 1 to 2", []),
        ("fake_no_grad", "the mode of gradients: True to False", ["full"]),
        ("fake_double", "the default dtype: float32 to float64", ["full"]),
    ],
)
def test_a_member_that_changes_the_process_fails_and_its_neighbours_do_not_notice(name, what, others):
    before = read_state(has_generators=False) | {"the number of threads": 1}
    found = run_cells_in_turns(cells([name, *others], passes=["fwd_bwd"]), bundle="b")
    assert changes(before) == {}
    guilty, *rest = found
    assert (guilty.status, guilty.reason) == ("gate_failed", f"global_state: a call changes {what}")
    assert guilty.timing is None
    assert [record.status for record in rest] == ["ok"] * len(others)
