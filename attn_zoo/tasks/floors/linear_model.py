"""What a linear model scores: logistic regression on a few features, fitted in seconds.

A byte histogram knows nothing about order, a linear model of pixels nothing about shapes. A model of sequences that
does not beat them has not used the sequence.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Features: TypeAlias = "NDArray[np.floating] | csr_array"
"""One row per example; sparse rows where most features are zero."""

_MAX_STEPS = 2_000  # a polynomial of where Pathfinder's markers are needs 700: after 200 it scores 0.3 points less
_TOKENS_AT_ONCE = 2**23  # of a histogram, so that its index array stays small, however long the rows


def linear_floor(
    train_features: Features,
    train_labels: NDArray[np.integer],
    test_features: Features,
    test_labels: NDArray[np.integer],
    *,
    l2: float = 1.0,
) -> float:
    """Return the test accuracy of multinomial logistic regression on the given features.

    Minimises, over weights w and biases b of standardised features x (by mean and deviation of train; sparse ones are
    taken as they are, since centring would fill them),

        sum_n cross_entropy(softmax(w x_n + b), y_n) + l2 / 2 |w|^2

    with L-BFGS from zero: convex and without a random draw, so the same on every call; machines differ by rounding. A
    search that ends before the minimum says so on standard error: a floor must not be too low in silence.

    Args:
        train_features: `[N, F]`; columns that are constant in train are left out.
        train_labels: classes `[N]`, from 0.
        test_features: `[M, F]`.
        test_labels: `[M]`.
        l2: weight of the penalty, in examples.

    Raises:
        ValueError: shapes do not belong together, a feature is not finite, or train is empty.

    >>> x = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> linear_floor(x, np.array([0, 0, 1, 1]), np.array([[-1.0], [4.0]]), np.array([0, 1]))
    1.0
    """
    if not len(train_labels) or not len(test_labels):
        raise ValueError("linear_floor: expected examples in train and test")
    for features, labels in ((train_features, train_labels), (test_features, test_labels)):
        if features.ndim != 2 or features.shape != (len(labels), train_features.shape[1]):
            raise ValueError(
                f"linear_floor: expected features [N, F] and labels [N]; got {features.shape}, {labels.shape}"
            )
        if not np.isfinite(features if isinstance(features, np.ndarray) else features.data).all():
            raise ValueError("linear_floor: a feature is not finite")
    train, test = _prepared(train_features, test_features)
    weights, biases = _fit(train, train_labels.astype(np.int64), l2)
    guesses = (test @ weights + biases).argmax(1)
    return float((guesses == test_labels).mean())


def _prepared(train: Features, test: Features) -> tuple[Features, Features]:
    """Return dense features standardised, without columns that are constant in train, and sparse ones as they are."""
    if not (isinstance(train, np.ndarray) and isinstance(test, np.ndarray)):
        return train, test
    mean, deviation = train.mean(0, dtype=np.float64), train.std(0, dtype=np.float64)
    varies = deviation > 1e-12 * np.maximum(1.0, abs(mean))
    scaled = [((x[:, varies] - mean[varies]) / deviation[varies]).astype(np.float32) for x in (train, test)]
    return scaled[0], scaled[1]


def _fit(features: Features, labels: NDArray[np.int64], l2: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return weights `[F, C]` and biases `[C]`."""
    from scipy.optimize import minimize  # half a second that no worker needs
    from scipy.special import logsumexp

    num_rows, num_features = features.shape
    num_classes = int(labels.max()) + 1
    rows = np.arange(num_rows)
    transposed = features.T if isinstance(features, np.ndarray) else features.T.tocsr()

    def loss(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = flat.reshape(num_features + 1, num_classes)
        # Dense products run in the features' own float32; sums over examples and the search itself in float64.
        logits = (features @ weights[:-1].astype(features.dtype)).astype(np.float64) + weights[-1]
        log_probs = logits - logsumexp(logits, axis=1, keepdims=True)
        value = -log_probs[rows, labels].sum() + 0.5 * l2 * (weights[:-1] ** 2).sum()
        error = np.exp(log_probs)
        error[rows, labels] -= 1.0
        gradient = np.empty_like(weights)
        gradient[:-1] = transposed @ error.astype(features.dtype) + l2 * weights[:-1]
        gradient[-1] = error.sum(0)
        return float(value) / num_rows, gradient.ravel() / num_rows

    start = np.zeros((num_features + 1) * num_classes)
    fit = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": _MAX_STEPS})
    if fit.status == 1:  # the limit; a search that rounding ended is as near as it gets
        sys.stderr.write(f"linear_floor: not at its minimum after {fit.nit} steps, so this floor may be too low\n")
    solution = fit.x.reshape(num_features + 1, num_classes)
    return solution[:-1], solution[-1]


def byte_histogram(tokens: NDArray[np.integer], vocab_size: int, *, pad_id: int | None = 0) -> NDArray[np.float32]:
    """Return how often each token id occurs in each row, `[N, vocab_size]`, as a fraction of the row.

    Args:
        tokens: `[N, L]`, ids below `vocab_size`.
        vocab_size: number of bins.
        pad_id: not counted; None counts every id.

    >>> byte_histogram(np.array([[1, 1, 2, 3], [2, 0, 0, 0]]), 4)
    array([[0.  , 0.5 , 0.25, 0.25],
           [0.  , 0.  , 1.  , 0.  ]], dtype=float32)
    """
    counts = np.empty((len(tokens), vocab_size), np.float32)
    at_once = max(1, _TOKENS_AT_ONCE // max(1, tokens.shape[1]))
    for start in range(0, len(tokens), at_once):
        part = tokens[start : start + at_once]
        index = part.astype(np.int64) + vocab_size * np.arange(len(part))[:, None]
        flat = np.bincount(index.ravel(), minlength=vocab_size * len(part))
        counts[start : start + len(part)] = flat.reshape(len(part), vocab_size)
    if pad_id is not None:
        counts[:, pad_id] = 0.0
    counts /= np.maximum(counts.sum(1, keepdims=True), 1.0)
    return counts
