"""Heat maps: colours with a scale that all panels of a figure share, squares, and the colour bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import INK, PALE
from attn_zoo.units import human_number

BAR_ROOM = 1.0
"""Inches at the right of panels for a colour bar with its numbers."""


@dataclass(frozen=True, slots=True)
class Shades:
    """Colours of one figure, the same for all its panels.

    Args:
        colours: from the lowest value to the highest.
        norm: which value has which colour.
        is_clipped: some values lie beyond the last colours.
    """

    colours: Colormap
    norm: Normalize
    is_clipped: bool = False


def weight_shades(values: NDArray[np.float32], limit: float | None = None) -> Shades:
    """Return one hue for weights that are nowhere negative, and two where they are, darkest at the same size.

    White is zero, blue is positive, red is negative. The darkest has the size `limit`, by default the largest there is.
    """
    largest = float(np.abs(values).max(initial=0.0))
    limit = (largest if limit is None else limit) or 1.0
    is_signed = float(values.min(initial=0.0)) < -1e-6 * max(largest, 1e-30)  # rounding is no sign
    norm = Normalize(-limit if is_signed else 0.0, limit)
    return Shades(colormaps["RdBu" if is_signed else "Blues"], norm, largest > limit * (1 + 1e-6))


def signed_number(value: float) -> str:
    """Return the number beside a colour of weights."""
    return human_number(value, 2)


def draw_squares(axes: Axes, values: NDArray[Any], shades: Shades, *, is_upwards: bool = False) -> None:
    """Draw `[rows, columns]` as squares, the first row on top or at the bottom; nothing where a value is NaN."""
    origin: Literal["lower", "upper"] = "lower" if is_upwards else "upper"
    look: dict[str, Any] = {"cmap": shades.colours, "norm": shades.norm, "interpolation": "nearest"}
    axes.imshow(values, origin=origin, aspect="auto", **look)
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color(PALE)


def draw_colour_bar(
    page: Page, panel: Axes, shades: Shades, show: Callable[[float], str], words: str = "", *, max_height: float = 4.0
) -> Axes:
    """Draw the colours right of a panel, with their numbers and what they mean.

    Return the axes, whose heights are values: no higher than the panel, and than so many inches.
    """
    axes = page.beside(panel, gap=0.15, width=0.14, max_height=max_height)
    low, high = float(shades.norm.vmin or 0.0), float(shades.norm.vmax or 1.0)
    ends = "neither" if not shades.is_clipped else "both" if low < 0 else "max"
    bar = page.figure.colorbar(ScalarMappable(shades.norm, shades.colours), cax=axes, extend=ends)
    bar.outline.set_edgecolor(PALE)
    steps = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high)
    ticks = [float(step) for step in steps if low <= step <= high]
    bar.set_ticks(ticks, labels=[show(tick) for tick in ticks])
    axes.tick_params(labelsize=8, length=2)
    axes.yaxis.set_label_position("right")
    bar.set_label(words, fontsize=8.5, color=INK)
    return axes
