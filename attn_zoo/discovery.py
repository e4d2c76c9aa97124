"""Find and import variants and tasks: modules of this package, entry points of other packages, plain files.

A provider that raises or exits is reported and passed over. One that hangs cannot be stopped inside this process, so
other packages' modules are first imported in a child process with a time limit, once for all processes of a run.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import math
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions, entry_points
from pathlib import Path
from tempfile import TemporaryFile
from traceback import extract_tb
from typing import Any

import attn_zoo
from attn_zoo.errors import ConfigError

IMPORT_TIMEOUT_S = 60.0

Guard = Callable[[], AbstractContextManager[None]]
"""Makes a context that forgets what its block registered when the block fails: half a provider is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFailure:
    """A provider that could not be loaded: the others still work, and this one is listed with its reason."""

    provider: str
    reason: str


_TRIAL = "ATTN_ZOO_IMPORT_TRIAL"
"""Set in the child process that tries an import, so that a module which itself asks for the variants starts no more."""

_TRIED = "ATTN_ZOO_TRIED_IMPORTS"
"""Set in child processes: what this one found out about providers, so that one which hangs does so once for all."""

_tried: dict[str, str] = {}
"""Why a provider must not be imported, by its module; empty where it may be."""

_END_OF_TRIAL = "attn_zoo: the import returned or raised"


def _reason(error: BaseException) -> str:
    """Return one line that says what happened while importing."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}) at import"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"


def _guarded(provider: str, load: Callable[[], object], guard: Guard) -> list[LoadFailure]:
    try:
        with guard(), redirect_stdout(sys.stderr):  # what a provider prints is not what was asked for
            load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in may even call sys.exit: none of it may take the others down
        return [LoadFailure(provider=provider, reason=_reason(error))]
    return []


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
) -> subprocess.CompletedProcess[bytes]:
    """Run Python in a session of its own and return what it said.

    Args:
        arguments: of Python.
        environment: of the child.
        limit_s: seconds after which it is ended.
        request: its standard input.
        should_stop: asked several times a second; True ends it.

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
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        complaint.seek(0)
        if exit_code is None:
            raise subprocess.TimeoutExpired(command, limit_s, output.read(), complaint.read())
        return subprocess.CompletedProcess(command, exit_code, output.read(), complaint.read())


def _probe(argument: str, code: str, timeout_s: float) -> str | None:
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
        answer = ask_python(["-c", trial, argument], importable({**os.environ, _TRIAL: "1"}), timeout_s)
    except subprocess.TimeoutExpired:
        return f"did not finish importing within {timeout_s:g} s"
    if _END_OF_TRIAL.encode() in answer.stdout:
        return None
    if answer.returncode < 0:
        return f"import killed by signal {-answer.returncode}"
    return f"ended the process at import, with exit code {answer.returncode}"


def is_trial() -> bool:
    """Tell whether this process only tries whether something can be imported."""
    return _TRIAL in os.environ


def tried_imports() -> dict[str, str]:
    """Return variables for the environment of child processes that ask for the variants too."""
    tried = {**json.loads(os.environ.get(_TRIED, "{}")), **_tried}
    return {_TRIED: json.dumps(tried)} if tried else {}


def _load_entry_point(entry: EntryPoint, guard: Guard, timeout_s: float) -> list[LoadFailure]:
    provider = f"{entry.dist.name} ({entry.value})" if entry.dist else entry.value
    module = entry.value.partition(":")[0]
    found = json.loads(os.environ.get(_TRIED, "{}")).get(module)
    if found is None:
        found = _probe(module, "import importlib; importlib.import_module(sys.argv[1])", timeout_s)
    _tried[module] = found or ""
    if _tried[module]:
        return [LoadFailure(provider=provider, reason=_tried[module])]
    return _guarded(provider, entry.load, guard)


def discover(group: str, guard: Guard, timeout_s: float = IMPORT_TIMEOUT_S) -> list[LoadFailure]:
    """Import every module of the package named `group`, then every entry point in the group of the same name.

    Args:
        group: `"attn_zoo.variants"` or `"attn_zoo.tasks"`.
        guard: put around each foreign provider.
        timeout_s: how long one foreign module may take to import.

    Returns:
        What failed to load, with reasons.
    """
    failures: list[LoadFailure] = []
    package = importlib.import_module(group)
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.ispkg):
        importlib.import_module(f"{group}.{module}")  # our own: a failure here is a bug and must be loud
    if is_trial():  # a module on trial that asks for the variants must not be blamed for its neighbours
        return failures
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value)):
        failures += _load_entry_point(entry, guard, timeout_s)
    return failures


def is_entry_point(module: str) -> bool:
    """Tell whether an installed package offers a module as a provider."""
    return module in _offered_modules(tuple(sys.path))


@functools.lru_cache(maxsize=1)  # a file asks for each of its classes, and all that is installed is read each time
def _offered_modules(path: tuple[str, ...]) -> frozenset[str]:
    """Return the modules that packages installed on a path offer."""
    return frozenset(
        entry.value.partition(":")[0]
        for package in distributions(path=list(path))
        for entry in package.entry_points
        if entry.group in {"attn_zoo.variants", "attn_zoo.tasks"}
    )


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles a file each time: kept bytecode is told apart by size and second of change, which two edits may share.

    What is measured must be what its digest is of. Nor is a `__pycache__` left beside a user's file.
    """

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"{path}: without the time of its change it has no bytecode")


def import_file(path: Path | str, guard: Guard, timeout_s: float | None = IMPORT_TIMEOUT_S) -> None:
    """Import a plain Python file under a name of its own. A second time does nothing.

    Args:
        path: of the file.
        guard: put around the import.
        timeout_s: how long the import may take, tried in a child process first; None for a process that is itself
            expendable, which then needs no trial.

    Raises:
        ConfigError: the file is missing, or raises, exits or hangs when imported; or the guard refuses it.
    """
    path = Path(path).resolve()
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(str(path), [("", "expected a Python file (.py); there is none at this path")])
    # The path decides the module's name, so that two files of the same name do not shadow each other.
    name = f"attn_zoo_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    hang = timeout_s and _probe(str(path), "import runpy; runpy.run_path(sys.argv[1])", timeout_s)
    if hang:
        raise ConfigError(str(path), [("", hang)])
    spec = importlib.util.spec_from_file_location(name, path, loader=_SourceLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None  # a .py file always has one
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with guard(), redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if Path(frame.filename) == path]
        where = f" (line {lines[-1]})" if lines else ""
        if isinstance(error, ConfigError):  # of the registry: what this file registers, or of something that it calls
            if error.source != path.name:
                raise
            raise ConfigError(str(path), [(key, f"{text}{where}") for key, text in error.problems]) from error
        raise ConfigError(str(path), [("", f"cannot be imported: {_reason(error)}{where}")]) from error
