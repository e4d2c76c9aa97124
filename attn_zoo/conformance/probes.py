"""What a few calls at a cell's own length can tell, before it is timed.

The gate compares whole outputs and gradients at short lengths. A path may be taken at long lengths only, and a kernel
may go wrong there: an index that overflows, a last block that is never written. The dense reference would cost more
than the cell. These probes cost about as much as the call itself:

* `own_reference`: where its pairs fit into memory, one sequence equals the readable reference;
* `own_modes`, `own_padding`, `own_causality`: the other mode, other tokens under the mask and in the future do not
  change the output;
* `own_prefix`: what follows a short sequence, in the future or as padding, does not matter to it, where that is
  promised: so a long output is held to a short one, and the gate holds that to the reference;
* `own_reach`, where a graph of its own fits: outputs depend on as many tokens as at a short length, and the last of
  them are written;
* `own_slope`: the gradients of the first timed call say the slope that a finite difference finds;
* `own_autocast`, where a model trains under it: outputs and gradients are those without it, up to bfloat16;
* `own_dropout`, where the call drops: it drops everywhere, without changing the mean, and where single draws can be
  seen at the rate asked for, each on its own.

The slope is asked only where it holds at a short length, and a jump is none: a choice by the data has no slope.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from attn_zoo.conformance.check import Violation
from attn_zoo.conformance.checks.dropout_rate import FEWEST, MOST_ROWS, expect_sound_draws
from attn_zoo.conformance.checks.modes import FEW_ROWS
from attn_zoo.conformance.inputs import Inputs, padded_rows, random_like
from attn_zoo.conformance.own_length import FirstCall
from attn_zoo.conformance.subject import (
    MaskKind,
    Module,
    Subject,
    call,
    call_reference,
    gradients,
    infer,
    is_own_reference,
    reference_results,
    results,
    routing_of,
)
from attn_zoo.conformance.tolerance import error_by_row, is_half, largest, largest_error, rounding, working_tolerance
from attn_zoo.errors import GateError, UnsupportedError, counted
from attn_zoo.measure.passes import grad_like

SHORT_LENS = (700, 131)
"""Tokens of the short calls: the gate has compared lengths like these with the reference."""
REFERENCE_PAIRS = 2**25
"""Scores (heads x queries x keys) up to which the readable reference is affordable: 2048 tokens with 8 heads."""
NUM_LAST = 16
"""Tokens in the future of all others, which are changed."""
MIN_NUDGES, MAX_NUDGES = 8, 64
"""Short calls with inputs that are rounded otherwise, where an output is off; the more, the fewer flips are missed."""
NUM_ROWS = 16
"""Neighbouring outputs of which the reach is counted together: rows apart reach much, each by a little."""
LEAST_REACH = 1 / 3
"""Of the tokens that the same outputs reach at the short length: what is chosen by the data differs."""
LEAST_WRITTEN = 0.5
"""Of the first outputs: where a fixed number of queries is served, few of many are, and zeros at the end no fault."""
MOST_UNDROPPED = 0.5
"""Of the rows of a head: where few keys are seen and normalised again, a draw may drop none of them."""
GRAPH_BYTES = 2**26
"""Of inputs and parameters; above, a cell without a graph is not called with one, which may need much more memory."""
LARGEST_BYTES = 2**28
"""Of inputs and parameters; above, no graph and no moved copies are made: a cell that just fits must not run out of
memory for its probes."""
STEPS = {torch.float64: 1e-5, torch.float32: 5e-3, torch.bfloat16: 0.0625, torch.float16: 0.0625}
"""Of the finite difference, for inputs of size 1: rounding and curvature are both small against the slope."""
SLOPE_ERRORS = {torch.float64: 1e-3, torch.float32: 0.01, torch.bfloat16: 0.15, torch.float16: 0.15}
"""Relative to the standard deviation of the slope over random directions."""


def probe(first: FirstCall, *, is_known: bool = False) -> tuple[str, ...]:
    """Probe a cell whose first call drew nothing at random; return the names of what was checked.

    With `is_known`, rows of the output were compared with exact attention: only its gradients are in question.

    Raises:
        GateError: a probe found something wrong.
    """
    if not first.capabilities.is_deterministic and not _repeats(first):
        return ()
    is_training, held = first.module.training, list[str]()
    try:
        for look in (_slope,) if is_known else (_reference, _other_mode, _prefix, _slope):
            held += look(first)
            first.module.train(is_training)
    finally:
        first.module.train(is_training)
    return tuple(held)


def _repeats(first: FirstCall) -> bool:
    """Return whether another call gives the same but for rounding, so that calls can be compared."""
    again = infer(first.module, first.inputs.map(torch.Tensor.detach))
    return largest_error(again, first.output) <= 2 * rounding(first.output, first.inputs.num_terms)


@torch.no_grad()
def probe_dropout(first: FirstCall) -> tuple[str, ...]:
    """Probe a cell whose first call dropped something; return the names of what was checked.

    Raises:
        GateError: a probe found something wrong.
    """
    if not first.capabilities.is_deterministic:
        return ()
    inputs, module = first.inputs.map(torch.Tensor.detach), first.module
    try:
        _expect_dropped(first, call(module.eval(), inputs))
        if first.inputs.form == "attention":
            expect_sound_draws(module, inputs, first.capabilities.dropout_unit)
    except Violation as violation:
        raise first.fault("own_dropout", str(violation)) from None
    finally:
        module.train()
    return ("own_dropout",)


def _expect_dropped(first: FirstCall, expected: Tensor) -> None:
    """Compare the first call with the same in evaluation."""
    step, rate = -(-first.inputs.query_len // MOST_ROWS), first.module.build.dropout_p
    output, expected = (each[:2, ..., ::step, :].double() for each in (first.output, expected))
    eps = torch.finfo(first.output.dtype).eps
    if rate < 4 * eps:
        return  # lost in rounding
    # What is kept is multiplied by 1 / (1 - p), so that a row without a drop changes too.
    rounded = 0.0 if is_half(first.output.dtype) else 1e-5
    has_output = expected.ne(0).any(-1)
    is_same = ((output - expected).abs().amax(-1) <= rounded * expected.abs().amax(-1)) & has_output
    share = (is_same.sum((0, -1)) / has_output.sum((0, -1)).clamp_min(1)).max()  # of the rows of a head
    if rate > 1e-3 and float(share) > MOST_UNDROPPED:
        raise Violation(f"dropout_p={rate} drops nothing in {float(share):.0%} of the rows of a head")
    size, num_tokens = float(expected.square().sum()), len(expected) * first.inputs.key_len
    if not size or num_tokens * min(rate, 1 - rate) < FEWEST:
        return  # a mechanism may draw once for each token of an entry
    factor = float((output * expected).sum()) / size
    # Rows may share what is dropped, or features.
    scatter = (output - factor * expected) * expected
    error = max(float(scatter.sum(axis).square().sum()) for axis in (-1, -2)) ** 0.5 / size
    if abs(factor - 1) > 6 * error + rate / 2:
        raise Violation(f"dropout_p={rate} multiplies the output by {factor:.3g}")


def probe_mixer(subject: Subject, seq_len: int, mask: MaskKind) -> tuple[str, ...]:
    """Call a new module of the subject forward and backward at `seq_len` tokens, and probe that call.

    Raises:
        GateError: a probe found something wrong.
    """
    module = subject.make(subject.build, seq_len=seq_len)
    inputs = subject.inputs(subject.build, seq_len, batch_size=1, mask=mask)
    found = gradients(module, inputs, weigh=lambda output: (output * grad_like(output)).sum())
    return probe(
        FirstCall(
            module=module,
            inputs=inputs,
            output=found.output,
            has_graph=True,
            gradients=found.by_name,
        )
    )


def probe_autocast(subject: Subject, seq_len: int, mask: MaskKind) -> tuple[str, ...]:
    """Compare a new module of the subject, in float32, under autocast to bfloat16, as it trains, with the same without.

    Raises:
        GateError: outputs or gradients differ by more than the roundings of bfloat16.
    """
    module = subject.make(subject.build, seq_len=seq_len)
    inputs = subject.inputs(subject.build, seq_len, batch_size=1, mask=mask)

    def under_autocast(module: Module, given: Inputs) -> tuple[Tensor, ...]:
        with torch.autocast(given.tensors[0].device.type, torch.bfloat16):  # a backward runs outside, as in training
            return results(module, given)

    with torch.autocast(inputs.tensors[0].device.type, torch.bfloat16):
        routing = routing_of(module, inputs)
    run = results if routing is None else partial(reference_results, routing=routing)
    expected, found = gradients(module, inputs, run), gradients(module, inputs, under_autocast)
    # Each value passes through a few roundings; a gradient that is zero by symmetry is rounding of the others.
    allowed = 16 * torch.finfo(torch.bfloat16).eps
    sizes = {name: value.double().norm() for name, value in expected.by_name.items() if value is not None}
    least = torch.stack([*sizes.values()]).norm() / 8
    by_row, words = error_by_row(found.output, expected.output), f"{subject.variant.name}: under autocast to bfloat16"
    if float((by_row > allowed * largest(expected.output)).double().mean()) > FEW_ROWS:
        message = f"{words} the output differs by {float(by_row.max()):.2g} ({inputs.words()})"
        raise GateError("own_autocast", message)
    for name, size in sizes.items():
        value, wanted = found.by_name[name], expected.by_name[name]
        error = math.inf if value is None or wanted is None else float((value.double() - wanted.double()).norm())
        if not error <= allowed * float(size + least):
            message = f"{words} the gradient of {name} differs by {error:.2g}, its norm is {float(size):.2g}"
            raise GateError("own_autocast", f"{message} ({inputs.words()})")
    return ("own_autocast",)


def _truncated(inputs: Inputs, count: int) -> Inputs:
    mask, short = inputs.key_padding_mask, inputs.map(lambda tensor: tensor.detach()[..., :count, :])
    return short.under(None if mask is None else mask[:, :count])


def _short_len(first: FirstCall) -> int:
    """Return the length of short calls, or 0 where the module takes none, or its own length is hardly longer."""
    multiple = first.capabilities.seq_len_multiple
    shorter = (-(-length // multiple) * multiple for length in SHORT_LENS)
    is_free = first.capabilities.variable_seq_len
    return next((short for short in shorter if is_free and 5 * short <= 4 * first.inputs.query_len), 0)


@torch.no_grad()
def _reference(first: FirstCall) -> list[str]:
    """Compare the first sequence with the readable reference."""
    inputs, module = first.inputs.entry(0).map(torch.Tensor.detach), first.module
    pairs = module.build.num_heads * inputs.query_len * inputs.key_len
    dtype = inputs.tensors[0].dtype  # of 16 bits, then it is computed twice
    if is_own_reference(module) or pairs * (1 + is_half(dtype)) > REFERENCE_PAIRS:
        return []
    module.eval()
    routing = routing_of(module, inputs)
    plain = call_reference(module, inputs, routing)
    expected, plain_error = plain, 0.0
    if is_half(dtype):
        wide = copy.deepcopy(module).float()
        expected = call_reference(wide, inputs.map(torch.Tensor.float), routing)
        plain_error = largest_error(plain, expected)
    tolerance = working_tolerance(plain_error, largest(expected), inputs.num_terms, dtype)
    error = largest_error(first.output[:1], expected)
    # In a wider type the reference makes rounding errors of the same size.
    if not error <= (tolerance if plain_error else 2 * tolerance) < math.inf:
        raise first.fault("own_reference", f"the output is off by {error:.2g} from the readable reference")
    return ["own_reference"]


def _other_mode(first: FirstCall) -> list[str]:
    """Call in the other mode, with a graph where that is affordable, with other padding, and another end if causal."""
    inputs, module = first.inputs.map(torch.Tensor.detach), first.module
    has_padding = inputs.key_padding_mask is not None
    has_future = inputs.is_causal and first.capabilities.causal is True and inputs.query_len > NUM_LAST
    if not module.build.dropout_p:  # training would drop
        module.train(not module.training)
    has_graph = _num_bytes(first) <= (LARGEST_BYTES if first.has_graph else GRAPH_BYTES)
    other = _with_other_padding(inputs)
    given = other.map(_with_another_end) if has_future else other
    try:
        with torch.set_grad_enabled(has_graph):
            given = given.leaves() if has_graph else given
            output = call(module, given)
    except UnsupportedError:  # a kernel without a backward, which a cell without a graph does not need
        if first.has_graph or not has_graph:
            raise
        given = given.map(torch.Tensor.detach)
        output = infer(module, given)
    tolerance = 2 * rounding(first.output, inputs.num_terms)
    change = _change(first, output, has_future=has_future)
    if change > tolerance and _change(first, infer(module, inputs)) <= tolerance:
        if has_padding and (change_of_padding := _change(first, infer(module, other))) > tolerance:
            words = f"an output changed by {change_of_padding:.2g} when tokens under key_padding_mask changed"
            raise first.fault("own_padding", words)
        if has_future:
            words = f"an output changed by {change:.2g} when the last {NUM_LAST} tokens changed"
            raise first.fault("own_causality", words)
    if change > tolerance:
        mode = "training" if module.training else "evaluation"
        graph = "with" if output.requires_grad else "without"
        raise first.fault("own_modes", f"{mode} {graph} a graph differs by {change:.2g} from what would be timed")
    held = ["own_modes", *["own_padding"] * has_padding, *["own_causality"] * has_future]
    return [*held, *_reach(first, given, output)]


def _change(first: FirstCall, output: Tensor, *, has_future: bool = False) -> float:
    """Return how far an output is from the first one, in rows that promise anything: not of padding, nor last."""
    by_row = error_by_row(output, first.output)
    mask = first.inputs.key_padding_mask
    if mask is not None and first.inputs.is_shared:
        by_row = by_row.masked_fill(mask, 0.0)
    return float((by_row[..., :-NUM_LAST] if has_future else by_row).max())


def _num_bytes(first: FirstCall) -> int:
    """Return the size of inputs and parameters."""
    return sum(each.numel() * each.element_size() for each in (*first.inputs.tensors, *first.module.parameters()))


def _with_other_padding(inputs: Inputs) -> Inputs:
    """Return the inputs with larger numbers in the padded tokens, those of their neighbours: nothing need be drawn."""
    mask, tensors = inputs.key_padding_mask, list(inputs.tensors)
    if mask is None:
        return inputs
    for index in inputs.key_side:
        old = tensors[index]
        new = old.roll(1, -2).mul_(-3.0)  # the only copy: a cell may just fit into memory
        tensors[index] = torch.where(padded_rows(old, mask), new, old, out=new)
    return replace(inputs, tensors=tuple(tensors))


def _with_another_end(tensor: Tensor) -> Tensor:
    return torch.cat([tensor[..., :-NUM_LAST, :], 3.0 * random_like(tensor[..., -NUM_LAST:, :], 31)], dim=-2)


def _reach(first: FirstCall, given: Inputs, output: Tensor) -> list[str]:
    """Count the tokens that some outputs depend on, and which of the last outputs are zero, beside a short call."""
    short_len = _short_len(first)
    if not output.requires_grad or not short_len:
        return []
    with torch.enable_grad():
        short = _truncated(given, short_len).leaves()
        short_output = call(first.module, short)
        expected = int(_reached(short_output, short, short_len).gt(0).sum())
    reach = _reached(output, given, short_len)
    # A small share of every later token may hide in the rounding of an output, and in no gradient.
    later, is_promised = reach[3 * short_len // 4 + NUM_ROWS :], given.is_causal and first.capabilities.causal is True
    if is_promised and (leak := largest(later)) > rounding(reach, first.inputs.num_terms):
        words = f"a gradient of {leak:.2g} reaches later tokens; of all others the largest is {largest(reach):.2g}"
        raise first.fault("own_causality", words)
    reached = int(reach.gt(0).sum())
    if reached < LEAST_REACH * expected:
        words = f"{NUM_ROWS} outputs depend on {reached} tokens; on {expected} of {short_len} in a shorter sequence"
        raise first.fault("own_reach", words)
    end, start = slice(-NUM_LAST, None), slice(short_len)
    written, wanted = _share_written(output, given, end), _share_written(short_output, short, end)
    if written < LEAST_REACH * wanted and _share_written(output, given, start) > LEAST_WRITTEN:
        words = f"{written:.0%} of the last {NUM_LAST} outputs are not zero; {wanted:.0%} in a shorter sequence"
        raise first.fault("own_reach", words)
    return ["own_reach"]


def _share_written(output: Tensor, inputs: Inputs, rows: slice) -> float:
    """Return the share of some outputs that are not all zero, padding left out; 1 where all of them are padding."""
    is_written = output.detach()[..., rows, :].ne(0).any(-1)  # [B, H, rows] or [B, rows]
    mask = inputs.key_padding_mask
    if mask is not None:
        is_token = ~mask[:, rows]
        is_written = is_written[(is_token[:, None] if is_written.dim() == 3 else is_token).expand_as(is_written)]
    return float(is_written.double().mean()) if is_written.numel() else 1.0


def _reached(output: Tensor, given: Inputs, short_len: int) -> Tensor:
    """Return how much some outputs of the first sequence depend on each token `[S]`, through whichever input.

    Late ones among the first `short_len`, so that causal ones may see much, and the same ones at any length.
    """
    start = 3 * short_len // 4
    some = output[0][..., start : start + NUM_ROWS, :]
    # A gradient of 16 bits must not vanish because a mean over many tokens gives each a small share.
    scale = 1024.0 if output.dtype == torch.float16 else 1.0
    found = torch.autograd.grad(some, given.tensors, scale * random_like(some, 7), allow_unused=True)
    reached = torch.zeros(given.key_len, dtype=output.dtype, device=output.device)
    for gradient in (found[index] for index in given.key_side):
        if gradient is not None:
            by_token = gradient[0].abs().amax(-1)  # [G, S] or [S]
            reached = reached.maximum(by_token.amax(0) if gradient.dim() == 4 else by_token)
    return reached


@torch.no_grad()
def _prefix(first: FirstCall) -> list[str]:
    """Compare the first outputs with those of a short call, where what follows them is promised not to matter."""
    short_len, capabilities, inputs = _short_len(first), first.capabilities, first.inputs.map(torch.Tensor.detach)
    is_state = inputs.is_causal and capabilities.decode != "none"  # a prefix read from a state equals the whole
    if not short_len or not (is_state or (capabilities.is_padding_invariant and capabilities.key_padding_mask)):
        return []
    short = _truncated(inputs, short_len)
    output = first.output
    if not is_state:
        hidden = torch.arange(inputs.key_len, device=output.device) >= short_len
        mask = hidden.expand(inputs.batch_size, -1)
        if inputs.key_padding_mask is not None:
            mask = mask | inputs.key_padding_mask
        output = call(first.module, inputs.under(mask))
    expected = call(first.module, short)
    is_off = _is_off(output[..., :short_len, :], expected, inputs)
    if is_off.any() and not _are_flips(is_off, first.module, short, expected):
        words = "come later" if is_state else "are padding"
        change = largest_error(output[..., :short_len, :], expected)
        rows = f"{counted(int(is_off.sum()), 'row')} of the first {short_len} outputs"
        raise first.fault("own_prefix", f"{rows} off by up to {change:.2g} when no more tokens {words}")
    return ["own_prefix"]


def _is_off(output: Tensor, expected: Tensor, inputs: Inputs) -> Tensor:
    """Return which rows differ by more than rounding."""
    return error_by_row(output, expected) > 2 * rounding(expected, inputs.num_terms)


def _are_flips(is_off: Tensor, module: Module, inputs: Inputs, expected: Tensor) -> bool:
    """Return whether rounding explains the rows that are off: a choice by the data stands near a tie there.

    Then it flips in these rows, at some tries, when all inputs are rounded otherwise; and not many more rows are off
    than flip at one try. A row seldom flips whose tie is as wide as rounding only just bridges: tries go on while more
    than one row in 16 has not flipped.
    """
    # Above the rounding of a score, below what tells in a smooth output.
    nudge = (2 if is_half(expected.dtype) else 32) * torch.finfo(expected.dtype).eps
    num_flips, num_off = torch.zeros_like(is_off, dtype=torch.float64), int(is_off.sum())
    num_nudges, num_stable = 0, num_off
    while num_nudges < MIN_NUDGES or (16 * num_stable > num_off and num_nudges < MAX_NUDGES):
        nudged = tuple(each * (1 + nudge * random_like(each, 80 + num_nudges).sign()) for each in inputs.tensors)
        num_flips += _is_off(call(module, replace(inputs, tensors=nudged)), expected, inputs)
        num_stable = int((is_off & num_flips.eq(0)).sum())
        num_nudges += 1
    at_once = float(num_flips.sum()) / num_nudges
    return 16 * num_stable <= num_off <= 2 * at_once + 6 * math.sqrt(at_once)


def _slope(first: FirstCall) -> list[str]:
    """Compare the gradients of the first call with a finite difference, where a short call's stand the comparison."""
    short_len = _short_len(first)
    if first.gradients is None or not short_len or _num_bytes(first) > LARGEST_BYTES:
        return []
    if routing_of(first.module, first.inputs) is not None:
        return []
    short = _truncated(first.inputs, short_len).leaves()
    leaves = {**dict(zip(short.names, short.tensors, strict=True)), **_parameters(first.module)}
    with torch.enable_grad():
        output = call(first.module, short)
    found = torch.autograd.grad(output, list(leaves.values()), grad_like(output), allow_unused=True)
    if _slope_error(first.module, short, output, dict(zip(leaves, found, strict=True)))[2] > 0.5:
        return []
    claimed, slope, error = _slope_error(first.module, first.inputs, first.output, first.gradients)
    if error > 1:
        # What is wrong with a gradient is as wrong for a step half as long; jumps are not.
        half_claimed, half_slope, _ = _slope_error(first.module, first.inputs, first.output, first.gradients, 0.5)
        if not 0.8 < 2 * (half_slope - half_claimed) / (slope - claimed) < 1.2:
            return []
        words = f"the gradients say a slope of {claimed:.4g}, a finite difference says {slope:.4g}"
        raise first.fault("own_slope", words)
    return ["own_slope"]


