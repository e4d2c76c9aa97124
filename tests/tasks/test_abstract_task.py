"""What any task promises, and that a broken promise is noticed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_zoo.tasks import AbstractTask, Split, TaskSpec

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


def test_check_accepts_what_is_right():
    task_with(split_of()).check("train")


@pytest.mark.parametrize(
    ("split", "spec", "message"),
    [
        (split_of(tokens=((1, 2, 0), (5, 1, 1))), SPEC, "below vocab_size"),
        (split_of(), dataclasses.replace(SPEC, max_seq_len=2), "exceed max_seq_len"),
        (split_of(tokens=((1, 2, 3), (4, 1, 1))), SPEC, "pad_id"),
        (split_of(), dataclasses.replace(SPEC, has_padding=False), "has_padding"),
    ],
)
def test_check_notices_broken_promises(split, spec, message):
    with pytest.raises(ValueError, match=message):
        task_with(split, spec).check("train")


def test_the_digest_changes_with_the_level():
    one, other = task_with(split_of()), task_with(split_of(), dataclasses.replace(SPEC, chance=0.25))
    assert one.digest("one") == one.digest("one") != other.digest("one")
