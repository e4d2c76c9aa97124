"""Fetch the files of a `Source`. The only module of the package that uses the network.

Files are checked before they get their place, and a manifest is written beside them. Datasets of the hub are fetched by
`huggingface_hub`. Plain addresses need no optional package, so they are fetched by the standard library: resumed where
the connection broke, never larger than allowed.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from attn_zoo.errors import AttnZooError, UnsupportedError
from attn_zoo.tasks.sources.archive import unpack
from attn_zoo.tasks.sources.manifest import Entry, describe, read_manifest, write_manifest
from attn_zoo.tasks.sources.source import Source, fetched_dir
from attn_zoo.whole_files import DISK_FULL

_QUIET = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}
_FREE_ALLOWANCE = 64 * 2**20  # what a file may exceed its rough size by, at least
_KNOCK_S = 15.0
_STAGING = ".fetch-"
_ABANDONED_S = 24 * 3600.0
_MAX_UNKNOWN = 32 * 2**30  # where nothing is known of the size
_CHUNK = 2**20
_ATTEMPTS = 4
_TIMEOUT_S = 30.0
_SAY_EVERY = 500 * 10**6  # bytes
_BUSY = {408, 425, 429, 500, 502, 503, 504}  # what a server says that may answer a moment later


class FetchError(AttnZooError):
    """Data could not be fetched. Nothing is left behind."""


class _BrokenError(Exception):
    """The connection ended early, or the server is busy: worth another attempt."""


def fetch(
    source: Source, *, data_dir: Path | None = None, force: bool = False, say: Callable[[str], None] = lambda _: None
) -> dict[str, Path]:
    """Fetch the files of a source, check them, move them to their place and write the manifest.

    Files that are there already are checked and left alone.

    Args:
        source: what to fetch.
        data_dir: folder below which `source.folder` is filled; by default `fetched_dir()`.
        force: fetch again, over what is there.
        say: told in one line each what happens.

    Returns:
        The path of each file by what the task calls it.

    Raises:
        UnsupportedError: the source cannot be fetched, or a package is missing.
        FetchError: no network, no such file, disk full, or another content than published; nothing new is left there.
    """
    if not force and (at := source.found(data_dir)) is not None:
        return _present(source, at, source.locate(data_dir), say)
    if not source.is_fetchable:
        raise UnsupportedError("data", f"{source.name} cannot be fetched. {source.hint}")
    folder = (fetched_dir() if data_dir is None else data_dir) / source.folder
    paths = {key: folder / file for key, file in source.files.items()}
    if (present := [path.name for path in paths.values() if path.exists()]) and not force:
        names = ", ".join(present)
        raise FetchError(f"{folder} holds {names} but not all of {source.name}: delete it, or fetch with --force")
    with _staging(source, folder) as staging:
        got = _fetch_files(source, staging, say)
        entries = _checked(source, got)
        for key, path in got.items():
            paths[key].parent.mkdir(parents=True, exist_ok=True)
            path.chmod(0o644)
            path.replace(paths[key])
        write_manifest(folder, entries)
    say(f"{source.name}: {len(paths)} files in {folder}")
    return paths


def _present(source: Source, folder: Path, paths: dict[str, Path], say: Callable[[str], None]) -> dict[str, Path]:
    """Return the files that are here; raise `FetchError` if one is not as the manifest says."""
    known = read_manifest(folder) or {}
    others = []
    for key, path in paths.items():
        digest = describe(path, "").sha256
        name = path.relative_to(folder).as_posix()
        if name in known and known[name].sha256 != digest:
            raise FetchError(f"{path}: not as its manifest says; delete it, or fetch anew with --force")
        if digest != source.sha256.get(key, digest):
            others.append(name)
    note = f"; {', '.join(others)} in other bytes than published (--force fetches those)" if others else ""
    say(f"{source.name}: already in {folder}{note}")
    return paths


@contextlib.contextmanager
def _staging(source: Source, folder: Path) -> Iterator[Path]:
    """Yield a new folder on the same disk as `folder`; after a failure, no folder is left that was not there before."""
    new = [at for at in (folder, *folder.parents) if not at.exists()]
    staging: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < source.num_bytes:
            raise FetchError(f"{folder}: {source.name} needs {source.num_bytes} bytes, and {free} are free")
        for left in folder.glob(f"{_STAGING}*"):  # by a killed fetch; another fetch may still be running
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(dir=folder, prefix=_STAGING))
        yield staging
    except OSError as error:
        raise _disk_error(error, folder) from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        for at in new:
            with contextlib.suppress(OSError):
                at.rmdir()  # only empty ones go


def _disk_error(error: OSError, folder: Path) -> FetchError:
    if error.errno in DISK_FULL:
        return FetchError(f"{folder}: the disk is full; nothing was left behind")
    return FetchError(f"{error.filename or folder}: {error.strerror or error}; nothing was left behind")


def _fetch_files(source: Source, staging: Path, say: Callable[[str], None]) -> dict[str, Path]:
    """Fetch every file into the staging folder; return the paths."""
    if source.is_at_hub:
        files = source.hub_files or source.files
        return {key: _from_hub(source, file, staging, say) for key, file in files.items()}
    allowed = max(4 * source.num_bytes, _FREE_ALLOWANCE) if source.num_bytes else _MAX_UNKNOWN
    if source.urls:
        got = {key: staging / str(number) for number, key in enumerate(source.files)}
        for key, path in got.items():
            say(f"fetching {source.urls[key]}")
            download(source.urls[key], path, max_bytes=allowed, say=say)
        return got
    say(f"fetching {source.url}")
    archive = staging / "archive"
    download(source.url, archive, max_bytes=_MAX_UNKNOWN, say=say)
    say("unpacking")
    unpack(archive, staging / "files", wanted={file: file for file in source.files.values()})
    archive.unlink()
    return {key: staging / "files" / file for key, file in source.files.items()}


def _from_hub(source: Source, file: str, staging: Path, say: Callable[[str], None]) -> Path:
    """Fetch one file of a dataset at its commit, anonymously: no token is sent, nothing is reported."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import huggingface_hub.constants
    except ImportError:
        raise UnsupportedError("datasets", "the hub needs its package: pip install 'attn-zoo[lra]'") from None
    where = f"{source.hub}@{source.revision[:8]}/{file}"
    say(f"fetching {where} from the hub")
    _check_reachable(huggingface_hub.constants.ENDPOINT, where)
    try:
        return Path(
            huggingface_hub.hf_hub_download(
                source.hub, file, repo_type="dataset", revision=source.revision, local_dir=staging / "hub", token=False
            )
        )
    except OSError as error:
        if error.errno in DISK_FULL or error.errno in {errno.EACCES, errno.EROFS}:
            raise
        answers = [getattr(getattr(one, "response", None), "status_code", None) for one in (error, error.__cause__)]
        if status := next(filter(None, answers), None):
            raise FetchError(f"{where}: the hub answers {status}") from None
        reason = _first_line(error.__cause__ or error)
        raise FetchError(f"{where}: the hub cannot be reached, is there a network? ({reason})") from None
    except Exception as error:  # errors of its HTTP client, which change from version to version
        raise FetchError(f"{where}: cannot be fetched from the hub ({_first_line(error)})") from None


