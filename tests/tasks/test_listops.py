"""ListOps as a task: splits, levels, digests, floors, cache, published files."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from types import MappingProxyType

import numpy as np
import pytest
import torch

from attn_zoo.errors import ConfigError, FolderError, UnknownNameError
from attn_zoo.registry import tasks
from attn_zoo.tasks import AbstractTask, Split, SplitName
from attn_zoo.tasks import listops as listops_module
from attn_zoo.tasks.expressions import OPERATORS, Grammar, draw_trees
from attn_zoo.tasks.floors.lookup_rules import lookup_floor, majority_floor
from attn_zoo.tasks.generated.draws import Draws
from attn_zoo.tasks.listops import (
    ListOps,
    ListOpsLevel,
    generate_splits,
    padded,
    read_tsv,
    show_tokens,
    tokens_of,
    write_tsv,
)
from attn_zoo.tasks.promises import checked_split
from attn_zoo.tasks.sources.tensor_cache import cache_dir, cached_tensors
from attn_zoo.training.protocol import resolve_protocol
from tests.tasks.evaluators import by_stack, recursive

TINY = ListOpsLevel(
    grammar=Grammar(max_depth=4, max_args=4, min_len=3, max_len=40), num_train=900, num_validation=60, num_test=80
)
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


@pytest.fixture
def with_level(monkeypatch, tmp_path):
    """Return a function that adds a level to ListOps; the cache is empty and private."""
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))

    def add(name: str, level: ListOpsLevel) -> None:
        monkeypatch.setattr(ListOps, "levels", MappingProxyType({**ListOps.levels, name: level}))

    return add


def strings(split) -> list[bytes]:
    return [split.example(index).tokens.numpy().tobytes() for index in range(len(split))]


def test_it_is_registered_and_keeps_the_contract():
    task_class = tasks["listops"]
    assert task_class is ListOps
    assert issubclass(task_class, AbstractTask)
    task = task_class("short")
    for name in SPLITS:
        checked_split(task, name)
        assert len(task.split(name)) == task.config.count(name)
        assert task.split(name).tokens.dtype == torch.uint8


def test_lra_level_is_the_published_one():
    level = ListOps.levels["lra"]
    assert dataclasses.asdict(level.grammar) == {
        "max_depth": 10,
        "max_args": 10,
        "min_len": 500,
        "max_len": 2000,
        "operators": ("[MIN", "[MAX", "[MED", "[SM"),
    }
    assert (level.num_train, level.num_validation, level.num_test) == (96_000, 2_000, 2_000)
    spec = ListOps("lra").spec
    assert (spec.max_seq_len, spec.num_classes, spec.kind, spec.metric) == (2_000, 10, "classification", "accuracy")


def test_unknown_level_names_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown level of listops 'shrt'; did you mean 'short'"):
        ListOps("shrt")
    with pytest.raises(UnknownNameError, match="level"):
        ListOps.digest("nothing")


def test_no_example_occurs_twice_or_in_two_splits():
    splits = generate_splits(TINY)
    every = [text for name in SPLITS for text in strings(splits[name])]
    assert len(set(every)) == len(every) == 900 + 60 + 80


def test_duplicates_really_occur_and_are_dropped():
    """Only 4 * 100 distinct trees exist, so the drawing has to drop many."""
    level = ListOpsLevel(
        grammar=Grammar(max_depth=2, max_args=2, min_len=3, max_len=5), num_train=300, num_validation=40, num_test=50
    )
    splits = generate_splits(level)
    every = {text for name in SPLITS for text in strings(splits[name])}
    assert len(every) == 390


def test_examples_do_not_depend_on_how_many_follow():
    short, long = generate_splits(TINY), generate_splits(dataclasses.replace(TINY, num_train=2_500))
    assert strings(short["train"]) == strings(long["train"])[:900]
    assert strings(short["test"]) == strings(long["test"])
    assert strings(short["validation"]) == strings(long["validation"])


def test_same_seed_same_data_in_another_process_and_another_seed_other_data():
    code = (
        "import hashlib; from attn_zoo.tasks.listops import ListOps; s = ListOps('short').split('train');"
        "print(hashlib.sha256(s.tokens[:500].numpy().tobytes() + s.labels[:500].numpy().tobytes()).hexdigest())"
    )
    here = ListOps("short").split("train")
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    content = here.tokens[:500].numpy().tobytes() + here.labels[:500].numpy().tobytes()
    assert hashlib.sha256(content).hexdigest() == there
    assert strings(generate_splits(dataclasses.replace(TINY, seed=1))["test"]) != strings(generate_splits(TINY)["test"])


def test_digest_follows_level_and_version(monkeypatch, with_level):
    digests = {ListOps.digest("short"), ListOps.digest("lra")}
    with_level("other", dataclasses.replace(ListOps.levels["short"], seed=1))
    digests.add(ListOps.digest("other"))
    before = ListOps.digest("short")
    monkeypatch.setattr(ListOps, "version", ListOps.version + 1)
    digests.add(ListOps.digest("short"))
    assert len(digests) == 4
    assert before in digests
    assert all(len(digest) == 16 for digest in digests)


@pytest.fixture(scope="module")
def short() -> Iterator[tuple[ListOps, dict[str, float], dict[str, float]]]:
    """The first quarter of a level with its floors and references, which take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        fewer = dataclasses.replace(ListOps.levels["short"], num_train=10_000)
        patch.setattr(ListOps, "levels", MappingProxyType({**ListOps.levels, "fewer": fewer}))
        task = ListOps("fewer")
        yield task, task.floors(), task.references()


