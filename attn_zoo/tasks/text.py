"""Text: is a film review, read byte by byte, positive? The byte-level task of Long Range Arena on IMDB.

Maas et al. 2011, "Learning Word Vectors for Sentiment Analysis": 25 000 reviews to train on, 25 000 to test on, as many
positive as negative, hardly a film in both.

Levels:
    1000, 2048, 4096: this many bytes. The release of Long Range Arena reads 1 000, its paper and all later work
        about 4 000. Half of the reviews fit into 1 000 bytes, and at 4 096 two thirds of all positions are padding.
    short: for CPUs: 256 bytes, and 5 000 of the test reviews.
    as_published_1000, as_published_4096: validation is the test set, as in the release and its ports. Choosing the best
        checkpoint on test is leakage: a score from here compares with published ones, not with honest ones.

All other levels hold out a tenth of train for validation: as many of each class, drawn with a seed, and only reviews
whose text occurs in train once (96 do not). The 123 texts that are in both train and test stay, as published. Rows
are sorted by their text and then shuffled with the same seed, so that splits do not depend on the order in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.errors import ConfigError
from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import AbstractFileTask, Example, Split, SplitName, TaskSpec
from attn_zoo.tasks.byte_text import VOCAB_SIZE, byte_spec, byte_symbols, encode_texts, text_of
from attn_zoo.tasks.floors.linear_model import byte_histogram, linear_floor
from attn_zoo.tasks.floors.lookup_rules import majority_floor
from attn_zoo.tasks.floors.text_models import word_floor
from attn_zoo.tasks.generated.draws import Ints, shuffled
from attn_zoo.tasks.sources.parquet import class_labels, read_parquet, require_columns, texts_of
from attn_zoo.tasks.sources.source import Source

COLUMN = "text"
"""Of the reviews, in the hub's tables; their labels are in `label`."""

CLASSES = ("neg", "pos")
"""Names of the labels there."""

REVIEWS = Source(
    name="IMDB reviews",
    folder="imdb/plain_text",
    files={"train": "train-00000-of-00001.parquet", "test": "test-00000-of-00001.parquet"},
    hint="The hub has them as stanfordnlp/imdb, 42 MB: attn-zoo data fetch text",
    terms="no licence given; for research, cite Maas et al. 2011",
    sha256={
        "train": "db47d16b5c297cc0dd625e519c81319c24c9149e70e8496de5475f6fa928342c",
        "test": "b52e26e2f872d282ffac460bf9770b25ac6f102cda0e6ca7158df98c94e8b3da",
    },
    hub="stanfordnlp/imdb",
    revision="e6281661ce1c48d982bc483cf8a173c1bbeb5d31",
    hub_files={"train": "plain_text/train-00000-of-00001.parquet", "test": "plain_text/test-00000-of-00001.parquet"},
    num_bytes=41_450_297,
)

_WORDS = ("negative", "positive")
_STREAMS: dict[SplitName, int] = {"train": 0, "test": 1}
_VALIDATION_SHARE = 10  # one review of train in ten


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLevel:
    """One level.

    Args:
        max_len: bytes kept of each review.
        max_test: reviews of test that are used, as many of each class; 0 uses all.
        is_validation_test: validation is the test set and train is whole.
        seed: of the order of rows and of what is held out.
    """

    max_len: int
    max_test: int = 0
    is_validation_test: bool = False
    seed: int = 0


def read_reviews(name: str, paths: Mapping[str, Path]) -> dict[str, tuple[list[str], NDArray[np.uint8]]]:
    """Return texts and labels (0 negative, 1 positive) of each Parquet file, in the order of its rows.

    Raises:
        UnsupportedError: `datasets` is not installed.
        ConfigError: a file is not a table of texts with these two classes, or a text is missing.
    """
    reviews = {}
    for key, table in read_parquet(name, paths).items():
        require_columns(name, paths[key], table, {COLUMN: "Value('string')"})
        labels = class_labels(name, paths[key], table, CLASSES)
        reviews[key] = texts_of(name, paths[key], table, COLUMN), labels
    return reviews


