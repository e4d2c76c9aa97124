"""Figures of one panel: time, peak memory, and speed-up over the fastest exact kernel, against length.

Panels of one length have rows of dots instead of curves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from attn_zoo.report.analysis.fits import Crossing, Growth
from attn_zoo.report.analysis.panels import Panel
from attn_zoo.report.analysis.series import Point, Series
from attn_zoo.report.figures.axes import (
    annotate,
    annotate_along,
    draw_curve,
    draw_interval,
    length_axis,
    set_ticks,
    value_axis,
)
from attn_zoo.report.figures.dot_rows import DotRow, draw_rows, row_axes
from attn_zoo.report.figures.labels import GAP, EndLabel, draw_end_labels, label_room, labels_height
from attn_zoo.report.figures.page import Page, text_size
from attn_zoo.report.figures.style import GUIDE, INK, MARK, MUTED, STRIP, Look, Looks, plain
from attn_zoo.report.figures.svg import Tag
from attn_zoo.report.tables.growth_tables import round_length
from attn_zoo.report.units import human_bytes, human_length, human_ms, ratio, shorten
from attn_zoo.report.wording import MARKS, held_words, outcome

STRIP_ROW = 0.34
STRIP_FONT = 8.5
GUIDE_GAP = 1.7
"""Factor between the data and the reference lines."""
POSITIVE = (0.0, math.inf)
_WAITING = "faint, hollow: calls that wait for the host"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """What is drawn of one length of a curve.

    Args:
        length: tokens.
        own: value of the mechanism itself: None where only calls were measured that wait for the host.
        call: value of the call as a user makes it, where it is another one.
        ends: of the interval of `call`, or of `own` where there is none.
        tip: what a reader who points at it is told.
    """

    length: int
    own: float | None
    call: float | None = None
    ends: tuple[float, float] | None = None
    tip: str


@dataclass(frozen=True, slots=True)
class _Curve:
    """One series, reduced to what is drawn; values are positive."""

    series: Series
    look: Look
    marks: tuple[_Mark, ...]

    @property
    def label(self) -> str:
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
class _Chart:
    """What tells one figure of a panel from another.

    Args:
        title: before that of the panel.
        show: a value, for people.
        base: of the logarithmic axis.
        legend: what the marks are.
        details: lines below the name of a curve.
        extra_labels: of lines that are no curve.
        extra_values: that must be on the axis too.
        draw: what belongs to this figure only; before the curves, once the axes are final.
        grown: fitted exponents by label, for the words.
        note: further words below the title.
    """

    title: str
    show: Callable[[float], str]
    base: int
    legend: Sequence[Line2D]
    details: Callable[[_Curve], Sequence[str]]
    extra_labels: Sequence[EndLabel] = ()
    extra_values: Sequence[float] = ()
    draw: Callable[[Axes], None]
    grown: Mapping[str, Growth] = field(default_factory=dict)
    note: str = ""


def _curves(panel: Panel, looks: Looks, mark: Callable[[Point], _Mark | None]) -> list[_Curve]:
    """Return the series that have something to draw."""
    every = (
        _Curve(series, looks[series.label], tuple(found for point in series.points if (found := mark(point))))
        for series in panel.series
    )
    return [curve for curve in every if curve.marks]


def _tip(point: Point, words: str) -> str:
    """Return what a mark says: whose it is, where, how much, and which kernel ran."""
    return "; ".join(filter(None, (f"{human_length(point.seq_len)} tokens: {words}", point.kernel)))


def _timed(point: Point) -> _Mark | None:
    if point.median_ms <= 0:
        return None
    words = human_ms.interval(point.median_ms, point.low_ms, point.high_ms)
    if point.device_ms:
        words = f"{human_ms(point.device_ms)} on the GPU alone; single call {words}"
    elif point.is_waiting:
        words += f" ({MARKS['host'][2]})"
    is_own = not (point.device_ms or point.is_waiting)
    return _Mark(
        length=point.seq_len,
        own=point.median_ms if is_own else point.device_ms,
        call=None if is_own else point.median_ms,
        ends=(point.low_ms, point.high_ms),
        tip=_tip(point, words),
    )


def draw_time(panel: Panel, looks: Looks) -> Page | None:
    """Return median time against length with intervals, slopes, crossings and failures; None without a point.

    The curve is that of the mechanism: on a GPU the time of the device alone where that was measured. Single calls that
    took longer, and those that wait for the host, are faint beside it.
    """
    curves = _curves(panel, looks, _timed)
    if not curves:
        return None
    has_device = any(point.device_ms for point in panel.points)
    legend = [_marker("median, 95 % interval, quartile band")]
    if has_device:
        legend.append(_marker("strong: the GPU alone; faint: single calls"))
    settled = [
        (curve, one)
        for curve in curves
        for one in (*panel.crossings, *panel.device_crossings)
        if one.is_fastest and one.label == curve.label and one.is_settled and one.result and one.result.length
    ]
    is_any_device = any(one.quantity == "device" for _, one in settled)
    if settled:
        words = f"crossover with {_baseline_name(panel)}" + (" (filled: of the GPU alone)" if is_any_device else "")
        legend.append(Line2D([], [], color=MUTED, marker="D", ms=6, mfc="white", mew=1.4, lw=0, label=words))
    if any(curve.series.waiting for curve in curves):
        shade = {"marker": "s", "ms": 8, "alpha": 0.18, "mew": 0, "lw": 0}
        legend.append(Line2D([], [], color=MUTED, label="shaded: calls wait for the host", **shade))  # type: ignore[arg-type]
    ends = [(length, value) for curve in curves for length, value in (*curve.own, *curve.calls) if value > 0]

    def draw(axes: Axes) -> None:
        _shade_waiting(axes, curves, panel.lengths)
        _reference_slopes(axes, ends)
        for curve in curves:
            _draw_quartiles(axes, curve)
        for curve, crossing in settled:
            _draw_crossing(axes, curve, crossing)

    chart = _Chart(
        title="Time",
        show=human_ms,
        base=10,
        legend=legend,
        details=lambda curve: (_growth_words(panel.time[curve.label]), *_wins(panel, curve)),
        draw=draw,
        grown=panel.time,
        note=_doubtful(panel, curves),
    )
    return _draw(panel, looks, curves, chart)


def draw_memory(panel: Panel, looks: Looks) -> Page | None:
    """Return peak bytes against length; None where they were not measured."""

    def mark(point: Point) -> _Mark | None:
        peak = point.memory.peak_bytes
        return _Mark(length=point.seq_len, own=float(peak), tip=_tip(point, human_bytes(peak))) if peak else None

    curves = _curves(panel, looks, mark)
    if not curves:
        return None
    points = [point for curve in curves for point in curve.own]
    chart = _Chart(
        title="Peak memory",
        show=human_bytes,
        base=2,
        legend=[_marker(f"most bytes in tensors at once, {held_words(panel.pass_)} included")],
        details=lambda curve: (_growth_words(panel.memory[curve.label]),),
        draw=lambda axes: _reference_slopes(axes, points),
        grown=panel.memory,
    )
    return _draw(panel, looks, curves, chart)


def draw_speed_up(panel: Panel, looks: Looks) -> Page | None:
    """Return the factor over the fastest exact kernel at each length; None without a baseline or another curve."""
    if panel.baseline is None:
        return None
    exact = panel.exact

    def mark(point: Point) -> _Mark | None:
        other = exact.get(point.seq_len)
        if other is None or min(point.median_ms, other.median_ms) <= 0:
            return None
        factor, alone = other.median_ms / point.median_ms, None
        ends = (other.low_ms / point.high_ms, other.high_ms / point.low_ms) if point.high_ms and point.low_ms else None
        words = ratio(factor) + (f" [{ratio(ends[0])}, {ratio(ends[1])}]" if ends else "")
        if point.device_ms and other.device_ms:
            alone = other.device_ms / point.device_ms
            words = f"{ratio(alone)} on the GPU alone; as single calls {words}"
        is_own = alone is None and not (point.is_waiting or other.is_waiting)
        tip = _tip(point, words)
        call = None if is_own else factor
        return _Mark(length=point.seq_len, own=factor if is_own else alone, call=call, ends=ends, tip=tip)

    def is_baseline(curve: _Curve) -> bool:
        ones = sum(abs(value - 1) < 1e-12 for _, value in curve.best)
        return curve.series.is_exact and len(exact) == len(curve.marks) == ones

    curves = [curve for curve in _curves(panel, looks, mark) if not is_baseline(curve)]
    if not curves:
        return None
    baseline = _baseline_name(panel)
    chart = _Chart(
        title=f"Speed-up over {baseline}",
        show=ratio,
        base=2,
        legend=[_marker("ratio of medians; bars: from the 95 % intervals")],
        details=lambda curve: (
            f"{ratio(curve.best[-1][1])} at {human_length(curve.best[-1][0])}",
            *_wins(panel, curve),
        ),
        extra_labels=[EndLabel(baseline, (f"fastest exact kernel: {ratio(1)}",), INK, max(exact), 1.0)],
        extra_values=[1.0],
        draw=_draw_ones,
    )
    return _draw(panel, looks, curves, chart)


def _draw_ones(axes: Axes) -> None:
    axes.axhline(1.0, color=INK, lw=1.0, zorder=1)


def _draw(panel: Panel, looks: Looks, curves: Sequence[_Curve], chart: _Chart) -> Page:
    """Draw curves over lengths, or rows of dots where there is one length only."""
    values = [value for curve in curves for value in curve.values] + list(chart.extra_values)
    note = panel.subtitle + chart.note
    failed = [series for series in panel.series if series.failures]
    lengths = {failure.seq_len for series in failed for failure in series.failures}
    lengths |= {mark.length for curve in curves for mark in curve.marks}
    if len(lengths) == 1:
        (length,) = lengths
        page = _draw_dots(panel, curves, chart, values, f"{note}; at {human_length(length)} tokens", looks)
    else:
        page = Page(f"{chart.title} against sequence length: {panel.title}", note)
        _draw_lengths(page, curves, chart, values, sorted(lengths), failed, looks)
    words = [_alt(curve, chart.show, chart.grown.get(curve.label)) for curve in curves]
    for series in failed:
        at = ", ".join(human_length(failure.seq_len) for failure in series.failures)
        words.append(f"{series.label}: {outcome(series.failures[0].record.status).legend} at {at}")
    return page.describe("; ".join(words))


def _draw_lengths(
    page: Page,
    curves: Sequence[_Curve],
    chart: _Chart,
    values: Sequence[float],
    lengths: Sequence[int],
    failed: Sequence[Series],
    looks: Looks,
) -> None:
    """Draw curves with labels at their ends below a strip of what failed."""
    labels = [_end_label(curve, chart.details(curve)) for curve in curves] + list(chart.extra_labels)
    legend = list(chart.legend)
    if any(mark.own is None for curve in curves for mark in curve.marks):
        legend.append(Line2D([], [], color=MUTED, marker="o", ms=4, mfc="white", lw=0, label=_WAITING))
    names = [text_size(words, STRIP_FONT)[0] for series in failed for words in _failed_words(series)]
    right = min(2.6, max([label_room(labels), 1.26, *(width + GAP + 0.14 for width in names)]))
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
    for curve in curves:
        _draw_calls(axes, curve)
        for mark in curve.marks:
            if mark.ends is not None:
                look: dict[str, Any] = {
                    "alpha": 1.0 if mark.call is None else 0.45,
                    "lw": 1.6,
                    "solid_capstyle": "butt",
                    "zorder": 2,
                }
                colour, own = curve.look.colour, Tag(of=curve.label)
                draw_interval(axes, mark.length, mark.ends, POSITIVE, tag=own, color=colour, **look)
        tips = tuple(f"{curve.label}, {mark.tip}" for mark in curve.marks if mark.own is not None)
        tag, is_open = Tag(of=curve.label, tips=tips), curve.series.is_simulated
        draw_curve(axes, curve.own, curve.look, curve.look.line, is_open=is_open, tag=tag)
    draw_end_labels(axes, labels, is_below_strip=bool(failed))


def _draw_calls(axes: Axes, curve: _Curve) -> None:
    """Draw calls that are not the mechanism's: faint, with hollow marks, and joined to the curve where it goes on."""
    calls, colour = curve.calls, curve.look.colour
    if not calls:
        return
    line = axes.plot(*zip(*_joined(curve), strict=True), color=colour, ls=curve.look.line, lw=1.1, alpha=0.45)
    look: dict[str, Any] = {"marker": curve.look.marker, "ms": 4.5, "mfc": "white", "mec": colour, "mew": 1.0}
    marks = axes.plot(*zip(*calls, strict=True), lw=0, alpha=0.7, zorder=2.9, **look)
    tips = tuple(f"{curve.label}, {mark.tip}" for mark in curve.marks if mark.call is not None)
    Tag(of=curve.label).put_on(*line)
    Tag(of=curve.label, tips=tips).put_on(*marks)


