"""Try an import where it can do no harm: one that hangs, crashes or exits cannot be stopped inside this process."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import attn_zoo
from attn_zoo.errors import first_line

IMPORT_TIMEOUT_S = 60.0

_TRIAL = "ATTN_ZOO_IMPORT_TRIAL"
"""Set in the child process that tries an import, so that a module which itself asks for the variants starts no more."""

_END_OF_TRIAL = "attn_zoo: the import returned or raised"


def reason_of(error: BaseException) -> str:
    """Return one line that says what happened while importing."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}) at import"
    return f"{type(error).__name__}: {first_line(error)}"


def importable(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which this package can be imported, from the source tree too.

    The current folder is searched only where it is here: a `random.py` in it would be taken for Python's own.
    """
    root = str(Path(attn_zoo.__path__[0]).parent)
    safe = {"PYTHONSAFEPATH": "1"}
    with suppress(OSError):  # the folder may be gone
        if Path.cwd() in [Path(each).resolve() for each in sys.path]:
            safe = {}
    path = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
    return {**environment, **safe, "PYTHONPATH": path}


def ask_python(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    *,
    request: bytes = b"",
    should_stop: Callable[[], bool] = lambda: False,
    hear: Callable[[bytes], None] = lambda _: None,
) -> subprocess.CompletedProcess[bytes]:
    """Run Python in a session of its own, ended after `limit_s` or when `should_stop` says so; return what it said.

    `hear` is given all that it has said so far, several times a second.

    Raises:
        subprocess.TimeoutExpired: it had to be ended; holds what it had said by then.
    """
    # Files, as a pipe may be held open by whatever the child starts.
    with TemporaryFile() as asked, TemporaryFile() as output, TemporaryFile() as complaint:
        asked.write(request)
        asked.seek(0)
        command, end = [sys.executable, *arguments], time.monotonic() + limit_s
        child = subprocess.Popen(
            command, stdin=asked, stdout=output, stderr=complaint, env=environment, start_new_session=True
        )
        exit_code: int | None = None
        try:
            while exit_code is None and time.monotonic() < end and not should_stop():
                with suppress(subprocess.TimeoutExpired):
                    exit_code = child.wait(0.2)
                # Read at a place: whoever moves the file's own moves the child's too.
                hear(os.pread(output.fileno(), os.fstat(output.fileno()).st_size, 0))
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        complaint.seek(0)
        if exit_code is None:
            raise subprocess.TimeoutExpired(command, limit_s, output.read(), complaint.read())
        return subprocess.CompletedProcess(command, exit_code, output.read(), complaint.read())


def why_not_import(argument: str, code: str, timeout_s: float) -> str | None:
    """Run `code` in a child process; return why it must not run here, or None.

    An exception is no reason: it can be caught here too. A hang, a crash or an exit without an exception would take
    this process with it.
    """
    trial = f"""
import gc, signal, sys
gc.disable()  # nearly all that is loaded stays to the end, which is near
signal.alarm({math.ceil(timeout_s) + 5})  # should whoever waits be killed
try:
    {code}
except BaseException:
    pass
print({_END_OF_TRIAL!r}, flush=True)
gc.freeze()
"""
    try:
        answer = ask_python(["-c", trial, argument], trial_environment(), timeout_s)
    except subprocess.TimeoutExpired:
        return f"did not finish importing within {timeout_s:g} s"
    if _END_OF_TRIAL.encode() in answer.stdout:
        return None
    if answer.returncode < 0:
        return f"import killed by signal {-answer.returncode}"
    return f"ended the process at import, with exit code {answer.returncode}"


def trial_environment() -> dict[str, str]:
    """Return the environment of a child process that only tries an import."""
    return importable({**os.environ, _TRIAL: "1"})


def is_trial() -> bool:
    """Tell whether this process only tries whether something can be imported."""
    return _TRIAL in os.environ
