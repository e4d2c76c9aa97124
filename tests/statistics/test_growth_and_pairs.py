"""Statistics against known truth: coverage of intervals, exponents with traps in them, crossings placed by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from attn_zoo.statistics.growth import crossover, fit_cost, fit_exponent, local_slopes
from attn_zoo.statistics.medians import median_interval, quartiles, time_ratio, time_summary
from attn_zoo.statistics.paired import interval_of_means, mean_interval, paired_interval

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
positive = st.floats(1e-3, 1e6, allow_nan=False)
sample_lists = st.lists(positive, min_size=1, max_size=12)


def curve(formula, noise=0.0, num=9, lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return {n: list(formula(n) * (1 + noise * rng.standard_normal(num))) for n in lengths}


# Intervals ------------------------------------------------------------------------------------------------------------


def test_quartiles_of_known_samples():
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [math.inf]])
@pytest.mark.parametrize("function", [quartiles, median_interval, mean_interval])
def test_no_sample_or_no_number_is_refused(function, bad):
    with pytest.raises(ValueError, match="finite number"):
        function(bad)


def test_median_interval_covers_the_true_median_about_as_often_as_it_says():
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        low, high = median_interval(list(rng.lognormal(0.0, 0.3, size=30)))
        hits += low <= 1.0 <= high
    assert 180 <= hits <= 199  # 95 % of 200 is 190; the percentile bootstrap of a median is near that


@pytest.mark.parametrize(
    ("count", "rank", "share"), [(2, 1, 0.5), (3, 1, 0.75), (4, 1, 0.875), (5, 1, 0.9375), (7, 2, 0.875)]
)
def test_few_samples_cover_their_median_as_often_as_the_docstring_says(count, rank, share):
    """The samples of these ranks from either end hold it unless fewer than `rank` are on one side: a coin tossed."""
    assert median_interval([float(each + 1) for each in range(count)]) == (rank, count + 1 - rank)
    assert 1 - 2 * stats.binom.cdf(rank - 1, count, 0.5) == pytest.approx(share)


def test_five_lengths_with_noise_keep_the_constant_that_they_show():
    """Were the variance a parameter too, as in the book, three of four fits would miss it."""
    rng, lengths = np.random.default_rng(0), 512 * 2 ** np.arange(5)
    costs = 0.02 + (lengths / lengths[-1]) ** 2
    fits = [fit_cost(lengths.tolist(), (costs * np.exp(0.1 * rng.standard_normal(5))).tolist()) for _ in range(60)]
    assert sum(fit.a > 0 for fit in fits) >= 54


@pytest.mark.parametrize("samples", [[3.0], [3.0] * 7])
def test_identical_samples_give_a_width_of_zero_and_no_nan(samples):
    assert median_interval(samples) == (3.0, 3.0)


@given(sample_lists, st.randoms(use_true_random=False), st.sampled_from([0.25, 2.0, 1024.0]))
def test_median_interval_knows_no_order_and_scales(samples, random, factor):
    low, high = median_interval(samples)
    shuffled = random.sample(samples, len(samples))
    assert median_interval(shuffled) == (low, high)
    assert median_interval([factor * x for x in samples]) == pytest.approx((factor * low, factor * high), rel=1e-12)
    assert min(samples) <= low <= quartiles(samples)[1] <= high <= max(samples)


def test_the_interval_of_means_is_welchs():
    """Beside scipy's test of two means: the half of their difference has the standard error of half their sum."""
    first, second = [0.1, 0.4, 0.2, 0.35], [2.0, 2.9, 2.2]
    test = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    found, alone = interval_of_means([first, second]), mean_interval(first)
    assert found is not None
    assert alone is not None
    low, high = found
    assert high - low == pytest.approx((test.high - test.low) / 2)
    assert (low + high) / 2 == pytest.approx((fmean(first) + fmean(second)) / 2)
    assert interval_of_means([first, [2.0, 2.0]]) == pytest.approx(tuple((end + 2.0) / 2 for end in alone), abs=1e-12)
    assert interval_of_means([[1.0, 1.0], [2.0, 2.0]]) == (1.5, 1.5)
    assert interval_of_means([first, [2.0]]) is None


def test_mean_interval_is_students():
    # t(0.975, 2) = 4.302653; mean 2, standard error 1/sqrt(3).
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), abs=1e-5)
    assert mean_interval([2.0, 2.0]) == (2.0, 2.0)
    assert mean_interval([2.0]) is None


