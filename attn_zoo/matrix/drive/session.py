"""The driver's side of a run: what it decides before each cell, and what it notes after it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FrameType

from attn_zoo.matrix.costs import with_costs
from attn_zoo.matrix.drive.merge_repeats import pooled
from attn_zoo.matrix.drive.progress import Progress
from attn_zoo.matrix.drive.supervise import Control
from attn_zoo.matrix.plan.estimate import TrainingTimes, scaled_seconds
from attn_zoo.matrix.plan.expand import PlannedCell
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Environment, Record
from attn_zoo.registry import variants

__all__ = ["GRACE_S", "Session"]

GRACE_S = 30.0
"""How long the running cell may go on after the first Ctrl-C."""


class Session(Control):
    """Stores records as they come, keeps the time limit, hears Ctrl-C.

    Args:
        store: where records go.
        progress: told what happens.
        time_limit_s: seconds from now, or None.
        todo: cells without a record.
        earlier: records that there are already.
        jobs: trainings at once.
        parts: repeats that cells without a record have already, by key.

    Attributes:
        stopped: why no further cell may start, or None.
        new: records of this run.
    """

    def __init__(
        self,
        store: Store,
        progress: Progress,
        time_limit_s: float | None,
        todo: Sequence[PlannedCell],
        earlier: Sequence[Record],
        jobs: int,
        parts: Mapping[str, Sequence[Record]],
    ) -> None:
        self._store, self._progress, self._jobs = store, progress, jobs
        self._began = time.monotonic()
        self._deadline = None if time_limit_s is None else self._began + time_limit_s
        self._waiting = {item.cell.key: item for item in todo}
        self._parts = {item.cell.key: list(parts.get(item.cell.key, ())) for item in todo}
        self._known: dict[str, Record] = {}
        self._trainings = TrainingTimes(earlier)
        self._kill_at: float | None = None
        self.stopped: str | None = None
        self.new: list[Record] = []

    def interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """First call: end after the running cell, or its grace. Second: at once."""
        now = time.monotonic()
        if self.stopped == "interrupted":
            self._kill_at = now
            return
        self.stopped, self._kill_at = "interrupted", now + GRACE_S
        self._progress.say(
            f"stopping after what is running (at most {GRACE_S:g} s); press Ctrl-C again to stop at once. "
            "The same command goes on from here."
        )

    def is_over(self) -> bool:
        return self.stopped == "interrupted" or (self._deadline is not None and time.monotonic() >= self._deadline)

    def forecast_s(self, item: PlannedCell) -> float:
        """Return the seconds that a cell, or its next repeat, will take.

        Known from the repeat before, from shorter lengths of its lane, or from trainings like it; otherwise estimated.
        """
        if parts := self._parts.get(item.cell.key):
            return parts[-1].duration_s
        if item.cell.kind == "accuracy":
            return self._trainings.forecast_s(item.cell)
        known, cell = self._known.get(item.cell.lane), item.cell
        if known is not None and known.cell.seq_len and cell.seq_len and known.cell.seq_len < cell.seq_len:
            exponent = variants[cell.variant].complexity.time_exponent
            return scaled_seconds(known.duration_s, known.cell.seq_len, cell.seq_len, exponent)
        return (item.estimate_s or 0.0) / item.num_rounds

    def may_start(self, item: PlannedCell, *beside: PlannedCell) -> bool:
        if self.is_over():
            self.stopped = self.stopped or "time limit"
            return False
        if item.cell.key not in self._waiting:
            return False  # an earlier repeat failed, which is the cell's result
        if self._deadline is None:
            return True
        if item.cell.kind == "accuracy":
            return True  # it goes on from its checkpoint another time
        forecast_s = sum(min(self.forecast_s(each), each.timeout_s) for each in (item, *beside))
        if time.monotonic() + forecast_s <= self._deadline:
            return True
        self.stopped = self.stopped or "time limit"  # cells of other lanes may still fit
        return False

    def started(self, item: PlannedCell) -> None:
        left_s = 0.0
        for key, waiting in self._waiting.items():
            rounds = waiting.num_rounds - len(self._parts[key])
            left_s += rounds * self.forecast_s(waiting) / (self._jobs if waiting.cell.kind == "accuracy" else 1)
        self._progress.started(item, left_s)

    def should_stop(self) -> bool:
        self._progress.tick()
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            return True
        if self._deadline is not None and now >= self._deadline:
            self.stopped = self.stopped or "time limit"
            return True
        return False

    def finished(self, record: Record) -> None:
        """Store a record: of a cell, or of one of its repeats as long as others are to come.

        The last repeat makes all of them the cell's record. One that fails is the cell's record, whatever the others
        said: a crash now and then is a result too.
        """
        key = record.cell.key
        rounds = self._waiting[key].num_rounds
        parts = self._parts[key]
        self._known[record.cell.lane] = record
        step = f"repeat {len(parts) + 1} of {rounds}" if rounds > 1 else ""
        num_done = 1
        if record.status == "ok":
            parts.append(record)
            if len(parts) < rounds:
                self._store.parts.write(record, len(parts))
                self._progress.finished(record, step)
                return
            record = pooled(parts)
        elif rounds > 1:
            num_done = rounds - len(parts)
            if parts:
                record = replace(record, reason=f"{step}: {record.reason}")
        record = with_costs(record)
        self._store.write(record)
        if record.status == "ok":
            self._store.parts.drop(key)
        else:
            self._store.parts.retire(key)
        del self._waiting[key]
        self._trainings.add(record)
        self.new.append(record)
        self._progress.finished(record, step, num_done)

    def moved_to(self, environment: Environment) -> None:
        self._store.add_environment(environment)

    def say(self, text: str) -> None:
        self._progress.say(text)
