"""The plain files that a run loaded, kept in its folder: `sources/NAME/FILE.py` for each variant or task of theirs.

So a folder can be gone on with where the file is no more: a notebook has none. Loading one runs it, and folders come
from others too: only what was measured on this machine, by this user, is loaded without being named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from attn_zoo.registry import load_file, tasks, variants
from attn_zoo.tasks.sources.tensor_cache import cache_dir
from attn_zoo.whole_files import write_whole


def _mark(content: bytes) -> Path:
    """Return the file that says that this user measured a source with this content."""
    return cache_dir() / "measured-sources" / hashlib.sha256(content).hexdigest()


def keep_sources(folder: Path, files: Mapping[str, Iterable[str]]) -> None:
    """Copy plain files, given with names of variants and tasks, into a results folder: the latest of each name.

    Raises:
        StoreError: the folder cannot be written.
    """
    for path, names in files.items():
        content = Path(path).read_bytes()
        for name in names:
            kept = folder / "sources" / name / Path(path).name
            write_whole(kept, content)
            with suppress(OSError):
                for other in set(kept.parent.glob("*.py")) - {kept}:
                    other.unlink()
        with suppress(OSError):  # without a cache folder the file must be named next time
            _mark(content).parent.mkdir(parents=True, exist_ok=True)
            _mark(content).touch()


def load_kept(folder: Path) -> list[Path]:
    """Load what a results folder keeps, is not registered here, and was measured by this user; return what was not.

    Raises:
        ConfigError: a file cannot be imported.
    """
    foreign = []
    for path in sorted(folder.glob("sources/*/*.py")):
        if path.parent.name in variants or path.parent.name in tasks:
            continue
        if _mark(path.read_bytes()).exists():
            load_file(path)
        else:
            foreign.append(path)
    return foreign
