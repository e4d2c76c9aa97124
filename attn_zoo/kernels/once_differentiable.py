"""Backward passes that cannot be differentiated again, and say so to whoever tries.

The decorator of torch says so less often. It marks gradients only where the gradient given needs one, so that of
`output.sum()` none is marked, and a penalty on them adds nothing to a loss. And it keeps the inputs out of the graph,
so that `torch.autograd.grad` towards them finds another way or none, and the refusal is never met.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

Backward = Callable[..., tuple[Any, ...]]


class _Final(torch.autograd.Function):
    """Gradients as they are, in a graph that leads to all they were computed from and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, num_results: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return tuple(None if result is None else result.view_as(result) for result in tensors[:num_results])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:  # noqa: ARG004
        raise RuntimeError(
            "expected one derivative; got a second: this kernel's backward is written by hand (once_differentiable); "
            "the `reference` of a variant has derivatives of any order"
        )


class _Unpacked:
    """A context whose saved tensors were read: hooks need not hand them out twice, and checkpointing refuses to."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def once_differentiable(backward: Backward) -> Backward:
    """Refuse a second derivative; where no graph of the gradients is made, that costs nothing.

    Among the tensors that are saved must be the inputs themselves: through them the graph leads on.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        unpacked = _Unpacked(ctx)
        with torch.no_grad():
            results = backward(unpacked, *grads)
        found: tuple[Any, ...] = _Final.apply(len(results), *results, *unpacked.saved_tensors, *grads)
        return found

    return wrapper
