"""What generated tasks share: examples drawn in chunks, none twice, each with the difficulty it was drawn at.

A level is a mixture of parts; a part holds examples of one difficulty (a number of pairs, a distance), and the task's
group axes are fields of its parts: one training gives a curve, or a heat map, of score against difficulty.

Chunks hold a fixed number of rows, each drawn from the stream (seed, split, part, chunk), and stay in order: the first
examples of a part do not depend on how many follow. Test is drawn first, then validation, then train; rows that
occurred before are left out, so no example is in two splits.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.tasks.abstract_task import IGNORED_LABEL, AbstractCachedTask, Split, SplitName, TaskSpec
from attn_zoo.tasks.generated.draws import STREAMS, Draws, SplitSizes, Unseen

PAD = 0
"""Padding of every generated task."""

_TOKENS_PER_CHUNK, _LEAST_ROWS = 2**17, 64
_CACHED_FROM = 2**24  # tokens of all splits; fewer are drawn within a few seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(SplitSizes):
    """Examples of one difficulty, all equally long. Subclasses add what the difficulty is.

    Args:
        seq_len: tokens of each input.
    """

    seq_len: int


PartT = TypeVar("PartT", bound=Part)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedLevel(Generic[PartT]):
    """One level: a mixture.

    Args:
        parts: what is mixed.
        axes: fields of the parts by which scores are broken down.
        seed: of the drawing.
    """

    parts: tuple[PartT, ...]
    axes: tuple[str, ...] = ()
    seed: int = 0


def grid(part: Callable[..., PartT], num_examples: tuple[int, int, int], **fields: Any) -> tuple[PartT, ...]:
    """Return a part for each combination of the values that are given as tuples, the first field slowest.

    Args:
        part: class of the parts.
        num_examples: of train, validation and test, in every part.
        fields: of the parts, each one value for all or a tuple of values.

    >>> [part.seq_len for part in grid(Part, (100, 10, 10), seq_len=(8, 16))]
    [8, 16]
    """
    sizes = dict(zip(("num_train", "num_validation", "num_test"), num_examples, strict=True))
    values = [value if isinstance(value, tuple) else (value,) for value in fields.values()]
    return tuple(part(**dict(zip(fields, chosen, strict=True)), **sizes) for chosen in itertools.product(*values))


@dataclass(frozen=True, slots=True)
class Rows:
    """Examples of one part, without padding.

    Args:
        tokens: `[N, seq_len]`.
        labels: `[N]`, `[N, seq_len]` or, with a target, `[N, target_len]`; `IGNORED_LABEL` is not scored.
        other_tokens: target as the decoder reads it, `[N, target_len]`.
    """

    tokens: NDArray[np.integer]
    labels: NDArray[np.integer]
    other_tokens: NDArray[np.integer] | None = None


class AbstractGeneratedTask(AbstractCachedTask, Generic[PartT]):
    """A task that is drawn. Subclasses say how one part is drawn; `levels` holds `GeneratedLevel`s."""

    config: GeneratedLevel[PartT]

    @abstractmethod
    def draw(self, draws: Draws, part: PartT, count: int) -> Rows:
        """Return `count` examples of a part; which ones must depend on nothing but the arguments and the level."""

    @abstractmethod
    def floors_on(self, test: Split) -> dict[str, float]:
        """Return what trivial models, fitted on train, score on `test`, by name."""

    def floors(self) -> dict[str, float]:
        return self.floors_on(self.split("test"))

    def drawn_spec(self, vocab_size: int, num_classes: int, **changes: Any) -> TaskSpec:
        """Return the spec of a task with a label per position, scored by accuracy, all classes equally likely."""
        lengths = {part.seq_len for part in self.config.parts}
        fields: dict[str, Any] = {
            "max_seq_len": max(lengths),
            "metric": "accuracy",
            "chance": 1.0 / num_classes,
            "kind": "token_classification",
            "pad_id": PAD,
            "has_padding": len(lengths) > 1,
            "group_axes": self.config.axes,
        }
        return TaskSpec(vocab_size=vocab_size, num_classes=num_classes, **{**fields, **changes})

    @property
    def is_slow(self) -> bool:
        return sum(part.seq_len * part.count(name) for part in self.config.parts for name in STREAMS) >= _CACHED_FROM

    def make(self) -> dict[SplitName, Split]:
        is_new = Unseen()
        return {name: self._draw_split(name, is_new) for name in STREAMS}

    def _draw_split(self, name: SplitName, is_new: Unseen) -> Split:
        parts = [(index, part) for index, part in enumerate(self.config.parts) if part.count(name)]
        drawn = [self._draw_part(name, index, part, is_new) for index, part in parts]
        counts = [part.count(name) for _, part in parts]
        groups = np.array([[float(getattr(part, axis)) for axis in self.config.axes] for _, part in parts], np.float32)
        others = [rows.other_tokens for rows in drawn if rows.other_tokens is not None]
        lengths = [part.seq_len for _, part in parts]
        return Split(
            tokens=_stacked([rows.tokens for rows in drawn], PAD),
            lengths=torch.from_numpy(np.repeat(lengths, counts).astype(np.int32)),
            labels=_stacked([rows.labels for rows in drawn], IGNORED_LABEL),
            other_tokens=_stacked(others, PAD) if others else None,
            other_lengths=(
                torch.from_numpy(np.repeat([other.shape[1] for other in others], counts).astype(np.int32))
                if others
                else None
            ),
            groups=torch.from_numpy(np.repeat(groups, counts, axis=0)) if self.config.axes else None,
        )

    def _draw_part(self, name: SplitName, index: int, part: PartT, is_new: Unseen) -> Rows:
        """Draw chunks until the part has its examples.

        Raises:
            ValueError: chunks yield nothing new.
        """
        wanted, chunk = part.count(name), 0
        per_chunk = max(_LEAST_ROWS, _TOKENS_PER_CHUNK // part.seq_len)
        kept: list[Rows] = []
        while wanted > 0:
            rows = self.draw(Draws(self.config.seed, STREAMS[name], index, chunk), part, per_chunk)
            chunk += 1
            new: list[int] = []
            for row, tokens in enumerate(rows.tokens):
                if is_new(tokens):
                    new.append(row)
                    if len(new) == wanted:
                        break
            if not new:
                raise ValueError(f"{self.name} {self.level}: there are fewer distinct examples than {part} asks for")
            wanted -= len(new)
            other = None if rows.other_tokens is None else _compact(rows.other_tokens[new])
            kept.append(Rows(_compact(rows.tokens[new]), _compact(rows.labels[new]), other))
        others = [rows.other_tokens for rows in kept if rows.other_tokens is not None]
        return Rows(
            np.concatenate([rows.tokens for rows in kept]),
            np.concatenate([rows.labels for rows in kept]),
            np.concatenate(others) if others else None,
        )


def _compact(values: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the values in the smallest type that holds them."""
    return values.astype(_smallest(int(values.min()), int(values.max())))


def _smallest(low: int, high: int) -> type[np.integer]:
    kinds: tuple[type[np.integer], ...] = (np.uint8, np.int8, np.int16, np.int32, np.int64)
    return next(kind for kind in kinds if np.iinfo(kind).min <= low <= high <= np.iinfo(kind).max)


def _stacked(arrays: list[NDArray[np.integer]], fill: int) -> Tensor:
    """Return arrays `[n, w]` below each other, filled on the right, in the smallest type; arrays `[n]` in a row."""
    low, high = min(int(a.min()) for a in arrays), max(int(a.max()) for a in arrays)
    kind = _smallest(min(low, fill), max(high, fill))
    if arrays[0].ndim == 1:
        return torch.from_numpy(np.concatenate(arrays).astype(kind))
    whole = np.full((sum(map(len, arrays)), max(a.shape[1] for a in arrays)), fill, kind)
    first = 0
    for array in arrays:
        whole[first : first + len(array), : array.shape[1]] = array
        first += len(array)
    return torch.from_numpy(whole)
