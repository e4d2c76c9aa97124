"""Score against training speed, peak memory as area: the figure of Long Range Arena (Tay et al. 2020, figure 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attn_zoo.report.analysis.floor import near_marks
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import AccuracyGroup
from attn_zoo.report.analysis.task_means import Overview
from attn_zoo.report.figures.curves import Picture
from attn_zoo.report.figures.placing import Box, Spot, place_names
from attn_zoo.report.figures.speed_axes import draw_floors, score_against_speed
from attn_zoo.report.figures.style import INK, MUTED, Look, draw_title, new_figure, plain, styled
from attn_zoo.report.units import human_bytes

__all__ = ["bubble_picture", "overview_picture"]

WIDTH, HEIGHT = 8.0, 4.3
LARGEST = 24.0
"""Radius of the largest bubble, in points."""
SMALLEST = 4.0
NAME_SIZE = 9


@dataclass(frozen=True, slots=True)
class _Bubble:
    name: str
    look: Look
    speed: float
    value: float
    ends: tuple[float | None, float | None]
    peak_bytes: float | None
    is_filled: bool


def bubble_picture(group: AccuracyGroup, look_of: Mapping[str, Look]) -> Picture | None:
    """Return score against tokens per second of training; None for fewer than two variants with a score."""
    bubbles = [
        _Bubble(
            score.name,
            look_of[score.label],
            score.costs["tokens_per_s"],
            score.mean,
            (score.low, score.high),
            score.costs["train_peak_bytes"],
            not score.start,
        )
        for score in group.ranked
        if score.mean is not None and score.costs["tokens_per_s"]
    ]
    best = list(group.marks.items())[-1:]  # the other floors are in the figure of the scores
    marks = dict(best) | ({} if group.chance is None else {"chance": group.chance})
    said = [group.how]
    if group.is_shared:
        said.append("speeds of runs that shared their device: they compare little")
    if group.num_machines > 1:
        said.append(f"runs on {group.num_machines} machines")
    if any(score.start for score in group.scores):
        said.append("hollow: self-pretrained")
    title = f"{group.metric.title} against cost: {group.title}"
    return _picture(f"bubbles-{group.name}", title, said, bubbles, marks, group.metric)


def overview_picture(overview: Overview, look_of: Mapping[str, Look]) -> Picture | None:
    """Return the mean score over the common tasks against speed; None for fewer than two variants or tasks."""
    bubbles = []
    for label in overview.labels:
        value, speed = overview.mean(label), overview.speed(label)
        if value is not None and speed is not None:
            peak = overview.peak_bytes(label)
            bubbles.append(_Bubble(label, look_of[label], speed, value, (None, None), peak, True))
    floor = overview.floor()
    said = [overview.how, overview.scope(), "speed: geometric mean; memory: the most"]
    if any(group.is_shared for group in overview.common):
        said.append("speeds of runs that shared their device: they compare little")
    title = f"{overview.metric.title} against cost: mean over {len(overview.common)} tasks"
    return _picture(f"bubbles-{overview.name}", title, said, bubbles, dict([floor]) if floor else {}, overview.metric)


def _picture(
    name: str,
    title: str,
    said: Sequence[str],
    bubbles: Sequence[_Bubble],
    marks: Mapping[str, float],
    metric: Metric,
) -> Picture | None:
    if len(bubbles) < 2:
        return None
    ends = [end for bubble in bubbles for end in (bubble.value, *bubble.ends) if end is not None]
    near, far = near_marks(ends, marks, metric)
    said = [*said, *(f"off the scale: {name} {metric.show(value)}" for name, value in far.items())]
    has_peaks = any(bubble.peak_bytes for bubble in bubbles)
    unknown = [bubble.name for bubble in bubbles if not bubble.peak_bytes]
    if unknown:
        said = [*said, f"memory not measured{': ' + ', '.join(unknown) if has_peaks else ''}"]
    lines = wrap("; ".join(said), 116, break_on_hyphens=False)
    head, foot = 0.5 + 0.17 * len(lines) + 0.14, 0.62
    total = head + HEIGHT + foot
    left, right = 0.82, 1.5 if has_peaks else 0.3
    with styled():
        figure = new_figure(WIDTH, total)
        draw_title(figure, title)
        for row, line in enumerate(lines):
            top = 1 - (0.53 + 0.17 * row) / total
            figure.text(0.14 / WIDTH, top, plain(line, 130), fontsize=8.5, color=MUTED, va="center")
        axes = figure.add_axes((left / WIDTH, foot / total, (WIDTH - left - right) / WIDTH, HEIGHT / total))
        most = max((bubble.peak_bytes for bubble in bubbles if bubble.peak_bytes), default=0.0)
        score_against_speed(axes, [bubble.speed for bubble in bubbles], [*ends, *near.values()], metric)
        floors = draw_floors(axes, near, metric)
        for bubble in sorted(bubbles, key=lambda one: -(one.peak_bytes or 0.0)):
            _draw(axes, bubble, most)
        _draw_names(figure, axes, bubbles, most, floors)
        if has_peaks:
            _draw_legend(figure, most, (WIDTH - right + 0.16) / WIDTH, (foot + HEIGHT) / total, total)
        axes.set_xlabel("training speed (tokens per second, logarithmic; right is faster)", fontsize=9.5)
        axes.set_ylabel(f"{metric.axis} on test", fontsize=9.5)
    alt = "; ".join(_alt(bubble, metric) for bubble in bubbles)
    return Picture(name, title, f"{title}, {'; '.join(said)}. {alt}.", figure)


def _alt(bubble: _Bubble, metric: Metric) -> str:
    memory = f", {human_bytes(bubble.peak_bytes)} at most" if bubble.peak_bytes else ""
    return f"{bubble.name}: {metric.show(bubble.value)} at {bubble.speed:,.0f} tokens/s{memory}"


def _radius(peak_bytes: float | None, most: float) -> float:
    """Return points: area in proportion to memory; what was not measured gets the smallest."""
    return max(SMALLEST, LARGEST * math.sqrt(peak_bytes / most)) if peak_bytes else SMALLEST


def _draw(axes: Axes, bubble: _Bubble, most: float) -> None:
    colour = bubble.look.colour
    low, high = bubble.ends
    if low is not None and high is not None:
        axes.plot([bubble.speed] * 2, [low, high], color=colour, lw=1.2, alpha=0.8, zorder=2)
    radius = _radius(bubble.peak_bytes, most)
    axes.scatter(
        [bubble.speed],
        [bubble.value],
        s=(2 * radius) ** 2,
        facecolors=(colour if bubble.is_filled else "white"),
        alpha=0.45,
        edgecolors="none",
        zorder=2.5,
    )
    axes.scatter(
        [bubble.speed], [bubble.value], s=(2 * radius) ** 2, facecolors="none", edgecolors=colour, lw=1.4, zorder=3
    )
    axes.plot([bubble.speed], [bubble.value], marker=".", ms=3, color=colour, zorder=3.5)


def _draw_names(figure: Figure, axes: Axes, bubbles: Sequence[_Bubble], most: float, taken: Sequence[Box]) -> None:
    """Write each name as near to its bubble as it can stand, joined by a thin line where that is not beside it."""
    scale = figure.dpi / 72
    spots, words = [], []
    for bubble in bubbles:
        name = plain(bubble.name, 30)
        drawn = figure.text(0, 0, name, fontsize=NAME_SIZE, fontweight="bold")
        extent = drawn.get_window_extent()
        drawn.remove()
        x, y = axes.transData.transform((bubble.speed, bubble.value))
        radius = _radius(bubble.peak_bytes, most) * scale
        spots.append(Spot(float(x), float(y), radius, extent.width + 2, extent.height))
        words.append(name)
    inside = axes.get_window_extent()
    frame = Box(inside.x0 + 2, inside.y0 + 2, figure.bbox.x1 - 4, inside.y1 + 8)
    if any(bubble.peak_bytes for bubble in bubbles):
        frame = Box(frame.x0, frame.y0, inside.x1 + 8, frame.y1)
    for bubble, spot, box, name in zip(bubbles, spots, place_names(spots, frame, taken), words, strict=True):
        middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
        near = (min(max(spot.x, box.x0), box.x1), min(max(spot.y, box.y0), box.y1))
        if math.hypot(near[0] - spot.x, near[1] - spot.y) > spot.radius + 9:
            ends = axes.transData.inverted().transform([near, (spot.x, spot.y)])
            axes.plot(ends[:, 0], ends[:, 1], color=bubble.look.colour, lw=0.7, alpha=0.6, zorder=2.2)
        figure.text(
            middle[0] / figure.bbox.width,
            middle[1] / figure.bbox.height,
            name,
            fontsize=NAME_SIZE,
            fontweight="bold",
            color=bubble.look.colour,
            ha="center",
            va="center",
        )


def _draw_legend(figure: Figure, most: float, left: float, top: float, total: float) -> None:
    """Draw three sizes with their memory, at the right of the axes."""
    figure.text(left, top, "peak memory\n(area)", fontsize=8.5, color=MUTED, va="top")
    y = top * total - 0.48
    for share in (1.0, 0.5, 0.1):
        radius = _radius(share * most, most) / 72
        y -= radius
        legend = figure.add_axes((left, (y - radius) / total, 2 * radius / WIDTH, 2 * radius / total))
        legend.axis("off")
        legend.set_xlim(-1, 1)
        legend.set_ylim(-1, 1)
        legend.scatter([0], [0], s=(144 * radius) ** 2, facecolors=INK, alpha=0.18, edgecolors="none", clip_on=False)
        legend.scatter([0], [0], s=(144 * radius) ** 2, facecolors="none", edgecolors=MUTED, lw=1.0, clip_on=False)
        figure.text(
            left + (2 * radius + 0.08) / WIDTH,
            y / total,
            human_bytes(share * most),
            fontsize=8.5,
            color=INK,
            va="center",
        )
        y -= radius + 0.12
