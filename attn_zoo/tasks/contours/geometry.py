"""Pathfinder's geometry as tables: every paddle that can occur, drawn once.

A contour's state is discrete: its first paddle has one of 360 directions, each later one ends on one of the few pixels
of a small circle. So everything is looked up by the number of a *direction*: 0 to 359 are the whole degrees -180 to
179, then come the pixels of the circle. Pixels are numbers in a flat *canvas*, the window with a border around it that
nothing can jump over; moving is adding. The rules are those of the generator that `pathfinder_scene` names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from attn_zoo.tasks.contours.scene import Bytes, Ints, Scene, flipped, grown, moved, paddle_stamp

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
