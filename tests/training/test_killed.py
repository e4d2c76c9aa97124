"""A run that is killed (SIGKILL, nothing can be tidied up) and started again ends with the same numbers, exactly."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from attn_zoo.training import Progress, run_training
from tests.processes import start_process
from tests.training.test_run import same
from tests.training.toy_task import cell, toy_task

DROPOUT: dict[str, Any] = {"resid_dropout_p": 0.2, "dropout_p": 0.1}
PRETRAIN: dict[str, Any] = {"pretrain": "masked", "pretrain_steps": 30, "pretrain_mask_prob": 0.3}


def train_until(level: str, overrides: dict[str, Any], phase: str, step: int, folder: Path) -> None:
    """Train, and be killed after this step."""

    def kill(state: Progress) -> None:
        if (state.phase, state.step) == (phase, step):
            os.kill(os.getpid(), signal.SIGKILL)

    with toy_task():
        run_training(cell(level, **overrides), checkpoint_dir=folder, progress=kill)


@pytest.fixture(autouse=True)
def toy():
    with toy_task() as task:
        yield task


@pytest.mark.parametrize(
    ("level", "overrides", "phase", "step", "first_again"),
    [
        ("language", DROPOUT | {"bucket_batches": 3}, "train", 26, ("train", 21)),
        ("tokens", DROPOUT | PRETRAIN, "pretrain", 15, ("pretrain", 11)),
        ("plain", PRETRAIN | {"pretrain": "causal", "pooling": "cls"}, "train", 4, ("train", 1)),
        ("pair", DROPOUT | PRETRAIN | {"bucket_batches": 4}, "train", 35, ("train", 31)),
        ("seq2seq", DROPOUT, "train", 33, ("train", 31)),
    ],
    ids=["language", "in-pretraining", "after-pretraining", "pretrained-pair", "seq2seq"],
)
def test_a_killed_run_ends_with_the_same_numbers(tmp_path, level, overrides, phase, step, first_again):
    run, folder = cell(level, **overrides), tmp_path / "checkpoints"
    killed = start_process(train_until, level, overrides, phase, step, folder, errors=tmp_path / "errors")
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL, (tmp_path / "errors").read_text()
    assert list(folder.iterdir()), "it had saved something"

    seen: list[Progress] = []
    again = run_training(run, checkpoint_dir=folder, progress=seen.append)
    assert (seen[0].phase, seen[0].step) == first_again
    whole = run_training(run)
    assert same(whole, again)
    assert whole.score is not None
    assert again.score is not None
    assert whole.score.curve == again.score.curve
    assert list(folder.iterdir()) == []
