"""A cache of generated data: tensors in one file, written whole or not at all, never pickled.

It is in `ATTN_ZOO_CACHE`, or else where the platform keeps caches. A cache that cannot be read or written costs
time, nothing more. Several workers that want the same data make them once: the others wait for the first.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attn_zoo.errors import FolderError
from attn_zoo.whole_files import whole_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user without a home, as in some containers: there is no place to keep anything
        return Path(os.devnull)


def cache_dir() -> Path:
    """Return the folder for caches; it need not exist, and may be one that cannot."""
    if given := os.environ.get("ATTN_ZOO_CACHE"):
        return Path(given)
    if sys.platform == "darwin":
        base = _home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or _home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache")
    return base / "attn_zoo"


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from making the same file; the lock ends with the process, however it ends.

    A process that the maker started does not wait, for the maker may be waiting for it: one that draws runs a script
    without a main guard from its beginning, and comes to the same data.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # where no lock can be had, each makes its own: slower, not wrong
            path.parent.mkdir(parents=True, exist_ok=True)
            name = path.with_name(f".{path.name}.lock")
            lock = stack.enter_context(name.open("a+b"))
            lock.seek(0)
            if lock.read() != b"%d" % os.getppid():
                if fcntl is not None:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                stack.callback(name.unlink, missing_ok=True)  # who waits holds the file itself, and then finds the data
                lock.truncate(0)
                lock.write(b"%d" % os.getpid())
                lock.flush()
        yield


def cached_tensors(name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return `make()` (contiguous tensors by name), or what it returned the last time.

    `name` must change whenever `make` would return something else.
    """
    path = cache_dir() / f"{name}.safetensors"
    # A missing file, one cut short by a full disk, or a folder that may not be read: make the data again.
    with contextlib.suppress(OSError, SafetensorError):
        return load_file(path)
    with _alone(path):
        with contextlib.suppress(OSError, SafetensorError):
            return load_file(path)  # made by another worker meanwhile
        tensors = make()
        with contextlib.suppress(OSError, SafetensorError, FolderError), whole_file(path, replace=True) as temporary:
            save_file(tensors, temporary)
    return tensors
