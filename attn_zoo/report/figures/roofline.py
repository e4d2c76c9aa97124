"""The roofline: what each kernel reaches beside what the machine can do (Williams, Waterman, Patterson 2009).

Above: useful FLOP/s against FLOP per byte, under the measured roof. Below: the bytes per second that moved at least,
against length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.axes import Axes

from attn_zoo.records import Ceilings
from attn_zoo.report.analysis.efficiency import Efficiency
from attn_zoo.report.analysis.panels import Panel
from attn_zoo.report.figures.axes import annotate, annotate_along, draw_curve, length_axis, log_axis, value_axis
from attn_zoo.report.figures.labels import (
    Box,
    EndLabel,
    PointName,
    along,
    box_of,
    draw_end_labels,
    draw_point_names,
    label_room,
    labels_height,
    square,
)
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import INK, MUTED, Look, Looks, plain
from attn_zoo.report.figures.svg import Tag
from attn_zoo.report.units import human_bandwidth, human_flop_rate, human_flops, human_length, human_number, percent
from attn_zoo.report.wording import MARKS, ceilings_words

SMALLEST, LARGEST = 3.0, 8.5
"""Points across the mark of the shortest and the longest length."""
FAINT = 0.35
"""Alpha of a rate that says more of the host than of the kernel."""
Rows = Mapping[str, Sequence[Efficiency]]


def draw_roofline(panel: Panel, looks: Looks) -> Page | None:
    """Return achieved rates under the measured roof; None where the run has not measured its ceilings."""
    ceilings, rows = panel.ceilings, panel.efficiency
    if ceilings is None or not rows:
        return None
    every = [row for series in rows.values() for row in series]
    lengths = sorted({row.seq_len for row in every})
    note = f"{panel.subtitle}; roof measured before the run: {ceilings_words(ceilings)}"
    if len(lengths) > 1:
        ends = f"{human_length(lengths[0])} to {human_length(lengths[-1])}"
        note += f"; marks grow with the length, {ends}; percent: share of the roof at the longest"
    if any(row.doubt for row in every):
        note += "; hollow: above the measured roof"
    if any(row.is_waiting for row in every):
        note += f"; faint: {MARKS['host'][2]}"
    labels = []
    for label, series in rows.items():
        last, colour = series[-1], looks[label].colour
        rate = human_bandwidth(last.bytes_per_s)
        labels.append(EndLabel(plain(label), (rate,), colour, last.seq_len, last.bytes_per_s, label))
    page = Page(f"Roofline: {panel.title}", note)
    (roof,) = page.panels(height=3.6, left=1.0, right=0.25)
    (below,) = page.panels(height=labels_height(labels, 1.7), left=1.0, right=label_room(labels), above=0.12)
    taken = _draw_roof(roof, every, ceilings)
    names = []
    for label, series in rows.items():
        taken += _draw_points(roof, series, looks[label], lengths)
        last, words = series[-1], f"{plain(label)} {percent(series[-1].roof_frac)}"
        radius = _mark_size(last.seq_len, lengths) / 2
        names.append(PointName(words, looks[label].colour, last.flops_per_byte, last.flops_per_s, radius))
    inside = roof.get_window_extent()
    frame = (inside.x0 + 2, inside.y0 + 2, inside.x1 - 2, inside.y1 - 2)
    draw_point_names(roof, names, frame, taken)
    _draw_bytes(below, rows, looks, ceilings)
    draw_end_labels(below, labels)
    return page.describe(_alt(label, row[-1]) for label, row in rows.items())


def _alt(label: str, last: Efficiency) -> str:
    return (
        f"{label}: {human_flops(last.flops_per_s)}/s, {human_bandwidth(last.bytes_per_s)}, {percent(last.roof_frac)} "
        f"of the roof at {human_length(last.seq_len)}"
    )


def _mark_size(length: int, lengths: Sequence[int]) -> float:
    if len(lengths) == 1:
        return 6.0
    return SMALLEST + (LARGEST - SMALLEST) * lengths.index(length) / (len(lengths) - 1)


def _draw_roof(axes: Axes, every: Sequence[Efficiency], ceilings: Ceilings) -> list[Box]:
    """Set up the axes, draw the roof and the data sheet's above it, and return boxes that names must not cover."""
    product, copy = ceilings.matmul_flops_per_s, ceilings.copy_bytes_per_s
    intensities, rates = [row.flops_per_byte for row in every], [row.flops_per_s for row in every]
    left, right = min(*intensities, product / copy) / 2.5, max(*intensities, product / copy) * 3
    log_axis(axes, "x", left, right, lambda value: human_length(value) if value >= 1 else human_number(value), 2)
    axes.set_xlabel("useful FLOP per byte that must move")
    tops = [product, ceilings.sheet_flops_per_s or 0.0]
    values = [*rates, min(product, left * copy * 2), max(*tops, *rates)]
    value_axis(axes, values, human_flop_rate, 10, 1.6)
    if ceilings.sheet_flops_per_s is None or ceilings.peak_bytes_per_s is None:
        return _draw_ceiling(axes, product, copy, "measured", INK, 1.8)
    # The data sheet's line lies close above the other, whose words go under it.
    sheet = ceilings.sheet_flops_per_s, ceilings.peak_bytes_per_s, "data sheet"
    boxes = _draw_ceiling(axes, product, copy, "measured", INK, 1.8, are_words_under=True)
    return boxes + _draw_ceiling(axes, *sheet, MUTED, 0.8)


