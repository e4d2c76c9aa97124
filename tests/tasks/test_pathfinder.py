"""Pathfinder as a task: levels, splits, sources, digests, floors, settings."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import numpy as np
import pytest
import torch

from attn_zoo.errors import ConfigError, UnknownNameError
from attn_zoo.registry import tasks
from attn_zoo.tasks import AbstractTask, SplitName
from attn_zoo.tasks.abstract_task import Split
from attn_zoo.tasks.contours.geometry import Scene
from attn_zoo.tasks.contours.pictures import draw_pictures
from attn_zoo.tasks.pathfinder import LEVELS, Pathfinder, PathfinderLevel, pathfinder_floors
from attn_zoo.tasks.promises import checked_split
from attn_zoo.tasks.sources.tensor_cache import cache_dir
from tests.tasks.test_pathfinder_files import write_folder

SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
EASY = LEVELS["32_easy"].scene


@pytest.fixture
def few(monkeypatch, tmp_path):
    """Make every level small; the cache is empty and private, and fetched data lie in it."""
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))
    small = {
        name: dataclasses.replace(
            level,
            num_train=60,
            num_validation=20,
            num_test=30,
            scene=dataclasses.replace(level.scene, contour_length=3) if level.scene.side > 16 else level.scene,
        )
        for name, level in LEVELS.items()
    }
    monkeypatch.setattr(Pathfinder, "levels", MappingProxyType(small))
    return small


@pytest.fixture
def original(tmp_path):
    """Return a folder with an array file as the 12 000 pictures are, of 50, each with its number as first pixel."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (50, 32, 32), np.uint8)
    pixels[:, 0, 0] = np.arange(50)
    labels = np.arange(50) % 2
    folder = tmp_path / "data" / "pathfinder32-hard"
    folder.mkdir(parents=True)
    np.savez(folder / "pathfinder32_hard_12000.npz", x=pixels, y=labels.astype(np.uint8))
    return tmp_path / "data"


def test_it_is_registered():
    assert tasks["pathfinder"] is Pathfinder
    assert issubclass(Pathfinder, AbstractTask)


def test_no_position_is_masked():
    """Level 0 is black: a model that took it for padding would not see two thirds of a picture."""
    for level, side in (("short", 16), ("32", 32), ("64", 64), ("128", 128), ("lra_128", 128), ("original_12000", 32)):
        task = Pathfinder(level)
        assert not task.spec.has_padding
        assert (task.spec.vocab_size, task.spec.num_classes, task.spec.kind) == (256, 2, "classification")
        assert task.spec.max_seq_len == side**2
        assert task.image_shape == (side, side)


def test_published_counts():
    level = Pathfinder.levels["32"]
    assert [level.count(name) for name in SPLITS] == [160_000, 20_000, 20_000]
    assert level.scene.contour_length == 14


def test_drawn_levels_keep_the_contract(few):
    for name in ("short", "32", "64"):
        task = Pathfinder(name)
        for split in SPLITS:
            checked_split(task, split)
            found = task.split(split)
            assert len(found) == few[name].count(split)
            assert (found.lengths == task.spec.max_seq_len).all()
            assert found.tokens.dtype == found.labels.dtype == torch.uint8
            assert set(found.labels.tolist()) == {0, 1}
        assert task.num_skipped == 0
        assert task.source(name) is None


def test_splits_are_apart_and_the_same_on_every_call(few):
    rows = {row.tobytes() for name in SPLITS for row in Pathfinder("32").split(name).tokens.numpy()}
    assert len(rows) == 110
    assert torch.equal(Pathfinder("32").split("train").tokens, Pathfinder("32").split("train").tokens)


def test_drawn_splits_are_cached_and_shared(few, original, monkeypatch):
    test = Pathfinder("32").split("test")
    files = sorted(cache_dir().iterdir())
    assert len(files) == 1  # only what was asked for
    monkeypatch.setattr("attn_zoo.tasks.contours.pictures.draw_pictures", None)  # would fail if drawn again
    assert torch.equal(Pathfinder("32").split("test").tokens, test.tokens)
    assert torch.equal(Pathfinder("original_to_32", data_dir=original).split("test").tokens, test.tokens)


def test_pictures_of_the_original_are_shared_out(few, original):
    task = Pathfinder("original_12000", data_dir=original)
    parts = {name: task.split(name) for name in SPLITS}
    assert [len(parts[name]) for name in SPLITS] == [40, 5, 5]
    numbers = torch.cat([parts[name].tokens[:, 0] for name in SPLITS])
    assert sorted(numbers.tolist()) == list(range(50))
    assert numbers.tolist() != list(range(50))
    for name in SPLITS:
        checked_split(task, name)
        assert torch.equal(parts[name].labels, parts[name].tokens[:, 0] % 2)


