"""The worker processes of one track: the one that is kept, and on a GPU the one that starts while another measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attn_zoo.matrix.engines.process import Ended, WorkerProcess
from attn_zoo.matrix.planned import PlannedCell
from attn_zoo.matrix.statuses import CLEAN
from attn_zoo.records import Record

__all__ = ["Crew", "Settings"]


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


class Crew:
    """Hands requests to worker processes and accounts for the time around what they measure.

    Args:
        settings: of the run.
        should_stop: asked several times a second while a worker runs; True ends it at once.
        is_over: tells whether no further cell will be allowed to start.
    """

    def __init__(self, settings: Settings, should_stop: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        self.settings, self._should_stop, self.is_over = settings, should_stop, is_over
        self._kept: WorkerProcess | None = None
        self._spare: WorkerProcess | None = None
        self._since = time.monotonic()

    def log(self, item: PlannedCell) -> Path:
        """Return where the output of a cell, or of all that are timed in turns with it, goes: to that of the first."""
        return self.settings.logs / f"{item.cell.key}.log"

    def ask(
        self, items: Sequence[PlannedCell], *, keeps: bool = False, has_next: bool = False, **request: Any
    ) -> list[Record] | Ended:
        """Have one process run these cells, and return its records with all their phases, or how it ended.

        Args:
            items: one cell, or those to be timed in turns.
            keeps: the process may serve the next request too, if this one ends well.
            has_next: another process will be needed after this one.
            request: the rest of what the worker is told.
        """
        first, settings = items[0], self.settings
        began = time.monotonic()
        worker = self._take(first)
        if has_next and not keeps and first.cell.device == "cuda":
            # Loading torch disturbs nothing that a GPU does. On a CPU it would take time from what is measured.
            self._spare = WorkerProcess(self.log(first), worker.threads)
        whole = {
            "cells": [item.cell.to_dict() for item in items],
            "budget_s": first.budget_s,
            "has_energy": first.has_energy,
            "has_count": [item.has_count for item in items],
            "environment": settings.environment,
            "variant_files": settings.variant_files,
            "log": str(self.log(first)),
            **request,
        }
        spawned = time.monotonic()
        try:
            answer = worker.run(whole, [item.timeout_s for item in items], self._should_stop)
        except BaseException:
            worker.kill()
            raise
        if isinstance(answer, Ended):
            self._since = time.monotonic()
            return answer
        if keeps and all(record.status in CLEAN for record in answer):
            self._kept = worker
        else:
            worker.close()
        driver_s, start_s = began - self._since, spawned - began + worker.waited_s
        self._since = time.monotonic()
        exchange_s = self._since - began - start_s - sum(sum(record.phases.values()) for record in answer)
        shared = {"driver": driver_s, "start": start_s, "exchange": max(exchange_s, 0.0)}
        return [_with_shares(record, shared, len(answer)) for record in answer]

    def _take(self, item: PlannedCell) -> WorkerProcess:
        threads = item.cell.threads or self.settings.threads
        found, self._kept = self._kept or self._spare, None
        if found is self._spare:
            self._spare = None
        if found is not None and found.threads == threads:
            return found
        if found is not None:
            found.close()
        return WorkerProcess(self.log(item), threads)

    def close(self) -> None:
        """End what is left."""
        for worker in (self._kept, self._spare):
            if worker is not None:
                worker.close()
        self._kept = self._spare = None


def _with_shares(record: Record, shared: dict[str, float], count: int) -> Record:
    """Add an equal share of what was spent for all cells of a request."""
    phases = {**record.phases, **{name: seconds / count for name, seconds in shared.items()}}
    return replace(record, phases={name: round(seconds, 4) for name, seconds in phases.items()})
