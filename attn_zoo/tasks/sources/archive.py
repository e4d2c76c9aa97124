"""Unpacking of archives that nobody vouches for: tar (compressed or not, whatever its name) and zip.

Only regular files are written, under names checked here; never a link, a device, a path that leaves the folder. The
checks do not lean on `tarfile`'s own filter, which has been bypassed (CVE-2025-4517 and its kin); where the interpreter
has it, it is asked too.
"""

from __future__ import annotations

import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path, PurePosixPath

from attn_zoo.errors import ConfigError, near_matches
from attn_zoo.tasks.sources.archive_members import Limits, Member, Meter, read_members
from attn_zoo.whole_files import DISK_FULL, whole_folder

__all__ = ["Limits", "unpack"]

_CHUNK = 2**20
_WRONG_NAME = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|]')  # control characters, and what Windows reads as a path
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, NotImplementedError)


def unpack(
    archive: Path, folder: Path, *, wanted: Mapping[str, str] | None = None, limits: Limits | None = None
) -> list[str]:
    """Unpack an archive into a new folder, whole or not at all.

    Args:
        archive: tar (also compressed by gzip, bzip2 or xz) or zip; its content decides which, not its name.
        folder: to make.
        wanted: member by the name it gets in `folder`, given by the last parts of its path: `{"a.tsv": "data/a.tsv"}`
            takes `release/data/a.tsv`. None takes every file under its own name. Members that are not wanted are
            skipped, whatever they are.
        limits: what it may hold at most.

    Returns:
        Names of the files written, sorted.

    Raises:
        ConfigError: the archive is missing, damaged, too large, lacks a wanted member or holds two that fit, or what
            should be written is a link, a device, or would lie outside; no trace is left.
        FolderError: the folder exists or cannot be written, or the disk is full; no trace is left.
    """
    try:
        meter = Meter(archive, limits or Limits())
        with whole_folder(folder) as inside, closing(read_members(meter)) as members:
            return _write(members, inside, wanted, meter)
    except _DAMAGED as error:
        raise ConfigError(str(archive), [("", f"damaged or cut short: {error or type(error).__name__}")]) from None
    except OSError as error:
        if error.errno is None:  # how gzip and bz2 report damage
            raise ConfigError(str(archive), [("", f"damaged or cut short: {error}")]) from None
        raise ConfigError(str(archive), [("", f"cannot be read: {error.strerror}")]) from None


def _write(members: Iterator[Member], folder: Path, wanted: Mapping[str, str] | None, meter: Meter) -> list[str]:
    """Write the wanted members and return their names."""
    written: dict[str, str] = {}  # by name in lower case: two that differ in case alone are one file on some disks
    seen: set[str] = set()
    for member in members:
        name = _name(member, wanted)
        if len(seen) < 10_000:
            seen.add(PurePosixPath(member.name).name)
        if name is None:
            continue
        problem = member.problem or _problem(member.name)
        if problem:
            raise meter.refuse(member.name, f"refused: it is {problem}")
        if name.casefold() in written:
            raise meter.refuse(member.name, f"refused: there are two entries for {name}")
        written[name.casefold()] = name
        try:
            _copy(member, folder / name)
        except OSError as error:
            if error.errno is None or error.errno in DISK_FULL:
                raise
            raise meter.refuse(member.name, f"refused: it cannot be written: {error.strerror}") from None
    if missing := [name for name in wanted or {} if name.casefold() not in written]:
        near = sorted({match for name in missing for match in near_matches(Path(name).name, seen, 1)})
        hint = f"; it holds {', '.join(near)}" if near else ""
        raise meter.refuse("", f"does not hold {', '.join(missing)}{hint}")
    return sorted(written.values())


def _name(member: Member, wanted: Mapping[str, str] | None) -> str | None:
    """Return the name under which a member is written, or None where it is not wanted."""
    path = PurePosixPath(member.name)
    if wanted is None:
        return str(path)
    for name, ending in wanted.items():
        parts = PurePosixPath(ending).parts
        if path.parts[-len(parts) :] == parts:
            return name
    return None


def _problem(name: str) -> str:
    """Return why a name may not be written, or an empty string."""
    path = PurePosixPath(name)
    if ".." in path.parts:
        return "a path that leaves the folder"
    if path.is_absolute():
        return "an absolute path"
    if not path.parts or _WRONG_NAME.search(name):
        return "a name with signs that have a meaning in paths"
    return ""


def _copy(member: Member, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with closing(member.open()) as source, target.open("xb") as file:
        while data := source.read(_CHUNK):
            file.write(data)
