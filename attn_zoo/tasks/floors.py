"""What trivial models score: a table of the most frequent label for each value of one feature.

A score is meant to be read beside these: on ListOps, most published accuracies are what the root operator alone gives.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["lookup_floor", "majority_floor"]


def lookup_floor(
    train_feature: NDArray[np.integer],
    train_labels: NDArray[np.integer],
    test_feature: NDArray[np.integer],
    test_labels: NDArray[np.integer],
) -> float:
    """Return the test accuracy of "the most frequent training label for this value of the feature".

    Values never seen in training get the majority label; ties go to the smaller label.

    Args:
        train_feature: non-negative integers `[N]`.
        train_labels: classes `[N]`.
        test_feature: `[M]`.
        test_labels: `[M]`.

    >>> lookup_floor(np.array([0, 0, 1]), np.array([3, 3, 5]), np.array([0, 1, 9]), np.array([3, 5, 3]))
    1.0
    """
    num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    num_values = int(max(train_feature.max(), test_feature.max())) + 1
    joint = train_feature.astype(np.int64) * num_classes + train_labels
    counts = np.bincount(joint, minlength=num_values * num_classes).reshape(num_values, num_classes)
    rule = np.where(counts.any(1), counts.argmax(1), counts.sum(0).argmax())
    return float((rule[test_feature.astype(np.int64)] == test_labels).mean())


def majority_floor(train_labels: NDArray[np.integer], test_labels: NDArray[np.integer]) -> float:
    """Return the test accuracy of always answering the most frequent training label."""
    return lookup_floor(np.zeros_like(train_labels), train_labels, np.zeros_like(test_labels), test_labels)
