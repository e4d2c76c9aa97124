"""Pairs of film reviews: are both of the same film? A stand-in for Retrieval on real text, not the AAN task.

From the reviews of Maas et al. 2011 and the URL of the film of each (`urls_*.txt` of their archive), one list for each
part and class. A review's URL is known by the review's number alone, so the rows must be in the order of these numbers,
negative ones first. The hub's Parquet files are not. Wrongly ordered rows are noticed by the names that reviews of one
film share.

Nothing but the pairing itself tells the two kinds of pair apart. Positive pairs: within each film and class of
sentiment, reviews form a random ring, and each is paired with the next (two reviews make one pair). Negative pairs:
the same first reviews and the same second reviews, matched anew with another film's. So in both kinds

* every review stands equally often first and equally often second: no text alone, no film's fame tells anything;
* both reviews of a pair have the same sentiment, each as often as in the other kind;
* the second review is, among all of its class, the next in length to the one it replaces: lengths do not tell.

Where the next in length is of the same film, the pair is left out, the positive one with the negative. What is left to
go by is what the task is about: names, plots, subjects. Words in common, without order, already say a lot (see the
floors).

Films of train, validation (a tenth of the films in train's reviews) and test are disjoint: the one film that is in both
parts of the original is left to test. A text that occurs again is used once, and in test only if it is in both parts.

Levels:
    1000, 4000: the first 1 000 or 4 000 bytes of each review.
    short: for CPUs: 256 bytes; at most 1 000 pairs for validation and 4 000 for test.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray

from attn_zoo.errors import ConfigError
from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import Split, SplitName
from attn_zoo.tasks.byte_text import encode_texts
from attn_zoo.tasks.floors.text_models import names_of
from attn_zoo.tasks.generated.draws import Draws, Ints, shuffled
from attn_zoo.tasks.retrieval import AbstractTextPairs, Retrieval, pair_split
from attn_zoo.tasks.sources.archive import gunzip
from attn_zoo.tasks.sources.source import Source
from attn_zoo.tasks.text import CLASSES, read_reviews

FILMS = Source(
    name="IMDB reviews and their films",
    folder="imdb",
    files={
        "train": "plain_text/train-00000-of-00001.parquet",
        "test": "plain_text/test-00000-of-00001.parquet",
        **{f"{part}_{label}": f"urls_{part}_{label}.txt.gz" for part in ("train", "test") for label in CLASSES},
    },
    hint="Get aclImdb_v1.tar.gz (ai.stanford.edu/~amaas/data/sentiment) and make them by python -m "
    "attn_zoo.tasks.imdb_archive aclImdb_v1.tar.gz FOLDER/imdb; the hub's Parquet files are in another order.",
    terms="no licence given; for research, cite Maas et al. 2011",
    num_bytes=42_000_000,
)

_FILM = re.compile(rb"/title/(tt\d+)(?:/|$)")
_ORDER = "expected reviews in the order of their numbers, negative ones first"
_LOOKED_AT = 2_000  # pairs, to see whether the order is right
_SIGMAS = 4.0
_RING, _TIES, _SOME = range(3)  # streams of random numbers

_VALIDATION_SHARE = 10  # one film of train in ten


@dataclass(frozen=True, kw_only=True, slots=True)
class ImdbPairsLevel:
    """One level.

    Args:
        max_len: bytes kept of each review.
        max_train: pairs; 0 takes all.
        max_validation: pairs.
        max_test: pairs.
        seed: of the pairing.
    """

    max_len: int
    max_train: int = 0
    max_validation: int = 4_000
    max_test: int = 10_000
    seed: int = 0


def read_films(path: Path) -> list[bytes]:
    """Return the film of each review of one class, from a packed list of URLs.

    Raises:
        ConfigError: the file cannot be unpacked, or a line is not the URL of a film; names it.
    """
    try:
        lines = gunzip(path).splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), [("", f"cannot be unpacked: {error}")]) from None
    films = []
    for number, line in enumerate(lines, start=1):
        if (match := _FILM.search(line.strip())) is None:
            raise ConfigError(str(path), [(f"line {number}", f"expected the URL of a film; got {line[:80]!r}")])
        films.append(match[1])
    return films


@dataclass(frozen=True, slots=True)
class FilmReviews:
    """Reviews of both parts, those of train first.

    Args:
        texts: as UTF-8.
        classes: 0 negative, 1 positive, `[N]`.
        films: a number for each film, `[N]`.
        is_test: `[N]`.
    """

    texts: list[bytes]
    classes: NDArray[np.uint8]
    films: Ints
    is_test: NDArray[np.bool_]


def read_film_reviews(paths: Mapping[str, Path]) -> FilmReviews:
    """Return all reviews of the files of `FILMS`.

    Raises:
        UnsupportedError: `datasets` is not installed.
        ConfigError: a file does not hold what it should, or the files do not belong together.
    """
    reviews = read_reviews(FILMS.name, {part: paths[part] for part in ("train", "test")})
    texts: list[bytes] = []
    films: list[bytes] = []
    for part, (strings, labels) in reviews.items():
        for label, name in enumerate(CLASSES):
            path = paths[f"{part}_{name}"]
            of_class, wanted = read_films(path), int((labels == label).sum())
            if len(of_class) != wanted:
                problem = f"expected {wanted} lines, one for each such review; got {len(of_class)}"
                raise ConfigError(FILMS.name, [(str(path), problem)])
            films += of_class
        if (np.diff(labels.astype(np.int8)) < 0).any():
            raise ConfigError(FILMS.name, [(str(paths[part]), f"{_ORDER}; a positive one precedes a negative one")])
        texts += [text.encode() for text in strings]
    numbers = {film: number for number, film in enumerate(sorted(set(films)))}
    return FilmReviews(
        texts=texts,
        classes=np.concatenate([labels for _, labels in reviews.values()]),
        films=np.array([numbers[film] for film in films], np.int64),
        is_test=np.repeat([False, True], [len(labels) for _, labels in reviews.values()]),
    )


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of rows in random order, as many with label 1 as with label 0.

    Args:
        first: row of the first review `[N]`.
        second: row of the second `[N]`.
        labels: 1 for one film, 0 for two, `[N]`.
    """

    first: Ints
    second: Ints
    labels: NDArray[np.uint8]


