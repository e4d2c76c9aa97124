"""What generated tasks share: distinct examples, mixtures of lengths, compact types, the cache, floors of rules."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import pytest
import torch

from attn_zoo.tasks import Example, TaskSpec
from attn_zoo.tasks.abstract_task import IGNORED_LABEL, Split
from attn_zoo.tasks.floors.lookup_rules import context_floors, floors_of_groups, position_majority_floor
from attn_zoo.tasks.generated import generated_task as generated_module
from attn_zoo.tasks.generated.draws import Draws
from attn_zoo.tasks.generated.generated_task import PAD, AbstractGeneratedTask, GeneratedLevel, Part, Rows
from attn_zoo.tasks.mqar import MultiQueryRecall
from attn_zoo.tasks.needle import Needle
from attn_zoo.tasks.promises import checked_split
from attn_zoo.tasks.sources.tensor_cache import cache_dir


@dataclass(frozen=True, kw_only=True, slots=True)
class BitPart(Part):
    """Rows of bits."""

    scale: float = 1.0


def bits(seq_len: int, count: int, scale: float = 1.0) -> BitPart:
    return BitPart(seq_len=seq_len, num_train=count, num_validation=count // 2, num_test=count // 2, scale=scale)


class Bits(AbstractGeneratedTask[BitPart]):
    """Label of the last place: the parity of the bits."""

    name: ClassVar[str] = "bits_for_a_test"
    version: ClassVar[int] = 1
    levels = MappingProxyType(
        {
            "tight": GeneratedLevel(parts=(bits(4, 8),)),
            "impossible": GeneratedLevel(parts=(bits(4, 9),)),
            "mixed": GeneratedLevel(parts=(bits(6, 20, 0.5), bits(10, 30, 2.5)), axes=("seq_len", "scale")),
        }
    )

    @property
    def spec(self) -> TaskSpec:
        return self.drawn_spec(3, 2)

    def draw(self, draws: Draws, part: BitPart, count: int) -> Rows:
        tokens = draws.below(2, count, part.seq_len) + 1
        labels = np.full(tokens.shape, IGNORED_LABEL)
        labels[:, -1] = (tokens - 1).sum(1) % 2
        return Rows(tokens, labels)

    def floors_on(self, test: Split) -> dict[str, float]:
        return {"ones": float((test.labels[test.labels != IGNORED_LABEL] == 1).float().mean())}

    def show(self, example: Example) -> str:
        return str(example.tokens.tolist())


def rows_of(task) -> list[list[int]]:
    return [
        task.split(n).example(i).tokens.tolist()
        for n in ("train", "validation", "test")
        for i in range(len(task.split(n)))
    ]


def test_duplicates_really_occur_and_are_dropped():
    """There are 16 rows of four bits, and 8 + 4 + 4 are wanted: every one is used once."""
    rows = rows_of(Bits("tight"))
    assert len(rows) == 16
    assert len({tuple(row) for row in rows}) == 16


def test_more_examples_than_there_are_is_an_error_not_a_loop():
    with pytest.raises(ValueError, match="bits_for_a_test impossible: there are fewer distinct examples"):
        Bits("impossible").split("train")


def test_a_mixture_of_lengths_is_padded_and_its_labels_ignored():
    task = Bits("mixed")
    split = task.split("train")
    checked_split(task, "train")
    assert task.spec.has_padding
    assert not Bits("tight").spec.has_padding
    assert split.tokens.shape == (50, 10)
    assert (split.tokens.dtype, split.labels.dtype) == (torch.uint8, torch.int8)
    assert split.lengths.tolist() == [6] * 20 + [10] * 30
    assert (split.tokens[:20, 6:] == PAD).all()
    assert (split.labels[:20, 6:] == IGNORED_LABEL).all()
    assert split.groups is not None
    assert split.groups.tolist() == [[6.0, 0.5]] * 20 + [[10.0, 2.5]] * 30


def test_a_part_without_examples_of_a_split_is_left_out(monkeypatch):
    only_train = BitPart(seq_len=12, num_train=5, num_validation=0, num_test=0)
    level = GeneratedLevel(parts=(bits(6, 10), only_train), axes=("seq_len",))
    monkeypatch.setattr(Bits, "levels", MappingProxyType({"both": level}))
    task = Bits("both")
    assert len(task.split("test")) == 5
    assert task.split("test").tokens.shape == (5, 6)
    assert task.split("train").tokens.shape == (15, 12)


def test_large_levels_are_cached(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path))
    plain = Bits("mixed").split("test")
    assert not list(cache_dir().iterdir())
    monkeypatch.setattr(generated_module, "_CACHED_FROM", 0)
    first = Bits("mixed").split("test")
    (path,) = cache_dir().iterdir()
    assert Bits.digest("mixed") in path.name
    monkeypatch.setattr(Bits, "draw", None)  # must not be needed again
    again = Bits("mixed").split("test")
    for split in (first, again):
        assert torch.equal(split.tokens, plain.tokens)
        assert torch.equal(split.labels, plain.labels)
        assert split.groups is not None
        assert plain.groups is not None
        assert torch.equal(split.groups, plain.groups)
        assert split.other_tokens is None


def test_digest_follows_the_parts(monkeypatch):
    before = Bits.digest("tight")
    monkeypatch.setattr(Bits, "levels", MappingProxyType({"tight": GeneratedLevel(parts=(bits(4, 6),))}))
    assert Bits.digest("tight") != before


def test_floors_of_groups_are_those_of_their_examples():
    """Examples of a group follow each other, so its floor can be had from a slice."""
    labels = Bits("mixed").split("test").labels
    asked = labels[labels != IGNORED_LABEL].float()
    assert floors_of_groups(Bits("mixed")) == {
        0: {"ones": pytest.approx(float(asked[:10].mean()))},
        1: {"ones": pytest.approx(float(asked[10:].mean()))},
    }
    assert floors_of_groups(Bits("tight")) == {}


@pytest.mark.parametrize("kind", [MultiQueryRecall, Needle])
def test_floors_of_groups_sum_up_to_those_of_the_test_set(kind):
    task = kind("short")
    test = task.split("test")
    assert test.groups is not None
    _, group_of = torch.unique(test.groups.double(), dim=0, return_inverse=True)
    found = floors_of_groups(task)
    num_items = [int((test.labels[group_of == index] != IGNORED_LABEL).sum()) for index in found]
    assert len(found) == int(group_of.max()) + 1
    for rule, value in task.floors().items():
        total = sum(count * own[rule] for count, own in zip(num_items, found.values(), strict=True))
        assert total / sum(num_items) == pytest.approx(value)


def test_context_floors_by_hand():
    options = np.array([[-1, 2, 2, 0], [1, -1, 3, -1]])
    labels = np.array([[IGNORED_LABEL, 2, 0], [3, IGNORED_LABEL, IGNORED_LABEL]])
    train = np.array([[3, 3, IGNORED_LABEL], [2, IGNORED_LABEL, IGNORED_LABEL]])
    assert context_floors(options, labels, train, 4) == {
        "majority": pytest.approx(1 / 3),  # 3, right once of three
        "random_of_context": pytest.approx((2 / 3 + 1 / 3 + 1 / 2) / 3),
        "most_frequent_of_context": pytest.approx(1 / 3),  # 2 in row 0; 1 in row 1, the smaller of equals
        "last_of_context": pytest.approx(2 / 3),  # 0 in row 0, 3 in row 1
    }


def test_position_majority_by_hand():
    train = np.array([[1, 5], [1, 4], [0, 4], [2, IGNORED_LABEL]])
    test = np.array([[1, 4], [0, 4], [1, IGNORED_LABEL]])
    assert position_majority_floor(train, test) == pytest.approx(4 / 5)
    assert position_majority_floor(np.full((1, 2), IGNORED_LABEL), test) == 0.0


class Many(Bits):
    """As many ids, and positions, as 16 bits do not hold."""

    name: ClassVar[str] = "many_for_a_test"
    levels = MappingProxyType(
        {"ids": GeneratedLevel(parts=(bits(8, 20),)), "long": GeneratedLevel(parts=(bits(40_000, 2),))}
    )

    @property
    def spec(self) -> TaskSpec:
        return self.drawn_spec(50_000, 50_000)

    def draw(self, draws: Draws, part: BitPart, count: int) -> Rows:
        tokens = draws.below(50_000, count, part.seq_len)
        return Rows(tokens, tokens)


@pytest.mark.parametrize("level", Many.levels)
def test_a_task_may_have_more_ids_and_positions_than_16_bits_hold(level):
    split = checked_split(Many(level), "train")
    assert split.tokens.max() > 2**15
    assert torch.equal(split.tokens, split.labels)
    assert set(split.lengths.tolist()) == {split.tokens.shape[1]}


def test_rows_without_padding_may_be_long():
    tokens = torch.zeros(2, 40_000, dtype=torch.uint8)
    assert Split.without_padding(tokens, torch.zeros(2)).lengths.tolist() == [40_000, 40_000]