def test_floors_are_what_simple_rules_score(short):
    task, floors, references = short
    train, test = task.split("train"), task.split("test")
    answers = {}
    for root in OPERATORS.values():
        answers[root] = torch.bincount(train.labels[train.tokens[:, 0] == root].long()).argmax()
    right = [answers[int(row[0])] == label for row, label in zip(test.tokens, test.labels, strict=True)]
    assert floors["root_operator"] == pytest.approx(np.mean([bool(x) for x in right]))
    majority = torch.bincount(train.labels.long()).argmax()
    assert floors["majority"] == pytest.approx((test.labels == majority).float().mean().item())
    assert 0.1 < floors["majority"] < floors["root_operator"] < floors["symbol_histogram"] < 0.38
    assert 0.40 < floors["bag_and_ends"] < references["reads_depth_1"]


def test_rungs_rise_and_the_first_is_the_root_operator(short):
    task, floors, references = short
    rungs = task.ladder(2)
    assert rungs[0].accuracy == pytest.approx(floors["root_operator"], abs=0.01)
    assert rungs[0].certain_frac == 0.0
    assert [rung.accuracy for rung in rungs] == sorted(rung.accuracy for rung in rungs)
    assert references == {"reads_depth_1": rungs[1].accuracy, "reads_depth_2": rungs[2].accuracy}, "3 reads it all"


@pytest.mark.parametrize("has_unknown_root", [False, True])
def test_symbol_histogram_fits_the_digits_of_each_root_operator(with_level, monkeypatch, has_unknown_root):
    """`[MIN 0 d ]` is 0 and `[MAX 0 d ]` is d: a bag of symbols says which, and a root never seen gets the majority."""
    trees = [[root, 1, digit, 15] for root in (11, 12) for digit in (1, 4, 8)] * 20
    values = [tree[2] - 1 if tree[0] == 12 else 0 for tree in trees]
    train = padded([np.array(tree, np.uint8) for tree in trees], np.array(values, np.uint8), 4)
    if has_unknown_root:
        trees, values = [*trees[:12], [14, 1, 4, 15]], [*values[:12], 3]
    test = padded([np.array(tree, np.uint8) for tree in trees], np.array(values, np.uint8), 4)
    with_level("tiny", TINY)
    monkeypatch.setattr(ListOps, "split", lambda _self, name: train if name == "train" else test)
    assert ListOps("tiny").floors()["symbol_histogram"] == (12 / 13 if has_unknown_root else 1.0)


