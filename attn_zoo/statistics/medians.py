"""Medians of samples of one process or of several, how far they may be off, and ratios of two.

Within one process a bootstrap says enough. Between processes it does not: of three, each in its own state of memory,
clocks and neighbours, resampling covers the truth in three cases out of four at best. What differs between processes
therefore enters as Student's t of their log medians, with one degree of freedom less than there are processes.

All processes count alike: their value is the geometric mean of their medians. The median of all samples would lean to
the fastest process, which takes more of them in its budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2000

MAX_RANKS = 4_000_000
"""Drawn at once, some 30 MB; how many decides no result."""

TAILS = (0.025, 0.975)
"""Of a 95 % interval."""

MAX_SHIFT = 50.0
"""Of a log median: a factor of 10^21, which stands for anything."""

Samples = Mapping[int, Sequence[float]]
"""Positive samples of one quantity by sequence length."""

Sizes = Mapping[int, Sequence[int]]
"""How many of these samples each process took, by sequence length; a length that is absent had one process."""

Processes = Sequence[NDArray[np.float64]]

Middles = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.intp]]
"""Of one process: pairs of ranks, lower and upper, and which pair is that of each resample."""


def _by_process(samples: NDArray[np.float64], sizes: Sequence[int], what: str) -> list[NDArray[np.float64]]:
    """Return the samples of each process; all of them in one where no sizes are given.

    Raises:
        ValueError: the sizes do not add up, or samples of several processes are not positive: they need a logarithm.
    """
    if not sizes:
        return [samples]
    if min(sizes) < 1 or sum(sizes) != samples.size:
        raise ValueError(f"{what}: expected positive sizes that add up to {samples.size} samples; got {list(sizes)}")
    if len(sizes) > 1 and samples.min() <= 0:
        raise ValueError(f"{what}: expected positive samples of several processes; got {float(samples.min())}")
    return [samples[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _middle(processes: Processes) -> float:
    """Return the median of the samples of one process, or the geometric mean of the medians of several."""
    medians = _medians(processes)
    return medians[0] if len(medians) == 1 else float(np.exp(np.mean(np.log(medians))))


def _medians(processes: Processes) -> list[float]:
    """Return the median of each process; for so few samples numpy's own takes ten times as long."""
    ordered = (np.sort(part) for part in processes)
    return [float((part[(part.size - 1) // 2] + part[part.size // 2]) / 2) for part in ordered]


@dataclass(frozen=True, slots=True)
class _Draw:
    """Which samples the resampled medians of some processes lie between: decided by the seed and the sizes alone.

    Args:
        middles: of each process, pairs of ranks of its samples, lower and upper, which are the middle ones of some
            resample (equal where their number is odd), and which pair is that of each resample.
        shifts: Student's t for each resample, shuffled; None for a single process.
    """

    middles: tuple[Middles, ...]
    shifts: NDArray[np.float64] | None


@lru_cache(maxsize=128)  # some 70 KiB each
def _draws(seed: int | tuple[int, int], *groups: tuple[int, ...]) -> tuple[_Draw, ...]:
    """Draw the samples of each process with replacement, `NUM_RESAMPLES` times."""
    rng, draws = np.random.default_rng(seed), []
    for sizes in groups:
        middles = []
        for size in sizes:
            below, above, codes = (size - 1) // 2, size // 2, []
            at_once = max(1, MAX_RANKS // size)
            for done in range(0, NUM_RESAMPLES, at_once):
                ranks = rng.integers(0, size, size=(min(at_once, NUM_RESAMPLES - done), size))
                ranks.partition((below, above), axis=1)
                codes.append(ranks[:, below] * size + ranks[:, above])
            # Few pairs are many resamples' own, and a logarithm of each pair is enough.
            pairs, which = np.unique(np.concatenate(codes), return_inverse=True)
            middles.append((*np.divmod(pairs, size), which))
        draws.append(_Draw(tuple(middles), rng.permutation(_student(len(sizes) - 1)) if len(sizes) > 1 else None))
    return tuple(draws)


def _resampled_medians(processes: Processes, draw: _Draw, *, is_log: bool = False) -> NDArray[np.float64]:
    """Return `NUM_RESAMPLES` values that `_middle` might as well have had; with several processes their shifts too."""
    if len(processes) == 1 and not is_log:
        return _drawn_medians(processes[0], draw.middles[0])
    logs = _resampled_logs(processes, draw) + _shifts(np.log(_medians(processes)), draw)
    return logs if is_log else np.exp(logs)


def _drawn_medians(part: NDArray[np.float64], middles: Middles, *, is_log: bool = False) -> NDArray[np.float64]:
    """Return the medians of one process whose samples are drawn with replacement."""
    lower, upper, which = middles
    ordered = np.sort(part)  # the order of the samples does not matter
    medians = (ordered[lower] + ordered[upper]) / 2
    return (np.log(medians) if is_log else medians)[which]


def _resampled_logs(processes: Processes, draw: _Draw) -> NDArray[np.float64]:
    """Return the mean log median of the processes, the samples of each drawn with replacement."""
    columns = [_drawn_medians(*both, is_log=True) for both in zip(processes, draw.middles, strict=True)]
    return np.asarray(sum(columns) / len(columns))


def _shifts(logs: NDArray[np.float64], draw: _Draw) -> NDArray[np.float64]:
    """Return what the mean of these logs, one of each process, may be off because processes differ: t s / sqrt(k).

    s is the standard deviation of the k logs, t of Student's distribution with k - 1 degrees of freedom.
    """
    if draw.shifts is None:
        return np.zeros(NUM_RESAMPLES)
    # Of two processes, the outermost of these quantiles would take a time beyond what a float holds.
    return np.asarray(np.clip(draw.shifts * logs.std(ddof=1) / logs.size**0.5, -MAX_SHIFT, MAX_SHIFT))


def _sizes(processes: Processes) -> tuple[int, ...]:
    return tuple(part.size for part in processes)


def _student(degrees: float) -> NDArray[np.float64]:
    """Return quantiles of Student's distribution at evenly spaced probabilities: a sample without the luck of one."""
    from scipy import special  # a fifth of a second that no worker needs

    places = (np.arange(NUM_RESAMPLES) + 0.5) / NUM_RESAMPLES
    return np.asarray(special.stdtrit(degrees, places), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class LogMedians:
    """Logs of the medians of several lengths, and how far they may be off.

    Args:
        lengths: ascending.
        values: logs of `_middle` [lengths].
        resampled: the samples of each process drawn with replacement [lengths, resamples]; one column where none vary.
        errors: squared standard errors of the values because processes differ [lengths]; 0 for one process.
        degrees: of freedom of these [lengths].
    """

    lengths: list[int]
    values: NDArray[np.float64]
    resampled: NDArray[np.float64]
    errors: NDArray[np.float64]
    degrees: NDArray[np.int64]

    def weighted(self, weights: NDArray[np.float64]) -> tuple[float, float, float]:
        """Return a sum of the values, each times its weight [lengths], and the ends of its 95 % interval.

        What differs between the processes of one length says nothing of another's, so the shifts of all lengths
        together have more degrees of freedom than that of one: those of Welch and Satterthwaite.
        """
        sums = np.ascontiguousarray(self.resampled.T) @ weights
        parts = weights**2 * self.errors
        if parts.any():
            degrees = parts.sum() ** 2 / (parts[parts > 0] ** 2 / self.degrees[parts > 0]).sum()
            shifts = np.random.default_rng(0).permutation(_student(degrees)) * parts.sum() ** 0.5
            sums = sums + np.clip(shifts, -MAX_SHIFT, MAX_SHIFT)
        return float(weights @ self.values), *_tails(sums)


def log_medians(samples: Samples, sizes: Sizes | None = None) -> LogMedians:
    """Return the logs of the medians of several lengths.

    Raises:
        ValueError: a length or sample is not positive and finite, or sizes do not add up.
    """
    lengths = sorted(samples)
    # A generator per length, so that a longer run gives the lengths it shares with a shorter one the same slopes.
    found = [_log_median(tuple(samples[n]), tuple((sizes or {}).get(n, ())), n) for n in lengths]
    values, columns, errors, degrees = zip(*found, strict=True) if found else ((), (), (), ())
    is_varying = any(len(samples[n]) > 1 for n in lengths)  # else one resample says it all
    resampled = np.stack(columns) if is_varying else np.array(values)[:, None]
    return LogMedians(lengths, np.array(values), resampled, np.array(errors), np.array(degrees))


@lru_cache(maxsize=512)  # the curves of a figure: each is asked for its slopes, its exponent and its crossings
def _log_median(
    samples: tuple[float, ...], sizes: tuple[int, ...], length: int
) -> tuple[float, NDArray[np.float64], float, int]:
    """Return what `LogMedians` has of one length."""
    array = np.asarray(samples, dtype=np.float64)
    if length < 1 or array.size == 0 or not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError(
            f"length {length}: expected a positive length with positive, finite samples; got {array.tolist()}"
        )
    processes = _by_process(array, sizes, f"length {length}")
    if array.size == 1:
        return float(np.log(array[0])), np.full(NUM_RESAMPLES, np.log(array[0])), 0.0, 0
    logs = np.log(_medians(processes))
    error = float(logs.var(ddof=1)) / logs.size if logs.size > 1 else 0.0
    resampled = _resampled_logs(processes, *_draws((0, length), _sizes(processes)))
    return float(np.log(_middle(processes))), resampled, error, logs.size - 1


def finite(values: Sequence[float], what: str) -> NDArray[np.float64]:
    """Return `values` as an array.

    Raises:
        ValueError: there is none, or one is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise ValueError(f"{what}: expected at least 1 finite number; got {list(values)!r}")
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
    return _by_process(finite(samples, what), sizes, what)


def _tails(resampled: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(resampled, TAILS)
    return float(low), float(high)


def median_interval(samples: Sequence[float], process_sizes: Sequence[int] = ()) -> tuple[float, float]:
    """Return the 95 % interval of the median that `quartiles` gives, of the same arguments.

    Of one process it is the percentile bootstrap of its samples: the doubt **within that process only**. A process
    keeps the memory, the clocks and the neighbours it found; another one, or the same a few minutes later, may lie far
    outside. Identical samples give a width of zero, and so does a single one, of which nothing more can be said: show
    the number of samples beside the interval. Of up to five it is their range, which holds the median of what they are
    drawn from in 1 - 2^(1 - n) of all cases: 50 % for two, 75, 88, 94 % for five. From there on a bootstrap of medians
    goes from sample to sample: 88 % for seven, 91 to 97 % for more.

    Where `process_sizes` says which samples belong together, what differs between processes is added as Student's t of
    their log medians: three processes that differ by s (standard deviation) give about 2.5 s to either side, two give
    9 s. By simulation (`tests/statistics/test_medians.py`) two such runs overlap in nine of ten cases as long as the
    machine forgets its state within three times the time between two processes; what lasts for a whole run, no interval
    of that run can see.

    Raises:
        ValueError: there is no sample, or one is not finite, the sizes do not add up, or a sample of several processes
            is not positive.
    """
    processes = _processes(samples, process_sizes, "samples")
    return _tails(_resampled_medians(processes, *_draws(0, _sizes(processes))))


def time_summary(samples_ms: Sequence[float], process_sizes: Sequence[int] = ()) -> dict[str, Any]:
    """Return what `Timing` says of its samples: median, quartiles and the 95 % interval of the median, by field.

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
) -> Ratio:
    """Return how many times a takes what b takes, with its 95 % interval.

    Samples taken in turns are pairs: sample k of both, of the same process, is that of the same round. What slowed the
    machine in that round slowed both, and drops out of their ratio. The series may differ in length, because a slower
    callable spends its budget in fewer rounds: the rounds that only one has say nothing and are left out. The ratios
    are then treated as samples in `median_interval`.

    Without pairing both medians are resampled for themselves. As many processes of both are pairs nevertheless: process
    k of every cell of a run is of its round k, and what slowed the machine in that round drops out of the ratio. Both
    intervals know of processes what `median_interval` knows: of one, only what differs within it.

    Args:
        samples_a: positive, in the order in which they were taken.
        samples_b: likewise.
        is_paired: both were taken in turns: their records have the same, non-empty `bundle`.
        sizes_a: samples of each process (`Timing.process_sizes`); empty for one.
        sizes_b: likewise.

    Raises:
        ValueError: no samples, one that is not positive and finite, sizes that do not add up, or pairs of different
            numbers of processes.

    >>> time_ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0, 1.0], is_paired=True)
    Ratio(value=2.0, low=2.0, high=2.0, num_pairs=3)
    """
    value, resampled, num_pairs = log_ratio(samples_a, samples_b, is_paired=is_paired, sizes_a=sizes_a, sizes_b=sizes_b)
    low, high = _tails(np.exp(resampled))
    return Ratio(value=float(np.exp(value)), low=low, high=high, num_pairs=num_pairs)


def log_ratio(
    samples_a: Sequence[float],
    samples_b: Sequence[float],
    *,
    is_paired: bool,
    sizes_a: Sequence[int] = (),
    sizes_b: Sequence[int] = (),
    seed: int = 0,
) -> tuple[float, NDArray[np.float64], int]:
    """Return the log of `time_ratio`, of the same arguments, those resampled, and the number of pairs.

    Raises:
        ValueError: see `time_ratio`.
    """
    first, second = _processes(samples_a, sizes_a, "samples_a"), _processes(samples_b, sizes_b, "samples_b")
    if min(float(part.min()) for part in (*first, *second)) <= 0:
        raise ValueError("expected positive samples; a time of zero has no ratio")
    if is_paired:
        ratios = _ratios_of_rounds(first, second)
        (draw,) = _draws(seed, _sizes(ratios))
        return float(np.log(_middle(ratios))), _resampled_medians(ratios, draw, is_log=True), sum(_sizes(ratios))
    draws = _draws(seed, _sizes(first), _sizes(second))
    logs, its_logs = np.log(_medians(first)), np.log(_medians(second))
    resampled = _resampled_logs(first, draws[0]) - _resampled_logs(second, draws[1])
    if len(first) == len(second):
        shifts = _shifts(logs - its_logs, draws[0])
    else:
        shifts = _shifts(logs, draws[0]) - _shifts(its_logs, draws[1])
    return float(logs.mean() - its_logs.mean()), resampled + shifts, 0


def _ratios_of_rounds(first: Processes, second: Processes) -> list[NDArray[np.float64]]:
    if len(first) != len(second):
        raise ValueError(f"expected pairs of as many processes; got {len(first)} and {len(second)}")
    rounds = [min(a.size, b.size) for a, b in zip(first, second, strict=True)]
    return [a[:count] / b[:count] for a, b, count in zip(first, second, rounds, strict=True)]


def process_spread(samples: Sequence[float], sizes: Sequence[int]) -> float | None:
    """Return the standard deviation of the log medians of several processes; None for one process.

    Raises:
        ValueError: see `median_interval`.
    """
    processes = _processes(samples, sizes, "samples")
    return float(np.log(_medians(processes)).std(ddof=1)) if len(processes) > 1 else None


def ratio_of_runs(
    samples_a: Sequence[float],
    samples_b: Sequence[float],
    *,
    sizes_a: Sequence[int] = (),
    sizes_b: Sequence[int] = (),
    least_spread: tuple[float, float] = (0.0, 0.0),
) -> Ratio:
    """Return how many times run a takes what run b takes, with its 95 % interval.

    Where both have several processes it is Welch's: Student's t of the difference of their mean log medians, each with
    its own spread between processes. It is narrower than what two intervals of one run each leave possible. With a
    single process on either side nothing is known of what differs between processes, and the interval is that of
    `time_ratio`: look at the number of processes before believing it. What lasts for a whole run no interval can see.

    Three processes that agree by chance pretend to a precision that the machine does not have: half of all false
    verdicts are of such cells. So no cell counts as steadier than `least_spread`.

    Args:
        samples_a: positive.
        samples_b: likewise.
        sizes_a: samples of each process (`Timing.process_sizes`); empty for one.
        sizes_b: likewise.
        least_spread: of each run, such as the median of `process_spread` over its cells.

    Raises:
        ValueError: no samples, one that is not positive and finite, or sizes that do not add up.

    >>> ratio = ratio_of_runs([2.0, 2.1, 1.9], [1.0, 1.05, 0.95], sizes_a=[1, 1, 1], sizes_b=[1, 1, 1])
    >>> f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    '2.00 [1.79, 2.24]'
    """
    sides = [_processes(samples_a, sizes_a, "samples_a"), _processes(samples_b, sizes_b, "samples_b")]
    if min(len(side) for side in sides) < 2:
        return time_ratio(samples_a, samples_b, is_paired=False, sizes_a=sizes_a, sizes_b=sizes_b)
    from scipy import special  # a fifth of a second that no worker needs

    logs = [np.log(_medians(side)) for side in sides]
    errors = [  # squared, of each mean
        max(float(each.std(ddof=1)), least) ** 2 / each.size for each, least in zip(logs, least_spread, strict=True)
    ]
    middle, error = float(logs[0].mean() - logs[1].mean()), sum(errors)
    half = 0.0
    if error > 0.0:
        degrees = error**2 / sum(one**2 / (each.size - 1) for one, each in zip(errors, logs, strict=True))
        half = min(float(special.stdtrit(degrees, TAILS[1])) * error**0.5, MAX_SHIFT)
    low, value, high = (float(np.exp(each)) for each in (middle - half, middle, middle + half))
    return Ratio(value=value, low=low, high=high, num_pairs=0)
