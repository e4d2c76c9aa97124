"""Checks that a call leaves nothing behind: in the process, its arguments, its module, or outputs given before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.attention.generators import seed_generators
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.checks.randomness import seeded_call
from attn_zoo.conformance.inputs import Inputs, expect_same, padding_mask, random_like
from attn_zoo.conformance.subject import Module, Subject, call, count_forward, gradients, infer, results
from attn_zoo.conformance.tolerance import largest_error, rounding, same_shape_tolerance
from attn_zoo.discovery.global_state import TORCH_GENERATOR, changes, read_state, restored
from attn_zoo.errors import counted

NUM_REPEATS = 4
"""Calls that must agree; a counter that waits for more is found after the samples of a cell (`own_last`)."""
OTHER_SEED = 314159
"""Global seed of builds and calls that are watched: one that seeds the generator itself would hardly choose it."""
LEAST_WORK = 0.5
"""Of a call that was seen before, as a share of a new one."""


@contextmanager
def _unchanged(what: str, words: str, *, may_draw: bool = False) -> Iterator[None]:
    before = read_state()
    yield
    for name, how in changes(before).items():
        if name != TORCH_GENERATOR or not may_draw:
            raise Violation(f"{what} changes {name}", f"{words}: {how}" if how else words)


@check("building and calling leave settings of the process and its random generators as they were")
def _global_state(subject: Subject) -> Finding:
    with restored():
        seed_generators(OTHER_SEED)  # seeding a generator that stands there already would not show
        for build in subject.contexts():
            for length in subject.ends[::-1]:
                inputs = subject.calls(build, length, batch_size=1)[-1]
                words, draws = inputs.words(), not subject.capabilities.is_deterministic
                with _unchanged("building", words, may_draw=True):  # parameters come from torch's generator
                    module = subject.make(build, seq_len=length, torch_seed=OTHER_SEED)
                if subject.reseeds:
                    raise Violation(f"building seeds {TORCH_GENERATOR}", words)
                with _unchanged("a call", words, may_draw=draws):
                    infer(module, inputs)
                with _unchanged("a call with its gradients", words, may_draw=draws):
                    gradients(module, inputs)
                with _unchanged("a call in training", words, may_draw=True):
                    gradients(module.train(), inputs)
    return passed()


@check("arguments are not written to")
def _inputs_unchanged(subject: Subject) -> Finding:
    for module, inputs in subject.cases(subject.lengths[-1 if subject.is_fixed else -2 :], batch_size=1):
        named = dict(zip(inputs.names, inputs.tensors, strict=True))
        if inputs.key_padding_mask is not None:
            named["key_padding_mask"] = inputs.key_padding_mask
        before = {name: (tensor.clone(), tensor._version) for name, tensor in named.items()}
        infer(module, inputs)
        for name, tensor in named.items():
            old, version = before[name]
            if not torch.equal(tensor, old):
                raise Violation(f"changes its argument {name} in place", inputs.words())
            if tensor._version != version:
                raise Violation(f"writes to its argument {name} in place", inputs.words())
        _expect_unchanged_by_backward(module, inputs)
    return passed()


class _Sends(torch.autograd.Function):
    """A number whose backward sends a tensor itself; torch loads half a second of modules to be given one."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, upstream: Tensor) -> Tensor:
        ctx.upstream = upstream
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        del gradient
        return ctx.upstream, None


def _expect_unchanged_by_backward(module: Module, inputs: Inputs) -> None:
    """Check that a backward leaves the arguments and the gradient of the output, which residual paths share with it."""
    leaves = inputs.leaves()
    output = call(module, leaves)
    if not output.requires_grad:
        return
    upstream = random_like(output, 99)
    torch.autograd.grad(_Sends.apply(output, upstream), leaves.tensors, allow_unused=True)  # type: ignore[no-untyped-call]
    named = {
        **{name: pair for name, *pair in zip(inputs.names, leaves.tensors, inputs.tensors, strict=True)},
        "the gradient of its output": [upstream, random_like(output, 99)],
    }
    for name, (tensor, old) in named.items():
        if not torch.equal(tensor, old):
            raise Violation(f"a call with its backward changes {name} in place", inputs.words())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@check("an output shares memory with no argument, parameter, buffer or earlier output")
def _own_output(subject: Subject) -> Finding:
    for build in subject.contexts():
        for length in subject.ends:
            module = subject.make(build, seq_len=length)
            for inputs in subject.calls(build, length, batch_size=1)[::2]:
                for is_training in (False, True):
                    module.train(is_training)
                    with torch.set_grad_enabled(is_training):
                        _expect_own_output(module, inputs)
    return passed()


