"""Axes of score against speed: limits, ticks, and the floors as lines with names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.figures.placing import Box
from attn_zoo.report.figures.style import MUTED, plain
from attn_zoo.report.units import human_number

__all__ = ["draw_floors", "score_against_speed"]


def score_against_speed(axes: Axes, speeds: Sequence[float], values: Sequence[float], metric: Metric) -> None:
    """Set up a logarithmic axis of speeds and an axis of scores, with air for names on all sides."""
    low, high = min(speeds), max(speeds)
    # At least a factor of two is shown, so that equal speeds do not look different; names need air on both sides.
    spread = max(math.log(high / low), math.log(2.0))
    middle = (math.log(low) + math.log(high)) / 2
    axes.set_xscale("log")
    axes.set_xlim(math.exp(middle - 0.68 * spread), math.exp(middle + 0.68 * spread))
    left, right = axes.get_xlim()
    steps = (1, 1.5, 2, 3, 5, 7) if right / left < 12 else (1, 2, 5)
    powers = range(math.floor(math.log10(left)), math.ceil(math.log10(right)) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if left <= tick <= right]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _speed(value)))
    span = max(values) - min(values) or 0.02 * (abs(values[0]) or 1.0)
    axes.set_ylim(min(values) - 0.1 * span, max(values) + 0.14 * span)
    axes.yaxis.set_major_locator(MaxNLocator(7))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: metric.tick(value)))


def _speed(value: float) -> str:
    if value >= 1e6:
        return f"{human_number(value / 1e6)}M"
    return f"{human_number(value / 1e3)}k" if value >= 1e3 else human_number(value)


def draw_floors(axes: Axes, marks: Mapping[str, float], metric: Metric) -> list[Box]:
    """Draw a dashed line for each of at most two marks, named on its far side; return boxes to keep names off."""
    boxes: list[Box] = []
    highest = max(marks.values(), default=0.0)
    for name, value in sorted(marks.items(), key=lambda mark: mark[1]):
        axes.axhline(value, color=MUTED, lw=1.0, ls=(0, (4, 2)), zorder=1)
        is_above = value == highest and len(boxes) == len(marks) - 1
        text = axes.annotate(
            f"{plain(name.replace('_', ' '), 26)} {metric.show(value)}",
            xy=(0, value),
            xycoords=("axes fraction", "data"),
            xytext=(4, 2 if is_above else -2),
            textcoords="offset points",
            fontsize=8,
            color=MUTED,
            va="bottom" if is_above else "top",
        )
        extent = text.get_window_extent()
        boxes.append(Box(extent.x0, extent.y0, extent.x1, extent.y1))
    inside = axes.get_window_extent()
    heights = [float(axes.transData.transform((1.0, value))[1]) for value in marks.values()]
    return [*boxes, *(Box(inside.x0, height - 2, inside.x1, height + 2) for height in heights)]
