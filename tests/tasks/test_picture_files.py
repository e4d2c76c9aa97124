"""Exported splits read back as what they were; nothing is overwritten and nothing half-written stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from attn_zoo.errors import FolderError
from attn_zoo.registry import tasks
from attn_zoo.tasks import Split
from attn_zoo.tasks.abstract_task import export_jsonl
from attn_zoo.tasks.picture_files import export_images


def ragged(**changes) -> Split:
    parts = {
        "tokens": torch.tensor([[1, 2, 3], [4, 0, 0]], dtype=torch.uint8),
        "lengths": torch.tensor([3, 1]),
        "labels": torch.tensor([7, 8]),
    }
    return Split(**{**parts, **changes})


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_each_example_without_padding(tmp_path):
    out = tmp_path / "new" / "split.jsonl"
    assert export_jsonl(ragged(), out) == [out]
    assert rows(out) == [
        {"tokens": [1, 2, 3], "length": 3, "label": 7},
        {"tokens": [4], "length": 1, "label": 8},
    ]
    assert [path.name for path in out.parent.iterdir()] == ["split.jsonl"]


def test_labels_of_positions_follow_the_input(tmp_path):
    labels = torch.tensor([[-100, 5, 6], [9, -100, -100]])
    export_jsonl(ragged(labels=labels), tmp_path / "x")
    assert [row["label"] for row in rows(tmp_path / "x")] == [[-100, 5, 6], [9]]


def test_labels_of_positions_follow_the_target_where_there_is_one(tmp_path):
    split = ragged(
        other_tokens=torch.tensor([[1, 2], [3, 0]]),
        other_lengths=torch.tensor([2, 1]),
        labels=torch.tensor([[2, 9], [9, -100]]),
    )
    export_jsonl(split, tmp_path / "x")
    assert [(row["other_tokens"], row["label"]) for row in rows(tmp_path / "x")] == [([1, 2], [2, 9]), ([3], [9])]


def test_pairs_keep_one_label(tmp_path):
    split = ragged(other_tokens=torch.tensor([[1, 2], [3, 0]]), other_lengths=torch.tensor([2, 1]))
    export_jsonl(split, tmp_path / "x")
    assert [(row["other_tokens"], row["label"]) for row in rows(tmp_path / "x")] == [([1, 2], 7), ([3], 8)]


def test_groups_carry_their_names(tmp_path):
    split = ragged(groups=torch.tensor([[64.0, 0.5], [128.0, 1.0]]))
    export_jsonl(split, tmp_path / "x", group_axes=("seq_len", "depth"))
    assert [row["groups"] for row in rows(tmp_path / "x")] == [
        {"seq_len": 64.0, "depth": 0.5},
        {"seq_len": 128.0, "depth": 1.0},
    ]


@pytest.mark.parametrize("name", ["listops", "mqar"])
def test_a_task_exports_a_line_for_each_example(name, tmp_path):
    task = tasks[name](next(iter(tasks[name].levels)))
    (path,) = task.export("validation", tmp_path / "out")
    assert len(path.read_bytes().splitlines()) - len(task.split("validation")) in {0, 1}, "a header at most"


def pictures(count: int = 3) -> Split:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, 12), np.uint8))
    return Split(tokens=pixels, lengths=torch.full((count,), 12), labels=torch.arange(count))


def test_pictures_read_back_as_the_same_pixels(tmp_path):
    split = pictures()
    index, folder = export_images(split, tmp_path / "out", (3, 4))
    lines = [line.split("\t") for line in index.read_text().splitlines()]
    assert lines[0] == ["file", "label"]
    assert [int(label) for _, label in lines[1:]] == split.labels.tolist()
    for row, (name, _) in enumerate(lines[1:]):
        picture = Image.open(tmp_path / "out" / name)
        assert (picture.mode, picture.size) == ("L", (4, 3))
        assert np.array_equal(np.asarray(picture).ravel(), split.tokens[row].numpy())
    assert len(list(folder.rglob("*.png"))) == 3


def test_what_is_no_picture_is_refused(tmp_path):
    with pytest.raises(ValueError, match="3 x 5 = 15 tokens"):
        export_images(pictures(), tmp_path / "out", (3, 5))
    short = Split(tokens=pictures().tokens, lengths=torch.tensor([12, 11, 12]), labels=torch.arange(3))
    with pytest.raises(ValueError, match="12 tokens in each row"):
        export_images(short, tmp_path / "out", (3, 4))
    with pytest.raises(ValueError, match="grey levels"):
        export_images(
            Split(tokens=torch.full((1, 12), 256), lengths=torch.tensor([12]), labels=torch.tensor([0])),
            tmp_path / "out",
            (3, 4),
        )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("write", [export_jsonl, lambda split, out: export_images(split, out, (1, 3))])
def test_what_exists_is_not_overwritten(write, tmp_path):
    (tmp_path / "out").write_text("precious")
    split = Split(tokens=torch.tensor([[1, 2, 3]]), lengths=torch.tensor([3]), labels=torch.tensor([0]))
    with pytest.raises(FolderError, match="exists already and is not overwritten"):
        write(split, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious"
