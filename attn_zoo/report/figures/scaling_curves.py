"""Figures of one panel: time, peak and extra memory, and speed-up over the fastest exact kernel, against length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from attn_zoo.report.analysis.fits import Growth
from attn_zoo.report.analysis.panels import Panel
from attn_zoo.report.analysis.series import Point, Series
from attn_zoo.report.figures.axes import annotate, annotate_along, draw_curve, length_axis, set_ticks, value_axis
from attn_zoo.report.figures.labels import GAP, EndLabel, draw_end_labels, label_room, labels_height
from attn_zoo.report.figures.page import Page, text_size
from attn_zoo.report.figures.style import INK, MARK, MUTED, Look, Looks, plain
from attn_zoo.report.tables.growth_tables import round_length
from attn_zoo.report.units import human_bytes, human_length, human_ms, ratio
from attn_zoo.report.wording import MARKS, held_words, outcome
from attn_zoo.statistics import Crossover

STRIP_ROW = 0.2
STRIP_FONT = 8.5
GUIDE_GAP = 1.7
"""Factor between the data and the reference lines."""


@dataclass(frozen=True, slots=True)
class _Curve:
    """One series, reduced to what is drawn: (length, value), values positive."""

    series: Series
    look: Look
    points: tuple[tuple[int, float], ...]

    @property
    def label(self) -> str:
        return self.series.label


def _curves(panel: Panel, looks: Looks, value: Callable[[Point], float]) -> list[_Curve]:
    """Return the series that have at least one positive value."""
    every = (
        _Curve(series, looks[series.label], tuple((p.seq_len, value(p)) for p in series.points if value(p) > 0))
        for series in panel.series
    )
    return [curve for curve in every if curve.points]


def draw_time(panel: Panel, looks: Looks) -> Page | None:
    """Return median time against length with intervals, slopes, crossings and failures; None without a point.

    Where the GPU alone was timed at every length, that is the curve, and that of single calls is faint beside it.
    """
    curves = _curves(panel, looks, lambda point: point.median_ms)
    if not curves:
        return None
    alone = {
        curve.label: tuple((point.seq_len, point.device_ms or 0.0) for point in curve.series.points)
        for curve in curves
        if all(point.device_ms for point in curve.series.points)
    }
    ends = [
        (point.seq_len, end)
        for curve in curves
        for point in curve.series.points
        for end in (point.median_ms, point.low_ms, point.high_ms, point.timing.q1_ms, point.timing.q3_ms)
        if end > 0
    ] + [point for points in alone.values() for point in points]
    legend = [_marker("median, 95 % interval, quartile band")]
    if alone:
        legend.append(_marker("faint: single calls; strong: the GPU alone"))
    crossings = {curve.label: found for curve in curves if (found := _settled_crossing(panel, curve)) is not None}
    if crossings:
        words = f"crossover with {_baseline_name(panel)}"
        legend.append(Line2D([], [], color=MUTED, marker="D", ms=6, mfc="white", mew=1.4, lw=0, label=words))

    def draw(axes: Axes) -> None:
        _reference_slopes(axes, ends)
        for curve in curves:
            _draw_spread(axes, curve)
            if curve.label in alone:
                draw_curve(axes, alone[curve.label], curve.look, curve.look.line)
            if (crossing := crossings.get(curve.label)) is not None and crossing.length is not None:
                _draw_crossing(axes, curve, crossing.length, (crossing.low, crossing.high))

    return _draw(
        panel,
        looks,
        curves,
        title="Time against sequence length",
        show=human_ms,
        base=10,
        values=[end for _, end in ends],
        labels=[_end_label(curve, _growth_words(panel.time[curve.label]), _wins(panel, curve)) for curve in curves],
        legend=legend,
        draw=draw,
        grown=panel.time,
        faint_until={
            curve.label: max(curve.series.lengths if curve.label in alone else curve.series.waiting, default=0)
            for curve in curves
        },
    )


def draw_memory(panel: Panel, looks: Looks) -> Page | None:
    """Return peak bytes against length; None where they were not measured."""
    curves = _curves(panel, looks, lambda point: float(point.memory.peak_bytes or 0))
    if not curves:
        return None
    points = [point for curve in curves for point in curve.points]
    return _draw(
        panel,
        looks,
        curves,
        title="Peak memory against sequence length",
        show=human_bytes,
        base=2,
        values=[value for _, value in points],
        labels=[_end_label(curve, _growth_words(panel.memory[curve.label])) for curve in curves],
        legend=[_marker(f"most bytes in tensors at once, {held_words(panel.pass_)} included")],
        draw=lambda axes: _reference_slopes(axes, points),
        grown=panel.memory,
    )


def draw_speed_up(panel: Panel, looks: Looks) -> Page | None:
    """Return the factor over the fastest exact kernel at each length; None without a baseline or another curve."""
    if panel.baseline is None:
        return None
    exact = {point.seq_len: point for point in panel.baseline.points}

    def speed_up(point: Point) -> float:
        return exact[point.seq_len].median_ms / point.median_ms if point.seq_len in exact else 0.0

    def is_baseline(curve: _Curve) -> bool:
        ones = sum(abs(value - 1) < 1e-12 for _, value in curve.points)
        return curve.series.is_exact and len(exact) == len(curve.points) == ones

    curves = [curve for curve in _curves(panel, looks, speed_up) if not is_baseline(curve)]
    if not curves:
        return None
    bars = [
        (curve.look.colour, point.seq_len, (other.low_ms / point.high_ms, other.high_ms / point.low_ms))
        for curve in curves
        for point in curve.series.points
        if (other := exact.get(point.seq_len)) is not None and point.high_ms > 0 and point.low_ms > 0
    ]
    labels = []
    for curve in curves:
        length, factor = curve.points[-1]
        labels.append(_end_label(curve, f"{ratio(factor)} at {human_length(length)}", _wins(panel, curve)))
    baseline = _baseline_name(panel)
    labels.append(EndLabel(baseline, f"fastest exact kernel: {ratio(1)}", INK, max(exact), 1.0))

    def draw(axes: Axes) -> None:
        axes.axhline(1.0, color=INK, lw=1.0, zorder=1)
        for colour, length, ends in bars:
            axes.plot([length] * 2, ends, color=colour, lw=1.3, solid_capstyle="butt")

    return _draw(
        panel,
        looks,
        curves,
        title=f"Speed-up over {baseline}",
        show=ratio,
        base=2,
        values=[
            1.0,
            *(value for curve in curves for _, value in curve.points),
            *(end for bar in bars for end in bar[2]),
        ],
        labels=labels,
        legend=[_marker("ratio of medians; bars: from the 95 % intervals")],
        draw=draw,
        grown={},
        faint_until={
            curve.label: max(curve.series.waiting | (panel.baseline.waiting if panel.baseline else set()), default=0)
            for curve in curves
        },
    )


def _draw(
    panel: Panel,
    looks: Looks,
    curves: Sequence[_Curve],
    *,
    title: str,
    show: Callable[[float], str],
    base: int,
    values: Sequence[float],
    labels: Sequence[EndLabel],
    legend: Sequence[Line2D],
    draw: Callable[[Axes], None],
    grown: Mapping[str, Growth],
    faint_until: Mapping[str, int] | None = None,
) -> Page:
    """Draw curves with labels at their ends below a strip of what failed.

    The axis has logarithms of `base`, reaches all `values` and says them with `show`; `draw` adds what belongs to one
    figure only; `grown` are the fitted exponents, for the words; `faint_until` says up to which length a curve is not
    that of the mechanism.
    """
    faint_until = faint_until or {}
    if any(curve.series.waiting for curve in curves if faint_until.get(curve.label)):
        legend = [*legend, Line2D([], [], color=MUTED, marker="o", ms=4, mfc="white", lw=0, label=_WAITING)]
    failed = [series for series in panel.series if series.failures]
    lengths = {failure.seq_len for series in failed for failure in series.failures}
    lengths |= {length for curve in curves for length, _ in curve.points}
    doubts = {doubt for curve in curves for point in curve.series.points for doubt in point.doubts} - {"host"}
    page = Page(f"{title}: {panel.title}", panel.subtitle + (_doubtful(panel, doubts) if grown is panel.time else ""))
    names = max((text_size(_failed_words(series), STRIP_FONT)[0] for series in failed), default=0.0)
    right = min(3.4, max(label_room(labels), names + GAP + 0.14, 1.26))
    strip = page.panels(1 if failed else 0, height=STRIP_ROW * len(failed) + 0.04, right=right, below=0.0)
    (axes,) = page.panels(height=labels_height(labels, 3.5), right=right, below=0.62)
    page.legend(legend, left=0.72, colour=MUTED)
    length_axis(axes, sorted(lengths))
    if failed:
        _draw_strip(strip[0], failed, looks, axes)
    value_axis(axes, values, show, base)
    draw(axes)
    for curve in curves:
        draw_curve(
            axes,
            curve.points,
            curve.look,
            curve.look.line,
            is_open=curve.series.is_simulated,
            faint_until=faint_until.get(curve.label, 0),
        )
    draw_end_labels(axes, labels, is_below_strip=bool(failed))
    words = [_alt(curve, show, grown.get(curve.label)) for curve in curves]
    for series in failed:
        at = ", ".join(human_length(failure.seq_len) for failure in series.failures)
        words.append(f"{series.label}: {outcome(series.failures[0].status).legend} at {at}")
    return page.describe("; ".join(words))


def _alt(curve: _Curve, show: Callable[[float], str], grown: Growth | None) -> str:
    """Return a curve in words: its ends and its exponent."""
    (first, start), (last, end) = curve.points[0], curve.points[-1]
    words = f"{curve.label}: {show(start)} at {human_length(first)}"
    if last != first:
        words += f", {show(end)} at {human_length(last)}"
    if grown is not None and grown.exponent is not None and grown.is_settled:
        words += f", exponent {grown.exponent.value:.2f}"
        words += f" (claimed {grown.claimed:g})" if grown.claimed is not None else ""
    elif grown is not None and grown.why:
        words += f", {grown.why}" if _is_known_within(grown) else f", exponent not settled: {grown.why}"
    return words


def _marker(words: str) -> Line2D:
    return Line2D([], [], color=MUTED, marker="o", ms=4, lw=1.2, label=words)


def _end_label(curve: _Curve, *details: str) -> EndLabel:
    name = plain(curve.label) + (" (simulated)" if curve.series.is_simulated else "")
    return EndLabel(name, ", ".join(detail for detail in details if detail), curve.look.colour, *curve.points[-1])


def _is_known_within(grown: Growth) -> bool:
    """Whether there is a slope to state with its interval, though it is no whole power for certain."""
    return grown.exponent is not None and grown.verdict == "not settled"


def _growth_words(grown: Growth) -> str:
    claimed = grown.claimed
    if grown.exponent is not None and grown.is_settled:
        return f"$N^{{{grown.exponent.value:.2f}}}$" + (f" (claimed {claimed:g})" if claimed is not None else "")
    if grown.exponent is not None and _is_known_within(grown):
        return f"slope {grown.exponent.value:.2f} [{grown.exponent.low:.2f}, {grown.exponent.high:.2f}]"
    if grown.slopes:
        return "slope not settled"
    return f"claimed $N^{{{claimed:g}}}$" if claimed is not None else ""


def _settled_crossing(panel: Panel, curve: _Curve) -> Crossover | None:
    """Return where the curve crosses the fastest exact one; None where it does not, or nobody can say where."""
    crossing = panel.crossing(curve.label)
    if crossing is None or crossing.result is None or crossing.result.length is None or not crossing.is_settled:
        return None
    return crossing.result


def _wins(panel: Panel, curve: _Curve) -> str:
    crossing = panel.crossing(curve.label)
    if crossing is None or crossing.result is None or len(crossing.result.lengths) == 1:
        return ""  # at one length nothing crosses
    if not crossing.is_settled:
        return "crossover not settled"
    if crossing.result.length is not None:
        return f"faster from {round_length(crossing.result.length)}" + (" (host)" if crossing.waiting else "")
    return "always faster" if crossing.result.kind == "always_faster" else "never faster"


_WAITING = "hollow: waits for the host, which decides where such curves cross"


def _doubtful(panel: Panel, doubts: set[str]) -> str:
    """Return how many times of the panel are doubtful, and why, for the note; nothing where all is well."""
    said = [
        f"{sum(doubt in point.doubts for point in panel.points)} {words}"
        for doubt, (_, words, _) in MARKS.items()
        if doubt in doubts
    ]
    return f"; of {len(panel.points)} times {', '.join(said)}" if said else ""


def _baseline_name(panel: Panel) -> str:
    return plain(panel.baseline.label) if panel.baseline else "exact attention"


def _draw_spread(axes: Axes, curve: _Curve) -> None:
    """Draw the 95 % interval of each median as a bar and the quartiles as a band."""
    points, colour = curve.series.points, curve.look.colour
    low, high = ([max(getattr(point.timing, end), 1e-12) for point in points] for end in ("q1_ms", "q3_ms"))
    axes.fill_between([point.seq_len for point in points], low, high, color=colour, alpha=0.15, lw=0, zorder=1.5)
    for point in points:
        axes.plot([point.seq_len] * 2, [max(point.low_ms, 1e-12), point.high_ms], color=colour, lw=1.6, zorder=2)


def _draw_crossing(axes: Axes, curve: _Curve, length: float, interval: tuple[float | None, float | None]) -> None:
    """Draw a diamond on the curve, with the interval of the crossing length as a horizontal line."""
    x, y = np.log(curve.points).T
    height, colour = math.exp(np.interp(math.log(length), x, y)), curve.look.colour
    left, right = axes.get_xlim()
    axes.plot([interval[0] or left, interval[1] or right], [height] * 2, color=colour, lw=1.2, zorder=4, scalex=False)
    axes.plot([length], [height], marker="D", ms=8, mfc="white", mec=colour, mew=1.6, zorder=5)


def _reference_slopes(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
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
        axes.plot(ends, heights, color="#afb8c1", lw=1.0, ls=MARK, zorder=0.6)
        middle = math.sqrt(ends[0] * ends[1])
        offset, va = ((0, -2), "top") if slope == 1 else ((0, 2), "bottom")
        annotate_along(axes, words, (middle, factor * middle**slope), offset, end - start, va=va, zorder=0.7)


def _failed_words(series: Series) -> str:
    """Return a name with everything that happened instead of a measurement."""
    brief = dict.fromkeys(outcome(failure.status).brief for failure in series.failures)
    return f"{plain(series.label, 20)}: {', '.join(brief)}"


def _draw_strip(axes: Axes, failed: Sequence[Series], looks: Looks, below: Axes) -> None:
    """Draw one row for each series with failures: marks at their lengths, words at the right."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(below.get_xlim())
    axes.set_ylim(len(failed) - 0.5, -0.5)
    set_ticks(axes.xaxis, [], str)
    set_ticks(axes.yaxis, [], str)
    axes.set_facecolor("#f6f8fa")
    axes.spines[:].set_visible(False)
    for row, series in enumerate(failed):
        colour = looks[series.label].colour
        for failure in series.failures:
            marker = outcome(failure.status).marker
            axes.plot([failure.seq_len], [row], marker=marker, color=colour, ms=6.5, mew=1.8, clip_on=False)
        words, offset = _failed_words(series), (72 * GAP, 0)
        annotate(axes, words, (1, row), offset, is_share=True, fontsize=STRIP_FONT, color=colour)
