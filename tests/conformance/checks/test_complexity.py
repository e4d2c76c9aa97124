"""The measured complexity table: claims that are read, chains and paths that are counted, what is contradicted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo.attention import Mixed
from attn_zoo.conformance import measure_complexity, run_checks
from attn_zoo.conformance.checks.complexity import Growth, claimed_exponent
from attn_zoo.errors import ConfigError, UnknownNameError
from attn_zoo.metadata import NEVER, Complexity
from attn_zoo.registry import VariantConfig
from tests.conformance.broken import Broken, Softmax, SoftmaxMixer, registered
from tests.conformance.broken_claims import SeesNeighboursOnly, SumsKeysInTurn
from tests.conformance.broken_contract import CARRY, SoundCarry


@pytest.mark.parametrize(
    ("text", "exponent"),
    [
        ("1", 0),
        ("2", 0),
        ("log L", 0),
        ("log(L / C)", 0),
        ("log_2 L", 0),
        ("L", 1),
        ("L / W", 1),
        ("L/k", 1),
        ("L log L", 1),
        ("2 L + C", 1),
        ("S k + 1", 1),
        ("L^2 D", 2),
        ("L^1.5", 1.5),
        ("L S", 2),
        ("L / L", 0),
        ("sqrt(L)", 0.5),
        ("sqrt(L) C", 0.5),
        ("1 (causal: L)", 0),
    ],
)
def test_claims_are_read(text: str, exponent: float):
    assert claimed_exponent(text) == exponent


def test_a_claim_may_differ_for_the_causal_form():
    assert claimed_exponent("1 (causal: L / C)", is_causal=True) == 1
    assert claimed_exponent("L", is_causal=True) == 1


def test_where_the_data_decide_nothing_is_contradicted():
    assert claimed_exponent("depends on the data") is None
    assert claimed_exponent("1 (causal: depends on the data)", is_causal=True) is None
    assert not Growth(None, 1.0).is_contradicted


@pytest.mark.parametrize("text", ["", "a few", "n", "N / w", "L (L + 1)", "1 (bidirectional: L)", "L +", "?"])
def test_claims_that_cannot_be_read_are_refused(text: str):
    with pytest.raises(ConfigError, match="or a sum of products such as") as caught:
        claimed_exponent(text)
    assert repr(text) in str(caught.value)


def measured(cls: type[Any], **changes: Any) -> tuple[tuple[float | None, float | None, float | None], ...]:
    with registered(Broken(cls=cls, check="", **changes)) as name:
        rows = measure_complexity(name)
    return tuple((row.cost.measured, row.sequential_ops.measured, row.max_path.measured) for row in rows)


def test_softmax_is_quadratic_parallel_and_direct():
    assert measured(Softmax, capabilities={"causal": True}) == ((2.0, 0.0, 0.0), (2.0, 0.0, 0.0))
    assert measured(SoftmaxMixer) == ((2.0, 0.0, 0.0),)


def test_a_loop_is_sequential_and_its_path_as_long():
    ((cost, sequential, path),) = measured(SumsKeysInTurn)
    assert cost == 2.0
    assert sequential == pytest.approx(1, abs=0.2)
    assert path == pytest.approx(1, abs=0.2)


def test_a_window_needs_layers_in_proportion_to_the_length():
    ((_, sequential, path),) = measured(SeesNeighboursOnly)
    assert sequential == 0
    assert path == pytest.approx(1, abs=0.1)


def test_lengths_are_multiples_of_what_the_variant_accepts():
    for multiple in (24, 160):
        assert measured(Softmax, capabilities={"seq_len_multiple": multiple}) == ((2.0, 0.0, 0.0),)
    assert measured(Softmax, capabilities={"variable_seq_len": False}) == ((2.0, 0.0, 0.0),)


class TwoHalves(Softmax):
    """No position ever sees the other half."""

    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        is_late = torch.arange(query.shape[-2]) >= query.shape[-2] // 2
        return is_late[:, None] == is_late


def test_a_path_that_never_arrives_is_infinite_and_contradicts_every_claim():
    ((_, _, path),) = measured(TwoHalves)
    assert path == math.inf
    with registered(Broken(cls=TwoHalves, check="")) as name:
        (result,) = run_checks(name, checks=["complexity_claims"])
    assert result.outcome == "failed"
    assert result.message == "maximum path length: another growth than claimed"
    assert result.example == "bidirectional: measured never; claims L^0"


def test_a_path_that_never_arrives_can_be_claimed():
    for cls, outcome in ((TwoHalves, "passed"), (Softmax, "failed")):
        with registered(Broken(cls=cls, check="", complexity={"max_path": NEVER})) as name:
            (result,) = run_checks(name, checks=["complexity_claims"])
        assert result.outcome == outcome
    assert result.example.startswith("bidirectional: measured constant; claims never")


class JoinsThroughTheCarry(SoundCarry):
    """Tokens meet in the carry alone, which the next layer reads."""

    def forward(self, hidden: Tensor, *, context: Any = None, key_padding_mask: Any = None, carry: Any = None) -> Mixed:
        pooled = self.pooled(hidden, key_padding_mask)
        return Mixed((hidden + carry[:, None]) * self.scale, carry + pooled)

    def reference(self, *args: Any, **keywords: Any) -> Mixed:
        return self.forward(*args, **keywords)


def test_a_path_may_lead_through_the_carry():
    ((_, _, path),) = measured(JoinsThroughTheCarry, capabilities=CARRY)
    assert path == 0


class SumsBlocksInTurn(Softmax):
    """Sums over keys 16 at a time: a chain of few nodes that are many only beside a long one that does not grow."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        value = super().attend(query, key, value, mask)
        for _ in range(20):
            value = value.sin()
        total = torch.zeros_like(value)
        for block in value.split(16, dim=-2):
            total = total + block.sum(-2, keepdim=True)
        return total


