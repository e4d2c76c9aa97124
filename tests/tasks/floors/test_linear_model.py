"""Logistic regression as a floor: it finds what is linear, nothing where nothing is, and agrees with the equation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_array

from attn_zoo.tasks.floors import linear_model
from attn_zoo.tasks.floors.linear_model import byte_histogram, linear_floor


def blobs(num_rows, *, num_classes=3, num_features=6, spread=0.3, seed=0):
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(num_classes, num_features))
    labels = draw.integers(num_classes, size=num_rows)
    return centres[labels] + spread * draw.normal(size=(num_rows, num_features)), labels


def test_it_separates_classes_that_a_line_separates():
    assert linear_floor(*blobs(600), *blobs(400, seed=1)) > 0.99


def test_it_is_at_chance_where_features_say_nothing():
    draw = np.random.default_rng(3)
    score = linear_floor(
        draw.normal(size=(4_000, 5)),
        draw.integers(2, size=4_000),
        draw.normal(size=(4_000, 5)),
        draw.integers(2, size=4_000),
    )
    assert abs(score - 0.5) < 0.04  # five standard errors


def test_it_does_not_find_what_is_not_linear():
    """Exclusive or: each feature alone, and any sum of both, is independent of the label."""
    draw = np.random.default_rng(4)
    bits = draw.integers(2, size=(4_000, 2))
    labels = bits[:, 0] ^ bits[:, 1]
    assert linear_floor(bits.astype(float), labels, bits.astype(float), labels) < 0.56
    product = (2.0 * bits[:, :1] - 1) * (2.0 * bits[:, 1:] - 1)
    assert linear_floor(product, labels, product, labels) == 1.0


def test_the_scale_and_origin_of_features_do_not_matter():
    train, test = blobs(500, spread=1.5), blobs(300, spread=1.5, seed=1)
    moved = [(features * np.array([1e-4, 1, 1e3, 1, 1, 50.0]) + 7.0, labels) for features, labels in (train, test)]
    assert linear_floor(*moved[0], *moved[1]) == pytest.approx(linear_floor(*train, *test), abs=0.01)


def test_features_that_are_constant_in_train_do_no_harm():
    (features, labels), (more, truth) = blobs(200), blobs(200, seed=1)
    still = np.full((200, 1), 5.0)
    wild = np.full((200, 1), 1e6)
    plain = linear_floor(features, labels, more, truth)
    assert linear_floor(np.hstack([features, still]), labels, np.hstack([more, wild]), truth) == plain
    assert linear_floor(still, labels, wild, truth) == (truth == np.bincount(labels).argmax()).mean()


def test_the_answer_is_the_minimum_of_the_equation():
    """With two classes, one feature and a penalty the minimum is where the gradient of the textbook formula is zero."""
    from attn_zoo.tasks.floors.linear_model import _fit

    draw = np.random.default_rng(5)
    features = draw.normal(size=(200, 1))
    labels = (features[:, 0] + draw.normal(size=200) > 0).astype(np.int64)
    weights, biases = _fit(features, labels, 2.0)
    slope, offset = weights[0, 1] - weights[0, 0], biases[1] - biases[0]
    error = 1 / (1 + np.exp(-(features[:, 0] * slope + offset))) - labels
    assert error.sum() == pytest.approx(0.0, abs=0.02)
    # |w|^2 over both classes with w_1 = -w_0 is slope^2 / 2.
    assert (error * features[:, 0]).sum() + 2.0 * slope / 2 == pytest.approx(0.0, abs=0.02)


def test_features_that_nearly_repeat_each_other_are_fitted_to_the_end(capsys, monkeypatch):
    """A polynomial, as that of Pathfinder's markers: what its terms tell beyond each other is found late."""
    draw = np.random.default_rng(7)
    x = draw.uniform(-1, 1, (2, 1_000))
    powers = np.stack([x[0] ** i * x[1] ** j for i in range(9) for j in range(9 - i) if i + j], 1)
    features = (powers - powers.mean(0)) / powers.std(0)
    labels = (np.sin(5 * x[0]) * np.cos(5 * x[1]) + 0.5 * draw.normal(size=1_000) > 0).astype(np.int64)
    weights, biases = linear_model._fit(features, labels, 0.01)
    logits = features @ weights + biases
    error = 1 / (1 + np.exp(logits[:, 0] - logits[:, 1])) - labels
    gradient = (features.T @ error + 0.01 * weights[:, 1]) / len(labels)
    assert abs(gradient).max() < 2e-4  # after 200 steps 9e-4
    assert not capsys.readouterr().err

    monkeypatch.setattr(linear_model, "_MAX_STEPS", 20)
    linear_model._fit(features, labels, 0.01)
    assert "not at its minimum after 20 steps" in capsys.readouterr().err


def test_sparse_features_score_as_dense_ones_do():
    draw = np.random.default_rng(6)
    labels = draw.integers(2, size=800)
    dense = (draw.random((800, 40)) < 0.1 + 0.2 * labels[:, None]).astype(float)
    sparse = csr_array(dense)
    score = linear_floor(sparse[:500], labels[:500], sparse[500:], labels[500:])
    assert score == pytest.approx(linear_floor(dense[:500], labels[:500], dense[500:], labels[500:]), abs=0.03)
    assert score > 0.9


def test_the_same_call_gives_the_same_score():
    train, test = blobs(300, spread=2.0), blobs(300, spread=2.0, seed=1)
    assert len({linear_floor(*train, *test) for _ in range(3)}) == 1


def test_a_class_that_only_test_has_is_always_missed():
    features = np.array([[0.0], [1.0]])
    assert linear_floor(features, np.array([0, 1]), np.array([[0.0], [9.0]]), np.array([0, 2])) == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_labels": np.zeros(3, int)}, r"expected features \[N, F\]"),
        ({"test_features": np.zeros((2, 5))}, r"expected features \[N, F\]"),
        ({"train_features": np.array([[0.0, np.nan]] * 4)}, "not finite"),
        ({"train_features": np.zeros((0, 2)), "train_labels": np.zeros(0, int)}, "expected examples"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    fine = {
        "train_features": np.zeros((4, 2)),
        "train_labels": np.array([0, 1, 0, 1]),
        "test_features": np.zeros((2, 2)),
        "test_labels": np.array([0, 1]),
    }
    with pytest.raises(ValueError, match=message):
        linear_floor(**{**fine, **change})


def test_a_histogram_counts_what_is_not_padding():
    tokens = np.array([[3, 3, 1, 0], [0, 0, 0, 0]], np.uint8)
    assert byte_histogram(tokens, 4).tolist() == [[0, pytest.approx(1 / 3), 0, pytest.approx(2 / 3)], [0, 0, 0, 0]]
    assert byte_histogram(tokens, 4, pad_id=None)[0].tolist() == [0.25, 0.25, 0, 0.5]


def test_a_histogram_of_many_rows_is_that_of_each(monkeypatch):
    monkeypatch.setattr(linear_model, "_TOKENS_AT_ONCE", 7 * 8_192)
    tokens = np.random.default_rng(0).integers(0, 256, (20_000, 7)).astype(np.uint8)
    whole = byte_histogram(tokens, 257)
    rows = [0, 8_191, 8_192, 19_999]
    assert (whole[rows] == byte_histogram(tokens[rows], 257)).all()
