"""How each curve grows with the sequence length, and from where it beats the exact baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean
from typing import Literal

from attn_zoo.errors import counted
from attn_zoo.report.analysis.series import Point, Series, joint_doubts
from attn_zoo.report.analysis.winners import SpeedUp
from attn_zoo.statistics.growth import (
    CostFit,
    Crossover,
    Exponent,
    LocalSlope,
    crossover,
    fit_cost,
    fit_exponent,
    local_slopes,
)
from attn_zoo.statistics.medians import log_medians
from attn_zoo.units import human_length, human_slope

Quantity = Literal["time", "device", "peak_bytes"]
"""`device` is the time of the GPU alone, where it was measured; `time` that of a call as a user makes it."""

TOLERANCE = 0.1
"""An interval of the exponent must lie within this of a whole power before the report calls it linear or quadratic."""
LEAST_LENGTHS = 3
"""That a line must go through before its slope is called an exponent."""
DEVICE_SPREAD = 1.08
"""Factor within which medians of replays are not told apart: those of one kernel of cuDNN that ran under three names
differed by 7 %, and there is one of each length."""
CLEAR = 0.975
"""Share of the resamples that must agree before a curve is called cheaper, or not cheaper, at all lengths."""

CONTRADICTION = 0.3
"""How far above a claimed exponent the measured interval must lie: a logarithm or a cache that overflows adds less."""

_POWERS = ((0, "constant"), (1, "linear"), (2, "quadratic"))
NOT_SETTLED = "not settled"
GROWTH_WORDS = ("constant", "less than linear", "linear", "more than linear", "quadratic")
"""What `Growth.words` says of a slope that is known, slowest growth first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """What the measured lengths of one series say about one quantity.

    Args:
        exponent: one straight line through the top decade of lengths; None below three lengths at which nothing but the
            mechanism takes the time.
        slopes: between neighbouring lengths, of the GPU alone where `exponent` is, else whatever took the time.
        fit: a + bN + cN^2; None below three lengths.
        claimed: exponent the variant claims, or None.
        verdict: `"linear"`, `"quadratic"`, `"constant"`, `"not settled"`, `"simulated"` or `"too few lengths"`.
        why: it is none of the first three; empty where it is.
        is_device: of the time of the GPU alone at all these lengths.
        varies: whether its samples do, so that slopes have intervals: bytes and single medians do not.
        formula: exponent of the variant's FLOPs formula over the same lengths; None without one, and for memory.
        doubts: what makes a time doubtful that `exponent` was fitted to.
        last_doubts: likewise of the last of `slopes`.
    """

    label: str
    quantity: Quantity
    exponent: Exponent | None
    slopes: tuple[LocalSlope, ...]
    fit: CostFit | None
    claimed: float | None
    verdict: str
    why: str
    is_device: bool = False
    varies: bool = True
    formula: float | None = None
    doubts: tuple[str, ...] = ()
    last_doubts: tuple[str, ...] = ()

    @property
    def is_settled(self) -> bool:
        """Whether the exponent may be said as a fact."""
        return not self.why

    @property
    def words(self) -> str:
        """Say how it grows: the power, or on which side of linear the whole interval of the slope lies."""
        if self.is_settled:
            return self.verdict
        if self.exponent is None or self.verdict == "simulated":
            return NOT_SETTLED
        if self.exponent.high < 1 - TOLERANCE:
            return "less than linear"
        return "more than linear" if self.exponent.low > 1 + TOLERANCE else NOT_SETTLED

    @property
    def is_contradicted(self) -> bool:
        """Whether the measurement contradicts the claim: it grows faster, and as one power over all lengths.

        Slower is no contradiction: smaller terms may lead at these lengths, and a large device may not be busy yet.
        """
        if self.claimed is None or self.exponent is None or self.fit is None or self.verdict == "simulated":
            return False
        used = [slope.slope for slope in self.slopes if slope.low_len >= self.exponent.lengths[0]]
        is_straight = all(abs(slope - self.exponent.value) <= TOLERANCE for slope in used) and len(used) > 1
        is_settled = is_straight or self.verdict in {word for _, word in _POWERS}
        return is_settled and self.exponent.low > self.claimed + CONTRADICTION


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """Where `label` gets cheaper than `against` for good; `result` is None where they share no length.

    Args:
        label: of the approximate series.
        against: of the exact one.
        quantity: what is compared.
        is_main: `against` is the exact series timed in turns with it at every length, else the fastest one.
        result: where they cross.
        waiting: which of the two wait for the host where they cross, so that it is not the mechanisms that do.
        is_in_turns: at every length both were timed in turns, and the ratios are those of their rounds.
        doubts: what makes a time doubtful that this was made of, but for what `waiting` says already.
        ends: the longest length of both, where the exact one was measured at longer ones; else None.
    """

    label: str
    against: str
    quantity: Quantity
    is_main: bool
    result: Crossover | None
    waiting: tuple[str, ...] = ()
    is_in_turns: bool = False
    doubts: tuple[str, ...] = ()
    ends: int | None = None

    @property
    def rank(self) -> float:
        """What puts first what is cheaper from the shortest length on: the length that is told, infinity for none."""
        result = self.result
        if result is None or (self.is_settled and result.kind == "never_in_range"):
            return math.inf
        told = (result.length or 0.0) if self.is_settled else result.high
        return math.inf if told is None else told

    @property
    def is_settled(self) -> bool:
        """Whether the intervals leave no doubt that it is so, and for a crossing that it is in range."""
        if self.result is None:
            return False
        if self.result.kind == "crosses":
            return self.result.low is not None and self.result.high is not None
        return self.result.support >= CLEAR


