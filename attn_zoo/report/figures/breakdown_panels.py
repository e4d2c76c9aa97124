"""Figures of breakdowns: a curve per variant over one axis, a heat map per variant over two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from attn_zoo.report.analysis.breakdown import Part, axes_of, parts, values_of
from attn_zoo.report.analysis.floor import FAR
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore
from attn_zoo.report.figures.curves import Picture
from attn_zoo.report.figures.labels import EndLabel, draw_labels, label_width
from attn_zoo.report.figures.panels import make_panels_figure
from attn_zoo.report.figures.style import INK, MUTED, Look, plain, styled
from attn_zoo.report.units import human_length, human_number

__all__ = ["breakdown_picture"]

LOGARITHMIC_FROM = 8
"""Ratio of the largest to the smallest value of an axis from which it is drawn logarithmically."""
COLOURS = "viridis"
LETTER = 0.1
"""Inches that a letter of a panel's title may take."""


def breakdown_picture(group: AccuracyGroup, look_of: Mapping[str, Look]) -> Picture | None:
    """Return curves or heat maps; None where no run has a breakdown."""
    axes = axes_of(group)
    scores = [score for score in group.ranked if parts(score, axes)] if axes else []
    if not scores:
        return None
    averaged = f"; mean over {', '.join(axes[2:])}" if len(axes) > 2 else ""
    shown = [axes[0]] if len(axes) == 1 else [axes[0], axes[1]]
    title = f"{group.metric.title} by {' and '.join(_words(name) for name in shown)}: {group.title}"
    said = f"{group.how}{averaged}"
    draw = _curves if len(shown) == 1 else _maps
    with styled():
        figure = draw(group, scores, shown, look_of, title, said)
    alt = "; ".join(f"{score.name}: {_alt(parts(score, shown), shown, group.metric)}" for score in scores)
    return Picture(f"breakdown-{group.name}", title, f"{title}, {said}. {alt}.", figure)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _number(value: float) -> str:
    return human_length(value) if value >= 1024 and value == int(value) else human_number(value)


def _alt(found: Sequence[Part], axes: Sequence[str], metric: Metric) -> str:
    worst = max(found, key=lambda part: metric.order(part.mean))
    best = min(found, key=lambda part: metric.order(part.mean))
    places = [
        ", ".join(f"{_words(name)} {_number(value)}" for name, value in zip(axes, part.place, strict=True))
        for part in (best, worst)
    ]
    return f"best {metric.show(best.mean)} ({places[0]}), worst {metric.show(worst.mean)} ({places[1]})"


def _curves(
    group: AccuracyGroup,
    scores: Sequence[LabelScore],
    axes: Sequence[str],
    look_of: Mapping[str, Look],
    title: str,
    said: str,
) -> Figure:
    said += "; mean over seeds with its 95 % t-interval"
    drawn = [part.mean for score in scores for part in parts(score, axes)]
    distance = min(abs(value - group.chance) for value in drawn) if group.chance is not None else 0.0
    is_near = distance <= FAR * ((max(drawn) - min(drawn)) or 0.1)
    if group.chance is not None:
        said += f"; {'dashed' if is_near else 'off the scale'}: chance {group.metric.show(group.chance)}"
    ends = {score.name: parts(score, axes) for score in scores}
    texts = {
        score.name: EndLabel(
            plain(score.name, 30),
            f"{group.metric.show(ends[score.name][-1].mean)} at {_number(ends[score.name][-1].place[0])}",
            look_of[score.label].colour,
            ends[score.name][-1].place[0],
            ends[score.name][-1].mean,
        )
        for score in scores
    }
    height = max(3.2, sum(label.height for label in texts.values()) + 0.1)
    figure, (axis,) = make_panels_figure(title, said, [], count=1, columns=1, height=height)
    box, room = axis.get_position(), label_width(figure, list(texts.values())) + 0.36
    axis.set_position((box.x0, box.y0, box.width - room / figure.get_figwidth(), box.height))
    if group.chance is not None and is_near:
        axis.axhline(group.chance, color=MUTED, lw=1.0, ls=(0, (4, 2)), zorder=1)
    for score in scores:
        _curve(axis, ends[score.name], look_of[score.label], is_dashed=bool(score.start))
    _value_axis(axis, values_of(group, axes, 0), _words(axes[0]))
    axis.yaxis.set_major_locator(MaxNLocator(6))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: group.metric.tick(value)))
    axis.set_ylabel(f"{group.metric.axis} on test", fontsize=9.5)
    axis.set_ylim(axis.get_ylim())  # labels need final limits
    draw_labels(axis, list(texts.values()))
    return figure


def _curve(axis: Axes, found: Sequence[Part], look: Look, *, is_dashed: bool) -> None:
    x, y = [part.place[0] for part in found], [part.mean for part in found]
    axis.plot(
        x, y, color=look.colour, lw=1.9, ls=(0, (2, 1)) if is_dashed else "-", marker=look.marker, ms=5.5, mec="white",
        mew=0.7, zorder=3,
    )  # fmt: skip
    for part in found:
        if part.low is not None and part.high is not None:
            axis.plot([part.place[0]] * 2, [part.low, part.high], color=look.colour, lw=1.2, alpha=0.7, zorder=2)


def _value_axis(axis: Axes, values: Sequence[float], words: str) -> None:
    if values[0] > 0 and values[-1] / values[0] >= LOGARITHMIC_FROM:
        axis.set_xscale("log", base=2)
    axis.set_xlabel(words, fontsize=9.5)
    axis.xaxis.set_minor_locator(NullLocator())
    left, right = axis.get_xlim()
    pixels = axis.get_window_extent().width
    scale = axis.transData.transform
    ticks = [values[-1]]
    for value in reversed(values[:-1]):  # never so many that their numbers touch
        if scale((ticks[-1], 0))[0] - scale((value, 0))[0] >= min(44, pixels):
            ticks.append(value)
    axis.xaxis.set_major_locator(FixedLocator(ticks[::-1]))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
    axis.set_xlim(left, right)


