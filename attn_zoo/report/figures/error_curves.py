"""Distance from exact attention against length, a panel for each kind of inputs; and against cost, at one length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from attn_zoo.report.analysis.approximation_errors import ErrorCurve, ErrorGroup, ErrorPanel
from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.figures.axes import draw_curve, draw_intervals, length_axis, value_axis
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import INK, MARK, MUTED, Looks, plain
from attn_zoo.report.figures.svg import Tag
from attn_zoo.report.tables.error_tables import MEAN, error_text
from attn_zoo.units import human_length, percent, some

LEAST = 1e-3
"""An error below is drawn here: what rounds is exact, and would press all others together."""

WIDTH = 7.4


def draw_errors(group: ErrorGroup, looks: Looks) -> Page | None:
    """Return a panel for each kind of inputs with two lengths or more; None where there is none, or only exact ones."""
    panels = [panel for panel in group.panels if len(panel.lengths) > 1 and _drawn(panel)]
    if not panels:
        return None
    labels = sorted({curve.label for panel in panels for curve in _drawn(panel)})
    exact = [curve for panel in panels for curve in panel.curves if curve.is_exact and curve.measured]
    note = f"{group.subtitle}; mean over seeds with its 95 % interval; dashed: {MEAN}, which needs no attention"
    if exact:
        worst = max(point.value or 0.0 for curve in exact for point in curve.measured)
        names = some(dict.fromkeys(curve.label for curve in exact), joint=" and ")
        note += f"; not drawn: {names}, exact (up to about {error_text(worst)})"
    values = [value for panel in panels for value in _values(panel)]
    page = Page("Error beside exact attention, by length", note + _lower_edge(values), width=WIDTH)
    for axes, panel in _framed(page, panels, labels, looks):
        length_axis(axes, panel.lengths)
        value_axis(axes, [max(value, LEAST) for value in values], error_text, 10)
        lengths = panel.lengths
        means = [max(panel.mean_error[length], LEAST) for length in lengths]
        axes.plot(lengths, means, color=MUTED, ls=MARK, lw=1.2, zorder=2)
        for curve in _drawn(panel):
            _draw_curve(axes, curve, looks)
    return page.describe(_alt(panel) for panel in panels)


def draw_error_costs(group: ErrorGroup, looks: Looks) -> Page | None:
    """Return error against the share of exact attention's FLOPs, at the length where variants have several budgets.

    Curves join the sets of options of one variant. None where no variant has two, or exact attention is not there.
    """
    length = group.budget_len
    if length is None:
        return None
    exact = {flops for panel in group.panels for one in panel.curves if one.is_exact and (flops := one.flops(length))}
    panels = [panel for panel in group.panels if length in panel.lengths]
    families = {panel.inputs: _families(panel, length) for panel in panels}
    names = sorted({name for own in families.values() for name in own})
    if not exact or not names:
        return None
    whole = float(max(exact))
    every = [place for own in families.values() for places in own.values() for place in places]
    values = [value for _, _, value in every] + [panel.mean_error[length] for panel in panels]
    note = f"{group.subtitle}; at {human_length(length)} tokens; mean over seeds; dashed: {MEAN}"
    page = Page("Error beside exact attention, by cost", note + _lower_edge(values), width=WIDTH)
    for axes, panel in _framed(page, panels, names, looks):
        value_axis(axes, [flops / whole for _, flops, _ in every], percent, 10, name="x")
        value_axis(axes, [max(value, LEAST) for value in values], error_text, 10)
        axes.set_xlabel("FLOPs (exact attention: 100 %)")
        axes.axhline(max(panel.mean_error[length], LEAST), color=MUTED, ls=MARK, lw=1.2, zorder=2)
        for name, places in families[panel.inputs].items():
            tips = tuple(f"{label}: {error_text(value)} at {percent(flops / whole)}" for label, flops, value in places)
            points = [(flops / whole, max(value, LEAST)) for _, flops, value in places]
            draw_curve(axes, points, looks[name], looks[name].line, tag=Tag(of=name, tips=tips))
    return page.describe(_cost_alt(panel, families[panel.inputs], whole) for panel in panels)


def _lower_edge(values: Iterable[float]) -> str:
    return f"; at the lower edge: below {error_text(LEAST)}" if any(value < LEAST for value in values) else ""


def _framed(
    page: Page, panels: Sequence[ErrorPanel], labels: Sequence[str], looks: Looks
) -> list[tuple[Axes, ErrorPanel]]:
    """Draw the legend, and return axes for each kind of inputs with its name, two in a row."""
    page.legend([_entry(label, looks) for label in labels], keys=labels)
    every = page.panels(len(panels), height=2.5, columns=2, left=0.72, right=0.2, gap=0.55, above=0.3)
    for place, (axes, panel) in enumerate(zip(every, panels, strict=True)):
        page.may_be_linear(axes)
        axes.set_title(f"{panel.inputs} inputs", loc="left", color=INK)
        if place % 2 == 0:
            axes.set_ylabel("relative error")
    return list(zip(every, panels, strict=True))


_Place = tuple[str, float, float]
"""Label, FLOPs, error."""


def _families(panel: ErrorPanel, length: int) -> dict[str, list[_Place]]:
    """Return the places of each family that is not exact, the cheapest first, by the label that has most lengths."""
    curves = [curve for curve in panel.curves if not curve.is_exact and curve.value(length) is not None]
    found: dict[str, list[_Place]] = {}
    for own in grouped(curves, lambda curve: curve.family).values():
        head = min(own, key=lambda curve: (-len(curve.points), len(curve.label), curve.label))
        places = [(curve.label, float(curve.flops(length) or 0), curve.value(length) or 0.0) for curve in own]
        found[head.label] = sorted((place for place in places if place[1] > 0), key=lambda place: place[1])
    return {head: places for head, places in found.items() if places}


def _cost_alt(panel: ErrorPanel, families: dict[str, list[_Place]], whole: float) -> str:
    said = [
        f"{label} {error_text(value)} at {percent(flops / whole)}"
        for places in families.values()
        for label, flops, value in places
    ]
    return f"{panel.inputs} inputs: {', '.join(said)}"


def _drawn(panel: ErrorPanel) -> list[ErrorCurve]:
    return [curve for curve in panel.over_lengths if len(curve.measured) > 1 and not curve.is_exact]


def _values(panel: ErrorPanel) -> list[float]:
    found = [point for curve in _drawn(panel) for point in curve.measured]
    ends = [end for point in found for end in (point.value, point.high) if end is not None]
    return [*ends, *panel.mean_error.values()]


def _entry(label: str, looks: Looks) -> Line2D:
    look = looks[label]
    mark: dict[str, Any] = {"marker": look.marker, "ms": 5.5, "mfc": look.colour, "mec": "white", "mew": 0.7}
    return Line2D([], [], color=look.colour, ls=look.line, lw=1.9, label=plain(label, 30), **mark)


def _draw_curve(axes: Axes, curve: ErrorCurve, looks: Looks) -> None:
    look = looks[curve.label]
    known = [(point, point.value) for point in curve.measured if point.value is not None]
    bars = [
        (point.seq_len, (max(point.low, LEAST), max(point.high, LEAST)))
        for point, _ in known
        if point.low is not None and point.high is not None
    ]
    style: dict[str, Any] = {"color": look.colour, "lw": 1.4, "alpha": 0.8, "zorder": 2.5}
    draw_intervals(axes, bars, (LEAST / 2, float("inf")), tag=Tag(of=curve.label), **style)
    tips = tuple(f"{curve.label}, {human_length(point.seq_len)} tokens: {error_text(value)}" for point, value in known)
    points = [(point.seq_len, max(value, LEAST)) for point, value in known]
    draw_curve(axes, points, look, look.line, tag=Tag(of=curve.label, tips=tips))


def _alt(panel: ErrorPanel) -> str:
    values = [(curve.label, curve.value(panel.front_len)) for curve in panel.ranked]
    said = [f"{label} {error_text(value)}" for label, value in values if value is not None]
    beside = f"{MEAN} {error_text(panel.floor)}"
    return f"{panel.inputs} inputs at {human_length(panel.front_len)} tokens: {', '.join([*said, beside])}"
