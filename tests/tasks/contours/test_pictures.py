"""Pathfinder's generator: the rules, replayed slowly one picture at a time; published statistics; reproducibility."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch
from scipy.ndimage import label as components
from scipy.ndimage import maximum_filter

from attn_zoo.tasks.contours import pictures as pathfinder_splits
from attn_zoo.tasks.contours.geometry import NUM_DEGREES, Scene, flipped, marker_levels, paddle_stamp, tables_of
from attn_zoo.tasks.contours.pictures import Pictures, distinct_splits, draw_pictures, generate
from attn_zoo.tasks.generated.draws import RowStreams
from attn_zoo.tasks.pathfinder import LEVELS, find_markers

HARD = LEVELS["32"].scene
EASY = LEVELS["32_easy"].scene
LARGE = dataclasses.replace(LEVELS["128"].scene, contour_length=6)  # two margins


@pytest.fixture(scope="module")
def hard() -> Pictures:
    return draw_pictures(HARD, seed=0, stream=0, index=np.arange(600))


def roc_area(score, label):
    """Return the probability that an example of class 1 scores higher than one of class 0."""
    order = np.argsort(score, kind="stable")
    values, inverse = np.unique(score[order], return_inverse=True)
    middle = np.array([np.flatnonzero(inverse == i).mean() for i in range(len(values))])  # ties share their rank
    ranks = np.empty(len(score))
    ranks[order] = middle[inverse]
    ones = label == 1
    return (ranks[ones].sum() - ones.sum() * (ones.sum() - 1) / 2) / (ones.sum() * (~ones).sum())


def test_statistics_of_hard_pictures_are_those_of_the_original(hard):
    """Of 12 000 pictures by the original generator, byte scaling restored."""
    pixels = hard.pixels
    lit = (pixels > 0).sum((1, 2))
    assert pixels.mean() == pytest.approx(20.15, abs=1)
    assert pixels.std() == pytest.approx(51.05, abs=2)
    assert (pixels == 0).mean() == pytest.approx(0.659, abs=0.02)
    assert (pixels > 64).mean() == pytest.approx(0.125, abs=0.01)
    np.testing.assert_allclose(np.quantile(lit, [0.05, 0.5, 0.95]), [288, 348, 415], atol=12)
    assert (pixels.max((1, 2)) == 255).all()
    assert (pixels.min((1, 2)) == 0).all()
    assert hard.labels.mean() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(len(pixels)))
    assert len({picture.tobytes() for picture in pixels}) == len(pixels)


def test_distance_of_the_markers_says_as_little_as_in_the_original(hard):
    distance = np.hypot(*(hard.markers[:, 0] - hard.markers[:, 1]).T)
    assert roc_area(distance, hard.labels) == pytest.approx(0.538, abs=0.08)


def test_markers_are_found_in_the_pixels(hard):
    found = np.sort(find_markers(hard.pixels, HARD) @ [HARD.side, 1], 1)
    assert (found == np.sort(hard.markers @ [HARD.side, 1], 1)).all(1).mean() > 0.95


def places(pictures: Pictures, scene: Scene, which: int, paddles) -> np.ndarray:
    """Return (row, column) in the window of each paddle of a picture."""
    tables = tables_of(scene, int(pictures.margins[which]))
    corner = int(tables.window[0]) // tables.width
    return np.stack(np.divmod(paddles.places[which], tables.width), -1) - corner


def angle_of(scene: Scene, margin: int, direction: int) -> float:
    if direction < NUM_DEGREES:
        return (direction - 180) * math.pi / 180
    tables = tables_of(scene, margin)
    step = int(tables.circle[direction - NUM_DEGREES])
    row = round(step / tables.width)
    return math.atan2(row, step - row * tables.width)


def moved(place, angle: float, distance: float) -> tuple[int, int]:
    return math.ceil(place[0] + distance * math.sin(angle)), math.ceil(place[1] + distance * math.cos(angle))


def pasted(stamp, place, side: int) -> np.ndarray:
    """Return a stamp in an empty window, cut at its edges."""
    half = stamp.shape[0] // 2
    wide = np.zeros((side + 2 * half, side + 2 * half), np.float64)
    wide[place[0] : place[0] + 2 * half + 1, place[1] : place[1] + 2 * half + 1] = stamp
    return wide[half:-half, half:-half]


class Replay:
    """A picture's paddles laid again, one at a time on whole images in floating point."""

    def __init__(self, scene: Scene, margin: int) -> None:
        self.scene, self.margin = scene, margin
        self.taken = np.zeros((scene.side, scene.side))
        edge = scene.padding
        self.taken[:edge] = self.taken[-edge:] = self.taken[:, :edge] = self.taken[:, -edge:] = 1
        disk = np.hypot(*np.ogrid[-margin : margin + 1, -margin : margin + 1]) <= margin
        self.disk = disk

    def seed(self, tail, direction):
        angle = angle_of(self.scene, self.margin, direction)
        head = moved(tail, angle, self.scene.paddle_length)
        pivot = moved(head, flipped(angle), self.scene.paddle_length + self.margin)
        assert min(*head, *pivot) >= 0
        assert max(*head, *pivot) < self.scene.side
        return pivot, angle, pasted(paddle_stamp(self.scene, self.margin, angle)[1] / 255, tail, self.scene.side)

    def extend(self, pivot, angle, head, direction):
        """Check one further paddle against every rule; return its pivot, angle and mask."""
        scene, radius = self.scene, self.scene.paddle_length + self.margin
        pivot = moved(pivot, angle, scene.paddle_length + 2 * self.margin)
        around = np.arange(0, 360, 360 / (2 * radius * np.pi)) * np.pi / 180
        circle = {
            (math.floor(pivot[0] + radius * np.sin(a)), math.floor(pivot[1] + radius * np.cos(a))) for a in around
        }
        assert tuple(head) in circle
        assert min(head) >= 0
        assert max(head) < scene.side
        new = math.atan2(head[0] - pivot[0], head[1] - pivot[1])
        assert new == pytest.approx(angle_of(scene, self.margin, direction))
        turn = min(abs(new - angle), 2 * math.pi - abs(new - angle)) * scene.continuity
        assert turn < math.pi / 2 + 1e-9
        grown = maximum_filter(self.taken, footprint=self.disk, mode="constant")
        assert 1 - grown[tuple(head)] > 0
        mask = pasted(paddle_stamp(scene, self.margin, flipped(new))[1] / 255, head, scene.side)
        assert (self.taken + mask).max() < 1.8 + 1e-6
        return pivot, new, mask

    def merge(self, mask) -> None:
        self.taken = np.maximum(self.taken, mask)


