"""How far a median may be off: resamples of it, from the samples of one process or of several.

Within one process a bootstrap says enough. Between processes it does not: of three, each in its own state of memory,
clocks and neighbours, resampling covers the truth in three cases out of four at best. What differs between processes
therefore enters as Student's t of their log medians, with one degree of freedom less than there are processes.

All processes count alike: their value is the geometric mean of their medians. The median of all samples would lean to
the fastest process, which takes more of them in its budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["NUM_RESAMPLES", "TAILS", "Samples", "Sizes", "by_process", "log_medians", "middle", "resampled_medians"]

NUM_RESAMPLES = 2000

TAILS = (0.025, 0.975)
"""Of a 95 % interval."""

MAX_SHIFT = 50.0
"""Of a log median: a factor of 10^21, which stands for anything."""

Samples = Mapping[int, Sequence[float]]
"""Positive samples of one quantity by sequence length."""

Sizes = Mapping[int, Sequence[int]]
"""How many of these samples each process took, by sequence length; a length that is absent had one process."""

Processes = Sequence[NDArray[np.float64]]


def by_process(samples: NDArray[np.float64], sizes: Sequence[int], what: str) -> list[NDArray[np.float64]]:
    """Return the samples of each process; all of them in one where no sizes are given.

    Args:
        samples: of all processes, one after another.
        sizes: of each (`Timing.process_sizes`).
        what: they are, for the message.

    Raises:
        ValueError: the sizes do not add up, or samples of several processes are not positive: they need a logarithm.
    """
    if not sizes:
        return [samples]
    if min(sizes) < 1 or sum(sizes) != samples.size:
        raise ValueError(f"{what}: expected positive sizes that add up to {samples.size} samples; got {list(sizes)}")
    if len(sizes) > 1 and samples.min() <= 0:
        raise ValueError(f"{what}: expected positive samples of several processes; got {float(samples.min())}")
    return np.split(samples, np.cumsum(sizes)[:-1])


def middle(processes: Processes) -> float:
    """Return the median of the samples of one process, or the geometric mean of the medians of several.

    Args:
        processes: the samples of each; positive where there are several.
    """
    if len(processes) == 1:
        return float(np.median(processes[0]))
    return float(np.exp(np.mean([np.log(np.median(part)) for part in processes])))


def resampled_medians(processes: Processes, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return `NUM_RESAMPLES` values that `middle` might as well have had.

    The samples of each process are drawn with replacement. With several processes the mean of each draw is also
    multiplied by exp(t s / sqrt(k)): s is the standard deviation of the log medians of the k processes, t of Student's
    distribution with k - 1 degrees of freedom.

    Args:
        processes: the samples of each; positive where there are several.
        rng: of the draws.
    """
    # Sorted within each process: within one the order does not matter.
    medians: list[NDArray[np.float64]] = [
        np.median(np.sort(part)[rng.integers(0, part.size, size=(NUM_RESAMPLES, part.size))], axis=1)
        for part in processes
    ]
    count = len(processes)
    if count == 1:
        return medians[0]
    spread = np.log([np.median(part) for part in processes]).std(ddof=1)
    # Of two processes, the outermost of these quantiles would take a time beyond what a float holds.
    shift = np.clip(rng.permutation(_student(count - 1)) * spread / count**0.5, -MAX_SHIFT, MAX_SHIFT)
    shifted: NDArray[np.float64] = np.exp(np.log(medians).mean(axis=0) + shift)
    return shifted


def _student(degrees: int) -> NDArray[np.float64]:
    """Return quantiles of Student's distribution at evenly spaced probabilities: a sample without the luck of one."""
    from scipy import special  # a fifth of a second that no worker needs

    quantiles: NDArray[np.float64] = special.stdtrit(degrees, (np.arange(NUM_RESAMPLES) + 0.5) / NUM_RESAMPLES)
    return quantiles


def log_medians(
    samples: Samples, seed: int, sizes: Sizes | None = None
) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64]]:
    """Return the ascending lengths, the logs of `middle` [lengths], and those resampled [resamples, lengths].

    Raises:
        ValueError: a length or sample is not positive and finite, or sizes do not add up.
    """
    lengths = sorted(samples)
    medians, columns = [], []
    for length in lengths:
        array = np.asarray(samples[length], dtype=np.float64)
        if length < 1 or array.size == 0 or not (np.isfinite(array).all() and (array > 0).all()):
            raise ValueError(
                f"length {length}: expected a positive length with positive, finite samples; got {array.tolist()}"
            )
        processes = by_process(array, (sizes or {}).get(length, ()), f"length {length}")
        # A generator per length, so that a longer run gives the lengths it shares with a shorter one the same slopes.
        columns.append(resampled_medians(processes, np.random.default_rng((seed, length))))
        medians.append(middle(processes))
    return lengths, np.log(medians), np.log(np.stack(columns, axis=1)) if columns else np.empty((0, 0))
