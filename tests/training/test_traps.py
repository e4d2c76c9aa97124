"""Mistakes found in published benchmarks of long-range tasks, each as a test that would catch it here.

The mistakes: settings that are written down and never used; a token that doubles as padding; masks that are accepted
and dropped; selection on test; means over padding; partial batches left out; another data order for each model.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from attn_zoo.errors import ConfigError
from attn_zoo.records import Score
from attn_zoo.registry import variants
from attn_zoo.tasks import Split
from attn_zoo.training import run_training
from attn_zoo.training.batches import Batcher, DataOrder
from attn_zoo.training.objective import objective_for
from attn_zoo.training.protocol import Protocol, resolve_protocol
from tests.training.toy_task import TINY, cell, toy_task

VARIANTS = ("full", "linformer", "bigbird")


@pytest.fixture(autouse=True)
def toy():
    with toy_task() as task:
        yield task


def scored(level: str = "plain", *, variant: str = "full", **overrides: Any) -> Score:
    result = run_training(cell(level, variant=variant, **{"num_steps": 8, "eval_every": 4, **overrides}))
    assert result.score is not None, result.reason
    return result.score


BASE: dict[str, Any] = {
    "dropout_p": 0.1,
    "resid_dropout_p": 0.1,
    "clip_norm": 0.1,
    "weight_decay": 0.1,
    "bucket_batches": 4,
    "pretrain": "masked",
    "pretrain_steps": 4,
}
CHANGED: dict[str, Any] = {
    "num_layers": 2,
    "embed_dim": 24,
    "num_heads": 4,
    "head_dim": 4,
    "ffn_dim": 24,
    "position": "sinusoidal",
    "norm": "rms_norm",
    "norm_order": "post",
    "activation": "relu",
    "pooling": "cls",
    "dropout_p": 0.3,
    "resid_dropout_p": 0.3,
    "betas": (0.5, 0.9),
    "eps": 1e-2,
    "weight_decay": 0.5,
    "base_lr": 0.02,
    "schedule": "linear",
    "warmup_steps": 2,
    "num_steps": 12,
    "batch_size": 8,
    "clip_norm": 0.0,
    "eval_every": 2,
    "pad_multiple": 4,
    "is_full_length": True,
    "bucket_batches": 0,
    "pretrain": "causal",
    "pretrain_steps": 6,
    "pretrain_mask_prob": 0.5,
}
ELSEWHERE = {
    "name": "names the protocol",
    "deviations": "words about it",
    "cross_variant": "tested in test_kinds.py",
    "eval_batch_size": "must change nothing: tested below",
    "compile": "must change nothing: tested in test_compile.py",
}


def essence(score: Score) -> tuple[Any, ...]:
    return score.curve, score.value, score.num_params, score.padding_frac, score.train_flops, score.pretrain_flops


def test_every_field_of_a_protocol_is_spoken_for():
    assert {item.name for item in dataclasses.fields(Protocol)} == CHANGED.keys() | ELSEWHERE.keys()


@pytest.fixture(scope="module")
def unchanged() -> Score:
    with toy_task():
        return scored(**BASE)


def test_the_same_settings_give_the_same_run(unchanged):
    """Without this the next test would say nothing."""
    assert essence(scored(**BASE)) == essence(unchanged)


@pytest.mark.parametrize("field", CHANGED)
def test_every_setting_is_really_used(field, unchanged):
    """A field that nobody reads would leave the run as it is."""
    changed = scored(**BASE | {field: CHANGED[field]})
    assert essence(changed) != essence(unchanged)
    assert changed.settings[field] == json.loads(json.dumps(CHANGED[field]))


def test_the_size_of_evaluation_batches_changes_no_answer():
    assert scored(eval_batch_size=7).correct == scored(eval_batch_size=120).correct


def test_settings_are_those_in_force(toy):
    run = dataclasses.replace(cell(), protocol="lra-small", overrides={"embed_dim": 16, "ffn_dim": 16})
    score = run_training(run).score
    assert score is not None
    resolved = resolve_protocol("lra-small", task_settings=toy.settings["lra-small"], overrides=run.overrides)
    assert resolved.compile is None, "the device decides"
    assert score.settings == json.loads(json.dumps(dataclasses.asdict(resolved))) | {"compile": False}
    assert (score.settings["num_steps"], score.settings["embed_dim"], score.settings["eps"]) == (7, 16, 1e-6)
    assert Protocol(**{**score.settings, "betas": tuple(score.settings["betas"]), "deviations": ()}).num_steps == 7


def test_an_option_or_override_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'warmup_steps'"):
        run_training(cell(warmup_step=1))
    with pytest.raises(ConfigError, match="did you mean 'proj_len'"):
        run_training(dataclasses.replace(cell(variant="linformer"), options={"proj_lenn": 32}))


def batcher_of(task, capabilities=variants["full"].capabilities, **overrides) -> tuple[Batcher, Protocol]:
    protocol = resolve_protocol("cpu-small", overrides={**TINY, **overrides})
    return Batcher(task.spec, protocol, capabilities, "cpu"), protocol


def model_of(task, batcher, protocol, variant="full"):
    objective = objective_for(task.spec)
    config = protocol.model_config(variant=variant, options={}, vocab_size=6, max_seq_len=batcher.max_seq_len, seed=0)
    return objective, objective.build_model(config).eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_token_0_is_a_token_where_nothing_is_padding(toy, monkeypatch, variant):
    """Black pixels are seen: other values there change the answer, and no mask is made from token ids."""
    task = toy("plain")
    monkeypatch.setattr(toy, "spec", dataclasses.replace(task.spec, has_padding=False, max_seq_len=16))
    tokens = torch.randint(0, 4, (8, 16), dtype=torch.uint8)
    tokens[:, 8:] = 0
    black = Split(tokens=tokens, lengths=torch.full((8,), 16), labels=torch.zeros(8))
    grey = dataclasses.replace(black, tokens=torch.where(tokens == 0, 5, tokens))
    batcher, protocol = batcher_of(task)
    objective, model = model_of(task, batcher, protocol, variant)
    outputs = []
    for split in (black, grey):
        batch = batcher.batch(batcher.feed(split), torch.arange(8))
        assert batch.key_padding_mask is None
        outputs.append(objective.outputs(model, batch))
    assert not torch.isclose(*outputs).any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("level", ["plain", "tokens", "pair"])
def test_what_stands_in_padding_changes_nothing(toy, monkeypatch, level, variant):
    """Not the weights that are learned, so not the gradients either."""
    clean = scored(level, variant=variant)
    split = toy.split

    def with_garbage(self, name):
        found = split(self, name)
        return dataclasses.replace(
            found,
            tokens=torch.where(found.tokens == 0, 4, found.tokens),
            other_tokens=None
            if found.other_tokens is None
            else torch.where(found.other_tokens == 0, 4, 1).byte()
            * torch.where(found.other_tokens == 0, 1, found.other_tokens).byte(),
        )

    monkeypatch.setattr(toy, "split", with_garbage)
    monkeypatch.setattr("attn_zoo.training.run.checked_split", with_garbage)  # which would not let it pass
    assert (toy(level).split("train").tokens == 0).sum() == 0
    dirty = scored(level, variant=variant)
    for one, two in zip(clean.curve, dirty.curve, strict=True):
        assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_pooling_divides_by_the_true_length(toy, pooling):
    """The answer for an example is the same in a batch of its own width and in one three times as wide."""
    task = toy("plain")
    outputs = []
    for multiple in (16, 48):
        batcher, protocol = batcher_of(task, pad_multiple=multiple, pooling=pooling, position="sinusoidal")
        objective, model = model_of(task, batcher, protocol)
        batch = batcher.batch(batcher.feed(task.split("train")), torch.arange(50))
        assert batch.tokens.shape[1] in (32, 31, 48, 47)
        outputs.append(objective.outputs(model, batch))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_selection_never_sees_test(toy, monkeypatch):
    """Another test set gives another score, and the same curve, selection and weights."""
    one, split = scored(num_steps=20), toy.split

    def other_test(self, name):
        found = split(self, name)
        return dataclasses.replace(found, labels=2 - found.labels) if name == "test" else found

    monkeypatch.setattr(toy, "split", other_test)
    two = scored(num_steps=20)
    assert (one.curve, one.best_step, one.validation) == (two.curve, two.best_step, two.validation)
    assert one.value != two.value


def test_every_example_of_test_counts(toy):
    """120 examples in batches of 50 leave a last batch of 20."""
    score = scored(eval_batch_size=50)
    assert (score.num_examples, len(score.correct)) == (120, 120)


@pytest.mark.parametrize("bucket_batches", [0, 5])
def test_all_variants_see_the_same_examples_in_the_same_order(monkeypatch, bucket_batches):
    seen: list[list[int]] = []
    original = DataOrder.rows

    def rows(self, step):
        found = original(self, step)
        seen[-1] += found.tolist()
        return found

    monkeypatch.setattr(DataOrder, "rows", rows)
    for variant in VARIANTS:
        seen.append([])
        scored(variant=variant, bucket_batches=bucket_batches)
    assert len(seen[0]) == 8 * 16
    assert seen[0] == seen[1] == seen[2]


def test_variants_start_from_the_same_weights_and_their_parameters_are_counted(toy):
    task = toy("plain")
    models = {}
    for variant in VARIANTS:
        batcher, protocol = batcher_of(task, variants[variant].capabilities)
        models[variant] = model_of(task, batcher, protocol, variant)[1]
    shared = set.intersection(*(set(model.state_dict()) for model in models.values()))
    assert len(shared) > 15
    weights = [model.state_dict() for model in models.values()]
    assert all(torch.equal(weights[0][name], other[name]) for name in shared for other in weights[1:])
    for variant, model in models.items():
        assert scored(variant=variant).num_params == sum(part.numel() for part in model.parameters())
    extra = sum(part.numel() for part in models["linformer"].parameters()) - sum(
        part.numel() for part in models["full"].parameters()
    )
    assert extra == 2 * 32 * 32, "E and F of one layer, k cut to the 32 positions there are"


def test_padding_and_memory_are_reported_as_they_were(toy):
    """No bucketing, full width: 32 positions for every example; lengths are known."""
    score = scored(is_full_length=True, batch_size=50, num_steps=4, eval_every=4)  # one pass over 200 examples
    lengths = toy("plain").split("train").lengths
    assert score.padding_frac == pytest.approx(1 - int(lengths.sum()) / (200 * 32))
    assert score.tokens_per_s == pytest.approx(int(lengths.sum()) / score.train_s)
    assert score.peak_bytes is not None
    assert score.peak_bytes > 50_000_000, "the interpreter and torch alone need more"