def _joined(curve: _Curve) -> list[tuple[float, float]]:
    """Return the points of calls, each span of them followed by the next point of the mechanism."""
    points: list[tuple[float, float]] = []
    for mark in curve.marks:
        if mark.call is not None:
            points.append((mark.length, mark.call))
        else:
            points += [(mark.length, mark.own or math.nan), (mark.length, math.nan)]
    return points


def _draw_dots(
    panel: Panel, curves: Sequence[_Curve], chart: _Chart, values: Sequence[float], note: str, looks: Looks
) -> Page:
    """Draw a row for each curve, the best on top, and one for each that gave no measurement."""
    sign = -1 if chart.extra_values else 1  # of speed-ups the largest is the best
    rows = [
        DotRow(
            name=curve.label + (" (simulated)" if curve.series.is_simulated else ""),
            label=curve.label,
            look=curve.look,
            words=chart.show(value) + ("" if mark.own is not None else " (host)"),
            tip=f"{curve.label}, {mark.tip}",
            value=value,
            ends=mark.ends,
            is_filled=mark.own is not None and not curve.series.is_simulated,
        )
        for curve in sorted(curves, key=lambda curve: sign * curve.best[-1][1])
        for mark, (_, value) in zip(curve.marks[-1:], curve.best[-1:], strict=True)
    ]
    drawn = {curve.label for curve in curves}
    for series in panel.series:
        if series.failures and series.label not in drawn:
            words = outcome(series.failures[-1].record.status).brief
            look = looks[series.label]
            rows.append(DotRow(name=series.label, label=series.label, look=look, words=words, tip=words))
    page = Page(f"{chart.title}: {panel.title}", f"{note}; bars: 95 % intervals" if _has_ends(curves) else note)
    axes = row_axes(page, rows)
    value_axis(axes, values, chart.show, chart.base, name="x")
    if chart.extra_values:
        axes.axvline(1.0, color=INK, lw=1.0, zorder=1)
    draw_rows(axes, rows, POSITIVE)
    return page


