"""How each outcome of a cell is called in tables and marked in figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["OUTCOMES", "Outcome", "outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Words and mark of one status.

    Args:
        word: for a table cell.
        legend: for a legend entry, a few words.
        brief: for the margin of a figure, two or three words.
        marker: matplotlib marker, distinct without colour.
        is_failure: something went wrong, as opposed to a declared refusal or a user's choice.
    """

    word: str
    legend: str
    brief: str
    marker: str
    is_failure: bool


_OOM = Outcome("OOM", "out of memory", "out of memory", "X", True)
_FAILED = Outcome("failed", "failed", "failed", "P", True)

OUTCOMES: Mapping[str, Outcome] = {
    "ok": Outcome("ok", "measured", "measured", ".", False),
    "unsupported": Outcome("refused", "refused (unsupported)", "refused", "_", False),
    "gate_failed": Outcome("wrong", "failed its correctness gate", "wrong result", "v", True),
    "oom_device": _OOM,
    "oom_host": _OOM,
    "skipped_after_oom": Outcome("(OOM)", "skipped: a shorter one was out of memory", "skipped after OOM", "x", False),
    "timeout": Outcome("timeout", "timeout", "timeout", "s", True),
    "crashed": Outcome("crashed", "crashed", "crashed", "P", True),
    "diverged": Outcome("diverged", "diverged", "diverged", "D", True),
    "error": Outcome("error", "error", "error", "P", True),
    "cancelled": Outcome("cancelled", "cancelled", "cancelled", "|", False),
}


def outcome(status: str) -> Outcome:
    """Return words and mark of `status`; a status of a newer version is shown under its own name."""
    return OUTCOMES.get(status) or Outcome(status, status, status, _FAILED.marker, True)
