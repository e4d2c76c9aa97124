"""Checks of the padding mask: what it hides must not matter in any way."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.conformance.check import Check, Finding, Violation, not_applicable, passed
from attn_zoo.conformance.inputs import Inputs, random_tensor
from attn_zoo.conformance.subject import Module, Subject, call, gradients, weighted_sum
from attn_zoo.conformance.tolerance import largest, largest_error, rounding, same_shape_tolerance


def _refusal(subject: Subject) -> Finding | None:
    """Return the finding for a variant without masks, or None where there is something to check."""
    if subject.capabilities.key_padding_mask:
        return None
    build = next(subject.contexts())
    length = subject.lengths[-1]
    module, inputs = subject.module(build, seq_len=length), subject.inputs(build, length)
    mask = torch.zeros(inputs.batch_size, inputs.key_len, dtype=torch.bool, device=subject.device)
    return subject.refuses(
        "key_padding_mask", "a call with key_padding_mask", lambda: call(module, replace(inputs, key_padding_mask=mask))
    )


def _padded_rows(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return the `[B, S]` mask in a shape that broadcasts to `[B, H, S, D]` or `[B, S, E]`."""
    return mask[:, None, :, None] if tensor.dim() == 4 else mask[:, :, None]


def _compared(inputs: Inputs, output: Tensor, mask: Tensor) -> Tensor:
    """Return the output without the rows whose own query is padding: those may change where queries are keys."""
    return output.masked_fill(_padded_rows(output, mask), 0.0) if inputs.is_shared else output


def _padding_content(subject: Subject) -> Finding:
    finding = _refusal(subject)
    if finding is not None:
        return finding
    for build in subject.contexts():
        for length in subject.lengths:
            module = subject.module(build, seq_len=length)
            plain, *padded = subject.calls(build, length)
            with torch.no_grad():
                expected = call(module, plain)
                empty = torch.zeros(plain.batch_size, plain.key_len, dtype=torch.bool, device=subject.device)
                change = largest_error(call(module, replace(plain, key_padding_mask=empty)), expected)
            if change > rounding(expected, plain.num_terms):
                raise Violation("a mask that hides nothing changes the output", f"{plain.words()}: by {change:.2g}")
            for inputs in padded:
                _expect_content_ignored(module, inputs)
    return passed()


def _expect_content_ignored(module: Module, inputs: Inputs) -> None:
    mask = inputs.key_padding_mask
    assert mask is not None
    with torch.no_grad():
        expected = _compared(inputs, call(module, inputs), mask)
        for size in (3.0, 100.0 if expected.dtype == torch.float16 else 1e4):
            tensors = list(inputs.tensors)
            for index in inputs.key_side:
                garbage = size * random_tensor(tensors[index].shape, 50 + index, expected.dtype, str(expected.device))
                tensors[index] = torch.where(_padded_rows(garbage, mask), garbage, tensors[index])
            output = _compared(inputs, call(module, replace(inputs, tensors=tuple(tensors))), mask)
            change = largest_error(output, expected)
            if change > same_shape_tolerance(expected):
                raise Violation(
                    "values under key_padding_mask influence the output",
                    f"{inputs.words()}: an output changed by {change:.2g} when padded tokens became {size:g} x noise; "
                    f"entry 0 pads {mask[0].nonzero().flatten().tolist()}",
                )
    found = gradients(module, inputs, weigh=lambda output: weighted_sum(_compared(inputs, output, mask))).by_name
    for index in inputs.key_side:
        gradient = found[inputs.names[index]]
        if gradient is not None and largest(gradient.masked_fill(~_padded_rows(gradient, mask), 0.0)) > 0:
            raise Violation("a gradient reaches padding", f"{inputs.words()}: to padded {inputs.names[index]}")


