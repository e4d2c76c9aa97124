"""Whole runs on the toy task: learning, determinism, selection, outcomes, resuming."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from attn_zoo.errors import ConfigError, UnknownNameError
from attn_zoo.records import Score
from attn_zoo.registry import variants
from attn_zoo.training import Progress, TrainingResult, run_training, updates
from attn_zoo.training.loop import Trainer
from tests.training.toy_task import ToyTask, cell, toy_task


@pytest.fixture(autouse=True)
def toy():
    with toy_task() as task:
        yield task


class StoppedError(Exception):
    """What a kill looks like from inside."""


def stop_at(step: int):
    def progress(state):
        if state.step == step:
            raise StoppedError

    return progress


def same(one: TrainingResult, two: TrainingResult) -> bool:
    """Equal but for wall-clock time and memory."""
    assert one.score is not None
    assert two.score is not None
    machine: dict[str, Any] = {
        "train_s": 1.0,
        "compile_s": 0.0,
        "eval_s": 1.0,
        "eval_compile_s": 0.0,
        "tokens_per_s": 1.0,
        "peak_bytes": None,
        "pretrain_s": None,
    }
    timeless = [dataclasses.replace(score, **machine) for score in (one.score, two.score)]
    others = [dataclasses.replace(result, score=None) for result in (one, two)]
    return timeless[0] == timeless[1] and others[0] == others[1]


DROPOUT: dict[str, Any] = {"resid_dropout_p": 0.3, "dropout_p": 0.1}


@cache
def undisturbed(*, has_dropout: bool) -> TrainingResult:
    """The run without a stop that stopped ones are compared with."""
    return run_training(cell(**DROPOUT) if has_dropout else cell())


def test_it_learns_and_reports_everything():
    seen: list[Progress] = []
    result = run_training(cell(), progress=seen.append)
    assert (result.status, result.reason) == ("ok", "")
    score = result.score
    assert score is not None
    assert score.value > 0.8
    assert (score.metric, score.num_examples, score.chance, score.floors) == ("accuracy", 120, 1 / 3, {"constant": 0.4})
    assert [point["step"] for point in score.curve] == [10, 20, 30, 40]
    assert score.curve[-1]["train_loss"] < score.curve[0]["train_loss"]
    assert len(score.correct) == 120
    assert score.correct.count("1") / 120 == pytest.approx(score.value)
    assert result.num_params
    assert score.num_params == result.num_params
    assert score.train_s > 0
    assert score.train_flops is not None
    assert result.kernels
    assert [state.step for state in seen] == list(range(1, 41))
    assert seen[0].validation is None
    assert seen[-1].validation is not None
    assert Score.from_dict(json.loads(score.to_json())) == score


def test_same_seed_same_result_and_another_seed_another():
    first, again, other = (run_training(cell(seed=seed, num_steps=20, resid_dropout_p=0.2)) for seed in (0, 0, 1))
    assert same(first, again)
    assert first.score is not None
    assert other.score is not None
    assert first.score.curve != other.score.curve


def test_the_global_random_state_before_a_run_does_not_matter():
    torch.manual_seed(1)
    first = run_training(cell(num_steps=10, resid_dropout_p=0.2))
    torch.manual_seed(2)
    assert same(first, run_training(cell(num_steps=10, resid_dropout_p=0.2)))


@pytest.mark.parametrize("step", [3, 10, 17, 39])
def test_a_stopped_run_continues_with_identical_results(tmp_path, step):
    """Stopped before, at and after evaluations; dropout on, so that random states matter."""
    run = cell(**DROPOUT)
    whole = undisturbed(has_dropout=True)
    with pytest.raises(StoppedError):
        run_training(run, checkpoint_dir=tmp_path, progress=stop_at(step))
    (tmp_path / f".{run.key}.train.safetensors-x1y2.tmp").write_bytes(b"cut short by a kill")
    seen: list[Progress] = []
    assert same(whole, run_training(run, checkpoint_dir=tmp_path, progress=seen.append))
    # The evaluation at step 10 comes after the step's own progress, so a stop at 10 has saved nothing.
    assert seen[0].step == (step - 1) // 10 * 10 + 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("large_bytes", "last_saved"), [(2**20, 30), (0, 10)], ids=["small", "large"])
def test_a_large_checkpoint_is_not_written_at_every_evaluation(tmp_path, monkeypatch, large_bytes, last_saved):
    """On a GPU writing it would take longer than the updates between."""
    monkeypatch.setattr(updates, "LARGE_BYTES", large_bytes)
    monkeypatch.setattr(updates, "LARGE_EVERY_S", 1e9)
    with pytest.raises(StoppedError):
        run_training(cell(), checkpoint_dir=tmp_path, progress=stop_at(35))
    seen: list[Progress] = []
    assert same(undisturbed(has_dropout=False), run_training(cell(), checkpoint_dir=tmp_path, progress=seen.append))
    assert seen[0].step == last_saved + 1


def test_a_run_may_be_stopped_many_times(tmp_path):
    run = cell(**DROPOUT)
    for step in (15, 25, 35):
        with pytest.raises(StoppedError):
            run_training(run, checkpoint_dir=tmp_path, progress=stop_at(step))
    assert same(undisturbed(has_dropout=True), run_training(run, checkpoint_dir=tmp_path))


def test_checkpoints_of_other_runs_and_damaged_ones_are_set_aside(tmp_path):
    run = cell()
    whole = undisturbed(has_dropout=False)
    with pytest.raises(StoppedError):
        run_training(run, checkpoint_dir=tmp_path, progress=stop_at(25))
    (path,) = tmp_path.iterdir()
    with safe_open(path, framework="pt") as file:
        assert set(file.metadata()) == {"identity", "numbers"}
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert same(whole, run_training(run, checkpoint_dir=tmp_path))
    assert [left.suffix for left in tmp_path.iterdir()] == [".unusable"]


def test_a_checkpoint_is_not_continued_with_other_data(tmp_path, monkeypatch):
    run = cell()
    with pytest.raises(StoppedError):
        run_training(run, checkpoint_dir=tmp_path, progress=stop_at(25))
    monkeypatch.setattr(ToyTask, "version", 2)
    seen: list[Progress] = []
    run_training(run, checkpoint_dir=tmp_path, progress=seen.append)
    assert seen[0].step == 1


def test_test_is_read_once_and_only_at_the_end(toy, monkeypatch):
    evaluated: list[int] = []
    original = Trainer.evaluate

    def evaluate(self, feed, *, is_test=False):
        assert is_test == (len(feed.lengths) == toy.sizes["test"])
        if is_test:
            assert self.numbers.step == 40
        evaluated.append(len(feed.lengths))
        return original(self, feed, is_test=is_test)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    run_training(cell())
    assert Counter(evaluated) == {toy.sizes["validation"]: 4, toy.sizes["test"]: 1}
    assert evaluated[-1] == toy.sizes["test"]
    assert toy.calls == {"train": 1, "validation": 1, "test": 1}


@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_a_split_without_examples_is_named(toy, monkeypatch, name):
    monkeypatch.setattr(toy, "sizes", {**toy.sizes, name: 0})
    with pytest.raises(ConfigError, match=f"toy plain: {name}: expected examples; there are none"):
        run_training(cell(num_steps=1))


def test_a_task_that_breaks_its_word_is_not_scored(toy, monkeypatch):
    """Without a mask, what fills the rows would be read and pooled: a wrong score, and nothing would say so."""
    spec = toy.spec.fget
    monkeypatch.setattr(toy, "spec", property(lambda self: dataclasses.replace(spec(self), has_padding=False)))
    with pytest.raises(ConfigError, match="train: tokens: has_padding is False, but rows end before"):
        run_training(cell())


def test_a_diverged_run_never_reads_test(toy):
    result = run_training(cell(base_lr=1e30, clip_norm=0.0))
    assert result.status == "diverged"
    assert result.score is None
    assert toy.calls["test"] == 0


def test_the_selected_weights_are_those_of_the_best_validation(monkeypatch):
    """The rate explodes after step 20, so later weights are bad; the score must come from step 20 or before."""
    import attn_zoo.training.updates as loop

    monkeypatch.setattr(loop, "learning_rate", lambda kind, step, **_: 0.01 if step <= 20 else 0.5)
    result = run_training(cell())
    score = result.score
    assert score is not None
    by_step = {point["step"]: point["validation"] for point in score.curve}
    assert score.best_step in (10, 20)
    assert score.validation == max(by_step.values()) == by_step[score.best_step]
    assert by_step[40] < score.validation
    assert score.value > 0.6


def test_divergence_names_the_step(monkeypatch):
    import attn_zoo.training.objective as objective

    calls = []
    original = objective.ClassificationObjective.losses

    def losses(self, outputs, batch):
        calls.append(outputs.requires_grad)
        value = original(self, outputs, batch)
        return value * torch.nan if calls.count(True) == 13 else value

    monkeypatch.setattr(objective.ClassificationObjective, "losses", losses)
    result = run_training(cell())
    assert (result.status, result.reason) == ("diverged", "loss or gradient norm is not finite at step 13")
    assert result.num_params


def test_a_finite_loss_with_an_infinite_gradient_diverges(monkeypatch):
    import attn_zoo.training.objective as objective

    original = objective.ClassificationObjective.losses

    def losses(self, outputs, batch):
        outputs.register_hook(lambda gradient: gradient * torch.inf) if outputs.requires_grad else None
        return original(self, outputs, batch)

    monkeypatch.setattr(objective.ClassificationObjective, "losses", losses)
    assert run_training(cell()).reason == "loss or gradient norm is not finite at step 1"


@pytest.mark.parametrize(
    ("capability", "overrides", "reason"),
    [
        ({"key_padding_mask": False}, {}, "no key_padding_mask"),
        ({"attention_dropout": False}, {"dropout_p": 0.1}, "no attention dropout"),
        ({"positions": ("none",)}, {"position": "rotary"}, "position 'rotary' is not one of none"),
        ({"devices": ("cuda",)}, {}, "device cpu is not one of cuda"),
        ({"bidirectional": False}, {}, "no bidirectional form"),
    ],
)
def test_what_a_variant_refuses_is_unsupported_before_data_is_made(toy, monkeypatch, capability, overrides, reason):
    full = variants["full"]
    narrowed = dataclasses.replace(full, capabilities=dataclasses.replace(full.capabilities, **capability))
    monkeypatch.setitem(variants._entries, "full", narrowed)
    result = run_training(cell(**overrides))
    assert result.status == "unsupported"
    assert reason in result.reason
    assert result.score is None
    assert not toy.calls


def test_float16_is_unsupported():
    result = run_training(dataclasses.replace(cell(), dtype="float16"))
    assert (result.status, "float16 needs loss scaling" in result.reason) == ("unsupported", True)


@pytest.mark.parametrize(("level", "least"), [("plain", 0.7), ("seq2seq", 0.45)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_precisions_learn_too(dtype, level, least):
    result = run_training(dataclasses.replace(cell(level), dtype=dtype))
    assert result.score is not None
    assert result.score.value > least


@pytest.mark.parametrize("overrides", [{"pooling": "cls"}, {"norm": "batch_norm"}, {"position": "sinusoidal"}], ids=str)
def test_other_models_learn_too(overrides):
    result = run_training(cell(num_steps=60, eval_every=30, **overrides))
    assert result.score is not None
    assert result.score.value > 0.6


def test_wrong_cells_are_explained():
    with pytest.raises(ConfigError, match="did you mean 'num_steps'"):
        run_training(cell(num_stepps=3))
    with pytest.raises(UnknownNameError, match="unknown level of toy 'plan'; did you mean 'plain'"):
        run_training(cell("plan"))
    with pytest.raises(UnknownNameError, match="did you mean 'full'"):
        run_training(cell(variant="ful"))
    with pytest.raises(ConfigError, match="kind accuracy"):
        run_training(dataclasses.replace(cell(), kind="scaling"))


def test_the_task_sets_what_differs_in_a_named_protocol():
    run = dataclasses.replace(cell(), protocol="lra-small", overrides={"embed_dim": 16, "ffn_dim": 16})
    result = run_training(run)
    assert result.score is not None
    assert result.score.num_steps == 7


def test_a_model_may_have_batch_norm_statistics_in_its_checkpoint(tmp_path):
    run = cell(norm="batch_norm")
    with pytest.raises(StoppedError):
        run_training(run, checkpoint_dir=tmp_path, progress=stop_at(25))
    assert same(run_training(run), run_training(run, checkpoint_dir=tmp_path))


def test_decay_spares_embeddings_biases_and_norms():
    from attn_zoo.training.protocol import resolve_protocol
    from attn_zoo.training.updates import make_optimizer

    model = nn.ModuleDict({"e": nn.Embedding(3, 4), "l": nn.Linear(4, 5), "n": nn.LayerNorm(5)})
    decayed, spared = make_optimizer(model, resolve_protocol("lra-original")).param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(5, 4)]
    assert (decayed["weight_decay"], spared["weight_decay"], len(spared["params"])) == (0.1, 0.0, 4)
    assert (decayed["betas"], decayed["eps"]) == ((0.9, 0.98), 1e-9)
    model = nn.ModuleDict({"heads": nn.Linear(4, 5)})
    model["heads"].bias = nn.Parameter(torch.zeros(2, 5))  # of two heads
    decayed, spared = make_optimizer(model, resolve_protocol("lra-original")).param_groups
    assert [tuple(p.shape) for p in (*decayed["params"], *spared["params"])] == [(5, 4), (2, 5)]
