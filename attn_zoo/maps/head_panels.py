"""Attention weights as a figure: a row of panels for each layer, a panel for each head, binned where they are many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.report.figures.heat import BAR_ROOM, draw_colour_bar, draw_squares, signed_number, weight_shades
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import INK, MUTED, plain, styled

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
class Bins:
    """Positions of one sequence, in bins of `width`; the last one may have fewer."""

    symbols: tuple[str, ...]
    width: int = 1

    @property
    def num_bins(self) -> int:
        """How many squares."""
        return -(-len(self.symbols) // self.width)


def make_bins(symbols: tuple[str, ...], max_bins: int) -> Bins:
    """Return the positions in at most `max_bins` bins."""
    return Bins(symbols, max(1, -(-len(symbols) // max_bins)))


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
    rows: Bins
    columns: Bins
    heads: tuple[int, ...]


def pool_weights(pieces: Iterable[Tensor], rows: Bins, columns: Bins, pool: Pool) -> NDArray[np.float32]:
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
    """Return the figure: a row of panels for each layer, a panel for each head, one scale of colours for all."""
    shades = weight_shades(np.concatenate([layer.values.ravel() for layer in layers]))
    size = _panel_size(layers)
    with styled():
        left, below = _margins(layers, size)
        shapes = [_panel_shape(layer, size) for layer in layers]
        across = [len(layer.heads) * (width + GAP) - GAP for layer, (width, _) in zip(layers, shapes, strict=True)]
        page = Page(title, note, width=max(6.4, left + max(across) + BAR_ROOM + 0.2))
        margins = {"left": left, "gap": GAP, "above": 0.22, "below": below + 0.08}
        rows = [
            page.panels(
                len(layer.heads), columns=len(layer.heads), height=height, right=page.width - left - width, **margins
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


def _font(bins: Bins, inches: float) -> float:
    """Return the size of letters that fits one label to each square, or 0 where numbers must do."""
    font = min(8.0, 72 * inches / bins.num_bins * 0.92)
    return font if bins.width == 1 and font >= SMALLEST_FONT else 0.0


def _margins(layers: Sequence[PooledWeights], size: float) -> tuple[float, float]:
    """Return inches for labels at the left and below a panel."""

    def room(bins: Bins) -> float:
        longest = min(SYMBOL, max(len(symbol) for symbol in bins.symbols))
        return max(0.42, 0.3 + longest * _font(bins, size) * 0.62 / 72)

    return max(room(layer.rows) for layer in layers) + 0.14, max(room(layer.columns) for layer in layers)


def _label(axes: Axes, layer: PooledWeights, *, is_first: bool) -> None:
    """Name the squares of a panel, or number them where names do not fit; rows only in the first panel of a layer."""
    box = axes.get_window_extent()
    _label_squares(axes.xaxis, layer.columns, box.width / 100, "key" if is_first else "", rotation=90)
    if is_first:
        _label_squares(axes.yaxis, layer.rows, box.height / 100, "query", rotation=0)
    else:
        axes.set_yticks([])


def _label_squares(axis: Axis, bins: Bins, inches: float, words: str, rotation: float) -> None:
    font = _font(bins, inches)
    if font:
        names = [plain(symbol, SYMBOL) for symbol in bins.symbols]
        axis.set_ticks(range(len(names)), names, rotation=rotation, fontsize=font)
        axis.set_tick_params(length=0, pad=2)
    else:
        positions = _round_positions(len(bins.symbols), max(2, int(inches / 0.45)))
        places = [(position - (bins.width - 1) / 2) / bins.width for position in positions]
        axis.set_ticks(places, [f"{position}" for position in positions])
        axis.set_tick_params(length=2, pad=2, labelsize=7.5)
        words = f"{words} (position)" if words else ""
    axis.set_label_text(words, fontsize=8, color=MUTED)


def _round_positions(length: int, most: int) -> range:
    """Return multiples of 1, 2 or 5 times a power of ten, at most so many."""
    steps = (factor * 10**power for power in range(8) for factor in (1, 2, 5))
    return range(0, length, next(step for step in steps if length / step <= most))
