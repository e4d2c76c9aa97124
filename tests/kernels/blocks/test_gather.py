"""The block-sparse engine: agrees with dense softmax under the pattern's mask, stays linear, refuses what it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.blocks import pieces as block_pieces
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention, block_sparse_attention_with_lse
from attn_zoo.kernels.blocks.layout import BlockLayout, TokenLayout
from attn_zoo.kernels.blocks.pattern import BlockPattern
from attn_zoo.kernels.trace import recording

BATCH, HEADS, DIM = 2, 3, 8


def make_layout(query_len: int, **options: Any) -> BlockLayout:
    sizes: dict[str, Any] = {
        "block_size": 16,
        "num_window_blocks": 3,
        "num_global_blocks": 2,
        "num_random_blocks": 2,
        **options,
    }
    return BlockLayout(query_len=query_len, **sizes)


def drawn_pattern(layout: BlockLayout, num_heads: int, key: tuple[int, int], device: str = "cpu") -> BlockPattern:
    return replace(layout, num_heads=num_heads, seed=key[0], layer_index=key[1]).pattern(device)


def band_pattern(length: int, reach: int, block_size: int, *, is_causal: bool) -> BlockPattern:
    return TokenLayout(query_len=length, reach=reach, block_size=block_size, is_causal=is_causal).pattern()


def make_inputs(pattern: BlockPattern, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = (pattern.query_len, pattern.key_len, pattern.key_len)
    return [torch.randn(BATCH, HEADS, n, DIM, generator=generator, dtype=torch.float64).to(dtype) for n in lengths]


def engine(inputs: Sequence[Tensor], pattern: BlockPattern, **options: Any) -> Tensor:
    query, key, value = inputs
    return block_sparse_attention(query, key, value, pattern, **options)


def make_padding(key_len: int, extra: int = 0) -> Tensor:
    """Entry 0 is padded at its end and within, entry 1 wholly; `extra` leading keys are never padding."""
    padding = torch.zeros(BATCH, key_len, dtype=torch.bool)
    padding[0, extra + (key_len - extra) // 2 :] = True
    padding[0, extra + 1 : extra + 3] = True
    padding[1] = True
    return padding


def dense_attention(
    inputs: Sequence[Tensor], pattern: BlockPattern, padding: Tensor | None = None, slopes: Tensor | None = None
) -> Tensor:
    """Softmax under the dense mask, in the dtype of the inputs; rows that see nothing are zero."""
    query, key, value = inputs
    keep = pattern.to_dense()
    if padding is not None:
        keep = keep & ~padding[:, None, None]
        key, value = (x.masked_fill(padding[:, None, :, None], 0.0) for x in (key, value))
    scores = query @ key.mT * DIM**-0.5
    if slopes is not None:
        standing = torch.arange(pattern.query_len)[:, None] + pattern.key_len - pattern.query_len
        scores = scores - slopes[:, None, None].to(scores.dtype) * (standing - torch.arange(pattern.key_len)).abs()
    scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    output: Tensor = (scores.softmax(-1) * keep) @ value
    return output


def fused_attention(inputs: Sequence[Tensor], keep: Tensor, padding: Tensor | None) -> Tensor:
    """PyTorch's attention under a dense mask, with the rows of wholly padded entries zeroed."""
    query, key, value = inputs
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, keep)
    return output if padding is None else output.masked_fill(padding.all(-1)[:, None, None, None], 0.0)


