"""Fetching: from addresses, archives and the hub, all of them on this machine; and everything that can go wrong."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.tasks.sources import fetch as fetch_module
from attn_zoo.tasks.sources.fetch import FetchError, download, fetch
from attn_zoo.tasks.sources.manifest import MANIFEST, read_manifest, verify
from attn_zoo.tasks.sources.source import Source, fetched_dir
from tests.tasks.sources.local_server import serve

FILES = {"/a.tsv": b"one\n" * 50_000, "/b.tsv": b"two\n"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    """Keep caches private, waits short and proxies out."""
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def site():
    with serve(dict(FILES)) as running:
        yield running


def source_of(site, **changes) -> Source:
    plain = {
        "name": "toy data",
        "folder": "toy/plain",
        "files": {"train": "a.tsv", "test": "b.tsv"},
        "hint": "Ask.",
        "urls": {"train": site.address("/a.tsv"), "test": site.address("/b.tsv")},
    }
    return Source(**{**plain, **changes})


def leftovers(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_files_get_their_place_and_a_manifest(site, tmp_path):
    said: list[str] = []
    paths = fetch(source_of(site), data_dir=tmp_path / "data", say=said.append)
    assert {key: path.read_bytes() for key, path in paths.items()} == {
        "train": FILES["/a.tsv"],
        "test": FILES["/b.tsv"],
    }
    folder = tmp_path / "data" / "toy" / "plain"
    assert leftovers(folder) == ["a.tsv", "b.tsv", MANIFEST]
    assert verify(folder).is_good
    entry = (read_manifest(folder) or {})["a.tsv"]
    assert entry.origin == site.address("/a.tsv")
    assert entry.sha256 == hashlib.sha256(FILES["/a.tsv"]).hexdigest()
    assert len(said) == 3


def test_the_default_place_is_where_tasks_look(site):
    source = source_of(site)
    assert source.found(None) is None
    paths = fetch(source)
    assert source.locate(None) == paths
    assert paths["train"].is_relative_to(fetched_dir())


def test_files_that_are_here_are_checked_and_not_fetched_again(site, tmp_path):
    source = source_of(site)
    fetch(source, data_dir=tmp_path)
    num_requests = len(site.requests)
    said: list[str] = []
    fetch(source, data_dir=tmp_path, say=said.append)
    assert len(site.requests) == num_requests
    assert "already in" in said[0]
    (tmp_path / "toy/plain/a.tsv").write_bytes(b"changed")
    with pytest.raises(FetchError, match=r"a\.tsv: not as its manifest says; delete it, or fetch anew with --force"):
        fetch(source, data_dir=tmp_path)
    assert fetch(source, data_dir=tmp_path, force=True)["train"].read_bytes() == FILES["/a.tsv"]
    assert verify(tmp_path / "toy/plain").is_good


def test_a_user_s_own_files_are_never_overwritten_silently(site, tmp_path):
    (tmp_path / "toy/plain").mkdir(parents=True)
    (tmp_path / "toy/plain/a.tsv").write_bytes(b"mine")
    with pytest.raises(FetchError, match=r"holds a\.tsv but not all of toy data"):
        fetch(source_of(site), data_dir=tmp_path)
    assert leftovers(tmp_path / "toy/plain") == ["a.tsv"]
    assert (tmp_path / "toy/plain/a.tsv").read_bytes() == b"mine"


def test_own_files_in_other_bytes_than_published_are_accepted_and_named(site, tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"the same rows")
    (tmp_path / "b.tsv").write_bytes(FILES["/b.tsv"])
    published = {
        key: hashlib.sha256(FILES[f"/{name}"]).hexdigest() for key, name in {"train": "a.tsv", "test": "b.tsv"}.items()
    }
    said: list[str] = []
    fetch(source_of(site, sha256=published), data_dir=tmp_path, say=said.append)
    assert "a.tsv in other bytes than published" in said[0]
    assert "b.tsv" not in said[0].partition(";")[2]


def test_other_content_than_published_is_refused_without_a_trace(site, tmp_path):
    with pytest.raises(FetchError, match=r"SHA-256 .* instead of 0{16}"):
        fetch(source_of(site, sha256={"test": "0" * 64}), data_dir=tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(("status", "num_requests"), [(404, 1), (403, 1), (503, 4)])
def test_what_the_server_refuses_is_one_sentence(site, tmp_path, status, num_requests):
    site.statuses = [status] * 4
    with pytest.raises(FetchError, match=f"the server answers {status}") as caught:
        fetch(source_of(site), data_dir=tmp_path / "data")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert len(site.requests) == num_requests
    assert not (tmp_path / "data").exists()


def test_a_second_file_that_fails_takes_the_first_with_it(site, tmp_path):
    del site.files["/b.tsv"]
    with pytest.raises(FetchError, match="404"):
        fetch(source_of(site), data_dir=tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_no_network_is_one_sentence(tmp_path):
    with serve({}) as closed:
        url = closed.address("/a")
    with pytest.raises(FetchError, match="cannot be reached, is there a network") as caught:
        download(url, tmp_path / "file", max_bytes=10)
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/a", "a.tsv"])
def test_other_kinds_of_addresses_are_refused(url, tmp_path):
    with pytest.raises(FetchError, match="https://"):
        download(url, tmp_path / "file", max_bytes=10**6)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("has_length", [True, False])
def test_more_than_allowed_is_refused(site, tmp_path, has_length):
    site.has_length = has_length
    with pytest.raises(FetchError, match="100000"):
        download(site.address("/a.tsv"), tmp_path / "file", max_bytes=100_000)
    assert leftovers(tmp_path) == []


def test_a_broken_connection_is_taken_up_where_it_ended(site, tmp_path):
    site.breaks_after = [70_000, 50_000]
    download(site.address("/a.tsv"), tmp_path / "file", max_bytes=10**6)
    assert (tmp_path / "file").read_bytes() == FILES["/a.tsv"]
    assert [asked for _, asked in site.requests] == ["", "bytes=70000-", "bytes=120000-"]


@pytest.mark.parametrize(("has_ranges", "has_marks"), [(False, True), (True, False)])
def test_a_server_that_cannot_resume_starts_anew(site, tmp_path, has_ranges, has_marks):
    site.breaks_after = [70_000]
    site.has_ranges, site.has_marks = has_ranges, has_marks
    download(site.address("/a.tsv"), tmp_path / "file", max_bytes=10**6)
    assert (tmp_path / "file").read_bytes() == FILES["/a.tsv"]


def test_a_file_that_changed_meanwhile_is_not_mixed(site, tmp_path, monkeypatch):
    site.breaks_after = [70_000]
    new = b"new\n" * 60_000
    monkeypatch.setattr(time, "sleep", lambda _: site.files.update({"/a.tsv": new}))
    download(site.address("/a.tsv"), tmp_path / "file", max_bytes=10**6)
    assert (tmp_path / "file").read_bytes() == new


def test_a_connection_that_breaks_again_and_again_is_given_up(site, tmp_path):
    site.breaks_after = [10] * 4
    with pytest.raises(FetchError, match=r"broke off after 40 of 200000 bytes; gave up after 4 attempts"):
        download(site.address("/a.tsv"), tmp_path / "file", max_bytes=10**6)
    assert leftovers(tmp_path) == []


def test_long_transfers_say_how_far_they_are(site, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_module, "_SAY_EVERY", 2**20)
    site.files["/large"] = bytes(5 * 2**20)
    said: list[str] = []
    download(site.address("/large"), tmp_path / "file", max_bytes=10**8, say=said.append)
    assert len(said) == 5
    assert said[-1] == "  0.0 of 0.0 GB"


def test_a_file_that_does_not_fit_is_refused_before_it_is_written(site, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(FetchError, match="200000 bytes do not fit, 1000 are free"):
        download(site.address("/a.tsv"), tmp_path / "file", max_bytes=10**6)
    assert leftovers(tmp_path) == []


def test_what_a_killed_fetch_left_is_cleared_away_later(site, tmp_path):
    folder = tmp_path / "toy" / "plain"
    for name in (".fetch-old", ".fetch-new"):
        (folder / name).mkdir(parents=True)
    os.utime(folder / ".fetch-old", (0, 0))
    fetch(source_of(site), data_dir=tmp_path)
    assert leftovers(folder) == [".fetch-new", "a.tsv", "b.tsv", MANIFEST]


def test_an_interrupt_leaves_nothing(site, tmp_path, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch_module, "_checked", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch(source_of(site), data_dir=tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_too_little_room_is_found_out_before(site, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(FetchError, match="needs 5000 bytes, and 1000 are free"):
        fetch(source_of(site, num_bytes=5000), data_dir=tmp_path / "data")
    assert site.requests == []
    assert not (tmp_path / "data").exists()


def test_a_disk_that_fills_up_is_one_sentence(site, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch_module, "download", full)
    with pytest.raises(FetchError, match="the disk is full; nothing was left behind"):
        fetch(source_of(site), data_dir=tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(site, tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:  # root, who runs tests in containers, may write everywhere
        raise PermissionError(errno.EACCES, "Permission denied", "data")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(FetchError, match="data: Permission denied; nothing was left behind"):
        fetch(source_of(site), data_dir=tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_file_in_place_of_the_folder_is_one_sentence(site, tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(FetchError, match="nothing was left behind"):
        fetch(source_of(site), data_dir=tmp_path / "data")
    assert (tmp_path / "data").read_text() == "a file"


def packed(names: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in names.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def archived(site, content: bytes) -> Source:
    site.files["/lra_release.gz"] = content
    files = {"train": "tsv/a.tsv", "test": "tsv/b.tsv"}
    return source_of(site, files=files, urls={}, url=site.address("/lra_release.gz"))


def test_an_archive_is_unpacked_to_what_is_wanted(site, tmp_path):
    source = archived(site, packed({"lra/lra/tsv/a.tsv": b"1", "lra/lra/tsv/b.tsv": b"2", "lra/other": b"3"}))
    paths = fetch(source, data_dir=tmp_path)
    assert {key: path.read_bytes() for key, path in paths.items()} == {"train": b"1", "test": b"2"}
    assert leftovers(tmp_path / "toy/plain") == [MANIFEST, "tsv", "tsv/a.tsv", "tsv/b.tsv"]
    assert source.digest(tmp_path)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (packed({"tsv/a.tsv": b"1"}), r"does not hold tsv/b\.tsv"),
        (packed({"tsv/a.tsv": b"1" * 5000, "tsv/b.tsv": b"2"})[:60], "damaged or cut short"),
        (b"<html>moved</html>", "tar or zip"),
        (gzip.compress(b"no tar"), "damaged or cut short"),
    ],
    ids=["incomplete", "cut", "page", "no tar"],
)
def test_a_bad_archive_leaves_nothing(site, tmp_path, content, match):
    with pytest.raises(ConfigError, match=match):
        fetch(archived(site, content), data_dir=tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_source_nobody_can_fetch_says_what_to_do(site, tmp_path):
    with pytest.raises(UnsupportedError, match=r"cannot be fetched\. Ask\."):
        fetch(source_of(site, urls={}), data_dir=tmp_path)


def test_nothing_else_of_the_package_can_use_the_network():
    root = Path(fetch_module.__file__).parents[2]
    network = re.compile(
        r"^\s*(?:import|from) (?:urllib\.request|http\.client|socket|requests|httpx|huggingface_hub)\b", re.MULTILINE
    )
    users = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if network.search(path.read_text())}
    # A cluster is reached at the address that its user names.
    assert users == {"tasks/sources/fetch.py", "matrix/drive/engines/ray.py"}


# The hub


def at_hub(**changes) -> Source:
    plain = {
        "name": "toy data",
        "folder": "toy/plain",
        "files": {"train": "a.tsv", "test": "b.tsv"},
        "hint": "Ask.",
        "hub": "somebody/toy",
        "revision": COMMIT,
        "hub_files": {"train": "data/a.tsv", "test": "data/b.tsv"},
    }
    return Source(**{**plain, **changes})


@pytest.fixture
def hub(monkeypatch):
    """Replace the hub's download by a function that a test fills in; return what it was asked."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls: list[dict[str, object]] = []

    def download_file(repo_id, filename, *, local_dir, **named):
        calls.append({"repo_id": repo_id, "filename": filename, **named})
        path = Path(local_dir) / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(filename)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download_file)
    monkeypatch.setattr(fetch_module, "_check_reachable", lambda *_: None)
    return calls


