"""Text: splits, levels, what a file must hold, on small files of the published layout."""

from __future__ import annotations

import random
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_zoo.errors import ConfigError, UnknownNameError, UnsupportedError
from attn_zoo.registry import tasks
from attn_zoo.tasks import SplitName
from attn_zoo.tasks.byte_text import text_of
from attn_zoo.tasks.generated.draws import shuffled
from attn_zoo.tasks.promises import checked_split
from attn_zoo.tasks.text import REVIEWS, Text, per_class
from attn_zoo.training.protocol import resolve_protocol

from .tables import NAMES, write_reviews

GOOD, BAD = "a lovely, moving film about bees", "a dull and awful mess of a picture"
PINNED, PINNED_LABELS = ["24", "14", "27", "6", "14", "11", "37", "19"], [0, 1, 1, 0, 0, 1, 1, 0]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


@pytest.fixture(autouse=True)
def _private_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))


def reviews_of(part: str, count: int) -> tuple[list[str], list[int]]:
    """Return reviews sorted by class, each with a text of its own."""
    texts = [f"{BAD} {part} {index}" for index in range(count)] + [f"{GOOD} {part} {index}" for index in range(count)]
    return texts, [0] * count + [1] * count


@pytest.fixture
def folder(tmp_path):
    for part, count in (("train", 40), ("test", 30)):
        write_reviews(tmp_path / "data" / "imdb" / "plain_text" / NAMES[part], *reviews_of(part, count))
    return tmp_path / "data"


def texts_of(split) -> list[str]:
    return [text_of(row) for row in split.tokens]


def test_it_is_registered_and_keeps_the_contract(folder):
    task = tasks["text"]("1000", data_dir=folder)
    assert isinstance(task, Text)
    for name in SPLITS:
        checked_split(task, name)
    assert [len(task.split(name)) for name in SPLITS] == [72, 8, 60]


def test_a_tenth_of_each_class_is_held_out_and_no_row_is_in_two_splits(folder):
    task = Text("1000", data_dir=folder)
    assert Counter(task.split("validation").labels.tolist()) == {0: 4, 1: 4}
    assert Counter(task.split("train").labels.tolist()) == {0: 36, 1: 36}
    train, validation, test = (set(texts_of(task.split(name))) for name in SPLITS)
    assert (len(train), len(validation), len(test)) == (72, 8, 60)
    assert train | validation == set(reviews_of("train", 40)[0])
    assert not train & validation


def test_labels_stay_with_their_texts(folder):
    task = Text("1000", data_dir=folder)
    for name in SPLITS:
        split = task.split(name)
        assert [GOOD in text for text in texts_of(split)] == split.labels.bool().tolist()


def test_rows_are_shuffled(folder):
    """The file is sorted by class."""
    labels = Text("1000", data_dir=folder).split("train").labels
    assert (labels.diff(dim=0) != 0).sum() > 15


def test_splits_do_not_depend_on_the_order_in_the_file(folder):
    before = {name: Text("1000", data_dir=folder).split(name) for name in SPLITS}
    for part, count in (("train", 40), ("test", 30)):
        rows = list(zip(*reviews_of(part, count), strict=True))
        random.Random(0).shuffle(rows)
        texts, labels = zip(*rows, strict=True)
        write_reviews(folder / "imdb" / "plain_text" / NAMES[part], list(texts), list(labels))
    task = Text("1000", data_dir=folder)
    for name in SPLITS:
        assert torch.equal(task.split(name).tokens, before[name].tokens)
        assert torch.equal(task.split(name).labels, before[name].labels)


def test_splits_are_pinned(folder):
    """These must never change without a new version of the task: stored results rest on them."""
    split = Text("1000", data_dir=folder).split("validation")
    assert [text.split("train ")[1] for text in texts_of(split)] == PINNED
    assert split.labels.tolist() == PINNED_LABELS


def test_copies_of_a_text_are_never_held_out(folder):
    texts, labels = reviews_of("train", 40)
    texts[3:9] = [texts[3]] * 6
    write_reviews(folder / "imdb" / "plain_text" / NAMES["train"], texts, labels)
    task = Text("1000", data_dir=folder)
    assert texts[3] not in texts_of(task.split("validation"))
    assert texts_of(task.split("train")).count(texts[3]) == 6
    assert len(task.split("validation")) == 8


def test_short_is_cut_and_smaller(folder):
    task = Text("short", data_dir=folder)
    assert task.spec.max_seq_len == 256
    long = ["x" * 300 + f"{index}" for index in range(20)]
    write_reviews(folder / "imdb" / "plain_text" / NAMES["train"], long, [0] * 10 + [1] * 10)
    task = Text("short", data_dir=folder)
    assert task.split("train").tokens.shape == (18, 256)
    assert set(task.split("train").lengths.tolist()) == {256}


def test_as_published_selects_on_test_and_says_so(folder):
    task = Text("as_published_1000", data_dir=folder)
    assert len(task.split("train")) == 80
    assert torch.equal(task.split("validation").tokens, task.split("test").tokens)
    assert "leakage" in (sys.modules[Text.__module__].__doc__ or "")
    assert [level for level in Text.levels if Text.levels[level].is_validation_test] == [
        "as_published_1000",
        "as_published_4096",
    ]