def _expect_own_output(module: Module, inputs: Inputs) -> None:
    first = call(module, inputs)
    if not first.isfinite().all():
        return  # equals nothing, not even itself: another check's finding
    owned = dict(zip(inputs.names, inputs.tensors, strict=True))
    owned |= {f"its parameter {name}": value for name, value in module.named_parameters()}
    owned |= {f"its buffer {name}": value for name, value in module.named_buffers()}
    for name, tensor in owned.items():
        if tensor.numel() and _storage(first) == _storage(tensor):
            raise Violation(f"the output shares its memory with {name}: a change of one changes both", inputs.words())
    kept = first.detach().clone()
    second = call(module, inputs.map(lambda tensor: tensor.flip(-2)))
    if _storage(second) == _storage(first) or not torch.equal(kept, first):
        raise Violation("a call writes to the output of the call before", inputs.words())


@check("neither output, gradients nor work of a call depend on other calls")
def _no_memory(subject: Subject) -> Finding:
    if subject.is_shared_mixer:
        return not_applicable("the shared mixer keeps nothing; the attention in it is checked by itself")
    for build in subject.contexts():
        length = subject.lengths[0 if subject.is_fixed else -1]  # some thirty calls, before each timing
        module = subject.make(build, seq_len=length)
        for inputs in subject.calls(build, length, batch_size=1 if subject.is_fixed else 2)[::2]:
            fresh = subject.make(build, seq_len=length)
            expected = infer(fresh, inputs).clone()
            if not expected.isfinite().all():
                continue  # another check's finding
            _expect_the_same(subject, build, module, inputs, expected)
    return passed()


@dataclass(frozen=True, slots=True)
class _Other:
    """A call that a careless cache takes for the one before.

    Args:
        what: is other about it.
        inputs: of the call.
        is_telling: an output that stays the same, bit for bit, is that of the call before.
    """

    what: str
    inputs: Inputs
    is_telling: bool = False


def _others(subject: Subject, build: BuildContext, module: Module, inputs: Inputs, expected: Tensor) -> list[_Other]:
    key_len, mask = inputs.key_len, inputs.key_padding_mask
    others = [_Other("other values", inputs.map(lambda tensor: 3.0 * tensor.flip(-2)), is_telling=True)]
    if mask is not None:
        has_effect = not torch.equal(infer(module, inputs.under(None)), expected)
        others.append(_Other("another mask", inputs.under(mask.flip(0, 1)), is_telling=has_effect))
        others.append(_Other("no mask", inputs.under(None)))
    elif "scattered" in subject.masks(key_len):
        mask = padding_mask(inputs.batch_size, key_len, "scattered", subject.device)
        others.append(_Other("a mask", inputs.under(mask)))
    size = 3 - inputs.batch_size
    batch = subject.inputs(build, inputs.query_len, key_len=key_len, batch_size=size, seed=5)
    others.append(_Other("another batch", batch))
    if subject.capabilities.variable_seq_len:
        shorter = subject.lengths[max(len(subject.lengths) - 2, 0)]
        others.append(_Other("another length", subject.inputs(build, shorter, seed=6)))
    return others


def _tolerance(subject: Subject, inputs: Inputs, expected: Tensor) -> float:
    if subject.capabilities.is_deterministic and subject.device == "cpu":
        return same_shape_tolerance(expected)
    return 2 * rounding(expected, inputs.num_terms)  # sums may run in another order each time


