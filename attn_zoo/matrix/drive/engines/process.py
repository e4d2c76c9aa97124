"""One worker process, seen from its supervisor: started, asked, watched, and ended with all its children."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from attn_zoo.discovery.import_trial import importable
from attn_zoo.discovery.providers import tried_imports
from attn_zoo.errors import StoreError
from attn_zoo.matrix.cell.log import keep_short, open_log
from attn_zoo.matrix.drive.engines.descendants import VARIABLE, end_marked
from attn_zoo.matrix.limits import available_bytes, num_oom_kills, resident_bytes
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.measure.environment import measuring_variables
from attn_zoo.records import Record

START_TIMEOUT_S = 120.0
TERM_GRACE_S = 2.0
MAX_ANSWER_BYTES = 2**28
"""More is no answer of ours."""
_TICK_S = 0.2


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker ended without an answer.

    Args:
        why: by itself, at the time limit, or because the run was stopped.
        exit_code: negative for a signal.
        fault: what was wrong with what it said, in words; empty where nothing was.
        was_memory: the kernel's out-of-memory killer, as far as can be told.
        was_ready: it had come as far as waiting for requests.
        at: index of the cell that it was working on.
    """

    why: Literal["exit", "timeout", "stopped"]
    exit_code: int
    was_memory: bool = False
    was_ready: bool = True
    at: int = 0
    fault: str = ""


def spawn_environment(threads: int | None) -> dict[str, str]:
    """Return the environment of processes that measure; None threads leaves `measuring_variables`' choice."""
    environment = importable({**measuring_variables(os.environ), **tried_imports()})
    environment["HF_HUB_OFFLINE"] = environment["HF_DATASETS_OFFLINE"] = "1"
    if threads is not None:
        environment.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)))
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))  # else one for each core
    return environment


