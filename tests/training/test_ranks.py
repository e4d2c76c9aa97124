"""Processes that train together give what one process gives: real ones, that talk by gloo."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from attn_zoo.errors import ConfigError
from attn_zoo.records import Cell
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.training import Progress, TrainingResult, run_training
from attn_zoo.training.batches import Batch
from attn_zoo.training.checkpoint import read_tensors
from tests.processes import start_process
from tests.training.toy_task import cell, toy_task

DROPOUT: dict[str, Any] = {"resid_dropout_p": 0.3, "dropout_p": 0.1}
PRETRAIN: dict[str, Any] = {"pretrain": "masked", "pretrain_steps": 10, "pretrain_mask_prob": 0.3}
SHORT: dict[str, Any] = {"num_steps": 12, "eval_every": 6, "clip_norm": 0.5}

CELLS = {
    "unequal-parts": cell(batch_size=5, **SHORT),
    "items-of-unequal-number": cell("language", bucket_batches=3, **SHORT),
    "few-items": cell("tokens", batch_size=2, **SHORT),
    "pretrained-pair": cell("pair", batch_size=7, **PRETRAIN, **SHORT),
    "causally-pretrained": cell(**PRETRAIN | {"pretrain": "causal"}, **SHORT),
    "seq2seq": cell("seq2seq", eval_batch_size=120, **SHORT),
}
"""In float64, where sums in another order agree to many digits."""


def train(rank: int, cells: dict[str, tuple[dict[str, Any], int]], folder: Path, kill_at: int | None) -> None:
    """Train cells, each with the port of its store, as one rank of all; be killed at a step, if this is rank 1."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}  # it is of the test

    def kill(state: Progress) -> None:
        if rank == 1 and state.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    for name, (data, port) in cells.items():
        own = Cell.from_dict(data)
        os.environ |= {"WORLD_SIZE": str(own.data_parallel), "MASTER_PORT": str(port)}
        with toy_task():
            result = run_training(
                own,
                checkpoint_dir=folder / "checkpoints",
                weights_path=folder / f"{name}.safetensors",
                progress=kill,
            )
        (folder / f"{name}-{rank}.json").write_text(json.dumps(asdict(result)))


def together(folder: Path, cells: dict[str, Cell], kill_at: int | None = None) -> list[int | None]:
    """Train cells on two ranks; return how these ended."""
    folder.mkdir(exist_ok=True)
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in cells]
    asked = {
        name: (replace(each, data_parallel=2).to_dict(), store.port)
        for (name, each), store in zip(cells.items(), stores, strict=True)
    }
    ranks = [
        start_process(train, rank, asked, folder, kill_at, errors=folder / f"errors-{rank}")
        for rank in range(2)
    ]
    for rank in ranks:
        rank.join(120)
    return [rank.exitcode for rank in ranks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cells, trained by two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    codes = together(folder, {name: replace(each, dtype="float64") for name, each in CELLS.items()})
    assert codes == [0, 0], "".join(path.read_text() for path in folder.glob("errors-*"))
    return folder


@pytest.mark.parametrize("name", CELLS)
def test_two_ranks_train_what_one_process_trains(folder, tmp_path, name):
    with toy_task():
        one = run_training(replace(CELLS[name], dtype="float64"), weights_path=tmp_path / "weights")
    two, other = (json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2))
    assert one.score is not None
    _, known_weights = read_tensors(tmp_path / "weights")
    for key, value in read_tensors(folder / f"{name}.safetensors")[1].items():
        torch.testing.assert_close(value, known_weights[key], rtol=1e-7, atol=1e-9)
    for entry, known in zip(two["score"]["curve"], one.score.curve, strict=True):
        assert entry == pytest.approx(known, rel=1e-9)
    for field in ("best_step", "num_examples", "correct", "padding_frac", "floors", "breakdown"):
        assert two["score"][field] == json.loads(json.dumps(getattr(one.score, field))), field
    for field in ("value", "validation", "train_flops", "pretrain_flops"):
        assert two["score"][field] == pytest.approx(getattr(one.score, field), rel=1e-9), field
    assert (other["status"], other["score"]) == ("ok", None), "the first rank gives the score"
    assert list((folder / "checkpoints").iterdir()) == []
