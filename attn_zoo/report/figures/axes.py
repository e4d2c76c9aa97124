"""Axes with human ticks, reference slopes, and the strip at the top edge that holds what gave no measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from attn_zoo.report.figures.labels import EndLabel, label_width
from attn_zoo.report.figures.style import INK, MUTED, draw_title, new_figure
from attn_zoo.report.units import human_length

__all__ = ["Frame", "Mark", "length_axis", "make_frame", "reference_slopes", "value_axis"]

WIDTH = 8.0
STRIP_ROW = 0.2
GUIDE_GAP = 1.7
"""Factor between the data and the reference lines."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One row of the strip: a label, why there is no measurement, and at which lengths."""

    name: str
    words: str
    colour: str
    lengths: tuple[int, ...]
    markers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """A figure with its main axes, laid out for the labels it will get."""

    figure: Figure
    axes: Axes
    has_strip: bool


def make_frame(
    title: str,
    subtitle: str,
    labels: Sequence[EndLabel],
    marks: Sequence[Mark],
    lengths: Sequence[int],
    legend: Sequence[Line2D],
) -> Frame:
    """Return an empty frame: title, strip of marks, length axis, legend, and room for the labels."""
    needed = sum(label.height for label in labels)
    height = max(3.5, needed + 0.1)
    lines = wrap(subtitle, 116)
    top = 0.5 + 0.17 * len(lines) + 0.08
    strip = STRIP_ROW * len(marks) + (0.1 if marks else 0.0)
    bottom = 0.62 + (0.3 if legend else 0.0)
    total = top + strip + height + bottom
    figure = new_figure(WIDTH, total)
    strip_labels = [EndLabel(f"{mark.name}: {mark.words}", "", mark.colour, 1, 1) for mark in marks]
    right = min(3.4, max(label_width(figure, [*labels]), 0.94 * label_width(figure, strip_labels), 0.9) + 0.36)
    left = 0.82
    draw_title(figure, title)
    for row, line in enumerate(lines):
        figure.text(0.14 / WIDTH, 1 - (0.53 + 0.17 * row) / total, line, fontsize=8.5, color=MUTED, va="center")
    across = (left / WIDTH, (WIDTH - left - right) / WIDTH)
    axes = figure.add_axes((across[0], bottom / total, across[1], height / total))
    length_axis(axes, lengths, (WIDTH - left - right) * 100)
    if marks:
        above = figure.add_axes((across[0], (bottom + height + 0.06) / total, across[1], (strip - 0.06) / total))
        _draw_strip(above, marks, axes)
    if legend:
        figure.legend(
            handles=list(legend),
            loc="lower left",
            bbox_to_anchor=((left - 0.1) / WIDTH, 0.06 / total),
            ncols=len(legend),
            columnspacing=1.4,
            handletextpad=0.5,
            borderpad=0,
            labelcolor=MUTED,
        )
    return Frame(figure, axes, bool(marks))


def length_axis(axes: Axes, lengths: Sequence[int], pixels: float) -> None:
    """Set up a logarithmic length axis with ticks at the measured lengths (or powers of two), never crowded."""
    low, high = min(lengths), max(lengths)
    margin = 2**0.5 if low == high else (high / low) ** 0.035
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / margin, high * margin)
    ticks: Sequence[float] = sorted(set(lengths))
    span = math.log(high / low) + 2 * math.log(margin)
    closest = min((math.log(b / a) for a, b in pairwise(ticks)), default=span)
    is_tight = closest / span * pixels < 40
    if closest / span * pixels < 30:
        powers = [2.0**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
        step = max(1, math.ceil(30 * span / (math.log(2) * pixels)))
        ticks = powers[::-1][::step][::-1] or [low, high]
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_length(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("sequence length (tokens)", color=INK, fontsize=9.5)
    axes.tick_params(length=3, width=0.7)
    if is_tight:
        axes.tick_params(axis="x", labelsize=8)


def value_axis(
    axes: Axes, values: Sequence[float], show: Callable[[float], str], base: Literal[2, 10], pad: float = 1.25
) -> None:
    """Set up a logarithmic value axis with at most about eight ticks in people's units.

    Args:
        axes: to change.
        values: everything drawn, positive.
        show: text of a tick.
        base: 10 for times, 2 for bytes and factors.
        pad: factor of air above and below.
    """
    low, high = min(values) / pad, max(values) * pad
    if high / low < 3:  # a flat picture: keep it from exaggerating noise
        middle = math.sqrt(low * high)
        low, high = middle / 3**0.5, middle * 3**0.5
    axes.set_yscale("log", base=base)
    axes.set_ylim(low, high)
    bottom, top = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    steps = (1, 2, 5) if base == 10 and top - bottom <= 3 else (1,)
    ticks = [step * float(base) ** power for power in range(bottom, top + 1) for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    every = math.ceil(len(ticks) / 8)
    axes.yaxis.set_major_locator(FixedLocator(ticks[::every]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def reference_slopes(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Draw a light line of slope 1 below all points and one of slope 2 above them, so that neither hides data."""
    lengths = [length for length, _ in points]
    if min(lengths) == max(lengths):
        return
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    below = min(value / length for length, value in points) / GUIDE_GAP
    above = max(value / length**2 for length, value in points) * GUIDE_GAP
    bottom = min(bottom, below * left)
    axes.set_ylim(bottom, top)
    for slope, factor, words in ((1, below, "slope 1 (linear)"), (2, above, "slope 2 (quadratic)")):
        ends = [max(left, (bottom / factor) ** (1 / slope)), min(right, (top / factor) ** (1 / slope))]
        heights = [factor * end**slope for end in ends]
        start, end = axes.transData.transform(np.array([ends, heights]).T)
        if math.hypot(*(end - start)) < 110:  # too short for its words, and a line without words says nothing
            continue
        axes.plot(ends, heights, color="#afb8c1", lw=1.0, ls=(0, (4, 2)), zorder=0.6)
        middle = math.sqrt(ends[0] * ends[1])
        axes.annotate(
            words,
            xy=(middle, factor * middle**slope),
            xytext=(0, -2 if slope == 1 else 2),
            textcoords="offset points",
            rotation=math.degrees(math.atan2(end[1] - start[1], end[0] - start[0])),
            rotation_mode="anchor",
            ha="center",
            va="top" if slope == 1 else "bottom",
            fontsize=7.8,
            color=MUTED,
            zorder=0.7,
        )


def _draw_strip(axes: Axes, marks: Sequence[Mark], below: Axes) -> None:
    """Draw one row per mark: same lengths as the axes below, names at the right."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(below.get_xlim())
    axes.set_ylim(len(marks) - 0.5, -0.5)
    axes.xaxis.set_major_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(NullLocator())
    axes.set_facecolor("#f6f8fa")
    for side in axes.spines.values():
        side.set_visible(False)
    for row, mark in enumerate(marks):
        for length, marker in zip(mark.lengths, mark.markers, strict=True):
            axes.plot(
                [length], [row], marker=marker, color=mark.colour, ms=6.5, mew=1.8, mec=mark.colour, clip_on=False
            )
        axes.annotate(
            f"{mark.name}: {mark.words}",
            xy=(1, row),
            xycoords=("axes fraction", "data"),
            xytext=(16, 0),
            textcoords="offset points",
            fontsize=8.5,
            color=mark.colour,
            va="center",
            annotation_clip=False,
        )
