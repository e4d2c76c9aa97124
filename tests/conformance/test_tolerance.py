"""Tolerances grow with how far results move with their inputs, and only where these move smoothly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_zoo.conformance import run_checks
from attn_zoo.conformance.tolerance import (
    allowing,
    rounding,
    running_tolerance,
    same_shape_tolerance,
    strain,
    working_tolerance,
)
from tests.conformance.broken import Broken, Softmax, registered
from tests.conformance.broken_dependence import MASKED

VALUES = torch.linspace(1.0, 2.0, 50, dtype=torch.float64)


def strain_of(run: Callable[[float], list[Tensor]]) -> float:
    return strain(run(0.0), run)


def test_every_tolerance_takes_the_allowance() -> None:
    def all_three() -> Tensor:
        return torch.tensor(
            [same_shape_tolerance(VALUES), rounding(VALUES, 9), working_tolerance(0.0, 2.0, 9, torch.float32)]
        )

    plain = all_three()
    with allowing(5.0):
        torch.testing.assert_close(all_three(), 5 * plain)
    assert torch.equal(all_three(), plain)
    with allowing(5.0):
        beside = working_tolerance(1.0, 8.0, 9, torch.float32) - working_tolerance(0.0, 8.0, 9, torch.float32)
        assert beside == pytest.approx(2.0), "what the plain computation errs by stays"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda values: values, 1.0),
        (lambda values: values.pow(3), 1.0),
        (lambda values: values.pow(100), 25.0),
        (lambda values: (values - 1.5).tanh() + 1e4, 1.0),
        (lambda values: 0 * values, 1.0),
        (lambda values: (values * 2**27).floor() / 2**20, 1.0),
        (lambda values: values + torch.rand_like(values), 1.0),
        (lambda values: values / 0.0, 1.0),
    ],
    ids=["same", "cube", "steep", "far from zero", "constant", "jumps", "random", "infinite"],
)
def test_strain_is_the_slope_beyond_the_ordinary(result: Callable[[Tensor], Tensor], expected: float) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        assert strain_of(lambda share: [result(VALUES * (1 + share))]) == pytest.approx(expected, rel=1e-3)


def test_results_that_depend_on_earlier_calls_are_not_smooth() -> None:
    counter = itertools.count()
    assert strain_of(lambda _: [VALUES + 0.1 * (next(counter) % 2)]) == 1.0
    assert strain_of(lambda _: [VALUES + math.sqrt(next(counter))]) == 1.0


class Sharp(Softmax):
    """Sound: softmax attention whose outputs are normalised over two features, nearly their sign."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        output = super().forward(query, key, value, key_padding_mask=key_padding_mask)
        return torch.nn.functional.layer_norm(output.unflatten(-1, (-1, 2)), (2,), eps=1e-12).flatten(-2)


class SharpAndLeaking(Sharp):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        output = super().forward(query, key, value, key_padding_mask=key_padding_mask)
        return output + 1e-5 * value.mean(0, keepdim=True).mean(-2, keepdim=True)


def test_a_sharp_variant_is_not_blamed_and_a_fault_of_one_is() -> None:
    checks = ("batch_invariance", "matches_reference", "padding_content")
    with registered(Broken(cls=Sharp, check="", capabilities=MASKED)) as name:
        assert not [result for result in run_checks(name, checks=checks) if result.is_bad]
    with registered(Broken(cls=SharpAndLeaking, check="", capabilities=MASKED)) as name:
        bad = {result.check for result in run_checks(name, checks=checks) if result.is_bad}
    assert bad == {"batch_invariance", "padding_content"}


def test_retention_of_tiny_heads_is_not_blamed() -> None:
    """Its norm over two or eight features once failed by rounding alone."""
    for embed_dim, num_heads in ((24, 3), (4, 2)):
        checks = ("batch_invariance", "matches_reference", "causality")
        results = run_checks("retention", {"chunk_len": 5}, checks=checks, embed_dim=embed_dim, num_heads=num_heads)
        assert not [result for result in results if result.is_bad]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_terms", [16, 131, 1024])
def test_a_sum_kept_in_its_own_type_is_within_its_tolerance_and_not_far_below(
    dtype: torch.dtype, num_terms: int
) -> None:
    terms = torch.randn(num_terms, 1536, generator=torch.Generator().manual_seed(0)).to(dtype)
    total = torch.zeros(1536, dtype=dtype)
    for term in terms:
        total = total + term
    exact = terms.double().sum(0)
    error = float((total.double() - exact).abs().max())
    allowed = running_tolerance(float(exact.abs().max()), num_terms, dtype)
    assert allowed / 20 < error < allowed
