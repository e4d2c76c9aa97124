"""What trivial rules score: the most frequent label for each value of one feature, a token of the context, a vote.

A score is meant to be read beside these: on ListOps, most published accuracies are what the root operator alone gives.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from attn_zoo.tasks.abstract_task import IGNORED_LABEL, AbstractTask, Split
from attn_zoo.tasks.sources.tensor_cache import cached_tensors

_MOST_TOKENS = 2**24  # of train that a vote is fitted on, for each length of rows
_TOKENS_AT_ONCE = 2**21
_FEWEST_SEEN = 400  # options behind a weight: that is an error of at most 0.025


@cache
def _code(task: type[AbstractTask]) -> str:
    """Return a hash of the files of all tasks and of this one: a changed floor must not be read from the cache."""
    content = hashlib.sha256()
    for path in sorted({*Path(__file__).parents[1].rglob("*.py"), Path(inspect.getfile(task))}):
        content.update(path.read_bytes())
    return content.hexdigest()[:16]


def floors_of(task: AbstractTask) -> dict[str, float]:
    """Return `task.floors()`, computed once for the same data and code: every run of a matrix asks for it."""
    return _once(task, "floors", task.floors)


def references_of(task: AbstractTask) -> dict[str, float]:
    """Return `task.references()`, likewise computed once."""
    return _once(task, "references", task.references)


def floors_of_groups(task: AbstractTask) -> dict[int, dict[str, float]]:
    """Return `task.floors_on` the examples of each group of test, by its place in the order of the groups' values.

    Likewise computed once; nothing for a task without groups, or one that cannot say.
    """

    def compute() -> dict[str, float]:
        test = task.split("test")
        if test.groups is None:
            return {}
        values, group_of = torch.unique(test.groups.double(), dim=0, return_inverse=True)
        parts = ((index, test.select((group_of == index).nonzero()[:, 0])) for index in range(len(values)))
        return {
            f"{index}/{name}": value
            for index, part in parts
            if bool((part.labels != IGNORED_LABEL).any())
            for name, value in task.floors_on(part).items()
        }

    found: dict[int, dict[str, float]] = {}
    for key, value in _once(task, "group-floors", compute).items():
        index, _, name = key.partition("/")
        found.setdefault(int(index), {})[name] = value
    return found


def _once(task: AbstractTask, what: str, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
    digest = task.digest(task.level, data_dir=task.data_dir)

    def tensors() -> dict[str, torch.Tensor]:
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in compute().items()}

    kept = cached_tensors(f"{what}-{task.name}-{task.level}-{digest}-{_code(type(task))}", tensors)
    return {name: float(value) for name, value in kept.items()}


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


def context_floors(
    options: NDArray[np.integer], labels: NDArray[np.integer], train_labels: NDArray[np.integer], num_classes: int
) -> dict[str, float]:
    """Return the accuracy on scored positions of four rules that look at the context but never at what is asked.

    A model that beats these has used the question.

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


def vote_floor(
    train: Split,
    test: Split,
    options_of: Callable[[NDArray[np.integer]], NDArray[np.integer]],
    num_classes: int,
) -> float:
    """Return the test accuracy of a vote of the places of a row, each for the option that it holds.

    For the i-th label of a row, place p votes with the weight

        max(0, P(option at p is the i-th label, where p holds an option) - c)

    as train has it, c being how often a label and an option agree by coincidence. Weights are learnt for each length of
    rows and number of labels, which a row shows; the sum of the votes for each class decides. So the rule knows where
    answers tend to stand and nothing of what stands around them: a model that beats it has looked. Where the place of
    the answer does not depend on the symbols, and all are equally likely, no rule that knows places alone does better.

    Neighbouring places share a weight where fewer than 400 options would be behind it. In rows of a length or number of
    labels that train does not have, all votes weigh the same.

    Args:
        train: fitted on evenly spaced rows, 2^24 tokens of each length.
        test: scored.
        options_of: from tokens `[n, L]` of one length the class that each place would answer `[n, P]`, negative where
            it holds none. Places need not be positions.
        num_classes: classes are below this.
    """
    kinds = {name: _lengths_and_labels(split) for name, split in (("train", train), ("test", test))}
    right = total = 0
    for kind in np.unique(kinds["test"], axis=0):
        fitted, scored = (np.flatnonzero((kinds[name] == kind).all(1)) for name in ("train", "test"))
        length, num_labels = kind.tolist()
        total += len(scored) * num_labels
        weights: Sequence[NDArray[np.float64] | None] = [None] * num_labels
        if len(fitted):
            step = -(-len(fitted) * length // _MOST_TOKENS)
            weights = list(_votes(_asked(train, fitted[::step], length, options_of), num_classes))
        for options, wanted in _asked(test, scored, length, options_of):
            rows, places = np.nonzero(options >= 0)
            cells = rows * num_classes + options[rows, places]
            for weight, label in zip(weights, wanted.T, strict=True):
                votes = None if weight is None else weight[places]
                sums = np.bincount(cells, votes, minlength=len(options) * num_classes)
                right += int((sums.reshape(len(options), num_classes).argmax(1) == label).sum())
    return right / total


def _lengths_and_labels(split: Split) -> NDArray[np.int64]:
    """Return of each row its length and how many labels it has, `[N, 2]`."""
    num_labels = (split.labels != IGNORED_LABEL).sum(1)
    return torch.stack([split.lengths.long(), num_labels], 1).numpy()


def _asked(
    split: Split, rows: NDArray[np.int64], length: int, options_of: Callable[[NDArray[np.integer]], NDArray[np.integer]]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the options `[n, P]` and the labels in their order `[n, Q]` of some rows that are equally long."""
    at_once = max(1, _TOKENS_AT_ONCE // length)
    for first in range(0, len(rows), at_once):
        some = split.select(torch.from_numpy(rows[first : first + at_once]))
        labels = some.labels.numpy()
        wanted = labels[labels != IGNORED_LABEL].reshape(len(labels), -1)
        yield options_of(some.tokens[:, :length].numpy()).astype(np.int64), wanted.astype(np.int64)


def _votes(asked: Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]], num_classes: int) -> NDArray[np.float64]:
    """Return the weight of each place for each label, `[Q, P]`."""
    seen = hits = labelled = offered = np.zeros(1, np.int64)
    for options, wanted in asked:
        is_option = options >= 0
        seen = seen + is_option.sum(0)
        hits = hits + np.stack([(options == label[:, None]).sum(0) for label in wanted.T])
        labelled = labelled + np.bincount(wanted.ravel(), minlength=num_classes)
        offered = offered + np.bincount(options[is_option], minlength=num_classes)
    width = -(-_FEWEST_SEEN * int((seen > 0).sum()) // max(1, int(seen.sum())))
    starts, num_places = np.arange(0, len(seen), max(1, width)), len(seen)
    seen, hits = np.add.reduceat(seen, starts), np.add.reduceat(hits, starts, axis=1)
    coincidence = (labelled / labelled.sum()) @ (offered / max(1, offered.sum()))
    weights: NDArray[np.float64] = np.maximum(0.0, hits / np.maximum(1, seen) - coincidence)
    return weights.repeat(max(1, width), axis=1)[:, :num_places]
