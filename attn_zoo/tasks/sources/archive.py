"""Untrusted archives: wanted files are taken out of a tar (compressed or not) or zip; single files are unpacked.

A path in an archive is only compared with what is wanted; files are written under names that the caller gives. Only
regular files are taken, never a link or a device, and what streams by is counted, wanted or not.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from attn_zoo.errors import ConfigError, near_matches
from attn_zoo.whole_files import whole_folder

_CHUNK = 2**20
_COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, NotImplementedError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What an archive may hold at most.

    Args:
        num_members: entries of any kind.
        num_bytes: of all of it, unpacked.
        ratio: unpacked bytes for each packed byte, once `free_bytes` are unpacked. Long Range Arena's archive has 2.3,
            text about 4; bombs have 1000.
        free_bytes: unpacked bytes that any archive may hold.
    """

    num_members: int = 1_000_000
    num_bytes: int = 64 * 2**30
    ratio: float = 100.0
    free_bytes: int = 16 * 2**20

    def most_bytes(self, num_packed: int) -> int:
        """Return how many bytes an archive of `num_packed` bytes may unpack to."""
        return min(self.num_bytes, max(self.free_bytes, int(self.ratio * num_packed)))


@dataclass(frozen=True, slots=True)
class _Member:
    """One file of an archive: its path, why it may not be taken (or empty), and how to open it before the next one."""

    path: PurePosixPath
    problem: str
    open: Callable[[], IO[bytes]]


class _Meter:
    """Counts what comes out of an archive and refuses too much."""

    def __init__(self, archive: Path, limits: Limits) -> None:
        self.archive, self.max_members = archive, limits.num_members
        self.max_bytes = limits.most_bytes(archive.stat().st_size)
        self.num_bytes = self.num_members = 0

    def refuse(self, why: str, member: str = "") -> ConfigError:
        """Return the error for a member, its path made printable."""
        shown = member if member.isprintable() else repr(member)
        return ConfigError(str(self.archive), [(shown[:200], why)])

    def add_bytes(self, count: int) -> None:
        self.num_bytes += count
        if self.num_bytes > self.max_bytes:
            raise self.refuse(f"refused: it unpacks to more than {self.max_bytes} bytes, as a bomb would")

    def add_member(self) -> None:
        self.num_members += 1
        if self.num_members > self.max_members:
            raise self.refuse(f"refused: it holds more than {self.max_members} entries")


class _Metered(io.RawIOBase):
    """A counted stream: it also counts what `tarfile` reads because a header says so, such as a name of a gigabyte."""

    def __init__(self, stream: IO[bytes], meter: _Meter) -> None:
        self._stream, self._meter = stream, meter

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(_CHUNK if size < 0 else size)
        self._meter.add_bytes(len(data))
        return data


def unpack(archive: Path, folder: Path, *, wanted: Mapping[str, str], limits: Limits | None = None) -> list[str]:
    """Take files out of an archive into a new folder, all or none.

    Args:
        archive: tar (also compressed by gzip, bzip2 or xz) or zip; its content decides which, not its name.
        folder: to make.
        wanted: last parts of a member's path by the name that its file gets in `folder`: `{"a.tsv": "data/a.tsv"}`
            takes `release/data/a.tsv`. Other members are skipped, whatever they are.
        limits: what the archive may hold at most.

    Returns:
        Names of the files written, sorted.

    Raises:
        ConfigError: the archive is missing, damaged, too large, lacks a wanted file or holds two that fit, or the one
            that fits is a link, a device, or has a path that leads out of the archive; no trace is left.
        FolderError: the folder exists or cannot be written, or the disk is full; no trace is left.
    """
    try:
        meter = _Meter(archive, limits or Limits())
        with whole_folder(folder) as inside, closing(_members(meter)) as members:
            return _write(members, inside, wanted, meter)
    except _DAMAGED as error:
        raise ConfigError(str(archive), [("", f"damaged or cut short: {error or type(error).__name__}")]) from None
    except OSError as error:
        # gzip and bz2 report damage as an OSError without a number.
        problem = f"damaged or cut short: {error}" if error.errno is None else f"cannot be read: {error.strerror}"
        raise ConfigError(str(archive), [("", problem)]) from None


