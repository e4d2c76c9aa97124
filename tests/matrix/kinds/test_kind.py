"""A new kind of cell is one class: what it adds to a timed kind is all that it says itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from attn_zoo.matrix.cell.run_order import run_order
from attn_zoo.matrix.cell.workload import AbstractWorkload
from attn_zoo.matrix.claimed_costs import Claims
from attn_zoo.matrix.kinds import all_kinds
from attn_zoo.matrix.kinds.all_kinds import KINDS, kind_of
from attn_zoo.matrix.kinds.kind import Axis
from attn_zoo.matrix.kinds.timed import TimedGroup, TimedKind
from attn_zoo.matrix.plan.estimate import START_S, Estimate
from attn_zoo.matrix.plan.expand import estimated
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.matrix.plan.source_digest import CALL_ROOMS
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.records import Cell, Memory


class SumWorkload(AbstractWorkload):
    def __init__(self, cell: Cell, inputs: Sequence[torch.Tensor] | None):
        assert cell.seq_len is not None
        self.module = torch.nn.Module()
        self.inputs = inputs or [torch.ones(cell.seq_len)]

    def gate(self) -> tuple[str, ...]:
        return ("is_a_sum",)

    def make_call(self) -> tuple[Any, None]:
        return lambda: self.inputs[0].sum(), None

    def check(self, output: object, *, is_repeat: bool) -> tuple[str, ...]:
        assert output == self.inputs[0].numel()
        return ("own_sum",)

    def memory(self) -> Memory:
        return Memory(peak_bytes=self.inputs[0].nbytes)

    def claims(self) -> Claims:
        return Claims(flops=self.inputs[0].numel())

    def counted_flops(self) -> None:
        return None

    def release(self) -> None:
        pass


class Summing(TimedKind):
    name = "summing"
    group = TimedGroup
    rooms = CALL_ROOMS

    def points(self, group: TimedGroup) -> Iterator[dict[str, Any]]:
        yield {"kind": self.name, "pass_": "infer"}

    def refusals(self, cells: Sequence[Cell]) -> list[tuple[str, str] | None]:
        return [("seq_len", "odd") if cell.seq_len is not None and cell.seq_len % 2 else None for cell in cells]

    def estimate(self, item: PlannedCell) -> Estimate:
        return Estimate(item.budget_s, 8)

    def workload(self, cell: Cell, inputs: Sequence[torch.Tensor] | None) -> AbstractWorkload:
        return SumWorkload(cell, inputs)


@pytest.fixture
def summing(monkeypatch):
    kind = Summing()
    monkeypatch.setattr(all_kinds, "KINDS", (*KINDS, kind))
    return kind


@pytest.mark.parametrize("isolation", ["cell", "interleaved"])
def test_a_kind_says_how_it_expands_and_runs_and_nothing_else_has_to_know(summing, isolation):
    group = TimedGroup.model_validate(
        {"variants": ["full", "linformer"], "seq_len": [8, 9], "isolation": isolation, "repeats": 2, "device": "cpu"}
    )
    members = [{"variant": entry.name, "label": entry.name} for entry in group.variants]
    items = estimated(summing.expand(group, members, None))
    assert [item.cell.id for item in items if item.refusal is None] == [
        "full/summing/infer/L8/fp32/seed0",
        "linformer/summing/infer/L8/fp32/seed0",
    ]
    assert {item.refusal for item in items if item.cell.seq_len == 9} == {("seq_len", "odd")}
    first = items[0]
    start_s = START_S / 2 if isolation == "interleaved" else START_S  # of a process, which both share
    assert (first.repeats, first.estimate_s, first.estimate_bytes) == (2, 1.0 + 2 * start_s, 8)
    assert bool(first.cell.together) == (isolation == "interleaved")
    assert kind_of(first.cell) is summing
    cells = tuple(item.cell for item in items if item.refusal is None)
    for bundle in [cells] if isolation == "interleaved" else [(cell,) for cell in cells]:
        for record in run_order(WorkOrder(cells=bundle, isolation=isolation, budget_s=0.01)):
            assert record.status == "ok", record.reason + record.trace
            assert record.gate == ("is_a_sum", "own_sum")
            assert (record.flops, record.isolation) == (8, isolation)
            assert record.timing is not None
            assert record.memory == Memory(peak_bytes=32)


def test_the_values_of_an_axis_are_distinct_whatever_they_are_and_very_many_are_no_trouble():
    axis: TypeAdapter[tuple[Any, ...]] = TypeAdapter(Axis[Any])
    assert axis.validate_python([[1, 2], [2, 1], {"a": 1}, {"a": 2}]) == ([1, 2], [2, 1], {"a": 1}, {"a": 2})
    for value in (7, [0.9, [0.99]], {"a": [1]}):
        with pytest.raises(ValueError, match="expected each value once"):
            axis.validate_python([value, 3, value])
    compared = []

    class Value:
        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return self is other

        def __hash__(self) -> int:
            return id(self)

    axis.validate_python([Value() for _ in range(1000)])
    assert len(compared) < 1000, "not each with each"


def test_every_cell_has_one_kind():
    cells = [Cell(kind="scaling", variant="x"), Cell(kind="scaling", variant="x", scope="model")]
    cells.append(Cell(kind="accuracy", variant="x"))
    assert [kind.name for cell in cells for kind in KINDS if kind.owns(cell)] == ["scaling", "step", "accuracy"]
    assert [kind_of(cell).name for cell in cells] == ["scaling", "step", "accuracy"]
