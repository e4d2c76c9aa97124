"""How each curve grows with the sequence length, and from where it beats the exact baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from attn_zoo.report.analysis.series import Point, Series
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

Quantity = Literal["time", "peak_bytes", "extra_bytes", "saved_bytes"]

TOLERANCE = 0.1
"""An interval of the exponent must lie within this of a whole power before the report calls it linear or quadratic."""

CONTRADICTION = 0.3
"""How far above a claimed exponent the measured interval must lie: a logarithm or a cache that overflows adds less."""

_POWERS = ((0, "constant"), (1, "linear"), (2, "quadratic"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """What the measured lengths of one series say about one quantity.

    Args:
        exponent: one straight line through the top decade of lengths; None below two lengths.
        slopes: between neighbouring lengths.
        fit: a + bN + cN^2; None below three lengths.
        claimed: exponent the variant claims, or None.
        verdict: `"linear"`, `"quadratic"`, `"constant"`, `"not settled"`, `"simulated"` or `"too few lengths"`.
        formula: exponent of the variant's FLOPs formula over the same lengths; None without one, and for memory.
    """

    label: str
    quantity: Quantity
    exponent: Exponent | None
    slopes: tuple[LocalSlope, ...]
    fit: CostFit | None
    claimed: float | None
    verdict: str
    formula: float | None = None

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
    """Where `label` gets cheaper than `against` for good; `result` is None where they share no length."""

    label: str
    against: str
    quantity: Quantity
    is_fastest: bool
    result: Crossover | None


def samples_by_length(points: Sequence[Point], quantity: Quantity) -> dict[int, list[float]]:
    """Return positive samples by length: many for time, one for bytes (which do not vary)."""
    if quantity == "time":
        samples = {point.seq_len: list(point.timing.samples_ms or (point.median_ms,)) for point in points}
    else:
        samples = {point.seq_len: [float(getattr(point.memory, quantity) or 0)] for point in points}
    return {length: values for length, values in samples.items() if min(values) > 0}


def processes_by_length(points: Sequence[Point], quantity: Quantity) -> dict[int, tuple[int, ...]]:
    """Return how many of these samples each process took, by length; nothing for bytes, which do not vary."""
    return {point.seq_len: point.timing.process_sizes for point in points} if quantity == "time" else {}


def growth(series: Series, quantity: Quantity = "time") -> Growth:
    """Fit one quantity of one series."""
    samples = samples_by_length(series.points, quantity)
    sizes = processes_by_length(series.points, quantity)
    exponent = fit_exponent(samples, sizes=sizes) if _has_decade(samples) else None
    medians = [sorted(samples[length])[len(samples[length]) // 2] for length in samples]
    if quantity == "time":
        medians = [point.median_ms for point in series.points if point.seq_len in samples]
    fit = fit_cost(list(samples), medians) if len(samples) >= 3 else None
    claimed = None
    if series.claim is not None and quantity in {"time", "peak_bytes"}:
        claimed = series.claim.time_exponent if quantity == "time" else series.claim.memory_exponent
    return Growth(
        label=series.label,
        quantity=quantity,
        exponent=exponent,
        slopes=tuple(local_slopes(samples, sizes=sizes)) if len(samples) > 1 else (),
        fit=fit,
        claimed=claimed,
        verdict=_verdict(exponent, fit, is_simulated=series.is_simulated),
        formula=_formula_exponent(series.points, exponent) if quantity == "time" else None,
    )


def _formula_exponent(points: Sequence[Point], exponent: Exponent | None) -> float | None:
    used = exponent.lengths if exponent else ()
    flops = {point.seq_len: [float(point.record.flops or 0)] for point in points if point.seq_len in used}
    if len(flops) < 2 or min(flops.values()) <= [0.0]:
        return None
    return fit_exponent(flops, from_len=0).value


def _has_decade(samples: Mapping[int, Sequence[float]]) -> bool:
    """Whether at least two lengths lie in the top decade, which is what the exponent is fitted to."""
    longest = max(samples, default=0)
    return sum(10 * length > longest for length in samples) > 1


def _verdict(exponent: Exponent | None, fit: CostFit | None, *, is_simulated: bool) -> str:
    if is_simulated:
        return "simulated"
    if exponent is None or fit is None:
        return "too few lengths"
    for power, word in _POWERS:
        is_near = power - TOLERANCE <= exponent.low and exponent.high <= power + TOLERANCE
        if is_near and fit.dominant(fit.lengths[-1]) == word:
            return word
    return "not settled"


def crossings(every: Sequence[Series], fastest: Series | None, quantity: Quantity) -> list[Crossing]:
    """Compare every approximate series with the fastest exact one, and with each exact one where there are several."""
    exact = [series for series in every if series.is_exact and series.points]
    baselines = [] if fastest is None else [(fastest, True)]
    if fastest is not None and len(exact) > 1:
        baselines += [(series, False) for series in exact if series.label != fastest.label]
    compared = [one for one in every if one.points and not (one.is_exact or one.is_simulated)]
    return [
        Crossing(
            label=series.label,
            against=baseline.label,
            quantity=quantity,
            is_fastest=is_fastest,
            result=_crossover(series, baseline, quantity),
        )
        for series in compared
        for baseline, is_fastest in baselines
    ]


def _crossover(series: Series, baseline: Series, quantity: Quantity) -> Crossover | None:
    own, other = (samples_by_length(one.points, quantity) for one in (series, baseline))
    sizes, other_sizes = (processes_by_length(one.points, quantity) for one in (series, baseline))
    return crossover(own, other, sizes_x=sizes, sizes_baseline=other_sizes) if set(own) & set(other) else None
