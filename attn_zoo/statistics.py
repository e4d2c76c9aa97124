"""What samples allow us to say: medians and means with intervals, and comparisons of two models or two curves.

Intervals are 95 % unless asked otherwise. Everything random is seeded, so that a report made twice is the same twice.
How one quantity grows with the sequence length is in `attn_zoo.scaling_fit`, whose results are offered here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attn_zoo.resampling import TAILS, Samples, Sizes, by_process, log_medians, middle, resampled_medians
from attn_zoo.scaling_fit import CostFit, Exponent, LocalSlope, fit_cost, fit_exponent, local_slopes

__all__ = [
    "CostFit",
    "Crossover",
    "Exponent",
    "LocalSlope",
    "PairedDifference",
    "Ratio",
    "crossover",
    "fit_cost",
    "fit_exponent",
    "local_slopes",
    "mean_interval",
    "median_interval",
    "paired_difference",
    "quartiles",
    "time_ratio",
    "time_summary",
]


def _finite(values: Sequence[float], minimum: int, what: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size < minimum or not np.isfinite(array).all():
        raise ValueError(f"{what}: expected at least {minimum} finite number(s); got {list(values)!r}")
    return array


def quartiles(samples: Sequence[float], process_sizes: Sequence[int] = ()) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile, by linear interpolation.

    Of several processes each is the geometric mean of theirs: all count alike, however many samples they took.

    Args:
        samples: in any order within each process.
        process_sizes: how many samples each process took, in order (`Timing.process_sizes`); empty for one process.

    Raises:
        ValueError: there is no sample, or one is not finite, the sizes do not add up, or a sample of several processes
            is not positive.

    >>> quartiles([4.0, 1.0, 3.0, 2.0, 5.0])
    (2.0, 3.0, 4.0)
    >>> quartiles([1.0, 4.0, 4.0, 4.0, 4.0], process_sizes=[1, 4])
    (2.0, 2.0, 2.0)
    """
    parts = [np.quantile(part, [0.25, 0.5, 0.75]) for part in _processes(samples, process_sizes, "samples")]
    low, median, high = parts[0] if len(parts) == 1 else np.exp(np.mean(np.log(parts), axis=0))
    return float(low), float(median), float(high)


def _processes(samples: Sequence[float], sizes: Sequence[int], what: str) -> list[NDArray[np.float64]]:
    return by_process(_finite(samples, 1, what), sizes, what)


