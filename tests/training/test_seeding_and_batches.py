"""Data order and padding are functions of the step."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from attn_zoo.registry import variants
from attn_zoo.tasks import Split, TaskSpec
from attn_zoo.training.batches import Batcher, DataOrder
from attn_zoo.training.loop import make_trainer
from attn_zoo.training.protocol import resolve_protocol
from attn_zoo.training.seeding import batch_rows, derive_seed, seed_everything
from tests.training.toy_task import cell, toy_task

SPEC = TaskSpec(vocab_size=9, num_classes=2, max_seq_len=50, metric="accuracy", chance=0.5, kind="classification")
FULL = variants["full"].capabilities


def split_with(lengths: list[int]) -> Split:
    tokens = torch.ones(len(lengths), max(lengths), dtype=torch.uint8)
    tokens[torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]] = 0
    return Split(tokens=tokens, lengths=torch.tensor(lengths), labels=torch.arange(len(lengths)) % 2)


def test_every_example_is_seen_once_per_epoch_across_batch_borders():
    rows = torch.cat([batch_rows(step, 7, 10, seed=3) for step in range(1, 11)])
    assert len(rows) == 70
    epochs = rows.reshape(7, 10)
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 7


def test_a_batch_may_be_larger_than_the_data():
    assert sorted(torch.bincount(batch_rows(1, 10, 4, seed=0)).tolist()) == [2, 2, 3, 3]


def test_order_depends_on_the_seed_only():
    assert torch.equal(batch_rows(5, 8, 100, seed=1), batch_rows(5, 8, 100, seed=1))
    assert not torch.equal(batch_rows(5, 8, 100, seed=1), batch_rows(5, 8, 100, seed=2))


def test_streams_are_distinct_and_pinned():
    seeds = [derive_seed(s, stream, i) for s in (0, 1) for stream in ("init", "data", "dropout") for i in (0, 1)]
    assert len(set(seeds)) == len(seeds)
    assert derive_seed(0, "init") == 2061300717
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_all_global_generators_are_seeded():
    draws = []
    for _ in range(2):
        seed_everything(5)
        draws.append(
            (
                random.random(),
                float(np.random.rand()),  # noqa: NPY002
                float(torch.rand(())),
            )
        )
    assert draws[0] == draws[1]


@pytest.mark.parametrize(
    ("overrides", "capability", "longest", "width", "max_seq_len"),
    [
        ({}, {}, 17, 32, 64),
        ({}, {}, 50, 64, 64),
        ({"pad_multiple": 1}, {}, 17, 17, 50),
        ({"pooling": "cls"}, {}, 31, 31, 63),  # with CLS in front the mixer sees 32
        ({"pooling": "cls"}, {}, 32, 47, 63),
        ({}, {"seq_len_multiple": 24}, 17, 48, 96),
        ({}, {"variable_seq_len": False}, 17, 64, 64),
        ({"is_full_length": True}, {}, 17, 64, 64),
    ],
)
def test_widths(overrides, capability, longest, width, max_seq_len):
    protocol = resolve_protocol("cpu-small", overrides=overrides)
    batcher = Batcher(SPEC, protocol, dataclasses.replace(FULL, **capability), "cpu")
    assert (batcher.width(longest), batcher.max_seq_len) == (width, max_seq_len)


def test_a_trainer_asks_what_the_variant_can_do_under_its_options(monkeypatch):
    def narrow(config, capabilities):
        return dataclasses.replace(capabilities, variable_seq_len=config.backend == "auto")

    monkeypatch.setattr(variants["full"].config, "narrow", narrow)
    full_length = []
    with toy_task() as task:
        for backend in ("auto", "math"):
            one = dataclasses.replace(cell(), options={"backend": backend})
            trainer, _ = make_trainer(one, task("plain").spec, resolve_protocol("cpu-small"))
            full_length.append(trainer.batcher.is_full_length)
    assert full_length == [False, True]


def test_batches_are_padded_and_masked():
    batcher = Batcher(SPEC, resolve_protocol("cpu-small"), FULL, "cpu")
    batch = batcher.batch(batcher.feed(split_with([3, 20, 5, 40])), torch.tensor([2, 1]))
    assert batch.tokens.shape == (2, 32)
    assert batch.tokens.dtype == torch.int64
    assert batch.tokens.sum(1).tolist() == [5, 20]
    assert batch.key_padding_mask is not None
    assert batch.key_padding_mask.sum(1).tolist() == [27, 12]
    assert torch.equal(batch.key_padding_mask, batch.tokens == 0)
    assert (batch.num_tokens, batch.labels.tolist()) == (25, [0, 1])


def test_tasks_without_padding_get_no_mask():
    batcher = Batcher(dataclasses.replace(SPEC, has_padding=False), resolve_protocol("cpu-small"), FULL, "cpu")
    assert batcher.batch(batcher.feed(split_with([48, 48])), torch.tensor([0, 1])).key_padding_mask is None


@pytest.mark.parametrize(("batch_size", "num_examples", "bucket"), [(7, 100, 4), (8, 64, 3), (5, 23, 50), (10, 4, 2)])
def test_buckets_visit_every_example_once_per_pass(batch_size, num_examples, bucket):
    costs = torch.randint(1, 50, (num_examples,), generator=torch.Generator().manual_seed(0))
    order = DataOrder(costs, batch_size=batch_size, seed=3, bucket_batches=bucket)
    batches = [order.rows(step) for step in range(1, num_examples + 1)]  # batch_size passes, none left over
    assert all(len(rows) == batch_size for rows in batches)
    counts = torch.zeros(num_examples, dtype=torch.int64)
    for step, rows in enumerate(batches, start=1):
        counts += torch.bincount(rows, minlength=num_examples)
        passes = step * batch_size // num_examples
        assert int(counts.max()) <= passes + 1, "none is seen again before its pass is over"
    assert bool((counts == batch_size).all())


def test_buckets_are_a_function_of_seed_and_step_alone():
    """Asked for in another order, or by a process that starts in the middle, a step has the same rows."""
    costs = torch.randint(1, 50, (90,), generator=torch.Generator().manual_seed(0))

    def order(seed=3):
        return DataOrder(costs, batch_size=8, seed=seed, bucket_batches=4)

    forward, one = [order().rows(step) for step in range(1, 40)], order()
    backward = [one.rows(step) for step in range(39, 0, -1)][::-1]
    assert all(torch.equal(*pair) for pair in zip(forward, backward, strict=True))
    assert all(torch.equal(order().rows(step), forward[step - 1]) for step in (1, 7, 30))
    assert not torch.equal(torch.cat(forward), torch.cat([order(4).rows(step) for step in range(1, 40)]))


def test_buckets_pad_less_and_shuffle_their_batches():
    costs = torch.randint(1, 512, (800,), generator=torch.Generator().manual_seed(0))

    def longest(bucket):
        order = DataOrder(costs, batch_size=8, seed=0, bucket_batches=bucket)
        return torch.stack([costs[order.rows(step)].max() for step in range(1, 101)])

    assert longest(20).sum() < 0.7 * longest(0).sum()
    inside = longest(20)[:20]
    assert not torch.equal(inside, inside.sort().values), "batches do not come by length"


def test_without_buckets_the_order_is_the_plain_one():
    order = DataOrder(torch.ones(30), batch_size=8, seed=1)
    assert all(torch.equal(order.rows(step), batch_rows(step, 8, 30, seed=1)) for step in range(1, 12))


def test_positions_and_tokens_are_counted_in_both_sequences():
    one, two = split_with([3, 20, 5, 40]), split_with([9, 1, 2, 33])
    pair = dataclasses.replace(one, other_tokens=two.tokens, other_lengths=two.lengths)
    spec = dataclasses.replace(SPEC, kind="pair", other_max_seq_len=50)
    batcher = Batcher(spec, resolve_protocol("cpu-small"), FULL, "cpu")
    feed = batcher.feed(pair)
    batch = batcher.batch(feed, torch.tensor([2, 1]))
    assert batch.other_tokens is not None
    assert batch.other_padding_mask is not None
    assert (batch.tokens.shape, batch.other_tokens.shape) == ((2, 32), (2, 16))
    assert (batch.num_tokens, batch.num_positions) == (25 + 3, 64 + 32)
    assert batch.other_padding_mask.sum(1).tolist() == [14, 15]
    assert feed.costs.tolist() == [12, 21, 7, 73]


def test_labels_of_positions_are_cut_and_filled_with_their_tokens():
    labels = torch.arange(4 * 40).view(4, 40)
    split = dataclasses.replace(split_with([3, 20, 5, 40]), labels=labels)
    spec = dataclasses.replace(SPEC, kind="token_classification")
    batcher = Batcher(spec, resolve_protocol("cpu-small", overrides={"pooling": "cls"}), FULL, "cpu")
    feed = batcher.feed(split)
    assert torch.equal(batcher.batch(feed, torch.tensor([2, 1])).labels, labels[[2, 1], :32])
    wide = batcher.batch(feed, torch.tensor([3])).labels
    assert wide.shape == (1, 48), "no CLS vector, so the tokens alone are rounded up"
    assert wide[0, 40:].tolist() == [-100] * 8


def test_labels_of_a_target_follow_the_target():
    two = split_with([9, 1, 2, 33])
    split = dataclasses.replace(
        split_with([3, 20, 5, 40]), other_tokens=two.tokens, other_lengths=two.lengths, labels=two.tokens.long()
    )
    spec = dataclasses.replace(SPEC, kind="seq2seq", other_max_seq_len=33)
    batcher = Batcher(spec, resolve_protocol("cpu-small"), FULL, "cpu")
    batch = batcher.batch(batcher.feed(split), torch.tensor([2, 1]))
    assert batch.other_tokens is not None
    assert batch.labels.shape == batch.other_tokens.shape == (2, 16)


@pytest.mark.parametrize(
    ("multiple", "pooling", "has_mask"), [(1, "mean", False), (32, "mean", True), (1, "cls", False)]
)
def test_inputs_of_one_length_are_not_rounded_but_for_the_variant(multiple, pooling, has_mask):
    """What is added for a variant's sake is masked, though the task itself has no padding."""
    spec = dataclasses.replace(SPEC, has_padding=False)
    capabilities = dataclasses.replace(FULL, seq_len_multiple=multiple)
    batcher = Batcher(spec, resolve_protocol("cpu-small", overrides={"pooling": pooling}), capabilities, "cpu")
    batch = batcher.batch(batcher.feed(split_with([50, 50])), torch.tensor([0, 1]))
    assert batcher.has_mask == has_mask == (batch.key_padding_mask is not None)
    assert batch.tokens.shape[1] == (64 if has_mask else 50)
    if batch.key_padding_mask is not None:
        assert batch.key_padding_mask.sum(1).tolist() == [14, 14]


def test_lengths_are_not_checked_again_on_a_device(monkeypatch):
    """On a GPU that would make the host wait for the device, in every step if it were done for a batch."""

    def refuse(_: Split) -> None:
        raise AssertionError("a split was checked")

    batcher = Batcher(SPEC, resolve_protocol("cpu-small"), FULL, "cpu")
    split = split_with([3, 20, 5, 40])
    monkeypatch.setattr(Split, "__post_init__", refuse)
    feed = batcher.feed(split)
    assert batcher.batch(feed, torch.tensor([2, 1])).tokens.sum(1).tolist() == [5, 20]
