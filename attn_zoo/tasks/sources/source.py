"""Where data come from that cannot be generated: a folder the user names, or else what `attn-zoo data fetch` left.

Looking never touches the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attn_zoo.errors import AttnZooError, ConfigError
from attn_zoo.tasks.sources.manifest import MANIFEST, read_manifest
from attn_zoo.tasks.sources.tensor_cache import cache_dir
from attn_zoo.whole_files import whole_file

_SPLITS = ("train", "validation", "test")  # files that must differ
_REMEMBERED_FROM = 2**20  # bytes; smaller files are hashed faster than looked up
_SETTLED_NS = 2 * 10**9  # a file that changed a moment ago may change again within the tick of the file system's clock


def fetched_dir() -> Path:
    """Return the folder that `attn-zoo data fetch` fills where the user names none; it need not exist."""
    return cache_dir() / "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Files that a task reads, and where they can be fetched from.

    `hub` with a `revision`, `urls` and `url` are three ways to fetch; the first given is taken. A source without any
    must be put there by hand.

    Args:
        name: for messages, such as `"IMDB reviews"`.
        folder: their place below a data folder, such as `"imdb/plain_text"`.
        files: their names in it, by what the task calls them.
        hint: one sentence: how to get them.
        terms: licence, or what is known of it.
        hub: dataset id at the Hugging Face hub, or empty.
        revision: commit there, 40 hexadecimal digits: a branch would be other data tomorrow. Without it nothing is
            fetched from the hub.
        hub_files: path in the hub's repository by what the task calls the file; `files` where it is None.
        urls: address of each file by what the task calls it, or empty.
        url: of an archive (tar or zip, compressed or not) that holds them, or empty. A file is the one member whose
            path ends in its name.
        sha256: of files, by what the task calls them, as published. Fetched files must have it; local ones need not (a
            Parquet file written again holds the same rows in other bytes).
        num_bytes: rough size of all files, 0 if unknown.

    Raises:
        ValueError: the fields do not fit together.
    """

    name: str
    folder: str
    files: Mapping[str, str]
    hint: str
    terms: str = ""
    hub: str = ""
    revision: str = ""
    hub_files: Mapping[str, str] | None = None
    urls: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)
    num_bytes: int = 0

    def __post_init__(self) -> None:
        if self.revision and not re.fullmatch("[0-9a-f]{40}", self.revision):
            raise ValueError(f"{self.name}: expected as revision a commit of 40 digits; got {self.revision!r}")
        for named in (self.hub_files, self.urls or None):
            if named is not None and set(named) != set(self.files):
                raise ValueError(f"{self.name}: expected an entry for each of {', '.join(self.files)}")
        if unknown := set(self.sha256) - set(self.files):
            raise ValueError(f"{self.name}: sha256 of unknown files {', '.join(sorted(unknown))}")

    @property
    def is_fetchable(self) -> bool:
        """Whether `attn-zoo data fetch` can fetch the files."""
        return self.is_at_hub or bool(self.urls or self.url)

    @property
    def is_at_hub(self) -> bool:
        """Whether the hub holds the files at a known commit."""
        return bool(self.hub and self.revision)

    def origin(self, key: str) -> str:
        """Return where `attn-zoo data fetch` gets one file, for the manifest and for messages."""
        if self.is_at_hub:
            return f"hub:{self.hub}@{self.revision}/{(self.hub_files or self.files)[key]}"
        return self.urls.get(key, self.url)

    def folders(self, data_dir: Path | None) -> list[Path]:
        """Return where to look, in order: below `data_dir`, in it, and where fetched data are."""
        given = [] if data_dir is None else [data_dir / self.folder, data_dir]
        return [*given, fetched_dir() / self.folder]

    def missing(self, data_dir: Path | None) -> list[str]:
        """Return the files that are not here; a folder with some of them is taken before one with none."""
        gaps = [[f for f in self.files.values() if not (at / f).is_file()] for at in self.folders(data_dir)]
        return min(gaps, key=len)

    def found(self, data_dir: Path | None) -> Path | None:
        """Return the first folder that holds all files, or None."""
        for at in self.folders(data_dir):
            if all((at / file).is_file() for file in self.files.values()):
                return at
        return None

    def locate(self, data_dir: Path | None) -> dict[str, Path]:
        """Return the path of each file by what the task calls it.

        Raises:
            ConfigError: a file is missing; says where it was looked for and how to get it.
        """
        if (at := self.found(data_dir)) is not None:
            return {key: at / file for key, file in self.files.items()}
        looked = ", ".join(str(at) for at in self.folders(data_dir))
        wanted = ", ".join(self.missing(data_dir))
        raise ConfigError(
            self.name, [("data_dir", f"missing {wanted}; looked in {looked}. {self.hint} (attn-zoo data list)")]
        )

    def why_missing(self, data_dir: Path | None) -> str | None:
        """Return what is not here and how to get it, without naming paths of this machine; None if nothing is missing.

        For records, which travel.
        """
        if self.found(data_dir) is not None:
            return None
        return f"{self.name}: missing {', '.join(self.missing(data_dir))}. {self.hint} (attn-zoo data list)"

    def hashes(self, data_dir: Path | None) -> dict[str, str]:
        """Return the SHA-256 of each file by what the task calls it, sorted.

        Raises:
            ConfigError: a file is missing or cannot be read, or is not what the manifest beside it says.
        """
        paths, at = self.locate(data_dir), self.found(data_dir)
        recorded = (read_manifest(at) if at else None) or {}
        hashes: dict[str, str] = {}
        for key, path in sorted(paths.items()):
            try:
                digest = file_sha256(path)
            except OSError as error:
                raise ConfigError(self.name, [(str(path), f"cannot be read: {error.strerror}")]) from None
            entry = recorded.get(path.relative_to(at).as_posix()) if at else None
            if entry is not None and entry.sha256 != digest:
                way = "fetch or restore it, or delete the manifest and record what is there (data verify --record)"
                text = f"was changed since {MANIFEST} beside it was written: {way}"
                raise ConfigError(self.name, [(str(path), text)])
            hashes[key] = digest
        return hashes

    def digest(self, data_dir: Path | None) -> str:
        """Return a hash of the content of all files.

        Raises:
            ConfigError: as for `hashes`, or a file is another one of them: two splits hold the same bytes, or one what
                was published as the other.
        """
        content = hashlib.sha256()
        owner = {digest: key for key, digest in self.sha256.items()}
        for key, digest in self.hashes(data_dir).items():
            other = owner.setdefault(digest, key) if key in _SPLITS else owner.get(digest, key)
            if other != key:
                is_published = self.sha256.get(other) == digest
                got = f"what was published as {other}" if is_published else f"the same bytes as {self.files[other]}"
                raise ConfigError(self.name, [("data_dir", f"expected {key} in {self.files[key]}; it holds {got}")])
            content.update(key.encode() + bytes.fromhex(digest))
        return content.hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits, remembered: some files have 10 GB.

    What is remembered lies in one JSON file of the cache, by path, size and the times of the last change of content and
    of the entry (the second cannot be set by copying or `touch`). If any of them differs, the file is hashed again.

    Raises:
        OSError: the file cannot be read.
    """
    path = path.resolve()
    before = path.stat()
    key = f"{before.st_size}:{before.st_mtime_ns}:{before.st_ctime_ns}:{path}"
    is_worth_it = before.st_size >= _REMEMBERED_FROM
    if is_worth_it and (known := _remembered().get(key)):
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    after = path.stat()
    is_settled = time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > _SETTLED_NS
    if is_worth_it and is_settled and (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size):
        # Read again: another process may have written meanwhile. What is lost to a race costs time, nothing more.
        others = {old: value for old, value in _remembered().items() if old.split(":", 3)[-1] != str(path)}
        with contextlib.suppress(OSError, AttnZooError), whole_file(_memory(), replace=True) as temporary:
            temporary.write_text(json.dumps({**others, key: digest}, indent=0, sort_keys=True), encoding="utf-8")
    return digest


def _memory() -> Path:
    return cache_dir() / "file-hashes.json"


def _remembered() -> dict[str, str]:
    """Return what is remembered; nothing if the file is missing or not ours."""
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(_memory().read_bytes())
        if isinstance(known, dict):
            return {key: value for key, value in known.items() if isinstance(value, str) and len(value) == 64}
    return {}
