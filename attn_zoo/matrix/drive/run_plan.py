"""Run a plan into a results folder: resume, time limit, Ctrl-C, and a summary of what was done and what is left."""

from __future__ import annotations

import itertools
import os
import signal
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Protocol

from attn_zoo.errors import ConfigError, StoreError, counted
from attn_zoo.matrix.cell.trial import ONCE_PHASES
from attn_zoo.matrix.claimed_costs import stored_claims
from attn_zoo.matrix.drive.engines.local import LocalEngine
from attn_zoo.matrix.drive.machine_ceilings import ceilings_text, note_ceilings
from attn_zoo.matrix.drive.progress import Progress
from attn_zoo.matrix.drive.supervise import Lane
from attn_zoo.matrix.drive.worker_pool import Control, Settings
from attn_zoo.matrix.kinds.all_kinds import KINDS, kind_of
from attn_zoo.matrix.plan.expand import Plan, estimated, plain_files
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.matrix.store.kept_sources import keep_sources
from attn_zoo.matrix.store.lock import wait_for_lock
from attn_zoo.matrix.store.store import Store, with_known_data
from attn_zoo.records import ANSWERS, Ceilings, Environment, Record
from attn_zoo.registry import variants
from attn_zoo.statistics.pooling import pool_records
from attn_zoo.typed_code import require_same_values

GRACE_S = 30.0
"""How long the running cell may go on after the first Ctrl-C."""


def _place(repeat: Record) -> tuple[bool, str, str]:
    """Return where a repeat stands: the weighed one, from which is taken what the others go without, then by time.

    It is one order for all of a bundle: on a cluster two of its processes may be under way at once. Short ones may have
    begun in the same second.
    """
    return repeat.memory is None, repeat.started, repeat.bundle


class Forecasts:
    """Foretell how long cells take, of every kind, from records, and from the repeats that others have, by key."""

    def __init__(self, records: Iterable[Record], repeats: Mapping[str, Sequence[Record]]) -> None:
        self._by_kind, self._repeats = {kind.name: kind.forecast() for kind in KINDS}, repeats
        for record in records:
            if not kind_of(record.cell).is_timed:  # that of a timed one sums its repeats
                self.add(record)

    def add(self, record: Record) -> None:
        """Take note of a record: of a cell, or of a repeat."""
        self._by_kind[kind_of(record.cell).name].add(record)

    def seconds(self, item: PlannedCell) -> float:
        """Return the seconds that a cell, or its next repeat, will take; 0 where nothing is known."""
        if repeats := self._repeats.get(item.cell.key):
            phases = repeats[-1].phases
            once_s = sum(phases.get(name, 0.0) for name in ONCE_PHASES)
            return (sum(phases.values()) or repeats[-1].duration_s) - once_s
        return self._by_kind[kind_of(item.cell).name].seconds(item)


