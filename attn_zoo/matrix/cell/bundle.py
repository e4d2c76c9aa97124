"""A bundle of cells in this process: one, or several of one length that are timed in turns, as peers are compared.

Each is built, passes its gate and is warmed up; then samples are taken in rounds; then each is weighed by itself. They
share their inputs, so that memory does not grow with their number: each adds its parameters and, in the backward alone,
its graph.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from attn_zoo.matrix.cell.conditions import Conditions
from attn_zoo.matrix.cell.outcomes import failure_record
from attn_zoo.matrix.cell.trial import Trial
from attn_zoo.measure.stopwatch import stopwatch_for
from attn_zoo.measure.timing import sample_in_turns
from attn_zoo.records import Record


class _Ledger:
    """Notes which member is at work, and charges the time between two rounds to the one that had it.

    Args:
        trials: all members.
        tell: told the member, for whoever has to know after a crash.
    """

    def __init__(self, trials: Sequence[Trial], tell: Callable[[int], object]) -> None:
        self._trials, self._tell = trials, tell
        self._index: int | None = None
        self._since = 0.0

    def at(self, index: int | None, *, has_phases: bool = False) -> None:
        """Go on with another member, or with none; one with phases keeps its own accounts."""
        now = time.perf_counter()
        if self._index is not None:
            phases = self._trials[self._index].phases
            phases["timing"] = phases.get("timing", 0.0) + now - self._since
        self._index, self._since = None if has_phases else index, now
        if index is not None:
            self._tell(index)


def measure_bundle(
    records: Sequence[Record],
    trials: Sequence[Trial],
    *,
    seed: int,
    tell: Callable[[int], object],
    room_bytes: int | None = None,
) -> list[Record]:
    """Measure cells and return their records. Every exception but Ctrl-C becomes a status of its own cell.

    Where an error has left the device unusable, only the records of failures are returned: for the others another
    process must begin anew.

    Args:
        records: of the cells, otherwise empty; one length, pass, dtype and so on.
        trials: of the same cells.
        seed: of the order in each round.
        tell: told the index of a cell whenever work on it begins.
        room_bytes: of memory that could be allocated at the start, for messages.
    """
    ledger = _Ledger(trials, tell)
    failures: dict[int, Record] = {}
    done: dict[int, Record] = {}
    is_usable = True

    def living() -> list[int]:
        return [index for index in range(len(trials)) if index not in failures]

    def failed(index: int, error: BaseException) -> None:
        failures[index] = failure_record(records[index], error, room_bytes)
        trials[index].drop()

    def guarded(step: Callable[[int], object], index: int) -> None:
        nonlocal is_usable
        ledger.at(index, has_phases=True)
        try:
            step(index)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a variant may even call sys.exit
            failed(index, error)
        if index in failures:  # outside the block above, whose traceback keeps tensors alive
            is_usable = is_usable and _tidy(trials[index].device)

    make_stopwatch = cache(stopwatch_for)  # one for all: it may hold a buffer that empties the cache
    inputs: Sequence[Tensor] | None = None

    def prepare(index: int) -> None:
        nonlocal inputs
        trials[index].prepare(inputs, make_stopwatch)
        inputs = trials[index].inputs

    for index in range(len(trials)):
        if is_usable:
            guarded(prepare, index)
    order = living() if is_usable else []
    with Conditions(trials[0].device) as conditions:
        sample_in_turns(
            [trials[index].sampling for index in order],
            seed=seed,
            at=lambda position: ledger.at(order[position]),
            failed=lambda position, error: failed(order[position], error),
        )
        ledger.at(None)
    is_usable = is_usable and (len(living()) == len(order) or _tidy(trials[0].device))

    def finish(index: int) -> None:
        done[index] = trials[index].finish(conditions)
        trials[index].drop()

    for step in (lambda index: trials[index].end_timing(), finish):  # all graphs go before anything is weighed
        for index in living():
            if is_usable:
                guarded(step, index)
    ended = {**done, **failures} if is_usable else failures
    return [_with_times(ended[index], trials[index]) for index in sorted(ended)]


def _with_times(record: Record, trial: Trial) -> Record:
    return replace(record, duration_s=round(sum(trial.phases.values()), 4), phases=trial.phases)


def _tidy(device: str) -> bool:
    """Free what a failure left behind; return whether the device still works."""
    gc.collect()
    if device == "cpu" or not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
