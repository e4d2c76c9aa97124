"""Local Parquet through `datasets`: what comes back, what damage says, and that no network is touched."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.tasks.sources.parquet import class_labels, read_parquet, require_columns, texts_of
from attn_zoo.tasks.sources.tensor_cache import cache_dir

datasets = pytest.importorskip("datasets")
arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))


def write(path: Path, texts: list[str], labels: list[int]) -> Path:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features).to_parquet(path)
    return path


def test_rows_keep_their_order_and_features(tmp_path):
    paths = {
        "train": write(tmp_path / "a.parquet", ["one", "two", "thrée"], [1, 0, 1]),
        "test": write(tmp_path / "b.parquet", ["four"], [0]),
    }
    tables = read_parquet("toy", paths)
    assert list(tables) == ["train", "test"]
    assert tables["train"]["text"][:] == ["one", "two", "thrée"]
    assert tables["train"]["label"][:] == [1, 0, 1]
    assert tables["train"].features["label"].names == ["neg", "pos"]
    assert len(tables["test"]) == 1


def test_texts_with_long_offsets_are_texts(tmp_path):
    """As Polars and pandas 3 write them."""
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": arrow.array(["one", "two"], arrow.large_string()), "label": [0, 1]}), path)
    table = read_parquet("toy", {"train": path})["train"]
    require_columns("toy", path, table, {"text": "Value('string')"})
    assert texts_of("toy", path, table, "text") == ["one", "two"]
    with pytest.raises(ConfigError, match=r"expected Value\('string'\) in column 'label'"):
        require_columns("toy", path, table, {"label": "Value('string')"})


def test_pictures_are_restored(tmp_path):
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    table = datasets.Dataset.from_dict({"img": [Image.fromarray(pixels)], "label": [3]}, features=features)
    table.to_parquet(tmp_path / "a.parquet")
    row = read_parquet("toy", {"test": tmp_path / "a.parquet"})["test"][0]
    assert np.array_equal(np.asarray(row["img"]), pixels)


def test_names_that_look_like_patterns_are_taken_at_their_word(tmp_path):
    path = write(tmp_path / "data [1] *" / "a?.parquet", ["right"], [0])
    write(tmp_path / "data [1] *" / "ab.parquet", ["wrong"], [0])
    assert read_parquet("toy", {"x": path})["x"]["text"][:] == ["right"]


def test_a_changed_file_is_read_anew_even_with_its_old_time(tmp_path):
    path = write(tmp_path / "a.parquet", ["old"], [0])
    times = path.stat()
    assert read_parquet("toy", {"x": path})["x"]["text"][:] == ["old"]
    write(path, ["new"], [0])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert read_parquet("toy", {"x": path})["x"]["text"][:] == ["new"]


def test_without_a_cache_tables_are_kept_in_memory(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", ["one"], [0])
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "file" / "below"))
    assert read_parquet("toy", {"x": path})["x"]["text"][:] == ["one"]
    assert not cache_dir().exists()


def damaged(data: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "text": b"text,label\nhello,1\n",
        "page": b"<html>not found</html>",
        "cut": data[: len(data) // 2],
        "zeros inside": data[:4] + bytes(len(data) - 8) + data[-4:],
        "middle lost": data[:8] + data[-len(data) // 2 :],
    }


@pytest.mark.parametrize("kind", damaged(b"12345678" * 10))
def test_damaged_files_are_named(kind, tmp_path):
    path = write(tmp_path / "a.parquet", [f"text {number}" for number in range(500)], [0] * 500)
    path.write_bytes(damaged(path.read_bytes())[kind])
    with pytest.raises(ConfigError) as caught:
        read_parquet("IMDB reviews", {"train": path})
    assert str(caught.value).startswith(f"IMDB reviews: {path}: ")
    assert "\n" not in str(caught.value)


def test_odd_features_are_named(tmp_path):
    """What `datasets` once wrote into the file decides how it reads it; anybody may have written something else."""
    for number, features in enumerate(({"text": {"dtype": "x"}}, {"text": 5}, [], {"text": {"_type": "Nonsense"}})):
        path = write(tmp_path / f"{number}.parquet", ["one"], [0])
        table = parquet.read_table(path)
        metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
        parquet.write_table(table.replace_schema_metadata(metadata), path)
        with pytest.raises(ConfigError, match=f"{number}.parquet: "):
            read_parquet("toy", {"train": path})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[0], [1]], "expected integers in column 'label'; got List"),
        ([{"int": 0}, {"int": 1}], "expected integers in column 'label'; got {"),
        ([0.0, 1.0], "expected integers in column 'label'; got Value"),
        ([None, 1], "expected labels from 0 to 1; got None in 1 rows, first in row 0"),
        ([2**63 - 1, 1], f"expected labels from 0 to 1; got {2**63 - 1} in 1 rows"),
    ],
)
def test_labels_of_another_type_are_named(tmp_path, labels, message):
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"label": labels}), path)
    with pytest.raises(ConfigError, match=message):
        class_labels("toy", path, read_parquet("toy", {"x": path})["x"], ("neg", "pos"))


def test_classes_that_are_numbers_are_named(tmp_path):
    path = tmp_path / "a.parquet"
    features = {"label": {"_type": "ClassLabel", "names": [0, 1]}}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    parquet.write_table(arrow.table({"label": [0, 1]}).replace_schema_metadata(metadata), path)
    with pytest.raises(ConfigError, match="expected the classes neg, pos; got 0, 1"):
        class_labels("toy", path, read_parquet("toy", {"x": path})["x"], ("neg", "pos"))


def test_a_text_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    words = arrow.array([b"good", b"\xff\xfe"])
    texts = arrow.Array.from_buffers(arrow.string(), 2, words.buffers())
    parquet.write_table(arrow.table({"text": texts}), path)
    table = read_parquet("toy", {"x": path})["x"]
    with pytest.raises(ConfigError, match=r"a\.parquet: row 1: 'utf-8' codec"):
        texts_of("toy", path, table, "text")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read: No such file"):
        read_parquet("toy", {"train": tmp_path / "a.parquet"})


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *arguments, **named):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *arguments, **named)

    path = write(tmp_path / "a.parquet", ["one"], [0])
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnsupportedError, match=r"pip install 'attn-zoo\[lra\]'"):
        read_parquet("toy", {"train": path})


PROGRAM = """
import socket, sys
def refuse(*arguments, **named):
    print("network!")
    raise OSError("no network in this test")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
import datasets  # before us, so that an environment variable comes too late
from pathlib import Path
from attn_zoo.tasks.sources.parquet import read_parquet
print(len(read_parquet("toy", {"train": Path(sys.argv[1])})["train"]))
"""


def test_no_network_is_touched(tmp_path):
    path = write(tmp_path / "a.parquet", ["one"], [0])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
