"""Pictures as files: decoded, written as PNG with a table, and read from what others published for Pathfinder.

A published folder of Long Range Arena holds `imgs/<k>/sample_<i>.png` and `metadata/<k>.npy`. The latter are plain text
in spite of their name: a line for each picture with its folder, file, number, **label**, then parameters of the
drawing. At least one picture was published as an empty file (`pathfinder32/curv_baseline/imgs/0/sample_172.png`).
"""

from __future__ import annotations

import hashlib
import io
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from attn_zoo.errors import ConfigError
from attn_zoo.tasks.abstract_task import Split
from attn_zoo.whole_files import whole_folder

_Grey = NDArray[np.uint8]
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)  # the last: encrypted
_FOLDER, _FILE, _LABEL = 0, 1, 3  # columns of the metadata
_IMAGES_PER_FOLDER = 10_000  # file managers and some file systems slow down beyond
MOST_EMPTY = 0.001
"""Of published pictures: more empty files are what an interrupted unpacking leaves."""
_FORMATS = ("PNG", "JPEG", "BMP", "PPM", "TIFF", "WEBP")  # Pillow would run other programs to decode some others
_MODES = {"L": "8-bit grey", "RGB": "8-bit colours"}


def decode_picture(content: bytes, mode: str, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the pixels of an encoded picture, `[rows, columns]` or, for colours, `[rows, columns, 3]`.

    Only a picture of the expected size is decoded: a small file may unpack to gigabytes.

    Args:
        content: of the file.
        mode: Pillow's name, `"L"` for grey or `"RGB"`.
        size: columns and rows.

    Raises:
        ValueError: it cannot be decoded, or has another mode or size; says which.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
                got_mode, got_size = image.mode, image.size
                pixels = np.asarray(image) if (got_mode, got_size) == (mode, size) else None
    except UnidentifiedImageError:
        problem = "its format is unknown" if content else "there is none"
        raise ValueError(f"cannot be read as a picture: {problem}") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what Pillow raises
        raise ValueError(f"cannot be read as a picture: {error}") from None
    if pixels is None:
        columns, rows = size
        got = f"{got_size[0]} x {got_size[1]}, mode {got_mode}"
        raise ValueError(f"expected {columns} x {rows} pixels, {_MODES[mode]}; got {got}")
    return pixels


def export_images(split: Split, out: Path, shape: tuple[int, int]) -> list[Path]:
    """Write each example as an 8-bit grey PNG, and `index.tsv` with the columns `file` and `label`.

    Args:
        split: rows of grey levels, row-major, one token per pixel.
        out: folder to make. Pictures lie in `images/0`, `images/1`, ... of it.
        shape: rows and columns of the pictures.

    Returns:
        The table and the folder of the pictures.

    Raises:
        ValueError: rows do not have one token per pixel, or a token is no grey level.
        FolderError: the folder exists or cannot be written; no trace is left.
    """
    from PIL import Image

    height, width = shape
    pixels = split.tokens
    if pixels.shape[1] != height * width or not bool((split.lengths == height * width).all()):
        raise ValueError(f"expected {height} x {width} = {height * width} tokens in each row; got {pixels.shape[1]}")
    if len(split) and not 0 <= int(pixels.min()) <= int(pixels.max()) <= 255:
        raise ValueError("expected tokens from 0 to 255, the grey levels")
    with whole_folder(out) as folder, (folder / "index.tsv").open("w", encoding="ascii", newline="\n") as index:
        index.write("file\tlabel\n")
        for number in range(len(split)):
            name = f"images/{number // _IMAGES_PER_FOLDER}/{number:06d}.png"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            picture = pixels[number].numpy().astype(np.uint8).reshape(height, width)
            Image.fromarray(picture).save(folder / name)
            index.write(f"{name}\t{int(split.labels[number])}\n")
    return [out / "index.tsv", out / "images"]


@dataclass(frozen=True, slots=True)
class Published:
    """Pictures in the order of their lists.

    Args:
        pixels: grey levels `[N, side^2]`.
        labels: 0 or 1, `[N]`.
        num_skipped: pictures left out because their file is empty.
    """

    pixels: _Grey
    labels: _Grey
    num_skipped: int = 0


def _lists(folder: Path) -> list[Path]:
    """Return the metadata files in the order of their numbers.

    Raises:
        ConfigError: there are none, or one has no number.
    """
    paths = list((folder / "metadata").glob("*.npy"))
    if not paths:
        raise ConfigError(str(folder), [("metadata", "expected files 0.npy, 1.npy, ...; there are none")])
    odd = [path.name for path in paths if not path.stem.isdecimal()]
    if odd:
        raise ConfigError(str(folder), [("metadata", f"expected names such as 0.npy; got {', '.join(sorted(odd))}")])
    return sorted(paths, key=lambda path: int(path.stem))


def _listed(path: Path, folder: Path) -> list[tuple[Path, int]]:
    """Return picture and label of each line.

    Raises:
        ConfigError: a line is not as published.
    """
    content = path.read_bytes()
    if content.startswith(b"\x93NUMPY"):
        raise ConfigError(str(path), [("", "expected plain text, as published; this is an array of NumPy")])
    listed = []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        words = line.split()
        if len(words) <= _LABEL:
            raise ConfigError(
                str(path), [(f"line {number}", f"expected folder, file, number and label; got {line[:60]!r}")]
            )
        relative = PurePosixPath(words[_FOLDER], words[_FILE])
        if relative.is_absolute() or ".." in relative.parts:
            raise ConfigError(str(path), [(f"line {number}", f"expected a path below the folder; got {relative}")])
        if words[_LABEL] not in ("0", "1"):
            raise ConfigError(str(path), [(f"line {number}", f"expected the label 0 or 1; got {words[_LABEL]!r}")])
        listed.append((folder / relative, int(words[_LABEL])))
    if not listed:
        raise ConfigError(str(path), [("", "expected a line for each picture; there is none")])
    return listed


def listing_digest(folder: Path) -> str:
    """Return a hash of all metadata files and of the size of each picture that they list.

    So a folder that was unpacked in part has another one. Pixels that change within a file of the same size are not
    seen: there are 200 000 files to read.

    Raises:
        ConfigError: there are no metadata files, or a line of one is not as published.
    """
    content = hashlib.sha256()
    for path in _lists(folder):
        content.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        for picture, _ in _listed(path, folder):
            try:
                content.update(picture.stat().st_size.to_bytes(8))
            except OSError:  # reading it will say which is missing
                content.update(b"missing")
    return content.hexdigest()


def read_folder(folder: Path, side: int) -> Published:
    """Read one difficulty of one size, such as `pathfinder32/curv_contour_length_14`.

    Raises:
        ConfigError: something is not as published; names the file and line.
    """
    listed = [entry for path in _lists(folder) for entry in _listed(path, folder)]
    pixels, labels = np.empty((len(listed), side * side), np.uint8), np.empty(len(listed), np.uint8)
    count = 0
    for path, label in listed:
        try:
            content = path.read_bytes()
        except OSError as error:
            problem = f"expected a picture that the metadata list: {error.strerror}"
            raise ConfigError(str(path), [("", problem)]) from None
        if content:
            try:
                pixels[count], labels[count] = decode_picture(content, "L", (side, side)).ravel(), label
            except ValueError as error:
                raise ConfigError(str(path), [("", str(error))]) from None
            count += 1
    if (num_empty := len(listed) - count) > max(1, MOST_EMPTY * len(listed)):
        problem = f"expected at most one empty file in {1 / MOST_EMPTY:,.0f}; got {num_empty} of {len(listed)}"
        raise ConfigError(str(folder), [("imgs", f"{problem}: unpack the archive again")])
    if not count:
        raise ConfigError(str(folder), [("imgs", "every picture is an empty file")])
    return Published(pixels[:count], labels[:count], len(listed) - count)


def read_npz(path: Path, side: int) -> Published:
    """Read arrays `x`, uint8 `[N, side, side]`, and `y`, 0 or 1 `[N]`.

    Raises:
        ConfigError: the file does not hold these arrays.
    """
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            missing = [name for name in ("x", "y") if name not in arrays]
            if missing:
                raise ConfigError(str(path), [("", f"expected arrays x and y; {', '.join(missing)} missing")])
            pixels, labels = arrays["x"], arrays["y"]
    except (*_DAMAGED, OSError, ValueError, AttributeError, TypeError, KeyError, MemoryError) as error:
        raise ConfigError(str(path), [("", f"cannot be read as arrays of NumPy: {error}")]) from None
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[1:] != (side, side):
        got = f"{pixels.dtype} {list(pixels.shape)}"
        raise ConfigError(str(path), [("x", f"expected uint8 [N, {side}, {side}]; got {got}")])
    if labels.shape != pixels.shape[:1] or not np.isin(labels, (0, 1)).all():
        is_list = labels.shape == pixels.shape[:1]
        got = f"also {labels[~np.isin(labels, (0, 1))][0]}" if is_list else f"shape {list(labels.shape)}"
        raise ConfigError(str(path), [("y", f"expected {len(pixels)} labels 0 or 1; got {got}")])
    return Published(pixels.reshape(len(pixels), side * side), labels.astype(np.uint8))