def gunzip(path: Path) -> bytes:
    """Return what a file packed by gzip holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or unpacks to more than `Limits` allow; says which.
    """
    packed = path.read_bytes()
    most = Limits().most_bytes(len(packed))
    try:
        with gzip.open(io.BytesIO(packed)) as file:
            content = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"damaged or cut short: {error}") from None
    if len(content) > most:
        raise ValueError(f"it unpacks to more than {most} bytes, as a bomb would")
    return content


def _write(
    members: Generator[_Member, None, None], folder: Path, wanted: Mapping[str, str], meter: _Meter
) -> list[str]:
    endings = {name: PurePosixPath(ending).parts for name, ending in wanted.items()}
    seen: set[str] = set()
    written: set[str] = set()
    for member in members:
        parts = member.path.parts
        if len(seen) < 10_000:
            seen.add(member.path.name)
        name = next((name for name, ending in endings.items() if parts[-len(ending) :] == ending), None)
        if name is None:
            continue
        problem = member.problem
        if member.path.is_absolute() or ".." in parts:
            problem = "it has a path that leads out of the archive"
        if name in written:
            problem = f"there are two entries for {name}"
        if problem:
            raise meter.refuse(f"refused: {problem}", str(member.path))
        written.add(name)
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with closing(member.open()) as source, target.open("xb") as file:
            while data := source.read(_CHUNK):
                file.write(data)
    if missing := [name for name in wanted if name not in written]:
        near = sorted({match for name in missing for match in near_matches(Path(name).name, seen, 1)})
        hint = f"; it holds {', '.join(near)}" if near else ""
        raise meter.refuse(f"does not hold {', '.join(missing)}{hint}")
    return sorted(written)


def _members(meter: _Meter) -> Generator[_Member, None, None]:
    """Yield the files of an archive; folders are left out. The first bytes decide what it is, not its name."""
    with meter.archive.open("rb") as file:
        head = file.read(512)
        file.seek(0)
        if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            yield from _zip_members(file, meter)
            return
        stream: IO[bytes] = file
        for magic, opened in _COMPRESSED.items():
            if head.startswith(magic):
                stream = opened(file)
        if stream is file and head[257:262] != b"ustar":
            raise meter.refuse("expected a tar or zip archive; it begins like neither")
        yield from _tar_members(stream, meter)


def _tar_members(stream: IO[bytes], meter: _Meter) -> Generator[_Member, None, None]:
    metered = _Metered(stream, meter)
    with closing(stream), tarfile.open(fileobj=metered, mode="r|") as tar:
        for info in tar:
            meter.add_member()
            problem = "" if info.isreg() and not info.issparse() else "it is not a regular file"
            if info.issym() or info.islnk():
                problem = "it is a link"
            if not info.isdir():
                yield _Member(PurePosixPath(info.name), problem, partial(_tar_file, tar, info))
        while metered.read(_CHUNK):  # to the end, where the checksums are
            pass


def _zip_members(file: IO[bytes], meter: _Meter) -> Generator[_Member, None, None]:
    with zipfile.ZipFile(file) as zipped:
        for info in zipped.infolist():
            meter.add_member()
            kind = stat.S_IFMT(info.external_attr >> 16)
            problem = "" if kind in (0, stat.S_IFREG) else "it is not a regular file"
            if kind == stat.S_IFLNK:
                problem = "it is a link"
            if info.flag_bits & 1:
                problem = "it is encrypted"
            if not info.is_dir():
                yield _Member(PurePosixPath(info.filename), problem, partial(_zip_file, zipped, info, meter))


def _tar_file(tar: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    return cast(IO[bytes], tar.extractfile(info))  # of regular files it is never None


def _zip_file(zipped: zipfile.ZipFile, info: zipfile.ZipInfo, meter: _Meter) -> IO[bytes]:
    return cast(IO[bytes], _Metered(zipped.open(info), meter))