def _tails(resampled: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(resampled, [tail, 1.0 - tail])
    return float(low), float(high)


def median_interval(
    samples: Sequence[float], confidence: float = 0.95, seed: int = 0, process_sizes: Sequence[int] = ()
) -> tuple[float, float]:
    """Return the interval of the median that `quartiles` gives.

    Of one process it is the percentile bootstrap of its samples: the doubt **within that process only**. A process
    keeps the memory, the clocks and the neighbours it found; another one, or the same a few minutes later, may lie far
    outside. Identical samples give a width of zero, and so does a single one, of which nothing more can be said: show
    the number of samples beside the interval. With fewer than about six samples it is little more than their range.

    Where `process_sizes` says which samples belong together, what differs between processes is added as Student's t of
    their log medians (`attn_zoo.resampling`): three processes that differ by s (standard deviation) give about 2.5 s to
    either side, two give 9 s. By simulation (`tests/test_resampling.py`) two such runs overlap in nine of ten cases as
    long as the machine forgets its state within three times the time between two processes; what lasts for a whole run,
    no interval of that run can see.

    Args:
        samples: in any order within each process; the result does not depend on it.
        confidence: probability the interval is meant to cover.
        seed: of the resampling.
        process_sizes: how many samples each process took, in order (`Timing.process_sizes`); empty for one process.

    Raises:
        ValueError: there is no sample, or one is not finite, `confidence` is not between 0 and 1, the sizes do not
            add up, or a sample of several processes is not positive.
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: expected a number between 0 and 1; got {confidence!r}")
    processes = _processes(samples, process_sizes, "samples")
    return _tails(resampled_medians(processes, np.random.default_rng(seed)), confidence)


def time_summary(samples_ms: Sequence[float], process_sizes: Sequence[int] = ()) -> dict[str, Any]:
    """Return what `Timing` says of its samples: median, quartiles and the 95 % interval of the median, by field.

    Args:
        samples_ms: raw, in order.
        process_sizes: how many samples each process took; empty for one process.

    Raises:
        ValueError: see `median_interval`.
    """
    q1, median, q3 = quartiles(samples_ms, process_sizes)
    low, high = median_interval(samples_ms, process_sizes=process_sizes)
    return {"median_ms": median, "q1_ms": q1, "q3_ms": q3, "low_ms": low, "high_ms": high}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """How many times one quantity is another, with its interval.

    Args:
        value: the median of the ratios of pairs, or the ratio of the medians where there are no pairs; of several
            processes their geometric mean.
        low: lower end of the interval.
        high: upper end.
        num_pairs: that were compared; 0 where the samples were not taken in turns.
    """

    value: float
    low: float
    high: float
    num_pairs: int


def time_ratio(
    samples_a: Sequence[float],
    samples_b: Sequence[float],
    *,
    is_paired: bool,
    sizes_a: Sequence[int] = (),
    sizes_b: Sequence[int] = (),
    confidence: float = 0.95,
    seed: int = 0,
) -> Ratio:
    """Return how many times a takes what b takes, with its interval.

    Samples taken in turns are pairs: sample k of both, of the same process, is that of the same round. What slowed the
    machine in that round slowed both, and drops out of their ratio. The series may differ in length, because a slower
    callable spends its budget in fewer rounds: the rounds that only one has say nothing and are left out. The ratios
    are then treated as samples in `median_interval`.

    Without pairing (two runs, two bundles) both medians are resampled for themselves. Both intervals know of processes
    what `median_interval` knows: of one, only what differs within it.

    Args:
        samples_a: positive, in the order in which they were taken.
        samples_b: likewise.
        is_paired: both were taken in turns: their records have the same, non-empty `bundle`.
        sizes_a: samples of each process (`Timing.process_sizes`); empty for one.
        sizes_b: likewise.
        confidence: probability the interval is meant to cover.
        seed: of the resampling.

    Raises:
        ValueError: no samples, one that is not positive and finite, sizes that do not add up, or pairs of different
            numbers of processes.

    >>> time_ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0, 1.0], is_paired=True)
    Ratio(value=2.0, low=2.0, high=2.0, num_pairs=3)
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: expected a number between 0 and 1; got {confidence!r}")
    first, second = _processes(samples_a, sizes_a, "samples_a"), _processes(samples_b, sizes_b, "samples_b")
    if min(float(part.min()) for part in (*first, *second)) <= 0:
        raise ValueError("expected positive samples; a time of zero has no ratio")
    rng = np.random.default_rng(seed)
    if not is_paired:
        value = middle(first) / middle(second)
        low, high = _tails(resampled_medians(first, rng) / resampled_medians(second, rng), confidence)
        return Ratio(value=value, low=low, high=high, num_pairs=0)
    if len(first) != len(second):
        raise ValueError(f"expected pairs of as many processes; got {len(first)} and {len(second)}")
    rounds = [min(a.size, b.size) for a, b in zip(first, second, strict=True)]
    ratios = [a[:count] / b[:count] for a, b, count in zip(first, second, rounds, strict=True)]
    low, high = _tails(resampled_medians(ratios, rng), confidence)
    return Ratio(value=middle(ratios), low=low, high=high, num_pairs=sum(rounds))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Return Student's t-interval of the mean: the honest one for a few seeds, where a bootstrap is too narrow.

    Returns:
        Low and high, or None for a single value, whose spread is unknown.

    Raises:
        ValueError: there is no value, or one is not finite, or `confidence` is not between 0 and 1.

    >>> low, high = mean_interval([0.359, 0.361, 0.367])
    >>> f"{low:.3f} {high:.3f}"
    '0.352 0.373'
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: expected a number between 0 and 1; got {confidence!r}")
    array = _finite(values, 1, "values")
    if array.size == 1:
        return None
    from scipy import special  # a fifth of a second that no worker needs

    quantile = special.stdtrit(array.size - 1, 0.5 + confidence / 2.0)
    half = float(quantile) * float(array.std(ddof=1)) / array.size**0.5
    return float(array.mean()) - half, float(array.mean()) + half


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """Two models on the same examples.

    Args:
        difference: accuracy of the first minus accuracy of the second.
        low: lower end of the 95 % interval of the difference.
        high: upper end.
        p_value: probability of a split at least as uneven among the examples on which they differ, were both equally
            good (exact McNemar test, two-sided).
        num_only_a: examples that only the first got right.
        num_only_b: examples that only the second got right.
        num_examples: compared.
    """

    difference: float
    low: float
    high: float
    p_value: float
    num_only_a: int
    num_only_b: int
    num_examples: int


