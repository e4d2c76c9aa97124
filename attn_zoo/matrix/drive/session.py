"""The driver's side of a run: what it decides before each cell, and what it notes after it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FrameType

from attn_zoo.matrix.drive.merge_repeats import merge_repeats
from attn_zoo.matrix.drive.progress import Progress
from attn_zoo.matrix.drive.supervise import Control
from attn_zoo.matrix.kinds.all_kinds import KINDS, kind_of
from attn_zoo.matrix.kinds.kind import Forecast
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Cell, Environment, Record

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
        repeats: of `todo`, by key.

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
        repeats: Mapping[str, Sequence[Record]],
    ) -> None:
        self._store, self._progress, self._jobs = store, progress, jobs
        self._began = time.monotonic()
        self._deadline = None if time_limit_s is None else self._began + time_limit_s
        self._waiting = {item.cell.key: item for item in todo}
        self._repeats = {item.cell.key: list(repeats.get(item.cell.key, ())) for item in todo}
        self._forecasts = {kind.name: kind.forecast() for kind in KINDS}
        for record in earlier:
            if not kind_of(record.cell).is_timed:  # that of a timed one sums its repeats
                self._forecast_of(record.cell).add(record)
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

    def _forecast_of(self, cell: Cell) -> Forecast:
        return self._forecasts[kind_of(cell).name]

    def forecast_s(self, item: PlannedCell) -> float:
        """Return the seconds that a cell, or its next repeat, will take."""
        if repeats := self._repeats.get(item.cell.key):
            return repeats[-1].duration_s
        return self._forecast_of(item.cell).seconds(item)

    def may_start(self, *bundle: PlannedCell) -> bool:
        if self.is_over():
            self.stopped = self.stopped or "time limit"
            return False
        cell = bundle[0].cell
        if cell.key not in self._waiting:
            return False  # an earlier repeat failed, which is the cell's result
        if self._deadline is None or not kind_of(cell).is_timed:
            return True  # a training goes on from its checkpoint another time
        forecast_s = sum(min(self.forecast_s(item), item.timeout_s) for item in bundle)
        if time.monotonic() + forecast_s <= self._deadline:
            return True
        self.stopped = self.stopped or "time limit"  # cells of other lanes may still fit
        return False

    def started(self, item: PlannedCell) -> None:
        left_s = 0.0
        for key, waiting in self._waiting.items():
            num_left = waiting.separate_repeats - len(self._repeats[key])
            left_s += num_left * self.forecast_s(waiting) / (1 if kind_of(waiting.cell).is_timed else self._jobs)
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
        num_repeats = self._waiting[key].separate_repeats
        repeats = self._repeats[key]
        self._forecast_of(record.cell).add(record)
        step = f"repeat {len(repeats) + 1} of {num_repeats}" if num_repeats > 1 else ""
        num_done = 1
        if record.status == "ok":
            repeats.append(record)
            if len(repeats) < num_repeats:
                self._store.repeats.write(record, len(repeats))
                self._progress.finished(record, step)
                return
            record = merge_repeats(repeats)
        elif num_repeats > 1:
            num_done = num_repeats - len(repeats)
            if repeats:
                record = replace(record, reason=f"{step}: {record.reason}")
        self._store.write(record)
        if record.status == "ok":
            self._store.repeats.drop(key)
        else:
            self._store.repeats.retire(key)
        del self._waiting[key]
        self.new.append(record)
        self._progress.finished(record, step, num_done)

    def moved_to(self, environment: Environment) -> None:
        self._store.add_environment(environment)

    def say(self, text: str) -> None:
        self._progress.say(text)
