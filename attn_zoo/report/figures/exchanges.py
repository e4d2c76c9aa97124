"""Scores of trained models against how far the heads of another mechanism are from their own."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from attn_zoo.records import AS_TRAINED, EQUAL_WEIGHTS
from attn_zoo.report.analysis.scores import AccuracyGroup
from attn_zoo.report.figures.axes import bar_words, draw_intervals, draw_mark, upright_scores, value_axis
from attn_zoo.report.figures.labels import Box, PointName, draw_point_names, line_box
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import MUTED, Looks, plain
from attn_zoo.report.figures.svg import Tag
from attn_zoo.report.tables.error_tables import MEAN, error_text
from attn_zoo.report.tables.exchange_tables import exchanges, head_error

HEIGHT = 4.0
LEAST = 1e-2
"""An error below is drawn here: what rounds is exact, and would press all others together."""


def draw_exchanges(group: AccuracyGroup, looks: Looks) -> Page | None:
    """Return a point for each mechanism, and one for the mean of the values; None for models trained with theirs.

    Lines are what the models score as they were trained, and what needs no attention.
    """
    metric = group.metric
    found = [score for score in group.ranked if exchanges(score)]
    every = [each for score in found for _, each in exchanges(score)]
    if len(found) < 2:
        return None
    trained, equal = group.references[AS_TRAINED], group.floors[EQUAL_WEIGHTS]
    control = max(fmean(each.mean_error for each in every), LEAST)
    lines = {f"with {group.setting.replaces}": trained, **dict([group.best_mark] if group.best_mark else [])}
    said = "; ".join(f"{name.replace('_', ' ')} {metric.show(value)}" for name, value in lines.items())
    bars = bar_words(
        [(score.ends, len(score.values)) for score in found], metric, "mean over seeds with its 95 % t-interval"
    )
    note = f"{group.how}\n{f'{bars}; ' if bars else ''}level lines: {said}"
    points, values, errors = [], [*lines.values(), equal], [control]
    for score in found:
        error, low, high = head_error(score)
        assert score.mean is not None and error is not None  # noqa: PT018  it was exchanged
        across = None if low is None or high is None else (max(low, LEAST), max(high, LEAST))
        points.append(
            (score, max(error, LEAST), across, f"{score.name}: {metric.show(score.mean)} at {error_text(error)}")
        )
        values += [score.mean, *(score.ends or ())]
        errors += [max(error, LEAST), *(across or ())]
    if any(error == LEAST for error in errors):
        note += f"; at the left edge: {error_text(LEAST)} and less"
    page = Page(f"{metric.title} against the error of heads: {group.title}", note)
    (axes,) = page.panels(height=HEIGHT, left=0.8, right=0.3, below=0.62)
    value_axis(axes, errors, error_text, 10, 1.5, name="x")
    axes.set_xlabel("error of heads before any update (logarithmic)")
    upright_scores(axes, values, metric)
    inside = axes.get_window_extent()
    taken: list[Box] = []
    for value in lines.values():
        draw_mark(axes, value)
        taken.append(line_box(axes, *((end, value) for end in axes.get_xlim())))
    names = [PointName(MEAN, MUTED, control, equal, 3.5)]
    axes.plot([control], [equal], marker="x", ms=6, color=MUTED, zorder=4, clip_on=False)  # whole at the frame too
    for score, error, across, tip in points:
        look, tag = looks[score.label], Tag(of=score.name)
        style: dict[str, Any] = {"color": look.colour, "lw": 1.0, "alpha": 0.6, "zorder": 2}
        assert score.mean is not None
        if score.ends is not None:
            taken.append(line_box(axes, *((error, end) for end in score.ends)))
            draw_intervals(axes, [(error, score.ends)], metric.bounds, tag=tag, **style)
        if across is not None:
            taken.append(line_box(axes, *((end, score.mean) for end in across)))
            draw_intervals(axes, [(score.mean, across)], (LEAST / 2, math.inf), is_flat=True, tag=tag, **style)
        dot: dict[str, Any] = {"marker": look.marker, "ms": 7, "mec": "white", "mew": 0.7, "clip_on": False}
        mark = axes.plot([error], [score.mean], color=look.colour, zorder=3, **dot)
        Tag(of=score.name, tips=(tip,)).put_on(*mark)
        names.append(PointName(plain(score.name, 30), look.colour, error, score.mean, 3.5, of=score.name))
    frame = (inside.x0 + 2, inside.y0 + 2, inside.x1 + 26, inside.y1 + 8)
    draw_point_names(axes, names, frame, taken)
    said = "; ".join([*(tip for *_, tip in points), f"{MEAN}: {metric.show(equal)} at {error_text(control)}"])
    return page.describe([f"{said}. As trained: {metric.show(trained)}"])
