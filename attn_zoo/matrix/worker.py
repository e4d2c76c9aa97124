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
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from attn_zoo.matrix.limits import be_first_to_die, die_with_parent, limit_memory
from attn_zoo.matrix.statuses import CLEAN
from attn_zoo.records import Cell, Record

__all__ = ["run_cell"]


def run_cell(
    cell: Cell,
    *,
    budget_s: float = 1.0,
    has_energy: bool = False,
    has_count: bool = True,
    environment: str = "",
    isolation: Literal["cell", "lane"] = "cell",
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
    from attn_zoo.matrix.outcomes import outcome_of, short_trace

    started, begin = datetime.now(UTC), time.monotonic()
    record = Record(
        cell=cell,
        status="ok",
        environment=environment,
        started=started.isoformat(timespec="seconds"),
        isolation=isolation,
        attempt=attempt,
    )
    try:
        if cell.kind == "scaling":
            from attn_zoo.matrix.scaling import measure_scaling

            record = measure_scaling(record, budget_s, has_energy=has_energy, has_count=has_count)
        else:
            from attn_zoo.matrix.accuracy import measure_accuracy

            record = measure_accuracy(record, data_dir=data_dir, checkpoint_dir=checkpoint_dir, weights_dir=weights_dir)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a variant may even call sys.exit: it becomes a named outcome
        status, reason = outcome_of(error, room_bytes)
        trace = short_trace(error) if status == "error" else ""
        record = replace(record, status=status, reason=reason, trace=trace)
    return replace(record, duration_s=round(time.monotonic() - begin, 4))


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


def _answer(request: dict[str, Any]) -> Record:
    from attn_zoo.discovery import load_file
    from attn_zoo.errors import AttnZooError, ConfigError
    from attn_zoo.matrix.sources import source_digest
    from attn_zoo.registry import variants

    cell = Cell.from_dict(request["cell"], "request")
    room = limit_memory() if cell.device == "cpu" else None
    try:
        for path in request["variant_files"]:
            load_file(path, None)  # this process is the isolation: no need to try the import in another one first
        if source_digest(variants[cell.variant]) != cell.variant_digest:
            raise ConfigError(cell.variant, [("", "its source was changed while the matrix ran; run again")])
    except AttnZooError as error:
        return Record(cell=cell, status="error", reason=str(error), environment=request["environment"])
    names = ("data_dir", "checkpoint_dir", "weights_dir")
    folders = {name: Path(request[name]) if request[name] else None for name in names}
    return run_cell(
        cell,
        budget_s=request["budget_s"],
        has_energy=request["has_energy"],
        has_count=request["has_count"],
        environment=request["environment"],
        isolation=request["isolation"],
        attempt=request["attempt"],
        room_bytes=room,
        **folders,
    )


def main() -> None:
    """Answer requests until the supervisor closes the pipe, or a failure makes this process unfit for another cell."""
    die_with_parent(int(sys.argv[1]))
    be_first_to_die()
    requests, answers = _private_streams()
    importlib.import_module("attn_zoo.matrix.scaling")  # and torch: before "ready", so that no cell pays for it
    print(json.dumps({"event": "ready"}), file=answers, flush=True)
    for line in requests:
        request = json.loads(line)
        _log_to(request["log"])
        record = _answer(request)
        sys.stdout.flush()
        print(json.dumps({"event": "done", "record": record.to_dict()}, allow_nan=False), file=answers, flush=True)
        if record.status not in CLEAN:
            return


if __name__ == "__main__":
    main()
