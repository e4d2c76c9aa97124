"""Activations for torch's compiler: the same numbers, and gradients that lie as the compiler was told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attn_zoo.kernels.activations import elu, softplus


@pytest.mark.parametrize(("ours", "torchs"), [(softplus, functional.softplus), (elu, functional.elu)])
def test_a_graph_that_runs_as_traced_has_the_same_numbers(
    ours: Callable[[Tensor], Tensor], torchs: Callable[[Tensor], Tensor]
):
    rows = torch.cat([torch.linspace(-50, 50, 82, dtype=torch.float64), torch.tensor([-1e3, 1e3])]).view(-1, 2)
    weights = torch.rand(21, 3, dtype=torch.float64)

    def run(activation: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        return activation(rows.view(2, 21, 2)).mT @ weights

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = []
    for call, activation in ((run, torchs), (run, ours), (compiled, ours)):
        leaf = rows.clone().requires_grad_()
        output = call(activation, leaf)
        found.append((output, *torch.autograd.grad(output.sin().sum(), leaf)))
    torch.compiler.reset()
    for other in found[1:]:
        for one, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-8, atol=1e-8)  # torch's softplus ends at 20
