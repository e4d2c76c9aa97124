"""What the copying tasks share: symbols among blanks, then as many markers, at which they are asked for in order.

Token ids: 0 padding, 1 blank, 2 marker, then the symbols; class c is the c-th. Chance is uniform over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.tasks.abstract_task import IGNORED_LABEL, Example, TaskSpec
from attn_zoo.tasks.floors.lookup_rules import context_floors, position_majority_floor
from attn_zoo.tasks.generated.generated_task import PAD, AbstractGeneratedTask, GeneratedLevel, PartT, Rows

__all__ = ["AbstractCopyingTask", "SymbolLevel", "copying_rows"]

_BLANK, _MARKER, _FIRST_SYMBOL = 1, 2, 3
_WORDS = {PAD: "_", _BLANK: ".", _MARKER: "?"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SymbolLevel(GeneratedLevel[PartT]):
    """One level.

    Args:
        num_symbols: different symbols.
    """

    num_symbols: int


def copying_rows(symbols: NDArray[np.int64], places: NDArray[np.int64], seq_len: int) -> Rows:
    """Return rows with the symbols at their places, and markers with their labels at the end.

    Args:
        symbols: classes `[N, M]`, in the order in which they are asked for.
        places: positions of them `[N, M]`, before the last M.
        seq_len: tokens of a row.
    """
    count, num_tokens = symbols.shape
    tokens = np.full((count, seq_len), _BLANK, np.int64)
    labels = np.full((count, seq_len), IGNORED_LABEL, np.int64)
    np.put_along_axis(tokens, places, symbols + _FIRST_SYMBOL, 1)
    tokens[:, seq_len - num_tokens :] = _MARKER
    labels[:, seq_len - num_tokens :] = symbols
    return Rows(tokens, labels)


class AbstractCopyingTask(AbstractGeneratedTask[PartT]):
    """A task whose rows `copying_rows` makes."""

    config: SymbolLevel[PartT]

    @property
    def spec(self) -> TaskSpec:
        return self.drawn_spec(_FIRST_SYMBOL + self.config.num_symbols, self.config.num_symbols)

    def floors(self) -> dict[str, float]:
        """Return rules that know which symbols there are but not their order, and the best constant per position."""
        train, test = self.split("train"), self.split("test")
        options = test.tokens.numpy().astype(np.int64) - _FIRST_SYMBOL
        floors = context_floors(options, test.labels.numpy(), train.labels.numpy(), self.config.num_symbols)
        position = position_majority_floor(train.labels.numpy(), test.labels.numpy())
        return {**floors, "majority_of_position": position}

    def show(self, example: Example) -> str:
        """Return such as `. s3 . . s7 ? ? -> s3 s7`."""
        answer = " ".join(f"s{label}" for label in example.label.tolist() if label != IGNORED_LABEL)
        return f"{' '.join(self.symbols(example.tokens))} -> {answer}"

    def symbols(self, tokens: Tensor) -> list[str]:
        return [_WORDS.get(token, f"s{token - _FIRST_SYMBOL}") for token in tokens.tolist()]
