"""SHA-256 of files, remembered: hashing 40 MB at every plan is nothing, hashing 10 GB is.

What is remembered lies in one JSON file of the cache, by path, size and the times of the last change of content and of
the entry (the second cannot be set by copying or `touch`). If any of them differs, the file is hashed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path

from attn_zoo.errors import AttnZooError
from attn_zoo.tasks.sources.tensor_cache import cache_dir
from attn_zoo.whole_files import whole_file

__all__ = ["file_sha256"]

_REMEMBERED_FROM = 2**20  # bytes; smaller files are hashed faster than looked up
_SETTLED_NS = 2 * 10**9  # a file that changed a moment ago may change again within the tick of the file system's clock


def _memory() -> Path:
    return cache_dir() / "file-hashes.json"


def _recall(path: Path) -> dict[str, str]:
    """Return what is remembered; nothing if the file is missing or not ours."""
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path.read_bytes())
        if isinstance(known, dict):
            return {key: value for key, value in known.items() if isinstance(value, str) and len(value) == 64}
    return {}


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    path = path.resolve()
    before = path.stat()
    key = f"{before.st_size}:{before.st_mtime_ns}:{before.st_ctime_ns}:{path}"
    is_worth_it = before.st_size >= _REMEMBERED_FROM
    if is_worth_it and (known := _recall(_memory()).get(key)):
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    after = path.stat()
    is_settled = time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > _SETTLED_NS
    if is_worth_it and is_settled and (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size):
        _remember(key, digest, path)
    return digest


def _remember(key: str, digest: str, path: Path) -> None:
    # Read again: another process may have written meanwhile. What is lost to a race costs time, nothing more.
    known = {old: value for old, value in _recall(_memory()).items() if old.split(":", 3)[-1] != str(path)}
    with contextlib.suppress(OSError, AttnZooError), whole_file(_memory(), replace=True) as temporary:
        temporary.write_text(json.dumps({**known, key: digest}, indent=0, sort_keys=True), encoding="utf-8")