# Pairs ----------------------------------------------------------------------------------------------------------------


def test_equal_models_do_not_differ_and_the_interval_still_has_width():
    low, high = paired_interval("1010", [1, 0, 1, 0])
    assert low == -high < 0


def test_paired_interval_covers():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        both = rng.random(200)
        a, b = (both < 0.70).astype(int), ((both < 0.60) | (both > 0.97)).astype(int)  # truth: 0.70 - 0.63 = 0.07
        low, high = paired_interval(list(a), list(b))
        hits += low <= 0.07 <= high
    assert hits >= 276  # 92 %


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40))
def test_swapping_the_models_turns_the_sign(pairs):
    a, b = ([pair[i] for pair in pairs] for i in (0, 1))
    low, high = paired_interval(a, b)
    assert paired_interval(b, a) == pytest.approx((-high, -low))
    assert -1 <= low < high <= 1


@pytest.mark.parametrize(
    ("a", "b"), [("", ""), ("1", "10"), ("12", "11"), ([0, -1], [0, 1]), ([0, 0.5], [0, 1]), ("1a", "10")]
)
def test_marks_that_cannot_be_compared_are_refused(a, b):
    with pytest.raises(ValueError, match="expected"):
        paired_interval(a, b)


# Growth ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_pure_powers_are_recovered(power):
    samples = curve(lambda n: 3.0 * n**power, noise=0.02)
    assert [(s.low_len, s.high_len) for s in local_slopes(samples)] == list(pairwise(LENGTHS))
    for slope in local_slopes(samples):
        assert slope.slope == pytest.approx(power, abs=0.06)
        assert slope.ci_low <= slope.slope <= slope.ci_high
    assert fit_exponent(samples, from_len=256).value == pytest.approx(power, abs=0.02)


def trap(n):
    """The constant hides the slope: the curve is quadratic in the end, yet looks sublinear over all lengths."""
    return 1.0 + 2e-4 * n + 4e-8 * n * n


def test_the_trap_of_a_constant_is_seen_through():
    samples = curve(trap, noise=0.01)
    assert fit_exponent(samples, from_len=256).value < 0.75  # the naive answer
    slopes = [s.slope for s in local_slopes(samples)]
    assert slopes == sorted(slopes)  # still rising: no asymptote reached
    assert slopes[-1] > 1.05
    fit = fit_cost(LENGTHS, [trap(n) for n in LENGTHS])
    assert (fit.a, fit.b, fit.c) == pytest.approx((1.0, 2e-4, 4e-8), rel=1e-6)
    assert (fit.dominant(256), fit.dominant(8192), fit.dominant(100_000)) == ("constant", "quadratic", "quadratic")


def test_exponent_uses_the_top_decade_by_default():
    samples = curve(lambda n: 1000 + n**2, lengths=(16, 64, 1024, 4096, 8192))
    result = fit_exponent(samples)
    assert result.lengths == (1024, 4096, 8192)
    assert result.value == pytest.approx(2, abs=0.01)


def test_exponent_interval_covers():
    hits = 0
    for seed in range(100):
        result = fit_exponent(curve(lambda n: 2.0 * n, noise=0.1, num=15, seed=seed), from_len=256)
        hits += result.low <= 1.0 <= result.high
    assert hits >= 88


def test_slopes_of_shared_lengths_do_not_depend_on_longer_ones():
    samples = curve(lambda n: n**2, noise=0.1)
    shorter = {n: samples[n] for n in LENGTHS[:3]}
    assert local_slopes(samples)[:2] == local_slopes(shorter)


@given(st.lists(sample_lists, min_size=3, max_size=3), st.sampled_from([0.5, 8.0]))
@settings(deadline=None, max_examples=30)
def test_growth_does_not_depend_on_the_unit_nor_on_order(lists, factor):
    samples = dict(zip((128, 256, 512), lists, strict=True))
    scaled = {n: [factor * x for x in reversed(samples[n])] for n in reversed(samples)}
    for one, other in zip(local_slopes(samples), local_slopes(scaled), strict=True):
        assert (one.slope, one.ci_low, one.ci_high) == pytest.approx(
            (other.slope, other.ci_low, other.ci_high), abs=1e-9
        )
    assert fit_exponent(samples).value == pytest.approx(fit_exponent(scaled).value, abs=1e-9)


