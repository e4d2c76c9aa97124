"""What a run says while it runs: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from typing import IO, ClassVar

from attn_zoo.errors import counted
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.records import Record
from attn_zoo.units import human_bytes


def span(seconds: float) -> str:
    """Return a duration for people.

    >>> span(0.42), span(59.6), span(3700)
    ('0.4 s', '1 min 00 s', '1 h 01 min')
    """
    whole = round(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def describe(record: Record) -> str:
    """Return one line: what became of a cell."""
    if record.status != "ok":
        return f"{record.status}: {' '.join(record.reason.split())}"
    if record.timing is not None:
        timing = record.timing
        by = f" by {len(timing.process_sizes)} processes" if len(timing.process_sizes) > 1 else ""
        text = f"{timing.median_ms:.4g} ms (95 %: {timing.low_ms:.4g} to {timing.high_ms:.4g}{by})"
        peak = record.memory.peak_bytes if record.memory else None
        text += f", peak {human_bytes(peak)}" if peak is not None else ""
        doubts = ", ".join(flag.replace("_", " ") for flag in timing.flags)
        return f"{text}, doubtful: {doubts}" if doubts else text
    if (found := record.approximation) is not None:
        return f"error {found.error:.3g} (mean of the values: {found.mean_error:.3g})"
    if record.score is not None:
        beside = f"chance: {record.score.chance:.3f}"
        if record.replacement is not None:
            beside = f"as trained: {record.replacement.trained_value:.3f}"
        return f"{record.score.metric} {record.score.value:.3f} ({beside})"
    return "ok"


class Progress:
    """Told what happens; shows nothing. Must not fail and must not take time while a cell is measured."""

    def begin(self, total: int, done: int, num_cells: int, eta_s: float) -> None:
        """Note how many measurements there are (cells, each with its repeats), how many were done before, and cells.

        `eta_s` is roughly what the others will take.
        """

    def started(self, item: PlannedCell, eta_s: float) -> None:
        """Note that a cell starts, and roughly what the whole run still takes."""

    def tick(self) -> None:
        """Note that time passes."""

    def finished(self, record: Record, step: str = "", num_done: int = 1) -> None:
        """Note what became of a cell, or of the repeat that `step` names, and how many measurements that ends."""

    def say(self, text: str) -> None:
        """Show a message."""

    def end(self) -> None:
        """Stop showing anything."""


class PlainProgress(Progress):
    """One line per cell, for logs and pipes: each with the time left, so that the last one tells it."""

    ENDS_WITH_LEFT: ClassVar[bool] = True

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.total = self.done = 0
        self._eta_s = self._since = 0.0

    def say(self, text: str) -> None:
        # Reasons quote foreign text: nothing in it may steer the terminal.
        self._print("".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text))

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def begin(self, total: int, done: int, num_cells: int, eta_s: float) -> None:
        self.total, self.done = total, done
        known = f", {done} of them done before" if done else ""
        repeats = f", {total} measurements with their repeats" if total > num_cells else ""
        takes = f", about {span(eta_s)} left" if eta_s else ""
        self.say(f"{counted(num_cells, 'cell')}{repeats}{known}{takes}")

    def started(self, item: PlannedCell, eta_s: float) -> None:  # noqa: ARG002
        self._eta_s, self._since = eta_s, time.monotonic()

    def _left_s(self, now: float) -> float:
        return max(self._eta_s - (now - self._since), 0.0)

    def finished(self, record: Record, step: str = "", num_done: int = 1) -> None:
        self.done += num_done
        around = "" if record.overhead_s is None else f", {span(record.overhead_s)} beside what it measured"
        took = span(sum(record.phases.values()) or record.duration_s)
        what = ": ".join(filter(None, [step, describe(record)]))
        left_s = self._left_s(time.monotonic()) if self.ENDS_WITH_LEFT and self.done < self.total else 0.0
        left = f"  about {span(left_s)} left" if left_s else ""
        self.say(f"[{self.done}/{self.total}] {record.cell.id}  {what}  [{took}{around}]{left}")


class LiveProgress(PlainProgress):
    """Finished cells scroll by; below them the running cells, and the time left.

    It is redrawn once a second by whoever waits, not by a thread: threads would take time from what is measured.
    """

    ENDS_WITH_LEFT: ClassVar[bool] = False
    MAX_SHOWN: ClassVar[int] = 8

    def __init__(self, stream: IO[str] | None = None) -> None:
        super().__init__(stream)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=self.stream, highlight=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._running: dict[str, tuple[str, float]] = {}  # id and start by key
        self._drawn = 0.0

    def begin(self, total: int, done: int, num_cells: int, eta_s: float) -> None:
        self._live.start()
        super().begin(total, done, num_cells, eta_s)

    def _print(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(text))

    def started(self, item: PlannedCell, eta_s: float) -> None:
        super().started(item, eta_s)
        self._running[item.cell.key] = item.cell.id, self._since
        self.tick()

    def finished(self, record: Record, step: str = "", num_done: int = 1) -> None:
        super().finished(record, step, num_done)
        self._running.pop(record.cell.key, None)

    def tick(self) -> None:
        from rich.text import Text

        now = time.monotonic()
        if not self._running or now - self._drawn < 1.0:
            return
        self._drawn = now
        self._live.update(Text("\n".join(self._picture(now)), no_wrap=True, overflow="ellipsis"), refresh=True)

    def _picture(self, now: float) -> list[str]:
        """Return the lines to show: one for a single cell, otherwise one for each and one for all."""
        known = f"about {span(self._left_s(now))} left in all" if self._eta_s else "time left unknown"
        running = list(self._running.values())
        if len(running) == 1:
            (name, since) = running[0]
            return [f"[{self.done + 1}/{self.total}] {name}  {span(now - since)}, {known}"]
        lines = [f"  {name}  {span(now - since)}" for name, since in running[: self.MAX_SHOWN]]
        if len(running) > self.MAX_SHOWN:
            lines.append(f"  and {len(running) - self.MAX_SHOWN} more")
        return [*lines, f"[{self.done}/{self.total}] {len(running)} running, {known}"]

    def end(self) -> None:
        self._running.clear()
        self._live.stop()


def make_progress(stream: IO[str] | None = None) -> Progress:
    """Return the live form on a terminal that can show it, the plain one otherwise (also with NO_COLOR set)."""
    stream = stream if stream is not None else sys.stderr
    is_plain = not stream.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return PlainProgress(stream) if is_plain else LiveProgress(stream)
