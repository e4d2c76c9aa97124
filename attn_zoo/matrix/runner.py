"""Run a plan into a results folder: resume, time limit, Ctrl-C, and a summary of what was done and what is left."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Protocol

from attn_zoo.matrix.claims import claims_of
from attn_zoo.matrix.engines.local import LocalEngine
from attn_zoo.matrix.estimate import scaled_seconds
from attn_zoo.matrix.plan import Plan, PlannedCell
from attn_zoo.matrix.progress import Progress, SilentProgress
from attn_zoo.matrix.standing import Standing, Summary, standing
from attn_zoo.matrix.store import Store
from attn_zoo.matrix.supervise import Control, Settings
from attn_zoo.records import Environment, Record
from attn_zoo.registry import variants

__all__ = ["Engine", "Standing", "Summary", "run", "standing"]

GRACE_S = 30.0
"""How long the running cell may go on after the first Ctrl-C."""

Lanes = Sequence[tuple[Sequence[PlannedCell], Sequence[Record]]]


class Engine(Protocol):
    """Supervises workers. Records go to `control`, which belongs to the driver: nobody else writes."""

    is_remote: bool

    def run(self, lanes: Lanes, settings: Settings, control: Control) -> None:
        """Run all lanes, as long as `control` agrees."""


class _Session:
    """The driver's side: stores records as they come, keeps the time limit, hears Ctrl-C."""

    def __init__(
        self, store: Store, progress: Progress, time_limit_s: float | None, todo: Sequence[PlannedCell]
    ) -> None:
        self._store, self._progress = store, progress
        self._began = time.monotonic()
        self._deadline = None if time_limit_s is None else self._began + time_limit_s
        self._waiting = {item.cell.key: item for item in todo}
        self._known: dict[str, Record] = {}
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
            f"stopping after the running cell (at most {GRACE_S:g} s); press Ctrl-C again to stop at once. "
            "The same command goes on from here."
        )

    def is_over(self) -> bool:
        return self.stopped == "interrupted" or (self._deadline is not None and time.monotonic() >= self._deadline)

    def forecast_s(self, item: PlannedCell) -> float:
        """Return the seconds a cell will take: from shorter lengths of its lane where there are any."""
        known, cell = self._known.get(item.cell.lane), item.cell
        if known is not None and known.cell.seq_len and cell.seq_len and known.cell.seq_len < cell.seq_len:
            exponent = variants[cell.variant].complexity.time_exponent
            return scaled_seconds(known.duration_s, known.cell.seq_len, cell.seq_len, exponent)
        return item.estimate_s or 0.0

    def may_start(self, item: PlannedCell) -> bool:
        if self.is_over():
            self.stopped = self.stopped or "time limit"
            return False
        if self._deadline is None:
            return True
        if time.monotonic() + min(self.forecast_s(item), item.timeout_s) <= self._deadline:
            return True
        self.stopped = self.stopped or "time limit"  # cells of other lanes may still fit
        return False

    def started(self, item: PlannedCell) -> None:
        self._progress.started(item, sum(self.forecast_s(waiting) for waiting in self._waiting.values()))

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
        self._store.write(record)
        self._waiting.pop(record.cell.key, None)
        self._known[record.cell.lane] = record
        self.new.append(record)
        self._progress.finished(record)

    def moved_to(self, environment: Environment) -> None:
        self._store.add_environment(environment)


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Send Ctrl-C and a polite kill to `handler`; only the main thread may change that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def run(
    plan: Plan,
    store: Store,
    *,
    engine: Engine | None = None,
    time_limit_min: float | None = None,
    retry_statuses: Sequence[str] = (),
    progress: Progress | None = None,
    allow_mixed_env: bool = False,
    data_dir: Path | None = None,
) -> Summary:
    """Run what the plan asks for and the folder does not have yet.

    Args:
        plan: from `make_plan`.
        store: results folder; created if absent.
        engine: supervises the workers; this machine by default.
        time_limit_min: minutes for everything; cells that would likely exceed it are left for another run, and one
            that does is stopped without a record.
        retry_statuses: records with these statuses are moved aside and run again.
        progress: told what happens; silent by default.
        allow_mixed_env: add to a folder that was measured in another environment.
        data_dir: where tasks find local data.

    Raises:
        StoreError: the folder cannot be used or written. Records written before stay whole.
    """
    from attn_zoo.measure.environment import capture_environment

    engine = engine or LocalEngine()
    progress = progress or SilentProgress()
    environment = capture_environment()
    matrix = plan.matrix.model_dump(mode="json")
    with store.writing(
        matrix,
        environment,
        allow_mixed_env=allow_mixed_env,
        shard=plan.shard,
        claims=claims_of({item.cell.variant for item in plan.cells}),
    ) as scan:
        if scan.problems:
            progress.say(f"{len(scan.problems)} files were no records and are now in {store.folder / 'quarantine'}")
        records = dict(scan.records)
        planned = {item.cell.key for item in plan.cells}
        for key, record in scan.records.items():
            if key in planned and record.status in retry_statuses:
                store.retire(key)
                del records[key]
        left = standing(plan, list(records.values())).left
        session = _Session(store, progress, None if time_limit_min is None else time_limit_min * 60, left)
        settings = Settings(
            logs=store.logs,
            environment=environment.digest,
            variant_files=plan.variant_files,
            data_dir=data_dir,
            checkpoints=store.checkpoints,
        )
        progress.begin(len(plan.cells), len(plan.cells) - len(left))
        try:
            with _signals(session.interrupt):
                for item in left:
                    if item.refusal is not None:
                        session.finished(_refused(item, environment.digest))
                engine.run(_lanes(left, records), settings, session)
        finally:
            progress.end()
    for record in session.new:
        records[record.cell.key] = record
    now = standing(plan, list(records.values()))
    return Summary(
        counts=dict(Counter(record.status for record in now.done)),
        new=len(session.new),
        left=now.left,
        stopped=session.stopped,
        folder=store.folder,
    )


def _refused(item: PlannedCell, environment: str) -> Record:
    assert item.refusal is not None  # asked by the caller
    started = datetime.now(UTC).isoformat(timespec="seconds")
    reason = item.refusal[1]
    return Record(cell=item.cell, status="unsupported", reason=reason, environment=environment, started=started)


def _lanes(left: Sequence[PlannedCell], records: dict[str, Record]) -> Lanes:
    """Group runnable cells by lane, each with the records that its lane has."""
    prior: dict[str, list[Record]] = {}
    for record in records.values():
        prior.setdefault(record.cell.lane, []).append(record)
    lanes: dict[str, list[PlannedCell]] = {}
    for item in left:
        if item.refusal is None:
            lanes.setdefault(item.cell.lane, []).append(item)
    return [(items, prior.get(lane, [])) for lane, items in lanes.items()]
