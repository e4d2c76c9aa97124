"""Timing under a clock that moves only when told to: every number is exact, by itself and in turns with others."""

from __future__ import annotations

import gc
import time
import weakref

import pytest

from attn_zoo.measure.stopwatch import Sample, stopwatch_for
from attn_zoo.measure.timing import MIN_WARMUP_CALLS, Sampling, quiet_collector, sample_in_turns
from tests.measure.fake_clock import FakeCall, FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture(params=[False, True])
def frozen_before(request, monkeypatch):
    """Whether what the process has loaded is frozen, as in a worker.

    What is frozen is really thawed here; other tests are better off without. All is frozen again in the end.
    """
    monkeypatch.setattr("attn_zoo.measure.timing.gc", gc)
    (gc.freeze if request.param else gc.unfreeze)()
    yield request.param
    gc.freeze()


def test_a_constant_cost_is_measured_exactly(clock):
    timing = Sampling(FakeCall(clock, [10.0]), budget_s=0.2, stopwatch=clock.stopwatch()).run()
    assert timing.samples_ms == pytest.approx([10.0] * 20)
    assert (timing.median_ms, timing.q1_ms, timing.q3_ms) == pytest.approx((10.0, 10.0, 10.0))
    assert (timing.low_ms, timing.high_ms) == pytest.approx((10.0, 10.0))
    assert timing.process_cpu_ms == pytest.approx(10.0)
    assert (timing.inner_loops, timing.timer, timing.flags) == (1, "perf_counter", ())


def test_twice_the_work_takes_twice_as_long(clock):
    one, two = (
        Sampling(FakeCall(clock, [cost]), stopwatch=clock.stopwatch()).run().median_ms for cost in (0.003, 0.006)
    )
    assert two / one == pytest.approx(2.0)


def test_first_call_and_warm_up_stay_out_of_the_samples(clock):
    call = FakeCall(clock, [500.0, 40.0, 20.0, 12.0, 8.0])
    timing = Sampling(call, stopwatch=clock.stopwatch()).run()
    assert timing.first_ms == pytest.approx(500.0)
    assert timing.samples_ms == pytest.approx([8.0] * len(timing.samples_ms))
    assert timing.num_warmup >= MIN_WARMUP_CALLS
    assert call.num_calls == timing.num_warmup + len(timing.samples_ms) * timing.inner_loops


def test_compilation_longer_than_the_budget_does_not_count_as_a_slow_call(clock):
    timing = Sampling(FakeCall(clock, [20_000.0, 10.0]), budget_s=1.0, stopwatch=clock.stopwatch()).run()
    assert timing.first_ms == pytest.approx(20_000.0)
    assert timing.median_ms == pytest.approx(10.0)
    assert timing.flags == ()
    assert len(timing.samples_ms) == 50


def test_warm_up_goes_on_until_calls_no_longer_get_faster(clock):
    getting_faster = [100.0 * 0.7**i for i in range(12)] + [1.0]
    timing = Sampling(FakeCall(clock, getting_faster), budget_s=10.0, stopwatch=clock.stopwatch()).run()
    assert timing.samples_ms == pytest.approx([1.0] * len(timing.samples_ms))
    assert timing.num_warmup >= len(getting_faster)
    assert timing.flags == ()


def test_restless_times_are_unstable(clock):
    timing = Sampling(FakeCall(clock, [10.0, 14.0] * 500), stopwatch=clock.stopwatch()).run()
    assert timing.flags == ("unsteady_warmup", "unstable")
    assert (timing.q1_ms, timing.q3_ms) == pytest.approx((10.0, 14.0))


def test_warm_up_that_never_settles_is_flagged(clock):
    # The fastest warm-up call is the first; every later one is twice as slow.
    timing = Sampling(FakeCall(clock, [1.0, 10.0, 20.0]), budget_s=0.5, stopwatch=clock.stopwatch()).run()
    assert "unsteady_warmup" in timing.flags


@pytest.mark.parametrize(("cost_ms", "loops"), [(0.001, 2000), (0.4, 5), (1.5, 2), (2.0, 1), (7.0, 1)])
def test_samples_are_filled_and_divided_by_their_loops(clock, cost_ms, loops):
    timing = Sampling(FakeCall(clock, [cost_ms]), min_sample_ms=2.0, stopwatch=clock.stopwatch()).run()
    assert timing.inner_loops == loops
    assert timing.median_ms == pytest.approx(cost_ms)
    assert timing.process_cpu_ms == pytest.approx(cost_ms)
    assert "too_short" not in timing.flags


def test_loops_are_corrected_when_a_single_call_looked_dearer_than_it_is(clock):
    """Warm-up calls cost 1 ms, calls in the loops 0.1 ms: two per sample would be too few."""
    call = FakeCall(clock, [1.0] * 26 + [0.1])
    timing = Sampling(call, min_sample_ms=2.0, stopwatch=clock.stopwatch()).run()
    assert timing.inner_loops == 20
    assert timing.flags == ()


