"""Attention to few keys in parts is the same attention: values, gradients, layouts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_zoo.attention.masks import score_bias
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.kernels.exact import sdpa
from attn_zoo.kernels.exact.backends import ExactCall
from attn_zoo.kernels.exact.few_keys import attend_by_operator, attend_in_parts, num_parts, split
from attn_zoo.kernels.exact.operators import OPERATORS, Operator
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.kernels.trace import recording


def tensors(is_interleaved: bool, batch_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (48, 5, 5)
    drawn = [torch.randn(batch_size, 3, n, 8, generator=generator, dtype=torch.float64) for n in lengths]
    if is_interleaved:
        drawn = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn]
    return [x.requires_grad_() for x in drawn]


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("parts", [2, 16])
def test_parts_change_nothing(is_interleaved: bool, batch_size: int, parts: int):
    query, key, value = tensors(is_interleaved, batch_size)
    want = scaled_dot_product_attention(query, key, value)
    got = attend_in_parts(query, key, value, scaled_dot_product_attention, parts)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
    gradients = [torch.autograd.grad(x, (query, key, value), upstream) for x in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("is_interleaved", "batch_size"), [(True, 1), (True, 2), (False, 1)])
def test_queries_are_not_copied(is_interleaved: bool, batch_size: int):
    query, key, value = (x.detach() for x in tensors(is_interleaved, batch_size))
    seen = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append(query.data_ptr())
        return query

    out = attend_in_parts(query, key, value, attend, 4)
    assert seen == [query.data_ptr()] == [out.data_ptr()]
    assert torch.equal(out, query)


# --- as one node of autograd, with operators of a CPU in place of those of a GPU ---


def _dense_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, needs_grad: bool
) -> tuple[Tensor, ...]:
    assert needs_grad
    assert not is_causal
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    kept = torch.rand(weights.shape, dtype=weights.dtype) >= dropout_p
    return weights * kept / (1 - dropout_p) @ value, weights, kept


def _dense_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, *results: Tensor
) -> tuple[Tensor, ...]:
    output, weights, kept = results
    share = kept.to(weights.dtype) / (1 - dropout_p)
    of_weights = grad @ value.mT * share
    of_scores = weights * (of_weights - (grad * output).sum(-1, keepdim=True)) / query.shape[-1] ** 0.5
    return of_scores @ key, of_scores.mT @ query, (weights * share).mT @ grad


CPU_OPERATORS = {
    "dense": Operator(_dense_forward, _dense_backward),
    "flash": Operator(
        lambda q, k, v, p, is_causal, _: torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, is_causal),
        lambda grad, q, k, v, p, out, lse: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, q, k, v, out, lse, p, False
        ),
    ),
}


@pytest.mark.parametrize("name", CPU_OPERATORS)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_one_node_is_the_same_attention(name: str, is_interleaved: bool, batch_size: int):
    query, key, value = tensors(is_interleaved, batch_size)
    want = scaled_dot_product_attention(query, key, value)
    with recording() as paths:
        got = attend_by_operator(query, key, value, CPU_OPERATORS[name], dropout_p=0.0, parts=4)
    assert paths == ["few_keys.parts"]
    assert got.grad_fn is not None
    assert [type(x).__name__ for x, _ in got.grad_fn.next_functions if x is not None] == ["AccumulateGrad"] * 3
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
    gradients = [torch.autograd.grad(x, (query, key, value), upstream) for x in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_dropout_of_one_node_is_the_same_in_its_gradient():
    query, key, value = tensors(True, 2)
    torch.manual_seed(0)
    kept = torch.rand(8, 3, 12, 5, dtype=torch.float64) >= 0.25
    torch.manual_seed(0)
    got = attend_by_operator(query, key, value, CPU_OPERATORS["dense"], dropout_p=0.25, parts=4)
    weights = (query @ key.mT / 8**0.5).softmax(-1) * kept.unflatten(0, (2, 4)).transpose(1, 2).flatten(2, 3) / 0.75
    want = weights @ value
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(x.square().sum(), (query, key, value)) for x in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_one_node_refuses_what_its_kernel_does():
    """A second derivative, and a result changed in place before backward: wrong gradients would be worse."""
    query, key, value = tensors(True, 1)
    output = attend_by_operator(query, key, value, CPU_OPERATORS["flash"], dropout_p=0.0, parts=4)
    (grad,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    # Of a sum, so that nothing but the inputs themselves leads on.
    grads = torch.autograd.grad(output.sum(), (query, key, value), create_graph=True)
    penalty = torch.stack([each.square().sum() for each in (*grads, query, key, value)]).sum()
    for leaf in (query, key, value):
        with pytest.raises(RuntimeError, match="once_differentiable"):
            torch.autograd.grad(penalty, leaf, retain_graph=True)
    output.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# --- where it is done ---


def empty(heads: int, length: int, **like: Any) -> Tensor:
    return torch.empty(1, heads, length, 8, dtype=torch.bfloat16, **like)


@pytest.mark.parametrize(
    ("heads", "length", "key_len", "eager", "compiled"),
    [
        (16, 65536, 256, 16, 16),
        (16, 2048, 256, 1, 2),
        (8, 4096, 256, 1, 4),
        (16, 1000, 256, 1, 1),
        (16, 65537, 256, 1, 1),
        (512, 65536, 256, 1, 1),
        (8, 65536, 65536, 1, 1),
        (1, 65536, 16384, 1, 1),
    ],
)
def test_parts_fill_a_gpu(monkeypatch: Any, heads: int, length: int, key_len: int, eager: int, compiled: int):
    query, key = empty(heads, length, device="meta"), empty(heads, key_len, device="meta")
    assert num_parts(query, key) == eager
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert num_parts(query, key) == compiled


def test_a_length_that_varies_is_compiled_once():
    """A question about it would be a guard, and one at the longest length leaves that length alone on its side."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    count = torch.compile(lambda query, key: query + num_parts(query, key), backend=counter, fullgraph=True)
    try:
        for length in (2048, 1792, 2048):
            query, key = torch.zeros(16, 2, length, 4), torch.zeros(16, 2, 256, 4)
            torch._dynamo.maybe_mark_dynamic(query, 2)
            assert count(query, key)[0, 0, 0, 0] == 1
    finally:
        torch.compiler.reset()
    assert counter.frame_count == 1


