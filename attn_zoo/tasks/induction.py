"""Induction heads: random symbols; what followed the marker the first time must be said when it comes again.

Olsson et al. 2022, arXiv 2209.11895; as a task: Fu et al. 2023, "Hungry Hungry Hippos", arXiv 2212.14052, section 3.1
(HazyResearch/safari, src/dataloaders/synthetics.py), and Gu and Dao 2023, "Mamba", arXiv 2312.00752, section 4.1.2:
    symbols are uniform; one place holds the marker, the next the symbol to remember; the last token is the marker
    again, and the symbol is its label (no other position has one)

Train and test have the same lengths: growing beyond them is asked of no variant, since many have a greatest length.

Levels:
    short: for CPUs: 64 tokens, the two markers 2 to 63 apart; accuracy against distance.
    lengths: 64 to 256 tokens, the first marker anywhere; accuracy against length.
    long: 2 048 tokens, the two markers 2 to 2 047 apart; accuracy against distance.

Token ids: 0 padding, 1 marker, then the symbols; class c is the c-th. Chance is uniform over them.
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
from attn_zoo.tasks.floors.lookup_rules import context_floors, vote_floor
from attn_zoo.tasks.generated.draws import Draws
from attn_zoo.tasks.generated.generated_task import PAD, AbstractGeneratedTask, GeneratedLevel, Part, Rows, grid

_MARKER, _FIRST_SYMBOL = 1, 2
_WORDS = {PAD: "_", _MARKER: "!"}


@dataclass(frozen=True, kw_only=True, slots=True)
class InductionPart(Part):
    """Examples with one distance between the markers.

    Args:
        distance: between the two markers; 0 draws the first marker's place uniformly.

    Raises:
        ValueError: the distance does not fit.
    """

    distance: int = 0

    def __post_init__(self) -> None:
        if self.seq_len < 3 or (self.distance and not 2 <= self.distance < self.seq_len):
            raise ValueError(f"expected 2 <= distance < seq_len; got {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class InductionLevel(GeneratedLevel[InductionPart]):
    """One level.

    Args:
        num_symbols: different symbols; the marker is not among them.
    """

    num_symbols: int = 16


def _options(tokens: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the class of each token, negative where it is no symbol."""
    return tokens.astype(np.int64) - _FIRST_SYMBOL


@final
@register_task("induction")
class Induction(AbstractGeneratedTask[InductionPart]):
    """Induction heads at one level."""

    version: ClassVar[int] = 1
    levels: ClassVar[Mapping[str, InductionLevel]] = MappingProxyType(
        {
            "short": InductionLevel(
                parts=grid(InductionPart, (8_000, 250, 500), seq_len=64, distance=(2, 4, 8, 16, 32, 48, 63)),
                axes=("distance",),
            ),
            "lengths": InductionLevel(
                parts=grid(InductionPart, (16_000, 400, 1_000), seq_len=(64, 128, 256)), axes=("seq_len",)
            ),
            "long": InductionLevel(
                parts=grid(
                    InductionPart, (4_000, 100, 200), seq_len=2_048, distance=(2, 16, 64, 256, 512, 1_024, 1_536, 2_047)
                ),
                axes=("distance",),
            ),
        }
    )
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {"cpu-small": {"batch_size": 64, "base_lr": 2e-3, "num_steps": 1_000, "eval_every": 100}}
    )
    config: InductionLevel

    @property
    def spec(self) -> TaskSpec:
        return self.drawn_spec(_FIRST_SYMBOL + self.config.num_symbols, self.config.num_symbols)

    def draw(self, draws: Draws, part: InductionPart, count: int) -> Rows:
        row, last = np.arange(count), part.seq_len - 1
        place = np.full(count, last - part.distance) if part.distance else draws.below(last - 1, count)
        symbols = draws.below(self.config.num_symbols, count, part.seq_len)
        tokens = symbols + _FIRST_SYMBOL
        tokens[row, place] = tokens[:, last] = _MARKER
        labels = np.full((count, part.seq_len), IGNORED_LABEL, np.int64)
        labels[:, last] = symbols[row, place + 1]
        return Rows(tokens, labels)

    def floors_on(self, test: Split) -> dict[str, float]:
        """Return rules that name a symbol of the row without looking for the marker.

        `vote_of_places` knows the distances at which the level puts it, not which of them this row has.
        """
        train, size = self.split("train"), self.config.num_symbols
        floors = context_floors(_options(test.tokens.numpy()), test.labels.numpy(), train.labels.numpy(), size)
        return {**floors, "vote_of_places": vote_floor(train, test, _options, size)}

    def show(self, example: Example) -> str:
        """Return such as `s3 s1 ! s7 s2 s1 ! -> s7`."""
        return f"{' '.join(self.symbols(example.tokens))} -> s{int(example.label[len(example.tokens) - 1])}"

    def symbols(self, tokens: Tensor) -> list[str]:
        return [_WORDS.get(token, f"s{token - _FIRST_SYMBOL}") for token in tokens.tolist()]
