"""Checks of the state that a variant keeps: reading a sequence in pieces equals one forward, and the state's size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.decode import state_bytes
from attn_zoo.conformance.check import Check, Finding, Violation, not_applicable, passed
from attn_zoo.conformance.inputs import Inputs
from attn_zoo.conformance.subject import Module, Subject, call, read_positions
from attn_zoo.conformance.tolerance import largest_error, rounding
from attn_zoo.errors import UnsupportedError

NUM_CUTS = 3
"""Random ways of cutting a sequence; beside them every sequence is stepped through, and read at once."""


def _pieces(length: int, seed: int) -> list[tuple[range, bool]]:
    """Cut `length` positions at random: to be read at once (True) or step by step, in turns."""
    source = random.Random(f"{length} {seed}")
    cuts = sorted(source.sample(range(1, length), min(length - 1, source.randint(1, 4))))
    ends = [0, *cuts, length]
    return [(range(ends[i], ends[i + 1]), (i + seed) % 2 == 0) for i in range(len(ends) - 1)]


def _ways(length: int) -> Iterator[tuple[str, list[tuple[range, bool]]]]:
    """Yield ways to read a sequence, in words and in pieces."""
    yield "step by step", [(range(length), False)]
    yield "prefill", [(range(length), True)]
    if length > 1:
        for seed in range(NUM_CUTS):
            pieces = _pieces(length, seed)
            words = ", ".join(f"{'prefill' if at_once else 'steps'} of {len(piece)}" for piece, at_once in pieces)
            yield words, pieces


def _read(module: Module, inputs: Inputs, pieces: list[tuple[range, bool]], state: Any) -> Iterator[tuple[Tensor, Any]]:
    """Yield output and state after every piece, after every step where it is stepped through."""
    for piece, at_once in pieces:
        for part in [piece] if at_once else [range(position, position + 1) for position in piece]:
            output, state = read_positions(module, inputs, part, state, at_once=at_once)
            yield output, state


def _causal_build(subject: Subject) -> BuildContext | None:
    if subject.is_fixed and not subject.build.is_causal:
        return None
    return replace(subject.build, is_causal=True, is_cross=False) if subject.capabilities.causal else None


def _refused_decode(subject: Subject) -> Finding:
    build = next(context for context in subject.contexts() if not context.is_cross)
    module = subject.make(build)
    inputs = subject.inputs(build, 1, batch_size=1)
    start = partial(module.init_state, 1, device=subject.device, dtype=subject.dtype)
    finding = subject.refuses("decode", "init_state()", start)
    if subject.form == "mixer":
        return finding  # without a state there is no step to ask for
    for at_once in (False, True):
        what = "prefill()" if at_once else "step()"
        subject.refuses("decode", what, partial(read_positions, module, inputs, range(1), None, at_once=at_once))
    return finding


def _decode(subject: Subject) -> Finding:
    if subject.capabilities.decode == "none":
        return _refused_decode(subject)
    build = _causal_build(subject)
    if build is None:
        return not_applicable("decodes only in its causal form")
    for position in subject.capabilities.positions:
        context = replace(build, position=position)
        for length in subject.lengths:
            module, inputs = subject.module(context, seq_len=length), subject.inputs(context, length)
            start = partial(module.init_state, inputs.batch_size, device=subject.device, dtype=subject.dtype)
            _expect_pieces(module, inputs, start, position)
    if subject.form == "mixer" and subject.capabilities.cross_attention and not subject.is_fixed:
        _cross_decode(subject)
    return passed()


@torch.no_grad()
def _expect_pieces(module: Module, inputs: Inputs, start: Any, position: str) -> None:
    expected = call(module, inputs)
    tolerance = rounding(expected, inputs.num_terms)
    for way, pieces in _ways(inputs.query_len):
        words = inputs.words() + ("" if position == "none" else f", {position}") + f", {way}"
        begin = 0
        for output, _ in _read(module, inputs, pieces, start()):
            end = begin + output.shape[-2]
            rows = expected[..., begin:end, :]
            if output.shape != rows.shape:
                raise Violation("reading from a state gives the wrong shape", f"{words}: {list(output.shape)}")
            error = largest_error(output, rows)
            if error > tolerance:
                what = "prefill" if way == "prefill" else "decoding"
                raise Violation(
                    f"{what} differs from the causal forward", f"{words}: positions from {begin} are off by {error:.2g}"
                )
            begin = end
        if begin != inputs.query_len:
            raise Violation("reading from a state gives the wrong shape", f"{words}: {begin} positions in all")


def _cross_decode(subject: Subject) -> None:
    build = replace(subject.build, is_causal=False, is_cross=True)
    for length in subject.lengths[:5]:
        for inputs in subject.calls(build, length):
            module = subject.module(build, seq_len=length)
            assert isinstance(module, AbstractMixer)
            start = partial(
                module.init_state,
                inputs.batch_size,
                context=inputs.tensors[1],
                key_padding_mask=inputs.key_padding_mask,
                device=subject.device,
                dtype=subject.dtype,
            )
            try:
                with torch.no_grad():
                    start()
            except UnsupportedError:
                return
            _expect_pieces(module, inputs, start, "none")


@torch.no_grad()
def _decode_state_bytes(subject: Subject) -> Finding:
    kind, claim = subject.capabilities.decode, subject.variant.complexity.state_bytes
    if kind == "none":
        return not_applicable("keeps no state")
    build = _causal_build(subject)
    if build is None:
        return not_applicable("decodes only in its causal form")
    length = subject.lengths[-1]
    module, inputs = subject.module(build, seq_len=length), subject.inputs(build, length)
    for way, pieces in _ways(length):
        start = module.init_state(inputs.batch_size, device=subject.device, dtype=subject.dtype)
        num_tokens, first = 0, 0
        for output, state in _read(module, inputs, pieces, start):
            num_tokens, size = num_tokens + output.shape[-2], state_bytes(state)
            first = first or size
            if kind == "recurrent" and size != first:
                raise Violation(
                    'declares decode="recurrent" but its state grows',
                    f"{inputs.words()}, {way}: {first} bytes at first, {size} after {num_tokens} tokens",
                )
            if claim is None:
                continue
            shape = build.shape(inputs.batch_size, 1, num_tokens, subject.config, subject.form)
            claimed = claim(shape, subject.dtype.itemsize)
            if size != claimed:
                raise Violation(
                    "the decode state has another size than claimed",
                    f"{inputs.words()}, {way}: {size} bytes after {num_tokens} tokens; claims {claimed}",
                )
    return passed(f"{size} bytes after {length} tokens" + ("; claims nothing" if claim is None else ""))


CHECKS = (
    Check(
        name="decode",
        summary="a sequence cut anywhere, read by prefill and steps, equals the causal forward; or it is refused",
        run=_decode,
    ),
    Check(
        name="decode_state_bytes",
        summary="the decode state has the size that is claimed, and a recurrent one does not grow",
        run=_decode_state_bytes,
    ),
)
