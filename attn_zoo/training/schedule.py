"""Learning-rate schedules: pure functions of the step, so that a run can start again anywhere.

Steps count from 1: the rate of step t is the one that the t-th update uses. With T steps, W of them warm-up, and the
model's width E, the base rate is multiplied by

    constant: min(1, t / W)
    linear: min(1, t / W), then straight to 0 at T (one cycle)
    cosine: min(1, t / W), then (1 + cos(pi (t - W) / (T - W))) / 2
    rsqrt: min(1, t / W) / sqrt(max(t, W)), of Long Range Arena; the peak is base / sqrt(W)
    noam: E^-0.5 min(t^-0.5, t W^-1.5), of Vaswani et al. 2017, section 5.3; the base rate there is 1
"""

from __future__ import annotations

import math
from typing import Literal, get_args

ScheduleKind = Literal["constant", "linear", "cosine", "rsqrt", "noam"]
SCHEDULES: tuple[ScheduleKind, ...] = get_args(ScheduleKind)


def learning_rate(
    kind: ScheduleKind, step: int, *, base_lr: float, warmup_steps: int, num_steps: int, embed_dim: int
) -> float:
    """Return the learning rate of update `step` (1 is the first).

    Args:
        kind: one of `SCHEDULES`.
        step: t.
        base_lr: what the factor multiplies; for all kinds but rsqrt and noam also the peak.
        warmup_steps: W.
        num_steps: T.
        embed_dim: E, for noam.

    >>> learning_rate("linear", 5, base_lr=1.0, warmup_steps=10, num_steps=100, embed_dim=64)
    0.5
    """
    if step < 1:
        raise ValueError(f"expected step >= 1; got {step}")
    warmup = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    left = float(step <= warmup_steps)  # of the decay: 1 at the end of warm-up, 0 at the last step
    if warmup_steps < step < num_steps:
        left = (num_steps - step) / (num_steps - warmup_steps)
    if kind == "linear":
        return base_lr * (warmup * left)
    if kind == "cosine":
        return base_lr * (warmup * 0.5 * (1.0 + math.cos(math.pi * (1.0 - left))))
    if kind == "rsqrt":
        return base_lr * (warmup / math.sqrt(max(step, warmup_steps)))
    if kind == "noam":
        rising = step / warmup_steps / math.sqrt(warmup_steps) if warmup_steps else math.inf
        return base_lr * (min(1.0 / math.sqrt(step), rising) / math.sqrt(embed_dim))
    return base_lr * warmup
