"""Counted training FLOPs against the closed form, and what happens without a formula."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_zoo.metadata import Shape
from attn_zoo.model import Classifier, ModelConfig
from attn_zoo.registry import variants
from attn_zoo.training.training_flops import FlopCounter

BATCH, LENGTH, DIM, FFN, HEADS, LAYERS, CLASSES = 3, 10, 16, 24, 2, 2, 5
CONFIG = ModelConfig(
    variant="full",
    vocab_size=7,
    max_seq_len=LENGTH,
    embed_dim=DIM,
    num_heads=HEADS,
    num_layers=LAYERS,
    ffn_dim=FFN,
)
TOKENS = torch.ones(BATCH, LENGTH, dtype=torch.int64)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_count_is_the_closed_form(pooling):
    model = Classifier(dataclasses.replace(CONFIG, pooling=pooling), CLASSES)
    counter = FlopCounter(model)
    model(TOKENS)
    model.eval()
    model(TOKENS)  # not training: not counted
    length = LENGTH + (pooling == "cls")
    shape = Shape(
        batch_size=BATCH,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        query_len=length,
        key_len=length,
        head_dim=DIM // HEADS,
        config=variants["full"].config(),
    )
    formula = variants["full"].complexity.flops
    assert formula is not None
    layer = 2 * BATCH * length * (4 * DIM * DIM + 2 * DIM * FFN)
    head = 2 * BATCH * (DIM * FFN + FFN * CLASSES)
    attention = LAYERS * formula(shape)
    assert counter.forward_flops == LAYERS * layer + head + attention
    assert counter.training_flops == 3 * (LAYERS * layer + head) + 3.5 * attention  # scores are recomputed


def test_it_continues_from_a_stored_total():
    model = Classifier(CONFIG, CLASSES)
    counter = FlopCounter(model)
    model(TOKENS)
    once = counter.training_flops
    assert once is not None
    counter.restore(once)
    model(TOKENS)
    assert counter.training_flops == 2 * once


def test_without_a_formula_there_is_no_number(monkeypatch):
    full = variants["full"]
    without = dataclasses.replace(full, complexity=dataclasses.replace(full.complexity, flops=None))
    monkeypatch.setitem(variants._entries, "full", without)
    model = Classifier(CONFIG, CLASSES)
    counter = FlopCounter(model)
    model(TOKENS)
    assert counter.training_flops is None
