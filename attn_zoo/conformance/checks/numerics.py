"""Checks of the numbers: fast path against readable reference, exact variants against the oracle, convergence to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.attention.masks import alibi_bias
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.checks.shapes import offset_calls
from attn_zoo.conformance.inputs import Inputs, random_tensor
from attn_zoo.conformance.lengths import SPANS
from attn_zoo.conformance.subject import (
    Module,
    Subject,
    call_reference,
    gradients,
    infer,
    is_own_reference,
    objective,
    reference_results,
    routing_of,
)
from attn_zoo.conformance.tolerance import (
    expect_close,
    largest,
    largest_error,
    rounding,
    running_tolerance,
    working_tolerance,
)

SLOPE_STEP = 1e-7  # of a one-sided difference: its bend and the rounding of sums are far below what is allowed
_DIFFERS = "the fast path differs from the readable reference"


@check("the fast path equals the readable reference, forward and gradients, in every dtype")
def _matches_reference(subject: Subject) -> Finding:
    worst: tuple[float, str] = (0.0, "")
    for build in subject.contexts():
        if is_own_reference(subject.module(build, seq_len=subject.lengths[-1])):
            return not_applicable("its forward is the readable version itself")
        for dtype in subject.dtypes:
            is_first = dtype == subject.dtype
            for length in subject.lengths[-2:] if is_first else subject.lengths[-1:]:
                module = subject.module(build, seq_len=length, dtype=dtype)
                truth_module = subject.in_float64(module, build, seq_len=length)
                calls = subject.calls(build, length, dtype=dtype)[:: 1 if is_first else 2]
                if subject.is_fixed and subject.spans and length == subject.lengths[-1]:
                    calls = calls[-1:]  # padded where that is offered; without padding it is compared at a span
                for inputs in calls:
                    worst = max(worst, _expect_reference(module, truth_module, inputs))
        for probe, length in subject.probes(build):
            module = subject.module(probe, seq_len=length)
            truth_module = subject.in_float64(module, probe, seq_len=length)
            inputs = subject.inputs(probe, length, batch_size=1)
            if length <= SPANS[0] and not subject.is_fixed:
                _expect_reference(module, truth_module, inputs)
                continue
            _expect_probe(module, truth_module, inputs, has_slope=subject.is_fixed and length == subject.spans[-1])
        for inputs in offset_calls(subject, build):
            module = subject.module(build)
            _expect_reference(module, subject.in_float64(module, build), inputs)
        # Rotary positions are inputs like others to what is called with heads.
        for position in subject.capabilities.positions if not (subject.is_fixed or build.is_cross) else ():
            if position == "none" or subject.is_shared_mixer or (position, subject.form) == ("rotary", "attention"):
                continue
            placed, length = replace(build, position=position), subject.lengths[-1]
            module = subject.module(placed, seq_len=length)
            truth_module = subject.in_float64(module, placed, seq_len=length)
            _expect_reference(module, truth_module, subject.calls(placed, length)[-1])
    return passed(worst[1])


def _expect_probe(module: Module, truth_module: Module, inputs: Inputs, *, has_slope: bool) -> None:
    """Compare one long output without a graph of the reference: those of dense ones are expensive.

    With `has_slope` the gradients too, along one direction of all inputs. `truth_module` is the same in float64.
    """
    dtype = inputs.tensors[0].dtype
    found = gradients(module, inputs) if has_slope else None
    directions = [
        random_tensor(tensor.shape, 300 + index, torch.float64, str(tensor.device))
        for index, tensor in enumerate(inputs.tensors)
    ]
    wide = inputs.map(torch.Tensor.double)

    def moved(step: float) -> Inputs:
        return replace(wide, tensors=tuple(x + step * d for x, d in zip(wide.tensors, directions, strict=True)))

    with torch.no_grad():
        routing = routing_of(module, inputs)
        if found is None:
            truth, there = reference_results(truth_module, wide, routing), None
        elif routing is None:  # as two entries of one batch: a reference that loops over the tokens does so once
            tensors = tuple(torch.cat(pair) for pair in zip(wide.tensors, moved(SLOPE_STEP).tensors, strict=True))
            both = reference_results(truth_module, replace(wide, tensors=tensors))
            truth, there = tuple(x[:1] for x in both), tuple(x[1:] for x in both)
        else:
            truth, there = (reference_results(truth_module, each, routing) for each in (wide, moved(SLOPE_STEP)))
        output = infer(module, inputs) if found is None else found.output
        tolerance = working_tolerance(0.0, largest(truth[0]), inputs.num_terms, dtype)
        if largest_error(output, truth[0]) > tolerance:  # only then it matters how far off the plain computation is
            plain_error = largest_error(call_reference(module, inputs, routing), truth[0])
            tolerance = working_tolerance(plain_error, largest(truth[0]), inputs.num_terms, dtype)
    expect_close(output, truth[0], tolerance, _DIFFERS, f"{inputs.words()}: output")
    if found is not None and there is not None:

        def slope(step: float) -> float:
            end = there if step == SLOPE_STEP else reference_results(truth_module, moved(step), routing)
            return float(objective(*end) - objective(*truth)) / step

        with torch.no_grad():
            _expect_slope([found.by_name[name] for name in inputs.names], directions, slope, inputs)


def _expect_slope(
    found: Sequence[Tensor | None], directions: Sequence[Tensor], slope_over: Callable[[float], float], inputs: Inputs
) -> None:
    """Compare gradients of the inputs in a working dtype with the slope of the reference in float64 along directions.

    A random direction keeps the size of an error, so what rounding explains is a share of the gradients' norm. Where
    the reference bends within the step, as a norm of two features may, a shorter step decides.
    """
    claimed, square = 0.0, 0.0
    for gradient, direction in zip(found, directions, strict=True):
        if gradient is not None:
            claimed += float((gradient.double() * direction).sum())
            square += float(gradient.double().square().sum())
    norm = torch.tensor([square**0.5, 1.0])
    allowed = 4 * rounding(norm, inputs.num_terms, inputs.tensors[0].dtype) + 1e-5 * largest(norm)
    slope = slope_over(SLOPE_STEP)
    if abs(slope - claimed) > allowed:
        slope = slope_over(SLOPE_STEP / 16)
    if abs(slope - claimed) > allowed:
        slopes = f"its gradients say a slope of {claimed:.4g}, the reference {slope:.4g}, allowed {allowed:.2g}"
        raise Violation(_DIFFERS, f"{inputs.words()}: {slopes}")


def _expect_reference(module: Module, truth_module: Module, inputs: Inputs) -> tuple[float, str]:
    """Compare one call; return the error of the output as a share of the tolerance, and in words."""
    dtype = inputs.tensors[0].dtype
    reference = partial(reference_results, routing=routing_of(module, inputs))
    truth = gradients(truth_module, inputs.map(torch.Tensor.double), reference)
    fast = dict(gradients(module, inputs).named())
    plain: dict[str, Tensor] = {}
    found = (0.0, "")
    for name, expected in truth.named():
        scale = largest(expected if name == "output" else truth.size)
        if name not in fast:
            raise Violation(f"{name}: the readable reference has one, the fast path has none", inputs.words())
        error = largest_error(fast[name], expected)
        if dtype == torch.float64:
            tolerance = rounding(torch.full((1,), scale, dtype=dtype), inputs.num_terms)
        else:
            tolerance = working_tolerance(0.0, scale, inputs.num_terms, dtype)
            if error > tolerance:  # only then it matters how far off the plain computation is
                plain = plain or dict(gradients(module, inputs, reference).named())
                plain_error = largest_error(plain[name], expected) if name in plain else 0.0
                tolerance = working_tolerance(plain_error, scale, inputs.num_terms, dtype)
                if name not in ("output", *(f"gradient of {each}" for each in inputs.names)):  # of a weight
                    tolerance += running_tolerance(scale, inputs.num_terms, dtype)
        expect_close(fast[name], expected, tolerance, _DIFFERS, f"{inputs.words()}: {name}")
        if name == "output":
            found = error / tolerance, f"at most {error / tolerance:.0%} of the tolerance ({dtype}: off by {error:.1e})"
    return found


@check("an exact variant equals float64 softmax attention, forward and gradients", forms=("attention",))
def _matches_oracle(subject: Subject) -> Finding:
    if not subject.capabilities.is_exact:
        return not_applicable("does not claim to be exact")
    has_alibi = "alibi" in subject.capabilities.positions and not subject.is_fixed
    for context in subject.contexts():
        builds = [context]
        if has_alibi and not context.is_cross:
            builds.append(replace(context, position="alibi"))
        if subject.capabilities.grouped_query and not subject.is_fixed:
            builds.append(replace(context, num_kv_heads=1))
        for build in builds:
            for length in subject.lengths:
                for inputs in subject.calls(build, length):
                    _expect_oracle(subject.module(build, seq_len=length), build, inputs)
                if build.is_causal and subject.has_causal_offset and subject.fit(length + 3) <= build.max_seq_len:
                    inputs = subject.inputs(build, length, key_len=subject.fit(length + 3))
                    _expect_oracle(subject.module(build), build, inputs)
            for inputs in offset_calls(subject, build):
                _expect_oracle(subject.module(build), build, inputs)
            for probe, length in list(subject.probes(build))[-1 if subject.is_fixed else 0 :]:
                inputs = subject.calls(probe, length, batch_size=1)[-1]
                _expect_oracle(subject.module(probe, seq_len=length), probe, inputs)
    return passed()


def _expect_oracle(module: Module, build: BuildContext, inputs: Inputs) -> None:
    bias = None
    if build.position == "alibi":
        bias = alibi_bias(build.num_heads, inputs.query_len, inputs.key_len, inputs.tensors[0].device, torch.float64)

    def oracle(_: Module, given: Inputs) -> tuple[Tensor]:
        query, key, value = given.tensors
        mask = given.key_padding_mask
        return (softmax_attention(query, key, value, is_causal=build.is_causal, key_padding_mask=mask, bias=bias),)

    actual = dict(gradients(module, inputs).named())
    expected = gradients(module, inputs.map(torch.Tensor.double), oracle)
    position = "" if build.position == "none" else f", {build.position}"
    for name, true in expected.named():
        if name in actual:
            # A gradient may be zero (one key: the weight is 1 whatever the query) where a kernel rounds its terms.
            scale = true if name == "output" else torch.maximum(expected.size, torch.tensor(largest(expected.output)))
            allowed = rounding(scale, inputs.num_terms, inputs.tensors[0].dtype)
            message = "claims to be exact but differs from float64 softmax attention"
            expect_close(actual[name], true, allowed, message, f"{inputs.words()}{position}: {name}")
        elif largest(true) > 0:
            raise Violation(f"claims to be exact but has no {name}", inputs.words())


@check("an approximation converges to exact attention as its budget grows", forms=("attention",))
def _converges(subject: Subject) -> Finding:
    length = subject.lengths[-1]
    config = subject.variant.config
    budgets = config.budgets(length)
    if subject.capabilities.is_exact:
        return not_applicable("exact already")
    if not budgets:
        return not_applicable("its config names no budgets under which it becomes exact")
    for build in subject.contexts(with_cross=False):
        inputs = subject.inputs(build, length)
        query, key, value = inputs.tensors
        expected = softmax_attention(query, key, value, is_causal=build.is_causal)
        size = float(expected.square().mean().sqrt())
        errors: list[float] = []
        for budget in budgets:
            module = subject.make(replace(build, max_seq_len=length), options=budget)
            difference = infer(module, inputs).double() - expected
            errors.append(float(difference.square().mean().sqrt()) / size)
        shown = ", ".join(f"{error:.2g}" for error in errors)
        floor = config.budget_error + rounding(torch.ones(1, dtype=subject.dtype), length)
        if any(later > max(1.1 * earlier, floor) for earlier, later in pairwise(errors)):
            raise Violation("the error grows with the budget", f"{inputs.words()}: relative errors {shown}")
        if errors[-1] > floor:
            raise Violation(
                "does not converge to exact attention",
                f"{inputs.words()}: relative errors {shown} under {', '.join(map(str, budgets))}; "
                f"allowed {floor:.2g} (budget_error of the config)",
            )
    return passed(f"relative errors {shown}")


CHECKS = (_matches_reference, _matches_oracle, _converges)
