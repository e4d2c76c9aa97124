"""What a task is: a frozen description, three splits, the floors of trivial models, a readable form.

A task knows neither models nor attention. What its kinds put into a `Split` (N examples, L the longest input):

| kind | tokens | other_tokens | labels |
| --- | --- | --- | --- |
| classification | input `[N, L]` | - | class `[N]` |
| token_classification | input `[N, L]` | - | class of each position `[N, L]` |
| pair | first input `[N, L]` | second input `[N, L']` | class `[N]` |
| causal_lm | input `[N, L]` | - | next token `[N, L]` |
| seq2seq | source `[N, L]` | target as the decoder reads it `[N, L']` | next target token `[N, L']` |

A label of -100 is not scored. Only `causal_lm` asks for attention that hides later tokens; whether a model for
`token_classification` does is the matrix's choice, so every variant can be tried on recall.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from attn_zoo.errors import UnknownNameError
from attn_zoo.tasks.sources.source import Source
from attn_zoo.tasks.sources.tensor_cache import cached_tensors
from attn_zoo.whole_files import whole_file

TaskKind = Literal["classification", "token_classification", "causal_lm", "seq2seq", "pair"]
Metric = Literal["accuracy", "bits_per_byte"]
"""`accuracy` is a fraction, higher is better; `bits_per_byte` is the loss to base 2, lower is better."""
SplitName = Literal["train", "validation", "test"]

IGNORED_LABEL = -100
"""A label that is not scored: torch's own default for `ignore_index`."""

