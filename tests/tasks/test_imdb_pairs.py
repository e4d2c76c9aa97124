"""Pairs of reviews as a task: disjoint films, balanced labels, and files that do not belong together are noticed."""

from __future__ import annotations

import gzip
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from attn_zoo.errors import ConfigError
from attn_zoo.registry import tasks
from attn_zoo.tasks import SplitName
from attn_zoo.tasks.byte_text import text_of
from attn_zoo.tasks.imdb_pairs import FILMS, ImdbPairs, read_films
from attn_zoo.tasks.promises import checked_split

from .tables import write_reviews

SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
REVIEWS_PER_FILM = 6


@pytest.fixture(autouse=True)
def _private_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))


def hero(film: int) -> str:
    """Return a name that all reviews of a film mention, and no others."""
    letters = "abcdefghij"
    return "X" + "".join(letters[int(digit)] for digit in f"{film:03d}")


def write_part(at: Path, part: str, films: range, *, is_mixed: bool = False) -> None:
    """Write reviews of some films, half of each film's in each class; `is_mixed` lists films in another order."""
    texts, labels = [], []
    urls: dict[int, list[str]] = {0: [], 1: []}
    for label in (0, 1):
        for index in range(REVIEWS_PER_FILM // 2):
            for film in films:
                verdict = ("a bad one", "a good one")[label]
                texts.append(
                    f"The film with {hero(film)} is {verdict}" + " indeed" * ((film + index) % 5) + f" {index}"
                )
                labels.append(label)
                urls[label].append(f"http://www.imdb.com/title/tt{film:07d}/usercomments")
    write_reviews(at / FILMS.files[part], texts, labels)
    for label, name in enumerate(("neg", "pos")):
        if is_mixed:
            random.Random(label).shuffle(urls[label])
        (at / FILMS.files[f"{part}_{name}"]).write_bytes(gzip.compress("\n".join(urls[label]).encode() + b"\n"))


@pytest.fixture
def folder(tmp_path):
    write_part(tmp_path / "data" / "imdb", "train", range(60))
    write_part(tmp_path / "data" / "imdb", "test", range(59, 80))  # one film in both
    return tmp_path / "data"


def pairs_of(split) -> list[tuple[str, str]]:
    return [(text_of(split.example(row).tokens), text_of(split.example(row).other_tokens)) for row in range(len(split))]


def hero_in(text: str) -> str:
    return text.split()[3]


def test_it_is_registered_and_keeps_the_contract(folder):
    for level in ImdbPairs.levels:
        task = tasks["imdb_pairs"](level, data_dir=folder)
        for name in SPLITS:
            checked_split(task, name)
    assert (task.spec.kind, task.spec.vocab_size, task.spec.num_classes) == ("pair", 257, 2)


def test_labels_are_true_and_balanced_and_sentiments_alike(folder):
    task = ImdbPairs("1000", data_dir=folder)
    for name in SPLITS:
        split = task.split(name)
        pairs = pairs_of(split)
        assert [hero_in(one) == hero_in(two) for one, two in pairs] == split.labels.bool().tolist()
        assert split.labels.float().mean() == 0.5
        assert all(("good" in one) == ("good" in two) for one, two in pairs)
        for side in (0, 1):
            texts = [
                Counter(pair[side] for pair, y in zip(pairs, split.labels, strict=True) if y == kind) for kind in (0, 1)
            ]
            assert texts[0] == texts[1]


def test_no_film_is_in_two_splits(folder):
    task = ImdbPairs("1000", data_dir=folder)
    films = {name: {hero_in(text) for pair in pairs_of(task.split(name)) for text in pair} for name in SPLITS}
    assert not films["train"] & films["validation"]
    assert not (films["train"] | films["validation"]) & films["test"]
    assert len(films["validation"]) == 5  # a tenth of 59
    assert hero(59) in films["test"]
    assert len(films["train"]) == 54


def test_a_text_is_never_paired_with_its_copy(folder):
    at = folder / "imdb"
    texts = [f"The film with {hero(film)} is fine" for film in range(60)] * 2
    texts += [f"The film with {hero(film)} was {word}" for word in ("fun", "joy", "fab") for film in range(60)]
    write_reviews(at / FILMS.files["train"], texts, [0] * 120 + [1] * 180)
    for name, count in (("neg", 2), ("pos", 3)):
        lines = [f"http://www.imdb.com/title/tt{film:07d}/" for film in range(60)] * count
        (at / FILMS.files[f"train_{name}"]).write_bytes(gzip.compress("\n".join(lines).encode()))
    pairs = pairs_of(ImdbPairs("1000", data_dir=folder).split("train"))
    assert pairs
    assert all(one != two for one, two in pairs)
    assert not any("is fine" in text for pair in pairs for text in pair)  # one left for each film: no pair


def test_the_same_pairs_come_on_every_call_and_at_every_level(folder):
    one, two = (ImdbPairs("1000", data_dir=folder).split("train") for _ in range(2))
    assert torch.equal(one.tokens, two.tokens)
    longer = ImdbPairs("4000", data_dir=folder).split("train")
    assert pairs_of(longer) == pairs_of(one)


def test_lists_of_other_reviews_are_noticed(folder):
    """Rows in another order than the lists, as in the hub's files: labels would be noise."""
    write_part(folder / "imdb", "train", range(60), is_mixed=True)
    with pytest.raises(
        ConfigError, match=r"expected reviews in the order of their numbers.*share more names than others"
    ):
        ImdbPairs("1000", data_dir=folder).split("train")


def test_lists_of_another_length_are_noticed(folder):
    path = folder / "imdb" / FILMS.files["train_pos"]
    path.write_bytes(gzip.compress(b"\n".join(gzip.decompress(path.read_bytes()).splitlines()[:-1])))
    with pytest.raises(ConfigError, match=r"urls_train_pos\.txt\.gz: expected 180 lines, .*; got 179"):
        ImdbPairs("1000", data_dir=folder).split("train")


def test_shuffled_classes_are_noticed(folder):
    write_reviews(folder / "imdb" / FILMS.files["train"], [f"{i}" for i in range(360)], [1, 0] * 180)
    with pytest.raises(ConfigError, match="negative ones first; a positive one precedes a negative one"):
        ImdbPairs("1000", data_dir=folder).split("train")


def test_too_few_films_are_an_error(folder):
    write_part(folder / "imdb", "test", range(70, 71))
    with pytest.raises(ConfigError, match="test: no two reviews are of one film and others of another"):
        ImdbPairs("1000", data_dir=folder).split("train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip", "cannot be unpacked"),
        (gzip.compress(b"http://www.imdb.com/title/tt0000001/usercomments\n" * 50)[:-20], "cannot be unpacked"),
        (
            gzip.compress(b"http://www.imdb.com/title/tt1/\nhttp://www.imdb.com/name/nm1/\n"),
            "line 2: expected the URL of a film",
        ),
        (gzip.compress(bytes(2**25)), "cannot be unpacked: it unpacks to more than"),
    ],
    ids=["no gzip", "cut short", "no film", "bomb"],  # the bytes hold the time of day
)
def test_broken_lists_are_refused(tmp_path, content, message):
    path = tmp_path / "urls.txt.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_films(path)
    assert str(path) in str(caught.value)


def test_lists_may_have_either_line_end(tmp_path):
    path = tmp_path / "urls.txt.gz"
    path.write_bytes(gzip.compress(b"http://x/title/tt12/usercomments\r\nhttp://x/title/tt7"))
    assert read_films(path) == [b"tt12", b"tt7"]


def test_missing_lists_are_named(folder):
    (folder / "imdb" / FILMS.files["test_neg"]).unlink()
    with pytest.raises(ConfigError, match=r"missing urls_test_neg\.txt\.gz"):
        ImdbPairs("1000", data_dir=folder).split("train")


def test_floors_know_lengths_and_words(folder):
    task = ImdbPairs("1000", data_dir=folder)
    floors = task.floors()
    assert floors["majority"] == 0.5
    assert floors["length"] < 0.65
    assert floors["either_histogram"] < 0.65
    assert task.references()["bag_of_words"] > 0.9


def test_a_pair_is_shown_with_both_texts(folder):
    task = ImdbPairs("1000", data_dir=folder)
    example = task.split("train").example(0)
    verdict = ("two films", "the same film")[int(example.label)]
    assert example.other_tokens is not None
    assert task.show(example) == f"{text_of(example.tokens)}\n---\n{text_of(example.other_tokens)}\n= {verdict}"
