"""Image: grey levels by the published formula, order of pixels and rows, nothing masked, on small files."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_zoo.errors import ConfigError
from attn_zoo.registry import tasks
from attn_zoo.tasks import SplitName
from attn_zoo.tasks.image import PICTURES, Image, block_picture, grey_levels, halved
from attn_zoo.tasks.promises import checked_split
from attn_zoo.tasks.sources.tensor_cache import cache_dir
from attn_zoo.training.protocol import resolve_protocol
from tests.tasks.sources.local_server import serve
from tests.tasks.tables import NAMES, png, write_pictures, write_reviews

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


@pytest.fixture(autouse=True)
def _private_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))


def pictures(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3)).astype(np.uint8)


TRAIN, TEST = pictures(30, 0), pictures(12, 1)


@pytest.fixture
def folder(tmp_path):
    at = tmp_path / "data" / "cifar10" / "plain_text"
    for part, colours in (("train", TRAIN), ("test", TEST)):
        labels = [index % 10 for index in range(len(colours))]
        write_pictures(at / NAMES[part], [png(one) for one in colours], labels, CLASSES)
    return tmp_path / "data"


def claimed_size(columns: int, rows: int) -> bytes:
    """Return a picture whose header claims a size that its few bytes do not have."""
    content = bytearray(png(np.zeros((1, 1, 3), np.uint8)))
    content[16:24] = struct.pack(">II", columns, rows)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


def test_it_is_registered_and_keeps_the_contract(folder):
    for level in Image.levels:
        task = tasks["image"](level, data_dir=folder)
        for name in SPLITS:
            checked_split(task, name)
        assert [len(task.split(name)) for name in SPLITS] == [27, 3, 12]


@pytest.mark.parametrize(
    ("colour", "level"),
    [((0, 0, 0), 0), ((255, 255, 255), 255), ((255, 0, 0), 76), ((0, 255, 0), 149), ((0, 0, 255), 29)],
)
def test_grey_is_the_published_formula(colour, level):
    """By hand: 0.2989 * 255.5 = 76.4, 0.5870 * 255.5 = 149.98, 0.1140 * 255.5 = 29.1, all cut, not rounded."""
    assert grey_levels(np.array([[colour]], np.uint8)).tolist() == [[level]]


@given(st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 255)))
def test_grey_is_within_rounding_of_exact_arithmetic(colour):
    from fractions import Fraction

    weights = (Fraction(2989, 10_000), Fraction(5870, 10_000), Fraction(1140, 10_000))
    exact = sum(w * value for w, value in zip(weights, colour, strict=True)) / 255 * Fraction(511, 2)
    got = int(grey_levels(np.array([[colour]], np.uint8))[0, 0])
    assert got == exact.__floor__() or abs(exact - round(exact)) < Fraction(1, 10_000)


def test_it_is_not_what_pillow_calls_grey():
    pillow = pytest.importorskip("PIL.Image")
    ours = grey_levels(TRAIN).astype(int)
    theirs = np.stack([np.asarray(pillow.fromarray(one).convert("L")) for one in TRAIN]).astype(int)
    assert abs(ours - theirs).max() == 1
    assert 0.05 < (ours != theirs).mean() < 0.9


def test_pixels_are_row_by_row_and_the_last_tenth_is_validation(folder):
    task = Image("lra", data_dir=folder)
    whole = grey_levels(TRAIN).reshape(30, -1)
    assert task.split("train").tokens.tolist() == whole[:27].tolist()
    assert task.split("validation").tokens.tolist() == whole[27:].tolist()
    assert task.split("validation").labels.tolist() == [7, 8, 9]
    assert task.split("test").tokens[5, 33].item() == grey_levels(TEST)[5, 1, 1]  # row 1, column 1


def test_black_is_not_padding(tmp_path):
    """The trap: masks made from "token > 0" hide black pixels."""
    at = tmp_path / "cifar10" / "plain_text"
    black = png(np.zeros((32, 32, 3), np.uint8))
    for count, part in enumerate(NAMES, start=10):
        write_pictures(at / NAMES[part], [black] * count, [index % 10 for index in range(count)], CLASSES)
    task = Image("lra", data_dir=tmp_path)
    assert not task.spec.has_padding
    for name in SPLITS:
        split = task.split(name)
        assert not split.tokens.any()
        assert set(split.lengths.tolist()) == {1_024}


def test_short_is_the_mean_of_four_pixels(folder):
    task = Image("short", data_dir=folder)
    grey = grey_levels(TRAIN)[0].astype(int)
    first = grey[0, 0] + grey[0, 1] + grey[1, 0] + grey[1, 1]
    assert task.split("train").tokens.shape == (27, 256)
    assert task.split("train").tokens[0, 0].item() == (first + 2) // 4
    assert task.split("train").tokens[0, 17].item() == (grey[2:4, 2:4].sum() + 2) // 4
    assert halved(np.array([[0, 1], [1, 1]], np.uint8)).tolist() == [[1]]
    assert task.image_shape == (16, 16)
    assert Image("lra").image_shape == (32, 32)


def test_short_takes_the_first_of_each_split(folder, monkeypatch):
    from types import MappingProxyType

    from attn_zoo.tasks.image import ImageLevel

    small = ImageLevel(max_train=4, max_validation=2, max_test=3)
    monkeypatch.setattr(Image, "levels", MappingProxyType({"small": small}))
    task = Image("small", data_dir=folder)
    assert [task.split(name).labels.tolist() for name in SPLITS] == [[0, 1, 2, 3], [7, 8], [0, 1, 2]]


def test_decoded_pictures_come_from_the_cache_the_next_time(folder, monkeypatch):
    first = Image("lra", data_dir=folder)
    tokens = first.split("train").tokens
    assert list(cache_dir().glob("image-lra-*.safetensors"))
    monkeypatch.setattr("attn_zoo.tasks.image.read_parquet", lambda *_: pytest.fail("read again"))
    again = Image("lra", data_dir=folder)
    assert torch.equal(again.split("train").tokens, tokens)
    assert again.split("validation").labels.tolist() == [7, 8, 9]


def test_export_writes_the_very_pixels(folder, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    Image("lra", data_dir=folder).export("test", tmp_path / "out")
    lines = (tmp_path / "out" / "index.tsv").read_text().splitlines()
    file, label = lines[4].split("\t")
    assert (len(lines), label) == (13, "3")
    assert (np.asarray(pillow.open(tmp_path / "out" / file)) == grey_levels(TEST)[3]).all()


def test_floors_find_what_is_linear_in_pixels(tmp_path):
    """Class c is as bright as its number."""
    at = tmp_path / "cifar10" / "plain_text"
    for part, count in (("train", 100), ("test", 40)):
        labels = [index % 10 for index in range(count)]
        bright = [png(np.full((32, 32, 3), 20 * label + index // 10, np.uint8)) for index, label in enumerate(labels)]
        write_pictures(at / NAMES[part], bright, labels, CLASSES)
    floors = Image("short", data_dir=tmp_path).floors()
    assert floors["majority"] == 0.1
    assert floors["linear_on_pixels"] > 0.9


def test_a_picture_is_shown_as_blocks(folder):
    shown = Image("lra", data_dir=folder).show(Image("lra", data_dir=folder).split("test").example(3))
    *rows, verdict = shown.split("\n")
    assert verdict == "= cat"
    assert (len(rows), {len(row) for row in rows}) == (32, {64})
    assert block_picture(np.array([[0, 60, 120, 170, 255]])) == "  ░░▒▒▓▓██"


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (png(np.zeros((32, 32), np.uint8)), "row 1: expected 32 x 32 pixels, 8-bit colours; got 32 x 32, mode L"),
        (png(np.zeros((16, 32, 3), np.uint8)), "row 1: expected 32 x 32 .*; got 32 x 16, mode RGB"),
        (png(np.zeros((32, 32, 4), np.uint8)), "row 1: expected 32 x 32 .*; got 32 x 32, mode RGBA"),
        (png(TRAIN[0])[:200], "row 1: cannot be read as a picture"),
        (b"no picture", "row 1: cannot be read as a picture: its format is unknown"),
        (b"", "row 1: cannot be read as a picture: there is none"),
        (claimed_size(20_000, 20_000), "row 1: cannot be read as a picture|got 20000 x 20000"),
        (claimed_size(10_000, 10_000), "row 1: expected 32 x 32 .*; got 10000 x 10000, mode RGB"),
    ],
)
def test_other_pictures_are_refused(folder, picture, message):
    path = folder / "cifar10" / "plain_text" / NAMES["test"]
    write_pictures(path, [png(TEST[0]), picture], [0, 1], CLASSES)
    with pytest.raises(ConfigError, match=message) as caught:
        Image("lra", data_dir=folder).split("test")
    assert NAMES["test"] in str(caught.value)


def test_a_picture_that_is_only_an_address_is_not_fetched(folder):
    path = folder / "cifar10" / "plain_text" / NAMES["test"]
    with serve({"/cat.png": png(TEST[0])}) as site:
        write_pictures(path, [png(TEST[0]), None], [0, 1], CLASSES, paths=[None, site.address("/cat.png")])
        with pytest.raises(ConfigError, match="row 1: cannot be read as a picture: there is none"):
            Image("lra", data_dir=folder).split("test")
    assert site.requests == []


def test_a_picture_that_is_only_a_path_is_not_opened(folder, tmp_path):
    (tmp_path / "cat.png").write_bytes(png(TEST[0]))
    path = folder / "cifar10" / "plain_text" / NAMES["test"]
    write_pictures(path, [png(TEST[0]), None], [0, 1], CLASSES, paths=[None, str(tmp_path / "cat.png")])
    with pytest.raises(ConfigError, match="row 1: cannot be read as a picture: there is none"):
        Image("lra", data_dir=folder).split("test")


def test_what_pillow_gives_to_other_programs_is_not_decoded(folder):
    pillow = pytest.importorskip("PIL.Image")
    postscript = io.BytesIO()
    pillow.fromarray(TEST[0]).save(postscript, format="EPS")
    path = folder / "cifar10" / "plain_text" / NAMES["test"]
    write_pictures(path, [png(TEST[0]), postscript.getvalue()], [0, 1], CLASSES)
    with pytest.raises(ConfigError, match="row 1: cannot be read as a picture: its format is unknown"):
        Image("lra", data_dir=folder).split("test")


@pytest.mark.parametrize(
    ("part", "count", "message"),
    [("train", 9, "expected at least 10 pictures; got 9"), ("train", 0, "no rows"), ("test", 0, "no rows")],
)
def test_too_few_pictures_are_refused(folder, part, count, message):
    write_pictures(folder / "cifar10" / "plain_text" / NAMES[part], [png(TEST[0])] * count, [0] * count, CLASSES)
    with pytest.raises(ConfigError, match=f"{NAMES[part]}: .*{message}"):
        Image("lra", data_dir=folder).split("test")


def test_other_tables_are_refused(folder):
    path = folder / "cifar10" / "plain_text" / NAMES["test"]
    write_pictures(path, [png(TEST[0])], [0], CLASSES[::-1])
    with pytest.raises(ConfigError, match="expected the classes airplane, automobile"):
        Image("lra", data_dir=folder).split("test")
    write_reviews(path, ["one"], [0])
    with pytest.raises(ConfigError, match="expected a column 'img'; it has text, label"):
        Image("lra", data_dir=folder).split("test")
    write_reviews(path, ["one"], [0], text="img", names=CLASSES)
    with pytest.raises(ConfigError, match=r"expected Image in column 'img'; got Value\('string'\)"):
        Image("lra", data_dir=folder).split("test")


def test_missing_pictures_name_the_hub(tmp_path):
    with pytest.raises(ConfigError, match="uoft-cs/cifar10"):
        Image("lra", data_dir=tmp_path).split("train")
    assert PICTURES.hub_files == {key: f"plain_text/{file}" for key, file in PICTURES.files.items()}


def test_settings_are_the_published_ones():
    original = resolve_protocol("lra-original", task_settings=Image.settings["lra-original"])
    assert (original.num_layers, original.num_heads, original.embed_dim, original.ffn_dim) == (1, 8, 128, 128)
    assert (original.head_dim, original.pretrain_mask_prob) == (8, 0.5)
    assert (original.schedule, original.base_lr, original.weight_decay, original.pooling) == (
        "cosine",
        5e-4,
        0.0,
        "cls",
    )
    small = resolve_protocol("lra-small", task_settings=Image.settings["lra-small"])
    assert (small.batch_size, small.num_steps, small.warmup_steps) == (256, 35_000, 175)
    assert Image("lra").spec.max_seq_len == 1_024
