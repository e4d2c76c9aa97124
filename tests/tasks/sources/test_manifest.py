"""Manifests: every difference is found, and a manifest that is none is not believed."""

from __future__ import annotations

import json

import pytest

from attn_zoo.errors import ConfigError
from attn_zoo.tasks.sources.manifest import MANIFEST, Entry, describe, read_manifest, verify, write_manifest

FILES = {"a.tsv": b"first", "sub/b.tsv": b"second", "c.tsv": b""}


@pytest.fixture
def folder(tmp_path):
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    write_manifest(tmp_path, {name: describe(tmp_path / name, "https://x/" + name) for name in FILES})
    return tmp_path


def test_an_untouched_folder_is_good(folder):
    result = verify(folder)
    assert result.is_good
    assert result.good == tuple(sorted(FILES))
    assert result.sentences() == []


def test_the_file_says_what_a_person_wants_to_know(folder):
    data = json.loads((folder / MANIFEST).read_text())
    assert data["format"] == 1
    assert list(data["files"]) == sorted(FILES)
    assert data["files"]["a.tsv"] == {
        "num_bytes": 5,
        "sha256": "a7937b64b8caa58f03721bb6bacf5c78cb235febe0e70b1b84cd99541461a08e",
        "origin": "https://x/a.tsv",
    }


@pytest.mark.parametrize(
    ("harm", "kind", "name"),
    [
        (lambda folder: (folder / "a.tsv").unlink(), "missing", "a.tsv"),
        (lambda folder: (folder / "a.tsv").write_bytes(b"fir"), "truncated", "a.tsv"),
        (lambda folder: (folder / "a.tsv").write_bytes(b"First"), "changed", "a.tsv"),
        (lambda folder: (folder / "sub/b.tsv").write_bytes(b"second and more"), "changed", "sub/b.tsv"),
        (lambda folder: (folder / "c.tsv").write_bytes(b"x"), "changed", "c.tsv"),
    ],
)
def test_each_kind_of_harm_is_found(folder, harm, kind, name):
    harm(folder)
    result = verify(folder)
    assert not result.is_good
    assert getattr(result, kind) == (name,)
    assert result.good == tuple(sorted(set(FILES) - {name}))
    assert result.sentences() == [f"{kind}: {name}"]


def test_extra_files_are_named_and_do_no_harm(folder):
    for number in range(7):
        (folder / "sub" / f"new{number}").write_text("x")
    result = verify(folder)
    assert result.is_good
    assert len(result.extra) == 7
    assert result.sentences() == [f"extra: {', '.join(f'sub/new{number}' for number in range(5))} and 2 more"]


def test_entries_of_other_sources_are_kept(folder):
    (folder / "d").write_text("new")
    write_manifest(folder, {"d": describe(folder / "d", "local")})
    assert set(read_manifest(folder) or {}) == {*FILES, "d"}
    assert verify(folder).is_good


def test_no_manifest(tmp_path):
    assert read_manifest(tmp_path) is None
    with pytest.raises(ConfigError, match=r"has no manifest\.json"):
        verify(tmp_path)


GOOD = {"num_bytes": 1, "sha256": "0" * 64, "origin": "x"}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ("", "Invalid JSON"),
        ("{}", "format"),
        ({"format": 2, "files": {}}, "format"),
        ({"format": 1, "files": {"a": {**GOOD, "num_bytes": -1}}}, "num_bytes"),
        ({"format": 1, "files": {"a": {**GOOD, "num_bytes": "1"}}}, "num_bytes"),
        ({"format": 1, "files": {"a": {**GOOD, "sha256": "abc"}}}, "sha256"),
        ({"format": 1, "files": {"a": {**GOOD, "md5": "abc"}}}, "md5"),
        ({"format": 1, "files": {"../outside": GOOD}}, "inside the folder"),
        ({"format": 1, "files": {"/etc/passwd": GOOD}}, "inside the folder"),
    ],
)
def test_a_manifest_that_is_none_is_not_believed(tmp_path, data, match):
    text = data if isinstance(data, str) else json.dumps(data)
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ConfigError, match=match):
        verify(tmp_path)
    with pytest.raises(ConfigError):
        write_manifest(tmp_path, {"a": Entry(num_bytes=0, sha256="0" * 64, origin="x")})
    assert (tmp_path / MANIFEST).read_text() == text
