"""Unpacking: what is wanted arrives whole; malicious and broken archives of each kind are refused without a trace."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_zoo.errors import ConfigError, FolderError
from attn_zoo.tasks.sources.archive import Limits, unpack

ALL = {name: name for name in ("release/data/a.tsv", "release/data/b.tsv", "release/README")}
NAMES = {"release/data/a.tsv": b"first\n", "release/data/b.tsv": b"second\n" * 1000, "release/README": b"read me"}


def tar_bytes(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, data in members:
            info.size = len(data) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def regular(name: str, data: bytes = b"x") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), data


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def zip_bytes(members: dict[str, bytes], mode: int = 0) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            file.writestr(info, data, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def good_tar() -> bytes:
    return tar_bytes(*(regular(name, data) for name, data in NAMES.items()))


FORMS = {
    "plain.tar": lambda: good_tar(),
    "lra_release.gz": lambda: gzip.compress(good_tar()),
    "a.tgz": lambda: gzip.compress(good_tar()),
    "a.tar.bz2": lambda: bz2.compress(good_tar()),
    "a.tar.xz": lambda: lzma.compress(good_tar()),
    "a.zip": lambda: zip_bytes(NAMES),
    "named-wrongly.tar": lambda: zip_bytes(NAMES),
}


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., Path]:
    def write(data: bytes, name: str = "archive") -> Path:
        path = tmp_path / "in" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return path

    return write


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_unpacks_to_the_same_files(name, archive, tmp_path):
    names = unpack(archive(FORMS[name](), name), tmp_path / "out", wanted=ALL)
    assert names == sorted(NAMES)
    assert contents(tmp_path / "out") == NAMES
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_only_what_is_wanted_is_written_under_the_wanted_name(archive, tmp_path):
    path = archive(tar_bytes(*map(regular, NAMES), special("release/link", tarfile.SYMTYPE, "/etc/passwd")))
    assert unpack(path, tmp_path / "out", wanted={"one/a": "data/a.tsv"}) == ["one/a"]
    assert contents(tmp_path / "out") == {"one/a": b"x"}


def test_the_end_of_a_path_is_compared_by_parts(archive, tmp_path):
    path = archive(tar_bytes(regular("x/not-a.tsv"), regular("x/a.tsv", b"right")))
    unpack(path, tmp_path / "out", wanted={"a.tsv": "a.tsv"})
    assert contents(tmp_path / "out") == {"a.tsv": b"right"}


def test_written_files_are_plain_and_readable(archive, tmp_path):
    info, data = regular("run.sh", b"#!/bin/sh")
    info.mode, info.uid = 0o6777, 12345
    unpack(archive(tar_bytes((info, data))), tmp_path / "out", wanted={"run.sh": "run.sh"})
    mode = (tmp_path / "out" / "run.sh").stat().st_mode
    assert not mode & (stat.S_IXUSR | stat.S_ISUID | stat.S_ISGID)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


OUTSIDE = {"up": "../evil", "deep": "a/../../evil", "absolute": "/tmp/evil"}
MALICIOUS_TAR = {
    **{name: tar_bytes(regular(path)) for name, path in OUTSIDE.items()},
    "symlink": tar_bytes(special("evil", tarfile.SYMTYPE, "target")),
    "hard link": tar_bytes(regular("a"), special("evil", tarfile.LNKTYPE, "/etc/passwd")),
    "fifo": tar_bytes(special("evil", tarfile.FIFOTYPE)),
    "character device": tar_bytes(special("evil", tarfile.CHRTYPE)),
    "block device": tar_bytes(special("evil", tarfile.BLKTYPE)),
    "control characters": tar_bytes(regular("../\x1b[2Jb/evil")),
    "twice": tar_bytes(regular("evil"), regular("evil", b"other")),
    "twice by a detour": tar_bytes(regular("d/evil"), regular("d/./evil")),
}
MALICIOUS_ZIP = {
    **{f"zip {name}": zip_bytes({path: b"x"}) for name, path in OUTSIDE.items()},
    "zip symlink": zip_bytes({"evil": b"/etc/passwd"}, stat.S_IFLNK | 0o777),
    "zip fifo": zip_bytes({"evil": b""}, stat.S_IFIFO | 0o644),
    "zip twice": zip_bytes({"a/evil": b"1", "b/evil": b"2"}),
}


@pytest.mark.parametrize("kind", [*MALICIOUS_TAR, *MALICIOUS_ZIP])
def test_malicious_archives_are_refused_without_a_trace(kind, archive, tmp_path):
    path = archive((MALICIOUS_TAR | MALICIOUS_ZIP)[kind])
    with pytest.raises(ConfigError, match="refused") as caught:
        unpack(path, tmp_path / "sub" / "out", wanted={"evil": "evil"})
    assert "\x1b" not in str(caught.value)
    assert not any((tmp_path / "sub").iterdir())
    assert [one.name for one in tmp_path.iterdir() if one.name not in {"in", "sub"}] == []
    assert not Path("/tmp/evil").exists()


ODD_NAMES = {
    "a symlink and what would be written through it": [
        special("dir", tarfile.SYMTYPE, "/tmp"),
        regular("dir/evil-attn-zoo", b"right"),
    ],
    "backslash": [regular("..\\evil-attn-zoo"), regular("evil-attn-zoo", b"right")],
    "drive": [regular("C:evil-attn-zoo"), regular("evil-attn-zoo", b"right")],
    "another case": [regular("EVIL-attn-zoo"), regular("evil-attn-zoo", b"right")],
    "file and folder": [regular("dir"), regular("dir/evil-attn-zoo", b"right")],
    "long name": [regular("n" * 5000 + "/evil-attn-zoo", b"right")],
}


@pytest.mark.parametrize("kind", ODD_NAMES)
def test_names_in_an_archive_are_never_names_on_the_disk(kind, archive, tmp_path):
    path = archive(tar_bytes(*ODD_NAMES[kind]))
    assert unpack(path, tmp_path / "out", wanted={"good": "evil-attn-zoo"}) == ["good"]
    assert contents(tmp_path) == {"in/archive": path.read_bytes(), "out/good": b"right"}
    assert not Path("/tmp/evil-attn-zoo").exists()


def test_a_wanted_link_is_refused_too(archive, tmp_path):
    path = archive(tar_bytes(special("data/a.tsv", tarfile.SYMTYPE, "/etc/passwd")))
    with pytest.raises(ConfigError, match="refused: it is a link"):
        unpack(path, tmp_path / "out", wanted={"a.tsv": "a.tsv"})


@pytest.mark.parametrize(
    "pack", [lambda zeros: gzip.compress(tar_bytes(regular("z", zeros))), lambda z: zip_bytes({"z": z})]
)
def test_bombs_are_refused_while_they_stream(pack, archive, tmp_path):
    path = archive(pack(bytes(24 * 2**20)))
    assert path.stat().st_size < 2**17
    with pytest.raises(ConfigError, match="as a bomb would"):
        unpack(path, tmp_path / "out", wanted={"z": "z"})
    assert [one.name for one in tmp_path.iterdir()] == ["in"]


def test_a_bomb_among_what_is_not_wanted_is_refused(archive, tmp_path):
    path = archive(gzip.compress(tar_bytes(regular("z", bytes(24 * 2**20)), regular("a"))))
    with pytest.raises(ConfigError, match="as a bomb would"):
        unpack(path, tmp_path / "out", wanted={"a": "a"})


def test_a_header_that_claims_a_gigabyte_does_not_fill_the_memory(archive, tmp_path):
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**30
    path = archive(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(2**25)))
    with pytest.raises(ConfigError, match="as a bomb would"):
        unpack(path, tmp_path / "out", wanted={"z": "z"})


def test_a_zip_that_lies_about_its_size_is_counted(archive, tmp_path):
    data = bytearray(zip_bytes({"z": bytes(2**20)}))
    at = data.index(b"PK\x01\x02")
    struct.pack_into("<I", data, at + 24, 10)  # unpacked size in the directory
    with pytest.raises(ConfigError):
        unpack(archive(bytes(data)), tmp_path / "out", wanted={"z": "z"}, limits=Limits(num_bytes=100))
    assert [one.name for one in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    "pack",
    [lambda: tar_bytes(*(regular(f"f{i}") for i in range(20))), lambda: zip_bytes({f"f{i}": b"" for i in range(20)})],
)
def test_too_many_entries_are_refused(pack, archive, tmp_path):
    every = {f"f{i}": f"f{i}" for i in range(20)}
    with pytest.raises(ConfigError, match="more than 10 entries"):
        unpack(archive(pack()), tmp_path / "out", wanted=every, limits=Limits(num_members=10))
    assert len(unpack(archive(pack()), tmp_path / "out", wanted=every, limits=Limits(num_members=20))) == 20


def test_an_encrypted_zip_is_refused(archive, tmp_path):
    data = bytearray(zip_bytes({"a": b"secret"}))
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + offset] |= 1
    with pytest.raises(ConfigError, match="refused: it is encrypted"):
        unpack(archive(bytes(data)), tmp_path / "out", wanted={"a": "a"})


@pytest.mark.parametrize("name", [name for name in FORMS if name != "named-wrongly.tar"])
@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_archives_that_were_cut_short_are_named_as_such(name, kept, archive, tmp_path):
    data = FORMS[name]()
    data = data[: int(len(data) * (kept if name != "plain.tar" else 0.1))]
    with pytest.raises(ConfigError, match=r"damaged or cut short|does not hold"):
        unpack(archive(data, name), tmp_path / "out", wanted={"b": "data/b.tsv"})
    assert [one.name for one in tmp_path.iterdir()] == ["in"]


def test_a_flipped_byte_is_noticed(archive, tmp_path):
    for pack in (lambda: gzip.compress(good_tar(), 0), lambda: zip_bytes(NAMES)):
        data = bytearray(pack())
        data[len(data) // 2 if data[:2] == b"\x1f\x8b" else 50] ^= 1
        with pytest.raises(ConfigError, match="damaged or cut short"):
            unpack(archive(bytes(data)), tmp_path / "out", wanted=ALL)


def test_something_else_is_no_archive(archive, tmp_path):
    for data in (b"", b"<html>404</html>", gzip.compress(b"only text, compressed")):
        with pytest.raises(ConfigError, match=r"begins like neither|damaged or cut short"):
            unpack(archive(data), tmp_path / "out", wanted=ALL)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        unpack(tmp_path / "missing", tmp_path / "out", wanted=ALL)


def test_a_wanted_file_that_is_not_there_is_named_with_its_likeness(archive, tmp_path):
    with pytest.raises(ConfigError, match=r"does not hold c\.tsv; it holds [ab]\.tsv"):
        unpack(archive(good_tar()), tmp_path / "out", wanted={"c.tsv": "data/c.tsv"})


def test_two_members_for_one_wanted_file_are_refused(archive, tmp_path):
    path = archive(tar_bytes(regular("x/a.tsv"), regular("y/a.tsv")))
    with pytest.raises(ConfigError, match=r"two entries for a\.tsv"):
        unpack(path, tmp_path / "out", wanted={"a.tsv": "a.tsv"})


def test_a_folder_that_exists_is_left_alone(archive, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(FolderError, match="exists already"):
        unpack(archive(good_tar()), tmp_path / "out", wanted=ALL)
    assert contents(tmp_path / "out") == {"mine": b"precious"}


@given(
    names=st.lists(st.text("ab./\\:~ \n", min_size=1, max_size=8), min_size=1, max_size=4),
    kinds=st.lists(st.sampled_from([tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE]), min_size=4),
)
@settings(max_examples=80, deadline=None)
def test_nothing_is_ever_written_outside(names, kinds):
    """Whatever names and kinds are mixed: what is wanted lies in the folder, or nothing was written."""
    members = [
        regular(name) if kind == tarfile.REGTYPE else special(name, kind, "..")
        for name, kind in zip(names, kinds, strict=False)
    ]
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "a" / "b"
        root.mkdir(parents=True)
        (root / "archive").write_bytes(tar_bytes(*members))
        try:
            written = unpack(root / "archive", root / "out", wanted={"x/y": names[0].strip("/") or "a", "z": "b"})
        except ConfigError:
            written = []
            assert not (root / "out").exists()
        files = {path.relative_to(place).as_posix() for path in Path(place).rglob("*") if not path.is_dir()}
        assert files == {"a/b/archive", *(f"a/b/out/{name}" for name in written)}
