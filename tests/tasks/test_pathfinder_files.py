"""Pathfinder pictures read from files: the published folder layout, arrays, and everything that can be wrong."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attn_zoo.errors import ConfigError
from attn_zoo.tasks.picture_files import listing_digest, read_folder, read_npz


def write_folder(folder: Path, pixels, labels, per_batch: int = 10, first_batch: int = 0) -> None:
    """Write pictures as Long Range Arena does."""
    (folder / "metadata").mkdir(parents=True)
    for batch in range(0, len(pixels), per_batch):
        number = first_batch + batch // per_batch
        at = folder / "imgs" / str(number)
        at.mkdir(parents=True)
        lines = []
        for i, (picture, label) in enumerate(
            zip(pixels[batch : batch + per_batch], labels[batch : batch + per_batch], strict=True)
        ):
            Image.fromarray(picture).save(at / f"sample_{i}.png")
            lines.append(f"imgs/{number} sample_{i}.png {i} {label} 1.0 14 4 2 0.5 1 1\n")
        (folder / "metadata" / f"{number}.npy").write_text("".join(lines))


@pytest.fixture
def pictures():
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (25, 32, 32), np.uint8), generator.integers(0, 2, 25).astype(np.uint8)


@pytest.fixture
def folder(tmp_path, pictures):
    write_folder(
        tmp_path / "hard", pictures[0], pictures[1], first_batch=8
    )  # 8, 9, 10: numbers, not names, decide the order
    return tmp_path / "hard"


def test_published_folders_are_read_in_the_order_of_their_numbers(folder, pictures):
    found = read_folder(folder, 32)
    np.testing.assert_array_equal(found.pixels, pictures[0].reshape(25, -1))
    np.testing.assert_array_equal(found.labels, pictures[1])
    assert found.num_skipped == 0


def test_an_empty_file_is_skipped_and_counted_and_more_are_refused(folder, pictures):
    (folder / "imgs" / "10" / "sample_0.png").write_bytes(b"")
    found = read_folder(folder, 32)
    left = np.delete(np.arange(25), 20)
    np.testing.assert_array_equal(found.pixels, pictures[0][left].reshape(24, -1))
    np.testing.assert_array_equal(found.labels, pictures[1][left])
    assert found.num_skipped == 1
    (folder / "imgs" / "8" / "sample_3.png").write_bytes(b"")
    with pytest.raises(ConfigError, match="imgs: expected at most one empty file in 1,000; got 2 of 25: unpack"):
        read_folder(folder, 32)


def test_a_folder_that_was_unpacked_in_part_has_another_digest(folder):
    digests, picture = [listing_digest(folder)], folder / "imgs" / "8" / "sample_3.png"
    content = picture.read_bytes()
    picture.write_bytes(content[:-1])
    digests.append(listing_digest(folder))
    picture.unlink()
    digests.append(listing_digest(folder))
    assert len(set(digests)) == 3
    picture.write_bytes(content)
    assert listing_digest(folder) == digests[0]


def test_nothing_but_empty_files_is_an_error(tmp_path, pictures):
    write_folder(tmp_path / "x", pictures[0][:1], pictures[1][:1])
    (tmp_path / "x" / "imgs" / "0" / "sample_0.png").write_bytes(b"")
    with pytest.raises(ConfigError, match="every picture is an empty file"):
        read_folder(tmp_path / "x", 32)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("imgs/9 sample_0.png 0", "line 2: expected folder, file, number and label; got 'imgs/9 sample_0.png 0'"),
        ("", "line 2: expected folder, file, number and label"),
        ("imgs/9 sample_0.png 0 2 1.0", "line 2: expected the label 0 or 1; got '2'"),
        ("imgs/9 sample_0.png 0 1.0 14", "line 2: expected the label 0 or 1; got '1.0'"),
        ("../imgs/9 sample_0.png 0 1", "line 2: expected a path below the folder"),
        ("/imgs/9 sample_0.png 0 1", "line 2: expected a path below the folder"),
    ],
)
def test_wrong_lines_are_named(folder, line, message):
    path = folder / "metadata" / "9.npy"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[2:]]))
    with pytest.raises(ConfigError, match=message) as caught:
        read_folder(folder, 32)
    assert caught.value.source == str(path)


def test_metadata_cut_short_are_named(folder):
    path = folder / "metadata" / "9.npy"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="line 3: expected folder, file, number and label"):
        read_folder(folder, 32)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="expected a line for each picture"):
        read_folder(folder, 32)


def test_metadata_that_numpy_wrote_are_refused(folder):
    np.save(folder / "metadata" / "9.npy", np.zeros(3))
    with pytest.raises(ConfigError, match="expected plain text, as published; this is an array of NumPy"):
        read_folder(folder, 32)


def test_missing_and_odd_metadata_are_named(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"metadata: expected files 0\.npy"):
        read_folder(tmp_path / "nothing", 32)
    (folder / "metadata" / "all.npy").write_text("")
    with pytest.raises(ConfigError, match=r"expected names such as 0\.npy; got all\.npy"):
        listing_digest(folder)


def test_pictures_that_are_not_there_or_not_such_are_named(folder):
    path = folder / "imgs" / "8" / "sample_1.png"
    with pytest.raises(ConfigError, match="expected 64 x 64 pixels, 8-bit grey; got 32 x 32, mode L"):
        read_folder(folder, 64)
    Image.new("RGB", (32, 32)).save(path)
    with pytest.raises(ConfigError, match="got 32 x 32, mode RGB"):
        read_folder(folder, 32)
    path.write_bytes(b"no picture at all")
    with pytest.raises(ConfigError, match="cannot be read as a picture") as caught:
        read_folder(folder, 32)
    assert caught.value.source == str(path)
    path.unlink()
    with pytest.raises(ConfigError, match="expected a picture that the metadata list"):
        read_folder(folder, 32)


def test_pictures_cut_short_are_named(folder):
    path = folder / "imgs" / "8" / "sample_1.png"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ConfigError, match="cannot be read as a picture"):
        read_folder(folder, 32)


def test_digest_of_a_folder_follows_its_lists(folder):
    before = listing_digest(folder)
    assert listing_digest(folder) == before
    path = folder / "metadata" / "9.npy"
    path.write_text(path.read_text().replace(" 1 1.0", " 0 1.0", 1))
    assert listing_digest(folder) != before


def test_arrays_are_read(tmp_path, pictures):
    path = tmp_path / "some.npz"
    np.savez_compressed(path, x=pictures[0], y=pictures[1])
    found = read_npz(path, 32)
    np.testing.assert_array_equal(found.pixels, pictures[0].reshape(25, -1))
    np.testing.assert_array_equal(found.labels, pictures[1])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 32, 32), np.uint8)}, "expected arrays x and y; y missing"),
        ({"x": np.zeros((2, 32, 31), np.uint8), "y": np.zeros(2)}, r"x: expected uint8 \[N, 32, 32\]; got uint8"),
        ({"x": np.zeros((2, 32, 32)), "y": np.zeros(2)}, "got float64"),
        ({"x": np.zeros((2, 32, 32), np.uint8), "y": np.zeros(3)}, "y: expected 2 labels 0 or 1; got shape"),
        ({"x": np.zeros((2, 32, 32), np.uint8), "y": np.array([0, 2])}, "y: expected 2 labels 0 or 1; got also 2"),
        ({"x": np.array([None, {}], object), "y": np.zeros(2)}, "cannot be read as arrays of NumPy"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, arrays, message):
    path = tmp_path / "some.npz"
    np.savez(path, **arrays)
    with pytest.raises(ConfigError, match=message):
        read_npz(path, 32)


def test_arrays_damaged_inside_or_of_a_claimed_size_are_named(tmp_path, pictures):
    path = tmp_path / "some.npz"
    np.savez_compressed(path, x=pictures[0], y=pictures[1])
    content = bytearray(path.read_bytes())
    content[200:260] = b"\xff" * 60
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as arrays of NumPy"):
        read_npz(path, 32)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**50, 32, 32)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header.getvalue())
        archive.writestr("y.npy", header.getvalue())
    with pytest.raises(ConfigError, match="cannot be read as arrays of NumPy"):
        read_npz(path, 32)


def test_files_that_are_no_arrays_are_named(tmp_path):
    path = tmp_path / "some.npz"
    for content in (b"", b"PK\x03\x04 cut short", b"text"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read as arrays of NumPy"):
            read_npz(path, 32)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ConfigError, match="cannot be read as arrays of NumPy"):
        read_npz(tmp_path / "one.npy", 32)