def test_a_call_below_the_resolution_is_too_short(clock):
    timing = Sampling(lambda: None, stopwatch=clock.stopwatch()).run()
    assert "too_short" in timing.flags


def test_budget_decides_the_number_of_samples(clock):
    for budget_s, expected in ((0.01, 5), (0.10, 10), (0.25, 25), (9.0, 50)):
        call = FakeCall(clock, [10.0])
        timing = Sampling(call, budget_s=max(budget_s, 0.0101), stopwatch=clock.stopwatch()).run()
        assert len(timing.samples_ms) == expected
        assert "few_samples" not in timing.flags


def test_a_call_beyond_the_budget_runs_three_times_in_all(clock):
    call = FakeCall(clock, [3000.0, 2900.0, 2800.0])
    timing = Sampling(call, budget_s=1.0, stopwatch=clock.stopwatch()).run()
    assert call.num_calls == 3
    assert timing.samples_ms == pytest.approx((2900.0, 2800.0))
    assert timing.num_warmup == 1
    assert timing.flags == ("few_samples",)


def test_outliers_and_waiting_are_flagged(clock):
    with_outlier = Sampling(FakeCall(clock, [10.0] * 10 + [16.0] + [10.0]), stopwatch=clock.stopwatch()).run()
    assert with_outlier.flags == ("outliers",)
    waiting = Sampling(FakeCall(clock, [10.0], cpu_frac=0.5), stopwatch=clock.stopwatch()).run()
    assert waiting.flags == ("waiting",)
    assert waiting.process_cpu_ms == pytest.approx(5.0)
    two_threads = Sampling(FakeCall(clock, [10.0], cpu_frac=2.0), stopwatch=clock.stopwatch()).run()
    assert two_threads.flags == ()


def test_samples_say_that_they_waited_before_they_are_summed(clock):
    """As the flag does, and never where the stopwatch cannot tell, as on a GPU."""
    for cpu_frac, is_waiting in ((0.89, True), (0.91, False), (2.0, False)):
        sampling = Sampling(FakeCall(clock, [10.0], cpu_frac), stopwatch=clock.stopwatch())
        assert not sampling.is_waiting, "no samples"
        assert sampling.run().flags == (("waiting",) if is_waiting else ())
        assert sampling.is_waiting == is_waiting
        sampling.discard()
        assert not sampling.is_waiting
    watch = clock.stopwatch()
    taken = watch.take
    watch.take = lambda *args, **how: [Sample(one.wall_s) for one in taken(*args, **how)]
    untold = Sampling(FakeCall(clock, [10.0], cpu_frac=0.0), stopwatch=watch)
    assert (untold.run().flags, untold.is_waiting) == ((), False)


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

    timing = Sampling(timed, setup=setup, budget_s=0.1, stopwatch=clock.stopwatch()).run()
    assert timing.median_ms == pytest.approx(cost_ms)
    assert timing.process_cpu_ms == pytest.approx(cost_ms)
    assert order == ["setup", "call"] * call.num_calls


def test_the_collector_rests_during_samples_and_cycles_do_not_pile_up(clock, frozen_before):
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

    assert (gc.get_freeze_count() > 0) == frozen_before
    timing = Sampling(call, stopwatch=clock.stopwatch()).run()
    assert gc.isenabled()
    assert not any(enabled[timing.num_warmup :])
    assert most <= timing.num_warmup + 2


def test_what_is_timed_is_freed_when_it_is_no_longer_used(frozen_before):
    class Cycle:
        def __init__(self):
            self.itself = self

    cycle = Cycle()
    freed = weakref.ref(cycle)
    with quiet_collector():
        assert gc.get_freeze_count() > 0
    del cycle
    gc.collect()
    assert freed() is None


def test_the_collector_is_on_again_after_an_error(clock):
    remaining = iter([10.0] * 6)

    def call() -> None:
        clock.spend(next(remaining))

    with pytest.raises(StopIteration):
        Sampling(call, stopwatch=clock.stopwatch()).run()
    assert gc.isenabled()


@pytest.mark.parametrize(
    "bad",
    [{"budget_s": 0.0}, {"budget_s": float("nan")}, {"min_samples": 0}, {"max_samples": 4}, {"min_sample_ms": -1.0}],
)
def test_numbers_without_sense_are_refused(bad):
    with pytest.raises(ValueError, match="expected budget_s"):
        Sampling(lambda: None, stopwatch=FakeClock().stopwatch(), **bad).run()


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="cpu or cuda"):
        stopwatch_for("meta")


