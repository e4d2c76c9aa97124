"""Generated recall tasks: every level against a plain solution that reads the tokens, and what makes them hard."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import subprocess
import sys
from collections import Counter
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from attn_zoo.tasks import AbstractTask, SplitName
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.tasks.byte_lm import ByteLanguageModelling
from attn_zoo.tasks.copying import Copying
from attn_zoo.tasks.floors.lookup_rules import floors_of_groups
from attn_zoo.tasks.induction import Induction, InductionPart
from attn_zoo.tasks.mqar import MultiQueryRecall, RecallPart
from attn_zoo.tasks.needle import Needle, NeedlePart
from attn_zoo.tasks.promises import checked_split
from attn_zoo.tasks.rewriting import Rewriting, RewritingLevel
from attn_zoo.tasks.selective_copying import CopyPart, SelectiveCopying
from attn_zoo.training.protocol import resolve_protocol
from tests.tasks.oracles import Answers, answers_of, solver_of

TASKS: tuple[type[AbstractTask], ...] = (MultiQueryRecall, SelectiveCopying, Copying, Induction, Needle, Rewriting)
LEVELS = [(task, level) for task in TASKS for level in task.levels]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
COUNTS = {"num_train": 24, "num_validation": 6, "num_test": 12}


@pytest.fixture
def shrunk(monkeypatch, tmp_path):
    """Return a function that makes a task with few examples per part; the cache is private."""
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))

    def make(task_class, level, **counts):
        wanted = {**COUNTS, **counts}
        config = task_class.levels[level]
        parts = tuple(
            dataclasses.replace(part, **{key: min(count, getattr(part, key)) for key, count in wanted.items()})
            for part in config.parts
        )
        monkeypatch.setattr(task_class, "levels", MappingProxyType({level: dataclasses.replace(config, parts=parts)}))
        return task_class(level)

    return make


@pytest.mark.parametrize(("task_class", "level"), LEVELS, ids=lambda value: getattr(value, "name", value))
def test_a_plain_solution_gets_every_label_and_there_are_no_others(task_class, level, shrunk):
    task = shrunk(task_class, level)
    solve = solver_of(task)
    for name in SPLITS:
        checked_split(task, name)
        split = task.split(name)
        assert len(split) == sum(part.count(name) for part in task.config.parts)
        for index in range(len(split)):
            expected = solve(split.example(index).tokens.tolist())
            assert answers_of(split, index) == expected
            assert all(0 <= label < task.spec.num_classes for label in expected.values())


@pytest.mark.parametrize(("task_class", "level"), LEVELS, ids=lambda value: getattr(value, "name", value))
def test_groups_are_the_difficulty_that_the_tokens_have(task_class, level, shrunk):
    task = shrunk(task_class, level)
    axes = task.spec.group_axes
    if not axes:
        assert task.split("test").groups is None
        return
    for name in SPLITS:
        split = task.split(name)
        expected = [
            [float(getattr(part, axis)) for axis in axes] for part in task.config.parts for _ in range(part.count(name))
        ]
        assert torch.equal(split.groups, torch.tensor(expected, dtype=torch.float32))
    split = task.split("test")
    for index in range(len(split)):
        measured = measure(task, split.example(index).tokens.tolist(), answers_of(split, index))
        for axis, value in zip(axes, split.groups[index].tolist(), strict=True):
            low, high = measured[axis]
            assert low <= value <= high, (axis, value, measured)


def measure(task: Any, tokens: list[int], answers: Answers) -> dict[str, tuple[float, float]]:
    """Difficulty read from the tokens, as a range in which the group's value must lie."""
    found: dict[str, tuple[float, float]] = {"seq_len": (len(tokens), len(tokens))}
    count = len(answers)
    if isinstance(task, MultiQueryRecall):
        first_pair = next(place for place, token in enumerate(tokens) if token > 1)
        found["num_pairs"] = (count, count)
        found["distance"] = (min(answers) - first_pair,) * 2
    elif isinstance(task, SelectiveCopying):
        found["num_tokens"] = (count, count)
    elif isinstance(task, Copying):
        delay = min(answers) - 1 - max(place for place, token in enumerate(tokens) if token >= 3)
        found["delay"] = (delay, delay)
    elif isinstance(task, Induction):
        distance = len(tokens) - 1 - tokens.index(1)
        found["distance"] = (distance, distance)
    elif isinstance(task, Needle):
        part, config = task.config.parts[0], task.config
        key = tokens[-1] - (1 + config.num_fillers + config.num_keys * config.num_values)
        before = config.num_fillers + key * config.num_values  # the last token before the needles of this key
        (place,) = [at for at, token in enumerate(tokens[:-1]) if 0 < token - before <= config.num_values]
        depth = 100 * place / (len(tokens) - 1)
        slack = part.band_percent / 2 + 100 / (len(tokens) - 1)  # half a band, and rounding to whole places
        found["depth_percent"] = (depth - slack, depth + slack)
    return found


