"""Tables of distances from exact attention: one a kind of inputs over lengths, all of one length, and every number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.approximation_errors import ErrorCurve, ErrorGroup, ErrorPanel, ErrorPoint
from attn_zoo.report.tables.table import (
    BRACKETS,
    Column,
    Note,
    Table,
    interval_column,
    interval_values,
    number_column,
    text_column,
    without_interval,
)
from attn_zoo.report.tables.time_tables import by_importance
from attn_zoo.report.wording import NO_RECORD
from attn_zoo.units import capital, human_flops, human_length, human_number, percent, with_ends

MEAN = "mean of the values"
"""What needs no attention: equal weights for all that a row sees."""

INPUT_WORDS = {
    "diffuse": "normal queries and keys; a third of all keys shares the weight of a row",
    "peaked": "normal ones with scores four times as large; few keys, at random places, have most of the weight",
    "local": "a score of 12 at the own position, falling to chance at 32; the more keys beyond, the more they weigh",
    "topics": "scores of 8 on tokens of the same topic of 16, in runs of 64 all over the sequence, chance on others",
}
"""What each kind of inputs is."""


def _how_to_read(curves: Iterable[ErrorCurve]) -> Note:
    measured = [curve for curve in curves if curve.measured and not curve.is_exact]
    endless = sorted({curve.label for curve in measured if not curve.has_budget})
    return (
        "Norm of the difference from exact attention in float64 over the norm of that: 0 is exact, zeros have 1.",
        "Mean over seeds; weights are random, as drawn.",
        BRACKETS,
        f"Declared with no budget that makes them exact: {', '.join(endless)}." if endless else "",
    )


def error_text(value: float) -> str:
    """Return an error: three digits, or below a thousandth one with an exponent.

    >>> error_text(0.12345), error_text(3.96e-7), error_text(0.0)
    ('0.123', '4e-07', '0')
    """
    return f"{value:.0e}" if 0.0 < value < 1e-3 else human_number(value)


def _text(point: ErrorPoint | float | None) -> str:
    if point is None:
        return NO_RECORD
    if isinstance(point, float):
        return error_text(point)
    return error_interval(point)


def error_interval(point: ErrorPoint) -> str:
    """Return an error with its interval, or a word where there is none."""
    if point.value is None:
        return point.word
    return with_ends(error_text(point.value), point.low, point.high, error_text)


_Found = ErrorPoint | float | None


def _error_column(heading: str, key: str, priority: float, found: Mapping[str, Mapping[str, _Found]]) -> Column:
    """Return the column of the errors `key` of all rows, which `found` has by variant."""
    return Column(
        heading=heading,
        show=lambda row: _text(found[row["variant"]][key]),
        brief=without_interval,
        sort=lambda row: row[key],
        priority=priority,
    )


def _values(found: Mapping[str, Mapping[str, _Found]]) -> list[dict[str, Any]]:
    """Return a row of numbers for each variant."""
    return [
        {"variant": label} | {key: one.value if isinstance(one, ErrorPoint) else one for key, one in errors.items()}
        for label, errors in found.items()
    ]


def error_table(group: ErrorGroup, panel: ErrorPanel) -> Table | None:
    """Return variants down, lengths across, the nearest at the longest first; None where nothing was measured."""
    lengths = panel.lengths
    if not lengths:
        return None
    ranks = {length: rank for rank, length in enumerate(by_importance(lengths))}
    found: dict[str, dict[str, _Found]] = {
        curve.label: {f"error_{length}": curve.at(length) for length in lengths} for curve in panel.over_lengths
    }
    found[MEAN] = {f"error_{length}": panel.mean_error[length] for length in lengths}
    spread = [f"{human_number(count)} at {human_length(length)}" for length, count in panel.num_effective_keys.items()]
    return Table(
        name=f"{group.name}-{panel.inputs}",
        title=f"Error on {panel.inputs} inputs" + (f", {group.apart}" if group.apart else ""),
        notes=(
            *_how_to_read(panel.over_lengths),
            f"{capital(panel.inputs)}: {INPUT_WORDS[panel.inputs]}.",
            f"Effective keys: {', '.join(spread)}.",
            f"{group.subtitle}.",
        ),
        columns=(
            text_column("variant", priority=0),
            *(
                _error_column(human_length(length), f"error_{length}", 1 + ranks[length] / (len(ranks) + 1), found)
                for length in lengths
            ),
        ),
        rows=tuple(_values(found)),
        is_view=True,
    )


def error_overview_table(group: ErrorGroup) -> Table | None:
    """Return variants down, kinds of inputs across, at the length that ranks them; None where nothing was measured.

    The nearest come first, as in `ErrorGroup.ranked`, after exact ones.
    """
    panels = [panel for panel in group.panels if panel.lengths]
    if not panels:
        return None
    length = max(panel.front_len for panel in panels)
    curves = {curve.label: curve for panel in panels for curve in panel.over_lengths}
    exact = [label for label in sorted(curves) if curves[label].is_exact]
    order = dict.fromkeys([*exact, *group.ranked, *sorted(curves)])
    return _by_inputs(group, "overview", "Error", length, [curves[label] for label in order])


def error_budget_table(group: ErrorGroup) -> Table | None:
    """Return sets of options down, kinds of inputs across, at one length; None where no variant has several there."""
    length = group.budget_len
    if length is None:
        return None
    labels = {curve.label: curve for panel in group.panels for curve in panel.curves if curve.value(length) is not None}
    order = sorted(
        labels.values(),
        key=lambda curve: (not curve.is_exact, curve.variant, curve.flops(length) or 0, curve.label),
    )
    return _by_inputs(group, "budgets", "Error by budget", length, order)


def _by_inputs(group: ErrorGroup, name: str, title: str, length: int, order: Sequence[ErrorCurve]) -> Table:
    """Return a row for each curve, with its label's error on each kind of inputs at a length."""
    panels = [panel for panel in group.panels if panel.lengths]
    exact = next((flops for curve in order if curve.is_exact and (flops := curve.flops(length))), None)
    found: dict[str, dict[str, _Found]] = {}
    for curve in order:
        own = {panel.inputs: next((one for one in panel.curves if one.label == curve.label), None) for panel in panels}
        found[curve.label] = {f"error_{inputs}": one.at(length) if one else None for inputs, one in own.items()}
    found[MEAN] = {f"error_{panel.inputs}": panel.mean_error.get(length) for panel in panels}
    rows = _values(found)
    for row, flops in zip(rows, [*(curve.flops(length) for curve in order), None], strict=True):
        row |= {"flops": flops, "flops_frac": flops / exact if flops and exact else None}
    return Table(
        name=f"{group.name}-{name}",
        title=f"{title} at {human_length(length)} tokens" + (f", {group.apart}" if group.apart else ""),
        notes=(
            *_how_to_read(order),
            *(f"{capital(panel.inputs)}: {INPUT_WORDS[panel.inputs]}." for panel in panels),
            f"{group.subtitle}.",
        ),
        columns=(
            text_column("variant", priority=0),
            *(_error_column(panel.inputs, f"error_{panel.inputs}", 0.5, found) for panel in panels),
            number_column("FLOPs", "flops", human_flops, 2),
            number_column("of exact", "flops_frac", percent, 1),
        ),
        rows=tuple(rows),
        is_view=True,
    )