def _draw_ceiling(
    axes: Axes, product: float, copy: float, source: str, colour: str, width: float, *, are_words_under: bool = False
) -> list[Box]:
    """Draw bandwidth slope and product ceiling with their figures; return boxes around words and line."""
    is_sheet = width < 1
    (left, right), (bottom, _) = axes.get_xlim(), axes.get_ylim()
    ridge, start = product / copy, max(left, bottom / copy)
    axes.plot([start, ridge, right], [start * copy, product, product], color=colour, lw=width, zorder=1.2)
    words = f"products, {source}: {human_flops(product)}/s"
    offset, va = ((-3, -3), "top") if are_words_under else ((-3, 3), "bottom")
    flat = annotate(axes, words, (right, product), offset, ha="right", va=va, color=colour)
    low, high, edge = axes.transData.transform([(start, start * copy), (ridge, product), (right, product)])
    ceiling = (float(high[0]), float(high[1]) - 3, float(edge[0]), float(high[1]) + 3)
    boxes = [box_of(flat.get_window_extent()), ceiling, *along(low, high, 6)]
    words = f"copies, {source}: {human_bandwidth(copy)}"
    if math.hypot(*(high - low)) > 6 * len(words):
        middle = (math.sqrt(start * ridge), math.sqrt(start * copy * product))
        offset, va = ((-2, 3), "bottom") if is_sheet else ((2, -3), "top")
        slope = annotate_along(axes, words, middle, offset, high - low, va=va, color=colour).get_window_extent()
        boxes += along(slope.min, slope.max, 6)  # the words go up along this diagonal
    return boxes


def _draw_points(axes: Axes, series: Sequence[Efficiency], look: Look, lengths: Sequence[int]) -> list[Box]:
    """Draw a line through the lengths, and a mark for each that grows with it; return boxes around all that."""
    points = [(row.flops_per_byte, row.flops_per_s) for row in series]
    line = axes.plot(*zip(*points, strict=True), color=look.colour, ls=look.line, lw=1.1, alpha=0.7, zorder=2.5)
    Tag(of=series[0].label).put_on(*line)
    boxes = []
    pixels = axes.transData.transform(points)
    for row, (x, y), pixel in zip(series, points, pixels, strict=True):
        size = _mark_size(row.seq_len, lengths)
        face, edge = ("white", look.colour) if row.doubt else (look.colour, "white")
        width, alpha = (1.1 if row.doubt else 0.6), (FAINT if row.is_waiting else 1.0)
        mark = axes.plot([x], [y], marker=look.marker, ms=size, mfc=face, mec=edge, mew=width, alpha=alpha, zorder=3)
        Tag(of=row.label, tips=(_alt(row.label, row),)).put_on(*mark)
        boxes.append(square(float(pixel[0]), float(pixel[1]), 0.7 * size))
    return boxes + [box for start, end in pairwise(pixels) for box in along(start, end, 2)]


def _draw_bytes(axes: Axes, rows: Rows, looks: Looks, ceilings: Ceilings) -> None:
    """Draw bytes per second against length, under the copy ceiling."""
    every = [row for series in rows.values() for row in series]
    length_axis(axes, sorted({row.seq_len for row in every}))
    tops = [rate for rate in (ceilings.copy_bytes_per_s, ceilings.peak_bytes_per_s) if rate is not None]
    value_axis(axes, [*(row.bytes_per_s for row in every), *tops], human_bandwidth, 10, 1.5)
    axes.set_title("Bytes that must move, per second", loc="left", pad=4)
    for rate, colour, width in zip(tops, (INK, MUTED), (1.4, 0.8), strict=False):
        axes.axhline(rate, color=colour, lw=width, zorder=1.2)
    words = f"copies, measured: {human_bandwidth(tops[0])}"
    annotate(axes, words, (0, tops[0]), (4, -2), is_share=True, va="top", color=INK)
    for label, series in rows.items():
        look = looks[label]
        points = [(row.seq_len, row.bytes_per_s) for row in series]
        tips = tuple(_alt(label, row) for row in series)
        busy = [(at, math.nan if row.is_waiting else rate) for (at, rate), row in zip(points, series, strict=True)]
        is_faint = any(row.is_waiting for row in series)
        draw_curve(axes, points, look, look.line, alpha=FAINT if is_faint else None, tag=Tag(of=label, tips=tips))
        if is_faint:
            draw_curve(axes, busy, look, look.line, tag=Tag(of=label))
