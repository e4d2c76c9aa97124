"""Which lengths are tried: they follow the options that are given, and stop where probes would cost too much."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import Tensor

from attn_zoo.conformance import run_checks
from attn_zoo.conformance.lengths import LONGEST, across_blocks, block_sizes, fitting
from attn_zoo.registry import VariantConfig
from tests.conformance.broken import Broken, Softmax, registered, written_out


@dataclass(frozen=True, kw_only=True, slots=True)
class ManyOptions(VariantConfig):
    chunk_len: int = 40
    ranks: tuple[int, ...] = (6, 9)
    num_choices: int = 1
    has_gate: bool = True
    scale: float = 17.0
    seed: int = 10**6
    mode: str = "fast"


class WrongBeyondTwoChunks(Softmax):
    reference = written_out

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        output = super().forward(query, key, value)
        return 1.1 * output if query.shape[-2] == 2 * self.config.chunk_len + 1 else output


def test_blocks_are_the_whole_numbers_among_the_options() -> None:
    assert block_sizes(ManyOptions()) == (6, 9, 40, 10**6)
    assert across_blocks(ManyOptions()) == (7, 10, 13, 19, 41, 81)
    assert across_blocks(ManyOptions(chunk_len=1000))[-1] == 1001 <= LONGEST


def test_lengths_fit_the_multiple_and_the_longest() -> None:
    assert fitting((1, 5, 9, 30), 8, 16) == (8, 16)


@pytest.mark.parametrize("chunk_len", [40, 170, 500])
def test_options_that_are_given_decide_what_is_crossed(chunk_len: int) -> None:
    with registered(Broken(cls=WrongBeyondTwoChunks, check="", config=ManyOptions)) as name:
        (result,) = run_checks(name, {"chunk_len": chunk_len}, checks=["matches_reference"])
    assert result.outcome == "failed"
    assert f"L={2 * chunk_len + 1} " in result.example
