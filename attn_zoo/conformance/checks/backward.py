"""Checks of gradients and of robustness: large inputs, memory nobody initialised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_zoo.attention import BuildContext
from attn_zoo.conformance.check import Check, Finding, Violation, passed
from attn_zoo.conformance.inputs import Inputs, random_tensor
from attn_zoo.conformance.subject import (
    Module,
    Subject,
    gradients,
    objective,
    read_positions,
    reference_results,
    results,
)
from attn_zoo.conformance.tolerance import largest, largest_error, rounding
from attn_zoo.errors import UnsupportedError


def _gradients_reach_every_parameter(subject: Subject) -> Finding:
    for build in subject.contexts():
        short = subject.lengths[len(subject.lengths) // 2]
        for length in dict.fromkeys((short, subject.lengths[-1])):
            module = subject.make(build, seq_len=length)
            for inputs in subject.calls(build, length)[::2]:
                found = gradients(module, inputs)
                for name, gradient in found.by_name.items():
                    if gradient is None:
                        raise Violation(f"no gradient reaches {name}", inputs.words())
                    if not gradient.isfinite().all():
                        raise Violation(f"the gradient of {name} is not finite", inputs.words())
                if subject.dtype == torch.float64 and length == short:
                    _expect_slopes(module, inputs, found.by_name)
    return passed("compared with finite differences" if subject.dtype == torch.float64 else "")


def _expect_slopes(module: Module, inputs: Inputs, found: Mapping[str, Tensor | None]) -> None:
    """Compare each gradient with a central difference along one random direction, which a lost share changes."""
    inputs = inputs.map(torch.Tensor.clone)
    leaves = dict(zip(inputs.names, inputs.tensors, strict=True))
    leaves |= {f"parameter {name}": value for name, value in module.named_parameters()}
    epsilon = 1e-6
    for index, (name, gradient) in enumerate(found.items()):
        leaf = leaves[name]
        direction = random_tensor(leaf.shape, 200 + index, leaf.dtype, str(leaf.device))
        with torch.no_grad():
            original = leaf.clone()
            leaf.copy_(original + epsilon * direction)
            above = float(objective(*results(module, inputs)))
            leaf.copy_(original - epsilon * direction)
            below = float(objective(*results(module, inputs)))
            leaf.copy_(original)
        slope = (above - below) / (2 * epsilon)
        claimed = float((gradient * direction).sum()) if gradient is not None else 0.0
        # Rounding of the two sums, magnified by 1 / epsilon, and the third derivative times epsilon squared.
        tolerance = 1e-5 * max(abs(slope), abs(claimed)) + 1e-9 * max(1.0, abs(above)) / epsilon * 1e-3
        if abs(slope - claimed) > max(tolerance, 1e-6):
            what = "is lost" if claimed == 0 else "is wrong"
            raise Violation(
                f"the gradient of {name} {what}",
                f"{inputs.words()}: it says a slope of {claimed:.4g}, a finite difference says {slope:.4g}",
            )


def _is_out_of_range(subject: Subject, build: BuildContext, module: Module, inputs: Inputs, name: str) -> bool:
    """Whether the true value, of the reference in float64, comes near the largest number of the dtype."""
    truth_module = subject.make(build, seq_len=inputs.query_len, dtype=torch.float64)
    truth_module.load_state_dict(module.state_dict())
    truth = gradients(truth_module, inputs.map(torch.Tensor.double), reference_results)
    value = truth.output if name == "output" else truth.by_name[name]
    return value is not None and torch.finfo(inputs.tensors[0].dtype).max / 16 < largest(value) < float("inf")


def _finite_on_large_inputs(subject: Subject) -> Finding:
    length = subject.lengths[-1]
    sizes = {torch.float64: 1e3, torch.float32: 1e2, torch.bfloat16: 1e2, torch.float16: 10.0}
    for build in subject.contexts():
        for dtype in subject.dtypes:
            module = subject.module(build, seq_len=length, dtype=dtype)
            for inputs in subject.calls(build, length, dtype=dtype)[::2]:
                size = sizes[dtype]
                large = inputs.map(partial(torch.mul, other=size))
                found = gradients(module, large)
                for name, value in (("output", found.output), *found.by_name.items()):
                    if value is not None and not value.isfinite().all():
                        what = name if name == "output" else f"gradient of {name}"
                        if _is_out_of_range(subject, build, module, large, name):
                            continue
                        raise Violation(f"the {what} is not finite", f"{inputs.words()}, inputs of size {size:g}")
    return passed()


_ALLOCATORS = frozenset(
    {
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        Tensor.new_empty,
        Tensor.new_empty_strided,
    }
)


class _Poison(TorchFunctionMode):
    """Fill every uninitialised floating-point tensor that Python code asks for with NaN."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATORS and isinstance(result, Tensor) and result.is_floating_point():
            with torch.no_grad():
                result.fill_(float("nan"))
        return result


def _uninitialised_memory(subject: Subject) -> Finding:
    for build in subject.contexts():
        for length in subject.lengths[-2:]:
            module = subject.module(build, seq_len=length)
            for inputs in subject.calls(build, length):
                clean = gradients(module, inputs)
                with _Poison():
                    poisoned = gradients(module, inputs)
                pairs = [("output", clean.output, poisoned.output)]
                pairs += [
                    (f"gradient of {name}", value, poisoned.by_name[name])  # type: ignore[misc]
                    for name, value in clean.by_name.items()
                    if value is not None
                ]
                # A gradient that is zero by symmetry is rounding of the others, and need not repeat.
                size = max(largest(expected) for _, expected, _ in pairs)
                for name, expected, value in pairs:
                    scale = torch.full((1,), largest(expected) if name == "output" else size, dtype=subject.dtype)
                    if largest_error(value, expected) > rounding(scale, inputs.num_terms):
                        raise Violation(f"the {name} depends on uninitialised memory", inputs.words())
        if build.is_causal and subject.capabilities.decode != "none":
            _expect_clean_steps(
                subject, subject.module(build), subject.inputs(build, subject.fit(min(5, subject.lengths[-1])))
            )
    return passed()


def _expect_clean_steps(subject: Subject, module: Module, inputs: Inputs) -> None:
    with torch.no_grad(), _Poison():
        try:
            state = module.init_state(inputs.batch_size, device=subject.device, dtype=subject.dtype)
        except UnsupportedError:
            return
        for position in range(inputs.query_len):
            output, state = read_positions(module, inputs, range(position, position + 1), state, at_once=False)
            if not output.isfinite().all():
                raise Violation("a decode step depends on uninitialised memory", f"{inputs.words()}: step {position}")


CHECKS = (
    Check(
        name="gradients_reach_every_parameter",
        summary="every input and parameter gets a finite and right gradient",
        run=_gradients_reach_every_parameter,
    ),
    Check(
        name="finite_on_large_inputs",
        summary="large inputs give finite outputs and gradients",
        run=_finite_on_large_inputs,
    ),
    Check(
        name="uninitialised_memory",
        summary="nothing is read from torch.empty before it is written",
        run=_uninitialised_memory,
    ),
)
