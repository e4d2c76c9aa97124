"""What a Pathfinder picture is made of: its parameters, and the shapes of a paddle and a marker.

Linsley et al. 2018, "Learning long-range spatial dependencies with horizontal gated recurrent units", arXiv 1805.08315;
generator drewlinsley/pathfinder (snakes2.py, snakes.py; MIT), with the parameters of Long Range Arena (Tay et al. 2020,
arXiv 2011.04006, lra_benchmarks/data/pathfinder.py). Python 2 divided lengths as integers, and the SciPy of that time
scaled an image's range to 0..255 before it shrank or saved it; both are kept here (the repository's later versions do
neither, so their markers are 255 times too faint).

Coordinates are (row, column), angles as in (sine, cosine). Shapes are drawn enlarged by Pillow, then shrunk by its
Lanczos filter, which works in integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Parameters of a kind of picture; the defaults are those of 32 pixels, hard.

    Args:
        side: of the square window, in pixels.
        contour_length: paddles of each of the two target contours.
        seed_distance: between the first tips of the two.
        distractor_paddles: shared by all distractors; each has a third of a target's paddles.
        paddle_length: in pixels.
        paddle_thickness: in pixels; times `antialias` it is a whole number.
        margins: half the gap between paddles; one is drawn for each picture.
        marker_radius: of the two disks.
        continuity: 1.0 lets a contour turn by up to 90 degrees, 1.8 by up to 50.
        snake_contrast: brightness of a distractor's paddle; markers have 1.
        paddle_contrast: of a target's paddle, times `snake_contrast`.
        padding: forbidden border.
        antialias: shapes are drawn this much larger, then shrunk.
        paddle_retries: further tries to place a paddle.
        distractor_retries: further tries to place a distractor, which is then left out.
    """

    side: int = 32
    contour_length: int = 14
    seed_distance: int = 7
    distractor_paddles: int = 20
    paddle_length: int = 2
    paddle_thickness: float = 0.5
    margins: tuple[int, ...] = (1,)
    marker_radius: float = 1.5
    continuity: float = 1.0
    snake_contrast: float = 2.0
    paddle_contrast: float = 0.75
    padding: int = 1
    antialias: int = 2
    paddle_retries: int = 2
    distractor_retries: int = 4

    @property
    def distractor_length(self) -> int:
        """Paddles of a distractor."""
        return self.contour_length // 3

    @property
    def num_distractors(self) -> int:
        """Distractors that are tried. Recomputed for each length; whether upstream did so for 9 and 14 is not known."""
        return self.distractor_paddles // self.distractor_length


def moved(start: int, angle: float, distance: float) -> tuple[int, int]:
    """Return (row, column) at a distance from (start, start), each rounded up."""
    return math.ceil(start + distance * math.sin(angle)), math.ceil(start + distance * math.cos(angle))


def flipped(angle: float) -> float:
    """Return the opposite angle, in -pi .. pi."""
    return angle + math.pi if angle < 0 else angle - math.pi


def _structure(radius: int) -> NDArray[np.bool_]:
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return np.asarray(x**2 + y**2 <= radius**2)


def grown(image: Bytes, radius: int) -> Bytes:
    """Return the maximum over a disk around each pixel of one image or of a stack `[..., rows, columns]`."""
    from scipy.ndimage import maximum_filter

    footprint = _structure(radius).reshape((1,) * (image.ndim - 2) + (2 * radius + 1,) * 2)
    return np.asarray(maximum_filter(image, footprint=footprint, mode="constant", cval=0), np.uint8)


def _shrunk(image: Bytes, rows: int, columns: int) -> Bytes:
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize((columns, rows), Image.Resampling.LANCZOS))


def paddle_stamp(scene: Scene, margin: int, angle: float) -> tuple[Bytes, Bytes]:
    """Return ink and mask, each square with the paddle's start in the middle, of a paddle drawn at an angle."""
    from PIL import Image, ImageDraw

    half = scene.paddle_length + math.ceil(scene.paddle_thickness) + margin
    centre, side = half * scene.antialias, 2 * half * scene.antialias + 1
    row, column = moved(centre, angle, scene.paddle_length * scene.antialias)
    image = Image.new("L", (side, side), 0)
    line = [(centre, centre), (column, row)]
    ImageDraw.Draw(image).line(line, fill=255, width=round(scene.paddle_thickness * scene.antialias))
    large = np.asarray(image)
    ink, mask = (_shrunk(each, 2 * half + 1, 2 * half + 1) for each in (large, grown(large, margin * scene.antialias)))
    return ink, mask


@lru_cache(maxsize=4096)
def _disk(rows: int, columns: int, row: int, column: int, radius: float, antialias: int) -> Bytes:
    y, x = np.ogrid[-row * antialias : (rows - row) * antialias, -column * antialias : (columns - column) * antialias]
    return _shrunk(np.where(x**2 + y**2 <= (radius * antialias) ** 2, 255, 0).astype(np.uint8), rows, columns)


def marker_levels(scene: Scene, row: int, column: int) -> tuple[slice, slice, Bytes]:
    """Return where a marker's disk shows in the window, and its grey levels there.

    Only a part of the window is drawn: beyond three pixels (the reach of the Lanczos filter) around the disk, or at the
    window's own edge, nothing changes.
    """
    reach = math.ceil(scene.marker_radius) + 5
    top, left = max(row - reach, 0), max(column - reach, 0)
    bottom, right = min(row + reach + 1, scene.side), min(column + reach + 1, scene.side)
    levels = _disk(bottom - top, right - left, row - top, column - left, scene.marker_radius, scene.antialias)
    return slice(top, bottom), slice(left, right), levels
