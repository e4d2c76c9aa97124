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

from attn_zoo.registry import register_task
from attn_zoo.tasks.generated.copying_task import AbstractCopyingTask, SymbolLevel, copying_rows
from attn_zoo.tasks.generated.draws import Draws
from attn_zoo.tasks.generated.generated_task import Part, Rows, grid

__all__ = ["Copying", "DelayLevel", "DelayPart"]


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

    name: ClassVar[str] = "copying"
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
