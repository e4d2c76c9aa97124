"""Checks of what a variant says that it can do: refusals, positions, the path that ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from attn_zoo.attention import BuildContext
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed, refused
from attn_zoo.conformance.subject import Subject, call, infer
from attn_zoo.conformance.tolerance import largest_error, rounding
from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.kernels.trace import recording

UNKNOWN_OPTION = "no_such_option_exists"


def _nos(subject: Subject) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield (capability, request in words, request) for every declared no."""
    capabilities, base = subject.capabilities, subject.build
    forward = next(context for context in subject.contexts() if not context.is_cross)
    sized = replace(base, num_heads=4, num_kv_heads=2)
    requests: list[tuple[bool, str, str, BuildContext]] = [
        (capabilities.bidirectional, "bidirectional", "is_causal=False", replace(base, is_causal=False)),
        (bool(capabilities.causal), "causal", "is_causal=True", replace(base, is_causal=True)),
        (
            capabilities.cross_attention,
            "cross_attention",
            "is_cross=True",
            replace(base, is_causal=False, is_cross=True),
        ),
        (capabilities.grouped_query, "grouped_query", "num_kv_heads=2 of 4", sized),
        (capabilities.attention_dropout, "attention_dropout", "dropout_p=0.1", replace(forward, dropout_p=0.1)),
        ("rotary" in capabilities.positions, "positions", "rotary", replace(forward, position="rotary")),
        ("alibi" in capabilities.positions, "positions", "alibi", replace(forward, position="alibi")),
    ]
    for is_offered, capability, words, build in requests:
        if not is_offered:
            yield capability, f"building with {words}", partial(subject.make, build)
    module = subject.module(forward)
    if capabilities.seq_len_multiple > 1:
        ragged = subject.inputs(forward, capabilities.seq_len_multiple + 1)
        yield "seq_len_multiple", f"length {ragged.query_len}", lambda: call(module, ragged)
    if not capabilities.variable_seq_len:
        shorter = subject.inputs(forward, forward.max_seq_len - capabilities.seq_len_multiple)
        yield "variable_seq_len", f"length {shorter.query_len} of {forward.max_seq_len}", lambda: call(module, shorter)
    if capabilities.decode == "none":
        yield "decode", "init_state()", lambda: module.init_state(1, device=subject.device)
    if not capabilities.key_padding_mask:
        inputs = subject.inputs(forward, subject.lengths[-1] if capabilities.variable_seq_len else forward.max_seq_len)
        yield "key_padding_mask", "a mask", lambda: call(module, inputs.unpadded())


@check("every declared no is refused with UnsupportedError, unknown options too")
def _refusals(subject: Subject) -> Finding:
    try:
        subject.make(next(subject.contexts()), options={**subject.options, UNKNOWN_OPTION: 1})
    except ConfigError as error:
        if UNKNOWN_OPTION not in str(error):
            raise Violation("the error for an unknown option does not name it", str(error)) from None
    else:
        raise Violation("accepts an unknown option", f"{subject.form} form: {UNKNOWN_OPTION}=1")
    seen = []
    for capability, words, request in _nos(subject):
        subject.refuses(capability, words, request)
        seen.append(words.removeprefix("building with "))
    return refused(f"refuses {', '.join(seen)}") if seen else passed("refuses nothing but unknown options")


@check("declared position schemes act, all others are refused")
def _positions(subject: Subject) -> Finding:
    wanted: tuple[tuple[str, BuildContext], ...] = (
        ("rotary", replace(subject.build, position="rotary")),
        ("alibi", replace(subject.build, position="alibi")),
    )
    finding = not_applicable("rotary positions are applied before the attention sees its heads")
    for context in subject.contexts(with_cross=False):
        for name, template in wanted:
            build = replace(template, is_causal=context.is_causal)
            if name not in subject.capabilities.positions:
                asked = f"building with position={name!r}"
                finding = subject.refuses("positions", asked, partial(subject.make, build))
                continue
            if name == "rotary" and build.head_dim % 2:
                continue  # features turn in pairs
            # A few compressed keys may be one only where less than the longest sequence is given, and one has no rival.
            multiple = subject.capabilities.seq_len_multiple
            lengths = dict.fromkeys((subject.lengths[-1], build.max_seq_len // multiple * multiple))
            has_effect = [_have_an_effect(subject, build, context, length) for length in lengths]
            if name == "rotary" and subject.form == "attention":
                continue
            if not any(has_effect):
                raise Violation(
                    f"accepts {name} positions and ignores them", subject.inputs(build, max(lengths)).words()
                )
            finding = passed(f"admits {', '.join(subject.capabilities.positions)}")
    return finding


@torch.no_grad()
def _have_an_effect(subject: Subject, build: BuildContext, without: BuildContext, length: int) -> bool:
    """Return whether the positions of `build` change an output; raise `Violation` where it is not finite."""
    inputs = subject.inputs(build, length)
    output = call(subject.make(build, seq_len=length), inputs)
    if not output.isfinite().all():
        raise Violation(f"{build.position} positions give an output that is not finite", inputs.words())
    expected = call(subject.make(without, seq_len=length), inputs)
    return largest_error(output, expected) > rounding(expected, inputs.num_terms)


@check("the path that ran is the one that was asked for, every time")
def _path_ran(subject: Subject) -> Finding:
    build = next(subject.contexts())
    length = subject.lengths[-1]
    inputs = subject.inputs(build, length)
    seen: list[list[str]] = []
    module = subject.make(build, seq_len=length)
    for _ in range(2):
        with recording() as paths:
            infer(module, inputs)
        seen.append(paths)
    if seen[0] != seen[1]:
        raise Violation("two equal calls took different paths", f"{inputs.words()}: {seen[0]}, then {seen[1]}")
    # The shared mixer adds no path of its own, so each backend is asked for once.
    is_wrapped = subject.form == "mixer" and subject.variant.attention is not None
    backends = () if is_wrapped else subject.variant.backends
    if not backends:
        return passed(f"ran {', '.join(seen[0])}") if seen[0] else not_applicable("has one path and names none")
    ran = []
    dtype = torch.float32 if torch.float32 in subject.dtypes else subject.dtype
    for backend in backends:
        path = _path_of(subject, build, backend, dtype)
        if path is not None:
            ran.append(path)
    return passed(f"ran {', '.join(ran)}")


def _path_of(subject: Subject, build: BuildContext, backend: str, dtype: torch.dtype) -> str | None:
    """Return the path that ran when `backend` was asked for, or None where it was refused."""
    length = subject.lengths[-1]
    inputs = subject.inputs(build, length, dtype=dtype)
    try:
        module = subject.make(build, seq_len=length, dtype=dtype, options={**subject.options, "backend": backend})
        with recording() as paths:
            infer(module, inputs)
    except UnsupportedError:
        return None
    asked = f"{inputs.words()}, backend={backend!r}"
    if not paths:
        raise Violation("does not say which path ran", asked)
    if backend != "auto" and not any(backend in path for path in paths):
        raise Violation("another path ran than the one that was asked for", f"{asked}: ran {', '.join(paths)}")
    return ", ".join(paths)


CHECKS = (_positions, _refusals, _path_ran)
