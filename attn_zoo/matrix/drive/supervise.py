"""Run the cells of one lane, or of several that share a process, in order: what is hopeless is not started.

Both engines use this function: on this machine, or inside a Ray task on another.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from attn_zoo.matrix.drive.attempts import run_alone, run_in_turns
from attn_zoo.matrix.drive.worker_pool import Crew
from attn_zoo.matrix.plan.planned import PlannedCell
from attn_zoo.matrix.status_sets import STOPPERS
from attn_zoo.records import Environment, Record

__all__ = ["Control", "run_lane", "skipped"]


class Control(Protocol):
    """Who is asked before a cell, and told after it."""

    def is_over(self) -> bool:
        """Tell whether no further cell will be allowed to start."""

    def may_start(self, item: PlannedCell, *beside: PlannedCell) -> bool:
        """Tell whether the cell, and those timed in turns with it, may begin; False leaves them for another run."""

    def started(self, item: PlannedCell) -> None:
        """Take note that the cell begins."""

    def should_stop(self) -> bool:
        """Tell, several times a second, whether the running cell must end now, without a record."""

    def finished(self, record: Record) -> None:
        """Take the record of a cell."""

    def moved_to(self, environment: Environment) -> None:
        """Take note that the next records come from another machine."""

    def say(self, text: str) -> None:
        """Pass a message on to whoever watches."""


def skipped(item: PlannedCell, earlier: Sequence[Record]) -> Record | None:
    """Return the record of a cell that a shorter length of its lane makes hopeless, or None.

    Args:
        item: cell in question.
        earlier: records of the same lane, and perhaps of others.
    """
    cell = item.cell
    for record in earlier:
        length = record.cell.seq_len
        if (
            record.cell.lane != cell.lane
            or record.status not in STOPPERS
            or length is None
            or cell.seq_len is None
            or cell.seq_len <= length
        ):
            continue
        if record.status == "timeout":
            return Record(cell=cell, status="timeout", reason=f"not started: length {length} of the lane timed out")
        reason = f"not started: length {length} of the lane ended in {record.status}"
        return Record(cell=cell, status="skipped_after_oom", reason=reason)
    return None


def run_lane(items: Sequence[PlannedCell], crew: Crew, control: Control, prior: Sequence[Record] = ()) -> None:
    """Run cells of one track, ascending within each lane; every cell, or repeat, that is started ends in one record.

    Args:
        items: of one lane, or of several that share a process; perhaps in several rounds, one after the other.
        crew: has the processes; it may serve other lanes before and after.
        control: asked and told.
        prior: records that these lanes have already.
    """
    known = list(prior)
    ended: set[str] = set()  # cells that failed: they are not repeated
    units = [list(group) for _, group in itertools.groupby(items, key=lambda item: item.unit)]
    try:
        for index, whole in enumerate(units):
            unit = [item for item in whole if item.cell.key not in ended]
            hopeless = {item.cell.key: record for item in unit if (record := skipped(item, known)) is not None}
            for item in unit:
                if item.cell.key in hopeless:
                    record = hopeless[item.cell.key]
                    known.append(replace(record, environment=crew.settings.environment, isolation=item.isolation))
                    control.finished(known[-1])
                    ended.add(item.cell.key)
            todo = [item for item in unit if item.cell.key not in hopeless]
            if not todo or not control.may_start(*todo):
                continue
            for item in todo:
                control.started(item)
            has_next = index + 1 < len(units)
            if todo[0].isolation == "interleaved":
                records = run_in_turns(todo, crew, has_next)
            else:
                records = run_alone(todo[0], crew, has_next)
            if records is None:
                return
            for record in records:
                known.append(record)
                control.finished(record)
                if record.status != "ok":
                    ended.add(record.cell.key)
    finally:
        crew.end_lane()