@final
@register_task("text")
class Text(AbstractFileTask):
    """Sentiment of a review from its bytes, at one level."""

    version: ClassVar[int] = 1
    files: ClassVar[Source] = REVIEWS
    levels: ClassVar[Mapping[str, TextLevel]] = MappingProxyType(
        {
            "short": TextLevel(max_len=256, max_test=5_000),
            "1000": TextLevel(max_len=1_000),
            "2048": TextLevel(max_len=2_048),
            "4096": TextLevel(max_len=4_096),
            "as_published_1000": TextLevel(max_len=1_000, is_validation_test=True),
            "as_published_4096": TextLevel(max_len=4_096, is_validation_test=True),
        }
    )
    # The release computes its embedding, attention and residual dropout with one rate, and so do these protocols.
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "lra-small": {"batch_size": 32, "num_steps": 20_000, "warmup_steps": 8_000, "eval_every": 500},
            "lra-original": {
                "num_layers": 4,
                "embed_dim": 256,
                "num_heads": 4,
                "ffn_dim": 1_024,
                "batch_size": 32,
                "num_steps": 20_000,
                "warmup_steps": 8_000,
                "eval_every": 100,
            },
        }
    )

    @property
    def spec(self) -> TaskSpec:
        return byte_spec(self.config.max_len, "classification")

    def read(self, paths: dict[str, Path]) -> dict[SplitName, Split]:
        reviews = read_reviews(REVIEWS.name, paths)
        rows = {name: _order(*reviews[name], self.config.seed, stream) for name, stream in _STREAMS.items()}
        labels = reviews["test"][1]
        if self.config.max_test:
            rows["test"] = per_class(rows["test"], labels, dict.fromkeys(range(2), self.config.max_test // 2))
        test = self._split(*reviews["test"], rows["test"])
        if self.config.is_validation_test:
            return {"train": self._split(*reviews["train"], rows["train"]), "validation": test, "test": test}
        held_out = _held_out(*reviews["train"], rows["train"])
        if not len(held_out):
            problem = (
                f"expected {_VALIDATION_SHARE} reviews of a class, and one with a text of its own, to hold one out"
            )
            raise ConfigError(REVIEWS.name, [(str(paths["train"]), problem)])
        kept = rows["train"][~np.isin(rows["train"], held_out)]
        return {
            "train": self._split(*reviews["train"], kept),
            "validation": self._split(*reviews["train"], held_out),
            "test": test,
        }

    def _split(self, texts: list[str], labels: NDArray[np.uint8], rows: Ints) -> Split:
        tokens, lengths = encode_texts((texts[row].encode() for row in rows), self.config.max_len)
        return Split(tokens=tokens, lengths=lengths, labels=torch.from_numpy(labels[rows]))

    def floors(self) -> dict[str, float]:
        """Return the majority class, and logistic regression on how often each byte occurs."""
        train, test = self.split("train"), self.split("test")
        labels = train.labels.numpy(), test.labels.numpy()
        counts = [byte_histogram(split.tokens.numpy(), VOCAB_SIZE) for split in (train, test)]
        return {
            "majority": majority_floor(*labels),
            "byte_histogram": linear_floor(counts[0], labels[0], counts[1], labels[1]),
        }

    def references(self) -> dict[str, float]:
        """Return logistic regression on which words occur: vocabulary without order."""
        return {"bag_of_words": word_floor(self.split("train"), self.split("test"))}

    def show(self, example: Example) -> str:
        return f"{text_of(example.tokens)}\n= {_WORDS[int(example.label)]}"

    def symbols(self, tokens: Tensor) -> list[str]:
        return byte_symbols(tokens)


def _order(texts: list[str], labels: NDArray[np.uint8], seed: int, stream: int) -> Ints:
    """Return all rows in the order of a split: a shuffled one of the sorted texts."""
    by_text = np.array(sorted(range(len(texts)), key=lambda row: (texts[row], labels[row])), np.int64)
    return by_text[shuffled(len(texts), seed, stream)]


def _held_out(texts: list[str], labels: NDArray[np.uint8], rows: Ints) -> Ints:
    """Return the rows for validation: of each class the first tenth that has a text of its own."""
    times: dict[str, int] = {}
    for text in texts:
        times[text] = times.get(text, 0) + 1
    single = np.array([times[texts[row]] == 1 for row in rows])
    counts = {label: int((labels == label).sum()) // _VALIDATION_SHARE for label in range(2)}
    return per_class(rows[single], labels, counts)


def per_class(rows: Ints, labels: NDArray[np.integer], counts: dict[int, int]) -> Ints:
    """Return the first `counts[c]` of the rows of each class c, or all where there are fewer, in the order of `rows`.

    >>> per_class(np.array([3, 0, 2, 1]), np.array([0, 1, 0, 1]), {0: 1, 1: 1}).tolist()
    [3, 0]
    """
    mine = labels[rows]
    keep = np.zeros(len(rows), bool)
    for label, count in counts.items():
        keep[np.flatnonzero(mine == label)[:count]] = True
    return rows[keep]
