"""Locks of a results folder, which the kernel frees when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from attn_zoo.errors import FolderError, StoreError

_PAUSE_S = 0.2


@contextmanager
def hold_lock(
    folder: Path,
    shard: tuple[int, int] | None,
    *,
    name: str = ".lock",
    wait: bool = False,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """Hold the lock of a results folder, or one shard's, while the block runs. The kernel frees it with the process.

    Args:
        folder: the results folder.
        shard: (I, N): share the folder with other shards, but not with a second run of this one, nor with a whole run.
        name: of the lock file.
        wait: until it is free, instead of raising.
        should_stop: of one lock that is waited for, asked several times a second while it is not free; True raises.

    Raises:
        FolderError: somebody else holds it, or runs another number of shards; the message says who and since when.
        StoreError: the disk is full.
    """
    if shard is None:
        with _flock(folder / name, fcntl.LOCK_EX, wait, should_stop):
            yield
        return
    with ExitStack() as stack:
        stack.enter_context(_flock(folder / name, fcntl.LOCK_SH, wait))
        own = folder / f"{name}-of-{shard[1]}"
        stack.enter_context(_flock(own, fcntl.LOCK_SH, wait))
        with _flock(folder / f"{name}-shards", fcntl.LOCK_EX, wait=True):  # one at a time: looking means locking
            for other in sorted(folder.glob(f"{name}-of-*")):
                if other != own and _is_held(other):
                    count = other.name.rpartition("-")[2]
                    text = (
                        f"shards of {count} are running here, and of {shard[1]} would measure some of their cells too"
                    )
                    raise FolderError(f"{folder}: {text}")
        stack.enter_context(_flock(folder / f"{name}-{shard[0]}-of-{shard[1]}", fcntl.LOCK_EX, wait))
        yield


def _is_held(path: Path) -> bool:
    """Tell whether somebody holds a lock, without keeping it."""
    try:
        with _flock(path, fcntl.LOCK_EX, False):
            return False
    except FolderError:
        return True


@contextmanager
def _flock(path: Path, kind: int, wait: bool, should_stop: Callable[[], bool] | None = None) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise FolderError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        try:
            while should_stop is not None and not _is_taken(descriptor, kind) and not should_stop():
                time.sleep(_PAUSE_S)
            fcntl.flock(descriptor, kind if wait and should_stop is None else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError(f"{path.parent}: in use by another run{_holder(descriptor)}") from None
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}:
                raise FolderError(f"{path}: cannot be locked: {error.strerror}") from None
            # Records are still whole: each is renamed into place.
            warnings.warn(f"{path.parent}: this file system has no locks; do not run twice into it", stacklevel=2)
        if kind == fcntl.LOCK_EX and not wait:
            holder = {"pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            except OSError as error:
                raise StoreError(f"{path}: cannot be written: {error.strerror}") from None
        yield
    finally:
        os.close(descriptor)


def _is_taken(descriptor: int, kind: int) -> bool:
    """Take a lock if it is free; the kernel would wait for it through Ctrl-C."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 1000, 0))
        return f": process {holder['pid']} since {holder['since']}; wait for it or end it"
    except (OSError, ValueError, KeyError, TypeError):
        return "; wait for it or end it"
