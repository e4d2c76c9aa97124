"""Measure the complexity table of "Attention Is All You Need" (Vaswani et al. 2017, table 1) beside the claims.

Three exponents of the sequence length L, for every direction of a variant, on a CPU in float64:

* cost of a layer: of the operations that run (the products of `count_operations`, or the sums where there are none),
  without projections;
* sequential operations: of the longest chain in the autograd graph of the readable reference, from output to input. A
  loop over time grows with L; matrix products over all positions do not;
* maximum path length: of that chain times the number of layers until an output depends on every token it may see. One
  layer is asked at a time which tokens its outputs depend on, so that nothing underflows through many layers; all
  together where a carry joins them.

A count of nodes of a graph says how much must wait for how much, not how long it takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext, build_mixer
from attn_zoo.attention.generators import seed_generators
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.inputs import Inputs, random_tensor
from attn_zoo.conformance.subject import Subject, call, call_reference, count_forward
from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.metadata import DEPENDS_ON_DATA, NEVER
from attn_zoo.registry import variants

SHORTEST_LEN = 32
"""Shortest length; the others are multiples, so that what a variant accepts and where its blocks end stays the same."""
COST_MULTIPLES = (4, 8)
MULTIPLES, FURTHER_MULTIPLES = (1, 2, 4), (8, 16)
"""For sequential operations and paths. Where paths are short, longer ones tell a logarithm from a power."""
SHORT_PATH = 500
"""In nodes."""
GROWTH_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
"""For the growth of operations and memory; beyond the first two only where those contradict a claim."""
LARGEST_EXCESS = 0.35
"""Between claimed and counted growth over a doubling: the square of a logarithm adds 0.3 at these lengths."""
LARGEST_GAP = 0.6
"""Between claimed and measured exponent: a logarithm, which counts as 0, looks like 0.2 to 0.5 at these lengths."""

_LOGARITHM = re.compile(r"\blog(?:_\w+)?\s*(?:\([^()]*\)|\w+)")
_ROOT = re.compile(r"\bsqrt\((\w)\)")
_FACTOR = re.compile(r"(?P<name>[A-Za-z](?:_\w+)?|\d+(?:\.\d+)?)(?:\^(?P<power>\d+(?:\.\d+)?))?")
_BY_DIRECTION = re.compile(r"(?P<any>.*?)\s*\(causal: (?P<causal>.*)\)")
_LENGTHS = {"L", "S"}
_LENGTHS_ELSEWHERE = {"n", "N", "T"}  # read as constants they would claim nothing

_CLAIM = "complexity"
"""What errors call a claim that cannot be read."""


def claimed_exponent(text: str, *, is_causal: bool = False) -> float | None:
    """Read the exponent of the sequence length from a claim in the symbols of the design; a logarithm counts as 0.

    None stands for `DEPENDS_ON_DATA`, infinity for `NEVER`.

    Args:
        text: a sum of products and quotients such as `"L / W"`; `"1 (causal: log L)"` claims something else for the
            causal form.
        is_causal: which of the two is asked for.

    Raises:
        ConfigError: the text cannot be read.

    >>> [claimed_exponent(text) for text in ("1", "log(L / C)", "L / W", "2 L + C", "sqrt(L)", "L^2 D")]
    [0.0, 0.0, 1.0, 1.0, 0.5, 2.0]
    >>> claimed_exponent("1 (causal: L)", is_causal=True)
    1.0
    """
    both = _BY_DIRECTION.fullmatch(text.strip())
    asked = both["causal" if is_causal else "any"] if both else text
    if asked in {DEPENDS_ON_DATA, NEVER}:
        return None if asked == DEPENDS_ON_DATA else math.inf
    plain = _ROOT.sub(r"\1^0.5", _LOGARITHM.sub("1", asked))
    try:
        return max(_product_exponent(term) for term in plain.split("+"))
    except ValueError:
        expected = (
            f'"{DEPENDS_ON_DATA}", "{NEVER}" or a sum of products such as "1", "log L", "L / W" or "1 (causal: L)"'
        )
        raise ConfigError(_CLAIM, [("", f"expected {expected}; got {text!r}")]) from None


def _product_exponent(term: str) -> float:
    above, *below = (_factors_exponent(part) for part in term.split("/"))
    return above - sum(below)


def _factors_exponent(text: str) -> float:
    factors = text.replace("*", " ").split()
    matches = [_FACTOR.fullmatch(factor) for factor in factors]
    if not factors or any(match is None or match["name"] in _LENGTHS_ELSEWHERE for match in matches):
        raise ValueError(text)
    return sum((float(match["power"] or 1) for match in matches if match and match["name"] in _LENGTHS), 0.0)


@dataclass(frozen=True, slots=True)
class Growth:
    """Exponents of the sequence length.

    Args:
        claimed: what the variant says; None where it says that the data decide, infinite for `NEVER`.
        measured: what was found; None where nothing could be counted, infinite where no number of layers reaches.
    """

    claimed: float | None
    measured: float | None

    @property
    def is_contradicted(self) -> bool:
        """Whether the measured exponent is another than the claimed one."""
        if self.claimed is None or self.measured is None or self.claimed == self.measured:
            return False
        return abs(self.measured - self.claimed) > LARGEST_GAP

    @property
    def is_exceeded(self) -> bool:
        """Whether the measured exponent is larger than the claimed one."""
        return None not in (self.claimed, self.measured) and self.measured > self.claimed  # type: ignore[operator]

    def claim_in_words(self) -> str:
        """Return what is claimed: `"L^1"`, `"never"` for an infinite path, `"-"` where the data decide."""
        if self.claimed is None:
            return "-"
        return NEVER if math.isinf(self.claimed) else f"L^{self.claimed:g}"

    def in_words(self) -> str:
        """Return what was measured: `"L^1.0"`, `"constant"`, `"not counted"`, or `"never"` for an infinite path.

        >>> [Growth(0, measured).in_words() for measured in (1.02, 0.0, None, math.inf)]
        ['L^1.0', 'constant', 'not counted', 'never']
        """
        if self.measured is None:
            return "not counted"
        if math.isinf(self.measured):
            return NEVER
        return "constant" if abs(self.measured) < 0.05 else f"L^{self.measured:.1f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredComplexity:
    """One row of the table: one direction of a variant under one set of options.

    They are operations: of a layer, those that wait for each other, those between two positions through all layers.
    """

    variant: str
    is_causal: bool
    cost: Growth
    sequential_ops: Growth
    max_path: Growth


def measure_complexity(name: str, options: Mapping[str, Any] | None = None) -> tuple[MeasuredComplexity, ...]:
    """Measure a variant in each direction it has, bidirectional first.

    Args:
        name: a registered variant.
        options: of the variant; None means the first set that its checks use, whose windows and blocks are small.

    Raises:
        UnknownNameError: no such variant.
        ConfigError: an option is impossible, or a claim cannot be read.

    >>> [(row.sequential_ops.measured, row.max_path.measured) for row in measure_complexity("full")]
    [(0.0, 0.0), (0.0, 0.0)]
    """
    variant = variants[name]
    build = BuildContext(embed_dim=16, num_heads=2, max_seq_len=1, is_causal=not variant.capabilities.bidirectional)
    subject = Subject(
        variant=variant,
        form="mixer",
        options=variant.option_sets[0] if options is None else options,
        build=build,
        dtypes=(torch.float64,),
        lengths=(),
    )
    return _measure(subject)


def _measure(subject: Subject) -> tuple[MeasuredComplexity, ...]:
    claims = subject.variant.complexity_of(subject.config)
    rows = []
    for build in subject.contexts(with_cross=False):
        claimed = partial(claimed_exponent, is_causal=build.is_causal)
        sequential, path = _sequential_and_path(subject, build)
        rows.append(
            MeasuredComplexity(
                variant=subject.variant.name,
                is_causal=build.is_causal,
                cost=Growth(claims.time_exponent, _cost_exponent(subject, build)),
                sequential_ops=Growth(claimed(claims.sequential_ops), sequential),
                max_path=Growth(claimed(claims.max_path), path),
            )
        )
    return tuple(rows)


def _sequential_and_path(subject: Subject, build: BuildContext) -> tuple[float, float]:
    depths: dict[int, float] = {}
    layers: dict[int, float] = {}
    longest_path = 0.0
    for multiple in MULTIPLES + FURTHER_MULTIPLES:
        if multiple in FURTHER_MULTIPLES and longest_path > SHORT_PATH:
            break
        length = multiple * subject.fit(SHORTEST_LEN)
        built = replace(build, max_seq_len=length)  # some ranks and windows follow from it
        depths[length] = _depth(subject, built, length)
        layers[length] = _num_layers(subject, built, length)
        longest_path = max(longest_path, depths[length] * layers[length])
    longest = sorted(layers)[-len(MULTIPLES) :]
    sequential = _increase_exponent(depths)
    return sequential, sequential + _exponent({length: layers[length] for length in longest})


def _increase_exponent(depths: Mapping[int, float]) -> float:
    """Return the exponent of what a chain gains with the length: of 20 + L / 16 nodes 1, of 20 + log L nodes 0."""
    increases = {longer: depths[longer] - depths[shorter] for shorter, longer in pairwise(depths)}
    return _exponent(increases if min(increases.values()) > 0 else depths)


def _exponent(values: Mapping[int, float]) -> float:
    """Return the slope of log value over log length by least squares."""
    if math.inf in values.values():
        return math.inf
    x, y = [math.log(length) for length in values], [math.log(value) for value in values.values()]
    centre = sum(x) / len(x)
    slope = sum((a - centre) * b for a, b in zip(x, y, strict=True)) / sum((a - centre) ** 2 for a in x)
    return round(slope, 6) + 0.0


def _cost_exponent(subject: Subject, build: BuildContext) -> float | None:
    subject = replace(subject, form=subject.variant.form)
    try:
        lengths = [multiple * subject.fit(SHORTEST_LEN) for multiple in COST_MULTIPLES]
        counts = {length: _operations(subject, build, length) or 0.0 for length in lengths}
    except UnsupportedError:  # these options need hidden states, as a mixer around an attention has them
        return None
    return _exponent(counts) if min(counts.values()) > 0 else None


def _grows_faster(
    measure: Callable[[int], float | None], lengths: Sequence[int], claimed: float, formula: Sequence[float]
) -> bool:
    """Whether what is measured grows faster than claimed over every doubling, and last than the formula too.

    The first doubling that keeps the claim ends it: windows, chunks and ranks may be as long as the lengths before.
    """
    before, is_explained = measure(lengths[0]), True
    for (shorter, longer), explained in zip(pairwise(lengths), formula, strict=True):
        after = measure(longer)
        if not before or not after:
            return False
        slope = math.log(after / before) / math.log(longer / shorter)
        if slope <= claimed + LARGEST_EXCESS:
            return False
        before, is_explained = after, slope <= explained + LARGEST_EXCESS
    return not is_explained


def _formula_slopes(subject: Subject, build: BuildContext, lengths: Sequence[int]) -> list[float]:
    """Return the exponent of the FLOPs formula over each doubling: it may saturate later; 0 without a formula."""
    formula = subject.variant.complexity.flops
    if formula is None:
        return [0.0] * (len(lengths) - 1)
    shapes = [
        replace(build, max_seq_len=length).shape(1, length, config=subject.config, form=subject.form)
        for length in lengths
    ]
    counts = [formula(shape) for shape in shapes]
    return [
        math.log(after / before) / math.log(longer / shorter)
        for (shorter, before), (longer, after) in pairwise(zip(lengths, counts, strict=True))
    ]


def _operations(subject: Subject, build: BuildContext, length: int) -> float | None:
    """Count the products of one sequence without projections, or the sums where there are none."""
    build = replace(build, max_seq_len=length)
    counted = count_forward(subject.make(build), subject.inputs(build, length, batch_size=1))
    if counted is None:
        return None
    projections = subject.variant.projection_flops(build.shape(1, length, config=subject.config, form=subject.form))
    return float(counted.products - projections or counted.additions)


def _saved_bytes(subject: Subject, build: BuildContext, length: int) -> float:
    from attn_zoo.measure.memory import SavedTensors

    build = replace(build, max_seq_len=length)
    module, inputs = subject.make(build), subject.inputs(build, length, batch_size=1).leaves()
    with SavedTensors() as saved:
        output = call(module, inputs)
    num_bytes = saved.num_bytes
    del output  # and with it the graph
    return float(num_bytes)


@check("operations and what is kept for the backward grow no faster than the exponents claimed")
def _claimed_growth(subject: Subject) -> Finding:
    if subject.form != subject.variant.form:
        return not_applicable("the claims are about the form the variant is written in")
    claims = subject.variant.complexity_of(subject.config)
    dtype = torch.float32 if torch.float32 in subject.dtypes else subject.dtype
    subject = replace(subject, dtypes=(dtype,))
    lengths = sorted({subject.fit(length) for length in GROWTH_LENGTHS})
    for context in subject.contexts(with_cross=False):
        build = replace(context, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8)
        slopes = _formula_slopes(subject, build, lengths)
        for what, claimed, count, formula in (
            ("operations", claims.time_exponent, _operations, slopes),
            ("the bytes kept for the backward", claims.memory_exponent, _saved_bytes, [0.0] * len(slopes)),
        ):
            measure = partial(count, subject, build)
            if _grows_faster(measure, lengths, claimed, formula):
                ends = [measure(length) or 0.0 for length in (lengths[0], lengths[-1])]
                slope = math.log(ends[1] / ends[0]) / math.log(lengths[-1] / lengths[0])
                direction = "causal" if build.is_causal else "bidirectional"
                found = f"measured L^{slope:.2f} from {lengths[0]} to {lengths[-1]} tokens"
                raise Violation(f"{what} grow faster than claimed", f"{direction}: claims L^{claimed:g}, {found}")
    return passed(f"from {lengths[0]} tokens")


def _depth(subject: Subject, build: BuildContext, length: int) -> int:
    """Return the number of nodes on the longest chain from the reference's output to its input."""
    inputs = subject.inputs(build, length, batch_size=1).leaves()
    return _longest_chain(call_reference(subject.module(build), inputs), inputs.tensors[0])


