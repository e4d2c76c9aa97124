"""A runner that is killed, interrupted or doubled, for real: nothing corrupt, nothing lost but the running cell."""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from attn_zoo.errors import AttnZooError
from attn_zoo.matrix.drive.progress import PlainProgress
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.plan.expand import Plan
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Record
from tests.matrix.conftest import prepare_process, tiny_plan
from tests.processes import is_gone, start_process, wait_for

LENGTHS = (16, 24, 32, 48, 900, 1000)


def plan_of(name: str = "fake_slow", lengths: Sequence[int] = LENGTHS) -> Plan:
    return tiny_plan([name], seq_len=list(lengths), isolation="lane", timeout_s=120)


def run_it(folder: Path, name: str, lengths: Sequence[int]) -> int:
    """What the runners do."""
    prepare_process()
    try:
        return run(plan_of(name, lengths), Store(folder), progress=PlainProgress()).exit_code
    except AttnZooError as error:
        sys.exit(f"{error} (exit code {error.exit_code})")


class Runner:
    """One process that runs the plan, its workers, and what it said."""

    def __init__(self, folder: Path, errors: Path, name: str, lengths: Sequence[int]) -> None:
        self.errors = errors
        self.process = start_process(run_it, folder, name, lengths, errors=errors)
        self.pid = self.process.pid or 0

    def end(self, limit_s: float = 120.0) -> tuple[int | None, str]:
        """Wait for its end; return its exit code and what it said."""
        self.process.join(limit_s)
        return self.process.exitcode, self.errors.read_text()

    def workers(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


@pytest.fixture
def start_runner(tmp_path):
    """Start runners, and end those that a failing test leaves behind."""
    runners: list[Runner] = []

    def start(folder: Path, name: str = "fake_slow", lengths: Sequence[int] = LENGTHS) -> Runner:
        runners.append(Runner(folder, tmp_path / f"errors{len(runners)}", name, lengths))
        return runners[-1]

    yield start
    for runner in runners:
        runner.process.kill()
        runner.process.join()


def records_on_disk(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cells").glob("*.json")}


@pytest.mark.slow
def test_kill_9_at_many_moments_loses_at_most_the_running_cell(tmp_path, start_runner):
    folder, lengths = tmp_path / "run", range(16, 336, 16)
    known: dict[str, bytes] = {}
    for delay_s in (0.0, 0.02, 0.08, 0.25):
        runner = start_runner(folder, lengths=lengths)
        count = len(known)
        wait_for(lambda count=count: len(records_on_disk(folder)) > count)
        time.sleep(delay_s)
        workers = runner.workers()
        runner.process.kill()
        assert runner.end()[0] == -signal.SIGKILL
        wait_for(lambda workers=workers: all(is_gone(worker) for worker in workers))
        found = records_on_disk(folder)
        for name, content in found.items():
            record = Record.from_dict(json.loads(content))
            assert name == f"{record.cell.key}.json"
            assert record.status == "ok"
        assert {name: found[name] for name in known} == known, "a stored record was changed"
        known = found
    store = Store(folder)
    summary = run(plan_of(lengths=lengths), store)
    assert summary.counts == {"ok": len(lengths)}
    assert summary.new == len(lengths) - len(known), "only what had no record ran again"
    assert {name: content for name, content in records_on_disk(folder).items() if name in known} == known
    assert store.scan().problems == {}
    assert not (folder / "quarantine").exists()
    assert not list(folder.rglob("*.tmp"))


def test_ctrl_c_once_finishes_the_running_cell_and_says_how_to_go_on(tmp_path, start_runner):
    folder = tmp_path / "run"
    runner = start_runner(folder)
    wait_for(lambda: len(records_on_disk(folder)) >= 1)
    before = len(records_on_disk(folder))
    os.kill(runner.pid, signal.SIGINT)
    code, errors = runner.end()
    assert code == 130
    assert "The same command goes on from here" in errors
    assert "Traceback" not in errors
    found = records_on_disk(folder)
    assert before <= len(found) <= before + 2, "at most the running cell, and the one that ended meanwhile"
    assert all(Record.from_dict(json.loads(content)).status == "ok" for content in found.values())


def test_ctrl_c_twice_ends_at_once_without_half_a_record(tmp_path, start_runner):
    folder = tmp_path / "run"
    runner = start_runner(folder, "fake_hang")  # hangs from 900 tokens on
    wait_for(lambda: len(records_on_disk(folder)) == 4)
    time.sleep(1.0)
    workers = runner.workers()
    begin = time.monotonic()
    os.kill(runner.pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(runner.pid, signal.SIGINT)
    assert runner.end(60)[0] == 130
    assert time.monotonic() - begin < 20
    assert len(records_on_disk(folder)) == 4
    wait_for(lambda: all(is_gone(worker) for worker in workers))


def test_a_second_runner_is_refused_and_the_first_not_disturbed(tmp_path, start_runner):
    folder = tmp_path / "run"
    first = start_runner(folder)
    wait_for(lambda: len(records_on_disk(folder)) >= 1)
    second = start_runner(folder)
    code, errors = second.end()
    assert code == 1
    assert f"in use by another run: process {first.pid} since" in errors
    assert "(exit code 2)" in errors
    assert first.end()[0] == 0
    assert len(records_on_disk(folder)) == len(LENGTHS)


def workers_of(pid: int) -> list[psutil.Process]:
    """Return what carries the command line of a worker of this runner: forked processes do, wherever they went."""
    sign = f"attn_zoo.matrix.cell.worker {pid}"
    return [each for each in psutil.process_iter(["cmdline"]) if sign in " ".join(each.info["cmdline"] or [])]


def test_what_left_the_session_of_a_worker_does_not_outlive_a_killed_runner(tmp_path, start_runner):
    folder = tmp_path / "run"
    runner = start_runner(folder, "fake_hang", (16, 900))
    wait_for(lambda: len(workers_of(runner.pid)) >= 3)
    runner.process.kill()
    runner.end()
    wait_for(lambda: all(is_gone(each) for each in workers_of(runner.pid)))
    assert len(records_on_disk(folder)) == 1
