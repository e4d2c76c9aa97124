"""Pathfinder's contours, grown for many pictures at once by the rules of the generator that `geometry` names.

Most attempts at two long contours run into something, and the picture starts again: at 32 pixels after 317 paddles on
average, for the 28 it keeps. That is where the time goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attn_zoo.tasks.contours.geometry import NUM_DEGREES, Bytes, Ints, Scene, Tables
from attn_zoo.tasks.generated.draws import RowStreams

_SCARCE = 77  # levels below are free pixels: ceil(level / 255 - 0.3) is 0
_ATTEMPTS = 2_048  # made at once
_TRIES = 48  # pixels drawn at once when looking for a free one


@dataclass(frozen=True, slots=True)
class Paddles:
    """Drawn paddles: canvas index and direction, each `[B, contours, paddles]`; -1 where a contour was left out.

    The index is the tail's for the first paddle of a contour, the head's for each later one.
    """

    places: Ints
    directions: Ints


class Field:
    """What is taken in each picture: `occupied`, and `blocked`, which is that grown by the margin; both `[B, canvas]`.

    Growing a maximum is the maximum of what was grown, so `blocked` is kept up to date paddle by paddle.
    """

    def __init__(self, tables: Tables, count: int) -> None:
        self.tables = tables
        self.occupied = np.tile(tables.occupied, (count, 1))
        self.blocked = np.tile(tables.blocked, (count, 1))

    def copy(self) -> Field:
        """Return the same, independent of this object."""
        copy = object.__new__(Field)
        copy.tables, copy.occupied, copy.blocked = self.tables, self.occupied.copy(), self.blocked.copy()
        return copy

    def take(self, rows: Ints, other: Field) -> None:
        """Make some pictures what they are in another field."""
        self.occupied[rows], self.blocked[rows] = other.occupied[rows], other.blocked[rows]

    def merge(self, rows: Ints, places: Ints, directions: Ints) -> None:
        """Take the room of one paddle in each of some pictures."""
        at = places[:, None] + self.tables.mask.offsets[directions]
        levels = np.minimum(self.tables.mask.levels[directions], self.tables.is_inside[at])
        _raise(self.occupied, rows, at, levels)
        # What the halo adds outside the window is blocked anyway, and so is, by the forbidden border, what it reaches
        # from there.
        at = places[:, None] + self.tables.halo.offsets[directions]
        _raise(self.blocked, rows, at, self.tables.halo.levels[directions])

    def extend(
        self, scene: Scene, streams: RowStreams, rows: Ints, pivots: Ints, directions: Ints
    ) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """Look for the next paddle after the last pivot and direction of some pictures.

        Returns:
            The next pivots, the directions found, and whether one was found, each `[rows]`.
        """
        tables = self.tables
        pivots = tables.hops(pivots, directions)
        free = (255 - self.blocked[rows[:, None], pivots[:, None] + tables.circle]) / 255.0
        cumulative = np.cumsum(tables.weights[directions] * free, 1)
        total = cumulative[:, -1]
        choice = np.zeros(len(rows), np.int64)
        is_placed = np.zeros(len(rows), np.bool_)
        uniform = streams.uniform(rows, 1 + scene.paddle_retries)
        pending = np.flatnonzero(total >= 1e-4)
        for attempt in range(uniform.shape[1]):
            drawn = (cumulative[pending] > (uniform[pending, attempt] * total[pending])[:, None]).argmax(1)
            at = (pivots[pending] + tables.circle[drawn])[:, None] + tables.crash.offsets[NUM_DEGREES + drawn]
            fits = (self.occupied[rows[pending, None], at] <= tables.crash.levels[NUM_DEGREES + drawn]).all(1)
            choice[pending], is_placed[pending] = drawn, fits
            pending = pending[~fits]
        return pivots, NUM_DEGREES + choice, is_placed


def _raise(field: Bytes, rows: Ints, at: Ints, levels: Bytes) -> None:
    """Raise cells to levels; a cell that occurs twice in a row has the same level."""
    field[rows[:, None], at] = np.maximum(field[rows[:, None], at], levels)


def _first_pivots(tables: Tables, tails: Ints, degrees: Ints) -> Ints:
    return tables.backs(tables.heads(tails, degrees), degrees)


def _stays_inside(tables: Tables, tails: Ints, degrees: Ints) -> NDArray[np.bool_]:
    """Return whether head and pivot of first paddles lie in the window."""
    heads = tables.heads(tails, degrees)
    return (tables.is_inside[heads] > 0) & (tables.is_inside[tables.backs(heads, degrees)] > 0)


def _two_seeds(scene: Scene, tables: Tables, streams: RowStreams, rows: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Draw the first paddles of both targets: tails `[rows, 2]`, degrees `[rows, 2]`, and whether that worked."""
    # Upstream starts again where it draws a degree without room, so only those with room are drawn here.
    roomy = np.flatnonzero(tables.first_counts)
    degree = roomy[streams.below(rows, len(roomy), 1)[:, 0]]
    pick = streams.below(rows, tables.first_counts[degree], 1)[:, 0]
    first = tables.first_tails[(np.cumsum(tables.first_counts) - tables.first_counts)[degree] + pick]
    pending = np.flatnonzero(_stays_inside(tables, first, degree))
    corner = int(tables.window[0]) // tables.width
    row, column = np.stack(np.divmod(first, tables.width)) - corner  # halves are rounded to even pixels of the window
    second, turn = np.full(len(rows), tables.window[0]), np.zeros(len(rows), np.int64)
    good = np.zeros(len(rows), np.bool_)
    draws = streams.below(rows, NUM_DEGREES, 2 * (1 + scene.paddle_retries))
    for attempt in range(0, draws.shape[1], 2):
        own, way = draws[pending, attempt], draws[pending, attempt + 1]
        at_row = np.rint(row[pending] + tables.seed_steps[way, 0]).astype(np.int64) + corner
        at_column = np.rint(column[pending] + tables.seed_steps[way, 1]).astype(np.int64) + corner
        place = at_row * tables.width + at_column
        fits = _stays_inside(tables, place, own)
        second[pending], turn[pending], good[pending] = place, own, fits
        pending = pending[~fits]
    return np.stack([first, second], 1), np.stack([degree, turn], 1), good


