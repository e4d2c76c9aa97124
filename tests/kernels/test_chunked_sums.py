"""Chunked sums against the recurrence they stand for, one position after another, and against autograd through it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_zoo.kernels.chunked_sums import chunked_sums, chunked_sums_flops
from attn_zoo.measure.flop_count import count_operations

BATCH, HEADS, DIM, WIDTH = 2, 3, 4, 5
GAMMAS = torch.tensor([0.1, 0.97, 1.0], dtype=torch.float64)


def draw(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    sizes = [(length, DIM), (length, DIM), (length, WIDTH), (DIM, WIDTH)]
    return [torch.randn(BATCH, HEADS, *size, generator=generator, dtype=torch.float64) for size in sizes]


def by_the_recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor]:
    state = torch.zeros(BATCH, HEADS, DIM, WIDTH, dtype=torch.float64) if start is None else start
    gamma = (torch.ones(HEADS, dtype=torch.float64) if decay is None else decay)[:, None, None]
    rows = []
    for i in range(query.shape[2]):
        state = gamma * state + key[:, :, i, :, None] * value[:, :, i, None, :]
        rows.append((query[:, :, i, None] @ state)[:, :, 0])
    return torch.stack(rows, 2), state


@pytest.mark.parametrize("chunk_len", [1, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 24, 50])
@pytest.mark.parametrize("decay", [None, GAMMAS], ids=["sum", "decay"])
@pytest.mark.parametrize("has_start", [False, True])
def test_it_is_the_recurrence_with_its_gradients(length: int, chunk_len: int, decay: Tensor | None, has_start: bool):
    results = []
    for is_chunked in (False, True):
        leaves = [x.requires_grad_() for x in draw(length)]
        query, key, value, begin = leaves
        start = begin if has_start else None
        if is_chunked:
            output, state = chunked_sums(query, key, value, chunk_len=chunk_len, decay=decay, start=start)
        else:
            output, state = by_the_recurrence(query, key, value, decay, start)
        gradients = torch.autograd.grad(output.sin().sum() + state.cos().sum(), leaves[: 4 if has_start else 3])
        results.append([output, state, *gradients])
    for slow, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-11)


@pytest.mark.parametrize("decay", [None, GAMMAS], ids=["sum", "decay"])
def test_a_sequence_may_be_cut_anywhere(decay: Tensor | None):
    query, key, value, state = draw(23)
    whole, last = chunked_sums(query, key, value, chunk_len=4, decay=decay, start=state)
    parts = []
    for part in (slice(0, 1), slice(1, 10), slice(10, 23)):
        output, state = chunked_sums(
            query[:, :, part], key[:, :, part], value[:, :, part], chunk_len=4, decay=decay, start=state
        )
        parts.append(output)
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def test_fast_decay_over_many_chunks_stays_finite():
    """A factor gamma^-L, which cheaper ways of carrying states need, would overflow here."""
    query, key, value, _ = (x.float().requires_grad_() for x in draw(4096))
    output, last = chunked_sums(query, key, value, chunk_len=16, decay=GAMMAS.float())
    (output.sum() + last.sum()).backward()
    for tensor in (output, last, query.grad, key.grad, value.grad):
        assert tensor is not None
        assert tensor.isfinite().all()
    q, k, v = (x.detach().double() for x in (query, key, value))
    exact, _ = by_the_recurrence(q, k, v, GAMMAS, None)
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [5, 8, 16, 20])
@pytest.mark.parametrize("decay", [None, GAMMAS], ids=["sum", "decay"])
def test_flops_are_those_of_the_products_that_run(length: int, decay: Tensor | None):
    query, key, value, _ = draw(length)
    counted = count_operations(lambda: chunked_sums(query, key, value, chunk_len=8, decay=decay))
    assert counted is not None
    assert counted.products == BATCH * HEADS * chunked_sums_flops(length, 8, DIM, WIDTH)