_NO_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """What a model must know about a task.

    Args:
        vocab_size: token ids are below this; padding included.
        num_classes: labels are below this; for `causal_lm` and `seq2seq` the tokens that can be predicted.
        max_seq_len: longest input, in tokens.
        metric: how scored items are summed up.
        chance: what guessing uniformly scores, in units of the metric.
        kind: what the splits hold (table above).
        pad_id: fills inputs on the right.
        has_padding: inputs differ in length, so models need a `key_padding_mask`.
        other_max_seq_len: longest second input or target; 0 where there is none.
        group_axes: what the columns of `Split.groups` are, such as `("seq_len", "depth")`: scores are also given for
            each combination of their values. One axis makes a curve, two a heat map.
    """

    vocab_size: int
    num_classes: int
    max_seq_len: int
    metric: Metric
    chance: float
    kind: TaskKind
    pad_id: int = 0
    has_padding: bool = True
    other_max_seq_len: int = 0
    group_axes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One row of a split without its padding."""

    tokens: Tensor
    label: Tensor
    other_tokens: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Examples as tensors of the smallest integer type that holds them; the module's table says what each kind puts in.

    Args:
        tokens: integers `[N, L]`, filled with `pad_id` on the right.
        lengths: tokens of each row that are not padding, `[N]`.
        labels: `[N]` or per position.
        other_tokens: `[N, L']`, for kinds with a second sequence.
        other_lengths: `[N]`, likewise.
        groups: float32 `[N, A]`: properties of each example, one column for each of the task's `group_axes`.

    Raises:
        ValueError: the tensors do not have the same number of rows, or a length does not fit.
    """

    tokens: Tensor
    lengths: Tensor
    labels: Tensor
    other_tokens: Tensor | None = None
    other_lengths: Tensor | None = None
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.other_tokens is None) != (self.other_lengths is None):
            raise ValueError("Split: give other_tokens and other_lengths together")
        for tokens, lengths in ((self.tokens, self.lengths), (self.other_tokens, self.other_lengths)):
            if tokens is None or lengths is None:
                continue
            if tokens.ndim != 2 or lengths.shape != tokens.shape[:1] or len(self.labels) != len(tokens):
                raise ValueError(
                    f"Split: expected tokens [N, L], lengths [N], labels [N, ...]; got {tuple(tokens.shape)}, "
                    f"{tuple(lengths.shape)}, {tuple(self.labels.shape)}"
                )
            if self.groups is not None and (self.groups.ndim != 2 or len(self.groups) != len(tokens)):
                raise ValueError(
                    f"Split: expected groups [N, A] with N = {len(tokens)}; got {tuple(self.groups.shape)}"
                )
            if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= tokens.shape[1]:
                raise ValueError(f"Split: expected lengths from 1 to L = {tokens.shape[1]}")

    @classmethod
    def without_padding(cls, tokens: Tensor, labels: Tensor) -> Split:
        """Return examples that are all as long as the rows of `tokens`."""
        return cls(tokens=tokens, lengths=torch.full((len(tokens),), tokens.shape[1], dtype=torch.int32), labels=labels)

    def __len__(self) -> int:
        return len(self.tokens)

    def example(self, index: int) -> Example:
        """Return row `index` without padding."""
        other = None
        if self.other_tokens is not None and self.other_lengths is not None:
            other = self.other_tokens[index, : int(self.other_lengths[index])]
        return Example(
            tokens=self.tokens[index, : int(self.lengths[index])], label=self.labels[index], other_tokens=other
        )

    def select(self, rows: Tensor) -> Split:
        """Return the rows with the given indices, as they are padded here."""
        return Split(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that there are, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


class AbstractTask(ABC):
    """A task at one level of difficulty. Subclasses are final and registered by `register_task`.

    Class attributes:
        name: the registered name, set by `register_task`.
        version: of the code that makes the data; raise it when the same level would yield other data.
        levels: frozen description of each difficulty, by name.
        settings: fields of named training protocols that this task sets, by protocol (published settings differ by
            task, and only a task's own file may know its name).

    Args:
        level: one of `levels`.
        data_dir: folder with data that cannot be generated; None where none is needed.

    Raises:
        UnknownNameError: no such level.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    levels: ClassVar[Mapping[str, Any]]
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = _NO_SETTINGS

    def __init__(self, level: str, *, data_dir: Path | None = None) -> None:
        self.check_level(level)
        self.level = level
        self.config: Any = self.levels[level]
        self.data_dir = data_dir

    @classmethod
    def check_level(cls, level: str) -> None:
        """Raise `UnknownNameError` unless `level` exists."""
        if level not in cls.levels:
            raise UnknownNameError(f"level of {cls.name}", level, list(cls.levels), f"it has {', '.join(cls.levels)}")

    @classmethod
    def digest(cls, level: str, *, data_dir: Path | None = None) -> str:
        """Return 16 hexadecimal digits that change when the data would. Makes no data.

        The hash of name, version, the level's description and, for tasks that read files, those.

        Raises:
            UnknownNameError: no such level.
            ConfigError: a file that the level needs is not here.
        """
        cls.check_level(level)
        described = json.dumps([cls.name, cls.version, asdict(cls.levels[level])], sort_keys=True)
        if (source := cls.source(level)) is not None:
            described += source.digest(data_dir)
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    @classmethod
    def source(cls, level: str) -> Source | None:  # noqa: ARG003 - for tasks that read files
        """Return the files that a level needs and that cannot be generated, or None where it needs none."""
        return None

    @property
    @abstractmethod
    def spec(self) -> TaskSpec:
        """What a model must know. Makes no data."""

    @abstractmethod
    def split(self, name: SplitName) -> Split:
        """Return one split, the same on every call and every machine."""

    @abstractmethod
    def floors(self) -> dict[str, float]:
        """Return what trivial models, fitted on train, score on test, by name; computed, never quoted."""

    def floors_on(self, test: Split) -> dict[str, float]:  # noqa: ARG002 - for tasks that can say
        """Return what the models of `floors`, fitted on train, score on some examples of test, by name.

        Nothing where a task cannot say: then scores for parts of the test set have no floor beside them.
        """
        return {}

    def references(self) -> dict[str, float]:
        """Return what further models score on test that no result has to beat but every reader should know, by name.

        Such as a bag of words for text, or an oracle that reads part of the answer. Computed, never quoted.
        """
        return {}

    @abstractmethod
    def show(self, example: Example) -> str:
        """Return one example as readable text."""

    def export(self, name: SplitName, out: Path) -> list[Path]:
        """Write a split for other programs and return what was written: here one JSON object per example.

        Tasks with a published form, and those of images (`picture_files.export_images`), override this.

        Raises:
            FolderError: `out` exists or cannot be written; no trace is left.
        """
        return export_jsonl(self.split(name), out, group_axes=self.spec.group_axes)

    def symbols(self, tokens: Tensor) -> list[str]:
        """Return a short name for each of the tokens `[L]`, as a figure labels positions; by default the id itself."""
        return [str(token) for token in tokens.tolist()]


def export_jsonl(split: Split, out: Path, *, group_axes: Sequence[str] = ()) -> list[Path]:
    """Write one JSON object per example: `tokens`, `length`, `label`, and where there are any `other_tokens`, `groups`.

    Sequences come without padding. A label of -100 is not scored.

    Raises:
        FolderError: the file exists or cannot be written; no trace is left.
    """
    label_lengths = split.lengths if split.other_lengths is None else split.other_lengths
    with whole_file(out) as temporary, temporary.open("w", encoding="ascii", newline="\n") as file:
        for index in range(len(split)):
            example = split.example(index)
            label = example.label if example.label.ndim == 0 else example.label[: int(label_lengths[index])]
            row: dict[str, Any] = {
                "tokens": example.tokens.tolist(),
                "length": len(example.tokens),
                "label": label.tolist(),
            }
            if example.other_tokens is not None:
                row["other_tokens"] = example.other_tokens.tolist()
            if split.groups is not None:
                row["groups"] = dict(zip(group_axes, split.groups[index].tolist(), strict=True))
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    return [out]


class AbstractCachedTask(AbstractTask):
    """A task that makes its splits at the first use and keeps them."""

    def __init__(self, level: str, *, data_dir: Path | None = None) -> None:
        super().__init__(level, data_dir=data_dir)
        self._splits: dict[SplitName, Split] = {}

    @property
    def is_slow(self) -> bool:
        """Whether making the splits takes longer than a few seconds, so that they are kept in the cache."""
        return False

    @abstractmethod
    def make(self) -> Mapping[SplitName, Split]:
        """Return the splits."""

    def split(self, name: SplitName) -> Split:
        if not self._splits:
            self._splits = dict(self._cached() if self.is_slow else self.make())
        return self._splits[name]

    def _cached(self) -> dict[SplitName, Split]:
        def flat() -> dict[str, Tensor]:
            return {
                f"{name}.{key}": value for name, split in self.make().items() for key, value in split.tensors().items()
            }

        digest = self.digest(self.level, data_dir=self.data_dir)
        parts: dict[SplitName, dict[str, Tensor]] = {name: {} for name in get_args(SplitName)}
        for key, tensor in cached_tensors(f"{self.name}-{self.level}-{digest}", flat).items():
            name, _, field = key.partition(".")
            parts[name][field] = tensor  # type: ignore[index]
        return {name: Split(**tensors) for name, tensors in parts.items() if tensors}


class AbstractFileTask(AbstractCachedTask):
    """A task whose splits are read from the files of its `source`.

    Class attributes:
        files: what every level reads.

    Args:
        level: one of `levels`.
        data_dir: folder to look in first; see `Source.folders`.
    """

    files: ClassVar[Source]

    @classmethod
    def source(cls, level: str) -> Source | None:
        cls.check_level(level)
        return cls.files

    @abstractmethod
    def read(self, paths: dict[str, Path]) -> Mapping[SplitName, Split]:
        """Return the splits.

        Args:
            paths: of the files, by what the source calls them.

        Raises:
            ConfigError: a file does not hold what it should.
        """

    def make(self) -> Mapping[SplitName, Split]:
        source = self.source(self.level)
        assert source is not None, f"{self.name} has no source"
        return self.read(source.locate(self.data_dir))
