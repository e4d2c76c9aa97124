"""Axes of a roofline with the roof itself: bandwidth slope, product ceiling, and the data sheet's above them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attn_zoo.records import Ceilings
from attn_zoo.report.analysis.efficiency import Efficiency
from attn_zoo.report.figures.axes import value_axis
from attn_zoo.report.figures.placing import Box
from attn_zoo.report.figures.style import INK, MUTED
from attn_zoo.report.units import human_bandwidth, human_flops, human_length, human_number

__all__ = ["along", "draw_roof", "square"]


def draw_roof(axes: Axes, every: Sequence[Efficiency], ceilings: Ceilings) -> list[Box]:
    """Set up the axes, draw the roof and the data sheet's above it, and return boxes that names must not cover."""
    product, copy = ceilings.matmul_flops_per_s, ceilings.copy_bytes_per_s
    ridge = product / copy
    left = min(*(row.intensity for row in every), ridge) / 2.5
    right = max(*(row.intensity for row in every), ridge) * 3
    top = max(product, ceilings.peak_flops_per_s or 0.0, *(row.flops_per_s for row in every))
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, right)
    powers = range(math.ceil(math.log2(left)), math.floor(math.log2(right)) + 1)
    axes.xaxis.set_major_locator(FixedLocator([2.0**power for power in powers][:: math.ceil(len(powers) / 10)]))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: human_length(value) if value >= 1 else human_number(value))
    )
    axes.xaxis.set_minor_locator(NullLocator())
    values = [*(row.flops_per_s for row in every), min(product, left * copy * 2), top]
    value_axis(axes, values, lambda value: f"{human_flops(value)}/s", 10, 1.6)
    axes.set_xlabel("useful FLOP per byte that must move", fontsize=9.5)
    axes.tick_params(length=3, width=0.7)
    boxes = _roof_line(axes, product, copy, "measured", INK, 1.8)
    if ceilings.peak_flops_per_s is not None and ceilings.peak_bytes_per_s is not None:
        boxes += _roof_line(axes, ceilings.peak_flops_per_s, ceilings.peak_bytes_per_s, "data sheet", MUTED, 0.8)
    return boxes


def _roof_line(axes: Axes, product: float, copy: float, source: str, colour: str, width: float) -> list[Box]:
    """Draw bandwidth slope and product ceiling with their figures; return boxes around words and line."""
    is_sheet = width < 1
    (left, right), (bottom, _) = axes.get_xlim(), axes.get_ylim()
    ridge, start = product / copy, max(left, bottom / copy)
    axes.plot([start, ridge, right], [start * copy, product, product], color=colour, lw=width, zorder=1.2)
    flat = axes.annotate(
        f"products, {source}: {human_flops(product)}/s",
        xy=(right, product),
        xytext=(-3, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8,
        color=colour,
    )
    ends = axes.transData.transform(np.array([[start, start * copy], [ridge, product]]))
    (x0, y0), (x1, y1) = ends
    words = f"copies, {source}: {human_bandwidth(copy)}"
    if math.hypot(x1 - x0, y1 - y0) > 8 * len(words) * 0.75:
        axes.annotate(
            words,
            xy=(math.sqrt(start * ridge), math.sqrt(start * copy * product)),
            xytext=(-2, 3) if is_sheet else (2, -3),
            textcoords="offset points",
            rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)),
            rotation_mode="anchor",
            ha="center",
            va="bottom" if is_sheet else "top",
            fontsize=8,
            color=colour,
        )
    extent = flat.get_window_extent()
    edge = float(axes.transData.transform((right, product))[0])
    return [
        Box(extent.x0, extent.y0, extent.x1, extent.y1),
        Box(x1, y1 - 3, edge, y1 + 3),
        *along(ends[0], ends[1], 6),
    ]


def square(point: Any, radius: float) -> Box:
    """Return the square around a point in pixels."""
    x, y = float(point[0]), float(point[1])
    return Box(x - radius, y - radius, x + radius, y + radius)


def along(start: Any, end: Any, radius: float) -> list[Box]:
    """Return squares that cover the line between two points in pixels."""
    count = max(2, math.ceil(math.hypot(*(end - start)) / (2 * radius + 4)))
    return [square(start + share * (end - start), radius) for share in np.linspace(0, 1, count)]
