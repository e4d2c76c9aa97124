"""A web server on this machine that can be told to misbehave, for tests of fetching."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Site:
    """What the server holds and how it answers.

    Attributes:
        files: content by path.
        breaks_after: answers are cut after so many bytes, once for each entry.
        statuses: answers with these codes come first.
        has_ranges: whether parts can be asked for.
        has_marks: whether answers carry an ETag.
        has_length: whether answers carry a Content-Length.
        requests: pairs of path and Range header that came in.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.breaks_after: list[int] = []
        self.statuses: list[int] = []
        self.has_ranges = self.has_marks = self.has_length = True
        self.requests: list[tuple[str, str]] = []
        self.url = ""

    def address(self, path: str) -> str:
        return self.url + path


class _Handler(BaseHTTPRequestHandler):
    site: Site

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_HEAD(self) -> None:
        self.do_GET(with_body=False)

    def do_GET(self, *, with_body: bool = True) -> None:
        site = self.site
        asked = self.headers.get("Range", "")
        site.requests.append((self.path, asked))
        if site.statuses:
            self.send_error(site.statuses.pop(0))
            return
        if self.path not in site.files:
            self.send_error(404)
            return
        data = site.files[self.path]
        mark = f'"{hashlib.sha256(data).hexdigest()}"'
        start = 0
        if asked and site.has_ranges and self.headers.get("If-Range", mark) == mark:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        if site.has_length:
            self.send_header("Content-Length", str(len(data) - start))
        if site.has_marks:
            self.send_header("ETag", mark)
        self.send_header("X-Repo-Commit", self.path.partition("/resolve/")[2].partition("/")[0])  # as the hub does
        self.end_headers()
        body = data[start:]
        if site.breaks_after and with_body:
            body = body[: site.breaks_after.pop(0)]
        if with_body:
            self.wfile.write(body)


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Site]:
    """Serve files by path while the block runs."""
    site = Site(files)
    handler = type("Handler", (_Handler,), {"site": site})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
