"""Growth of a formula: a term that leads later contradicts no claim, and a term of nothing saves none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attn_zoo.conformance import run_checks
from attn_zoo.metadata import Shape
from tests.conformance.broken import Broken, Softmax, registered


def growth(formula: Callable[[int], float], exponent: float) -> tuple[str, str]:
    """Return outcome and message of the check of a formula of the length."""

    def flops(shape: Shape) -> int:
        return shape.batch_size * round(formula(shape.query_len))

    broken = Broken(cls=Softmax, check="", complexity={"flops": flops, "time_exponent": exponent})
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
