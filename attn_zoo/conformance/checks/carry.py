"""Checks of what a mixer passes from layer to layer beside the hidden states: it must be as independent as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_zoo.attention import AbstractMixer, BuildContext, Mixed, build_mixer
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.inputs import Inputs, random_like
from attn_zoo.conformance.subject import Subject, gradients, is_own_reference, reference_results, results, weighted_sum
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
                _expect_use(first, second, inputs, is_causal=build.is_causal)
            _expect_finite_gradients(first, inputs.poisoned())
            _expect_no_foreign_gradient(first, second, inputs, is_causal=build.is_causal)
    return passed(f"{list(carry.shape[1:])} for each sequence")


def _expect_independence(mixer: AbstractMixer, inputs: Inputs, carry: Tensor) -> None:
    alone, allowed = results(mixer, inputs.entry(0))[1], rounding(carry, inputs.num_terms)
    message = "an entry's carry depends on the other entries of the batch"
    expect_close(alone[0], carry[0], allowed, message, inputs.words())
    poisoned = inputs.poisoned()
    if not results(mixer, poisoned)[1].isfinite().all():
        raise Violation("the carry is not finite", f"{poisoned.words()}, with NaN and infinities in padded tokens")


def _expect_finite_gradients(mixer: AbstractMixer, inputs: Inputs) -> None:
    found = gradients(mixer, inputs, run=lambda module, given: results(module, given)[1:])
    if found.not_finite:
        words = f"{inputs.words()}: {found.not_finite}, with NaN and infinities in padded tokens"
        raise Violation("the carry has a gradient that is not finite", words)


def _expect_use(first: AbstractMixer, second: AbstractMixer, inputs: Inputs, *, is_causal: bool) -> None:
    """Check that the second layer reads the carry, passes on one like it, and that an output sees no more through it.

    Only the carry changes, so that a fault of the first layer's output is not found here again. What it holds of padded
    tokens is free, as their outputs are, as long as no other token's output reads it.
    """
    hidden, given = _mix(first, inputs)
    assert given is not None  # seen above
    expected = _mix(second, inputs, given, hidden)
    after = expected.carry
    if after is None or after.shape != given.shape:
        raise Violation("the second layer passes on another shape than it was given", inputs.words())
    if not is_own_reference(second):
        reference = reference_results(second, replace(inputs, tensors=(hidden,)), carry=given)
        for what, own, other in zip(("output", "carry"), (expected.hidden, after), reference, strict=True):
            message = f"the second layer's {what} differs from that of the readable reference"
            expect_close(own, other, 2 * rounding(other, inputs.num_terms), message, inputs.words())

    def through(change: Callable[[Tensor], Tensor], seen: Tensor, message: str) -> None:
        """Change the tokens that the carry was made of; outputs in `seen` `[B, L]` may not change."""
        carry = _mix(first, inputs.map(change)).carry
        found, before = (hidden_states[seen] for hidden_states in (_mix(second, inputs, carry, hidden)[0], expected[0]))
        expect_close(found, before, 2 * rounding(expected.hidden, inputs.num_terms), message, inputs.words())

    noise = 3.0 * random_like(inputs.tensors[0], 80)
    if torch.equal(_mix(second, inputs, given + random_like(given, 81), hidden).hidden, expected.hidden):
        raise Violation("the second layer's output does not depend on the carry", inputs.words())
    if torch.equal(_carry_of(first, inputs.map(lambda tensor: tensor + noise)), given):
        raise Violation("the carry does not depend on the sequence", inputs.words())
    entry = torch.arange(inputs.batch_size, device=hidden.device)[:, None].expand(hidden.shape[:2])
    token = torch.arange(inputs.query_len, device=hidden.device).expand(hidden.shape[:2])
    is_padding = (
        torch.zeros_like(entry, dtype=torch.bool) if inputs.key_padding_mask is None else inputs.key_padding_mask
    )

    def noisy(where: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda tensor: torch.where(where[..., None], noise, tensor)

    message = "an output depends on the other entries of the batch through the carry"
    through(noisy(entry > 0), (entry == 0) & ~is_padding, message)
    through(noisy(is_padding), ~is_padding, "values under key_padding_mask influence an output through the carry")
    if is_causal:
        future, message = token >= inputs.query_len // 2, "a past output sees the future through the carry"
        through(noisy(future), ~future & ~is_padding, message)


def _expect_no_foreign_gradient(
    first: AbstractMixer, second: AbstractMixer, inputs: Inputs, *, is_causal: bool
) -> None:
    """Check that an output sends no gradient through the carry to another sequence or to the future."""
    inputs = inputs.leaves()
    hidden, carry = _mix(first, inputs)
    output = _mix(second, inputs, carry, hidden.detach()).hidden
    cut = inputs.query_len // 2 if is_causal else inputs.query_len
    weighed = weighted_sum(output[0, :cut])
    if not weighed.requires_grad:
        return
    found: Sequence[Tensor | None] = torch.autograd.grad(weighed, inputs.tensors[0], allow_unused=True)
    if (gradient := found[0]) is None:  # nothing is learned through it
        return
    allowed = rounding(gradient, inputs.num_terms, torch.promote_types(gradient.dtype, torch.float32))
    for where, foreign in (("to another sequence", gradient[1:]), ("to the future", gradient[0, cut:])):
        if largest(foreign) > allowed:
            raise Violation(f"an output sends a gradient {where} through the carry", inputs.words())


CHECKS = (_carry,)
