"""A results folder with the weights of tiny models of every kind of task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_zoo.records import Cell
from attn_zoo.training.run import run_training
from tests.training.toy_task import cell, toy_task

SMALL: dict[str, Any] = {"num_steps": 2, "eval_every": 2, "num_layers": 2}


def keep(folder: Path, kept: Cell) -> Path:
    """Train two updates and keep the weights as a run does."""
    path = folder / "weights" / f"{kept.key}.safetensors"
    result = run_training(kept, weights_path=path)
    assert result.status == "ok", result.reason
    return path


@pytest.fixture(scope="session")
def kept_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that keeps: full on each kind of task, and others on classification."""
    folder = tmp_path_factory.mktemp("zoo")
    with toy_task():
        for level in ("plain", "tokens", "language", "pair", "seq2seq"):
            keep(folder, cell(level, **SMALL))
        for variant in ("linformer", "global_pooling"):
            keep(folder, cell(variant=variant, **SMALL))
        keep(folder, cell("other", **SMALL, pooling="cls", position="none"))
    return folder


@pytest.fixture(scope="module")
def zoo(kept_weights: Path) -> Iterator[Path]:
    """Return that folder while its task is registered, which it must not be for the whole session."""
    with toy_task():
        yield kept_weights
