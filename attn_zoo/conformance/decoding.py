"""Checks of step-by-step decoding and of the state it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.attention.decode import state_bytes
from attn_zoo.conformance.check import Check, Finding, Violation, not_applicable, passed
from attn_zoo.conformance.inputs import Inputs
from attn_zoo.conformance.subject import Module, Subject, call, take_step
from attn_zoo.conformance.tolerance import largest_error, rounding
from attn_zoo.errors import UnsupportedError

__all__ = ["CHECKS"]


def _steps(module: Module, inputs: Inputs, state: Any) -> Iterator[tuple[Tensor, Any]]:
    """Yield output and state of every step; in cross-attention only the hidden states advance."""
    for position in range(inputs.query_len):
        output, state = take_step(module, inputs, position, state)
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
    return subject.refuses("decode", "step()", lambda: take_step(module, inputs, 0, None))


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
            state = module.init_state(inputs.batch_size, device=subject.device, dtype=subject.dtype)
            _expect_steps(module, inputs, state, position)
    if subject.form == "mixer" and subject.capabilities.cross_attention and not subject.is_fixed:
        _cross_decode(subject)
    return passed()


def _expect_steps(module: Module, inputs: Inputs, state: Any, position: str) -> None:
    with torch.no_grad():
        expected = call(module, inputs)
        tolerance = rounding(expected, inputs.num_terms)
        for index, (output, _) in enumerate(_steps(module, inputs, state)):
            row = expected[..., index : index + 1, :]
            words = inputs.words() + ("" if position == "none" else f", {position}")
            if output.shape != row.shape:
                raise Violation("a decode step has the wrong shape", f"{words}: {list(output.shape)}")
            error = largest_error(output, row)
            if error > tolerance:
                raise Violation(
                    "decoding differs from the causal forward", f"{words}: step {index} is off by {error:.2g}"
                )


def _cross_decode(subject: Subject) -> None:
    build = replace(subject.build, is_causal=False, is_cross=True)
    for length in subject.lengths[:5]:
        for inputs in subject.calls(build, length):
            module = subject.module(build, seq_len=length)
            with torch.no_grad():
                try:
                    state = module.init_state(
                        inputs.batch_size,
                        context=inputs.tensors[1],  # type: ignore[call-arg]
                        key_padding_mask=inputs.key_padding_mask,
                        device=subject.device,
                        dtype=subject.dtype,
                    )
                except UnsupportedError:
                    return
            _expect_steps(module, inputs, state, "none")


def _decode_state_bytes(subject: Subject) -> Finding:
    kind, claim = subject.capabilities.decode, subject.variant.complexity.state_bytes
    if kind == "none":
        return not_applicable("keeps no state")
    build = _causal_build(subject)
    if build is None:
        return not_applicable("decodes only in its causal form")
    length = subject.lengths[-1]
    module, inputs = subject.module(build, seq_len=length), subject.inputs(build, length)
    with torch.no_grad():
        start = module.init_state(inputs.batch_size, device=subject.device, dtype=subject.dtype)
        sizes = [state_bytes(state) for _, state in _steps(module, inputs, start)]
    if kind == "recurrent" and len(set(sizes)) > 1:
        raise Violation(
            'declares decode="recurrent" but its state grows',
            f"{inputs.words()}: {sizes[0]} bytes after one token, {sizes[-1]} after {length}",
        )
    if claim is None:
        return passed(f"{sizes[-1]} bytes after {length} tokens; claims nothing")
    for num_tokens, size in enumerate(sizes, start=1):
        shape = build.shape(inputs.batch_size, 1, num_tokens, subject.config)
        claimed = claim(shape, subject.dtype.itemsize)
        if size != claimed:
            raise Violation(
                "the decode state has another size than claimed",
                f"{inputs.words()}: {size} bytes after {num_tokens} tokens; claims {claimed}",
            )
    return passed(f"{sizes[-1]} bytes after {length} tokens")


CHECKS = (
    Check(name="decode", summary="step by step equals the causal forward, or is refused", run=_decode),
    Check(
        name="decode_state_bytes",
        summary="the decode state has the size that is claimed",
        run=_decode_state_bytes,
        forms=("attention",),
    ),
)
