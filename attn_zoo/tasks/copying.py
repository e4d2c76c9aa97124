"""Copying memory: symbols, a delay of blanks, then as many markers, at which the symbols are to be given back in order.

Hochreiter and Schmidhuber 1997; Arjovsky, Shah and Bengio 2016, "Unitary Evolution Recurrent Neural Networks", arXiv
1511.06464, section 4.1; sizes of level `s4` from state-spaces/s4, src/dataloaders/datasets/copying.py.

Blanks also stand before the symbols, so that all rows of a level are equally long whatever the delay; all distances
between a symbol and its marker are M + delay.

Levels:
    short: for CPUs: 64 tokens, 8 symbols, delays of 0 to 48; accuracy against delay.
    s4: 10 symbols, delay 100.
    long: 1 024 tokens, 10 symbols, delays of 0 to 1 000; accuracy against delay.

Token ids: 0 padding, 1 blank, 2 marker, then the 8 symbols; class c is the c-th. Chance is uniform over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import IGNORED_LABEL, Example, Split, TaskSpec
from attn_zoo.tasks.floors.lookup_rules import context_floors, position_majority_floor
from attn_zoo.tasks.generated.draws import Draws
from attn_zoo.tasks.generated.generated_task import PAD, AbstractGeneratedTask, GeneratedLevel, Part, PartT, Rows, grid

FIRST_SYMBOL = 3
_BLANK, _MARKER = 1, 2
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
    np.put_along_axis(tokens, places, symbols + FIRST_SYMBOL, 1)
    tokens[:, seq_len - num_tokens :] = _MARKER
    labels[:, seq_len - num_tokens :] = symbols
    return Rows(tokens, labels)


class AbstractCopyingTask(AbstractGeneratedTask[PartT]):
    """A task whose rows `copying_rows` makes: symbols among blanks, asked for in order by as many markers."""

    config: SymbolLevel[PartT]

    @property
    def spec(self) -> TaskSpec:
        return self.drawn_spec(FIRST_SYMBOL + self.config.num_symbols, self.config.num_symbols)

    def floors_on(self, test: Split) -> dict[str, float]:
        """Return rules that know which symbols there are but not their order, and the best constant per position."""
        train = self.split("train")
        options = test.tokens.numpy().astype(np.int64) - FIRST_SYMBOL
        floors = context_floors(options, test.labels.numpy(), train.labels.numpy(), self.config.num_symbols)
        position = position_majority_floor(train.labels.numpy(), test.labels.numpy())
        return {**floors, "majority_of_position": position}

    def show(self, example: Example) -> str:
        """Return such as `. s3 . . s7 ? ? -> s3 s7`."""
        answer = " ".join(f"s{label}" for label in example.label.tolist() if label != IGNORED_LABEL)
        return f"{' '.join(self.symbols(example.tokens))} -> {answer}"

    def symbols(self, tokens: Tensor) -> list[str]:
        return [_WORDS.get(token, f"s{token - FIRST_SYMBOL}") for token in tokens.tolist()]


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayPart(Part):
    """Examples with one delay.

    Args:
        num_tokens: M, the symbols to copy.
        delay: blanks between the last symbol and the first marker.

    Raises:
        ValueError: symbols, delay and markers do not fit.
    """

    num_tokens: int
    delay: int

    def __post_init__(self) -> None:
        if self.seq_len < 2 * self.num_tokens + self.delay:
            raise ValueError(f"expected a seq_len of at least 2 num_tokens + delay; got {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayLevel(SymbolLevel[DelayPart]):
    """One level.

    Args:
        num_symbols: different symbols; blank and marker are not among them.
    """

    num_symbols: int = 8


@final
@register_task("copying")
class Copying(AbstractCopyingTask[DelayPart]):
    """Copying memory at one level."""

    version: ClassVar[int] = 1
    levels: ClassVar[Mapping[str, DelayLevel]] = MappingProxyType(
        {
            "short": DelayLevel(
                parts=grid(DelayPart, (8_000, 250, 500), seq_len=64, num_tokens=8, delay=(0, 8, 16, 32, 48)),
                axes=("delay",),
            ),
            "s4": DelayLevel(parts=grid(DelayPart, (50_000, 1_000, 1_000), seq_len=120, num_tokens=10, delay=100)),
            "long": DelayLevel(
                parts=grid(
                    DelayPart, (8_000, 250, 500), seq_len=1_024, num_tokens=10, delay=(0, 50, 100, 250, 500, 1_000)
                ),
                axes=("delay",),
            ),
        }
    )
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {"cpu-small": {"batch_size": 64, "base_lr": 2e-3, "num_steps": 500, "eval_every": 100}}
    )

    def draw(self, draws: Draws, part: DelayPart, count: int) -> Rows:
        symbols = draws.below(self.config.num_symbols, count, part.num_tokens)
        first = part.seq_len - 2 * part.num_tokens - part.delay
        places = np.broadcast_to(first + np.arange(part.num_tokens), symbols.shape)
        return copying_rows(symbols, places, part.seq_len)
