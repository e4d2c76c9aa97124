"""Samples that something else disturbed are taken again within a budget, and never mixed with those that stay."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from attn_zoo.matrix.cell import conditions as conditions_module
from attn_zoo.matrix.cell import trial
from attn_zoo.matrix.cell.conditions import Conditions
from attn_zoo.matrix.drive.progress import describe
from attn_zoo.measure.energy import Clocks
from attn_zoo.measure.timing import Sampling
from tests.matrix.conftest import run_cell, run_cells_in_turns, tiny_plan

BUDGET_S = 0.2


@pytest.fixture
def disturbed(monkeypatch):
    """Return a function that plants what each block of samples meets, and a list with how many are left after each.

    How long the samples took says nothing here: a machine that tests elsewhere as well takes them slowly.
    """
    monkeypatch.setattr(trial, "RETAKEN_S", (0.0, math.inf))
    monkeypatch.setattr(Sampling, "is_waiting", False)

    def plant(*blocks: tuple[str, ...]) -> list[int]:
        waiting, left = list(blocks), []

        class Planted(Conditions):
            def __exit__(self, *exc: object) -> None:
                super().__exit__(*exc)
                self.flags = waiting.pop(0)
                left.append(len(waiting))

        monkeypatch.setattr(trial, "Conditions", Planted)
        return left

    return plant


def cell(name="full", **changes):
    return tiny_plan([name], seq_len=[16], passes=["fwd"], **changes).cells[0].cell


def test_disturbed_samples_are_taken_again_and_thrown_away(disturbed, monkeypatch):
    taken: list[list[float]] = []
    discard = Sampling.discard

    def note(sampling: Sampling) -> None:
        taken.append([one.wall_s for one in sampling._samples])
        discard(sampling)

    monkeypatch.setattr(Sampling, "discard", note)
    left = disturbed(("loaded_host",), ())
    record = run_cell(cell(), budget_s=BUDGET_S)
    assert left == [1, 0]
    assert record.timing is not None
    assert "loaded_host" not in record.timing.flags
    assert record.timing.num_discarded == len(taken[0]) >= 2
    thrown = tuple(1e3 * wall_s / record.timing.inner_loops for wall_s in taken[0])
    assert record.timing.samples_ms[: len(thrown)] != thrown
    assert len(record.timing.samples_ms) <= 50, "those of one taking"


def test_what_is_always_disturbed_stays_flagged_with_the_last_samples_only(disturbed):
    left = disturbed(("loaded_host",), ("other_gpu_process",), ("clock_changed",))
    record = run_cell(cell(), budget_s=BUDGET_S)
    assert left == [2, 1, 0]
    assert record.timing is not None
    assert record.timing.flags[-1] == "clock_changed"
    assert "loaded_host" not in record.timing.flags
    assert record.timing.num_discarded > 0
    assert describe(record).endswith("clock changed")
    assert "doubtful: " in describe(record)


@pytest.mark.parametrize(
    ("flags", "least_s", "most_s"),
    [(("throttled",), 0.0, 9.0), (("loaded_host",), 0.0, 1e-9), (("loaded_host",), 9.0, 9.0), ((), 0.0, 9.0)],
)
def test_samples_that_are_dear_or_short_or_will_not_get_better_stay(disturbed, monkeypatch, flags, least_s, most_s):
    monkeypatch.setattr(trial, "RETAKEN_S", (least_s, most_s))
    left = disturbed(flags, (), ())
    record = run_cell(cell(), budget_s=BUDGET_S)
    assert left == [2]
    assert record.timing is not None
    assert (record.timing.num_discarded, set(flags) <= set(record.timing.flags)) == (0, True)


def test_samples_that_waited_for_the_processor_are_taken_again(disturbed, monkeypatch):
    """Whatever else is seen on the machine; the last ones stay, flagged."""
    found: list[bool] = []
    monkeypatch.setattr(Sampling, "is_waiting", property(lambda _: found.pop(0)))
    for is_last_waiting, num_left in ((False, 1), (True, 0)):
        found[:] = [True, *[is_last_waiting] * 3]
        left = disturbed((), (), ())
        record = run_cell(cell(), budget_s=BUDGET_S)
        assert left[-1] == num_left
        assert record.timing is not None
        assert record.timing.num_discarded > 0
        assert ("waiting" in record.timing.flags) == is_last_waiting


def test_one_member_that_waited_has_all_of_its_bundle_taken_again(disturbed, monkeypatch):
    seen: list[Sampling] = []

    def is_waiting(sampling: Sampling) -> bool:
        seen.append(sampling)
        return len(seen) == 2

    monkeypatch.setattr(Sampling, "is_waiting", property(is_waiting))
    left = disturbed((), ())
    cells = [cell(name, isolation="interleaved") for name in ("full", "fake_ok")]
    records = run_cells_in_turns(cells, budget_s=BUDGET_S)
    assert left == [1, 0]
    assert all(record.timing is not None and record.timing.num_discarded > 0 for record in records)
    assert seen[0] is not seen[1]


def test_the_samples_of_short_calls_last_long_enough_to_be_taken_again():
    """As many as there are at most, each half as long as it should be at least: fewer are flagged as too short."""
    assert trial.RETAKEN_S[0] <= 50 * 0.5 * 2e-3


@pytest.mark.parametrize(
    ("wall_s", "own_s", "num_ticks", "cpus", "is_loaded"),
    [
        (0.11, 0.11, 22, 2, True),  # short calls, and another process all the time
        (0.16, 0.11, 32, 2, True),  # two others, so that this one waits
        (0.055, 0.055, 11, 2, True),
        (0.055, 0.055, 9, 1, True),
        (0.11, 0.11, 11, 2, False),  # nothing else
        (0.11, 0.11, 14, 2, False),  # a step more in each sum, and on the processor
        (0.11, 7.04, 768, 64, False),  # one on every processor
        (0.004, 0.004, 4, 2, False),
        (0.11, 0.11, 33, 64, False),  # two of 64 processors
        (0.11, 0.11, 99, 64, True),  # eight
        (2.0, 2.0, 230, 2, False),  # less than a tenth of all processors
        (2.0, 2.0, 250, 2, True),
    ],
)
def test_other_work_is_told_from_the_steps_of_processor_times(
    monkeypatch, wall_s, own_s, num_ticks, cpus, is_loaded
) -> None:
    now = {"monotonic": 0.0, "process_time": 0.0, "busy": 0.0}
    monkeypatch.setattr("time.monotonic", lambda: now["monotonic"])
    monkeypatch.setattr("time.process_time", lambda: now["process_time"])
    monkeypatch.setattr("os.cpu_count", lambda: cpus)
    monkeypatch.setattr(conditions_module, "_busy_s", lambda: now["busy"])
    with Conditions("cpu") as found:
        now.update(monotonic=wall_s, process_time=own_s, busy=0.01 * num_ticks)
    assert found.flags == (("loaded_host",) if is_loaded else ())


def test_all_members_of_a_bundle_are_taken_again_together(disturbed):
    left = disturbed(("loaded_host",), ())
    cells = [cell(name, isolation="interleaved") for name in ("full", "fake_ok")]
    records = run_cells_in_turns(cells, budget_s=BUDGET_S)
    assert left == [1, 0]
    assert all(record.timing is not None and record.timing.num_discarded > 0 for record in records)


def test_a_process_on_the_gpu_that_left_meanwhile_is_seen(monkeypatch):
    now = Clocks(sm_mhz=1000.0, temperature_c=1.0, power_w=1.0, throttles=())
    monkeypatch.setattr(conditions_module, "clocks", lambda _: now)
    monkeypatch.setattr(conditions_module, "SETTLING_S", 0.0)
    count: dict[str, int] = {}
    monkeypatch.setattr(conditions_module, "num_other_processes", lambda _: count["now"])
    for before, after, flags in ((1, 0, ("other_gpu_process",)), (0, 1, ("other_gpu_process",)), (0, 0, ())):
        count["now"] = before
        with Conditions("cuda") as found:
            count["now"] = after
        assert found.flags == flags
        assert found.may_pass is bool(flags)


def test_a_throttled_gpu_is_not_tried_again(monkeypatch):
    hot = Clocks(sm_mhz=1000.0, temperature_c=90.0, power_w=1.0, throttles=("hw_thermal",))
    monkeypatch.setattr(conditions_module, "num_other_processes", lambda _: 0)
    for states, may_pass in (([hot, hot], False), ([hot, replace(hot, sm_mhz=500.0)], True)):
        waiting = iter(states)
        monkeypatch.setattr(conditions_module, "clocks", lambda _, waiting=waiting: next(waiting))
        with Conditions("cuda") as found:
            pass
        assert "throttled" in found.flags
        assert found.may_pass is may_pass
