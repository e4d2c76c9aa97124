"""The check of how much dropout drops, and that it draws anew for each weight, head, entry and call.

The output of an attention over heads is linear in the values. So values of zero but for a one in a place of its own for
some keys show the weights of these keys, once without dropout and once with it; their ratio is 0 or 1 / (1 - p). Where
single weights cannot be seen, in a mixer or where weights belong to summaries of keys, the spread of the output over
draws is left: for inverted dropout it grows as p / (1 - p).

A sum of independent products with mean zero over the root of the sum of their squares has about a standard normal
distribution, whatever their sizes. Six is the limit everywhere: a sound variant fails one comparison in 10^9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.checks.randomness import seeded_call
from attn_zoo.conformance.inputs import Inputs
from attn_zoo.conformance.subject import Module, Subject, gradients
from attn_zoo.conformance.tolerance import expect_close, largest, largest_error, same_shape_tolerance
from attn_zoo.metadata import DropoutUnit, Form

LENGTH, MANY_LENGTH = 256, 128
"""Of calls with few and with many copies."""
RATES = (0.5, 0.875)
"""Multiples of 2^-8, which every kernel's draws can hit exactly."""
EXTREME_RATES = (1e-6, 1 - 1e-6)
COPIES, MANY_COPIES = 8, 96
"""Entries of a batch: where each query draws for itself, and where all draws of an entry may be one."""
LIMIT = 6.0
"""In standard errors."""
FEWEST = 40
"""Terms of a sum that is compared with the limit, which fewer than 36 equal ones cannot reach."""
MOST_ROWS = 4096
"""Queries of a cell's own call whose draws are looked at: the last."""
RATE_STEP = 2.0**-8
"""How far the rate of a cell may be from what was asked for: some kernels draw eight bits."""
SPREAD_FACTOR = 2.0
"""How far the growth of the spread may be off: a mechanism need not be linear in what it drops."""


@dataclass(frozen=True, slots=True)
class _Draws:
    """Two calls of one module in training, each `[N, H, L, C]`: C keys of H heads, or features and one H in a mixer.

    Args:
        rate: that was asked for.
        expected: output without dropout, of which every entry of the batch is a copy.
        first: output of the first call.
        second: of the second.
        words: of the call.
    """

    rate: float
    expected: Tensor
    first: Tensor
    second: Tensor
    words: str

    @property
    def is_visible(self) -> Tensor:
        """Where the expected output is large enough for a ratio."""
        size = self.expected.abs()
        return size > 1e-3 * size.max()

    def ratio(self, output: Tensor) -> Tensor:
        """Return an output over the expected one; 1 where nothing is visible."""
        is_visible = self.is_visible
        return torch.where(is_visible, output / torch.where(is_visible, self.expected, 1.0), 1.0)