@pytest.mark.parametrize("place", [1, 4, -2, -5])
def test_ends_are_read_from_both_sides_whatever_the_length(with_level, monkeypatch, place):
    """Rows of 6 to 30 digits whose label is the digit at a place near an end, which their histogram hardly tells."""
    draw = np.random.default_rng(0)

    def rows(count: int, *, at_random: bool) -> Split:
        trees = [np.array([11, *draw.integers(1, 11, draw.integers(6, 31)), 15], np.uint8) for _ in range(count)]
        values = draw.integers(10, size=count) if at_random else [tree[place] - 1 for tree in trees]
        return padded(trees, np.array(values, np.uint8), 40)

    with_level("tiny", TINY)
    for at_random in (False, True):
        train, test = rows(3_000, at_random=at_random), rows(1_000, at_random=at_random)
        monkeypatch.setattr(ListOps, "split", lambda _, name, train=train, test=test: {"train": train}.get(name, test))
        floors = ListOps("tiny").floors()
        if at_random:
            assert abs(floors["bag_and_ends"] - 0.1) < 0.04
        else:
            assert floors["bag_and_ends"] > 0.99
            assert floors["symbol_histogram"] < 0.3


def test_rows_shorter_than_their_ends_are_padded(with_level, monkeypatch):
    """`[MIN 3 4 ]` has two places between operator and bracket, wherever they are counted from."""
    both = padded(
        [np.array([11, 4, 5, 15], np.uint8), np.array([11, 5, 4, 15], np.uint8)], np.array([3, 4], np.uint8), 9
    )
    with_level("tiny", TINY)
    monkeypatch.setattr(ListOps, "split", lambda *_: both)
    floors = ListOps("tiny").floors()
    assert floors["bag_and_ends"] == 1.0
    assert floors["symbol_histogram"] == 0.5


def test_lookup_floor_falls_back_on_the_majority():
    features, labels = np.array([0, 0, 0, 1]), np.array([2, 2, 2, 1])
    assert lookup_floor(features, labels, np.array([1, 5]), np.array([1, 2])) == 1.0
    assert majority_floor(labels, np.array([2, 1, 1, 1])) == 0.25


def test_show_is_readable():
    task = ListOps("short")
    text = task.show(task.split("test").example(0))
    expression, _, value = text.partition(" = ")
    assert expression.startswith("[")
    assert expression.endswith("]")
    assert int(value) == int(task.split("test").labels[0])


def test_large_levels_are_cached_and_the_cache_is_only_a_cache(with_level, monkeypatch):
    monkeypatch.setattr(listops_module, "_CACHED_FROM", 0)
    with_level("tiny", TINY)
    first = ListOps("tiny").split("train")
    (path,) = cache_dir().iterdir()
    assert ListOps.digest("tiny") in path.name
    calls = []

    def counted(level):
        calls.append(level)
        return generate_splits(level)

    monkeypatch.setattr(listops_module, "generate_splits", counted)
    assert torch.equal(ListOps("tiny").split("train").tokens, first.tokens)
    assert not calls
    path.write_bytes(path.read_bytes()[:100])  # cut short
    assert torch.equal(ListOps("tiny").split("train").tokens, first.tokens)
    assert len(calls) == 1
    assert torch.equal(ListOps("tiny").split("train").tokens, first.tokens)
    assert len(calls) == 1


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(blocked / "below"))
    assert cached_tensors("x", lambda: {"a": torch.arange(3)})["a"].tolist() == [0, 1, 2]


def test_published_files_are_read_from_data_dir(tmp_path, with_level):
    drawn = generate_splits(TINY)
    folder = tmp_path / "data" / "listops-1000"
    folder.mkdir(parents=True)
    source = ListOps.source("lra_release")
    assert source is not None
    assert ListOps.source("lra") is None
    assert source.is_fetchable
    assert list(source.files) == ["train", "validation", "test"]
    order: tuple[SplitName, ...] = ("train", "validation", "test")
    for name, file in zip(order, source.files.values(), strict=True):
        rows = [drawn[name].example(index).tokens.tolist() for index in range(len(drawn[name]))]
        write_tsv(folder / file, rows, drawn[name].labels.tolist())
    task = ListOps("lra_release", data_dir=tmp_path / "data")
    for name in SPLITS:
        checked_split(task, name)
        assert strings(task.split(name)) == strings(drawn[name])
        assert torch.equal(task.split(name).labels, drawn[name].labels)
    before = ListOps.digest("lra_release", data_dir=folder)
    write_tsv(folder / "basic_test.tsv", [[13, 2, 2, 15]], [1])
    assert ListOps.digest("lra_release", data_dir=folder) != before


