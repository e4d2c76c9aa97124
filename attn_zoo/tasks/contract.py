"""What a task is: a frozen description, three splits, the floors of trivial models, a text form for people.

A task knows neither models nor attention. What its four kinds put into a `Split` (N examples, L the longest input):

| kind | tokens | other_tokens | labels |
| --- | --- | --- | --- |
| classification | input `[N, L]` | - | class `[N]` |
| pair | first input `[N, L]` | second input `[N, L']` | class `[N]` |
| causal_lm | input `[N, L]` | - | next token `[N, L]` |
| seq2seq | source `[N, L]` | target as the decoder reads it `[N, L']` | next target token `[N, L']` |

A label of -100 is not scored.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from attn_zoo.errors import UnknownNameError

__all__ = ["IGNORED_LABEL", "AbstractTask", "Example", "Split", "SplitName", "TaskKind", "TaskSpec"]

TaskKind = Literal["classification", "causal_lm", "seq2seq", "pair"]
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
        metric: name of the score, such as `"accuracy"`: a fraction, higher is better.
        chance: what guessing uniformly scores.
        kind: what the splits hold (table above).
        pad_id: fills inputs on the right.
        has_padding: inputs differ in length, so models need a `key_padding_mask`.
        other_max_seq_len: longest second input or target; 0 where there is none.
    """

    vocab_size: int
    num_classes: int
    max_seq_len: int
    metric: str
    chance: float
    kind: TaskKind
    pad_id: int = 0
    has_padding: bool = True
    other_max_seq_len: int = 0


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

    Raises:
        ValueError: the tensors do not have the same number of rows, or a length does not fit.
    """

    tokens: Tensor
    lengths: Tensor
    labels: Tensor
    other_tokens: Tensor | None = None
    other_lengths: Tensor | None = None

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
            if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= tokens.shape[1]:
                raise ValueError(f"Split: expected lengths from 1 to L = {tokens.shape[1]}")

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
        return Split(
            tokens=self.tokens[rows],
            lengths=self.lengths[rows],
            labels=self.labels[rows],
            other_tokens=None if self.other_tokens is None else self.other_tokens[rows],
            other_lengths=None if self.other_lengths is None else self.other_lengths[rows],
        )


class AbstractTask(ABC):
    """A task at one level of difficulty. Subclasses are final and registered by `register_task`.

    Class attributes:
        name: the registered name.
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
        self.data_dir = data_dir

    @classmethod
    def check_level(cls, level: str) -> None:
        """Raise `UnknownNameError` unless `level` exists."""
        if level not in cls.levels:
            raise UnknownNameError(f"level of {cls.name}", level, list(cls.levels), f"it has {', '.join(cls.levels)}")

    @classmethod
    def digest(cls, level: str, *, data_dir: Path | None = None) -> str:  # noqa: ARG003 - for tasks that read files
        """Return 16 hexadecimal digits that change when the data would. Makes no data.

        Here the hash of name, version and the level's description; tasks that read files add those.

        Raises:
            UnknownNameError: no such level.
        """
        cls.check_level(level)
        described = json.dumps([cls.name, cls.version, asdict(cls.levels[level])], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()[:16]

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

    @abstractmethod
    def show(self, example: Example) -> str:
        """Return one example as text for people."""

    def check(self, name: SplitName) -> None:
        """Raise `ValueError` if the split does not keep what `spec` promises."""
        split, spec = self.split(name), self.spec
        if len(split) and not 0 <= int(split.tokens.min()) <= int(split.tokens.max()) < spec.vocab_size:
            raise ValueError(f"{self.name}: token ids must be below vocab_size = {spec.vocab_size}")
        if split.tokens.shape[1] > spec.max_seq_len:
            raise ValueError(f"{self.name}: rows of {split.tokens.shape[1]} exceed max_seq_len = {spec.max_seq_len}")
        positions = torch.arange(split.tokens.shape[1])
        padding = positions >= split.lengths.long()[:, None]
        if bool((split.tokens[padding] != spec.pad_id).any()):
            raise ValueError(f"{self.name}: positions beyond the length must hold pad_id = {spec.pad_id}")
        if not spec.has_padding and bool(padding.any()):
            raise ValueError(f"{self.name}: has_padding is False but rows differ in length")
