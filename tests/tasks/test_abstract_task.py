"""What any task promises, and that a broken promise is noticed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attn_zoo.errors import ConfigError
from attn_zoo.tasks import AbstractTask, Split, TaskSpec, promises
from attn_zoo.tasks.promises import checked_split

SPEC = TaskSpec(vocab_size=5, num_classes=2, max_seq_len=3, metric="accuracy", chance=0.5, kind="classification")


def split_of(tokens=((1, 2, 0), (4, 1, 1)), lengths=(2, 3), labels=(0, 1)) -> Split:
    return Split(tokens=torch.tensor(tokens), lengths=torch.tensor(lengths), labels=torch.tensor(labels))


def task_with(split: Split, described: TaskSpec = SPEC) -> AbstractTask:
    class Task(AbstractTask):
        name, version, levels = "some", 1, {"one": described}

        @property
        def spec(self):
            return described

        def split(self, name):
            return split

        def floors(self):
            return {}

        def show(self, example):
            return str(example.tokens.tolist())

    return Task("one")


def test_examples_lose_their_padding():
    example = split_of().example(0)
    assert (example.tokens.tolist(), int(example.label), example.other_tokens) == ([1, 2], 0, None)


def test_second_sequences_travel_with_their_row():
    pair = dataclasses.replace(
        split_of(), other_tokens=torch.tensor([[7, 0], [8, 9]]), other_lengths=torch.tensor([1, 2])
    )
    assert pair.example(0).other_tokens.tolist() == [7]  # type: ignore[union-attr]
    chosen = pair.select(torch.tensor([1]))
    assert chosen.other_tokens.tolist() == [[8, 9]]  # type: ignore[union-attr]
    assert chosen.labels.tolist() == [1]


@pytest.mark.parametrize(
    "wrong", [{"lengths": (2,)}, {"labels": (1,)}, {"lengths": (2, 4)}, {"lengths": (0, 3)}], ids=str
)
def test_tensors_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match="Split: expected"):
        split_of(**wrong)


def test_one_of_two_second_tensors_is_refused():
    with pytest.raises(ValueError, match="together"):
        dataclasses.replace(split_of(), other_tokens=torch.tensor([[7], [8]]))


def changed_spec(**changes) -> TaskSpec:
    return dataclasses.replace(SPEC, **changes)


PAIR, TOKENS = changed_spec(kind="pair", other_max_seq_len=2), changed_spec(kind="token_classification")
SEQ2SEQ = changed_spec(kind="seq2seq", num_classes=10, other_max_seq_len=2)


def two(labels, other=((4, 0), (3, 3))) -> Split:
    return dataclasses.replace(
        split_of(labels=labels), other_tokens=torch.tensor(other), other_lengths=torch.tensor([1, 2])
    )


@pytest.mark.parametrize(
    ("split", "spec"),
    [
        (split_of(), SPEC),
        (two((0, 1)), PAIR),
        (split_of(labels=((0, 1, -100), (-100, 1, 1))), TOKENS),
        (two(((9, -100), (0, -100)), other=((9, 0), (3, 3))), SEQ2SEQ),
    ],
)
def test_what_keeps_its_promises_is_returned(split, spec):
    assert checked_split(task_with(split, spec), "train") is split


@pytest.mark.parametrize(
    ("split", "spec", "message"),
    [
        (split_of(tokens=((1, 2, 0), (5, 1, 1))), SPEC, "tokens: expected ids from 0 to 4; got 0 to 5"),
        (split_of(tokens=((1, -1, 0), (4, 1, 1))), SPEC, "tokens: expected ids from 0 to 4; got -1 to 4"),
        (split_of(), changed_spec(max_seq_len=2), "tokens: expected rows of at most 2; got 3"),
        (split_of(tokens=((1, 2, 3), (4, 1, 1))), SPEC, "tokens: expected pad_id = 0 beyond"),
        (split_of(), changed_spec(has_padding=False), "tokens: has_padding is False, but rows end before the last"),
        (split_of(), changed_spec(group_axes=("depth",)), "groups: expected a column for each of"),
        (split_of(), PAIR, "a task of kind pair has also other_tokens"),
        (two((0, 1)), SPEC, "a task of kind classification has no other_tokens"),
        (two((0, 1), other=((5, 0), (3, 3))), PAIR, "other_tokens: expected ids from 0 to 4; got 0 to 5"),
        (two((0, 1)), dataclasses.replace(PAIR, other_max_seq_len=1), "other_tokens: expected rows of at most 1"),
        (two((0, 1), other=((4, 4), (3, 3))), PAIR, "other_tokens: expected pad_id"),
        (split_of(labels=(0, 2)), SPEC, "labels: expected classes from 0 to 1; got 0 to 2"),
        (split_of(labels=(0, -100)), SPEC, "labels: expected classes from 0 to 1; got -100 to 0"),
        (split_of(labels=((0, 1, 1), (0, 1, 1))), SPEC, r"labels: expected \[2\] for a task of kind classification"),
        (split_of(labels=(0, 1)), TOKENS, r"labels: expected \[2, 3\] for a task of kind token_classification"),
        (split_of(labels=((0, 1, 1), (-100, 1, 1))), TOKENS, "labels: expected -100 beyond the length"),
        (split_of(labels=((0, 2, -100), (0, 1, 1))), TOKENS, "labels: expected classes from 0 to 1; got 0 to 2"),
        (two(((9, 9), (0, -100))), SEQ2SEQ, "labels: expected -100 beyond the length"),
    ],
)
def test_a_broken_promise_is_named(split, spec, message):
    with pytest.raises(ConfigError, match=f"some one: train: {message}"):
        checked_split(task_with(split, spec), "train")


def test_all_broken_promises_are_named_at_once():
    with pytest.raises(ConfigError, match="2 problems"):
        checked_split(task_with(split_of(tokens=((1, 2, 0), (5, 1, 1)), labels=(0, 2))), "train")


class Sizes(TorchDispatchMode):
    """Notes the bytes of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.made += [each.nbytes for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        return result


def test_no_wide_copy_of_a_split_is_made(monkeypatch):
    monkeypatch.setattr(promises, "_VALUES_AT_ONCE", 64)
    tokens, labels = torch.ones(300, 20, dtype=torch.uint8), torch.ones(300, 20, dtype=torch.int16)
    lengths = torch.full((300,), 20, dtype=torch.uint8)
    tokens[-1, -1], labels[-1, -1], lengths[-1] = 0, -100, 19
    task = task_with(
        Split(tokens=tokens, lengths=lengths, labels=labels), changed_spec(kind="token_classification", max_seq_len=20)
    )
    with Sizes() as sizes:
        checked_split(task, "train")
    assert max(sizes.made) <= 300 * 8  # the lengths
    labels[299, 0] = 2
    with pytest.raises(ConfigError, match="classes from 0 to 1; got 1 to 2"):
        checked_split(task, "train")


def test_the_digest_changes_with_the_level():
    one, other = task_with(split_of()), task_with(split_of(), dataclasses.replace(SPEC, chance=0.25))
    assert one.digest("one") == one.digest("one") != other.digest("one")