def _has_ends(curves: Sequence[_Curve]) -> bool:
    return any(mark.ends for curve in curves for mark in curve.marks)


def _alt(curve: _Curve, show: Callable[[float], str], grown: Growth | None) -> str:
    """Return a curve in words: its ends and its exponent."""
    (first, start), (last, end) = curve.best[0], curve.best[-1]
    words = f"{curve.label}: {show(start)} at {human_length(first)}"
    if last != first:
        words += f", {show(end)} at {human_length(last)}"
    if grown is not None and grown.exponent is not None and grown.is_settled:
        words += f", exponent {grown.exponent.value:.2f}"
        words += f" (claimed {grown.claimed:g})" if grown.claimed is not None else ""
    elif grown is not None and grown.why and last != first:
        words += f", {grown.why}" if _is_known_within(grown) else f", exponent not settled: {grown.why}"
    return words


def _marker(words: str) -> Line2D:
    return Line2D([], [], color=MUTED, marker="o", ms=4, lw=1.2, label=words)


def _end_label(curve: _Curve, details: Sequence[str]) -> EndLabel:
    name = plain(curve.label, 20) + (" (simulated)" if curve.series.is_simulated else "")
    lines = tuple(detail for detail in details if detail)
    return EndLabel(name, lines, curve.look.colour, *curve.best[-1], curve.label)


