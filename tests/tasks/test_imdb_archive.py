"""The published archive becomes the layout that pairs of films are read from."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from pathlib import Path

import pytest

from attn_zoo.errors import ConfigError, FolderError
from attn_zoo.tasks.imdb_archive import convert_archive, main
from attn_zoo.tasks.imdb_pairs import FILMS, read_film_reviews


@pytest.fixture(autouse=True)
def _private_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))


def members(count: int = 12) -> dict[str, bytes]:
    """Return what the archive holds: reviews by number and rating, lists, and things that are not wanted."""
    held = {
        "aclImdb/README": b"read me",
        "aclImdb/train/unsup/0_0.txt": b"no label",
        "aclImdb/train/urls_unsup.txt": b"x",
    }
    for part in ("train", "test"):
        for name, rating in (("neg", 2), ("pos", 9)):
            for number in range(count):
                held[f"aclImdb/{part}/{name}/{number}_{rating}.txt"] = f"{part} {name} {number} é".encode()
            urls = "".join(f"http://www.imdb.com/title/tt{number:07d}/usercomments\n" for number in range(count))
            held[f"aclImdb/{part}/urls_{name}.txt"] = urls.encode()
    return held


def write_archive(path: Path, held: dict[str, bytes]) -> Path:
    names = list(held)
    random.Random(0).shuffle(names)
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(held[name])
            tar.addfile(info, io.BytesIO(held[name]))
    return path


def test_rows_are_in_the_order_of_their_numbers(tmp_path):
    written = convert_archive(write_archive(tmp_path / "a.tar.gz", members()), tmp_path / "imdb")
    assert {path.relative_to(tmp_path / "imdb").as_posix() for path in written} == set(FILMS.files.values())
    reviews = read_film_reviews(FILMS.locate(tmp_path))
    assert [text.decode() for text in reviews.texts] == [
        f"{part} {name} {number} é" for part in ("train", "test") for name in ("neg", "pos") for number in range(12)
    ]
    assert reviews.classes.tolist() == ([0] * 12 + [1] * 12) * 2
    assert reviews.films.tolist() == list(range(12)) * 4
    assert reviews.is_test.tolist() == [False] * 24 + [True] * 24


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("aclImdb/test/pos/3_9.txt", "test/pos: expected reviews 0 to 11, one for each line of urls_pos.txt; got 11"),
        ("aclImdb/train/urls_neg.txt", "train/neg: expected reviews 0 to -1"),
    ],
)
def test_a_gap_is_named_and_nothing_written(tmp_path, lost, message):
    held = members()
    del held[lost]
    with pytest.raises(ConfigError, match=message):
        convert_archive(write_archive(tmp_path / "a.tar.gz", held), tmp_path / "imdb")
    assert not (tmp_path / "imdb").exists()


def test_a_broken_archive_is_refused(tmp_path):
    path = write_archive(tmp_path / "a.tar.gz", members())
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ConfigError, match=r"a\.tar\.gz: cannot be read"):
        convert_archive(path, tmp_path / "imdb")
    with tarfile.open(path, "w:xz") as tar:
        tar.addfile(tarfile.TarInfo("x"))
    path.write_bytes(path.read_bytes()[:40] + b"\xff" * 40)
    with pytest.raises(ConfigError, match="cannot be read"):
        convert_archive(path, tmp_path / "imdb")
    path.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="cannot be read"):
        convert_archive(path, tmp_path / "imdb")
    with pytest.raises(ConfigError, match="cannot be read"):
        convert_archive(tmp_path / "none.tar.gz", tmp_path / "imdb")


def test_two_reviews_of_one_number_are_refused_and_nothing_written(tmp_path):
    held = members() | {"aclImdb/test/pos/3_8.txt": b"another"}
    with pytest.raises(ConfigError, match="test/pos: there are two reviews with number 3"):
        convert_archive(write_archive(tmp_path / "a.tar.gz", held), tmp_path / "imdb")
    assert not (tmp_path / "imdb").exists()


def test_a_number_without_end_is_no_number(tmp_path):
    held = members() | {f"aclImdb/test/pos/{'1' * 5_000}_8.txt": b"another"}
    convert_archive(write_archive(tmp_path / "a.tar.gz", held), tmp_path / "imdb")


def test_links_and_strange_paths_are_not_followed(tmp_path):
    held = members()
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        link = tarfile.TarInfo("aclImdb/train/neg/12_1.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
        for name, content in held.items():
            info = tarfile.TarInfo(f"../../{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    convert_archive(path, tmp_path / "out" / "imdb")
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.tar.gz", "out"}


def test_nothing_is_overwritten(tmp_path):
    archive = write_archive(tmp_path / "a.tar.gz", members())
    convert_archive(archive, tmp_path / "imdb")
    with pytest.raises(FolderError, match="exists already"):
        convert_archive(archive, tmp_path / "imdb")


def test_it_runs_as_a_command(tmp_path, capsys):
    arguments = [str(write_archive(tmp_path / "a.tar.gz", members())), str(tmp_path / "imdb")]
    assert main(arguments) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert gzip.decompress((tmp_path / "imdb" / "urls_train_neg.txt.gz").read_bytes()).count(b"\n") == 12
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