def test_the_hub_is_asked_for_the_pinned_commit_without_a_token(hub, tmp_path):
    paths = fetch(at_hub(), data_dir=tmp_path)
    assert paths["train"].read_text() == "data/a.tsv"
    assert [call["filename"] for call in hub] == ["data/a.tsv", "data/b.tsv"]
    assert all(
        (call["repo_id"], call["repo_type"], call["revision"], call["token"])
        == ("somebody/toy", "dataset", COMMIT, False)
        for call in hub
    )
    assert leftovers(tmp_path / "toy/plain") == ["a.tsv", "b.tsv", MANIFEST]
    entry = json.loads((tmp_path / "toy/plain" / MANIFEST).read_text())["files"]["a.tsv"]
    assert entry["origin"] == f"hub:somebody/toy@{COMMIT}/data/a.tsv"


def test_files_of_the_hub_must_have_the_published_hash(hub, tmp_path):
    with pytest.raises(FetchError, match="SHA-256"):
        fetch(at_hub(sha256={"train": "0" * 64}), data_dir=tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (FileNotFoundError("cannot find the requested files"), "is there a network"),
        (ConnectionError("offline"), "is there a network"),
        (RuntimeError("something of its own\nand more"), r"cannot be fetched from the hub \(something of its own\)"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
    ],
)
def test_what_goes_wrong_at_the_hub_is_one_sentence(hub, tmp_path, monkeypatch, error, match):
    import huggingface_hub

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(FetchError, match=match) as caught:
        fetch(at_hub(), data_dir=tmp_path / "data")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_nobody_at_the_hub_s_address_is_found_out_at_once(tmp_path):
    with serve({}) as closed:
        endpoint = closed.url
    with pytest.raises(FetchError, match=r"127\.0\.0\.1 cannot be reached, is there a network"):
        fetch_module._check_reachable(endpoint, "toy")
    with serve({}) as site:
        fetch_module._check_reachable(site.url, "toy")


