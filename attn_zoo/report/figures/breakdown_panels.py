"""Figures of breakdowns: a curve per variant over one axis, a heat map per variant over two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from numpy.typing import NDArray

from attn_zoo.report.analysis.breakdown import Part, axes_of, floors_by_place, parts
from attn_zoo.report.analysis.floor import FAR
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore
from attn_zoo.report.figures.axes import draw_curve, draw_intervals, draw_mark, score_axis, set_ticks
from attn_zoo.report.figures.heat import BAR_ROOM, Shades, draw_colour_bar, draw_squares
from attn_zoo.report.figures.labels import EndLabel, draw_end_labels, label_room, labels_height
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import BLACK, DASHED, MARK, MUTED, SOLID, WHITE, Looks, plain
from attn_zoo.report.figures.svg import Tag
from attn_zoo.units import human_length, human_number, some

LOGARITHMIC_FROM = 8
"""Ratio of the largest to the smallest value of an axis from which it is drawn logarithmically."""
_ENDINGS = (("seq_len", "sequence length", "tokens"), ("_len", " length", "tokens"), ("_percent", "", "%"))
"""Of names of properties, with what they say and their units."""
Grid = NDArray[np.float64]
Scored = Sequence[tuple[LabelScore, Sequence[Part]]]
Floors = Mapping[tuple[float, ...], float]
"""Scores by place."""
COLOURS = "viridis"
LETTER = 0.1
"""Inches that a letter of a panel's title may take."""
LEAST_TITLE = 0.75
"""Share of its size that a long one may come down to."""
MAP_GAP = 0.3
"""Inches between maps."""


def draw_breakdown(group: AccuracyGroup, looks: Looks) -> Page | None:
    """Return curves or heat maps; None where no run has a breakdown."""
    every = axes_of(group)
    axes = every[:2]
    scored = [(score, found) for score in group.ranked if (found := parts(score, axes))] if axes else []
    if not scored:
        return None
    title = f"{group.metric.title} by {' and '.join(_words(name) for name in axes)}: {group.title}"
    note = group.how + (f"; mean over {', '.join(map(_words, every[2:]))}" if len(every) > 2 else "")
    floors = floors_by_place(group, axes)
    if floors:
        note += "; best floor: the best trivial model of each"
    elif group.best_mark and group.best_mark[0] in group.floors:
        name, value = group.best_mark
        note += f"; best floor, of all examples together: {plain(name.replace('_', ' '))} {group.metric.show(value)}"
    draw = _draw_curves if len(axes) == 1 else _draw_maps
    page = draw(group, scored, floors, axes, looks, title, note)
    return page.describe(f"{score.name}: {_alt(found, axes, group.metric)}" for score, found in scored)


def _values(scored: Scored, index: int) -> list[float]:
    """Return the values that occur on one axis, ascending."""
    return sorted({part.place[index] for _, found in scored for part in found})


def _words(name: str) -> str:
    """Return a property of the examples for people, after our conventions for names: counts begin with `num_`."""
    if name.startswith("num_"):
        return f"number of {_words(name.removeprefix('num_'))}"
    for ending, words, _ in _ENDINGS:
        if name.endswith(ending):
            name = name.removesuffix(ending) + words
            break
    return name.replace("_", " ")


def _unit(name: str) -> str:
    return next((unit for ending, _, unit in _ENDINGS if name.endswith(ending)), "")


def _axis_words(name: str) -> str:
    return f"{_words(name)} ({_unit(name)})" if _unit(name) else _words(name)


def _place(name: str, value: float) -> str:
    return f"{_words(name)} {_number(value)} {_unit(name)}".strip()


def _number(value: float) -> str:
    return human_length(value) if value >= 1024 and value == int(value) else human_number(value)


def _alt(scored: Sequence[Part], axes: Sequence[str], metric: Metric) -> str:
    ends = [choose(scored, key=lambda part: metric.order(part.mean)) for choose in (min, max)]
    best, worst = (
        f"{metric.show(part.mean)} "
        f"({', '.join(_place(name, value) for name, value in zip(axes, part.place, strict=True))})"
        for part in ends
    )
    return f"best {best}, worst {worst}"


