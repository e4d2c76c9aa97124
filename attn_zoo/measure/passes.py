"""The four passes of a differentiable computation, each as a pair of callables: what is timed, and what runs before it.

| pass | timed | outside the timing |
| --- | --- | --- |
| `infer` | forward without graph | - |
| `fwd` | forward that saves what backward needs | - |
| `bwd` | backward from a fixed random gradient, graph kept | the one forward; gradients set to None |
| `fwd_bwd` | forward and backward | gradients set to None |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from attn_zoo.records import PASSES, CallPass

GRAD_SEED = 20_170_612

MOST_REPLAYED = 2**26
"""Numbers in the first tensor of a call that may be replayed on a GPU; as `MOST_NUMBERS` of `kernels/replay.py`."""


def num_unlike(first: Tensor) -> int:
    """Return how many calls run otherwise than all later ones, after the very first.

    On a GPU the second call of a kind is recorded, beside what it was recorded from, and replayed later. Torch may
    settle which kernel it prefers in the first, which makes the next one the first of another kind.
    """
    return 3 if first.is_cuda and first.numel() <= MOST_REPLAYED else 0


def clear_grads(leaves: Sequence[Tensor]) -> None:
    """Set the gradients of `leaves` to None, so that the next backward allocates them instead of adding."""
    for leaf in leaves:
        leaf.grad = None


def grad_like(output: Tensor) -> Tensor:
    """Return normal noise of the shape, dtype and device of `output`: the same every time."""
    generator = torch.Generator(output.device).manual_seed(GRAD_SEED)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)


def require_leaves(leaves: Sequence[Tensor], pass_: str) -> None:
    """Check that a backward pass has somewhere to go.

    Raises:
        ValueError: the pass is unknown, a leaf is no leaf, or none requires a gradient in a pass that has a backward.
    """
    if pass_ not in get_args(CallPass):
        raise ValueError(f"pass_: expected one of {', '.join(get_args(CallPass))}; got {pass_!r}")
    if not all(leaf.is_leaf for leaf in leaves):
        raise ValueError("leaves: expected inputs and parameters, not results of computations")
    if PASSES[pass_].has_graph and not any(leaf.requires_grad for leaf in leaves):
        raise ValueError(f"leaves: pass {pass_!r} needs at least one that requires a gradient")


def require_graph(output: Tensor, pass_: CallPass) -> Tensor:
    """Return `output`.

    Raises:
        ValueError: it does not require a gradient.
    """
    if not output.requires_grad:
        raise ValueError(
            f"forward: pass {pass_!r} needs an output that requires a gradient; it is cut off from the leaves"
        )
    return output


def make_pass(
    forward: Callable[[], Tensor], leaves: Sequence[Tensor], pass_: CallPass
) -> tuple[Callable[[], Tensor], Callable[[], None] | None]:
    """Return what to time, each call of which returns the output, and what to run before each call.

    The gradient that backward starts from is made once, in the first call. Graph-free means `torch.no_grad`, not
    `inference_mode`: tensors that a module caches in its first call must stay usable for training.

    Raises:
        ValueError: see `require_leaves`; or the output does not depend on the leaves.
    """
    require_leaves(leaves, pass_)
    seeds: list[Tensor] = []

    def seed_for(output: Tensor) -> Tensor:
        if not seeds:
            seeds.append(grad_like(output))
        return seeds[0]

    def infer() -> Tensor:
        with torch.no_grad():
            return forward()

    def fwd() -> Tensor:
        return require_graph(forward(), pass_)

    def fwd_bwd() -> Tensor:
        output = fwd()
        output.backward(seed_for(output))  # type: ignore[no-untyped-call]
        return output

    kind = PASSES[pass_]
    if not kind.has_graph:
        return infer, None
    if not kind.backwards:
        return fwd, None
    if kind.forwards:
        return fwd_bwd, partial(clear_grads, leaves)
    for _ in range(num_unlike(leaves[0])):
        fwd()  # gradients are replayed of what is
    output = fwd()
    seed = seed_for(output)

    def bwd() -> Tensor:
        output.backward(seed, retain_graph=True)  # type: ignore[no-untyped-call]
        return output

    return bwd, partial(clear_grads, leaves)
