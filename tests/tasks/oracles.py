"""Plain solutions of the recall tasks: read the tokens of one example, say what must be answered and where.

The solutions share no code with the generators and read tokens by the ids that the tasks' docstrings state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_zoo.tasks import Split
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.tasks.induction import Induction
from attn_zoo.tasks.mqar import MultiQueryRecall
from attn_zoo.tasks.needle import Needle
from attn_zoo.tasks.rewriting import Rewriting

Answers = dict[int, int]
"""Label by position."""


def solve_recall(tokens: list[int], num_symbols: int) -> Answers:
    """0 padding, 1 filler, then V / 2 - 1 keys, then values: a key seen before is a question."""
    first_value = num_symbols // 2 + 1
    value_of: dict[int, int] = {}
    answers = {}
    for place, token in enumerate(tokens):
        if 2 <= token < first_value:
            if token in value_of:
                answers[place] = value_of[token]
            else:
                value_of[token] = tokens[place + 1] - first_value
    return answers


def solve_copy(tokens: list[int]) -> Answers:
    """0 padding, 1 blank, 2 marker: the markers ask for the symbols (3 and more) in order."""
    symbols = [token - 3 for token in tokens if token >= 3]
    markers = [place for place, token in enumerate(tokens) if token == 2]
    assert len(symbols) == len(markers)
    return dict(zip(markers, symbols, strict=True))


def solve_induction(tokens: list[int]) -> Answers:
    """0 padding, 1 marker: what followed it the first time, symbols from 2."""
    assert tokens.count(1) == 2
    return {len(tokens) - 1: tokens[tokens.index(1) + 1] - 2}


def solve_needle(tokens: list[int], num_fillers: int, num_keys: int, num_values: int) -> Answers:
    """0 padding, filler, needles (key by key, value by value), questions: the needle of the key that is asked."""
    key = tokens[-1] - (1 + num_fillers + num_keys * num_values)
    needles = [divmod(token - 1 - num_fillers, num_values) for token in tokens[:-1] if token > num_fillers]
    (answer,) = [value for other, value in needles if other == key]
    return {len(tokens) - 1: answer}


def solve_reverse(tokens: list[int]) -> Answers:
    """The source backwards, then the end token (2)."""
    return dict(enumerate([*reversed(tokens), 2]))


def solve_sort(tokens: list[int]) -> Answers:
    """Pairs of key and symbol: the symbols by key, then the end token (2)."""
    pairs = sorted(zip(tokens[0::2], tokens[1::2], strict=True))
    return dict(enumerate([*(symbol for _, symbol in pairs), 2]))


def solver_of(task: Any) -> Callable[[list[int]], Answers]:
    """Return what solves the examples of a task."""
    config = task.config
    if isinstance(task, MultiQueryRecall):
        return lambda tokens: solve_recall(tokens, config.num_symbols)
    if isinstance(task, Needle):
        return lambda tokens: solve_needle(tokens, config.num_fillers, config.num_keys, config.num_values)
    if isinstance(task, Rewriting):
        return solve_reverse if config.rule == "reverse" else solve_sort
    return solve_induction if isinstance(task, Induction) else solve_copy


def answers_of(split: Split, index: int) -> Answers:
    """Return the labels of one example that are scored."""
    label = split.labels[index]
    places = (label != IGNORED_LABEL).nonzero()[:, 0].tolist()
    return {place: int(label[place]) for place in places}
