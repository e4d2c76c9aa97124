"""A training on two ranks that torchrun starts from a worker: whatever dies, nothing is left and nothing is lost."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from attn_zoo.matrix.cell.run_order import run_order
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.plan.expand import Plan
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.matrix.store.store import Store
from tests.matrix.conftest import TINY_TRAINING, prepare_process, training_plan
from tests.matrix.drive.test_interruptions import is_gone, wait_for
from tests.processes import start_process


def plan_of(*names: str) -> Plan:
    # Each rank has as many examples as the misbehaving variants wait for.
    overrides = {**TINY_TRAINING, "num_steps": 6, "eval_every": 2, "batch_size": 2 * TINY_TRAINING["batch_size"]}
    return training_plan(list(names), overrides=overrides, data_parallel=2, threads=1)


def run_it(folder: Path, marks: Path) -> int:
    """What the runner does."""
    prepare_process()
    os.environ["FAKE_MARKS"] = str(marks)
    return run(plan_of("fake_train_rank_killed"), Store(folder)).exit_code


def test_ranks_end_together_with_the_right_blame_and_go_on_from_their_checkpoint(tmp_path, monkeypatch):
    folder, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    runner = start_process(run_it, folder, marks, errors=tmp_path / "errors")
    try:
        # The first attempt lost a rank, which ended the other and the worker; the second goes on, and waits.
        wait_for(lambda: len(list(marks.glob("waiting-*"))) == 2 or not runner.is_alive())
        assert runner.is_alive(), (tmp_path / "errors").read_text()
        children = psutil.Process(runner.pid).children(recursive=True)
        assert sum("rank_processes" in " ".join(child.cmdline()) for child in children) == 2
        assert list((folder / "checkpoints").glob("*/*.safetensors"))
    finally:
        runner.kill()
        runner.join()
    wait_for(lambda: all(is_gone(child) for child in children))

    (marks / "go").touch()
    monkeypatch.setenv("FAKE_MARKS", str(marks))
    store = Store(folder)
    summary = run(plan_of("fake_train_rank_killed", "fake_train_rank_error"), store)
    assert summary.counts == {"ok": 1, "error": 1}
    done, failed = sorted(store.records(), key=lambda record: record.status == "error")
    assert (done.cell.data_parallel, done.num_jobs, done.attempt) == (2, 1, 1)
    assert "own_output" in done.gate
    assert failed.reason == "KeyError: 'of rank 1 alone'"
    assert not [child for child in psutil.Process().children(recursive=True) if "rank_proc" in str(child.cmdline())]

    (one,) = run_order(WorkOrder(cells=(replace(done.cell, data_parallel=1),)))
    assert one.score is not None
    assert done.score is not None
    for entry, known in zip(done.score.curve, one.score.curve, strict=True):
        assert entry == pytest.approx(known, rel=1e-5)
    assert [part for part in (done.score.value, done.score.best_step)] == [one.score.value, one.score.best_step]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "torchrun's handler stays in the worker"
