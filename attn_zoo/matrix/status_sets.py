"""What the statuses of records mean to a run: which are answers, which end a process, which end a lane."""

from __future__ import annotations

__all__ = ["ANSWERS", "CLEAN", "STOPPERS"]

ANSWERS = frozenset({"ok", "unsupported"})
"""The run did what was asked; everything else makes its exit code 1."""

CLEAN = frozenset({"ok", "unsupported", "gate_failed", "diverged"})
"""A process is as good after these as before. After any other it is replaced."""

STOPPERS = frozenset({"oom_device", "oom_host", "skipped_after_oom", "timeout"})
"""After these, longer lengths of the same lane are not tried: they need more of the same."""
