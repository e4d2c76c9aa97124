"""Claims of variants that their own measurements contradict: exponents, and FLOPs beside those that were counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attn_zoo.report.analysis.fits import Growth, slope_words
from attn_zoo.report.analysis.observations import Observation
from attn_zoo.report.analysis.panels import Panel
from attn_zoo.units import human_length, human_slope

AGREEMENT = 0.01
"""Relative difference between a formula and a count that needs no words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopsRatio:
    """FLOPs by a variant's formula over those that were counted, where they differ: a row of the table.

    Args:
        variant: its label.
        setting: direction and scope, in words.
        least: smallest ratio over the lengths.
        most: largest.
        ratios: the two in words.
        lengths: the shortest and the longest at which they differ, in words.
        is_too_many: more is claimed than ran, which no convention explains.
    """

    variant: str
    setting: str
    least: float
    most: float
    ratios: str
    lengths: str
    is_too_many: bool


def contradicted_exponents(panels: Iterable[Panel]) -> list[str]:
    """Return one sentence for each claimed exponent that a settled fit contradicts."""
    return [
        f"{growth.label}, {panel.title}: {_exponent_words(growth)}"
        for panel in panels
        for fits in (panel.time, panel.memory)
        for growth in fits.values()
        if growth.is_contradicted
    ]


def _exponent_words(growth: Growth) -> str:
    exponent = growth.exponent
    assert exponent is not None  # nothing is contradicted without one
    quantity = "time" if growth.quantity == "time" else "memory"
    first, last = human_length(exponent.lengths[0]), human_length(exponent.lengths[-1])
    found = f"measured {slope_words(exponent)} from {first} to {last} tokens"
    said = f"exponent of {quantity} claims {growth.claimed:g}, {found}"
    if growth.formula is not None and growth.formula >= exponent.low:
        said += f"; its own formula grows with {human_slope(growth.formula)} there"
    return said


def flops_ratios(observations: Iterable[Observation]) -> list[FlopsRatio]:
    """Return where formula and count differ by more than 1 %, one entry for each mechanism and direction.

    Left out are a mechanism without products of its own, whose formula counts sums that a count of products does not
    see, and layers whose formula says nothing of their projections, which are counted. Fewer ran where padding is left
    out, which formulas count.
    """
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for one in observations:
        record, cell = one.record, one.cell
        claimed, counted = record.flops, record.counted_flops
        if not claimed or not counted or record.is_simulated:
            continue
        if cell.scope == "mixer" and record.projection_flops is None:
            continue
        if abs(counted - (record.projection_flops or 0)) <= AGREEMENT * counted:
            continue
        if not (1 - AGREEMENT) * claimed * cell.least_pairs_frac <= counted <= (1 + AGREEMENT) * claimed:
            setting = f"{'causal' if cell.is_causal else 'bidirectional'}, {cell.scope or 'attention'}"
            found.setdefault((one.label, setting), []).append((cell.seq_len or 0, claimed / counted))
    said = []
    for (label, setting), pairs in sorted(found.items()):
        lengths, ratios = zip(*pairs, strict=True)
        least, most = min(ratios), max(ratios)
        said.append(
            FlopsRatio(
                variant=label,
                setting=setting,
                least=least,
                most=most,
                ratios=" to ".join(dict.fromkeys(f"{end:.3g}" for end in (least, most))),
                lengths=" to ".join(dict.fromkeys(map(human_length, (min(lengths), max(lengths))))),
                is_too_many=most > 1,
            )
        )
    return said
