"""Pathfinder's pictures: contours and markers drawn, one picture or many processes full of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_zoo.tasks.contours.field import Streams
from attn_zoo.tasks.contours.geometry import Tables, tables_of
from attn_zoo.tasks.contours.scene import Bytes, Ints, Scene, marker_levels
from attn_zoo.tasks.contours.snakes import Paddles, draw_distractors, draw_targets

__all__ = ["Pictures", "draw_pictures"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """Drawn pictures, and how they came about.

    Args:
        pixels: grey levels `[B, side, side]`.
        labels: 1 where both markers lie on one contour, `[B]`.
        margins: half the gap between paddles, `[B]`.
        marked: the contours of the first and second marker, 0 or 1, `[B, 2]`.
        markers: (row, column) of each `[B, 2, 2]`.
        targets: paddles of the two contours, as canvas indices of `tables_of(scene, margin)`.
        distractors: paddles of the others.
    """

    pixels: Bytes
    labels: Bytes
    margins: Ints
    marked: Ints
    markers: Ints
    targets: Paddles
    distractors: Paddles


def _inked(canvas: NDArray[np.float32], tables: Tables, paddles: Paddles, contrast: float) -> None:
    """Draw paddles into canvases `[B, canvas]`."""
    for contour in range(paddles.places.shape[1]):
        for paddle in range(paddles.places.shape[2]):
            rows = np.flatnonzero(paddles.directions[:, contour, paddle] >= 0)
            directions = paddles.directions[rows, contour, paddle]
            at = paddles.places[rows, contour, paddle][:, None] + tables.ink.offsets[directions]
            level = (tables.ink.levels[directions] / 255 * contrast).astype(np.float32)
            canvas[rows[:, None], at] = np.maximum(canvas[rows[:, None], at], level)


def _draw(scene: Scene, margin: int, streams: Streams, labels: Bytes) -> Pictures:
    """Draw the pictures of one margin."""
    tables, count = tables_of(scene, margin), len(labels)
    targets, field = draw_targets(scene, tables, streams, count)
    distractors = draw_distractors(scene, field, streams)
    canvas = np.zeros((count, len(tables.occupied)), np.float32)
    _inked(canvas, tables, targets, scene.paddle_contrast * scene.snake_contrast)
    _inked(canvas, tables, distractors, scene.snake_contrast)
    images = canvas[:, tables.window].reshape(count, scene.side, scene.side).astype(np.float64)

    every = np.arange(count)
    first = streams.below(every, 2, 1)[:, 0]
    marked = np.stack([first, np.where(labels == 1, first, 1 - first)], 1)
    tips = np.stack([targets.places[every, marked[:, 0], 0], targets.places[every, marked[:, 1], -1]], 1)
    corner = int(tables.window[0]) // tables.width
    markers = np.stack(np.divmod(tips, tables.width), 2) - corner
    for image, places in zip(images, markers, strict=True):
        for row, column in places:
            rows, columns, levels = marker_levels(scene, int(row), int(column))
            image[rows, columns] = np.maximum(image[rows, columns], levels / 255)
    low, high = images.min((1, 2), keepdims=True), images.max((1, 2), keepdims=True)
    # Halves go up, as on paper: 135 of 255, times 1.5, is 202.5; in floating point half of such ties would go down.
    pixels = ((images - low) * (255 / (high - low)) + 0.5).astype(np.uint8)
    return Pictures(
        pixels=pixels,
        labels=labels,
        margins=np.full(count, margin),
        marked=marked,
        markers=markers,
        targets=targets,
        distractors=distractors,
    )


def draw_pictures(scene: Scene, *, seed: int, stream: int, index: Ints) -> Pictures:
    """Draw some pictures of a split; each is the same whichever others are drawn with it.

    Args:
        scene: what they look like.
        seed: of the data.
        stream: names the split.
        index: of each picture in the split, `[B]`.
    """
    streams = Streams(seed, stream, index)
    every = np.arange(len(index))
    labels = streams.below(every, 2, 1)[:, 0].astype(np.uint8)
    margins = np.array(scene.margins)[streams.below(every, len(scene.margins), 1)[:, 0]]
    groups = [np.flatnonzero(margins == margin) for margin in scene.margins]
    parts = [
        _draw(scene, margin, streams.only(rows), labels[rows])
        for margin, rows in zip(scene.margins, groups, strict=True)
    ]
    order = np.argsort(np.concatenate(groups))

    def joined(values: list[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(values)[order]

    def paddles(values: list[Paddles]) -> Paddles:
        return Paddles(joined([v.places for v in values]), joined([v.directions for v in values]))

    return Pictures(
        **{
            name: joined([getattr(part, name) for part in parts])
            for name in ("pixels", "labels", "margins", "marked", "markers")
        },
        targets=paddles([part.targets for part in parts]),
        distractors=paddles([part.distractors for part in parts]),
    )
