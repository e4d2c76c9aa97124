"""Direct labels: the name of each curve beside its end, moved apart so that none covers another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attn_zoo.report.figures.style import MUTED

__all__ = ["EndLabel", "draw_labels", "label_width", "spread"]

NAME_SIZE = 10
DETAIL_SIZE = 8.3
LINE_HEIGHT = 0.165
"""Inches from one line of text to the next."""
GAP = 0.22
"""Inches from the axes to the text."""


@dataclass(frozen=True, slots=True)
class EndLabel:
    """A name, a smaller line below it (may be empty), and the data point that it belongs to."""

    name: str
    detail: str
    colour: str
    x: float
    y: float

    @property
    def height(self) -> float:
        """Inches it occupies, with a little air."""
        return LINE_HEIGHT * (2 if self.detail else 1) + 0.05


def spread(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """Return centres as near as possible to `wanted` (least squares) that keep their order and do not overlap.

    Args:
        wanted: centres, ascending.
        heights: of each label, in the same unit.
        low: lower edge of the space; when it is too small the labels keep their distances and leave it at the top.
        high: upper edge.

    >>> spread([1.0, 1.0], [1.0, 1.0], 0.0, 10.0)
    [0.5, 1.5]
    """
    offsets, position = [], 0.0
    for index, height in enumerate(heights):
        position += (heights[index - 1] + height) / 2 if index else 0.0
        offsets.append(position)
    # Pool adjacent violators: with the offsets taken away, "not overlapping" becomes "not decreasing".
    blocks: list[tuple[float, int]] = []
    for centre, offset in zip(wanted, offsets, strict=True):
        value, count = centre - offset, 1
        while blocks and blocks[-1][0] > value:
            before, size = blocks.pop()
            value, count = (before * size + value * count) / (size + count), size + count
        blocks.append((value, count))
    free = [value for value, count in blocks for _ in range(count)]
    if not free:
        return []
    lowest = low + heights[0] / 2
    highest = max(lowest, high - heights[-1] / 2 - offsets[-1])
    return [min(max(value, lowest), highest) + offset for value, offset in zip(free, offsets, strict=True)]


def label_width(figure: Figure, labels: Sequence[EndLabel]) -> float:
    """Return the inches that the widest of the labels needs."""
    widest = 0.0
    for label in labels:
        for text, size, weight in ((label.name, NAME_SIZE, "bold"), (label.detail, DETAIL_SIZE, "normal")):
            drawn = figure.text(0, 0, text, fontsize=size, fontweight=weight)
            widest = max(widest, drawn.get_window_extent().width / figure.dpi)
            drawn.remove()
    return widest


def draw_labels(axes: Axes, labels: Sequence[EndLabel], *, is_below_strip: bool = False) -> None:
    """Write the labels right of `axes`, each joined to its point by a thin line.

    Limits and scales of the axes must be final.

    Args:
        axes: that hold the points.
        labels: one per curve.
        is_below_strip: names of the strip of failures stand above, so the labels must stay lower.
    """
    if not labels:
        return
    figure = axes.get_figure(root=True)
    assert figure is not None
    dpi = figure.dpi
    box = axes.get_window_extent()
    ends = [axes.transData.transform((label.x, label.y)) for label in labels]
    order = sorted(range(len(labels)), key=lambda index: (ends[index][1], -index))
    centres = spread(
        [float(ends[index][1]) / dpi for index in order],
        [labels[index].height for index in order],
        box.y0 / dpi - 0.2,
        box.y1 / dpi + (-0.04 if is_below_strip else 0.1),
    )
    width, height = figure.get_size_inches()
    left = box.x1 / dpi + GAP
    for index, centre in zip(order, centres, strict=True):
        label, (end_x, end_y) = labels[index], ends[index]
        axes.annotate(
            "",
            xy=(end_x / dpi / width, end_y / dpi / height),
            xytext=((left - 0.04) / width, centre / height),
            xycoords="figure fraction",
            textcoords="figure fraction",
            arrowprops={"arrowstyle": "-", "color": label.colour, "lw": 0.7, "alpha": 0.55, "shrinkA": 0, "shrinkB": 4},
            annotation_clip=False,
        )
        up = LINE_HEIGHT / 2 if label.detail else 0.0
        figure.text(
            left / width,
            (centre + up) / height,
            label.name,
            fontsize=NAME_SIZE,
            fontweight="bold",
            color=label.colour,
            va="center",
        )
        if label.detail:
            figure.text(
                left / width, (centre - up) / height, label.detail, fontsize=DETAIL_SIZE, color=MUTED, va="center"
            )
