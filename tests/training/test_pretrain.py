"""Self-pretraining: what is hidden, whose weights they become, and that no example beyond train is looked at."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from attn_zoo.errors import ConfigError
from attn_zoo.registry import variants
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.training import Progress, run_training
from attn_zoo.training.batches import Batcher
from attn_zoo.training.loop import Trainer
from attn_zoo.training.protocol import resolve_protocol
from attn_zoo.training.run import DenoisingObjective, Pretrainer, make_pretrainer
from attn_zoo.training.seeding import derive_seed
from tests.training.toy_task import TINY, cell, toy_task

MASKED: dict[str, Any] = {"pretrain": "masked", "pretrain_steps": 20, "pretrain_mask_prob": 0.3}


@pytest.fixture(autouse=True)
def toy():
    with toy_task() as task:
        yield task


def batcher_of(task, **overrides):
    protocol = resolve_protocol("cpu-small", overrides={**TINY, **MASKED, **overrides})
    return Batcher(task.spec, protocol, variants["full"].capabilities, "cpu"), protocol


def objective_of(task, *, is_causal=False, mask_prob=0.3):
    return DenoisingObjective(task.spec, is_causal=is_causal, mask_prob=mask_prob, has_cls=False, seed=5)


@pytest.mark.parametrize("level", ["plain", "pair"])
def test_a_share_of_the_tokens_is_hidden_and_never_padding(toy, level):
    task = toy(level)
    batcher, _ = batcher_of(task)
    batch = batcher.batch(batcher.feed(task.split("train")), torch.arange(200))
    objective = objective_of(task)
    seen = objective.prepare(batch, step=1)
    before = torch.cat([part for part in (batch.tokens, batch.other_tokens) if part is not None], dim=1)
    after = torch.cat([part for part in (seen.tokens, seen.other_tokens) if part is not None], dim=1)
    is_hidden = after == task.spec.vocab_size
    assert int(is_hidden.sum()) / batch.num_tokens == pytest.approx(0.3, abs=0.03)
    assert not (is_hidden & (before == 0)).any(), "padding is never hidden"
    assert torch.equal(after[~is_hidden], before[~is_hidden])
    assert torch.equal(seen.labels[is_hidden], before[is_hidden])
    assert bool((seen.labels[~is_hidden] == IGNORED_LABEL).all())
    assert torch.equal(objective.prepare(batch, step=1).tokens, seen.tokens)
    assert not torch.equal(objective.prepare(batch, step=2).tokens, seen.tokens)


@pytest.mark.parametrize("level", ["plain", "pair"])
def test_how_wide_a_batch_is_padded_does_not_change_what_is_hidden(toy, level):
    """A GPU pads to fixed widths, and must hide what a CPU hides."""

    def wider(tokens, fill):
        return None if tokens is None else pad(tokens, (0, 7), value=fill)

    task = toy(level)
    batcher, _ = batcher_of(task)
    batch = batcher.batch(batcher.feed(task.split("train")), torch.arange(50))
    wide = dataclasses.replace(
        batch,
        tokens=wider(batch.tokens, 0),
        key_padding_mask=wider(batch.key_padding_mask, True),
        other_tokens=wider(batch.other_tokens, 0),
        other_padding_mask=wider(batch.other_padding_mask, True),
    )
    seen, seen_wide = (objective_of(task).prepare(each, step=3) for each in (batch, wide))
    assert torch.equal(seen_wide.tokens, wider(seen.tokens, 0))
    if batch.other_tokens is not None:
        assert torch.equal(seen_wide.other_tokens, wider(seen.other_tokens, 0))
        assert not torch.equal(seen.tokens == task.spec.vocab_size, seen.other_tokens == task.spec.vocab_size)


def test_causal_pretraining_asks_for_each_next_token(toy):
    task = toy("plain")
    batcher, _ = batcher_of(task)
    batch = batcher.batch(batcher.feed(task.split("train")), torch.arange(50))
    seen = objective_of(task, is_causal=True).prepare(batch, step=1)
    assert torch.equal(seen.tokens, batch.tokens)
    labels = seen.labels
    is_item = labels != IGNORED_LABEL
    assert is_item.sum() == batch.num_tokens - 50, "the last token of a row has no next one"
    assert torch.equal(labels[:, :-1][is_item[:, :-1]], batch.tokens[:, 1:][is_item[:, :-1]])
    assert not (labels == 0).any(), "padding is never asked for"


@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_denoiser_sees_what_it_should(toy, is_causal, position):
    """A causal one is blind to later tokens; neither knows what stood at a hidden place."""
    task = toy("plain")
    batcher, protocol = batcher_of(task, position=position, pretrain="causal" if is_causal else "masked")
    config = protocol.model_config(variant="full", options={}, vocab_size=6, max_seq_len=32, seed=0)
    model = make_pretrainer(config, batcher, protocol, seed=0, dtype="float32").model.eval()
    tokens = torch.randint(1, 4, (3, 20))
    later = tokens.clone()
    later[:, 10:] = 1 + later[:, 10:] % 3
    assert torch.equal(model(tokens)[:, :10], model(later)[:, :10]) == is_causal
    assert model(tokens).shape == (3, 20, 6)


@pytest.mark.parametrize("pretrain", ["masked", "causal"])
@pytest.mark.parametrize("level", ["plain", "tokens", "pair"])
@pytest.mark.parametrize("variant", ["full", "bigbird"])
def test_every_kind_with_an_encoder_pretrains(level, variant, pretrain):
    seen: list[Progress] = []
    run = cell(level, variant=variant, **MASKED | {"pretrain": pretrain, "num_steps": 10, "resid_dropout_p": 0.1})
    result = run_training(run, progress=seen.append)
    assert (result.status, result.reason) == ("ok", "")
    score = result.score
    assert score is not None
    assert score.pretrain == pretrain
    assert score.pretrain_s
    assert score.pretrain_flops
    assert score.train_flops
    assert [(state.phase, state.step) for state in seen] == [
        *(("pretrain", step) for step in range(1, 21)),
        *(("train", step) for step in range(1, 11)),
    ]
    assert score.num_steps == 10
    assert score.settings["pretrain"] == pretrain


def test_without_it_nothing_is_said_of_it():
    result = run_training(cell(num_steps=10))
    assert result.score is not None
    assert (result.score.pretrain, result.score.pretrain_s, result.score.pretrain_flops) == ("", None, None)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_training_begins_with_the_pretrained_weights(monkeypatch, pooling):
    kept, begun = {}, {}
    before: list[weakref.ref[object]] = []
    pretrain, train = Pretrainer.pretrain, Trainer.train

    def note_pretrained(self, feed, encoder, *rest):
        pretrain(self, feed, encoder, *rest)
        kept.update({name: tensor.clone() for name, tensor in self.model.encoder_weights().items()})
        before.extend(weakref.ref(part) for part in (self, self.model, self.optimizer))

    def note_begin(self, *rest):
        assert [part() for part in before] == [None] * 3, "what pretrained takes memory from training"
        begun.update({name: tensor.clone() for name, tensor in self.model.encoder.state_dict().items()})
        train(self, *rest)

    monkeypatch.setattr(Pretrainer, "pretrain", note_pretrained)
    monkeypatch.setattr(Trainer, "train", note_begin)
    result = run_training(cell(pooling=pooling, **MASKED))
    assert result.status == "ok"
    assert kept.keys() == begun.keys()
    assert ("embedding.cls" in kept) == (pooling == "cls")
    assert all(torch.equal(kept[name], begun[name]) for name in kept)
    assert kept["embedding.token.weight"].shape == (6, 16), "the hidden token is thrown away"


def test_it_learns_to_denoise_and_num_params_are_those_of_the_model(monkeypatch):
    curves = []
    pretrain = Pretrainer.pretrain

    def note(self, *rest):
        pretrain(self, *rest)
        curves.append(self.numbers.curve)

    monkeypatch.setattr(Pretrainer, "pretrain", note)
    # In the language of this level a sequence repeats one token, so what is hidden can be read off the rest.
    run = cell("pair", **MASKED | {"pretrain_steps": 60, "num_steps": 10})
    result = run_training(run)
    assert curves[0][-1]["train_loss"] < 0.5 < curves[0][0]["train_loss"]
    assert result.num_params == run_training(cell("pair", num_steps=10)).num_params


def test_only_train_is_looked_at_and_labels_are_not(toy, monkeypatch):
    """Pretraining on other labels gives the same weights; test and validation are not asked for meanwhile."""
    weights = []
    original, split = Pretrainer.pretrain, toy.split

    def note(self, *rest):
        original(self, *rest)
        assert dict(toy.calls) == {"train": 1}
        weights.append({name: tensor.clone() for name, tensor in self.model.encoder_weights().items()})

    monkeypatch.setattr(Pretrainer, "pretrain", note)
    run_training(cell(**MASKED, num_steps=10))
    toy.calls.clear()
    monkeypatch.setattr(
        toy, "split", lambda self, name: dataclasses.replace(found := split(self, name), labels=2 - found.labels)
    )
    run_training(cell(**MASKED, num_steps=10))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_data_order_and_dropout_have_streams_of_their_own():
    assert derive_seed(0, "pretrain") not in {derive_seed(0, stream) for stream in ("data", "dropout", "init")}


@pytest.mark.parametrize(
    ("level", "variant", "pretrain", "reason"),
    [
        ("plain", "linformer", "causal", "no causal form"),
        ("language", "full", "masked", "no encoder over one input"),
        ("seq2seq", "full", "masked", "no encoder over one input"),
    ],
)
def test_what_cannot_pretrain_is_refused_before_data_is_made(toy, level, variant, pretrain, reason):
    result = run_training(cell(level, variant=variant, **MASKED | {"pretrain": pretrain}))
    assert result.status == "unsupported"
    assert reason in result.reason
    assert not toy.calls


def test_forms_with_other_weights_are_refused(toy, monkeypatch):
    from attn_zoo.model import Denoiser

    monkeypatch.setattr(Denoiser, "encoder_weights", lambda self: {"blocks.0.new": torch.zeros(1)})
    result = run_training(cell(**MASKED))
    assert result.status == "unsupported"
    assert "the bidirectional form has other weights" in result.reason
    assert not toy.calls


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pretrain": "masked"}, "pretrain_steps: expected more than 0"),
        ({"pretrain_mask_prob": 1.0}, "pretrain_mask_prob: expected more than 0 and less than 1"),
        ({"pretrain": "mask"}, "pretrain"),
    ],
)
def test_impossible_settings_are_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        run_training(cell(**overrides))


def test_diverged_pretraining_says_so():
    result = run_training(cell(**MASKED, base_lr=1e30, clip_norm=0.0))
    assert result.status == "diverged"
    assert "pretraining: loss or gradient norm is not finite at step" in result.reason
