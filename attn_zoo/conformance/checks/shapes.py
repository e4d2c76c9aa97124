"""Checks of shapes, sizes, types and memory layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.attention.oracle import expand_kv_heads, softmax_attention
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.inputs import Inputs, expect_same
from attn_zoo.conformance.lengths import across_blocks
from attn_zoo.conformance.subject import (
    Module,
    Subject,
    call,
    call_reference,
    gradients,
    has_routing,
    infer,
    is_own_reference,
    reference_results,
    results,
    routing_of,
    weighted_sum,
)
from attn_zoo.conformance.tolerance import largest, largest_error, rounding
from attn_zoo.errors import ConfigError, UnsupportedError
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
    expect_same(inputs, output, expected, f"{what}: differs from the readable reference")


def _is_inexact(subject: Subject, module: Module, inputs: Inputs) -> bool:
    """Whether a variant that claims to be exact differs from exact attention."""
    if not subject.capabilities.is_exact or subject.form == "mixer":
        return False
    query, key, value = inputs.tensors
    output, mask = infer(module, inputs), inputs.key_padding_mask
    expected = softmax_attention(query, key, value, is_causal=inputs.is_causal, key_padding_mask=mask)
    return largest_error(output, expected) > rounding(expected, inputs.num_terms, output.dtype)


@check("the output has the shape, dtype and device of the input")
def _shape_and_dtype(subject: Subject) -> Finding:
    for dtype in subject.dtypes:
        for module, inputs in subject.cases(sorted({subject.lengths[0], subject.lengths[-1]}), dtype=dtype):
            _expect_like_query(infer(module, inputs), inputs)
    return passed()


@check("1, 63, 100, the maximum and block sizes plus one work; longer is refused")
def _odd_lengths(subject: Subject) -> Finding:
    longest = subject.build.max_seq_len // subject.capabilities.seq_len_multiple * subject.capabilities.seq_len_multiple
    wanted = (1, 2, 63, 65, 100, subject.capabilities.seq_len_multiple + 1, *across_blocks(subject.config))
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


FEW_QUERIES = 33
SIZES = ((1, 12, 20), (2, 5, 8), (1, 3, 80))
"""Batch size, heads and features of a head, which a variant may refuse: no powers of two among the heads."""


@check("other batch sizes, an empty batch, other heads, features and layers: same mathematics, or refused")
def _batch_and_head_sizes(subject: Subject) -> Finding:
    length = subject.lengths[-1]
    for build in subject.contexts():
        for batch_size, num_heads in ((1, 1), (3, 1), (1, 2), (3, 4)):
            sized = replace(build, num_heads=num_heads, num_kv_heads=num_heads)
            module = subject.module(sized, seq_len=length)
            for inputs in subject.calls(sized, length, batch_size=batch_size):
                expect_equals_reference(module, inputs, f"batch_size={batch_size}, num_heads={num_heads}")
        _expect_empty_batch(subject, build, length)
        if subject.is_fixed or subject.is_shared_mixer:
            continue
        ordinary = subject.calls(build, length, batch_size=1)[-1]
        is_exact = not _is_inexact(subject, subject.module(build, seq_len=length), ordinary)
        for words, batch_size, sized in _other_sizes(build):
            try:
                module = subject.module(sized, seq_len=length)
            except (ConfigError, UnsupportedError):
                continue  # a size may be refused
            inputs = subject.calls(sized, length, batch_size=batch_size)[-1]
            expect_equals_reference(module, inputs, words)
            if is_exact and _is_inexact(subject, module, inputs):
                raise Violation(f"{words}: differs from exact attention, as other sizes do not", inputs.words())
    return passed()


def _other_sizes(build: BuildContext) -> Iterator[tuple[str, int, BuildContext]]:
    """Yield sizes that a variant may refuse, in words, as a batch size and as a context."""
    for batch_size, num_heads, head_dim in SIZES:
        sized = replace(build, num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim)
        words = f"batch_size={batch_size}, num_heads={num_heads}, head_dim={head_dim}"
        yield words, batch_size, replace(sized, embed_dim=num_heads * head_dim)
    deeper = replace(build, num_layers=build.num_layers + 2, layer_index=build.layer_index + 2)
    yield f"layer_index={deeper.layer_index}", 1, deeper


def _expect_empty_batch(subject: Subject, build: BuildContext, length: int) -> None:
    """Check that no sequence gives no output, and gradients of zero where they are not empty."""
    module = subject.module(build, seq_len=length)
    for inputs in subject.calls(build, length, batch_size=0):
        found = gradients(module, inputs)
        _expect_like_query(found.output, inputs)
        for name, gradient in found.by_name.items():
            if gradient is not None and largest(gradient) > 0:
                raise Violation(f"an empty batch gives a gradient of {name}", inputs.words())


def offset_calls(subject: Subject, build: BuildContext) -> Iterator[Inputs]:
    """Yield causal calls with other numbers of keys than of queries, where the variant takes such calls."""
    if not (build.is_causal and subject.has_causal_offset):
        return
    one, short, long = subject.fit(1), subject.fit(3), subject.lengths[-1]
    module = subject.module(build)
    for query_len, key_len in ((long, subject.fit(long + 3)), (short, long), (one, short), (long, short), (short, one)):
        if query_len == key_len or max(query_len, key_len) > build.max_seq_len:
            continue
        inputs = subject.inputs(build, query_len, key_len=key_len, mask=subject.masks(key_len)[-1])
        try:
            infer(module, inputs)
        except (UnsupportedError, ValueError):
            if key_len > query_len:
                raise
            continue  # queries before every key may be refused
        yield inputs


@check("other key lengths work, also under a causal mask, or are refused as declared")
def _cross_attention(subject: Subject) -> Finding:
    capabilities = subject.capabilities
    if capabilities.causal and subject.form == "attention" and not subject.is_fixed:
        causal = replace(subject.build, is_cross=False, is_causal=True)
        for inputs in offset_calls(subject, causal):
            expect_equals_reference(subject.module(causal), inputs, "causal, aligned at the end")
            if _is_inexact(subject, subject.module(causal), inputs):
                raise Violation("causal, aligned at the end: differs from exact attention", inputs.words())
            if inputs.key_len > inputs.query_len:
                _expect_last_key_read(subject.module(causal), inputs.under(None))
        _expect_few_of_many(subject, causal, "causal, aligned at the end")
        query_len, key_len = subject.lengths[0], subject.lengths[-1]
        if not capabilities.cross_attention and capabilities.variable_seq_len and query_len < key_len:
            ask = partial(call, subject.module(causal), subject.inputs(causal, query_len, key_len=key_len))
            subject.refuses("cross_attention", "a causal call with more keys than queries", ask)
    build = replace(subject.build, is_cross=True, is_causal=False)
    if not (capabilities.cross_attention and capabilities.bidirectional):
        return subject.refuses("cross_attention", "building with is_cross=True", lambda: subject.make(build))
    if not capabilities.variable_seq_len:
        return not_applicable("has one fixed length, so L and S cannot differ")
    short, long = subject.fit(3), subject.lengths[-1]
    module = subject.module(build)
    for query_len, key_len in (
        (1, short),
        (short, subject.fit(1)),
        (short, 2 * short),
        (long, short),
        (short, long),
        (long, long),
    ):
        for mask in subject.masks(key_len):
            inputs = subject.inputs(build, subject.fit(query_len), key_len=key_len, mask=mask)
            expect_equals_reference(module, inputs, "cross-attention")
            if _is_inexact(subject, module, inputs):
                raise Violation("cross-attention differs from exact attention", inputs.words())
    _expect_few_of_many(subject, build, "cross-attention")
    return passed()


def _expect_last_key_read(module: Module, inputs: Inputs) -> None:
    """Check that the last query reads the last key: were positions aligned at the start, it would see one before it."""
    found = gradients(module, inputs, weigh=lambda output: weighted_sum(output[..., -1:, :]))
    read = [gradient for name in inputs.names[1:] if (gradient := found.by_name[name]) is not None]
    if not any(largest(gradient[..., -1:, :]) > 0 for gradient in read):
        message = "causal: the last query does not read the last key; positions must be aligned at the end"
        raise Violation(message, inputs.words())


def _expect_few_of_many(subject: Subject, build: BuildContext, what: str) -> None:
    """Check a few queries, and many keys at the longest of the spans; and many queries of few keys.

    Where steps are promised, one query at a time equals all at once, and what has no reference is held to itself: the
    last queries alone give what they give among as many as there are keys, at a long length as at a short one.
    """
    if build.is_causal and not subject.has_causal_offset:
        return
    few, short = subject.fit(FEW_QUERIES), subject.lengths[-1]
    for long_build, long in list(subject.probes(build))[-1:]:
        module = subject.module(long_build)
        for query_len, key_len in ((few, long), (long, few)) if not build.is_causal else ((few, long),):
            inputs = subject.inputs(long_build, query_len, key_len=key_len, batch_size=1)
            expect_equals_reference(module, inputs, what)
            if _is_inexact(subject, module, inputs):
                raise Violation(f"{what}: differs from exact attention", inputs.words())
        if subject.capabilities.decode == "none" or few >= short:
            continue
        alone, far_alone = (
            _off_among_many(subject, each, subject.module(each), few, length)
            for each, length in ((build, short), (long_build, long))
        )
        if alone <= 1 < far_alone:
            words = f"{few} queries of {long} keys give something else than among {long} queries"
            raise Violation(f"{what}: {words}, as they do not among {short}", subject.form)


@torch.no_grad()
def _off_among_many(subject: Subject, build: BuildContext, module: Module, few: int, length: int) -> float:
    """Return how far the last queries are off where they are alone, as a share of what rounding allows."""
    inputs = subject.inputs(build, length, batch_size=1)
    expected = call(module, inputs)[..., -few:, :]
    output = call(module, replace(inputs, tensors=(inputs.tensors[0][..., -few:, :], *inputs.tensors[1:])))
    return largest_error(output, expected) / rounding(expected, inputs.num_terms)


@check("fewer key/value heads work like repeated ones, or are refused")
def _grouped_query(subject: Subject) -> Finding:
    grouped = replace(subject.build, num_heads=4, num_kv_heads=2)
    if not subject.capabilities.grouped_query:
        return subject.refuses(
            "grouped_query", "building with num_kv_heads=2 of 4 heads", lambda: subject.make(grouped)
        )
    for build in subject.contexts():
        for num_heads, num_kv_heads in ((4, 1), (4, 2), (9, 3)):
            grouped = replace(build, num_heads=num_heads, num_kv_heads=num_kv_heads)
            length = subject.lengths[-1]
            module = subject.module(grouped, seq_len=length)
            for inputs in subject.calls(grouped, length):
                words = f"num_kv_heads={num_kv_heads} of {num_heads}"
                expect_equals_reference(module, inputs, words)
                _expect_gradients_of_reference(module, inputs, words)
                if subject.form == "mixer" or has_routing(module):  # a group may choose as one
                    continue
                plain = subject.module(replace(grouped, num_kv_heads=num_heads), seq_len=length)
                if any(True for _ in plain.parameters()):
                    continue  # other sizes, other parameters: only the reference can be compared
                query, *grouped_heads = inputs.tensors
                tensors = (query, *(expand_kv_heads(heads, num_heads) for heads in grouped_heads))
                repeated = replace(inputs, tensors=tensors)
                message = "grouped heads differ from the same heads repeated"
                expect_same(inputs, infer(module, inputs), infer(plain, repeated), message)
    return passed()


def _expect_gradients_of_reference(module: Module, inputs: Inputs, words: str) -> None:
    """Check that a key that several heads read gets the gradients of all of them."""
    if is_own_reference(module):
        return
    routing = routing_of(module, inputs)
    expected = gradients(module, inputs, partial(reference_results, routing=routing))
    found, allowed = (
        gradients(module, inputs).by_name,
        rounding(expected.size, inputs.num_terms, inputs.tensors[0].dtype),
    )
    for name in inputs.names:
        true, other = expected.by_name[name], found[name]
        if true is not None and (other is None or largest_error(other, true) > allowed):
            message = f"{words}: the gradient of {name} differs from the readable reference's"
            raise Violation(message, inputs.words())


_Layout = Callable[[Tensor], Tensor]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, -2).contiguous().transpose(1, -2)


def _head_of_longer(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, torch.full_like(tensor, 7.0)], dim=-2)[..., : tensor.shape[-2], :]


def _every_other(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, torch.full_like(tensor, 7.0)], dim=-1)[..., 0]


def _part_of_projection(tensor: Tensor) -> Tensor:
    return torch.cat([torch.full_like(tensor, 7.0), tensor], dim=-1)[..., tensor.shape[-1] :]


def _expanded(tensor: Tensor) -> Tensor:
    """Return a view whose entries are one; the values are the same where they are copies of the first."""
    return tensor[:1].expand_as(tensor)


def _columns(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def _odd_strides(tensor: Tensor) -> Tensor:
    """Return a view in which every dimension of size 1 has a stride of 2, which is as good as any other."""
    return tensor.as_strided(
        tensor.shape, [2 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    )


LAYOUTS: tuple[tuple[str, tuple[_Layout, ...]], ...] = (
    ("transposed", (_transposed,)),
    ("the head of a longer tensor", (_head_of_longer,)),
    ("every other element", (_every_other,)),
    ("expanded", (_expanded,)),
)
"""In words, and what is done to every tensor."""

UNLIKE_LAYOUTS: tuple[tuple[str, tuple[_Layout, ...]], ...] = (
    ("part of a projection, transposed, as columns", (_part_of_projection, _transposed, _columns)),
    ("transposed, expanded, as it is", (_transposed, _expanded, torch.Tensor.contiguous)),
    ("as it is, every other element, expanded", (torch.Tensor.contiguous, _every_other, _expanded)),
    ("as it is, as it is, every other element", (torch.Tensor.contiguous, torch.Tensor.contiguous, _every_other)),
)
"""In words, and what is done to each tensor, from the first one again where there are more."""


def _in_layout(inputs: Inputs, layout: tuple[_Layout, ...]) -> Inputs:
    tensors = tuple(change(tensor) for change, tensor in zip(cycle(layout), inputs.tensors, strict=False))
    mask = inputs.key_padding_mask
    return replace(inputs, tensors=tensors).under(None if mask is None else torch.stack([mask, ~mask], dim=-1)[..., 0])


@check("the layout of the inputs in memory does not matter")
def _non_contiguous(subject: Subject) -> Finding:
    length = subject.lengths[-1]
    for build in subject.contexts():
        module = subject.module(build, seq_len=length)
        for inputs in subject.calls(build, length):
            _expect_same_outputs(module, inputs, LAYOUTS)
        _expect_same_outputs(module, inputs, UNLIKE_LAYOUTS)
        _expect_same_gradients(module, subject.inputs(build, length))
        one = subject.fit(1)
        _expect_same_outputs(subject.module(build, seq_len=one), subject.inputs(build, one), LAYOUTS)
        _expect_odd_strides(subject, build)
    return passed()


def _expect_same_outputs(module: Module, inputs: Inputs, layouts: tuple[tuple[str, tuple[_Layout, ...]], ...]) -> None:
    copies = inputs.repeated(2)
    expected = infer(module, copies)
    for words, layout in layouts:
        message = f"another result for the same values in another layout: {words}"
        expect_same(inputs, infer(module, _in_layout(copies, layout)), expected, message)


def _expect_same_gradients(module: Module, inputs: Inputs) -> None:
    """Compare gradients of tensors in unlike layouts, and those that come from a gradient of one number, expanded."""

    def in_layout(module: Module, given: Inputs) -> tuple[Tensor, ...]:
        return results(module, _in_layout(given, UNLIKE_LAYOUTS[0][1]))

    def scaled(output: Tensor, *, upstream: Tensor) -> Tensor:
        return (output * upstream).sum()

    plain = gradients(module, inputs)
    ones = torch.ones_like(plain.output)
    for words, expected, found in (
        (UNLIKE_LAYOUTS[0][0], plain, gradients(module, inputs, in_layout)),
        (
            "the gradient of the output expanded",
            gradients(module, inputs, weigh=partial(scaled, upstream=ones)),
            gradients(module, inputs, weigh=torch.sum),
        ),
    ):
        allowed = rounding(expected.size, inputs.num_terms, plain.output.dtype)
        for name, value in expected.by_name.items():
            other = found.by_name[name]
            if value is not None and (other is None or largest_error(other, value) > allowed):
                raise Violation(
                    f"another gradient of {name} for the same values in another layout: {words}", inputs.words()
                )


def _expect_odd_strides(subject: Subject, build: BuildContext) -> None:
    """Check single tokens, and single numbers where they are admitted, in tensors whose strides say nothing."""
    length = subject.fit(1)
    narrow = replace(build, embed_dim=build.num_heads, head_dim=1)
    for sized in (build,) if subject.is_fixed or subject.form == "mixer" else (build, narrow):
        try:
            module = subject.module(sized, seq_len=length)
        except (ConfigError, UnsupportedError):
            continue
        inputs = subject.inputs(sized, length, batch_size=1)
        expected, output = infer(module, inputs), infer(module, inputs.map(_odd_strides))
        expect_same(inputs, output, expected, "another result for one token whose strides are 2")


@check("declared dtypes run, all others are refused")
def _dtype_support(subject: Subject) -> Finding:
    build = next(subject.contexts())
    length = subject.lengths[-1]
    for name in FLOAT_DTYPES:
        dtype = getattr(torch, name)
        if name in subject.capabilities.dtypes:
            inputs = subject.calls(build, length, dtype=dtype)[0]
            _expect_like_query(infer(subject.module(build, seq_len=length, dtype=dtype), inputs), inputs)
            continue
        module = subject.make(build, seq_len=length, dtype=dtype)
        inputs = subject.inputs(build, length, dtype=dtype)
        subject.refuses("dtypes", f"a call in {name}", partial(call, module, inputs))
    return passed(f"runs in {', '.join(subject.capabilities.dtypes)}")


CHECKS = (
    _shape_and_dtype,
    _odd_lengths,
    _batch_and_head_sizes,
    _cross_attention,
    _grouped_query,
    _non_contiguous,
    _dtype_support,
)
