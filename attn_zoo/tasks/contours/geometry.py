"""Pathfinder's geometry: the parameters of a picture, the shapes of paddle and marker, and tables of all paddles.

Linsley et al. 2018, "Learning long-range spatial dependencies with horizontal gated recurrent units", arXiv 1805.08315;
generator drewlinsley/pathfinder (snakes2.py, snakes.py; MIT), with the parameters of Long Range Arena (Tay et al. 2020,
arXiv 2011.04006, lra_benchmarks/data/pathfinder.py). Python 2 divided lengths as integers, and the SciPy of that time
scaled an image's range to 0..255 before it shrank or saved it; both are kept here (the repository's later versions do
neither, so their markers are 255 times too faint).

Coordinates are (row, column), angles as in (sine, cosine). Shapes are drawn enlarged by Pillow, then shrunk by its
Lanczos filter, which works in integers.

A contour's state is discrete: its first paddle has one of 360 directions, each later one ends on one of the few pixels
of a small circle. So everything is looked up by the number of a *direction*: 0 to 359 are the whole degrees -180 to
179, then come the pixels of the circle. Pixels are numbers in a flat *canvas*, the window with a border around it that
nothing can jump over; moving is adding.
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


NUM_DEGREES = 360
"""Directions that a first paddle may have; those of later paddles have numbers from here on."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The pixels of a stamp that matter, for each direction: canvas offsets and levels, both `[directions, n]`.

    Where a direction has fewer, its first is repeated, with its level: writing it twice does no harm.
    """

    offsets: Ints
    levels: Bytes


@dataclass(frozen=True, slots=True)
class Moves:
    """Where a step of one length leads, rounded up, from each row and column of the canvas in each direction.

    Upstream rounds the floating-point sum of coordinate and step. A step that is a whole number on paper may come out a
    hair above it, and whether that hair survives the sum depends on the coordinate: near the top and left of the window
    straight contours drift by one pixel. So there is an entry for each coordinate.

    Args:
        rows: canvas index of the beginning of the new row, `[directions, width]`.
        columns: the new column, `[directions, width]`.
    """

    rows: Ints
    columns: Ints

    def __call__(self, places: Ints, directions: Ints) -> Ints:
        """Return the canvas indices one step from places, each in its direction."""
        row, column = np.divmod(places, self.rows.shape[1])
        return self.rows[directions, row] + self.columns[directions, column]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """What `Scene` and one margin fix. Directions are numbered as in the module's docstring, K pixels on the circle.

    Args:
        width: of the canvas, a border of which lies around the window.
        window: canvas index of each pixel of the window, row by row.
        is_inside: 255 in the window, 0 in the border, by canvas index.
        occupied: mask of an empty picture: 255 on the forbidden border `[canvas]`.
        blocked: the same, grown by the margin, and 255 outside the window `[canvas]`.
        circle: from a pivot to the pixels on its circle, `[K]`.
        weights: of those pixels, after a paddle of each direction, `[360 + K, K]`.
        hops: from one pivot to the next.
        heads: from a first paddle's tail to its head, by degrees.
        backs: from a first paddle's head to its pivot, by degrees.
        seed_steps: from the first tail to the second as (row, column) before rounding, `[360, 2]`.
        is_blind: degrees at which upstream's search for room always fails, `[360]` (see `_is_blind`).
        first_tails: canvas indices where the first contour may begin, degree after degree.
        first_counts: how many of them each degree has, `[360]`.
        ink: how a paddle looks.
        mask: how much room it takes.
        halo: the mask grown by the margin.
        crash: the cells where it may collide, with the highest occupied level that is no collision.
        footprint: the cells that must be free around a first paddle's tail, by degrees.
    """

    width: int
    window: Ints
    is_inside: Bytes
    occupied: Bytes
    blocked: Bytes
    circle: Ints
    weights: NDArray[np.float64]
    hops: Moves
    heads: Moves
    backs: Moves
    seed_steps: NDArray[np.float64]
    is_blind: NDArray[np.bool_]
    first_tails: Ints
    first_counts: Ints
    ink: Cells
    mask: Cells
    halo: Cells
    crash: Cells
    footprint: Cells


def _moves(angles: list[float], distance: int, border: int, width: int) -> Moves:
    ends = np.array([[moved(start, angle, distance) for start in range(-border, width - border)] for angle in angles])
    rows, columns = np.moveaxis(np.clip(ends + border, 0, width - 1), 2, 0)
    return Moves(rows * width, columns)


def _cells(stamps: Bytes, keep: NDArray[np.bool_], width: int) -> Cells:
    """Return the kept pixels of stamps `[directions, side, side]`, as offsets from the middle."""
    half = stamps.shape[1] // 2
    most = int(keep.sum((1, 2)).max())
    offsets, levels = np.zeros((len(stamps), most), np.int64), np.zeros((len(stamps), most), np.uint8)
    for direction, (stamp, kept) in enumerate(zip(stamps, keep, strict=True)):
        rows, columns = np.nonzero(kept)
        index = np.where(np.arange(most) < len(rows), np.arange(most), 0)
        offsets[direction] = ((rows - half) * width + columns - half)[index]
        levels[direction] = stamp[rows, columns][index]
    return Cells(offsets, levels)


def _highest_free_levels() -> Bytes:
    """Return, by level of a new mask, the highest level already there that leaves their sum below 1.8."""
    unit = (np.arange(256) / 255).astype(np.float32).astype(np.float64)
    return np.array([np.flatnonzero(unit + new < 1.8)[-1] for new in unit], np.uint8)


@lru_cache(maxsize=16)
def tables_of(scene: Scene, margin: int) -> Tables:
    """Return the tables of a scene whose gaps are two margins wide. Takes a fraction of a second, once."""
    length, side = scene.paddle_length, scene.side
    border = length + 2 * margin + 4  # a pivot is at most margin + 3 outside, a pixel on its circle length + margin + 1
    width = side + 2 * border
    radius = length + margin

    steps = np.arange(0, 360, 360 / (2 * radius * math.pi)) * math.pi / 180
    around = np.stack([np.floor(border + radius * np.sin(steps)), np.floor(border + radius * np.cos(steps))], 1)
    circle = np.unique(around.astype(np.int64) - border, axis=0)
    degrees = [degree * math.pi / 180 for degree in range(-180, 180)]
    angles = degrees + [math.atan2(row, column) for row, column in circle.tolist()]
    turn = np.abs(np.subtract.outer(angles, angles[NUM_DEGREES:]))
    turn = np.minimum(np.minimum(turn, 2 * math.pi - turn) * scene.continuity, math.pi / 2)

    # Ends at the head, so that later paddles are drawn backwards from the pixel on the circle.
    drawn = degrees + [flipped(angle) for angle in angles[NUM_DEGREES:]]
    ink, mask = (np.stack(each) for each in zip(*(paddle_stamp(scene, margin, a) for a in drawn), strict=True))
    halo = grown(np.pad(mask, ((0, 0), (margin, margin), (margin, margin))), margin)
    limits = _highest_free_levels()[mask]

    empty = np.zeros((side, side), np.uint8)
    empty[: scene.padding] = empty[-scene.padding :] = empty[:, : scene.padding] = empty[:, -scene.padding :] = 255
    forbidden = np.pad(grown(empty, margin), border, constant_values=255)

    is_inside = np.pad(np.full((side, side), 255, np.uint8), border).ravel()
    window = np.flatnonzero(is_inside)
    footprint = _footprint(mask[:NUM_DEGREES], radius, width)
    is_blind = _is_blind(footprint, window, is_inside, radius + 1)
    tails = _first_tails(scene, footprint, window, is_inside, is_blind)
    return Tables(
        width=width,
        window=window,
        is_inside=is_inside,
        occupied=np.pad(empty, border).ravel(),
        blocked=forbidden.ravel(),
        circle=circle @ np.array([width, 1]),
        weights=np.round(np.cos(turn) ** 2, 12),
        hops=_moves(angles, length + 2 * margin, border, width),
        heads=_moves(degrees, length, border, width),
        backs=_moves([flipped(a) for a in degrees], length + margin, border, width),
        seed_steps=scene.seed_distance * np.array([[math.sin(a), math.cos(a)] for a in degrees]),
        is_blind=is_blind,
        first_tails=np.concatenate(tails),
        first_counts=np.array([len(free) for free in tails]),
        ink=_cells(ink, ink > 0, width),
        mask=_cells(mask, mask > 0, width),
        halo=_cells(halo, halo > 0, width),
        crash=_cells(limits, limits < 255, width),
        footprint=footprint,
    )


def _footprint(mask: Bytes, radius: int, width: int) -> Cells:
    """Return the cells around a tail that must be free for a first paddle.

    Upstream pastes the mask into a square of side 2 radius + 1 one pixel below and right of its middle, cuts what
    leaves the square, and keeps the pixels that are full.
    """
    half = mask.shape[1] // 2
    square = np.zeros((len(mask), 2 * radius + 3, 2 * radius + 3), np.uint8)  # its middle is that of the square, plus 1
    low, high = half - radius - 1, half + radius
    square[:, 1 : 2 * radius + 2, 1 : 2 * radius + 2] = mask[:, low:high, low:high]
    return _cells(square, square == 255, width)


def _is_blind(footprint: Cells, window: Ints, is_inside: Bytes, reach: int) -> NDArray[np.bool_]:
    """Return the degrees at which upstream finds no room for a first paddle, whatever the picture.

    It looks for room with OpenCV's dilation, which gives minus infinity where all cells of the footprint lie outside
    the window, and takes any negative value for "no room anywhere". That happens wherever the footprint lies wholly on
    one side of its tail: at 32 pixels for all but 30 of the 360 degrees, so that first paddles point up and left and
    most distractors are left out; at 64 pixels for three quarters; at 128 for almost none.
    """
    side, near = math.isqrt(len(window)), reach + 2  # further inside all pixels are alike
    edges = np.unique(np.concatenate([np.arange(min(near, side)), np.arange(max(side - near, 0), side)]))
    pixels = window.reshape(side, side)[np.ix_(edges, edges)].ravel()
    return np.array([bool((is_inside[pixels[:, None] + offsets] == 0).all(1).any()) for offsets in footprint.offsets])


def _first_tails(
    scene: Scene, footprint: Cells, window: Ints, is_inside: Bytes, is_blind: NDArray[np.bool_]
) -> list[Ints]:
    """Return the pixels where the first paddle fits into the middle of the window, by degree; none for blind ones."""
    strip, middle = 2 * scene.seed_distance, scene.side - 4 * scene.seed_distance
    taken = np.ones((scene.side, scene.side), np.bool_)
    taken[strip : strip + middle, strip : strip + middle] = False
    canvas = is_inside > 0
    canvas[window] = taken.ravel()
    none = window[:0]
    return [
        none if blind else window[~canvas[window[:, None] + np.unique(offsets)].any(1)]
        for offsets, blind in zip(footprint.offsets, is_blind, strict=True)
    ]
