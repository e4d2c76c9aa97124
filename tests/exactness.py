"""How exact a result must be: at most twice the error of the plain computation in the same dtype, plus rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def worst(actual: Tensor, exact: Tensor) -> float:
    """Return the largest absolute error; a NaN is infinitely wrong."""
    return float((actual.detach().double() - exact.detach().double()).abs().nan_to_num(nan=float("inf")).max())


def assert_exact(actual: Tensor, plain: Tensor, exact: Tensor, what: str = "output", *, times: float = 2.0) -> None:
    """Compare a fast path with the float64 oracle.

    Args:
        actual: of the fast path.
        plain: the oracle's equation in the dtype of `actual`.
        exact: of the oracle in float64.
        what: for the message.
        times: the plain computation's error that is allowed.
    """
    # Sums in another order differ by rounding that grows with the root of the number of terms; 16-bit types are summed
    # in float32, so that only the last few roundings count.
    eps = torch.finfo(actual.dtype).eps
    growth = 4.0 if eps > 1e-4 else 4.0 + 2.0 * max(actual.shape[-2:]) ** 0.5
    rounding = growth * eps * float(exact.detach().abs().max().clamp(min=1.0))
    allowed = times * worst(plain, exact) + rounding
    error = worst(actual, exact)
    assert error <= allowed, f"{what}: error {error:.3g} > {allowed:.3g}"


def assert_one_graph(mixer: Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> None:
    """Check that the graph that is traced for the first hidden states serves those of another length, in float64."""
    compiled = torch.compile(mixer, backend="eager", fullgraph=True)
    for hidden, stance in ((first, "default"), (second, "fail_on_recompile")):
        torch._dynamo.mark_dynamic(hidden, 1)
        with torch.compiler.set_stance(stance):
            torch.testing.assert_close(compiled(hidden), mixer(hidden), rtol=0, atol=1e-11)


def assert_transforms_as_autograd(mixer: Callable[[Tensor], Tensor], entries: Tensor) -> None:
    """Compare `torch.func`'s gradients of each of the entries `[N, B, L, E]`, and a derivative, with autograd."""

    def loss(hidden: Tensor) -> Tensor:
        return mixer(hidden).sin().sum()

    of_all = torch.func.vmap(torch.func.grad(loss))(entries)
    change = torch.func.jvp(loss, (entries[0],), (entries[0],))[1]
    for entry, found in zip(entries, of_all, strict=True):
        leaf = entry.clone().requires_grad_()
        torch.testing.assert_close(found, *torch.autograd.grad(loss(leaf), leaf))
    torch.testing.assert_close(change, (of_all[0] * entries[0]).sum())