def test_a_loop_over_blocks_is_as_sequential_as_one_over_tokens():
    ((_, sequential, path),) = measured(SumsBlocksInTurn)
    assert sequential == pytest.approx(1, abs=0.01)
    assert path == pytest.approx(1, abs=0.01)


class ReachesTwiceAsFar(Softmax):
    """Layer n sees tokens 2^n before it: two positions are joined in log L layers."""

    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        distance = torch.arange(query.shape[-2])[:, None] - torch.arange(key.shape[-2])
        reach: int = 2**self.build.layer_index
        return (distance == 0) | (distance == reach)


def test_layers_are_built_at_their_own_depth():
    changes: dict[str, Any] = {"capabilities": {"bidirectional": False, "causal": True}}
    ((_, _, path),) = measured(ReachesTwiceAsFar, **changes)
    assert path is not None
    assert 0 < path < 0.4
    with registered(Broken(cls=ReachesTwiceAsFar, check="", complexity={"max_path": "log L"}, **changes)) as name:
        (result,) = run_checks(name, checks=["complexity_claims"])
    assert result.outcome == "passed"


class ForgetsItsInput(SoftmaxMixer):
    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        return super().forward(hidden.detach())


def test_a_reference_without_a_path_to_its_input_is_a_finding():
    with registered(Broken(cls=ForgetsItsInput, check="")) as name:
        (result,) = run_checks(name, checks=["complexity_claims"])
    assert result.outcome == "failed"
    assert "depends on no input" in result.message


def test_what_was_not_counted_contradicts_nothing():
    assert not Growth(2.0, None).is_contradicted
    assert Growth(0.0, math.inf).is_contradicted
    assert Growth(1.0, 0.2).is_contradicted
    assert not Growth(1.0, 0.8).is_contradicted


def test_options_and_names():
    rows = measure_complexity("word_convolution", {"max_dilation": 1024})
    assert [row.is_causal for row in rows] == [False, True]
    assert all(row.max_path.measured < 0.5 for row in rows if row.max_path.measured is not None)  # dilated: log L
    with pytest.raises(UnknownNameError):
        measure_complexity("no_such_variant")


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowConfig(VariantConfig):
    window_size: int = 700

    def claim(self, complexity: Complexity) -> Complexity:
        return replace(complexity, time_exponent=2) if self.window_size > 4096 else complexity


class LongWindow(Softmax):
    """Blocks that are longer than the first lengths; linear from there on."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        parts = [each.split(self.config.window_size, dim=2) for each in (query, key, value)]
        return torch.cat([super(LongWindow, self).attend(q, k, v, None) for q, k, v in zip(*parts, strict=True)], dim=2)


@pytest.mark.parametrize("size", [128, 700, 2000, 10**6])
def test_a_window_longer_than_the_first_lengths_contradicts_nothing(size: int):
    """The last claims two for itself."""
    broken = Broken(cls=LongWindow, check="", config=WindowConfig, complexity={"time_exponent": 1})
    with registered(broken) as name:
        (result,) = run_checks(name, {"window_size": size}, checks=["claimed_growth"])
    assert result.outcome == "passed", result


def test_growth_is_said_with_what_was_claimed():
    with registered(Broken(cls=Softmax, check="", complexity={"time_exponent": 1})) as name:
        (result,) = run_checks(name, checks=["claimed_growth"])
    assert result.message == "operations grow faster than claimed"
    assert result.example == "bidirectional: claims L^1, measured L^2.00 from 128 to 4096 tokens"


def test_windows_as_long_as_the_sequences_hide_growth_unless_the_variant_chose_them():
    wide = {"max_dilation": 128}  # 510 tokens: up to there a layer more doubles what is seen
    (found,) = run_checks("word_convolution", wide, checks=["complexity_claims"])
    assert found.outcome == "passed"
    with registered(Broken(cls=Softmax, check="", complexity={"max_path": "L"})) as name:
        (found,) = run_checks(name, checks=["complexity_claims"])
        assert found.outcome == "failed"
        assert "measured constant; claims L^1" in found.example
