"""Trained weights come back as the model that was scored."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from attn_zoo.errors import StoreError
from attn_zoo.training import run_training
from attn_zoo.training.evaluation import evaluate
from attn_zoo.training.weights import load_trained
from tests.training.toy_task import cell, toy_task


@pytest.fixture(autouse=True)
def toy():
    with toy_task() as task:
        yield task


@pytest.mark.parametrize(
    ("level", "variant", "options", "is_causal"),
    [
        ("plain", "linformer", {"proj_len": (4,)}, False),
        ("plain", "linformer", {"sharing": "layerwise"}, False),
        ("tokens", "bigbird", {}, True),
        ("language", "full", {}, True),
        ("pair", "full", {}, False),
        ("seq2seq", "full", {}, False),
    ],
)
def test_the_loaded_model_scores_what_the_record_says(tmp_path, level, variant, options, is_causal):
    path = tmp_path / "kept" / "weights.safetensors"
    run = cell(level, variant=variant, num_steps=20, dropout_p=0.1)
    run = dataclasses.replace(run, options=options, is_causal=is_causal)
    result = run_training(run, weights_path=path)
    assert result.score is not None
    assert [file.name for file in path.parent.iterdir()] == ["weights.safetensors"]

    trained = load_trained(path)
    assert trained.cell.key == run.key
    assert not trained.model.training
    found = evaluate(
        trained.model,
        trained.objective,
        trained.batcher,
        trained.batcher.feed(trained.task.split("test")),
        batch_size=50,
        seed=run.seed,
        is_test=True,
    )
    assert found.value == result.score.value
    batch = trained.batcher.batch(trained.batcher.feed(trained.task.split("test")), torch.arange(3))
    assert torch.isfinite(trained.objective.outputs(trained.model, batch)).all()


def test_float64_weights_lose_no_digit(tmp_path):
    path = tmp_path / "weights.safetensors"
    run_training(dataclasses.replace(cell(num_steps=10), dtype="float64"), weights_path=path)
    loaded, kept = load_trained(path).model.state_dict(), load_file(path)
    assert loaded.keys() == kept.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in kept.items())


def test_a_run_without_a_score_leaves_no_weights(tmp_path):
    path = tmp_path / "weights.safetensors"
    assert run_training(cell(base_lr=1e30, clip_norm=0.0), weights_path=path).status == "diverged"
    assert not path.exists()


def test_what_is_not_ours_is_explained(tmp_path):
    path = tmp_path / "weights.safetensors"
    with pytest.raises(StoreError, match="no such file"):
        load_trained(path)
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(StoreError, match="not weights of attn_zoo"):
        load_trained(path)
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(StoreError, match="cannot be read"):
        load_trained(path)


def test_a_model_that_changed_since_is_explained(tmp_path, monkeypatch, toy):
    path = tmp_path / "weights.safetensors"
    run_training(cell(num_steps=10), weights_path=path)
    described = toy("plain").spec
    monkeypatch.setattr(toy, "spec", dataclasses.replace(described, num_classes=4))
    with pytest.raises(StoreError, match="does not fit the model"):
        load_trained(path)
