"""A second derivative is right or refused: a penalty on gradients must not silently count for nothing, or for less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attn_zoo
from attn_zoo.attention import BuildContext, build_attention, build_mixer
from attn_zoo.kernels.once_differentiable import once_differentiable
from attn_zoo.registry import variants

LENGTH = 40
OPTIONS: dict[str, dict[str, Any]] = {  # that leave some keys unseen at this length
    "bigbird": {"block_size": 4, "num_global_blocks": 1, "num_random_blocks": 1},
    "local_window": {"window_size": 5},
    "moba": {"block_size": 8, "top_k": 2},
    "nsa": {"compress_len": 8, "compress_stride": 4, "block_size": 8, "num_blocks": 4, "window_size": 8},
}
CASES = [(name, dropout_p) for name in attn_zoo.list_variants() for dropout_p in (0.0, 0.3)]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return (3 * x**2 * grads[0],)


def test_refuses_whichever_way_it_is_asked() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for output in (Cube.apply(x).sum(), Cube.apply(x).square().sum()):
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        loss = gradient.square().sum() + x.sum()
        with pytest.raises(RuntimeError, match="once_differentiable"):
            torch.autograd.grad(loss, x, retain_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            loss.backward()
    Cube.apply(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([3.0, 12.0]))


def test_saved_tensors_are_unpacked_once() -> None:
    """Checkpointing hands them out once only, also where a graph of the gradients is made."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    output = checkpoint(Cube.apply, x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, torch.tensor([3.0, 12.0]))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(gradient.sum(), x)


@pytest.mark.parametrize(("name", "dropout_p"), CASES)
def test_a_penalty_on_gradients_is_right_or_refused(name: str, dropout_p: float) -> None:
    capabilities = attn_zoo.describe(name).capabilities
    if dropout_p and not capabilities.attention_dropout:
        pytest.skip("it has no dropout")
    build = BuildContext(
        embed_dim=16, num_heads=2, max_seq_len=LENGTH, is_causal=not capabilities.bidirectional, dropout_p=dropout_p
    )
    is_mixer = variants[name].attention is None
    make = build_mixer if is_mixer else build_attention
    module = make(name, build, **OPTIONS.get(name, {})).double()
    shape = (2, LENGTH, 16) if is_mixer else (2, 2, LENGTH, 8)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(1 if is_mixer else 3)]
    directions = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in inputs]

    def loss_at(step: float, *, has_graph: bool = False) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)  # of dropout
        leaves = [(x + step * d).requires_grad_() for x, d in zip(inputs, directions, strict=True)]
        output: Tensor = module(*leaves)
        # Of a sum and not of a square: the gradient given to the kernel is a constant.
        found = torch.autograd.grad(output.sum(), leaves, create_graph=has_graph)
        return torch.stack([gradient.square().sum() for gradient in (*found, *leaves)]).sum(), leaves

    loss, leaves = loss_at(0.0, has_graph=True)
    try:
        gradients = torch.autograd.grad(loss, leaves)
    except RuntimeError as error:
        if "once_differentiable" in str(error) or "is not implemented" in str(error):  # ours, torch's
            return
        raise
    claimed = float(sum((g * d).sum() for g, d in zip(gradients, directions, strict=True)))
    slope = float((loss_at(1e-5)[0] - loss_at(-1e-5)[0]).detach()) / 2e-5
    assert claimed == pytest.approx(slope, rel=1e-4)