def test_one_can_train_on_ours_and_test_on_theirs_and_the_reverse(few, original):
    ours, theirs = Pathfinder("32"), np.load(original / "pathfinder32-hard" / "pathfinder32_hard_12000.npz")["x"]
    there = Pathfinder("32_to_original", data_dir=original)
    assert torch.equal(there.split("train").tokens, ours.split("train").tokens)
    assert torch.equal(there.split("validation").tokens, ours.split("validation").tokens)
    assert {row.tobytes() for row in there.split("test").tokens.numpy()} == {row.tobytes() for row in theirs}
    back = Pathfinder("original_to_32", data_dir=original)
    assert (len(back.split("train")), len(back.split("validation"))) == (45, 5)
    assert torch.equal(back.split("test").tokens, ours.split("test").tokens)
    read = torch.cat([back.split("train").tokens, back.split("validation").tokens]).numpy()
    assert {row.tobytes() for row in read} == {row.tobytes() for row in theirs}


def test_published_pictures_are_shared_out_without_empty_files(few, tmp_path, capsys):
    drawn = draw_pictures(EASY, seed=0, stream=0, index=np.arange(31))
    folder = tmp_path / "data" / "pathfinder32" / "curv_contour_length_14"
    write_folder(folder, drawn.pixels, drawn.labels)
    (folder / "imgs" / "0" / "sample_4.png").write_bytes(b"")
    task = Pathfinder("lra_32", data_dir=tmp_path / "data")
    assert [len(task.split(name)) for name in SPLITS] == [24, 3, 3]
    assert task.num_skipped == 1
    assert "1 empty files skipped" in capsys.readouterr().err
    labels = {picture.tobytes(): label for picture, label in zip(drawn.pixels, drawn.labels, strict=True)}
    for name in SPLITS:
        checked_split(task, name)
        for tokens, label in zip(task.split(name).tokens.numpy(), task.split(name).labels, strict=True):
            assert labels.pop(tokens.tobytes()) == label
    assert list(labels) == [drawn.pixels[4].tobytes()]
    again = Pathfinder("lra_32", data_dir=folder)  # the folder itself will do, and the cache holds it
    assert torch.equal(again.split("train").tokens, task.split("train").tokens)
    assert again.num_skipped == 1


@pytest.mark.parametrize(
    ("level", "count", "message"),
    [
        ("original_12000", 9, "expected at least 10 for train, validation, test; got 9"),
        ("original_to_32", 9, "expected at least 10 for train, validation; got 9"),
        ("32_to_original", 0, "expected at least 1 for test; got 0"),
    ],
)
def test_so_few_pictures_that_a_split_has_none_are_refused(few, original, level, count, message):
    path = original / "pathfinder32-hard" / "pathfinder32_hard_12000.npz"
    np.savez(path, x=np.zeros((count, 32, 32), np.uint8), y=np.zeros(count))
    with pytest.raises(ConfigError, match=message):
        Pathfinder(level, data_dir=original).split("train" if level == "original_to_32" else "test")


def test_missing_files_are_named_with_the_way_to_get_them(few, tmp_path):
    for level, file in (("lra_32", "metadata/0.npy"), ("original_12000", "pathfinder32_hard_12000.npz")):
        with pytest.raises(ConfigError, match=f"missing {file}; looked in"):
            Pathfinder(level, data_dir=tmp_path).split("test")
        with pytest.raises(ConfigError, match="missing"):
            Pathfinder.digest(level, data_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"lra_release\.gz"):
        Pathfinder("lra_128").split("train")


def test_digests_follow_level_version_and_files(few, original, monkeypatch, tmp_path):
    drawn = {name: Pathfinder.digest(name) for name, level in Pathfinder.levels.items() if not level.source}
    assert len(set(drawn.values())) >= 4  # contours are all 3 paddles long here
    folder = tmp_path / "data" / "pathfinder32" / "curv_contour_length_14"
    write_folder(folder, np.zeros((20, 32, 32), np.uint8), np.zeros(20, np.uint8))
    before = Pathfinder.digest("lra_32", data_dir=original)
    other = folder / "metadata" / "1.npy"
    other.write_text(other.read_text().replace(" 0 0 1.0", " 0 1 1.0"))  # a label in a file that is not the source's
    assert Pathfinder.digest("lra_32", data_dir=original) != before
    read = Pathfinder.digest("original_12000", data_dir=original)
    np.savez(
        original / "pathfinder32-hard" / "pathfinder32_hard_12000.npz", x=np.zeros((9, 32, 32), np.uint8), y=np.zeros(9)
    )
    assert Pathfinder.digest("original_12000", data_dir=original) != read
    monkeypatch.setattr(Pathfinder, "version", Pathfinder.version + 1)
    assert Pathfinder.digest("32") != drawn["32"]


def test_unknown_level_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean '32_easy'"):
        Pathfinder("32_eazy")


def as_split(pixels, labels) -> Split:
    tokens = torch.from_numpy(pixels.reshape(len(pixels), -1))
    return Split(tokens=tokens, lengths=torch.full((len(tokens),), tokens.shape[1]), labels=torch.from_numpy(labels))