def value_and_gradients(run: Callable[[list[Tensor]], Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = run(leaves)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad(output, leaves, weights.to(output.dtype))]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 100, 200, 333])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("extra", [0, 32])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("has_slopes", [False, True])
def test_equals_dense_attention_in_float64(
    length: int, is_causal: bool, extra: int, has_padding: bool, has_slopes: bool
):
    pattern = drawn_pattern(make_layout(length, is_causal=is_causal, num_extra_tokens=extra), HEADS, (1, 0))
    inputs = make_inputs(pattern)
    padding = make_padding(pattern.key_len) if has_padding else None
    slopes = torch.tensor([0.5, 0.1, 0.02], dtype=torch.float64) if has_slopes else None
    with recording() as paths:
        actual = value_and_gradients(lambda x: engine(x, pattern, key_padding_mask=padding, slopes=slopes), inputs)
    assert paths == ["block_sparse.gather"]
    expected = value_and_gradients(lambda x: dense_attention(x, pattern, padding, slopes), inputs)
    for found, wanted in zip(actual, expected, strict=True):
        # Sums of at most S terms in another order.
        bound = 8 * torch.finfo(torch.float64).eps * (1 + pattern.key_len**0.5) * float(wanted.abs().max().clamp(min=1))
        torch.testing.assert_close(found, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_error_in_working_dtypes_is_at_most_twice_the_plain_one(dtype: torch.dtype, has_padding: bool, is_causal: bool):
    pattern = drawn_pattern(make_layout(333, is_causal=is_causal), HEADS, (1, 0))
    inputs = make_inputs(pattern, dtype)
    padding = make_padding(pattern.key_len) if has_padding else None
    truth = value_and_gradients(lambda x: dense_attention(x, pattern, padding), [x.double() for x in inputs])
    plain = value_and_gradients(lambda x: dense_attention(x, pattern, padding), inputs)
    # In float32 PyTorch's fused backward is three times as far off as products and softmax are; it is a baseline too.
    keep = pattern.to_dense() if padding is None else pattern.to_dense() & ~padding[:, None, None]
    keep = keep | ~keep.any(-1, keepdim=True)
    fused = value_and_gradients(lambda x: fused_attention(x, keep.expand(BATCH, -1, -1, -1), padding), inputs)
    actual = value_and_gradients(lambda x: engine(x, pattern, key_padding_mask=padding), inputs)
    for found, *rough, wanted in zip(actual, plain, fused, truth, strict=True):
        assert found.dtype == dtype
        error, *others = (float((x.double() - wanted).abs().max()) for x in (found, *rough))
        assert error <= 2 * max(others) + 2 * torch.finfo(dtype).eps * float(wanted.abs().max())


@pytest.mark.parametrize("piece_bytes", [1, 1 << 12, 1 << 14, 1 << 30])
def test_size_of_the_pieces_does_not_matter(piece_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(block_pieces, "_CPU_PIECE_BYTES", piece_bytes)
    pattern = drawn_pattern(make_layout(150), HEADS, (1, 0))
    inputs, padding = make_inputs(pattern), make_padding(150)
    actual = value_and_gradients(lambda x: engine(x, pattern, key_padding_mask=padding), inputs)
    expected = value_and_gradients(lambda x: dense_attention(x, pattern, padding), inputs)
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


def test_one_table_may_serve_all_heads():
    pattern = drawn_pattern(make_layout(150), 1, (1, 0))
    inputs = make_inputs(pattern)
    torch.testing.assert_close(engine(inputs, pattern), dense_attention(inputs, pattern))


@pytest.mark.parametrize("layout", ["heads last", "every other", "expanded"])
def test_layout_of_the_inputs_does_not_matter(layout: str):
    pattern = drawn_pattern(make_layout(150), HEADS, (1, 0))
    inputs = make_inputs(pattern)
    if layout == "heads last":
        strange = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    elif layout == "every other":
        strange = [torch.stack([x, torch.zeros_like(x)], -1).flatten(-2)[..., ::2] for x in inputs]
    else:
        inputs = [x[:1].expand(BATCH, -1, -1, -1) for x in inputs]
        strange = inputs
        inputs = [x.contiguous() for x in inputs]
    torch.testing.assert_close(engine(strange, pattern), dense_attention(inputs, pattern))


def test_gradient_of_a_sum_is_accepted():
    pattern = drawn_pattern(make_layout(100), HEADS, (1, 0))
    inputs = [x.requires_grad_() for x in make_inputs(pattern)]
    found = torch.autograd.grad(engine(inputs, pattern).sum(), inputs)
    wanted = torch.autograd.grad(dense_attention(inputs, pattern).sum(), inputs)
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_content_of_padding_does_not_matter(garbage: float):
    pattern = drawn_pattern(make_layout(150), HEADS, (1, 0))
    inputs, padding = make_inputs(pattern), make_padding(150)
    spoiled = [inputs[0], *(x.masked_fill(padding[:, None, :, None], garbage) for x in inputs[1:])]
    runs = [
        value_and_gradients(lambda x: engine(x, pattern, key_padding_mask=padding), given)
        for given in (inputs, spoiled)
    ]
    for clean, found in zip(*runs, strict=True):
        assert torch.equal(clean, found)
    output, _, grad_key, grad_value = runs[0]
    assert output[1].abs().max() == 0
    for gradient in (grad_key, grad_value):
        assert gradient.masked_select(padding[:, None, :, None]).abs().max() == 0


def test_future_tokens_do_not_leak():
    pattern = drawn_pattern(make_layout(150, is_causal=True), HEADS, (1, 0))
    inputs = make_inputs(pattern)
    expected = engine(inputs, pattern)
    for cut in (1, 16, 37, 100, 149):
        changed = [torch.cat([x[:, :, :cut], torch.randn_like(x[:, :, cut:])], 2) for x in inputs]
        torch.testing.assert_close(engine(changed, pattern)[:, :, :cut], expected[:, :, :cut])
        leaves = [x.clone().requires_grad_() for x in inputs]
        engine(leaves, pattern)[:, :, :cut].square().sum().backward()
        for leaf in leaves:
            assert leaf.grad is not None
            assert leaf.grad[:, :, cut:].abs().max() == 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_has_the_gradient_of_what_it_computed(is_causal: bool):
    pattern = drawn_pattern(make_layout(40, is_causal=is_causal, block_size=8), HEADS, (1, 0))
    inputs, padding = make_inputs(pattern), make_padding(40)
    generator = torch.Generator().manual_seed(5)
    weights, *directions = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in [inputs[0], *inputs])

    def run(tensors: Sequence[Tensor]) -> Tensor:
        torch.manual_seed(3)  # so that every call drops the same weights
        return engine(tensors, pattern, key_padding_mask=padding, dropout_p=0.3)

    leaves = [x.clone().requires_grad_() for x in inputs]
    with recording() as paths:
        gradients = torch.autograd.grad(run(leaves), leaves, weights)
    assert paths == ["block_sparse.gather"]
    for index, (gradient, direction) in enumerate(zip(gradients, directions, strict=True)):
        # Along one direction in all, not gradcheck's fast mode: its tolerance is so wide that wrong gradients pass.
        sides = []
        for step in (1e-5, -1e-5):
            moved = [x + step * direction if place == index else x for place, x in enumerate(inputs)]
            sides.append(float((run(moved) * weights).sum()))
        slope = (sides[0] - sides[1]) / 2e-5
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_dropout_is_the_same_in_backward_under_another_number_of_threads(is_compiled: bool):
    layout = make_layout(128, num_heads=4)
    query, key, value = (torch.randn(2, 4, 128, 32, dtype=torch.float64).requires_grad_() for _ in range(3))
    run = torch.compile(block_sparse_attention, backend="aot_eager") if is_compiled else block_sparse_attention
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        output = run(query, key, value, layout, dropout_p=0.3, backend="gather")
        torch.set_num_threads(2)
        direction = torch.randn_like(output)
        (gradient,) = torch.autograd.grad(output, value, direction)
    finally:
        torch.set_num_threads(before)
    # Linear in the values under the same draws, so both are <direction, output>.
    found, expected = (value * gradient).sum().detach(), (output * direction).sum().detach()
    assert float(found) == pytest.approx(float(expected), rel=1e-9)


def test_scores_are_wide_before_they_are_softmaxed():
    layout = make_layout(128, num_heads=HEADS)
    query, value = (100 * torch.randn(1, HEADS, 128, 64) for _ in range(2))
    query, key, value = (x.half().requires_grad_() for x in (query, query, value / 100))
    output, _ = block_sparse_attention_with_lse(query, key, value, layout, backend="gather")
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    want, _ = block_sparse_attention_with_lse(exact[0], exact[1], exact[2], layout, backend="gather")
    torch.testing.assert_close(output.double(), want, rtol=4e-3, atol=4e-3)
    grads = torch.autograd.grad(output.sum(), (query, key, value)), torch.autograd.grad(want.sum(), exact)
    for found, true in zip(*grads, strict=True):
        torch.testing.assert_close(found.double(), true, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_values_have_in_common_costs_the_gradient_no_digits(dtype):
    """Of `dO V^T` a row's mean is taken away, which a 16-bit type would have rounded by then."""
    pattern = drawn_pattern(make_layout(128, num_random_blocks=1, block_size=16), HEADS, (1, 0))
    query, key, value = (x.to(dtype) for x in make_inputs(pattern))

    def gradients(given: Sequence[Tensor]) -> Sequence[Tensor]:
        leaves = [x.detach().requires_grad_() for x in given]
        output, _ = block_sparse_attention_with_lse(leaves[0], leaves[1], leaves[2], pattern, backend="gather")
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        return torch.autograd.grad(output, leaves, weights.to(output.dtype))

    given = query, key, value + 8
    for found, true in zip(gradients(given), gradients([x.double() for x in given]), strict=True):
        assert float((found.double() - true).norm() / true.norm()) <= torch.finfo(dtype).eps


def test_dropout_keeps_the_mean_and_drops_the_right_share():
    pattern = drawn_pattern(make_layout(64, num_random_blocks=1, block_size=8), HEADS, (1, 0))
    query, key, _ = make_inputs(pattern)
    # With a constant value each output is the sum of the weights that were kept, divided by 1 - p.
    value = torch.ones_like(key)
    torch.manual_seed(0)
    draws = torch.stack([block_sparse_attention(query, key, value, pattern, dropout_p=0.25) for _ in range(400)])
    sums = draws[..., 0]
    squares = dense_weights_squared(query, key, pattern)
    deviation = (squares * 0.25 / 0.75).sqrt()
    assert float(((sums.mean(0) - 1).abs() / (deviation / 400**0.5)).max()) < 5
    assert float((sums.std(0) / deviation - 1).abs().mean()) < 0.05


def dense_weights_squared(query: Tensor, key: Tensor, pattern: BlockPattern) -> Tensor:
    scores = (query @ key.mT * DIM**-0.5).masked_fill(~pattern.to_dense(), float("-inf"))
    squares: Tensor = scores.softmax(-1).square().sum(-1)
    return squares


def test_backward_repeats_bit_for_bit():
    pattern = drawn_pattern(make_layout(500), HEADS, (1, 0))
    inputs = make_inputs(pattern, torch.float32)
    first, second = (value_and_gradients(lambda x: engine(x, pattern), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_saved_tensors_are_linear_in_the_length():
    saved = []
    for length in (512, 1024, 2048):
        pattern = drawn_pattern(make_layout(length), HEADS, (1, 0))
        inputs = [x.requires_grad_() for x in make_inputs(pattern, torch.float32)]
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            engine(inputs, pattern)
        saved.append(sum(sizes))
        assert sum(sizes) == BATCH * HEADS * length * 4 * 3 * DIM  # query, key and value
    assert saved[1] == 2 * saved[0]
    assert saved[2] == 2 * saved[1]


def test_a_named_backend_is_never_replaced():
    pattern = drawn_pattern(make_layout(64), HEADS, (1, 0))
    inputs = make_inputs(pattern)
    with pytest.raises(UnsupportedError, match="CUDA") as caught:
        engine(inputs, pattern, backend="flex")
    assert caught.value.capability == "backend"
    with recording() as paths:
        engine(inputs, pattern, backend="gather")
    assert paths == ["block_sparse.gather"]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_functions_are_refused_with_what_to_do(transform: Callable[..., Any]):
    pattern = drawn_pattern(make_layout(64), HEADS, (1, 0))
    inputs = [x[None] for x in make_inputs(pattern)]
    with pytest.raises(UnsupportedError, match=r"torch\.func .* cannot go through; use torch\.autograd\.grad"):
        transform(lambda *x: engine([each.reshape(BATCH, HEADS, 64, DIM) for each in x], pattern).sum())(*inputs)


def test_a_pattern_for_other_sizes_is_refused():
    pattern = drawn_pattern(make_layout(64), HEADS, (1, 0))
    inputs = make_inputs(drawn_pattern(make_layout(65), HEADS, (1, 0)))
    with pytest.raises(ValueError, match="L = 65, S = 65, H = 3, B = 2; got L = 64, S = 64, H = 3"):
        engine(inputs, pattern)
