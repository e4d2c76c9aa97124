"""Figures of one panel: time, peak and extra memory, and speed-up over the fastest exact kernel, against length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.lines import Line2D

from attn_zoo.report.analysis.analyse import PanelAnalysis
from attn_zoo.report.analysis.fits import Growth, Quantity, growth
from attn_zoo.report.figures.axes import Frame, Mark, make_frame, reference_slopes, value_axis
from attn_zoo.report.figures.curves import (
    Curve,
    Picture,
    diamond,
    draw_crossing,
    draw_curve,
    draw_spread,
    interpolate,
    make_curves,
)
from attn_zoo.report.figures.labels import EndLabel, draw_labels
from attn_zoo.report.figures.style import INK, MUTED, Look, plain, styled
from attn_zoo.report.tables.growth_tables import round_length
from attn_zoo.report.units import human_bytes, human_length, human_ms, ratio
from attn_zoo.report.wording import held_words, outcome

__all__ = ["memory_picture", "speed_up_picture", "time_picture"]


def time_picture(one: PanelAnalysis, look_of: Mapping[str, Look]) -> Picture | None:
    """Return median time against length with intervals, slopes, crossings and failures; None without a point."""
    curves = make_curves(one, look_of, lambda point: point.median_ms)
    if not curves:
        return None
    labels = [_end(curve, _growth_words(one.time[curve.series.label], _wins(one, curve))) for curve in curves]
    crossings = [found for found in one.crossings if found.is_fastest and found.result and found.result.length]
    legend = [Line2D([], [], color=MUTED, marker="o", ms=4, lw=1.2, label="median, 95 % interval, quartile band")]
    if crossings:
        legend.append(diamond(f"crossover with {_baseline_name(one)}"))
    title = f"Time against sequence length: {one.panel.title}"
    with styled():
        frame = _frame(title, one, labels, look_of, curves, legend)
        ends = [
            (point.seq_len, end)
            for curve in curves
            for point in curve.series.points
            for end in (point.median_ms, point.low_ms, point.high_ms, point.timing.q1_ms, point.timing.q3_ms)
            if end > 0
        ]
        value_axis(frame.axes, [end for _, end in ends], human_ms, 10)
        reference_slopes(frame.axes, ends)
        for curve in curves:
            draw_curve(frame.axes, curve)
            draw_spread(frame.axes, curve)
        for found in crossings:
            curve = next(curve for curve in curves if curve.series.label == found.label)
            assert found.result is not None
            assert found.result.length is not None
            height = interpolate(curve.points, found.result.length)
            interval = (found.result.low, found.result.high)
            draw_crossing(frame.axes, found.result.length, height, interval, curve.look.colour)
        draw_labels(frame.axes, labels, is_below_strip=frame.has_strip)
    alt = _alt(title, one, curves, human_ms, one.time)
    return Picture(f"time-{one.panel.name}", title, alt, frame.figure)


def memory_picture(one: PanelAnalysis, look_of: Mapping[str, Look], quantity: Quantity) -> Picture | None:
    """Return peak, extra or saved bytes against length; None where they were not measured."""
    curves = make_curves(one, look_of, lambda point: float(getattr(point.memory, quantity) or 0))
    if not curves:
        return None
    grown = {curve.series.label: growth(curve.series, quantity) for curve in curves}
    labels = [_end(curve, _growth_words(grown[curve.series.label], "")) for curve in curves]
    held = held_words(one.panel.pass_)
    beside = "" if held != "inputs" else ", output and gradients of the inputs"
    kind, note = {
        "peak_bytes": ("Peak memory", f"most bytes in tensors at once, {held} included"),
        "extra_bytes": ("Extra memory", f"peak without {held}{beside}"),
        "saved_bytes": ("Memory kept for backward", "bytes saved by forward, inputs included"),
    }[quantity]
    title = f"{kind} against sequence length: {one.panel.title}"
    legend = [Line2D([], [], color=MUTED, marker="o", ms=4, lw=1.2, label=note)]
    with styled():
        frame = _frame(title, one, labels, look_of, curves, legend)
        points = [point for curve in curves for point in curve.points]
        value_axis(frame.axes, [value for _, value in points], human_bytes, 2)
        reference_slopes(frame.axes, points)
        for curve in curves:
            draw_curve(frame.axes, curve)
        draw_labels(frame.axes, labels, is_below_strip=frame.has_strip)
    name = f"memory-{quantity.removesuffix('_bytes')}-{one.panel.name}"
    return Picture(name, title, _alt(title, one, curves, human_bytes, grown), frame.figure)


def speed_up_picture(one: PanelAnalysis, look_of: Mapping[str, Look]) -> Picture | None:
    """Return the factor over the fastest exact kernel at each length; None without a baseline or another curve."""
    if one.panel.baseline is None:
        return None
    exact = {point.seq_len: point for point in one.panel.baseline.points}
    every = make_curves(
        one, look_of, lambda point: exact[point.seq_len].median_ms / point.median_ms if point.seq_len in exact else 0.0
    )
    curves = [
        curve for curve in every if not (curve.series.is_exact and len(exact) == len(curve.points) == _ones(curve))
    ]
    if not curves:
        return None
    baseline = _baseline_name(one)
    labels = []
    for curve in curves:
        length, factor = curve.points[-1]
        labels.append(
            _end(curve, ", ".join([f"{ratio(factor)} at {human_length(length)}", *_listed(_wins(one, curve))]))
        )
    labels.append(EndLabel(baseline, f"fastest exact kernel: {ratio(1)}", INK, max(exact), 1.0))
    title = f"Speed-up over {baseline}: {one.panel.title}"
    legend = [
        Line2D([], [], color=MUTED, marker="o", ms=4, lw=1.2, label="ratio of medians; bars: from the 95 % intervals")
    ]
    with styled():
        frame = _frame(title, one, labels, look_of, curves, legend)
        value_axis(frame.axes, [*(value for curve in curves for _, value in curve.points), 1.0], ratio, 2)
        frame.axes.axhline(1.0, color=INK, lw=1.0, zorder=1)
        for curve in curves:
            draw_curve(frame.axes, curve)
            for point in curve.series.points:
                other = exact.get(point.seq_len)
                if other is not None and point.high_ms > 0 and point.low_ms > 0:
                    ends = [other.low_ms / point.high_ms, other.high_ms / point.low_ms]
                    frame.axes.plot([point.seq_len] * 2, ends, color=curve.look.colour, lw=1.3, solid_capstyle="butt")
        draw_labels(frame.axes, labels, is_below_strip=frame.has_strip)
    alt = _alt(title, one, curves, ratio, {})
    return Picture(f"speedup-{one.panel.name}", title, alt, frame.figure)


def _ones(curve: Curve) -> int:
    return sum(abs(value - 1) < 1e-12 for _, value in curve.points)


def _frame(
    title: str,
    one: PanelAnalysis,
    labels: Sequence[EndLabel],
    look_of: Mapping[str, Look],
    curves: Sequence[Curve],
    legend: Sequence[Line2D],
) -> Frame:
    failed = [failure.seq_len for series in one.panel.series for failure in series.failures]
    lengths = sorted({*failed, *(length for curve in curves for length, _ in curve.points)})
    marks = []
    for series in one.panel.series:
        if series.failures:
            words = ", ".join(dict.fromkeys(outcome(failure.status).brief for failure in series.failures))
            marks.append(
                Mark(
                    plain(series.label, 20),
                    words,
                    look_of[series.label].colour,
                    tuple(failure.seq_len for failure in series.failures),
                    tuple(outcome(failure.status).marker for failure in series.failures),
                )
            )
    return make_frame(title, plain(one.panel.subtitle, 300), labels, marks, lengths, legend)


def _end(curve: Curve, detail: str) -> EndLabel:
    length, value = curve.points[-1]
    name = plain(curve.series.label) + (" (simulated)" if curve.series.is_simulated else "")
    return EndLabel(name, detail, curve.look.colour, length, value)


def _growth_words(found: Growth, wins: str) -> str:
    parts = []
    if found.exponent is not None:
        parts.append(f"$N^{{{found.exponent.value:.2f}}}$")
        if found.claimed is not None:
            parts[0] += f" (claimed {found.claimed:g})"
    elif found.claimed is not None:
        parts.append(f"claimed $N^{{{found.claimed:g}}}$")
    return ", ".join([*parts, *_listed(wins)])


def _wins(one: PanelAnalysis, curve: Curve) -> str:
    found = one.crossing(curve.series.label)
    if found is None or found.result is None or len(found.result.lengths) == 1:
        return ""  # at one length nothing crosses
    if found.result.length is not None:
        return f"faster from {round_length(found.result.length)}"
    return "always faster" if found.result.kind == "always_faster" else "never faster"


def _listed(text: str) -> list[str]:
    return [text] if text else []


def _baseline_name(one: PanelAnalysis) -> str:
    return plain(one.panel.baseline.label) if one.panel.baseline else "exact attention"


def _alt(
    title: str,
    one: PanelAnalysis,
    curves: Sequence[Curve],
    show: Callable[[float], str],
    grown: Mapping[str, Growth],
) -> str:
    """Return the figure in words: ends of every curve, exponents, crossings and failures."""
    said = []
    for curve in curves:
        (first, start), (last, end) = curve.points[0], curve.points[-1]
        words = f"{curve.series.label}: {show(start)} at {human_length(first)}"
        if last != first:
            words += f", {show(end)} at {human_length(last)}"
        found = grown.get(curve.series.label)
        if found is not None and found.exponent is not None:
            words += f", exponent {found.exponent.value:.2f}"
            words += f" (claimed {found.claimed:g})" if found.claimed is not None else ""
        said.append(words)
    for series in one.panel.series:
        if series.failures:
            lengths = ", ".join(human_length(failure.seq_len) for failure in series.failures)
            said.append(f"{series.label}: {outcome(series.failures[0].status).legend} at {lengths}")
    return f"{title}. {one.panel.subtitle}. " + "; ".join(said) + "."
