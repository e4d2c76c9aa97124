"""Timing under a clock that moves only when told to: every number is exact."""

from __future__ import annotations

import gc
import weakref

import pytest

from attn_zoo.measure.timing import MIN_WARMUP_CALLS, time_callable
from tests.measure.fake_clock import FakeCall, FakeClock


@pytest.fixture
def clock():
    return FakeClock()


def test_a_constant_cost_is_measured_exactly(clock):
    timing = time_callable(FakeCall(clock, [10.0]), budget_s=0.2, stopwatch=clock.stopwatch())
    assert timing.samples_ms == pytest.approx([10.0] * 20)
    assert (timing.median_ms, timing.q1_ms, timing.q3_ms) == pytest.approx((10.0, 10.0, 10.0))
    assert (timing.low_ms, timing.high_ms) == pytest.approx((10.0, 10.0))
    assert timing.process_cpu_ms == pytest.approx(10.0)
    assert (timing.inner_loops, timing.timer, timing.flags) == (1, "perf_counter", ())


def test_twice_the_work_takes_twice_as_long(clock):
    one, two = (
        time_callable(FakeCall(clock, [cost]), stopwatch=clock.stopwatch()).median_ms for cost in (0.003, 0.006)
    )
    assert two / one == pytest.approx(2.0)


def test_first_call_and_warm_up_stay_out_of_the_samples(clock):
    call = FakeCall(clock, [500.0, 40.0, 20.0, 12.0, 8.0])
    timing = time_callable(call, stopwatch=clock.stopwatch())
    assert timing.first_ms == pytest.approx(500.0)
    assert timing.samples_ms == pytest.approx([8.0] * len(timing.samples_ms))
    assert timing.num_warmup >= MIN_WARMUP_CALLS
    assert call.num_calls == timing.num_warmup + len(timing.samples_ms) * timing.inner_loops


def test_compilation_longer_than_the_budget_does_not_count_as_a_slow_call(clock):
    timing = time_callable(FakeCall(clock, [20_000.0, 10.0]), budget_s=1.0, stopwatch=clock.stopwatch())
    assert timing.first_ms == pytest.approx(20_000.0)
    assert timing.median_ms == pytest.approx(10.0)
    assert timing.flags == ()
    assert len(timing.samples_ms) == 50


def test_warm_up_goes_on_until_calls_no_longer_get_faster(clock):
    getting_faster = [100.0 * 0.7**i for i in range(12)] + [1.0]
    timing = time_callable(FakeCall(clock, getting_faster), budget_s=10.0, stopwatch=clock.stopwatch())
    assert timing.samples_ms == pytest.approx([1.0] * len(timing.samples_ms))
    assert timing.num_warmup >= len(getting_faster)
    assert timing.flags == ()


def test_restless_times_are_unstable(clock):
    timing = time_callable(FakeCall(clock, [10.0, 14.0] * 500), stopwatch=clock.stopwatch())
    assert timing.flags == ("unsteady_warmup", "unstable")
    assert (timing.q1_ms, timing.q3_ms) == pytest.approx((10.0, 14.0))


def test_warm_up_that_never_settles_is_flagged(clock):
    # The fastest warm-up call is the first; every later one is twice as slow.
    timing = time_callable(FakeCall(clock, [1.0, 10.0, 20.0]), budget_s=0.5, stopwatch=clock.stopwatch())
    assert "unsteady_warmup" in timing.flags


@pytest.mark.parametrize(("cost_ms", "loops"), [(0.001, 2000), (0.4, 5), (1.5, 2), (2.0, 1), (7.0, 1)])
def test_samples_are_filled_and_divided_by_their_loops(clock, cost_ms, loops):
    timing = time_callable(FakeCall(clock, [cost_ms]), min_sample_ms=2.0, stopwatch=clock.stopwatch())
    assert timing.inner_loops == loops
    assert timing.median_ms == pytest.approx(cost_ms)
    assert timing.process_cpu_ms == pytest.approx(cost_ms)
    assert "too_short" not in timing.flags


def test_loops_are_corrected_when_a_single_call_looked_dearer_than_it_is(clock):
    """Warm-up calls cost 1 ms, calls in the loops 0.1 ms: two per sample would be too few."""
    call = FakeCall(clock, [1.0] * 26 + [0.1])
    timing = time_callable(call, min_sample_ms=2.0, stopwatch=clock.stopwatch())
    assert timing.inner_loops == 20
    assert timing.flags == ()