@pytest.mark.parametrize(("scene", "count"), [(HARD, 12), (EASY, 12), (LARGE, 2)], ids=["hard", "easy", "large"])
def test_every_paddle_keeps_the_rules(scene, count):
    pictures = draw_pictures(scene, seed=3, stream=0, index=np.arange(count))
    num_distractors = 0
    for which in range(count):
        replay = Replay(scene, int(pictures.margins[which]))
        targets, directions = places(pictures, scene, which, pictures.targets), pictures.targets.directions[which]
        strip = 2 * scene.seed_distance
        assert strip - scene.paddle_length - 4 <= targets[0, 0].min()
        apart = np.hypot(*(targets[0, 0] - targets[1, 0]))
        assert apart == pytest.approx(scene.seed_distance, abs=1)
        state = [replay.seed(targets[snake, 0], directions[snake, 0]) for snake in (0, 1)]
        for paddle in range(1, scene.contour_length):
            for snake in (0, 1):
                pivot, angle, last = state[snake]
                state[snake] = replay.extend(pivot, angle, targets[snake, paddle], directions[snake, paddle])
                replay.merge(last)
        replay.merge(state[1][2])  # and not the first contour's end
        for snake, turns in zip(
            places(pictures, scene, which, pictures.distractors), pictures.distractors.directions[which], strict=True
        ):
            if turns[0] < 0:
                continue
            num_distractors += 1
            pivot, angle, last = replay.seed(snake[0], turns[0])
            for paddle in range(1, scene.distractor_length):
                pivot, angle, mask = replay.extend(pivot, angle, snake[paddle], turns[paddle])
                replay.merge(last)
                last = mask
            replay.merge(last)
    assert num_distractors > 0


