"""A run that is killed (SIGKILL, nothing can be tidied up) and started again ends with the same numbers, exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attn_zoo.training import Progress, run_training
from tests.training.test_run import same
from tests.training.toy_task import cell, toy_task

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal, sys
from pathlib import Path
from attn_zoo.training import run_training
from tests.training.toy_task import cell, toy_task
level, overrides, phase, step, folder = eval(sys.argv[1])
def kill(state):
    if (state.phase, state.step) == (phase, step):
        os.kill(os.getpid(), signal.SIGKILL)
with toy_task():
    run_training(cell(level, **overrides), checkpoint_dir=Path(folder), progress=kill)
"""
DROPOUT: dict[str, Any] = {"resid_dropout_p": 0.2, "dropout_p": 0.1}
PRETRAIN: dict[str, Any] = {"pretrain": "masked", "pretrain_steps": 30, "pretrain_mask_prob": 0.3}


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
    run = cell(level, **overrides)
    argument = repr((level, overrides, phase, step, str(tmp_path)))
    killed = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(tmp_path.iterdir()), "it had saved something"

    seen: list[Progress] = []
    again = run_training(run, checkpoint_dir=tmp_path, progress=seen.append)
    assert (seen[0].phase, seen[0].step) == first_again
    whole = run_training(run)
    assert same(whole, again)
    assert whole.score is not None
    assert again.score is not None
    assert whole.score.curve == again.score.curve
    assert list(tmp_path.iterdir()) == []
