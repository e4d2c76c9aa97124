"""How far two results may be apart: derived from rounding, not tuned.

Three cases. Same numbers, same shape: a few units of rounding. Same mathematics, another order of summation: rounding
that grows with the square root of the number of terms. A fast path in a working dtype: twice the error that the plain
computation makes in that dtype, plus rounding (the rule of flash-attention's tests). Where that error is large or not
finite, as of sums beyond what 16 bits hold, it excuses nothing: `MOST_PLAIN`.

All three take for granted that results move about as much as inputs do. Where a variant divides by what may be small,
as a norm over two features does, a rounding grows. A check that failed is therefore asked again, with tolerances in
proportion, if `strain` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

import torch
from torch import Tensor

from attn_zoo.conformance.check import Violation

_ORDINARY = 4.0
"""Relative change of a result over that of its inputs which the tolerances below leave room for."""

_STEP = 2.0**-26
"""Relative change of inputs to measure that: the root of float64's epsilon, so that rounding is far below."""

MOST_PLAIN = 0.125
"""Share of the largest true value that the plain computation's error counts as at most: zeros are off by all of it."""

_allowance: ContextVar[float] = ContextVar("_allowance", default=1.0)


@contextmanager
def allowing(factor: float) -> Iterator[None]:
    """Multiply every tolerance within the block."""
    token = _allowance.set(factor)
    try:
        yield
    finally:
        _allowance.reset(token)


def strain(results: Sequence[Tensor], run: Callable[[float], Sequence[Tensor]]) -> float:
    """Return how many times more results move with their inputs than tolerances leave room for, 1 at least.

    Results that jump, are others at every call or not finite, are not smooth: of these 1 is returned, whatever moves
    them.

    Args:
        results: what `run` makes of inputs and parameters as they are.
        run: makes results in float64 from inputs and parameters that are all changed by this share of themselves.
    """
    if not all(result.isfinite().all() for result in results):
        return 1.0
    nudged = run(_STEP)
    slopes = [_slope(change, result) for change, result in zip(nudged, results, strict=True)]
    if max(slopes) <= 1.0:
        return 1.0
    most = 1.0
    for slope, result, *others in zip(slopes, results, run(0.0), nudged, run(4 * _STEP), run(16 * _STEP), strict=True):
        again, *changes = (largest_error(other, result) for other in others)
        grows = all(2 * change <= further <= 8 * change for change, further in pairwise(changes))
        if 8 * again <= changes[0] < math.inf and grows:
            most = max(most, slope)
    return most


def is_half(dtype: torch.dtype) -> bool:
    """Return whether a type has 16 bits."""
    return torch.finfo(dtype).eps > 1e-4


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value, 0 for an empty tensor."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference in float64; infinite where only one of the two is finite."""
    difference = (actual.detach().double() - expected.detach().double()).abs()
    return float(difference.nan_to_num(nan=float("inf")).max()) if difference.numel() else 0.0


def error_by_row(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the largest absolute difference in each row of the last dimension; infinite as in `largest_error`."""
    difference: Tensor = (actual.detach().double() - expected.detach().double()).abs().nan_to_num(nan=math.inf)
    return difference.amax(-1)


def _slope(nudged: Tensor, result: Tensor) -> float:
    scale = largest(result)
    return largest_error(nudged, result) / (_STEP * _ORDINARY * scale) if scale else 0.0


def same_shape_tolerance(expected: Tensor) -> float:
    """Return the tolerance where the same numbers are combined in the same shapes."""
    return _allowance.get() * 8 * torch.finfo(expected.dtype).eps * largest(expected)


def rounding(expected: Tensor, num_terms: int, dtype: torch.dtype | None = None) -> float:
    """Return the tolerance where sums of `num_terms` terms run in another order.

    Half-precision types accumulate in float32, so that only the last roundings count.
    """
    dtype = expected.dtype if dtype is None else dtype
    growth = 8.0 if is_half(dtype) else 8.0 + 8.0 * num_terms**0.5
    return _allowance.get() * torch.finfo(dtype).eps * growth * largest(expected)


def working_tolerance(plain_error: float, scale: float, num_terms: int, dtype: torch.dtype) -> float:
    """Return the tolerance of a fast path in a working dtype.

    Args:
        plain_error: largest error of the readable reference in the same dtype, against itself in float64.
        scale: largest value of the true result.
        num_terms: length of the sums, which may run in another order.
        dtype: working type.
    """
    growth = 2.0 if is_half(dtype) else 8.0 + 8.0 * num_terms**0.5
    return 2 * min(plain_error, MOST_PLAIN * scale) + _allowance.get() * torch.finfo(dtype).eps * growth * scale


def running_tolerance(scale: float, num_terms: int, dtype: torch.dtype) -> float:
    """Return the tolerance of a sum that is kept in its working dtype: each addition rounds it, by chance up or down.

    So are gradients of weights that a recurrence uses at every step.
    """
    return _allowance.get() * torch.finfo(dtype).eps * 0.5 * math.sqrt(num_terms) * scale


_MANY_TERMS = 4096
"""Of sums that may have run in float32, where nobody knows how many they have."""


def expect_close(actual: Tensor, expected: Tensor, allowed: float, message: str, example: str) -> None:
    """Raise `Violation` where two results are further apart than `allowed`; the example then says how far."""
    error = largest_error(actual, expected)
    if error <= allowed < math.inf:
        return
    if not allowed < math.inf:
        raise Violation("a result is not finite for ordinary inputs", example)
    hint = ""
    if expected.dtype == torch.float64 and error <= rounding(expected, _MANY_TERMS, torch.float32):
        hint = ', as float32 rounds: cast to no narrower dtype, or leave "float64" out of Capabilities.dtypes'
    raise Violation(message, f"{example}: off by {error:.2g}, allowed {allowed:.2g}{hint}")