def all_errors_table(analysis: Analysis) -> Table | None:
    """Return every error, a row for each mechanism, kind of inputs and length; None where there are none."""
    rows = [
        _row(group, panel, curve, point)
        for group in analysis.errors
        for panel in group.panels
        for curve in panel.curves
        for point in curve.points
    ]
    if not rows:
        return None
    return Table(
        name="approximation",
        title="All errors",
        notes=(
            *_how_to_read(curve for group in analysis.errors for panel in group.panels for curve in panel.curves),
            "Effective keys: 1 / sum of the squares of exact weights, median over rows.",
        ),
        columns=(
            text_column("variant", priority=0),
            text_column("inputs", priority=0),
            *([text_column("settings", priority=3)] if len(analysis.errors) > 1 else []),
            number_column("length", "seq_len", human_length, priority=0),
            interval_column("error", "error", error_text, 0),
            text_column("outcome", "word", priority=4),
            number_column(MEAN, "mean_error", error_text, 1),
            number_column("rounding", "rounding_error", error_text, 3),
            number_column("effective keys", "num_effective_keys", human_number, 2),
            number_column("FLOPs", "flops", human_flops, 2),
            number_column("seeds", "num_seeds", str, 3),
            text_column("kernel", priority=5),
        ),
        rows=tuple(rows),
    )


_FOUND = ("mean_error", "rounding_error", "num_effective_keys")


def _row(group: ErrorGroup, panel: ErrorPanel, curve: ErrorCurve, point: ErrorPoint) -> dict[str, Any]:
    found, record = point.found, point.record
    means = {name: sum(getattr(one, name) for one in found) / len(found) if found else None for name in _FOUND}
    return {
        "variant": curve.label,
        "inputs": panel.inputs,
        "settings": group.subtitle,
        "seq_len": point.seq_len,
        "word": "" if found else point.word,
        "status": "ok" if found else record.status,
        "reason": record.reason,
        **interval_values("error", point.value, point.low, point.high),
        **means,
        "has_budget": curve.has_budget if found else None,
        "flops": record.flops,
        "num_seeds": len(found),
        "kernel": " + ".join(record.kernels),
    }
