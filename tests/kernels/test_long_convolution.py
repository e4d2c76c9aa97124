"""Long convolutions: sums written out, in one and two directions, gradients, cost; memories after every position."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_zoo.kernels.long_convolution import convolve, convolve_flops, remember, transform_size, two_levels
from attn_zoo.measure.flop_count import count_operations


def written_out(tokens: Tensor, kernels: Tensor) -> Tensor:
    length = tokens.shape[-1]
    output = torch.zeros_like(tokens)
    for at in range(length):
        for other in range(length):
            if other <= at:
                output[..., at] += kernels[0, :, at - other] * tokens[..., other]
            elif len(kernels) == 2:
                output[..., at] += kernels[1, :, other - at - 1] * tokens[..., other]
    return output


@pytest.mark.parametrize("num_directions", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 5, 16, 17])
def test_a_convolution_is_the_sum_over_both_sides(length: int, num_directions: int):
    generator = torch.Generator().manual_seed(length)
    tokens, kernels, upstream = (
        torch.randn(*shape, 3, length, generator=generator, dtype=torch.float64)
        for shape in ((2,), (num_directions,), (2,))
    )
    leaves, results = [tokens.requires_grad_(), kernels.requires_grad_()], []
    for run in (convolve, written_out):
        output = run(tokens, kernels)
        results.append([output, *torch.autograd.grad(output, leaves, upstream)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    assert torch.autograd.gradgradcheck(convolve, leaves, fast_mode=True)


def test_no_length_wraps_around_and_two_levels_hold_it():
    for length in range(1, 300):
        count, size = two_levels(length)
        assert (count - 1) * size < length <= count * size
        assert transform_size(length) >= 2 * length


def test_cost_is_what_runs():
    tokens, kernels = torch.randn(2, 3, 40, requires_grad=True), torch.randn(1, 3, 40, requires_grad=True)
    forward = count_operations(lambda: convolve(tokens, kernels))
    both = count_operations(lambda: convolve(tokens, kernels).sum().backward())
    assert forward is not None
    assert both is not None
    claim = convolve_flops(2, 3, 40)
    assert claim == pytest.approx(2.5 * 5 * 3 * 80 * math.log2(80))
    assert forward.products == pytest.approx(claim, abs=3)
    assert both.products == pytest.approx(2 * claim, abs=6)  # waves are kept


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_memories_after_every_position(length: int, dtype: torch.dtype):
    torch.manual_seed(length)
    tokens, decay = torch.randn(2, length, 3, dtype=torch.float64), torch.rand(3, 4, dtype=dtype)
    memory, rows = torch.zeros(2, 3, 4, dtype=dtype), []
    for at in range(length):
        memory = decay * memory + tokens[:, at, :, None]
        rows.append(memory)
    torch.testing.assert_close(remember(tokens, decay), torch.stack(rows, 1), rtol=0, atol=1e-12)
