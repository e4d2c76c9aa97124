"""Which named status an exception stands for, and the sentence that goes with it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

from attn_zoo.errors import (
    DEVICE_MEMORY_SIGNS,
    OVERFLOW_SIGNS,
    GateError,
    StoreError,
    UnsupportedError,
    first_line,
    memory_lacked_by,
    message_of,
)
from attn_zoo.records import Record, Status
from attn_zoo.units import human_bytes

_ASKED = re.compile(r"tried to allocate (\d+) bytes")
_TRACE_LINES, _TRACE_CHARS = 14, 4000


def _host_reason(error: BaseException, room_bytes: int | None) -> str:
    text = message_of(error, None)
    what = "an allocation failed"
    if asked := _ASKED.search(text):
        what = f"an allocation of {human_bytes(int(asked[1]))} failed"
    elif any(sign in text for sign in OVERFLOW_SIGNS):
        what = "a tensor of more bytes than can be counted"
    had = f"; {human_bytes(room_bytes)} were free when the cell began" if room_bytes is not None else ""
    return f"out of host memory: {what}{had}"


def outcome_of(error: BaseException, room_bytes: int | None = None) -> tuple[Status, str]:
    """Return (status, reason) for what ended a cell; `room_bytes` could be allocated when it began, if known."""
    text = message_of(error, None)
    if isinstance(error, UnsupportedError):
        return "unsupported", message_of(error.reason)
    if isinstance(error, GateError):
        return "gate_failed", message_of(text)
    if isinstance(error, StoreError):  # a full disk says nothing about the cell, which goes on from its checkpoint
        return "cancelled", message_of(text)
    match memory_lacked_by(error):
        case "device":  # the first line may be that of a compiler, which met it
            lines = message_of(error).splitlines()
            said = (line for line in lines if any(sign in line for sign in DEVICE_MEMORY_SIGNS))
            return "oom_device", next(said, first_line(error))
        case "host":
            return "oom_host", _host_reason(error, room_bytes)
    if isinstance(error, SystemExit):
        return "error", f"the variant called sys.exit({error.code!r})"
    return "error", f"{type(error).__name__}: {first_line(error)}"


def short_trace(error: BaseException) -> str:
    """Return the end of the traceback, where the cause is."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(lines[-_TRACE_LINES:])[-_TRACE_CHARS:].encode("utf-8", "backslashreplace").decode()


def run_one(
    records: Sequence[Record], measure: Callable[[Record, dict[str, float]], Record], room_bytes: int | None
) -> list[Record]:
    """Return the record of a single cell as `measure` gives it, with the seconds that this notes by phase.

    Every exception but Ctrl-C becomes a status of the cell.
    """
    (record,) = records
    phases: dict[str, float] = {}
    try:
        record = measure(record, phases)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a variant may even call sys.exit
        record = failure_record(record, error, room_bytes)
    return [replace(record, duration_s=round(sum(phases.values()), 4), phases=phases)]


def failure_record(record: Record, error: BaseException, room_bytes: int | None = None) -> Record:
    """Return the record of a cell that an exception ended; arguments as in `outcome_of`."""
    status, reason = outcome_of(error, room_bytes)
    return replace(record, status=status, reason=reason, trace=short_trace(error) if status == "error" else "")
