"""A runner that is killed, interrupted or doubled, for real: nothing corrupt, nothing lost but the running cell."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from attn_zoo.matrix.runner import run
from attn_zoo.matrix.store import Store
from attn_zoo.records import Record
from tests.matrix.conftest import tiny_plan

ROOT = Path(__file__).parents[2]
LENGTHS = (16, 24, 32, 48, 900, 1000)
RUN = """
    import sys
    from attn_zoo.discovery import load_file
    from attn_zoo.errors import AttnZooError
    from attn_zoo.matrix.progress import PlainProgress
    from attn_zoo.matrix.runner import run
    from attn_zoo.matrix.store import Store
    from attn_zoo.registry import variants
    from tests.matrix.conftest import VARIANT_FILE, tiny_plan
    variants["full"]
    load_file(VARIANT_FILE, None)
    plan = tiny_plan([sys.argv[2]], seq_len=[{lengths}], isolation="lane", timeout_s=120)
    try:
        summary = run(plan, Store(sys.argv[1]), progress=PlainProgress())
    except AttnZooError as error:
        sys.exit(f"{{error}} (exit code {{error.exit_code}})")
    sys.exit(summary.exit_code)
"""


@pytest.fixture
def start_runner():
    """Start runners, and end those that a failing test leaves behind."""
    runners: list[subprocess.Popen[bytes]] = []

    def start(folder: Path, name: str = "fake_slow") -> subprocess.Popen[bytes]:
        code = textwrap.dedent(RUN.format(lengths=", ".join(map(str, LENGTHS))))
        runner = subprocess.Popen(
            [sys.executable, "-c", code, str(folder), name], cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True
        )
        runners.append(runner)
        return runner

    yield start
    for runner in runners:
        runner.kill()
        runner.communicate()


def plan_of(name: str = "fake_slow"):
    return tiny_plan([name], seq_len=list(LENGTHS), isolation="lane", timeout_s=120)


def records_on_disk(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cells").glob("*.json")}


def wait_for(condition, limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_and_resume(start_runner, folder: Path, delays_s: list[float]) -> None:
    known: dict[str, bytes] = {}
    for delay_s in delays_s:
        runner = start_runner(folder)
        count = len(known)
        wait_for(lambda runner=runner, count=count: runner.poll() is not None or len(records_on_disk(folder)) > count)
        time.sleep(delay_s)
        workers = psutil.Process(runner.pid).children(recursive=True) if runner.poll() is None else []
        runner.kill()
        runner.wait()
        wait_for(lambda workers=workers: all(is_gone(worker) for worker in workers), 10)
        found = records_on_disk(folder)
        for name, content in found.items():
            record = Record.from_dict(json.loads(content))
            assert name == f"{record.cell.key}.json"
            assert record.status == "ok"
        assert {name: found[name] for name in known} == known, "a stored record was changed"
        known = found
    store = Store(folder)
    summary = run(plan_of(), store)
    assert summary.counts == {"ok": len(LENGTHS)}
    assert summary.new == len(LENGTHS) - len(known), "only what had no record ran again"
    assert {name: content for name, content in records_on_disk(folder).items() if name in known} == known
    assert store.scan().problems == {}
    assert not (folder / "quarantine").exists()
    assert not list(folder.rglob("*.tmp"))


def test_kill_9_loses_at_most_the_running_cell(tmp_path, start_runner):
    kill_and_resume(start_runner, tmp_path / "run", [0.0, 0.3])


@pytest.mark.slow
def test_kill_9_at_many_moments_loses_at_most_the_running_cell(tmp_path, start_runner):
    for index in range(8):
        kill_and_resume(start_runner, tmp_path / f"run{index}", [0.01 * index, 0.05 + 0.1 * index])


def test_ctrl_c_once_finishes_the_running_cell_and_says_how_to_go_on(tmp_path, start_runner):
    folder = tmp_path / "run"
    runner = start_runner(folder)
    wait_for(lambda: len(records_on_disk(folder)) >= 1)
    before = len(records_on_disk(folder))
    os.kill(runner.pid, signal.SIGINT)
    _, errors = runner.communicate(timeout=120)
    assert runner.returncode == 130
    assert "The same command goes on from here" in errors.decode()
    assert "Traceback" not in errors.decode()
    found = records_on_disk(folder)
    assert before <= len(found) <= before + 2, "at most the running cell, and the one that ended meanwhile"
    assert all(Record.from_dict(json.loads(content)).status == "ok" for content in found.values())


def test_ctrl_c_twice_ends_at_once_without_half_a_record(tmp_path, start_runner):
    folder = tmp_path / "run"
    runner = start_runner(folder, "fake_hang")  # hangs from 900 tokens on
    wait_for(lambda: len(records_on_disk(folder)) == 4)
    time.sleep(1.0)
    workers = psutil.Process(runner.pid).children(recursive=True)
    begin = time.monotonic()
    os.kill(runner.pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(runner.pid, signal.SIGINT)
    runner.communicate(timeout=60)
    assert runner.returncode == 130
    assert time.monotonic() - begin < 20
    assert len(records_on_disk(folder)) == 4
    wait_for(lambda: all(is_gone(worker) for worker in workers), 10)


def test_a_second_runner_is_refused_and_the_first_not_disturbed(tmp_path, start_runner):
    folder = tmp_path / "run"
    first = start_runner(folder)
    wait_for(lambda: len(records_on_disk(folder)) >= 1)
    second = start_runner(folder)
    _, errors = second.communicate(timeout=120)
    assert second.returncode == 1
    assert f"in use by another run: process {first.pid} since" in errors.decode()
    assert "(exit code 2)" in errors.decode()
    first.communicate(timeout=120)
    assert first.returncode == 0
    assert len(records_on_disk(folder)) == len(LENGTHS)
