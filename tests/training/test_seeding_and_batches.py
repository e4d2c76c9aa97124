"""Data order and padding are functions of the step."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from attn_zoo.registry import variants
from attn_zoo.tasks import Split, TaskSpec
from attn_zoo.training.batches import Batcher
from attn_zoo.training.protocol import resolve_protocol
from attn_zoo.training.seeding import batch_rows, derive_seed, seed_everything

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
