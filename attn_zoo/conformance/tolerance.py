"""How far two results may be apart: derived from rounding, not tuned.

Three cases. Same numbers, same shape: a few units of rounding. Same mathematics, another order of summation: rounding
that grows with the square root of the number of terms. A fast path in a working dtype: twice the error that the plain
computation makes in that dtype, plus rounding (the rule of flash-attention's tests).
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF_EPS = 1e-4  # between float16 and float32


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value, 0 for an empty tensor."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference in float64; infinite where only one of the two is finite."""
    difference = (actual.detach().double() - expected.detach().double()).abs()
    return float(difference.nan_to_num(nan=float("inf")).max()) if difference.numel() else 0.0


def same_shape_tolerance(expected: Tensor, dtype: torch.dtype | None = None) -> float:
    """Return the tolerance where the same numbers are combined in the same shapes."""
    return 8 * torch.finfo(expected.dtype if dtype is None else dtype).eps * largest(expected)


def rounding(expected: Tensor, num_terms: int, dtype: torch.dtype | None = None) -> float:
    """Return the tolerance where sums of `num_terms` terms run in another order.

    Half-precision types accumulate in float32, so that only the last roundings count.
    """
    eps = torch.finfo(expected.dtype if dtype is None else dtype).eps
    growth = 8.0 if eps > HALF_EPS else 8.0 + 8.0 * num_terms**0.5
    return eps * growth * largest(expected)


def working_tolerance(plain_error: float, scale: float, num_terms: int, dtype: torch.dtype) -> float:
    """Return the tolerance of a fast path in a working dtype.

    Args:
        plain_error: largest error of the readable reference in the same dtype, against itself in float64.
        scale: largest value of the true result.
        num_terms: length of the sums, which may run in another order.
        dtype: working type.
    """
    eps = torch.finfo(dtype).eps
    return 2 * plain_error + eps * scale * (2.0 if eps > HALF_EPS else 8.0 + 8.0 * num_terms**0.5)
