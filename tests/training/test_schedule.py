"""Schedules against their closed forms."""

from __future__ import annotations

import math

import pytest

from attn_zoo.training.protocol import SCHEDULES, learning_rate

WARMUP, STEPS, DIM, BASE = 10, 110, 64, 0.5


def rate(kind, step, warmup_steps=WARMUP, num_steps=STEPS):
    return learning_rate(kind, step, base_lr=BASE, warmup_steps=warmup_steps, num_steps=num_steps, embed_dim=DIM)


@pytest.mark.parametrize("step", [1, 5, 10, 11, 60, 110])
def test_closed_forms(step):
    warm = min(1.0, step / WARMUP)
    gone = max(0.0, (step - WARMUP) / (STEPS - WARMUP))
    assert rate("constant", step) == pytest.approx(BASE * warm)
    assert rate("linear", step) == pytest.approx(BASE * (warm if step <= WARMUP else 1 - gone))
    cosine = warm if step <= WARMUP else (1 + math.cos(math.pi * gone)) / 2
    assert rate("cosine", step) == pytest.approx(BASE * cosine)
    assert rate("rsqrt", step) == pytest.approx(BASE * warm / math.sqrt(max(step, WARMUP)))
    assert rate("noam", step) == pytest.approx(BASE * DIM**-0.5 * min(step**-0.5, step * WARMUP**-1.5))


def test_long_range_arena_peaks_are_the_published_ones():
    """0.05 / sqrt(warm-up): 1.6e-3 at 1000 and 5.6e-4 at 8000; Retrieval's 5000 steps never reach the peak."""
    for warmup, peak in ((1_000, 1.58e-3), (8_000, 5.59e-4)):
        at = learning_rate("rsqrt", warmup, base_lr=0.05, warmup_steps=warmup, num_steps=20_000, embed_dim=512)
        assert at == pytest.approx(peak, rel=1e-2)
    rates = [
        learning_rate("rsqrt", step, base_lr=0.05, warmup_steps=8_000, num_steps=5_000, embed_dim=128)
        for step in range(1, 5_001, 500)
    ]
    assert rates == sorted(rates)


def test_original_transformer_peaks_at_the_end_of_warm_up():
    rates = [
        learning_rate("noam", step, base_lr=1.0, warmup_steps=4_000, num_steps=100_000, embed_dim=512)
        for step in (3_999, 4_000, 4_001)
    ]
    assert max(rates) == rates[1] == pytest.approx((512 * 4_000) ** -0.5)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_no_warm_up_and_warm_up_beyond_the_end(kind):
    assert math.isfinite(rate(kind, 1, warmup_steps=0))
    assert rate(kind, 1, warmup_steps=0) > 0
    beyond = [rate(kind, step, warmup_steps=500) for step in range(1, STEPS + 1)]
    assert beyond == sorted(beyond)
    with pytest.raises(ValueError, match="step >= 1"):
        rate(kind, 0)


def test_decaying_schedules_end_at_zero():
    assert rate("linear", STEPS) == rate("cosine", STEPS) == 0.0
