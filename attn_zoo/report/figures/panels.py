"""A figure of several panels under one title, with one legend of names at its right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attn_zoo.report.figures.style import MUTED, Look, draw_title, new_figure, plain

__all__ = ["legend_entry", "make_panels_figure"]

WIDTH = 8.0
GAP_X, GAP_Y = 0.95, 0.74
"""Inches between panels: room for tick labels and the axis title."""


def legend_entry(name: str, look: Look, *, is_dashed: bool = False) -> Line2D:
    """Return the line that stands for one label in a legend."""
    return Line2D(
        [],
        [],
        color=look.colour,
        ls=(0, (2, 1)) if is_dashed else "-",
        lw=1.9,
        marker=look.marker,
        ms=5,
        mfc="white",
        mec=look.colour,
        label=plain(name, 30),
    )


def make_panels_figure(
    title: str,
    said: str,
    entries: Sequence[Line2D],
    *,
    count: int,
    columns: int,
    height: float,
    gap_y: float = GAP_Y,
    gap_x: float = GAP_X,
    right: float = 0.2,
    above: float = 0.0,
) -> tuple[Figure, list[Axes]]:
    """Return the figure and its `count` panels, row by row; the legend stands below the title.

    Args:
        title: bold, one line.
        said: below it, wrapped.
        entries: of the legend; may be empty.
        count: panels.
        columns: panels side by side.
        height: of one panel, in inches.
        gap_y: between rows, in inches.
        gap_x: between columns, in inches.
        right: margin, in inches.
        above: room over the first row for titles of panels, in inches.
    """
    lines = wrap(said, 116, break_on_hyphens=False)
    longest = max((len(str(entry.get_label())) for entry in entries), default=0)
    across = max(1, min(len(entries), math.floor((WIDTH - 0.6) / (0.5 + 0.075 * longest)))) if entries else 1
    legend = 0.185 * math.ceil(len(entries) / across) + 0.1 if entries else 0.0
    rows = math.ceil(count / columns)
    head = 0.5 + 0.17 * len(lines) + legend + 0.16 + above
    foot, left = 0.6, 0.78
    total = head + rows * height + (rows - 1) * gap_y + foot
    figure = new_figure(WIDTH, total)
    draw_title(figure, title)
    for row, line in enumerate(lines):
        top = 1 - (0.53 + 0.17 * row) / total
        figure.text(0.14 / WIDTH, top, plain(line, 130), fontsize=8.5, color=MUTED, va="center")
    if entries:
        figure.legend(
            handles=list(entries),
            loc="upper left",
            bbox_to_anchor=(0.1 / WIDTH, 1 - (0.47 + 0.17 * len(lines)) / total),
            ncols=across,
            columnspacing=1.4,
            handletextpad=0.5,
            borderpad=0,
            borderaxespad=0.4,
            labelspacing=0.35,
        )
    width = (WIDTH - left - right - (columns - 1) * gap_x) / columns
    panels = []
    for index in range(count):
        row, column = divmod(index, columns)
        bottom = total - head - (row + 1) * height - row * gap_y
        place = ((left + column * (width + gap_x)) / WIDTH, bottom / total, width / WIDTH, height / total)
        panels.append(figure.add_axes(place))
    return figure, panels
