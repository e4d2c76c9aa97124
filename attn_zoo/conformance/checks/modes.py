"""Checks that how a module is run does not change what it computes: its mode, the graph, the dtype.

What is timed runs in training mode with a graph, or in evaluation without one, and in a dtype that no other check may
have seen. A path that is taken in one of these only must give what the others give.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_zoo.attention import BuildContext
from attn_zoo.attention.generators import seed_generators
from attn_zoo.conformance.check import Finding, Violation, check, passed
from attn_zoo.conformance.checks.randomness import seeded_call
from attn_zoo.conformance.inputs import Inputs
from attn_zoo.conformance.subject import Gradients, Module, Subject, gradients, infer, is_own_reference, routing_of
from attn_zoo.conformance.tolerance import error_by_row, expect_close, is_half, largest, largest_error, rounding

FEW_ROWS = 0.25
"""Share of rows that another dtype may change altogether: rounding may flip a choice that the data make."""

LEAST_DROPOUT = 1e-15
"""Below this probability no weight of a call is dropped."""

_MESSAGE = "the output depends on the mode or on whether a graph is kept"


@check("training or evaluation, with a graph or without, and the dtype change rounding only")
def _modes(subject: Subject) -> Finding:
    for context in subject.contexts():
        # A gate also asks at a probability at which nothing is dropped.
        build = context if context.dropout_p < LEAST_DROPOUT else replace(context, dropout_p=0.0)
        for dtype in subject.dtypes:
            for length in subject.lengths[-1:] if subject.is_fixed or dtype != subject.dtype else subject.lengths[-2:]:
                module = subject.make(build, seq_len=length, dtype=dtype)
                calls = subject.calls(build, length, dtype=dtype)
                for inputs in calls[::2]:
                    _expect_one_output(module, inputs)
                _expect_like_widest(subject, build, module, calls[0])
    return passed()


def _expect_one_output(module: Module, inputs: Inputs) -> None:
    """Check that one call gives the same in both modes, with a graph and without."""
    expected = _seeded(module.eval(), inputs)
    if expected.not_finite:
        return  # equals nothing, not even itself: another check's finding
    # Other kernels may run, each with roundings of its own.
    tolerance = 2 * rounding(expected.output, inputs.num_terms)
    for is_training in (False, True):
        module.train(is_training)
        seed_generators(0)
        words = f"{inputs.words()}: {'training' if is_training else 'evaluation'} without a graph, evaluation with one"
        output = infer(module, inputs)
        if largest_error(output, expected.output) > tolerance < largest_error(seeded_call(module, inputs, 1), output):
            raise Violation(
                "draws at random without dropout, which no capability declares: draw under dropout_p", words
            )
        expect_close(output, expected.output, tolerance, _MESSAGE, words)
    _expect_same_gradients(_seeded(module, inputs), expected, inputs, tolerance)
    module.eval()


def _seeded(module: Module, inputs: Inputs) -> Gradients:
    seed_generators(0)
    return gradients(module, inputs)


def _expect_same_gradients(trained: Gradients, expected: Gradients, inputs: Inputs, tolerance: float) -> None:
    words = f"{inputs.words()}: training, evaluation, both with a graph"
    expect_close(trained.output, expected.output, tolerance, _MESSAGE, words)
    allowed = 4 * rounding(expected.size, inputs.num_terms, expected.output.dtype)
    for name, value in expected.by_name.items():
        other = trained.by_name[name]
        if (value is None) != (other is None):
            raise Violation("a gradient is there in one mode only", f"{inputs.words()}: {name}")
        if value is not None and other is not None:
            words = f"{inputs.words()}: of {name}, training and evaluation"
            expect_close(other, value, allowed, "a gradient depends on the mode", words)


def _expect_like_widest(subject: Subject, build: BuildContext, module: Module, inputs: Inputs) -> None:
    """Check a call in its dtype against the same module in the widest dtype the variant admits, row by row.

    Looser than the comparison with a reference in that dtype, and all there is where the variant has no reference.
    """
    dtype = inputs.tensors[0].dtype
    widest = next(name for name in ("float64", "float32", "bfloat16", "float16") if name in subject.capabilities.dtypes)
    if getattr(torch, widest) == dtype or torch.finfo(dtype).eps < torch.finfo(getattr(torch, widest)).eps:
        return
    if routing_of(module, inputs) is not None:
        return  # its choices are compared where its reference takes them as given
    if subject.is_fixed and not is_own_reference(module):
        return  # the gate has compared this dtype with the reference
    wide = subject.make(build, seq_len=inputs.query_len, dtype=getattr(torch, widest)).eval()
    wide.load_state_dict(module.state_dict())
    expected = _seeded(wide, inputs.map(lambda tensor: tensor.to(getattr(torch, widest))))
    found = _seeded(module, inputs)
    # Each value passes through a few roundings of the working dtype, which softmax turns into relative errors.
    growth = 32.0 if is_half(dtype) else 64.0 + 64.0 * inputs.num_terms**0.5
    true, size = dict(expected.named()), largest(expected.size)
    for name, value in found.named():
        allowed = growth * torch.finfo(dtype).eps * (largest(true[name]) if name == "output" else size)
        off = error_by_row(value, true[name]) > allowed
        if float(off.double().mean()) > FEW_ROWS:
            few = f"{int(off.sum())} of {off.numel()} rows differ by more than {allowed:.2g} from {widest}"
            raise Violation(f"another {name} in another dtype", f"{inputs.words()}: {few}")


CHECKS = (_modes,)
