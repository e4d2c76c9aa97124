"""Find and import variants and tasks: modules of this package, entry points of other packages, plain files.

A provider that raises or exits is reported and passed over. One that hangs cannot be stopped inside this process, so
other packages' modules are first imported in a child process with a time limit.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

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

_END_OF_TRIAL = "attn_zoo: the import returned or raised"


def _reason(error: BaseException) -> str:
    """Return one line that says what happened while importing."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}) at import"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"


def _guarded(provider: str, load: Callable[[], object], guard: Guard) -> list[LoadFailure]:
    try:
        with guard():
            load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in may even call sys.exit: none of it may take the others down
        return [LoadFailure(provider=provider, reason=_reason(error))]
    return []


def _probe(argument: str, code: str, timeout_s: float) -> str | None:
    """Run `code` in a child process; return why it must not run here, or None.

    An exception is no reason: it can be caught here too. A hang, a crash or an exit without an exception would take
    this process with it.
    """
    trial = f"import sys\ntry:\n    {code}\nexcept BaseException:\n    pass\nprint({_END_OF_TRIAL!r}, flush=True)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", trial, argument],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, _TRIAL: "1"},
        )
    except subprocess.TimeoutExpired:
        return f"did not finish importing within {timeout_s:g} s"
    if _END_OF_TRIAL.encode() in done.stdout:
        return None
    if done.returncode < 0:
        return f"import killed by signal {-done.returncode}"
    return f"ended the process at import, with exit code {done.returncode}"


def _load_entry_point(entry: EntryPoint, guard: Guard, timeout_s: float) -> list[LoadFailure]:
    provider = f"{entry.dist.name} ({entry.value})" if entry.dist else entry.value
    hang = _probe(entry.value.partition(":")[0], "import importlib; importlib.import_module(sys.argv[1])", timeout_s)
    if hang:
        return [LoadFailure(provider=provider, reason=hang)]
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
    if _TRIAL in os.environ:  # a module on trial that asks for the variants must not be blamed for its neighbours
        return failures
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value)):
        failures += _load_entry_point(entry, guard, timeout_s)
    return failures


def is_entry_point(module: str) -> bool:
    """Tell whether an installed package offers a module as a provider."""
    return any(
        entry.value.partition(":")[0] == module
        for group in ("attn_zoo.variants", "attn_zoo.tasks")
        for entry in entry_points(group=group)
    )


def import_file(path: Path | str, guard: Guard, timeout_s: float | None = IMPORT_TIMEOUT_S) -> None:
    """Import a plain Python file under a name of its own. A second time does nothing.

    Args:
        path: of the file.
        guard: put around the import.
        timeout_s: how long the import may take, tried in a child process first; None for a process that is itself
            expendable, which then needs no trial.

    Raises:
        ConfigError: the file is missing, or raises, exits or hangs when imported.
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
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # a .py file always has one
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with guard():
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, (KeyboardInterrupt, ConfigError)):
            raise
        raise ConfigError(str(path), [("", f"cannot be imported: {_reason(error)}")]) from error
