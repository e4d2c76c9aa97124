"""Checks that an output depends on nothing it must not depend on: the batch, the order, the future."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.checks.randomness import seeded_call
from attn_zoo.conformance.inputs import Inputs, expect_same, random_like, without_padding
from attn_zoo.conformance.lengths import block_sizes
from attn_zoo.conformance.subject import MaskKind, Module, Subject, gradients, has_routing, infer, weighted_sum
from attn_zoo.conformance.tolerance import error_by_row, expect_close, largest, largest_error, rounding
from attn_zoo.errors import UnsupportedError

MAX_POSITIONS = 16  # per call; shorter sequences are tried at every position
FEW_POSITIONS = 6  # in the gate
MANY = 17  # entries of one batch, as few kernels take at once
MAX_TOKENS = 4096  # of all entries of a call that probes one length
FEW_TOKENS = 1024  # in the gate
LEAST_BLOCK = 16  # of kernels: where one begins, a mask is often off by one
ORDINARY_BLOCKS = (64, 128, 256, 512)  # beside those that the options name


def _hint(module: Module) -> str:
    return '; where only the routing sees it, declare causal="masked"' if has_routing(module) else ""


@check("other entries of the batch do not matter")
def _batch_invariance(subject: Subject) -> Finding:
    for build in subject.contexts():
        for length in subject.lengths:
            module = subject.module(build, seq_len=length)
            for inputs in subject.calls(build, length)[::2]:
                _expect_batch_invariance(lambda module=module: module, inputs, "evaluation")  # type: ignore[misc]
        many = subject.inputs(build, subject.lengths[0], batch_size=MANY)
        module = subject.module(build, seq_len=subject.lengths[0])
        _expect_alone(module, many, MANY - 1, infer(module, many))
        for long_build, length in () if subject.is_fixed else list(subject.probes(build))[-1:]:
            module, inputs = subject.module(long_build, seq_len=length), subject.inputs(long_build, length)
            _expect_alone(module, inputs, 1, infer(module, inputs))
        # Statistics over the batch, as of batch normalisation, are used in training only. A gate asks for its own mode.
        if build.dropout_p == 0 and not subject.is_fixed:
            inputs = subject.calls(build, subject.lengths[-1], batch_size=3)[-1]
            make = partial(subject.make, build, seq_len=subject.lengths[-1])
            # A new module for each call: whether they depend on each other is for `no_memory` to say, and noise for
            # `modes`.
            first, second = (seeded_call(make().train(), inputs, seed) for seed in range(2))
            if largest_error(first, second) <= rounding(first, inputs.num_terms):
                _expect_batch_invariance(lambda: make().train(), inputs, "training")  # noqa: B023
    return passed()


def _expect_alone(module: Module, inputs: Inputs, entry: int, together: Tensor, mode: str = "evaluation") -> None:
    alone, allowed = infer(module, inputs.entry(entry))[0], rounding(together, inputs.num_terms)
    message = "an entry's output depends on the other entries of the batch"
    words = f"{inputs.words()}, {mode}: entry {entry}, when it was alone"
    expect_close(alone, together[entry], allowed, message, words)


def _expect_batch_invariance(make: Callable[[], Module], inputs: Inputs, mode: str) -> None:
    together = infer(make(), inputs)
    for entry in range(inputs.batch_size):
        _expect_alone(make(), inputs, entry, together, mode)
    order = torch.arange(inputs.batch_size - 1, -1, -1, device=together.device)
    message, detail = "permuting the batch does not permute the outputs", f", {mode}: the batch reversed"
    expect_same(inputs, infer(make(), inputs.entries(order)), together[order], message, detail)
    found = gradients(make(), inputs, weigh=lambda output: weighted_sum(output[0])).by_name
    for name in inputs.names:
        gradient = found[name]
        if gradient is not None and largest(gradient[1:]) > 0:
            raise Violation(
                "a gradient crosses the batch",
                f"{inputs.words()}, {mode}: output of entry 0 has a gradient to {name} of another entry",
            )


@check("where it is claimed, the order of the keys does not matter without positions")
def _permutation(subject: Subject) -> Finding:
    if not subject.capabilities.is_permutation_invariant:
        return not_applicable("does not claim that the order of the keys is all the same (is_permutation_invariant)")
    if not subject.capabilities.bidirectional or (subject.is_fixed and subject.build.is_causal):
        return not_applicable("causal attention depends on the order of the tokens")
    for build in subject.contexts():
        for length in (length for length in subject.lengths if length > 1 and not build.is_causal):
            module = subject.module(build, seq_len=length)
            for inputs in subject.calls(build, length):
                _expect_permutation(module, inputs)
        for long_build, length in () if build.is_causal else subject.probes(build):
            module = subject.module(long_build, seq_len=length)
            _expect_permutation(module, subject.calls(long_build, length, batch_size=1)[-1])
    return passed()


def _expect_permutation(module: Module, inputs: Inputs) -> None:
    device = inputs.tensors[0].device
    order = torch.randperm(inputs.key_len, generator=torch.Generator().manual_seed(0)).to(device)
    tensors = list(inputs.tensors)
    for index in inputs.key_side:
        tensors[index] = tensors[index][..., order, :]
    mask = None if inputs.key_padding_mask is None else inputs.key_padding_mask[:, order]
    expected, output = infer(module, inputs), infer(module, replace(inputs, tensors=tuple(tensors)).under(mask))
    if inputs.is_shared:  # keys are queries: the outputs move along
        expected = expected[..., order, :]
    message, detail = "the order of keys matters without positions", ": keys and values permuted together"
    expect_same(inputs, output, expected, message, detail)


def _positions(length: int, count: int) -> list[int]:
    """Return `count` positions to disturb: all of a short sequence, else the ends, where blocks begin, and others."""
    if length <= count:
        return list(range(length))
    inner = torch.randperm(length - 4, generator=torch.Generator().manual_seed(0)) + 2
    wanted = (0, 1, length - 2, length - 1, *range(LEAST_BLOCK, length, LEAST_BLOCK), *inner.tolist())
    return sorted(list(dict.fromkeys(wanted))[:count])


@check("future tokens change neither past outputs nor gradients")
def _causality(subject: Subject) -> Finding:
    causal = replace(subject.build, is_causal=True, is_cross=False)
    if not subject.capabilities.causal:
        return subject.refuses("causal", "building with is_causal=True", lambda: subject.make(causal))
    if subject.is_fixed and not subject.build.is_causal:
        return not_applicable("built to see both directions")
    has_offset = subject.has_causal_offset
    for length in subject.lengths:
        module = subject.module(causal, seq_len=length)
        _expect_causal(module, subject, causal, length, 0)
        for key_len in (subject.fit(length + 2), subject.lengths[-1]) if has_offset else ():
            if length < key_len <= causal.max_seq_len:
                _expect_causal(module, subject, causal, length, key_len - length)
    if (mask := subject.masks(subject.lengths[-1])[-1]) != "none":  # hides the first key: some queries see none
        _expect_causal(module, subject, causal, subject.lengths[-1], 0, mask)
    for build, length in list(subject.probes(causal))[-1 if subject.is_fixed else 0 :]:
        _expect_causal_probe(subject.module(build, seq_len=length), subject, build, length)
    if subject.capabilities.causal == "masked":
        return passed("masked; its routing sees the future, as declared")
    return passed()


def _expect_causal(
    module: Module, subject: Subject, build: BuildContext, length: int, offset: int, mask: MaskKind = "none"
) -> None:
    """Check one length: query i may see keys up to i + offset, where offset = S - L."""
    single = subject.inputs(build, length, key_len=length + offset, batch_size=1, mask=mask)
    count = FEW_POSITIONS if subject.is_fixed else MAX_POSITIONS
    positions = [position for position in _positions(length + offset, count) if position > offset]
    if not positions:
        return
    # Entry 0 stays as it is; entry n has token positions[n - 1] changed. One call shows every leak.
    batch = single.repeated(len(positions) + 1)
    tensors = [tensor.clone() for tensor in batch.tensors]
    for index, tensor in enumerate(tensors):
        for entry, position in enumerate(positions, start=1):
            row = position if index in batch.key_side else position - offset
            tensor[entry, ..., row, :] = 3.0 * random_like(tensor[entry, ..., row, :], 7 * entry + index)
    cuts = positions[::2] if subject.is_fixed else positions
    if subject.capabilities.causal == "masked":  # what a query may choose from may change, what it then sees may not
        _expect_causal_gradient(module, single.repeated(len(cuts)), cuts, offset)
        return
    output = without_padding(batch, infer(module, replace(batch, tensors=tuple(tensors))))
    if not output[0].isfinite().all():
        raise Violation("the output is not finite for ordinary inputs", single.words())
    tolerance = rounding(output[0], single.num_terms)  # a row's place decides in which order its sums run
    for entry, position in enumerate(positions, start=1):
        seen, unchanged = (output[index, ..., : position - offset, :] for index in (entry, 0))
        by_row = error_by_row(seen, unchanged).reshape(-1, position - offset).amax(0)
        if not float(by_row.max()) <= tolerance:
            row = int((by_row > tolerance).nonzero()[0])
            raise Violation(
                "a future token changes a past output",
                f"{single.words()}: output {row} changed by {float(by_row[row]):.2g} "
                f"when token {position} (the future) changed{_hint(module)}",
            )
    _expect_causal_gradient(module, single.repeated(len(cuts)), cuts, offset)


def _cuts(subject: Subject, length: int) -> list[int]:
    """Return as many positions to cut at as fit a call: the last, where the last, first and second blocks begin."""
    sizes = sorted({size for size in (*block_sizes(subject.config), *ORDINARY_BLOCKS) if size < length}, reverse=True)
    most = FEW_TOKENS if subject.is_fixed else MAX_TOKENS
    starts = [(length - 1) // size * size for size in sizes] + sizes + [2 * size for size in sizes if 2 * size < length]
    return sorted(list(dict.fromkeys([length - 1, *starts]))[: max(2, most // length)])


def _expect_causal_probe(module: Module, subject: Subject, build: BuildContext, length: int) -> None:
    """Check a longer sequence: all tokens from a cut on are others, a different cut in every entry of one batch."""
    single, cuts = subject.inputs(build, length, batch_size=1), _cuts(subject, length)
    batch = single.repeated(len(cuts) + 1)
    other = subject.inputs(build, length, batch_size=1, seed=7)
    at = torch.tensor([length, *cuts], device=subject.device)
    is_after = torch.arange(length, device=subject.device) >= at[:, None]  # [B, L]

    def joined(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(is_after[:, None, :, None] if old.dim() == 4 else is_after[..., None], new, old)

    tensors = tuple(joined(*pair) for pair in zip(batch.tensors, other.tensors, strict=True))
    if subject.capabilities.causal != "masked":
        output = infer(module, replace(batch, tensors=tensors))
        change = error_by_row(output, output[:1])
        change = (change if change.dim() == 2 else change.amax(1)).masked_fill(is_after, 0.0)  # [B, L]
        if float(change.max()) > rounding(output, batch.num_terms):
            entry = int(change.amax(-1).argmax())
            row = int(change[entry].argmax())
            raise Violation(
                "a future token changes a past output",
                f"{single.words()}: output {row} changed by {float(change[entry, row]):.2g} "
                f"when the tokens from {cuts[entry - 1]} on (the future) changed{_hint(module)}",
            )
    _expect_causal_gradient(module, single, [length // 2], 0)


def _expect_causal_gradient(module: Module, batch: Inputs, positions: list[int], offset: int) -> None:
    """Check that outputs before a cut send no gradient to tokens after it; a cut for every entry of the batch."""
    leaks = _gradient_leaks(module, batch, positions, offset)
    if leaks and not any(leaks.values()) and batch.tensors[0].dtype != torch.float64:
        # What cancels leaves rounding, as in a Fourier transform, and less in float64; a leak stays. Where that is
        # refused, nothing may be left.
        try:
            leaks = _gradient_leaks(deepcopy(module).double(), batch.map(Tensor.double), positions, offset)
        except UnsupportedError:
            leaks = dict.fromkeys(leaks, True)
    for (name, cut), is_leak in leaks.items():
        if is_leak:
            start = cut if batch.names.index(name) in batch.key_side else cut - offset
            raise Violation(
                "a past output sends a gradient to a future token",
                f"{batch.entry(0).words()}: outputs before {cut - offset}, {name} from {start} on",
            )


def _gradient_leaks(module: Module, batch: Inputs, positions: list[int], offset: int) -> dict[tuple[str, int], bool]:
    """Return where a gradient reaches a token after a cut, by input and cut: True for more than rounding."""

    def before_cuts(output: Tensor) -> Tensor:
        output = without_padding(batch, output)
        terms = [weighted_sum(output[n, ..., : cut - offset, :]) for n, cut in enumerate(positions)]
        return torch.stack(terms).sum()

    found, leaks = gradients(module, batch, weigh=before_cuts).by_name, dict[tuple[str, int], bool]()
    for index, name in enumerate(batch.names):
        gradient = found[name]
        if gradient is None:
            continue
        wide = torch.promote_types(gradient.dtype, torch.float32)
        for entry, cut in enumerate(positions):
            start = cut if index in batch.key_side else cut - offset
            if (leak := largest(gradient[entry, ..., start:, :])) > 0:
                leaks[name, cut] = leak > rounding(gradient[entry], batch.num_terms, wide)
    return leaks


CHECKS = (_batch_invariance, _permutation, _causality)
