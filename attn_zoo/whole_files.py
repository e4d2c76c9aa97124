"""Files and folders that are whole or absent: written under another name in the same folder, then renamed.

Whoever reads, and whoever comes after a crash, finds all of a file or nothing of it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from attn_zoo.errors import FolderError, StoreError

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of a full disk."""


class _DiskFullError(FolderError):
    """A disk is full, which is no mistake in the call. Caches do without a file then, as after any `FolderError`."""

    exit_code = StoreError.exit_code


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file; a pipe or a device, which may have no end, is refused without waiting for it.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than `most_bytes`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "expected a regular file; it is a folder, a pipe or a device")
    with os.fdopen(descriptor, "rb") as file:
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"expected at most {most_bytes:,} bytes; it has {found.st_size:,}")
        return file.read(found.st_size)


def refuse_links(folder: Path, depth: int = 1) -> None:
    """Raise `FolderError` if a folder in one that we write into is a symbolic link, which may lead anywhere.

    Links to files do no harm: writing whole files replaces them.

    Args:
        folder: need not exist; may itself be a link, which its owner chose.
        depth: how many levels of folders in it to look into as well.
    """
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink() and entry.is_dir():
                raise FolderError(f"{entry.path}: is a symbolic link, and nothing is written through one")
            if depth and entry.is_dir():
                refuse_links(Path(entry.path), depth - 1)


def _must_be_new(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise FolderError(f"{path}: exists already and is not overwritten; delete it or choose another name")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _naming(path: Path, *, is_place: bool = False) -> Iterator[None]:
    """Turn a full disk met in the block into one sentence; where `is_place`, whatever the system says against it."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise _DiskFullError(f"{path}: {error.strerror}; nothing of it was left behind") from None
        if is_place:
            raise FolderError(f"{path}: cannot be written: {error.strerror}") from None
        raise


@contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """Yield a temporary path; when the block ends well it is synced to disk and renamed, otherwise removed."""
    if path.parent == Path("/dev") or (path.exists() and not path.is_file() and not path.is_dir()):
        # Root may do it: the machine would be without it. `/dev/stdout` may be a link to a file.
        raise OSError(errno.EINVAL, "a device or a pipe, which is not replaced by a file")
    with suppress(FileExistsError):  # a file is there: what comes next says that it is no folder
        path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}-", suffix=".tmp")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        _sync(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
        _sync(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def whole_file(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a path to write to; the file gets its name when the block ends well, and leaves no trace otherwise.

    The file and its folder are synced to disk. A killed process may leave a hidden file `.<name>-*.tmp`.

    Raises:
        FolderError: the file exists or its folder cannot be written (before the block); or the disk is full, with the
            exit code of a `StoreError`.
    """
    if not replace:
        _must_be_new(path)
    with _naming(path), ExitStack() as stack:
        with _naming(path, is_place=True):
            temporary = stack.enter_context(_renamed(path))
        yield temporary


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Turn what the system says in the block into one sentence about a file."""
    try:
        yield
    except OSError as error:
        is_place = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL}
        kind = FolderError if error.errno in is_place else StoreError
        raise kind(f"{path}: cannot be written: {error.strerror}") from None


def write_whole(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Write a file at once, over one of the same name; content that is long may come in parts.

    Raises:
        FolderError: the place is not writable.
        StoreError: the disk is full or fails. In both cases the file is as it was before.
    """
    content = content.encode() if isinstance(content, str) else content
    with _telling(path), _renamed(path) as temporary, temporary.open("wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)


def require_writable(path: Path) -> None:
    """Raise at once, before the work on a file, what `write_whole` would raise after it; leave nothing there."""
    with _telling(path), tempfile.TemporaryFile(dir=next(folder for folder in path.parents if folder.exists())):
        pass


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; it gets its name when the block ends well, and leaves no trace otherwise.

    Raises:
        FolderError: something of that name exists, or the folder above cannot be written; or the disk is full, with
            the exit code of a `StoreError`.
    """
    _must_be_new(path)
    with _naming(path, is_place=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name[:100]}-", suffix=".tmp"))
    try:
        inner = temporary / "content"  # mkdtemp's own folder is closed to everybody else
        inner.mkdir()
        with _naming(path):
            yield inner
            _must_be_new(path)
            inner.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
