"""Where data are looked for, what a missing file says, and when a digest changes."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from attn_zoo.errors import ConfigError
from attn_zoo.tasks.sources import source as source_module
from attn_zoo.tasks.sources.manifest import describe, write_manifest
from attn_zoo.tasks.sources.source import Source, fetched_dir, file_sha256
from attn_zoo.tasks.sources.tensor_cache import cache_dir

FILES = {"train": "a.tsv", "test": "sub/b.tsv"}


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))


def source(**changes) -> Source:
    return Source(**{"name": "toy data", "folder": "toy", "files": FILES, "hint": "Ask somebody.", **changes})


def fill(folder: Path, text: str = "x") -> Path:
    for name in FILES.values():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text if name == FILES["train"] else text * 2)
    return folder


@pytest.mark.parametrize("place", ["below", "in", "fetched"])
def test_files_are_found_in_each_place(place, tmp_path):
    data_dir = tmp_path / "data"
    folder = fill({"below": data_dir / "toy", "in": data_dir, "fetched": fetched_dir() / "toy"}[place])
    assert source().found(data_dir) == folder
    assert source().locate(data_dir) == {key: folder / name for key, name in FILES.items()}
    assert source().missing(data_dir) == []


def test_the_user_s_folder_comes_before_what_was_fetched(tmp_path):
    fill(fetched_dir() / "toy", "fetched")
    mine = fill(tmp_path / "data" / "toy", "mine")
    assert source().locate(tmp_path / "data")["train"].parent == mine
    assert source().locate(None)["train"].read_text() == "fetched"


def test_a_folder_with_some_of_the_files_is_not_mixed_with_another(tmp_path):
    fill(fetched_dir() / "toy")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "a.tsv").write_text("half")
    assert source().locate(tmp_path)["train"].is_relative_to(fetched_dir())


def test_missing_files_are_named_with_where_and_how(tmp_path):
    fill(tmp_path / "toy")
    (tmp_path / "toy" / "a.tsv").unlink()
    assert source().missing(tmp_path) == ["a.tsv"]
    with pytest.raises(ConfigError) as caught:
        source().locate(tmp_path)
    for text in ("toy data", "missing a.tsv", str(tmp_path / "toy"), str(fetched_dir()), "Ask somebody."):
        assert text in str(caught.value)
    with pytest.raises(ConfigError):
        source().digest(tmp_path)


def test_the_digest_follows_content_and_role_not_place(tmp_path):
    one = source().digest(fill(tmp_path / "one"))
    assert source().digest(fill(tmp_path / "two" / "toy").parent) == one
    (tmp_path / "one" / "a.tsv").write_text("y")
    changed = source().digest(tmp_path / "one")
    assert changed != one
    (tmp_path / "one" / "a.tsv").write_text("x")
    assert source().digest(tmp_path / "one") == one
    (tmp_path / "one" / "sub" / "b.tsv").write_text("y")
    assert source().digest(tmp_path / "one") not in {one, changed}, "which file changed matters"


def test_one_file_in_the_place_of_another_is_refused(tmp_path):
    folder = fill(tmp_path / "toy")
    sha256 = {key: hashlib.sha256((folder / name).read_bytes()).hexdigest() for key, name in FILES.items()}
    assert source(sha256=sha256).digest(tmp_path) == source().digest(tmp_path)
    train, test = ((folder / name) for name in FILES.values())
    kept = train.read_text()
    train.write_text(test.read_text())
    with pytest.raises(ConfigError, match=r"data_dir: expected train in a\.tsv; it holds what was published as test"):
        source(sha256=sha256).digest(tmp_path)
    with pytest.raises(ConfigError, match=r"expected train in a\.tsv; it holds the same bytes as sub/b\.tsv"):
        source().digest(tmp_path)
    train.write_text("changed " + kept)
    source(sha256=sha256).digest(tmp_path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hub": "a/b", "revision": "main"}, "a commit of 40 digits"),
        ({"hub": "a/b", "revision": "0" * 40, "hub_files": {"train": "x"}}, "an entry for each of train, test"),
        ({"urls": {"train": "https://x"}}, "an entry for each"),
        ({"sha256": {"validation": "0" * 64}}, "sha256 of unknown files validation"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        source(**changes)


def test_a_source_knows_how_it_can_be_fetched():
    assert not source().is_fetchable
    assert not source(hub="a/b").is_fetchable, "a branch is no pinned revision"
    pinned = source(hub="a/b", revision="0" * 40, url="https://x/archive")
    assert pinned.origin("train") == f"hub:a/b@{'0' * 40}/a.tsv"
    assert source(url="https://x/archive").origin("train") == "https://x/archive"
    addresses = {"train": "https://x/1", "test": "https://x/2"}
    assert source(urls=addresses).origin("test") == "https://x/2"


# Remembered hashes


@pytest.fixture
def big(tmp_path):
    """A file worth remembering that nobody has touched for a while."""
    path = tmp_path / "big.bin"
    path.write_bytes(bytes(2**20))
    return path


@pytest.fixture
def settled(monkeypatch):
    monkeypatch.setattr(source_module, "_SETTLED_NS", -1)


@pytest.fixture
def hashed(monkeypatch):
    """Count how often a file is really read."""
    count: list[int] = []
    real = hashlib.file_digest

    def counting(*arguments):
        count.append(1)
        return real(*arguments)

    monkeypatch.setattr(hashlib, "file_digest", counting)
    return count


def test_a_large_file_is_read_once(big, settled, hashed):
    first = file_sha256(big)
    assert [file_sha256(big), file_sha256(big)] == [first, first]
    assert len(hashed) == 1


def test_small_files_are_not_remembered(tmp_path, settled):
    (tmp_path / "small").write_text("x")
    file_sha256(tmp_path / "small")
    assert not cache_dir().exists()


def test_a_file_that_changed_a_moment_ago_is_not_remembered(big, hashed):
    file_sha256(big)
    file_sha256(big)
    assert len(hashed) == 2


def test_changed_content_is_noticed_even_with_the_old_size_and_time(big, settled):
    before = file_sha256(big)
    times = big.stat()
    time.sleep(0.02)  # beyond the tick of the file system's clock
    big.write_bytes(b"\x01" + bytes(2**20 - 1))
    os.utime(big, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert big.stat().st_mtime_ns == times.st_mtime_ns
    assert file_sha256(big) != before


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"a": 5}', '{"a": "short"}'])
def test_a_damaged_memory_costs_time_nothing_more(big, settled, text):
    right = file_sha256(big)
    memory = cache_dir() / "file-hashes.json"
    memory.write_text(text)
    assert file_sha256(big) == right


def test_a_cache_that_cannot_be_written_costs_time_nothing_more(big, settled, tmp_path, monkeypatch):
    right = file_sha256(big)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "file" / "below"))
    assert file_sha256(big) == right


def test_only_the_last_state_of_a_file_is_kept(big, settled):
    file_sha256(big)
    big.write_bytes(bytes(2**20 + 1))
    file_sha256(big)
    assert (cache_dir() / "file-hashes.json").read_text().count("big.bin") == 1


def test_files_that_changed_since_they_were_recorded_are_refused(tmp_path):
    folder = fill(tmp_path / "toy")
    entries = {name: describe(folder / name, "local") for name in FILES.values()}
    write_manifest(folder, entries)
    known = source().digest(tmp_path)
    (folder / "a.tsv").write_text("y")
    with pytest.raises(ConfigError, match=r"a\.tsv: was changed since manifest\.json beside it was written"):
        source().digest(tmp_path)
    (folder / "manifest.json").unlink()
    assert source().digest(tmp_path) != known
