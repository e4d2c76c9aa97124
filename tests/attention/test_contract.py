"""The contract: what every attention and mixer checks before its mathematics runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attn_zoo import (
    AbstractAttention,
    AbstractMixer,
    BuildContext,
    Capabilities,
    Complexity,
    Reference,
    UnsupportedError,
    build_attention,
    build_mixer,
    register_attention,
    register_mixer,
)
from attn_zoo.metadata import Request
from attn_zoo.registry import variants
from tests.conftest import keep_only

COMPLEXITY = Complexity(time="1", memory="1", time_exponent=0, memory_exponent=0, sequential_ops="1", max_path="1")
REFERENCE = Reference(title="t", authors="a", year=2020, url="https://example.org")
NOTHING = Capabilities(
    bidirectional=True,
    causal=False,
    cross_attention=False,
    key_padding_mask=False,
    attention_dropout=False,
    positions=("none",),
    dtypes=("float32",),
    seq_len_multiple=4,
    why={"key_padding_mask": "it reads every key"},
)


class Least(AbstractAttention):
    def forward(self, query, key, value, *, key_padding_mask=None):
        return query + 0 * value.sum()


class LeastMixer(AbstractMixer):
    def forward(self, hidden, *, context=None, key_padding_mask=None):
        return hidden


@pytest.fixture(autouse=True)
def least() -> Iterator[None]:
    before = tuple(variants)
    register_attention("least", capabilities=NOTHING, complexity=COMPLEXITY, reference=REFERENCE)(Least)
    register_mixer("least_mixer", capabilities=NOTHING, complexity=COMPLEXITY, reference=REFERENCE)(LeastMixer)
    yield
    keep_only(variants, before)


def context(**changes):
    return BuildContext(**{"embed_dim": 8, "num_heads": 2, "max_seq_len": 16, **changes})


def heads(length=4, num_heads=2, **options):
    return torch.randn(3, num_heads, length, 4, **options)


PADDED = torch.zeros(3, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("tensors", "mask", "message"),
    [
        ((heads(num_heads=3), heads(), heads()), None, r"query: expected .* = \[3, 2, 4, 4\]; got \[3, 3, 4, 4\]"),
        ((heads(), heads(num_heads=1), heads()), None, r"key: expected .*; got \[3, 1, 4, 4\]"),
        ((heads(), heads(), heads(5)), None, r"value: expected .* = \[3, 2, 4, 4\]; got \[3, 2, 5, 4\]"),
        ((heads(), heads()[:1], heads()), None, r"key: expected .*; got \[1, 2, 4, 4\]"),
        ((heads()[0], heads(), heads()), None, r"query: expected \[B, heads, length, D\]; got \[2, 4, 4\]"),
        ((torch.zeros(4), heads(), heads()), None, r"query: expected \[B, heads, length, D\]; got \[4\]"),
        ((heads(0), heads(0), heads(0)), None, r"query: expected at least one token"),
        ((heads(), heads(dtype=torch.float64), heads()), None, r"key: expected dtype and device of query"),
        ((heads(17), heads(17), heads(17)), None, r"expected at most max_seq_len = 16 tokens; got 17"),
        ((heads(), heads(5), heads(5)), None, r"self-attention needs L == S; got L = 4, S = 5"),
        ((heads(), heads(), heads()), PADDED.int(), r"expected bool, True = padding; got torch.int32"),
        ((heads(), heads(), heads()), PADDED[:, :3], r"expected \[B, S\] = \[3, 4\]; got \[3, 3\]"),
        ((heads(), heads(), heads()), PADDED.to("meta"), r"key_padding_mask: expected on cpu, as the keys; got meta"),
    ],
)
def test_calls_that_do_not_fit_say_what_was_expected(tensors, mask, message):
    with pytest.raises(ValueError, match=message):
        build_attention("full", context())(*tensors, key_padding_mask=mask)


@pytest.mark.parametrize(
    ("hidden", "other", "mask", "is_cross", "message"),
    [
        (torch.zeros(3, 4, 7), None, None, False, r"hidden: expected \[B, L, E\] with E = 8; got \[3, 4, 7\]"),
        (torch.zeros(4, 8), None, None, False, r"hidden: expected .* got \[4, 8\]"),
        (torch.zeros(3, 17, 8), None, None, False, r"max_seq_len = 16 tokens; got 17"),
        (torch.zeros(3, 4, 8), torch.zeros(3, 4, 8), None, False, r"exactly when .* is_cross=True; got one"),
        (torch.zeros(3, 4, 8), None, None, True, r"exactly when .* is_cross=True; got none"),
        (
            torch.zeros(3, 4, 8),
            torch.zeros(2, 5, 8),
            None,
            True,
            r"context: expected .* = \[3, S, 8\]; got \[2, 5, 8\]",
        ),
        (torch.zeros(3, 4, 8), torch.zeros(3, 5, 8), PADDED, True, r"expected \[B, S\] = \[3, 5\]; got \[3, 4\]"),
    ],
)
def test_mixers_check_their_calls(hidden, other, mask, is_cross, message):
    with pytest.raises(ValueError, match=message):
        build_mixer("full", context(is_cross=is_cross))(hidden, context=other, key_padding_mask=mask)


@pytest.mark.parametrize(
    ("changes", "capability"),
    [
        ({"is_causal": True}, "causal"),
        ({"is_cross": True}, "cross_attention"),
        ({"num_kv_heads": 1}, "grouped_query"),
        ({"dropout_p": 0.1}, "attention_dropout"),
        ({"position": "alibi"}, "positions"),
    ],
)
@pytest.mark.parametrize(
    ("make", "name"), [(build_attention, "least"), (build_mixer, "least"), (build_mixer, "least_mixer")]
)
def test_what_a_variant_cannot_do_is_refused_when_it_is_built(make, name, changes, capability):
    with pytest.raises(UnsupportedError, match=f"^{name}: ") as refusal:
        make(name, context(**changes))
    assert refusal.value.capability == capability


@pytest.mark.parametrize(
    ("length", "dtype", "mask", "message"),
    [
        (4, torch.float32, PADDED, "least.*: no key_padding_mask: it reads every key"),
        (4, torch.float64, None, "least.*: dtype float64 is not one of float32"),
        (6, torch.float32, None, "least.*: length 6 is not a multiple of 4"),
    ],
)
def test_what_only_a_call_shows_is_refused_when_it_is_called(length, dtype, mask, message):
    with pytest.raises(UnsupportedError, match=message):
        build_attention("least", context())(*(heads(length, dtype=dtype) for _ in range(3)), key_padding_mask=mask)
    with pytest.raises(UnsupportedError, match=message):
        build_mixer("least_mixer", context())(torch.zeros(3, length, 8, dtype=dtype), key_padding_mask=mask)


def test_variants_that_cannot_decode_refuse_to():
    for module in (build_attention("least", context()), build_mixer("least_mixer", context())):
        with pytest.raises(UnsupportedError, match="no step-by-step decoding") as refusal:
            module.init_state(1)
        assert refusal.value.capability == "decode"
    with pytest.raises(UnsupportedError, match="no step-by-step decoding"):
        build_attention("least", context()).step(heads(1), heads(1), heads(1), None)
    with pytest.raises(UnsupportedError, match="no step-by-step decoding"):
        build_mixer("least", context()).init_state(1)


def test_a_class_that_declares_decoding_must_write_it():
    capable = Capabilities(
        bidirectional=True, causal=True, cross_attention=True, key_padding_mask=True, decode="recurrent"
    )
    register_attention("forgetful", capabilities=capable, complexity=COMPLEXITY, reference=REFERENCE)(
        type("Forgetful", (Least,), {})
    )
    with pytest.raises(UnsupportedError, match="Forgetful cannot decode"):
        build_attention("forgetful", context(is_causal=True)).init_state(1)


def test_the_reference_is_the_forward_unless_written():
    module, (query, key, value) = build_attention("least", context()), (heads(), heads(), heads())
    assert torch.equal(module.reference(query, key, value), module(query, key, value))
    hidden = torch.randn(3, 4, 8)
    reference = build_mixer("least_mixer", context()).reference(hidden)
    assert isinstance(reference, torch.Tensor)
    assert torch.equal(reference, hidden)


def test_a_class_that_is_not_registered_checks_shapes_and_refuses_nothing():
    class Bare(AbstractAttention):
        def forward(self, query, key, value, *, key_padding_mask=None):
            return value

    module = Bare(None, context())
    assert module(heads(), heads(), heads(), key_padding_mask=PADDED).shape == (3, 2, 4, 4)
    with pytest.raises(ValueError, match="query"):
        module(heads(num_heads=1), heads(), heads())
    module._refuse(Request(is_causal=True))


@pytest.mark.parametrize(("base", "output"), [(AbstractAttention, None), (AbstractMixer, (0, 1))])
def test_what_is_no_tensor_is_not_returned(base, output):
    cls = type("Wrong", (base,), {"forward": lambda self, *inputs, **named: output})
    inputs = [heads()] * 3 if base is AbstractAttention else [torch.zeros(3, 4, 8)]
    with pytest.raises(TypeError, match=f"Wrong.forward: expected to return a tensor; got {type(output).__name__}"):
        cls(None, context())(*inputs)


def test_abstract_classes_cannot_be_made():
    for abstract in (AbstractAttention, AbstractMixer):
        with pytest.raises(TypeError, match="abstract"):
            abstract(None, context())  # type: ignore[abstract]
