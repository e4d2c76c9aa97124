"""Effective weights: found by unit values alone, they equal what each mechanism's own definition says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, UnsupportedError, build_attention, build_mixer, list_variants
from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.effective import AttentionCall, attention_call, effective_weights, weight_columns
from attn_zoo.attention.masks import keep_mask
from attn_zoo.attention.oracle import attention_weights
from attn_zoo.registry import variants
from attn_zoo.variants.linear_attention import feature_map

HEADS, DIM, BATCH = 4, 8, 2
NOT_LINEAR = {"differential"}  # it norms its heads


def make_call(
    name: str,
    length: int = 21,
    *,
    key_len: int | None = None,
    is_causal: bool = False,
    padded: bool = False,
    dtype: torch.dtype = torch.float64,
    build: dict[str, Any] | None = None,
    **options: Any,
) -> AttentionCall:
    key_len = length if key_len is None else key_len
    sizes = {"embed_dim": HEADS * DIM, "num_heads": HEADS, "max_seq_len": 64, **(build or {})}
    context = BuildContext(is_causal=is_causal, is_cross=key_len != length, **sizes)
    torch.manual_seed(0)
    attention = build_attention(name, context, **options).to(dtype)
    groups = context.num_kv_heads
    query, key, value = (
        torch.randn(BATCH, heads, tokens, DIM, dtype=dtype)
        for heads, tokens in ((HEADS, length), (groups, key_len), (groups, key_len))
    )
    mask = None
    if padded:
        mask = torch.zeros(BATCH, key_len, dtype=torch.bool)
        mask[0, key_len - 6 :] = True
    return AttentionCall(attention, query, key, value, mask)


def cases() -> list[Any]:
    """Every variant with heads, in every direction it has, under each of the option sets that its checks use."""
    found = []
    for name in list_variants():
        variant = variants[name]
        if variant.attention is None:
            continue
        directions = [False] * variant.capabilities.bidirectional + [True] * bool(variant.capabilities.causal)
        for is_causal in directions:
            for index, options in enumerate(variant.config.check_options()):
                found.append(pytest.param(name, is_causal, options, id=f"{name}-{is_causal}-{index}"))
    return found


@pytest.mark.parametrize(("name", "is_causal", "options"), cases())
@pytest.mark.parametrize("padded", [False, True])
def test_weights_reproduce_the_reference_on_other_values(
    name: str, is_causal: bool, options: dict[str, Any], padded: bool
):
    try:
        call = make_call(name, is_causal=is_causal, padded=padded, **options)
    except UnsupportedError as error:
        pytest.skip(error.reason)
    if name in NOT_LINEAR:
        with pytest.raises(UnsupportedError, match="not linear in the values"):
            effective_weights(call)
        return
    found = effective_weights(call)
    other = torch.randn_like(call.value)
    expected = call.attention.reference(call.query, call.key, other, key_padding_mask=call.key_padding_mask)
    torch.testing.assert_close(found.weights @ other + found.offset, expected, rtol=0, atol=1e-12)
    if padded:
        assert (found.weights[0, :, :, -6:] == 0).all()
    if is_causal:
        assert (found.weights == found.weights.tril()).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_weights_of_full_attention_are_the_oracle_s(is_causal: bool, padded: bool):
    call = make_call("full", is_causal=is_causal, padded=padded)
    expected = attention_weights(call.query, call.key, is_causal=is_causal, key_padding_mask=call.key_padding_mask)
    found = effective_weights(call)
    torch.testing.assert_close(found.weights, expected, rtol=0, atol=1e-13)
    assert not found.offset.any()


def test_grouped_heads_and_cross_attention():
    call = make_call("full", 9, key_len=20, build={"num_kv_heads": 2})
    found = effective_weights(call).weights
    assert found.shape == (BATCH, HEADS, 9, 20)
    torch.testing.assert_close(found, attention_weights(call.query, call.key), rtol=0, atol=1e-13)


def test_weights_of_a_window_are_the_softmax_inside_it():
    call = make_call("local_window", window_size=3)
    position = torch.arange(21)
    hidden = torch.where((position[:, None] - position).abs() <= 3, 0.0, float("-inf")).double()
    expected = attention_weights(call.query, call.key, bias=hidden)
    torch.testing.assert_close(effective_weights(call).weights, expected, rtol=0, atol=1e-13)


def test_weights_of_linear_attention_are_products_of_features():
    call = make_call("linear_attention", is_causal=True)
    products = feature_map(call.query) @ feature_map(call.key).mT
    keep = keep_mask(21, 21, is_causal=True, key_padding_mask=None, device="cpu")
    assert keep is not None
    products = products * keep
    expected = products / (products.sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(effective_weights(call).weights, expected, rtol=0, atol=1e-13)


def test_weights_of_a_learned_compression_have_both_signs():
    weights = effective_weights(make_call("linformer", proj_len=6)).weights
    assert weights.min() < -1e-3
    assert weights.max() > 1e-3


def test_what_comes_from_extra_tokens_is_the_offset():
    call = make_call("bigbird", mode="etc", block_size=4, num_global_blocks=1, num_random_blocks=1)
    found = effective_weights(call)
    assert found.offset.abs().max() > 1e-4
    assert (found.weights.sum(-1) < 1).all()  # the rest is on the extra tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_working_dtypes_pass_the_check(dtype: torch.dtype):
    for name in ("full", "linear_attention", "linformer"):
        found = effective_weights(make_call(name, dtype=dtype, padded=True))
        assert found.weights.dtype == dtype


def test_columns_come_in_pieces_of_the_head_width():
    pieces = list(weight_columns(make_call("full")))
    assert [piece.shape[-1] for piece in pieces] == [8, 8, 5]


def test_dropout_is_off_and_the_mode_is_given_back():
    call = make_call("full", build={"dropout_p": 0.5})
    call.attention.train()
    first, second = effective_weights(call), effective_weights(call)
    assert torch.equal(first.weights, second.weights)
    assert call.attention.training
    assert not first.weights.requires_grad


class Squared(AbstractAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return (value**2).mean(2, keepdim=True).expand_as(query)


def test_what_is_not_linear_in_the_values_is_refused():
    call = make_call("full")
    wrong = replace(call, attention=Squared(None, call.attention.build))
    with pytest.raises(UnsupportedError, match="not linear in the values"):
        effective_weights(wrong)


@pytest.mark.parametrize("padded", [False, True])
def test_the_call_of_a_mixer_that_compresses_first(padded: bool):
    build = BuildContext(embed_dim=HEADS * DIM, num_heads=HEADS, max_seq_len=64)
    torch.manual_seed(0)
    mixer = build_mixer("linformer", build, proj_len=6)
    hidden, mask = torch.randn(1, 30, HEADS * DIM), None
    if padded:
        mask = torch.arange(30)[None] >= 25
    call = attention_call(mixer, hidden, key_padding_mask=mask)
    found = effective_weights(call)
    assert found.weights.shape == (1, HEADS, 30, 30)


@pytest.mark.parametrize("position", ["none", "rotary"])
def test_the_call_of_a_mixer_has_its_heads(position: Any):
    build = BuildContext(embed_dim=HEADS * DIM, num_heads=HEADS, max_seq_len=64, position=position, is_causal=True)
    mixer = build_mixer("full", build)
    hidden = torch.randn(1, 12, HEADS * DIM)
    seen: list[tuple[Tensor, ...]] = []
    mixer.attention.register_forward_pre_hook(lambda _, heads: seen.append(heads))  # type: ignore[union-attr]
    mixer(hidden)
    mixer.train().attention.eval()  # type: ignore[union-attr]
    call = attention_call(mixer, hidden)
    assert mixer.training
    assert not mixer.attention.training  # type: ignore[union-attr]
    for expected, found in zip(seen[0], (call.query, call.key, call.value), strict=True):
        torch.testing.assert_close(found, expected)


def test_mixers_without_heads_or_with_another_output_are_refused():
    build = BuildContext(embed_dim=HEADS * DIM, num_heads=HEADS, max_seq_len=64)
    hidden = torch.randn(1, 12, HEADS * DIM)
    with pytest.raises(UnsupportedError, match="without heads that attend"):
        attention_call(build_mixer("global_pooling", build), hidden)
    mixer = build_mixer("full", build)
    mixer.register_forward_hook(lambda *given: given[-1] + 1.0)  # a mixer that adds something of its own
    with pytest.raises(UnsupportedError, match="another output than its mixer"):
        attention_call(mixer, hidden)
