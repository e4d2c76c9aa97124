"""Checks of shapes, sizes, types and memory layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attn_zoo.attention.oracle import expand_kv_heads, softmax_attention
from attn_zoo.conformance.check import Check, Finding, Violation, not_applicable, passed
from attn_zoo.conformance.inputs import Inputs
from attn_zoo.conformance.subject import Module, Subject, call, call_reference, routing_of
from attn_zoo.conformance.tolerance import largest_error, rounding
from attn_zoo.errors import UnsupportedError
from attn_zoo.metadata import FLOAT_DTYPES


def _expect_like_query(output: Tensor, inputs: Inputs) -> None:
    query = inputs.tensors[0]
    for what, got, expected in (
        ("shape", list(output.shape), list(query.shape)),
        ("dtype", output.dtype, query.dtype),
        ("device", output.device, query.device),
    ):
        if got != expected:
            raise Violation(
                f"the output's {what} is {got}; expected {expected} as the {inputs.names[0]}", inputs.words()
            )
    if not output.isfinite().all():
        raise Violation("the output is not finite for ordinary inputs", inputs.words())


def expect_equals_reference(module: Module, inputs: Inputs, what: str) -> None:
    """Raise `Violation` where the output is not like the query or not equal to the readable reference."""
    with torch.no_grad():
        output, expected = call(module, inputs), call_reference(module, inputs, routing_of(module, inputs))
    _expect_like_query(output, inputs)
    error, tolerance = largest_error(output, expected), rounding(expected, inputs.num_terms)
    if error > tolerance:
        raise Violation(f"{what}: differs from the readable reference by {error:.2g}", inputs.words())


def _shape_and_dtype(subject: Subject) -> Finding:
    for build in subject.contexts():
        for dtype in subject.dtypes:
            for length in dict.fromkeys((subject.lengths[0], subject.lengths[-1])):
                module = subject.module(build, seq_len=length, dtype=dtype)
                for inputs in subject.calls(build, length, dtype=dtype):
                    with torch.no_grad():
                        _expect_like_query(call(module, inputs), inputs)
    return passed()


def _odd_lengths(subject: Subject) -> Finding:
    longest = subject.build.max_seq_len // subject.capabilities.seq_len_multiple * subject.capabilities.seq_len_multiple
    wanted = (1, 2, 63, 65, 100, subject.capabilities.seq_len_multiple + 1)
    lengths = sorted({min(subject.fit(length), longest) for length in wanted} | {longest})
    for build in subject.contexts():
        for length in lengths:
            module = subject.module(build, seq_len=length)
            expect_equals_reference(module, subject.calls(build, length, batch_size=1)[-1], f"length {length}")
        too_long = subject.inputs(build, longest + subject.capabilities.seq_len_multiple, batch_size=1)
        try:
            call(subject.module(build, seq_len=longest), too_long)
        except (ValueError, UnsupportedError):
            continue
        raise Violation(f"accepts more than max_seq_len = {subject.build.max_seq_len} tokens", too_long.words())
    return passed(f"lengths {', '.join(map(str, lengths))}")


def _batch_and_head_sizes(subject: Subject) -> Finding:
    length = subject.lengths[-1]
    for build in subject.contexts():
        for batch_size, num_heads in ((1, 1), (3, 1), (1, 2), (3, 4)):
            sized = replace(build, num_heads=num_heads, num_kv_heads=num_heads)
            module = subject.module(sized, seq_len=length)
            for inputs in subject.calls(sized, length, batch_size=batch_size):
                expect_equals_reference(module, inputs, f"batch_size={batch_size}, num_heads={num_heads}")
    return passed()


def _cross_attention(subject: Subject) -> Finding:
    build = replace(subject.build, is_cross=True, is_causal=False)
    capabilities = subject.capabilities
    if not (capabilities.cross_attention and capabilities.bidirectional):
        return subject.refuses("cross_attention", "building with is_cross=True", lambda: subject.make(build))
    if not capabilities.variable_seq_len:
        return not_applicable("has one fixed length, so L and S cannot differ")
    short, long = subject.fit(3), subject.lengths[-1]
    module = subject.module(build)
    for query_len, key_len in ((1, short), (short, 2 * short), (long, short), (short, long), (long, long)):
        for mask in subject.masks(key_len):
            inputs = subject.inputs(build, subject.fit(query_len), key_len=key_len, mask=mask)
            expect_equals_reference(module, inputs, "cross-attention")
            if capabilities.is_exact and subject.form == "attention":
                query, key, value = inputs.tensors
                with torch.no_grad():
                    output = call(module, inputs)
                expected = softmax_attention(query, key, value, key_padding_mask=inputs.key_padding_mask)
                if largest_error(output, expected) > rounding(expected, key_len, subject.dtype):
                    raise Violation("cross-attention differs from exact attention", inputs.words())
    return passed()


def _grouped_query(subject: Subject) -> Finding:
    grouped = replace(subject.build, num_heads=4, num_kv_heads=2)
    if not subject.capabilities.grouped_query:
        return subject.refuses(
            "grouped_query", "building with num_kv_heads=2 of 4 heads", lambda: subject.make(grouped)
        )
    for build in subject.contexts():
        for num_kv_heads in (1, 2):
            grouped = replace(build, num_heads=4, num_kv_heads=num_kv_heads)
            length = subject.lengths[-1]
            module = subject.module(grouped, seq_len=length)
            for inputs in subject.calls(grouped, length):
                expect_equals_reference(module, inputs, f"num_kv_heads={num_kv_heads} of 4")
                if subject.form == "mixer":
                    continue
                plain = subject.module(replace(grouped, num_kv_heads=4), seq_len=length)
                if any(True for _ in plain.parameters()):
                    continue  # other sizes, other parameters: only the reference can be compared
                query, key, value = inputs.tensors
                repeated = replace(inputs, tensors=(query, expand_kv_heads(key, 4), expand_kv_heads(value, 4)))
                with torch.no_grad():
                    output, expected = call(module, inputs), call(plain, repeated)
                if largest_error(output, expected) > rounding(expected, inputs.num_terms):
                    raise Violation("grouped heads differ from the same heads repeated", inputs.words())
    return passed()


def _layouts(tensor: Tensor) -> list[tuple[str, Tensor]]:
    padded = torch.cat([tensor, torch.full_like(tensor, 7.0)], dim=-2)
    stacked = torch.stack([tensor, torch.full_like(tensor, 7.0)], dim=-1)
    return [
        ("transposed", tensor.transpose(1, -2).contiguous().transpose(1, -2)),
        ("the head of a longer tensor", padded[..., : tensor.shape[-2], :]),
        ("every other element", stacked[..., 0]),
    ]


def _in_layout(tensor: Tensor, *, index: int) -> Tensor:
    return _layouts(tensor)[index][1]


def _non_contiguous(subject: Subject) -> Finding:
    length = subject.lengths[-1]
    for build in subject.contexts():
        module = subject.module(build, seq_len=length)
        for inputs in subject.calls(build, length):
            with torch.no_grad():
                expected = call(module, inputs)
                tolerance = rounding(expected, inputs.num_terms)
                for index in range(3):
                    layout = _layouts(inputs.tensors[0])[index][0]
                    changed = inputs.map(partial(_in_layout, index=index))
                    if inputs.key_padding_mask is not None:
                        mask = inputs.key_padding_mask
                        changed = replace(changed, key_padding_mask=torch.stack([mask, ~mask], dim=-1)[..., 0])
                    if largest_error(call(module, changed), expected) > tolerance:
                        raise Violation(
                            f"another result for the same values in another layout: {layout}", inputs.words()
                        )
                copies = inputs.repeated(2)
                views = copies.map(lambda tensor: tensor[:1].expand_as(tensor))
                if largest_error(call(module, views), call(module, copies)) > tolerance:
                    raise Violation("another result for an expanded view", copies.words())
    return passed()


def _inputs_unchanged(subject: Subject) -> Finding:
    for build in subject.contexts():
        for length in subject.lengths[-2:]:
            module = subject.module(build, seq_len=length)
            for inputs in subject.calls(build, length):
                named = dict(zip(inputs.names, inputs.tensors, strict=True))
                if inputs.key_padding_mask is not None:
                    named["key_padding_mask"] = inputs.key_padding_mask
                before = {name: (tensor.clone(), tensor._version) for name, tensor in named.items()}
                with torch.no_grad():
                    call(module, inputs)
                for name, tensor in named.items():
                    old, version = before[name]
                    if not torch.equal(tensor, old):
                        raise Violation(f"changes its argument {name} in place", inputs.words())
                    if tensor._version != version:
                        raise Violation(f"writes to its argument {name} in place", inputs.words())
    return passed()


def _dtype_support(subject: Subject) -> Finding:
    build = next(subject.contexts())
    length = subject.lengths[-1]
    for name in FLOAT_DTYPES:
        dtype = getattr(torch, name)
        if name in subject.capabilities.dtypes:
            inputs = subject.calls(build, length, dtype=dtype)[0]
            with torch.no_grad():
                _expect_like_query(call(subject.module(build, seq_len=length, dtype=dtype), inputs), inputs)
            continue
        module = subject.make(build, seq_len=length, dtype=dtype)
        inputs = subject.inputs(build, length, dtype=dtype)
        subject.refuses("dtypes", f"a call in {name}", partial(call, module, inputs))
    return passed(f"runs in {', '.join(subject.capabilities.dtypes)}")


CHECKS = (
    Check(
        name="shape_and_dtype", summary="the output has the shape, dtype and device of the input", run=_shape_and_dtype
    ),
    Check(
        name="odd_lengths",
        summary="1, 63, 100, the maximum and block sizes plus one work; longer is refused",
        run=_odd_lengths,
    ),
    Check(
        name="batch_and_head_sizes",
        summary="one head, one batch entry, three of them: same mathematics",
        run=_batch_and_head_sizes,
    ),
    Check(name="cross_attention", summary="other key lengths work, or are refused as declared", run=_cross_attention),
    Check(
        name="grouped_query",
        summary="fewer key/value heads work like repeated ones, or are refused",
        run=_grouped_query,
    ),
    Check(name="non_contiguous", summary="the layout of the inputs in memory does not matter", run=_non_contiguous),
    Check(name="inputs_unchanged", summary="arguments are not written to", run=_inputs_unchanged),
    Check(name="dtype_support", summary="declared dtypes run, all others are refused", run=_dtype_support),
)
