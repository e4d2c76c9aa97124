"""The plain files that a run loaded, kept in its folder: `sources/NAME/FILE.py` for each variant or task of theirs.

What they import from beside them lies beside them there too, so that a folder can be gone on with where the files are
no more: a notebook has none. Loading one runs it, and folders come from others too: only what was measured on this
machine, by this user, is loaded without being named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from attn_zoo.discovery.own_files import SUFFIXES, own_digest, own_files
from attn_zoo.registry import load_file, tasks, variants
from attn_zoo.tasks.sources.tensor_cache import cache_dir
from attn_zoo.whole_files import write_whole


def _mark(source: Path) -> Path:
    """Return the file that says that this user measured a source with this content."""
    return cache_dir() / "measured-sources" / own_digest(source)


def keep_sources(folder: Path, files: Mapping[str, Iterable[str]]) -> None:
    """Copy plain files, given with names of variants and tasks, into a results folder: the latest of each name.

    Raises:
        StoreError: the folder cannot be written.
    """
    for path, names in files.items():
        own = own_files(Path(path))
        for name in names:
            kept = folder / "sources" / name
            for each, file in own.items():
                write_whole(kept / each, file.read_bytes())
            with suppress(OSError):
                for other in {each for each in kept.rglob("*") if each.is_file()} - {kept / each for each in own}:
                    other.unlink()
        with suppress(OSError):  # without a cache folder the file must be named next time
            mark = _mark(Path(path))
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def _kept(folder: Path) -> Iterator[Path]:
    """Yield the plain files that a results folder keeps: of each name the one that imports what lies beside it."""
    for kept in sorted(folder.glob("sources/*/")):
        every = {path for path in kept.rglob("*") if path.name.endswith(SUFFIXES)}
        yield from (path for path in sorted(kept.glob("*.py")) if {*own_files(path).values()} == every)


def load_kept(folder: Path) -> list[Path]:
    """Load what a results folder keeps, is not registered here, and was measured by this user; return what was not.

    Raises:
        ConfigError: a file cannot be imported.
    """
    foreign = []
    for path in _kept(folder):
        if path.parent.name in variants or path.parent.name in tasks:
            continue
        if _mark(path).exists():
            load_file(path)
        else:
            foreign.append(path)
    return foreign