def _parameters(module: Module) -> dict[str, Tensor]:
    return {f"parameter {name}": value for name, value in module.named_parameters() if value.requires_grad}


@torch.no_grad()
def _slope_error(
    module: Module, inputs: Inputs, output: Tensor, gradients: Mapping[str, Tensor | None], length: float = 1.0
) -> tuple[float, float, float]:
    """Return the change that gradients say, the one found, and their difference as a share of what is allowed.

    All inputs and parameters move together along one random direction, by a step of relative `length`.
    """
    dtype, device = output.dtype, output.device
    generator = torch.Generator(device).manual_seed(1)
    leaves = {**dict(zip(inputs.names, inputs.tensors, strict=True)), **_parameters(module)}
    above, below = dict[str, Tensor](), dict[str, Tensor]()
    claimed, variance = 0.0, 0.0
    for name, leaf in leaves.items():
        size = 1.0 if name in inputs.names else float(leaf.detach().double().square().mean().sqrt())
        noise = STEPS[dtype] * size * length * torch.randn(leaf.shape, generator=generator, device=device, dtype=dtype)
        above[name], below[name] = leaf.detach() + noise, leaf.detach() - noise
        if (gradient := gradients.get(name)) is not None:
            moved = above[name] - below[name]  # as rounded
            claimed += float((gradient.double() * moved.double()).sum())
            variance += float(gradient.double().square().sum() * moved.double().square().mean())
    seed = grad_like(output).double()
    values = [float((_moved(module, inputs, moved).double() * seed).sum()) for moved in (above, below)]
    slope = values[0] - values[1]
    # The rounding of each output is independent of the others'.
    rounded = 3 * torch.finfo(dtype).eps * float((output.double() * seed).square().sum()) ** 0.5
    allowed = SLOPE_ERRORS[dtype] * variance**0.5 + rounded
    return claimed, slope, abs(slope - claimed) / allowed if allowed else float(slope != claimed)


def _moved(module: Module, inputs: Inputs, values: Mapping[str, Tensor]) -> Tensor:
    """Call the module with other values of inputs and parameters, which it does not keep."""
    prefix = "parameter "
    parameters = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    tensors = tuple(values[name] for name in inputs.names)
    output: Tensor = functional_call(module, parameters, tensors, {"key_padding_mask": inputs.key_padding_mask})
    return output
