"""Count the floating-point operations of a forward by watching what runs: a check of the formulas, not a substitute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count, shape_wrapper

__all__ = ["count_flops"]

_COMPILER = "torch._dynamo"
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


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what torch's table of formulas says, and stops before an operation that would count as nothing.

    `torch.utils.flop_counter.FlopCounterMode` would serve, but as every mode it loads torch's compiler to keep it out,
    which takes a second. See `_new_counter`.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        extra = {operation: shape_wrapper(formula) for operation, formula in _EXTRA_FORMULAS.items()}  # type: ignore[no-untyped-call]
        self._formulas: dict[Any, Any] = {**flop_registry, **extra}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise _OpaqueOperation(str(func))  # FlexAttention would compute all scores here, and count as dense
        if (formula := self._formulas.get(func._overloadpacket)) is not None:
            output = func(*args, **kwargs)
            self.total += int(formula(*args, **kwargs, out_val=output))
            return output
        if func.namespace != "prim":
            with self:  # what consists of other operations is counted by those
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        if func.namespace not in _TRANSPARENT_NAMESPACES or "attention" in func.name():
            raise _OpaqueOperation(func.name())
        return func(*args, **kwargs)


def _new_counter() -> _Counter:
    """Return a counter that keeps the compiler out of itself, where there is one: to say so loads it."""
    if _COMPILER not in sys.modules:
        return _Counter()

    class Uncompiled(_Counter):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return super().__torch_dispatch__(func, types, args, kwargs)

    return Uncompiled()


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
    had_compiler = _COMPILER in sys.modules
    counter = _new_counter()
    try:
        with torch.no_grad(), _no_triton_launch(), counter:
            forward()
    except _OpaqueOperation:
        return None
    except Exception:
        if had_compiler or _COMPILER not in sys.modules:
            raise
        return count_flops(forward)  # it has just loaded the compiler, which then took the counter apart too
    return counter.total