def _draw_curves(
    group: AccuracyGroup,
    curves: Scored,
    floors: Floors,
    axes: Sequence[str],
    looks: Looks,
    title: str,
    note: str,
) -> Page:
    metric, chance = group.metric, group.chance
    note += "; mean over seeds with its 95 % t-interval"
    is_near = False
    if chance is not None:
        drawn = [*(part.mean for _, curve in curves for part in curve), *floors.values()]
        is_near = min(abs(value - chance) for value in drawn) <= FAR * ((max(drawn) - min(drawn)) or 0.1)
        note += f"; {'level line' if is_near else 'off the scale'}: chance {metric.show(chance)}"
    if vague := [score.name for score, curve in curves if any(_says_little(part, metric) for part in curve)]:
        note += f"; no bar where the interval leaves out less than a tenth of the scale: {some(vague, len(vague))}"
    labels = []
    for score, curve in curves:
        ((x,), y) = curve[-1].place, curve[-1].mean
        detail = f"{metric.show(y)} at {_number(x)}"
        labels.append(EndLabel(plain(score.name, 30), (detail,), looks[score.label].colour, x, y, score.name))
    if floors:
        ((x,), y) = list(floors.items())[-1]
        detail = f"{metric.show(y)} at {_number(x)}"
        labels.append(EndLabel("best floor", (detail,), MUTED, x, y))
    page = Page(title, note)
    (panel,) = page.panels(height=labels_height(labels, 3.2), right=0.2 + label_room(labels))
    if chance is not None and is_near:
        draw_mark(panel, chance)
    if floors:
        lows = [(x, y) for (x,), y in floors.items()]
        panel.plot(*zip(*lows, strict=True), color=MUTED, lw=1.2, ls=MARK, marker="_", ms=9, zorder=1.5)
    for score, curve in curves:
        look = looks[score.label]
        points = [(part.place[0], part.mean) for part in curve]
        tips = tuple(f"{score.name}, {_place(axes[0], x)}: {metric.show(y)}" for x, y in points)
        tag = Tag(of=score.name, tips=tips)
        draw_curve(panel, points, look, DASHED if score.start else SOLID, tag=tag)
        bars = [(part.place[0], part.ends) for part in curve if part.ends and not _says_little(part, metric)]
        style: dict[str, Any] = {"color": look.colour, "lw": 1.2, "alpha": 0.7, "zorder": 2}
        draw_intervals(panel, bars, metric.bounds, tag=Tag(of=score.name), **style)
    _property_axis(panel, _values(curves, 0), _axis_words(axes[0]))
    score_axis(panel.yaxis, metric, f"{metric.axis} on test")
    draw_end_labels(panel, labels)
    return page


def _says_little(part: Part, metric: Metric) -> bool:
    """Tell whether an interval excludes next to nothing: bars of several curves from end to end would hide others."""
    if part.ends is None:
        return False
    (low, high), (least, most) = part.ends, metric.bounds
    return min(high, most) - max(low, least) > 0.9 * (most - least)


def _property_axis(axes: Axes, values: Sequence[float], words: str) -> None:
    """Set up the axis of a property of the examples, with ticks at its values but never so many that they touch."""
    if values[0] > 0 and values[-1] / values[0] >= LOGARITHMIC_FROM:
        axes.set_xscale("log", base=2)
    limits = axes.get_xlim()
    pixels = {value: float(axes.transData.transform((value, 0))[0]) for value in values}
    least = min(44, axes.get_window_extent().width)
    ticks = [values[-1]]
    for value in reversed(values[:-1]):
        if pixels[ticks[-1]] - pixels[value] >= least:
            ticks.append(value)
    set_ticks(axes.xaxis, ticks[::-1], _number)
    axes.set_xlabel(words)
    axes.set_xlim(limits)


