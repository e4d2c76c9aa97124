"""Files and folders that are whole or absent: written under another name beside their place, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attn_zoo.errors import FolderError

__all__ = ["FULL", "whole_file", "whole_folder"]


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of a full disk."""


def _must_be_new(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise FolderError(f"{path}: exists already and is not overwritten; delete it or choose another name")


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn a full disk met in the block into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise FolderError(f"{path}: {error.strerror}; nothing of it was left behind") from None


@contextlib.contextmanager
def whole_file(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a path to write to; the file gets its name when the block ends well, and leaves no trace otherwise.

    Args:
        path: of the finished file; folders above it are made.
        replace: whether a file of that name may be overwritten.

    Raises:
        FolderError: the file exists or its folder cannot be written (before the block), or the disk is full.
    """
    if not replace:
        _must_be_new(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    except OSError as error:
        raise FolderError(f"{path}: cannot be written: {error.strerror}") from None
    os.close(descriptor)
    temporary = Path(name)
    try:
        with _naming(path):
            yield temporary
            temporary.chmod(0o644)
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; it gets its name when the block ends well, and leaves no trace otherwise.

    Raises:
        FolderError: something of that name exists, the folder above cannot be written, or the disk is full.
    """
    _must_be_new(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name[:40]}."))
    except OSError as error:
        raise FolderError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        inner = temporary / "content"  # mkdtemp's own folder is closed to everybody else
        inner.mkdir()
        with _naming(path):
            yield inner
            _must_be_new(path)
            inner.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
