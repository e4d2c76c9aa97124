"""Film reviews with the film of each: texts as a table, films as lists of URLs, one list for each part and class.

A review's URL is known by the review's number alone, so the rows must be in the order of these numbers, negative ones
first. The hub's Parquet files are not. Wrongly ordered rows are noticed by the names that reviews of one film share.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attn_zoo.errors import ConfigError
from attn_zoo.tasks.film_pairs import Pairs
from attn_zoo.tasks.floors.pair_models import names_of
from attn_zoo.tasks.generated.draws import Ints
from attn_zoo.tasks.sources.source import Source
from attn_zoo.tasks.text import CLASSES, read_reviews

__all__ = ["FILMS", "FilmReviews", "check_order", "read_film_reviews", "read_films"]

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


def read_films(path: Path) -> list[bytes]:
    """Return the film of each review of one class, from a packed list of URLs.

    Raises:
        ConfigError: the file cannot be unpacked, or a line is not the URL of a film; names it.
    """
    try:
        lines = gzip.decompress(path.read_bytes()).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(str(path), [("", f"cannot be unpacked: {error}")]) from None
    films = []
    for number, line in enumerate(lines, start=1):
        if (found := _FILM.search(line.strip())) is None:
            raise ConfigError(str(path), [(f"line {number}", f"expected the URL of a film; got {line[:80]!r}")])
        films.append(found[1])
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
    """Return all reviews.

    Args:
        paths: of the files of `FILMS`.

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


def check_order(texts: list[bytes], pairs: Pairs) -> None:
    """Raise `ConfigError` if reviews said to be of one film share no more names than others do: a sign test.

    Args:
        texts: all reviews.
        pairs: of `film_pairs`, where each first review has a partner of its film and one of another.
    """
    shared: dict[int, dict[int, int]] = {}
    for first, second, label in zip(pairs.first.tolist(), pairs.second.tolist(), pairs.labels.tolist(), strict=True):
        if len(shared) < _LOOKED_AT or first in shared:
            shared.setdefault(first, {})[label] = len(names_of(texts[first]) & names_of(texts[second]))
    differences = [found[1] - found[0] for found in shared.values()]
    more, fewer = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    if more - fewer < _SIGMAS * math.sqrt(max(1, more + fewer)):
        found = f"reviews said to be of one film share more names than others in {more} cases, fewer in {fewer}"
        raise ConfigError(FILMS.name, [("rows", f"{_ORDER}; {found}")])
