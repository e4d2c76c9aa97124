"""What a task's `spec` promises, looked for in its splits: a broken promise would be a wrong score, not an error.

Such as rows of several lengths under `has_padding=False`: their padding would be read as tokens, since no batch would
have a mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attn_zoo.errors import ConfigError
from attn_zoo.tasks.abstract_task import IGNORED_LABEL, AbstractTask, Split, SplitName, TaskSpec

_VALUES_AT_ONCE = 1 << 22
"""Of the compact types of a split: wider ones of all of it would be the most memory that a training takes."""


def checked_split(task: AbstractTask, name: SplitName) -> Split:
    """Return a split of a task that keeps what the task promises.

    Raises:
        ConfigError: it has no examples, or a promise is broken; all problems at once.
    """
    split = task.split(name)
    if problems := [(name, problem) for problem in _problems(split, task.spec)]:
        raise ConfigError(f"{task.name} {task.level}", problems)
    return split


def _problems(split: Split, spec: TaskSpec) -> Iterator[str]:
    if not len(split):
        yield "expected examples; there are none"
        return
    other, other_lengths = split.other_tokens, split.other_lengths
    yield from _problems_of_tokens("tokens", split.tokens, split.lengths, spec.vocab_size, spec.max_seq_len, spec)
    if (other is not None) != (spec.kind in ("pair", "seq2seq")):
        yield f"a task of kind {spec.kind} has {'no' if other is not None else 'also'} other_tokens"
    elif other is not None and other_lengths is not None:
        size = max(spec.vocab_size, spec.num_classes) if spec.kind == "seq2seq" else spec.vocab_size
        yield from _problems_of_tokens("other_tokens", other, other_lengths, size, spec.other_max_seq_len, spec)
    width = 0 if split.groups is None else split.groups.shape[1]
    if width != len(spec.group_axes):
        yield f"groups: expected a column for each of {spec.group_axes}; got {width}"
    yield from _problems_of_labels(split, spec)


def _problems_of_tokens(
    name: str, tokens: Tensor, lengths: Tensor, vocab_size: int, max_len: int, spec: TaskSpec
) -> Iterator[str]:
    low, high, width = int(tokens.min()), int(tokens.max()), tokens.shape[1]
    if low < 0 or high >= vocab_size:
        yield f"{name}: expected ids from 0 to {vocab_size - 1}; got {low} to {high}"
    if width > max_len:
        yield f"{name}: expected rows of at most {max_len}; got {width}"
    if not spec.has_padding and int(lengths.min()) < width:
        yield f"{name}: has_padding is False, but rows end before the last position"
    elif _holds_in_padding(tokens, lengths, spec.pad_id):
        yield f"{name}: expected pad_id = {spec.pad_id} beyond the length of each row"


def _problems_of_labels(split: Split, spec: TaskSpec) -> Iterator[str]:
    labels, tokens, lengths = split.labels, split.tokens, split.lengths
    if spec.kind == "seq2seq" and split.other_tokens is not None and split.other_lengths is not None:
        tokens, lengths = split.other_tokens, split.other_lengths
    is_of_positions = spec.kind not in ("classification", "pair")
    shape = tokens.shape if is_of_positions else lengths.shape
    if labels.shape != shape:
        yield f"labels: expected {list(shape)} for a task of kind {spec.kind}; got {list(labels.shape)}"
        return
    if is_of_positions and _holds_in_padding(labels, lengths, IGNORED_LABEL):
        yield f"labels: expected {IGNORED_LABEL} beyond the length of each row"
    every = (part.long() for part in _parts(labels))
    scored = (part[part != IGNORED_LABEL] if is_of_positions else part for part in every)
    ends = [int(end) for part in scored if len(part) for end in part.aminmax()]
    if ends and not 0 <= min(ends) <= max(ends) < spec.num_classes:
        yield f"labels: expected classes from 0 to {spec.num_classes - 1}; got {min(ends)} to {max(ends)}"


def _holds_in_padding(values: Tensor, lengths: Tensor, fill: int) -> bool:
    """Tell whether rows `[N, L]` hold anything but `fill` beyond their lengths."""
    if int(lengths.min()) >= values.shape[1]:
        return False
    place, parts = torch.arange(values.shape[1]), _parts(values)
    ends = torch.split(lengths.long()[:, None], len(parts[0]))
    return any(bool(((rows.long() != fill) & (place >= end)).any()) for rows, end in zip(parts, ends, strict=True))


def _parts(values: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor as rows of which a wider copy is small."""
    return torch.split(values, max(1, _VALUES_AT_ONCE * len(values) // max(1, values.numel())))
