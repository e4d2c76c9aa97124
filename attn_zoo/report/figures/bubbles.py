"""Score against training speed, peak memory as area: the figure of Long Range Arena (Tay et al. 2020, figure 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from attn_zoo.report.analysis.floor import near_marks
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import AccuracyGroup
from attn_zoo.report.analysis.task_means import Overview
from attn_zoo.report.figures.axes import bar_words, draw_intervals, draw_mark, log_axis, upright_scores
from attn_zoo.report.figures.labels import PointName, draw_point_names, line_box
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import INK, MUTED, Look, Looks, plain
from attn_zoo.report.figures.svg import Tag
from attn_zoo.units import human_bytes, human_rate, some

HEIGHT = 4.3
LARGEST, SMALLEST = 24.0, 4.0
"""Radius in points of the bubble with the most memory, and of those that would be smaller than can be seen."""


@dataclass(frozen=True, slots=True)
class _Bubble:
    name: str
    look: Look
    speed: float
    value: float
    ends: tuple[float, float] | None
    num_seeds: int
    peak_bytes: float | None
    is_filled: bool

    def radius(self, most: float) -> float:
        """Return points: area in proportion to memory; what was not measured gets the smallest."""
        return _radius(self.peak_bytes / most) if self.peak_bytes else SMALLEST


def _radius(share: float) -> float:
    return max(SMALLEST, LARGEST * math.sqrt(share))


def draw_bubbles(group: AccuracyGroup, looks: Looks) -> Page | None:
    """Return score against tokens per second of training; None for fewer than two variants with a score.

    None either where runs shared their device: their speeds compare nothing.
    """
    if group.is_shared:
        return None
    bubbles = []
    for score in group.ranked:
        speed, peak = score.costs["tokens_per_s"], score.costs["train_peak_bytes"]
        if score.mean is not None and speed:
            at = speed, score.mean, score.ends, len(score.values)
            bubbles.append(_Bubble(score.name, looks[score.label], *at, peak, is_filled=not score.start))
    best = [group.best_mark] if group.best_mark else []  # the other floors are in the figure of the scores
    marks = dict(best) | ({} if group.chance is None else {"chance": group.chance})
    said = [group.how]
    if group.num_machines > 1:
        said.append(f"runs on {group.num_machines} machines")
    if any(group.starts):
        said.append("hollow: self-pretrained")
    title = f"{group.metric.title} against cost: {group.title}"
    return _draw(title, said, bubbles, marks, group.metric)


def draw_task_means(overview: Overview, looks: Looks) -> Page | None:
    """Return the mean score over the common tasks against speed; None for fewer than two variants or tasks.

    None either where runs shared their device: their speeds compare nothing.
    """
    if any(group.is_shared for group in overview.common):
        return None
    bubbles = []
    for label in overview.labels:
        value, speed = overview.mean(label), overview.speed(label)
        if value is not None and speed is not None:
            at = speed, value, overview.ends(label), overview.num_seeds(label)
            bubbles.append(_Bubble(label, looks[label], *at, overview.peak_bytes(label), is_filled=True))
    floor = overview.floor()
    said = [overview.how, overview.scope(), "speed: geometric mean; memory: the most"]
    title = f"{overview.title} against cost: mean over {len(overview.common)} tasks"
    return _draw(title, said, bubbles, dict([floor]) if floor else {}, overview.metric)


def _draw(
    title: str, said: Sequence[str], bubbles: Sequence[_Bubble], marks: Mapping[str, float], metric: Metric
) -> Page | None:
    if len(bubbles) < 2:
        return None
    bars = [(bubble.ends, bubble.num_seeds) for bubble in bubbles]
    said = [*said, *filter(None, [bar_words(bars, metric, "bars: 95 % t-interval of the mean over seeds")])]
    values = [end for bubble in bubbles for end in (bubble.value, *(bubble.ends or ()))]
    near, far = near_marks(values, marks, metric)
    # A name beside its line would lie on bubbles or bars of some run.
    lines = some((f"{name.replace('_', ' ')} {metric.show(value)}" for name, value in near.items()), len(near))
    said = [*said, *([f"level lines: {lines}"] if near else [])]
    said += [f"off the scale: {name} {metric.show(value)}" for name, value in far.items()]
    has_peaks = any(bubble.peak_bytes for bubble in bubbles)
    unknown = [bubble.name for bubble in bubbles if not bubble.peak_bytes]
    if unknown:
        said = [*said, f"memory not measured{': ' + ', '.join(unknown) if has_peaks else ''}"]
    most = max((bubble.peak_bytes for bubble in bubbles if bubble.peak_bytes), default=0.0)
    page = Page(title, "; ".join(said))
    top = page.bottom
    (axes,) = page.panels(height=HEIGHT, right=1.5 if has_peaks else 0.3, below=0.62)
    _speed_axis(axes, [bubble.speed for bubble in bubbles])
    upright_scores(axes, [*values, *near.values()], metric)
    names = [
        PointName(plain(bubble.name, 30), bubble.look.colour, bubble.speed, bubble.value, bubble.radius(most))
        for bubble in bubbles
    ]
    taken = [line_box(axes, *((bubble.speed, end) for end in bubble.ends)) for bubble in bubbles if bubble.ends]
    taken += [line_box(axes, *((end, value) for end in axes.get_xlim())) for value in near.values()]
    for value in near.values():
        draw_mark(axes, value)
    for bubble in sorted(bubbles, key=lambda bubble: -(bubble.peak_bytes or 0.0)):
        _draw_bubble(axes, bubble, bubble.radius(most), _alt(bubble, metric), metric.bounds)
    inside = axes.get_window_extent()
    frame = (inside.x0 + 2, inside.y0 + 2, inside.x1 + (8 if has_peaks else 26), inside.y1 + 8)
    draw_point_names(axes, names, frame, taken)
    if has_peaks:
        _draw_size_legend(page, most, page.width - 1.34, top)
    return page.describe(_alt(bubble, metric) for bubble in bubbles)


def _alt(bubble: _Bubble, metric: Metric) -> str:
    memory = f", {human_bytes(bubble.peak_bytes)} at most" if bubble.peak_bytes else ""
    return f"{bubble.name}: {metric.show(bubble.value)} at {bubble.speed:,.0f} tokens/s{memory}"


def _speed_axis(axes: Axes, speeds: Sequence[float]) -> None:
    """Set up a logarithmic axis of at least a factor of two, so that equal speeds do not look different."""
    low, high = min(speeds), max(speeds)
    spread = max(math.log(high / low), math.log(2.0))
    middle = math.log(low * high) / 2
    left, right = (math.exp(middle + side * 0.68 * spread) for side in (-1, 1))  # names need air on both sides
    log_axis(axes, "x", left, right, lambda speed: human_rate(speed).replace(" ", ""), 10)
    axes.set_xlabel("training speed (tokens per second, logarithmic; right is faster)")


def _draw_bubble(axes: Axes, bubble: _Bubble, radius: float, tip: str, possible: tuple[float, float]) -> None:
    colour, at = bubble.look.colour, ([bubble.speed], [bubble.value])
    if bubble.ends is not None:
        own = Tag(of=bubble.name)
        draw_intervals(
            axes, [(bubble.speed, bubble.ends)], possible, tag=own, color=colour, lw=1.2, alpha=0.8, zorder=2
        )
    face = colour if bubble.is_filled else "white"
    axes.scatter(*at, s=(2 * radius) ** 2, facecolors=face, alpha=0.45, edgecolors="none", zorder=2.5)
    axes.scatter(*at, s=(2 * radius) ** 2, facecolors="none", edgecolors=colour, lw=1.4, zorder=3)
    Tag(of=bubble.name, tips=(tip,)).put_on(*axes.plot(*at, marker=".", ms=3, color=colour, zorder=3.5))


def _draw_size_legend(page: Page, most: float, left: float, top: float) -> None:
    """Draw three sizes with their memory, at the right of the axes."""
    page.text(left, top + 0.06, "peak memory\n(area)", fontsize=8.5, color=MUTED, va="top")
    middle = top + 0.54
    for share in (1.0, 0.5, 0.1):
        radius = _radius(share) / 72
        axes = page.axes(left, middle, 2 * radius, 2 * radius)
        axes.axis("off")
        for style in ({"facecolors": INK, "alpha": 0.18, "lw": 0.0}, {"facecolors": "none", "edgecolors": MUTED}):
            axes.scatter([0], [0], s=(144 * radius) ** 2, clip_on=False, **style)
        page.text(left + 2 * radius + 0.08, middle + radius, human_bytes(share * most), fontsize=8.5, color=INK)
        middle += 2 * radius + 0.12
