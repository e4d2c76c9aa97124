"""A visit to a GPU, on a CPU: stages in order within their time, what is left, and files to go on from."""

from __future__ import annotations

import importlib.util
import json
import sys
import tarfile
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "benchmarks" / "gpu_visit.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_visit", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_visit"] = module
    spec.loader.exec_module(module)
    return module


def test_every_stage_has_its_matrix_and_the_visit_fits_its_time(script):
    assert sum(stage.minutes for stage in script.STAGES) <= 25
    for stage in script.STAGES:
        assert not stage.matrix or (PATH.parent / f"{stage.matrix}.toml").is_file()
    (tests,) = [stage for stage in script.STAGES if not stage.matrix]
    assert script.command(tests, Path(), 1.0, "cuda")[1:3] == ["-m", "pytest"]


def test_shares_come_first_and_the_rest_goes_to_what_is_not_complete(script, tmp_path, monkeypatch):
    clock, log = [0.0], []
    answers = {"a": ["3 cells", ""], "b": [""], "c": ["8 cells"] * 9}

    def run_stage(stage, work, minutes, device):
        log.append((stage.name, round(minutes, 2)))
        clock[0] += 60 * minutes
        return answers[stage.name].pop(0)

    monkeypatch.setattr(script, "run_stage", run_stage)
    monkeypatch.setattr(script, "pack", lambda *_: None)
    stages = [script.Stage(name=name, minutes=2) for name in "abc"]
    state = script.visit(5, tmp_path, tmp_path, "cpu", stages, now=lambda: clock[0])
    assert log == [("a", 2), ("b", 2), ("c", 1)]
    assert state["a"]["left"] == "3 cells"
    log.clear()
    state = script.visit(9, tmp_path, tmp_path, "cpu", stages, now=lambda: clock[0])
    assert log == [("c", 1), ("a", 8)], "what had its share waits until the others had theirs"
    assert [state[name]["left"] for name in "abc"] == ["", "", "8 cells"]


TINY = """
name = "tiny"
[[scaling]]
variants = ["full"]
seq_len = [16, 32]
passes = ["fwd"]
num_heads = 2
head_dim = 8
budget_s = 0.02
"""


def test_a_machine_that_lost_everything_goes_on_from_the_files(script, tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "tiny.toml").write_text(TINY)
    monkeypatch.setenv("PYTHONPATH", str(script.ROOT))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    only = tuple(f"--only=full/scaling/fwd/L{length}/*" for length in (16, 32))
    stage = script.Stage(name="scaling", minutes=3, matrix="tiny", more=only[:1])
    state = script.visit(2, tmp_path / "one", tmp_path / "out", "cpu", [stage])
    assert state["scaling"]["left"] == ""
    with tarfile.open(tmp_path / "out" / "tiny.tar.gz") as archive:
        names = archive.getnames()
    assert "tiny/run.json" in names
    assert "visit.json" in names
    assert not any("/logs" in name for name in names)
    work = tmp_path / "two"
    work.mkdir()
    script.unpack(tmp_path / "out", work)
    assert json.loads((work / "visit.json").read_text()) == state
    before = sorted(path.name for path in (work / "tiny" / "cells").iterdir())
    more = script.Stage(name="more", minutes=3, matrix="tiny", more=only)
    assert script.visit(2, work, tmp_path / "out", "cpu", [more])["more"]["left"] == ""
    after = sorted(path.name for path in (work / "tiny" / "cells").iterdir())
    assert len(before) == 1
    assert set(before) < set(after)
    assert len(after) == 2
