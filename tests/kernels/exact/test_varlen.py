"""Packed exact attention: what is packed, what comes back. The kernel is a stand-in but on a GPU, where it is flash."""

from __future__ import annotations

import math

import pytest
import torch

from attn_zoo.attention.masks import score_bias
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.exact import varlen
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.kernels.trace import recording
from tests.test_host_time import script

B, H, D = 3, 4, 8


class LeavesTheRest(torch.autograd.Function):
    """What the kernel does not read gets a gradient that nobody wrote."""

    @staticmethod
    def forward(ctx, rows, num_read):
        ctx.num_read = num_read
        return rows.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[ctx.num_read :] = math.nan
        return grad, None


def one_by_one(query, key, value, query_starts, key_starts, max_query, max_key, dropout_p, is_causal, debug, *, scale):
    """What the operator promises, a sequence at a time."""
    assert dropout_p == 0.0
    assert not debug
    num_read = int(key_starts[-1])
    key, value = (LeavesTheRest.apply(rows, num_read) for rows in (key, value))
    output = torch.zeros_like(query)
    for index in range(len(query_starts) - 1):
        q = query[query_starts[index] : query_starts[index + 1]].transpose(0, 1)
        k, v = (x[key_starts[index] : key_starts[index + 1]].transpose(0, 1) for x in (key, value))
        assert q.shape[1] <= max_query
        assert k.shape[1] <= max_key
        if k.shape[1]:
            k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
            scores = q @ k.transpose(1, 2) * scale
            if is_causal:
                scores = scores.masked_fill(
                    ~torch.ones(scores.shape[1:], dtype=torch.bool).tril(k.shape[1] - q.shape[1]), -math.inf
                )
            output[query_starts[index] : query_starts[index + 1]] = (scores.softmax(-1) @ v).transpose(0, 1)
    return output


@pytest.fixture
def kernel(monkeypatch):
    varlen._probe.cache_clear()
    monkeypatch.setattr(varlen, "_flash", one_by_one)
    yield
    varlen._probe.cache_clear()


def draw(query_len, key_len, num_kv_heads=H, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(B, heads, length, D, generator=generator).to(device, dtype).requires_grad_()
        for heads, length in ((H, query_len), (num_kv_heads, key_len), (num_kv_heads, key_len))
    )