def _expect_the_same(subject: Subject, build: BuildContext, module: Module, inputs: Inputs, expected: Tensor) -> None:
    """Call again and again, with others between, and compare with what a module without a past gave."""
    tolerance = _tolerance(subject, inputs, expected)

    def repeat(after: str) -> None:
        change = largest_error(infer(module, inputs), expected)
        if not change <= tolerance:
            raise Violation("an output depends on the calls before", f"{inputs.words()}, {after}: by {change:.2g}")

    repeat("as the first call")
    for other in _others(subject, build, module, inputs, expected):
        fresh = subject.make(build, seq_len=inputs.query_len)
        alone, after = infer(fresh, other.inputs), infer(module, other.inputs)
        if not alone.isfinite().all():
            continue  # another check's finding
        change = largest_error(after, alone)
        words = f"{other.inputs.words()}, after a call with {inputs.words()} ({other.what})"
        if not change <= _tolerance(subject, other.inputs, alone):
            raise Violation("an output depends on the calls before", f"{words}: by {change:.2g}")
        # What all modules of the class share would give both the same.
        if other.is_telling and torch.equal(after, expected) and bool(expected.any()):  # zeros are others' finding
            raise Violation("a call gives the output of the call before", words)
        repeat(f"after a call with {other.what}")
    gradients(module, inputs)
    repeat("after a backward")
    _expect_own_backward(module, subject.make(build, seq_len=inputs.query_len), inputs)
    if build.dropout_p == 0:
        trained = seeded_call(subject.make(build, seq_len=inputs.query_len).train(), inputs, 0)
        gradients(module.train(), inputs)
        for count in range(NUM_REPEATS):
            change = largest_error(seeded_call(module, inputs, 0), trained)  # noise is for `modes` to name
            if not change <= tolerance:
                words = f"{inputs.words()}, called {count + 2} times in training: by {change:.2g}"
                raise Violation("an output depends on the calls before", words)
        module.train(subject.is_training)
        repeat("after calls in training")
    _expect_no_cache_by_address(module, inputs, expected, tolerance)
    for count in range(NUM_REPEATS):
        repeat(f"called {counted(count + 1, 'time')} more")
    if not subject.is_fixed:
        _expect_as_much_work(module, inputs)
        _expect_own_dtype(subject, build, inputs)


def _expect_own_backward(module: Module, other: Module, inputs: Inputs) -> None:
    """Check the backward of a call after further calls, of the module and of another one, as of the next layer."""
    expected = gradients(module, inputs)

    def with_others_between(module: Module, given: Inputs) -> tuple[Tensor, ...]:
        found, flipped = results(module, given), given.map(lambda tensor: 3.0 * tensor.detach().flip(-2)).leaves()
        for each in (module, other):
            results(each, flipped)
        return found

    found = gradients(module, inputs, with_others_between)
    allowed = rounding(expected.size, inputs.num_terms, inputs.tensors[0].dtype)
    for name, before in expected.by_name.items():
        after = found.by_name[name]
        if before is not None and not (after is not None and largest_error(after, before) <= 2 * allowed):
            words = f"{inputs.words()}: the gradient of {name}"
            raise Violation("a backward depends on calls after its own", words)


def _expect_own_dtype(subject: Subject, build: BuildContext, inputs: Inputs) -> None:
    """Check that a module may be cast after a call, as a trained one is: a table that it keeps must not stay behind."""
    dtype = subject.dtypes[-1]
    moved, fresh = (
        subject.make(build, seq_len=inputs.query_len),
        subject.make(build, seq_len=inputs.query_len, dtype=dtype),
    )
    infer(moved, inputs)
    given = inputs.map(lambda tensor: tensor.to(dtype))
    expected, output = infer(fresh, given), infer(moved.to(dtype), given)
    message = "what a module keeps of a call in another dtype is used again"
    if output.dtype != expected.dtype:
        raise Violation(message, f"{given.words()}: the output is {output.dtype}")
    expect_same(given, output, expected, message)


def _expect_as_much_work(module: Module, inputs: Inputs) -> None:
    """Compare the matrix products of a call seen before with those of a new one: a look-up would be timed as a call."""
    new = count_forward(module, inputs.map(lambda tensor: tensor.roll(1, -2)))
    infer(module, inputs)
    seen = count_forward(module, inputs)
    # What is chosen by the data may cost more or less.
    if new is not None and seen is not None and seen.products < LEAST_WORK * new.products:
        raise Violation(
            "a call that was seen before is looked up, not computed",
            f"{inputs.words()}: {seen.products} FLOPs of matrix products, {new.products} in a new call",
        )


def _expect_no_cache_by_address(module: Module, inputs: Inputs, expected: Tensor, tolerance: float) -> None:
    """Call with tensors at one address whose values change between the calls."""
    reused = inputs.map(lambda tensor: 2.0 * tensor)
    with torch.no_grad():
        call(module, reused)
        for tensor, values in zip(reused.tensors, inputs.tensors, strict=True):
            tensor.copy_(values)
        change = largest_error(call(module, reused), expected)
    if not change <= tolerance:
        raise Violation(
            "an output depends on the calls before",
            f"{inputs.words()}, given in the tensors of the call before with new values: by {change:.2g}",
        )


CHECKS = (_global_state, _inputs_unchanged, _own_output, _no_memory)