def test_a_call_nobody_can_see_is_too_short(clock):
    timing = time_callable(lambda: None, stopwatch=clock.stopwatch())
    assert "too_short" in timing.flags


def test_budget_decides_the_number_of_samples(clock):
    for budget_s, expected in ((0.01, 5), (0.10, 10), (0.25, 25), (9.0, 50)):
        call = FakeCall(clock, [10.0])
        timing = time_callable(call, budget_s=max(budget_s, 0.0101), stopwatch=clock.stopwatch())
        assert len(timing.samples_ms) == expected
        assert "few_samples" not in timing.flags


def test_a_call_beyond_the_budget_runs_three_times_in_all(clock):
    call = FakeCall(clock, [3000.0, 2900.0, 2800.0])
    timing = time_callable(call, budget_s=1.0, stopwatch=clock.stopwatch())
    assert call.num_calls == 3
    assert timing.samples_ms == pytest.approx((2900.0, 2800.0))
    assert timing.num_warmup == 1
    assert timing.flags == ("few_samples",)


def test_outliers_and_waiting_are_flagged(clock):
    with_outlier = time_callable(FakeCall(clock, [10.0] * 10 + [16.0] + [10.0]), stopwatch=clock.stopwatch())
    assert with_outlier.flags == ("outliers",)
    waiting = time_callable(FakeCall(clock, [10.0], cpu_frac=0.5), stopwatch=clock.stopwatch())
    assert waiting.flags == ("waiting",)
    assert waiting.process_cpu_ms == pytest.approx(5.0)
    two_threads = time_callable(FakeCall(clock, [10.0], cpu_frac=2.0), stopwatch=clock.stopwatch())
    assert two_threads.flags == ()


@pytest.mark.parametrize("cost_ms", [0.1, 10.0])
def test_setup_runs_before_every_call_and_is_not_timed(clock, cost_ms):
    order: list[str] = []
    call = FakeCall(clock, [cost_ms])

    def setup() -> None:
        order.append("setup")
        clock.spend(3.0)

    def timed() -> None:
        order.append("call")
        call()

    timing = time_callable(timed, setup=setup, budget_s=0.1, stopwatch=clock.stopwatch())
    assert timing.median_ms == pytest.approx(cost_ms)
    assert timing.process_cpu_ms == pytest.approx(cost_ms)
    assert order == ["setup", "call"] * call.num_calls


def test_the_collector_rests_during_samples_and_cycles_do_not_pile_up(clock):
    class Big:
        me: Big

    alive: weakref.WeakSet[Big] = weakref.WeakSet()
    enabled: list[bool] = []
    most = 0

    def call() -> None:
        nonlocal most
        big = Big()
        big.me = big
        alive.add(big)
        most = max(most, len(alive))
        enabled.append(gc.isenabled())
        clock.spend(10.0)

    num_frozen = gc.get_freeze_count()
    timing = time_callable(call, stopwatch=clock.stopwatch())
    assert gc.isenabled()
    assert gc.get_freeze_count() == num_frozen
    assert not any(enabled[timing.num_warmup :])
    assert most <= timing.num_warmup + 2


def test_the_collector_is_on_again_after_an_error(clock):
    remaining = iter([10.0] * 6)

    def call() -> None:
        clock.spend(next(remaining))

    with pytest.raises(StopIteration):
        time_callable(call, stopwatch=clock.stopwatch())
    assert gc.isenabled()


@pytest.mark.parametrize(
    "bad",
    [{"budget_s": 0.0}, {"budget_s": float("nan")}, {"min_samples": 0}, {"max_samples": 4}, {"min_sample_ms": -1.0}],
)
def test_numbers_without_sense_are_refused(bad):
    with pytest.raises(ValueError, match="expected budget_s"):
        time_callable(lambda: None, **bad)


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="cpu or cuda"):
        time_callable(lambda: None, device="meta")


def test_real_clock_sees_work_that_grows_tenfold():
    """Sanity only, with room for a busy machine: the minimum of the samples, and a factor of two either way."""

    def work(count: int) -> None:
        for _ in range(count):
            pass

    small, large = (
        min(time_callable(lambda: work(count), budget_s=0.1).samples_ms)  # noqa: B023 (called at once)
        for count in (20_000, 200_000)
    )
    assert 5 < large / small < 20