def _is_known_within(grown: Growth) -> bool:
    """Whether there is a slope to state with its interval, though it is no whole power for certain."""
    return grown.exponent is not None and grown.verdict == "not settled"


def _growth_words(grown: Growth) -> str:
    claimed = grown.claimed
    if grown.exponent is not None and grown.is_settled:
        return f"N^{grown.exponent.value:.2f}" + (f" (claimed {claimed:g})" if claimed is not None else "")
    if grown.exponent is not None and _is_known_within(grown):
        return f"slope {grown.exponent.value:.2f} [{grown.exponent.low:.2f}, {grown.exponent.high:.2f}]"
    if grown.slopes:
        return "slope not settled"
    return f"claimed N^{claimed:g}" if claimed is not None else ""


def _wins(panel: Panel, curve: _Curve) -> list[str]:
    """Return from where a curve is the faster one, of the GPU alone and as calls."""
    alone = _crossing_words(panel.crossing(curve.label, is_device=True))
    calls = _crossing_words(panel.crossing(curve.label))
    return [f"{alone} (GPU alone)", calls and f"{calls} (calls)"] if alone else [calls]


def _crossing_words(crossing: Crossing | None) -> str:
    result = crossing.result if crossing else None
    if crossing is None or result is None or len(result.lengths) == 1:
        return ""  # at one length nothing crosses
    if not crossing.is_settled:
        return "crossover not settled"
    if result.length is not None:
        return f"faster from {round_length(result.length)}" + (" (host)" if crossing.waiting else "")
    return "always faster" if result.kind == "always_faster" else "never faster"


