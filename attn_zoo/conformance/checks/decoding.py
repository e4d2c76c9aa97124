"""Checks of the state that a variant keeps: reading in pieces equals one forward, states are values, and their size."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import partial
from itertools import pairwise
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.attention.decode import state_bytes
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.inputs import Inputs, expect_same
from attn_zoo.conformance.subject import Module, Subject, call, read_positions, routing_of
from attn_zoo.conformance.tolerance import expect_close, is_half, rounding
from attn_zoo.errors import UnsupportedError

NUM_CUTS = 3
"""Random ways of cutting a sequence; beside them every sequence is stepped through, and read at once."""

MOST_KEPT = 2
"""Times the size of its tensors that a state may keep in memory, as the parts of a larger tensor that they are."""

SHORT_ENDS = (0, 3, 5, 7, 8, 11)
"""Prefills shorter than what a short convolution keeps, one after another."""

FEW_STEPS = 4
"""Place among the lengths of that which is stepped through in every type."""

LONG_LEN = 300
"""Steps of the one long run: buffers have grown many times, and windows of 64, 128 or 256 have moved."""


def _pieces(length: int, seed: int) -> list[tuple[range, bool]]:
    """Cut `length` positions at random: to be read at once (True) or step by step, in turns."""
    source = random.Random(f"{length} {seed}")
    cuts = sorted(source.sample(range(1, length), min(length - 1, source.randint(1, 4))))
    ends = [0, *cuts, length]
    return [(range(ends[i], ends[i + 1]), (i + seed) % 2 == 0) for i in range(len(ends) - 1)]


def _ways(length: int, *, few: bool = False) -> Iterator[tuple[str, list[tuple[range, bool]]]]:
    """Yield ways to read a sequence, in words and in pieces; `few`: step by step, and cut once."""
    yield "step by step", [(range(length), False)]
    if length > 1:
        for seed in range(1 if few else NUM_CUTS):
            pieces = _pieces(length, seed)
            words = ", ".join(f"{'prefill' if at_once else 'steps'} of {len(piece)}" for piece, at_once in pieces)
            yield words, pieces
    if not few:
        yield "prefill", [(range(length), True)]
        if length > SHORT_ENDS[-1]:
            yield "short prefills", [(range(begin, end), True) for begin, end in pairwise((*SHORT_ENDS, length))]


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
    build = next((context for context in subject.contexts() if not context.is_cross), None)
    if build is None:
        return not_applicable("is asked to decode within one sequence only")
    module = subject.make(build)
    inputs = subject.inputs(build, 1, batch_size=1)
    start = partial(module.init_state, 1, device=subject.device, dtype=subject.dtype)
    finding = subject.refuses("decode", "init_state()", start)
    # Without a state there is no step to ask for.
    subject.refuses("decode", "prefill()", partial(read_positions, module, inputs, range(1), None, at_once=True))
    return finding


@check("a sequence cut anywhere, read by prefill and steps, equals the causal forward; or it is refused")
def _decode(subject: Subject) -> Finding:
    if subject.capabilities.decode == "none":
        return _refused_decode(subject)
    build = _causal_build(subject)
    if build is None:
        return not_applicable("decodes only in its causal form")
    length = subject.lengths[-1]
    if routing_of(subject.module(build, seq_len=length), subject.inputs(build, length)) is not None:
        return not_applicable("chooses by the data, and rounding may flip a choice in any type but float64")
    for position in subject.capabilities.positions:
        context = replace(build, position=position)
        for length in subject.lengths:
            inputs = subject.inputs(context, length, batch_size=3)
            is_first = position == subject.capabilities.positions[0]
            _expect_pieces(*_started(subject, context, inputs), position, few=not is_first)
    if not subject.is_shared_mixer:  # its state is that of an attention which is checked by itself
        _expect_long(subject, context)
        _expect_other_dtypes(subject, build)
        if subject.capabilities.attention_dropout and subject.dropout_p:
            _expect_no_dropout(subject, replace(build, dropout_p=subject.dropout_p))
    if subject.capabilities.grouped_query:
        grouped = replace(build, num_heads=4, num_kv_heads=2)
        length = next((length for length in subject.lengths if length > 2), subject.lengths[-1])
        inputs = subject.inputs(grouped, length, batch_size=5)
        _expect_pieces(*_started(subject, grouped, inputs), "none")
    if subject.form == "mixer" and subject.capabilities.cross_attention and not subject.is_fixed:
        _cross_decode(subject)
    return passed()


def _started(subject: Subject, build: BuildContext, inputs: Inputs) -> tuple[Module, Inputs, Callable[[], Any]]:
    """Return a module, its inputs and how to begin to read them; in cross-attention the state holds the context."""
    module = subject.module(build, seq_len=inputs.query_len)
    start = partial(module.init_state, inputs.batch_size, device=subject.device, dtype=subject.dtype)
    if build.is_cross:
        start = partial(start, context=inputs.tensors[1], key_padding_mask=inputs.key_padding_mask)
    return module, inputs, start


@torch.no_grad()
def _expect_long(subject: Subject, build: BuildContext) -> None:
    """Check one long sequence, stepped through, and nearly all of it read at once from a state.

    A type of 16 bits may gather rounding over so many steps.
    """
    length = subject.fit(LONG_LEN)
    if is_half(subject.dtype):
        return
    context = replace(build, max_seq_len=max(build.max_seq_len, length))
    module, inputs, start = _started(subject, context, subject.inputs(context, length, batch_size=1))
    expected = call(module, inputs)
    tolerance = rounding(expected, inputs.num_terms)
    begin = subject.fit(SHORT_ENDS[-1])
    for pieces in ([(range(length), False)], [(range(begin), True), (range(begin, length), True)]):
        end = 0
        for output, _ in _read(module, inputs, pieces, start()):
            rows, words = expected[..., end : end + output.shape[-2], :], f"{inputs.words()}: from position {end}"
            expect_close(output, rows, tolerance, "decoding differs from the causal forward", words)
            end += output.shape[-2]


@torch.no_grad()
def _expect_other_dtypes(subject: Subject, build: BuildContext) -> None:
    """Check a few steps in the types that are timed, and a prefill of all without a state, which begins one."""
    for dtype in subject.dtypes:
        length = subject.lengths[min(FEW_STEPS, len(subject.lengths) - 1)]
        module = subject.module(build, seq_len=length, dtype=dtype)
        inputs = subject.inputs(build, length, dtype=dtype)
        expected, start = call(module, inputs), module.init_state(2, device=subject.device, dtype=dtype)
        output = torch.cat([part for part, _ in _read(module, inputs, [(range(length), False)], start)], dim=-2)
        expect_same(inputs, output, expected, "decoding differs from the causal forward", ", step by step")
        output, _ = read_positions(module, inputs, range(length), None, at_once=True)
        expect_same(inputs, output, expected, "prefill differs from the causal forward", ", prefill without a state")


@torch.no_grad()
def _expect_no_dropout(subject: Subject, build: BuildContext) -> None:
    """Check that steps and prefill drop nothing in training mode: ways to read a sequence could not agree otherwise."""
    length = subject.lengths[-1]
    module, inputs = subject.make(build, seq_len=length), subject.inputs(build, length, batch_size=1)
    expected = call(module.eval(), inputs)
    module.train()
    for words, pieces in _ways(length, few=True):
        state = module.init_state(1, device=subject.device, dtype=subject.dtype)
        output = torch.cat([part for part, _ in _read(module, inputs, pieces, state)], dim=-2)
        message = "decoding in training mode differs from the causal forward in evaluation"
        expect_same(inputs, output, expected, message, f", dropout_p={build.dropout_p}, {words}")


@torch.no_grad()
def _expect_pieces(
    module: Module, inputs: Inputs, start: Callable[[], Any], position: str, *, few: bool = False
) -> None:
    expected = call(module, inputs)
    tolerance = rounding(expected, inputs.num_terms)
    for way, pieces in _ways(inputs.query_len, few=few):
        words = inputs.words() + ("" if position == "none" else f", {position}") + f", {way}"
        begin = 0
        for output, _ in _read(module, inputs, pieces, start()):
            end = begin + output.shape[-2]
            rows = expected[..., begin:end, :]
            if output.shape != rows.shape:
                raise Violation("reading from a state gives the wrong shape", f"{words}: {list(output.shape)}")
            message = f"{'prefill' if way == 'prefill' else 'decoding'} differs from the causal forward"
            expect_close(output, rows, tolerance, message, f"{words}: positions from {begin}")
            begin = end
        if begin != inputs.query_len:
            raise Violation("reading from a state gives the wrong shape", f"{words}: {begin} positions in all")


def _cross_decode(subject: Subject) -> None:
    build = replace(subject.build, is_causal=False, is_cross=True)
    for length in subject.lengths[:5]:
        for inputs in subject.calls(build, length):
            module, inputs, start = _started(subject, build, inputs)
            if not _can_start(start):
                return
            _expect_pieces(module, inputs, start, "none")


@torch.no_grad()
def _can_start(start: Callable[[], Any]) -> bool:
    """Return whether a mixer decodes across two sequences, which no capability says."""
    try:
        start()
    except UnsupportedError:
        return False
    return True


Sequence = tuple[Module, Inputs, Callable[[], Any]]
"""What is read, by which module, and how its state begins."""


@check("a decode state is a value: used twice, or in turns with others, it gives the same; or use is refused")
@torch.no_grad()
def _decode_states(subject: Subject) -> Finding:
    """Compare steps with steps: that these are right is for `decode` to say."""
    if subject.capabilities.decode == "none":
        return not_applicable("keeps no state")
    build = _causal_build(subject)
    if build is None:
        return not_applicable("decodes only in its causal form")
    length = next((length for length in subject.lengths if length >= 8), subject.lengths[-1])
    builds = [] if subject.is_shared_mixer else [build]
    if subject.form == "mixer" and subject.capabilities.cross_attention and not subject.is_fixed:
        builds.append(replace(subject.build, is_causal=False, is_cross=True))
    for context in builds:
        calls = subject.calls(context, length)  # padded last, which only a context can be
        pair = calls[-1 if context.is_cross else 0], subject.inputs(context, length, seed=2)
        first, second = (_started(subject, context, inputs) for inputs in pair)
        if not _can_start(first[2]):
            return passed() if context.is_cross else not_applicable("refuses to begin")
        _expect_turns(first, second)
        _expect_value(first, second[1])
        if not context.is_cross:
            _expect_parameters_read(subject, context, first)
    return passed()


def _stepped(sequence: Sequence, num_steps: int) -> tuple[list[Tensor], Any]:
    """Return what the first steps give, undisturbed, and the state after them."""
    module, inputs, start = sequence
    outputs, state = [], start()
    for at in range(num_steps):
        output, state = read_positions(module, inputs, range(at, at + 1), state, at_once=False)
        outputs.append(output)
    return outputs, state


def _expect_turns(*sequences: Sequence) -> None:
    """Check sequences that are read in turns, in no order, from states of their own."""
    expected = [_stepped(sequence, sequence[1].query_len)[0] for sequence in sequences]
    states, done = [start() for _, _, start in sequences], [0] * len(sequences)
    turns = [number for number, outputs in enumerate(expected) for _ in outputs]
    random.Random(0).shuffle(turns)
    for number in turns:
        module, inputs, _ = sequences[number]
        at = done[number]
        output, states[number] = read_positions(module, inputs, range(at, at + 1), states[number], at_once=False)
        message = "sequences that are decoded in turns disturb each other"
        detail = f": step {at} of one, with {done} steps read of each"
        expect_same(inputs, output, expected[number][at], message, detail)
        done[number] += 1


def _expect_value(sequence: Sequence, other: Inputs) -> None:
    """Check that a state may be used again, after it was continued with another token, as beam search does."""
    module, inputs, start = sequence
    expected, state = _stepped(sequence, inputs.query_len)[0], start()

    def expect(output: Tensor, before: Tensor, what: str) -> None:
        expect_same(inputs, output, before, "a state that is used again has changed", f": {what}")

    for at, before in enumerate(expected):
        here = range(at, at + 1)
        if at not in {0, 5, 6, len(expected) - 2}:  # 5 and 6: a buffer that doubles has room there
            output, state = read_positions(module, inputs, here, state, at_once=False)
            expect(output, before, f"step {at}, after others were tried before it")
            continue
        branch = replace(inputs, tensors=tuple(map(torch.Tensor.clone, inputs.tensors)))
        for index in range(3 if inputs.form == "attention" else 1):  # a context stays: it is in the state
            branch.tensors[index][..., at, :] = other.tensors[index][..., at, :]
        ways = ("another token", False), ("another token, by prefill", True)
        alone = [read_positions(module, branch, here, _stepped(sequence, at)[1], at_once=once)[0] for _, once in ways]
        read_positions(module, branch, here, state, at_once=False)
        try:
            output, after = read_positions(module, inputs, here, state, at_once=False)
        except UnsupportedError:  # a state that can be used once only must say so
            return
        expect(output, before, f"step {at}, after another token at it")
        for (words, at_once), output in zip(ways, alone, strict=True):
            again, _ = read_positions(module, branch, here, state, at_once=at_once)
            expect(again, output, f"{words} at step {at}, after it was made")
        state = after


def _expect_parameters_read(subject: Subject, build: BuildContext, sequence: Sequence) -> None:
    """Check that steps use the parameters of now: those loaded after the module was stepped."""
    source, inputs, _ = sequence
    if not source.state_dict():
        return
    target = subject.make(build, seq_len=inputs.query_len, torch_seed=1)
    start = partial(target.init_state, inputs.batch_size, device=subject.device, dtype=subject.dtype)
    _stepped((target, inputs, start), 1)
    target.load_state_dict(source.state_dict())
    expected, outputs = (_stepped((module, inputs, start), inputs.query_len)[0] for module in (source, target))
    for at, (output, before) in enumerate(zip(outputs, expected, strict=True)):
        expect_same(inputs, output, before, "steps do not use the parameters that were loaded", f": step {at}")


def state_tensors(state: object) -> list[Tensor]:
    """Return all tensors of a state (a tensor, a dataclass, tuple, list or dict of them)."""
    return [item for item in _items(state) if isinstance(item, Tensor)]


def _items(state: object) -> Iterator[object]:
    """Yield what a state holds in the end: tensors, and whatever else nothing here looks into."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        yield from _items(list(state.values()))
    elif isinstance(state, tuple | list):
        for item in state:
            yield from _items(item)
    elif is_dataclass(state):
        yield from _items([getattr(state, item.name) for item in fields(state)])
    else:
        yield state