def _rings(rows: Ints, films: Ints, classes: NDArray[np.integer], draws: Draws) -> tuple[Ints, Ints]:
    """Return each review beside the next of its film and class."""
    order = rows[np.lexsort((draws.uniform(len(rows)), classes[rows], films[rows]))]
    group = np.stack([films[order], classes[order].astype(np.int64)])
    starts = np.flatnonzero(np.concatenate([[True], (group[:, 1:] != group[:, :-1]).any(0)]))
    sizes = np.diff(np.append(starts, len(order)))
    start_of, size_of = np.repeat(starts, sizes), np.repeat(sizes, sizes)
    place = np.arange(len(order)) - start_of
    second = order[start_of + (place + 1) % size_of]
    keep = (size_of > 2) | ((size_of == 2) & (place == 0))
    return order[keep], second[keep]


def _matched_anew(
    first: Ints, second: Ints, films: Ints, classes: NDArray[np.integer], lengths: Ints, draws: Draws
) -> tuple[NDArray[np.bool_], Ints]:
    """Return which pairs can stay, and for each of these the second review of its negative pair."""
    stays = np.ones(len(first), bool)
    ties = draws.uniform(len(first))
    while True:
        pairs = np.flatnonzero(stays)
        order = pairs[np.lexsort((ties[pairs], lengths[second[pairs]], classes[second[pairs]]))]
        other = np.empty(len(first), np.int64)
        for label in np.unique(classes[second[order]]):
            ring = order[classes[second[order]] == label]
            other[ring] = second[np.roll(ring, -1)]
        clash = films[other[pairs]] == films[first[pairs]]
        if not clash.any():
            return stays, other[pairs]
        stays[pairs[clash]] = False


