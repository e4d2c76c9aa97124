"""Attention to compressed keys as one node of autograd: its parts' results, with gradients of our own kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo.kernels.compress import attend, compression
from attn_zoo.kernels.compress.attend import attend_compressed
from attn_zoo.kernels.trace import recording
from tests.kernels.interpreter import IS_INTERPRETING, mend_interpreter, run_interpreted

LENGTH, RANK = 200, 24

if not IS_INTERPRETING:

    @pytest.mark.triton
    @pytest.mark.timeout(600)
    def test_in_the_interpreter():
        run_interpreted(Path(__file__), "-k", "interpreted")


def draw(
    device: str = "cpu", dtype: torch.dtype = torch.float16, length: int = LENGTH, rank: int = RANK, groups: int = 2
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return query, key and value of two sequences, E and F, and a gradient."""
    generator = torch.Generator().manual_seed(length)

    def leaf(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype).requires_grad_()

    tokens = [leaf(2, 2, length, 64), leaf(2, groups, length, 64), leaf(2, groups, length, 64)]
    matrices = [leaf(1, length + 30, rank, scale=length**-0.5) for _ in range(2)]
    return tokens, matrices, leaf(2, 2, length, 64).detach()


def truth(tokens: list[Tensor], matrices: list[Tensor], mask: Tensor | None) -> Tensor:
    """Return equation 7 of the paper as it is written."""
    query, key, value = tokens
    if mask is not None:
        key, value = (x.masked_fill(mask[:, None, :, None], 0.0) for x in (key, value))
    key, value = (e[:, : key.shape[2]].mT @ x for x, e in zip((key, value), matrices, strict=True))
    weights = torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1)
    return weights @ value


def results(tokens: list[Tensor], matrices: list[Tensor], grad: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return output and gradients."""
    output = attend_compressed(tokens[0], (tokens[1], tokens[2]), (matrices[0], matrices[-1]), key_padding_mask=mask)
    return [output.detach(), *torch.autograd.grad(output, [*tokens, *matrices], grad)]


def agree(found: list[Tensor], tokens: list[Tensor], matrices: list[Tensor], grad: Tensor, mask: Tensor | None) -> None:
    wide = [x.detach().double().requires_grad_() for x in (*tokens, *matrices)]
    output = truth(wide[:3], [wide[3], wide[-1]], mask)
    wanted = [output.detach(), *torch.autograd.grad(output, wide, grad.double())]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=4e-3 * float(other.abs().max()))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_interpreter(monkeypatch)
    real = compression.path_of_pair
    monkeypatch.setattr(attend, "path_of_pair", lambda one, other, mask, _: real(one, other, mask, "triton"))


def padding() -> Tensor:
    return torch.arange(LENGTH) >= torch.tensor([[LENGTH - 50], [LENGTH]])


of_triton = pytest.mark.skipif(not IS_INTERPRETING, reason="run by the test above, in a process of its own")


@of_triton
@pytest.mark.triton
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("num_matrices", [1, 2])
def test_interpreted_it_is_the_equation(interpreted: Any, has_padding: bool, num_matrices: int):
    tokens, matrices, grad = draw()
    matrices, mask = matrices[:num_matrices], padding() if has_padding else None
    with recording() as paths:
        found = results(tokens, matrices, grad, mask)
    assert (paths[0], paths[-1]) == ("compress.triton", "few_keys.triton")
    agree(found, tokens, matrices, grad, mask)
    if mask is not None:  # whatever is stored there
        spoilt = [tokens[0], *(x.detach().masked_fill(mask[:, None, :, None], torch.nan) for x in tokens[1:])]
        again = results([x.requires_grad_() for x in spoilt], matrices, grad, mask)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@of_triton
@pytest.mark.triton
def test_interpreted_saved_tensors_may_come_back_elsewhere_and_otherwise_laid_out(interpreted: Any):
    tokens, matrices, grad = draw()
    wanted = results(tokens, matrices, grad, None)

    def moved(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1) if x.shape[0] > 1 else x.clone()

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, moved):
        found = results(tokens, matrices, grad, None)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


@of_triton
@pytest.mark.triton
def test_interpreted_what_needs_no_gradient_gets_none_and_a_second_derivative_is_refused(interpreted: Any):
    tokens, matrices, grad = draw()
    wanted = results(tokens, matrices, grad, None)
    for needing in ([0], [1, 2], [3, 4], [0, 4]):
        leaves = [x.detach().requires_grad_(i in needing) for i, x in enumerate([*tokens, *matrices])]
        output = attend_compressed(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]))
        found = torch.autograd.grad(output, [leaves[i] for i in needing], grad)
        assert all(torch.equal(one, wanted[1 + i]) for i, one in zip(needing, found, strict=True))
    output = attend_compressed(tokens[0], (tokens[1], tokens[2]), (matrices[0], matrices[1]))
    (first,) = torch.autograd.grad(output.sum(), tokens[0], create_graph=True)
    with pytest.raises(RuntimeError, match="expected one derivative"):
        first.sum().backward()


@of_triton
@pytest.mark.triton
@pytest.mark.parametrize("change", [{"groups": 1}, {"rank": 300}, {"dtype": torch.float32}])
def test_interpreted_what_our_gradients_do_not_serve_is_two_nodes(interpreted: Any, change: dict[str, Any]):
    options: dict[str, Any] = {"length": 320} | change
    tokens, matrices, grad = draw(**options)
    with recording() as paths:
        found = results(tokens, matrices, grad, None)
    assert "few_keys.triton" not in paths
    if tokens[1].shape[1] == 2:
        agree(found, tokens, matrices, grad, None)


def test_on_a_cpu_it_is_two_nodes():
    tokens, matrices, grad = draw(dtype=torch.float32)
    with recording() as paths:
        found = results(tokens, matrices, grad, padding())
    assert "few_keys.triton" not in paths
    agree(found, tokens, matrices, grad, padding())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_matrices", [1, 2])
def test_on_the_gpu_it_is_the_equation_and_can_be_captured(dtype: torch.dtype, num_matrices: int):
    tokens, matrices, grad = draw("cuda", dtype, 1000, 256)
    matrices = matrices[:num_matrices]
    with recording() as paths:
        found = results(tokens, matrices, grad, None)
    assert (paths[0], paths[-1]) == ("compress.triton", "few_keys.triton")
    agree(found, tokens, matrices, grad, None)
    again = results(tokens, matrices, grad, None)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(tokens, matrices, grad, None)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(found, captured, strict=True))