def test_rows_longer_than_the_maximum_are_cut_on_the_right():
    split = padded([np.arange(1, 9, dtype=np.uint8)], np.array([3], np.uint8), 5)
    assert split.tokens.tolist() == [[1, 2, 3, 4, 5]]
    assert split.lengths.tolist() == [5]


def test_missing_published_files_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))
    for call in (
        lambda: ListOps("lra_release").split("train"),
        lambda: ListOps.digest("lra_release", data_dir=tmp_path),
    ):
        with pytest.raises(
            ConfigError, match=r"data_dir: missing basic_train\.tsv, basic_val\.tsv, basic_test\.tsv"
        ) as found:
            call()
        assert "lra_release.gz" in str(found.value)
        assert "attn-zoo data fetch" in str(found.value)


def test_a_split_written_as_published_is_read_back(tmp_path, with_level):
    with_level("tiny", TINY)
    task = ListOps("tiny")
    (path,) = task.export("test", tmp_path / "made" / "basic_test.tsv")
    assert path.read_bytes().startswith(b"Source\tTarget\r\n")
    rows, values = read_tsv(path)
    assert [row.tobytes() for row in rows] == strings(task.split("test"))
    assert values.tolist() == task.split("test").labels.tolist()
    for line, value in zip(path.read_text().splitlines()[1:], values, strict=True):
        assert by_stack(line.partition("\t")[0]) == value
    with pytest.raises(FolderError):
        task.export("test", path)


def test_symbols_name_each_position():
    task = ListOps("short")
    example = task.split("test").example(0)
    assert " ".join(task.symbols(example.tokens)) == task.show(example).partition(" = ")[0]
    assert task.symbols(torch.tensor([13, 1, 10, 15, 0])) == ["[MED", "0", "9", "]", ""]


def pairs_of(split) -> np.ndarray:
    counts = np.zeros((16, 10), int)
    np.add.at(counts, (split.tokens[:, 0].numpy(), split.labels.numpy()), 1)
    return counts[11:15]


