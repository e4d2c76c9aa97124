"""The roofline: what each kernel reaches beside what the machine can do (Williams, Waterman, Patterson 2009).

Above: useful FLOP/s against FLOP per byte, under the measured roof. Below, or alone where copies are the only roof: the
bytes per second that moved at least, against length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from attn_zoo.records import Ceilings, is_one_token
from attn_zoo.report.analysis.efficiency import Efficiency
from attn_zoo.report.analysis.panels import Panel
from attn_zoo.report.figures.axes import length_axis, log_axis, value_axis
from attn_zoo.report.figures.labels import (
    Box,
    EndLabel,
    PointName,
    draw_end_labels,
    draw_point_names,
    label_room,
    labels_height,
    square,
)
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import INK, MUTED, Look, Looks, plain
from attn_zoo.report.figures.svg import Tag
from attn_zoo.report.wording import MARKS, ceilings_words
from attn_zoo.units import (
    human_bandwidth,
    human_flop_rate,
    human_length,
    human_number,
    percent,
    some,
)

SMALLEST, LARGEST = 5.5, 9.5
"""Points across the mark of the shortest and the longest length: some are measured at the shortest alone."""
_ROOF: dict[str, Any] = {"color": INK, "lw": 1.8}
_SHEET: dict[str, Any] = {"color": MUTED, "lw": 0.8}
FAINT = 0.35
"""Alpha of a rate that says more of the host than of the kernel."""
MOST_BESIDE = 8
"""Names that stand beside the roof; lines to more of them would cross each other and the marks of all lengths."""
CROWDED_HEIGHT = 5.6
"""Inches of a roof with more names than that, which stand at their marks."""


def draw_roofline(panel: Panel, looks: Looks) -> Page | None:
    """Return achieved rates under the measured roof, or those of bytes alone; None without measured ceilings."""
    ceilings, rows = panel.ceilings, panel.efficiency
    if ceilings is None or not rows:
        return None
    every = [row for series in rows.values() for row in series]
    rated = {label: found for label, series in rows.items() if (found := [row for row in series if row.flops])}
    lengths = sorted({row.seq_len for row in every})
    counted = sorted({row.seq_len for series in rated.values() for row in series})
    note = f"{panel.subtitle}; roof measured beside the run: {ceilings_words(ceilings)}"
    what = "counted" if is_one_token(panel.pass_) else "useful"
    is_of_bytes = _is_of_bytes(rated, ceilings)
    is_crowded = len(rated) > MOST_BESIDE and not is_of_bytes
    if is_of_bytes:
        note += f"; {_bytes_words(rated, what)}"
    elif is_crowded:
        note += "; marks: the longest length of each" + (", lines from the shortest" if len(counted) > 1 else "")
    elif len(counted) > 1:
        ends = f"{human_length(counted[0])} to {human_length(counted[-1])}"
        note += f"; marks grow with the length, {ends}; share of the roof: at the longest of each"
    if rated and sum(map(len, rated.values())) < len(every):
        note += f"; FLOPs were counted at {some(map(human_length, counted))} only"
    if any(row.doubt for row in every):
        note += "; hollow: above the measured roof"
    if any(row.device_ms for row in every):
        note += "; times of the GPU alone where they were measured"
    if any(row.is_waiting for row in every):
        note += f"; faint: {MARKS['host'][2]}"
    shares = {label: f"{percent(series[-1].roof_frac)} of the roof" for label, series in rows.items()}
    names = (
        []
        if is_of_bytes or is_crowded
        else [
            EndLabel(plain(label), (shares[label],), looks[label].colour, *_place(series[-1]), label)
            for label, series in rated.items()
        ]
    )
    rates = []
    for label, series in rows.items():
        last, colour = series[-1], looks[label].colour
        details = (human_bandwidth(last.bytes_per_s), *([] if names else [shares[label]]))
        rates.append(EndLabel(plain(label), details, colour, last.seq_len, last.bytes_per_s, label))
    right = max(label_room(names), label_room(rates))
    page = Page(f"Roofline: {panel.title}", note)
    sheet = [Line2D([], [], label="data sheet", **_SHEET)] if ceilings.peak_bytes_per_s else []
    page.legend([Line2D([], [], label="roof, measured", **_ROOF), *sheet], left=0.86, colour=MUTED)
    if is_crowded:
        above = page.panels(height=CROWDED_HEIGHT, left=1.0)
    else:
        above = [] if is_of_bytes else page.panels(height=labels_height(names, 3.6), left=1.0, right=right)
    (below,) = page.panels(height=labels_height(rates, 1.7), left=1.0, right=right, above=0.12)
    for roof in above:
        _draw_roof(roof, [_place(row) for series in rated.values() for row in series], ceilings, what)
        if is_crowded:
            _draw_crowd(roof, rated, ceilings, looks)
            continue
        sizes = {length: _mark_size(length, counted) for length in counted}
        for label, series in rated.items():
            _draw_points(roof, series, _place, looks[label], sizes, 1.1)
        draw_end_labels(roof, names)
    _set_up_bytes(below, every, lengths, ceilings)
    alike = dict.fromkeys(lengths, 5.5)
    for label, series in rows.items():
        _draw_points(below, series, lambda row: (row.seq_len, row.bytes_per_s), looks[label], alike, 1.9)
    draw_end_labels(below, rates)
    return page.describe(_alt(label, row[-1]) for label, row in rows.items())


_Rated = Mapping[str, Sequence[Efficiency]]
"""Rows whose FLOPs are known, by label."""


def _is_of_bytes(rated: _Rated, ceilings: Ceilings) -> bool:
    """Tell whether all are bound by copies at about the same FLOP per byte, as tokens are that are decoded one by one.

    Marks in one column below the slope say nothing that their bytes do not say better.
    """
    places = [_place(row)[0] for series in rated.values() for row in series]
    ridge = ceilings.matmul_flops_per_s / ceilings.copy_bytes_per_s
    return not places or max(places) < min(2 * min(places), ridge)


def _bytes_words(rated: _Rated, what: str) -> str:
    """Say why copies are the only roof that is drawn."""
    places = [_place(row)[0] for series in rated.values() for row in series]
    if not places:
        return "FLOPs are not known: the roof is that of copies"
    ends = dict.fromkeys(f"{end:.2g}" for end in (min(places), max(places)))
    return f"{' to '.join(ends)} {what} FLOP per byte: the roof is that of copies"


def _place(row: Efficiency) -> tuple[float, float]:
    """Return where a row that has FLOPs stands under the roof."""
    return row.flops_per_byte or 0.0, row.flops_per_s or 0.0


def _alt(label: str, last: Efficiency) -> str:
    rate = "" if last.flops_per_s is None else f"{human_flop_rate(last.flops_per_s)}, "
    share = f"{percent(last.roof_frac)} of the roof at {human_length(last.seq_len)}"
    return f"{label}: {rate}{human_bandwidth(last.bytes_per_s)}, {share}"


def _mark_size(length: int, lengths: Sequence[int]) -> float:
    if len(lengths) == 1:
        return 6.0
    return SMALLEST + (LARGEST - SMALLEST) * lengths.index(length) / (len(lengths) - 1)


def _draw_roof(axes: Axes, places: Sequence[tuple[float, float]], ceilings: Ceilings, what: str) -> None:
    """Set up the axes, draw the roof and the data sheet's."""
    product, copy, sheet = ceilings.matmul_flops_per_s, ceilings.copy_bytes_per_s, ceilings.sheet_flops_per_s
    intensities, rates = zip(*places, strict=True)
    left, right = min(*intensities, product / copy) / 2.5, max(*intensities, product / copy) * 3
    log_axis(axes, "x", left, right, lambda value: human_length(value) if value >= 1 else human_number(value), 2)
    axes.set_xlabel(f"{what} FLOP per byte that must move")
    values = [*rates, min(product, left * copy * 2), max(product, sheet or 0.0, *rates)]
    value_axis(axes, values, human_flop_rate, 10, 1.6)
    if sheet is not None and ceilings.peak_bytes_per_s is not None:
        _draw_ceiling(axes, sheet, ceilings.peak_bytes_per_s, _SHEET)
    _draw_ceiling(axes, product, copy, _ROOF)


