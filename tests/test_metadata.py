"""Capabilities: every kind of request is refused by the field that lacks it, with a reason."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from types import MappingProxyType
from typing import Any

import pytest

from attn_zoo.errors import UnknownNameError, UnsupportedError
from attn_zoo.metadata import Capabilities, Request, Shape

EVERYTHING = Capabilities(
    bidirectional=True,
    causal=True,
    cross_attention=True,
    key_padding_mask=True,
    decode="recurrent",
    grouped_query=True,
    positions=("none", "rotary", "alibi"),
)

# (what is missing, what asks for it, the sentence)
REFUSALS: list[tuple[dict[str, Any], Request, str]] = [
    ({"causal": False}, Request(is_causal=True), "no causal form"),
    ({"bidirectional": False}, Request(), "no bidirectional form"),
    ({"cross_attention": False}, Request(is_cross=True), "no cross-attention"),
    ({"key_padding_mask": False}, Request(has_key_padding_mask=True), "no key_padding_mask"),
    ({"decode": "none"}, Request(is_causal=True, needs_decode=True), "no step-by-step decoding"),
    ({"grouped_query": False}, Request(is_grouped_query=True), "num_kv_heads must equal num_heads"),
    ({"attention_dropout": False}, Request(dropout_p=0.1), "no attention dropout"),
    ({"positions": ("none",)}, Request(position="alibi"), "position 'alibi' is not one of none"),
    ({"dtypes": ("float32",)}, Request(dtype="float16"), "dtype float16 is not one of float32"),
    ({"devices": ("cuda",)}, Request(device="cpu"), "device cpu is not one of cuda"),
    (
        {"requires": ("torch", "no_such_package")},
        Request(),
        "the package no_such_package is not installed, or cannot be imported",
    ),
    ({"seq_len_multiple": 64}, Request(seq_len=65), "length 65 is not a multiple of 64"),
    (
        {"variable_seq_len": False},
        Request(seq_len=65, max_seq_len=128),
        "length 65 is not the max_seq_len = 128 that it is built for",
    ),
]


@pytest.mark.parametrize(("change", "request_", "sentence"), REFUSALS, ids=[next(iter(case[0])) for case in REFUSALS])
def test_what_is_missing_is_refused_with_its_reason(change, request_, sentence):
    (capability,) = change
    lacking = replace(EVERYTHING, **change)
    assert EVERYTHING.why_not(request_) is None
    assert lacking.why_not(request_) == sentence
    explained = replace(lacking, why={capability: "because so"})
    assert explained.why_not(request_) == f"{sentence}: because so"
    with pytest.raises(UnsupportedError, match=f"^it: {sentence}$") as refusal:
        lacking.require("it", request_)
    assert refusal.value.capability == capability


@pytest.mark.parametrize(("change", "request_", "sentence"), REFUSALS, ids=[next(iter(case[0])) for case in REFUSALS])
def test_what_is_missing_is_not_missed_by_others(change, request_, sentence):
    del request_, sentence
    for other_change, other_request, _ in REFUSALS:
        if other_change != change and not (other_request.is_causal is False and "bidirectional" in change):
            asks_less = replace(EVERYTHING, **change).missing(other_request)
            assert asks_less is None or asks_less[0] in change


def test_a_request_asks_for_nothing_by_default_but_a_direction():
    assert EVERYTHING.why_not(Request()) is None
    only_causal = replace(EVERYTHING, bidirectional=False)
    assert only_causal.why_not(Request(is_causal=True)) is None


def test_every_field_that_can_say_no_is_covered():
    silent = {
        "is_exact",
        "is_permutation_invariant",
        "is_padding_invariant",
        "has_carry",
        "is_deterministic",
        "is_simulated",
        "is_control",
        "dropout_unit",
        "why",
    }
    assert {item.name for item in fields(Capabilities)} - silent == {next(iter(case[0])) for case in REFUSALS}


def test_only_capabilities_are_taken_away():
    with pytest.raises(UnknownNameError, match="unknown capability 'casual'; did you mean 'causal'"):
        EVERYTHING.without(casual="a slip")


def test_the_first_four_must_be_decided():
    with pytest.raises(TypeError, match=r"bidirectional.*causal.*cross_attention.*key_padding_mask"):
        Capabilities()  # type: ignore[call-arg]


@pytest.mark.parametrize("multiple", [0, -4])
def test_a_length_is_a_multiple_of_something(multiple):
    with pytest.raises(ValueError, match=f"seq_len_multiple: expected at least 1; got {multiple}"):
        replace(EVERYTHING, seq_len_multiple=multiple)


def test_every_variant_runs_without_positions_of_its_own():
    with pytest.raises(ValueError, match=r"positions: expected 'none', which cells and checks ask for, among them"):
        replace(EVERYTHING, positions=("rotary",))


def test_records_are_frozen():
    with pytest.raises(FrozenInstanceError):
        EVERYTHING.causal = False  # type: ignore[misc]
    assert isinstance(EVERYTHING.why, MappingProxyType)


def test_a_shape_calls_its_query_length_seq_len():
    shape = Shape(batch_size=1, num_heads=2, num_kv_heads=2, query_len=3, key_len=4, head_dim=5)
    assert shape.seq_len == 3


def test_a_module_is_built_for_the_keys_of_a_call_at_least():
    shape = Shape(batch_size=1, num_heads=2, num_kv_heads=2, query_len=3, key_len=4, head_dim=5)
    assert shape.max_seq_len == 4
    assert replace(shape, max_seq_len=9).max_seq_len == 9
    assert replace(shape, key_len=6).max_seq_len == 6


def test_a_reason_for_what_is_no_capability_would_never_be_said():
    with pytest.raises(UnknownNameError, match="capability in why 'groupd_query'; did you mean 'grouped_query'"):
        replace(EVERYTHING, why={"groupd_query": "not written yet"})


@pytest.mark.parametrize("line", ["raise OSError('libx.so: cannot open')", "import no_such_package", "1 / 0"])
def test_a_part_of_a_package_that_is_broken_is_refused_as_one_that_is_not_there(tmp_path, monkeypatch, line):
    (tmp_path / "zoo_broken_package").mkdir()
    (tmp_path / "zoo_broken_package" / "__init__.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))
    needing = replace(EVERYTHING, requires=("zoo_broken_package.part",))
    reason = "the package zoo_broken_package.part is not installed, or cannot be imported"
    assert needing.why_not(Request()) == reason
