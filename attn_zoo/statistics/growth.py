"""How time or memory grows with the sequence length: local slopes, a cost model, and where two curves cross.

One power law over all lengths misleads: with time = a + bN + cN^2 the constant pulls the slope below its asymptote
(0.57 on a curve whose asymptote is 2). So we report slopes between neighbouring lengths, where one can see them still
rising, and beside them the non-negative cost model that explains them. Neither proves a complexity; the formula does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from attn_zoo.statistics.medians import TAILS, Samples, Sizes, log_medians, log_ratio

NOISE_FLOOR = 2e-3
"""Relative error below which a fit counts as perfect: nothing we time repeats better than that."""

ROUNDING = 1e-9
"""Of log medians: what is equal up to it is not cheaper."""

Term = Literal["constant", "linear", "quadratic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSlope:
    """Log-log slope between two neighbouring lengths, with its 95 % interval."""

    low_len: int
    high_len: int
    slope: float
    ci_low: float
    ci_high: float


def local_slopes(samples_by_length: Samples, sizes: Sizes | None = None) -> list[LocalSlope]:
    """Return the slope of log median against log length between each two neighbours, shortest first.

    Args:
        samples_by_length: positive samples of one quantity, by sequence length; batch size must be the same for all.
        sizes: samples of each process, by length; lengths of one process may be left out.

    Raises:
        ValueError: a length or sample is not positive and finite.

    >>> [round(s.slope, 3) for s in local_slopes({256: [1.0], 512: [2.0], 1024: [8.0]})]
    [1.0, 2.0]
    """
    lengths, slopes = log_medians(samples_by_length, sizes).lengths, []
    for low_len, high_len in pairwise(lengths):
        both = log_medians({n: samples_by_length[n] for n in (low_len, high_len)}, sizes)
        slope, low, high = both.weighted(np.array([-1.0, 1.0]) / np.log(high_len / low_len))
        slopes.append(LocalSlope(low_len=low_len, high_len=high_len, slope=slope, ci_low=low, ci_high=high))
    return slopes


@dataclass(frozen=True, kw_only=True, slots=True)
class Exponent:
    """Slope of one straight line through several lengths on log-log axes, with its 95 % interval."""

    value: float
    low: float
    high: float
    lengths: tuple[int, ...]


def fit_exponent(samples_by_length: Samples, from_len: int | None = None, sizes: Sizes | None = None) -> Exponent:
    """Fit one exponent by least squares of log median on log length.

    The interval covers the spread of the samples, and that between processes where `sizes` tells them apart: by
    simulation, in 97 % of cases for three processes at each length. Of lengths with one process each it does not know
    what differs between processes: where that is a fifth of the spread of the samples, four lengths of 50 samples
    cover the truth in 82 % of cases, where it is as much in 29 %. Where the true curve bends it is too narrow, so look
    at `local_slopes` too.

    Args:
        samples_by_length: as in `local_slopes`.
        from_len: shortest length used; None takes the top decade (lengths above a tenth of the longest).
        sizes: as in `local_slopes`.

    Raises:
        ValueError: fewer than two lengths are left.
    """
    longest = max(samples_by_length, default=0)
    used = {n: s for n, s in samples_by_length.items() if (n >= from_len if from_len is not None else 10 * n > longest)}
    if len(used) < 2:
        raise ValueError(f"expected at least two lengths from {from_len or longest / 10:g} up; got {sorted(used)}")
    medians = log_medians(used, sizes)
    centred = np.log(medians.lengths) - np.log(medians.lengths).mean()
    value, low, high = medians.weighted(centred / (centred @ centred))
    return Exponent(value=value, low=low, high=high, lengths=tuple(medians.lengths))


@dataclass(frozen=True, kw_only=True, slots=True)
class CostFit:
    """Cost = a + b N + c N^2 with non-negative coefficients; a term that is not needed is exactly zero.

    Args:
        a: constant: launches, set-up.
        b: per token.
        c: per pair of tokens.
        relative_rms: root mean square of (model / measured - 1): how well it describes the data.
        lengths: fitted, ascending.
    """

    a: float
    b: float
    c: float
    relative_rms: float
    lengths: tuple[int, ...]

    def dominant(self, length: float) -> Term:
        """Return the name of the largest term at `length`."""
        parts: dict[Term, float] = {"constant": self.a, "linear": self.b * length, "quadratic": self.c * length**2}
        return max(parts, key=lambda term: parts[term])


def fit_cost(lengths: Sequence[int], values: Sequence[float]) -> CostFit:
    """Fit a + bN + cN^2, non-negative, with weights 1/value^2, and keep only the terms the data ask for.

    All seven sub-forms are tried. One whose best coefficients are not all positive is dropped: its non-negative optimum
    is a smaller form that is tried too. Among the rest AICc decides (Hurvich and Tsai 1989, "Regression and time series
    model selection in small samples"), but for its variance, which is not counted as a parameter as it is there: of
    four lengths that would leave a single term whatever the data say, and of five with noise of a tenth miss the
    constant of 0.02 + x^2 (x = N / longest) in three of four cases, where this misses it in one of twenty. The price
    is a term too many in one of eight cases of ten lengths on a line, where it would be one of twelve. With n
    lengths at most n - 2 terms are admitted, so three lengths can only tell which single term fits best.

    Args:
        lengths: sequence lengths, distinct.
        values: medians, positive, in any unit.

    Raises:
        ValueError: fewer than three lengths, or a value is not positive and finite.

    >>> fit = fit_cost([512, 1024, 2048, 4096, 8192], [2 + 1e-6 * n * n for n in (512, 1024, 2048, 4096, 8192)])
    >>> f"{fit.a:.3f} {fit.b:.3f} {fit.c:.1e} {fit.dominant(8192)}"
    '2.000 0.000 1.0e-06 quadratic'
    """
    if len(lengths) != len(values) or len(set(lengths)) < max(3, len(lengths)):
        raise ValueError(f"expected at least three distinct lengths and a value for each; got {list(lengths)}")
    order = np.argsort(lengths)
    n, t = np.asarray(lengths, dtype=np.float64)[order], np.asarray(values, dtype=np.float64)[order]
    if n[0] < 1 or not (np.isfinite(t).all() and (t > 0).all()):
        raise ValueError(f"expected positive lengths and positive, finite values; got {list(values)}")
    count, longest = len(n), n[-1]
    # Relative lengths keep the columns of one size; dividing by t turns weights 1/t^2 into plain squares.
    columns = np.stack([(n / longest) ** power / t for power in range(3)], axis=1)
    best: tuple[float, float, NDArray[np.float64]] | None = None
    for size in range(1, min(3, count - 2) + 1):
        for terms in combinations(range(3), size):
            solved = np.linalg.lstsq(columns[:, terms], np.ones(count))[0]
            if (solved <= 0).any():
                continue
            mean_square = float(np.mean((columns[:, terms] @ solved - 1.0) ** 2))
            score = count * np.log(max(mean_square, NOISE_FLOOR**2)) + 2 * size
            score += 2 * size * (size + 1) / (count - size - 1)
            if best is None or score < best[0]:
                full = np.zeros(3)
                full[list(terms)] = solved
                best = (float(score), mean_square, full)
    assert best is not None  # a single positive column always has a positive coefficient
    a, b, c = (float(value / longest**power) for power, value in enumerate(best[2]))
    return CostFit(a=a, b=b, c=c, relative_rms=best[1] ** 0.5, lengths=tuple(int(x) for x in n))


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
        cheaper: those of them at which x is below in 97.5 % of the resamples.
    """

    kind: Literal["crosses", "always_faster", "never_in_range"]
    length: float | None
    low: float | None
    high: float | None
    support: float
    lengths: tuple[int, ...]
    cheaper: tuple[int, ...] = ()


def _last_crossings(log_lengths: NDArray[np.float64], gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return where gaps `[lengths, resamples]` turn negative for good; -inf where always, +inf if not at the end."""
    gaps = np.where(np.abs(gaps) < ROUNDING, 0.0, gaps)
    last, every = len(gaps) - 1, np.arange(gaps.shape[1])
    left = last - np.argmax(gaps[::-1] >= 0, axis=0)
    right = np.minimum(left + 1, last)
    before, after = gaps[left, every], gaps[right, every]
    with np.errstate(divide="ignore", invalid="ignore"):  # where nothing crosses
        crossing = log_lengths[left] + before / (before - after) * (log_lengths[right] - log_lengths[left])
    return np.where((gaps < 0).all(axis=0), -np.inf, np.where(left == last, np.inf, crossing))


def crossover(
    samples_x: Samples,
    samples_baseline: Samples,
    *,
    sizes_x: Sizes | None = None,
    sizes_baseline: Sizes | None = None,
    paired: Collection[int] = (),
) -> Crossover:
    """Find the length from which x costs less than the baseline, and keeps costing less up to the longest length.

    The log ratio of medians is interpolated linearly in log length. Curves that cross several times count by the last
    crossing from more to less expensive. The interval comes from resampling the ratio of every length as `time_ratio`
    does: by rounds where both were timed in turns. By simulation it covers the crossing in 97 % of cases or more for
    several processes at each length; for one of each, what differs between them is missing, as in `fit_exponent`.

    Args:
        samples_x: samples by length.
        samples_baseline: likewise; only lengths that both have are used.
        sizes_x: samples of each process, by length; lengths of one process may be left out.
        sizes_baseline: likewise.
        paired: lengths at which sample k of both, of the same process, is that of the same round.

    Raises:
        ValueError: no length in common, a sample is not positive and finite, or pairs of different numbers of
            processes.

    >>> crossover({256: [4.0], 1024: [16.0]}, {256: [1.0], 1024: [64.0]}).length
    512.0
    """
    common = sorted(set(samples_x) & set(samples_baseline))
    if not common:
        raise ValueError(f"expected a length in common; got {sorted(samples_x)} and {sorted(samples_baseline)}")
    ratios = [
        log_ratio(
            samples_x[n],
            samples_baseline[n],
            is_paired=n in paired,
            sizes_a=(sizes_x or {}).get(n, ()),
            sizes_b=(sizes_baseline or {}).get(n, ()),
            seed=n,
        )
        for n in common
    ]
    log_lengths, gaps = np.log(common), np.stack([resampled for _, resampled, _ in ratios])
    point = float(_last_crossings(log_lengths, np.array([[value] for value, *_ in ratios]))[0])
    crossings = _last_crossings(log_lengths, gaps)
    # method="lower": interpolating between a finite crossing and an infinite one has no meaning.
    low, high = np.quantile(crossings, TAILS, method="lower")
    is_crossing = bool(np.isfinite(point))
    same = np.isfinite(crossings) if is_crossing else crossings == point
    return Crossover(
        kind="crosses" if is_crossing else ("always_faster" if point < 0 else "never_in_range"),
        length=round(float(np.exp(point)), 6) if is_crossing else None,
        low=float(np.exp(low)) if np.isfinite(low) else None,
        high=float(np.exp(high)) if np.isfinite(high) else None,
        support=float(same.mean()),
        lengths=tuple(common),
        cheaper=tuple(n for n, share in zip(common, (gaps < -ROUNDING).mean(axis=1), strict=True) if share >= TAILS[1]),
    )