_ByLength = dict[int, list[float]]
_Samples = tuple[_ByLength, dict[int, tuple[int, ...]]]


def samples_by_length(points: Sequence[Point], quantity: Quantity) -> _Samples:
    """Return positive samples by length, and of times, which alone vary, how many each process took."""
    sizes = {}
    if quantity == "time":
        samples = {point.seq_len: list(point.timing.samples_ms or (point.median_ms,)) for point in points}
        sizes = {point.seq_len: point.timing.process_sizes for point in points}
    elif quantity == "device":
        samples = {point.seq_len: list(point.device_samples_ms or (0.0,)) for point in points}
        sizes = {length: (1,) * len(values) for length, values in samples.items() if len(values) > 1}
    else:
        samples = {point.seq_len: [float(point.memory.peak_bytes or 0)] for point in points}
    return {length: values for length, values in samples.items() if min(values) > 0}, sizes


def growth(series: Series, quantity: Literal["time", "peak_bytes"]) -> Growth:
    """Fit one quantity of one series.

    Of time on a GPU, what the GPU alone took, where that was measured; lengths that wait for the host are left out.
    """
    every, sizes = samples_by_length(series.points, quantity)
    samples, device, own_sizes, last_waiting = dict(every), _ByLength(), dict(sizes), 0
    if quantity == "time":
        device, device_sizes = samples_by_length(series.points, "device")
        own_sizes = {length: own for length, own in sizes.items() if length not in device} | device_sizes
        waiting = {length for length in series.waiting if length not in device}
        last_waiting = max(waiting, default=0)
        samples = {length: values for length, values in every.items() if length not in waiting} | device
    used = [length for length in samples if 10 * length > max(samples)]
    exponent = fit_exponent(samples, sizes=own_sizes) if len(used) >= LEAST_LENGTHS else None
    medians = [math.exp(log) for log in log_medians(samples, own_sizes).values]
    fit = fit_cost(sorted(samples), medians) if len(samples) >= LEAST_LENGTHS else None
    name = "time_exponent" if quantity == "time" else "memory_exponent"
    claimed = getattr(series.claim, name)
    if claimed is not None and series.points:  # that of the options, where the record has it
        own = getattr(series.points[-1].record, name)
        claimed = claimed if own is None else own
    timed = series.points if quantity == "time" else ()
    fitted = [point for point in timed if exponent and point.seq_len in exponent.lengths]
    verdict, why = _verdict(exponent, fit, len(used), last_waiting, is_simulated=series.is_simulated)
    is_device = bool(used) and all(length in device for length in used)
    slopes = local_slopes(device, sizes=own_sizes) if is_device else local_slopes(every, sizes=sizes)
    return Growth(
        label=series.label,
        quantity=quantity,
        exponent=exponent,
        slopes=tuple(slopes),
        fit=fit,
        claimed=claimed,
        verdict=verdict,
        why=why,
        is_device=is_device,
        varies=quantity == "time" and (not is_device or any(len(device[length]) > 1 for length in used)),
        formula=_formula_exponent(series.points, exponent) if quantity == "time" else None,
        # Of a length that waits, the time of the GPU alone was fitted.
        doubts=joint_doubts(fitted, without="host", of_device=is_device),
        last_doubts=joint_doubts(timed[-2:], of_device=is_device),
    )