def _draw_ceiling(axes: Axes, product: float, copy: float, style: Mapping[str, Any]) -> None:
    """Draw bandwidth slope and product ceiling."""
    (left, right), (bottom, _) = axes.get_xlim(), axes.get_ylim()
    start = max(left, bottom / copy)
    points = [(start, start * copy), (product / copy, product), (right, product)]
    axes.plot(*zip(*points, strict=True), zorder=1.2, **style)


def _draw_crowd(axes: Axes, rated: _Rated, ceilings: Ceilings, looks: Looks) -> None:
    """Draw the longest length of each with its name at the mark, and faint lines from the shorter ones."""
    names, taken = [], list[Box]()
    for label, series in rated.items():
        for points in filter(None, _lines(series, _place)):
            line: dict[str, Any] = {"color": looks[label].colour, "lw": 0.9, "alpha": FAINT, "zorder": 2.4}
            Tag(of=label).put_on(*axes.plot(*zip(*points, strict=True), **line))
        taken += [square(x, y, 1.5) for x, y in axes.transData.transform([_place(row) for row in series]).tolist()]
        _draw_points(axes, series[-1:], _place, looks[label], {series[-1].seq_len: LARGEST}, 0.0)
        names.append(PointName(plain(label, 30), looks[label].colour, *_place(series[-1]), LARGEST / 2, of=label))
    (left, right), copy, product = axes.get_xlim(), ceilings.copy_bytes_per_s, ceilings.matmul_flops_per_s
    along = np.geomspace(left, right, 200)
    roof = np.column_stack([along, np.minimum(along * copy, product)])
    taken += [square(x, y, 3) for x, y in axes.transData.transform(roof).tolist()]
    inside = axes.get_window_extent()
    draw_point_names(axes, names, (inside.x0 + 2, inside.y0 + 2, inside.x1 + 24, inside.y1 - 2), taken)


