"""The entries of tar and zip archives, in one form, counted while they stream by; nothing is written here."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, cast

from attn_zoo.errors import ConfigError

__all__ = ["Limits", "Member", "Meter", "read_members"]

_CHUNK = 2**20


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


@dataclass(frozen=True, slots=True)
class Member:
    """One file of an archive.

    Args:
        name: its path as the archive gives it, unchecked.
        problem: why it may not be written, or empty.
        open: returns its content, once, before the next member is asked for.
    """

    name: str
    problem: str
    open: Callable[[], IO[bytes]]


class Meter:
    """Counts what comes out of an archive and refuses too much.

    Args:
        archive: the file.
        limits: what it may hold.
    """

    def __init__(self, archive: Path, limits: Limits) -> None:
        self.archive, self.limits = archive, limits
        self.allowed = min(limits.num_bytes, max(limits.free_bytes, int(limits.ratio * archive.stat().st_size)))
        self.num_bytes = self.num_members = 0

    def refuse(self, member: str, why: str) -> ConfigError:
        """Return the error for a member, its name made printable."""
        shown = member if member.isprintable() else repr(member)
        return ConfigError(str(self.archive), [(shown[:200], why)])

    def add_bytes(self, count: int) -> None:
        """Count unpacked bytes."""
        self.num_bytes += count
        if self.num_bytes > self.allowed:
            raise self.refuse("", f"refused: it unpacks to more than {self.allowed} bytes, as a bomb would")

    def add_member(self) -> None:
        """Count an entry."""
        self.num_members += 1
        if self.num_members > self.limits.num_members:
            raise self.refuse("", f"refused: it holds more than {self.limits.num_members} entries")


class _Metered(io.RawIOBase):
    """A counted stream: also what `tarfile` reads on the word of a header, such as names of a gigabyte."""

    def __init__(self, stream: IO[bytes], meter: Meter) -> None:
        self._stream, self._meter = stream, meter

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(_CHUNK if size < 0 else size)
        self._meter.add_bytes(len(data))
        return data


def read_members(meter: Meter) -> Generator[Member, None, None]:
    """Yield the files of an archive; folders are left out. The first bytes decide what it is, not its name.

    Raises:
        ConfigError: neither tar nor zip, or too much in it.
    """
    with meter.archive.open("rb") as file:
        head = file.read(512)
        file.seek(0)
        if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            yield from _zip_members(file, meter)
        elif head.startswith(b"\x1f\x8b"):
            yield from _tar_members(cast(IO[bytes], gzip.GzipFile(fileobj=file)), meter)
        elif head.startswith(b"BZh"):
            yield from _tar_members(bz2.BZ2File(file), meter)
        elif head.startswith(b"\xfd7zXZ\x00"):
            yield from _tar_members(lzma.LZMAFile(file), meter)  # noqa: SIM115 - closed there
        elif head[257:262] == b"ustar":
            yield from _tar_members(file, meter)
        else:
            raise meter.refuse("", "expected a tar or zip archive; it begins like neither")


def _tar_members(stream: IO[bytes], meter: Meter) -> Generator[Member, None, None]:
    metered = _Metered(stream, meter)
    with closing(stream), tarfile.open(fileobj=metered, mode="r|") as tar:
        for member in tar:
            meter.add_member()
            if not member.isdir():
                yield Member(member.name, _tar_problem(member), partial(_opened, tar, member))
        while metered.read(_CHUNK):  # to the end, where checksums stand
            pass


def _opened(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    stream = tar.extractfile(member)
    if stream is None:
        raise tarfile.ReadError(f"{member.name} holds no data")
    return stream


def _tar_problem(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return "a link"
    if not member.isreg():
        return "not a regular file"
    if member.issparse():
        return "a sparse file"
    if hasattr(tarfile, "data_filter"):  # 3.11.4 and later
        try:
            tarfile.data_filter(member, "/nowhere")
        except tarfile.FilterError as error:
            return f"unsafe ({error})"
    return ""


def _zip_members(file: IO[bytes], meter: Meter) -> Generator[Member, None, None]:
    with zipfile.ZipFile(file) as zipped:
        for info in zipped.infolist():
            meter.add_member()
            if not info.is_dir():
                yield Member(info.filename, _zip_problem(info), partial(_counted, zipped, info, meter))


def _counted(zipped: zipfile.ZipFile, info: zipfile.ZipInfo, meter: Meter) -> IO[bytes]:
    return cast(IO[bytes], _Metered(zipped.open(info), meter))


def _zip_problem(info: zipfile.ZipInfo) -> str:
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return "a link"
    if kind not in (0, stat.S_IFREG):
        return "not a regular file"
    return "encrypted" if info.flag_bits & 1 else ""
