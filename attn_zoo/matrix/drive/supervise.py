"""Run the cells of one lane in order: what is hopeless is not started, and every end of a worker is a named outcome.

Both engines use this function: on this machine, or on a node of a cluster.
"""

from __future__ import annotations

import hashlib
import itertools
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from attn_zoo.matrix.cell.log import end_of
from attn_zoo.matrix.drive.engines.process import START_TIMEOUT_S, Ended
from attn_zoo.matrix.drive.worker_pool import WorkerPool
from attn_zoo.matrix.kinds.all_kinds import kind_of
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.measure.environment import hashed_host
from attn_zoo.records import STOPPERS, Record, Status

Lane = tuple[Sequence[PlannedCell], Sequence[Record]]
"""Cells that run one after another, shorter sequences first, and the records that their curves have already."""


def beside(record: Record, num_jobs: int) -> Record:
    """Return the record of a cell that shared its device with others, `num_jobs` in all, which it then says."""
    if num_jobs == 1:
        return record
    if record.status in {"oom_host", "oom_device"}:
        shared = f"{num_jobs} cells may have shared the memory: fewer --jobs leave each more"
        record = replace(record, reason=f"{record.reason} ({shared})")
    return replace(record, num_jobs=num_jobs)


def skipped(item: PlannedCell, earlier: Sequence[Record]) -> Record | None:
    """Return the record of a cell that a shorter length of its curve makes hopeless, or None."""
    cell = item.cell
    for record in earlier:
        length = record.cell.seq_len
        if record.cell.curve != cell.curve or record.status not in STOPPERS:
            continue
        if length is None or cell.seq_len is None or cell.seq_len <= length:
            continue
        if record.status == "timeout":
            return Record(cell=cell, status="timeout", reason=f"not started: length {length} of the lane timed out")
        reason = f"not started: length {length} of the lane ended in {record.status}"
        return Record(cell=cell, status="skipped_after_oom", reason=reason)
    return None


def run_lane(items: Sequence[PlannedCell], pool: WorkerPool, prior: Sequence[Record] = ()) -> None:
    """Run the cells of a lane, or several repeats of it; every cell, or repeat, that is started ends in one record.

    The pool, whose control is asked and told, may serve other lanes before and after.
    """
    known, host, control = list(prior), hashed_host(), pool.control
    ended: set[str] = set()  # cells that failed: they are not repeated
    bundles = [list(group) for _, group in itertools.groupby(items, key=lambda item: item.bundle)]
    try:
        for index, bundle in enumerate(bundles):
            todo = []
            for item in bundle:
                if item.cell.key in ended or not control.is_wanted(item):
                    continue
                if (record := skipped(item, known)) is None:
                    todo.append(item)
                    continue
                known.append(replace(record, environment=pool.settings.environment, isolation=item.isolation))
                control.started(item)  # which repeat ends is known by it
                control.finished(known[-1])
                ended.add(item.cell.key)
            if not todo or not control.may_start(*todo):
                continue
            for item in todo:
                control.started(item)
            records = run_bundle(todo, pool, has_next=index + 1 < len(bundles))
            if records is None:
                return
            for measured in records:
                record = replace(measured, host=host)
                known.append(record)
                control.finished(record)
                if record.status != "ok":
                    ended.add(record.cell.key)
    finally:
        pool.end_lane()


