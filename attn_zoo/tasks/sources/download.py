"""One file from an address, resumed where the connection broke, never larger than allowed.

Only `fetch.py` uses this, and only when the user asked.
"""

from __future__ import annotations

import http.client
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from attn_zoo.errors import AttnZooError

__all__ = ["FetchError", "download"]

_CHUNK = 2**20
_ATTEMPTS = 4
_TIMEOUT_S = 30.0
_SAID_EVERY = 500 * 10**6  # bytes
_MAY_PASS = {408, 425, 429, 500, 502, 503, 504}  # what a server says that may answer a moment later


class FetchError(AttnZooError):
    """Data could not be brought. Nothing is left behind."""


class _BrokenError(Exception):
    """The connection ended early, or the server is busy: worth another attempt."""


def download(url: str, path: Path, *, max_bytes: int, say: Callable[[str], None] = lambda _: None) -> None:
    """Write what lies at an address into a file.

    A broken connection is taken up again where it ended, if the server can do that and has still the same file;
    otherwise the file is begun anew. After four attempts that is an error.

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
        _persist(transfer)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _persist(transfer: _Transfer) -> None:
    """Go on until the file is whole, or enough is enough."""
    reason = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(2.0 ** (attempt - 1))
        try:
            return transfer.go_on()
        except _BrokenError as error:
            reason = str(error)
    raise FetchError(f"{transfer.url}: {reason}; gave up after {_ATTEMPTS} attempts")


class _Transfer:
    """One file on its way."""

    def __init__(self, url: str, path: Path, max_bytes: int, say: Callable[[str], None]) -> None:
        self.url, self.path, self.max_bytes, self.say = url, path, max_bytes, say
        self.num_bytes = 0
        self.mark = ""  # the server's name for this version of the file; without one nothing is resumed

    def go_on(self) -> None:
        """Bring what is left of the file.

        Raises:
            _BrokenError: try again.
            FetchError: trying again is of no use.
        """
        request = urllib.request.Request(self.url, headers={"User-Agent": "attn-zoo"})  # noqa: S310 - checked above
        is_resumed = bool(self.mark and self.num_bytes)
        if is_resumed:
            request.add_header("Range", f"bytes={self.num_bytes}-")
            request.add_header("If-Range", self.mark)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
                self._receive(response, response.headers, is_resumed and response.status == 206)
        except urllib.error.HTTPError as error:
            with error:
                kind = _BrokenError if error.code in _MAY_PASS else FetchError
                raise kind(self._said(f"the server answers {error.code} {error.reason}", kind)) from None
        except urllib.error.URLError as error:
            why = getattr(error.reason, "strerror", None) or error.reason
            raise FetchError(f"{self.url}: cannot be reached, is there a network? ({why})") from None
        except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
            raise _BrokenError(f"the connection broke off ({type(error).__name__})") from None

    def _said(self, text: str, kind: type[Exception]) -> str:
        return text if kind is _BrokenError else f"{self.url}: {text}"

    def _receive(self, response: IO[bytes], headers: Mapping[str, str], is_rest: bool) -> None:
        """Write the answer to the end of the file (`is_rest`) or over it."""
        if is_rest and not str(headers.get("Content-Range", "")).startswith(f"bytes {self.num_bytes}-"):
            self.mark = ""
            raise _BrokenError("the server sent another part than it was asked for")
        start = self.num_bytes if is_rest else 0
        length = headers.get("Content-Length")
        expected = start + int(length) if length and length.isdecimal() else None
        if expected is not None and expected > self.max_bytes:
            raise FetchError(f"{self.url}: {expected} bytes, where at most {self.max_bytes} are expected")
        if expected is not None and (free := shutil.disk_usage(self.path.parent).free) < expected - start:
            raise FetchError(f"{self.url}: {expected - start} bytes do not fit, {free} are free")
        etag = headers.get("ETag") or ""
        self.mark = "" if etag.startswith("W/") else etag
        self.num_bytes = start
        with self.path.open("ab" if is_rest else "wb") as file:
            while data := response.read(_CHUNK):
                if (self.num_bytes + len(data)) // _SAID_EVERY > self.num_bytes // _SAID_EVERY:
                    whole = f" of {expected / 1e9:.1f}" if expected else ""
                    self.say(f"  {(self.num_bytes + len(data)) / 1e9:.1f}{whole} GB")
                self.num_bytes += len(data)
                if self.num_bytes > self.max_bytes:
                    raise FetchError(f"{self.url}: more than {self.max_bytes} bytes, which is not the expected file")
                file.write(data)
        if expected is not None and self.num_bytes < expected:
            raise _BrokenError(f"the connection broke off after {self.num_bytes} of {expected} bytes")
