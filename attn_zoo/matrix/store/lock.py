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

_PAUSE_S = 0.1


@contextmanager
def hold_lock(folder: Path, shard: tuple[int, int] | None) -> Iterator[None]:
    """Hold the lock of a results folder, or one shard's, while a run goes on. The kernel frees it with the process.

    Args:
        folder: the results folder.
        shard: (I, N): share the folder with other shards, but not with a second run of this one, nor with a whole run.

    Raises:
        FolderError: somebody else holds it, or runs another number of shards; the message says who and since when.
        StoreError: the disk is full.
    """
    if shard is None:
        with _flock(folder / ".lock", fcntl.LOCK_EX):
            yield
        return
    with ExitStack() as stack:
        stack.enter_context(_flock(folder / ".lock", fcntl.LOCK_SH))
        own = folder / f".lock-of-{shard[1]}"
        stack.enter_context(_flock(own, fcntl.LOCK_SH))
        with wait_for_lock(folder / ".lock-shards"):  # one at a time: looking means locking
            for other in sorted(folder.glob(".lock-of-*")):
                if other != own and _is_held(other):
                    count = other.name.rpartition("-")[2]
                    text = (
                        f"shards of {count} are running here, and of {shard[1]} would measure some of their cells too"
                    )
                    raise FolderError(f"{folder}: {text}")
        stack.enter_context(_flock(folder / f".lock-{shard[0]}-of-{shard[1]}", fcntl.LOCK_EX))
        yield


@contextmanager
def wait_for_lock(path: Path, should_stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Hold the lock of one file while the block runs; wait until it is free.

    `should_stop` is asked several times a second meanwhile, as the kernel would wait through Ctrl-C.

    Raises:
        FolderError: it was to stop; or the lock cannot be made.
        StoreError: the disk is full.
    """
    with _flock(path, fcntl.LOCK_EX, should_stop):
        yield


def _is_held(path: Path) -> bool:
    """Tell whether somebody holds a lock, without keeping it."""
    try:
        with _flock(path, fcntl.LOCK_EX):
            return False
    except FolderError:
        return True


@contextmanager
def _flock(path: Path, kind: int, should_stop: Callable[[], bool] = lambda: True) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise FolderError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        try:
            is_ours = _take(descriptor, kind, should_stop)
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}:
                raise FolderError(f"{path}: cannot be locked: {error.strerror}") from None
            # Records are still whole: each is renamed into place.
            warnings.warn(f"{path.parent}: this file system has no locks; do not run twice into it", stacklevel=2)
            is_ours = True
        if not is_ours:
            raise FolderError(f"{path.parent}: in use by another run{_holder(descriptor)}")
        if kind == fcntl.LOCK_EX:
            holder = {"pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            except OSError as error:
                raise StoreError(f"{path}: cannot be written: {error.strerror}") from None
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, kind: int, should_stop: Callable[[], bool]) -> bool:
    """Take a lock as soon as it is free; return whether that was before `should_stop` said so."""
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if should_stop():
                return False
            time.sleep(_PAUSE_S)
        else:
            return True


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 1000, 0))
        return f": process {holder['pid']} since {holder['since']}; wait for it or end it"
    except (OSError, ValueError, KeyError, TypeError):
        return "; wait for it or end it"