def paired_difference(correct_a: str | Sequence[int], correct_b: str | Sequence[int]) -> PairedDifference:
    """Compare per-example correctness of two models on one test set.

    Pairing removes the difficulty of the examples from the comparison: what both get right or both get wrong says
    nothing about which is better. The interval is Agresti and Min's (2005, "Simple improved confidence intervals for
    comparing matched proportions"): Wald's after adding half an example to each of the four kinds.

    Args:
        correct_a: 1 or 0 for each example, or the same as a string of digits (`records.Score.correct`).
        correct_b: likewise, for the same examples in the same order.

    Raises:
        ValueError: the two are of different length, empty, or hold anything but 0 and 1.

    >>> result = paired_difference("1111100000", "1111000000")
    >>> result.difference, result.num_only_a, result.p_value
    (0.1, 1, 1.0)
    """
    first, second = ([int(mark) for mark in marks] for marks in (correct_a, correct_b))
    if len(first) != len(second) or not first:
        raise ValueError(f"expected the same, non-zero number of examples; got {len(first)} and {len(second)}")
    if not {*first, *second} <= {0, 1}:
        raise ValueError(f"expected only 0 and 1 as marks; got {sorted({*first, *second})}")
    count = len(first)
    from scipy import special

    only_a = sum(a > b for a, b in zip(first, second, strict=True))
    only_b = sum(b > a for a, b in zip(first, second, strict=True))
    differing = only_a + only_b
    p_value = min(1.0, 2.0 * float(special.bdtr(min(only_a, only_b), differing, 0.5))) if differing else 1.0
    padded, shift = count + 2.0, (only_a - only_b) / (count + 2.0)
    half = float(special.ndtri(0.975)) * ((differing + 1.0) / padded - shift**2) ** 0.5 / padded**0.5
    return PairedDifference(
        difference=(only_a - only_b) / count,
        low=max(-1.0, shift - half),
        high=min(1.0, shift + half),
        p_value=p_value,
        num_only_a=only_a,
        num_only_b=only_b,
        num_examples=count,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossover:
    """Where one curve gets below another for good.

    Args:
        kind: `"crosses"`; `"always_faster"`: below at every length both were measured at; `"never_in_range"`: not below
            at the longest.
        length: estimated crossing, in tokens; None unless it crosses in range.
        low: lower end of the 95 % interval; None where it lies below the shortest length, or for no crossing at all.
        high: upper end; None where it lies beyond the longest length.
        support: fraction of the bootstrap resamples of the same kind.
        lengths: that both have, ascending.
    """

    kind: Literal["crosses", "always_faster", "never_in_range"]
    length: float | None
    low: float | None
    high: float | None
    support: float
    lengths: tuple[int, ...]


def _last_crossing(log_lengths: NDArray[np.float64], gap: NDArray[np.float64]) -> float:
    """Return the log length at which `gap` turns negative for good; -inf if it always is, +inf if not at the end."""
    gap = np.where(np.abs(gap) < 1e-9, 0.0, gap)  # equal up to rounding is not cheaper
    above = np.flatnonzero(gap >= 0)
    if above.size == 0:
        return -np.inf
    left = int(above[-1])
    if left == gap.size - 1:
        return np.inf
    share = gap[left] / (gap[left] - gap[left + 1])
    return float(log_lengths[left] + share * (log_lengths[left + 1] - log_lengths[left]))


def crossover(
    samples_x: Samples,
    samples_baseline: Samples,
    seed: int = 0,
    *,
    sizes_x: Sizes | None = None,
    sizes_baseline: Sizes | None = None,
) -> Crossover:
    """Find the length from which x costs less than the baseline, and keeps costing less up to the longest length.

    The log ratio of medians is interpolated linearly in log length. Curves that cross several times count by the last
    crossing from dearer to cheaper. The interval comes from resampling both curves.

    Args:
        samples_x: samples by length.
        samples_baseline: likewise; only lengths that both have are used.
        seed: of the resampling.
        sizes_x: samples of each process, by length; lengths of one process may be left out.
        sizes_baseline: likewise.

    Raises:
        ValueError: no length in common, or a sample is not positive and finite.

    >>> crossover({256: [4.0], 1024: [16.0]}, {256: [1.0], 1024: [64.0]}).length
    512.0
    """
    common = sorted(set(samples_x) & set(samples_baseline))
    if not common:
        raise ValueError(f"expected a length in common; got {sorted(samples_x)} and {sorted(samples_baseline)}")
    _, logs_x, resampled_x = log_medians({n: samples_x[n] for n in common}, seed, sizes_x)
    baseline = {n: samples_baseline[n] for n in common}
    _, logs_baseline, resampled_baseline = log_medians(baseline, seed + 1, sizes_baseline)
    log_lengths = np.log(common)
    point = _last_crossing(log_lengths, logs_x - logs_baseline)
    drawn = np.array([_last_crossing(log_lengths, gap) for gap in resampled_x - resampled_baseline])
    # method="lower": interpolating between a finite crossing and an infinite one has no meaning.
    low, high = np.quantile(drawn, TAILS, method="lower")
    is_crossing = bool(np.isfinite(point))
    same = np.isfinite(drawn) if is_crossing else drawn == point
    return Crossover(
        kind="crosses" if is_crossing else ("always_faster" if point < 0 else "never_in_range"),
        length=round(float(np.exp(point)), 6) if is_crossing else None,
        low=float(np.exp(low)) if np.isfinite(low) else None,
        high=float(np.exp(high)) if np.isfinite(high) else None,
        support=float(same.mean()),
        lengths=tuple(common),
    )
