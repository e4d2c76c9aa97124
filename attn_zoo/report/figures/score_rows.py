"""The scores of one accuracy group: every seed with mean and interval, beside chance and the floors."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from attn_zoo.report.analysis.floor import near_marks
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore
from attn_zoo.report.figures.axes import ON_WHITE, annotate, bar_words, score_axis
from attn_zoo.report.figures.dot_rows import ROW, DotRow, draw_rows, row_axes
from attn_zoo.report.figures.page import Page, text_size
from attn_zoo.report.figures.style import MARK, MUTED, Looks, plain
from attn_zoo.report.wording import outcome
from attn_zoo.units import some, with_ends

FLOOR_ROW = 0.17
SMALL = 8
"""Points of the names of floors."""


def draw_scores(group: AccuracyGroup, looks: Looks) -> Page | None:
    """Return one row per label: a point for each seed, the mean and its 95 % interval, chance and floors as lines.

    None where no run finished.
    """
    metric = group.metric
    rows = [_row(score, group, looks) for score in group.ranked]
    values = [value for row in rows for value in (*row.singles, *(row.ends or ()))]
    if not values:
        return None
    words = {name.replace("_", " "): value for name, value in group.marks.items()}
    near, far = near_marks(values, words, metric)
    marks = [(plain(name, 28), value) for name, value in near.items()]
    bars = [(score.ends, len(score.values)) for score in group.ranked]
    said = bar_words(bars, metric, "large: mean over seeds with its 95 % t-interval; small: each seed")
    note = f"{group.how}\n{f'{said}; ' if said else ''}dashed: chance and trivial models"
    if far:
        note += f"; off the scale: {', '.join(f'{name} {metric.show(value)}' for name, value in far.items())}"
    floor_rows = FLOOR_ROW * len(marks) + (0.12 if marks else 0)
    page = Page(f"{metric.title}: {group.title}", note)
    axes = row_axes(page, rows, below=floor_rows)
    values += [value for _, value in marks]
    margin = 0.06 * (max(values) - min(values)) or 0.02 * (abs(values[0]) or 1.0)
    axes.set_xlim(min(values) - margin, max(values) + margin)
    score_axis(axes.xaxis, metric, f"{metric.axis} on test", num_ticks=5)
    _draw_floors(page, axes, marks, len(rows), metric)
    draw_rows(axes, rows, metric.bounds)
    floors = "; ".join(f"{name}: {metric.show(value)}" for name, value in words.items())
    said = "; ".join(row.tip for row in rows)
    return page.describe([f"{said}. {floors}" if floors else said])


def _draw_floors(page: Page, axes: Axes, marks: Sequence[tuple[str, float]], rows: int, metric: Metric) -> None:
    """Draw a dashed line for each, labelled on a line of its own below the rows: to its right, if there is room."""
    figure = page.figure
    rightwards, leftwards = list[tuple[str, float]](), list[tuple[str, float]]()
    edge = figure.bbox.width - 0.04 * figure.dpi  # of the room to the right; a line that goes on below ends it too
    for mark in sorted(marks, key=lambda mark: -mark[1]):
        start = float(axes.transData.transform((mark[1], 0))[0])
        if start + figure.dpi * (0.06 + text_size(_floor_words(*mark, metric), SMALL)[0]) < edge:
            rightwards.append(mark)
        else:
            leftwards.insert(0, mark)
            edge = start
    # A label must not cross the line of a later one: those that write to the right go outermost last, and mirrored.
    for index, mark in enumerate([*rightwards, *leftwards]):
        level = rows - 0.5 + (0.1 + FLOOR_ROW * (index + 0.5)) / ROW
        axes.plot([mark[1]] * 2, [-0.5, level], color=MUTED, lw=1.0, ls=MARK, zorder=1)
        ha, offset = ("left", 4) if mark in rightwards else ("right", -4)
        words = _floor_words(*mark, metric)
        annotate(axes, words, (mark[1], level), (offset, 0), fontsize=SMALL, ha=ha, bbox=ON_WHITE)


def _floor_words(name: str, value: float, metric: Metric) -> str:
    return f"{name} {metric.show(value)}"


def _row(score: LabelScore, group: AccuracyGroup, looks: Looks) -> DotRow:
    metric, ends = group.metric, score.ends
    if score.mean is None:
        words = some(dict.fromkeys(outcome(status).brief for status in score.trial.failures), 1) or "no run"
    else:
        num_failed = len(score.failed_seeds)
        lost = (num_failed, "failed"), (len(score.trial.failures) - num_failed, "not run")
        counts = [f"n={len(score.values)}", *(f"{number} {words}" for number, words in lost if number)]
        words = f"{metric.show(score.mean)} ({', '.join(counts)})"
    low, high = ends or (None, None)
    return DotRow(
        name=score.name,
        label=score.label,
        look=looks[score.label],
        words=words,
        tip=with_ends(f"{score.name}: {words}", low, high, metric.end),
        value=score.mean,
        ends=ends,
        singles=tuple(score.values.values()),
    )
