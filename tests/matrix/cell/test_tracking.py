"""Curves go where they are asked to go, once each, and no tracker can end a training."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import attn_zoo
from attn_zoo.errors import UnknownNameError, UnsupportedError
from attn_zoo.matrix.cell.tracking import TRACKERS, VARIABLE, check_tracker, tracked
from tests.matrix.conftest import TINY_TRAINING, run_cell, training_plan


class Tracker(ModuleType):
    """Stands in for wandb and trackio, which have the same calls."""

    def __init__(self, name: str, broken: str = "") -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []
        self.broken = broken

    def _note(self, name: str, what: Any) -> None:
        self.calls.append((name, what))
        if name == self.broken:
            raise ConnectionError("no network")

    def init(self, **about: Any) -> SimpleNamespace:
        self._note("init", about)
        return SimpleNamespace(
            log=lambda values, step: self._note("log", (step, values)), finish=lambda: self._note("finish", None)
        )


def cell_of(**overrides):
    (item,) = training_plan(["fake_train_ok"], overrides={**TINY_TRAINING, **overrides}).cells
    return item.cell


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_each_evaluation_is_sent_once(monkeypatch, name):
    tracker = Tracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    monkeypatch.setenv(VARIABLE, f"{name}:my project")
    cell = cell_of()
    record = run_cell(cell)
    assert record.status == "ok"
    assert record.score is not None
    kinds = [kind for kind, _ in tracker.calls]
    assert kinds == ["init", *["log"] * len(record.score.curve), "finish"]
    about = tracker.calls[0][1]
    assert (about["project"], about["config"]["variant"]) == ("my project", "fake_train_ok")
    assert about["name"].startswith(f"{cell.id}-")
    sent = [what for kind, what in tracker.calls if kind == "log"]
    assert sent == [
        (int(entry["step"]), {f"train/{key}": value for key, value in entry.items() if key != "step"})
        for entry in record.score.curve
    ]


def test_two_trainings_of_one_id_have_a_curve_each(monkeypatch):
    """`overrides` are not in it; trackio goes on with the run of a name, TensorBoard draws a folder as one."""
    cells = [cell_of(), cell_of(weight_decay=0.5)]
    assert cells[0].id == cells[1].id
    monkeypatch.setitem(sys.modules, "trackio", tracker := Tracker("trackio"))
    monkeypatch.setenv(VARIABLE, "trackio")
    for cell in cells:
        with tracked(cell):
            pass
    assert len({about["name"] for kind, about in tracker.calls if kind == "init"}) == 2


def test_pretraining_has_a_curve_of_its_own(monkeypatch):
    tracker = Tracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    monkeypatch.setenv(VARIABLE, "wandb")
    assert run_cell(cell_of(pretrain="masked", pretrain_steps=2)).status == "ok"
    sent = [what[1] for kind, what in tracker.calls if kind == "log"]
    assert list(sent[0]) == ["pretrain/train_loss"]
    assert "train/validation" in sent[-1]


def test_tensorboard_writes_scalars_into_a_folder_for_each_cell(monkeypatch, tmp_path):
    written: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            written.append(folder)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None:
            pass

        def close(self) -> None:
            written.append("closed")

    stand_in = ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    monkeypatch.setenv(VARIABLE, f"tensorboard:{tmp_path}")
    cell = cell_of()
    assert run_cell(cell).status == "ok"
    assert written[0].startswith(f"{tmp_path / cell.id}-")
    assert {name for name, *_ in written[1:-1]} == {"train/train_loss", "train/validation_loss", "train/validation"}
    assert written[-1] == "closed"


def test_of_processes_that_train_together_the_first_sends_the_curve(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Tracker("wandb"))
    monkeypatch.setenv(VARIABLE, "wandb")
    sends = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        for size in (1, 2):
            with tracked(replace(cell_of(), data_parallel=size)) as send:
                sends[rank, size] = send is not None
    assert sends == {("0", 1): True, ("0", 2): True, ("1", 1): True, ("1", 2): False}


def test_a_folder_is_the_same_for_processes_that_run_elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in TRACKERS:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert check_tracker("tensorboard") == f"tensorboard:{tmp_path}/runs/tensorboard"
    assert check_tracker("tensorboard:mine") == f"tensorboard:{tmp_path}/mine"
    assert check_tracker("wandb:mine") == "wandb:mine"


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_tracker_that_fails_ends_no_training_and_is_asked_no_more(monkeypatch, capsys, broken):
    tracker = Tracker("wandb", broken)
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    monkeypatch.setenv(VARIABLE, "wandb")
    record = run_cell(cell_of())
    assert record.status == "ok"
    assert [kind for kind, _ in tracker.calls].count(broken) == 1
    assert "wandb: ConnectionError: no network; the training goes on without it" in capsys.readouterr().err


def test_nothing_is_loaded_where_nothing_is_asked_for(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    before = set(sys.modules)
    assert run_cell(cell_of()).status == "ok"
    assert not {"wandb", "trackio", "tensorboard"} & (set(sys.modules) - before)


def test_a_tracker_that_is_not_there_is_an_error_before_anything_runs(monkeypatch, tmp_path, call):
    monkeypatch.chdir(tmp_path)
    for name in TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    with pytest.raises(UnsupportedError, match="wandb cannot be loaded"):
        attn_zoo.run("quick", track="wandb:mine", progress=False)
    with pytest.raises(UnknownNameError, match="did you mean 'tensorboard'"):
        attn_zoo.run("quick", track="tensorbord", progress=False)
    answer = call("run", "quick", "--track", "trackio")
    assert (answer.code, "pip install trackio" in answer.err) == (2, True)
    assert list(tmp_path.iterdir()) == []
    assert VARIABLE not in os.environ


def test_a_tracker_whose_package_is_broken_is_refused_before_anything_runs(monkeypatch, tmp_path):
    (tmp_path / "wandb.py").write_text("raise TypeError('Descriptors cannot be created directly.\\nIf this call ...')")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match=r"wandb cannot be loaded \(Descriptors cannot be created \w+\.\); "):
        check_tracker("wandb:mine")
