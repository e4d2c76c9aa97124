"""ListOps as a task: splits, levels, digests, floors, cache, published files."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from types import MappingProxyType

import numpy as np
import pytest
import torch

from attn_zoo.errors import ConfigError, UnknownNameError
from attn_zoo.registry import tasks
from attn_zoo.tasks import AbstractTask, SplitName
from attn_zoo.tasks import listops as listops_module
from attn_zoo.tasks.cache import cache_dir, cached_tensors
from attn_zoo.tasks.floors import lookup_floor, majority_floor
from attn_zoo.tasks.listops import ListOps, ListOpsLevel, generate_splits
from attn_zoo.tasks.listops_grammar import OPERATORS, Grammar
from attn_zoo.tasks.listops_text import write_tsv

TINY = ListOpsLevel(
    grammar=Grammar(max_depth=4, max_args=4, min_len=3, max_len=40), num_train=900, num_validation=60, num_test=80
)
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


@pytest.fixture
def with_level(monkeypatch, tmp_path):
    """Return a function that adds a level to ListOps; the cache is empty and private."""
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))

    def add(name: str, level: ListOpsLevel) -> None:
        monkeypatch.setattr(ListOps, "levels", MappingProxyType({**ListOps.levels, name: level}))

    return add


def strings(split) -> list[bytes]:
    return [split.example(index).tokens.numpy().tobytes() for index in range(len(split))]


def test_it_is_registered_and_keeps_the_contract():
    task_class = tasks["listops"]
    assert task_class is ListOps
    assert issubclass(task_class, AbstractTask)
    task = task_class("short")
    for name in SPLITS:
        task.check(name)
        assert len(task.split(name)) == task.config.count(name)
        assert task.split(name).tokens.dtype == torch.uint8


def test_lra_level_is_the_published_one():
    level = ListOps.levels["lra"]
    assert dataclasses.asdict(level.grammar) == {"max_depth": 10, "max_args": 10, "min_len": 500, "max_len": 2000}
    assert (level.num_train, level.num_validation, level.num_test) == (96_000, 2_000, 2_000)
    spec = ListOps("lra").spec
    assert (spec.max_seq_len, spec.num_classes, spec.kind, spec.metric) == (2_000, 10, "classification", "accuracy")


def test_unknown_level_names_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown level of listops 'shrt'; did you mean 'short'"):
        ListOps("shrt")
    with pytest.raises(UnknownNameError, match="level"):
        ListOps.digest("nothing")


def test_no_example_occurs_twice_or_in_two_splits():
    splits = generate_splits(TINY)
    every = [text for name in SPLITS for text in strings(splits[name])]
    assert len(set(every)) == len(every) == 900 + 60 + 80


def test_duplicates_really_occur_and_are_dropped():
    """Only 4 * 100 distinct trees exist, so the drawing has to drop many."""
    level = ListOpsLevel(
        grammar=Grammar(max_depth=2, max_args=2, min_len=3, max_len=5), num_train=300, num_validation=40, num_test=50
    )
    splits = generate_splits(level)
    every = {text for name in SPLITS for text in strings(splits[name])}
    assert len(every) == 390


def test_examples_do_not_depend_on_how_many_follow():
    short, long = generate_splits(TINY), generate_splits(dataclasses.replace(TINY, num_train=2_500))
    assert strings(short["train"]) == strings(long["train"])[:900]
    assert strings(short["test"]) == strings(long["test"])
    assert strings(short["validation"]) == strings(long["validation"])


def test_same_seed_same_data_in_another_process_and_another_seed_other_data():
    code = (
        "import hashlib; from attn_zoo.tasks.listops import ListOps; s = ListOps('short').split('train');"
        "print(hashlib.sha256(s.tokens[:500].numpy().tobytes() + s.labels[:500].numpy().tobytes()).hexdigest())"
    )
    here = ListOps("short").split("train")
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    content = here.tokens[:500].numpy().tobytes() + here.labels[:500].numpy().tobytes()
    assert hashlib.sha256(content).hexdigest() == there
    assert strings(generate_splits(dataclasses.replace(TINY, seed=1))["test"]) != strings(generate_splits(TINY)["test"])


def test_digest_follows_level_and_version(monkeypatch, with_level):
    digests = {ListOps.digest("short"), ListOps.digest("lra")}
    with_level("other", dataclasses.replace(ListOps.levels["short"], seed=1))
    digests.add(ListOps.digest("other"))
    before = ListOps.digest("short")
    monkeypatch.setattr(ListOps, "version", ListOps.version + 1)
    digests.add(ListOps.digest("short"))
    assert len(digests) == 4
    assert before in digests
    assert all(len(digest) == 16 for digest in digests)


def test_floors_are_what_simple_rules_score():
    task = ListOps("short")
    train, test = task.split("train"), task.split("test")
    answers = {}
    for root in OPERATORS.values():
        answers[root] = torch.bincount(train.labels[train.tokens[:, 0] == root].long()).argmax()
    right = [answers[int(row[0])] == label for row, label in zip(test.tokens, test.labels, strict=True)]
    floors = task.floors()
    assert floors["root_operator"] == pytest.approx(np.mean([bool(x) for x in right]))
    majority = torch.bincount(train.labels.long()).argmax()
    assert floors["majority"] == pytest.approx((test.labels == majority).float().mean().item())
    assert 0.1 < floors["majority"] < floors["root_operator"] < 0.5


def test_lookup_floor_falls_back_on_the_majority():
    features, labels = np.array([0, 0, 0, 1]), np.array([2, 2, 2, 1])
    assert lookup_floor(features, labels, np.array([1, 5]), np.array([1, 2])) == 1.0
    assert majority_floor(labels, np.array([2, 1, 1, 1])) == 0.25


def test_show_is_readable():
    task = ListOps("short")
    text = task.show(task.split("test").example(0))
    expression, _, value = text.partition(" = ")
    assert expression.startswith("[")
    assert expression.endswith("]")
    assert int(value) == int(task.split("test").labels[0])


def test_large_levels_are_cached_and_the_cache_is_only_a_cache(with_level, monkeypatch):
    monkeypatch.setattr(listops_module, "_CACHED_FROM", 0)
    with_level("tiny", TINY)
    first = ListOps("tiny").split("train")
    (path,) = cache_dir().iterdir()
    assert ListOps.digest("tiny") in path.name
    calls = []

    def counted(level):
        calls.append(level)
        return generate_splits(level)

    monkeypatch.setattr(listops_module, "generate_splits", counted)
    assert torch.equal(ListOps("tiny").split("train").tokens, first.tokens)
    assert not calls
    path.write_bytes(path.read_bytes()[:100])  # cut short
    assert torch.equal(ListOps("tiny").split("train").tokens, first.tokens)
    assert len(calls) == 1
    assert torch.equal(ListOps("tiny").split("train").tokens, first.tokens)
    assert len(calls) == 1


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(blocked / "below"))
    assert cached_tensors("x", lambda: {"a": torch.arange(3)})["a"].tolist() == [0, 1, 2]


def test_published_files_are_read_from_data_dir(tmp_path, with_level):
    drawn = generate_splits(TINY)
    folder = tmp_path / "data" / "listops-1000"
    folder.mkdir(parents=True)
    files = ListOps.levels["lra_release"].files
    assert files is not None
    for name, file in files.items():
        rows = [drawn[name].example(index).tokens.tolist() for index in range(len(drawn[name]))]
        write_tsv(folder / file, rows, drawn[name].labels.tolist())
    task = ListOps("lra_release", data_dir=tmp_path / "data")
    for name in SPLITS:
        task.check(name)
        assert strings(task.split(name)) == strings(drawn[name])
        assert torch.equal(task.split(name).labels, drawn[name].labels)
    before = ListOps.digest("lra_release", data_dir=folder)
    write_tsv(folder / "basic_test.tsv", [[13, 2, 2, 15]], [1])
    assert ListOps.digest("lra_release", data_dir=folder) != before


def test_rows_longer_than_the_maximum_are_cut_on_the_right():
    split = listops_module._padded([np.arange(1, 9, dtype=np.uint8)], np.array([3], np.uint8), 5)
    assert split.tokens.tolist() == [[1, 2, 3, 4, 5]]
    assert split.lengths.tolist() == [5]


def test_missing_published_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"data_dir: expected a folder that holds basic_train\.tsv"):
        ListOps("lra_release").split("train")
    with pytest.raises(ConfigError, match=r"does not hold basic_train\.tsv, basic_val\.tsv, basic_test\.tsv"):
        ListOps.digest("lra_release", data_dir=tmp_path)
