"""How each curve grows with the sequence length, and from where it beats the exact baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attn_zoo.report.analysis.series import Point, Series, joint_doubts
from attn_zoo.report.units import human_length
from attn_zoo.statistics import (
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

Quantity = Literal["time", "device", "peak_bytes", "extra_bytes", "saved_bytes"]
"""`device` is the time of the GPU alone, where it was measured; `time` that of a call as a user makes it."""

TOLERANCE = 0.1
"""An interval of the exponent must lie within this of a whole power before the report calls it linear or quadratic."""
LEAST_LENGTHS = 3
"""That a line must go through before its slope is called an exponent."""
CLEAR = 0.975
"""Share of the resamples that must agree before a curve is called cheaper, or not cheaper, at all lengths."""

CONTRADICTION = 0.3
"""How far above a claimed exponent the measured interval must lie: a logarithm or a cache that overflows adds less."""

_POWERS = ((0, "constant"), (1, "linear"), (2, "quadratic"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """What the measured lengths of one series say about one quantity.

    Args:
        exponent: one straight line through the top decade of lengths; None below three lengths at which nothing but the
            mechanism takes the time.
        slopes: between neighbouring lengths, whatever took the time.
        fit: a + bN + cN^2; None below three lengths.
        claimed: exponent the variant claims, or None.
        verdict: `"linear"`, `"quadratic"`, `"constant"`, `"not settled"`, `"simulated"` or `"too few lengths"`.
        why: it is none of the first three; empty where it is.
        is_device: of the time of the GPU alone at all these lengths.
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
    formula: float | None = None
    doubts: tuple[str, ...] = ()
    last_doubts: tuple[str, ...] = ()

    @property
    def is_settled(self) -> bool:
        """Whether the exponent may be said as a fact."""
        return not self.why

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
        is_fastest: the exact series is the fastest at each length.
        result: where they cross.
        waiting: which of the two wait for the host where they cross, so that it is not the mechanisms that do.
    """

    label: str
    against: str
    quantity: Quantity
    is_fastest: bool
    result: Crossover | None
    waiting: tuple[str, ...] = ()

    @property
    def is_settled(self) -> bool:
        """Whether the intervals leave no doubt that it is so, and for a crossing that it is in range."""
        if self.result is None:
            return False
        if self.result.kind == "crosses":
            return self.result.low is not None and self.result.high is not None
        return self.result.support >= CLEAR


def samples_by_length(points: Sequence[Point], quantity: Quantity) -> dict[int, list[float]]:
    """Return positive samples by length: many for time, one for everything else (which does not vary)."""
    if quantity == "time":
        samples = {point.seq_len: list(point.timing.samples_ms or (point.median_ms,)) for point in points}
    elif quantity == "device":
        samples = {point.seq_len: [point.device_ms or 0.0] for point in points}
    else:
        samples = {point.seq_len: [float(getattr(point.memory, quantity) or 0)] for point in points}
    return {length: values for length, values in samples.items() if min(values) > 0}


def processes_by_length(points: Sequence[Point], quantity: Quantity) -> dict[int, tuple[int, ...]]:
    """Return how many of these samples each process took, by length; nothing for what does not vary."""
    return {point.seq_len: point.timing.process_sizes for point in points} if quantity == "time" else {}


def growth(series: Series, quantity: Quantity = "time") -> Growth:
    """Fit one quantity of one series.

    Of time on a GPU, what the GPU alone took, where that was measured; lengths that wait for the host are left out.
    """
    every, sizes = samples_by_length(series.points, quantity), processes_by_length(series.points, quantity)
    samples, device, last_waiting = dict(every), {}, 0
    if quantity == "time":
        device = samples_by_length(series.points, "device")
        waiting = {length for length in series.waiting if length not in device}
        last_waiting = max(waiting, default=0)
        samples = {length: values for length, values in every.items() if length not in waiting} | device
    used = [length for length in samples if 10 * length > max(samples)]
    own_sizes = {length: own for length, own in sizes.items() if length not in device}
    exponent = fit_exponent(samples, sizes=own_sizes) if len(used) >= LEAST_LENGTHS else None
    medians = [math.exp(log) for log in log_medians(samples, 0, own_sizes)[1]]
    fit = fit_cost(sorted(samples), medians) if len(samples) >= LEAST_LENGTHS else None
    claimed = None
    if series.claim is not None and quantity in {"time", "peak_bytes"}:
        name = "time_exponent" if quantity == "time" else "memory_exponent"
        claimed = getattr(series.claim, name)
        if claimed is not None and series.points:  # that of the options, where the record has it
            own = getattr(series.points[-1].record, name)
            claimed = claimed if own is None else own
    timed = series.points if quantity == "time" else ()
    fitted = [point for point in timed if exponent and point.seq_len in exponent.lengths]
    verdict, why = _verdict(exponent, fit, len(used), last_waiting, is_simulated=series.is_simulated)
    return Growth(
        label=series.label,
        quantity=quantity,
        exponent=exponent,
        slopes=tuple(local_slopes(every, sizes=sizes)) if len(every) > 1 else (),
        fit=fit,
        claimed=claimed,
        verdict=verdict,
        why=why,
        is_device=bool(used) and all(length in device for length in used),
        formula=_formula_exponent(series.points, exponent) if quantity == "time" else None,
        # Of a length that waits, the time of the GPU alone was fitted.
        doubts=tuple(doubt for doubt in joint_doubts(fitted) if doubt != "host"),
        last_doubts=joint_doubts(timed[-2:]),
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
        lengths = f"{count} length{'s' if count != 1 else ''}"
        if last_waiting:
            return "too few lengths", f"waits for the host up to {human_length(last_waiting)}; {lengths} above it"
        return "too few lengths", f"{lengths} in the top decade, {LEAST_LENGTHS} are needed"
    ends = slope_words(exponent)
    for power, word in _POWERS:
        if power - TOLERANCE <= exponent.low and exponent.high <= power + TOLERANCE:
            leading = fit.dominant(fit.lengths[-1])
            return (word, "") if leading == word else ("not settled", f"slope {ends}, but the {leading} term leads")
    if any(exponent.low <= power <= exponent.high for power, _ in _POWERS):
        return "not settled", f"slope known to {ends} only"
    return "not settled", f"slope {ends} is no whole power"


def slope_words(exponent: Exponent) -> str:
    """Return a slope with its interval; bytes do not vary, and an interval of no width says nothing."""
    value, low, high = (f"{each:.2f}" for each in (exponent.value, exponent.low, exponent.high))
    return value if low == high else f"{value} [{low}, {high}]"


def crossings(every: Sequence[Series], fastest: Series | None, quantity: Quantity) -> list[Crossing]:
    """Compare every approximate series with the fastest exact one, and with each exact one where there are several."""
    exact = [series for series in every if series.is_exact and series.points]
    baselines = [] if fastest is None else [(fastest, True)]
    if fastest is not None and len(exact) > 1:
        baselines += [(series, False) for series in exact if series.label != fastest.label]
    compared = [one for one in every if one.points and not (one.is_exact or one.is_simulated)]
    found = []
    for series in compared:
        for baseline, is_fastest in baselines:
            result = _crossover(series, baseline, quantity)
            if quantity == "device" and (result is None or len(result.lengths) < 2):
                continue
            waiting = _waiting(result, (series, baseline)) if quantity == "time" and result is not None else ()
            found.append(
                Crossing(
                    label=series.label,
                    against=baseline.label,
                    quantity=quantity,
                    is_fastest=is_fastest,
                    result=result,
                    waiting=waiting,
                )
            )
    return found


def _waiting(result: Crossover, pair: Sequence[Series]) -> tuple[str, ...]:
    """Return which of two series wait for the host at the lengths on either side of their crossing."""
    if result.length is None:
        return ()
    before = max(length for length in result.lengths if length <= result.length)
    after = min(length for length in result.lengths if length >= result.length)
    return tuple(series.label for series in pair if {before, after} & series.waiting)


def _crossover(series: Series, baseline: Series, quantity: Quantity) -> Crossover | None:
    own, other = (samples_by_length(one.points, quantity) for one in (series, baseline))
    sizes, other_sizes = (processes_by_length(one.points, quantity) for one in (series, baseline))
    return crossover(own, other, sizes_x=sizes, sizes_baseline=other_sizes) if set(own) & set(other) else None
