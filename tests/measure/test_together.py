"""Turns: every member in every round, in an order drawn anew, each until its own budget is spent."""

from __future__ import annotations

import pytest

from attn_zoo.measure.timing import Sampling
from attn_zoo.measure.together import sample_in_turns
from tests.measure.fake_clock import FakeCall, FakeClock


def members(clock: FakeClock, *costs_ms: float, **changes) -> list[Sampling]:
    made = [
        Sampling(FakeCall(clock, [cost]), stopwatch=clock.stopwatch(), **{"budget_s": 0.1, **changes})
        for cost in costs_ms
    ]
    for sampling in made:
        sampling.begin()
        sampling.warm_up()
    return made


def nobody(index: int, error: BaseException) -> None:
    raise AssertionError(f"member {index} failed: {error}")


def test_every_round_has_every_member_once_until_its_budget_is_spent():
    clock, order = FakeClock(), list[int]()
    fast, slow = members(clock, 5.0, 20.0)
    sample_in_turns([fast, slow], at=order.append, failed=nobody)
    assert [len(fast.timing().samples_ms), len(slow.timing().samples_ms)] == [20, 5]
    for number in range(5):
        assert sorted(order[2 * number : 2 * number + 2]) == [0, 1], "both, once"
    assert order[10:] == [0] * 15, "the slower one has spent its budget and left"


def test_the_order_is_drawn_anew_in_each_round_and_the_same_for_the_same_seed():
    def order(seed: int) -> list[int]:
        seen: list[int] = []
        sample_in_turns(members(FakeClock(), *[10.0] * 3, max_samples=20), seed=seed, at=seen.append, failed=nobody)
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
    sample_in_turns(made, at=lambda _: None, failed=nobody)
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
    sample_in_turns([breaking, fine], at=lambda _: None, failed=lambda index, found: failures.append((index, found)))
    assert failures == [(0, error)]
    assert len(fine.timing().samples_ms) == 10


def test_ctrl_c_is_passed_on():
    clock = FakeClock()
    breaking = Sampling(Breaks(clock, 8, KeyboardInterrupt()), stopwatch=clock.stopwatch(), budget_s=0.1)
    breaking.begin()
    breaking.warm_up()
    with pytest.raises(KeyboardInterrupt):
        sample_in_turns([breaking], at=lambda _: None, failed=nobody)


def test_nobody_is_nothing_to_do():
    sample_in_turns([], at=lambda _: None, failed=nobody)


def test_the_first_call_gives_its_result_away():
    sampling = Sampling(lambda: 42, budget_s=0.01)
    assert sampling.begin() == 42
