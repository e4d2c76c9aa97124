"""How often two runs of one cell agree, by simulation: the machine drifts, and a process sees one moment of it.

The log time of a sample is the cell's, plus what the machine does while its process runs (an Ornstein-Uhlenbeck
process, 20 % strong), plus noise of 5 %. Two runs half an hour apart agree where their intervals overlap.
"""

from __future__ import annotations

import numpy as np
import pytest

from attn_zoo.statistics import medians
from attn_zoo.statistics.growth import crossover, fit_exponent, local_slopes
from attn_zoo.statistics.medians import median_interval, quartiles, time_ratio

GAP_S = 60.0
APART_S = 1800.0


def drift(rng, times_s, memory_s, strength=0.2):
    """Return what a slowly changing machine adds to the log time at each of these moments."""
    levels = [rng.standard_normal()]
    for step_s in np.diff(times_s):
        kept = np.exp(-step_s / memory_s)
        levels.append(kept * levels[-1] + (1 - kept**2) ** 0.5 * rng.standard_normal())
    return strength * np.array(levels)


def two_runs(rng, num_processes, memory_s, num_samples=15):
    """Return the samples of two runs of one cell, and how many each process took."""
    starts = GAP_S * np.arange(num_processes)
    levels = drift(rng, np.concatenate([starts, starts + APART_S]), memory_s)
    logs = levels[:, None] + 0.05 * rng.standard_normal((2 * num_processes, num_samples))
    first, second = np.exp(logs[:num_processes]).ravel(), np.exp(logs[num_processes:]).ravel()
    return list(first), list(second), (num_samples,) * num_processes


def agreeing(num_processes, memory_s, runs=100, seed=0, knows_processes=True):
    """Return the share of pairs of runs whose intervals overlap."""
    rng, hits = np.random.default_rng(seed), 0
    for _ in range(runs):
        first, second, sizes = two_runs(rng, num_processes, memory_s)
        told = sizes if knows_processes else ()
        (low_a, high_a), (low_b, high_b) = (median_interval(run, process_sizes=told) for run in (first, second))
        hits += low_a <= high_b and low_b <= high_a
    return hits / runs


@pytest.mark.parametrize("num_processes", [2, 3, 4])
@pytest.mark.parametrize("memory_s", [1.0, GAP_S])
def test_repeats_far_apart_agree_in_nine_of_ten_cells(num_processes, memory_s):
    assert agreeing(num_processes, memory_s) >= 0.9


def test_a_single_process_does_not_and_no_interval_can_see_what_lasts_for_a_whole_run():
    assert agreeing(1, GAP_S) <= 0.3
    assert agreeing(3, GAP_S, knows_processes=False) <= 0.5, "three processes taken for one pool of samples"
    assert agreeing(3, 20 * GAP_S) < 0.8, "the limit that the docstring of `median_interval` names"


def test_the_interval_covers_the_median_of_independent_processes():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(300):
        run, _, sizes = two_runs(rng, 3, memory_s=1.0)
        low, high = median_interval(run, process_sizes=sizes)
        hits += low <= 1.0 <= high
    assert 0.91 <= hits / 300 <= 0.985


def test_a_ratio_of_two_runs_covers_one():
    rng, hits = np.random.default_rng(2), 0
    for _ in range(200):
        first, second, sizes = two_runs(rng, 3, GAP_S)
        found = time_ratio(first, second, is_paired=False, sizes_a=sizes, sizes_b=sizes)
        hits += found.low <= 1.0 <= found.high
    assert hits / 200 >= 0.9


def test_what_lasts_for_a_round_drops_out_of_the_ratio_of_two_cells():
    """Rounds of a run differ by a fifth, the cells of one round by a fiftieth: twice as fast, in nine of ten runs."""
    rng, hits, widths, apart = np.random.default_rng(6), 0, [], []
    for _ in range(200):
        rounds = 0.2 * rng.standard_normal(3)
        cells = np.exp(rounds + 0.02 * rng.standard_normal((2, 3)))[:, :, None] * rng.lognormal(
            sigma=0.05, size=(2, 3, 9)
        )
        slow, fast, sizes = list(2.0 * cells[0].ravel()), list(cells[1].ravel()), (9, 9, 9)
        found = time_ratio(slow, fast, is_paired=False, sizes_a=sizes, sizes_b=sizes)
        fewer = time_ratio(slow, fast[9:], is_paired=False, sizes_a=sizes, sizes_b=sizes[1:])
        hits += found.low <= 2.0 <= found.high
        widths.append(found.high / found.low)
        apart.append(fewer.high / fewer.low)
    assert 0.9 <= hits / 200 <= 0.99
    assert np.median(widths) < 1.25
    assert np.median(apart) > 2.0, "what one of the two has not, nothing says which rounds are the same"


def test_crossings_pair_the_processes_of_a_run():
    """x is a tenth dearer at 256 and cheaper at 1024, while the rounds of the run differ by a factor of four."""
    baseline = {n: [1.0] * 5 + [4.0] * 5 + [2.0] * 5 for n in (256, 1024)}
    x = {256: [1.1 * ms for ms in baseline[256]], 1024: [ms / 1.1 for ms in baseline[1024]]}
    sizes = dict.fromkeys(x, (5, 5, 5))
    found = crossover(x, baseline, sizes_x=sizes, sizes_baseline=sizes)
    assert [found.low, found.high] == pytest.approx([512.0, 512.0])
    assert crossover(x, baseline, sizes_x=sizes).low is None


