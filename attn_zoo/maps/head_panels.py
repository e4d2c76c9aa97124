"""The figure of attention weights: a row of panels for each layer, a panel for each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attn_zoo.maps.binning import Axis, PooledWeights
from attn_zoo.maps.canvas import BAR_ROOM, Canvas, header_height, shades_for
from attn_zoo.report.figures.style import INK, MUTED, plain, styled

__all__ = ["draw_heads"]

MAX_WIDTH = 15.0
MIN_PANEL, MAX_PANEL = 1.25, 5.5
SQUARE = 0.125
"""Inches of a square that has a label."""

SMALLEST_FONT = 4.8
GAP = 0.22
SYMBOL = 9
"""Letters of a token that are shown."""


def _panel_size(layers: Sequence[PooledWeights], num_heads: int) -> float:
    most = max(max(layer.rows.num_bins, layer.columns.num_bins) for layer in layers)
    room = (MAX_WIDTH - BAR_ROOM - 1.3) / num_heads - GAP
    wanted = max(2.3, most * SQUARE) if all(layer.rows.width == 1 for layer in layers) else 3.0
    return max(MIN_PANEL, min(MAX_PANEL, wanted, room))


def draw_heads(layers: Sequence[PooledWeights], *, title: str, subtitle: str) -> Figure:
    """Return the figure.

    Args:
        layers: what each row of panels shows; all share one scale of colours.
        title: one line.
        subtitle: what was read by which model, and how positions are binned.
    """
    shades = shades_for(np.concatenate([layer.values.ravel() for layer in layers]))
    num_heads = max(len(layer.heads) for layer in layers)
    size = _panel_size(layers, num_heads)
    with styled():
        left, below = _margins(layers, size)
        heights = [size * layer.rows.num_bins / max(layer.rows.num_bins, layer.columns.num_bins) for layer in layers]
        widths = [size * layer.columns.num_bins / max(layer.rows.num_bins, layer.columns.num_bins) for layer in layers]
        across = max(
            width * len(layer.heads) + GAP * (len(layer.heads) - 1) for width, layer in zip(widths, layers, strict=True)
        )
        width = max(6.4, left + across + BAR_ROOM + 0.2)
        top = header_height(subtitle, width) + 0.1
        canvas = Canvas(width, top + sum(height + below + 0.3 for height in heights) + 0.25, title, subtitle)
        first_top = top + 0.22
        for layer, height, panel in zip(layers, heights, widths, strict=True):
            top += 0.22
            for place, head in enumerate(layer.heads):
                axes = canvas.axes(left + place * (panel + GAP), top, panel, height)
                axes.imshow(
                    layer.values[place], cmap=shades.colours, norm=shades.norm, aspect="auto", interpolation="nearest"
                )
                axes.set_title(f"{layer.name}, head {head}", fontsize=8.5, color=INK, pad=3)
                _label(axes, layer, panel, height, is_first=place == 0)
            top += height + below + 0.08
        words = "weight" if shades.norm.vmin == 0 else "weight (signed)"
        canvas.colour_bar(left + across + 0.25, first_top, min(2.2, heights[0]), shades, words)
    return canvas.figure


def _font(axis: Axis, inches: float) -> float:
    """Return the size of letters that fits one label to each square, or 0 where numbers must do."""
    font = min(8.0, 72 * inches / axis.num_bins * 0.92)
    return font if axis.width == 1 and font >= SMALLEST_FONT else 0.0


def _margins(layers: Sequence[PooledWeights], size: float) -> tuple[float, float]:
    """Return inches for labels at the left and below a panel."""
    left = below = 0.42
    for layer in layers:
        for axis, is_row in ((layer.rows, True), (layer.columns, False)):
            font = _font(axis, size)
            longest = max(len(symbol) for symbol in axis.symbols)
            room = 0.3 + min(longest, SYMBOL) * font * 0.62 / 72
            if font and is_row:
                left = max(left, room)
            elif font:
                below = max(below, room)
    return left + 0.14, below


def _label(axes: Axes, layer: PooledWeights, width: float, height: float, *, is_first: bool) -> None:
    for axis, inches, target, is_row in (
        (layer.columns, width, axes.xaxis, False),
        (layer.rows, height, axes.yaxis, True),
    ):
        font = _font(axis, inches)
        name: Literal["x", "y"] = "y" if is_row else "x"
        if is_row and not is_first:
            target.set_ticks([])
            continue
        if font:
            names = [plain(symbol, SYMBOL) for symbol in axis.symbols]
            target.set_ticks(range(len(names)), names, rotation=0 if is_row else 90, fontsize=font)
            axes.tick_params(axis=name, length=0, pad=2)
        else:
            ticks = _numbers(axis, inches)
            target.set_ticks(
                [(tick - (axis.width - 1) / 2) / axis.width for tick in ticks], [f"{tick}" for tick in ticks]
            )
            axes.tick_params(axis=name, length=2, pad=2, labelsize=7.5)
        if is_row or is_first:
            words = "query" if is_row else "key"
            target.set_label_text(words if font else f"{words} (position)", fontsize=8, color=MUTED)


def _numbers(axis: Axis, inches: float) -> list[int]:
    """Return round positions, few enough to stand beside each other."""
    length, room = len(axis.symbols), max(2, int(inches / 0.45))
    step = next(
        factor * 10**power for power in range(8) for factor in (1, 2, 5) if length / (factor * 10**power) <= room
    )
    return list(range(0, length, step))
