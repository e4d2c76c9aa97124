"""Names beside what they name: at the ends of curves, and around points, so that none covers another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from attn_zoo.report.figures.page import text_size
from attn_zoo.report.figures.style import DOTTED, MUTED
from attn_zoo.report.figures.svg import Tag

NAME_SIZE = 10
DETAIL_SIZE = 8.3
LINE_HEIGHT = 0.165
"""Inches from one line of text to the next."""
GAP = 0.22
"""Inches from the axes to the labels."""
_AROUND = 0.36
"""Inches that a label takes beside its words."""
_NEAR = 0.08
"""Share of the width of a panel: points that are as near to its right edge are at the last place."""
POINT_NAME_SIZE = 9
_AIR = 7.0
"""Pixels between the name of a point and what else is drawn, where there is room."""


@dataclass(frozen=True, slots=True)
class EndLabel:
    """The name of a curve, smaller lines below it, and the data point at its end.

    Pressing the name hides the curve `of` this label, if given.
    """

    name: str
    details: tuple[str, ...]
    colour: str
    x: float
    y: float
    of: str = ""

    @property
    def height(self) -> float:
        """Inches it occupies, with a little air."""
        return LINE_HEIGHT * (1 + len(self.details)) + 0.05


def labels_height(labels: Sequence[EndLabel], least: float) -> float:
    """Return the inches of a panel that has room for all labels, `least` at least."""
    return max(least, sum(label.height for label in labels) + 0.1)


def label_room(labels: Sequence[EndLabel]) -> float:
    """Return the inches that the labels need to the right of a panel."""
    widths = [text_size(label.name, NAME_SIZE, "bold")[0] for label in labels]
    widths += [text_size(detail, DETAIL_SIZE)[0] for label in labels for detail in label.details]
    return max(widths, default=0.0) + _AROUND


def wrap_detail(words: str, most: float) -> list[str]:
    """Return the lines of a detail, so that its label takes no more than `most` inches; none for no words."""
    lines: list[str] = []
    for word in words.split():
        longer = f"{lines[-1]} {word}" if lines else ""
        if longer and text_size(longer, DETAIL_SIZE)[0] + _AROUND <= most:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def draw_end_labels(axes: Axes, labels: Sequence[EndLabel], *, is_below_strip: bool = False) -> None:
    """Write the labels right of `axes`, each joined to its point by a thin line.

    That of a point far from the right edge crosses the panel: it is dotted and grey, so that nobody takes it for data.
    Limits and scales of the axes must be final. Below a strip, where other names stand, labels stay lower.
    """
    figure = _figure_of(axes)
    axes.set_ylim(axes.get_ylim())  # drawing must not move the limits any more
    box = axes.get_window_extent()
    ends = [axes.transData.transform((label.x, label.y)) / figure.dpi for label in labels]
    order = sorted(range(len(labels)), key=lambda index: (ends[index][1], -index))
    centres = spread(
        [float(ends[index][1]) for index in order],
        [labels[index].height for index in order],
        box.y0 / figure.dpi - 0.2,
        box.y1 / figure.dpi + (-0.04 if is_below_strip else 0.1),
    )
    width, height = figure.get_size_inches()
    left = box.x1 / figure.dpi + GAP
    for index, centre in zip(order, centres, strict=True):
        label, end = labels[index], ends[index]
        own = Tag(of=label.of)
        is_near = figure.dpi * end[0] > box.x1 - _NEAR * box.width
        line = {"color": label.colour, "alpha": 0.55} if is_near else {"color": MUTED, "ls": DOTTED}
        leader = axes.annotate(
            "",
            xy=(end[0] / width, end[1] / height),
            xytext=((left - 0.04) / width, centre / height),
            xycoords="figure fraction",
            textcoords="figure fraction",
            arrowprops={"arrowstyle": "-", "lw": 0.7, "shrinkA": 0, "shrinkB": 4} | line,
            annotation_clip=False,
        )
        if leader.arrow_patch is not None:
            Tag(of=label.of, is_log=True).put_on(leader.arrow_patch)
        up = centre + LINE_HEIGHT / 2 * len(label.details)
        name: dict[str, Any] = {"fontsize": NAME_SIZE, "fontweight": "bold", "color": label.colour}
        key = figure.text(left / width, up / height, label.name, va="center", **name)
        Tag(of=label.of, is_key=True).put_on(key)
        for index, words in enumerate(label.details, start=1):
            detail: dict[str, Any] = {"fontsize": DETAIL_SIZE, "color": MUTED}
            text = figure.text(left / width, (up - index * LINE_HEIGHT) / height, words, va="center", **detail)
            own.put_on(text)


def spread(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """Return centres as near as possible to the ascending `wanted` (least squares) at which labels do not overlap.

    Where the space from `low` to `high` is too small they keep their distances and leave it at the top.

    >>> spread([1.0, 1.0], [1.0, 1.0], 0.0, 10.0)
    [0.5, 1.5]
    """
    from scipy.optimize import isotonic_regression  # a fifth of a second that no other part of a report needs

    if not wanted:
        return []
    sizes = np.asarray(heights, dtype=np.float64)
    offsets = np.cumsum(sizes) - sizes / 2 - sizes[0] / 2
    # With the offsets taken away, "not overlapping" becomes "not decreasing".
    free = isotonic_regression(np.asarray(wanted) - offsets).x
    lowest = low + sizes[0] / 2
    highest = max(lowest, high - sizes[-1] / 2 - offsets[-1])
    placed: list[float] = (np.clip(free, lowest, highest) + offsets).tolist()
    return placed


Box = tuple[float, float, float, float]
"""Left, lower, right and upper edge in pixels."""


def square(x: float, y: float, radius: float) -> Box:
    """Return the square around a point."""
    return x - radius, y - radius, x + radius, y + radius


def covered(boxes: Sequence[Box], others: Sequence[Box]) -> NDArray[np.float64]:
    """Return for each box the sum of the areas that it shares with the others, in square pixels."""
    own, other = np.reshape(boxes, (-1, 1, 4)), np.reshape(others, (1, -1, 4))
    sides = np.minimum(own[..., 2:], other[..., 2:]) - np.maximum(own[..., :2], other[..., :2])
    areas: NDArray[np.float64] = np.prod(np.clip(sides, 0.0, None), axis=-1).sum(axis=-1)
    return areas


def line_box(axes: Axes, *ends: tuple[float, float]) -> Box:
    """Return what an upright or level line between two points covers. Limits and scales of the axes must be final."""
    (left, low), (right, high) = axes.transData.transform(ends).tolist()
    across, along = (2, 0) if left == right else (0, 2)
    return left - across, low - along, right + across, high + along


@dataclass(frozen=True, slots=True)
class PointName:
    """The name of a data point whose mark has a radius in points; pressing it hides the curve `of`, if given."""

    name: str
    colour: str
    x: float
    y: float
    radius: float
    of: str = ""


def draw_point_names(axes: Axes, names: Sequence[PointName], frame: Box, taken: Sequence[Box]) -> None:
    """Write each name as near to its point as it can stand, joined by a thin line where that is not beside it.

    The most crowded points get their places first. Names stay inside the frame, and off each other, the marks and what
    is taken. Limits and scales of the axes must be final.
    """
    figure = _figure_of(axes)
    middles = axes.transData.transform([(name.x, name.y) for name in names]).tolist()
    radii = [name.radius * figure.dpi / 72 for name in names]
    marks = [square(x, y, radius) for (x, y), radius in zip(middles, radii, strict=True)]
    crowds = [sum(1 / (1 + math.dist(middle, other)) for other in middles) for middle in middles]
    words = list(taken)
    for index in sorted(range(len(names)), key=lambda index: (-crowds[index], index)):
        name, (x, y), radius = names[index], middles[index], radii[index]
        width, height = text_size(name.name, POINT_NAME_SIZE, "bold")
        box = _place((x, y), radius, (figure.dpi * width + 3, figure.dpi * height), words, marks, frame)
        words.append(box)
        near = _nearest((x, y), box)
        if math.dist(near, (x, y)) > radius + _JOINED:
            ends = axes.transData.inverted().transform([near, (x, y)])
            line = axes.plot(ends[:, 0], ends[:, 1], color=name.colour, lw=0.7, alpha=0.6, zorder=2.2)
            Tag(of=name.of).put_on(*line)
        across, up = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
        style: dict[str, Any] = {"fontsize": POINT_NAME_SIZE, "fontweight": "bold", "color": name.colour}
        text = figure.text(
            across / figure.bbox.width, up / figure.bbox.height, name.name, ha="center", va="center", **style
        )
        Tag(of=name.of, is_key=bool(name.of)).put_on(text)


def _nearest(point: tuple[float, float], box: Box) -> tuple[float, float]:
    """Return the point of a box that is nearest to this one."""
    return min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])


_ANGLES = [math.radians(angle) for angle in (0, 90, 180, 270, 45, 135, 315, 225, 20, 340, 160, 200, 65, 115, 245, 295)]
_JOINED = 9.0
"""Pixels from a mark beyond which a line joins the name to it."""
_GAPS = (4.0, 14.0, 28.0, 44.0, 62.0, 82.0, 104.0, 130.0)


def _place(
    middle: tuple[float, float],
    radius: float,
    size: tuple[float, float],
    words: Sequence[Box],
    marks: Sequence[Box],
    frame: Box,
) -> Box:
    """Return the nearest box of this size beside a mark that covers nothing, or else the least."""
    boxes, distances = [], []
    for gap in _GAPS:
        for angle in _ANGLES:
            across, up = math.cos(angle), math.sin(angle)
            # The box touches the circle of this radius with the side or corner that faces the point: on a diagonal
            # with the corner itself, so that it keeps clear of bars through the point.
            behind, below = ((1 - min(max(way * 2**0.5, -1.0), 1.0)) / 2 for way in (across, up))
            left = middle[0] + across * (radius + gap) - size[0] * behind
            low = middle[1] + up * (radius + gap) - size[1] * below
            boxes.append((left, low, left + size[0], low + size[1]))
            distances.append(gap)
    outside = size[0] * size[1] - covered(boxes, [frame])
    # What is as near to another mark as to its own would be taken for that one's name.
    wide = [(left - _AIR, low - _AIR, right + _AIR, high + _AIR) for left, low, right, high in boxes]
    costs = 4 * covered(boxes, words) + covered(boxes, marks) + 8 * outside + 0.02 * np.array(distances)
    costs += 0.5 * covered(wide, words) + _line_costs(middle, radius, boxes, [*words, *marks])
    return boxes[int(np.argmin(costs.round(6)))]  # the first of those that differ in rounding only


def _line_costs(
    middle: tuple[float, float], radius: float, boxes: Sequence[Box], taken: Sequence[Box]
) -> NDArray[np.float64]:
    """Return what a line from each box to its mark costs: what it covers, and more if it may be taken for a bar.

    On a bar, or upright or level as bars are, it would make an interval look longer.
    """
    (x, y), ends = middle, [_nearest(middle, box) for box in boxes]
    joined = np.array([math.dist(near, middle) > radius + _JOINED for near in ends])
    dots = [
        square(x + share * (near[0] - x), y + share * (near[1] - y), 1.0)
        for near in ends
        for share in (0.4, 0.55, 0.7, 0.85, 1.0)
    ]
    like_bars = np.array([near[0] == x or near[1] == y for near in ends])
    crossed = covered(dots, taken).reshape(len(ends), -1).sum(axis=1)
    costs: NDArray[np.float64] = joined * (0.1 * crossed + 0.5 * like_bars)
    return costs


def _figure_of(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure
