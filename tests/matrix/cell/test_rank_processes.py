"""A training on two ranks that torchrun starts from a worker: whatever dies, nothing is left and nothing is lost."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from attn_zoo.matrix.cell import rank_processes
from attn_zoo.matrix.cell.run_order import run_order
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.plan.expand import Plan
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Cell, Record
from tests.matrix.conftest import TINY_TRAINING, prepare_process, training_plan
from tests.processes import is_gone, start_process, wait_for


def plan_of() -> Plan:
    # Each rank has as many examples as the misbehaving variants wait for.
    overrides = {**TINY_TRAINING, "num_steps": 6, "eval_every": 2, "batch_size": 2 * TINY_TRAINING["batch_size"]}
    return training_plan(["fake_train_rank_killed"], overrides=overrides, data_parallel=2, threads=1)


def run_it(folder: Path, marks: Path) -> int:
    """What the runner does."""
    prepare_process()
    os.environ["FAKE_MARKS"] = str(marks)
    return run(plan_of(), Store(folder)).exit_code


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ranks_end_together_and_go_on_from_their_checkpoint(tmp_path, monkeypatch):
    folder, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    runner = start_process(run_it, folder, marks, errors=tmp_path / "errors")
    try:
        # The first attempt lost a rank, which ended the other and the worker; the second goes on, and waits.
        wait_for(lambda: len(list(marks.glob("waiting-*"))) == 2 or not runner.is_alive(), 600)
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
    summary = run(plan_of(), store)
    assert (summary.counts, summary.new) == ({"ok": 1}, 1)
    (done,) = store.records()
    assert (done.cell.data_parallel, done.num_jobs, done.attempt) == (2, 1, 1)
    assert "own_output" in done.gate
    assert not list((folder / "checkpoints").glob("*/*.safetensors"))
    (one,) = run_order(WorkOrder(cells=(replace(done.cell, data_parallel=1),)))
    assert one.score is not None
    assert done.score is not None
    for entry, known in zip(done.score.curve, one.score.curve, strict=True):
        assert entry == pytest.approx(known, rel=1e-5)
    assert (done.score.value, done.score.best_step) == (one.score.value, one.score.best_step)


LOST = "LostRankError: connection closed"
TERM, KILL, SEGV = -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV


class EndedError(Exception):
    """Stands for the end of the process."""


def outcome(monkeypatch, answers: dict[int, str], died: dict[int, int]) -> tuple[str, int | None]:
    """Return the reason of the record and, where there is none, the code with which the worker ends."""

    def end(code: int) -> NoReturn:
        raise EndedError(code)

    monkeypatch.setattr(rank_processes, "_end_like", end)
    cell = Cell(kind="accuracy", variant="full")
    given = {
        rank: {
            "record": Record(cell=cell, status="error" if reason else "ok", reason=reason).to_dict(),
            "has_lost_another": reason == LOST,
        }
        for rank, reason in answers.items()
    }
    try:
        return rank_processes._outcome(given, died).reason, None
    except EndedError as ended:
        return "", ended.args[0]


@pytest.mark.parametrize(
    ("answers", "died", "expected"),
    [
        ({1: "", 0: ""}, {}, ("", None)),
        ({1: "bug"}, {1: 1, 0: TERM}, ("bug", None)),
        ({0: LOST, 1: "bug"}, {0: 1, 1: 1}, ("bug", None)),
        ({1: "bug", 0: "late"}, {0: 1, 1: 1}, ("bug", None)),
        ({}, {1: SEGV, 0: TERM}, ("", SEGV)),
        ({0: LOST}, {0: 1, 1: KILL, 2: TERM}, ("", KILL)),
        ({0: LOST}, {0: 1, 2: TERM, 1: 3}, ("", 3)),
        ({0: ""}, {1: KILL}, ("", KILL)),
        ({}, {0: TERM, 1: TERM}, ("", TERM)),
        ({0: LOST, 1: LOST}, {1: 1, 0: 1}, (LOST, None)),
    ],
    ids=["well", "one", "noticed", "first", "crash", "killed", "exit", "first-is-done", "terminated", "network"],
)
def test_the_cell_ends_as_the_rank_at_fault_did(monkeypatch, answers, died, expected):
    assert outcome(monkeypatch, answers, died) == expected


@pytest.mark.parametrize("code", [KILL, SEGV, 5])
def test_the_worker_ends_like_a_rank_without_a_word(code, tmp_path):
    process = start_process(rank_processes._end_like, code, errors=tmp_path / "errors")
    process.join(120)
    assert process.exitcode == code
    assert (tmp_path / "errors").read_text() == ""
