"""Which sources decide a result: the variant's file and all that the measured code imports. Edits make records stale.

Those of comments and docstrings do not: what counts is what the files do.
Imports are followed through the text of the files, also those inside functions, but only in rooms whose code runs
while something is measured. How it is measured is in the protocol versions, and what reads results decides nothing.
Nor do, on a CPU, modules of this package that cannot be imported without Triton: they are for GPUs.
Of other projects' packages the versions count, where a variant that is not ours imports them; of those that are used
from their source tree, as editable ones are, the files too that it imports.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import attn_zoo
from attn_zoo.discovery.own_files import imported_names, modules_at, own_files, program_digest
from attn_zoo.measure.environment import PACKAGES
from attn_zoo.registry import Variant

CALL_ROOMS = ("attention", "kernels", "variants")
"""Rooms of this package whose code runs in a call of a variant; the first is always imported."""

TRAINING_ROOMS = ("training", "model", "tasks", *CALL_ROOMS)
"""Likewise in a training step and in a whole training."""

_PACKAGE = "attn_zoo"


def _own_package(source: Path, is_plain: bool) -> tuple[str, Path]:
    """Return the name of the package that a file belongs to and the folder above it; a plain file's has no name."""
    if is_plain:
        return "", source.parent
    top = source.with_suffix("")
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    return top.name, top.parent


@cache
def _imported_at_once(path: Path, root: Path) -> tuple[bool, frozenset[Path]]:
    """Return whether a module of this package imports Triton when it is imported, and which modules of the rooms."""
    absolute = [name.split(".") for level, name in imported_names(path, is_at_once=True) if level == 0]
    own = [parts[1:] for parts in absolute if parts[0] == _PACKAGE and parts[1:] and parts[1] in CALL_ROOMS]
    modules = frozenset(file for parts in own for file in modules_at(root, parts))
    return any(parts[0] == "triton" for parts in absolute), modules


def _is_for_gpus(path: Path, root: Path) -> bool:
    """Tell whether a module of this package cannot be imported without Triton."""
    seen, waiting = {path}, [path]
    while waiting:
        needs_triton, modules = _imported_at_once(waiting.pop(), root)
        if needs_triton:
            return True
        waiting += modules - seen
        seen |= modules
    return False


def source_files(source: Path, rooms: Sequence[str], device: str, *, is_plain: bool = False) -> dict[str, Path]:
    """Return the files that decide a result on a device, by names that are the same on every machine.

    One that `is_plain` belongs to no package, and may import what lies beside it.
    """
    root = Path(attn_zoo.__path__[0])
    own_name, own_folder = _own_package(source, is_plain)

    def resolve(path: Path, level: int, name: str) -> Iterator[Path]:
        parts = name.split(".")
        if level:
            yield from (file for file in modules_at(path.parents[level - 1], parts) if file.is_relative_to(own_folder))
        elif parts[0] == _PACKAGE:
            if len(parts) > 1 and parts[1] in rooms:
                yield from modules_at(root, parts[1:])
        elif own_name == parts[0]:
            yield from modules_at(own_folder, parts)

    # A plug-in need not import what builds and calls it.
    own = own_files(source) if is_plain else {source.name: source}
    files = {*own.values(), *(root / room / "__init__.py" for room in (rooms[0], "attention"))}
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        for level, name in imported_names(path):
            new = set(resolve(path, level, name)) - files
            if device == "cpu":
                new = {file for file in new if not (file.is_relative_to(root) and _is_for_gpus(file, root))}
            files |= new
            waiting += new
    files |= {path.with_suffix(".cpp") for path in files if path.with_suffix(".cpp").is_file()}  # which it compiles
    return {
        path.relative_to(root.parent if path.is_relative_to(root) else own_folder).as_posix(): path for path in files
    }


@cache
def _distributions() -> dict[str, list[str]]:
    """Return what is installed by the names under which it is imported; that takes a third of a second."""
    return dict(metadata.packages_distributions())


def _source_root(name: str) -> Path | None:
    """Return the folder that holds a package of which the source is used: editable, or on the path only."""
    for package in _distributions().get(name, ()):
        told = json.loads(metadata.distribution(package).read_text("direct_url.json") or "{}")
        if not told.get("dir_info", {}).get("editable"):
            return None
    spec = PathFinder.find_spec(name)
    places = [spec.origin] if spec and spec.has_location else []
    tops = [Path(place).parent if Path(place).stem == "__init__" else Path(place) for place in places if place]
    return tops[0].resolve().parent if tops and "site-packages" not in tops[0].parts else None


@cache
def _packages(source: Path, rooms: tuple[str, ...], device: str, is_plain: bool, content: str) -> dict[str, str]:
    del content  # a file that is loaded anew may import others
    root = Path(attn_zoo.__path__[0])
    files = source_files(source, rooms, device, is_plain=is_plain)
    own = {name: path for name, path in files.items() if not path.is_relative_to(root)}
    names = {name.partition(".")[0] for path in own.values() for level, name in imported_names(path) if level == 0}
    names -= {_PACKAGE, *PACKAGES, *sys.stdlib_module_names, *(re.split("[./]", name)[0] for name in own)}
    found: dict[str, str] = {}
    for name in sorted(names):
        versions = {package: metadata.version(package) for package in _distributions().get(name, ())}
        if (folder := _source_root(name)) is not None:  # its version says little: it is edited under one
            digest = hashlib.sha256()
            imported = {key: path for each in own.values() for key, path in own_files(each, folder).items()}
            for key in sorted(imported.keys() - {path.name for path in own.values()}):
                digest.update(f"{key}={program_digest(imported[key])}\n".encode())
            code = f"source {digest.hexdigest()[:12]}"
            versions = {package: f"{version}, {code}" for package, version in versions.items()} or {name: code}
        found |= versions
    return {package: version for package, version in sorted(found.items()) if package not in PACKAGES}


def imported_packages(variant: Variant, rooms: tuple[str, ...], device: str) -> dict[str, str]:
    """Return versions of the packages that a variant's own files import, by name; of a source tree a digest too.

    Those that every environment records are there, and empty is what our own variants import besides.
    """
    return _packages(*_program(variant, rooms, device)) if variant.digest else {}


def _program(variant: Variant, rooms: tuple[str, ...], device: str) -> tuple[Path, tuple[str, ...], str, bool, str]:
    source = Path(variant.source)
    return source, rooms, device, variant.provider == source.name, variant.digest


@cache
def _digest(source: Path, rooms: tuple[str, ...], device: str, is_plain: bool, content: str) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(source_files(source, rooms, device, is_plain=is_plain).items()):
        digest.update(f"{name}={program_digest(path)}\n".encode())
    for name, version in _packages(source, rooms, device, is_plain, content).items():
        digest.update(f"{name}=={version}\n".encode())
    return digest.hexdigest()[:16]


def source_digest(variant: Variant, rooms: tuple[str, ...], device: str) -> str:
    """Return 16 hexadecimal digits that change with what the variant's `source_files` do, or its `imported_packages`.

    Computed once per process and registration: what is imported does not change under a running process either.
    """
    if not variant.digest:  # a notebook names files that do not exist
        return ""
    return _digest(*_program(variant, rooms, device))
