"""Learning-rate schedules: pure functions of the step, so that a run can start again anywhere.

Steps count from 1: the rate of step t is the one that the t-th update uses. T is the number of steps, W of warm-up
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

__all__ = ["SCHEDULES", "ScheduleKind", "learning_rate"]

ScheduleKind = Literal["constant", "linear", "cosine", "rsqrt", "noam"]


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, step / warmup_steps) if warmup_steps else 1.0


def _left(step: int, warmup_steps: int, num_steps: int) -> float:
    """Return the fraction of the decay that is still ahead: 1 at the end of warm-up, 0 at the last step."""
    if step <= warmup_steps:
        return 1.0
    return max(0.0, (num_steps - step) / (num_steps - warmup_steps)) if num_steps > warmup_steps else 0.0


def _constant(step: int, warmup_steps: int, num_steps: int, embed_dim: int) -> float:  # noqa: ARG001
    return _warmup(step, warmup_steps)


def _linear(step: int, warmup_steps: int, num_steps: int, embed_dim: int) -> float:  # noqa: ARG001
    return _warmup(step, warmup_steps) * _left(step, warmup_steps, num_steps)


def _cosine(step: int, warmup_steps: int, num_steps: int, embed_dim: int) -> float:  # noqa: ARG001
    left = _left(step, warmup_steps, num_steps)
    return _warmup(step, warmup_steps) * 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))


def _rsqrt(step: int, warmup_steps: int, num_steps: int, embed_dim: int) -> float:  # noqa: ARG001
    return _warmup(step, warmup_steps) / math.sqrt(max(step, warmup_steps))


def _noam(step: int, warmup_steps: int, num_steps: int, embed_dim: int) -> float:  # noqa: ARG001
    rising = step / warmup_steps / math.sqrt(warmup_steps) if warmup_steps else math.inf
    return min(1.0 / math.sqrt(step), rising) / math.sqrt(embed_dim)


SCHEDULES: dict[ScheduleKind, Callable[[int, int, int, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "rsqrt": _rsqrt,
    "noam": _noam,
}
"""Factor on the base rate, by name:

constant: min(1, t / W).
linear: min(1, t / W), then straight to 0 at T (one cycle).
cosine: min(1, t / W), then (1 + cos(pi (t - W) / (T - W))) / 2.
rsqrt: min(1, t / W) / sqrt(max(t, W)), of Long Range Arena; the peak is base / sqrt(W).
noam: E^-0.5 min(t^-0.5, t W^-1.5), of Vaswani et al. 2017, section 5.3; the base rate there is 1.
"""


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
    return base_lr * SCHEDULES[kind](step, warmup_steps, num_steps, embed_dim)
