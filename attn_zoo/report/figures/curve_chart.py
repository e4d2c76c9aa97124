"""What figures of one panel share: curves over lengths with labels at their ends, below a strip of what failed.

Panels of one length have rows of dots instead of curves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.panels import Panel
from attn_zoo.report.analysis.series import Point, Series
from attn_zoo.report.figures.axes import annotate, draw_curve, draw_intervals, length_axis, set_ticks, value_axis
from attn_zoo.report.figures.dot_rows import DotRow, draw_rows, row_axes
from attn_zoo.report.figures.labels import GAP, EndLabel, draw_end_labels, label_room, labels_height, wrap_detail
from attn_zoo.report.figures.page import Page, text_size
from attn_zoo.report.figures.style import INK, MUTED, STRIP, Look, Looks, plain
from attn_zoo.report.figures.svg import Tag
from attn_zoo.report.wording import missing_word, outcome
from attn_zoo.units import human_length, shorten

STRIP_ROW = 0.34
STRIP_FONT = 8.5
DETAIL_ROOM = 2.2
"""Inches that a label may take from the panel before its details are wrapped."""
POSITIVE = (0.0, math.inf)
_WAITING = "faint, hollow: calls that wait for the host"
_LEVEL: dict[str, Any] = {"color": INK, "lw": 1.0, "zorder": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What is drawn of one length of a curve.

    Args:
        length: tokens.
        own: value of the mechanism itself: None where only calls were measured that wait for the host.
        call: value of the call as a user makes it, where it is another one.
        is_waiting: the call waits for the host.
        ends: of the interval of `call`, or of `own` where there is none.
        tip: what a reader who points at it is told.
    """

    length: int
    own: float | None
    call: float | None = None
    is_waiting: bool = False
    ends: tuple[float, float] | None = None
    tip: str


