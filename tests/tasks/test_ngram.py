"""N-gram floors against a slow, plain version of the same formula."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from attn_zoo.tasks.byte_lm import ngram_bits


def plain_prob(train: bytes, context: bytes, byte: int) -> float:
    """Witten-Bell by the definition, counting anew for every prediction."""
    lower = plain_prob(train, context[1:], byte) if context else 1 / 256
    size = len(context)
    follows = Counter(train[i + size] for i in range(len(train) - size) if train[i : i + size] == context)
    if not follows:
        return lower
    return (follows[byte] + len(follows) * lower) / (follows.total() + len(follows))


def plain_bits(train: bytes, test: bytes, order: int, num_context: int) -> float:
    places = range(num_context, len(test))
    logs = [-math.log2(plain_prob(train, test[max(0, i - order + 1) : i], test[i])) for i in places]
    return sum(logs) / len(logs)


def as_array(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("num_context", [0, 1, 4])
def test_it_is_the_formula(order, num_context):
    train, test = b"the cat sat on the mat; the rat sat\xff too", b"that cat is at the zoo \x00\xff"
    expected = plain_bits(train, test, order, num_context)
    assert ngram_bits(as_array(train), as_array(test), order, num_context) == pytest.approx(expected, rel=1e-12)


def test_probabilities_of_all_bytes_sum_to_one():
    train = as_array(b"abracadabra")
    for context in (b"abra", b"br", b"zz"):
        bits = [ngram_bits(train, as_array(context + bytes([byte])), 4, len(context)) for byte in range(256)]
        assert sum(2.0**-b for b in bits) == pytest.approx(1.0)


def test_higher_orders_win_on_text_that_repeats():
    text = as_array(b"to be or not to be, that is the question. " * 30)
    bits = [ngram_bits(text[:1_000], text[1_000:], order) for order in (1, 2, 3, 5)]
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] < 0.5 < bits[0]


def test_uniform_bytes_cannot_be_predicted():
    values = np.random.default_rng(0).integers(0, 256, 60_000).astype(np.uint8)
    assert ngram_bits(values[:50_000], values[50_000:], 1) == pytest.approx(8.0, abs=0.02)


@pytest.mark.parametrize(
    ("order", "train", "test"), [(0, b"ab", b"a"), (8, b"a" * 20, b"a"), (3, b"ab", b"a"), (1, b"a", b"")]
)
def test_impossible_requests_are_errors(order, train, test):
    with pytest.raises(ValueError, match="expected"):
        ngram_bits(as_array(train), as_array(test), order)
