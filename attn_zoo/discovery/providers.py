"""Import the modules of this package and the entry points of others.

A provider that raises or exits is reported and passed over. One that hangs cannot be stopped inside this process, so
other packages' modules are first imported in a child process with a time limit, once for all processes of a run.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, redirect_stdout
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import NamedTuple

from attn_zoo.discovery.import_trial import IMPORT_TIMEOUT_S, is_trial, reason_of, why_not_import

Guard = Callable[[], AbstractContextManager[None]]
"""Makes a context that forgets what its block registered when the block fails: half a provider is none."""


class LoadFailure(NamedTuple):
    """A provider that could not be loaded: the others still work, and this one is listed with its reason."""

    provider: str
    reason: str


_TRIED = "ATTN_ZOO_TRIED_IMPORTS"
"""Set in child processes: what this one found out about providers, so that one which hangs does so once for all."""

_tried: dict[str, str] = {}
"""Why a provider must not be imported, by its module; empty where it may be."""


def forget_modules(names: Iterable[str]) -> None:
    """Let the next import of these modules run them anew."""
    for name in names:
        package, _, attribute = name.rpartition(".")
        if sys.modules.pop(name, None) is not None and package in sys.modules:
            vars(sys.modules[package]).pop(attribute, None)  # `from package import module` would find it there


def tried_imports() -> dict[str, str]:
    """Return variables for the environment of child processes that ask for the variants too."""
    tried = {**json.loads(os.environ.get(_TRIED, "{}")), **_tried}
    return {_TRIED: json.dumps(tried)} if tried else {}


def _load_entry_point(entry: EntryPoint, guard: Guard, timeout_s: float) -> str:
    """Import what an entry point names; return why it cannot be loaded, or an empty text."""
    module = entry.value.partition(":")[0]
    found = {**json.loads(os.environ.get(_TRIED, "{}")), **_tried}.get(module)
    if found is None:
        found = why_not_import(module, "import importlib; importlib.import_module(sys.argv[1])", timeout_s) or ""
    _tried[module] = found
    if found:
        return found
    before = set(sys.modules)
    try:
        with guard(), redirect_stdout(sys.stderr):  # what a provider prints is not what was asked for
            entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in may even call sys.exit: none of it may take the others down
        # What its other modules had registered is forgotten, and the next entry point may name one of them.
        package = module.partition(".")[0]
        forget_modules(name for name in set(sys.modules) - before if name.partition(".")[0] == package)
        return reason_of(error)
    return ""


def discover(group: str, guard: Guard, timeout_s: float = IMPORT_TIMEOUT_S) -> list[LoadFailure]:
    """Import every module of the package named `group`, then every entry point in the group of the same name.

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
        if reason := _load_entry_point(entry, guard, timeout_s):
            provider = f"{entry.dist.name} ({entry.value})" if entry.dist else entry.value
            failures.append(LoadFailure(provider=provider, reason=reason))
    return failures


def is_offered(package: str) -> bool:
    """Tell whether discovery finds a package, or a module of no package: this one, and whoever has an entry point."""
    return package == "attn_zoo" or package in _offered_packages(tuple(sys.path))


@functools.lru_cache(maxsize=1)  # a file asks for each of its classes, and all that is installed is read each time
def _offered_packages(path: tuple[str, ...]) -> frozenset[str]:
    """Return the packages with entry points that are installed on a path."""
    return frozenset(
        re.split(r"[.:]", entry.value)[0]
        for package in distributions(path=list(path))
        for entry in package.entry_points
        if entry.group in {"attn_zoo.variants", "attn_zoo.tasks"}
    )
