"""Building by name, listing by capability, describing without building."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from attn_zoo import (
    AbstractAttention,
    AbstractMixer,
    BuildContext,
    ConfigError,
    UnknownNameError,
    UnsupportedError,
    build_attention,
    build_mixer,
    describe,
    list_variants,
    register_attention,
    register_mixer,
)
from attn_zoo.attention import MultiHeadMixer
from attn_zoo.metadata import Capabilities
from attn_zoo.registry import VariantConfig, variants
from tests.conftest import keep_only

BUILD = BuildContext(embed_dim=8, num_heads=2, max_seq_len=16)


def test_both_forms_answer_to_their_calls():
    heads = torch.randn(2, 2, 5, 4)
    assert build_attention("full", BUILD)(heads, heads, heads).shape == heads.shape
    mixer = build_mixer("full", BUILD)
    assert isinstance(mixer, MultiHeadMixer)
    assert mixer.variant is variants["full"]
    assert mixer(torch.randn(2, 5, 8)).shape == (2, 5, 8)


def test_options_reach_the_variant():
    assert build_attention("full", BUILD, backend="math").config.backend == "math"


@pytest.mark.parametrize("make", [build_attention, build_mixer])
def test_unknown_names_and_options_name_their_nearest_match(make):
    with pytest.raises(UnknownNameError, match=r"unknown variant 'ful'; did you mean 'full'\?  \(attn-zoo list shows"):
        make("ful", BUILD)
    with pytest.raises(ConfigError, match=r"full: unknown option 'backed'; did you mean 'backend'\?"):
        make("full", BUILD, backed="math")


def test_a_variant_of_hidden_states_has_no_attention_form():
    info = describe("full")
    before = tuple(variants)

    @register_mixer("only_mixer", capabilities=info.capabilities, complexity=info.complexity, reference=info.reference)
    class OnlyMixer(AbstractMixer):
        def forward(self, hidden, *, context=None, key_padding_mask=None):
            return hidden

    try:
        assert isinstance(build_mixer("only_mixer", BUILD), OnlyMixer)
        with pytest.raises(UnsupportedError, match="use build_mixer") as refusal:
            build_attention("only_mixer", BUILD)
        assert refusal.value.capability == "attention"
    finally:
        keep_only(variants, before)


def test_a_class_of_two_names_keeps_the_capabilities_of_each():
    info = describe("full")
    before = tuple(variants)
    facts: dict[str, Any] = {"complexity": info.complexity, "reference": info.reference}

    @register_attention("both_ways", capabilities=info.capabilities, **facts)
    @register_attention("one_way", capabilities=replace(info.capabilities, causal=False), **facts)
    class Twice(AbstractAttention):
        def forward(self, query, key, value, *, key_padding_mask=None):
            return value

    try:
        for name, is_causal in (("both_ways", True), ("one_way", False)):
            attention = build_attention(name, BUILD)
            assert isinstance(attention, Twice)
            assert attention.capabilities == variants[name].capabilities
            assert attention.capabilities.causal is is_causal
            mixer: Any = build_mixer(name, BUILD)
            assert mixer.attention.capabilities.causal is is_causal
    finally:
        keep_only(variants, before)


def test_lists_are_filtered_by_capability():
    assert "full" in list_variants()
    assert list_variants() == sorted(list_variants())
    assert "full" in list_variants(causal=True, decode=True, dtypes="bfloat16", positions="alibi", is_exact=True)
    assert "full" in list_variants(decode="kv_cache")
    for wanted in ({"causal": False}, {"decode": False}, {"dtypes": "float8"}, {"seq_len_multiple": 2}):
        assert "full" not in list_variants(**wanted)
    for name in list_variants(is_exact=False):
        assert not describe(name).capabilities.is_exact


def test_unknown_capabilities_name_their_nearest_match():
    with pytest.raises(ConfigError, match=r"unknown capability 'casual'; did you mean 'causal'\?"):
        list_variants(casual=True)


def test_descriptions_say_everything_without_building():
    info = describe("full")
    assert info.summary == "Full attention: exact softmax over all pairs of positions."
    assert isinstance(info.capabilities, Capabilities)
    assert [option.name for option in info.options] == ["backend"]
    assert info.options[0].default == "auto"
    assert info.provider == "attn_zoo"
    assert info.source.endswith("full.py")
    with pytest.raises(UnknownNameError, match="did you mean 'full'"):
        describe("fulll")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(VariantConfig):
    table: tuple[int, ...] = field(default_factory=lambda: (1, 2))
    half: int = field(init=False, default=0)


def test_options_are_described_with_the_defaults_that_they_get():
    info = describe("full")
    before = tuple(variants)
    facts: dict[str, Any] = {"complexity": info.complexity, "reference": info.reference}

    @register_attention("with_options", config=Config, capabilities=info.capabilities, **facts)
    class WithOptions(AbstractAttention):
        def forward(self, query, key, value, *, key_padding_mask=None):
            return value

    try:
        assert [(one.name, one.default) for one in describe("with_options").options] == [("table", (1, 2))]
    finally:
        keep_only(variants, before)


@pytest.mark.parametrize("name", list_variants())
def test_every_variant_describes_itself(name):
    info = describe(name)
    assert info.summary
    assert info.reference.title
    assert info.reference.url.startswith("https://")
    for option in info.options:
        assert option.type
