"""Interpolated Witten-Bell n-gram models over bytes: the floor of a language model.

Witten and Bell 1991, "The zero-frequency problem", as in Chen and Goodman 1999, section 2.4; for a context h of k bytes
that was followed c(h) times by t(h) different bytes, and h' its last k - 1 bytes,
    p(b | h) = (c(h b) + t(h) p(b | h')) / (c(h) + t(h)),   p(b | no context at all) = 1 / 256
An unseen h leaves p(b | h') as it is. Nothing is tuned.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_ORDER", "ngram_bits"]

MAX_ORDER: Final = 7
"""A byte and its context must fit into 56 bits."""


def _codes(text: NDArray[np.uint8], order: int) -> NDArray[np.int64]:
    """Return, for each place from `order - 1` on, the `order` bytes that end there as one integer."""
    codes = np.zeros(len(text) - order + 1, np.int64)
    for offset in range(order):
        codes = (codes << 8) | text[offset : offset + len(codes)]
    return codes


def _counts_of(codes: NDArray[np.int64], known: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the count of each code, 0 for those that are not known; `known` is sorted."""
    place = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.where(known[place] == codes, counts[place], 0)


def ngram_bits(train: NDArray[np.uint8], test: NDArray[np.uint8], order: int, num_context: int = 0) -> float:
    """Return the mean bits per byte of `test` under the model of `train`.

    Args:
        train: text to count in, at least `order` bytes.
        test: text to predict.
        order: n, 1 to `MAX_ORDER`; a byte is predicted from the n - 1 bytes before it, fewer at the start.
        num_context: bytes at the start of `test` that are read but not predicted.

    Raises:
        ValueError: the order is out of range, or a text is too short.

    >>> round(ngram_bits(np.full(100, 7, np.uint8), np.full(10, 7, np.uint8), 1), 3)  # p = (100 + 1 / 256) / 101
    0.014
    """
    if not 1 <= order <= MAX_ORDER:
        raise ValueError(f"expected an order from 1 to {MAX_ORDER}; got {order}")
    if len(train) < order or len(test) <= num_context:
        raise ValueError(f"expected texts of at least {order} and {num_context + 1} bytes")
    prob = np.full(len(test), 1 / 256)
    for n in range(1, min(order, len(test)) + 1):
        known, counts = np.unique(_codes(train, n), return_counts=True)
        contexts, first = np.unique(known >> 8, return_index=True)
        totals, types = np.add.reduceat(counts, first), np.diff(np.append(first, len(known)))
        codes = _codes(test, n)
        seen = _counts_of(codes, known, counts)
        total, distinct = _counts_of(codes >> 8, contexts, totals), _counts_of(codes >> 8, contexts, types)
        lower = prob[n - 1 :]
        prob[n - 1 :] = np.where(total > 0, (seen + distinct * lower) / np.maximum(total + distinct, 1), lower)
    return float(-np.log2(prob[num_context:]).mean())