@dataclass(frozen=True, slots=True)
class Curve:
    """One series, reduced to what is drawn; values are positive."""

    series: Series
    look: Look
    marks: tuple[Mark, ...]

    @property
    def label(self) -> str:
        """Of the series."""
        return self.series.label

    @property
    def own(self) -> list[tuple[float, float]]:
        """Points of the mechanism; NaN where only calls are known, so that no line is drawn across."""
        return [(mark.length, math.nan if mark.own is None else mark.own) for mark in self.marks]

    @property
    def calls(self) -> list[tuple[float, float]]:
        """Points of calls that are not the mechanism's."""
        return [(mark.length, mark.call) for mark in self.marks if mark.call is not None]

    @property
    def best(self) -> list[tuple[int, float]]:
        """Of each length the mechanism, or else the call."""
        return [(mark.length, mark.own if mark.own is not None else mark.call or 0.0) for mark in self.marks]

    @property
    def values(self) -> list[float]:
        """All that must be on the axis."""
        drawn = [end for mark in self.marks for end in (mark.own, mark.call, *(mark.ends or ()))]
        return [value for value in drawn if value is not None and value > 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """What tells one figure of a panel from another.

    Args:
        title: before that of the panel.
        show: a value, for people.
        base: of the logarithmic axis.
        legend: what the marks are.
        details: lines below the name of a curve.
        draw: what belongs to this figure only; before the curves, once the axes are final.
        level: name of a line that all values are over, so that the largest is the best; drawn at its `y`.
        note: further words below the title.
        said: what the description says of a curve, beside its ends.
    """

    title: str
    show: Callable[[float], str]
    base: int
    legend: Sequence[Line2D]
    details: Callable[[Curve], Sequence[str]]
    draw: Callable[[Axes], object] = lambda _: None
    level: EndLabel | None = None
    note: str = ""
    said: Callable[[Curve], str] = lambda _: ""


def curves_of(panel: Panel, looks: Looks, mark: Callable[[Series, Point], Mark | None]) -> list[Curve]:
    """Return the series that have something to draw."""
    every = (
        Curve(series, looks[series.label], tuple(found for point in series.points if (found := mark(series, point))))
        for series in panel.series
    )
    return [curve for curve in every if curve.marks]


def draw_chart(panel: Panel, looks: Looks, curves: Sequence[Curve], chart: Chart) -> Page:
    """Draw curves over lengths, or rows of dots where there is one length only."""
    values = [value for curve in curves for value in curve.values] + ([chart.level.y] if chart.level else [])
    note = panel.subtitle + chart.note
    failed = [series for series in panel.series if series.failures]
    lengths = {length for series in failed for length in series.failures}
    lengths |= {mark.length for curve in curves for mark in curve.marks}
    if len(lengths) == 1:
        (length,) = lengths
        page = _draw_dots(panel, curves, chart, values, f"{note}; at {human_length(length)} tokens", looks)
    else:
        page = Page(f"{chart.title} against sequence length: {panel.title}", note)
        _draw_lengths(page, curves, chart, values, sorted(lengths), failed, looks)
    words = [_alt(curve, chart) for curve in curves]
    for series in failed:
        outcomes = grouped(series.failures.items(), lambda failure: outcome(failure[1].status).legend).items()
        said = (f"{what} at {', '.join(human_length(length) for length, _ in same)}" for what, same in outcomes)
        words.append(f"{series.label}: {' and '.join(said)}")
    return page.describe(words)


def _draw_lengths(
    page: Page,
    curves: Sequence[Curve],
    chart: Chart,
    values: Sequence[float],
    lengths: Sequence[int],
    failed: Sequence[Series],
    looks: Looks,
) -> None:
    """Draw curves with labels at their ends below a strip of what failed."""
    labels = [_end_label(curve, chart.details(curve)) for curve in curves] + ([chart.level] if chart.level else [])
    legend = list(chart.legend)
    if any(mark.is_waiting for curve in curves for mark in curve.marks):
        legend.append(Line2D([], [], color=MUTED, marker="o", ms=4, mfc="white", lw=0, label=_WAITING))
    names = [text_size(words, STRIP_FONT)[0] for series in failed for words in _failed_words(series)]
    right = max([label_room(labels), 1.26, *(width + GAP + 0.14 for width in names)])
    strip = page.panels(1 if failed else 0, height=STRIP_ROW * len(failed) + 0.04, right=right, below=0.0)
    (axes,) = page.panels(height=labels_height(labels, 3.2), right=right, below=0.62)
    page.legend(legend, left=0.72, colour=MUTED)
    page.may_be_linear(axes)
    length_axis(axes, lengths)
    if failed:
        _draw_strip(strip[0], failed, looks, axes)
        page.may_be_linear(strip[0])
    value_axis(axes, values, chart.show, chart.base)
    chart.draw(axes)
    if chart.level:
        axes.axhline(chart.level.y, **_LEVEL)
    for curve in curves:
        _draw_calls(axes, curve)
        for alpha, is_call in ((1.0, False), (0.45, True)):
            bars = [
                (each.length, each.ends) for each in curve.marks if each.ends and (each.call is not None) == is_call
            ]
            look: dict[str, Any] = {"alpha": alpha, "lw": 1.6, "solid_capstyle": "butt", "zorder": 2}
            draw_intervals(axes, bars, POSITIVE, tag=Tag(of=curve.label), color=curve.look.colour, **look)
        tips = tuple(f"{curve.label}, {mark.tip}" for mark in curve.marks if mark.own is not None)
        tag, is_open = Tag(of=curve.label, tips=tips), curve.series.is_simulated
        draw_curve(axes, curve.own, curve.look, curve.look.line, is_open=is_open, tag=tag)
    draw_end_labels(axes, labels, is_below_strip=bool(failed))


def _draw_calls(axes: Axes, curve: Curve) -> None:
    """Draw calls that are not the mechanism's: faint, joined to the curve where it goes on, hollow where they wait."""
    calls, colour = [mark for mark in curve.marks if mark.call is not None], curve.look.colour
    if not calls:
        return
    line = axes.plot(*zip(*_joined(curve), strict=True), color=colour, ls=curve.look.line, lw=1.1, alpha=0.45)
    Tag(of=curve.label).put_on(*line)
    for is_waiting, face in ((True, "white"), (False, colour)):
        some = [mark for mark in calls if mark.is_waiting == is_waiting]
        look: dict[str, Any] = {"marker": curve.look.marker, "ms": 4.5, "mfc": face, "mec": colour, "mew": 1.0}
        if some:
            points = [(mark.length, mark.call or math.nan) for mark in some]
            marks = axes.plot(*zip(*points, strict=True), lw=0, alpha=0.7, zorder=2.9, **look)
            Tag(of=curve.label, tips=tuple(f"{curve.label}, {mark.tip}" for mark in some)).put_on(*marks)


def _joined(curve: Curve) -> list[tuple[float, float]]:
    """Return the points of calls, each span of them followed by the next point of the mechanism."""
    points: list[tuple[float, float]] = []
    for mark in curve.marks:
        if mark.call is not None:
            points.append((mark.length, mark.call))
        else:
            points += [(mark.length, mark.own or math.nan), (mark.length, math.nan)]
    return points


def _draw_dots(
    panel: Panel, curves: Sequence[Curve], chart: Chart, values: Sequence[float], note: str, looks: Looks
) -> Page:
    """Draw a row for each curve, the best on top, and one for each that gave no measurement."""
    sign = -1 if chart.level else 1
    rows = [
        DotRow(
            name=curve.label + (" (simulated)" if curve.series.is_simulated else ""),
            label=curve.label,
            look=curve.look,
            words=_dot_words(mark, chart),
            tip=f"{curve.label}, {mark.tip}",
            value=value,
            ends=mark.ends,
            call=None if mark.own is None else mark.call,
            is_filled=mark.own is not None and not curve.series.is_simulated,
        )
        for curve in sorted(curves, key=lambda curve: sign * curve.best[-1][1])
        for mark, (_, value) in zip(curve.marks[-1:], curve.best[-1:], strict=True)
    ]
    drawn = {curve.label for curve in curves}
    for series in panel.series:
        if series.failures and series.label not in drawn:
            words = outcome(series.failures[max(series.failures)].status).brief
            look = looks[series.label]
            rows.append(DotRow(name=series.label, label=series.label, look=look, words=words, tip=words))
    if any(mark.ends for curve in curves for mark in curve.marks):
        note += "; bars: 95 % intervals"
    if any(row.call is not None for row in rows):
        note += "; faint: calls, where the GPU alone is drawn strong"
    page = Page(f"{chart.title}: {panel.title}", note)
    axes = row_axes(page, rows)
    value_axis(axes, values, chart.show, chart.base, name="x")
    axes.set_xlabel(f"{chart.title[:1].lower()}{chart.title[1:]} (logarithmic)")
    if chart.level:
        axes.axvline(chart.level.y, **_LEVEL)
    draw_rows(axes, rows, POSITIVE)
    return page


def _dot_words(mark: Mark, chart: Chart) -> str:
    """Return the value of a dot in words, with that of the call where it is another one."""
    if mark.own is None:
        return f"{chart.show(mark.call or 0.0)} (host)"
    return chart.show(mark.own) + ("" if mark.call is None else f" (GPU), call {chart.show(mark.call)}")


def _alt(curve: Curve, chart: Chart) -> str:
    """Return a curve in words: its ends, and what the figure says of it."""
    said = [
        f"{chart.show(value)} at {human_length(length)}{_whose(mark)}"
        for mark, (length, value) in zip(curve.marks, curve.best, strict=True)
    ]
    return f"{curve.label}: {', '.join(dict.fromkeys([said[0], said[-1]]))}{chart.said(curve)}"


def _whose(mark: Mark) -> str:
    """Return whose value it is where a call takes longer than the mechanism."""
    if mark.call is None:
        return ""
    return " (waits for the host)" if mark.own is None else " (the GPU alone)"


def _end_label(curve: Curve, details: Sequence[str]) -> EndLabel:
    name = plain(curve.label) + (" (simulated)" if curve.series.is_simulated else "")
    lines = tuple(line for detail in details for line in wrap_detail(detail, DETAIL_ROOM))
    return EndLabel(name, lines, curve.look.colour, *curve.best[-1], curve.label)


def _failed_words(series: Series) -> tuple[str, str]:
    """Return a name, and what happened instead of a measurement."""
    brief = dict.fromkeys(outcome(record.status).brief for record in series.failures.values())
    return plain(series.label), shorten(", ".join(brief), 34)


def _draw_strip(axes: Axes, failed: Sequence[Series], looks: Looks, below: Axes) -> None:
    """Draw one row for each series with failures: marks at their lengths, words at the right."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(below.get_xlim())
    axes.set_ylim(len(failed) - 0.5, -0.5)
    set_ticks(axes.xaxis, [], str)
    set_ticks(axes.yaxis, [], str)
    axes.set_facecolor(STRIP)
    axes.spines[:].set_visible(False)
    for row, series in enumerate(failed):
        colour = looks[series.label].colour
        for length, record in series.failures.items():
            marker = outcome(record.status).marker
            mark = axes.plot([length], [row], marker=marker, color=colour, ms=6.5, mew=1.8, clip_on=False)
            tip = f"{series.label}, {human_length(length)} tokens: {record.reason or missing_word(record)}"
            Tag(of=series.label, tips=(shorten(tip, 200),)).put_on(*mark)
        for words, up in zip(_failed_words(series), (5, -5), strict=True):
            annotate(axes, words, (1, row), (72 * GAP, up), is_share=True, fontsize=STRIP_FONT, color=colour)