def test_a_split_call_is_not_split_again():
    for heads, length, key_len in ((16, 65536, 256), (8, 32768, 256), (3, 36864, 512)):
        query, key = empty(heads, length, device="meta"), empty(heads, key_len, device="meta")
        parts = num_parts(query, key)
        assert parts > 1
        assert num_parts(*split(query, key, key, parts)[:2]) == 1


# --- how exact attention takes it ---


def is_one_node(output: Tensor) -> bool:
    return "ByOperator" in type(output.grad_fn).__name__


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Tensor, list[str]]]:
    """Attend in four parts as on a GPU, with the kernel of a CPU: `(query, key, value, **changes of the call)`."""
    monkeypatch.setitem(OPERATORS, "flash", CPU_OPERATORS["flash"])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, list[str]]:
        call = ExactCall(query, key, value, False, None, None, 0.0, score_bias)
        with recording() as paths:
            output = sdpa._in_parts("flash", call, 4)(call)
        return output, paths

    return attend


def test_exact_attention_in_parts_is_one_node(in_parts: Any):
    query, key, value = tensors(True, 2)
    output, paths = in_parts(query, key, value)
    assert paths == ["few_keys.parts", "sdpa.flash"]
    assert is_one_node(output)
    torch.testing.assert_close(output, softmax_attention(query, key, value), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("why", ["grouped", "a head size that is padded", "autocast"])
def test_what_the_operator_does_not_know_goes_by_the_public_function(in_parts: Any, why: str):
    query, key, value = tensors(True, 2)
    if why == "grouped":
        key, value = (x[:, :1] for x in (key, value))
    if why == "a head size that is padded":
        query, key, value = (x[..., :3] for x in (query, key, value))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=why == "autocast"):
        output, paths = in_parts(query, key, value)
    assert paths == ["few_keys.parts", "sdpa.flash"]
    assert not is_one_node(output)
    torch.testing.assert_close(output, softmax_attention(query, key, value), rtol=1e-12, atol=1e-12)


def test_what_the_kernel_refuses_in_parts_is_left_whole(in_parts: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sdpa, "why_not", lambda _, call: "short" if call.query.shape[2] == 12 else None)
    output, paths = in_parts(*tensors(True, 2))
    assert paths == ["sdpa.flash"]
    torch.testing.assert_close(output, softmax_attention(*tensors(True, 2)), rtol=1e-12, atol=1e-12)


def test_the_compiler_gets_the_public_function(in_parts: Any):
    query, key, value = tensors(True, 2)

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        call = ExactCall(query, key, value, False, None, None, 0.0, score_bias)
        return sdpa._in_parts("flash", call, 4)(call).square().sum()

    want = torch.autograd.grad(softmax_attention(query, key, value).square().sum(), (query, key, value))
    try:
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        got = torch.autograd.grad(compiled(query, key, value), (query, key, value))
    finally:
        torch.compiler.reset()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_one_node_on_the_gpu(dtype: torch.dtype, is_interleaved: bool):
    """By the kernel that is chosen there; dropout by its mean."""
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [torch.randn(2, 4, n, 64, device="cuda", generator=generator).to(dtype) for n in (32_768, 256, 256)]
    if is_interleaved:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    with recording() as paths:
        output = exact_attention(*inputs, score_bias=score_bias)
    assert paths[0] == "few_keys.parts"
    assert is_one_node(output)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact, upstream = softmax_attention(*wide), torch.randn_like(output)
    got = (output, *torch.autograd.grad(output, inputs, upstream))
    want = (exact, *torch.autograd.grad(exact, wide, upstream.double()))
    for mine, right in zip(got, want, strict=True):
        error = (mine.double() - right).square().mean().sqrt() / right.square().mean().sqrt()
        assert error < 4 * torch.finfo(torch.bfloat16).eps
    dropped = exact_attention(*inputs, score_bias=score_bias, dropout_p=0.5)
    grads = torch.autograd.grad(dropped, inputs, upstream)
    assert all(x.isfinite().all() for x in (dropped, *grads))
    assert abs((dropped.double() * exact).sum() / exact.square().sum() - 1) < 0.05
