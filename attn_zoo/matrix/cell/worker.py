"""One cell in, one record out: in this process (`run_cell`), or in a process of its own that answers the supervisor.

The process reads one JSON request per line from its standard input and answers with one JSON line each on what was its
standard output. Both are moved out of reach first: whatever a variant prints or reads goes to the cell's log and to
nowhere. It dies with its supervisor.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from attn_zoo.matrix.limits import be_first_to_die, die_with_parent, limit_memory
from attn_zoo.matrix.status_sets import CLEAN
from attn_zoo.records import Cell, Record

__all__ = ["run_cell", "run_cells_in_turns"]


def _empty(cell: Cell, **fields: Any) -> Record:
    return Record(cell=cell, status="ok", started=datetime.now(UTC).isoformat(timespec="seconds"), **fields)


def run_cell(
    cell: Cell,
    *,
    budget_s: float = 1.0,
    has_energy: bool = False,
    has_count: bool = True,
    is_repeat: bool = False,
    environment: str = "",
    isolation: Literal["cell", "lane", "interleaved"] = "cell",
    attempt: int = 1,
    data_dir: Path | None = None,
    checkpoint_dir: Path | None = None,
    weights_dir: Path | None = None,
    room_bytes: int | None = None,
) -> Record:
    """Run one cell in this process and say what became of it; every exception but Ctrl-C becomes a status.

    Args:
        cell: what to run. Its variant must be registered.
        budget_s: seconds of sampling in a scaling cell.
        has_energy: measure energy in a scaling cell.
        has_count: count FLOPs in a scaling cell.
        is_repeat: times only, in a scaling cell: another process has checked and weighed it before.
        environment: digest that the record carries.
        isolation: whether this process ran other cells before.
        attempt: 1 for the first.
        data_dir: where tasks find local data.
        checkpoint_dir: where a training may continue from.
        weights_dir: where to store what was trained, or None.
        room_bytes: of memory that could be allocated at the start, for messages.

    Returns:
        A record, whatever happened.
    """
    from attn_zoo.matrix.cell.outcomes import outcome_of, short_trace

    begin = time.monotonic()
    record = _empty(cell, environment=environment, isolation=isolation, attempt=attempt)
    phases: dict[str, float] = {}
    try:
        if cell.kind == "scaling":
            from attn_zoo.matrix.cell.trial import Trial, measure_scaling

            trial = Trial(record, budget_s, has_energy=has_energy, has_count=has_count, is_repeat=is_repeat)
            phases = trial.phases
            record = measure_scaling(trial)
        else:
            from attn_zoo.matrix.cell.train import measure_accuracy

            record = measure_accuracy(record, data_dir=data_dir, checkpoint_dir=checkpoint_dir, weights_dir=weights_dir)
            phases = {"training": time.monotonic() - begin}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a variant may even call sys.exit: it becomes a named outcome
        status, reason = outcome_of(error, room_bytes)
        trace = short_trace(error) if status == "error" else ""
        record = replace(record, status=status, reason=reason, trace=trace)
    return replace(record, duration_s=round(time.monotonic() - begin, 4), phases=phases)


def run_cells_in_turns(
    cells: Sequence[Cell],
    *,
    budget_s: float = 1.0,
    has_energy: bool = False,
    has_count: Sequence[bool] = (),
    is_repeat: bool = False,
    environment: str = "",
    bundle: str = "",
    seed: int = 0,
    attempt: int = 1,
    tell: Callable[[int], object] = lambda index: None,  # noqa: ARG005
    room_bytes: int | None = None,
) -> list[Record]:
    """Run scaling cells that differ in the variant only, timed in turns; as `run_cell` otherwise.

    Args:
        cells: what to run.
        budget_s: seconds of sampling for each.
        has_energy: measure energy.
        has_count: for each cell, whether to count FLOPs.
        is_repeat: times only: another process has checked and weighed these very cells before.
        environment: digest that the records carry.
        bundle: id that the records carry.
        seed: of the order in each round.
        attempt: 1 for the first.
        tell: told the index of a cell whenever work on it begins.
        room_bytes: of memory that could be allocated at the start, for messages.

    Returns:
        A record of each cell; of failures only, where one of them left the device unusable.
    """
    from attn_zoo.matrix.cell.bundle import measure_together
    from attn_zoo.matrix.cell.trial import Trial

    records = [
        _empty(cell, environment=environment, isolation="interleaved", bundle=bundle, attempt=attempt) for cell in cells
    ]
    trials = [
        Trial(record, budget_s, has_energy=has_energy, has_count=counts, is_repeat=is_repeat)
        for record, counts in zip(records, has_count or [True] * len(records), strict=True)
    ]
    return measure_together(records, trials, seed=seed, tell=tell, room_bytes=room_bytes)


def _private_streams() -> tuple[IO[str], IO[str]]:
    """Return (requests, answers) and point descriptors 0 and 1 elsewhere, so that no variant can disturb them."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _log_to(path: str) -> None:
    """Send everything printed from here on, by C code too, to the end of the file."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _answer(request: dict[str, Any], tell: Callable[[int], object]) -> list[Record]:
    from attn_zoo.errors import AttnZooError, ConfigError
    from attn_zoo.matrix.plan.source_digest import source_digest
    from attn_zoo.registry import load_file, variants

    cells = [Cell.from_dict(data, "request") for data in request["cells"]]
    room = limit_memory() if cells[0].device == "cpu" else None
    try:
        for path in request["variant_files"]:
            load_file(path, None)  # this process is the isolation: no need to try the import in another one first
        for cell in cells:
            if source_digest(variants[cell.variant]) != cell.variant_digest:
                raise ConfigError(cell.variant, [("", "its source was changed while the matrix ran; run again")])
    except AttnZooError as error:
        empty = [_empty(cell, environment=request["environment"]) for cell in cells]
        return [replace(record, status="error", reason=str(error)) for record in empty]
    told = ("budget_s", "has_energy", "environment", "attempt", "is_repeat")
    common: dict[str, Any] = {name: request[name] for name in told}
    if request["isolation"] == "interleaved":
        extra = {name: request[name] for name in ("has_count", "bundle", "seed")}
        return run_cells_in_turns(cells, tell=tell, room_bytes=room, **common, **extra)
    names = ("data_dir", "checkpoint_dir", "weights_dir")
    folders: dict[str, Any] = {name: Path(request[name]) if request[name] else None for name in names}
    (has_count,) = request["has_count"]
    record = run_cell(
        cells[0], has_count=has_count, isolation=request["isolation"], room_bytes=room, **common, **folders
    )
    return [record]


def main() -> None:
    """Answer requests until the supervisor closes the pipe, or a failure makes this process unfit for another cell."""
    die_with_parent(int(sys.argv[1]))
    place = int(sys.argv[2])
    be_first_to_die()
    requests, answers = _private_streams()
    # Before "ready", so that no cell pays for it: torch, and what is registered in this package and installed ones.
    importlib.import_module("attn_zoo.matrix.cell.trial")
    list(importlib.import_module("attn_zoo.registry").variants)
    print(json.dumps({"event": "ready"}), file=answers, flush=True)
    from attn_zoo.conformance.verdicts import known, learn

    for line in requests:
        request = json.loads(line)
        _log_to(request["log"])
        learn(request["verdicts"])
        # Written, not sent: a message would wake the supervisor while something is timed.
        records = _answer(request, lambda index: os.pwrite(place, index.to_bytes(4, "little"), 0))
        sys.stdout.flush()
        answer = {"event": "done", "records": [record.to_dict() for record in records], "verdicts": known()}
        print(json.dumps(answer, allow_nan=False), file=answers, flush=True)
        if any(record.status not in CLEAN for record in records):
            break
    sys.stderr.flush()
    os._exit(0)  # taking a loaded torch apart takes a fifth of a second, and nothing here needs it


if __name__ == "__main__":
    main()
