"""Selective copying: symbols scattered among blanks, to be given back in order at the end.

Arjovsky et al. 2016, arXiv 1511.06464 (copying memory), in the form with random gaps of Gu and Dao 2023, "Mamba", arXiv
2312.00752, section 4.1.1, and of MAD (Poli et al. 2024, arXiv 2403.17844; athms/mad-lab, mad/data/instances.py):
    the first seq_len - M positions hold M symbols, at places drawn without replacement, and blanks; the last M hold
    markers, and the i-th marker's label is the i-th symbol
Unlike MAD's generator, every place is equally likely (there the last symbol always ends the context). All lengths here
count the whole input.

What is asked is to count: the i-th symbol stands where i - 1 others stand before it. Position alone says much all the
same (floor `vote_of_places`): with 2 symbols, weights that fall along the row pick the first, weights that rise the
second, and nothing has to be counted.

Levels:
    short: for CPUs: 64 tokens, 2 to 16 symbols; accuracy against their number.
    lengths: 16 symbols in 64 to 512 tokens; accuracy against length.
    mad: the baseline of MAD: 256 tokens, 16 of them symbols; 12 800 / 1 280.
    long: 4 096 tokens, 16 of them symbols, as in "Mamba".

Token ids: 0 padding, 1 blank, 2 marker, then the 14 symbols; class c is the c-th. Chance is uniform over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np

from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import Split
from attn_zoo.tasks.copying import FIRST_SYMBOL, AbstractCopyingTask, SymbolLevel, copying_rows
from attn_zoo.tasks.floors.lookup_rules import vote_floor
from attn_zoo.tasks.generated.draws import Draws
from attn_zoo.tasks.generated.generated_task import Part, Rows, grid


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPart(Part):
    """Examples with one number of symbols.

    Args:
        num_tokens: M, the symbols to copy.

    Raises:
        ValueError: symbols and markers do not fit.
    """

    num_tokens: int

    def __post_init__(self) -> None:
        if self.seq_len < 2 * self.num_tokens:
            raise ValueError(f"expected a seq_len of at least 2 num_tokens; got {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyLevel(SymbolLevel[CopyPart]):
    """One level.

    Args:
        num_symbols: different symbols; blank and marker are not among them.
    """

    num_symbols: int = 14


@final
@register_task("selective_copying")
class SelectiveCopying(AbstractCopyingTask[CopyPart]):
    """Selective copying at one level."""

    version: ClassVar[int] = 1
    levels: ClassVar[Mapping[str, CopyLevel]] = MappingProxyType(
        {
            "short": CopyLevel(
                parts=grid(CopyPart, (10_000, 250, 500), seq_len=64, num_tokens=(2, 4, 8, 16)), axes=("num_tokens",)
            ),
            "lengths": CopyLevel(
                parts=grid(CopyPart, (10_000, 250, 500), seq_len=(64, 128, 256, 512), num_tokens=16), axes=("seq_len",)
            ),
            "mad": CopyLevel(parts=grid(CopyPart, (12_800, 1_280, 1_280), seq_len=256, num_tokens=16)),
            "long": CopyLevel(parts=grid(CopyPart, (20_000, 500, 1_000), seq_len=4_096, num_tokens=16)),
        }
    )
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {"cpu-small": {"batch_size": 64, "base_lr": 3e-3, "num_steps": 4_000, "eval_every": 250}}
    )

    def floors_on(self, test: Split) -> dict[str, float]:
        """Return also `vote_of_places`, which knows where the i-th symbol tends to stand but does not count.

        Plain copying has no such floor: its places are fixed, and to remember what stood there is all of the task.
        """
        vote = vote_floor(
            self.split("train"), test, lambda tokens: tokens.astype(np.int64) - FIRST_SYMBOL, self.config.num_symbols
        )
        return {**super().floors_on(test), "vote_of_places": vote}

    def draw(self, draws: Draws, part: CopyPart, count: int) -> Rows:
        places = np.sort(draws.distinct(part.seq_len - part.num_tokens, part.num_tokens, count), axis=1)
        symbols = draws.below(self.config.num_symbols, count, part.num_tokens)
        return copying_rows(symbols, places, part.seq_len)
