"""The rate of dropout and its draws: every fault in every dress, and no sound variant at any of many seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_zoo
from attn_zoo.conformance import run_checks
from attn_zoo.conformance.checks import dropout_rate
from attn_zoo.conformance.checks.randomness import seeded_call
from attn_zoo.conformance.inputs import Inputs
from attn_zoo.conformance.subject import Module
from attn_zoo.registry import variants
from tests.conformance.broken import Broken, Softmax, SoftmaxMixer, registered
from tests.conformance.broken_dropout import RATE, RATES, SOUND_DROPOUT

SEEDS = range(1, 4)


def plain(self: Softmax, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Any:
    return Softmax.attend(self, query, key, value, key_padding_mask)


@pytest.mark.parametrize("dress", ["exact", "approximate"])
@pytest.mark.parametrize(
    "broken", [each for each in RATES if not issubclass(each.cls, SoftmaxMixer)], ids=lambda broken: broken.name
)
def test_is_caught_in_another_dress(broken: Broken, dress: str) -> None:
    """Without a reference of its own it is caught in `test_broken`."""
    cls: Any = type(broken.cls.__name__, (broken.cls,), {"reference": plain} if dress == "approximate" else {})
    capabilities = {**broken.capabilities, "is_exact": dress == "exact", "causal": True}
    with registered(replace(broken, cls=cls, capabilities=capabilities)) as name:
        (result,) = run_checks(name, checks=[RATE])
    assert result.outcome == "failed", result


@pytest.fixture
def at_seed(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes the check draw from other seeds."""
    seeded = seeded_call

    def shift(seed: int) -> None:
        def shifted(module: Module, inputs: Inputs, own: int) -> Tensor:
            return seeded(module, inputs, own + 10 * seed)

        monkeypatch.setattr(dropout_rate, "seeded_call", shifted)

    return shift


@pytest.mark.parametrize("sound", SOUND_DROPOUT, ids=lambda sound: sound.name)
def test_no_sound_variant_is_blamed_at_any_seed(sound: Broken, at_seed: Callable[[int], None]) -> None:
    with registered(sound) as name:
        for seed in SEEDS:
            at_seed(seed)
            (result,) = run_checks(name, checks=[RATE])
            assert result.outcome == "passed", (seed, result)


@pytest.mark.parametrize(
    "name", [name for name in attn_zoo.list_variants() if variants[name].capabilities.attention_dropout]
)
def test_no_shipped_variant_is_blamed_at_another_seed(name: str, at_seed: Callable[[int], None]) -> None:
    at_seed(1)
    (result,) = run_checks(name, checks=[RATE])
    assert result.outcome == "passed", result


@pytest.mark.parametrize("embed_dim", [2, 6, 160])
def test_heads_of_any_size_show_their_weights(embed_dim: int) -> None:
    """One feature, an odd number of them, and more keys than there are powers of two."""
    for name in ("full", "linear_attention"):
        (result,) = run_checks(name, checks=[RATE], embed_dim=embed_dim)
        assert result.outcome == "passed", result


def test_sums_are_compared_in_their_standard_errors() -> None:
    generator = torch.Generator().manual_seed(0)
    heavy = torch.randn(8, 2, 64, 4, generator=generator) * torch.rand(8, 2, 64, 1, generator=generator) ** 4
    assert abs(dropout_rate._in_errors(heavy, by_query=True)) < 5
    assert dropout_rate._in_errors(heavy.abs(), by_query=True) > dropout_rate.LIMIT
    assert dropout_rate._in_errors(torch.ones(39, 1, 5, 2), by_query=False) == 0.0  # too few to reach the limit
    assert dropout_rate._in_errors(torch.ones(48, 1, 5, 2), by_query=False) > dropout_rate.LIMIT
