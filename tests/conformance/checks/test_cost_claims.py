"""Growth of a formula: a term that leads later contradicts no claim, and a term of nothing saves none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_zoo.attention import BuildContext
from attn_zoo.conformance import run_checks
from attn_zoo.metadata import Shape
from tests.conformance.broken import Broken, Softmax, registered
from tests.conformance.broken_claims import MIXER, MIXER_COST, ProjectedSoftmax, mixer_softmax_flops


def growth(formula: Callable[[int], float], exponent: float, **capabilities: Any) -> tuple[str, str]:
    """Return outcome and message of the check of a formula of the length."""

    def flops(shape: Shape) -> int:
        return shape.batch_size * round(formula(shape.query_len))

    claims = {"flops": flops, "time_exponent": exponent}
    broken = Broken(cls=Softmax, check="", complexity=claims, capabilities=capabilities)
    with registered(broken) as name:
        (result,) = run_checks(name, checks=["flops_formula"])
    return result.outcome, result.message


@pytest.mark.parametrize(
    ("formula", "exponent"),
    [
        (lambda n: 7 * n, 1),
        (lambda n: 7 * n**2, 2),
        (lambda n: 10**8 * n + n**2, 2),  # the second leads from a hundred million tokens on
        (lambda n: 10**4 * n + n**1.5, 1.5),
        (lambda n: n * n.bit_length(), 1),
    ],
)
def test_sound_formulas_pass(formula, exponent):
    outcome, _ = growth(formula, exponent)
    assert outcome == "passed"


@pytest.mark.parametrize("multiple", [24, 300, 1000])
def test_a_length_is_compared_with_itself_by_no_multiple(multiple):
    assert growth(lambda n: 7 * n**2, 2, seq_len_multiple=multiple) == ("passed", "grows as L^2.00")


@pytest.mark.parametrize(
    ("formula", "exponent"),
    [
        (lambda n: 7 * n**2, 1),
        (lambda n: n + 10**-3 * n**2, 1),
        (lambda n: 7 * n, 2),
        (lambda n: 7 * n**2, 3),
        (lambda n: 7 * n**1.5, 2),
        (lambda n: n * n.bit_length(), 2),
    ],
)
def test_a_formula_of_another_growth_is_caught(formula, exponent):
    assert growth(formula, exponent) == ("failed", "the FLOPs formula and the claimed exponent of time disagree")


class KeepsFeatures(ProjectedSoftmax):
    """Adds a buffer to each token, and rows of a table of which one is read for each position."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.register_buffer("features", torch.ones(16 * build.embed_dim))
        self.features: Tensor
        self.table = nn.Parameter(torch.ones(4 * build.max_seq_len, build.embed_dim))

    def forward(self, hidden: Tensor, **keywords: Any) -> Tensor:
        rows = self.table[: hidden.shape[1]] + self.features[: hidden.shape[-1]]
        return super().forward(hidden + rows, **keywords)


@pytest.mark.parametrize(
    ("num_numbers", "outcome"),
    [
        (lambda length, width: 0, "failed"),
        (lambda length, width: width**2, "failed"),  # the rows of the table are read too
        (lambda length, width: width**2 + length * width, "passed"),
        (lambda length, width: width**2 + (length + 16) * width, "passed"),  # as if all of the buffer were
        (lambda length, width: width**2 + 6 * length * width, "failed"),  # more than there is
    ],
)
def test_bytes_count_the_weights_that_are_read(num_numbers, outcome):
    def projection_bytes(shape: Shape, itemsize: int) -> int:
        return int(num_numbers(shape.query_len, shape.embed_dim)) * itemsize

    complexity = {**MIXER_COST, "projection_bytes": projection_bytes}
    capabilities = {**MIXER, "decode": "none"}
    with registered(Broken(cls=KeepsFeatures, check="", capabilities=capabilities, complexity=complexity)) as name:
        (result,) = run_checks(name, checks=["least_bytes"])
    assert result.outcome == outcome, result


class CausalMixer(ProjectedSoftmax):
    pass


@pytest.mark.parametrize(("num_of_100", "outcome"), [(102, "failed"), (100, "passed"), (51, "passed"), (48, "failed")])
def test_a_mixer_counts_what_its_mask_leaves_or_what_runs_or_between(num_of_100, outcome):
    def flops(shape: Shape) -> int:
        return mixer_softmax_flops(shape) * (num_of_100 if shape.is_causal else 100) // 100

    broken = Broken(cls=CausalMixer, check="", capabilities=MIXER, complexity={**MIXER_COST, "flops": flops})
    with registered(broken) as name:
        (result,) = run_checks(name, checks=["flops_count"])
    assert result.outcome == outcome, result