def _maps(
    group: AccuracyGroup,
    scores: Sequence[LabelScore],
    axes: Sequence[str],
    look_of: Mapping[str, Look],
    title: str,
    said: str,
) -> Figure:
    metric = group.metric
    across, up = values_of(group, axes, 0), values_of(group, axes, 1)
    columns = min(len(scores), 2 if len(across) > 6 else 3)
    height = min(3.0, max(1.2, 0.24 * len(up)))
    said += "; mean over seeds, one colour scale for all" + (", white: no result" if _has_holes(scores, axes) else "")
    figure, panels = make_panels_figure(
        title, said, [], count=len(scores), columns=columns, height=height, gap_y=0.96, gap_x=0.3, right=1.0, above=0.32
    )
    every = [part.mean for score in scores for part in parts(score, axes)]
    scale = _scale(every, group)
    for index, (panel, score) in enumerate(zip(panels, scores, strict=True)):
        _map(panel, parts(score, axes), across, up, metric, scale)
        room = int(panel.get_window_extent().width / figure.dpi / LETTER)
        value = f"\n{metric.show(score.mean)}" if score.mean is not None else ""
        name = plain(score.name, max(8, room)) + value
        panel.set_title(name, fontsize=9.5, fontweight="bold", color=look_of[score.label].colour, loc="left")
        if index % columns:
            panel.set_yticklabels([])
            panel.tick_params(axis="y", length=0)
        else:
            panel.set_ylabel(_words(axes[1]), fontsize=9.5)
        if index + columns >= len(scores):
            panel.set_xlabel(_words(axes[0]), fontsize=9.5)
    _draw_scale(figure, panels[0], scale, group)
    return figure


def _has_holes(scores: Sequence[LabelScore], axes: Sequence[str]) -> bool:
    found = [{part.place for part in parts(score, axes)} for score in scores]
    return any(places != found[0] for places in found) or len(found[0]) < len({p[0] for p in found[0]}) * len(
        {p[1] for p in found[0]}
    )


def _scale(values: Sequence[float], group: AccuracyGroup) -> Normalize:
    """Return the common scale: fractions from the lower of chance and the worst up to 1, others over what occurs."""
    if group.metric.is_lower_better:
        return Normalize(min(values), max(values) if max(values) > min(values) else min(values) + 1e-9)
    return Normalize(min([*values, *([group.chance] if group.chance is not None else [])]), 1.0)


def _map(
    panel: Axes, found: Sequence[Part], across: Sequence[float], up: Sequence[float], metric: Metric, scale: Normalize
) -> None:
    grid = np.full((len(up), len(across)), np.nan)
    for part in found:
        grid[up.index(part.place[1]), across.index(part.place[0])] = part.mean
    colours = colormaps[f"{COLOURS}_r" if metric.is_lower_better else COLOURS]
    panel.imshow(grid, cmap=colours, norm=scale, aspect="auto", origin="lower", interpolation="nearest")
    panel.grid(visible=False)
    box = panel.get_window_extent()
    width, height = box.width / len(across), box.height / len(up)
    _category_ticks(panel, across, up, width, height)
    if width < 22 or height < 13:
        return  # the numbers would not fit; the table has them
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            colour = colours(scale(value))
            panel.text(
                column, row, metric.number(value), ha="center", va="center", fontsize=8 if width > 28 else 7,
                color=_readable_on(*colour[:3]),
            )  # fmt: skip


def _readable_on(*colour: float) -> str:
    """Return white or ink, whichever has more contrast on a colour (relative luminance of WCAG 2)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if 1.05 / (light + 0.05) > (light + 0.05) / 0.067 else INK


def _category_ticks(panel: Axes, across: Sequence[float], up: Sequence[float], width: float, height: float) -> None:
    every_x, every_y = max(1, round(34 / width + 0.49)), max(1, round(13 / height + 0.49))
    panel.set_xticks(range(0, len(across), every_x), [_number(value) for value in across[::every_x]])
    panel.set_yticks(range(0, len(up), every_y), [_number(value) for value in up[::every_y]])
    panel.tick_params(length=2, labelsize=8.5)


def _draw_scale(figure: Figure, first: Axes, scale: Normalize, group: AccuracyGroup) -> None:
    """Draw the colour scale at the right of the first row, with chance marked."""
    box, width = first.get_position(), figure.get_figwidth()
    bar = figure.add_axes((1 - 0.86 / width, box.y0, 0.14 / width, box.height))
    name = f"{COLOURS}_r" if group.metric.is_lower_better else COLOURS
    steps = np.linspace(float(scale.vmin or 0.0), float(scale.vmax or 1.0), 128)
    bar.imshow(steps[:, None], cmap=colormaps[name], norm=scale, aspect="auto", origin="lower",
               extent=(0, 1, steps[0], steps[-1]))  # fmt: skip
    bar.grid(visible=False)
    bar.set_xticks([])
    bar.yaxis.tick_right()
    bar.yaxis.set_major_locator(MaxNLocator(4))
    bar.yaxis.set_major_formatter(FuncFormatter(lambda value, _: group.metric.tick(value)))
    bar.tick_params(length=2, labelsize=8.5)
    if group.chance is not None and scale.vmin is not None and scale.vmin <= group.chance <= (scale.vmax or 1.0):
        bar.axhline(group.chance, color="white", lw=1.6)
        bar.axhline(group.chance, color=INK, lw=0.8, ls=(0, (2, 1)))
