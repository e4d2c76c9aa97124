"""The log of a cell: all that its process prints, and never a reason for the cell to fail or for a disk to be full."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from attn_zoo.errors import StoreError

MAX_BYTES = 4 * 2**20
"""Of one log. What is printed beyond it is cut out of the middle: how it began and how it ended says most."""

_TAIL_BYTES = 64 * 2**10


def open_log(path: Path | str) -> int:
    """Return a descriptor that writes to the end of a log; a symbolic link is not followed.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from None


def keep_short(path: Path | str) -> None:
    """Cut what is too much out of a log that somebody may be writing to."""
    with suppress(OSError):
        if os.lstat(path).st_size <= MAX_BYTES + 2 * _TAIL_BYTES:
            return
        # Append mode, here as there: whatever is written meanwhile comes after what is kept.
        log = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
        try:
            tail = os.pread(log, _TAIL_BYTES, os.fstat(log).st_size - _TAIL_BYTES)
            os.ftruncate(log, MAX_BYTES)
            os.write(log, b"\n... something was cut here: a log is kept short ...\n" + tail)
        finally:
            os.close(log)


_END_BYTES, _END_LINES = 8000, 14


def end_of(log: Path) -> str:
    """Return the last lines of a log: after a crash, the stacks that faulthandler wrote."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _END_BYTES))
            return last_lines(file.read())
    except OSError:
        return ""


def last_lines(printed: bytes) -> str:
    """Return the last lines of what a process printed: after a crash, the stacks that faulthandler wrote."""
    text = printed[-_END_BYTES:].decode("utf-8", "replace")
    start = text.rfind("Fatal Python error")
    lines = [line for line in text[max(start, 0) :].splitlines() if not line.startswith("Extension modules:")]
    return "\n".join(lines[:_END_LINES] if start >= 0 else lines[-_END_LINES:])


def private_streams() -> tuple[IO[str], IO[str]]:
    """Return (orders, answers) and point descriptors 0 and 1 elsewhere, so that no variant can disturb them."""
    orders = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return orders, answers


class _PatientFile(io.FileIO):
    """Drops what cannot be written: a variant that prints does not fail because a disk is full."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def be_patient() -> None:
    """Let Python's standard output and error write to their descriptors whatever the text and the disk are."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = io.BufferedWriter(_PatientFile(number, "w", closefd=False))
        stream = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)


def log_to(path: str) -> None:
    """Send everything printed from here on, by C code too, to the end of a log; to the one before if it cannot be."""
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(StoreError):
        log = open_log(path)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
