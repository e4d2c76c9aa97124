"""The curve of a training, sent to TensorBoard, Weights & Biases or trackio while it trains, where that is asked for.

The packages are optional. What goes wrong with one of them ends no training: the records have the same curve.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attn_zoo.errors import ConfigError, UnknownNameError, UnsupportedError, first_line
from attn_zoo.records import Cell

VARIABLE = "TRACK_TRAINING"
"""Of the environment: `TRACKER` or `TRACKER:PLACE`, for the processes that train."""

FOLDERS = {"tensorboard": "runs/tensorboard"}
"""Trackers whose place is a folder, and where by default."""

Values = Mapping[str, float]
Log = Callable[[Values, int], object]
Close = Callable[[], object]


def _name(cell: Cell) -> str:
    """Return what no other cell is called: ids leave out what a protocol decides, and two curves would be one."""
    return f"{cell.id}-{cell.key[:8]}"


def _tensorboard(place: str, cell: Cell) -> tuple[Log, Close]:
    from torch.utils.tensorboard import SummaryWriter  # raises ImportError where tensorboard is not installed

    writer: Any = SummaryWriter(str(Path(place or FOLDERS["tensorboard"]) / _name(cell)))

    def log(values: Values, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _online(name: str, place: str, cell: Cell, **more: Any) -> tuple[Log, Close]:
    module: Any = importlib.import_module(name)
    run = module.init(project=place or "attn-zoo", name=_name(cell), config=cell.to_dict(), resume="allow", **more)
    return (lambda values, step: run.log(dict(values), step=step)), run.finish


TRACKERS: Mapping[str, Callable[[str, Cell], tuple[Log, Close]]] = {
    "tensorboard": _tensorboard,
    "wandb": lambda place, cell: _online("wandb", place, cell, id=cell.key),
    "trackio": lambda place, cell: _online("trackio", place, cell),
}
"""What sends a curve, by name: given a place (a folder; a project) and the cell, it opens a run there."""


def check_tracker(text: str) -> str:
    """Return `text` as a process understands it that runs in another folder: with the whole path of a folder.

    Raises:
        UnknownNameError: there is no such tracker.
        UnsupportedError: its package cannot be loaded.
    """
    name, _, place = text.partition(":")
    if name not in TRACKERS:
        raise UnknownNameError("tracker", name, list(TRACKERS), f"there are {', '.join(TRACKERS)}")
    try:
        importlib.import_module(name)
    except Exception as error:  # as it is not installed, or does not suit another package that is
        raise UnsupportedError(name, f"{name} cannot be loaded ({first_line(error)}); pip install {name}") from None
    return f"{name}:{Path(place or FOLDERS[name]).absolute()}" if name in FOLDERS else text


@contextmanager
def tracked(cell: Cell) -> Iterator[Callable[[str, Values], None] | None]:
    """Yield what to call at each evaluation with the phase and an entry of the curve; None where nobody asks.

    Of processes that train together the first sends the curve.
    """
    name, _, place = os.environ.get(VARIABLE, "").partition(":")
    if not name or (cell.data_parallel > 1 and os.environ.get("RANK") != "0"):
        yield None
        return
    if name not in TRACKERS:
        raise ConfigError(VARIABLE, [("", f"expected one of {', '.join(TRACKERS)}; got {name!r}")])
    log: Log | None = None
    close: Close | None = None
    try:
        log, close = TRACKERS[name](place, cell)
    except Exception as error:
        _complain(name, error)

    def send(phase: str, entry: Values) -> None:
        nonlocal log
        if log is None:
            return
        try:
            log({f"{phase}/{key}": value for key, value in entry.items() if key != "step"}, int(entry["step"]))
        except Exception as error:
            _complain(name, error)
            log = None

    try:
        yield send
    finally:
        if close is not None:
            try:
                close()
            except Exception as error:
                _complain(name, error)


def _complain(name: str, error: Exception) -> None:
    print(f"{name}: {type(error).__name__}: {error}; the training goes on without it", file=sys.stderr)  # noqa: T201
