"""What rules score on recall tasks that look at the tokens of the context but never at what is asked.

Whoever beats these has used the question.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.tasks.floors.lookup_rules import majority_floor

__all__ = ["context_floors", "position_majority_floor"]


def context_floors(
    options: NDArray[np.integer], labels: NDArray[np.integer], train_labels: NDArray[np.integer], num_classes: int
) -> dict[str, float]:
    """Return the accuracy on scored positions of four rules.

    `majority`: the most frequent training label. `random_of_context`: one of the row's options, drawn at random (its
    expectation). `most_frequent_of_context`: the row's most frequent option, the smallest of equals.
    `last_of_context`: the row's last option.

    Args:
        options: class that each input token would be as an answer, in the order of the input, `[N, L]`; negative for
            tokens that can be no answer. Every row with a label has an option.
        labels: `[N, Q]`; `IGNORED_LABEL` is not scored.
        train_labels: of training, any shape.
        num_classes: classes are below this.
    """
    rows, columns = np.nonzero(labels != IGNORED_LABEL)
    wanted = labels[rows, columns].astype(np.int64)
    is_option = options >= 0
    row_of, _ = np.nonzero(is_option)
    flat = row_of * num_classes + options[is_option].astype(np.int64)
    counts = np.bincount(flat, minlength=len(options) * num_classes).reshape(len(options), num_classes)
    last = options.shape[1] - 1 - is_option[:, ::-1].argmax(1)
    train = train_labels[train_labels != IGNORED_LABEL]
    return {
        "majority": majority_floor(train, wanted),
        "random_of_context": float((counts[rows, wanted] / counts.sum(1)[rows]).mean()),
        "most_frequent_of_context": float((counts.argmax(1)[rows] == wanted).mean()),
        "last_of_context": float((options[np.arange(len(options)), last][rows] == wanted).mean()),
    }


def position_majority_floor(train_labels: NDArray[np.integer], test_labels: NDArray[np.integer]) -> float:
    """Return the test accuracy of the most frequent training label of each position.

    Args:
        train_labels: `[N, Q]`; `IGNORED_LABEL` is not scored.
        test_labels: `[M, Q]`.
    """
    right = total = 0.0
    for train, test in zip(train_labels.T, test_labels.T, strict=True):
        train, test = train[train != IGNORED_LABEL], test[test != IGNORED_LABEL]
        if len(test):
            right += majority_floor(train, test) * len(test) if len(train) else 0.0
            total += len(test)
    return right / total
