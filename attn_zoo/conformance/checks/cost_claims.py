"""Checks of what a variant says that it costs: FLOPs, those of the backward, bytes, beside what is counted.

The same for both forms. A formula says what is useful and a count what runs: a kernel may compute blocks of which a
mask hides a part. So a claim must lie between the products over the pairs of positions that really see each other and
the products that ran, within 1 % of each; where nothing is hidden the two are one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.effective import AttentionCall, effective_weights
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.inputs import Inputs
from attn_zoo.conformance.subject import (
    Module,
    Subject,
    call,
    call_reference,
    count_forward,
    gradients,
    routing_of,
    weighted_sum,
)
from attn_zoo.errors import UnsupportedError
from attn_zoo.metadata import Shape

AGREEMENT = 0.01
"""Relative difference that is left between a claim and a count."""

COUNTED_LENGTHS = (256, 384)
"""Multiples of the blocks and chunks in use, so that what a ragged end pads does not count."""

LONG_LENGTH = 1280
"""For one sequence more, of a forward: what a formula says must not be right at short lengths only."""

MOST_LOST = 0.25
"""Of the share of what runs that a formula names, at the long length: pairs that see each other are dear to find."""

BATCH = 4


@check("the FLOPs formula is positive, grows, and agrees with the claimed exponent")
def _flops_formula(subject: Subject) -> Finding:
    complexity = subject.variant.complexity_of(subject.config)
    if complexity.flops is None:
        return not_applicable("claims no formula")
    build, config = next(subject.contexts(with_cross=False)), subject.config
    lengths = sorted({subject.fit(2**power) for power in range(4, 23)})
    counts = [complexity.flops(build.shape(1, length, config=config, form=subject.form)) for length in lengths]
    for length, count in zip(lengths, counts, strict=True):
        if not isinstance(count, int) or count <= 0:
            raise Violation("the FLOPs formula gives no positive integer", f"L={length}: {count!r}")
    for index, (shorter, longer) in enumerate(pairwise(counts)):
        if longer <= shorter:
            at = f"L={lengths[index]}: {shorter}, L={lengths[index + 1]}: {longer}"
            raise Violation("the FLOPs formula does not grow with the length", at)
    twice = complexity.flops(build.shape(2, lengths[0], config=config, form=subject.form))
    if twice <= counts[0]:
        raise Violation("the FLOPs formula does not grow with the batch", f"L={lengths[0]}: {counts[0]}, twice {twice}")
    slope = math.log2(counts[-1] / counts[-2])
    # A logarithm adds 0.07 at these lengths; a smaller term may still lead.
    if abs(slope - complexity.time_exponent) > 0.2 and not _leads_later(lengths, counts, complexity.time_exponent):
        raise Violation(
            "the FLOPs formula and the claimed exponent of time disagree",
            f"up to L={lengths[-1]} the formula grows as L^{slope:.2f}; claims {complexity.time_exponent:g}",
        )
    return passed(f"grows as L^{slope:.2f}")


def _leads_later(lengths: Sequence[int], counts: Sequence[int], exponent: float) -> bool:
    """Whether b L + c L^exponent, with b and c positive, is what the formula gives at the longest lengths."""
    *_, first, _, third = lengths
    powers = [(length / first) ** exponent for length in lengths[-3:]]
    ratio = third / first
    high = (counts[-1] - ratio * counts[-3]) / (powers[2] - ratio) if exponent != 1 else 0.0
    low = counts[-3] - high
    between = low * lengths[-2] / first + high * powers[1]
    return low > 0 and high > 1e-6 * low and abs(between - counts[-2]) < 1e-6 * counts[-2]


def _counted_calls(
    subject: Subject, lengths: tuple[int, ...] = COUNTED_LENGTHS
) -> Iterator[tuple[Module, Inputs, Shape]]:
    """Yield calls whose operations are counted, in float32 where that is declared; every other has twice the heads."""
    dtype = torch.float32 if torch.float32 in subject.dtypes else subject.dtype
    for context in subject.contexts(with_cross=False):
        for index, wanted in enumerate(lengths):
            length, num_heads = subject.fit(wanted), context.num_heads * (1 + index % 2)
            batch_size = BATCH if wanted < LONG_LENGTH else 1
            build = replace(context, max_seq_len=length, num_heads=num_heads, num_kv_heads=num_heads)
            inputs = subject.inputs(build, length, batch_size=batch_size, dtype=dtype)
            shape = build.shape(batch_size, length, config=subject.config, form=subject.form)
            yield subject.make(build, seq_len=length, dtype=dtype), inputs, shape


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products inside, and of those before and after a softmax what its mask hides."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hidden = 0.0
        self.visible: dict[_Product, float] = {}
        self._made: dict[Sequence[int], _Product] = {}  # whose result may be scores, by its size
        self._shares: dict[Sequence[int], float] = {}  # hidden of scores whose weights are still to be multiplied

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in {torch.ops.aten.bmm, torch.ops.aten.mm, torch.ops.aten.addmm}:
            left, right = args[-2:]
            product = left.shape, right.shape, float(result.double().sum())
            self._made[_size(result)] = product
            self.visible[product] = 2.0 * left.numel() * right.shape[-1]
            self._hide(product, self._shares.pop(_size(left), 0.0))
        elif func.overloadpacket is torch.ops.aten._softmax and args[0].numel():
            size = _size(args[0])
            self._shares[size] = float((args[0] <= torch.finfo(args[0].dtype).min).double().mean())
            if size in self._made:
                self._hide(self._made.pop(size), self._shares[size])
        return result

    def _hide(self, product: _Product, share: float) -> None:
        hidden = share * self.visible[product]
        self.hidden += hidden
        self.visible[product] -= hidden


_Product = tuple[Sequence[int], Sequence[int], float]
"""Shapes of both factors and the sum of the result: equal ones are the same product, computed again."""


def _size(scores: Tensor) -> tuple[int, ...]:
    return scores.numel(), *scores.shape[-2:]


def _visible_products(module: AbstractAttention, inputs: Inputs) -> float:
    """Return the FLOPs of both products over the pairs of query and key that a call really uses.

    Where the output is no weighted sum of the values, they are those of the reference; or infinity.
    """
    # Small queries give every key that is seen a weight above zero.
    query, key, value = inputs.entry(0).map(lambda tensor: 0.1 * tensor).tensors
    try:
        weights = effective_weights(AttentionCall(module, query, key, value)).weights
    except UnsupportedError:
        visible = _unmasked_products(module, inputs)
        return math.inf if visible is None else visible
    return 4.0 * inputs.batch_size * query.shape[-1] * int(weights.count_nonzero())


def _unmasked_products(module: Module, inputs: Inputs) -> float | None:
    """Return the FLOPs of the routing and the readable reference without what masks hide; None if they hide none."""
    from attn_zoo.measure.flop_count import count_operations  # loads Triton

    of_routing, of_reference = _Products(), _Products()
    with torch.no_grad():
        with of_routing:
            routing = routing_of(module, inputs)
        with of_reference:
            total = count_operations(lambda: call_reference(module, inputs, routing))
    if total is None or not of_reference.hidden:
        return None
    only_routing = (flops for product, flops in of_routing.visible.items() if product not in of_reference.visible)
    return total.products - of_reference.hidden + sum(only_routing)


@check("the FLOPs formula agrees with what runs, or with the pairs it really uses, within 1 %")
def _flops_count(subject: Subject) -> Finding:
    variant = subject.variant
    if variant.complexity.flops is None:
        return not_applicable("claims no formula")
    if subject.is_shared_mixer:
        return not_applicable("the shared mixer adds its projections")
    finding, share = not_applicable("an operation runs that cannot be counted"), 1.0
    for module, inputs, shape in _counted_calls(subject, (*COUNTED_LENGTHS, LONG_LENGTH)):
        claim, projections = variant.flops(shape), variant.projection_flops(shape)
        counted = count_forward(module, inputs)
        if counted is None or claim is None:
            continue
        words = f"{inputs.words()}: claims {claim}, counted {counted.products}"
        if projections or subject.form == "mixer":
            words += f"; without the {projections} claimed for projections {claim - projections}"
            words += f" and {counted.products - projections}"
        claim, mechanism, slack = claim - projections, counted.products - projections, 0.0
        if abs(mechanism) <= AGREEMENT * projections:  # no products of its own: its sums count
            least = most = float(counted.additions)
            slack = AGREEMENT * projections
            words += f" in products and {counted.additions} in sums over tokens; elementwise work does not count"
        else:
            least = most = float(mechanism)
            if inputs.query_len >= LONG_LENGTH:
                least *= (1 - MOST_LOST) * share if share < 1 - AGREEMENT else 1.0
            share = claim / most
            if isinstance(module, AbstractAttention):
                if claim < (1 - AGREEMENT) * least:
                    least = min(most, _visible_products(module, inputs))
                    words += f", {least:.0f} for pairs that see each other" if least < most else ""
            elif claim < (1 - AGREEMENT) * most and (visible := _unmasked_products(module, inputs)) is not None:
                least = most = visible - projections
                words += f", or {most:.0f} of its reference without what is masked"
        if not (1 - AGREEMENT) * least - slack <= claim <= (1 + AGREEMENT) * most + slack:
            raise Violation("the FLOPs formula and the count of what runs disagree", words)
        finding = passed(f"claim / count = {claim / max(most, 1.0):.3f} ({inputs.words()})")
    return finding


@check("the backward has as many operations for one of the forward as claimed")
def _backward_ratio(subject: Subject) -> Finding:
    from attn_zoo.measure.flop_count import count_operations  # loads Triton

    variant = subject.variant
    if variant.complexity.flops is None:
        return not_applicable("claims no formula")
    if subject.is_shared_mixer:
        return not_applicable("the shared mixer adds its projections")
    finding = not_applicable("an operation runs that cannot be counted")
    for module, inputs, shape in _counted_calls(subject):
        claim, leaves = variant.backward_ratio(shape), inputs.leaves()

        def both(module: Module = module, leaves: Inputs = leaves) -> None:
            torch.autograd.backward(weighted_sum(call(module, leaves)))

        forward, total = count_forward(module, inputs), count_operations(both)
        if forward is None or total is None or claim is None:
            continue
        flops, projections = variant.flops(shape), variant.projection_flops(shape)
        if flops is None or forward.products <= (1 + AGREEMENT) * projections:
            return not_applicable("has no matrix products of its own")
        counted = total.products / forward.products - 1
        # What a mask hides shifts the share of a mixer's projections, which have another ratio.
        is_shifted = projections and flops < (1 - AGREEMENT) * forward.products
        slack = 5 * AGREEMENT if is_shifted else AGREEMENT
        if abs(counted - claim) > slack * claim:
            raise Violation(
                "the claimed ratio of backward and forward (Complexity.backward_ratio) and what runs disagree",
                f"{inputs.words()}: claims {claim:.3f}, counted {counted:.3f}",
            )
        finding = passed(f"claims {claim:.3f}, counted {counted:.3f}")
    return finding


def _num_read(module: Module, inputs: Inputs) -> int:
    """Return how many weights the output depends on: rows of a table beyond the length are not read."""
    by_name = gradients(module, inputs).by_name if any(True for _ in module.parameters()) else {}
    found = (gradient for name, gradient in by_name.items() if name not in inputs.names)
    return sum(int(gradient.count_nonzero()) for gradient in found if gradient is not None)


@check("the least traffic is that of inputs, output and the weights that are read")
def _least_bytes(subject: Subject) -> Finding:
    finding = not_applicable("has no form without a second sequence")
    for build in subject.contexts(with_cross=False):
        length = subject.lengths[-1]
        sized = replace(build, max_seq_len=length)
        module = subject.make(sized, seq_len=length)
        shape = sized.shape(BATCH, length, config=subject.config, form=subject.form)
        itemsize = subject.dtype.itemsize
        claim, moved = subject.variant.min_bytes(shape, itemsize), shape.io_bytes(itemsize)
        weights = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers())) * itemsize
        read = _num_read(module, subject.inputs(sized, length, batch_size=BATCH)) * itemsize
        if not max(moved, (1 - AGREEMENT) * (moved + read)) <= claim <= moved + weights:
            raise Violation(
                "the claimed least traffic is not that of inputs, output and weights",
                f"{subject.form} form, B={BATCH} L={length}: claims {claim} bytes; inputs and output have {moved}, "
                f"parameters and buffers {weights}, of which at least {read} are read "
                "(Complexity.bytes and projection_bytes)",
            )
        finding = passed(f"{claim} bytes for B={BATCH} L={length}, {moved} of them inputs and output")
    return finding


CHECKS = (_flops_formula, _flops_count, _backward_ratio, _least_bytes)