_MAX_ATTEMPTS = 2
_FOREIGN = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_bundle(
    items: Sequence[PlannedCell], pool: WorkerPool, has_next: bool, *, is_alone: bool = False
) -> list[Record] | None:
    """Return the records of one bundle; None if the run was stopped.

    A cell that ends its process keeps the blame; others of the bundle begin anew without it. One that runs out of
    memory, where others hold some too, is run again by itself (`is_alone`): then the failure is its own, or its timing
    says `timed_alone`.
    """
    first, settings = items[0], pool.settings
    isolation = "cell" if is_alone else first.isolation
    is_in_turns = isolation == "interleaved"
    bundle = _bundle_id(items) if is_in_turns else ""
    is_training = not kind_of(first.cell).is_timed
    records: dict[str, Record] = {}
    attempt = 1
    while left := [item for item in items if item.cell.key not in records]:
        began, clock = datetime.now(UTC), time.monotonic()
        answer = pool.ask(
            left,
            keeps=isolation == "lane" and has_next,
            has_next=has_next,
            isolation=isolation,
            attempt=attempt,
            bundle=bundle,
            seed=1000 * first.cell.seed + first.repeat,
            is_repeat=first.repeat > 0,
            checkpoint_dir=_folder(settings.checkpoints, first.cell.key) if is_training else None,
            weights_dir=_folder(settings.weights) if first.keep_weights else None,
        )
        if not isinstance(answer, Ended):
            records |= {record.cell.key: record for record in answer}
        elif _is_stopped(answer, pool):
            return None
        elif _is_foreign(answer) and attempt < _MAX_ATTEMPTS:
            attempt += 1  # killed from outside, for no reason of its own: that says nothing about the cells
        else:
            guilty = left[answer.at]
            status, reason = _classify(answer, guilty.timeout_s, attempt)
            records[guilty.cell.key] = Record(
                cell=guilty.cell,
                status=status,
                reason=reason,
                environment=settings.environment,
                started=began.isoformat(timespec="seconds"),
                duration_s=round(time.monotonic() - clock, 4),
                isolation=isolation,
                bundle=bundle,
                attempt=attempt,
                exit_code=answer.exit_code,
                trace=end_of(pool.log(left[0])),
            )
            attempt = 1
    for item in items:
        if records[item.cell.key].status in {"oom_device", "oom_host"} and len(items) > 1:
            again = run_bundle([item], pool, has_next, is_alone=True)
            if again is None:
                return None
            (record,) = again
            if (timing := record.timing) is not None:
                record = replace(record, timing=replace(timing, flags=(*timing.flags, "timed_alone")))
            records[item.cell.key] = record
    return [records[item.cell.key] for item in items]


def _folder(folder: Path | None, name: str = "") -> str | None:
    return str(folder / name) if folder else None


def _bundle_id(items: Sequence[PlannedCell]) -> str:
    """Return a name that no other run of the same cells has: samples of two runs are no pairs."""
    cell = items[0].cell
    text = f"{time.time_ns()} {' '.join(item.cell.key for item in items)}"
    return f"{cell.scope}/{cell.pass_}/L{cell.seq_len}/{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def _is_stopped(ended: Ended, pool: WorkerPool) -> bool:
    """Tell whether the run is at its end: whoever ended it, such as a batch system, ended its workers too."""
    return ended.why == "stopped" or (_is_foreign(ended) and pool.control.is_over())


def _is_foreign(ended: Ended) -> bool:
    return ended.why == "exit" and not ended.fault and -ended.exit_code in _FOREIGN and not ended.was_memory


def _classify(ended: Ended, timeout_s: float, attempt: int) -> tuple[Status, str]:
    if ended.fault:
        return "error", f"the process was ended: {ended.fault}"
    if ended.why == "timeout":
        if not ended.was_ready:  # which says nothing about longer lengths
            return "crashed", f"the process was not ready within {START_TIMEOUT_S:g} s of its start"
        return "timeout", f"stopped after its limit of {timeout_s:g} s"
    if ended.exit_code == -signal.SIGKILL and ended.was_memory:
        return "oom_host", "killed by the operating system while using most of the memory"
    where = "" if ended.was_ready else " before it could run a cell"
    if ended.exit_code < 0:
        number = -ended.exit_code
        known = {item.value: item.name for item in signal.Signals}
        again = f" ({attempt} attempts)" if attempt > 1 else ""
        return "crashed", f"the process was ended by {known.get(number, f'signal {number}')}{where}{again}"
    return "crashed", f"the process ended with exit code {ended.exit_code} and no result{where}"