def test_balanced_levels_have_equal_counts_of_root_operator_and_label_in_every_split():
    level = dataclasses.replace(TINY, num_train=1_200, num_validation=80, num_test=120, is_balanced=True)
    splits = generate_splits(level)
    for name in SPLITS:
        assert (pairs_of(splits[name]) == level.count(name) // 40).all()
    every = [text for name in SPLITS for text in strings(splits[name])]
    assert len(set(every)) == len(every) == 1_400
    for index in range(0, 1_200, 7):
        example = splits["train"].example(index)
        assert recursive(show_tokens(example.tokens.tolist()).split()) == (int(example.label), [])
    again = generate_splits(level)
    assert strings(again["train"]) == strings(splits["train"])
    halves = pairs_of(splits["train"].select(torch.arange(600)))
    assert halves.min() > 3, "examples are shuffled: rare pairs do not stand at the end"


def test_a_balanced_level_cannot_have_any_number_of_examples():
    with pytest.raises(ValueError, match="test: expected a multiple of 40 examples; got 50"):
        ListOpsLevel(num_test=50, is_balanced=True)
    two = ListOpsLevel(grammar=Grammar(operators=("[MED", "[SM")), num_test=20, is_balanced=True)
    assert two.num_pairs == 20


def test_a_balanced_level_leaves_nothing_to_the_root_operator(with_level):
    """Half of one that is registered."""
    with_level("fewer", dataclasses.replace(ListOps.levels["short_balanced"], num_train=20_000))
    task = ListOps("fewer")
    floors = task.floors()
    assert floors["majority"] == 0.1
    assert floors["root_operator"] == 0.1
    assert 0.40 < floors["bag_and_ends"] < 0.46, "what balancing cannot take away either"
    assert task.references()["reads_depth_1"] > 0.15, "what balancing roots cannot take away"


def test_sm_med_level_has_these_operators_only():
    grammar = ListOps.levels["lra_sm_med"].grammar
    trees = draw_trees(Draws(0), 8_192, grammar)
    used = set(np.unique(trees.tokens[trees.tokens > 10]).tolist())
    assert used == {OPERATORS["[MED"], OPERATORS["[SM"], 15}
    assert dataclasses.replace(grammar, operators=Grammar().operators) == Grammar(), "otherwise the published grammar"


class TestTraps:
    """Faults of published code that must not be ours."""

    def test_data_are_seeded_and_pinned(self):
        """The published generator had no seed. Changed data need a new `version`, and then new digits here."""
        assert ListOps.version == 1
        split = ListOps("short").split("test")
        content = hashlib.sha256(split.tokens.numpy().tobytes() + split.labels.numpy().tobytes()).hexdigest()
        assert content[:16] == PINNED_SHORT_TEST

    def test_the_median_of_an_even_count_is_truncated_in_task_and_evaluators(self):
        med, digit, close = OPERATORS["[MED"], 1, 15
        trees = draw_trees(
            Draws(2), 30_000, Grammar(max_depth=2, max_args=2, min_len=3, max_len=10, operators=("[MED",))
        )
        rows = trees.tokens.reshape(-1, 4)
        low, high = np.sort(rows[:, 1:3].astype(int) - digit, axis=1).T
        assert (rows[:, 0] == med).all()
        assert (rows[:, 3] == close).all()
        is_odd = (low + high) % 2 == 1
        assert is_odd.sum() > 1_000
        assert (trees.values == (low + high) // 2).all(), "2 and 3 give 2, neither 3 nor 2.5"
        assert recursive(["[MED", "2", "3", "]"]) == (2, [])

    def test_no_word_is_unknown_and_ids_do_not_depend_on_the_data(self):
        words = ListOps("short").symbols(torch.arange(16))
        assert words == ["", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"]

    def test_a_last_partial_batch_is_no_reason_to_drop_examples(self):
        assert len(ListOps("short").split("test")) == ListOps.levels["short"].num_test

    @pytest.mark.parametrize("name", ["lra-small", "lra-original"])
    def test_settings_are_those_of_the_published_configurations(self, name):
        protocol = resolve_protocol(name, task_settings=ListOps.settings[name])
        got = {key: getattr(protocol, key) for key in PUBLISHED[name]}
        assert got == PUBLISHED[name]


PINNED_SHORT_TEST = "1d1dcebff3b6eabf"
# mlpen/Nystromformer, LRA/code/lra_config.py; google-research/long-range-arena, lra_benchmarks/listops/configs/base.
PUBLISHED = {
    "lra-small": {
        "num_layers": 2,
        "embed_dim": 64,
        "num_heads": 2,
        "ffn_dim": 128,
        "position": "learned",
        "pooling": "mean",
        "norm_order": "pre",
        "dropout_p": 0.1,
        "resid_dropout_p": 0.1,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.0,
        "base_lr": 1e-4,
        "schedule": "linear",
        "warmup_steps": 1_000,
        "num_steps": 5_000,
        "batch_size": 32,
        "eval_every": 50,
    },
    "lra-original": {
        "num_layers": 4,
        "embed_dim": 512,
        "num_heads": 8,
        "ffn_dim": 1_024,
        "position": "sinusoidal",
        "pooling": "cls",
        "norm_order": "pre",
        "dropout_p": 0.1,
        "resid_dropout_p": 0.1,
        "betas": (0.9, 0.98),
        "eps": 1e-9,
        "weight_decay": 0.1,
        "base_lr": 0.05,
        "schedule": "rsqrt",
        "warmup_steps": 1_000,
        "num_steps": 5_000,
        "batch_size": 32,
    },
}


def test_a_file_that_was_cut_is_refused(tmp_path):
    path = tmp_path / "basic_train.tsv"
    rows = [tokens_of(b"[MAX 2 9 ]"), tokens_of(b"[MIN 4 7 ]")]
    write_tsv(path, rows, [9, 4])
    assert read_tsv(path)[1].tolist() == [9, 4]
    path.write_bytes(path.read_bytes().removesuffix(b"\r\n"))
    with pytest.raises(ConfigError, match="line 3: expected a line end; the file was cut short"):
        read_tsv(path)
