"""What trivial models score on pairs of texts: which bytes, how long, which names in common."""

from __future__ import annotations

import re

import numpy as np
import torch
from numpy.typing import NDArray

from attn_zoo.tasks.abstract_task import Split
from attn_zoo.tasks.byte_text import VOCAB_SIZE
from attn_zoo.tasks.floors.linear_model import byte_histogram, linear_floor
from attn_zoo.tasks.floors.lookup_rules import majority_floor
from attn_zoo.tasks.floors.word_model import word_similarity

__all__ = ["names_of", "pair_floors", "pair_references"]

_NAME = re.compile(rb"(?<=[a-z,] )[A-Z][a-z]{2,}")  # a capital that no sentence's beginning explains
_MAX_ROWS = 10_000  # of train: more change a fit of some hundred weights by less than its error on test


def names_of(text: bytes) -> set[bytes]:
    """Return the words of a text that look like names: capitalised within a sentence.

    >>> sorted(names_of(b"The film with Anna. Bob, Eve"))
    [b'Anna', b'Eve']
    """
    return set(_NAME.findall(text))


def pair_floors(train: Split, test: Split) -> dict[str, float]:
    """Return the test accuracy of the majority class and of three logistic regressions, by name.

    length: lengths of both texts, as cut, and their difference. either_histogram: how often each byte occurs in the
    first text and in the second, which tells whether one text alone gives the answer away. histogram_difference:
    |difference| of the two, byte by byte. They are fitted on the first 10 000 rows of train.
    """
    splits = [train.select(torch.arange(min(len(train), _MAX_ROWS))), test]
    features = [_features(split) for split in splits]
    labels = [split.labels.numpy() for split in splits]
    scores = {name: linear_floor(features[0][name], labels[0], features[1][name], labels[1]) for name in features[0]}
    return {"majority": majority_floor(labels[0], labels[1]), **scores}


def pair_references(train: Split, test: Split) -> dict[str, float]:
    """Return the test accuracy of logistic regression on how alike the words of both texts are (`word_similarity`)."""
    first = train.select(torch.arange(min(len(train), _MAX_ROWS)))
    alike = word_similarity(first, test)
    return {"bag_of_words": linear_floor(alike[0], first.labels.numpy(), alike[1], test.labels.numpy())}


def _features(split: Split) -> dict[str, NDArray[np.floating]]:
    assert split.other_tokens is not None
    assert split.other_lengths is not None
    first, second = split.tokens.numpy(), split.other_tokens.numpy()
    lengths = np.stack([split.lengths.numpy(), split.other_lengths.numpy()], 1).astype(np.float32)
    histograms = [byte_histogram(tokens, VOCAB_SIZE) for tokens in (first, second)]
    return {
        "length": np.concatenate([lengths, abs(lengths[:, :1] - lengths[:, 1:])], 1),
        "either_histogram": np.concatenate(histograms, 1),
        "histogram_difference": abs(histograms[0] - histograms[1]),
    }