def test_empty_and_wide_texts_are_read(folder):
    texts, labels = reviews_of("test", 2)
    texts[0], texts[3] = "", "é" * 600
    write_reviews(folder / "imdb" / "plain_text" / NAMES["test"], texts, labels)
    split = Text("1000", data_dir=folder).split("test")
    assert int(split.lengths.min()) == 1
    assert int(split.lengths.max()) == 1_000  # bytes, not characters


def test_floors_find_the_words_that_tell(folder):
    task = Text("1000", data_dir=folder)
    floors = task.floors()
    assert floors["majority"] == 0.5
    assert floors["byte_histogram"] == 1.0
    assert task.references() == {"bag_of_words": 1.0}


def test_a_review_is_shown_with_its_verdict(folder):
    task = Text("1000", data_dir=folder)
    shown = {task.show(task.split("train").example(index)) for index in range(72)}
    assert f"{GOOD} train 1\n= positive" in shown or f"{GOOD} train 2\n= positive" in shown
    assert task.symbols(torch.tensor([98, 33])) == ["a", "\u2423"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [0, -1]}, "expected labels from 0 to 1; got -1 in 1 rows, first in row 1; -1 marks rows without"),
        ({"text": "review"}, "expected a column 'text'; it has review, label"),
        ({"names": ("pos", "neg")}, "expected the classes neg, pos; got pos, neg"),
        ({"names": (), "labels": [0, 7]}, "expected labels from 0 to 1; got 7 in 1 rows, first in row 1"),
        ({"texts": [], "labels": []}, "no data|no rows"),
    ],
)
def test_a_table_of_another_kind_is_refused(folder, change, message):
    given = {"texts": ["one", "two"], "labels": [0, 1], **change}
    write_reviews(folder / "imdb" / "plain_text" / NAMES["test"], **given)
    with pytest.raises(ConfigError, match=message) as caught:
        Text("1000", data_dir=folder).split("train")
    assert NAMES["test"] in str(caught.value)


def test_missing_texts_and_texts_that_are_numbers_are_refused(folder):
    write_reviews(folder / "imdb" / "plain_text" / NAMES["test"], ["one", None], [0, 1])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="row 1 has no text"):
        Text("1000", data_dir=folder).split("train")
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"text": [1, 2], "label": [0, 1]}), folder / "imdb" / "plain_text" / NAMES["test"])
    with pytest.raises(ConfigError, match=r"expected Value\('string'\) in column 'text'; got Value\('int64'\)"):
        Text("1000", data_dir=folder).split("train")


@pytest.mark.parametrize("texts", [["one", "two"], ["the same"] * 40])
def test_too_few_reviews_to_hold_one_out_are_refused(folder, texts):
    write_reviews(folder / "imdb" / "plain_text" / NAMES["train"], texts, [index % 2 for index in range(len(texts))])
    with pytest.raises(ConfigError, match=f"{NAMES['train']}: expected 10 reviews of a class, and one with a text of"):
        Text("1000", data_dir=folder).split("train")
    assert len(Text("as_published_1000", data_dir=folder).split("train")) == len(texts)


def test_plain_integers_are_labels_too(folder):
    write_reviews(folder / "imdb" / "plain_text" / NAMES["test"], ["one", "two"], [0, 1], names=())
    assert sorted(Text("1000", data_dir=folder).split("test").labels.tolist()) == [0, 1]


def test_a_missing_or_broken_file_is_named(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"train-00000-of-00001\.parquet") as caught:
        Text("1000", data_dir=tmp_path / "nowhere").split("train")
    assert "attn-zoo data" in str(caught.value)
    path = folder / "imdb" / "plain_text" / NAMES["train"]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"train-00000-of-00001\.parquet.*cut short"):
        Text("1000", data_dir=folder).split("train")


def test_without_the_library_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnsupportedError, match=r"attn-zoo\[lra\]"):
        Text("1000", data_dir=folder).split("train")


def test_the_digest_follows_the_files(folder):
    before = Text.digest("1000", data_dir=folder)
    assert before == Text.digest("1000", data_dir=folder) != Text.digest("2048", data_dir=folder)
    write_reviews(folder / "imdb" / "plain_text" / NAMES["test"], *reviews_of("other", 30))
    assert Text.digest("1000", data_dir=folder) != before


def test_levels_and_settings_are_the_published_ones():
    assert {level: Text.levels[level].max_len for level in Text.levels if level.isdigit()} == {
        "1000": 1_000,
        "2048": 2_048,
        "4096": 4_096,
    }
    spec = Text("4096").spec
    assert (spec.vocab_size, spec.num_classes, spec.kind, spec.has_padding) == (257, 2, "classification", True)
    original = resolve_protocol("lra-original", task_settings=Text.settings["lra-original"])
    assert (original.num_layers, original.embed_dim, original.num_steps, original.warmup_steps) == (
        4,
        256,
        20_000,
        8_000,
    )
    assert resolve_protocol("lra-small", task_settings=Text.settings["lra-small"]).eval_every == 500
    assert Text.source("1000") is REVIEWS
    with pytest.raises(UnknownNameError, match="did you mean '1000'"):
        Text.source("100")


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(0, 5))
def test_rows_are_the_first_of_their_class(labels, count):
    truth = np.array(labels)
    rows = shuffled(len(labels), 7)
    kept = per_class(rows, truth, {0: count, 2: count})
    assert [row for row in rows if row in set(kept.tolist())] == kept.tolist()
    for label in (0, 2):
        assert [r for r in kept if truth[r] == label] == [r for r in rows if truth[r] == label][:count]
    assert not (truth[kept] == 1).any()