@pytest.mark.parametrize("scene", [HARD, LARGE], ids=["hard", "large"])
def test_label_1_means_that_both_markers_lie_on_one_contour(scene):
    """By connected components of each contour, drawn alone and thickened until its gaps close."""
    pictures = draw_pictures(scene, seed=1, stream=0, index=np.arange(40))
    for which in range(40):
        margin = int(pictures.margins[which])
        found = places(pictures, scene, which, pictures.targets)
        islands = []
        for snake in (0, 1):
            picture = np.zeros((scene.side, scene.side))
            for place, direction in zip(found[snake], pictures.targets.directions[which, snake], strict=True):
                angle = angle_of(scene, margin, int(direction))
                ink, _ = paddle_stamp(scene, margin, angle if direction < NUM_DEGREES else flipped(angle))
                picture = np.maximum(picture, pasted(ink >= 40, place, scene.side))
            thick = maximum_filter(picture, size=2 * margin + 3, mode="constant")
            numbered, count = components(thick, structure=np.ones((3, 3)))
            assert count == 1
            islands.append(numbered > 0)
        first, second = pictures.markers[which]
        one, other = pictures.marked[which]
        assert islands[one][tuple(first)]
        assert islands[other][tuple(second)]
        assert (one == other) == (pictures.labels[which] == 1)
        assert tuple(first) == tuple(found[one, 0])
        assert tuple(second) == tuple(found[other, -1])


def test_a_picture_does_not_depend_on_its_neighbours(hard):
    some = np.array([500, 3, 599, 41])
    alone = draw_pictures(HARD, seed=0, stream=0, index=some)
    np.testing.assert_array_equal(alone.pixels, hard.pixels[some])
    np.testing.assert_array_equal(alone.labels, hard.labels[some])
    assert not np.array_equal(draw_pictures(HARD, seed=1, stream=0, index=some).pixels, alone.pixels)
    assert not np.array_equal(draw_pictures(HARD, seed=0, stream=1, index=some).pixels, alone.pixels)


def test_two_margins_occur_and_do_not_disturb_the_order():
    every = draw_pictures(LARGE, seed=0, stream=0, index=np.arange(8))
    assert set(every.margins.tolist()) == {2, 3}
    for which in (0, 5):
        alone = draw_pictures(LARGE, seed=0, stream=0, index=np.array([which]))
        np.testing.assert_array_equal(alone.pixels[0], every.pixels[which])


def test_pictures_are_pinned(hard):
    """The same on every machine and with every release of numpy and Pillow, or the version has to be raised."""
    assert hashlib.sha256(hard.pixels[:200].tobytes() + hard.labels[:200].tobytes()).hexdigest()[:16] == PINNED


def test_ties_of_rounding_go_as_in_the_original(hard):
    """Each is a half rounded the other way, and in none of 12 000 pictures by the original generator."""
    counts = np.bincount(hard.pixels.ravel(), minlength=256)
    assert not counts[[22, 77, 103, 140, 158, 218]].any()
    assert counts[[23, 76, 104, 139, 157, 217]].all()


def test_processes_share_the_work_without_changing_it(monkeypatch):
    monkeypatch.setattr(pathfinder_splits, "_PICTURES_PER_CHUNK", 7)
    alone = generate(EASY, seed=0, stream=0, count=20, num_processes=1)
    shared = generate(EASY, seed=0, stream=0, count=20, num_processes=2)
    whole = draw_pictures(EASY, seed=0, stream=0, index=np.arange(20))
    for pixels, labels in (alone, shared):
        np.testing.assert_array_equal(pixels, whole.pixels.reshape(20, -1))
        np.testing.assert_array_equal(labels, whole.labels)


