"""How each variant grows, and from where it beats exact attention."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Any

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.fits import DEVICE_SPREAD, Crossing, Growth
from attn_zoo.report.analysis.panels import Panel
from attn_zoo.report.tables.table import (
    BRACKETS,
    MARK_REMARKS,
    Column,
    Note,
    Remark,
    Row,
    Table,
    interval_column,
    interval_values,
    marked,
    number_column,
    text_column,
)
from attn_zoo.report.tables.time_tables import interval_remark, pass_columns
from attn_zoo.report.wording import marks_of
from attn_zoo.units import human_length, human_slope, percent, some


def exponent_table(analysis: Analysis) -> Table:
    """Return fitted and claimed exponents of time and peak memory, one row per curve."""
    rows = [
        {"panel": panel.title, "settings": panel.subtitle, **_growth_row(growth, analysis.shown_doubts)}
        for panel in analysis.panels
        for fits in (panel.time, panel.memory)
        for growth in _slowest_growth_first(panel, fits)
    ]
    has_waiting = any(series.waiting for panel in analysis.panels for series in panel.series)
    return Table(
        name="exponents",
        title="Growth with the sequence length",
        notes=(
            (
                "Exponent k of N^k: a straight line through the top decade of lengths, three at least"
                f"{', without those that wait for the host' if has_waiting else ''}."
            ),
            BRACKETS,
            Remark("Last slope: between the two longest, of calls whatever took the time.", heading="last slope"),
            Remark(
                "Reading: linear or quadratic only where the whole interval is within 0.1 of it and that term leads "
                "the fit a + bN + cN^2.",
                heading="reading",
            ),
            Remark("Formula: exponent of the FLOPs formula over the same lengths.", heading="formula"),
            Remark("(!): contradicted by the measurement.", sign="(!)"),
            interval_remark(analysis.points),
            *MARK_REMARKS,
            *analysis.caveats,
        )
        if rows
        else (_NOTHING_GROWS,),
        columns=(
            text_column("variant", priority=0),
            text_column("of", "quantity", priority=0),
            *pass_columns(analysis.panels, "panel"),
            interval_column("exponent", "exponent", human_slope, priority=0, marks="exponent_marks"),
            Column(heading="claimed", show=_claimed, sort=lambda row: row["claimed_exponent"]),
            number_column("formula", "formula_exponent", human_slope, priority=4),
            interval_column("last slope", "last_slope", human_slope, priority=4, marks="last_slope_marks"),
            text_column("reading", priority=2),
            replace(text_column("why", priority=2.5), brief=lambda text: text.rpartition(": ")[2]),
            text_column("lengths", priority=5),
        ),
        rows=tuple(rows),
        fields_if_empty=("variant", "quantity", "exponent", "claimed_exponent"),
    )


def _slowest_growth_first(panel: Panel, fits: Mapping[str, Growth]) -> list[Growth]:
    """Return what has slopes; without an exponent it comes after those that have one, who is not judged last."""

    def standing(growth: Growth) -> tuple[bool, float]:
        return growth.label not in panel.judged, growth.exponent.value if growth.exponent else math.inf

    return sorted((growth for growth in fits.values() if growth.slopes), key=standing)


def _claimed(row: Row) -> str:
    if row["claimed_exponent"] is None:
        return ""
    return f"{row['claimed_exponent']:g}" + (" (!)" if row["is_contradicted"] else "")


def _growth_row(growth: Growth, shown: frozenset[str]) -> dict[str, Any]:
    exponent, fit = growth.exponent, growth.fit
    last = growth.slopes[-1]
    used = exponent.lengths if exponent else ()
    return {
        "variant": growth.label,
        "quantity": _QUANTITIES["device" if growth.is_device else growth.quantity],
        "exponent": exponent.value if exponent else None,
        "exponent_low": exponent.low if exponent and growth.varies else None,
        "exponent_high": exponent.high if exponent and growth.varies else None,
        "exponent_marks": marks_of(growth.doubts, shown) if exponent else "",
        "claimed_exponent": growth.claimed,
        "is_contradicted": growth.is_contradicted,
        "formula_exponent": growth.formula,
        "last_slope": last.slope,
        "last_slope_low": last.ci_low if growth.varies else None,
        "last_slope_high": last.ci_high if growth.varies else None,
        "last_slope_marks": marks_of(growth.last_doubts, shown),
        "reading": growth.verdict,
        "why": growth.why,
        "lengths": f"{human_length(used[0])} to {human_length(used[-1])}" if used else "",
        **{f"fit_{name}": getattr(fit, name, None) for name in ("a", "b", "c", "relative_rms")},
    }


_QUANTITIES = {"time": "time", "device": "time of the GPU", "peak_bytes": "memory"}


def crossing_text(crossing: Crossing, shown: Container[str] = (), *, waits: str = "calls wait for the host") -> str:
    """Return where it gets cheaper, in words that say no more than the intervals do; figures and sentences use these.

    `waits` is said where calls wait for the host on either side.
    """
    return marked(_crossing_words(crossing, waits), marks_of(crossing.doubts, shown))


def _crossing_words(crossing: Crossing, waits: str) -> str:
    result = crossing.result
    if result is None:
        return "no length in common"
    first, last = human_length(result.lengths[0]), human_length(result.lengths[-1])
    if len(result.lengths) == 1:
        if not crossing.is_settled:
            return f"not settled at {first}, the only length"
        return f"{'cheaper' if result.kind == 'always_faster' else 'not cheaper'} at {first}, the only length"
    host = f" ({waits})" if crossing.waiting else ""
    until = f" (up to {human_length(crossing.ends)})" if crossing.ends else ""
    if crossing.is_settled and result.length is not None:
        return f"from {round_length(result.length)}{until}{host}"
    if crossing.is_settled and result.kind == "always_faster":
        return f"from {first} or less{until}"
    if crossing.is_settled:
        return f"at {some(map(human_length, result.cheaper))} only" if result.cheaper else f"none up to {last}"
    if result.high is not None:
        return f"from {round_length(result.high)} or less{until}{host}"
    return "not settled" if result.low is None else f"not below {round_length(result.low)}, then not settled"


def round_length(tokens: float) -> str:
    """Return a crossing on three digits at most: more would be false precision."""
    digits = max(0, len(str(int(tokens))) - 3)
    return f"{round(tokens / 10**digits) * 10**digits:,}"


_CHEAPER: Note = (
    "The length from which a variant costs less than exact attention of the same run and stays cheaper.",
    Remark("Interval: 95 %, from resampling both; bytes do not vary.", heading="interval"),
    Remark("From N or less: the interval ends at N and is open below.", sign="or less"),
    Remark("None up to N is a result.", sign="none up to"),
    Remark("In turns: from the ratios of calls of one round.", sign="in turns"),
    Remark(
        f"Time of the GPU: of one median a length the interval is what {percent(DEVICE_SPREAD - 1)} would change.",
        sign="time of the GPU",
    ),
    Remark("Where calls wait for the host, their costs of launching cross, not the mechanisms.", sign="host)"),
)
_NO_BASELINE = (
    "Nothing to compare: it takes an exact variant and another one, both measured in the same run. Of those timed in "
    "turns at one length only, the ratio is under Timed in turns."
)
_NOTHING_GROWS = "Nothing to fit: it takes two lengths."


def crossover_table(analysis: Analysis) -> Table:
    """Return from which length each variant is cheaper than exact attention, in time and in peak memory."""
    rows, shown = [], analysis.shown_doubts
    for panel in analysis.panels:
        for crossing in (one for every in _crossings_of(panel) for one in every):
            result = crossing.result
            if result is not None and len(result.lengths) == 1 and panel.turns:
                continue  # nothing can cross, and the table of turns says how much cheaper
            is_sampled = crossing.quantity in {"time", "device"}  # nothing else varies between repetitions
            names = ("length", "low", "high") if is_sampled else ("length", "", "")
            rows.append(
                {
                    "variant": crossing.label,
                    "quantity": _QUANTITIES[crossing.quantity],
                    "against": crossing.against,
                    "against_is": "fastest exact" if panel.is_baseline(crossing.against) else "exact",
                    "is_in_turns": crossing.is_in_turns,
                    "panel": panel.title,
                    "settings": panel.subtitle,
                    "outcome": result.kind if result else "no_common_length",
                    **interval_values("crossing", *(getattr(result, name, None) for name in names)),
                    "support": getattr(result, "support", None),
                    "is_settled": crossing.is_settled,
                    "waiting": ", ".join(crossing.waiting),
                    "words": crossing_text(crossing, shown),
                    "marks": marks_of(crossing.doubts, shown),
                }
            )
    is_several = any(not one.is_main for panel in analysis.panels for one in panel.crossings)  # rows alike but for it
    return Table(
        name="crossovers",
        title="Cheaper than exact attention",
        notes=(
            *_CHEAPER,
            replace(interval_remark(analysis.points), sign="", heading="interval"),
            *MARK_REMARKS,
            *analysis.caveats,
        )
        if rows
        else (_NO_BASELINE,),
        columns=(
            text_column("variant", priority=0),
            text_column("of", "quantity", priority=1),
            *pass_columns(analysis.panels, "panel"),
            Column(
                heading="crossover",
                show=lambda row: row["words"],
                brief=lambda text: text.replace("calls wait for the host", "host"),
                sort=_crossing_rank,
                align="left",
                priority=0,
            ),
            Column(heading="interval", show=_crossing_interval, align="left", priority=3),
            Column(
                heading="than",
                show=_than,
                brief=lambda text: text.removesuffix(", in turns"),
                align="left",
                priority=0 if is_several else 4,
            ),
        ),
        rows=tuple(rows),
        fields_if_empty=("variant", "quantity", "against", "outcome", "crossing"),
    )


def _than(row: Row) -> str:
    return f"{row['against']}, in turns" if row["is_in_turns"] else str(row["against"])


def _crossing_rank(row: Row) -> float | None:
    ends = {"always_faster": 0.0, "never_in_range": float("inf")}
    return row["crossing"] if row["crossing"] is not None else ends.get(row["outcome"])


def _crossings_of(panel: Panel) -> Iterator[list[Crossing]]:
    """Yield the crossings of each quantity, cheaper first, those of one variant together and of controls last."""
    for every in (panel.crossings, panel.device_crossings, panel.memory_crossings):
        main = {one.label: one.rank for one in every if one.is_main}
        yield sorted(every, key=lambda one: (one.label not in panel.judged, main.get(one.label, one.rank), one.label))


def _crossing_interval(row: Row) -> str:
    if row["crossing"] is None or row["quantity"] not in {_QUANTITIES["time"], _QUANTITIES["device"]}:
        return ""
    low, high = row["crossing_low"], row["crossing_high"]
    return f"{round_length(low) if low else 'below'} to {round_length(high) if high else 'beyond'}"
