"""The oracle, against a loop over pairs that shares no code with it, and against gradients taken numerically."""

from __future__ import annotations

import math

import pytest
import torch

from attn_zoo.attention.oracle import attention_weights, expand_kv_heads, softmax_attention


def by_hand(query, key, value, *, is_causal, padding, scale, bias):
    """Equation 1, one number at a time."""
    num_batches, num_heads, query_len, head_dim = query.shape
    groups, key_len = key.shape[1], key.shape[2]
    output = torch.zeros(query.shape, dtype=torch.float64)
    for b in range(num_batches):
        for h in range(num_heads):
            g = h * groups // num_heads
            for i in range(query_len):
                seen = {}
                for j in range(key_len):
                    is_hidden = (is_causal and j > i + key_len - query_len) or (padding is not None and padding[b, j])
                    if not is_hidden:
                        score = sum(float(query[b, h, i, d]) * float(key[b, g, j, d]) for d in range(head_dim))
                        seen[j] = math.exp(score * scale + float(bias[0, h, i, j]))
                for j, weight in seen.items():
                    output[b, h, i] += weight / sum(seen.values()) * value[b, g, j].double()
    return output


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize(("query_len", "key_len"), [(4, 4), (2, 5), (5, 2)])
def test_it_is_the_equation(is_causal, has_padding, query_len, key_len):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, query_len, 3, generator=generator)
    key, value = (torch.randn(2, 2, key_len, 3, generator=generator) for _ in range(2))
    bias = torch.randn(1, 4, query_len, key_len, generator=generator)
    padding = torch.zeros(2, key_len, dtype=torch.bool) if has_padding else None
    if padding is not None:
        padding[0, 0] = padding[1, :] = True
    for scale in (None, 0.3):
        output = softmax_attention(
            query, key, value, is_causal=is_causal, key_padding_mask=padding, scale=scale, bias=bias
        )
        by_loop = by_hand(query, key, value, is_causal=is_causal, padding=padding, scale=scale or 3**-0.5, bias=bias)
        assert output.dtype == torch.float64
        torch.testing.assert_close(output, by_loop, rtol=1e-12, atol=1e-12)


def test_its_gradients_are_those_of_its_values():
    tensors = [torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    padding = torch.tensor([[False, True, False]])

    def attend(*tensors):
        return softmax_attention(*tensors, is_causal=True, key_padding_mask=padding)

    assert torch.autograd.gradcheck(attend, tensors)


def test_garbage_in_padding_reaches_neither_output_nor_gradients():
    query, key, value = (torch.randn(1, 1, 3, 2, requires_grad=True) for _ in range(3))
    padding = torch.tensor([[False, True, False]])
    spoilt = [x.detach().clone() for x in (key, value)]
    for tensor in spoilt:
        tensor[:, :, 1] = float("nan")
        tensor.requires_grad_()
    output = softmax_attention(query, *spoilt, key_padding_mask=padding)
    assert torch.equal(output, softmax_attention(query, key, value, key_padding_mask=padding))
    for grad in torch.autograd.grad(output.sum(), (query, *spoilt)):
        assert grad.isfinite().all()


def test_weights_keep_the_dtype_and_sum_to_one():
    query = torch.randn(1, 1, 5, 4, dtype=torch.bfloat16)
    weights = attention_weights(query, query, is_causal=True)
    assert weights.dtype == torch.bfloat16
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(1, 1, 5), rtol=0.02, atol=0)


def test_heads_of_a_group_are_neighbours():
    groups = torch.arange(2.0)[None, :, None, None]
    assert expand_kv_heads(groups, 6).flatten().tolist() == [0, 0, 0, 1, 1, 1]
    assert expand_kv_heads(groups, 2) is groups
