"""The worker processes of a run: the one at work, the one that a lane keeps, and those that wait for an order.

Most of a process's start is loading torch, which takes no part in what is measured. So several load it at once, before
the first of them measures, and then wait for an order without using the processor. On a CPU nothing is measured while
a process loads; on a GPU, which that does not disturb, the next one loads meanwhile.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from attn_zoo.discovery.own_files import KNOWN_PROGRAMS
from attn_zoo.matrix.drive.engines.descendants import Keeper
from attn_zoo.matrix.drive.engines.process import Ended, WorkerProcess
from attn_zoo.matrix.kinds.all_kinds import kind_of
from attn_zoo.matrix.limits import available_bytes
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.measure.environment import num_cores
from attn_zoo.records import Ceilings, Environment, Record

MAX_STARTING = 8
"""Processes that start at once."""

WAITING_BYTES, WAITING_FRAC = 200 * 2**20, 0.05
"""What a process that waits occupies, a little more than measured; and how much of the memory all of them may."""

_TICK_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all cells of a run share.

    Args:
        logs: folder for one log per cell.
        environment: digest that records carry.
        variant_files: plain files that workers load first.
        data_dir: where tasks find local data.
        checkpoints: folder in which trainings keep one folder each, or None.
        weights: folder for trained weights that a matrix asks to keep, or None.
        threads: CPU threads of a cell that does not say, where several share the cores; None leaves torch's default.
        ceilings: (environment, device, dtype, threads) of what the folder knows already.
    """

    logs: Path
    environment: str = ""
    variant_files: tuple[str, ...] = ()
    data_dir: Path | None = None
    checkpoints: Path | None = None
    weights: Path | None = None
    threads: int | None = None
    ceilings: frozenset[tuple[str, str, str, int | None]] = frozenset()


class Control:
    """Asked before a bundle, and told after it. As it stands everything may start and run to its end."""

    def is_over(self) -> bool:
        """Tell whether no further cell will be allowed to start."""
        return False

    def is_wanted(self, item: PlannedCell) -> bool:  # noqa: ARG002
        """Tell whether a cell has no result yet; another of its repeats may have failed, which is one."""
        return True

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

    def moved_to(self, environment: Environment) -> str:  # noqa: ARG002
        """Take note of another machine that records come from; return why none may, empty where they may."""
        return ""

    def measured(self, ceilings: Sequence[Ceilings]) -> None:
        """Take note of what such a machine can do."""

    def say(self, text: str) -> None:
        """Pass a message on to whoever watches."""