@pytest.mark.parametrize("task_class", TASKS, ids=lambda task: task.name)
def test_no_example_is_in_two_splits_or_twice(task_class, shrunk):
    task = shrunk(task_class, "short", num_train=400, num_test=200, num_validation=100)
    rows = [task.split(name).example(index).tokens.numpy() for name in SPLITS for index in range(len(task.split(name)))]
    texts = {row.tobytes() for row in rows}
    assert len(texts) == len(rows) >= 600 * len(task.config.parts)


@pytest.mark.parametrize("task_class", TASKS, ids=lambda task: task.name)
def test_examples_do_not_depend_on_how_many_follow(task_class, shrunk, monkeypatch):
    few = shrunk(task_class, "short", num_train=24)
    kept = few.split("train")
    monkeypatch.undo()
    task = task_class("short")
    part = task.config.parts[-1]
    more = task.split("train").tokens[-part.num_train :]
    assert torch.equal(more[:24, : part.seq_len], kept.tokens[-24:, : part.seq_len])


@pytest.mark.parametrize("task_class", TASKS, ids=lambda task: task.name)
def test_floors_are_above_chance_and_far_from_solved(task_class):
    task = task_class("short")
    floors = task.floors()
    assert all(0.0 <= value < 0.6 for value in floors.values())
    assert max(floors.values()) > task.spec.chance


def test_random_value_floor_is_one_over_the_number_of_pairs(shrunk):
    floors = shrunk(MultiQueryRecall, "n64", num_train=500, num_test=200).floors()
    assert floors["random_of_context"] == pytest.approx(0.25)
    assert floors["last_of_context"] == pytest.approx(0.25)
    assert floors["majority"] < 0.02


def test_recall_floors_know_that_early_pairs_tend_to_be_asked_first(shrunk):
    """The r-th question for the r-th pair: better than a value at random, and no look at a key."""
    task = shrunk(MultiQueryRecall, "n64", num_train=100, num_test=3_000)
    right = total = 0
    for tokens, labels in zip(task.split("test").tokens.tolist(), task.split("test").labels.tolist(), strict=True):
        values = [value - 4_097 for value in tokens[1:8:2]]
        asked = [label for label in labels if label != IGNORED_LABEL]
        right += sum(value == label for value, label in zip(values, asked, strict=True))
        total += len(asked)
    floors = task.floors()
    assert floors["asked_in_order"] == pytest.approx(right / total)
    assert floors["asked_in_order"] > floors["random_of_context"] + 0.02


def test_recall_floors_know_how_likely_each_question_asks_for_each_pair():
    """The share of each pair among the answers to the r-th question, counted in plain Python; the largest is named."""
    task = MultiQueryRecall("short")
    train, test = task.split("train"), task.split("test")
    often = np.zeros((17, 16, 16), int)  # number of pairs, of the question, of the pair that it asks for

    def questions(split, index):
        answers = answers_of(split, index)
        values = [value - 33 for value in split.tokens[index].tolist()[1 : 2 * len(answers) : 2]]
        for number, (_, label) in enumerate(sorted(answers.items())):
            yield len(answers), number, values.index(label)

    for index in range(len(train)):
        for question in questions(train, index):
            often[question] += 1
    named = [
        often[pairs, number].argmax() == asked for i in range(len(test)) for pairs, number, asked in questions(test, i)
    ]
    assert task.floors()["vote_of_places"] == pytest.approx(np.mean(named), abs=0.002)  # pairs asked equally often


@pytest.mark.parametrize(
    ("task_class", "level", "low", "high"),
    [
        (SelectiveCopying, "short", 0.53, 0.57),
        (Rewriting, "sort", 0.51, 0.55),
        (Induction, "short", 0.25, 0.29),
        (MultiQueryRecall, "short", 0.172, 0.20),
    ],
)
def test_knowing_places_alone_is_worth_more_than_any_other_rule(task_class, level, low, high):
    floors = task_class(level).floors()
    assert max(floors, key=floors.__getitem__) == "vote_of_places"
    assert low < floors["vote_of_places"] < high


