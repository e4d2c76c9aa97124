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
