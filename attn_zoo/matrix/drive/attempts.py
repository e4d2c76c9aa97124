"""Run one cell, or several in turns, and turn every way a worker process can end into a named outcome."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from attn_zoo.matrix.drive.engines.process import START_TIMEOUT_S, Ended
from attn_zoo.matrix.drive.merge_repeats import pooled
from attn_zoo.matrix.drive.worker_pool import Crew
from attn_zoo.matrix.plan.planned import PlannedCell
from attn_zoo.records import Record, Status

__all__ = ["run_alone", "run_in_turns"]

_MAX_ATTEMPTS = 2
_FOREIGN = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TAIL_BYTES, _TAIL_LINES = 8000, 14


def run_alone(item: PlannedCell, crew: Crew, has_next: bool) -> list[Record] | None:
    """Return the record of one cell, or None if the run was stopped.

    Args:
        item: to run.
        crew: of its track.
        has_next: another cell will follow.
    """
    cell, settings = item.cell, crew.settings
    checkpoint = settings.checkpoints / cell.key if settings.checkpoints and cell.kind == "accuracy" else None
    isolation = "cell" if item.isolation == "interleaved" else item.isolation
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        began, clock = datetime.now(UTC), time.monotonic()
        answer = crew.ask(
            [item],
            keeps=isolation == "lane" and has_next,
            has_next=has_next,
            isolation=isolation,
            attempt=attempt,
            is_repeat=item.repeat > 0,
            data_dir=str(settings.data_dir) if settings.data_dir else None,
            checkpoint_dir=str(checkpoint) if checkpoint else None,
            weights_dir=str(settings.weights) if settings.weights and item.keep_weights else None,
        )
        if not isinstance(answer, Ended):
            return answer
        if _is_stopped(answer, crew):
            return None
        if _is_foreign(answer) and attempt < _MAX_ATTEMPTS:
            continue  # killed from outside, for no reason of its own: that says nothing about the cell
        record = _failure(item, answer, crew.log(item), crew.settings.environment, attempt, began, clock)
        return [replace(record, isolation=isolation)]
    raise AssertionError("the last attempt returns")


def run_in_turns(items: Sequence[PlannedCell], crew: Crew, has_next: bool) -> list[Record] | None:
    """Return the records of cells that are timed in turns, in as many processes as they ask for; None if stopped.

    A cell that ends its process keeps the blame; the others begin anew without it. One that runs out of memory, where
    the others hold some too, is run again by itself: then the failure is its own, or its timing says `timed_alone`.

    Args:
        items: one length of each lane.
        crew: of their track.
        has_next: other cells will follow.
    """
    bundle = _bundle_id(items)
    found: dict[str, list[Record]] = {item.cell.key: [] for item in items}
    final: dict[str, Record] = {}
    num_processes = items[0].num_processes
    for process in range(num_processes):
        attempt = 1
        while left := [item for item in items if item.cell.key not in final and len(found[item.cell.key]) <= process]:
            began, clock = datetime.now(UTC), time.monotonic()
            answer = crew.ask(
                left,
                has_next=has_next or process + 1 < num_processes,
                isolation="interleaved",
                attempt=attempt,
                bundle=bundle,
                seed=1000 * left[0].cell.seed + process,
                is_repeat=process > 0,
            )
            if not isinstance(answer, Ended):
                for record in answer:
                    if record.status == "ok":
                        found[record.cell.key].append(record)
                    else:
                        final[record.cell.key] = record
            elif _is_stopped(answer, crew):
                return None
            elif _is_foreign(answer) and attempt < _MAX_ATTEMPTS:
                attempt += 1
            else:
                guilty = left[answer.at]
                record = _failure(guilty, answer, crew.log(left[0]), crew.settings.environment, attempt, began, clock)
                final[guilty.cell.key] = replace(record, isolation="interleaved", bundle=bundle)
                attempt = 1
    for item in items:
        key = item.cell.key
        if key not in final:
            final[key] = pooled(found[key])
        elif final[key].status in {"oom_device", "oom_host"} and len(items) > 1:
            again = run_alone(item, crew, has_next)
            if again is None:
                return None
            final[key] = _marked(again[0])
    return [final[item.cell.key] for item in items]


def _marked(record: Record) -> Record:
    if record.timing is None:
        return record
    return replace(record, timing=replace(record.timing, flags=(*record.timing.flags, "timed_alone")))


def _bundle_id(items: Sequence[PlannedCell]) -> str:
    """Return a name that no other run of the same cells has: samples of two runs are no pairs."""
    cell = items[0].cell
    text = f"{time.time_ns()} {' '.join(item.cell.key for item in items)}"
    return f"{cell.scope}/{cell.pass_}/L{cell.seq_len}/{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def _failure(
    item: PlannedCell, ended: Ended, log: Path, environment: str, attempt: int, began: datetime, clock: float
) -> Record:
    status, reason = _classify(ended, item.timeout_s, attempt)
    return Record(
        cell=item.cell,
        status=status,
        reason=reason,
        environment=environment,
        started=began.isoformat(timespec="seconds"),
        duration_s=round(time.monotonic() - clock, 4),
        attempt=attempt,
        exit_code=ended.exit_code,
        trace=_tail(log),
    )


def _is_stopped(ended: Ended, crew: Crew) -> bool:
    """Tell whether the run is at its end: whoever ended it, such as a batch system, ended its workers too."""
    return ended.why == "stopped" or (_is_foreign(ended) and crew.is_over())


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
