"""Every kind of task trains, is scored item by item, and refuses what its variant cannot do."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.records import Cell, Score
from attn_zoo.registry import register_attention, tasks, variants
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.training import run_training
from attn_zoo.training.batches import Batcher
from attn_zoo.training.evaluation import Evaluation, breakdown, evaluate, is_better
from attn_zoo.training.objective import objective_for
from attn_zoo.training.protocol import resolve_protocol
from tests.training.toy_task import cell, toy_task

KINDS = ("tokens", "language", "pair", "seq2seq")
LONGER: dict[str, dict[str, Any]] = {
    "tokens": {"num_steps": 100, "eval_every": 50},
    "pair": {"num_steps": 120, "eval_every": 40},
    "seq2seq": {"num_steps": 200, "eval_every": 100},
}


@pytest.fixture(autouse=True)
def toy():
    with toy_task() as task:
        yield task


def run_of(level: str, *, is_causal: bool = False, **overrides: Any) -> Cell:
    return dataclasses.replace(cell(level, **(LONGER.get(level, {}) | overrides)), is_causal=is_causal)


@cache
def score_of(level: str) -> Score:
    result = run_training(run_of(level))
    assert (result.status, result.reason) == ("ok", "")
    assert result.score is not None
    return result.score


@pytest.mark.parametrize("level", KINDS)
def test_every_kind_learns_and_its_record_survives_json(level):
    score = score_of(level)
    if level == "language":
        assert score.value < 0.3, "all but the first token can be known"
    else:
        assert score.value > 0.8
    assert score.num_examples == 120
    assert level != "pair" or score.num_effective == 120  # one item each
    assert Score.from_dict(json.loads(score.to_json())) == score


def test_items_are_the_positions_with_a_label(toy):
    labels = toy("tokens").split("test").labels
    num_items = int((labels != IGNORED_LABEL).sum())
    score = score_of("tokens")
    counts = (labels != IGNORED_LABEL).sum(1).double()
    effective = float(counts.mean() ** 2 / (counts**2).mean()) * len(counts)
    assert score.num_effective == pytest.approx(effective)
    assert effective < score.num_examples
    assert len(score.correct) == num_items != 120
    assert score.correct.count("1") / num_items == pytest.approx(score.value)


def test_groups_sum_up_to_the_score(toy):
    split, score = toy("tokens").split("test"), score_of("tokens")
    assert {(row["parity"], row["tenth"]) for row in score.breakdown} == {
        (float(a), b) for a in (0, 1) for b in (0.0, 0.1)
    } | {(0.0, 0.2)}
    for row in score.breakdown:
        inside = (split.groups[:, 0] == row["parity"]) & torch.isclose(split.groups[:, 1], torch.tensor(row["tenth"]))
        assert row["num_items"] == int((split.labels[inside] != IGNORED_LABEL).sum())
        assert row["floor"] == pytest.approx(int(inside.sum()) / len(split))
    total = sum(row["num_items"] for row in score.breakdown)
    assert sum(row["value"] * row["num_items"] for row in score.breakdown) / total == pytest.approx(score.value)
    assert score_of("pair").breakdown == ()


def test_a_group_without_items_is_left_out():
    found = Evaluation(1.0, 0.5, torch.tensor([1.0, 3.0]), torch.tensor([True, False]), torch.tensor([2, 0]))
    groups = torch.tensor([[1.0], [2.0]])
    assert breakdown(found, groups, ("depth",), "accuracy") == ({"depth": 1.0, "value": 0.5, "num_items": 2.0},)
    floors = {0: {"a": 0.25, "b": 0.75}, 1: {"a": 1.0}}
    (row,) = breakdown(found, groups, ("depth",), "accuracy", floors)
    assert row["floor"] == 0.75
    (row,) = breakdown(found, groups, ("depth",), "bits_per_byte", floors)
    assert row["floor"] == 0.25, "fewer bits are better"
    assert row["value"] == pytest.approx(2.0 / math.log(2))


def test_bits_are_the_loss_to_base_two_and_fewer_are_better():
    score = score_of("language")
    assert score.is_lower_better
    assert score.correct == "", "top-1 hits are not what this metric counts"
    values = {point["step"]: point["validation"] for point in score.curve}
    assert all(point["validation"] == pytest.approx(point["validation_loss"] / math.log(2)) for point in score.curve)
    assert score.validation == min(values.values()) == values[score.best_step]
    assert is_better("bits_per_byte", (1.0, 0.7), (2.0, 1.4))
    assert not is_better("accuracy", (0.1, 0.7), (0.2, 1.4))
    assert is_better("accuracy", (0.2, 0.7), (0.2, 1.4))


def test_positions_without_a_label_change_nothing():
    """Neither the loss nor its gradient sees what a model says there."""
    spec = tasks["toy"]("tokens").spec
    objective = objective_for(spec)
    batcher = Batcher(spec, resolve_protocol("cpu-small"), variants["full"].capabilities, "cpu")
    split = tasks["toy"]("tokens").split("validation")
    batch = batcher.batch(batcher.feed(split), torch.arange(8))
    outputs = torch.randn(*batch.labels.shape, 3, requires_grad=True)
    is_item = batch.labels != IGNORED_LABEL
    loss = objective.loss(outputs, batch)
    loss.backward()
    assert outputs.grad is not None
    assert not outputs.grad[~is_item].any()
    expected = torch.nn.functional.cross_entropy(outputs[is_item], batch.labels[is_item])
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("dtype", "of_loss"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_the_loss_is_computed_in_no_less_than_the_model(dtype, of_loss):
    spec = tasks["toy"]("tokens").spec
    objective = objective_for(spec)
    batcher = Batcher(spec, resolve_protocol("cpu-small"), variants["full"].capabilities, "cpu")
    batch = batcher.batch(batcher.feed(tasks["toy"]("tokens").split("validation")), torch.arange(8))
    outputs = torch.randn(*batch.labels.shape, 3, dtype=torch.float64).to(dtype)
    loss = objective.loss(outputs, batch)
    assert loss.dtype == of_loss
    is_item = batch.labels != IGNORED_LABEL
    expected = torch.nn.functional.cross_entropy(outputs[is_item].to(of_loss), batch.labels[is_item])
    torch.testing.assert_close(loss, expected, rtol=1e-12 if of_loss == torch.float64 else 1e-6, atol=0.0)


@pytest.mark.parametrize("level", ["tokens", "language"])
def test_direction(level):
    """With causal attention later tokens change no earlier output; token classification sees both sides else."""
    spec = tasks["toy"](level).spec
    protocol = resolve_protocol("cpu-small", overrides={"num_layers": 1})
    config = protocol.model_config(variant="full", options={}, vocab_size=6, max_seq_len=20, seed=0)
    tokens = torch.randint(1, 4, (2, 20))
    later = tokens.clone()
    later[:, 10:] = 1 + later[:, 10:] % 3
    for is_causal in (False, True):
        model = objective_for(spec, is_causal=is_causal).build_model(config).eval()
        is_blind = torch.equal(model(tokens)[:, :10], model(later)[:, :10])
        assert is_blind == (is_causal or level == "language")


def test_the_cell_chooses_the_direction_of_token_classification():
    both, causal = (
        run_training(run_of("tokens", num_steps=10)),
        run_training(run_of("tokens", is_causal=True, num_steps=10)),
    )
    assert both.score is not None
    assert causal.score is not None
    assert both.score.curve != causal.score.curve
    assert both.num_params == causal.num_params
    assert run_training(dataclasses.replace(run_of("tokens"), variant="linformer")).status == "ok"


@pytest.mark.parametrize(
    ("level", "is_causal", "variant", "overrides", "reason"),
    [
        ("tokens", True, "linformer", {}, "no causal form"),
        ("language", False, "linformer", {}, "no causal form"),
        ("seq2seq", False, "linformer", {}, "no causal form"),
        ("seq2seq", False, "bigbird", {}, "no cross-attention"),
        ("plain", True, "full", {}, "does not leave the direction open"),
        ("pair", True, "full", {}, "does not leave the direction open"),
        ("plain", False, "full", {"cross_variant": "bigbird"}, "has no cross-attention"),
        ("language", False, "full", {"norm": "batch_norm"}, "later tokens would leak"),
        ("tokens", True, "full", {"norm": "batch_norm"}, "later tokens would leak"),
    ],
)
def test_what_cannot_be_is_refused_before_data_is_made(toy, level, is_causal, variant, overrides, reason):
    run = dataclasses.replace(run_of(level, is_causal=is_causal, **overrides), variant=variant)
    result = run_training(run)
    assert result.status == "unsupported"
    assert reason in result.reason
    assert not toy.calls


def test_another_variant_may_attend_across():
    result = run_training(dataclasses.replace(run_of("seq2seq", num_steps=10, cross_variant="full"), variant="bigbird"))
    assert result.status == "ok"


@pytest.mark.parametrize("lengths", [{"seq_len_multiple": 6}, {"variable_seq_len": False}])
def test_batches_suit_the_variant_that_attends_across(lengths):
    full = variants["full"]
    capabilities = dataclasses.replace(full.capabilities, causal=False, decode="none", **lengths)

    class Across(AbstractAttention):
        """Full attention between sequences of some lengths only."""

        def forward(self, query, key, value, *, key_padding_mask=None):
            return softmax_attention(query, key, value, key_padding_mask=key_padding_mask).to(query.dtype)

    register = register_attention(
        "across", capabilities=capabilities, complexity=full.complexity, reference=full.reference
    )
    register(Across)
    try:
        result = run_training(run_of("seq2seq", num_steps=3, batch_size=2, pad_multiple=1, cross_variant="across"))
    finally:
        variants.remove("across")
    assert (result.status, result.reason) == ("ok", "")


def test_a_seq2seq_test_reads_its_own_words(monkeypatch):
    """The test is decoded greedily from the first target token; validation reads the true target."""
    from attn_zoo.model import Seq2Seq

    starts = []
    original = Seq2Seq.generate

    def generate(self, source, num_tokens, *, start_token, source_padding_mask=None):
        starts.append(start_token)
        return original(self, source, num_tokens, start_token=start_token, source_padding_mask=source_padding_mask)

    monkeypatch.setattr(Seq2Seq, "generate", generate)
    run_training(run_of("seq2seq", num_steps=10, eval_every=5))
    assert [len(start) for start in starts] == [50, 50, 20]
    assert all(bool((start == 5).all()) for start in starts)


@pytest.mark.parametrize("can_step", [True, False])
def test_greedy_decoding_equals_reading_step_by_step(monkeypatch, can_step):
    """Every written token is the best one given those before it, with and without decode state."""
    from attn_zoo.model import Seq2Seq, heads

    if not can_step:
        monkeypatch.setattr(heads, "_can_step", lambda model: False)
    protocol = resolve_protocol("cpu-small")
    config = protocol.model_config(variant="full", options={}, vocab_size=9, max_seq_len=16, seed=3)
    model = Seq2Seq(config).eval()
    source, mask = torch.randint(1, 9, (4, 16)), torch.arange(16) >= torch.tensor([16, 3, 9, 1])[:, None]
    start = torch.tensor([1, 2, 3, 4])
    written = model.generate(source, 6, start_token=start, source_padding_mask=mask)
    read = torch.cat([start[:, None], written], dim=1)
    for position in range(6):
        logits = model(source, read[:, : position + 1], mask)
        assert torch.equal(logits[:, -1].argmax(-1), written[:, position])


def scorer(toy) -> Callable[..., Evaluation]:
    """Return what scores a split of the toy task of tokens by an untrained model; takes arguments of `evaluate`."""
    spec, protocol = toy("tokens").spec, resolve_protocol("cpu-small")
    batcher, objective = Batcher(spec, protocol, variants["full"].capabilities, "cpu"), objective_for(spec)
    model = objective.build_model(
        protocol.model_config(variant="full", options={}, vocab_size=6, max_seq_len=batcher.max_seq_len, seed=0)
    )
    return lambda split, **how: evaluate(model, objective, batcher, batcher.feed(split), seed=0, **how)


def test_last_partial_batches_count(toy):
    scored, split = scorer(toy), toy("tokens").split("test")
    found = [scored(split, batch_size=size) for size in (7, 120)]
    assert [len(one.counts) for one in found] == [120, 120]
    assert torch.equal(found[0].counts, (split.labels != IGNORED_LABEL).sum(1))
    assert torch.equal(found[0].correct, found[1].correct)
    assert found[0].loss == pytest.approx(found[1].loss)


def test_batches_of_similar_lengths_are_scored_as_the_order_of_the_split_is(toy, monkeypatch):
    scored, split = scorer(toy), toy("tokens").split("test")
    widths = []
    whole = Batcher.batch

    def noted(self, feed, rows):
        widths.append(int(feed.lengths[rows].max()) - int(feed.lengths[rows].min()))
        return whole(self, feed, rows)

    monkeypatch.setattr(Batcher, "batch", noted)
    plain, bucketed = (scored(split, batch_size=7, is_bucketed=each) for each in (False, True))
    assert sum(widths[len(widths) // 2 :]) < sum(widths[: len(widths) // 2]) / 4
    assert torch.equal(plain.counts, bucketed.counts)
    assert torch.equal(plain.correct, bucketed.correct)
    assert torch.allclose(plain.losses, bucketed.losses)
    assert plain.value == bucketed.value
