"""Checks of what a mixer passes from layer to layer beside the hidden states: it must be as independent as they are."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_zoo.attention import AbstractMixer, BuildContext, Mixed, build_mixer
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.inputs import Inputs, random_like
from attn_zoo.conformance.subject import Subject, gradients, reference_results, results, weighted_sum
from attn_zoo.conformance.tolerance import expect_close, largest, largest_error, rounding


def _two_layers(subject: Subject, build: BuildContext, length: int) -> tuple[AbstractMixer, AbstractMixer]:
    """Return the first and the second layer of one model."""
    if not subject.capabilities.variable_seq_len:
        build = replace(build, max_seq_len=length)
    build = replace(build, num_layers=2, shared={})
    layers = []
    for index in range(2):
        mixer = build_mixer(subject.variant.name, build.at_layer(index), **subject.options)
        layers.append(mixer.to(device=subject.device, dtype=subject.dtype).eval())
    return layers[0], layers[1]


def _mix(mixer: AbstractMixer, inputs: Inputs, carry: Tensor | None = None, hidden: Tensor | None = None) -> Mixed:
    context = inputs.tensors[1] if len(inputs.tensors) > 1 else None
    hidden = inputs.tensors[0] if hidden is None else hidden
    return mixer.mix(hidden, context=context, key_padding_mask=inputs.key_padding_mask, carry=carry)


def _carry_of(mixer: AbstractMixer, inputs: Inputs) -> Tensor:
    carry = _mix(mixer, inputs).carry
    if carry is None:
        raise Violation("declares has_carry and passes nothing on", inputs.words())
    if carry.shape[:1] != inputs.tensors[0].shape[:1] or carry.dtype != inputs.tensors[0].dtype:
        raise Violation("the carry does not have the batch or the dtype of the hidden states", inputs.words())
    if not carry.isfinite().all():
        raise Violation("the carry is not finite", inputs.words())
    return carry


@check("what passes between layers is used, and depends on nothing that an output must not depend on", forms=("mixer",))
def _carry(subject: Subject) -> Finding:
    if not subject.capabilities.has_carry:
        return not_applicable("passes nothing between layers")
    length = subject.lengths[-1]
    for build in subject.contexts():
        first, second = _two_layers(subject, build, length)
        for inputs in subject.calls(build, length):
            with torch.no_grad():
                carry = _carry_of(first, inputs)
                _expect_independence(first, inputs, carry)
                expected = reference_results(first, inputs)[1:]
            if not expected or largest_error(carry, expected[0]) > rounding(expected[0], inputs.num_terms):
                raise Violation("the carry differs from that of the readable reference", inputs.words())
            _expect_finite_gradients(first, inputs.poisoned())
            _expect_use(first, second, inputs, is_causal=build.is_causal)
    return passed(f"{list(carry.shape[1:])} for each sequence")


def _expect_independence(mixer: AbstractMixer, inputs: Inputs, carry: Tensor) -> None:
    alone = results(mixer, inputs.entry(0))[1]
    mask, allowed = inputs.key_padding_mask, rounding(carry, inputs.num_terms)
    message = "an entry's carry depends on the other entries of the batch"
    expect_close(alone[0], carry[0], allowed, message, inputs.words())
    if mask is None:
        return
    last = inputs.tensors[-1]
    noisy = torch.where(mask[..., None], 3.0 * random_like(last, 80), last)
    garbage = replace(inputs, tensors=(*inputs.tensors[:-1], noisy))
    for content, other in (("noise", garbage), ("NaN and infinities", inputs.poisoned())):
        message, words = "values under key_padding_mask influence the carry", f"{inputs.words()}: padded with {content}"
        expect_close(results(mixer, other)[1], carry, allowed, message, words)


def _expect_finite_gradients(mixer: AbstractMixer, inputs: Inputs) -> None:
    found = gradients(mixer, inputs, run=lambda module, given: results(module, given)[1:])
    if found.not_finite:
        words = f"{inputs.words()}: {found.not_finite}, with NaN and infinities in padded tokens"
        raise Violation("the carry has a gradient that is not finite", words)


def _expect_use(first: AbstractMixer, second: AbstractMixer, inputs: Inputs, *, is_causal: bool) -> None:
    """Check that the second layer reads the carry, passes on one like it, and sees no future through it."""
    inputs = inputs.leaves()
    hidden, carry = _mix(first, inputs)
    assert carry is not None  # seen above
    after = _mix(second, inputs, carry, hidden)
    if after.carry is None or after.carry.shape != carry.shape:
        raise Violation("the second layer passes on another shape than it was given", inputs.words())
    (through,) = torch.autograd.grad(weighted_sum(after.hidden), carry, retain_graph=True, allow_unused=True)
    if through is None or largest(through) == 0:
        raise Violation("the second layer's output does not depend on the carry", inputs.words())
    (source,) = torch.autograd.grad(weighted_sum(carry), inputs.tensors[-1], retain_graph=True, allow_unused=True)
    if source is None or largest(source) == 0:
        raise Violation("the carry does not depend on the sequence", inputs.words())
    if is_causal:
        cut = inputs.query_len // 2
        (future,) = torch.autograd.grad(weighted_sum(after.hidden[:, :cut]), inputs.tensors[0])
        if largest(future[:, cut:]) > 0:
            raise Violation("a past output sees the future through the carry", inputs.words())


CHECKS = (_carry,)
