"""Import a plain Python file, and what it imports from beside it: together they are what another process must have."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from traceback import extract_tb
from typing import Any

from attn_zoo.discovery.import_trial import IMPORT_TIMEOUT_S, reason_of, why_not_import
from attn_zoo.discovery.own_files import own_digest, own_files
from attn_zoo.discovery.providers import Guard, forget_modules
from attn_zoo.errors import ConfigError


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles a file each time: kept bytecode is told apart by size and second of change, which two edits may share.

    What is measured must be what its digest is of. Nor is a `__pycache__` left beside a user's file.
    """

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"{path}: without the time of its change it has no bytecode")


class _Beside:
    """Finds what plain files import from beside them, and nothing else: it hides no module from anybody.

    Attributes:
        places: file of each module, or folder of one that is a package without `__init__.py`.
    """

    def __init__(self) -> None:
        self.places: dict[str, Path] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        place = self.places.get(name)
        if place is None:
            return None
        if place.suffix == ".py":
            below = [str(place.parent)] if place.name == "__init__.py" else None
            loader = _SourceLoader(name, str(place))
            return importlib.util.spec_from_file_location(name, place, loader=loader, submodule_search_locations=below)
        if place.is_file():  # compiled
            return importlib.util.spec_from_file_location(name, place)
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec


_beside = _Beside()
_contents: dict[str, str] = {}
"""`own_digest` of each plain file as it was when it was imported, by the name of its module."""

_at_work: list[str] = []
"""Plain files that are being imported, each by the one before it."""


def plain_file_at_work() -> str:
    """Return the plain file that is being imported: what registers meanwhile is known to whoever imports it too."""
    return _at_work[0] if _at_work else ""


def _modules_beside(path: Path) -> dict[str, Path]:
    """Return the modules that a plain file imports from beside it, each with its file or folder."""
    places: dict[str, Path] = {}
    for file in set(own_files(path).values()) - {path}:
        parts = file.relative_to(path.parent).parts
        last = [] if file.name == "__init__.py" else [parts[-1].partition(".")[0]]
        places[".".join([*parts[:-1], *last])] = file
        for depth in range(1, len(parts)):
            places.setdefault(".".join(parts[:depth]), path.parent.joinpath(*parts[:depth]))
    return places


def _is_same(place: Path, other: Path) -> bool:
    """Tell whether one does for the other: results folders keep a copy for each variant, and files are moved."""
    return not (place.is_file() and other.is_file()) or place.read_bytes() == other.read_bytes()


@contextmanager
def _importing_beside(path: Path) -> Iterator[None]:
    """Let the block import what lies beside a plain file; where it fails, nothing of that stays loaded.

    Raises:
        ConfigError: this process has another module of one of the names.
    """
    places = _modules_beside(path)
    for name, place in sorted(places.items()):
        for other in (_beside.places.get(name), getattr(sys.modules.get(name), "__file__", None)):
            if other and not _is_same(place, Path(other)):
                text = f"imports {name!r} from beside it, and another one is loaded here, {other}: rename one"
                raise ConfigError(str(path), [("", text)])
    there = {name for name, place in _beside.places.items() if place.exists()}
    new = {name: place for name, place in places.items() if name not in there}
    before = set(sys.modules)
    if _beside not in sys.meta_path:
        sys.meta_path.insert(0, _beside)
    _beside.places |= new
    _at_work.append(str(path))
    try:
        yield
    except BaseException:
        _forget(new, before)
        raise
    finally:
        _at_work.pop()


def _forget(places: Iterable[str], kept: Collection[str] = ()) -> None:
    """Let the next import of modules beside plain files read their files anew."""
    for name in places:
        _beside.places.pop(name, None)
    forget_modules(set(places) - set(kept))


def _where(error: BaseException, path: Path) -> str:
    """Return the place of an error in a plain file, or in what lies beside it."""
    if isinstance(error, SyntaxError):
        return ""  # it says so itself
    own = own_files(path).values()
    frames = [frame for frame in extract_tb(error.__traceback__) if Path(frame.filename) in own]
    if not frames:
        return ""
    name = Path(frames[-1].filename).relative_to(path.parent).as_posix()
    return f" (line {frames[-1].lineno})" if name == path.name else f" ({name}, line {frames[-1].lineno})"


def _hint(path: Path, said: str) -> str:
    """Return what to do about a name that cannot be imported as a package would."""
    names, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    if len(names) > 1:
        return f"; it lies in a package: load a file beside {names[0]} that says `import {'.'.join(names)}`"
    if "relative import" in said:
        return "; a plain file belongs to no package: name what lies beside it without a dot"
    return ""


def import_file(path: Path | str, guard: Guard, timeout_s: float | None = IMPORT_TIMEOUT_S) -> None:
    """Import a plain Python file under a name of its own, and what it imports from beside it.

    A second time does nothing, unless one of these files was changed since. `guard` is put around the import;
    `timeout_s` is that of `registry.load_file`.

    Raises:
        ConfigError: the file is missing, or raises, exits or hangs when imported; or the guard refuses it.
    """
    path = Path(path).resolve()
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(str(path), [("", "expected a Python file (.py); there is none at this path")])
    # The path decides the module's name, so that two files of the same name do not shadow each other.
    name = f"attn_zoo_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    content = own_digest(path)
    if name in sys.modules:
        if _contents[name] == content:
            return
        _forget(_modules_beside(path))
        del sys.modules[name]
    program = "from contextlib import nullcontext; from attn_zoo.discovery.plain_files import import_file"
    hang = timeout_s and why_not_import(str(path), f"{program}; import_file(sys.argv[1], nullcontext, None)", timeout_s)
    if hang:
        raise ConfigError(str(path), [("", hang)])
    spec = importlib.util.spec_from_file_location(name, path, loader=_SourceLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None  # a .py file always has one
    module = importlib.util.module_from_spec(spec)
    sys.modules[name], _contents[name] = module, content
    try:
        with _importing_beside(path), guard(), redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        where = _where(error, path)
        if isinstance(error, ConfigError):  # of the registry: what this file registers, or of something that it calls
            if error.source != path.name:
                raise
            raise ConfigError(str(path), [(key, f"{text}{where}") for key, text in error.problems]) from error
        hint = _hint(path, str(error)) if isinstance(error, ImportError) else ""
        raise ConfigError(str(path), [("", f"cannot be imported: {reason_of(error)}{where}{hint}")]) from error