@pytest.mark.parametrize("bad", [{256: [1.0], 512: []}, {256: [1.0], 512: [0.0]}, {256: [-1.0], 512: [1.0]}])
def test_samples_without_a_logarithm_are_refused(bad):
    with pytest.raises(ValueError, match="length"):
        local_slopes(bad)


def test_too_few_lengths():
    assert local_slopes({256: [1.0]}) == []
    with pytest.raises(ValueError, match="two lengths"):
        fit_exponent({256: [1.0]})
    with pytest.raises(ValueError, match="three distinct"):
        fit_cost([256, 512], [1.0, 2.0])
    with pytest.raises(ValueError, match="three distinct"):
        fit_cost([256, 256, 512], [1.0, 1.0, 2.0])
    with pytest.raises(ValueError, match="positive"):
        fit_cost([256, 512, 1024], [1.0, 0.0, 2.0])


# The cost model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("true", "terms"),
    [
        ((5.0, 0.0, 0.0), "a"),
        ((0.0, 1e-3, 0.0), "b"),
        ((0.0, 0.0, 1e-6), "c"),
        ((2.0, 1e-3, 0.0), "ab"),
        ((2.0, 0.0, 1e-6), "ac"),
        ((0.0, 1e-3, 1e-6), "bc"),
        ((2.0, 1e-2, 3e-6), "abc"),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_true_form_is_chosen_and_no_other_term_appears(true, terms, noise):
    a, b, c = true
    lengths = [2**k for k in range(6, 15)]
    rng = np.random.default_rng(7)
    values = [(a + b * n + c * n * n) * (1 + noise * rng.standard_normal()) for n in lengths]
    fit = fit_cost(lengths, values)
    assert "".join(name for name, value in zip("abc", (fit.a, fit.b, fit.c), strict=True) if value) == terms
    assert (fit.a, fit.b, fit.c) == pytest.approx(true, rel=max(10 * noise, 1e-6))
    assert fit.relative_rms == pytest.approx(noise, abs=noise + 1e-9)


def test_four_lengths_with_noise_do_not_invent_terms():
    for seed in range(20):
        values = [v[0] for v in curve(lambda n: 1e-6 * n * n, 0.03, 1, (512, 1024, 2048, 4096), seed).values()]
        fit = fit_cost((512, 1024, 2048, 4096), values)
        assert (fit.a, fit.b) == (0.0, 0.0)
        assert fit.c == pytest.approx(1e-6, rel=0.1)


def test_growth_faster_than_quadratic_shows_as_misfit():
    fit = fit_cost(LENGTHS, [float(n) ** 3 for n in LENGTHS])
    assert fit.relative_rms > 0.3
    assert fit.dominant(8192) == "quadratic"


@given(
    st.lists(positive, min_size=6, max_size=6),
    st.permutations(range(6)),
    st.sampled_from([1e-3, 64.0]),
)
def test_fit_does_not_depend_on_order_or_unit(values, order, factor):
    fit = fit_cost(LENGTHS, values)
    other = fit_cost([LENGTHS[i] for i in order], [factor * values[i] for i in order])
    assert min(fit.a, fit.b, fit.c) >= 0
    assert fit.relative_rms == pytest.approx(other.relative_rms, rel=1e-6, abs=1e-9)
    assert (other.a, other.b, other.c) == pytest.approx([factor * term for term in (fit.a, fit.b, fit.c)], rel=1e-6)


# Crossings ------------------------------------------------------------------------------------------------------------


def test_crossing_of_a_line_and_a_parabola():
    # 2000 N = N^2 at N = 2000.
    result = crossover(curve(lambda n: 2000.0 * n, 0.02), curve(lambda n: 1.0 * n * n, 0.02, seed=1))
    assert result.kind == "crosses"
    assert result.length == pytest.approx(2000, rel=0.05)
    assert result.low is not None
    assert result.high is not None
    assert result.low <= 2000 <= result.high
    assert result.support == 1.0
    assert result.lengths == LENGTHS


def test_never_and_always():
    slow, fast = curve(lambda n: 2.0 * n), curve(lambda n: 1.0 * n)
    never, always = crossover(slow, fast), crossover(fast, slow)
    assert (never.kind, never.length, never.low, never.high) == ("never_in_range", None, None, None)
    assert (always.kind, always.length, always.low, always.high) == ("always_faster", None, None, None)
    assert never.support == always.support == 1.0
    assert crossover(fast, fast).kind == "never_in_range"  # equal is not faster


def test_the_last_crossing_counts():
    ratios = {256: 0.5, 512: 2.0, 1024: 0.5, 2048: 2.0, 4096: 0.5, 8192: 0.4}
    result = crossover({n: [r] for n, r in ratios.items()}, {n: [1.0] for n in ratios})
    assert result.length == pytest.approx(2048 * 2**0.5)
    ends_slower = crossover({n: [1 / r] for n, r in ratios.items()}, {n: [1.0] for n in ratios})
    assert ends_slower.kind == "never_in_range"


def test_an_open_end_is_none():
    """At the longest length the two are equal within noise, so some resamples never cross."""
    rng = np.random.default_rng(0)
    x = {256: [2.0] * 20, 512: list(rng.normal(0.99, 0.1, 20))}
    result = crossover(x, {256: [1.0], 512: [1.0]})
    assert result.kind == "crosses"
    assert result.high is None
    assert result.low is not None
    assert 256 < result.low < 512
    assert 0.5 < result.support < 1.0


def test_only_common_lengths_count():
    result = crossover({128: [9.0], 256: [2.0], 512: [1.0]}, {256: [1.0], 512: [2.0], 1024: [3.0]})
    assert result.lengths == (256, 512)
    assert result.length == pytest.approx(256 * 2**0.5)
    with pytest.raises(ValueError, match="in common"):
        crossover({128: [1.0]}, {256: [1.0]})


def test_a_crossover_of_pairs_forgets_what_slowed_both():
    """x is a tenth dearer at 256 and cheaper at 1024 in every round, while rounds differ by a factor of nine."""
    rounds = [1.0, 9.0, 3.0, 1.0, 8.0, 2.0]
    baseline = {256: rounds, 1024: [*rounds, 7.0]}
    x = {256: [1.1 * ms for ms in rounds], 1024: [ms / 1.1 for ms in rounds]}
    sizes = {256: (3, 3), 1024: (3, 3)}
    paired = crossover(x, baseline, paired=(256, 1024))
    assert paired.length == pytest.approx(512.0)
    assert [paired.low, paired.high, paired.support] == pytest.approx([512.0, 512.0, 1.0])
    assert crossover(x, {**baseline, 1024: rounds}, sizes_x=sizes, sizes_baseline=sizes, paired=x).length == (
        pytest.approx(512.0)
    )
    alone = crossover(x, baseline)
    assert (alone.low, alone.high) == (None, None)
    with pytest.raises(ValueError, match="as many processes; got 2 and 1"):
        crossover(x, {**baseline, 1024: rounds}, sizes_x=sizes, paired=x)


@given(st.lists(sample_lists, min_size=4, max_size=4), st.lists(sample_lists, min_size=4, max_size=4))
@settings(deadline=None, max_examples=50)
def test_crossover_lies_in_range_and_ignores_the_unit(lists_x, lists_baseline):
    x, baseline = (dict(zip((64, 128, 256, 512), lists, strict=True)) for lists in (lists_x, lists_baseline))
    result = crossover(x, baseline)
    scaled = crossover(
        {n: [4.0 * v for v in s] for n, s in x.items()}, {n: [4.0 * v for v in s] for n, s in baseline.items()}
    )
    assert result.kind == scaled.kind
    if result.length is not None:
        assert 64 <= result.length <= 512
        assert scaled.length == pytest.approx(result.length, rel=1e-5)
    for end in (result.low, result.high):
        assert end is None or 64 - 1e-6 <= end <= 512 + 1e-6


# Several processes, and pairs by round --------------------------------------------------------------------------------


def in_processes(rng, num=3, size=12, spread=0.0, noise=0.05):
    """Return samples around 10, each process with a shift of its own, and their sizes."""
    parts = [10 * (1 + spread * rng.standard_normal()) * (1 + noise * rng.standard_normal(size)) for _ in range(num)]
    return list(np.concatenate(parts)), [size] * num


def test_the_interval_covers_what_differs_between_processes():
    samples, sizes = [10.0] * 40 + [12.0] * 40 + [13.0] * 40, (40, 40, 40)
    low, high = median_interval(samples, process_sizes=sizes)
    assert low < 10.0
    assert high > 13.0
    assert median_interval(samples) == (12.0, 12.0), "one pool of samples hides it"
    assert median_interval([5.0] * 6, process_sizes=(2, 4)) == pytest.approx((5.0, 5.0))


def test_all_processes_count_alike_however_many_samples_they_took():
    """A fast process takes more samples in its budget; the median of all would be its."""
    samples, sizes = [8.0] * 2 + [8.0] * 2 + [1.0] * 5, (2, 2, 5)
    assert quartiles(samples)[1] == 1.0
    assert quartiles(samples, sizes) == pytest.approx((4.0, 4.0, 4.0))
    found = time_summary(samples, sizes)
    assert found["median_ms"] == pytest.approx(4.0)
    assert found["low_ms"] * found["high_ms"] == pytest.approx(16.0, rel=1e-3), "the interval is about it"
    assert time_ratio(samples, [1.0], is_paired=False, sizes_a=sizes).value == pytest.approx(4.0)
    fit = fit_exponent({512: samples, 1024: [2 * x for x in samples]}, sizes={512: (9,), 1024: sizes})
    assert fit.value == pytest.approx(3.0), "1 to 8"


def test_one_process_is_the_plain_interval_and_the_order_within_a_process_does_not_matter():
    rng = np.random.default_rng(0)
    samples, sizes = in_processes(rng, spread=0.1)
    assert median_interval(samples, process_sizes=(len(samples),)) == median_interval(samples)
    shuffled = list(np.concatenate([rng.permutation(part) for part in np.split(np.array(samples), 3)]))
    assert median_interval(shuffled, process_sizes=sizes) == median_interval(samples, process_sizes=sizes)


@pytest.mark.parametrize("sizes", [(3, 3), (4, -1), (3, 0), (2,)])
def test_sizes_must_add_up(sizes):
    with pytest.raises(ValueError, match="expected positive sizes that add up to 3 samples"):
        median_interval([1.0, 2.0, 3.0], process_sizes=sizes)


def test_pairs_remove_what_slowed_both():
    rng = np.random.default_rng(2)
    weather = np.exp(0.5 * rng.standard_normal(40))  # of the machine, round by round
    a, b = 2 * weather * (1 + 0.01 * rng.standard_normal(40)), weather * (1 + 0.01 * rng.standard_normal(40))
    paired = time_ratio(list(a), list(b), is_paired=True)
    unpaired = time_ratio(list(a), list(b), is_paired=False)
    assert paired.low <= 2 <= paired.high
    assert paired.high - paired.low < 0.05 < unpaired.high - unpaired.low
    assert unpaired.low <= 2 <= unpaired.high
    assert (paired.num_pairs, unpaired.num_pairs) == (40, 0)


def test_pairs_are_those_of_the_same_process_and_round():
    a, b = [2.0, 20.0, 3.0, 30.0, 300.0], [1.0, 10.0, 100.0, 1.0, 10.0]
    found = time_ratio(a, b, is_paired=True, sizes_a=(2, 3), sizes_b=(3, 2))
    assert found.num_pairs == 2 + 2
    assert found.value == pytest.approx(6**0.5), "2 and 2, 3 and 3; the third rounds of either process are no pairs"
    assert found.low < 2.0
    assert found.high > 3.0, "two processes: Student's t has one degree of freedom"
    backwards = time_ratio(b, a, is_paired=True, sizes_a=(3, 2), sizes_b=(2, 3))
    assert backwards.value == pytest.approx(1 / found.value)
    with pytest.raises(ValueError, match="expected pairs of as many processes; got 2 and 1"):
        time_ratio(a, b, is_paired=True, sizes_a=(2, 3))


@given(sample_lists, sample_lists, st.booleans())
@settings(deadline=None, max_examples=30)
def test_a_ratio_lies_in_its_interval_and_turns_round_with_its_sides(a, b, is_paired):
    found = time_ratio(a, b, is_paired=is_paired)
    assert found.low <= found.value * (1 + 1e-9)
    assert found.value <= found.high * (1 + 1e-9)
    assert found == time_ratio(a, b, is_paired=is_paired), "seeded"
    scaled = time_ratio([4 * x for x in a], b, is_paired=is_paired)
    assert scaled.value == pytest.approx(4 * found.value)


@pytest.mark.parametrize("bad", [[0.0], [-1.0], [math.nan], []])
def test_a_ratio_needs_positive_samples(bad):
    for pair in ((bad, [1.0]), ([1.0], bad)):
        with pytest.raises(ValueError, match=r"positive|expected at least 1"):
            time_ratio(*pair, is_paired=False)