def test_exponents_and_crossings_know_what_differs_between_processes():
    rng, hits, hits_pooled, widths = np.random.default_rng(3), 0, 0, []
    for _ in range(150):
        samples, sizes = {}, {}
        for length in (512, 1024, 2048):
            run, _, sizes[length] = two_runs(rng, 3, memory_s=1.0)
            samples[length] = [length * value for value in run]
        exponent, pooled = fit_exponent(samples, sizes=sizes), fit_exponent(samples)
        alike = {length: [quartiles(samples[length], sizes[length])[1]] for length in samples}
        assert exponent.value == pytest.approx(fit_exponent(alike).value)
        hits += exponent.low <= 1.0 <= exponent.high
        hits_pooled += pooled.low <= 1.0 <= pooled.high
        widths.append(exponent.high - exponent.low)
        wide, narrow = local_slopes(samples, sizes=sizes)[0], local_slopes(samples)[0]
        assert wide.ci_high - wide.ci_low > narrow.ci_high - narrow.ci_low
    assert hits >= 0.92 * 150
    assert hits_pooled <= 0.75 * 150
    assert np.median(widths) < 0.8, "three lengths know more than two degrees of freedom: 4.3 s each would be 1.2"
    flat = {length: [1024.0] for length in samples}
    apart, pool = crossover(flat, samples, sizes_baseline=sizes), crossover(flat, samples)
    assert apart.length == pytest.approx(crossover(flat, alike).length)
    assert apart.support < pool.support, "processes that differ may move the crossing out of range"


def test_the_interval_is_students_where_a_process_has_no_spread_of_its_own():
    # Log medians 0, 0.1, 0.2: s = 0.1, t(0.975, 2) = 4.302653.
    samples = [float(np.exp(shift)) for shift in (0.0, 0.1, 0.2) for _ in range(5)]
    half = 4.302653 * 0.1 / 3**0.5
    expected = (np.exp(0.1 - half), np.exp(0.1 + half))
    assert median_interval(samples, process_sizes=(5, 5, 5)) == pytest.approx(expected, rel=2e-3)


def test_what_a_budget_holds_makes_no_process_count_for_more():
    """Each process takes as many samples as its budget holds: a fast one more, of which the median of all would be."""
    rng, alike, pooled = np.random.default_rng(4), [], []
    for _ in range(400):
        times = np.exp(0.5 * rng.standard_normal(3))
        sizes = [max(1, int(4.0 / each)) for each in times]
        samples = [float(each) for each, size in zip(times, sizes, strict=True) for _ in range(size)]
        alike.append(np.log(quartiles(samples, sizes)[1]))
        pooled.append(np.log(quartiles(samples)[1]))
    assert abs(np.mean(alike)) < 3 * 0.5 / (3 * 400) ** 0.5
    assert np.mean(pooled) < -0.15


def test_several_processes_need_positive_samples():
    with pytest.raises(ValueError, match="expected positive samples of several processes; got -1"):
        median_interval([1.0, -1.0], process_sizes=(1, 1))


@pytest.mark.filterwarnings("error")
def test_two_processes_that_tell_nothing_give_a_finite_interval():
    # Student's distribution of one degree of freedom reaches so far that the exponential overflowed.
    low, high = median_interval([0.01, 0.01, 1000.0, 1000.0], process_sizes=(2, 2))
    assert 0 < low < 1e-9
    assert 1e9 < high < np.inf


def test_draws_are_made_once_for_all_samples_of_the_same_sizes(monkeypatch):
    """A folder of 100 000 records has few sizes, and drawing takes ten times as long as all the rest."""
    made, real = [], np.random.default_rng

    def noting(seed):
        made.append(seed)
        return real(seed)

    monkeypatch.setattr(np.random, "default_rng", noting)
    medians._draws.cache_clear()
    rng = np.random.default_rng(3)
    made.clear()
    for _ in range(20):
        median_interval(rng.lognormal(size=33).tolist(), process_sizes=[11, 11, 11])
    assert made == [0]
    curves = [{n: rng.lognormal(size=5).tolist() for n in (16, 32)} for _ in range(2)]
    for curve in curves:
        local_slopes(curve)
        fit_exponent(curve, from_len=1)
        crossover(curve, curves[0])
    assert made == [0, (0, 16), (0, 32), 16, 32]  # those of crossings are of two curves


def test_sizes_that_do_not_add_up_are_refused_of_a_single_sample_too():
    with pytest.raises(ValueError, match="length 16: expected positive sizes that add up to 1 samples; got \\[2\\]"):
        local_slopes({16: [1.0], 32: [2.0]}, {16: [2], 32: [1]})


@pytest.mark.parametrize("sizes", [[7], [8], [1], [3, 4], [1, 1, 1]])
@pytest.mark.parametrize("max_ranks", [medians.MAX_RANKS, 21, 1])
def test_ranks_give_the_medians_of_the_draws(sizes, max_ranks, monkeypatch):
    """How many are drawn at once decides nothing."""
    monkeypatch.setattr(medians, "MAX_RANKS", max_ranks)
    medians._draws.cache_clear()
    rng = np.random.default_rng(5)
    processes = [rng.lognormal(size=size) for size in sizes]
    (draw,) = medians._draws(9, tuple(sizes))
    resampled = medians._resampled_medians(processes, draw)
    again = np.random.default_rng(9)
    drawn = [
        np.median(np.sort(part)[again.integers(0, part.size, size=(medians.NUM_RESAMPLES, part.size))], axis=1)
        for part in processes
    ]
    if len(sizes) == 1:
        assert (resampled == drawn[0]).all()
    else:
        spread = np.log([np.median(part) for part in processes]).std(ddof=1)
        shift = again.permutation(medians._student(len(sizes) - 1)) * spread / len(sizes) ** 0.5
        shift = np.clip(shift, -medians.MAX_SHIFT, medians.MAX_SHIFT)
        assert resampled == pytest.approx(np.exp(np.log(drawn).mean(axis=0) + shift), rel=1e-12)
