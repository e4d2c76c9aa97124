"""Count the floating-point operations of a forward by watching what runs: a check of the formulas, not a substitute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

__all__ = ["count_flops"]

_TRANSPARENT_NAMESPACES = frozenset({"aten", "prim", "prims", "profiler", "c10d"})


def _cpu_flash_flops(
    query_shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size, *_: object, **__: object
) -> int:
    """Count the two products of attention; the counter passes all further arguments, which do not matter."""
    return int(sdpa_flop_count(query_shape, key_shape, value_shape))  # type: ignore[no-untyped-call]


_EXTRA_FORMULAS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_flash_flops}
"""What torch's own table lacks."""


class _OpaqueOperation(BaseException):
    """Something ran whose operations nobody knows. Not an `Exception`: no fall-back in the callable may swallow it."""


class _Watchman(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops before an operation that the counter would silently count as nothing."""

    def __init__(self, formulas: Mapping[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._formulas = formulas

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_known = func._overloadpacket in self._formulas
        if not is_known and (func.namespace not in _TRANSPARENT_NAMESPACES or "attention" in func.name()):
            raise _OpaqueOperation(func.name())
        return func(*args, **(kwargs or {}))


class _HigherOrderWatchman(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops before a higher-order operator: FlexAttention would compute all scores here, and count as dense."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise _OpaqueOperation(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_triton_launch() -> Iterator[None]:
    """Stop at a Triton kernel launched by hand, which no dispatcher sees."""
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    chain: Any = getattr(getattr(knobs, "runtime", None), "launch_enter_hook", None)
    if not hasattr(chain, "add") or not hasattr(chain, "remove"):
        yield
        return

    def stop(metadata: object) -> None:
        raise _OpaqueOperation(str(metadata))

    chain.add(stop)
    try:
        yield
    finally:
        chain.remove(stop)


def count_flops(forward: Callable[[], object]) -> int | None:
    """Run `forward` once without a graph and return its floating-point operations, a multiply-add being two.

    Counted are matrix products, convolutions and fused attention; element-wise work, reductions, softmax and FFTs are
    not. Causal or masked attention counts as dense, as in `torch.utils.flop_counter`: for sparse mechanisms the formula
    is the truth, and this is the upper bound it is checked against.

    Returns:
        The count, or None where an operation ran that the counter cannot see into: FlexAttention, a kernel of another
        package, a Triton kernel. It stops at the first of those.
    """
    formulas = {**flop_registry, **_EXTRA_FORMULAS}
    counter = FlopCounterMode(display=False, custom_mapping=_EXTRA_FORMULAS)
    try:
        # One watchman stands outside the counter and sees what it could not take apart; the other must be asked first.
        inner = _HigherOrderWatchman()  # type: ignore[no-untyped-call]
        with torch.no_grad(), _no_triton_launch(), _Watchman(formulas), counter, inner:
            forward()
    except _OpaqueOperation:
        return None
    return int(counter.get_total_flops())
