"""End whatever came of a worker process, also what left its session, and also when the one who watches it is killed.

A worker carries a mark in its environment, which all that it starts inherits, wherever they go. A worker itself dies
with its supervisor; what it has started is ended by a keeper, a small process that waits for the supervisor's end, and
removes what that would have left on the disk. This file is the keeper's program too, so it imports nothing of this
package.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

VARIABLE = "ATTN_ZOO_WORKER"
"""Of the environment: the mark."""

_ROUNDS = 5
_DONE = b"done"


def _marked(mark: str) -> list[int]:
    """Return the processes that carry the mark, or one that begins with it."""
    wanted, found = f"\0{VARIABLE}={mark}".encode(), []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():  # noqa: PTH112, PTH208  many times a minute
        if name.isdecimal() and int(name) != os.getpid():
            with suppress(OSError), open(f"/proc/{name}/environ", "rb", 0) as file:  # noqa: PTH123
                if wanted in b"\0" + file.read():
                    found.append(int(name))
    return found


def end_marked(mark: str) -> None:
    """Kill all processes that carry the mark; nothing where there is no `/proc`."""
    for _ in range(_ROUNDS):  # they may have forked meanwhile
        pids = _marked(mark)
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.01)


class Keeper:
    """Ends what carries a mark when this process ends, however it does.

    Args:
        mark: that the marks of all workers begin with.
        scratch: folder to remove then.
    """

    def __init__(self, mark: str, scratch: str | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, *([scratch] if scratch else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._process.wait()  # that forked the keeper

    def close(self) -> None:
        """End it: every worker was ended by whoever watched it."""
        with suppress(BrokenPipeError):  # somebody killed it
            self._process.communicate(_DONE)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():  # Ray kills the children of a process that it ends
        return
    if sys.stdin.buffer.read() == _DONE:  # else whoever holds the other end is gone
        return
    end_marked(sys.argv[1])
    for scratch in sys.argv[2:]:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    _main()
