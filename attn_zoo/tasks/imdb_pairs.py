"""Pairs of film reviews: are both of the same film? A stand-in for Retrieval on real text, not the AAN task.

From the reviews of Maas et al. 2011 and the URL of the film of each (`urls_*.txt` of their archive). How pairs are made
so that sentiment, length, fame of a film and each text alone tell nothing: `attn_zoo.tasks.film_pairs`. What is left
to go by is what the task is about: names, plots, subjects. Words in common, without order, already say a lot (see the
floors).

Films of train, validation (a tenth of the films in train's reviews) and test are disjoint: the one film that is in both
parts of the original is left to test. A text that occurs again is used once, and in test only if it is in both parts.

Levels:
    1000, 4000: the first so many bytes of each review.
    short: for CPUs: 256 bytes; at most 1 000 pairs for validation and 4 000 for test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from attn_zoo.errors import ConfigError
from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import Example, Split, SplitName, TaskSpec
from attn_zoo.tasks.byte_text import byte_spec, byte_symbols, encode_texts, text_of
from attn_zoo.tasks.file_task import AbstractFileTask
from attn_zoo.tasks.film_pairs import Pairs, film_pairs
from attn_zoo.tasks.film_reviews import FILMS, FilmReviews, check_order, read_film_reviews
from attn_zoo.tasks.floors.pair_models import pair_floors, pair_references
from attn_zoo.tasks.generated.draws import Ints
from attn_zoo.tasks.labelled import shuffled
from attn_zoo.tasks.retrieval import Retrieval
from attn_zoo.tasks.sources.source import Source

__all__ = ["ImdbPairs", "ImdbPairsLevel"]

_WORDS = ("two films", "the same film")
_VALIDATION_SHARE = 10  # one in so many films of train


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
class ImdbPairs(AbstractFileTask):
    """Same film or not, from the bytes of two reviews, at one level.

    Args:
        level: one of `levels`.
        data_dir: folder with the reviews and the lists of films.
    """

    name: ClassVar[str] = "imdb_pairs"
    version: ClassVar[int] = 1
    files: ClassVar[Source] = FILMS
    levels: ClassVar[Mapping[str, ImdbPairsLevel]] = MappingProxyType(
        {
            "short": ImdbPairsLevel(max_len=256, max_validation=1_000, max_test=4_000),
            "1000": ImdbPairsLevel(max_len=1_000),
            "4000": ImdbPairsLevel(max_len=4_000),
        }
    )
    # Nothing is published for this task: these are the settings of the one it stands in for.
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = Retrieval.settings

    @property
    def spec(self) -> TaskSpec:
        return byte_spec(self.config.max_len, "pair")

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
        tokens, lengths = encode_texts((texts[row] for row in pairs.first), self.config.max_len)
        other_tokens, other_lengths = encode_texts((texts[row] for row in pairs.second), self.config.max_len)
        return Split(
            tokens=tokens,
            lengths=lengths,
            labels=torch.from_numpy(pairs.labels),
            other_tokens=other_tokens,
            other_lengths=other_lengths,
        )

    def floors(self) -> dict[str, float]:
        """Return what `pair_floors` finds: no knowledge of order, nor of what stands where."""
        return pair_floors(self.split("train"), self.split("test"))

    def references(self) -> dict[str, float]:
        """Return what `pair_references` finds: words in common, without order."""
        return pair_references(self.split("train"), self.split("test"))

    def show(self, example: Example) -> str:
        assert example.other_tokens is not None
        texts = f"{text_of(example.tokens)}\n---\n{text_of(example.other_tokens)}"
        return f"{texts}\n= {_WORDS[int(example.label)]}"

    def symbols(self, tokens: Tensor) -> list[str]:
        return byte_symbols(tokens)