def test_the_real_clock_sees_no_less_than_a_call_sleeps_and_no_more_than_passes():
    """Both bounds hold on a busy machine too."""
    began = time.perf_counter()
    timing = Sampling(lambda: time.sleep(0.003), budget_s=0.05, stopwatch=stopwatch_for("cpu")).run()
    passed_ms = 1e3 * (time.perf_counter() - began)
    assert min(timing.samples_ms) >= 3.0
    assert timing.first_ms + timing.inner_loops * sum(timing.samples_ms) <= passed_ms


# --- in turns ---


def members(clock: FakeClock, *costs_ms: float, **changes) -> list[Sampling]:
    made = [
        Sampling(FakeCall(clock, [cost]), stopwatch=clock.stopwatch(), **{"budget_s": 0.1, **changes})
        for cost in costs_ms
    ]
    for sampling in made:
        sampling.begin()
        sampling.warm_up()
    return made


def unexpected(index: int, error: BaseException) -> None:
    raise AssertionError(f"member {index} failed: {error}")


def test_every_round_has_every_member_once_until_its_budget_is_spent():
    clock, order = FakeClock(), list[int]()
    fast, slow = members(clock, 5.0, 20.0)
    sample_in_turns([fast, slow], at=order.append, failed=unexpected)
    assert [len(fast.timing().samples_ms), len(slow.timing().samples_ms)] == [20, 5]
    for number in range(5):
        assert sorted(order[2 * number : 2 * number + 2]) == [0, 1], "both, once"
    assert order[10:] == [0] * 15, "the slower one has spent its budget and left"


def test_a_member_beyond_its_budget_has_the_samples_of_the_first_rounds_too():
    clock, starts = FakeClock(), dict[int, list[float]]({0: [], 1: []})
    made = members(clock, 5.0, 200.0)
    sample_in_turns(made, at=lambda index: starts[index].append(1e-6 * clock.wall_ns), failed=unexpected)
    assert len(starts[1]) == len(made[1].timing().samples_ms) == 2, "one sample in each of its rounds"
    assert made[1].timing().num_warmup == 2
    sample_in_turns([alone := members(FakeClock(), 200.0)[0]], at=lambda _: None, failed=unexpected)
    assert (alone.timing().num_warmup, len(alone.timing().samples_ms)) == (1, 2)


def test_the_order_is_drawn_anew_in_each_round_and_the_same_for_the_same_seed():
    def order(seed: int) -> list[int]:
        seen: list[int] = []
        sample_in_turns(members(FakeClock(), *[10.0] * 3, max_samples=20), seed=seed, at=seen.append, failed=unexpected)
        return seen

    first = order(1)
    rounds = {tuple(first[start : start + 3]) for start in range(0, len(first), 3)}
    assert len(rounds) > 1
    assert order(1) == first
    assert order(2) != first


def test_a_slow_spell_of_the_machine_hits_the_same_rounds_of_all():
    clock = FakeClock()
    spell = [10.0] * 7 + [30.0] * 4 + [10.0]  # from the seventh call on, for four calls: in both alike
    made = [Sampling(FakeCall(clock, spell), stopwatch=clock.stopwatch(), budget_s=0.2) for _ in range(2)]
    for sampling in made:
        sampling.begin()
        sampling.warm_up()
    sample_in_turns(made, at=lambda _: None, failed=unexpected)
    first, second = (sampling.timing().samples_ms for sampling in made)
    assert first == pytest.approx(second)
    assert max(first) == pytest.approx(30.0)


class Breaks(FakeCall):
    """Raises at its n-th call."""

    def __init__(self, clock: FakeClock, at_call: int, error: BaseException) -> None:
        super().__init__(clock, [10.0])
        self._at_call, self._error = at_call, error

    def __call__(self) -> None:
        super().__call__()
        if self.num_calls == self._at_call:
            raise self._error


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3), MemoryError()])
def test_a_member_that_raises_leaves_and_the_others_go_on(error):
    clock, failures = FakeClock(), []
    breaking = Sampling(Breaks(clock, 8, error), stopwatch=clock.stopwatch(), budget_s=0.1)
    breaking.begin()
    breaking.warm_up()
    fine = members(clock, 10.0)[0]
    sample_in_turns([breaking, fine], at=lambda _: None, failed=lambda index, error: failures.append((index, error)))
    assert failures == [(0, error)]
    assert len(fine.timing().samples_ms) == 10


def test_ctrl_c_is_passed_on():
    clock = FakeClock()
    breaking = Sampling(Breaks(clock, 8, KeyboardInterrupt()), stopwatch=clock.stopwatch(), budget_s=0.1)
    breaking.begin()
    breaking.warm_up()
    with pytest.raises(KeyboardInterrupt):
        sample_in_turns([breaking], at=lambda _: None, failed=unexpected)


def test_no_members_take_no_samples():
    sample_in_turns([], at=lambda _: None, failed=unexpected)


def test_the_first_call_gives_its_result_away():
    sampling = Sampling(lambda: 42, budget_s=0.01, stopwatch=stopwatch_for("cpu"))
    assert sampling.begin() == 42
