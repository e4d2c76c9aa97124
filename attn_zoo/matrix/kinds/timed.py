"""What kinds share that time a piece of work over lengths: alone, or in turns with the same work of other variants."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from attn_zoo.conformance.gate import SPAN_LEN
from attn_zoo.errors import UnsupportedError
from attn_zoo.matrix.cell.trial import Trial, measure_bundle
from attn_zoo.matrix.cell.workload import AbstractWorkload
from attn_zoo.matrix.claimed_costs import config_of
from attn_zoo.matrix.kinds.kind import NO_CUDA, AbstractKind, Axis, Forecast, Member, Seconds
from attn_zoo.matrix.kinds.one_call import CallGroup, LengthGroup, make_module
from attn_zoo.matrix.plan.estimate import CALLS
from attn_zoo.matrix.plan.planned_cell import PlannedCell, Refusal
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.records import Cell, Record
from attn_zoo.registry import variants


class TimedGroup(LengthGroup):
    """What groups that are timed over lengths may say.

    Args:
        isolation: a process for each cell, one for all lengths of a lane, or one in which all variants of the group are
            timed in turns (`"interleaved"`): the way to compare peers.
        repeats: how many processes time each cell; with several, intervals cover what differs between them. They are
            far apart in time: the run goes over all cells once, then again. Two say little (Student's t has one degree
            of freedom then): take three or more.
        budget_s: seconds of sampling per cell, shared by its repeats; fewer samples, wider intervals.
        has_energy: also measure the energy of a call: some seven seconds more per cell, twice that for a decoded token,
            on a GPU that tells. A cell without says why.
    """

    isolation: Literal["cell", "lane", "interleaved"] = "cell"
    repeats: Annotated[int, Field(ge=1, le=20)] = 1
    budget_s: Seconds = 1.0
    has_energy: bool = False


class TimedCallGroup(CallGroup, TimedGroup):
    """What groups may say that time one mechanism by itself.

    Args:
        scope: heads in and out (`"attention"`), or hidden states with projections (`"mixer"`).
    """

    scope: Axis[Literal["attention", "mixer"]] = ("attention",)

    def axes(self) -> dict[str, Sequence[Any]]:
        return {"scope": self.scope, **super().axes()}


def seconds_of_calls(record: Record) -> float:
    """Return the seconds of a cell that its calls took."""
    timing = record.timing
    return math.inf if timing is None else CALLS * (timing.graph_ms or timing.median_ms) / 1e3


def seconds_of_gate(record: Record) -> float:
    """Return the seconds of a cell's gate, where longer lengths know its verdict; on a GPU they are most of a cell."""
    return record.phases.get("gate", 0.0) if (record.cell.seq_len or 0) >= SPAN_LEN else 0.0


class TimedForecast(Forecast):
    """From a shorter length of the same curve, whose calls grow by the claimed exponent; or the estimate of the plan.

    Short calls are a small part of their cell: the rest, such as checks and the seconds of sampling, does not grow;
    `growing` says what does, and `once` what no longer length has again.
    """

    def __init__(
        self,
        growing: Callable[[Record], float] = seconds_of_calls,
        once: Callable[[Record], float] = seconds_of_gate,
    ) -> None:
        self._growing, self._once = growing, once
        self._latest: dict[str, Record] = {}

    def add(self, record: Record) -> None:
        if record.status == "ok":
            self._latest[record.cell.curve] = record

    def seconds(self, item: PlannedCell) -> float:
        cell, known = item.cell, self._latest.get(item.cell.curve)
        if known is not None and known.cell.seq_len and cell.seq_len and known.cell.seq_len < cell.seq_len:
            exponent = max(variants[cell.variant].complexity_of(config_of(cell)).time_exponent, 1.0)
            growth: float = (cell.seq_len / known.cell.seq_len) ** exponent
            kept_s = known.duration_s - self._once(known)
            return kept_s + min(self._growing(known), kept_s) * (growth - 1)
        return (item.estimate_s or 0.0) / item.repeats


class TimedKind(AbstractKind):
    """A kind whose cells are timed."""

    is_timed = True

    @abstractmethod
    def points(self, group: Any) -> Iterator[dict[str, Any]]:
        """Yield the fields of each curve that the group decides, but for members, device and threads."""

    @abstractmethod
    def refusals(self, cells: Sequence[Cell]) -> list[Refusal | None]:
        """Return for each cell of one curve why it cannot run, or None."""

    @abstractmethod
    def workload(self, cell: Cell, inputs: Sequence[Tensor] | None) -> AbstractWorkload:
        """Build what is timed, from the inputs of another variant or from new ones, the same for the same seed.

        Raises:
            UnsupportedError: the variant cannot do what the cell asks.
        """

    def expand(self, group: Any, members: Sequence[Member], data_dir: Path | None) -> Iterator[PlannedCell]:  # noqa: ARG002
        machine = {"device": group.device, "threads": group.threads}
        lengths, budget_s = sorted(group.seq_len), group.budget_s / group.repeats
        for member, point in itertools.product(members, self.points(group)):
            first = Cell(**machine, **point, **member)
            if group.isolation == "interleaved":
                first = replace(first, together=_together(group, members, {**machine, **point}))
            cells = [first.at(seq_len) for seq_len in lengths]
            for cell, refusal in zip(cells, self.refusals(cells), strict=True):
                yield PlannedCell(
                    cell=cell,
                    refusal=refusal,
                    isolation=group.isolation,
                    repeats=group.repeats,
                    timeout_s=group.timeout_s,
                    budget_s=budget_s,
                    has_energy=group.has_energy,
                )

    def build_on_meta(self, cell: Cell) -> None:
        with torch.device("meta"):
            make_module(cell)

    def forecast(self) -> Forecast:
        return TimedForecast()

    def run(
        self, order: WorkOrder, records: Sequence[Record], tell: Callable[[int], object], room_bytes: int | None
    ) -> list[Record]:
        counts = order.has_count or [True] * len(records)
        trials = [
            Trial(record, self._workload_here, order, count) for record, count in zip(records, counts, strict=True)
        ]
        return measure_bundle(order, trials, tell=tell, room_bytes=room_bytes)

    def _workload_here(self, cell: Cell, inputs: Sequence[Tensor] | None) -> AbstractWorkload:
        if cell.device == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError(*NO_CUDA)
        return self.workload(cell, inputs)


def _together(group: TimedGroup, members: Sequence[Member], point: Mapping[str, Any]) -> str:
    """Return the digest of what is timed in turns and how: another peer, or another source of one, is another cell."""
    text = json.dumps([list(members), group.repeats, dict(point)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
