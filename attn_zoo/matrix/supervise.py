"""Run the cells of one lane in worker processes, and turn every way a process can end into a named outcome.

Both engines use this function: on this machine, or inside a Ray task on another.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from attn_zoo.matrix.cells import PlannedCell
from attn_zoo.matrix.engines.process import START_TIMEOUT_S, Ended, WorkerProcess
from attn_zoo.matrix.statuses import CLEAN, STOPPERS
from attn_zoo.records import Environment, Record, Status

__all__ = ["Control", "Settings", "run_lane", "skipped"]

_MAX_ATTEMPTS = 2
_FOREIGN = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TAIL_BYTES, _TAIL_LINES = 8000, 14


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
    """

    logs: Path
    environment: str = ""
    variant_files: tuple[str, ...] = ()
    data_dir: Path | None = None
    checkpoints: Path | None = None
    weights: Path | None = None
    threads: int | None = None


class Control(Protocol):
    """Who is asked before a cell, and told after it."""

    def is_over(self) -> bool:
        """Tell whether no further cell will be allowed to start."""

    def may_start(self, item: PlannedCell) -> bool:
        """Tell whether the cell may begin; False leaves it for another run."""

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
        earlier: records of the same lane.
    """
    cell = item.cell
    for record in earlier:
        length = record.cell.seq_len
        if record.status not in STOPPERS or length is None or cell.seq_len is None or cell.seq_len <= length:
            continue
        if record.status == "timeout":
            return Record(cell=cell, status="timeout", reason=f"not started: length {length} of the lane timed out")
        reason = f"not started: length {length} of the lane ended in {record.status}"
        return Record(cell=cell, status="skipped_after_oom", reason=reason)
    return None


def run_lane(items: Sequence[PlannedCell], settings: Settings, control: Control, prior: Sequence[Record] = ()) -> None:
    """Run cells of one lane, ascending; every cell that is started ends in one record.

    Args:
        items: of one lane.
        settings: of the run.
        control: asked and told.
        prior: records that the lane has already.
    """
    lane, worker = list(prior), None
    try:
        for item in items:
            hopeless = skipped(item, lane)
            if hopeless is not None:
                record = replace(hopeless, environment=settings.environment, isolation=item.isolation)
                lane.append(record)
                control.finished(record)
                continue
            if not control.may_start(item):
                continue
            control.started(item)
            result, worker = _run_one(item, settings, control, worker)
            if result is None:
                return
            lane.append(result)
            control.finished(result)
    finally:
        if worker is not None:
            worker.close()


def _run_one(
    item: PlannedCell, settings: Settings, control: Control, worker: WorkerProcess | None
) -> tuple[Record | None, WorkerProcess | None]:
    """Return the record (None if the run was stopped) and the worker where it may run another cell."""
    cell, log = item.cell, settings.logs / f"{item.cell.key}.log"
    checkpoint = settings.checkpoints / cell.key if settings.checkpoints and cell.kind == "accuracy" else None
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        if worker is None:
            worker = WorkerProcess(log, cell.threads or settings.threads)
        request = {
            "cell": cell.to_dict(),
            "budget_s": item.budget_s,
            "has_energy": item.has_energy,
            "has_count": item.has_count,
            "isolation": item.isolation,
            "attempt": attempt,
            "environment": settings.environment,
            "variant_files": settings.variant_files,
            "data_dir": str(settings.data_dir) if settings.data_dir else None,
            "checkpoint_dir": str(checkpoint) if checkpoint else None,
            "weights_dir": str(settings.weights) if settings.weights and item.keep_weights else None,
            "log": str(log),
        }
        began, clock = datetime.now(UTC), time.monotonic()
        try:
            answer = worker.run(request, item.timeout_s, control.should_stop)
        except BaseException:
            worker.kill()
            raise
        if isinstance(answer, Record):
            if item.isolation == "lane" and answer.status in CLEAN:
                return answer, worker
            worker.close()
            return answer, None
        worker = None
        if answer.why == "stopped":
            return None, None
        if _is_foreign(answer):  # killed from outside, for no reason of its own: that says nothing about the cell
            if control.is_over():
                return None, None  # whoever ended the run, such as a batch system, ended its workers too
            if attempt < _MAX_ATTEMPTS:
                continue
        status, reason = _classify(answer, item.timeout_s, attempt)
        record = Record(
            cell=cell,
            status=status,
            reason=reason,
            environment=settings.environment,
            started=began.isoformat(timespec="seconds"),
            duration_s=round(time.monotonic() - clock, 4),
            isolation=item.isolation,
            attempt=attempt,
            exit_code=answer.exit_code,
            trace=_tail(log),
        )
        return record, None
    raise AssertionError("the last attempt returns")


def _is_foreign(ended: Ended) -> bool:
    return ended.why == "exit" and -ended.exit_code in _FOREIGN and not ended.was_memory


def _classify(ended: Ended, timeout_s: float, attempt: int) -> tuple[Status, str]:
    if ended.why == "timeout":
        limit = f"its limit of {timeout_s:g} s" if ended.was_ready else f"{START_TIMEOUT_S:g} s of starting up"
        return "timeout", f"stopped after {limit}"
    if ended.exit_code == -signal.SIGKILL and ended.was_memory:
        return "oom_host", "killed by the operating system while using most of the memory"
    where = "" if ended.was_ready else " before it could run a cell"
    if ended.exit_code < 0:
        number = -ended.exit_code
        known = {item.value: item.name for item in signal.Signals}
        again = f" ({attempt} attempts)" if attempt > 1 else ""
        return "crashed", f"the process was ended by {known.get(number, f'signal {number}')}{where}{again}"
    return "crashed", f"the process ended with exit code {ended.exit_code} and no result{where}"


def _tail(log: Path) -> str:
    """Return the end of a log: after a crash, the stacks that faulthandler wrote."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    start = text.rfind("Fatal Python error")
    lines = [line for line in text[max(start, 0) :].splitlines() if not line.startswith("Extension modules:")]
    return "\n".join(lines[:_TAIL_LINES] if start >= 0 else lines[-_TAIL_LINES:])
