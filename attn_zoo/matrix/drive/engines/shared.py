"""One control for several lanes at once: a lock around the driver, and an end for all where one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from attn_zoo.matrix.drive.supervise import Control
from attn_zoo.matrix.plan.planned import PlannedCell
from attn_zoo.records import Environment, Record

__all__ = ["SharedControl"]

_Item = TypeVar("_Item")


class SharedControl(Control):
    """Passes on to the driver's control, one call at a time.

    Args:
        control: the driver's.
        num_jobs: lanes that may run at once; records say so.
    """

    def __init__(self, control: Control, num_jobs: int) -> None:
        self._control, self._num_jobs = control, num_jobs
        self._lock = threading.Lock()
        self._is_abandoned = False

    def abandon(self) -> None:
        """End every lane at once, without a record of what is running."""
        self._is_abandoned = True

    def take(self, items: Iterator[_Item]) -> _Item | None:
        """Return the next item, or None after the last."""
        with self._lock:
            return next(items, None)

    def is_over(self) -> bool:
        with self._lock:
            return self._is_abandoned or self._control.is_over()

    def may_start(self, item: PlannedCell, *beside: PlannedCell) -> bool:
        with self._lock:
            return not self._is_abandoned and self._control.may_start(item, *beside)

    def started(self, item: PlannedCell) -> None:
        with self._lock:
            self._control.started(item)

    def should_stop(self) -> bool:
        with self._lock:
            return self._is_abandoned or self._control.should_stop()

    def finished(self, record: Record) -> None:
        record = replace(record, num_jobs=self._num_jobs)
        if record.status in {"oom_host", "oom_device"} and self._num_jobs > 1:
            shared = f"{self._num_jobs} cells may have shared the memory: fewer --jobs leave each more"
            record = replace(record, reason=f"{record.reason} ({shared})")
        with self._lock:
            if not self._is_abandoned:
                self._control.finished(record)

    def moved_to(self, environment: Environment) -> None:
        with self._lock:
            self._control.moved_to(environment)

    def say(self, text: str) -> None:
        with self._lock:
            self._control.say(text)
