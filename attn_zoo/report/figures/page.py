"""The page that every figure and every map is drawn on: title, note and legends, then panels in rows, in inches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Transform, offset_copy

from attn_zoo.report.figures.style import INK, MUTED, plain, styled
from attn_zoo.report.figures.svg import Tag

WIDTH = 5.6
"""Inches of a page, where nothing asks for more."""

TITLE_SIZE = 12.5
_TITLE_LINE = 0.21
_TIGHT = 1.12
"""A title that is this many times too wide for one line gets two."""
_MARGIN = 0.14
_NOTE_LETTER = 0.0665
"""Inches that a letter of the note takes, on average."""
_NOTE_LINE = 0.17

_LEGEND_SIZE = 8.5
_LEGEND_LINE, _LEGEND_PAD, _LEGEND_GAP = 2.0, 0.5, 1.4
"""In units of that size: an entry's line, the space before its words, and the space between columns."""

NO_FIGURE = Figure()
"""Stands for one that was written and let go: it held its pixels, ten MiB."""


class Page:
    """A figure that grows downwards: title and note first, then legends and rows of panels as they are asked for.

    Draw on the panels once all rows are there: each new row moves those above it in pixels.

    Args:
        title: on as many lines as it needs; smaller where a word would not fit.
        note: below it, wrapped; a line break starts a new line.
        width: inches.
    """

    def __init__(self, title: str, note: str, *, width: float = WIDTH) -> None:
        self.title, self.note, self.width = title, note, width
        self.alt = ""
        self.figure = _empty_figure(width)
        self.bottom = 0.5
        """Inches from the top edge to the end of what stands already."""
        self._places: list[tuple[Axes, float, float, float, float]] = []
        self._linear: list[Axes] = []
        room, text = 0.98 * (width - 2 * _MARGIN), plain(title, 240)
        lines, excess = [text], text_size(text, TITLE_SIZE, "bold")[0] / room
        if excess > _TIGHT:
            count = math.ceil(0.5 + 0.8 * excess)  # lines of unequal words are not full
            lines = wrap(text, math.ceil(1.12 * len(text) / count))
            excess = max(text_size(line, TITLE_SIZE, "bold")[0] / room for line in lines)
        size = TITLE_SIZE / max(1.0, excess)
        while max((text_size(line, size, "bold")[0] for line in lines), default=0.0) > room:
            size -= 0.25  # letters of whole pixels do not shrink with their size
        for place, line in enumerate(lines):
            self.text(_MARGIN, 0.3 + place * _TITLE_LINE, line, fontsize=size, fontweight="bold")
        self.bottom += _TITLE_LINE * (len(lines) - 1) if lines else 0.0
        letters = max(20, int((width - 2 * _MARGIN) / _NOTE_LETTER))
        for line in (line for part in note.split("\n") for line in wrap(part, letters, break_on_hyphens=False)):
            self.text(_MARGIN, self.bottom + 0.03, plain(line, 2 * letters), fontsize=8.5, color=MUTED)
            self.bottom += _NOTE_LINE
        self._grow(self.bottom + 0.08)

    def text(self, left: float, top: float, words: str, **style: Any) -> None:
        """Write words, inches from the top left corner; `top` is that of their middle."""
        self.figure.text(0, 1, words, transform=self._from_top_left(left, top), **({"va": "center"} | style))

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Return axes at a place in inches from the top left corner, inside what the page has grown to."""
        axes = self.figure.add_axes((0, 0, 1, 1))
        self._places.append((axes, left, top, width, height))
        self._grow(self.bottom)
        return axes

    def beside(self, panel: Axes, *, gap: float, width: float, max_height: float) -> Axes:
        """Return axes to the right of a panel, from its top edge down."""
        left, top, panel_width, height = next(place for axes, *place in self._places if axes is panel)
        return self.axes(left + panel_width + gap, top, width, min(height, max_height))

    def panels(
        self,
        count: int = 1,
        *,
        height: float,
        columns: int = 1,
        left: float = 0.82,
        right: float = 0.3,
        gap: float = 0.95,
        above: float = 0.06,
        below: float = 0.6,
    ) -> list[Axes]:
        """Return axes of equal size below what stands already, row by row.

        Args:
            count: of panels.
            height: of each, in inches, as all that follow.
            columns: panels side by side.
            left: margin.
            right: margin, for labels or a colour bar.
            gap: between columns.
            above: each row, for the titles of panels.
            below: each row, for ticks and the words of the axis.
        """
        width = (self.width - left - right - (columns - 1) * gap) / columns
        panels = []
        for index in range(count):
            column = index % columns
            if column == 0:
                top = self.bottom + above
                self._grow(top + height + below)
            panels.append(self.axes(left + column * (width + gap), top, width, height))
        return panels

    def legend(
        self, entries: Sequence[Line2D], *, left: float = 0.1, colour: str = INK, keys: Sequence[str] = ()
    ) -> None:
        """Draw a legend below what stands already; nothing for no entries. Pressing one of `keys` hides its curve."""
        if not entries:
            return
        beside = _LEGEND_SIZE / 72 * (_LEGEND_LINE + _LEGEND_PAD)
        widths = [text_size(str(entry.get_label()), _LEGEND_SIZE)[0] + beside for entry in entries]
        left = max(0.1, min(left, self.width - _MARGIN - max(widths)))
        columns = _legend_columns(widths, self.width - left - _MARGIN)
        legend = self.figure.legend(
            handles=list(entries),
            loc="upper left",
            bbox_to_anchor=(0, 1),
            bbox_transform=self._from_top_left(left, self.bottom - 0.05),
            ncols=columns,
            fontsize=_LEGEND_SIZE,
            columnspacing=_LEGEND_GAP,
            handlelength=_LEGEND_LINE,
            handletextpad=_LEGEND_PAD,
            borderpad=0,
            borderaxespad=0.4,
            labelspacing=0.35,
            labelcolor=colour,
        )
        for key, words in zip(keys, legend.get_texts(), strict=False):
            Tag(of=key, is_key=True).put_on(words)
        self._grow(self.bottom + 0.185 * math.ceil(len(entries) / columns) + 0.1)

    def may_be_linear(self, axes: Axes) -> None:
        """Let a reader of the page change logarithmic axes into linear ones."""
        self._linear.append(axes)

    def describe(self, said: Iterable[str]) -> Page:
        """Return the finished page; what is `said` of each curve tells a reader who cannot see it what it shows."""
        for axes in self._linear:
            box, height = axes.get_position(), 72 * self.bottom
            left, right = (72 * self.width * edge for edge in (box.x0, box.x1))
            edges = (left, height * (1 - box.y1), right, height * (1 - box.y0))
            Tag(is_log=True).put_on(axes.xaxis, axes.yaxis)
            Tag(axes=(*edges, axes.get_xscale(), *axes.get_xlim(), axes.get_yscale(), *axes.get_ylim())).put_on(axes)
        self.alt = ". ".join([self.title, *self.note.split("\n"), f"{'; '.join(said)}."])
        return self

    def _from_top_left(self, left: float, top: float) -> Transform:
        return offset_copy(self.figure.transFigure, self.figure, left, -top, units="inches")

    def _grow(self, bottom: float) -> None:
        self.bottom = bottom
        self.figure.set_size_inches(self.width, bottom)
        for axes, left, top, width, height in self._places:
            low = bottom - top - height
            axes.set_position((left / self.width, low / bottom, width / self.width, height / bottom))


def _legend_columns(widths: Sequence[float], room: float) -> int:
    """Return the most columns of entries this wide, filled one after another, that fit into `room` inches."""
    for count in range(len(widths), 1, -1):
        columns = [max(part) for part in np.array_split(widths, count)]
        if sum(columns) + (count - 1) * _LEGEND_SIZE / 72 * _LEGEND_GAP <= room:
            return count
    return 1


def _empty_figure(width: float) -> Figure:
    figure = Figure(figsize=(width, 1.0), dpi=100)
    FigureCanvasAgg(figure)
    return figure


@lru_cache(maxsize=1)
def _measuring_figure() -> Figure:
    return _empty_figure(WIDTH)


@lru_cache(maxsize=1024)
def text_size(words: str, size: float, weight: str = "normal") -> tuple[float, float]:
    """Return width and height in inches of words in so many points."""
    figure = _measuring_figure()
    with styled():
        text = figure.text(0, 0, words, fontsize=size, fontweight=weight)
        box = text.get_window_extent()
        text.remove()
    return float(box.width / figure.dpi), float(box.height / figure.dpi)
