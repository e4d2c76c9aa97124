"""Checks of gradients and of robustness: large inputs, memory nobody initialised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.inputs import Inputs, random_tensor
from attn_zoo.conformance.subject import (
    Module,
    Subject,
    gradients,
    is_own_reference,
    objective,
    read_positions,
    results,
)
from attn_zoo.conformance.tolerance import expect_close, largest, largest_error, rounding
from attn_zoo.errors import UnsupportedError

STEP = 1e-6
NUM_DIRECTIONS = 3


@check("every input and parameter gets a finite and right gradient")
def _gradients_reach_every_parameter(subject: Subject) -> Finding:
    if subject.is_fixed:
        return _gradients_in_a_gate(subject)
    for build in subject.contexts():
        short, longest = subject.lengths[len(subject.lengths) // 2], subject.lengths[-1]
        for length in dict.fromkeys((short, longest)):
            module = subject.make(build, seq_len=length)
            for inputs in subject.calls(build, length)[::2]:
                found = _finite_gradients(module, inputs, can_be_unread=length < longest)
                if length == short:
                    _expect_alone(module, inputs, found)
                if subject.dtype == torch.float64 and length == short:
                    _expect_slopes(module, inputs, found)
        # A pass costs several calls: of the lengths below those that every check tries, the longest will do.
        probes = list(subject.probes(build)) if subject.dtype == torch.float64 else []
        num_below = sum(length < subject.lengths[-1] for _, length in probes)
        for long_build, length in probes[max(0, num_below - 1) :]:
            module = subject.module(long_build, seq_len=length)
            _expect_slope(module, subject.calls(long_build, length, batch_size=1)[-1])
    return passed("compared with finite differences" if subject.dtype == torch.float64 else "")


def _gradients_in_a_gate(subject: Subject) -> Finding:
    """Check one call in training of a variant that is its own reference: nothing else compares its gradients."""
    if not subject.is_training:
        return not_applicable("is called without gradients")
    module = subject.module(subject.build, seq_len=(length := subject.lengths[-1]))
    if not is_own_reference(module):
        return not_applicable("its gradients are compared with the readable reference's")
    inputs = subject.inputs(subject.build, length, batch_size=1)
    _finite_gradients(module, inputs)
    if "float64" in subject.capabilities.dtypes:
        _expect_slope(subject.make(subject.build, seq_len=length, dtype=torch.float64), inputs.map(Tensor.double))
    return passed()


def _finite_gradients(module: Module, inputs: Inputs, *, can_be_unread: bool = False) -> dict[str, Tensor | None]:
    """Return the gradients; a parameter may have none where such short sequences do not need it."""
    found = gradients(module, inputs).by_name
    for name, gradient in found.items():
        if gradient is None:
            is_unread = name not in inputs.names and not _is_read(module, inputs, name)
            if is_unread and can_be_unread:
                continue
            hint = ", which no output reads at this length" if is_unread else ""
            raise Violation(f"no gradient reaches {name}{hint}", inputs.words())
        if not gradient.isfinite().all():
            raise Violation(f"the gradient of {name} is not finite", inputs.words())
    return found


def _expect_alone(module: Module, inputs: Inputs, found: Mapping[str, Tensor | None]) -> None:
    """Check that an input gets the same gradient where no other asks for one, as beside a frozen context."""
    size = torch.tensor(max(largest(gradient) for gradient in found.values() if gradient is not None))
    allowed = 2 * rounding(size, inputs.num_terms, inputs.tensors[0].dtype)
    for place, name in enumerate(inputs.names if len(inputs.names) > 1 else ()):
        tensors = [tensor.clone() for tensor in inputs.tensors]
        leaf, expected = tensors[place].requires_grad_(), found[name]
        scalar = objective(*results(module, replace(inputs, tensors=tuple(tensors))))
        alone = torch.autograd.grad(scalar, leaf, allow_unused=True)[0] if scalar.requires_grad else None
        alone = torch.zeros_like(leaf) if alone is None else alone
        if expected is not None and largest_error(alone, expected) > allowed:
            raise Violation(f"another gradient of {name} where no other input asks for one", inputs.words())


@torch.no_grad()
def _is_read(module: Module, inputs: Inputs, name: str) -> bool:
    """Whether a parameter that is no number reaches an output."""
    value = dict(module.named_parameters())[name.removeprefix("parameter ")]
    kept = value.clone()
    try:
        value.fill_(float("nan"))
        return not all(output.isfinite().all() for output in results(module, inputs))
    finally:
        value.copy_(kept)


def _expect_slopes(module: Module, inputs: Inputs, found: Mapping[str, Tensor | None]) -> None:
    """Compare each gradient with a central difference along one random direction, which a lost share changes."""
    for name in found:
        slopes = wrong_slope(module, inputs, {name: found[name]})
        if slopes is not None:
            what = "is lost" if slopes.claimed == 0 else "is wrong"
            raise Violation(f"the gradient of {name} {what}", f"{inputs.words()}: {slopes}")


def _expect_slope(module: Module, inputs: Inputs) -> None:
    """Compare all gradients at once, along one direction of all inputs and parameters: two calls more."""
    found = gradients(module, inputs).by_name
    slopes = wrong_slope(module, inputs, found)
    if slopes is not None:
        _expect_slopes(module, inputs, found)  # which one?
        raise Violation("the gradients of inputs and parameters together are wrong", f"{inputs.words()}: {slopes}")


class _Slopes(NamedTuple):
    claimed: float
    measured: float

    def __str__(self) -> str:
        return f"it says a slope of {self.claimed:.4g}, a finite difference says {self.measured:.4g}"


def wrong_slope(
    module: Module,
    inputs: Inputs,
    found: Mapping[str, Tensor | None],
    run: Callable[[Module, Inputs], tuple[Tensor, ...]] = results,
) -> _Slopes | None:
    """Return both slopes along a random direction of some leaves where they differ, or None.

    An output may jump or have a kink (a choice by the data, a rectifier). A difference across one says nothing: it
    changes with its width or bends, and another direction is tried.
    """
    inputs = inputs.map(torch.Tensor.clone)
    leaves = dict(zip(inputs.names, inputs.tensors, strict=True))
    leaves |= {f"parameter {name}": value for name, value in module.named_parameters()}
    moved = {name: leaves[name] for name in found}
    originals = {name: leaf.detach().clone() for name, leaf in moved.items()}

    @torch.no_grad()
    def move(directions: Mapping[str, Tensor], step: float) -> None:
        for name, leaf in moved.items():
            leaf.copy_(originals[name] + step * directions[name])

    @torch.no_grad()
    def value(directions: Mapping[str, Tensor], step: float) -> float:
        move(directions, step)
        return float(objective(*run(module, inputs)))

    for attempt in range(NUM_DIRECTIONS):
        directions = {
            name: random_tensor(leaf.shape, 200 + 1000 * attempt + index, leaf.dtype, str(leaf.device))
            for index, (name, leaf) in enumerate(moved.items())
        }
        gradients_of = [(gradient, directions[name]) for name, gradient in found.items() if gradient is not None]
        claimed = float(sum((gradient * direction).sum() for gradient, direction in gradients_of))
        above, below = (value(directions, step) for step in (STEP, -STEP))
        slope = (above - below) / (2 * STEP)
        # Rounding of the two sums, magnified by 1 / STEP, and the third derivative times its square.
        tolerance = 1e-5 * max(abs(slope), abs(claimed)) + 1e-12 * max(1.0, abs(above)) / STEP
        if abs(slope - claimed) <= max(tolerance, 1e-6):
            move(directions, 0.0)
            return None
        narrow_above, narrow_below, here = (value(directions, step) for step in (STEP / 4, -STEP / 4, 0.0))
        narrow = (narrow_above - narrow_below) / (STEP / 2)
        bend = (narrow_above + narrow_below - 2 * here) / (STEP / 4)
        if max(abs(narrow - slope), abs(bend)) <= abs(slope - claimed) / 2:
            return _Slopes(claimed, slope)
    return None


@check("large inputs and zeros give finite outputs and gradients")
def _finite_on_large_inputs(subject: Subject) -> Finding:
    length = subject.lengths[-1]
    sizes = {torch.float64: 1e3, torch.float32: 1e2, torch.bfloat16: 1e2, torch.float16: 10.0}
    for build in subject.contexts():
        for dtype in subject.dtypes:
            module = subject.module(build, seq_len=length, dtype=dtype)
            for inputs in subject.calls(build, length, dtype=dtype)[::2]:
                # Of zeros a norm is zero and has no slope: one type is enough, as nothing overflows.
                for size in (sizes[dtype], 0.0) if dtype == subject.dtype else (sizes[dtype],):
                    found = gradients(module, inputs.map(partial(torch.mul, other=size)))
                    if found.not_finite:
                        words = f"{inputs.words()}, inputs of size {size:g}"
                        raise Violation(f"the {found.not_finite} is not finite", words)
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


@check("nothing is read from torch.empty before it is written")
def _uninitialised_memory(subject: Subject) -> Finding:
    for build in subject.contexts():
        for length in subject.lengths[-1 if subject.is_fixed else -2 :]:
            module = subject.module(build, seq_len=length)
            for inputs in subject.calls(build, length, batch_size=1)[-1 if subject.is_fixed else 0 :]:
                clean = gradients(module, inputs)
                with _Poison():
                    poisoned = gradients(module, inputs)
                after, size = dict(poisoned.named()), torch.tensor(max(largest(value) for _, value in clean.named()))
                for name, expected in clean.named():
                    # A gradient that is zero by symmetry is rounding of the others, and need not repeat.
                    allowed = rounding(expected if name == "output" else size, inputs.num_terms, subject.dtype)
                    message = f"the {name} depends on uninitialised memory"
                    expect_close(after[name], expected, allowed, message, inputs.words())
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


CHECKS = (_gradients_reach_every_parameter, _finite_on_large_inputs, _uninitialised_memory)
