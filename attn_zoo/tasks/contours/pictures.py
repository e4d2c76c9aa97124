"""Pathfinder's pictures: contours and markers drawn, by all cores, and whole splits of them in the cache.

Each picture has a random stream of its own (seed, split, index), so a split does not depend on how many processes draw
it, nor its first pictures on how many follow.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.tasks.abstract_task import SplitName
from attn_zoo.tasks.contours.geometry import Bytes, Ints, Scene, Tables, marker_levels, tables_of
from attn_zoo.tasks.contours.snakes import Paddles, draw_distractors, draw_targets
from attn_zoo.tasks.generated.draws import STREAMS, RowStreams, Unseen
from attn_zoo.tasks.sources.tensor_cache import cached_tensors

_VERSION = 2  # raise it when a seed would give other pictures
_SPARE = 10  # one more picture in ten, to replace those that occurred before
_PICTURES_PER_CHUNK = 1_024
_FEW_CHUNKS = 4  # are drawn sooner than processes have started
_SAY_EVERY_S = 30.0


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
    """Draw paddles into canvases `[B, canvas]`, in float32 throughout: which way ties of rounding go depends on it."""
    for contour in range(paddles.places.shape[1]):
        for paddle in range(paddles.places.shape[2]):
            rows = np.flatnonzero(paddles.directions[:, contour, paddle] >= 0)
            directions = paddles.directions[rows, contour, paddle]
            at = paddles.places[rows, contour, paddle][:, None] + tables.ink.offsets[directions]
            level = tables.ink.levels[directions].astype(np.float32) / np.float32(255) * np.float32(contrast)
            canvas[rows[:, None], at] = np.maximum(canvas[rows[:, None], at], level)


def _draw(scene: Scene, margin: int, streams: RowStreams, labels: Bytes) -> Pictures:
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
    # Paddles in float32, their scaling in float64: so ties go as they do in the original's pictures, but for a few
    # pixels of levels 127 and 128. (135 of 255, times 1.5, is 202.5 and becomes 203; 105 times 1.5 is 157.5 and 157.)
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
    """Draw the pictures `index` `[B]` of a stream; each is the same whichever others are drawn with it."""
    streams = RowStreams(seed, stream, index)
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


def _chunk(scene: Scene, seed: int, stream: int, first: int, count: int) -> tuple[int, Bytes, Bytes]:
    pictures = draw_pictures(scene, seed=seed, stream=stream, index=np.arange(first, first + count))
    return first, pictures.pixels.reshape(count, -1), pictures.labels


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def generate(
    scene: Scene, *, seed: int, stream: int, count: int, num_processes: int | None = None
) -> tuple[Bytes, Bytes]:
    """Draw the first `count` pictures of a stream: grey levels `[count, side^2]`, labels `[count]`.

    `num_processes` share the work, all cores by default. Where none can be started (in a daemon, or from a script
    without a main guard) this process does it all.
    """
    pixels, labels = np.empty((count, scene.side**2), np.uint8), np.empty(count, np.uint8)
    jobs = [
        (scene, seed, stream, first, min(_PICTURES_PER_CHUNK, count - first))
        for first in range(0, count, _PICTURES_PER_CHUNK)
    ]
    say = _progress(scene, count)
    done = 0

    def keep(first: int, grey: Bytes, label: Bytes) -> None:
        nonlocal done
        pixels[first : first + len(grey)], labels[first : first + len(grey)] = grey, label
        done += len(grey)
        say(done)

    if num_processes is None:
        num_processes = min(_num_cores(), len(jobs)) if len(jobs) > _FEW_CHUNKS else 1
    left = dict.fromkeys(jobs)
    if num_processes > 1:
        try:
            with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
                running = {pool.submit(_chunk, *job): job for job in jobs}
                for future in as_completed(running):
                    keep(*future.result())
                    del left[running[future]]
        except (BrokenProcessPool, AssertionError, OSError):
            pass  # what is left is drawn below
    for job in left:
        keep(*_chunk(*job))
    return pixels, labels


def _progress(scene: Scene, count: int) -> Callable[[int], None]:
    """Return a function that now and then says how far the drawing is, on standard error."""
    began = said = time.monotonic()

    def say(done: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _SAY_EVERY_S and done < count:
            said = now
            left = (now - began) / done * (count - done) / 60
            sys.stderr.write(
                f"pathfinder: {done:,} of {count:,} pictures of {scene.side} pixels drawn, about {left:.0f} min left "
                "(once; they are kept in the cache)\n"
            )

    return say


def drawn_split(scene: Scene, *, seed: int, name: SplitName, count: int) -> dict[str, Tensor]:
    """Return `tokens` uint8 `[count, side^2]` and `labels` uint8 `[count]` of a split, which levels may share."""

    def make() -> dict[str, Tensor]:
        pixels, labels = generate(scene, seed=seed, stream=STREAMS[name], count=count)
        return {"tokens": torch.from_numpy(pixels), "labels": torch.from_numpy(labels)}

    described = json.dumps([_VERSION, asdict(scene), seed, count], sort_keys=True)
    mark = hashlib.sha256(described.encode()).hexdigest()[:16]
    return cached_tensors(f"pathfinder-{scene.side}-{name}-{mark}", make)


def distinct_splits(scene: Scene, *, seed: int, counts: Mapping[SplitName, int]) -> dict[SplitName, dict[str, Tensor]]:
    """Return splits without a picture that occurs twice or in two of them, for scenes so small that this happens.

    Pictures stay in the order of drawing; test is filled first, then validation, then train.

    Raises:
        ValueError: the scene has fewer distinct pictures.
    """
    is_new = Unseen()
    splits = {}
    for name in STREAMS:
        count = counts[name]
        drawn = drawn_split(scene, seed=seed, name=name, count=count + count // _SPARE + _SPARE)
        rows: list[int] = []
        for row, picture in enumerate(drawn["tokens"].numpy()):
            if len(rows) < count and is_new(picture):
                rows.append(row)
        if len(rows) < count:
            raise ValueError(f"expected {count} distinct pictures for {name}; {len(drawn['tokens'])} held {len(rows)}")
        splits[name] = {key: tensor[torch.tensor(rows)] for key, tensor in drawn.items()}
    return splits
