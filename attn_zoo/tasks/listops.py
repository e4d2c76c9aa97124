"""ListOps: the value of a nested expression over digits, ten classes.

Levels (trees of `attn_zoo.tasks.expressions`):
    short: for CPUs: the same grammar with short, shallow trees.
    short_balanced: the same, with as many examples for every pair of root operator and label.
    lra: generated exactly as Long Range Arena does (lengths 501 to 1999, at most 9 nested operators; 96 000 / 2 000 /
        2 000), but seeded, in order, and without examples shared by splits. The release was drawn without a seed.
    lra_balanced: the same, with as many examples for every pair of root operator and label.
    lra_sm_med: the same as lra with SM and MED alone, whose value a few arguments hardly ever decide.
    lra_release: the published files basic_{train,val,test}.tsv.

Trees are drawn in chunks of a fixed number of roots, each from the stream (seed, split, chunk), and kept in order: the
first examples of a split do not depend on how many follow. Test is drawn first, then validation, then train; a tree
that occurred before is left out.

Balanced: every pair (root operator, label) has the same number of examples in every split, so that neither the most
frequent label nor the root operator says anything. Trees are drawn as always and taken or left. The operator of a root
is independent of everything below it, so a tree may be taken with any of them: it goes to the pair, among those that it
has with one operator or another, that still lacks most examples (of several, the first operator), and is left if none
lacks any. What that cannot balance: a large MIN or a small MAX is likely only with few arguments and many large or
small digits, so a bag of symbols and deeper floors (`attn_zoo.tasks.expressions.ladder`) are still above guessing. Nor
does it balance the root's own arguments: a linear model that knows the symbols near both ends is right in 43 % of
short_balanced and 37 % of lra_balanced (floor `bag_and_ends`).
Examples are shuffled at the end, for rare pairs fill last.

Token ids are fixed: 0 padding, 1 to 10 the digits, 11 [MIN, 12 [MAX, 13 [MED, 14 [SM, 15 the closing bracket. (Long
Range Arena numbers its 15 symbols in the order of a set, so that its ids differ from run to run, and adds one for
unknown symbols.)

The published files have columns Source and Target, tab-separated, CRLF line ends. Each operator is applied to its
arguments one at a time, and at last to the closing bracket: `[MAX 2 9 ]` is `( ( ( [MAX 2 ) 9 ) ] )`. The parentheses
say nothing that the brackets do not, and are no tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.errors import ConfigError
from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import AbstractCachedTask, Example, Split, SplitName, TaskSpec
from attn_zoo.tasks.expressions import (
    CLOSE,
    DIGIT,
    OPERATORS,
    VOCAB_SIZE,
    Bounds,
    Grammar,
    Rung,
    Trees,
    draw_trees,
    has_whole_trees,
    is_operator,
    ladder,
    tree_values,
)
from attn_zoo.tasks.floors.linear_model import byte_histogram, linear_floor
from attn_zoo.tasks.floors.lookup_rules import lookup_floor, majority_floor
from attn_zoo.tasks.generated.draws import STREAMS, Draws, SplitSizes, Unseen
from attn_zoo.tasks.sources.source import Source
from attn_zoo.whole_files import whole_file

_ROOTS_PER_CHUNK = 16_384
_SHUFFLE = 2**32 - 1  # a chunk that is never drawn

_CACHED_FROM = 50_000  # examples; fewer are drawn faster than a file is checked
_DEEPEST_RUNG = 3
_MOST_FITTED = 40_000  # of train, from the first: there are 15 symbols
_NUM_ENDS = 4  # places at each end; with 2 or 6 a part of train that was not fitted is scored less well
_SHORT = Grammar(max_depth=4, max_args=5, min_len=9, max_len=64)
_URL = "https://storage.googleapis.com/long-range-arena/lra_release/listops-1000/"
_FILES: Mapping[str, str] = MappingProxyType(
    {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
)
_RELEASE = Source(
    name="ListOps of Long Range Arena",
    folder="listops-1000",
    files=_FILES,
    hint="They are in lra_release.gz of Long Range Arena, folder listops-1000, and on their own, some 640 MB: "
    "attn-zoo data fetch listops",
    terms="none stated with the files; the code that drew them is under Apache-2.0",
    urls={split: _URL + file for split, file in _FILES.items()},
    num_bytes=640_000_000,
)


_Row = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class ListOpsLevel(SplitSizes):
    """One level.

    Args:
        grammar: distribution of the trees.
        seed: of the drawing.
        is_balanced: as many examples for every pair of root operator and label.
        is_release: read from published files instead of drawn.

    Raises:
        ValueError: a balanced split cannot have that many examples.
    """

    grammar: Grammar = field(default_factory=Grammar)
    num_train: int = 96_000
    num_validation: int = 2_000
    num_test: int = 2_000
    seed: int = 0
    is_balanced: bool = False
    is_release: bool = False

    def __post_init__(self) -> None:
        for name in STREAMS if self.is_balanced else ():
            if self.count(name) % self.num_pairs:
                raise ValueError(f"{name}: expected a multiple of {self.num_pairs} examples; got {self.count(name)}")

    @property
    def num_pairs(self) -> int:
        """How many pairs of root operator and label there are."""
        return 10 * len(self.grammar.operators)


def padded(rows: Sequence[_Row], values: NDArray[np.uint8], width: int) -> Split:
    """Return rows as a split, cut on the right to `width` and filled with padding."""
    lengths = np.array([min(len(row), width) for row in rows], np.int16)
    tokens = np.zeros((len(rows), int(lengths.max(initial=1))), np.uint8)
    for row, target, length in zip(rows, tokens, lengths, strict=True):
        target[:length] = row[:length]
    return Split(tokens=torch.from_numpy(tokens), lengths=torch.from_numpy(lengths), labels=torch.from_numpy(values))


def _chunks(
    level: ListOpsLevel, stream: int, wanted: Callable[[Bounds], NDArray[np.bool_]] | None = None
) -> Iterator[tuple[Trees, list[_Row]]]:
    """Yield drawn trees, also one by one, for ever."""
    for chunk in itertools.count():
        trees = draw_trees(Draws(level.seed, stream, chunk), _ROOTS_PER_CHUNK, level.grammar, wanted)
        yield trees, np.split(trees.tokens, np.cumsum(trees.lengths)[:-1])


def _natural(level: ListOpsLevel, stream: int, count: int, is_new: Unseen) -> Iterator[tuple[_Row, int]]:
    """Yield the first `count` new trees with their values."""
    num_kept = 0
    for trees, rows in _chunks(level, stream):
        for row, value in zip(rows, trees.values.tolist(), strict=False):  # of no trees there is one empty row
            if num_kept == count:
                return
            if is_new(row):
                num_kept += 1
                yield row, value


def _balanced(level: ListOpsLevel, stream: int, count: int, is_new: Unseen) -> Iterator[tuple[_Row, int]]:
    """Yield `count` new trees with their values, as many of every pair."""
    ids = [OPERATORS[name] for name in level.grammar.operators]
    each = np.arange(len(ids))
    lacking = np.full((len(ids), 10), count // level.num_pairs)
    taken: list[tuple[_Row, int]] = []

    def wanted(bounds: Bounds) -> NDArray[np.bool_]:
        low, high = bounds
        open_below = np.concatenate([np.zeros((len(ids), 1), np.int64), np.cumsum(lacking > 0, axis=1)], axis=1)
        is_open = open_below[each, high.astype(np.int64) + 1] > open_below[each, low]
        return np.asarray(is_open.any(axis=1))

    for trees, rows in _chunks(level, stream, wanted):
        # In the end few trees are of any use: one by one are looked at those that some pair wants.
        for index in np.flatnonzero(lacking[each, trees.by_root].any(axis=1)):
            values = trees.by_root[index]
            best = int(lacking[each, values].argmax())
            row, value = rows[index].copy(), int(values[best])
            row[0] = ids[best]
            if lacking[best, value] and is_new(row):
                lacking[best, value] -= 1
                taken.append((row, value))
        if not lacking.any():
            break
    order = Draws(level.seed, stream, _SHUFFLE).words(count).argsort(kind="stable")
    yield from (taken[index] for index in order)


def generate_splits(level: ListOpsLevel) -> dict[SplitName, Split]:
    """Draw the three splits of a level."""
    draw = _balanced if level.is_balanced else _natural
    is_new = Unseen()
    splits: dict[SplitName, Split] = {}
    for name, stream in STREAMS.items():
        rows, values = zip(*draw(level, stream, level.count(name), is_new), strict=True)
        splits[name] = padded(rows, np.array(values, np.uint8), level.grammar.max_len)
    return splits


_STEPS = {"batch_size": 32, "num_steps": 5_000, "warmup_steps": 1_000, "pretrain_mask_prob": 0.1}


@final
@register_task("listops")
class ListOps(AbstractCachedTask):
    """ListOps at one level."""

    version: ClassVar[int] = 1
    levels: ClassVar[Mapping[str, ListOpsLevel]] = MappingProxyType(
        {
            "short": ListOpsLevel(grammar=_SHORT, num_train=40_000, num_validation=1_000, num_test=2_000),
            "short_balanced": ListOpsLevel(
                grammar=_SHORT, num_train=40_000, num_validation=1_000, num_test=2_000, is_balanced=True
            ),
            "lra": ListOpsLevel(),
            "lra_balanced": ListOpsLevel(is_balanced=True),
            "lra_sm_med": ListOpsLevel(grammar=Grammar(operators=("[MED", "[SM"))),
            "lra_release": ListOpsLevel(is_release=True),
        }
    )
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "cpu-small": {"pretrain_mask_prob": 0.1},
            "lra-small": {"eval_every": 50, **_STEPS},
            "lra-original": {
                "num_layers": 4,
                "embed_dim": 512,
                "num_heads": 8,
                "ffn_dim": 1_024,
                "eval_every": 200,
                **_STEPS,
            },
        }
    )

    config: ListOpsLevel

    @classmethod
    def source(cls, level: str) -> Source | None:
        return _RELEASE if cls.levels[level].is_release else None

    @property
    def spec(self) -> TaskSpec:
        # The published maximum is 2000 although no tree is longer than 1999.
        return TaskSpec(
            vocab_size=VOCAB_SIZE,
            num_classes=10,
            max_seq_len=self.config.grammar.max_len,
            metric="accuracy",
            chance=0.1,
            kind="classification",
        )

    @property
    def is_slow(self) -> bool:
        return not self.config.is_release and self.config.num_train >= _CACHED_FROM

    def make(self) -> dict[SplitName, Split]:
        if not self.config.is_release:
            return generate_splits(self.config)
        paths = _RELEASE.locate(self.data_dir)
        return {name: padded(*read_tsv(paths[name]), self.spec.max_seq_len) for name in STREAMS}

    def floors(self) -> dict[str, float]:
        """Return the majority class, the most frequent label of the root operator, and two linear models of each root.

        `symbol_histogram`: logistic regression on the share of each symbol, one for each root operator, fitted on the
        first 40 000 of train. It knows one place and no order: of short expressions that tells a good deal.
        `bag_and_ends`: likewise on the number of each symbol, and on which symbol stands at each of the 4 places
        behind the root operator and the 4 before its closing bracket. Many of those are arguments of the root, but the
        rule knows no nesting.
        """
        train, test = self.split("train"), self.split("test")
        shown = train.select(torch.arange(min(len(train), _MOST_FITTED)))
        shares = [byte_histogram(split.tokens.numpy(), VOCAB_SIZE) for split in (shown, test)]
        both = [
            np.concatenate([share * split.lengths.numpy()[:, None], _symbols_at_ends(split)], 1)
            for share, split in zip(shares, (shown, test), strict=True)
        ]
        labels = train.labels.numpy(), test.labels.numpy()
        first = train.tokens[:, 0].numpy(), test.tokens[:, 0].numpy()
        return {
            "majority": majority_floor(*labels),
            "root_operator": lookup_floor(first[0], labels[0], first[1], labels[1]),
            "symbol_histogram": _linear_by_root(shown, test, *shares),
            "bag_and_ends": _linear_by_root(shown, test, *both),
        }

    def references(self) -> dict[str, float]:
        """Return what reading the tree to some depth gives: rungs of the `ladder` that do not read the whole tree."""
        rungs = self.ladder(min(_DEEPEST_RUNG, self.config.grammar.max_depth - 2))[1:]
        return {f"reads_depth_{rung.depth}": rung.accuracy for rung in rungs}

    def ladder(self, deepest: int = 8) -> list[Rung]:
        """Return what reading the tree to each depth from 0 to `deepest` gives; nothing where rows are cut short."""
        train, test = self.split("train"), self.split("test")
        if not (has_whole_trees(train) and has_whole_trees(test)):
            return []
        return ladder(train, test, range(deepest + 1))

    def show(self, example: Example) -> str:
        return f"{show_tokens(example.tokens.tolist())} = {int(example.label)}"

    def symbols(self, tokens: Tensor) -> list[str]:
        return words_of(tokens.tolist())

    def export(self, name: SplitName, out: Path) -> list[Path]:
        """Write a split in the form that Long Range Arena publishes, columns Source and Target."""
        split = self.split(name)
        with whole_file(out) as temporary:
            rows = (split.example(index).tokens.tolist() for index in range(len(split)))
            write_tsv(temporary, rows, split.labels.tolist())
        return [out]


def _symbols_at_ends(split: Split) -> NDArray[np.float32]:
    """Return as zeros and ones which symbol stands at each place near an end, `[N, 2 _NUM_ENDS VOCAB_SIZE]`.

    The root operator and its bracket are no such places; a place that a short row does not have holds padding.
    """
    bracket = split.lengths.numpy().astype(np.int64)[:, None] - 1
    steps = np.arange(1, _NUM_ENDS + 1)
    places = np.concatenate([np.broadcast_to(steps, (len(split), _NUM_ENDS)), bracket - steps], 1)
    is_there = (places > 0) & (places < bracket)
    symbols = np.take_along_axis(split.tokens.numpy(), np.where(is_there, places, 0), 1) * is_there
    is_symbol: NDArray[np.bool_] = symbols[:, :, None] == np.arange(VOCAB_SIZE)
    return is_symbol.reshape(len(split), -1).astype(np.float32)


def _linear_by_root(
    train: Split, test: Split, train_features: NDArray[np.float32], test_features: NDArray[np.float32]
) -> float:
    """Return the test accuracy of logistic regression on features `[N, F]`, one for each first token."""
    roots, asked_roots = train.tokens[:, 0].numpy(), test.tokens[:, 0].numpy()
    labels, asked_labels = train.labels.numpy(), test.labels.numpy()
    right = 0.0
    for root in np.unique(asked_roots):
        known, wanted = roots == root, asked_roots == root
        if known.any():
            right += wanted.sum() * linear_floor(
                train_features[known], labels[known], test_features[wanted], asked_labels[wanted]
            )
        else:
            right += wanted.sum() * majority_floor(labels, asked_labels[wanted])
    return float(right / len(test))


HEADER = "Source\tTarget"

_WORDS = {CLOSE: "]", **{DIGIT + digit: str(digit) for digit in range(10)}, **{i: w for w, i in OPERATORS.items()}}
_ROWS = 2_048  # evaluated at once
_LETTERS = b"abcd"  # one byte for each operator while reading
_BETWEEN = np.frombuffer(b"() ", np.uint8)
_IDS = np.zeros(256, np.uint8)
for _word_id, _word in _WORDS.items():
    _IDS[_LETTERS[list(OPERATORS).index(_word)] if _word in OPERATORS else ord(_word)] = _word_id


def words_of(tokens: Iterable[int]) -> list[str]:
    """Return the word of each token; padding has none."""
    return [_WORDS.get(int(token), "") for token in tokens]


def show_tokens(tokens: Iterable[int]) -> str:
    """Return the tokens as words: `[MAX 2 9 ]`."""
    return " ".join(_WORDS[int(token)] for token in tokens)


def source_text(tokens: Iterable[int]) -> str:
    """Return the published form of one tree.

    >>> source_text([OPERATORS["[MAX"], DIGIT + 2, DIGIT + 9, CLOSE])
    '( ( ( [MAX 2 ) 9 ) ] )'
    """
    frames: list[list[str]] = [[]]  # name and finished arguments of each open operator
    for token in tokens:
        word = _WORDS[int(token)]
        if word.startswith("["):
            frames.append([word])
            continue
        done = word
        if word == "]":
            name, *arguments = frames.pop()
            done = "".join(["( " * (len(arguments) + 1), name, *(f" {argument} )" for argument in arguments), " ] )"])
        frames[-1].append(done)
    return " ".join(frames[0])


def tokens_of(source: bytes) -> NDArray[np.uint8]:
    """Return the token ids of one published `Source`.

    Raises:
        ValueError: a symbol is not one of the 15, brackets do not match, or an operator has no argument.
    """
    for letter, name in zip(_LETTERS, OPERATORS, strict=True):
        if letter in source:
            raise ValueError(f"unexpected symbol {chr(letter)!r}")
        source = source.replace(name.encode(), bytes([letter]))
    written = np.frombuffer(source, np.uint8)
    is_symbol = ~np.isin(written, _BETWEEN)
    symbols = written[is_symbol]
    tokens: NDArray[np.uint8] = _IDS[symbols]
    if not tokens.all():
        raise ValueError(f"unexpected symbol {chr(symbols[tokens == 0][0])!r}")
    if (is_symbol[1:] & is_symbol[:-1]).any():
        first = int(np.flatnonzero(is_symbol[1:] & is_symbol[:-1])[0])
        raise ValueError(
            f"expected a space between two symbols; there is none after symbol {is_symbol[: first + 1].sum()}"
        )
    opened = np.cumsum(np.where(tokens == CLOSE, -1, is_operator(tokens)))
    if not len(tokens) or opened[-1] != 0 or opened[:-1].min(initial=1) < 1:
        raise ValueError("expected one expression whose brackets match")
    if (is_operator(tokens[:-1]) & (tokens[1:] == CLOSE)).any():
        raise ValueError("expected an argument after each operator")
    return tokens


def _digit(target: bytes) -> int:
    if len(target) != 1 or not target.isdigit():
        raise ValueError(f"expected a digit as target; got {target[:20]!r}")
    return int(target)


def read_tsv(path: Path) -> tuple[list[NDArray[np.uint8]], NDArray[np.uint8]]:
    """Return token ids of each row and the values.

    Raises:
        ConfigError: the file is missing, has no rows, is not of the published form, or gives an expression a value that
            it does not have; names the line.
    """
    if not path.is_file():
        raise ConfigError(str(path), [("", "expected a ListOps file of Long Range Arena; there is none")])
    rows, values = [], []
    with path.open("rb") as file:
        if file.readline().strip() != HEADER.encode():
            raise ConfigError(str(path), [("line 1", f"expected the header {HEADER!r}")])
        for number, line in enumerate(file, start=2):
            source, _, target = line.rstrip(b"\r\n").partition(b"\t")
            try:
                rows.append(tokens_of(source))
                values.append(_digit(target))
            except ValueError as error:
                raise ConfigError(str(path), [(f"line {number}", str(error))]) from None
        if rows and not line.endswith(b"\n"):
            raise ConfigError(str(path), [(f"line {number}", "expected a line end; the file was cut short")])
    if not rows:
        raise ConfigError(str(path), [("line 2", "expected an expression; the file ends after its header")])
    for first in range(0, len(rows), _ROWS):
        true = tree_values(np.concatenate(rows[first : first + _ROWS]))
        for row in np.flatnonzero(true != values[first : first + _ROWS])[:1] + first:
            problem = f"expected the target {true[row - first]}, the value of the expression; got {values[row]}"
            raise ConfigError(str(path), [(f"line {row + 2}", problem)])
    return rows, np.array(values, np.uint8)


def write_tsv(path: Path, rows: Iterable[Iterable[int]], values: Iterable[int]) -> None:
    """Write trees in the published form."""
    with path.open("w", encoding="ascii", newline="") as file:
        file.write(f"{HEADER}\r\n")
        file.writelines(f"{source_text(row)}\t{int(value)}\r\n" for row, value in zip(rows, values, strict=True))