class WorkerPool:
    """Hands orders to worker processes and accounts for the time around what they measure. Close it, or use `with`."""

    def __init__(self, settings: Settings, control: Control, ahead: Iterable[PlannedCell] = ()) -> None:
        self.settings, self.control = settings, control
        self.expect(ahead)
        self._kept: WorkerProcess | None = None
        self._waiting: list[WorkerProcess] = []
        self._share_s = 0.0  # of each process that started at last, in the time that they took together
        self._verdicts: dict[str, Any] = {}
        self._mark = uuid4().hex
        self._end_keeper = weakref.finalize(self, Keeper(self._mark).close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def expect(self, ahead: Iterable[PlannedCell]) -> None:
        """Take note of all that will be asked, in order, so that processes for it start several at a time.

        Some may never be asked. Time before this is none of theirs.
        """
        self._since = time.monotonic()
        self._ahead = list(ahead)
        self._places = {(item.cell.key, item.repeat): place for place, item in enumerate(self._ahead)}

    def log(self, item: PlannedCell) -> Path:
        """Return where the output of a cell, or of all that are timed in turns with it, goes: to that of the first."""
        return self.settings.logs / f"{item.cell.key}.log"

    def ask(
        self, items: Sequence[PlannedCell], *, keeps: bool = False, has_next: bool = False, **fields: Any
    ) -> list[Record] | Ended:
        """Have one process run these cells, and return its records with all their phases, or how it ended.

        Args:
            items: a bundle.
            keeps: the process may serve the next order too, if this one ends well.
            has_next: another process will be needed after this one, whatever lies ahead.
            fields: the rest of the order.
        """
        first, settings = items[0], self.settings
        began = time.monotonic()
        num_after = max(self._num_after(items[-1]), int(has_next and not keeps))
        worker, owed_s = self._take(first, num_after)
        if first.cell.device == "cuda" and num_after and not keeps and not self._waiting:
            self._start(first, worker.threads, 1)
        taken = time.monotonic()
        order = WorkOrder(
            cells=tuple(item.cell for item in items),
            budget_s=first.budget_s,
            has_energy=first.has_energy,
            has_count=tuple(item.has_count for item in items),
            environment=settings.environment,
            variant_files=settings.variant_files,
            data_dir=str(settings.data_dir) if settings.data_dir else None,
            log=str(self.log(first)),
            verdicts=dict(self._verdicts),
            programs=dict(KNOWN_PROGRAMS),
            **fields,
        )
        try:
            answer = worker.run(order, [item.timeout_s for item in items], self.control.should_stop)
        except BaseException:
            worker.kill()
            raise
        if isinstance(answer, Ended):
            self._since = time.monotonic()
            return answer
        if keeps and worker.is_fit:
            self._kept = worker
        else:
            worker.close()
        self._verdicts |= worker.verdicts
        now, measured_s = time.monotonic(), sum(sum(record.phases.values()) for record in answer)
        shared = {
            "driver": began - self._since,
            "start": taken - began + owed_s + worker.waited_s,
            "exchange": max(now - taken - worker.waited_s - measured_s, 0.0),
        }
        self._since = now
        return [_with_shares(record, shared, len(answer)) for record in answer]

    def _num_after(self, item: PlannedCell) -> int:
        """Return how many more processes the cells after this one need in a row, up to MAX_STARTING."""
        place = self._places.get((item.cell.key, item.repeat), len(self._ahead))
        needed: set[object] = set()
        for later in islice(self._ahead, place + 1, None):
            if _kind(later) != _kind(item) or len(needed) >= MAX_STARTING:
                break
            if (process := (later.process, later.repeat)) != (item.process, item.repeat):
                needed.add(process)
        return len(needed)

    def _take(self, item: PlannedCell, num_after: int) -> tuple[WorkerProcess, float]:
        """Return a process for the item, and seconds that it owes to one before it: less than 0 if others owe it."""
        began, is_cpu = time.monotonic(), item.cell.device == "cpu"
        threads = item.cell.threads or self.settings.threads
        kept, self._kept = self._kept, None
        if kept is not None:
            if kept.threads == threads:
                return kept, 0.0
            kept.close()
        self._drop_unless(lambda worker: worker.threads == threads and (worker.is_starting() or worker.is_waiting))
        is_new = not self._waiting
        if is_new:
            has_more = is_cpu and kind_of(item.cell).is_timed
            self._start(item, threads, 1 + (min(num_after, _num_spare()) if has_more else 0))
        if is_cpu:
            for worker in self._waiting:
                while worker.is_starting(_TICK_S) and not self.control.should_stop():
                    pass
            # If none could start, or the run is being stopped, one is left to say so when it is asked.
            first = next((worker for worker in self._waiting if worker.is_waiting), self._waiting[0])
            self._drop_unless(lambda worker: worker is first or worker.is_waiting)
        owed_s = self._share_s
        if is_new:
            spent_s = time.monotonic() - began
            self._share_s = spent_s / len(self._waiting) if len(self._waiting) > 1 else 0.0
            owed_s = self._share_s * (1 - len(self._waiting))
        return self._waiting.pop(0), owed_s

    def _drop_unless(self, is_wanted: Callable[[WorkerProcess], bool]) -> None:
        for worker in [worker for worker in self._waiting if not is_wanted(worker)]:
            self._waiting.remove(worker)
            worker.close()

    def _start(self, item: PlannedCell, threads: int | None, count: int) -> None:
        for _ in range(count):  # one by one: those that were started are ended, whatever happens to the next
            self._waiting.append(WorkerProcess(self.log(item), threads, self._mark))

    def end_lane(self) -> None:
        """End the process that the lane kept: the next lane's must not have run anything of this one."""
        if self._kept is not None:
            self._kept.close()
        self._kept = None

    def close(self) -> None:
        """End what is left."""
        self.end_lane()
        while self._waiting:
            self._waiting.pop().close()
        self._end_keeper()


def _kind(item: PlannedCell) -> object:
    """Return what is equal for cells that a process which was started for one of them suits."""
    return kind_of(item.cell).name, item.cell.device, item.cell.threads


def _num_spare() -> int:
    """Return how many processes may wait while another measures: no more start at once than there are cores."""
    return min(MAX_STARTING, num_cores(), 1 + int(available_bytes() * WAITING_FRAC / WAITING_BYTES)) - 1


def _with_shares(record: Record, shared: dict[str, float], count: int) -> Record:
    """Add an equal share of what was spent for all cells of an order."""
    phases = {**record.phases, **{name: seconds / count for name, seconds in shared.items()}}
    return replace(record, phases={name: round(seconds, 4) for name, seconds in phases.items()})
