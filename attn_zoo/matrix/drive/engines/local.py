"""The default engine: worker processes on this machine; timings one at a time, trainings several if asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from attn_zoo.errors import counted
from attn_zoo.matrix.drive.supervise import Lane, beside, run_lane
from attn_zoo.matrix.drive.worker_pool import Control, Settings, WorkerPool
from attn_zoo.matrix.kinds.all_kinds import kind_of
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.measure.environment import num_cores
from attn_zoo.records import Record

_TICK_S = 0.2


def crowding(cells: Sequence[PlannedCell], jobs: int, cores: int) -> str:
    """Return the sentence that warns of more threads than cores, where `jobs` of the cells run at once, or ""."""
    asked = sorted((item.cell.threads or 0 for item in cells), reverse=True)[:jobs]
    share = max(1, cores // jobs)
    total = sum(threads or share for threads in asked)
    if total <= cores:
        return ""
    use = f"{len(asked)} trainings at once may use {total} threads on {counted(cores, 'core')}"
    return f"{use}: they will slow each other down"


class _SharedControl(Control):
    """Passes on to the driver's control, one call at a time; `num_jobs` lanes may run at once, and records say so."""

    def __init__(self, control: Control, num_jobs: int) -> None:
        self._control, self._num_jobs = control, num_jobs
        self._lock = threading.Lock()
        self._is_abandoned = False

    def abandon(self) -> None:
        """End every lane at once, without a record of what is running."""
        self._is_abandoned = True

    def take(self, lanes: Iterator[Lane]) -> Lane | None:
        """Return the next lane, or None after the last."""
        with self._lock:
            return next(lanes, None)

    def is_over(self) -> bool:
        with self._lock:
            return self._is_abandoned or self._control.is_over()

    def is_wanted(self, item: PlannedCell) -> bool:
        with self._lock:
            return self._control.is_wanted(item)

    def may_start(self, *bundle: PlannedCell) -> bool:
        with self._lock:
            return not self._is_abandoned and self._control.may_start(*bundle)

    def started(self, item: PlannedCell) -> None:
        with self._lock:
            self._control.started(item)

    def should_stop(self) -> bool:
        with self._lock:
            return self._is_abandoned or self._control.should_stop()

    def finished(self, record: Record) -> None:
        with self._lock:
            if not self._is_abandoned:
                self._control.finished(beside(record, self._num_jobs))

    def say(self, text: str) -> None:
        with self._lock:
            self._control.say(text)


def _may_share(lane: Lane) -> bool:
    """Tell whether other lanes may run beside this one."""
    cell = lane[0][0].cell
    return not kind_of(cell).is_timed and cell.data_parallel == 1


class LocalEngine:
    """Runs timing lanes one after another, for two at once would measure each other; then trainings, `jobs` at once.

    A training on several devices runs alone too.

    Each lane is supervised by a thread of its own, so that all of them are watched as closely as one would be.

    Args:
        jobs: trainings at once. With more than one, a cell that names no threads has its share of the cores.
    """

    is_remote = False

    def __init__(self, jobs: int = 1) -> None:
        self.jobs = jobs

    def run(self, lanes: Sequence[Lane], settings: Settings, control: Control) -> None:
        """Run all lanes; `control` is asked before each cell and told after it."""
        alone = [lane for lane in lanes if self.jobs == 1 or not _may_share(lane)]
        ahead = [item for items, _ in alone for item in items]
        with WorkerPool(settings, control, ahead) as pool:
            for items, prior in alone:
                if control.is_over():
                    return
                run_lane(items, pool, prior)
        trainings = [lane for lane in lanes if self.jobs > 1 and _may_share(lane)]
        if trainings and not control.is_over():
            self._run_at_once(trainings, settings, control)

    def _run_at_once(self, lanes: Sequence[Lane], settings: Settings, control: Control) -> None:
        num_jobs, cores = min(self.jobs, len(lanes)), num_cores()
        if warning := crowding([item for items, _ in lanes for item in items], num_jobs, cores):
            control.say(warning)
        if num_jobs > 1:
            import torch

            settings = replace(settings, threads=min(max(1, cores // num_jobs), torch.get_num_threads()))
        shared = _SharedControl(control, num_jobs)
        waiting = iter(lanes)

        def work() -> None:
            # The kernel ends a worker when the thread that started it ends: so one thread per lane, to its end.
            while not shared.is_over():
                lane = shared.take(waiting)
                if lane is None:
                    return
                with WorkerPool(settings, shared) as pool:
                    run_lane(lane[0], pool, lane[1])

        with ThreadPoolExecutor(num_jobs, thread_name_prefix="lane") as threads:
            running: set[Future[None]] = {threads.submit(work) for _ in range(num_jobs)}
            try:
                while running:  # short waits, so that Ctrl-C is heard by this thread, which alone can hear it
                    done, running = wait(running, _TICK_S, FIRST_COMPLETED)
                    for future in done:
                        future.result()
            except BaseException:
                shared.abandon()
                raise
