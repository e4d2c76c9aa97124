"""Checks of the padding mask: what it hides must not matter in any way."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.inputs import Inputs, expect_same, padded_rows, random_like, random_tensor, without_padding
from attn_zoo.conformance.subject import Module, Subject, gradients, infer, weighted_sum
from attn_zoo.conformance.tolerance import expect_close, largest, largest_error, rounding, same_shape_tolerance
from attn_zoo.errors import UnsupportedError

PATTERNS = ("nothing", "the start", "every other key", "all keys but one")
"""What the entries of one batch pad, in turns."""

MANY = 18
"""Entries of one batch, as few kernels take at once; the last pads something."""

_INFLUENCE = "values under key_padding_mask influence the output"
_INFLUENCE_ON_GRADIENT = "values under key_padding_mask influence a gradient"

MAX_NAMED = 8
"""Padded positions that an example lists."""


def _refusal(subject: Subject) -> Finding | None:
    """Return the finding for a variant without masks, or None where there is something to check."""
    if subject.capabilities.key_padding_mask:
        return None
    build = next(subject.contexts())
    length = subject.lengths[-1]
    module, inputs = subject.module(build, seq_len=length), subject.inputs(build, length).unpadded()
    return subject.refuses("key_padding_mask", "a call with key_padding_mask", lambda: infer(module, inputs))


def _noisy(inputs: Inputs, mask: Tensor, size: float) -> Inputs:
    """Return the inputs with large numbers in the padded tokens."""
    tensors = list(inputs.tensors)
    for index in inputs.key_side:
        old = tensors[index]
        tensors[index] = torch.where(padded_rows(old, mask), size * random_like(old, 50 + index), old)
    return replace(inputs, tensors=tuple(tensors))


@check("values under key_padding_mask change no output and no gradient, whatever they are, NaN too")
def _padding_content(subject: Subject) -> Finding:
    finding = _refusal(subject)
    if finding is not None:
        return finding
    # The padding of a cell is finite, and what other projects wrote to be timed beside ours promises no more.
    has_nan = not subject.is_fixed
    for build in subject.contexts():
        for length in subject.lengths:
            module = subject.module(build, seq_len=length)
            plain, *padded = subject.calls(build, length)
            message = "a mask that hides nothing changes the output"
            expect_same(plain, infer(module, plain.unpadded()), infer(module, plain), message)
            for inputs in padded:
                _expect_content_ignored(module, inputs, has_nan=has_nan, is_poisoned=has_nan and inputs is padded[-1])
        if padded and has_nan:
            _expect_content_ignored(module, _with_padding_only(padded[-1]))
            for context, length in list(subject.probes(build))[-1:]:
                inputs = subject.inputs(context, length, mask="scattered")
                _expect_content_ignored_far(subject.module(context, seq_len=length), inputs)
    return passed()


def _with_padding_only(inputs: Inputs) -> Inputs:
    """Return the inputs with an entry 0 whose keys are all padding."""
    mask = inputs.key_padding_mask if inputs.key_padding_mask is not None else inputs.unpadded().key_padding_mask
    assert mask is not None
    return inputs.under(torch.cat([torch.ones_like(mask[:1]), mask[1:]]))


def _words(inputs: Inputs) -> str:
    """Say what is called and what is hidden."""
    mask = inputs.key_padding_mask
    assert mask is not None
    hidden = mask[0].nonzero().flatten().tolist()
    some = str(hidden) if len(hidden) <= MAX_NAMED else f"{len(hidden)} keys, {str(hidden[:MAX_NAMED])[1:-1]} first"
    return f"{inputs.words()}, entry 0 pads {some}"


def _expect_content_ignored_far(module: Module, inputs: Inputs) -> None:
    """Check one long call, with NaN and infinities alone."""
    mask = inputs.key_padding_mask
    assert mask is not None
    expected = without_padding(inputs, infer(module, inputs))
    found = gradients(module, inputs.poisoned(), weigh=lambda output: weighted_sum(without_padding(inputs, output)))
    allowed = rounding(expected, inputs.num_terms)  # with a graph and without: not the same kernels everywhere
    words = f"{_words(inputs)}, when padded tokens became NaN and infinities"
    expect_close(without_padding(inputs, found.output), expected, allowed, _INFLUENCE, words)
    if name := replace(found, output=expected).not_finite:  # the rows of padding themselves may hold anything
        raise Violation(_INFLUENCE_ON_GRADIENT, f"{words}: the {name} is not finite")


def _expect_content_ignored(module: Module, inputs: Inputs, *, has_nan: bool = True, is_poisoned: bool = True) -> None:
    mask = inputs.key_padding_mask
    assert mask is not None
    words = _words(inputs)
    size = 100.0 if inputs.tensors[0].dtype == torch.float16 else 1e4
    others = {f"{size:g} x noise": _noisy(inputs, mask, size)}
    if has_nan:
        others["NaN and infinities"] = inputs.poisoned()
    expected = without_padding(inputs, infer(module, inputs))
    if not expected.isfinite().all():
        if mask.all(-1).any():  # of an entry of padding only: another check's finding
            return
        raise Violation("an output is not finite under key_padding_mask", words)
    for content, other in others.items():
        became = f"{words}, when padded tokens became {content}"
        output = without_padding(inputs, infer(module, other))
        expect_close(output, expected, same_shape_tolerance(expected), _INFLUENCE, became)
    _expect_content_sends_no_gradient(module, inputs, words, is_poisoned=is_poisoned)


def _expect_content_sends_no_gradient(module: Module, inputs: Inputs, words: str, *, is_poisoned: bool) -> None:
    mask = inputs.key_padding_mask
    assert mask is not None

    def weigh(output: Tensor) -> Tensor:
        return weighted_sum(without_padding(inputs, output))

    found = gradients(module, inputs, weigh=weigh)
    for index in inputs.key_side:
        gradient = found.by_name[inputs.names[index]]
        if gradient is not None and largest(gradient.masked_fill(~padded_rows(gradient, mask), 0.0)) > 0:
            raise Violation("a gradient reaches padding", f"{words}: to padded {inputs.names[index]}")
    if not is_poisoned:
        return
    allowed = rounding(found.size.clamp_min(1.0), inputs.num_terms * inputs.batch_size, inputs.tensors[0].dtype)
    for name, gradient in gradients(module, inputs.poisoned(), weigh=weigh).by_name.items():
        before = found.by_name[name]
        if gradient is None or before is None:
            continue
        if not before.isfinite().all():
            if mask.all(-1).any():
                continue
            raise Violation(f"a gradient of {name} is not finite under key_padding_mask", words)
        advice = "when padded tokens became NaN and infinities: blank_padding before anything is multiplied by them"
        expect_close(gradient, before, allowed, _INFLUENCE_ON_GRADIENT, f"{words}, that of {name}, {advice}")


def _patterns(inputs: Inputs) -> Tensor:
    """Return a mask of `PATTERNS`, each of which leaves a key, again from the first where there are more."""
    mask = torch.zeros(len(PATTERNS), inputs.key_len, dtype=torch.bool)
    mask[1, : inputs.key_len // 2] = True
    mask[2, ::2] = True
    mask[3] = True
    mask[3, inputs.key_len // 2] = False
    return mask[torch.arange(inputs.batch_size) % len(PATTERNS)].to(inputs.tensors[0].device)


@check("each entry is read under its own mask, whatever its pattern, and under that of this call")
def _padding_patterns(subject: Subject) -> Finding:
    if not subject.capabilities.key_padding_mask:
        return not_applicable("has no key_padding_mask")
    if not subject.has_masks:
        return not_applicable("is called without padding")
    for build in subject.contexts():
        lengths = [length for length in subject.lengths if length > 2] or [subject.lengths[-1]]
        for length in sorted({lengths[0], lengths[-1]}):
            inputs = subject.calls(build, length, batch_size=MANY if length == lengths[0] else len(PATTERNS))[0]
            if inputs.key_len == 1:
                continue
            inputs = inputs.under(_patterns(inputs))
            _expect_own_mask(subject.module(build, seq_len=length), inputs)
            if length == lengths[-1]:
                _expect_mask_read_again(subject, build, inputs)
    return passed()


def _expect_own_mask(module: Module, inputs: Inputs) -> None:
    mask = inputs.key_padding_mask
    assert mask is not None
    together = without_padding(inputs, infer(module, inputs))
    tolerance = rounding(together, inputs.num_terms)
    for entry in dict.fromkeys((*range(len(PATTERNS)), inputs.batch_size - 1)):
        one, pattern = inputs.entry(entry), PATTERNS[entry % len(PATTERNS)]
        alone = without_padding(one, infer(module, one))[0]
        words = f"{inputs.words()}: entry {entry}, which pads {pattern}, when it was alone"
        expect_close(alone, together[entry], tolerance, "an entry is not read under its own mask", words)


def _expect_mask_read_again(subject: Subject, build: BuildContext, inputs: Inputs) -> None:
    """Check that a mask is read at each call: changed in place, made anew with as many padded keys, or left out."""
    if subject.is_fixed:
        inputs = inputs.entry(1)  # padded at the start, and turned round at the end
    length, first = inputs.query_len, inputs.key_padding_mask
    assert first is not None
    module, fresh = subject.make(build, seq_len=length), subject.make(build, seq_len=length)
    held, second = first.clone(), first.flip(0, 1)
    infer(module, inputs.under(held))
    held.copy_(second)
    apart = torch.stack([first, ~first], dim=-1)[..., 0]  # not contiguous
    for what, mask, same in (
        ("was changed in place", held, second),
        ("was another one before", apart, first),
        ("was left out after one", None, None),
    ):
        other = inputs.under(None if same is None else same.clone())
        expected, output = infer(fresh, other), infer(module, inputs.under(mask))
        if same is not None:
            expected, output = (without_padding(other, each) for each in (expected, output))
        words = f"{inputs.words()}, where the mask {what}"
        expect_close(output, expected, same_shape_tolerance(expected), "a mask of an earlier call is used again", words)


def _longer(tensor: Tensor, count: int, seed: int) -> Tensor:
    shape = (*tensor.shape[:-2], count, tensor.shape[-1])
    return torch.cat([tensor, 3.0 * random_tensor(shape, seed, tensor.dtype, str(tensor.device))], dim=-2)


_UNCLAIMED = "does not claim that the padded length is all the same (is_padding_invariant)"


@check("where it is claimed, more padding does not matter")
def _padding_length(subject: Subject) -> Finding:
    capabilities = subject.capabilities
    if not capabilities.key_padding_mask:
        return not_applicable("has no key_padding_mask")
    if not capabilities.variable_seq_len:
        return not_applicable("has one fixed length")
    try:
        share = max(
            (
                _share_of_length(subject, build, length, longer - length)
                for build in subject.contexts()
                for length in subject.lengths
                for longer in (min(subject.fit(2 * length + 1), build.max_seq_len),)
                if longer > length and subject.fit(longer) == longer
            ),
            default=0.0,
        )
    except UnsupportedError:
        if capabilities.is_padding_invariant:
            raise
        return not_applicable(_UNCLAIMED)
    if capabilities.is_padding_invariant:
        return passed()
    return not_applicable(f"{_UNCLAIMED}: as much padding as tokens changes the output by up to {share:.1%}")


def _share_of_length(subject: Subject, build: BuildContext, length: int, count: int) -> float:
    """Return by how much `count` padded tokens change the output, as a share of its largest value.

    Raises:
        Violation: it is more than rounding, where it is claimed to be nothing.
    """
    module, inputs = subject.module(build), subject.inputs(build, length)
    # Under a causal mask positions are aligned at the end, so queries grow with the keys.
    grown = inputs.key_side if build.is_cross else range(len(inputs.tensors))
    tensors = [_longer(tensor, count, 60 + i) if i in grown else tensor for i, tensor in enumerate(inputs.tensors)]
    mask = torch.zeros(inputs.batch_size, inputs.key_len + count, dtype=torch.bool, device=subject.device)
    mask[:, inputs.key_len :] = True
    expected, output = infer(module, inputs), infer(module, replace(inputs, tensors=tuple(tensors)).under(mask))
    output = output[..., :length, :]
    if subject.capabilities.is_padding_invariant:
        allowed = rounding(expected, inputs.num_terms + count)
        words = f"{inputs.words()}, {count} padded tokens appended"
        expect_close(output, expected, allowed, "longer padding changes the output", words)
    return largest_error(output, expected) / max(largest(expected), torch.finfo(expected.dtype).tiny)


@check("an entry of padding only gives zeros and finite gradients")
def _fully_padded_row(subject: Subject) -> Finding:
    finding = _refusal(subject)
    if finding is not None:
        return finding
    for module, inputs in subject.cases(subject.lengths):
        _expect_row_ignored(module, inputs)
    return passed()


def _expect_row_ignored(module: Module, inputs: Inputs) -> None:
    found = gradients(module, _with_padding_only(inputs))
    words = f"{inputs.words()}, all keys of entry 0 are padding"
    if found.not_finite:
        raise Violation(f"an entry of padding only: the {found.not_finite} is not finite", words)
    # A mixer may add its output bias; heads have nothing to add.
    if inputs.form == "attention" and largest(found.output[0]) > 0:
        raise Violation("an entry of padding only must give zeros", f"{words}: got {largest(found.output[0]):.2g}")
    others = infer(module, inputs.entries(slice(1, None)))
    expect_same(inputs, found.output[1:], others, "an entry of padding only changes the other entries")


CHECKS = (_padding_content, _padding_patterns, _padding_length, _fully_padded_row)
