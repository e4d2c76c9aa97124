"""What a record holds of the claims of its variant, under the options of its cell."""

import pytest

from attn_zoo.matrix.claimed_costs import claims
from attn_zoo.records import Cell


@pytest.mark.parametrize(
    ("variant", "options", "exponents"),
    [
        ("full", {}, (2, 1)),
        ("full", {"backend": "math"}, (2, 2)),
        ("moba", {}, (2, 1)),
        ("moba", {"top_k": 1}, (1, 1)),
    ],
)
def test_exponents_are_those_of_the_options(variant, options, exponents):
    cell = Cell(
        kind="scaling", variant=variant, options=options, seq_len=64, num_heads=2, head_dim=8, batch_size=1, pass_="fwd"
    )
    found = claims(cell)
    assert (found.time_exponent, found.memory_exponent) == exponents
    assert found.flops is not None
