"""What `benchmarks/host_time.py` prints."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("host_time", Path(__file__).parents[1] / "benchmarks" / "host_time.py")
assert _spec is not None
assert _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "ROUNDS", 3)
    monkeypatch.setattr(script, "CALLS", 2)


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    """Return the rows of the table by name."""
    monkeypatch.setattr(sys, "argv", ["host_time.py", "--device", "cpu", *arguments])
    script.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {line[0]: line[1:] for line in lines if line}


def test_calls_are_shown_beside_torchs_own(monkeypatch, capsys):
    """A call that fills the queue is waited for before the next, in the profile too."""
    monkeypatch.setattr(script, "QUEUE", 1)
    rows = run(monkeypatch, capsys, "full", "retention", "--profile", "--seq-len", "8")
    assert rows["torch"][1:5] == ["1.0", "0", "+", "1,"]  # one operator
    assert float(rows["torch"][0]) > 0
    assert float(rows["full"][1]) > 0
    assert rows["full"][2:6] == ["0", "+", "1,", "1"]
    assert "retention" not in rows["of"]
    assert "no bidirectional form" in " ".join(rows["retention:"])
    assert "ncalls" in rows
    assert rows["full,"] == ["with", "backward,", "3", "calls"]


@pytest.mark.triton
def test_launches_without_a_gpu_are_counted(monkeypatch, capsys):
    pytest.importorskip("triton", reason="the package triton is not installed")
    rows = run(monkeypatch, capsys, "--stand-in", "local_window")
    assert rows["local_window"][1:6] == ["-", "1", "+", "0,", "2"]
    assert rows["local_window"][7:] == ["-", "3", "+", "0,", "6"]


def test_a_name_that_is_not_known_is_told(monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, capsys, "fulll")
    assert caught.value.code == 2
    assert "no such variant: fulll; there are bigbird" in capsys.readouterr().err
