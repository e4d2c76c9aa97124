"""A results folder from elsewhere: one file that holds a run, or what a commit of a git repository holds.

Both are zip archives underneath, and nothing in one is trusted: what a reader of a results folder reads is written to a
temporary folder, within limits of size and number, and nothing else. `share` packs a run, `opened` opens it.
"""

from __future__ import annotations

import json
import lzma
import re
import stat
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from attn_zoo.errors import ConfigError, FolderError
from attn_zoo.folder import read_info
from attn_zoo.whole_files import whole_file

SUFFIX = ".zip"

MAX_FILES = 1_000_000
MAX_FILE_BYTES = 64 * 2**20
MAX_BYTES = 4 * 2**30
"""Of everything in a packed run, unpacked: a run of 100 000 cells takes about a quarter."""

_READ = re.compile(r"(run|ceilings)\.json|(cells|parts)/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,150}\.json")
"""What a reader of a results folder reads: not logs, weights, or sources."""

_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(NotImplementedError, RuntimeError, EOFError, OSError, ValueError),
)
"""What reading a damaged archive raises."""

_GIT_TIMEOUT_S = 120


def share(folder: str | Path, path: str | Path | None = None) -> Path:
    """Pack the records of a results folder into one file; return its path. The same records give the same bytes.

    Args:
        folder: results folder.
        path: of the file, by default the name of the folder, here. One that was packed of the same run is replaced.

    Raises:
        FolderError: no results folder that could be read, or the file cannot be written, or is another's.
    """
    folder = Path(folder)
    created = read_info(folder, has_plan=False).created
    path = Path(path) if path is not None else Path(f"{folder.resolve().name}{SUFFIX}")
    if path.suffix != SUFFIX:
        raise FolderError(f"{path}: expected a name that ends in {SUFFIX}")
    if path.exists() and _created(path) != created:
        raise FolderError(f"{path}: exists already and is not packed from this run; delete it or choose another name")
    files = [entry for entry in sorted(folder.rglob("*.json")) if entry.is_file() and not entry.is_symlink()]
    names = {entry.relative_to(folder).as_posix(): entry for entry in files}
    with (
        whole_file(path, replace=True) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive,
    ):
        for name, entry in names.items():
            if _READ.fullmatch(name):
                info = zipfile.ZipInfo(name)  # with a date of its own: 1980
                info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                with suppress(FileNotFoundError):  # a repeat of a run that goes on, which became a record meanwhile
                    archive.writestr(info, entry.read_bytes())
    return path


def _created(path: Path) -> str | None:
    """Return when the run began that `share` packed into a file; None where it is no such file."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("run.json") as stream:
            return str(json.loads(stream.read(MAX_FILE_BYTES))["created"])
    except (*_DAMAGED, LookupError, TypeError):
        return None


@contextmanager
def opened(source: str | Path) -> Iterator[Path]:
    """Yield a results folder: that one, or a temporary one with the records of a packed run or of a commit.

    Args:
        source: folder; file that `share` made, or another zip archive of a results folder; `REV:FOLDER` of the git
            repository here.

    Raises:
        ConfigError: a packed run that is damaged, too large, or not what it pretends to be; no such commit or folder.
    """
    path = Path(source)
    revision, colon, inner = str(source).partition(":")
    is_packed = path.is_file() and path.suffix == SUFFIX
    if not is_packed and (path.exists() or not (colon and revision and inner)):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="attn-zoo-") as room:
        folder = Path(room) / (re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem if is_packed else str(source))[-80:] or "run")
        if is_packed:
            _unpack(path, folder, str(source))
        else:
            archive = Path(room) / f"archive{SUFFIX}"
            archive.write_bytes(_archive(revision, inner))
            _unpack(archive, folder, str(source))
        yield folder


def _unpack(path: Path, folder: Path, source: str) -> None:
    """Write what a reader reads of an archive into a new folder."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            left = MAX_BYTES
            for name, entry in _read_entries(entries, source).items():
                with archive.open(entry) as stream:
                    content = stream.read(min(MAX_FILE_BYTES, left) + 1)
                left -= len(content)
                if len(content) > MAX_FILE_BYTES or left < 0:
                    raise _refusal(source, f"{name} is larger than a record can be, or all of it too large together")
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
    except _DAMAGED as error:
        raise _refusal(source, f"damaged, or no packed run: {error}") from None


def _read_entries(entries: Sequence[zipfile.ZipInfo], source: str) -> dict[str, zipfile.ZipInfo]:
    """Return what a reader reads of an archive by its path within the results folder, where nothing is wrong in it."""
    if len(entries) > MAX_FILES:
        raise _refusal(source, f"it holds {len(entries)} files; at most {MAX_FILES} are read")
    for entry in entries:
        parts = PurePosixPath(entry.filename).parts
        if entry.filename.startswith("/") or "\\" in entry.filename or ".." in parts or ":" in "".join(parts[:1]):
            raise _refusal(source, f"{entry.filename!r} points out of it")
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if kind not in (0, stat.S_IFREG):
            raise _refusal(source, f"{entry.filename!r} is a link or a device; expected plain files")
    heads = sorted((entry.filename for entry in entries if PurePosixPath(entry.filename).name == "run.json"), key=len)
    if not heads:
        raise _refusal(source, "it has no run.json, so it holds no results folder")
    top = heads[0].removesuffix("run.json")
    found: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        name = entry.filename.removeprefix(top)
        if entry.filename.startswith(top) and _READ.fullmatch(name):
            if name in found:
                raise _refusal(source, "it holds several files of one name")
            found[name] = entry
    return found


def _archive(revision: str, inner: str) -> bytes:
    """Return a folder as a commit has it, as a zip archive; links in it are refused like any others."""
    tree = ""
    for path in (f"./{inner}", inner):  # seen from here, as git says it; or from the top
        tree = (
            tree or _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}:{path}").decode().strip()
        )
    if not tree:
        known = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        what = f"no folder {inner} at {revision}" if known else f"no commit {revision} in a git repository here"
        raise ConfigError(f"{revision}:{inner}", [("", f"expected a results folder or REV:FOLDER; there is {what}")])
    content = _git("archive", "--format=zip", tree, top=True)
    if not content:
        raise ConfigError(f"{revision}:{inner}", [("", "git cannot archive it: expected a folder")])
    return content


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """One commit of a repository."""

    digest: str
    date: str
    subject: str


def commits(folder: str, most: int) -> list[Commit]:
    """Return the latest commits that changed the records of a folder of the git repository here, oldest first."""
    records = [f"./{folder}/{name}" for name in ("run.json", "cells")]
    log = _git("log", f"--max-count={most}", "--format=%H%x1f%cI%x1f%s%x1e", "--", *records).decode(errors="replace")
    found = [entry.strip().split("\x1f", 2) for entry in log.split("\x1e") if entry.strip()]
    return [Commit(digest=digest, date=date, subject=subject) for digest, date, subject in reversed(found)]


def _git(*arguments: str, top: bool = False) -> bytes:
    """Return what git prints; nothing where it fails.

    Raises:
        ConfigError: there is no git.
    """
    where = _git("rev-parse", "--show-toplevel").decode().strip() if top else "."
    try:
        done = subprocess.run(
            ["git", "-C", where, *arguments], capture_output=True, check=False, timeout=_GIT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError("git", [("", f"cannot be run: {error}")]) from None
    return done.stdout if done.returncode == 0 else b""


def _refusal(source: str, text: str) -> ConfigError:
    return ConfigError(source, [("", text)])