_WEIGHED = Tensor | Number | str | Enum | torch.dtype | torch.device | None
"""What a state may hold in the end: tensors, and what surely holds none."""


@check("the decode state has the size that is claimed, keeps nothing else alive, and does not grow if recurrent")
@torch.no_grad()
def _decode_state_bytes(subject: Subject) -> Finding:
    kind, claim = subject.capabilities.decode, subject.variant.complexity.state_bytes
    if kind == "none":
        return not_applicable("keeps no state")
    build = _causal_build(subject)
    if build is None:
        return not_applicable("decodes only in its causal form")
    length, size = subject.lengths[-1], 0
    for dtype in dict.fromkeys((subject.dtype, subject.dtypes[-1])):  # a state may be kept in a wider type
        size = _expect_state_bytes(subject, build, length, dtype, few=dtype != subject.dtype)
    if subject.capabilities.grouped_query:
        _expect_state_bytes(subject, replace(build, num_heads=4, num_kv_heads=2), length, subject.dtype, few=True)
    return passed(f"{size} bytes after {length} tokens" + ("; claims nothing" if claim is None else ""))


def _expect_state_bytes(subject: Subject, build: BuildContext, length: int, dtype: torch.dtype, *, few: bool) -> int:
    """Check the size after every piece of all ways to read, or a few; return that after all tokens."""
    kind, claim = subject.capabilities.decode, subject.variant.complexity.state_bytes
    module = subject.module(build, seq_len=length, dtype=dtype)
    inputs, size = subject.inputs(build, length, dtype=dtype), 0
    for way, pieces in _ways(length, few=few):
        start = module.init_state(inputs.batch_size, device=subject.device, dtype=dtype)
        num_tokens, first = 0, 0
        for output, state in _read(module, inputs, pieces, start):
            if unknown := [type(item).__name__ for item in _items(state) if not isinstance(item, _WEIGHED)]:
                raise Violation(
                    "a decode state is not of tensors, dataclasses, tuples, lists and dicts, so nobody can weigh it",
                    f"{inputs.words()}, {way}: got {unknown[0]}",
                )
            num_tokens, size = num_tokens + output.shape[-2], state_bytes(state)
            first = first or size
            tensors = state_tensors(state)
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
            occupied, seen = sum(storages.values()), sum(tensor.nbytes for tensor in tensors)
            if occupied > MOST_KEPT * seen:
                raise Violation(
                    "the decode state is a view of more than it holds, and keeps all of that in memory",
                    f"{inputs.words()}, {way}: {seen} bytes of {occupied}, after {num_tokens} tokens",
                )
            if kind == "recurrent" and size != first:
                raise Violation(
                    'declares decode="recurrent" but its state grows',
                    f"{inputs.words()}, {way}: {first} bytes at first, {size} after {num_tokens} tokens",
                )
            if claim is None:
                continue
            shape = build.shape(inputs.batch_size, 1, num_tokens, subject.config, subject.form)
            claimed = claim(shape, dtype.itemsize)
            if size != claimed:
                raise Violation(
                    "the decode state has another size than claimed",
                    f"{inputs.words()}, {way}: {size} bytes after {num_tokens} tokens; claims {claimed}",
                )
            step_bytes = subject.variant.complexity.step_bytes
            if step_bytes is not None and not 0 <= (read := step_bytes(shape, dtype.itemsize)) <= size:
                raise Violation(
                    "a decoded token is claimed to read what its state has not",
                    f"{inputs.words()}: {read} of {size} bytes after {num_tokens} tokens (Complexity.step_bytes)",
                )
    return size


CHECKS = (_decode, _decode_states, _decode_state_bytes)
