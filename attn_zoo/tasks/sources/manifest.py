"""What a data folder should hold: names, sizes and SHA-256 of its files, and where they came from.

`manifest.json` is in the folder it describes. Several sources may share a folder: writing keeps the entries of files
that it does not mention.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from attn_zoo.errors import ConfigError
from attn_zoo.whole_files import whole_file

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file as it was when the manifest was written.

    Args:
        num_bytes: size.
        sha256: of the content, 64 hexadecimal digits.
        origin: `hub:ID@COMMIT/PATH`, an address, or `local`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    num_bytes: Annotated[int, Field(ge=0, strict=True)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Manifest:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format: Literal[1]
    files: dict[str, Entry]


_ADAPTER = TypeAdapter(_Manifest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What differs from the manifest: names relative to the folder, sorted.

    Args:
        good: files as they should be.
        missing: files that are not there.
        truncated: files that are shorter and may have been cut short.
        changed: files with other content.
        extra: files the manifest does not know; they do no harm.
    """

    good: tuple[str, ...]
    missing: tuple[str, ...]
    truncated: tuple[str, ...]
    changed: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether every file of the manifest is as it should be."""
        return not (self.missing or self.truncated or self.changed)

    def sentences(self) -> list[str]:
        """Return one line for each kind of difference, with at most five names."""
        lines = []
        for kind in ("missing", "truncated", "changed", "extra"):
            names: tuple[str, ...] = getattr(self, kind)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            if names:
                lines.append(f"{kind}: {', '.join(names[:5])}{more}")
        return lines


def describe(path: Path, origin: str) -> Entry:
    """Return what the manifest says of a file. Reads all of it: cached hashes are not used here.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Entry(num_bytes=file.tell(), sha256=digest, origin=origin)


def read_manifest(folder: Path) -> dict[str, Entry] | None:
    """Return the entries by name of file, or None where the folder has no manifest.

    Raises:
        ConfigError: the manifest cannot be read or is not one; says what is wrong.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(str(path), [("", f"cannot be read: {error.strerror}")]) from None
    try:
        files = _ADAPTER.validate_json(text).files
    except ValidationError as error:
        problems = [(".".join(map(str, problem["loc"])), problem["msg"]) for problem in error.errors()]
        raise ConfigError(str(path), problems) from None
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise ConfigError(str(path), [(f"files.{name}", "expected a path inside the folder")])
    return files


def write_manifest(folder: Path, entries: Mapping[str, Entry]) -> Path:
    """Write or extend the manifest of a folder, atomically; return its path.

    Raises:
        ConfigError: there is one that cannot be read.
        FolderError: the folder cannot be written.
    """
    files = {**(read_manifest(folder) or {}), **entries}
    data = {"format": 1, "files": {name: asdict(entry) for name, entry in sorted(files.items())}}
    with whole_file(folder / MANIFEST, replace=True) as temporary:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return folder / MANIFEST


def verify(folder: Path) -> Verification:
    """Compare a folder with its manifest. Reads every file of it.

    Raises:
        ConfigError: there is no manifest, or it or a file cannot be read.
    """
    entries = read_manifest(folder)
    if entries is None:
        raise ConfigError(str(folder), [("", f"has no {MANIFEST} to compare with")])
    states: dict[str, list[str]] = {kind: [] for kind in ("good", "missing", "truncated", "changed", "extra")}
    for name, entry in entries.items():
        states[_state(folder / name, entry)].append(name)
    present = (path for path in folder.rglob("*") if not path.is_dir())
    names = {path.relative_to(folder).as_posix() for path in present}
    states["extra"] = list(names - set(entries) - {MANIFEST})
    return Verification(**{kind: tuple(sorted(names)) for kind, names in states.items()})


def _state(path: Path, entry: Entry) -> str:
    """Return the field of `Verification` that a file belongs to."""
    if not path.is_file():
        return "missing"
    try:
        if (size := path.stat().st_size) != entry.num_bytes:
            return "truncated" if size < entry.num_bytes else "changed"
        return "good" if describe(path, entry.origin).sha256 == entry.sha256 else "changed"
    except OSError as error:
        raise ConfigError(str(path), [("", f"cannot be read: {error.strerror}")]) from None
