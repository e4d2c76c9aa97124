"""No sound variant is blamed, whatever its options, sizes, form, direction, type and padding: a small seeded sample.

`python -m tests.conformance.random_configurations` goes on from here.
"""

from __future__ import annotations

from collections import Counter

import pytest

from attn_zoo.attention import BuildContext
from attn_zoo.conformance import gate, run_checks
from attn_zoo.registry import variants
from tests.conformance.broken import Broken, registered
from tests.conformance.broken_dependence import MixesBatch
from tests.conformance.random_configurations import draw, outcome

PER_VARIANT = 2


@pytest.mark.parametrize("name", sorted(variants))
def test_no_variant_is_blamed(name: str) -> None:
    found: Counter[str] = Counter()
    for number in range(PER_VARIANT):
        asked = draw(number, [name])
        what, text = outcome(asked)
        assert what != "blamed", f"{asked}\n{text}"
        found[what] += 1
    assert found["held"], f"hardly anything was asked of it: {dict(found)}"


def test_a_broken_variant_is() -> None:
    with registered(Broken(cls=MixesBatch, check="batch_invariance")) as name:
        found = Counter(outcome(draw(number, [name]))[0] for number in range(PER_VARIANT))
    assert found["blamed"], f"it was let pass: {dict(found)}"


def test_a_number_stands_for_one_configuration() -> None:
    assert draw(3) == draw(3) != draw(4)


@pytest.mark.parametrize(
    ("name", "embed_dim", "num_heads"),
    [("linear_attention", 2, 2), ("linear_attention", 48, 2), ("global_pooling", 6, 3), ("luna", 2, 1)],
)
def test_dropout_is_checked_in_heads_of_any_size(name: str, embed_dim: int, num_heads: int) -> None:
    results = run_checks(name, {}, checks=["dropout_rate"], embed_dim=embed_dim, num_heads=num_heads)
    assert [result.outcome for result in results] == ["passed"]


def test_positions_are_looked_for_where_there_is_more_than_one_key() -> None:
    """Two compressed keys for 142 tokens are one for 70, whose weight no position changes."""
    options = {"proj_len": 2, "projection": "mean_pool"}
    results = run_checks("linformer", options, checks=["positions"], max_seq_len=142)
    assert not [result for result in results if result.is_bad]


def test_one_sequence_whose_values_cancel_is_not_blamed() -> None:
    """A mean over 70 values of one feature is a thousandth of them by chance, and its rounding is theirs."""
    checks = ["batch_and_head_sizes"]
    results = run_checks(
        "linear_attention", {"eps": 0.1}, checks=checks, embed_dim=1, num_heads=1, max_seq_len=113, seed=1
    )
    assert [result.outcome for result in results] == ["passed"]


def test_a_reference_that_bends_within_a_step_is_not_blamed() -> None:
    """The norm of heads of two features, far down a long sequence."""
    build = BuildContext(embed_dim=6, num_heads=2, head_dim=2, max_seq_len=510, is_causal=True, seed=2, num_layers=3)
    assert gate("retention", {}, build, seq_len=510, dtype="float64", form="mixer", has_padding=True)
