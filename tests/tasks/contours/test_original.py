"""Ours against 12 000 pictures by the original generator; needs `ATTN_ZOO_DATA`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from attn_zoo.tasks.contours.pictures import draw_pictures
from attn_zoo.tasks.pathfinder import LEVELS, ORIGINAL, Pathfinder, find_markers
from tests.tasks.contours.test_pictures import roc_area

DATA = os.environ.get("ATTN_ZOO_DATA")
pytestmark = pytest.mark.skipif(
    DATA is None or ORIGINAL.missing(Path(DATA)) != [],
    reason="ATTN_ZOO_DATA names no folder with pictures of the original generator",
)
HARD = LEVELS["32"].scene


@pytest.fixture(scope="module")
def theirs():
    assert DATA is not None
    arrays = np.load(ORIGINAL.locate(Path(DATA))["pictures"])
    return arrays["x"], arrays["y"]


@pytest.fixture(scope="module")
def ours():
    pictures = draw_pictures(HARD, seed=5, stream=0, index=np.arange(2_000))
    return pictures.pixels, pictures.labels


def features(pixels) -> np.ndarray:
    """Return what a statistician looks at: sums, shares, a coarse picture, profiles, places of the markers."""
    flat = pixels.reshape(len(pixels), -1).astype(np.float64)
    bounds = [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 255]
    markers = find_markers(pixels, HARD)
    coarse = flat.reshape(-1, 8, 4, 8, 4).mean((2, 4)).reshape(len(flat), -1)
    distance = np.hypot(*(markers[:, 0] - markers[:, 1]).T)
    return np.column_stack(
        [
            flat.mean(1),
            flat.std(1),
            *[(flat >= bound).mean(1) for bound in bounds],
            coarse,
            pixels.astype(np.float64).mean(1),
            pixels.astype(np.float64).mean(2),
            distance,
            markers.sum(1),
            markers.var((1, 2)),
        ]
    )


def how_well_told_apart(one, other, folds: int = 5) -> float:
    """Return the area under the curve of a linear discriminant that was not fitted on what it scores."""
    x = np.concatenate([features(one), features(other)])
    y = np.repeat([1, 0], [len(one), len(other)])
    x = np.column_stack([(x - x.mean(0)) / (x.std(0) + 1e-9), np.ones(len(x))])
    fold = np.random.default_rng(0).integers(0, folds, len(x))
    areas = []
    for held_out in range(folds):
        fit, kept = fold != held_out, fold == held_out
        weight = np.where(y[fit] == 1, 1 / len(one), 1 / len(other))[:, None]
        gram = x[fit].T @ (x[fit] * weight) + 1e-2 * np.eye(x.shape[1]) * 2 / x.shape[1]
        score = x[kept] @ np.linalg.solve(gram, x[fit].T @ (weight[:, 0] * (2 * y[fit] - 1)))
        areas.append(roc_area(score, y[kept]))
    return float(np.mean(areas))


def test_statistics_agree(ours, theirs):
    (x, y), (their_x, their_y) = ours, theirs
    for value, kept in (
        (x.mean((1, 2)), their_x.mean((1, 2))),
        (x.std((1, 2)), their_x.std((1, 2))),
        ((x == 0).mean((1, 2)), (their_x == 0).mean((1, 2))),
        ((x > 64).mean((1, 2)), (their_x > 64).mean((1, 2))),
        (y, their_y),
    ):
        error = np.hypot(value.std() / len(value) ** 0.5, kept.std() / len(kept) ** 0.5)
        assert abs(value.mean() - kept.mean()) < 4 * error
    levels = [np.bincount(pixels.ravel(), minlength=256) / pixels.size for pixels in (x, their_x)]
    assert abs(levels[0] - levels[1]).sum() < 0.012  # with ties rounded another way it is above 0.014


def test_the_average_picture_agrees_in_every_pixel(ours, theirs):
    x, their_x = ours[0].astype(np.float64), theirs[0].astype(np.float64)
    error = np.sqrt(x.var(0) / len(x) + their_x.var(0) / len(their_x))
    z = (x.mean(0) - their_x.mean(0)) / np.maximum(error, 1e-2)
    assert (z**2).mean() < 1.5
    assert abs(z).max() < 5.5


def test_distance_of_markers_says_as_much(ours, theirs):
    areas = []
    for pixels, labels in (ours, theirs):
        markers = find_markers(pixels, HARD)
        areas.append(roc_area(np.hypot(*(markers[:, 0] - markers[:, 1]).T), labels))
    assert areas[0] == pytest.approx(areas[1], abs=4 * 0.0138)


def test_a_classifier_does_not_tell_ours_from_theirs(ours, theirs):
    assert how_well_told_apart(ours[0], theirs[0]) == pytest.approx(0.5, abs=0.03)


def test_that_classifier_tells_other_pictures_from_theirs(theirs):
    """Mirrored ones: the same statistics, but first contours point up and left only in the original."""
    half = len(theirs[0]) // 2
    assert how_well_told_apart(theirs[0][:2_000, :, ::-1], theirs[0][half:]) > 0.56
    shorter = draw_pictures(LEVELS["32_intermediate"].scene, seed=5, stream=0, index=np.arange(500))
    assert how_well_told_apart(shorter.pixels, theirs[0]) > 0.9


def test_the_level_holds_all_of_them(theirs):
    assert DATA is not None
    task = Pathfinder("original_12000", data_dir=Path(DATA))
    parts = [task.split(name) for name in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [9_600, 1_200, 1_200]
    found = {
        (row.numpy().tobytes(), int(label))
        for part in parts
        for row, label in zip(part.tokens, part.labels, strict=True)
    }
    assert found == {(row.tobytes(), int(label)) for row, label in zip(*theirs, strict=True)}