class Session(Control):
    """Stores records as they come, keeps the time limit, hears Ctrl-C.

    `todo` are the cells without a record, `repeats` those that they have, `earlier` the records that there are.

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
        refuse: Callable[[Environment], str] = lambda _: "",
    ) -> None:
        self._store, self._progress, self._jobs, self._refuse = store, progress, jobs, refuse
        self._began = time.monotonic()
        self._deadline = None if time_limit_s is None else self._began + time_limit_s
        self._waiting = {item.cell.key: item for item in todo}
        self._repeats = {item.cell.key: list(repeats.get(item.cell.key, ())) for item in todo}
        self._forecasts = Forecasts(earlier, self._repeats)
        self._kill_at: float | None = None
        self._summed = self._sum_again = self._sum_s = 0.0
        self._environments: set[str] = set()
        self.stopped: str | None = None
        self.new: list[Record] = []

    def interrupt(self, number: int, _frame: FrameType | None) -> None:
        """First call: end after the running cell, or its grace. Second: at once, but for one more of a terminal's end.

        That comes twice, from a shell that ends and from the system.
        """
        now = time.monotonic()
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.stopped == "interrupted":
            self._kill_at = self._kill_at if number == signal.SIGHUP else now
            return
        self.stopped, self._kill_at = "interrupted", now + GRACE_S
        self._progress.say(
            f"stopping after what is running (at most {GRACE_S:g} s); press Ctrl-C again to stop at once. "
            "The same command goes on from here."
        )

    def is_over(self) -> bool:
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        if is_late and self._waiting:
            self.stopped = self.stopped or "time limit"
        return is_late or self.stopped == "interrupted"

    def is_wanted(self, item: PlannedCell) -> bool:
        return item.cell.key in self._waiting

    def may_start(self, *bundle: PlannedCell) -> bool:
        if self.is_over():
            return False
        if self._deadline is None or not kind_of(bundle[0].cell).is_timed:
            return True  # a training goes on from its checkpoint another time
        forecast_s = sum(min(self._forecasts.seconds(item), item.timeout_s) for item in bundle)
        if time.monotonic() + forecast_s <= self._deadline:
            return True
        self.stopped = self.stopped or "time limit"  # cells of other lanes may still fit
        return False

    def started(self, item: PlannedCell) -> None:
        self._progress.started(item, self.left_s())

    def left_s(self) -> float:
        """Return the seconds that all which waits will take.

        It is added up anew only when a hundred times as long has passed as that takes: thousands may wait.
        """
        now = time.monotonic()
        if now >= self._sum_again:
            self._summed, self._sum_s = now, 0.0
            for key, waiting in self._waiting.items():
                num_left = waiting.repeats - len(self._repeats[key])
                jobs = 1 if kind_of(waiting.cell).is_timed or waiting.cell.data_parallel > 1 else self._jobs
                self._sum_s += num_left * self._forecasts.seconds(waiting) / jobs
            self._sum_again = now + 100 * (time.monotonic() - now)
        return max(self._sum_s - (now - self._summed), 0.0)

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

        Raises:
            StoreError: the record cannot be stored, or its cell ended because its checkpoint could not be.
        """
        if record.status == "cancelled":
            raise StoreError(record.reason)
        key = record.cell.key
        if key not in self._waiting:
            return  # another repeat failed elsewhere meanwhile: that is the cell's result
        num_repeats = self._waiting[key].repeats
        repeats = self._repeats[key]
        num_done = 1
        if repeats and repeats[0].environment != record.environment:
            self._store.repeats.retire(key)  # no machine of that environment is left: begun anew
            num_done -= len(repeats)  # which were among those done before
            repeats.clear()
        self._forecasts.add(record)
        step = f"repeat {len(repeats) + 1} of {num_repeats}" if num_repeats > 1 else ""
        if record.status == "ok":
            repeats.append(record)
            if len(repeats) < num_repeats:
                self._store.repeats.write(record, len(repeats))
                self._progress.finished(record, step, num_done)
                return
            record = pool_records(sorted(repeats, key=_place))
        elif num_repeats > 1:
            num_done += num_repeats - len(repeats) - 1
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

    def moved_to(self, environment: Environment) -> str:
        if problem := self._refuse(environment):
            return f"the folder was {problem}"
        if environment.digest not in self._environments:
            self._environments.add(environment.digest)
            self._store.add_environment(environment)
        return ""

    def measured(self, ceilings: Sequence[Ceilings]) -> None:
        try:
            with wait_for_lock(self._store.folder / ".lock-ceilings", self.is_over):
                self._store.add_ceilings(ceilings)
        except StoreError as error:
            self._progress.say(f"{error}; nothing new is noted")
            return
        for one in ceilings:
            self._progress.say(f"ceilings of a node: {ceilings_text(one)}")

    def say(self, text: str) -> None:
        self._progress.say(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How a plan and the records of a folder compare.

    Args:
        done: cells with a record.
        left: cells without, and those whose records are to be measured again.
        stale: records whose source or data changed since: kept, but not part of the plan any more.
        other: records of other matrices.
        begun: repeats that cells of `left` have already, by key.
        left_s: seconds that these will roughly take, one after another; 0 where nothing is known.
        num_again: how many cells of `left` have a record, which stays until the next one is there.
        has_plan: what was planned is known; otherwise nothing can be said of `left`.
        doubt: what is not known, one sentence; empty where the matrix could be planned anew.
        missing_shards: which shards have not run here, in words.
        problems: files that are no records, each with the reason.
    """

    done: tuple[Record, ...]
    left: tuple[PlannedCell, ...]
    stale: tuple[Record, ...]
    other: tuple[Record, ...]
    begun: Mapping[str, int] = field(default_factory=dict)
    left_s: float = 0.0
    num_again: int = 0
    has_plan: bool = True
    doubt: str = ""
    missing_shards: str = ""
    problems: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a run did.

    Args:
        counts: cells of the plan by status, records of earlier runs included.
        new: how many of them are new.
        left: cells without a record, and those whose records are still to be measured again.
        num_repeats: repeats that cells of `left` have already.
        num_again: how many cells of `left` have a record.
        stopped: why it ended early: `"interrupted"`, `"time limit"`, or None.
        missing_shards: which shards have not run here, in words.
        folder: where the records are.
    """

    counts: dict[str, int] = field(default_factory=dict)
    new: int = 0
    left: tuple[PlannedCell, ...] = ()
    num_repeats: int = 0
    num_again: int = 0
    stopped: str | None = None
    missing_shards: str = ""
    folder: Path = Path()

    @property
    def exit_code(self) -> int:
        """0 if every cell with a record is ok or unsupported, 1 if one failed or was lost, 130 after Ctrl-C."""
        if self.stopped == "interrupted":
            return 130
        is_lost = bool(self.left) and self.stopped is None
        return int(is_lost or any(status not in ANSWERS for status in self.counts))


def standing(
    cells: Sequence[PlannedCell],
    records: Sequence[Record],
    repeats: Mapping[str, int] | None = None,
    again: Collection[str] = (),
) -> Standing:
    """Compare planned cells with the records of a folder.

    Args:
        cells: of the plan.
        records: of the folder.
        repeats: how many there are of cells that are not done, by key.
        again: keys of cells whose records are to be measured again.
    """
    by_key = {record.cell.key: record for record in records}
    planned = {item.cell.key: item for item in cells}
    outside = [record for key, record in by_key.items() if key not in planned]
    ids = {item.cell.id for item in cells} if outside else set()
    done = by_key.keys() - set(again)
    return Standing(
        done=tuple(by_key[key] for key in planned if key in done),
        left=tuple(item for key, item in planned.items() if key not in done),
        stale=tuple(record for record in outside if record.cell.id in ids),
        other=tuple(record for record in outside if record.cell.id not in ids),
        begun={key: count for key, count in (repeats or {}).items() if key in planned and key not in done},
        num_again=sum(key in by_key and key not in done for key in planned),
    )


def time_left(left: Iterable[PlannedCell], records: Iterable[Record], repeats: Mapping[str, Sequence[Record]]) -> float:
    """Return the seconds that cells will roughly take, one after another; 0 where nothing is known.

    Args:
        left: cells; those that are refused take none.
        records: of the folder, from which is foretold.
        repeats: those that cells without a record have, by key.
    """
    forecasts = Forecasts(records, repeats)
    runnable = estimated(item for item in left if item.refusal is None)
    return sum((item.repeats - len(repeats.get(item.cell.key, ()))) * forecasts.seconds(item) for item in runnable)


class Engine(Protocol):
    """Supervises workers. Records go to `control`, which belongs to the driver: nobody else writes.

    Attributes:
        is_remote: workers run on other machines.
        jobs: trainings at once on this one.
    """

    is_remote: bool
    jobs: int

    def run(self, lanes: Sequence[Lane], settings: Settings, control: Control) -> None:
        """Run all lanes, as long as `control` agrees."""


def _leave_terminal(streams: Sequence[int] = (1, 2)) -> None:
    """Let what is still said to a terminal that is gone go nowhere: writing to it fails, and would end the run."""
    for stream in streams:
        with suppress(OSError):  # closed
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Send Ctrl-C, a polite kill and the end of a terminal to `handler`; only the main thread may change that.

    What is ignored stays so: Ctrl-C by what a shell runs in the background, the end of a terminal by `nohup`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in heard}
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
        retry_statuses: records with these statuses are measured again; each stays until the next one is written. What
            an interrupted run like this one has measured again already is not among them.
        progress: told what happens; silent by default.
        allow_mixed_env: add to a folder that was measured in another environment.
        data_dir: where tasks find local data.

    Raises:
        ConfigError: a variant has no source that a worker could load.
        StoreError: the folder cannot be used or written. Records written before stay whole.
    """
    from attn_zoo.kernels.gpu_replays import replays_on
    from attn_zoo.measure.environment import capture_environment

    for name in {item.cell.variant: None for item in plan.cells if variants[item.cell.variant].no_source}:
        text = f"worker processes load a variant from its source; {variants[name].no_source}"
        raise ConfigError(name, [("", text)])
    for path in plan.variant_files:
        require_same_values(path)
    if store.exists and any(item.refusal is not None for item in plan.cells):
        plan = replace(plan, cells=tuple(with_known_data(plan.cells, store.info().planned or ())))
    # Neither run nor refused for good: somewhere the data are.
    refused = [(item.cell, item.refusal[0]) for item in plan.cells if item.refusal is not None]
    away = {cell.key for cell, what in refused if what == "data" and cell.data_digest}
    engine = engine or LocalEngine()
    progress = progress or Progress()
    has_gpu = any(item.cell.device == "cuda" and item.refusal is None for item in plan.cells)
    if has_gpu and not engine.is_remote and (replays := replays_on("cuda")):
        replays.prepare_run(progress.say)
    environment = None if engine.is_remote else capture_environment()  # this machine need be like no node
    matrix = plan.matrix.model_dump(mode="json")
    with store.writing(
        matrix,
        environment,
        allow_mixed_env=allow_mixed_env,
        shard=plan.shard,
        is_whole=plan.is_whole,
        claims=stored_claims({item.cell.variant for item in plan.cells}),
        planned=[item.cell for item in plan.cells],
    ) as scan:
        if scan.problems:
            progress.say(
                f"not records, and now in {store.folder / 'quarantine'}: {counted(len(scan.problems), 'file')}"
            )
        keep_sources(store.folder, plain_files(plan.cells))
        planned = {item.cell.key for item in plan.cells} - away
        retried = [key for key, one in scan.records.items() if one.status in retry_statuses and key in planned]
        store.mark_again(retry_statuses, [item.cell for item in plan.cells], retried)
        again = store.marked_again()
        records = {key: record for key, record in scan.records.items() if key not in again}
        left = estimated(standing(plan.cells, list(records.values())).left)
        todo = [item for item in left if item.cell.key not in away]
        limit_s = None if time_limit_min is None else time_limit_min * 60
        info = store.info(has_plan=False)
        refuse = (lambda _: "") if allow_mixed_env else info.refusal
        here = None if environment is None else info.names_of(environment.digest)
        repeats = _repeats(store, plan, records, here)
        session = Session(store, progress, limit_s, todo, list(records.values()), engine.jobs, repeats, refuse)
        digest = "" if environment is None else environment.digest
        settings = Settings(
            logs=store.logs,
            environment=digest,
            variant_files=plan.variant_files,
            data_dir=data_dir,
            checkpoints=store.checkpoints,
            weights=store.weights,
            ceilings=_known_ceilings(store) if engine.is_remote else frozenset(),
        )
        total = sum(item.repeats for item in plan.cells)
        missing = sum(item.repeats - len(repeats.get(item.cell.key, ())) for item in left)
        progress.begin(total, total - missing, len(plan.cells), session.left_s())
        if num_fewer := sum(_has_fewer(item, records.get(item.cell.key)) for item in plan.cells):
            kept = "cells that keep a record of fewer processes than `repeats` says now"
            progress.say(f"{kept}: {num_fewer}; --retry ok measures these and all others anew")
        if num_away := sum(key not in records or records[key].status in retry_statuses for key in away):
            where = "say where they are (--data-dir or ATTN_ZOO_DATA)"
            progress.say(f"cells that wait for data that are not here: {num_away}; {where}")
        if num_compiled := sum(bool(item.cell.overrides.get("compile")) for item in todo if item.refusal is None):
            progress.say(f"cells that are compiled first, in silence and up to a minute each: {num_compiled}")
        try:
            with _signals(session.interrupt):
                if not engine.is_remote:
                    note_ceilings(todo, store, digest, progress.say, session.is_over)
                for item in todo:
                    if item.refusal is not None:
                        started = datetime.now(UTC).isoformat(timespec="seconds")
                        record = Record(cell=item.cell, status="unsupported", reason=item.refusal[1], started=started)
                        session.finished(replace(record, environment=digest))
                engine.run(lanes_of(todo, records, repeats), settings, session)
                if not engine.is_remote and not session.is_over():
                    timed = {record.cell.key for record in session.new if record.timing is not None}
                    measured = [item for item in todo if item.cell.key in timed]
                    note_ceilings(measured, store, digest, progress.say, session.is_over, is_done=True)
                reasons = Counter(record.energy_reason for record in session.new if record.energy_reason)
                for reason, count in reasons.items():
                    progress.say(f"cells without energy: {count}; {reason}")
        finally:
            progress.end()
        if session.stopped:
            store.note_end(session.stopped)
    known = {**scan.records, **{record.cell.key: record for record in session.new}}
    now = standing(plan.cells, list(known.values()), store.repeats.count(), store.marked_again())
    return Summary(
        counts=dict(Counter(record.status for record in now.done)),
        new=len(session.new),
        left=now.left,
        num_repeats=sum(now.begun.values()),
        num_again=now.num_again,
        stopped=session.stopped,
        missing_shards=store.info(has_plan=False).missing_shards,
        folder=store.folder,
    )


def _has_fewer(item: PlannedCell, record: Record | None) -> bool:
    """Tell whether a cell was timed in fewer processes than it would be now; that is in no key."""
    if record is None or record.status != "ok" or record.timing is None:
        return False
    return max(len(record.timing.process_sizes), 1) < item.repeats


def _known_ceilings(store: Store) -> frozenset[tuple[str, str, str, int | None]]:
    with suppress(StoreError):  # whoever adds to them will say so
        return frozenset(one.subject for one in store.ceilings())
    return frozenset()


def _repeats(
    store: Store, plan: Plan, records: Mapping[str, Record], environments: Collection[str] | None
) -> dict[str, list[Record]]:
    """Return the repeats that cells without a record have, by key; tidy away what a killed run left of the others.

    What is timed in turns has equally many: one that a killed run could not store for all of them is no pair.
    """
    usable: dict[str, list[Record]] = {}
    begun = store.repeats.count()
    bundles: dict[Hashable, list[str]] = {}
    for item in plan.cells:
        key = item.cell.key
        if key not in records and item.refusal is None:
            bundles.setdefault(item.bundle, []).append(key)
        if key not in begun:
            continue
        if key not in records:
            usable[key] = store.repeats.take(key, environments, most=item.repeats - 1)
        elif records[key].status == "ok":
            store.repeats.drop(key)
        else:
            store.repeats.retire(key)
    for keys in bundles.values():
        fewest = min(len(usable.get(key, ())) for key in keys)
        for key in keys:
            if len(usable.get(key, ())) > fewest:
                store.repeats.retire(key, beyond=fewest)
                del usable[key][fewest:]
    return usable


def lanes_of(
    left: Sequence[PlannedCell],
    records: Mapping[str, Record] | None = None,
    repeats: Mapping[str, Sequence[Record]] | None = None,
) -> list[Lane]:
    """Group runnable cells by repeat and by lane, with all records that their curves have, repeats included."""
    runnable = [item for item in left if item.refusal is None]
    if not runnable:
        return []
    records, repeats = records or {}, repeats or {}
    prior: dict[str, list[Record]] = {}
    for record in itertools.chain(records.values(), *repeats.values()):
        prior.setdefault(record.cell.curve, []).append(record)
    lanes: dict[tuple[int, str], list[PlannedCell]] = {}
    for repeat in range(max(item.repeats for item in runnable)):
        for item in runnable:
            if len(repeats.get(item.cell.key, ())) <= repeat < item.repeats:
                lanes.setdefault((repeat, item.lane), []).append(replace(item, repeat=repeat))

    def known(items: Sequence[PlannedCell]) -> list[Record]:
        curves = dict.fromkeys(item.cell.curve for item in items)
        return [record for curve in curves for record in prior.get(curve, [])]

    return [(items, known(items)) for items in lanes.values()]