class WorkerProcess:
    """A spawned Python that runs cells, in a session of its own.

    Args:
        log: file for what it prints before its first cell.
        threads: for OpenMP and MKL, which read it at start; None leaves their default.
        mark: that its own mark begins with; see `descendants`.

    Attributes:
        threads: likewise.
        waited_s: how long the last `run` waited for the process to be ready.
        verdicts: of the gate, as far as the process knew them when it last answered.
        is_fit: whether it then said that it may serve another order.
    """

    def __init__(self, log: Path, threads: int | None, mark: str = "") -> None:
        self._mark = f"{mark}-{uuid4().hex}"
        self.threads, self.waited_s = threads, 0.0
        self.verdicts: dict[str, Any] = {}
        self.is_fit = False
        # The worker writes here which cell it is at. A file outlives it, and nobody is woken by a write.
        self._place = tempfile.TemporaryFile()  # noqa: SIM115  closed by `kill`
        place = self._place.fileno()
        module = "attn_zoo.matrix.cell.worker"
        stderr = open_log(log)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", module, str(os.getpid()), str(place)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**spawn_environment(threads), VARIABLE: self._mark},
                pass_fds=(place,),
                start_new_session=True,
            )
        finally:
            os.close(stderr)
        self._buffer = b""
        self._is_ready = False
        self._spawned = time.monotonic()

    def is_starting(self, wait_s: float = 0.0) -> bool:
        """Tell whether it is loading what it needs, after `wait_s` at most; one that ended or takes too long is not."""
        if not self._is_ready and self._process.poll() is None:
            self._is_ready = self._next_message(wait_s) is not None  # the first message says so
        is_late = time.monotonic() > self._spawned + START_TIMEOUT_S
        return not self._is_ready and not is_late and self._process.poll() is None

    @property
    def is_waiting(self) -> bool:
        """Whether it is alive and blocked on its standard input, ready for an order."""
        return not self.is_starting() and self._is_ready and self._process.poll() is None

    def run(self, order: WorkOrder, limits_s: Sequence[float], should_stop: Callable[[], bool]) -> list[Record] | Ended:
        """Have cells run; `should_stop` is asked several times a second, and True ends the worker at once.

        `limits_s` are the seconds that each cell may take: time counts for the one that the worker is at. The clocks
        start when the worker is ready.
        """
        assert self._process.stdin is not None  # opened above
        os.pwrite(self._place.fileno(), bytes(4), 0)
        # Not when it was started: others may have run since, and been killed; and it may have run larger cells.
        self._room, self._kills, self._peak = available_bytes(), num_oom_kills(), 0
        with contextlib.suppress(BrokenPipeError):  # it is gone: the exit code says more
            self._process.stdin.write(json.dumps(order.to_dict()).encode() + b"\n")
            self._process.stdin.flush()
        left_s = list(limits_s)
        asked = seen = time.monotonic()
        self.waited_s = 0.0
        while True:
            message = self._next_message(_TICK_S)
            keep_short(order.log)
            self._peak = max(self._peak, resident_bytes(self._process.pid))
            now, at = time.monotonic(), self._at(order)
            if self._is_ready:
                left_s[at] -= now - seen
            seen = now
            if message is not None:
                if message.get("event") != "ready":
                    return self._records(message, order)
                self._is_ready = True
                self.waited_s = now - asked
            elif should_stop():
                return Ended("stopped", self.kill())
            elif left_s[at] < 0 if self._is_ready else now > self._spawned + START_TIMEOUT_S:
                return Ended("timeout", self.kill(), was_ready=self._is_ready, at=at)
            elif self._process.poll() is not None:
                while (last := self._next_message(0.0)) is not None:  # written just before it ended
                    if last.get("event") != "ready":
                        return self._records(last, order)
                at, was_memory = self._at(order), self._was_memory()
                return Ended("exit", self.kill(), was_memory=was_memory, was_ready=self._is_ready, at=at)

    def _at(self, order: WorkOrder) -> int:
        """Return the index of the cell that it says it is at; a variant may have written anything there."""
        return min(int.from_bytes(os.pread(self._place.fileno(), 4, 0), "little"), len(order.cells) - 1)

    def _records(self, answer: dict[str, Any], order: WorkOrder) -> list[Record] | Ended:
        """Return the records of an answer; one that makes no sense was written by a variant, not by the worker."""
        fault = "something wrote on the pipe of its answers"
        try:
            records = [Record.from_dict(item, "worker") for item in answer["records"]]
            found, asked = [record.cell.key for record in records], {cell.key for cell in order.cells}
            is_whole = set(found) == asked or not any(record.status == "ok" for record in records)
            if found and len(found) == len(set(found)) and asked.issuperset(found) and is_whole:
                self.verdicts, self.is_fit = dict(answer["verdicts"]), answer["is_fit"] is True
                return records
        except StoreError as error:
            fault = f"it gave an answer that is no record ({error})"
        except (LookupError, TypeError, ValueError):
            pass
        at = self._at(order)
        return Ended("exit", self.kill(), at=at, fault=fault)

    def _was_memory(self) -> bool:
        """Tell whether a SIGKILL was the kernel's: it counted one, or the process had taken half of what was free."""
        kills = num_oom_kills()
        counted = kills is not None and self._kills is not None and kills > self._kills
        return counted or self._peak > self._room // 2

    def _next_message(self, wait_s: float) -> dict[str, Any] | None:
        """Return the next whole line from the worker, or None if there is none within `wait_s`."""
        assert self._process.stdout is not None  # opened above
        descriptor = self._process.stdout.fileno()
        end = time.monotonic() + wait_s
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:  # closed: the process is ending, so there is no need to hurry
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(wait_s, 0.01))
                return None
            self._buffer += chunk
            if len(self._buffer) > MAX_ANSWER_BYTES:
                self._buffer = b"{}\n"
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            # Text that no file can hold, from whatever a variant named or raised, must not stop the driver.
            message = json.loads(json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace"))
        except (ValueError, RecursionError):
            message = None
        return message if isinstance(message, dict) else {}

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def kill(self) -> int:
        """End the process and all that came of it: TERM, a little time, KILL. Return the exit code."""
        if self._process.poll() is None:
            self._signal_group(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(TERM_GRACE_S)
        self._signal_group(signal.SIGKILL)  # also for children that outlived it
        end_marked(self._mark)
        code = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._place):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        return code

    def close(self) -> None:
        """Let the process end by itself, which it does when the pipe closes; make sure that it does.

        One that is still starting has nothing to end well: it would only notice after loading torch.
        """
        if self._process.stdin is not None and not self.is_starting():
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(TERM_GRACE_S)
        self.kill()