def film_pairs(
    rows: Ints, films: Ints, classes: NDArray[np.integer], lengths: Ints, *, max_pairs: int, seed: int, stream: int
) -> Pairs:
    """Return pairs made of the given reviews.

    Args:
        rows: indices of the reviews to use.
        films: film of every review, as a number, also of those not used.
        classes: sentiment of every review.
        lengths: of every review.
        max_pairs: at most this many; 0 takes all.
        seed: of the drawing.
        stream: number of this set of pairs.

    >>> films, classes = np.array([0, 0, 1, 1]), np.zeros(4, np.int64)
    >>> pairs = film_pairs(np.arange(4), films, classes, np.arange(4), max_pairs=0, seed=0, stream=0)
    >>> bool(((films[pairs.first] == films[pairs.second]) == pairs.labels).all())
    True
    """
    first, second = _rings(rows, films, classes, Draws(seed, stream, _RING))
    if max_pairs:
        some = shuffled(len(first), seed, stream, _SOME, 0)[: max_pairs // 2]
        first, second = first[some], second[some]
    stays, other = _matched_anew(first, second, films, classes, lengths, Draws(seed, stream, _TIES))
    first, second = first[stays], second[stays]
    labels = np.repeat(np.array([1, 0], np.uint8), len(first))
    order = shuffled(len(labels), seed, stream, _SOME, 1)
    return Pairs(np.tile(first, 2)[order], np.concatenate([second, other])[order], labels[order])


def check_order(texts: list[bytes], pairs: Pairs) -> None:
    """Raise `ConfigError` if reviews listed under one film share no more names than others do: a sign test."""
    shared: dict[int, dict[int, int]] = {}
    for first, second, label in zip(pairs.first.tolist(), pairs.second.tolist(), pairs.labels.tolist(), strict=True):
        if len(shared) < _LOOKED_AT or first in shared:
            shared.setdefault(first, {})[label] = len(names_of(texts[first]) & names_of(texts[second]))
    differences = [names[1] - names[0] for names in shared.values()]
    more, fewer = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    if more - fewer < _SIGMAS * math.sqrt(max(1, more + fewer)):
        got = f"reviews said to be of one film share more names than others in {more} cases, fewer in {fewer}"
        raise ConfigError(FILMS.name, [("rows", f"{_ORDER}; {got}")])


def _usable(reviews: FilmReviews, seed: int) -> dict[SplitName, Ints]:
    """Return rows by split: disjoint in films and in texts."""
    test_films = np.unique(reviews.films[reviews.is_test])
    seen: set[bytes] = set()
    usable = np.zeros(len(reviews.texts), bool)
    for row in [*np.flatnonzero(reviews.is_test), *np.flatnonzero(~reviews.is_test)]:
        usable[row] = reviews.texts[row] not in seen
        seen.add(reviews.texts[row])
    train = usable & ~reviews.is_test & ~np.isin(reviews.films, test_films)
    films = np.unique(reviews.films[train])
    held_out = films[shuffled(len(films), seed, 0)[: len(films) // _VALIDATION_SHARE]]
    is_held_out = np.isin(reviews.films, held_out)
    return {
        "train": np.flatnonzero(train & ~is_held_out),
        "validation": np.flatnonzero(train & is_held_out),
        "test": np.flatnonzero(usable & reviews.is_test),
    }


@final
@register_task("imdb_pairs")
class ImdbPairs(AbstractTextPairs):
    """Same film or not, from the bytes of two reviews, at one level."""

    version: ClassVar[int] = 1
    files: ClassVar[Source] = FILMS
    words: ClassVar[tuple[str, str]] = ("two films", "the same film")
    levels: ClassVar[Mapping[str, ImdbPairsLevel]] = MappingProxyType(
        {
            "short": ImdbPairsLevel(max_len=256, max_validation=1_000, max_test=4_000),
            "1000": ImdbPairsLevel(max_len=1_000),
            "4000": ImdbPairsLevel(max_len=4_000),
        }
    )
    # Nothing is published for this task: these are the settings of the one it stands in for.
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = Retrieval.settings

    def read(self, paths: dict[str, Path]) -> dict[SplitName, Split]:
        reviews = read_film_reviews(paths)
        lengths = np.array([len(text) for text in reviews.texts])
        limits = (self.config.max_train, self.config.max_validation, self.config.max_test)
        splits: dict[SplitName, Split] = {}
        rows = _usable(reviews, self.config.seed)
        for stream, (name, limit) in enumerate(zip(rows, limits, strict=True), start=1):
            pairs = film_pairs(
                rows[name],
                reviews.films,
                reviews.classes,
                lengths,
                max_pairs=limit,
                seed=self.config.seed,
                stream=stream,
            )
            if not len(pairs.labels):
                raise ConfigError(FILMS.name, [(name, "no two reviews are of one film and others of another")])
            if name == "train":
                check_order(reviews.texts, pairs)
            splits[name] = self._split(reviews.texts, pairs)
        return splits

    def _split(self, texts: list[bytes], pairs: Pairs) -> Split:
        first, second = (
            encode_texts((texts[row] for row in rows), self.config.max_len) for rows in (pairs.first, pairs.second)
        )
        return pair_split(first, second, torch.from_numpy(pairs.labels))