def _doubtful(panel: Panel, curves: Sequence[_Curve]) -> str:
    """Return what makes times of the panel doubtful, and of how many, for the note; nothing where all is well."""
    doubts = {doubt for curve in curves for point in curve.series.points for doubt in point.doubts} - {"host"}
    said = [
        f"{sum(doubt in point.doubts for point in panel.points)} {words}"
        for doubt, (_, words, _) in MARKS.items()
        if doubt in doubts
    ]
    words = f"; of {len(panel.points)} times {', '.join(said)}" if said else ""
    if any(mark.own is None for curve in curves for mark in curve.marks):
        words += "; where the GPU alone was not timed, waiting for the host is inferred from times that hardly grow"
    return words


def _baseline_name(panel: Panel) -> str:
    return plain(panel.baseline.label) if panel.baseline else "exact attention"


def _draw_quartiles(axes: Axes, curve: _Curve) -> None:
    points = curve.series.points
    low, high = ([max(getattr(point.timing, end), 1e-12) for point in points] for end in ("q1_ms", "q3_ms"))
    lengths = [point.seq_len for point in points]
    band = axes.fill_between(lengths, low, high, color=curve.look.colour, alpha=0.15, lw=0, zorder=1.5)
    Tag(of=curve.label, is_log=True).put_on(band)


