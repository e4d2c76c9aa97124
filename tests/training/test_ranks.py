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
from attn_zoo.training import Progress, run_training
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
DROPPING = cell("pair", **DROPOUT, **SHORT)


def train(rank: int, cells: dict[str, tuple[dict[str, Any], int]], folder: Path) -> None:
    """Train cells, each with the port of its store, as one rank of all; rank 1 is killed in the one of that name."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}  # it is of the test

    def kill(state: Progress) -> None:
        if (rank, name, state.step) == (1, "killed", 9):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    has_one_gpu = torch.cuda.device_count() == 1  # for both: NCCL refuses that, gloo does not
    if has_one_gpu:
        os.environ["LOCAL_RANK"] = "0"
    for name, (data, port) in cells.items():
        own = Cell.from_dict(data)
        os.environ |= {"WORLD_SIZE": str(own.data_parallel), "MASTER_PORT": str(port)}
        if has_one_gpu and own.device == "cuda":
            dist.init_process_group("gloo")
        with toy_task():
            result = run_training(
                own,
                checkpoint_dir=folder / "checkpoints",
                weights_path=folder / f"{name}.safetensors",
                progress=kill,
            )
        (folder / f"{name}-{rank}.json").write_text(json.dumps({**asdict(result), "cell_key": own.key}))


def together(folder: Path, cells: dict[str, Cell]) -> list[int | None]:
    """Train cells on two ranks; return how these ended."""
    make: Any = dist.TCPStore  # type: ignore[attr-defined]  # it is documented
    stores = [make("localhost", 0, is_master=True, wait_for_workers=False) for _ in cells]
    asked = {
        name: (replace(each, data_parallel=2).to_dict(), store.port)
        for (name, each), store in zip(cells.items(), stores, strict=True)
    }
    ranks = [start_process(train, rank, asked, folder, errors=folder / f"errors-{rank}") for rank in range(2)]
    for rank in ranks:
        rank.join(120)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cells, trained by two ranks in float64, where sums in another order agree to many digits.

    Then one with dropout as it is, and again as far as a rank is killed.
    """
    folder = tmp_path_factory.mktemp("ranks")
    cells = {name: replace(each, dtype="float64") for name, each in CELLS.items()}
    codes = together(folder, {**cells, "dropping": DROPPING, "killed": DROPPING})
    assert codes == [1, -signal.SIGKILL], "".join(path.read_text() for path in folder.glob("errors-*"))
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
        assert (two["score"][field] or 0) == pytest.approx(getattr(one.score, field) or 0, rel=1e-9), field
    assert (other["status"], other["score"]) == ("ok", None), "the first rank gives the score"
    assert not list((folder / "checkpoints").glob(f"{two['cell_key']}.*"))


def test_ranks_that_were_killed_go_on_with_the_same_numbers_exactly(folder):
    assert "LostRankError" in (folder / "errors-0").read_text(), "it does not wait for the other"
    assert len(list((folder / "checkpoints").iterdir())) == 1
    assert together(folder, {"resumed": DROPPING}) == [0, 0]
    (_, again), (_, whole) = (read_tensors(folder / f"{name}.safetensors") for name in ("resumed", "dropping"))
    assert whole.keys() == again.keys()
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    two, known = (json.loads((folder / f"{name}-0.json").read_text())["score"] for name in ("resumed", "dropping"))
    for field in ("curve", "train_flops", "value"):
        assert two[field] == known[field], field
    assert list((folder / "checkpoints").iterdir()) == []


def test_the_parts_of_a_batch_are_the_batch_and_weigh_what_they_hold():
    labels = torch.tensor([[1, IGNORED_LABEL], [IGNORED_LABEL, IGNORED_LABEL], [2, 3]])
    whole = Batch(torch.arange(6).view(3, 2), None, labels, 5, 6)
    parts = [whole.part(rank, 2) for rank in range(2)]
    assert torch.equal(parts[0].tokens, whole.tokens[[0, 2]])
    assert torch.equal(parts[1].labels, labels[1:2])
    assert [float(part.weight) for part in parts if part.weight is not None] == [1.0, 0.0]
    assert all((part.num_tokens, part.num_positions) == (5, 6) for part in parts)


def test_a_process_alone_does_not_pass_for_several(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with toy_task(), pytest.raises(ConfigError, match="one of 2 processes that torchrun started together"):
        run_training(replace(CELLS["unequal-parts"], data_parallel=2))


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
def test_ranks_on_gpus_train_what_one_process_trains(tmp_path, is_compiled):
    run = replace(cell("tokens", compile=is_compiled, **SHORT), device="cuda", dtype="float64")
    assert together(tmp_path, {"gpus": run}) == [0, 0], (tmp_path / "errors-0").read_text()
    with toy_task():
        one = run_training(run)
    two = json.loads((tmp_path / "gpus-0.json").read_text())["score"]
    assert one.score is not None
    for entry, known in zip(two["curve"], one.score.curve, strict=True):
        assert entry == pytest.approx(known, rel=1e-6)