def _check_reachable(endpoint: str, where: str) -> None:
    """Raise `FetchError` if no server answers there: the hub's package would try for 23 s and print each attempt."""
    address = urllib.parse.urlsplit(endpoint)
    if urllib.request.getproxies().get(address.scheme) or not address.hostname:
        return
    port = address.port or {"http": 80}.get(address.scheme, 443)
    try:
        socket.create_connection((address.hostname, port), timeout=_KNOCK_S).close()
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise FetchError(f"{where}: {address.hostname} cannot be reached, is there a network? ({why})") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _checked(source: Source, got: Mapping[str, Path]) -> dict[str, Entry]:
    """Return the manifest's entries of the fetched files, each with the hash that was published for it."""
    entries = {}
    for key, path in got.items():
        entry = describe(path, source.origin(key))
        should_be = source.sha256.get(key, entry.sha256)
        if entry.sha256 != should_be:
            raise FetchError(
                f"{source.origin(key)}: SHA-256 {entry.sha256[:16]}... instead of {should_be[:16]}...; nothing was kept"
            )
        entries[source.files[key]] = entry
    return entries


def download(url: str, path: Path, *, max_bytes: int, say: Callable[[str], None] = lambda _: None) -> None:
    """Download an address into a file.

    A broken connection is resumed where it ended, if the server can do that and still has the same file; otherwise the
    file is started again. After four attempts that is an error.

    Args:
        url: `https://...` or `http://...`.
        path: of the file to write; it is removed if anything fails.
        max_bytes: more is refused.
        say: told now and then how far it is.

    Raises:
        FetchError: no network, no such file, too large, no room, or cut short again and again; one sentence.
        OSError: the file cannot be written.
    """
    if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
        raise FetchError(f"{url}: expected an address that begins with https://")
    transfer = _Transfer(url, path, max_bytes, say)
    try:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return transfer.resume()
            except _BrokenError as error:
                if attempt == _ATTEMPTS:
                    raise FetchError(f"{url}: {error}; gave up after {_ATTEMPTS} attempts") from None
            time.sleep(2.0 ** (attempt - 1))
    except BaseException:
        path.unlink(missing_ok=True)
        raise