@pytest.mark.parametrize("error", [BrokenProcessPool("dead"), AssertionError("daemonic"), OSError("no fork")])
def test_without_processes_one_does_it_all(monkeypatch, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr(pathfinder_splits, "_PICTURES_PER_CHUNK", 7)
    monkeypatch.setattr(pathfinder_splits, "ProcessPoolExecutor", refuse)
    pixels, _ = generate(EASY, seed=0, stream=0, count=20, num_processes=2)
    whole = draw_pictures(EASY, seed=0, stream=0, index=np.arange(20))
    np.testing.assert_array_equal(pixels, whole.pixels.reshape(20, -1))


def test_long_drawing_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(pathfinder_splits, "_PICTURES_PER_CHUNK", 5)
    monkeypatch.setattr(pathfinder_splits, "_SAY_EVERY_S", 0.0)
    generate(EASY, seed=0, stream=0, count=10, num_processes=1)
    assert "pathfinder: 5 of 10 pictures of 32 pixels drawn" in capsys.readouterr().err


def test_distinct_splits_leave_out_what_occurred(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path))
    scene = Scene(side=12, contour_length=3, seed_distance=2, distractor_paddles=1, margins=(1,))
    plain, _ = generate(scene, seed=0, stream=2, count=2_000)
    splits = distinct_splits(scene, seed=0, counts={"train": 1_500, "validation": 50, "test": 60})
    every = [picture.tobytes() for split in splits.values() for picture in split["tokens"].numpy()]
    assert len(set(map(bytes, plain))) < 2_000  # so that there is something to leave out
    assert len(set(every)) == len(every) == 1_610


def test_too_few_distinct_pictures_are_an_error(monkeypatch):
    same = {"tokens": torch.zeros(50, 9, dtype=torch.uint8), "labels": torch.zeros(50, dtype=torch.uint8)}
    monkeypatch.setattr(pathfinder_splits, "drawn_split", lambda *_, **__: same)
    with pytest.raises(ValueError, match="expected 2 distinct pictures for test; 50 held 1"):
        distinct_splits(EASY, seed=0, counts={"train": 3, "validation": 1, "test": 2})


def test_markers_drawn_in_a_part_of_the_window_are_those_drawn_in_all_of_it():
    from PIL import Image

    for scene in (HARD, LEVELS["64"].scene):
        side, aa = scene.side, scene.antialias
        for row, column in [(0, 0), (side - 1, 3), (side // 2, side // 2), (5, side - 2), (9, 11)]:
            y, x = np.ogrid[: side * aa, : side * aa]
            disk = (y - row * aa) ** 2 + (x - column * aa) ** 2 <= (scene.marker_radius * aa) ** 2
            large = Image.fromarray(np.where(disk, 255, 0).astype(np.uint8))
            expected = np.asarray(large.resize((side, side), Image.Resampling.LANCZOS))
            rows, columns, levels = marker_levels(scene, row, column)
            picture = np.zeros((side, side), np.uint8)
            picture[rows, columns] = levels
            np.testing.assert_array_equal(picture, expected)


def test_parameters_follow_from_the_lengths():
    lengths = [(LEVELS[name].scene.distractor_length, LEVELS[name].scene.num_distractors) for name in PUBLISHED]
    assert lengths == [(4, 5), (3, 6), (2, 10), (4, 5), (4, 8)]


PUBLISHED = ("32", "32_intermediate", "32_easy", "64", "128")


def test_upstream_blindness_is_kept():
    """Its search for room fails at all but 30 degrees, so first contours point up and left (see `_is_blind`)."""
    tables = tables_of(HARD, 1)
    assert np.flatnonzero(~tables.is_blind).tolist() == list(range(30, 60))
    assert (tables.first_counts[tables.is_blind] == 0).all()
    assert (tables.first_counts[~tables.is_blind] > 0).all()
    assert tables_of(LEVELS["128"].scene, 3).is_blind.sum() == 0


def test_streams_are_uniform_and_apart():
    streams = RowStreams(0, 0, np.arange(4_000))
    rows = np.arange(4_000)
    assert streams.uniform(rows, 3).mean() == pytest.approx(0.5, abs=0.015)
    counts = np.bincount(streams.below(rows, 10, 2).ravel(), minlength=10)
    assert abs(counts / 800 - 1).max() < 0.15
    assert len(np.unique(streams.words(rows, 4))) == 16_000
    same = RowStreams(0, 0, np.array([17]))
    before = same.words(np.array([0]), 3)
    np.testing.assert_array_equal(RowStreams(0, 0, rows).words(np.array([17]), 3), before)
    assert not np.array_equal(same.words(np.array([0]), 3), before)


PINNED = "432b59b3d48f4184"
