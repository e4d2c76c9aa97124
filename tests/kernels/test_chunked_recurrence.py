"""Chunked recurrences against their steps one by one, and the short convolution against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, pad

from attn_zoo.kernels.chunked_recurrence import chunk_sizes, decay_in_chunk, memories, short_convolution, split_chunks


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16, 17])
@pytest.mark.parametrize("kind", ["matrices", "numbers"])
def test_memories_are_those_of_one_step_after_another(count: int, kind: str):
    generator = torch.Generator().manual_seed(count)
    sizes = {"matrices": (4, 4), "numbers": (1, 3)}[kind]
    factor = torch.rand(2, 3, count, *sizes, generator=generator, dtype=torch.float64)
    addition = torch.randn(2, 3, count, 4, 3, generator=generator, dtype=torch.float64)
    state = torch.randn(2, 3, 4, 3, generator=generator, dtype=torch.float64)
    before, last = memories(factor, addition, state)
    assert before.shape == addition.shape
    for step in range(count):
        torch.testing.assert_close(before[:, :, step], state)
        state = (factor[:, :, step] @ state if kind == "matrices" else factor[:, :, step] * state) + addition[
            :, :, step
        ]
    torch.testing.assert_close(last, state)


def test_decay_between_positions_is_a_product():
    alpha = torch.rand(1, 1, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    so_far, between = decay_in_chunk(alpha.log())
    for t in range(5):
        torch.testing.assert_close(so_far[..., t, 0], alpha[..., : t + 1].prod(-1))
        for i in range(5):
            expected = alpha[..., i + 1 : t + 1].prod(-1) if i <= t else torch.zeros(1, 1, 2, dtype=torch.float64)
            torch.testing.assert_close(between[..., t, i], expected)


@pytest.mark.parametrize("strong", [20.0, 80.0, 1e4])
def test_weak_decays_keep_their_digits_behind_strong_ones(strong: float):
    """The sum of all logarithms is in the thousands, where float32 has three digits behind the point."""
    generator = torch.Generator().manual_seed(0)
    log_decay = -0.05 * torch.rand(1, 1, 1, 64, generator=generator)
    log_decay[..., [*range(20), 40]] -= strong
    log_decay[..., 60:] = 0.0  # padding
    weights, results = torch.randn(1, 1, 1, 64, 64, generator=generator), []
    for leaf in (log_decay.requires_grad_(), log_decay.detach().double().requires_grad_()):
        between = decay_in_chunk(leaf)[1]
        results.append((between, *torch.autograd.grad(between, leaf, weights.to(leaf))))
    for found, exact in zip(*results, strict=True):
        error = (found.double() - exact).abs().max() / exact.abs().max()
        assert error < 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("strong", [20.0, 80.0, 1e4])
def test_the_gradient_of_a_strong_decay_keeps_its_digits(strong: float):
    """A rate that all logarithms are multiplied by weighs the gradient of each with it, the strongest most."""
    generator = torch.Generator().manual_seed(0)
    log_decay = -0.05 * torch.rand(1, 1, 1, 64, generator=generator)
    log_decay[..., 20::10] -= strong
    weights, results = torch.randn(1, 1, 1, 64, 64, generator=generator), []
    for leaf in (log_decay.requires_grad_(), log_decay.detach().double().requires_grad_()):
        (gradient,) = torch.autograd.grad(decay_in_chunk(leaf)[1], leaf, weights.to(leaf))
        results.append((gradient * leaf.detach()).double())
    found, exact = results
    assert (found - exact).abs().max() < 8 * torch.finfo(torch.float32).eps * exact.abs().max()


def test_chunks_are_filled_up_with_zeros():
    assert chunk_sizes(10, 4) == (3, 4)
    assert chunk_sizes(3, 4) == (1, 3)
    rows = torch.randn(2, 1, 10, 3)
    chunks = split_chunks(rows, 3, 4)
    assert chunks.shape == (2, 1, 3, 4, 3)
    torch.testing.assert_close(chunks.flatten(2, 3), pad(rows, (0, 0, 0, 2)))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_the_short_convolution_is_that_of_torch_and_goes_on(size: int, length: int):
    generator = torch.Generator().manual_seed(length)
    rows = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    expected = conv1d(pad(rows.mT, (size - 1, 0)), weights.T[:, None], groups=3).mT
    output, tail = short_convolution(rows, weights)
    torch.testing.assert_close(output, expected)
    assert tail.shape == (2, size - 1, 3)
    one_by_one, tail = [], rows.new_zeros(2, size - 1, 3)
    for at in range(length):
        row, tail = short_convolution(rows[:, at : at + 1], weights, tail)
        one_by_one.append(row)
    torch.testing.assert_close(torch.cat(one_by_one, 1), expected)
    torch.testing.assert_close(tail, short_convolution(rows, weights)[1])
