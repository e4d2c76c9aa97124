"""What trivial models score on Pathfinder: there should be none above chance, and that is worth showing.

The distance between the two markers says a little: the ends of one contour cannot be further apart than it is long.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from attn_zoo.tasks.abstract_task import Split
from attn_zoo.tasks.contours.scene import Scene, marker_levels
from attn_zoo.tasks.floors.linear_model import linear_floor
from attn_zoo.tasks.floors.lookup_rules import lookup_floor, majority_floor

__all__ = ["find_markers", "pathfinder_floors"]

_MAX_TRAIN, _MAX_TEST = 10_000, 5_000
_MAX_LINEAR_TRAIN = 4_000
_MAX_LINEAR_PIXELS = 1_024  # more weights than that are not fitted within seconds
_MAX_TOKENS = 2**25  # looked at for markers


def find_markers(pictures: NDArray[np.uint8], scene: Scene) -> NDArray[np.int64]:
    """Return (row, column) of the two markers of each picture `[N, 2, 2]`, found in its pixels alone.

    A marker is where the darkest pixel of a full disk is brightest: lines are too thin for that. The second is the next
    best that does not touch the first.

    Args:
        pictures: grey levels `[N, side, side]`.
        scene: how large the markers are.
    """
    middle = scene.side // 2
    rows, columns, levels = marker_levels(scene, middle, middle)
    core = np.argwhere(levels >= 250) + np.array([rows.start - middle, columns.start - middle])
    reach = int(abs(core).max())
    padded = np.pad(pictures, ((0, 0), (reach, reach), (reach, reach)))
    side = scene.side
    darkest = np.full(pictures.shape, 255, np.uint8)
    for row, column in core + reach:
        np.minimum(darkest, padded[:, row : row + side, column : column + side], out=darkest)
    found = np.empty((len(pictures), 2, 2), np.int64)
    flat, every = darkest.reshape(len(pictures), -1), np.arange(len(pictures))
    first = flat.argmax(1)
    found[:, 0] = np.stack(np.divmod(first, side), 1)
    near = math.ceil(scene.marker_radius)
    for row in range(-near, near + 1):
        for column in range(-near, near + 1):
            at = np.clip(found[:, 0] + [row, column], 0, side - 1)
            flat[every, at[:, 0] * side + at[:, 1]] = 0
    found[:, 1] = np.stack(np.divmod(flat.argmax(1), side), 1)
    return found


def _distances(tokens: NDArray[np.uint8], scene: Scene) -> NDArray[np.int64]:
    """Return the distance between the markers of each picture, in whole pixels."""
    markers = find_markers(tokens.reshape(-1, scene.side, scene.side), scene)
    rows, columns = (markers[:, 0] - markers[:, 1]).T
    whole: NDArray[np.int64] = np.rint(np.hypot(rows, columns)).astype(np.int64)
    return whole


def pathfinder_floors(train: Split, test: Split, scene: Scene) -> dict[str, float]:
    """Return what three rules score on test: majority, distance between the markers, and a linear model of pixels.

    Args:
        train: the first 10 000 pictures are used, fewer of large ones, and 4 000 by the linear model.
        test: the first 5 000, likewise; for the majority all.
        scene: what the pictures look like.
    """
    floors = {"majority": majority_floor(train.labels.numpy(), test.labels.numpy())}
    most = _MAX_TOKENS // scene.side**2
    parts = [(train, min(_MAX_TRAIN, most)), (test, min(_MAX_TEST, most))]
    (pixels, labels), (test_pixels, test_labels) = (
        (split.tokens[:count].numpy(), split.labels[:count].numpy()) for split, count in parts
    )
    distances = _distances(pixels, scene), _distances(test_pixels, scene)
    floors["marker_distance"] = lookup_floor(distances[0], labels, distances[1], test_labels)
    if scene.side**2 <= _MAX_LINEAR_PIXELS:
        some = slice(_MAX_LINEAR_TRAIN)
        features = pixels[some].astype(np.float32), test_pixels.astype(np.float32)
        floors["linear_on_pixels"] = linear_floor(features[0], labels[some], features[1], test_labels)
    return floors
