"""Selective copying: symbols scattered among blanks, to be given back in order at the end.

Arjovsky et al. 2016, arXiv 1511.06464 (copying memory), in the form with random gaps of Gu and Dao 2023, "Mamba", arXiv
2312.00752, section 4.1.1, and of MAD (Poli et al. 2024, arXiv 2403.17844; athms/mad-lab, mad/data/instances.py):
    the first seq_len - M positions hold M symbols, at places drawn without replacement, and blanks; the last M hold
    markers, and the i-th marker's label is the i-th symbol
Unlike MAD's generator, every place is equally likely (there the last symbol always ends the context). All lengths here
count the whole input.

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
from torch import Tensor

from attn_zoo.registry import register_task
from attn_zoo.tasks.context_floors import context_floors, position_majority_floor
from attn_zoo.tasks.contract import IGNORED_LABEL, Example, TaskSpec
from attn_zoo.tasks.drawing import Draws
from attn_zoo.tasks.generated import PAD, AbstractGeneratedTask, GeneratedLevel, Part, Rows

__all__ = ["CopyLevel", "CopyPart", "SelectiveCopying"]

_BLANK, _MARKER, _FIRST_SYMBOL = 1, 2, 3
_WORDS = {PAD: "_", _BLANK: ".", _MARKER: "?"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPart(Part):
    """Examples with so many symbols.

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
class CopyLevel(GeneratedLevel[CopyPart]):
    """One level.

    Args:
        num_symbols: different symbols; blank and marker are not among them.
    """

    num_symbols: int = 14


@final
@register_task("selective_copying")
class SelectiveCopying(AbstractGeneratedTask[CopyPart]):
    """Selective copying at one level.

    Args:
        level: one of `levels`.
        data_dir: not used.
    """

    name: ClassVar[str] = "selective_copying"
    version: ClassVar[int] = 1
    levels: ClassVar[Mapping[str, CopyLevel]] = MappingProxyType(
        {
            "short": CopyLevel(
                parts=tuple(
                    CopyPart(seq_len=64, num_tokens=count, num_train=10_000, num_validation=250, num_test=500)
                    for count in (2, 4, 8, 16)
                ),
                axes=("num_tokens",),
            ),
            "lengths": CopyLevel(
                parts=tuple(
                    CopyPart(seq_len=length, num_tokens=16, num_train=10_000, num_validation=250, num_test=500)
                    for length in (64, 128, 256, 512)
                ),
                axes=("seq_len",),
            ),
            "mad": CopyLevel(
                parts=(CopyPart(seq_len=256, num_tokens=16, num_train=12_800, num_validation=1_280, num_test=1_280),)
            ),
            "long": CopyLevel(
                parts=(CopyPart(seq_len=4_096, num_tokens=16, num_train=20_000, num_validation=500, num_test=1_000),)
            ),
        }
    )
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {"cpu-small": {"batch_size": 64, "base_lr": 3e-3, "num_steps": 4_000, "eval_every": 250}}
    )
    config: CopyLevel

    @property
    def spec(self) -> TaskSpec:
        return self.drawn_spec(_FIRST_SYMBOL + self.config.num_symbols, self.config.num_symbols)

    def draw(self, draws: Draws, part: CopyPart, count: int) -> Rows:
        context_len = part.seq_len - part.num_tokens
        places = np.sort(draws.distinct(context_len, part.num_tokens, count), axis=1)
        symbols = draws.below(self.config.num_symbols, count, part.num_tokens)
        tokens = np.full((count, part.seq_len), _BLANK, np.int64)
        labels = np.full((count, part.seq_len), IGNORED_LABEL, np.int64)
        np.put_along_axis(tokens, places, symbols + _FIRST_SYMBOL, 1)
        tokens[:, context_len:] = _MARKER
        labels[:, context_len:] = symbols
        return Rows(tokens, labels)

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
