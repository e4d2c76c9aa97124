"""The page that all maps share: title and subtitle, axes placed in inches, colours of weights, a colour bar."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from attn_zoo.report.figures.style import INK, MUTED, PALE, new_figure, plain
from attn_zoo.report.units import human_number

__all__ = ["BAR_ROOM", "Canvas", "Shades", "header_height", "shades_for"]

BAR_ROOM = 1.0
"""Inches at the right for a colour bar with its numbers."""

_LETTER = 0.072
"""Inches that a letter of the subtitle takes, on average."""


@dataclass(frozen=True, slots=True)
class Shades:
    """Colours of one figure, the same for all its panels.

    Args:
        colours: white is zero; blue is positive, red is negative.
        norm: which value has which colour.
        is_clipped: some values lie beyond the darkest colour.
    """

    colours: Colormap
    norm: Normalize
    is_clipped: bool = False


def shades_for(values: NDArray[np.float32], limit: float | None = None) -> Shades:
    """Return one hue for weights that are nowhere negative, and two where they are, darkest at the same size.

    Args:
        values: all that will be drawn.
        limit: size of the darkest value; by default the largest there is.
    """
    largest = float(np.abs(values).max(initial=0.0))
    limit = largest if limit is None else limit
    limit = limit if limit > 0 else 1.0
    is_signed = float(values.min(initial=0.0)) < -1e-6 * max(largest, 1e-30)
    norm = Normalize(-limit, limit) if is_signed else Normalize(0.0, limit)
    return Shades(colormaps["RdBu" if is_signed else "Blues"], norm, largest > limit * (1 + 1e-6))


def header_height(subtitle: str, width: float) -> float:
    """Return the inches that title and subtitle take on a page `width` inches wide."""
    return 0.48 + 0.17 * len(_lines(subtitle, width))


def _lines(subtitle: str, width: float) -> list[str]:
    return [line for part in subtitle.split("\n") for line in wrap(part, max(20, int((width - 0.3) / _LETTER)))]


class Canvas:
    """A figure whose parts are placed in inches from its top left corner.

    Args:
        width: inches.
        height: inches.
        title: one line.
        subtitle: wrapped; a line break starts a new line.
    """

    def __init__(self, width: float, height: float, title: str, subtitle: str) -> None:
        self.width, self.height = width, height
        self.figure: Figure = new_figure(width, height)
        self._text(0.14, 0.3, plain(title, int(width / 0.1)), fontsize=12.5, fontweight="bold")
        for row, line in enumerate(_lines(subtitle, width)):
            self._text(0.14, 0.53 + 0.17 * row, plain(line, 400), fontsize=8.5, color=MUTED)

    def _text(self, left: float, top: float, words: str, **style: Any) -> None:
        self.figure.text(left / self.width, 1 - top / self.height, words, va="center", **style)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Return axes without a grid, framed on all sides."""
        bottom = self.height - top - height
        axes = self.figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))
        axes.grid(visible=False)
        for side in axes.spines.values():
            side.set_visible(True)
            side.set_color(PALE)
        return axes

    def colour_bar(self, left: float, top: float, height: float, shades: Shades, words: str) -> None:
        """Draw the colours with their numbers, and what they mean."""
        axes = self.axes(left, top, 0.14, height)
        low, high = float(shades.norm.vmin or 0.0), float(shades.norm.vmax or 1.0)
        ends = "neither" if not shades.is_clipped else "both" if low < 0 else "max"
        bar = self.figure.colorbar(ScalarMappable(shades.norm, shades.colours), cax=axes, extend=ends)
        bar.outline.set_edgecolor(PALE)
        steps = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high)
        ticks = [float(step) for step in steps if low <= step <= high]
        bar.set_ticks(ticks, labels=[human_number(tick, 2).replace("-", "\u2212") for tick in ticks])
        axes.tick_params(labelsize=8, length=2)
        axes.yaxis.set_label_position("right")
        bar.set_label(words, fontsize=8.5, color=INK)
