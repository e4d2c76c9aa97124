"""Products that autocast does not reach: wide sums and choices are the same inside it as outside."""

from typing import Any

import pytest
import torch

from attn_zoo import BuildContext, build_attention
from attn_zoo.kernels.chunked_sums import chunked_sums
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.variants import gated_deltanet, gated_linear_attention, mamba2, retention

SIZES: dict[str, Any] = {"num_heads": 2, "head_dim": 8, "embed_dim": 16, "max_seq_len": 200}


@in_own_dtype
def product(first, second):
    return first @ second


def both_ways(function):
    """Return what a function gives, and what it gives under autocast to bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        inside = function()
    return function(), inside


def test_a_product_keeps_its_dtype_and_its_gradient():
    first, second = torch.randn(5, 300, requires_grad=True), torch.randn(300, 4)
    with torch.autocast("cpu", torch.bfloat16):
        narrow, kept = first @ second, product(first, second=second)
        assert torch.is_autocast_enabled("cpu")
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(kept, first @ second)
    (grad,) = torch.autograd.grad(kept.sum(), first)
    assert torch.equal(grad, second.sum(1).expand(5, -1))


def test_a_compiler_sees_through_it():
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    outside, inside = both_ways(lambda: compiled(torch.eye(3), torch.full((3, 3), 1 + 2**-20)))
    assert torch.equal(outside, inside)


@pytest.mark.parametrize("name", ["linear_attention", "performer"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sums_of_features_are_wide(name, is_causal):
    attention: Any = build_attention(name, BuildContext(**SIZES, is_causal=is_causal))
    inputs = torch.randn(3, 1, 2, 200, 8).unbind()
    assert torch.equal(*both_ways(lambda: attention(*inputs)))
    if is_causal:
        state = attention.prefill(*inputs)[1]
        assert torch.equal(*both_ways(lambda: attention.prefill(*inputs, state)[1]))
        assert torch.equal(*both_ways(lambda: attention.step(*(x[:, :, :1] for x in inputs), state)[0]))


def test_memories_that_decay_are_wide():
    query, key, value = torch.randn(3, 1, 2, 200, 8).unbind()
    memory, decay = torch.randn(1, 2, 8, 8), torch.tensor([0.9, 0.99])
    assert torch.equal(*both_ways(lambda: chunked_sums(query, key, value, chunk_len=16, decay=decay, start=memory)[1]))
    one = query[:, :, :1], key[:, :, :1], value[:, :, :1]
    assert torch.equal(*both_ways(lambda: retention.recur(*one, decay, memory)[0]))
    log_decay, strength = -torch.rand(1, 2, 200), torch.rand(1, 2, 200)
    writes = gated_deltanet.Writes(query, key / 8, value, log_decay, strength)
    assert torch.equal(*both_ways(lambda: gated_deltanet.gated_delta_rule(writes, memory, chunk_len=16)[1]))
    assert torch.equal(*both_ways(lambda: gated_deltanet.recur(writes, memory)[1]))
    gated = gated_linear_attention.Writes(query, key, value, -query.abs())
    assert torch.equal(*both_ways(lambda: gated_linear_attention.gated_sums(gated, memory, chunk_len=16)[1]))
    assert torch.equal(*both_ways(lambda: gated_linear_attention.recur(gated, memory)[1]))
    inputs = mamba2.Inputs(value.transpose(1, 2), key[:, 0], query[:, 0], strength.mT, log_decay.mT)
    side_by_side = torch.randn(1, 1, 8, 16)
    assert torch.equal(*both_ways(lambda: mamba2.state_space_dual(inputs, side_by_side, chunk_len=16)[1]))
    assert torch.equal(*both_ways(lambda: mamba2.recur(inputs, side_by_side)[0]))


def test_blocks_are_chosen_alike():
    attention = build_attention("moba", BuildContext(**SIZES), block_size=4, top_k=9)
    query, key = torch.randn(2, 1, 2, 200, 8).unbind()
    assert torch.equal(*both_ways(lambda: attention.route(query, key)))