def _num_keys(inputs: Inputs) -> int:
    """Return how many keys are shown: two features for each, where there are two."""
    return max(1, min(inputs.tensors[-1].shape[-1] // 2, inputs.key_len))


def _probe(inputs: Inputs) -> Inputs:
    """Return the first entry; in attention form its values are ones, each in the features of one key."""
    inputs, length = inputs.entry(0), inputs.key_len
    if inputs.form == "mixer":
        return inputs
    query, key, value = inputs.tensors
    # Near and far, and early enough for causal queries; then the last ones, which the last queries see in any window.
    powers = [0, *(2**power for power in range((length - 1).bit_length()))]
    keys, count = list(dict.fromkeys([*powers, *range(length - 1, -1, -1)])), _num_keys(inputs)
    value = torch.zeros_like(value)
    for feature in range(min(2 * count, value.shape[-1])):
        value[:, :, keys[feature % count], feature] = 1.0
    return replace(inputs, tensors=(0.1 * query, 0.1 * key, value))


@check("drops at the rate asked for, each draw independent of all others unless declared, and stays finite")
def _dropout_rate(subject: Subject) -> Finding:
    if not subject.capabilities.attention_dropout:
        return not_applicable("has no dropout")
    if subject.is_shared_mixer:
        return not_applicable("the shared mixer drops nothing; the attention in it is checked by itself")
    is_seen = False
    for context in subject.contexts(with_cross=False):
        length = subject.fit(LENGTH)
        is_seen = _expect_sound_draws(subject, replace(context, max_seq_len=length), length)
        _expect_finite(subject, context)
        if subject.form == "attention" and is_seen:
            _expect_sound_draws_elsewhere(subject, replace(context, max_seq_len=length, dropout_p=RATES[0]), length)
            for build, span in list(subject.probes(context))[-1:]:
                for dtype in subject.dtypes:
                    module = subject.make(replace(build, dropout_p=RATES[0]), seq_len=span, dtype=dtype)
                    inputs = subject.inputs(build, span, batch_size=1, dtype=dtype)
                    expect_sound_draws(module, inputs, subject.capabilities.dropout_unit)
    return passed(f"seen in {'single draws' if is_seen else 'the spread of the output'} at {length} tokens")


def _expect_sound_draws_elsewhere(subject: Subject, build: BuildContext, length: int) -> None:
    """Check one sequence across two, and one whose heads share keys."""
    can, builds = subject.capabilities, list[BuildContext]()
    if can.cross_attention and not build.is_causal:
        builds.append(replace(build, is_cross=True))
    if can.grouped_query:
        builds.append(replace(build, num_heads=4, num_kv_heads=2))
    for other in builds:
        module, inputs = subject.make(other, seq_len=length), subject.inputs(other, length, batch_size=1)
        expect_sound_draws(module, inputs, can.dropout_unit)


def _expect_sound_draws(subject: Subject, build: BuildContext, length: int) -> bool:
    """Check one direction; return whether single draws can be seen."""

    def draw(probe: Inputs, rate: float, copies: int) -> _Draws:
        plain = subject.make(replace(build, dropout_p=0.0), seq_len=probe.query_len).eval()
        module = subject.make(replace(build, dropout_p=rate), seq_len=probe.query_len)
        module.load_state_dict(plain.state_dict())
        return _draws(plain, module, probe, subject.capabilities.dropout_unit, rate, copies)

    probe, shorter = (_probe(subject.inputs(build, each, batch_size=1)) for each in (length, subject.fit(MANY_LENGTH)))
    few = [draw(probe, rate, COPIES) for rate in RATES]
    levels = [_level(draws) for draws in few]
    is_seen = None not in levels
    by_query = is_seen and subject.capabilities.dropout_unit != "tokens"
    many = few[0]
    if not by_query:  # there are fewer draws, or sums of them that depend on each other
        many = draw(shorter, RATES[0], MANY_COPIES)
    if is_seen:
        for draws in (many, few[1]):
            _expect_rate(draws, _level(draws) or 0.0, by_query=by_query)
    else:
        _expect_growth([many, draw(shorter, RATES[1], MANY_COPIES)], subject.capabilities.dropout_unit)
    _expect_independence(many, subject.capabilities.dropout_unit, subject.form, is_seen=is_seen, by_query=by_query)
    return is_seen


def expect_sound_draws(module: Module, inputs: Inputs, unit: DropoutUnit) -> bool:
    """Check the draws of one sequence at the rate of a module; return whether single ones can be seen.

    The module is in attention form, and is left in training mode.

    Raises:
        Violation: something else is dropped than is declared.
    """
    rate = module.build.dropout_p
    draws = _draws(module.eval(), module, _probe(inputs), unit, rate, 1)
    level = _level(draws)
    if level is None or int(draws.is_visible.sum()) * min(rate, 1 - rate) < FEWEST:
        return False
    expected, first, second = (each[..., -MOST_ROWS:, :] for each in (draws.expected, draws.first, draws.second))
    draws = replace(draws, expected=expected, first=first, second=second)
    by_query = unit != "tokens"
    _expect_rate(draws, level, by_query=by_query, slack=RATE_STEP)
    _expect_independence(draws, unit, inputs.form, is_seen=True, by_query=by_query)
    return True


def _draws(plain: Module, module: Module, probe: Inputs, unit: DropoutUnit, rate: float, copies: int) -> _Draws:
    """Draw twice from a module that drops at `rate`, with copies of the probe in a call; `plain` is it without dropout.

    Raises:
        Violation: nothing is dropped, or in evaluation too, or something else than is declared.
    """
    inputs = probe.repeated(copies)
    words = f"{inputs.words()}, dropout_p={rate}"
    expected = seeded_call(plain, probe, 0).clone()
    tolerance = same_shape_tolerance(expected)
    expect_close(seeded_call(module.eval(), probe, 0), expected, tolerance, "dropout acts in evaluation", words)
    nothing = replace(probe, tensors=(*probe.tensors[:2], torch.zeros_like(probe.tensors[-1])))
    offset = seeded_call(plain, nothing, 0) if probe.form == "attention" else None
    first, second = (seeded_call(module.train(), inputs, seed).clone() for seed in (1, 2))
    heads = first.shape[1] if probe.form == "attention" else 1
    for head in range(heads if copies > 1 else 0):  # a few weights of one copy may all be kept
        one = (first, expected) if probe.form == "mixer" else (first[:, head], expected[:, head])
        if largest_error(one[0], one[1].expand_as(one[0])) <= same_shape_tolerance(one[1]):
            raise Violation("dropout does nothing in training", f"{words}, head {head}")
    if probe.form == "mixer":
        return _Draws(rate, expected[:, None].expand_as(first[:, None]), first[:, None], second[:, None], words)
    if offset is not None and largest(offset):  # of tokens that the variant adds: the same seed, the same draws
        nothing = nothing.repeated(copies)
        expected = expected - offset
        first, second = first - seeded_call(module, nothing, 1), second - seeded_call(module, nothing, 2)
    count = _num_keys(inputs)
    shown, twin = slice(count), slice(count, 2 * count) if expected.shape[-1] > 1 else slice(count)
    are_twins = largest_error(expected[..., shown], expected[..., twin]) <= tolerance
    if are_twins and unit != "outputs" and largest_error(first[..., shown], first[..., twin]) > 8 * tolerance:
        raise Violation("dropout drops numbers of the output, not weights", words)
    first, second = first[..., shown], second[..., shown]
    return _Draws(rate, expected[..., shown].expand_as(first), first, second, words)


def _level(draws: _Draws) -> float | None:
    """Return the one ratio that is found beside 0, or None where there are others: single draws cannot be seen."""
    found = draws.ratio(draws.first)[draws.is_visible].double()
    kept = found[found.abs() > _slack(found)]
    if not kept.numel():
        return 0.0
    level = float(kept.median())
    return level if float((kept - level).abs().max()) <= _slack(draws.expected) * abs(level) else None


def _slack(tensor: Tensor) -> float:
    """Return the relative error of a ratio: of 16-bit draws, and of rounding."""
    return max(1e-3, 64 * torch.finfo(tensor.dtype).eps)


def _expect_rate(draws: _Draws, level: float, *, by_query: bool, slack: float = 0.0) -> None:
    """Check the factor of what is kept, and the share of it."""
    wanted, kept = 1 / (1 - draws.rate), 1 - draws.rate
    is_kept = draws.ratio(draws.first).abs() > 0.5 * abs(level)
    share = float(is_kept[draws.is_visible].double().mean())
    kept = min(max(share, kept - slack), kept + slack)
    if abs(_in_errors(torch.where(draws.is_visible, is_kept.double() - kept, 0.0), by_query=by_query)) > LIMIT:
        raise Violation("dropout drops another share than was asked for", f"{draws.words}: {1 - share:.4f}")
    if abs(level - wanted) > _slack(draws.expected) * wanted:
        said = f"{draws.words}: by {level:.4g}, expected 1 / (1 - p) = {wanted:.4g}"
        raise Violation("dropout multiplies what it keeps by another factor", said)


def _in_errors(products: Tensor, *, by_query: bool) -> float:
    """Return a sum over `[N, H, L, C]` in its standard errors; what is drawn together counts as one term."""
    terms = products.double().sum(3 if by_query else (2, 3)).flatten()
    if int(terms.count_nonzero()) < FEWEST:
        return 0.0
    return float(terms.sum() / terms.square().sum().sqrt())


def _deviations(output: Tensor, draws: _Draws, *, is_seen: bool) -> Tensor:
    """Return `[N, H, L, C]` with mean zero: of single draws, or half as many differences of entries, for any sums."""
    return draws.ratio(output) - 1 if is_seen else output[::2] - output[1::2]


def _expect_independence(draws: _Draws, unit: DropoutUnit, form: Form, *, is_seen: bool, by_query: bool) -> None:
    """Check that calls, entries, heads, queries and keys have draws of their own, as far as is declared."""
    if draws.first.shape[0] > 1 and torch.equal(draws.first[1:], draws.first[:-1]):
        raise Violation("dropout draws the same for all entries of the batch", draws.words)
    is_mixer = form == "mixer"
    axes = ["entries of the batch", "heads"]
    if unit in {"weights", "outputs"} or (unit == "summaries" and not is_mixer):
        axes.append("positions" if is_mixer else "queries")
    if is_seen and len(axes) == 3 and unit != "summaries":
        axes.append("features" if is_mixer else "keys")
    elif is_seen and unit == "tokens" and not is_mixer:
        axes = [*axes, "", "keys"]
    one, two = (_deviations(each, draws, is_seen=is_seen) for each in (draws.first, draws.second))
    compared = [("in every call", one * two)]
    for axis, name in enumerate(axes):
        size = one.shape[axis]
        for lag in (2**power for power in range((size - 1).bit_length()) if name):
            ends = one.narrow(axis, lag, size - lag), one.narrow(axis, 0, size - lag)
            compared.append((f"for {name} {lag} apart", ends[0] * ends[1]))
    rare = min(draws.rate, 1 - draws.rate) ** 2 if is_seen else 1.0  # two that coincide, of those that are rarer
    for where, products in compared:
        if int(products.count_nonzero()) * rare < FEWEST:
            continue
        if abs(_in_errors(products, by_query=by_query)) > LIMIT:
            raise Violation(f"dropout draws the same or the opposite {where}", draws.words)


def _expect_growth(every: list[_Draws], unit: DropoutUnit) -> None:
    """Check that the spread grows with the rate as p / (1 - p); to its square where draws multiply."""
    spreads = [float((draws.first - draws.expected).double().square().mean()) for draws in every]
    found, wanted = spreads[1] / spreads[0], RATES[1] / (1 - RATES[1]) / (RATES[0] / (1 - RATES[0]))
    most = wanted * (wanted if unit == "summaries" else SPREAD_FACTOR)  # a summary may be made of summaries
    if not wanted / SPREAD_FACTOR < found < most:
        raise Violation(
            "the spread of the output over draws of dropout belongs to another rate",
            f"{every[1].words}: {found:.3g} times that at {RATES[0]}; p / (1 - p) says {wanted:.3g} times",
        )


def _expect_finite(subject: Subject, context: BuildContext) -> None:
    length = subject.lengths[-1]
    for rate in EXTREME_RATES:
        module = subject.make(replace(context, dropout_p=rate), seq_len=length).train()
        inputs = subject.inputs(context, length)
        with torch.random.fork_rng(devices=None if inputs.tensors[0].is_cuda else []):
            found = gradients(module, inputs)
        if found.not_finite:
            raise Violation(f"the {found.not_finite} is not finite", f"{inputs.words()}, dropout_p={rate}")


CHECKS = (_dropout_rate,)