PROGRAM = """
import sys
from pathlib import Path
from attn_zoo.tasks.sources.fetch import FetchError, fetch
from attn_zoo.tasks.sources.source import Source
for name in ("a.tsv", "absent.tsv"):
    source = Source(name="toy data", folder=name[:-4], files={"train": name}, hint="", hub="somebody/toy",
                    revision=sys.argv[1], hub_files={"train": f"data/{name}"})
    try:
        print(fetch(source, data_dir=Path(sys.argv[2]))["train"].read_text())
    except FetchError as error:
        print("failed:", error)
"""


def test_the_real_hub_package_fetches_from_a_server_that_answers_like_the_hub(tmp_path):
    pytest.importorskip("huggingface_hub")
    with serve({f"/datasets/somebody/toy/resolve/{COMMIT}/data/a.tsv": b"hello from the hub"}) as site:
        environment = {**os.environ, "HF_ENDPOINT": site.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, COMMIT, str(tmp_path / "data")],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
    fetched, failed = done.stdout.splitlines()
    assert fetched == "hello from the hub"
    assert failed == f"failed: somebody/toy@{COMMIT[:8]}/data/absent.tsv: the hub answers 404"
    assert leftovers(tmp_path / "data") == ["a", "a/a.tsv", f"a/{MANIFEST}"]
    assert done.stderr == ""
    assert all(asked.startswith("/datasets/somebody/toy/resolve/") for asked, _ in site.requests)
