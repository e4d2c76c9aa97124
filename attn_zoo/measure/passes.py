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
from typing import get_args

import torch
from torch import Tensor

from attn_zoo.measure.cuda_graphs import with_graph_time
from attn_zoo.measure.stopwatch import AbstractStopwatch
from attn_zoo.measure.timing import time_callable
from attn_zoo.records import CallPass, Timing

__all__ = ["clear_grads", "grad_like", "make_pass", "require_graph", "require_leaves", "time_pass"]

GRAD_SEED = 20_170_612
GRAPH_PASSES = ("fwd", "bwd", "fwd_bwd")


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
    if pass_ in GRAPH_PASSES and not any(leaf.requires_grad for leaf in leaves):
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

    Args:
        forward: computes the output.
        leaves: inputs and parameters.
        pass_: which pass.

    Raises:
        ValueError: see `require_leaves`; or the output does not depend on the leaves.
    """
    require_leaves(leaves, pass_)
    seeds: list[Tensor] = []

    def seed_for(output: Tensor) -> Tensor:
        if not seeds:
            seeds.append(grad_like(output))
        return seeds[0]

    def clear() -> None:
        clear_grads(leaves)

    def infer() -> Tensor:
        with torch.no_grad():
            return forward()

    def fwd() -> Tensor:
        return require_graph(forward(), pass_)

    def fwd_bwd() -> Tensor:
        output = fwd()
        output.backward(seed_for(output))  # type: ignore[no-untyped-call]
        return output

    match pass_:
        case "infer":
            return infer, None
        case "fwd":
            return fwd, None
        case "fwd_bwd":
            return fwd_bwd, clear
    output = fwd()
    seed = seed_for(output)

    def bwd() -> Tensor:
        output.backward(seed, retain_graph=True)  # type: ignore[no-untyped-call]
        return output

    return bwd, clear


def time_pass(
    forward: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    pass_: CallPass,
    *,
    device: torch.device | str = "cpu",
    budget_s: float = 1.0,
    min_samples: int = 5,
    max_samples: int = 50,
    min_sample_ms: float = 2.0,
    flush_cache: bool = True,
    stopwatch: AbstractStopwatch | None = None,
) -> Timing:
    """Time one pass of `forward`. The numbers mean what they mean in `time_callable`.

    A GPU pass that is bound by its launches has the time of its replay from a CUDA graph too; see `graphs`.

    Args:
        forward: computes the output, a tensor.
        leaves: inputs and parameters; their gradients are None afterwards.
        pass_: `"infer"`, `"fwd"`, `"bwd"` (alone, over one graph) or `"fwd_bwd"`.
        device: where the work runs.
        budget_s: how long the samples may take together.
        min_samples: taken even where the budget is exceeded, as long as one call is not.
        max_samples: never more.
        min_sample_ms: shortest sample on CPU.
        flush_cache: on GPU, empty the second-level cache before every sample.
        stopwatch: measures; None takes the one for `device`.

    Raises:
        ValueError: no gradient can flow in a pass that needs one, or an argument makes no sense.
    """
    clear_grads(leaves)
    call, setup = make_pass(forward, leaves, pass_)
    try:
        timing = time_callable(
            call,
            device=device,
            setup=setup,
            budget_s=budget_s,
            min_samples=min_samples,
            max_samples=max_samples,
            min_sample_ms=min_sample_ms,
            flush_cache=flush_cache,
            stopwatch=stopwatch,
        )
        del call, setup  # they may hold an autograd graph of these leaves, bound to the stream it was made on
        return with_graph_time(timing, lambda: make_pass(forward, leaves, pass_), device)
    finally:
        clear_grads(leaves)
