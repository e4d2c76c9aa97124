"""A run in one file, and a run in a commit: the same records, and nothing of a hostile archive outside its folder."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import zipfile

import pytest

from attn_zoo import packed_run
from attn_zoo.errors import ConfigError, FolderError
from attn_zoo.folder import read_run
from attn_zoo.packed_run import opened, share
from attn_zoo.whole_files import whole_file
from tests.report.synthetic import accuracy, roof, scaling, write_run


@pytest.fixture
def folder(tmp_path):
    records = [scaling("full", 512), scaling("full", 1024), accuracy("full", 0, 0.5)]
    made = write_run(tmp_path / "run", records, ceilings=[roof()])
    (made / "parts").mkdir()
    (made / "parts" / "0123456789abcdef0123-1.json").write_text(scaling("full", 2048).to_json())
    (made / "logs").mkdir()
    (made / "logs" / "x.log").write_text("secret")
    return made


def test_a_packed_run_has_all_that_is_read_and_nothing_else(folder, tmp_path):
    path = share(folder, tmp_path / "run.zip")
    with opened(path) as inside:
        assert read_run(inside) == read_run(folder)
        assert sorted(entry.name for entry in inside.iterdir()) == ["ceilings.json", "cells", "parts", "run.json"]
    assert not inside.exists()


def test_the_same_records_give_the_same_bytes(folder, tmp_path):
    first = share(folder, tmp_path / "a.zip").read_bytes()
    other = shutil.copytree(folder, tmp_path / "elsewhere")
    for path in other.rglob("*"):
        path.touch()
    assert share(other, tmp_path / "a.zip").read_bytes() == first


def test_a_packed_run_is_replaced_by_the_same_run_only(folder, tmp_path):
    path = share(folder, tmp_path / "run.zip")
    head = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**head, "created": "2001-01-01T00:00:00+00:00"}))
    mine = tmp_path / "mine.zip"
    mine.write_text("no packed run")
    for there in (path, mine):
        before = there.read_bytes()
        with pytest.raises(FolderError, match="exists already and is not packed from this run"):
            share(folder, there)
        assert there.read_bytes() == before


def test_a_run_that_goes_on_is_packed(folder, tmp_path, monkeypatch):
    def meanwhile(*given, **more):
        for path in (folder / "parts").iterdir():
            path.unlink()
        return whole_file(*given, **more)

    monkeypatch.setattr(packed_run, "whole_file", meanwhile)
    with opened(share(folder, tmp_path / "run.zip")) as inside:
        assert len(read_run(inside).records) == 3


def test_links_are_not_packed(folder, tmp_path):
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    (folder / "cells" / "aaaa.json").symlink_to(outside)
    with zipfile.ZipFile(share(folder, tmp_path / "run.zip")) as archive:
        assert "cells/aaaa.json" not in archive.namelist()


def test_a_folder_zipped_by_hand_opens_too(folder, tmp_path):
    path = shutil.make_archive(str(tmp_path / "by-hand"), "zip", tmp_path, "run")
    with opened(path) as inside:
        assert read_run(inside) == read_run(folder)


def test_what_is_no_results_folder_is_not_packed(tmp_path, folder):
    with pytest.raises(FolderError, match=r"it has no run\.json"):
        share(tmp_path, tmp_path / "x.zip")
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match=r"expected a results folder; got a file \(report"):
        share(tmp_path / "file", tmp_path / "x.zip")
    with pytest.raises(FolderError, match=r"ends in \.zip"):
        share(folder, tmp_path / "x.tar")


def archive(path, entries):
    with zipfile.ZipFile(path, "w") as made:
        for name, content, mode in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            made.writestr(info, content)
    return path


PLAIN = stat.S_IFREG | 0o644
HEAD = ("run.json", "{}", PLAIN)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([HEAD, ("../outside.json", "{}", PLAIN)], "points out of it"),
        ([HEAD, ("/etc/outside.json", "{}", PLAIN)], "points out of it"),
        ([HEAD, ("cells\\..\\..\\outside.json", "{}", PLAIN)], "points out of it"),
        ([HEAD, ("C:/outside.json", "{}", PLAIN)], "points out of it"),
        ([HEAD, ("cells/a.json", "/etc/passwd", stat.S_IFLNK | 0o777)], "is a link or a device"),
        ([HEAD, ("cells/a.json", "", stat.S_IFIFO | 0o644)], "is a link or a device"),
        ([HEAD, ("cells/a.json", "{}", PLAIN), ("cells/a.json", "[]", PLAIN)], "several files of one name"),
        ([("readme.txt", "hello", PLAIN)], r"no run\.json"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_hostile_archive_is_refused_and_writes_nothing(tmp_path, entries, words):
    path = archive(tmp_path / "evil.zip", entries)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=words), opened(path):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_run, "MAX_FILE_BYTES", 2**22)
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("run.json", "{}")
        made.writestr("cells/a.json", b"0" * (packed_run.MAX_FILE_BYTES + 1))
        made.writestr("logs/a.log", b"0" * (packed_run.MAX_FILE_BYTES + 1))  # is not read at all
    assert path.stat().st_size < 2**20
    with pytest.raises(ConfigError, match="larger than a record can be"), opened(path):
        pass
    many = archive(tmp_path / "many.zip", [HEAD, *((f"cells/{index}.json", "{}", PLAIN) for index in range(5))])
    monkeypatch.setattr(packed_run, "MAX_FILES", 5)
    with pytest.raises(ConfigError, match="holds 6 files"), opened(many):
        pass
    monkeypatch.setattr(packed_run, "MAX_FILES", 6)
    monkeypatch.setattr(packed_run, "MAX_BYTES", 7)
    with pytest.raises(ConfigError, match="all of it too large"), opened(many):
        pass


def test_a_damaged_packed_run_says_so(folder, tmp_path):
    path = share(folder, tmp_path / "run.zip")
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"x" * 100, content[:200] + b"\0" * 50 + content[250:]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="damaged, or no packed run"), opened(path):
            pass


@pytest.mark.parametrize("how", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_no_flipped_byte_is_more_than_a_refusal(tmp_path, how):
    """Each way to compress raises errors of its own, and an entry may be named `.`."""
    path = tmp_path / "run.zip"
    with zipfile.ZipFile(path, "w", how) as made:
        made.writestr("run.json", "{}")
        made.writestr("cells/a.json", '{"a": [1, 2, 3], "b": "some more text, to be compressed"}')
        made.writestr(".", "")
    content, refused = path.read_bytes(), 0
    with opened(path):
        pass
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            with opened(path):
                pass
        except ConfigError:
            refused += 1
    assert refused > len(content) // 3


# --- commits ---


@pytest.fixture
def repository(tmp_path, folder, monkeypatch):
    """Commit a run with three records, tag that commit, and commit the run with two."""
    monkeypatch.chdir(tmp_path)

    def git(*arguments):
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], check=True, capture_output=True
        )

    git("init", "-q")
    git("add", "run")
    git("commit", "-qm", "three")
    git("tag", "three")
    next((folder / "cells").iterdir()).unlink()
    git("add", "-A", "run")
    git("commit", "-qm", "two")
    return git


@pytest.mark.usefixtures("repository")
def test_a_commit_gives_the_run_that_it_holds(tmp_path, folder, monkeypatch):
    for source, count in (("three:run", 3), ("HEAD:run", 2), ("HEAD~1:run", 3)):
        with opened(source) as inside:
            assert len(read_run(inside).records) == count
            assert not inside.is_relative_to(tmp_path)
    monkeypatch.chdir(folder)
    for source in ("three:.", "three:run"):  # seen from here, or from the top
        with opened(source) as inside:
            assert len(read_run(inside).records) == 3


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("four:run", "no commit four in a git repository here"),
        ("three:walk", "no folder walk at three"),
        ("--output=x:run", "no commit --output=x"),
    ],
)
def test_a_commit_or_folder_that_is_not_there_is_named(source, words, tmp_path):
    with pytest.raises(ConfigError, match=words), opened(source):
        pass
    assert not (tmp_path / "x").exists()


def test_a_link_in_a_commit_is_refused(repository, folder):
    (folder / "cells" / "aaaa.json").symlink_to("/etc/passwd")
    repository("add", "run")
    repository("commit", "-qm", "link")
    with pytest.raises(ConfigError, match="is a link"), opened("HEAD:run"):
        pass


def test_a_folder_whose_name_has_a_colon_is_a_folder(tmp_path):
    folder = write_run(tmp_path / "a:b", [scaling("full", 512)])
    with opened(folder) as inside:
        assert inside == folder


def test_without_a_repository_the_message_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ConfigError, match="no commit HEAD in a git repository here"), opened("HEAD:run"):
        pass
