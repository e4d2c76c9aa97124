"""Count the floating-point operations of a forward by watching what runs: a check of the formulas, not a substitute."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_COMPILER = "torch._dynamo"
_TRANSPARENT_NAMESPACES = frozenset({"aten", "prim", "prims", "profiler", "c10d"})
_PRODUCTS = re.compile(
    r"attention|encoder_layer|linalg_(?!vector_norm|cross|check_errors)|cholesky|triangular_solve|trilinear"
    r"|[cp]dist|euclidean_dist|mm_?(\.|$)"
)
"""Operations of torch that multiply matrices, solve or decompose: one without a formula is unknown, not nothing."""


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count the two products of attention for every head of the queries: torch up to 2.11 refuses grouped ones."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> int:
    """Count five products: the scores are recomputed."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def _fft_flops(tensor: Tensor, dims: Sequence[int], *_: Any, out_val: Tensor, **__: Any) -> int:
    """Count 5 N log2 N for each transform of N complex points, half of it where input or output is real."""
    points = out_val if out_val.numel() > tensor.numel() else tensor
    is_real = not (tensor.is_complex() and out_val.is_complex())
    size = math.prod(points.shape[dim] for dim in dims)
    return round(5 * points.numel() * math.log2(max(size, 1)) * (0.5 if is_real else 1.0))


def _recurrent_flops(tensor: Tensor, *rest: Any, **_: Any) -> int:
    """Count the products of a fused recurrent layer: each weight matrix once for every position.

    The weights are the four arguments after the input (oneDNN) or the first of them, a list (cuDNN).
    """
    given = rest[0] if isinstance(rest[0], list | tuple) else rest[:4]
    weights = sum(item.numel() for item in given if isinstance(item, Tensor) and item.dim() == 2)
    return 2 * weights * (tensor.numel() // tensor.shape[-1])


def _recurrent_backward_flops(tensor: Tensor, *rest: Any, **_: Any) -> int:
    return 2 * _recurrent_flops(tensor, *rest)


def _convolution_backward_flops(
    grad: Tensor, tensor: Tensor, weight: Tensor, *rest: Any, out_val: Sequence[Tensor | None], **_: Any
) -> int:
    """Count as many as the forward has for each gradient: torch's own count is too large by the number of groups."""
    places = tensor if rest[4] else grad  # where the weight is applied: at each input if transposed, else each output
    return 2 * weight.numel() * len(grad) * math.prod(places.shape[2:]) * sum(x is not None for x in out_val[:2])


def _triangular_flops(matrix: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Count half a product: each unknown meets the unknowns before it."""
    return matrix.shape[-1] * out_val.numel()


def _vector_flops(*tensors: Any, **_: Any) -> int:
    """Count the product of a vector with the largest of the arguments: a matrix, or a vector too."""
    return 2 * max(item.numel() for item in tensors if isinstance(item, Tensor))


_aten = torch.ops.aten
_EXTRA_FORMULAS = {
    **dict.fromkeys((_aten.mv, _aten.addmv, _aten.addmv_, _aten.dot, _aten.vdot), _vector_flops),
    **dict.fromkeys((_aten.addmm_, _aten._addmm_activation), flop_registry[_aten.addmm]),
    **dict.fromkeys((_aten.baddbmm_, _aten.addbmm, _aten.addbmm_), flop_registry[_aten.baddbmm]),
    **dict.fromkeys(
        (
            _aten._scaled_dot_product_flash_attention_for_cpu,
            _aten._scaled_dot_product_flash_attention,
            _aten._scaled_dot_product_efficient_attention,
            _aten._scaled_dot_product_cudnn_attention,
        ),
        _attention_flops,
    ),
    **dict.fromkeys(
        (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward,
            _aten._scaled_dot_product_flash_attention_backward,
            _aten._scaled_dot_product_efficient_attention_backward,
            _aten._scaled_dot_product_cudnn_attention_backward,
        ),
        _attention_backward_flops,
    ),
    _aten.convolution_backward: _convolution_backward_flops,
    _aten.linalg_solve_triangular: _triangular_flops,
    _aten._fft_r2c: _fft_flops,
    _aten._fft_c2r: _fft_flops,
    _aten._fft_c2c: _fft_flops,
    _aten.mkldnn_rnn_layer: _recurrent_flops,
    _aten.mkldnn_rnn_layer_backward: _recurrent_backward_flops,
    _aten._cudnn_rnn: _recurrent_flops,
    _aten._cudnn_rnn_backward: _recurrent_backward_flops,
}
"""What torch's own table lacks, or has wrong."""

_SUMS = frozenset({_aten.sum, _aten.mean, _aten.cumsum})


@dataclass(frozen=True, slots=True)
class Operations:
    """What ran.

    Args:
        products: floating-point operations of matrix products, triangular systems, convolutions, fused attention, fused
            recurrent layers and Fourier transforms, a multiply-add being two.
        additions: one for each element that was summed along a dimension.
    """

    products: int
    additions: int


class _OpaqueOperation(BaseException):
    """An operation ran whose FLOPs are unknown. Not an `Exception`: no fall-back in the callable may swallow it."""


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what torch's table of formulas says, and stops before an operation that would count as nothing.

    `torch.utils.flop_counter.FlopCounterMode` would serve, but as every mode it loads torch's compiler to keep it out,
    which takes a second. See `_new_counter`.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.additions = 0
        self._formulas: dict[Any, Any] = {**flop_registry, **_EXTRA_FORMULAS}

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
            try:
                self.total += int(formula(*args, **kwargs, out_val=output))
            except Exception as error:  # torch's formulas do not know all that its operations take
                raise _OpaqueOperation(func.name()) from error
            return output
        if func._overloadpacket in _SUMS:
            self.additions += args[0].numel()
        if func.namespace != "prim":
            with self:  # what consists of other operations is counted by those
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        if func.namespace not in _TRANSPARENT_NAMESPACES or _PRODUCTS.search(func.name()):
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


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled functions as they are written: what the compiler meets under a mode it never compiles again."""
    with torch.compiler.set_stance("force_eager") if _COMPILER in sys.modules else nullcontext():
        yield


def count_operations(run: Callable[[], object]) -> Operations | None:
    """Run once and return the operations, those of a backward included where `run` has one.

    Element-wise work and softmax are not counted. Causal or masked attention counts as dense, as in
    `torch.utils.flop_counter`: for sparse mechanisms the formula is the truth, and this is the upper bound.

    Returns:
        The counts, or None where an operation ran that the counter cannot see into: FlexAttention, a kernel of another
        package, a Triton kernel, a decomposition of a matrix, arguments that a formula refuses. It stops at the first.
    """
    had_compiler = _COMPILER in sys.modules
    counter = _new_counter()
    try:
        with _no_triton_launch(), _uncompiled(), counter:
            run()
    except _OpaqueOperation:
        return None
    except Exception:
        if had_compiler or _COMPILER not in sys.modules:
            raise
        return count_operations(run)  # it has just loaded the compiler, which then took the counter apart too
    finally:
        if not had_compiler and (compiler := sys.modules.get(_COMPILER)) is not None:
            compiler.reset()  # it forgets what it met under the counter
    return Operations(counter.total, counter.additions)


def count_flops(forward: Callable[[], object]) -> int | None:
    """Return the products of `count_operations` for one forward without a graph."""
    with torch.no_grad():
        counted = count_operations(forward)
    return None if counted is None else counted.products
