"""Every task that reads files, with files that are damaged in every way: one sentence, and nothing is written."""

from __future__ import annotations

import gzip
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attn_zoo.errors import ConfigError
from attn_zoo.registry import tasks
from attn_zoo.tasks import SplitName
from attn_zoo.tasks.expressions import Grammar
from attn_zoo.tasks.listops import ListOpsLevel, generate_splits, write_tsv
from attn_zoo.tasks.promises import checked_split
from attn_zoo.tasks.sources.tensor_cache import cache_dir
from tests.tasks.tables import NAMES, png, write_pictures, write_reviews
from tests.tasks.test_image import CLASSES
from tests.tasks.test_imdb_pairs import write_part
from tests.tasks.test_pathfinder_files import write_folder

SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
RANDOM = np.random.default_rng(0)


def write_listops(at: Path) -> None:
    grammar = Grammar(max_depth=4, max_args=4, min_len=3, max_len=40)
    splits = generate_splits(ListOpsLevel(grammar=grammar, num_train=60, num_validation=20, num_test=20))
    (at / "listops-1000").mkdir(parents=True)
    for name, file in zip(SPLITS, ("train", "val", "test"), strict=True):
        rows = [splits[name].example(row).tokens.tolist() for row in range(len(splits[name]))]
        write_tsv(at / "listops-1000" / f"basic_{file}.tsv", rows, splits[name].labels.tolist())


def write_text(at: Path) -> None:
    for part, count in (("train", 60), ("test", 30)):
        texts = [f"{part} review {row} of a {'good' if row % 2 else 'bad'} film" for row in range(count)]
        write_reviews(at / "imdb" / "plain_text" / NAMES[part], texts, [row % 2 for row in range(count)])


def write_images(at: Path) -> None:
    for part, count in (("train", 20), ("test", 10)):
        pictures = [png(RANDOM.integers(0, 256, (32, 32, 3), np.uint8)) for _ in range(count)]
        write_pictures(
            at / "cifar10" / "plain_text" / NAMES[part], pictures, [row % 10 for row in range(count)], CLASSES
        )


def write_bytes(at: Path) -> None:
    (at / "tinyshakespeare").mkdir(parents=True)
    (at / "tinyshakespeare" / "input.txt.gz").write_bytes(gzip.compress(b"To be or not to be, " * 2_000, mtime=0))


def write_papers(at: Path) -> None:
    (at / "tsv_data").mkdir(parents=True)
    for part, file in enumerate(("train", "eval", "test")):
        rows = [f"{row % 2}.0\t{row}\t{row + 1}\tpaper {part} {row}\tother {row}\n" for row in range(40)]
        (at / "tsv_data" / f"new_aan_pairs.{file}.tsv").write_text("".join(rows))


def write_films(at: Path) -> None:
    write_part(at / "imdb", "train", range(60))
    write_part(at / "imdb", "test", range(59, 80))


def write_contours(at: Path) -> None:
    pictures, labels = RANDOM.integers(0, 256, (20, 32, 32), np.uint8), np.arange(20) % 2
    write_folder(at / "pathfinder32" / "curv_contour_length_14", pictures, labels, per_batch=20)
    (at / "pathfinder32-hard").mkdir(parents=True)
    np.savez_compressed(at / "pathfinder32-hard" / "pathfinder32_hard_12000.npz", x=pictures, y=labels)


READERS: dict[tuple[str, str], Callable[[Path], None]] = {
    ("listops", "lra_release"): write_listops,
    ("text", "short"): write_text,
    ("image", "short"): write_images,
    ("byte_lm", "short"): write_bytes,
    ("retrieval", "short"): write_papers,
    ("imdb_pairs", "short"): write_films,
    ("pathfinder", "lra_32"): write_contours,
    ("pathfinder", "original_12000"): write_contours,
}

DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "empty": lambda *_: b"",
    "cut": lambda data, rng: data[: rng.randrange(1, len(data))],
    "beheaded": lambda data, rng: data[rng.randrange(1, len(data)) :],
    "zeros": lambda data, _: bytes(len(data)),
    "noise": lambda data, rng: rng.randbytes(len(data)),
    "noise inside": lambda data, rng: data[: len(data) // 2] + rng.randbytes(30) + data[len(data) // 2 + 30 :],
    "twice": lambda data, _: data + data,
    "another encoding": lambda data, _: data.decode("latin-1").encode("utf-16"),
    "page": lambda *_: b"<html>404 not found</html>\n",
}


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "data"


def read_all(task: str, level: str, folder: Path) -> None:
    made = tasks[task](level, data_dir=folder)
    tasks[task].digest(level, data_dir=folder)
    for name in SPLITS:
        assert len(made.split(name)) > 0
        checked_split(made, name)


def refusal(task: str, level: str, folder: Path) -> str | None:
    try:
        read_all(task, level, folder)
    except ConfigError as error:
        return str(error)
    return None


def files_of(task: str, level: str, folder: Path) -> list[Path]:
    """Return the files that the level reads; of pictures one."""
    source = tasks[task].source(level)
    assert source is not None
    files = source.locate(folder)
    pictures = sorted(files["metadata"].parent.parent.rglob("*.png"))[:1] if "metadata" in files else []
    return [*files.values(), *pictures]


@pytest.mark.parametrize(("task", "level"), READERS)
def test_a_damaged_file_is_named_in_one_sentence_and_nothing_is_written(data, task, level):
    READERS[task, level](data)
    read_all(task, level, data)
    for number, path in enumerate(files_of(task, level, data)):
        whole, num_refused = path.read_bytes(), 0
        for damage in DAMAGES.values():
            path.write_bytes(damage(whole, random.Random(number)))
            shutil.rmtree(cache_dir(), ignore_errors=True)
            if (sentence := refusal(task, level, data)) is not None:  # half of a text is a text
                num_refused += 1
                assert "\n" not in sentence
                assert not [file for file in cache_dir().rglob("*") if file.is_file()]
        path.write_bytes(whole)
        assert num_refused >= len(DAMAGES) // 2
    path.unlink()
    path.mkdir()
    shutil.rmtree(cache_dir(), ignore_errors=True)
    with pytest.raises(ConfigError):
        read_all(task, level, data)


@pytest.mark.parametrize(
    ("task", "level"), [key for key in READERS if key[0] in {"listops", "text", "image", "retrieval"}]
)
def test_one_file_in_the_place_of_another_is_noticed(data, task, level):
    READERS[task, level](data)
    first, *_, last = files_of(task, level, data)
    shutil.copy(first, last)
    with pytest.raises(ConfigError, match="the same bytes as"):
        read_all(task, level, data)