def _longer(tensor: Tensor, count: int, seed: int) -> Tensor:
    shape = (*tensor.shape[:-2], count, tensor.shape[-1])
    return torch.cat([tensor, 3.0 * random_tensor(shape, seed, tensor.dtype, str(tensor.device))], dim=-2)


def _padding_length(subject: Subject) -> Finding:
    capabilities = subject.capabilities
    if not capabilities.key_padding_mask:
        return not_applicable("has no key_padding_mask")
    if not capabilities.is_padding_invariant:
        return not_applicable("does not claim that the padded length is all the same (is_padding_invariant)")
    if not capabilities.variable_seq_len:
        return not_applicable("has one fixed length")
    for build in subject.contexts():
        for length in subject.lengths:
            longer = min(subject.fit(2 * length + 1), build.max_seq_len)
            if longer > length and subject.fit(longer) == longer:
                _expect_length_ignored(subject.module(build), subject, build, length, longer - length)
    return passed()


def _expect_length_ignored(module: Module, subject: Subject, build: BuildContext, length: int, count: int) -> None:
    inputs = subject.inputs(build, length)
    # Under a causal mask positions are aligned at the end, so queries grow with the keys.
    grown = inputs.key_side if build.is_cross else range(len(inputs.tensors))
    tensors = [_longer(tensor, count, 60 + i) if i in grown else tensor for i, tensor in enumerate(inputs.tensors)]
    mask = torch.zeros(inputs.batch_size, inputs.key_len + count, dtype=torch.bool, device=subject.device)
    mask[:, inputs.key_len :] = True
    with torch.no_grad():
        expected = call(module, inputs)
        output = call(module, replace(inputs, tensors=tuple(tensors), key_padding_mask=mask))[..., :length, :]
    change = largest_error(output, expected)
    if change > rounding(expected, inputs.num_terms + count):
        raise Violation(
            "longer padding changes the output",
            f"{inputs.words()}: an output changed by {change:.2g} when {count} padded tokens were appended",
        )


def _fully_padded_row(subject: Subject) -> Finding:
    finding = _refusal(subject)
    if finding is not None:
        return finding
    for build in subject.contexts():
        for length in subject.lengths:
            module = subject.module(build, seq_len=length)
            for inputs in subject.calls(build, length):
                _expect_row_ignored(module, inputs)
    return passed()


def _expect_row_ignored(module: Module, inputs: Inputs) -> None:
    mask = inputs.key_padding_mask
    if mask is None:
        mask = torch.zeros(inputs.batch_size, inputs.key_len, dtype=torch.bool, device=inputs.tensors[0].device)
    mask = torch.cat([torch.ones_like(mask[:1]), mask[1:]])
    found = gradients(module, replace(inputs, key_padding_mask=mask))
    words = f"{inputs.words()}, all keys of entry 0 are padding"
    if not found.output.isfinite().all():
        raise Violation("an entry of padding only gives an output that is not finite", words)
    for name, gradient in found.by_name.items():
        if gradient is not None and not gradient.isfinite().all():
            raise Violation(f"an entry of padding only gives a gradient of {name} that is not finite", words)
    # A mixer may add its output bias; heads have nothing to add.
    if inputs.form == "attention" and largest(found.output[0]) > 0:
        raise Violation("an entry of padding only must give zeros", f"{words}: got {largest(found.output[0]):.2g}")
    with torch.no_grad():
        others = call(module, inputs.entries(slice(1, None)))
    if largest_error(found.output[1:], others) > rounding(others, inputs.num_terms):
        raise Violation("an entry of padding only changes the other entries", words)


CHECKS = (
    Check(
        name="padding_content",
        summary="values under key_padding_mask do not matter, whatever they are",
        run=_padding_content,
    ),
    Check(name="padding_length", summary="where it is claimed, more padding does not matter", run=_padding_length),
    Check(
        name="fully_padded_row",
        summary="an entry of padding only gives zeros and finite gradients",
        run=_fully_padded_row,
    ),
)