def _draw_points(
    axes: Axes,
    series: Sequence[Efficiency],
    place: Callable[[Efficiency], tuple[float, float]],
    look: Look,
    sizes: Mapping[int, float],
    width: float,
) -> None:
    """Draw a mark for each length and lines of this width through them."""
    for points, alpha in zip(_lines(series, place), (1.0, FAINT), strict=True):
        if not points:
            continue
        line: dict[str, Any] = {"color": look.colour, "ls": look.line, "lw": width, "alpha": alpha, "zorder": 2.5}
        Tag(of=series[0].label).put_on(*axes.plot(*zip(*points, strict=True), **line))
    for row in series:
        x, y = place(row)
        face, edge = ("white", look.colour) if row.doubt else (look.colour, "white")
        style: dict[str, Any] = {"marker": look.marker, "mfc": face, "mec": edge, "mew": 1.1 if row.doubt else 0.6}
        mark = axes.plot([x], [y], ms=sizes[row.seq_len], alpha=FAINT if row.is_waiting else 1.0, zorder=3, **style)
        Tag(of=row.label, tips=(_alt(row.label, row),)).put_on(*mark)


def _lines(
    series: Sequence[Efficiency], place: Callable[[Efficiency], tuple[float, float]]
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the points of the strong line, and of the faint one where calls wait for the host; NaN in the gaps.

    Such calls are joined to the call at which the curve goes on, never to the time of the GPU alone, which is another
    quantity.
    """
    strong, faint = [], []
    for row in series:
        x, y = place(row)
        strong.append((x, math.nan if row.is_waiting else y))
        faint.append((x, math.nan if row.device_ms else y))
        if not row.is_waiting:
            faint.append((x, math.nan))
    return strong, faint if any(row.is_waiting for row in series) else []


def _set_up_bytes(axes: Axes, every: Sequence[Efficiency], lengths: Sequence[int], ceilings: Ceilings) -> None:
    """Set up the axes of bytes per second against length, and draw the ceilings of copies."""
    length_axis(axes, lengths)
    tops = [rate for rate in (ceilings.copy_bytes_per_s, ceilings.peak_bytes_per_s) if rate is not None]
    value_axis(axes, [*(row.bytes_per_s for row in every), *tops], human_bandwidth, 10, 1.5)
    axes.set_title("Bytes that must move, per second", loc="left", pad=4)
    for rate, style in zip(tops, (_ROOF, _SHEET), strict=False):
        axes.axhline(rate, zorder=1.2, **style)
