"""Pathfinder pictures that others drew: Long Range Arena's folders, and arrays in one file.

A published folder holds `imgs/<k>/sample_<i>.png` and `metadata/<k>.npy`. The latter are plain text in spite of their
name: a line for each picture with its folder, file, number, **label**, then parameters of the drawing. At least one
picture was published as an empty file (`pathfinder32/curv_baseline/imgs/0/sample_172.png`).
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from attn_zoo.errors import ConfigError

__all__ = ["Published", "listing_digest", "read_folder", "read_npz"]

Grey = NDArray[np.uint8]
_FOLDER, _FILE, _LABEL = 0, 1, 3  # columns


@dataclass(frozen=True, slots=True)
class Published:
    """Pictures in the order of their lists.

    Args:
        pixels: grey levels `[N, side^2]`.
        labels: 0 or 1, `[N]`.
        num_skipped: pictures left out because their file is empty.
    """

    pixels: Grey
    labels: Grey
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
    found = []
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
        found.append((folder / relative, int(words[_LABEL])))
    if not found:
        raise ConfigError(str(path), [("", "expected a line for each picture; there is none")])
    return found


def _picture(path: Path, side: int) -> Grey | None:
    """Return the grey levels of a picture, or None if its file is empty.

    Raises:
        ConfigError: the file is missing or not such a picture.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(str(path), [("", f"expected a picture that the metadata list: {error.strerror}")]) from None
    if not content:
        return None
    try:
        with Image.open(io.BytesIO(content)) as image:
            mode, size = image.mode, image.size
            pixels = np.asarray(image)
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ConfigError(str(path), [("", f"cannot be read as a picture: {error}")]) from None
    if mode != "L" or size != (side, side):
        got = f"{size[0]} x {size[1]}, mode {mode}"
        raise ConfigError(str(path), [("", f"expected {side} x {side} pixels, 8-bit grey; got {got}")])
    return pixels.ravel()


def listing_digest(folder: Path) -> str:
    """Return a hash of all metadata files: which pictures there are, and their labels (not their pixels).

    Raises:
        ConfigError: there are no metadata files.
    """
    content = hashlib.sha256()
    for path in _lists(folder):
        content.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return content.hexdigest()


def read_folder(folder: Path, side: int) -> Published:
    """Read one difficulty of one size, such as `pathfinder32/curv_contour_length_14`.

    Args:
        folder: that holds `imgs` and `metadata`.
        side: of the pictures, in pixels.

    Raises:
        ConfigError: something is not as published; names the file and line.
    """
    listed = [entry for path in _lists(folder) for entry in _listed(path, folder)]
    pixels, labels = np.empty((len(listed), side * side), np.uint8), np.empty(len(listed), np.uint8)
    count = 0
    for path, label in listed:
        if (picture := _picture(path, side)) is not None:
            pixels[count], labels[count] = picture, label
            count += 1
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
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise ConfigError(str(path), [("", f"cannot be read as arrays of NumPy: {error}")]) from None
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[1:] != (side, side):
        got = f"{pixels.dtype} {list(pixels.shape)}"
        raise ConfigError(str(path), [("x", f"expected uint8 [N, {side}, {side}]; got {got}")])
    if labels.shape != pixels.shape[:1] or not np.isin(labels, (0, 1)).all():
        raise ConfigError(str(path), [("y", f"expected {len(pixels)} labels 0 or 1; got {list(labels.shape)}")])
    return Published(pixels.reshape(len(pixels), -1), labels.astype(np.uint8))
