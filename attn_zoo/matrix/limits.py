"""What a process may use: memory, a limit on it that fails cleanly, traces of the out-of-memory killer.

For Linux; elsewhere fewer things are known, and None says so.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))
_HEADROOM = 0.95  # the rest of the machine needs something too


def _cgroup_number(*names: str, key: str = "") -> int | None:
    """Return the number in the first of these files that has one, in its line that begins with `key`."""
    for folder in _CGROUPS:
        for name in names:
            try:
                lines = (folder / name).read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                before, _, value = line.strip().rpartition(" ")
                if before == key and value.isdigit():
                    return int(value)
    return None


def available_bytes() -> int:
    """Return the bytes that can still be allocated: of the machine, or of the container where that is less."""
    available = int(psutil.virtual_memory().available)
    limit = _cgroup_number("memory.max", "memory.limit_in_bytes")
    used = _cgroup_number("memory.current", "memory.usage_in_bytes")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def num_oom_kills() -> int | None:
    """Return how often the kernel killed for memory in this container so far, or None where it does not say."""
    return _cgroup_number("memory.events", "memory.oom_control", key="oom_kill")


def resident_bytes(pid: int) -> int:
    """Return the bytes of memory that process `pid` occupies now; 0 if it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def limit_memory() -> int | None:
    """Let allocations of this process beyond what is available now fail with an error it can report.

    Without this the kernel's killer ends the process, or the machine swaps, and nothing says how much was asked.
    Never for a process that uses CUDA, which reserves address space far beyond any memory.

    Returns:
        The bytes that may still be allocated, or None where no limit can be set.
    """
    if not sys.platform.startswith("linux"):
        return None
    room = int(available_bytes() * _HEADROOM)
    # Of VmData the kernel counts private writable mappings: what RLIMIT_DATA limits since Linux 4.7.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            limit = int(line.split()[1]) * 1024 + room
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            if hard != resource.RLIM_INFINITY:
                limit = min(limit, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
            return room
    return None


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends; leave at once if it is gone."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def be_first_to_die() -> None:
    """Make the kernel's out-of-memory killer prefer this process over the one that supervises it."""
    try:
        Path("/proc/self/oom_score_adj").write_text("500")
    except OSError:
        return  # not Linux, or not allowed: the killer then chooses by size, which is usually the worker as well
