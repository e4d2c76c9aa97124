"""Run the cells of one lane in order: what is hopeless is not started.

Both engines use this function: on this machine, or inside a Ray task on another.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from attn_zoo.matrix.drive.attempts import run_bundle
from attn_zoo.matrix.drive.worker_pool import WorkerPool
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.records import STOPPERS, Environment, Record


class Control:
    """Asked before a bundle, and told after it. As it stands everything may start and run to its end."""

    def is_over(self) -> bool:
        """Tell whether no further cell will be allowed to start."""
        return False

    def may_start(self, *bundle: PlannedCell) -> bool:  # noqa: ARG002
        """Tell whether the cells of a bundle may begin; False leaves them for another run."""
        return True

    def started(self, item: PlannedCell) -> None:
        """Take note that the cell begins."""

    def should_stop(self) -> bool:
        """Tell, several times a second, whether the running cell must end now, without a record."""
        return False

    def finished(self, record: Record) -> None:
        """Take the record of a cell."""

    def moved_to(self, environment: Environment) -> None:
        """Take note that the next records come from another machine."""

    def say(self, text: str) -> None:
        """Pass a message on to whoever watches."""


def skipped(item: PlannedCell, earlier: Sequence[Record]) -> Record | None:
    """Return the record of a cell that a shorter length of its curve makes hopeless, or None.

    Args:
        item: cell in question.
        earlier: records of the same curve, and perhaps of others.
    """
    cell = item.cell
    for record in earlier:
        length = record.cell.seq_len
        if record.cell.curve != cell.curve or record.status not in STOPPERS or length is None:
            continue
        if cell.seq_len is None or cell.seq_len <= length:
            continue
        if record.status == "timeout":
            return Record(cell=cell, status="timeout", reason=f"not started: length {length} of the lane timed out")
        reason = f"not started: length {length} of the lane ended in {record.status}"
        return Record(cell=cell, status="skipped_after_oom", reason=reason)
    return None


def run_lane(items: Sequence[PlannedCell], pool: WorkerPool, control: Control, prior: Sequence[Record] = ()) -> None:
    """Run the cells of a lane, shorter sequences first; every cell, or repeat, that is started ends in one record.

    Args:
        items: of one lane; perhaps several repeats of it, one after the other.
        pool: has the processes; it may serve other lanes before and after.
        control: asked and told.
        prior: records that the lane's curves have already.
    """
    known = list(prior)
    ended: set[str] = set()  # cells that failed: they are not repeated
    bundles = [list(group) for _, group in itertools.groupby(items, key=lambda item: item.bundle)]
    try:
        for index, bundle in enumerate(bundles):
            todo = []
            for item in bundle:
                if item.cell.key in ended:
                    continue
                if (record := skipped(item, known)) is None:
                    todo.append(item)
                    continue
                known.append(replace(record, environment=pool.settings.environment, isolation=item.isolation))
                control.finished(known[-1])
                ended.add(item.cell.key)
            if not todo or not control.may_start(*todo):
                continue
            for item in todo:
                control.started(item)
            records = run_bundle(todo, pool, has_next=index + 1 < len(bundles))
            if records is None:
                return
            for record in records:
                known.append(record)
                control.finished(record)
                if record.status != "ok":
                    ended.add(record.cell.key)
    finally:
        pool.end_lane()