def _longest_chain(output: Tensor, leaf: Tensor) -> int:
    longest: dict[Any, float] = {}
    stack = [output.grad_fn]
    while stack:  # recursion would be as deep as the chain
        node = stack[-1]
        if node is None or node in longest:
            stack.pop()
            continue
        before = [edge for edge, _ in node.next_functions if edge is not None]
        if waiting := [edge for edge in before if edge not in longest]:
            stack += waiting
            continue
        stack.pop()
        if getattr(node, "variable", None) is leaf:
            longest[node] = 0
        else:  # a chain that ends at a parameter mixes nothing
            longest[node] = max((longest[edge] + 1 for edge in before), default=-math.inf)
    depth = longest.get(output.grad_fn, -math.inf)
    if depth < 1:
        raise Violation("the output of the readable reference depends on no input", f"{list(output.shape)}")
    return int(depth)


def _num_layers(subject: Subject, build: BuildContext, length: int) -> float:
    """Return the number of layers until two outputs depend on every token that they may see; infinite for never.

    Asked are the last position and, as it may be special, the one in the middle.
    """
    targets = torch.tensor([length - 1, length // 2])
    own = torch.arange(length) == targets[:, None]  # [2, L]: after no layer, each position depends on itself
    wanted = torch.ones(2, length, dtype=torch.bool)
    if build.is_causal:
        wanted = torch.arange(length) <= targets[:, None]
    layers = _seen_with_carry if subject.capabilities.has_carry else _seen
    for num_layers, seen in enumerate(layers(subject, build, length, own), start=1):
        if bool((seen | ~wanted).all()):
            return num_layers
    return math.inf


def _seen(subject: Subject, build: BuildContext, length: int, seen: Tensor) -> Iterator[Tensor]:
    """Yield what is seen through one, two, ... layers, bool `[2, L]`."""
    for index in range(length):
        inputs = subject.inputs(build, length, batch_size=2, seed=index + 1)  # what is chosen by the data changes
        seen = seen | _seen_through(subject, build.at_layer(index), inputs, seen)
        yield seen


def _seen_with_carry(subject: Subject, build: BuildContext, length: int, own: Tensor) -> Iterator[Tensor]:
    """Yield the same where a carry joins the layers, which are then asked together."""
    inputs = subject.inputs(build, length, batch_size=2).leaves()
    hidden, carry, shared = inputs.tensors[0], None, dict[str, Any]()
    for index in range(length):
        context = replace(build.at_layer(index), shared=shared)
        with torch.random.fork_rng(devices=[]):
            seed_generators(index)
            layer = build_mixer(subject.variant.name, context, **subject.options).to(hidden.dtype).eval()
        mixed = layer.mix(hidden, carry=carry)
        hidden, carry = hidden + mixed.hidden, mixed.carry
        weights = random_tensor(hidden.shape, 7, hidden.dtype, "cpu")
        output = (hidden * weights * own[..., None]).sum()
        (gradient,) = torch.autograd.grad(output, inputs.tensors, retain_graph=True)
        yield gradient.ne(0).any(-1)


def _seen_through(subject: Subject, build: BuildContext, inputs: Inputs, seen: Tensor) -> Tensor:
    """Return which tokens the outputs at the positions in `seen` `[2, L]` depend on; an entry of the batch for each."""
    inputs = inputs.leaves()
    output = call_reference(subject.module(build), inputs)
    weights = random_tensor(output.shape, 7, output.dtype, "cpu")
    (gradient,) = torch.autograd.grad((output * weights * seen[..., None]).sum(), inputs.tensors)
    return gradient.ne(0).any(-1)


@check("sequential operations and maximum path length grow with the length as claimed", forms=("mixer",))
def _complexity_claims(subject: Subject) -> Finding:
    words = []
    try:
        rows = _measure(subject)
    except ConfigError as error:
        if error.source != _CLAIM:
            raise  # sizes that do not fit each other
        raise Violation("a claim cannot be read", str(error)) from None
    # Other options may name chunks and windows as long as these sequences, in which nothing is seen to grow.
    are_small = dict(subject.options) in subject.variant.option_sets
    for row in rows:
        direction = "causal" if row.is_causal else "bidirectional"
        for what, growth in (("sequential operations", row.sequential_ops), ("maximum path length", row.max_path)):
            if growth.is_contradicted and (are_small or growth.is_exceeded):
                found = f"{direction}: measured {growth.in_words()}; claims {growth.claim_in_words()}"
                if growth.measured != math.inf:
                    found += (
                        f" (from {subject.fit(SHORTEST_LEN)} tokens on: check_options names smaller chunks and windows)"
                    )
                raise Violation(f"{what}: another growth than claimed", found)
        words.append(f"{direction}: sequential {row.sequential_ops.in_words()}, path {row.max_path.in_words()}")
    return passed("; ".join(words))


CHECKS = (_complexity_claims, _claimed_growth)