class _Transfer:
    """One download."""

    def __init__(self, url: str, path: Path, max_bytes: int, say: Callable[[str], None]) -> None:
        self.url, self.path, self.max_bytes, self.say = url, path, max_bytes, say
        self.num_bytes = 0
        self.etag = ""  # the server's name for this version of the file; without one nothing is resumed

    def resume(self) -> None:
        """Transfer what is left of the file.

        Raises:
            _BrokenError: try again.
            FetchError: trying again is of no use.
        """
        request = urllib.request.Request(self.url, headers={"User-Agent": "attn-zoo"})  # noqa: S310 - checked above
        is_resumed = bool(self.etag and self.num_bytes)
        if is_resumed:
            request.add_header("Range", f"bytes={self.num_bytes}-")
            request.add_header("If-Range", self.etag)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
                self._receive(response, is_rest=is_resumed and response.status == 206)
        except urllib.error.HTTPError as error:
            with error:
                said = f"the server answers {error.code} {error.reason}"
                raise (_BrokenError(said) if error.code in _BUSY else FetchError(f"{self.url}: {said}")) from None
        except urllib.error.URLError as error:
            why = getattr(error.reason, "strerror", None) or error.reason
            raise FetchError(f"{self.url}: cannot be reached, is there a network? ({why})") from None
        except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
            raise _BrokenError(f"the connection broke off ({type(error).__name__})") from None

    def _receive(self, response: http.client.HTTPResponse, *, is_rest: bool) -> None:
        """Write the answer to the end of the file (`is_rest`) or over it."""
        headers = response.headers
        if is_rest and not str(headers.get("Content-Range", "")).startswith(f"bytes {self.num_bytes}-"):
            self.etag = ""
            raise _BrokenError("the server sent another part than it was asked for")
        start = self.num_bytes if is_rest else 0
        length = headers.get("Content-Length")
        expected = start + int(length) if length and length.isdecimal() else None
        if expected is not None and expected > self.max_bytes:
            raise FetchError(f"{self.url}: {expected} bytes, where at most {self.max_bytes} are expected")
        if expected is not None and (free := shutil.disk_usage(self.path.parent).free) < expected - start:
            raise FetchError(f"{self.url}: {expected - start} bytes do not fit, {free} are free")
        etag = headers.get("ETag") or ""
        self.etag = "" if etag.startswith("W/") else etag
        self.num_bytes = start
        with self.path.open("ab" if is_rest else "wb") as file:
            while data := response.read(_CHUNK):
                before, self.num_bytes = self.num_bytes, self.num_bytes + len(data)
                if self.num_bytes > self.max_bytes:
                    raise FetchError(f"{self.url}: more than {self.max_bytes} bytes, which is not the expected file")
                file.write(data)
                if self.num_bytes // _SAY_EVERY > before // _SAY_EVERY:
                    whole = f" of {expected / 1e9:.1f}" if expected else ""
                    self.say(f"  {self.num_bytes / 1e9:.1f}{whole} GB")
        if expected is not None and self.num_bytes < expected:
            raise _BrokenError(f"the connection broke off after {self.num_bytes} of {expected} bytes")
