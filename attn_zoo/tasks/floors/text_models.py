"""What models without order score on texts: which bytes, how long, which words; of one text or of a pair."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.tasks.abstract_task import Split
from attn_zoo.tasks.byte_text import VOCAB_SIZE
from attn_zoo.tasks.floors.linear_model import byte_histogram, linear_floor
from attn_zoo.tasks.floors.lookup_rules import majority_floor

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_WORD = re.compile(rb"[a-z]{2,}")
_NAME = re.compile(rb"(?<=[a-z,] )[A-Z][a-z]{2,}")  # a capital that no sentence's beginning explains
_MAX_ROWS = 10_000  # of train: more change a fit of some hundred weights by less than its error on test


def word_floor(train: Split, test: Split) -> float:
    """Return the test accuracy of logistic regression on which words a text has.

    Words are runs of at least two ASCII letters, lower-cased, that occur in at least two texts of train; their weights
    are (1 + log count) log(N / texts with the word), each text scaled to length 1 (tf-idf).
    """
    counted = [_counts(split.tokens) for split in (train, test)]
    texts_with = Counter(word for words in counted[0] for word in words)
    rarity = {word: math.log(len(train) / texts) for word, texts in texts_with.items() if texts > 1}
    features = _weighted(counted, rarity)
    return linear_floor(features[0], train.labels.numpy(), features[1], test.labels.numpy())


def word_similarity(train: Split, test: Split) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the cosine of the words of both texts of each pair, `[N, 1]` for train and `[M, 1]` for test.

    Words and weights are those of `word_floor`, but a word that train does not have counts as if one text had it: a
    name that both texts mention tells most where it is new.
    """
    counted = []
    for split in (train, test):
        assert split.other_tokens is not None
        counted += [_counts(split.tokens), _counts(split.other_tokens)]
    texts_with = Counter(word for texts in counted[:2] for words in texts for word in words)
    every = {word for texts in counted for words in texts for word in words}
    rarity = {word: math.log(2 * len(train) / max(1, texts_with[word])) for word in every}
    weights = _weighted(counted, rarity)
    return _cosine(weights[0], weights[1]), _cosine(weights[2], weights[3])


def _cosine(one: csr_array, two: csr_array) -> NDArray[np.float64]:
    return np.asarray((one * two).sum(axis=1), np.float64)[:, None]


def _counts(tokens: Tensor) -> list[Counter[bytes]]:
    rows = (tokens.numpy() - 1).astype(np.uint8)  # padding wraps to 255, which is no letter
    return [Counter(_WORD.findall(row.tobytes().lower())) for row in rows]


def _weighted(splits: list[list[Counter[bytes]]], rarity: dict[bytes, float]) -> list[csr_array]:
    """Return weights of words `[N, words]` for each list of texts, rows of length 1."""
    known = {word: index for index, word in enumerate(sorted(rarity))}
    rarities = np.array([rarity[word] for word in known], np.float64)
    return [_rows(texts, known, rarities) for texts in splits]


def _rows(texts: list[Counter[bytes]], known: dict[bytes, int], rarities: NDArray[np.float64]) -> csr_array:
    from scipy.sparse import csr_array  # a quarter of a second that no worker needs

    indices, counts, ends = array("q"), array("q"), [0]
    for words in texts:
        pairs = [(known[word], count) for word, count in words.items() if word in known]
        indices.extend(index for index, _ in pairs)
        counts.extend(count for _, count in pairs)
        ends.append(len(indices))
    columns = np.array(indices, np.int64)
    weights = (1.0 + np.log(np.array(counts, np.float64))) * rarities[columns]
    row_of = np.repeat(np.arange(len(texts)), np.diff(ends))
    norms = np.sqrt(np.bincount(row_of, weights**2, minlength=len(texts)))
    weights /= np.maximum(norms, 1e-12)[row_of]
    return csr_array((weights, columns, np.array(ends)), shape=(len(texts), max(1, len(known))))


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