def _formula_exponent(points: Sequence[Point], exponent: Exponent | None) -> float | None:
    used = exponent.lengths if exponent else ()
    flops = {point.seq_len: [float(point.record.flops or 0)] for point in points if point.seq_len in used}
    if len(flops) < 2 or min(flops.values()) <= [0.0]:
        return None
    return fit_exponent(flops, from_len=0).value


def _verdict(
    exponent: Exponent | None, fit: CostFit | None, count: int, last_waiting: int, *, is_simulated: bool
) -> tuple[str, str]:
    """Return the reading of a fit, and why it is no power."""
    if is_simulated:
        return "simulated", "it computes dense scores underneath"
    if exponent is None or fit is None:
        lengths = counted(count, "length")
        if last_waiting:
            return "too few lengths", f"waits for the host up to {human_length(last_waiting)}; {lengths} above it"
        return "too few lengths", f"{lengths} in the top decade, {LEAST_LENGTHS} are needed"
    ends = slope_words(exponent)
    for power, word in _POWERS:
        if power - TOLERANCE <= exponent.low and exponent.high <= power + TOLERANCE:
            leading = fit.dominant(fit.lengths[-1])
            return (word, "") if leading == word else (NOT_SETTLED, f"slope {ends}: the {leading} term leads")
    if exponent.high < 0:
        return NOT_SETTLED, f"slope {ends}: no cost falls with the length, the machine changed meanwhile"
    if any(exponent.low <= power <= exponent.high for power, _ in _POWERS):
        return NOT_SETTLED, f"slope {ends}: too wide to tell"
    return NOT_SETTLED, f"slope {ends}: no whole power"


def slope_words(exponent: Exponent) -> str:
    """Return a slope with its interval; bytes do not vary, and an interval of no width says nothing."""
    value, low, high = map(human_slope, (exponent.value, exponent.low, exponent.high))
    return value if low == high else f"{value} [{low}, {high}]"


Pairs = Mapping[int, SpeedUp]
"""Two points of each length that two curves have."""


def same_lengths(series: Series, exact: Series) -> dict[int, SpeedUp]:
    """Return the points of an exact curve and another one, by length."""
    others = {point.seq_len: point for point in exact.points}
    return {
        point.seq_len: SpeedUp(exact.label, others[point.seq_len], point)
        for point in series.points
        if point.seq_len in others
    }


