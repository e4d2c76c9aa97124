"""Most memory in use since a mark: the allocator's peak on GPU, the high water of the process on CPU.

The process's high water holds everything: interpreter and libraries (some 300 MB), data, weights. On Linux the kernel
resets it at the mark, so that what the process did before does not count; elsewhere it is that of the whole process.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

__all__ = ["peak_bytes", "reset_peak"]


def reset_peak(device: torch.device) -> None:
    """Set the mark."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Return the bytes, or None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
    except OSError:
        return _whole_process()


def _whole_process() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else 1024 * highest
