"""The default engine: worker processes on this machine; timings one at a time, trainings several if asked."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from attn_zoo.errors import ConfigError
from attn_zoo.matrix.drive.engines.shared import SharedControl
from attn_zoo.matrix.drive.supervise import Control, run_lane
from attn_zoo.matrix.drive.worker_pool import Crew, Settings
from attn_zoo.matrix.limits import num_cores
from attn_zoo.matrix.plan.expand import PlannedCell
from attn_zoo.records import Record

__all__ = ["LocalEngine", "crowding"]

Lane = tuple[Sequence[PlannedCell], Sequence[Record]]
_TICK_S = 0.2


def crowding(cells: Sequence[PlannedCell], jobs: int, cores: int) -> str:
    """Return the sentence that warns of more threads than cores, or an empty string.

    Args:
        cells: that may run at once.
        jobs: how many of them.
        cores: of this machine.
    """
    asked = sorted((item.cell.threads or 0 for item in cells), reverse=True)[:jobs]
    share = max(1, cores // jobs)
    total = sum(threads or share for threads in asked)
    if total <= cores:
        return ""
    return f"{len(asked)} trainings at once may use {total} threads on {cores} cores: they will slow each other down"


class LocalEngine:
    """Runs timing lanes one after another, for two at once would measure each other; then trainings, `jobs` at once.

    Each lane is supervised by a thread of its own, so that all of them are watched as closely as one would be.

    Args:
        jobs: trainings at once. With more than one, a cell that names no threads has its share of the cores.

    Raises:
        ConfigError: fewer than one job.
    """

    is_remote = False

    def __init__(self, jobs: int = 1) -> None:
        if jobs < 1:
            raise ConfigError("--jobs", [("", f"expected 1 or more; got {jobs}")])
        self.jobs = jobs

    def run(self, lanes: Sequence[Lane], settings: Settings, control: Control) -> None:
        """Run all lanes.

        Args:
            lanes: cells to run, ascending, and the records their lane has already.
            settings: of the run.
            control: asked before each cell and told after it.
        """
        alone = [lane for lane in lanes if self.jobs == 1 or lane[0][0].cell.kind != "accuracy"]
        ahead = [item for items, _ in alone for item in items]
        with Crew(settings, control.should_stop, control.is_over, ahead) as crew:
            for items, prior in alone:
                if control.is_over():
                    return
                run_lane(items, crew, control, prior)
        together = [lane for lane in lanes if self.jobs > 1 and lane[0][0].cell.kind == "accuracy"]
        if together and not control.is_over():
            self._run_together(together, settings, control)

    def _run_together(self, lanes: Sequence[Lane], settings: Settings, control: Control) -> None:
        num_jobs, cores = min(self.jobs, len(lanes)), num_cores()
        if warning := crowding([item for items, _ in lanes for item in items], num_jobs, cores):
            control.say(warning)
        if num_jobs > 1:
            import torch

            settings = replace(settings, threads=min(max(1, cores // num_jobs), torch.get_num_threads()))
        shared = SharedControl(control, num_jobs)
        waiting = iter(lanes)

        def work() -> None:
            # The kernel ends a worker when the thread that started it ends: so one thread per lane, to its end.
            while not shared.is_over():
                lane = shared.take(waiting)
                if lane is None:
                    return
                with Crew(settings, shared.should_stop, shared.is_over) as crew:
                    run_lane(lane[0], crew, shared, lane[1])

        with ThreadPoolExecutor(num_jobs, thread_name_prefix="lane") as pool:
            running: set[Future[None]] = {pool.submit(work) for _ in range(num_jobs)}
            try:
                while running:  # short waits, so that Ctrl-C is heard by this thread, which alone can hear it
                    done, running = wait(running, _TICK_S, FIRST_COMPLETED)
                    for future in done:
                        future.result()
            except BaseException:
                shared.abandon()
                raise