def test_two_symbols_are_told_apart_without_counting():
    by_group = floors_of_groups(SelectiveCopying("short"))
    votes = [floors["vote_of_places"] for floors in by_group.values()]
    assert votes == sorted(votes, reverse=True)
    assert votes[0] > 0.97
    assert votes[-1] < 0.5


def test_where_places_are_all_of_the_task_they_are_no_floor():
    assert "vote_of_places" not in Copying("short").floors()
    assert "vote_of_places" not in Rewriting("short").floors()


def test_needle_floor_is_one_over_the_number_of_needles(shrunk):
    assert shrunk(Needle, "short").floors()["random_of_context"] == pytest.approx(0.25)


def test_a_bag_of_tokens_finds_the_needle_and_nothing_that_is_not_there(shrunk, monkeypatch):
    task = shrunk(Needle, "short", num_train=600, num_test=60)
    assert task.references() == {"bag_of_tokens": 1.0}
    for name in ("train", "test"):
        labels = task.split(name).labels
        is_label = labels != IGNORED_LABEL
        order = torch.randperm(int(is_label.sum()), generator=torch.Generator().manual_seed(0))
        labels[is_label] = labels[is_label][order]
    assert task.references()["bag_of_tokens"] < 0.12  # chance is 1 / 16, of 900 rows


def test_values_stand_only_beside_their_keys():
    """So nothing can be copied from the right by a model that sees later tokens."""
    task = MultiQueryRecall("short")
    split = task.split("test")
    first_value = 64 // 2 + 1
    pairs = split.groups
    assert pairs is not None
    for row, count in zip(split.tokens.tolist(), pairs[:, 0].int().tolist(), strict=True):
        assert [token >= first_value for token in row[: 2 * count]] == [False, True] * count
        assert max(row[2 * count :]) < first_value
        keys = row[0 : 2 * count : 2]
        assert sorted(token for token in row[2 * count :] if token > 1) == sorted(keys)
        assert len(set(keys)) == len(set(row[1 : 2 * count : 2])) == count


def test_recall_questions_follow_the_published_power_law(shrunk):
    """Drawn again by numpy's own choice, one row after the other as published: the same mean slot."""
    task = shrunk(MultiQueryRecall, "n64", num_train=20_000)
    asked = (task.split("train").labels != IGNORED_LABEL).nonzero()[:, 1].view(-1, 4).numpy()
    slots = (asked - 8) // 2
    assert slots.min() == 0
    weights = 0.01 * np.arange(1, 29) ** (0.01 - 1.0)
    generator = np.random.default_rng(0)
    published = [generator.choice(28, 4, replace=False, p=weights / weights.sum()) for _ in range(5_000)]
    assert slots.mean() == pytest.approx(np.mean(published), abs=0.15)
    share = Counter(slots.ravel().tolist())[0] / len(slots)
    assert share == pytest.approx(np.mean([0 in row for row in published]), abs=0.02)


def test_levels_have_the_published_sizes():
    levels = MultiQueryRecall.levels
    for length, pairs in ((64, 4), (128, 8), (256, 16), (512, 64)):
        level = levels[f"n{length}"]
        assert [(p.seq_len, p.num_pairs, p.num_train, p.num_test) for p in level.parts] == [
            (length, pairs, 100_000, 3_000)
        ]
        assert (level.num_symbols, level.power) == (8_192, 0.01)
    based = levels["based"].parts
    assert sum(part.num_train for part in based) == 180_000
    assert [(p.seq_len, p.num_pairs) for p in based if p.num_test][-1] == (1_024, 256)
    (mad,) = SelectiveCopying.levels["mad"].parts
    assert (mad.seq_len, mad.num_tokens, mad.num_train, mad.num_test) == (256, 16, 12_800, 1_280)
    (s4,) = Copying.levels["s4"].parts
    assert (s4.seq_len, s4.num_tokens, s4.delay, Copying.levels["s4"].num_symbols) == (120, 10, 100, 8)


def test_selective_copying_puts_symbols_everywhere(shrunk):
    tokens = shrunk(SelectiveCopying, "mad", num_train=4_000).split("train").tokens
    often = (tokens[:, :240] >= 3).double().mean(0)
    assert often.mean() == pytest.approx(16 / 240)
    assert often.min() > 0.045
    assert often.max() < 0.09


