"""Masks and biases: bottom-right alignment, rows that see nothing, ALiBi's published slopes, any rows of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensor, FakeTensorMode

from attn_zoo.attention.masks import (
    alibi_bias,
    alibi_slopes,
    blank_padding,
    causal_keep,
    keep_mask,
    masked_softmax,
    score_bias,
    zero_padded_rows,
)

lengths = st.integers(1, 9)


@given(lengths, lengths)
def test_causal_masks_are_aligned_bottom_right(query_len, key_len):
    keep = causal_keep(query_len, key_len)
    for query in range(query_len):
        for key in range(key_len):
            assert bool(keep[query, key]) == (key <= query + key_len - query_len)


def test_keep_masks_combine_causality_and_padding():
    padding = torch.tensor([[False, True, False], [False, False, False]])
    assert keep_mask(3, 3, is_causal=False, key_padding_mask=None, device="cpu") is None
    only_padding = keep_mask(2, 3, is_causal=False, key_padding_mask=padding, device="cpu")
    assert only_padding is not None
    assert only_padding.shape == (2, 1, 1, 3)
    both = keep_mask(3, 3, is_causal=True, key_padding_mask=padding, device="cpu")
    assert both is not None
    assert torch.equal(both, only_padding & causal_keep(3, 3))


def test_a_row_without_kept_keys_is_zero_and_its_gradient_finite():
    scores = torch.randn(2, 4, requires_grad=True)
    keep = torch.tensor([[True, False, True, False], [False] * 4])
    weights = masked_softmax(scores, keep)
    torch.testing.assert_close(weights.sum(-1), torch.tensor([1.0, 0.0]))
    assert not weights[~keep].any()
    (grad,) = torch.autograd.grad(weights.square().sum(), scores)
    assert grad.isfinite().all()
    assert not grad[1].any()


def test_rows_of_fully_padded_sequences_are_zeroed_only():
    output = torch.ones(2, 1, 3, 2)
    mask = torch.tensor([[True, True], [True, False]])
    assert zero_padded_rows(output, mask).flatten(1).any(1).tolist() == [False, True]
    assert zero_padded_rows(output, None) is output


def test_padding_is_blanked_whatever_it_holds():
    heads = torch.full((1, 2, 2, 3), float("nan"))
    heads[:, :, 0] = 1.0
    blank = blank_padding(heads, torch.tensor([[False, True]]))
    assert torch.equal(blank[:, :, 0], heads[:, :, 0])
    assert not blank[:, :, 1].any()
    assert torch.equal(blank_padding(heads[0], torch.tensor([[False, True]]).expand(len(heads[0]), -1)), blank[0])


def test_slopes_are_made_once_and_serve_a_graph_though_they_were_made_without_one():
    with torch.inference_mode():
        first = alibi_slopes(5)
    assert alibi_slopes(5) is first
    (first * torch.ones(5, requires_grad=True)).sum().backward()  # an inference tensor could not be saved for it


def test_slopes_that_a_mode_made_serve_nobody_else():
    with FakeTensorMode():
        assert isinstance(alibi_slopes(7), FakeTensor)
    assert type(alibi_slopes(7)) is torch.Tensor


def test_slopes_are_the_published_ones():
    assert alibi_slopes(8).tolist() == [2.0**-power for power in range(1, 9)]
    # Heads that are no power of two: the next lower one's, then every other one of the next higher one's.
    assert alibi_slopes(3).tolist() == [2.0**-4, 2.0**-8, 2.0**-2]
    assert alibi_slopes(12).tolist()[:8] == alibi_slopes(8).tolist()
    torch.testing.assert_close(alibi_slopes(12)[8:], alibi_slopes(16)[0:8:2])


def test_alibi_is_slope_times_distance_aligned_bottom_right():
    bias = alibi_bias(2, 2, 3)
    distance = torch.tensor([[1.0, 0.0, 1.0], [2.0, 1.0, 0.0]])
    torch.testing.assert_close(bias, -alibi_slopes(2)[None, :, None, None] * distance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alibi_is_rounded_once_in_half_precision(dtype):
    """Distances above 256 are no bfloat16 and above 2048 no float16; only the product is rounded."""
    bias, exact = alibi_bias(1, 1, 70_000, dtype=dtype), alibi_bias(1, 1, 70_000, dtype=torch.float64)
    assert bias.isfinite().all()
    error = (bias.double() - exact).abs() / exact.abs().clamp(min=1e-9)
    assert error.max() <= torch.finfo(dtype).eps / 2


@given(data=st.data(), query_len=lengths, key_len=lengths, is_causal=st.booleans(), has_alibi=st.booleans())
def test_any_rows_of_the_bias_are_rows_of_the_whole(data, query_len, key_len, is_causal, has_alibi):
    start = data.draw(st.integers(0, query_len - 1))
    stop = data.draw(st.integers(start + 1, query_len))
    num_keys = data.draw(st.integers(1, key_len))
    padding = torch.tensor([data.draw(st.lists(st.booleans(), min_size=key_len, max_size=key_len)) for _ in range(2)])
    slopes = alibi_slopes(2, dtype=torch.float64) if has_alibi else None
    whole = torch.zeros(2, 2, query_len, key_len, dtype=torch.float64)
    if has_alibi:
        whole = whole + alibi_bias(2, query_len, key_len, dtype=torch.float64)
    keep = keep_mask(query_len, key_len, is_causal=is_causal, key_padding_mask=padding, device="cpu")
    assert keep is not None
    whole = whole.masked_fill(~keep, float("-inf"))
    some = score_bias(
        range(start, stop),
        query_len,
        key_len,
        is_causal=is_causal,
        key_padding_mask=padding,
        slopes=slopes,
        num_keys=num_keys,
        dtype=torch.float64,
    )
    assert torch.equal(some.expand(2, 2, stop - start, num_keys), whole[:, :, start:stop, :num_keys])


def test_a_bias_is_as_small_as_what_it_says():
    padding = torch.zeros(5, 7, dtype=torch.bool)
    assert score_bias(range(3), 4, 7, key_padding_mask=padding).shape == (5, 1, 1, 7)
    assert score_bias(range(3), 4, 7, is_causal=True).shape == (1, 1, 3, 7)
    assert score_bias(range(3), 4, 7, slopes=alibi_slopes(2)).shape == (1, 2, 3, 7)