def _attempt(scene: Scene, tables: Tables, streams: RowStreams, count: int) -> tuple[Paddles, NDArray[np.bool_]]:
    """Try once to draw both targets, `count` times; return the paddles and which attempts worked."""
    field = Field(tables, count)
    places, directions = np.zeros((2, count, 2, scene.contour_length), np.int64)
    places[:, :, 0], directions[:, :, 0], good = _two_seeds(scene, tables, streams, np.arange(count))
    pivots = _first_pivots(tables, places[:, :, 0], directions[:, :, 0])
    active = np.flatnonzero(good)
    for paddle in range(1, scene.contour_length):
        for snake in (0, 1):
            nexts, new, fits = field.extend(
                scene, streams, active, pivots[active, snake], directions[active, snake, paddle - 1]
            )
            active, nexts, new = active[fits], nexts[fits], new[fits]
            # Only the paddle before the last is in the way: a contour would collide with its newest.
            field.merge(active, places[active, snake, paddle - 1], directions[active, snake, paddle - 1])
            pivots[active, snake], directions[active, snake, paddle] = nexts, new
            places[active, snake, paddle] = nexts + tables.circle[new - NUM_DEGREES]
    good[:] = False
    good[active] = True
    return Paddles(places, directions), good


def draw_targets(scene: Scene, tables: Tables, streams: RowStreams, count: int) -> tuple[Paddles, Field]:
    """Draw the two target contours of `count` pictures, and what they leave free.

    Each attempt has a stream of its own, and the first that works counts; so many can be made at once, and how many
    does not matter.
    """
    places, directions = np.zeros((2, count, 2, scene.contour_length), np.int64)
    missing, made = np.arange(count), 0
    while len(missing):
        each = max(1, _ATTEMPTS // len(missing))
        attempts = streams.branches(missing, np.arange(made, made + each))
        made += each
        tried, good = _attempt(scene, tables, attempts, len(missing) * each)
        works = good.reshape(-1, each)
        which = (np.arange(len(missing)) * each + works.argmax(1))[works.any(1)]
        done, missing = missing[works.any(1)], missing[~works.any(1)]
        places[done], directions[done] = tried.places[which], tried.directions[which]
    field, every = Field(tables, count), np.arange(count)
    for snake in (0, 1):
        for paddle in range(scene.contour_length - 1 + snake):  # the first contour's end stays free, as upstream
            field.merge(every, places[:, snake, paddle], directions[:, snake, paddle])
    return Paddles(places, directions), field


def _free_pixel(field: Field, streams: RowStreams, rows: Ints, degrees: Ints) -> Ints:
    """Draw a pixel where a first paddle fits, uniform among all such; -1 where there is none."""
    tables = field.tables
    footprint = tables.footprint.offsets[degrees]
    drawn = tables.window[streams.below(rows, len(tables.window), _TRIES)]
    fits = (field.occupied[rows[:, None, None], drawn[:, :, None] + footprint[:, None, :]] < _SCARCE).all(2)
    pixel = np.where(fits.any(1), drawn[np.arange(len(rows)), fits.argmax(1)], -1)
    for i in np.flatnonzero(pixel < 0):  # few or none: look at all of them
        row = rows[i : i + 1]
        cells = field.occupied[row[0]][tables.window[:, None] + footprint[i]]
        free = tables.window[(cells < _SCARCE).all(1)]
        if len(free):
            pixel[i] = free[int(streams.below(row, len(free), 1)[0, 0])]
    return pixel


def _seed(scene: Scene, field: Field, streams: RowStreams, rows: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Draw the first paddle of a distractor anywhere: tails, degrees, and whether that worked, each `[rows]`."""
    tables = field.tables
    taken = (field.occupied[rows] >= _SCARCE).sum(1)  # the border around the window is never taken
    roomy = len(tables.window) - taken >= 0.01 * len(tables.window)
    tails, turns = np.full(len(rows), tables.window[0]), np.zeros(len(rows), np.int64)
    good = np.zeros(len(rows), np.bool_)
    pending = np.flatnonzero(roomy)
    for _ in range(1 + scene.paddle_retries):
        degrees = streams.below(rows[pending], NUM_DEGREES, 1)[:, 0]
        pending, degrees = pending[~tables.is_blind[degrees]], degrees[~tables.is_blind[degrees]]
        pixel = _free_pixel(field, streams, rows[pending], degrees)
        pending, degrees, pixel = pending[pixel >= 0], degrees[pixel >= 0], pixel[pixel >= 0]  # no room: no retry
        fits = _stays_inside(tables, pixel, degrees)
        tails[pending], turns[pending], good[pending] = pixel, degrees, fits
        pending = pending[~fits]
    return tails, turns, good


def draw_distractors(scene: Scene, field: Field, streams: RowStreams) -> Paddles:
    """Draw the distractors into what the targets leave free; those that do not fit are left out."""
    tables, count = field.tables, len(field.occupied)
    length = scene.distractor_length
    places, directions = np.full((2, count, scene.num_distractors, length), -1, np.int64)
    saved = field.copy()
    pivots, step, tries, number = np.zeros((4, count), np.int64)
    active = np.arange(count if scene.num_distractors else 0)
    while len(active):
        fresh = active[step[active] == 0]
        tails, turns, good = _seed(scene, field, streams, fresh)
        places[fresh, number[fresh], 0], directions[fresh, number[fresh], 0] = tails, turns
        pivots[fresh] = _first_pivots(tables, tails, turns)
        step[fresh[good]] = 1
        failed = [fresh[~good]]

        rows = active[(step[active] > 0) & (step[active] < length)]
        which, last = number[rows], step[rows] - 1
        nexts, turned, fits = field.extend(scene, streams, rows, pivots[rows], directions[rows, which, last])
        failed.append(rows[~fits])
        rows, which, last = rows[fits], which[fits], last[fits]
        field.merge(rows, places[rows, which, last], directions[rows, which, last])
        pivots[rows] = nexts[fits]
        directions[rows, which, last + 1] = turned[fits]
        places[rows, which, last + 1] = nexts[fits] + tables.circle[turned[fits] - NUM_DEGREES]
        step[rows] += 1

        gone = np.concatenate(failed)
        field.take(gone, saved)
        places[gone, number[gone]] = directions[gone, number[gone]] = -1
        tries[gone] += 1
        step[gone] = 0
        whole = active[step[active] == length]
        field.merge(whole, places[whole, number[whole], -1], directions[whole, number[whole], -1])
        saved.take(whole, field)
        over = np.concatenate([whole, gone[tries[gone] > scene.distractor_retries]])
        number[over] += 1
        tries[over] = step[over] = 0
        active = active[number[active] < scene.num_distractors]
    return Paddles(places, directions)