def _draw_maps(
    group: AccuracyGroup,
    scored: Scored,
    floors: Floors,
    axes: Sequence[str],
    looks: Looks,
    title: str,
    note: str,
) -> Page:
    metric = group.metric
    across, up = _values(scored, 0), _values(scored, 1)
    maps: list[tuple[str, float | None, str, Floors]] = [
        (score.name, score.mean, looks[score.label].colour, {part.place: part.mean for part in found})
        for score, found in scored
    ]
    maps += [("best floor", None, MUTED, floors)] if floors else []
    columns = min(len(maps), 2 if len(across) > 6 else 3)
    grids = [_grid(places, across, up) for *_, places in maps]
    note += "; mean over seeds, one colour scale for all"
    note += ", empty: no result" if any(np.isnan(grid).any() for grid in grids) else ""
    shades = _shades(np.concatenate([grid.ravel() for grid in grids]), group)
    chance = group.chance if group.chance is not None and 0 <= shades.norm(group.chance) <= 1 else None
    note += "" if chance is None else f"; dashed on the scale: chance {metric.show(chance)}"
    page = Page(title, note)
    height = min(3.0, max(1.2, 0.24 * len(up)))
    panels = page.panels(len(maps), columns=columns, height=height, left=0.78, right=BAR_ROOM, gap=MAP_GAP, above=0.4)
    bar = draw_colour_bar(page, panels[columns - 1], shades, metric.tick)
    if chance is not None:
        bar.axhline(chance, color=WHITE, lw=1.6)
        bar.axhline(chance, color=BLACK, lw=0.8, ls=DASHED)
    for index, (panel, (label, mean, colour, _), grid) in enumerate(zip(panels, maps, grids, strict=True)):
        draw_squares(panel, grid, shades, is_upwards=True)
        _label_squares(panel, grid, across, up, shades, metric)
        letters = max(8, (panel.get_window_extent().width / page.figure.dpi + MAP_GAP) / LETTER)
        name = plain(label, int(letters / LEAST_TITLE))
        share = max(LEAST_TITLE, min(1.0, letters / len(name)))  # rather small than cut
        name += f"\n{metric.show(mean)}" if mean is not None else ""
        heading = panel.set_title(name, fontweight="bold", color=colour, loc="left")
        heading.set_fontsize(share * float(heading.get_fontsize()))
        if index % columns:
            panel.set_yticklabels([])
            panel.tick_params(axis="y", length=0)
        else:
            panel.set_ylabel(_axis_words(axes[1]))
        if index + columns >= len(maps):
            panel.set_xlabel(_axis_words(axes[0]).replace(" (", "\n("))  # a map is narrow
    return page


def _grid(scored: Floors, across: Sequence[float], up: Sequence[float]) -> Grid:
    """Return `[rows, columns]` of means, NaN where there is no result."""
    grid = np.full((len(up), len(across)), np.nan)
    for (x, y), value in scored.items():
        grid[up.index(y), across.index(x)] = value
    return grid


def _shades(values: Grid, group: AccuracyGroup) -> Shades:
    """Return the common scale: fractions from the lower of chance and the worst up to 1, others over what occurs."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if group.metric.is_lower_better:
        return Shades(colormaps[f"{COLOURS}_r"], Normalize(low, max(high, low + 1e-9)))
    return Shades(colormaps[COLOURS], Normalize(low if group.chance is None else min(low, group.chance), 1.0))


def _label_squares(
    panel: Axes, grid: Grid, across: Sequence[float], up: Sequence[float], shades: Shades, metric: Metric
) -> None:
    """Put values on both axes, and the score into each square that has room for it."""
    box = panel.get_window_extent()
    width, height = box.width / len(across), box.height / len(up)
    for axis, values, step in ((panel.xaxis, across, 34 / width), (panel.yaxis, up, 13 / height)):
        every = max(1, round(step + 0.49))
        axis.set_ticks(range(0, len(values), every), [_number(value) for value in values[::every]])
    panel.tick_params(length=2, labelsize=8.5)
    if width < 22 or height < 13:
        return  # the numbers would not fit; the table has them
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            colour = _readable_on(*shades.colours(shades.norm(value))[:3])
            words, size = metric.number(value), 8 if width > 28 else 7
            panel.text(column, row, words, ha="center", va="center", fontsize=size, color=colour)


def _readable_on(*colour: float) -> str:
    """Return white or black, whichever has more contrast on a colour (relative luminance of WCAG 2)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return WHITE if 1.05 / (light + 0.05) > (light + 0.05) / 0.053 else BLACK
