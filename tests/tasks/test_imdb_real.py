"""The real reviews, where `ATTN_ZOO_DATA` names their folder: counts, lengths, floors, and no hint in the pairs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from attn_zoo.errors import ConfigError
from attn_zoo.tasks import Split, SplitName
from attn_zoo.tasks.byte_text import VOCAB_SIZE, text_of
from attn_zoo.tasks.floors.linear_model import byte_histogram, linear_floor
from attn_zoo.tasks.imdb_pairs import FILMS, ImdbPairs
from attn_zoo.tasks.promises import checked_split
from attn_zoo.tasks.text import REVIEWS, Text, read_reviews

FOLDER = Path(os.environ.get("ATTN_ZOO_DATA") or "no-folder")
pytest.importorskip("datasets")


def is_here(source) -> bool:
    try:
        source.locate(FOLDER)
    except ConfigError:
        return False
    return True


needs_reviews = pytest.mark.skipif(not is_here(REVIEWS), reason="ATTN_ZOO_DATA names no folder with the IMDB reviews")
needs_films = pytest.mark.skipif(not is_here(FILMS), reason="ATTN_ZOO_DATA names no folder with IMDB reviews and films")
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


@pytest.fixture(scope="module", autouse=True)
def _private_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTN_ZOO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def published() -> dict[SplitName, Split]:
    task = Text("as_published_4096", data_dir=FOLDER)
    return {name: task.split(name) for name in SPLITS}


def texts_of(split: Split) -> set[bytes]:
    return {row.tobytes() for row in split.tokens.numpy()}


@needs_reviews
def test_counts_and_lengths_are_those_of_the_published_reviews(published):
    train = published["train"]
    assert (len(train), len(published["validation"]), len(published["test"])) == (25_000, 25_000, 25_000)
    lengths = train.lengths.numpy()
    assert np.median(lengths) == 979
    assert (lengths <= 1_000).mean() == pytest.approx(0.515, abs=0.001)
    assert (lengths <= 2_048).mean() == pytest.approx(0.834, abs=0.001)
    assert lengths.min() == 52
    texts, labels = read_reviews("reviews", {"train": REVIEWS.locate(FOLDER)["train"]})["train"]
    whole = [text.encode() for text in texts]
    assert len({byte for text in whole for byte in text}) == 157
    assert (max(map(len, whole)), round(np.mean([len(text) for text in whole]))) == (13_704, 1_325)
    assert len(texts) - len(set(texts)) == 96
    assert labels.sum() == 12_500


@needs_reviews
def test_validation_is_a_stratified_tenth_and_disjoint():
    task = Text("2048", data_dir=FOLDER)
    train, validation = task.split("train"), task.split("validation")
    assert (len(train), len(validation), len(task.split("test"))) == (22_500, 2_500, 25_000)
    for split in (train, validation):
        assert float(split.labels.float().mean()) == 0.5
        changes = (split.labels[1:] != split.labels[:-1]).float().mean()
        assert 0.4 < float(changes) < 0.6  # shuffled
    assert not texts_of(train) & texts_of(validation)
    for name in SPLITS:
        checked_split(task, name)


@needs_reviews
@pytest.mark.parametrize(("num_bytes", "known"), [(1_000, 0.643), (4_000, 0.663)])
def test_a_byte_histogram_scores_what_others_measured(published, num_bytes, known):
    train, test = published["train"], published["test"]
    counts = [byte_histogram(split.tokens[:, :num_bytes].numpy(), VOCAB_SIZE) for split in (train, test)]
    score = linear_floor(counts[0], train.labels.numpy(), counts[1], test.labels.numpy())
    assert score == pytest.approx(known, abs=0.01)


@needs_films
def test_pairs_of_films_hold_no_hint_but_the_pairing():
    task = ImdbPairs("short", data_dir=FOLDER)
    assert len(task.split("train")) > 40_000
    for name in SPLITS:
        checked_split(task, name)
        assert float(task.split(name).labels.float().mean()) == 0.5
    floors = task.floors()
    error = 0.5 / np.sqrt(len(task.split("test")))
    assert abs(floors["length"] - 0.5) < 4 * error
    assert abs(floors["either_histogram"] - 0.5) < 4 * error
    assert task.references()["bag_of_words"] > 0.6


@needs_films
def test_pairs_of_films_share_what_they_should():
    """A look at what the labels say: films of splits are disjoint, so hardly a text is in two of them."""
    task = ImdbPairs("1000", data_dir=FOLDER)
    texts = {name: texts_of(task.split(name)) for name in SPLITS}
    assert not texts["train"] & texts["validation"]
    assert not (texts["train"] | texts["validation"]) & texts["test"]
    assert len(text_of(task.split("train").example(0).tokens)) > 50
