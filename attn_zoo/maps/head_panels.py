"""Attention weights as a figure: a row of panels for each layer, a panel for each head, binned where they are many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.report.figures.heat import BAR_ROOM, draw_colour_bar, draw_squares, signed_number, weight_shades
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import INK, MUTED, plain, styled

__all__ = ["Axis", "Pool", "PooledWeights", "draw_heads", "make_axis", "pool_weights"]

MAX_WIDTH = 15.0
MIN_PANEL, MAX_PANEL = 1.25, 5.5
SQUARE = 0.125
"""Inches of a square that has a label."""

SMALLEST_FONT = 4.8
GAP = 0.22
SYMBOL = 9
"""Letters of a token that are shown."""

Pool = Literal["max", "mean"]


@dataclass(frozen=True, slots=True)
class Axis:
    """Positions of one sequence, in bins of equally many.

    Args:
        symbols: a name for each position.
        width: positions in a bin; the last one may have fewer.
    """

    symbols: tuple[str, ...]
    width: int = 1

    @property
    def num_bins(self) -> int:
        """How many squares."""
        return -(-len(self.symbols) // self.width)


def make_axis(symbols: tuple[str, ...], max_bins: int) -> Axis:
    """Return the positions in at most `max_bins` bins."""
    return Axis(symbols, max(1, -(-len(symbols) // max_bins)))


@dataclass(frozen=True, slots=True)
class PooledWeights:
    """What one panel for each head shows.

    Args:
        name: of the layer.
        values: `[H, rows, columns]`, in squares.
        rows: of the queries.
        columns: of the keys.
        heads: number of each head, counted from 1.
    """

    name: str
    values: NDArray[np.float32]
    rows: Axis
    columns: Axis
    heads: tuple[int, ...]


def pool_weights(pieces: Iterable[Tensor], rows: Axis, columns: Axis, pool: Pool) -> NDArray[np.float32]:
    """Return `[H, rows, columns]` of pieces of columns `[1, H, L, n]`, holding no more than one piece in full.

    Args:
        pieces: as `attn_zoo.attention.effective.weight_columns` yields them; what is beyond either axis is padding.
        rows: of the queries.
        columns: of the keys.
        pool: `"max"` keeps the weight of each block that is furthest from zero, with its sign; `"mean"` averages.
    """
    num_rows, num_columns = len(rows.symbols), len(columns.symbols)
    narrow = [_pooled(piece[0, :, :num_rows].float(), 1, rows.width, pool) for piece in pieces]
    wide = torch.cat(narrow, dim=2)[:, :, :num_columns]
    pooled: NDArray[np.float32] = _pooled(wide, 2, columns.width, pool).numpy()
    return pooled


def _pooled(values: Tensor, dim: int, width: int, pool: Pool) -> Tensor:
    if width == 1:
        return values
    parts = torch.split(values, width, dim)
    if pool == "mean":
        return torch.stack([part.mean(dim) for part in parts], dim)
    high, low = (torch.stack([getattr(part, name)(dim) for part in parts], dim) for name in ("amax", "amin"))
    return torch.where(high >= -low, high, low)


def draw_heads(layers: Sequence[PooledWeights], *, title: str, note: str) -> Figure:
    """Return the figure: a row of panels for each layer, a panel for each head, one scale of colours for all.

    Args:
        layers: what each row of panels shows.
        title: one line.
        note: what was read by which model, and how positions are binned.
    """
    shades = weight_shades(np.concatenate([layer.values.ravel() for layer in layers]))
    size = _panel_size(layers)
    with styled():
        left, below = _margins(layers, size)
        shapes = [_panel_shape(layer, size) for layer in layers]
        across = [len(layer.heads) * (width + GAP) - GAP for layer, (width, _) in zip(layers, shapes, strict=True)]
        page = Page(title, note, width=max(6.4, left + max(across) + BAR_ROOM + 0.2))
        rows = [
            page.panels(
                len(layer.heads),
                columns=len(layer.heads),
                height=height,
                left=left,
                right=page.width - left - width,
                gap=GAP,
                above=0.22,
                below=below + 0.08,
            )
            for layer, (_, height), width in zip(layers, shapes, across, strict=True)
        ]
        words = "weight" if shades.norm.vmin == 0 else "weight (signed)"
        widest = rows[across.index(max(across))][-1]
        draw_colour_bar(page, widest, shades, signed_number, words, max_height=2.2)
        for layer, panels in zip(layers, rows, strict=True):
            for place, (axes, head) in enumerate(zip(panels, layer.heads, strict=True)):
                draw_squares(axes, layer.values[place], shades)
                axes.set_title(f"{layer.name}, head {head}", fontsize=8.5, color=INK, pad=3)
                _label(axes, layer, is_first=place == 0)
    return page.figure


def _panel_size(layers: Sequence[PooledWeights]) -> float:
    """Return the inches of the longer side of a panel."""
    most = max(max(layer.rows.num_bins, layer.columns.num_bins) for layer in layers)
    room = (MAX_WIDTH - BAR_ROOM - 1.3) / max(len(layer.heads) for layer in layers) - GAP
    wanted = max(2.3, most * SQUARE) if all(layer.rows.width == 1 for layer in layers) else 3.0
    return max(MIN_PANEL, min(MAX_PANEL, wanted, room))


def _panel_shape(layer: PooledWeights, size: float) -> tuple[float, float]:
    """Return width and height of a panel with square squares."""
    scale = size / max(layer.rows.num_bins, layer.columns.num_bins)
    return scale * layer.columns.num_bins, scale * layer.rows.num_bins


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


def _label(axes: Axes, layer: PooledWeights, *, is_first: bool) -> None:
    """Name the squares of a panel, or number them where names do not fit; rows only in the first panel of a layer."""
    box = axes.get_window_extent()
    for axis, pixels, target, is_row in (
        (layer.columns, box.width, axes.xaxis, False),
        (layer.rows, box.height, axes.yaxis, True),
    ):
        inches = pixels / 100
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
