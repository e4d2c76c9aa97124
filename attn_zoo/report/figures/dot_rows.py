"""Rows of dots with intervals: what is compared in one respect only, such as scores, or times at one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from attn_zoo.report.figures.axes import annotate, draw_intervals
from attn_zoo.report.figures.page import Page, text_size
from attn_zoo.report.figures.style import INK, PAPER, Look, plain
from attn_zoo.report.figures.svg import Tag

ROW = 0.46
"""Inches from one row to the next."""
_NAME_LETTERS = 28
_NAME_SIZE, _WORDS_SIZE = 10, 8.5


@dataclass(frozen=True, kw_only=True, slots=True)
class DotRow:
    """One row: a name at its left, words at its right, between them a dot with its interval where there is a value.

    Args:
        label: whose row it is.
        tip: what the dot says.
        ends: of the interval of `call`, or of `value` where there is none.
        call: of which the dot is a part; a fainter mark.
        singles: smaller marks below the dot.
    """

    name: str
    label: str
    look: Look
    words: str
    tip: str
    value: float | None = None
    ends: tuple[float, float] | None = None
    call: float | None = None
    is_filled: bool = False
    singles: tuple[float, ...] = ()


def row_axes(page: Page, rows: Sequence[DotRow], *, below: float = 0.0) -> Axes:
    """Return axes with one row each, from the top, and so many inches below the last."""
    left = max(text_size(plain(row.name, _NAME_LETTERS), _NAME_SIZE, "bold")[0] for row in rows) + 0.34
    right = max(text_size(row.words, _WORDS_SIZE)[0] for row in rows) + 0.44
    (axes,) = page.panels(height=ROW * len(rows) + below, left=left, right=right)
    axes.set_ylim(len(rows) - 0.5 + below / ROW, -0.5)
    axes.set_yticks(range(len(rows)), ["" for _ in rows])
    axes.tick_params(axis="y", length=0)
    return axes


def draw_rows(axes: Axes, rows: Sequence[DotRow], possible: tuple[float, float]) -> None:
    """Draw rows on axes of `row_axes`, whose limits and scale must be final; intervals are cut at what is possible."""
    for place, row in enumerate(rows):
        own, colour = Tag(of=row.label), row.look.colour
        name = {"fontsize": _NAME_SIZE, "fontweight": "bold", "color": colour}
        annotate(axes, plain(row.name, _NAME_LETTERS), (0, place), (-10, 0), is_share=True, ha="right", **name)
        annotate(axes, row.words, (1, place), (13, 0), is_share=True, fontsize=_WORDS_SIZE, color=INK)
        for value in row.singles:
            axes.plot(
                [value], [place + 0.24], marker=row.look.marker, ms=4.5, color=colour, alpha=0.55, mew=0, clip_on=False
            )
        if row.value is None:
            continue
        strength = 1.0 if row.call is None else 0.55
        if row.ends is not None:
            bar: dict[str, Any] = {"color": colour, "lw": 2.2, "zorder": 2.5, "alpha": strength}
            draw_intervals(axes, [(place, row.ends)], possible, is_flat=True, tag=own, **bar)
        if row.call is not None:
            mark: dict[str, Any] = {"marker": row.look.marker, "ms": 5, "mfc": PAPER, "mec": colour, "alpha": strength}
            own.put_on(*axes.plot([row.call], [place], zorder=3, clip_on=False, **mark))
        look = {"marker": row.look.marker, "mfc": colour if row.is_filled else PAPER, "mec": colour, "mew": 2}
        dot = axes.plot([row.value], [place], ms=9, zorder=4, clip_on=False, **look)  # type: ignore[arg-type]
        Tag(of=row.label, tips=(row.tip,)).put_on(*dot)
