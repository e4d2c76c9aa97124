"""Axes with human ticks: lengths, logarithmic values, scores; and lines that mark a value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.figures.style import MARK, MUTED, Line, Look
from attn_zoo.report.figures.svg import NO_TAG, Tag
from attn_zoo.units import human_length

ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.7}
"""Box behind words that lines may cross."""


def set_ticks(axis: Axis, ticks: Sequence[float], show: Callable[[float], str]) -> None:
    """Put ticks at these values and nowhere else."""
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    axis.set_minor_locator(NullLocator())


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """Set up a logarithmic length axis with ticks at the measured lengths (or powers of two), never crowded."""
    low, high = min(lengths), max(lengths)
    margin = 2**0.5 if low == high else (high / low) ** 0.035
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / margin, high * margin)
    pixels = axes.get_window_extent().width
    ticks: Sequence[float] = sorted(set(lengths))
    span = math.log(high / low) + 2 * math.log(margin)
    closest = min((math.log(b / a) for a, b in pairwise(ticks)), default=span) / span * pixels
    if closest < 30:
        powers = [2.0**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
        step = max(1, math.ceil(30 * span / (math.log(2) * pixels)))
        ticks = powers[::-1][::step][::-1] or [low, high]
    set_ticks(axes.xaxis, ticks, human_length)
    axes.set_xlabel("sequence length (tokens)")
    if closest < 40:
        axes.tick_params(axis="x", labelsize=8)


def log_axis(
    axes: Axes, name: Literal["x", "y"], low: float, high: float, show: Callable[[float], str], base: int
) -> None:
    """Set up a logarithmic axis from `low` to `high` with no more ticks than there is room for, in people's units.

    The base is 10 for times and rates, 2 for bytes and factors.
    """
    axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    bottom, top = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    steps: tuple[float, ...] = (1,)
    if base == 10 and top - bottom <= 3:
        steps = (1, 1.5, 2, 3, 5, 7) if high / low < 12 else (1, 2, 5)
    ticks: list[float] = []
    finer = ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),) if base == 10 else ((1, 1.5), (1, 1.25, 1.5, 1.75))
    for own in (steps, *finer):  # one tick or two say little of a scale
        if len(ticks) < 3:
            every = (step * float(base) ** power for power in range(bottom, top + 1) for step in own)
            ticks = [tick for tick in every if low <= tick <= high]
    if name == "y":
        set_ticks(axes.yaxis, ticks[:: math.ceil(len(ticks) / 9)], show)
        return
    pixels = axes.get_window_extent().width / math.log(high / low)
    kept: list[float] = []
    for tick in ticks:  # steps of 1, 2 and 5 are not of one width
        if not kept or math.log(tick / kept[-1]) * pixels >= max(48, 6 + 4 * len(show(kept[-1]) + show(tick))):
            kept.append(tick)
    set_ticks(axes.xaxis, kept, show)


def value_axis(
    axes: Axes,
    values: Sequence[float],
    show: Callable[[float], str],
    base: int,
    pad: float = 1.25,
    *,
    name: Literal["x", "y"] = "y",
) -> None:
    """Set up a logarithmic value axis around everything drawn, with a factor `pad` of air on either side."""
    low, high = min(values) / pad, max(values) * pad
    if high / low < 3:  # flat curves: keep the axis from exaggerating noise
        middle = math.sqrt(low * high)
        low, high = middle / 3**0.5, middle * 3**0.5
    log_axis(axes, name, low, high, show, base)


def score_axis(axis: Axis, metric: Metric, words: str, num_ticks: int = 6) -> None:
    """Set up a linear axis of scores; limits follow what is drawn, as far as such scores are possible."""
    (low, high), (least, most) = sorted(axis.get_view_interval()), metric.bounds
    name = "xlim" if axis is axis.axes.xaxis else "ylim"
    if name == "xlim":  # long names leave it little room
        num_ticks = max(1, min(num_ticks, int(axis.axes.get_window_extent().width // 48) - 1))
    axis.axes.set(**{name: (max(low, least), min(high, most))})
    axis.set_major_locator(MaxNLocator(num_ticks, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: metric.tick(value)))
    axis.set_label_text(words)


def upright_scores(axes: Axes, values: Sequence[float], metric: Metric) -> None:
    """Set up the upright axis of scores on test around everything drawn, with air for names above and below."""
    span = max(values) - min(values) or 0.02 * (abs(values[0]) or 1.0)
    axes.set_ylim(min(values) - 0.1 * span, max(values) + 0.14 * span)
    score_axis(axes.yaxis, metric, f"{metric.axis} on test", num_ticks=7)


def draw_curve(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    look: Look,
    line: Line,
    *,
    is_open: bool = False,
    tag: Tag = NO_TAG,
) -> None:
    """Draw a line with markers, which are hollow where `is_open`; nothing for no points. The tag has a tip for each."""
    if not points:
        return
    x, y = [x for x, _ in points], [y for _, y in points]
    face, edge, width = ("white", look.colour, 1.2) if is_open else (look.colour, "white", 0.7)
    marker = {"marker": look.marker, "ms": 5.5, "mfc": face, "mec": edge, "mew": width}
    style = {"color": look.colour, "ls": line, "lw": 1.9, "zorder": 3, **marker}
    tag.put_on(*axes.plot(x, y, clip_on=False, **style))  # type: ignore[arg-type]


def draw_intervals(
    axes: Axes,
    bars: Iterable[tuple[float, tuple[float, float]]],
    possible: tuple[float, float],
    *,
    is_flat: bool = False,
    tag: Tag = NO_TAG,
    **style: Any,
) -> None:
    """Draw bars between two ends; one that reaches the last possible value is cut there, which an arrow head says.

    A bar is where it stands on the other axis, and its two ends; flat ones lie along the first axis. All are one line
    with gaps, as a line of matplotlib each takes longer to draw than everything else of a curve.
    """
    (least, most), gap = possible, (math.nan, math.nan)
    line, low, high = [], [], []
    for at, (start, end) in bars:
        line += [(at, max(start, least)), (at, min(end, most)), gap]
        low += [(at, least)] if start <= least < end else []
        high += [(at, most)] if start < most <= end else []
    arrow = style | {"lw": 0, "ms": 5, "clip_on": False, "mew": 0}
    heads = "<>" if is_flat else "v^"
    for places, look in ((line[:-1], style), (low, arrow | {"marker": heads[0]}), (high, arrow | {"marker": heads[1]})):
        if places:
            across, along = zip(*places, strict=True)
            tag.put_on(*axes.plot(*((along, across) if is_flat else (across, along)), **look))


def bar_words(bars: Iterable[tuple[tuple[float, float] | None, int]], metric: Metric, several: str) -> str:
    """Say what bars of scores are, by ends and number of seeds, `several` of those over seeds; nothing for none."""
    drawn = [(*ends, num_seeds) for ends, num_seeds in bars if ends]
    said = [several] if any(num_seeds > 1 for *_, num_seeds in drawn) else []
    if any(num_seeds == 1 for *_, num_seeds in drawn):
        said.append("one seed: 95 % interval from the size of the test set alone")
    if any(low < high and {low, high} & {*metric.bounds} for low, high, _ in drawn):
        said.append("arrow: an interval cut where scores end")
    return "; ".join(said)


def draw_mark(axes: Axes, value: float) -> None:
    """Draw a dashed horizontal line for chance or a floor."""
    axes.axhline(value, color=MUTED, lw=1.0, ls=MARK, zorder=1)


def annotate(
    axes: Axes,
    words: str,
    at: tuple[float, float],
    offset: tuple[float, float],
    *,
    is_share: bool = False,
    **style: Any,
) -> Annotation:
    """Write small words so many points off a place, which may lie outside the axes.

    The place is in data; if `is_share`, its first coordinate is a share of the width of the axes.
    """
    near: dict[str, Any] = {"xytext": offset, "textcoords": "offset points", "annotation_clip": False}
    near["xycoords"] = ("axes fraction", "data") if is_share else "data"
    look: dict[str, Any] = {"fontsize": 8, "color": MUTED, "va": "center"} | style
    return axes.annotate(words, xy=at, **near, **look)