def _draw_crossing(axes: Axes, curve: _Curve, crossing: Crossing) -> None:
    """Draw a diamond on the curve, with the interval of the crossing length as a bar; full: of the GPU alone."""
    result, is_device = crossing.result, crossing.quantity == "device"
    assert result is not None
    assert result.length is not None
    times = [(point.seq_len, point.device_ms if is_device else point.median_ms) for point in curve.series.points]
    points = [(length, time_ms) for length, time_ms in times if time_ms]
    x, y = np.log(points).T
    height, colour, own = math.exp(np.interp(math.log(result.length), x, y)), curve.look.colour, Tag(of=curve.label)
    ends = (result.low or 0.0, result.high or math.inf)
    look: dict[str, Any] = {"color": colour, "lw": 1.2, "zorder": 4, "scalex": False}
    draw_interval(axes, height, ends, axes.get_xlim(), is_flat=True, tag=own, **look)
    face = colour if is_device else "white"
    own.put_on(*axes.plot([result.length], [height], marker="D", ms=8, mfc=face, mec=colour, mew=1.6, zorder=5))


def _shade_waiting(axes: Axes, curves: Sequence[_Curve], lengths: Sequence[int]) -> None:
    """Shade the lengths at which calls wait for the host, the darker the more curves do."""
    left, right = axes.get_xlim()
    lasts = [max(curve.series.waiting) for curve in curves if curve.series.waiting]
    for last in lasts:
        beyond = min((length for length in lengths if length > last), default=None)
        axes.axvspan(left, math.sqrt(last * beyond) if beyond else right, color=MUTED, alpha=0.06, lw=0, zorder=0.3)


def _reference_slopes(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Draw a light line of slope 1 below all points and one of slope 2 above them, so that neither hides data."""
    lengths = [length for length, _ in points]
    if min(lengths) == max(lengths):
        return
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    below = min(value / length for length, value in points) / GUIDE_GAP
    above = max(value / length**2 for length, value in points) * GUIDE_GAP
    bottom = max(bottom / 4, min(bottom, below * left))
    axes.set_ylim(bottom, top)
    for slope, factor, words in ((1, below, "slope 1 (linear)"), (2, above, "slope 2 (quadratic)")):
        ends = [max(left, (bottom / factor) ** (1 / slope)), min(right, (top / factor) ** (1 / slope))]
        heights = [factor * end**slope for end in ends]
        start, end = axes.transData.transform(np.array([ends, heights]).T)
        if math.hypot(*(end - start)) < 110:  # too short for its words, and a line without words says nothing
            continue
        Tag(is_log=True).put_on(*axes.plot(ends, heights, color=GUIDE, lw=1.0, ls=MARK, zorder=0.6))
        middle = math.sqrt(ends[0] * ends[1])
        offset, va = ((0, -2), "top") if slope == 1 else ((0, 2), "bottom")
        annotate_along(axes, words, (middle, factor * middle**slope), offset, end - start, va=va, zorder=0.7)


def _failed_words(series: Series) -> tuple[str, str]:
    """Return a name, and what happened instead of a measurement."""
    brief = dict.fromkeys(outcome(failure.record.status).brief for failure in series.failures)
    return plain(series.label, 20), shorten(", ".join(brief), 34)


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
        for failure in series.failures:
            marker = outcome(failure.record.status).marker
            mark = axes.plot([failure.seq_len], [row], marker=marker, color=colour, ms=6.5, mew=1.8, clip_on=False)
            tip = f"{series.label}, {human_length(failure.seq_len)} tokens: {failure.record.reason or failure.word}"
            Tag(of=series.label, tips=(shorten(tip, 200),)).put_on(*mark)
        for words, up in zip(_failed_words(series), (5, -5), strict=True):
            annotate(axes, words, (1, row), (72 * GAP, up), is_share=True, fontsize=STRIP_FONT, color=colour)
