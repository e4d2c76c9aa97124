"""The roofline: what each kernel reaches beside what the machine can do (Williams, Waterman, Patterson 2009).

Above: useful FLOP/s against FLOP per byte, under the measured roof. Below: the bytes per second that moved at least,
against length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from textwrap import wrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attn_zoo.records import Ceilings
from attn_zoo.report.analysis.analyse import PanelAnalysis
from attn_zoo.report.analysis.efficiency import Efficiency
from attn_zoo.report.figures.axes import length_axis, value_axis
from attn_zoo.report.figures.curves import Picture
from attn_zoo.report.figures.labels import EndLabel, draw_labels, label_width
from attn_zoo.report.figures.placing import Box, Spot, place_names
from attn_zoo.report.figures.roofline_axes import along, draw_roof, square
from attn_zoo.report.figures.style import INK, MUTED, Look, draw_title, new_figure, plain, styled
from attn_zoo.report.units import human_bandwidth, human_flops, human_length, percent
from attn_zoo.report.wording import ceilings_words

__all__ = ["roofline_picture"]

WIDTH, ROOF_HEIGHT, BYTES_HEIGHT, GAP, FOOT, LEFT = 8.0, 3.6, 1.7, 0.72, 0.6, 1.0
NAME_SIZE = 9
SMALLEST, LARGEST = 3.0, 8.5
"""Points across the mark of the shortest and the longest length."""
Rows = Mapping[str, Sequence[Efficiency]]


def roofline_picture(one: PanelAnalysis, look_of: Mapping[str, Look]) -> Picture | None:
    """Return achieved rates under the measured roof; None where the run has not measured its ceilings."""
    ceilings = one.panel.ceilings
    if ceilings is None or not one.efficiency:
        return None
    rows = one.efficiency
    every = [row for found in rows.values() for row in found]
    lengths = sorted({row.seq_len for row in every})
    title = f"Roofline: {one.panel.title}"
    said = f"{one.panel.subtitle}; roof measured before the run: {ceilings_words(ceilings)}"
    if len(lengths) > 1:
        ends = f"{human_length(lengths[0])} to {human_length(lengths[-1])}"
        said += f"; marks grow with the length, {ends}; percent: share of the roof at the longest"
    if any(row.doubt for row in every):
        said += "; hollow: above the measured roof"
    with styled():
        lines = wrap(said, 116, break_on_hyphens=False)
        head = 0.5 + 0.17 * len(lines) + 0.16
        labels = [
            EndLabel(plain(label), human_bandwidth(found[-1].bytes_per_s), look_of[label].colour, *_last(found))
            for label, found in rows.items()
        ]
        low = max(BYTES_HEIGHT, sum(label.height for label in labels) + 0.1)
        total = head + ROOF_HEIGHT + GAP + low + FOOT
        figure = new_figure(WIDTH, total)
        draw_title(figure, title)
        for index, line in enumerate(lines):
            height = 1 - (0.53 + 0.17 * index) / total
            figure.text(0.14 / WIDTH, height, plain(line, 130), fontsize=8.5, color=MUTED, va="center")
        right = min(3.0, max(label_width(figure, labels), 0.9) + 0.36)
        across = (LEFT / WIDTH, (WIDTH - LEFT - right) / WIDTH)
        upper = (LEFT / WIDTH, (FOOT + low + GAP) / total, (WIDTH - LEFT - 0.25) / WIDTH, ROOF_HEIGHT / total)
        roof = figure.add_axes(upper)
        below = figure.add_axes((across[0], FOOT / total, across[1], low / total))
        taken = draw_roof(roof, every, ceilings)
        for label, found in rows.items():
            _draw_points(roof, found, look_of[label], lengths)
        _draw_names(figure, roof, rows, look_of, taken, lengths)
        _draw_bytes(below, rows, look_of, ceilings, (WIDTH - LEFT - right) * 100)
        draw_labels(below, labels)
    alt = f"{title}. {said}. " + "; ".join(_alt(label, found) for label, found in rows.items()) + "."
    return Picture(f"roofline-{one.panel.name}", title, alt, figure)


def _last(found: Sequence[Efficiency]) -> tuple[float, float]:
    return found[-1].seq_len, found[-1].bytes_per_s


def _alt(label: str, found: Sequence[Efficiency]) -> str:
    last = found[-1]
    return (
        f"{label}: {human_flops(last.flops_per_s)}/s, {human_bandwidth(last.bytes_per_s)}, {percent(last.roof_frac)} "
        f"of the roof at {human_length(last.seq_len)}"
    )


def _size(length: int, lengths: Sequence[int]) -> float:
    place = lengths.index(length) / max(1, len(lengths) - 1)
    return SMALLEST + (LARGEST - SMALLEST) * place if len(lengths) > 1 else 6.0


def _draw_points(axes: Axes, found: Sequence[Efficiency], look: Look, lengths: Sequence[int]) -> None:
    """Draw a line through the lengths, and a mark for each that grows with it."""
    x, y = [row.intensity for row in found], [row.flops_per_s for row in found]
    axes.plot(x, y, color=look.colour, ls=look.line, lw=1.1, alpha=0.7, zorder=2.5)
    for row in found:
        size = _size(row.seq_len, lengths)
        axes.plot(
            [row.intensity],
            [row.flops_per_s],
            marker=look.marker,
            ms=size,
            mfc="white" if row.doubt else look.colour,
            mec=look.colour if row.doubt else "white",
            mew=1.1 if row.doubt else 0.6,
            zorder=3,
        )


def _draw_names(
    figure: Figure,
    axes: Axes,
    rows: Rows,
    look_of: Mapping[str, Look],
    taken: Sequence[Box],
    lengths: Sequence[int],
) -> None:
    """Write each name and its share of the roof beside its longest length, off all marks and off the roof."""
    scale = figure.dpi / 72
    spots, words, marks = [], [], []
    for label, found in rows.items():
        name = f"{plain(label)} {percent(found[-1].roof_frac)}"
        drawn = figure.text(0, 0, name, fontsize=NAME_SIZE, fontweight="bold")
        extent = drawn.get_window_extent()
        drawn.remove()
        points = axes.transData.transform(np.array([[row.intensity, row.flops_per_s] for row in found]))
        radii = [_size(row.seq_len, lengths) / 2 * scale for row in found]
        marks += [square(point, radius) for point, radius in zip(points, radii, strict=True)]
        marks += [box for start, end in pairwise(points) for box in along(start, end, 2)]
        x, y = float(points[-1][0]), float(points[-1][1])
        spots.append(Spot(x, y, radii[-1], extent.width + 4, extent.height))
        words.append((name, look_of[label].colour))
    inside = axes.get_window_extent()
    frame = Box(inside.x0 + 2, inside.y0 + 2, inside.x1 - 2, inside.y1 - 2)
    for (name, colour), spot, box in zip(words, spots, place_names(spots, frame, [*taken, *marks]), strict=True):
        near = (min(max(spot.x, box.x0), box.x1), min(max(spot.y, box.y0), box.y1))
        if math.hypot(near[0] - spot.x, near[1] - spot.y) > spot.radius + 9:
            ends = axes.transData.inverted().transform([near, (spot.x, spot.y)])
            axes.plot(ends[:, 0], ends[:, 1], color=colour, lw=0.7, alpha=0.6, zorder=2.2)
        figure.text(
            (box.x0 + box.x1) / 2 / figure.bbox.width,
            (box.y0 + box.y1) / 2 / figure.bbox.height,
            name,
            fontsize=NAME_SIZE,
            fontweight="bold",
            color=colour,
            ha="center",
            va="center",
        )


def _draw_bytes(axes: Axes, rows: Rows, look_of: Mapping[str, Look], ceilings: Ceilings, pixels: float) -> None:
    """Draw bytes per second against length, under the copy ceiling."""
    every = [row for found in rows.values() for row in found]
    length_axis(axes, sorted({row.seq_len for row in every}), pixels)
    tops = [rate for rate in (ceilings.copy_bytes_per_s, ceilings.peak_bytes_per_s) if rate is not None]
    value_axis(axes, [*(row.bytes_per_s for row in every), *tops], human_bandwidth, 10, 1.5)
    axes.set_title("Bytes that must move, per second", fontsize=9.5, loc="left", color=INK, pad=4)
    for rate, colour, width in zip(tops, (INK, MUTED), (1.4, 0.8), strict=False):
        axes.axhline(rate, color=colour, lw=width, zorder=1.2)
    axes.annotate(
        f"copies, measured: {human_bandwidth(tops[0])}",
        xy=(0, tops[0]),
        xycoords=("axes fraction", "data"),
        xytext=(4, -2),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color=INK,
    )
    for label, found in rows.items():
        look = look_of[label]
        x, y = [row.seq_len for row in found], [row.bytes_per_s for row in found]
        axes.plot(x, y, color=look.colour, ls=look.line, lw=1.6, marker=look.marker, ms=4.5, mec="white", mew=0.6)
