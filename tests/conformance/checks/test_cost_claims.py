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
from tests.conformance.broken_claims import MIXER, MIXER_COST, ProjectedSoftmax


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


@pytest.mark.parametrize(
    ("num_pairs", "outcome"),
    [
        (lambda length: length**2 * 102 // 100, "failed"),
        (lambda length: length**2, "passed"),  # what runs
        (lambda length: length * (length + 1) // 2, "passed"),  # what the mask leaves
        (lambda length: length * (length + 1) * 3 // 4, "failed"),
        (lambda length: length * (length + 1) * 49 // 100, "failed"),
    ],
)
def test_a_mixer_counts_what_runs_or_what_its_mask_leaves(num_pairs, outcome):
    def flops(shape: Shape) -> int:
        pairs = int(num_pairs(shape.query_len)) if shape.is_causal else shape.query_len**2
        return 4 * shape.batch_size * shape.embed_dim * pairs

    broken = Broken(cls=CausalMixer, check="", capabilities=MIXER, complexity={**MIXER_COST, "flops": flops})
    with registered(broken) as name:
        (result,) = run_checks(name, checks=["flops_count"])
    assert result.outcome == outcome, result


class ChoosesByMore(CausalMixer):
    """What it chooses by is products, too: the square of the scores, of which nothing comes out."""

    def route(self, hidden: Tensor, **_: Any) -> Tensor:
        scores = hidden @ hidden.mT
        return scores @ scores

    def forward(self, hidden: Tensor, **keywords: Any) -> Tensor:
        self.route(hidden)
        return super().forward(hidden, **keywords)

    def reference(self, hidden: Tensor, *, routing: Any = None, **keywords: Any) -> Tensor:
        del routing
        return super().forward(hidden, **keywords)


def test_what_a_mixer_chooses_by_is_counted_with_what_its_mask_leaves():
    def flops(shape: Shape) -> int:
        pairs = shape.query_len * (shape.query_len + 1) // 2
        return 4 * shape.batch_size * shape.embed_dim * pairs

    def with_choice(shape: Shape) -> int:
        return flops(shape) + 2 * shape.batch_size * shape.query_len**2 * (shape.query_len + shape.embed_dim)

    capabilities = {**MIXER, "bidirectional": False}
    for formula, outcome in ((flops, "failed"), (with_choice, "passed")):
        complexity = {**MIXER_COST, "flops": formula}
        with registered(Broken(cls=ChoosesByMore, check="", capabilities=capabilities, complexity=complexity)) as name:
            (result,) = run_checks(name, checks=["flops_count"])
        assert result.outcome == outcome, result
