"""Checks of dropout, of seeds, and of saved parameters."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from safetensors.torch import load, save
from torch import Tensor

from attn_zoo.attention.generators import seed_generators
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.checks.backward import wrong_slope
from attn_zoo.conformance.inputs import Inputs
from attn_zoo.conformance.subject import Module, Subject, gradients, infer, results
from attn_zoo.conformance.tolerance import expect_close, is_half, largest, largest_error, same_shape_tolerance

COPIES, FEW_COPIES = 32, 8
"""Draws of a call; in the gate few, where they drop enough."""
LEAST_DROPS = 20
"""Of a call on average, if one draw decides on each token of a head: then it does not happen that none is dropped."""
NUM_CALLS, FEW_CALLS = 32, 2
"""Whose draws, with all copies, have the right mean; in the gate fewer, and no more than tell."""
FEWEST = 256
"""Draws whose mean is compared number by number: among fewer none may be dropped."""


def seeded_call(module: Module, inputs: Inputs, seed: int) -> Tensor:
    """Return the output without a graph; what is drawn depends on `seed` alone."""
    with torch.random.fork_rng(devices=None if inputs.tensors[0].is_cuda else []):
        seed_generators(seed)
        return infer(module, inputs)


@check("acts in training without bias, not in evaluation, or is refused")
def _dropout(subject: Subject) -> Finding:
    if not subject.dropout_p:
        return not_applicable("nothing is dropped")
    length = subject.lengths[0 if subject.is_fixed else len(subject.lengths) // 2]
    dropout_p = subject.dropout_p
    if not subject.capabilities.attention_dropout:
        build = replace(next(subject.contexts()), dropout_p=dropout_p)
        return subject.refuses("attention_dropout", f"dropout_p={dropout_p}", lambda: subject.make(build))
    for context in subject.contexts():
        build = replace(context, dropout_p=dropout_p)
        plain = subject.make(replace(context, dropout_p=0.0), seq_len=length).eval()
        module = subject.make(build, seq_len=length).eval()
        module.load_state_dict(plain.state_dict())
        for inputs in subject.calls(build, length)[::2]:
            expected = seeded_call(plain, inputs, 0)
            words = f"{inputs.words()}, dropout_p={dropout_p}"
            tolerance = same_shape_tolerance(expected)
            expect_close(seeded_call(module, inputs, 0), expected, tolerance, "dropout acts in evaluation", words)
            output, message = seeded_call(plain.train(), inputs, 0), "training mode changes the output without dropout"
            expect_close(output, expected, tolerance, message, f"{inputs.words()}, dropout_p=0")
            plain.eval()
            module.train()
            # One draw at a small rate may drop nothing that matters.
            least = dropout_p * length * (1 if subject.capabilities.dropout_unit == "tokens" else build.num_heads)
            copies = inputs.repeated(FEW_COPIES if subject.is_fixed and least * FEW_COPIES >= LEAST_DROPS else COPIES)
            first, second = seeded_call(module, copies, 1), seeded_call(module, copies, 2)
            # In 16 bits a share of one among many keys is lost in the tolerance; the copies among each other are not.
            slack, whole = (0.0, first[:1]) if is_half(first.dtype) else (tolerance, expected[:1])
            if largest_error(first, whole.expand_as(first)) <= slack:
                raise Violation("dropout does nothing in training", words)
            if least * copies.batch_size >= LEAST_DROPS:
                if torch.equal(first, second):
                    raise Violation("dropout drops the same weights in every call", words)
                if torch.equal(first, first[:1].expand_as(first)):
                    raise Violation("dropout drops the same weights in every entry of the batch", words)
            draws, true = torch.cat([first, second]).double(), expected[0].double()
            most = (FEW_CALLS if subject.is_fixed else NUM_CALLS) * COPIES
            for seed in range(3, most + 1):
                if draws.shape[0] >= most or (subject.is_fixed and _is_precise(draws, true, dropout_p)):
                    break
                draws = torch.cat([draws, seeded_call(module, copies, seed).double()])
            # What a mixer makes of summaries need not be linear in what was dropped of them.
            if subject.form == "attention" or subject.capabilities.dropout_unit != "summaries":
                _expect_unbiased(draws, true, words)
            if dropout_p > 4 * torch.finfo(first.dtype).eps:  # less is lost in rounding
                _expect_unbiased_in_all(draws, true, dropout_p, words)
            if subject.dtype == torch.float64:
                _expect_same_mask_in_backward(module, inputs, words)
            module.eval()
    return passed()


def _expect_unbiased(draws: Tensor, expected: Tensor, words: str) -> None:
    """Check that the mean of many draws approaches the output without dropout, within six standard errors and 5 %."""
    if draws.shape[0] < FEWEST:
        return
    error = (draws.mean(0) - expected).abs()
    allowed = 6 * draws.std(0) / draws.shape[0] ** 0.5 + 0.05 * largest(expected)
    if bool((error > allowed).any()):
        raise Violation(
            "dropout changes the mean of the output",
            f"{words}: the mean of {draws.shape[0]} draws is off by {float(error.max()):.2g}",
        )


def _factors(draws: Tensor, expected: Tensor) -> tuple[Tensor, float]:
    """Return the factor of each whole output, and the standard error of their mean."""
    factors = (draws * expected).flatten(1).sum(1) / expected.square().sum()
    return factors, float(factors.std()) / draws.shape[0] ** 0.5


def _is_precise(draws: Tensor, expected: Tensor, dropout_p: float) -> bool:
    """Return whether a factor of 1 - p would tell."""
    return 6 * _factors(draws, expected)[1] < dropout_p / 4


def _expect_unbiased_in_all(draws: Tensor, expected: Tensor, dropout_p: float, words: str) -> None:
    """Check the mean factor of a whole output: 1 - p where what is kept is not scaled, else 1.

    The half of that difference is left to a mechanism that is not linear in what it drops.
    """
    factors, error = _factors(draws, expected)
    if int(((factors - factors.median()).abs() > 0.1 * factors.std()).sum()) < draws.shape[0] / 4:
        return  # draws that are rarely others say little
    if not abs(float(factors.mean()) - 1) <= 6 * error + dropout_p / 2:
        raise Violation(
            "dropout changes the mean of the output",
            f"{words}: by a factor of {float(factors.mean()):.3g} over {draws.shape[0]} draws",
        )


def _expect_same_mask_in_backward(module: Module, inputs: Inputs, words: str) -> None:
    """Check the gradient of a draw with a finite difference of the same draw: a recomputed mask must be the same."""

    def same_draw(module: Module, given: Inputs) -> tuple[Tensor, ...]:
        with torch.random.fork_rng(devices=None if given.tensors[0].is_cuda else []):
            seed_generators(1)
            return results(module, given)

    def slopes_off() -> object:
        found = gradients(module, inputs, same_draw).by_name
        return wrong_slope(module, inputs, {name: found[name] for name in inputs.names}, same_draw)

    slopes = slopes_off()
    if slopes is not None and module.eval() and slopes_off() is None:  # else the gradient is wrong without dropout too
        raise Violation("the gradient belongs to another dropout mask than the output", f"{words}: {slopes}")


@check("the same seeds give the same output, bit for bit")
def _same_seed_same_output(subject: Subject) -> Finding:
    if not subject.capabilities.is_deterministic:
        return not_applicable("declares itself not deterministic")
    for build in subject.contexts():
        for length in subject.lengths[-2:]:
            module, again = subject.make(build, seq_len=length), subject.make(build, seq_len=length)
            for inputs in subject.calls(build, length):
                expected = seeded_call(module, inputs, 0)
                if not expected.isfinite().all():
                    continue  # equals nothing, not even itself: another check's finding
                for what, output in (
                    ("a second call under another global seed", seeded_call(module, inputs, 1)),
                    ("a module built again from the same seeds", seeded_call(again, inputs, 2)),
                    ("switching to training and back", seeded_call(module.train().eval(), inputs, 3)),
                ):
                    if not torch.equal(output, expected):
                        change = largest_error(output, expected)
                        raise Violation(f"{what} gives another output", f"{inputs.words()}: by {change:.2g}")
    return passed()


@check("saved tensors are all there is to save")
def _state_dict_round_trip(subject: Subject) -> Finding:
    for build in subject.contexts():
        length = subject.lengths[-1]
        source = subject.make(build, seq_len=length, torch_seed=1)
        target = subject.make(build, seq_len=length, torch_seed=2)
        _expect_round_trip(source, target, subject.calls(build, length))
    return passed()


def _expect_round_trip(source: Module, target: Module, calls: list[Inputs]) -> None:
    state = source.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise Violation(f"state_dict()[{name!r}] is a {type(value).__name__}, not a tensor", calls[0].words())
    # Tied tensors are stored once for each name: safetensors refuses shared memory.
    stored = load(save({name: value.detach().clone().contiguous() for name, value in state.items()}))
    seeded_call(target, calls[0], 0)  # what it keeps of its parameters must follow them
    target.load_state_dict(stored, strict=True)
    for inputs in calls:
        expected, output = seeded_call(source, inputs, 0), seeded_call(target, inputs, 1)
        if not expected.isfinite().all():
            return  # another check's finding
        if not largest_error(output, expected) <= same_shape_tolerance(expected):
            raise Violation(
                "a module loaded from the saved state gives another output",
                f"{inputs.words()}: by {largest_error(output, expected):.2g}",
            )
    copied, message = seeded_call(copy.deepcopy(source), calls[-1], 0), "a deep copy of the module gives another output"
    expect_close(copied, expected, same_shape_tolerance(expected), message, calls[-1].words())
    grown = source.state_dict().keys() ^ state.keys()
    if grown:
        raise Violation(f"a call changes the names in state_dict: {', '.join(sorted(grown))}", calls[0].words())


CHECKS = (_dropout, _same_seed_same_output, _state_dict_round_trip)
