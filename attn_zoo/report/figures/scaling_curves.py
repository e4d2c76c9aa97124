"""Figures of one panel: time, peak memory, energy, and speed-up over the fastest exact kernel, against length."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from attn_zoo.report.analysis.fits import NOT_SETTLED, Crossing, Growth, slope_words
from attn_zoo.report.analysis.panels import Panel
from attn_zoo.report.analysis.series import Point, Series, joint_doubts
from attn_zoo.report.analysis.winners import SpeedUp
from attn_zoo.report.figures.axes import annotate, draw_intervals
from attn_zoo.report.figures.curve_chart import Chart, Curve, Mark, curves_of, draw_chart
from attn_zoo.report.figures.labels import EndLabel
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import GUIDE, INK, MARK, MUTED, Looks, plain
from attn_zoo.report.figures.svg import Tag
from attn_zoo.report.tables.growth_tables import crossing_text
from attn_zoo.report.tables.table import marked
from attn_zoo.report.wording import MARKS, doubt_counts, held_words, marks_of
from attn_zoo.units import (
    human_bytes,
    human_joules,
    human_length,
    human_ms,
    human_slope,
    ratio,
    ratio_interval,
    some,
)

GUIDE_GAP = 1.7
"""Factor between the data and the reference lines."""


def _tip(point: Point, words: str) -> str:
    """Return what a mark says: whose it is, where, how much, and which kernel ran."""
    return "; ".join(filter(None, (f"{human_length(point.seq_len)} tokens: {words}", point.kernel)))


def _timed(_: Series, point: Point) -> Mark | None:
    if point.median_ms <= 0:
        return None
    words = human_ms.interval(point.median_ms, point.low_ms, point.high_ms)
    if point.device_ms:
        words = f"{human_ms(point.device_ms)} on the GPU alone; single call {words}"
    elif point.is_waiting:
        words += f" ({MARKS['host'][2]})"
    is_own = not (point.device_ms or point.is_waiting)
    return Mark(
        length=point.seq_len,
        own=point.median_ms if is_own else point.device_ms,
        call=None if is_own else point.median_ms,
        is_waiting=point.is_waiting,
        ends=(point.low_ms, point.high_ms),
        tip=_tip(point, words),
    )


def draw_time(panel: Panel, looks: Looks) -> Page | None:
    """Return median time against length with intervals, slopes, crossings and failures; None without a point.

    The curve is that of the mechanism: on a GPU the time of the device alone where that was measured. Single calls that
    took longer, and those that wait for the host, are faint beside it.
    """
    curves = curves_of(panel, looks, _timed)
    if not curves:
        return None
    marks = [mark for curve in curves for mark in curve.marks]
    has_device = any(point.device_ms for point in panel.points)
    words = "bars: 95 % interval of calls; band: quartiles" if has_device else "median, 95 % interval, quartile band"
    legend = _stroke_legend(marks, words, has_device=has_device)
    settled = [
        (curve, one)
        for curve in curves
        for one in (panel.crossing(curve.label), panel.crossing(curve.label, is_device=True))
        if one and one.is_settled and one.result and one.result.length
    ]
    is_any_device = any(one.quantity == "device" for _, one in settled)
    if settled:
        against = some(dict.fromkeys(plain(one.against) for _, one in settled), joint=" or ")
        words = f"crossover with {against}" + (" (filled: of the GPU alone)" if is_any_device else "")
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

    chart = Chart(
        title="Time",
        show=human_ms,
        base=10,
        legend=legend,
        details=lambda curve: (_growth_words(panel.time[curve.label], panel.shown_doubts), *_wins(panel, curve)),
        draw=draw,
        note=_doubtful(panel, curves),
        said=lambda curve: _exponent_words(panel.time[curve.label]),
    )
    return draw_chart(panel, looks, curves, chart)


def draw_memory(panel: Panel, looks: Looks) -> Page | None:
    """Return peak bytes against length; None where they were not measured."""

    def mark(_: Series, point: Point) -> Mark | None:
        peak = point.memory.peak_bytes
        return Mark(length=point.seq_len, own=float(peak), tip=_tip(point, human_bytes(peak))) if peak else None

    curves = curves_of(panel, looks, mark)
    if not curves:
        return None
    points = [point for curve in curves for point in curve.own]
    chart = Chart(
        title="Peak memory",
        show=human_bytes,
        base=2,
        legend=[_marker(f"most bytes in tensors at once, {held_words(panel.pass_)} included")],
        details=lambda curve: (_growth_words(panel.memory[curve.label], ()),),
        draw=lambda axes: _reference_slopes(axes, points),
        said=lambda curve: _exponent_words(panel.memory[curve.label]),
    )
    return draw_chart(panel, looks, curves, chart)


def draw_energy(panel: Panel, looks: Looks) -> Page | None:
    """Return joules of a call against length; None where they were not measured.

    Where the host is the limit they are also what the GPU draws while it waits, so no property of the mechanism.
    """

    def mark(_: Series, point: Point) -> Mark | None:
        joules, is_waiting = point.record.energy_joules, point.is_host_bound
        if not joules:
            return None
        own, call = (None, joules) if is_waiting else (joules, None)
        words = human_joules(joules) + (", while it waits for the host too" if is_waiting else "")
        return Mark(length=point.seq_len, own=own, call=call, is_waiting=is_waiting, tip=_tip(point, words))

    curves = curves_of(panel, looks, mark)
    if not curves:
        return None
    known = [point for point in panel.points if point.record.energy_joules]
    throttled = sum("throttled" in point.doubts for point in known)
    chart = Chart(
        title="Energy of a call",
        show=human_joules,
        base=10,
        legend=[_marker("one call of many, one after another")],
        details=lambda curve: (f"{human_joules(curve.best[-1][1])} at {human_length(curve.best[-1][0])}",),
        draw=lambda axes: _reference_slopes(axes, [point for curve in curves for point in curve.best]),
        note=f"; {throttled} of {len(known)} {MARKS['throttled'][1]}" if throttled else "",
    )
    return draw_chart(panel, looks, curves, chart)


def draw_speed_up(panel: Panel, looks: Looks) -> Page | None:
    """Return the factor over the fastest exact kernel at each length; None without a baseline or another curve."""
    if panel.baseline is None:
        return None
    every: dict[tuple[str, int], SpeedUp] = {}

    def mark(series: Series, point: Point) -> Mark | None:
        found = panel.beside_exact(series, point.seq_len)
        if found is None or min(found.point.median_ms, found.exact.median_ms) <= 0:
            return None
        every[series.label, point.seq_len] = found
        factor, alone = found.factor, found.device_factor
        words = ratio_interval(factor.value, factor.low, factor.high)
        if alone is not None:
            words = f"{ratio(alone)} on the GPU alone; as single calls {words}"
        if not panel.is_baseline(found.against):
            words += f", over {found.against}"
        is_waiting = found.point.is_waiting or found.exact.is_waiting
        is_own = alone is None and not is_waiting
        return Mark(
            length=point.seq_len,
            own=factor.value if is_own else alone,
            call=None if is_own else factor.value,
            is_waiting=is_waiting,
            ends=(factor.low, factor.high),
            tip=_tip(point, words),
        )

    def marks(curve: Curve) -> str:
        found = every[curve.label, curve.best[-1][0]]
        is_alone = found.device_factor is not None
        doubts = joint_doubts((found.exact, found.point), without="host", of_device=is_alone)  # hollow marks say that
        return marks_of(doubts, panel.shown_doubts)

    def alone(curve: Curve) -> str:
        return " (GPU)" if every[curve.label, curve.best[-1][0]].device_factor is not None else ""

    def is_baseline(curve: Curve) -> bool:
        return all(every[curve.label, mark.length].is_itself for mark in curve.marks)

    curves = [curve for curve in curves_of(panel, looks, mark) if not is_baseline(curve)]
    if not curves:
        return None
    drawn = [found for (label, _), found in every.items() if label in {curve.label for curve in curves}]
    has_device = any(found.device_factor is not None for found in drawn)
    of_calls = " of calls" if has_device else ""
    baseline = some(dict.fromkeys(plain(found.against) for found in drawn), joint=" or ")
    chart = Chart(
        title=f"Speed-up over {baseline}",
        show=ratio,
        base=2,
        legend=_stroke_legend(
            [mark for curve in curves for mark in curve.marks],
            f"{_ratio_words(drawn)}; bars: 95 % interval{of_calls}",
            has_device=has_device,
        ),
        details=lambda curve: (
            marked(f"{ratio(curve.best[-1][1])} at {human_length(curve.best[-1][0])}{alone(curve)}", marks(curve)),
            *_wins(panel, curve),
        ),
        note=_doubtful(panel, curves),
        level=EndLabel(baseline, (f"exact: {ratio(1)}",), INK, max(panel.exact), 1.0),
    )
    return draw_chart(panel, looks, curves, chart)


def _stroke_legend(marks: Sequence[Mark], words: str, *, has_device: bool) -> list[Line2D]:
    """Return what strong and faint strokes are, where any is of the GPU alone, and what bars are."""
    if not has_device:
        return [_marker(words)]
    beside = ", or calls where it was not timed" if any(mark.call is None for mark in marks) else ""
    legend = [_marker(f"strong: the GPU alone{beside}")]
    if any(mark.call is not None and not mark.is_waiting for mark in marks):
        legend.append(_marker("faint: calls", alpha=0.45))
    return [*legend, _marker(words, marker="|", ms=9, mew=1.6, lw=0)]


def _ratio_words(every: Iterable[SpeedUp]) -> str:
    """Say what factors are made of; of the one that all are over nothing."""
    kinds = {one.is_in_turns for one in every if not one.is_itself}
    if len(kinds) > 1:
        return "ratio by rounds where timed in turns, else of medians"
    return "ratio by rounds, timed in turns" if kinds == {True} else "ratio of medians"


def _marker(words: str, **look: Any) -> Line2D:
    usual: dict[str, Any] = {"marker": "o", "ms": 4, "lw": 1.2}
    return Line2D([], [], color=MUTED, label=words, **usual | look)


def _is_known_within(grown: Growth) -> bool:
    """Whether there is a slope to state with its interval, though it is no whole power for certain."""
    return grown.exponent is not None and grown.verdict == NOT_SETTLED


def _exponent_words(grown: Growth) -> str:
    """Return what the description says of how a curve grows; one or two lengths cannot say it."""
    if grown.exponent is not None and grown.is_settled:
        claimed = f" (claimed {grown.claimed:g})" if grown.claimed is not None else ""
        return f", exponent {human_slope(grown.exponent.value)}{claimed}"
    if not grown.why or len(grown.slopes) < 2:
        return ""
    return f", {grown.why}" if _is_known_within(grown) else f", exponent not settled: {grown.why}"


def _growth_words(grown: Growth, shown: Container[str]) -> str:
    claimed, marks = grown.claimed, marks_of(grown.doubts, shown)
    if grown.exponent is not None and grown.is_settled:
        words = f"N^{human_slope(grown.exponent.value)}" + (f" (claimed {claimed:g})" if claimed is not None else "")
        return marked(words, marks)
    if grown.exponent is not None and _is_known_within(grown):
        return marked(f"slope {slope_words(grown.exponent)}", marks)
    if len(grown.slopes) > 1:  # two lengths could settle none
        return "slope not settled"
    return f"claimed N^{claimed:g}" if claimed is not None and not grown.slopes else ""


def _wins(panel: Panel, curve: Curve) -> list[str]:
    """Return from where a curve is the cheaper one, of the GPU alone and as calls, in words that fit their lines."""
    alone = _crossing_words(panel, panel.crossing(curve.label, is_device=True))
    calls = _crossing_words(panel, panel.crossing(curve.label), what="calls" if alone else "")
    return [f"{alone} (GPU)", calls] if alone else [calls]


def _crossing_words(panel: Panel, crossing: Crossing | None, what: str = "") -> str:
    result = crossing.result if crossing else None
    if crossing is None or result is None or len(result.lengths) == 1:
        return ""  # at one length nothing crosses
    than = "" if panel.is_baseline(crossing.against) else f" than {plain(crossing.against)}"
    first = f"{what} cheaper{than}".lstrip() if than or not what else what
    return f"{first}: {crossing_text(crossing, panel.shown_doubts, waits='host')}"


def _doubtful(panel: Panel, curves: Sequence[Curve]) -> str:
    """Return what makes times of the panel doubtful, and of how many, for the note; nothing where all is well."""
    every = [point.doubts for point in panel.points]
    said = doubt_counts(every, panel.shown_doubts, without="host")  # a legend says that
    words = f"; {said}" if said else ""
    if any(mark.own is None for curve in curves for mark in curve.marks):
        words += "; where the GPU alone was not timed, waiting for the host is inferred from times that hardly grow"
    return words


def _draw_quartiles(axes: Axes, curve: Curve) -> None:
    points = curve.series.points
    low, high = ([max(getattr(point.timing, end), 1e-12) for point in points] for end in ("q1_ms", "q3_ms"))
    lengths = [point.seq_len for point in points]
    band = axes.fill_between(lengths, low, high, color=curve.look.colour, alpha=0.15, lw=0, zorder=1.5)
    Tag(of=curve.label, is_log=True).put_on(band)


def _draw_crossing(axes: Axes, curve: Curve, crossing: Crossing) -> None:
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
    draw_intervals(axes, [(height, ends)], axes.get_xlim(), is_flat=True, tag=own, **look)
    face = colour if is_device else "white"
    own.put_on(*axes.plot([result.length], [height], marker="D", ms=8, mfc=face, mec=colour, mew=1.6, zorder=5))


def _shade_waiting(axes: Axes, curves: Sequence[Curve], lengths: Sequence[int]) -> None:
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
        across, up = end - start
        along: dict[str, Any] = {"rotation": math.degrees(math.atan2(up, across)), "rotation_mode": "anchor"}
        at = middle, factor * middle**slope
        Tag(is_log=True).put_on(annotate(axes, words, at, offset, ha="center", va=va, zorder=0.7, **along))
