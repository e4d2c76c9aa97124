"""One series as it is drawn: line, intervals, crossing mark."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attn_zoo.report.analysis.analyse import PanelAnalysis
from attn_zoo.report.analysis.series import Point, Series
from attn_zoo.report.figures.style import MUTED, Look

__all__ = ["Curve", "Picture", "diamond", "draw_crossing", "draw_curve", "draw_spread", "interpolate", "make_curves"]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure with what a reader who cannot see it needs.

    Args:
        name: file name stem.
        title: one line.
        alt: what it shows, in words and numbers.
        figure: not yet rendered.
    """

    name: str
    title: str
    alt: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Curve:
    """One series, reduced to what is drawn."""

    series: Series
    look: Look
    points: tuple[tuple[int, float], ...]


def make_curves(one: PanelAnalysis, look_of: Mapping[str, Look], value: Callable[[Point], float]) -> list[Curve]:
    """Return the series that have at least one positive value."""
    curves = []
    for series in one.panel.series:
        points = tuple((point.seq_len, value(point)) for point in series.points if value(point) > 0)
        if points:
            curves.append(Curve(series, look_of[series.label], points))
    return curves


def draw_curve(axes: Axes, curve: Curve) -> None:
    """Draw line and markers; hollow markers for a simulated variant."""
    x, y = zip(*curve.points, strict=True)
    look = curve.look
    is_open = curve.series.is_simulated
    axes.plot(
        x,
        y,
        color=look.colour,
        ls=look.line,
        lw=1.9,
        marker=look.marker,
        ms=5.5,
        mec=look.colour if is_open else "white",
        mfc="white" if is_open else look.colour,
        mew=1.2 if is_open else 0.7,
        zorder=3,
    )


def draw_spread(axes: Axes, curve: Curve) -> None:
    """Draw the 95 % interval of each median as a bar and the quartiles as a band."""
    points = curve.series.points
    x = [point.seq_len for point in points]
    low, high = ([max(getattr(point.timing, end), 1e-12) for point in points] for end in ("q1_ms", "q3_ms"))
    axes.fill_between(x, low, high, color=curve.look.colour, alpha=0.15, lw=0, zorder=1.5)
    for point in points:
        axes.plot(
            [point.seq_len] * 2, [max(point.low_ms, 1e-12), point.high_ms], color=curve.look.colour, lw=1.6, zorder=2
        )


def draw_crossing(
    axes: Axes, length: float, height: float, interval: tuple[float | None, float | None], colour: str
) -> None:
    """Draw a diamond with the interval of the crossing length as a horizontal line."""
    left, right = axes.get_xlim()
    axes.plot([interval[0] or left, interval[1] or right], [height] * 2, color=colour, lw=1.2, zorder=4, scalex=False)
    axes.plot([length], [height], marker="D", ms=8, mfc="white", mec=colour, mew=1.6, zorder=5)


def interpolate(points: Sequence[tuple[int, float]], length: float) -> float:
    """Return the value on the line through the points on log-log axes."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= length <= x1:
            share = math.log(length / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + share * math.log(y1 / y0))
    return points[0][1] if length < points[0][0] else points[-1][1]


def diamond(words: str) -> Line2D:
    """Return the legend entry of a crossing."""
    return Line2D([], [], color=MUTED, marker="D", ms=6, mfc="white", mew=1.4, lw=0, label=words)