def test_induction_without_distance_puts_the_marker_anywhere(shrunk):
    split = shrunk(Induction, "lengths", num_train=3_000).split("train")
    places = (split.tokens[:3_000] == 1).int().argmax(1)  # the first marker of the rows of 64 tokens
    assert places.min() == 0
    assert places.max() == 61
    assert places.double().mean() == pytest.approx(30.5, abs=1.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RecallPart(seq_len=16, num_pairs=5, **COUNTS), "even seq_len of at least 4 num_pairs"),
        (lambda: RecallPart(seq_len=64, num_pairs=4, distance=60, **COUNTS), "distance <= seq_len"),
        (lambda: CopyPart(seq_len=10, num_tokens=6, **COUNTS), "at least 2 num_tokens"),
        (lambda: dataclasses.replace(Copying.levels["s4"].parts[0], delay=101), r"2 num_tokens \+ delay"),
        (lambda: InductionPart(seq_len=8, distance=8, **COUNTS), "distance < seq_len"),
        (
            lambda: NeedlePart(seq_len=64, depth_percent=5, band_percent=20, num_needles=4, **COUNTS),
            "band inside 0 to 100",
        ),
        (lambda: dataclasses.replace(Rewriting.levels["sort"], num_keys=15), "at least 16 keys"),
    ],
)
def test_impossible_difficulties_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("task_class", "expected"),
    [
        (MultiQueryRecall, r"^k\d+ v\d+ k\d+ v\d+ .*k\d+\? -> v\d+"),
        (SelectiveCopying, r"^[s.].* \? \? -> s\d+ s\d+$"),
        (Copying, r"^\. .*s\d+( \?){8} -> s\d+( s\d+){7}$"),
        (Induction, r"^s\d+ .*! (s\d+) ! -> \1$"),
        (Needle, r"(k\d+)(v\d+) .*\1\? -> \2$"),
        (Rewriting, r"^(s\d+) (s\d+) .* -> .* \2 \1 \.$"),
    ],
)
def test_examples_are_readable(task_class, expected):
    task = task_class("short")
    example = task.split("test").example(0)
    assert re.search(expected, task.show(example)), task.show(example)
    names = task.symbols(example.tokens)
    assert len(names) == len(example.tokens)
    assert all(names)


def test_every_token_has_its_own_symbol():
    for task_class in TASKS:
        task = task_class("short")
        names = task.symbols(torch.arange(task.spec.vocab_size))
        assert len(set(names)) == task.spec.vocab_size


def test_same_data_in_another_process():
    code = (
        "import hashlib; from attn_zoo.tasks.mqar import MultiQueryRecall as T; s = T('short').split('train');"
        "print(hashlib.sha256(s.tokens.numpy().tobytes() + s.labels.numpy().tobytes()).hexdigest())"
    )
    here = MultiQueryRecall("short").split("train")
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert hashlib.sha256(here.tokens.numpy().tobytes() + here.labels.numpy().tobytes()).hexdigest() == there


def test_rewriting_targets_start_with_the_start_token_and_shift_the_labels():
    split = Rewriting("sort").split("test")
    assert split.other_tokens is not None
    assert split.other_lengths is not None
    assert (split.other_tokens[:, 0] == 1).all()
    for index in range(0, len(split), 50):
        length = int(split.other_lengths[index])
        assert length == int(split.lengths[index]) // 2 + 1
        assert split.other_tokens[index, 1:length].tolist() == split.labels[index, : length - 1].tolist()
        assert int(split.labels[index, length - 1]) == 2
        assert (split.labels[index, length:] == IGNORED_LABEL).all()
        assert (split.other_tokens[index, length:] == 0).all()


def test_rewriting_spec_covers_its_targets():
    for level in Rewriting.levels:
        config: RewritingLevel = Rewriting.levels[level]
        spec = Rewriting(level).spec
        assert spec.other_max_seq_len == config.target_len(spec.max_seq_len)
        assert spec.num_classes <= spec.vocab_size
        assert spec.chance == pytest.approx(1 / 17)


@pytest.mark.parametrize("task_class", [*TASKS, ByteLanguageModelling], ids=lambda task: task.name)
def test_settings_are_those_of_a_protocol(task_class):
    for protocol, chosen in task_class.settings.items():
        resolved = resolve_protocol(protocol, task_settings=chosen)
        assert {key: getattr(resolved, key) for key in chosen} == dict(chosen)
        assert resolved.num_steps % resolved.eval_every == 0