def padding(kind, key_len, device="cpu"):
    mask = torch.zeros(B, key_len, dtype=torch.bool)
    if kind == "right":
        mask[1, key_len // 2 :] = mask[2, 1:] = True
    elif kind == "left":
        mask[0, : key_len // 3] = True
    elif kind == "scattered":
        mask = torch.rand(B, key_len, generator=torch.Generator().manual_seed(2)) < 0.4
        mask[1] = True  # and an entry of which nothing is left
    return mask.to(device)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("num_kv_heads", [H, 1])
@pytest.mark.parametrize("lengths", [(12, 12), (5, 12), (1, 9)], ids=str)
@pytest.mark.parametrize("kind", ["none", "right", "left", "scattered"])
def test_packed_keys_give_what_a_mask_gives(kind, lengths, num_kv_heads):
    tensors, mask = draw(lengths[0], lengths[1], num_kv_heads), padding(kind, lengths[1])
    with recording() as paths:
        output = exact_attention(*tensors, score_bias=score_bias, key_padding_mask=mask, backend="varlen")
    assert paths == ["varlen.flash"]
    expected = softmax_attention(*tensors, is_causal=False, key_padding_mask=mask)
    torch.testing.assert_close(output, expected)
    direction = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(3))
    grads = [torch.autograd.grad((x * direction).sum(), tensors) for x in (output, expected)]
    for actual, true in zip(*grads, strict=True):
        torch.testing.assert_close(actual, true)


@pytest.mark.usefixtures("kernel")
def test_without_padding_it_may_be_causal():
    tensors = draw(5, 9)
    output = exact_attention(*tensors, score_bias=score_bias, is_causal=True, backend="varlen")
    torch.testing.assert_close(output, softmax_attention(*tensors, is_causal=True, key_padding_mask=None))
    with pytest.raises(UnsupportedError, match="beside padding"):
        exact_attention(
            *tensors, score_bias=score_bias, is_causal=True, key_padding_mask=padding("right", 9), backend="varlen"
        )


@pytest.mark.usefixtures("kernel")
def test_packing_enqueues_no_more_than_a_mask_does(monkeypatch):
    """By a mask: keys and values blanked, a bias made and guarded against empty rows, the kernel, empty rows zeroed."""
    monkeypatch.setattr(varlen, "_flash", lambda query, *_, **__: torch.empty_like(query))
    (query, key, value), mask = draw(12, 12), padding("scattered", 12)
    with script.Enqueued() as enqueued:
        varlen.attend(query, key, value, is_causal=False, key_padding_mask=mask, dropout_p=0.0)
    assert len(enqueued.kernels) <= 9, enqueued.kernels


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("is_training", [True, False])
def test_packing_runs_in_one_graph(is_training):
    def attend(query, key, value, mask):
        return varlen.attend(query, key, value, is_causal=False, key_padding_mask=mask, dropout_p=0.0)

    seen = []

    def of_fixed_shape(query, key, value, query_starts, key_starts, *rest, scale):
        seen.append((query.shape, key.shape, key_starts.shape, scale))
        return query * 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "_flash", of_fixed_shape)
        query, key, value = draw(6, 6)
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        with torch.set_grad_enabled(is_training):
            output = compiled(query, key, value, padding("scattered", 6))
        if is_training:
            output.sum().backward()
    torch.compiler.reset()
    assert seen[0] == ((B * 6, H, D), (B * 6, H, D), (B + 1,), D**-0.5), "no shape depends on the mask"


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", ["right", "scattered"])
def test_padding_may_hold_anything(kind):
    mask, found = padding(kind, 12), []
    for garbage in (0.0, math.nan):
        tensors = [x.detach().clone() for x in draw(12, 12)]
        for x in tensors[1:]:
            x.masked_fill_(mask[:, None, :, None], garbage)
        tensors = [x.requires_grad_() for x in tensors]
        output = exact_attention(*tensors, score_bias=score_bias, key_padding_mask=mask, backend="varlen")
        found.append((output, *torch.autograd.grad(output.square().sum(), tensors)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.usefixtures("kernel")
def test_keys_that_are_the_values_are_packed_once():
    (query, key, _), mask = draw(12, 12), padding("scattered", 12)
    with script.Enqueued() as enqueued:
        output = exact_attention(query, key, key, score_bias=score_bias, key_padding_mask=mask, backend="varlen")
    assert enqueued.kernels.count("index_put_") == 1
    expected = softmax_attention(query, key, key, is_causal=False, key_padding_mask=mask)
    torch.testing.assert_close(output, expected)
    grads = [torch.autograd.grad(x.square().sum(), (query, key)) for x in (output, expected)]
    for actual, true in zip(*grads, strict=True):
        torch.testing.assert_close(actual, true)


def test_on_a_cpu_it_is_refused_with_torchs_reason():
    varlen._probe.cache_clear()
    with pytest.raises(UnsupportedError, match=r"'varlen' cannot serve .* does not run on cpu in torch\.float32"):
        exact_attention(*draw(4, 4, dtype=torch.float32), score_bias=score_bias, backend="varlen")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["none", "right", "left", "scattered"])
def test_the_kernel_keeps_the_promise_on_a_gpu(kind, dtype):
    for num_kv_heads in (H, 1):
        tensors, mask = draw(200, 300, num_kv_heads, dtype, "cuda"), padding(kind, 300, "cuda")
        output = exact_attention(*tensors, score_bias=score_bias, key_padding_mask=mask, backend="varlen")
        wide = [x.detach().double().requires_grad_() for x in tensors]
        expected = softmax_attention(*wide, is_causal=False, key_padding_mask=mask)
        torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=2e-2)
        grads = torch.autograd.grad(output.float().sum(), tensors), torch.autograd.grad(expected.sum(), wide)
        for actual, true in zip(*grads, strict=True):
            torch.testing.assert_close(actual.double(), true, atol=5e-2, rtol=5e-2)