def test_floors_are_computed_from_the_pictures():
    pictures = draw_pictures(EASY, seed=0, stream=0, index=np.arange(700))
    train, test = (as_split(pictures.pixels[part], pictures.labels[part]) for part in (slice(500), slice(500, None)))
    floors = pathfinder_floors(train, test, EASY)
    assert set(floors) == {"majority", "marker_distance", "marker_places", "linear_on_pixels"}
    majority = int(train.labels.float().mean() > 0.5)
    assert floors["majority"] == pytest.approx((test.labels == majority).float().mean().item())
    assert all(0.4 < value < 0.8 for value in floors.values())


def test_the_rule_of_distance_finds_a_rule_that_is_there():
    """Labels that say whether the markers are far apart are learnt; by the majority they are not."""
    pictures = draw_pictures(EASY, seed=0, stream=0, index=np.arange(900))
    distance = np.hypot(*(pictures.markers[:, 0] - pictures.markers[:, 1]).T)
    labels = (distance > np.median(distance)).astype(np.uint8)
    train, test = (as_split(pictures.pixels[part], labels[part]) for part in (slice(600), slice(600, None)))
    floors = pathfinder_floors(train, test, EASY)
    assert floors["marker_distance"] > 0.9
    assert floors["majority"] < 0.6


def test_the_rule_of_places_finds_a_direction_and_nothing_that_is_not_there():
    """Whether the marker further out lies below the other: distance hardly says it. Coins say nothing to any rule."""
    pictures = draw_pictures(EASY, seed=0, stream=0, index=np.arange(2_600))
    from_middle = abs(pictures.markers - 15.5).max(2)
    nearer = from_middle.argmin(1)
    every = np.arange(len(nearer))
    is_below = pictures.markers[every, 1 - nearer, 0] > pictures.markers[every, nearer, 0]
    coins = np.random.default_rng(0).integers(2, size=len(nearer))
    for labels, low, high in ((is_below, 0.9, 1.0), (coins, 0.42, 0.58)):
        parts = (slice(2_000), slice(2_000, None))
        train, test = (as_split(pictures.pixels[part], labels[part].astype(np.uint8)) for part in parts)
        floors = pathfinder_floors(train, test, EASY)
        assert low < floors["marker_places"] <= high
        assert floors["marker_distance"] < 0.68


def test_where_the_markers_are_tells_more_than_how_far_apart(monkeypatch):
    """What the task cannot take away: directions of the generator are not all alike. A fifth of them shows it."""
    fewer = dataclasses.replace(LEVELS["short"], num_train=4_000)
    monkeypatch.setattr(Pathfinder, "levels", MappingProxyType({**LEVELS, "fewer": fewer}))
    floors = Pathfinder("fewer").floors()
    assert 0.78 < floors["marker_places"] < 0.83
    assert floors["marker_distance"] < 0.6


def test_large_pictures_have_no_linear_floor():
    scene = Scene(side=48, contour_length=3)
    pictures = draw_pictures(scene, seed=0, stream=0, index=np.arange(20))
    split = as_split(pictures.pixels, pictures.labels)
    assert set(pathfinder_floors(split, split, scene)) == {"majority", "marker_distance", "marker_places"}


def test_show_is_a_picture_and_a_sentence(few):
    task = Pathfinder("short")
    example = task.split("test").example(0)
    *picture, answer = task.show(example).split("\n")
    assert [len(line) for line in picture] == [16] * 8
    assert answer == ("= one contour" if int(example.label) else "= two contours")
    lit = example.tokens.reshape(16, 16) >= 64
    for row, line in enumerate(picture):
        for column, sign in enumerate(line):
            assert (sign in "▀█") == bool(lit[2 * row, column])
            assert (sign in "▄█") == bool(lit[2 * row + 1, column])


def test_export_writes_pictures(few, tmp_path):
    from PIL import Image

    task = Pathfinder("short")
    task.export("validation", tmp_path / "out")
    files = sorted((tmp_path / "out").rglob("*.png"))
    assert len(files) == 20
    with Image.open(files[0]) as picture:
        assert picture.size == (16, 16)


def test_protocols_resolve_with_the_published_settings():
    from attn_zoo.training.protocol import resolve_protocol

    small = resolve_protocol("lra-small", task_settings=Pathfinder.settings["lra-small"])
    assert (small.batch_size, small.num_steps, small.warmup_steps, small.eval_every) == (256, 62_400, 312, 312)
    original = resolve_protocol("lra-original", task_settings=Pathfinder.settings["lra-original"])
    assert (original.num_layers, original.embed_dim, original.ffn_dim, original.num_heads) == (4, 32, 32, 4)
    assert (original.head_dim, original.pretrain_mask_prob) == (4, 0.5)
    assert (original.batch_size, original.num_steps, original.schedule) == (512, 62_400, "cosine")
    assert (original.dropout_p, original.resid_dropout_p, original.pooling) == (0.1, 0.2, "mean")


def test_a_level_counts_each_split():
    level = PathfinderLevel(num_train=3, num_validation=2, num_test=1)
    assert [level.count(name) for name in SPLITS] == [3, 2, 1]