def crossings(
    every: Sequence[Series],
    fastest: Series | None,
    quantity: Quantity,
    pairs_of: Callable[[Series, Series], Pairs] = same_lengths,
) -> list[Crossing]:
    """Compare every approximate series with the fastest exact one of each length, and with each of several.

    The points that are compared are `pairs_of` an approximate series and an exact one.
    """
    exact = [series for series in every if series.is_exact and series.points]
    if fastest is None:
        return []
    longest, found = max(series.points[-1].seq_len for series in exact), []
    for series in (one for one in every if one.points and not (one.is_exact or one.is_simulated)):
        main = _crossing(series.label, fastest.label, pairs_of(series, fastest), quantity, is_main=True)
        others = [one for one in exact if one.label != main.against]  # none where there is one exact series
        own = [_crossing(series.label, one.label, pairs_of(series, one), quantity, is_main=False) for one in others]
        for one in (main, *own):
            last = one.result.lengths[-1] if one.result is not None else 0
            if quantity != "device" or (one.result is not None and len(one.result.lengths) > 1):
                found.append(replace(one, ends=last) if 0 < last < longest else one)
    return found


def _crossing(label: str, exact: str, pairs: Pairs, quantity: Quantity, *, is_main: bool) -> Crossing:
    own, own_sizes = samples_by_length([pair.point for pair in pairs.values()], quantity)
    other, other_sizes = samples_by_length([pair.exact for pair in pairs.values()], quantity)
    common = set(own) & set(other)
    against = " / ".join(dict.fromkeys(pairs[length].against for length in sorted(common))) or exact
    if not common:
        return Crossing(label=label, against=against, quantity=quantity, is_main=is_main, result=None)
    paired = {length for length in common if quantity == "time" and pairs[length].is_in_turns}
    result = crossover(own, other, sizes_x=own_sizes, sizes_baseline=other_sizes, paired=paired)
    if quantity == "device" and any(len(each[length]) < 2 for each in (own, other) for length in common):
        result = _of_single_medians(result, own, other)
    waiting: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    if quantity in {"time", "device"}:
        used = [pairs[length] for length in _deciding(result)]
        waiting = _waiting(label, result, pairs) if quantity == "time" else ()
        doubts = joint_doubts(
            (point for pair in used for point in (pair.exact, pair.point)),
            without="host" if waiting else "",
            of_device=quantity == "device",
        )
    return Crossing(
        label=label,
        against=against,
        quantity=quantity,
        is_main=is_main,
        result=result,
        waiting=waiting,
        is_in_turns=paired == common,
        doubts=doubts,
    )


def _of_single_medians(result: Crossover, own: _ByLength, other: _ByLength) -> Crossover:
    """Return a crossing of times of the GPU with the interval that `DEVICE_SPREAD` of their ratio leaves."""
    baseline = {length: [geometric_mean(values)] for length, values in other.items()}
    early, late = (
        crossover({length: [factor * geometric_mean(values)] for length, values in own.items()}, baseline)
        for factor in (1 / DEVICE_SPREAD, DEVICE_SPREAD)
    )
    support = fmean(one.kind == result.kind for one in (early, result, late))
    return replace(result, low=early.length, high=late.length, support=support, cheaper=late.cheaper)


def _deciding(result: Crossover) -> tuple[int, ...]:
    """Return the lengths that a crossing and its interval lie between; all of them where nothing crosses."""
    if result.kind != "crosses" and result.low is None and result.high is None:
        return result.lengths
    before = [length for length in result.lengths if length <= (result.low or 0)][-1:]
    after = [length for length in result.lengths if length >= (result.high or math.inf)][:1]
    low, high = (*before, 0)[0], (*after, math.inf)[0]
    return tuple(length for length in result.lengths if low <= length <= high)


def _waiting(label: str, result: Crossover, pairs: Pairs) -> tuple[str, ...]:
    """Return which of two series wait for the host at the lengths on either side of their crossing."""
    if result.length is None:
        return ()
    before = max(length for length in result.lengths if length <= result.length)
    after = min(length for length in result.lengths if length >= result.length)
    near = [pairs[length] for length in (before, after)]
    both = ((label, [pair.point for pair in near]), (pairs[before].against, [pair.exact for pair in near]))
    return tuple(name for name, points in both if any(point.is_waiting for point in points))
