"""A fault is caught whatever the variant says of itself: with a reference of its own, as exact attention, or bare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.masks import blank_padding
from attn_zoo.attention.oracle import attention_weights, expand_kv_heads
from attn_zoo.conformance import run_checks
from tests.conformance.broken import Broken, registered
from tests.conformance.broken_decoding import DECODING, SOUND_DECODING
from tests.conformance.broken_padding import PADDING, SOUND_PADDING

DRESSES: dict[str, dict[str, Any]] = {"OwnReference": {}, "Exact": {"is_exact": True}}
FAULTS = (*PADDING, *DECODING)
# Whose verdict a dress may change: those that catch the faults, and those that compare with what it claims.
CHECKS = sorted({broken.check for broken in FAULTS} | {"matches_reference", "matches_oracle"})


def dense(
    self: AbstractAttention, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None
) -> Tensor:
    """Return softmax attention, by nothing that a broken variant overrides."""
    weights = attention_weights(query, key, is_causal=self.build.is_causal, key_padding_mask=key_padding_mask)
    return weights @ expand_kv_heads(blank_padding(value, key_padding_mask), query.shape[1])


def dressed(broken: Broken, dress: str) -> Broken:
    cls = type(broken.cls.__name__ + dress, (broken.cls,), {"reference": dense})
    return replace(broken, cls=cls, capabilities=broken.capabilities | DRESSES[dress])


@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize("broken", FAULTS, ids=lambda broken: broken.name)
def test_is_caught_in_every_dress(broken: Broken, dress: str) -> None:
    with registered(dressed(broken, dress)) as name:
        assert [result.outcome for result in run_checks(name, checks=[broken.check])] == ["failed"]


@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize("sound", [*SOUND_PADDING, *SOUND_DECODING], ids=lambda sound: sound.name)
def test_the_same_dress_without_the_fault_passes(sound: Broken, dress: str) -> None:
    with registered(dressed(sound, dress)) as name:
        assert [result for result in run_checks(name, checks=CHECKS) if result.is_bad] == []
