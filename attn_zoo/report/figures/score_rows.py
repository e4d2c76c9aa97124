"""The scores of one accuracy group: every seed with mean and interval, beside chance and the floors."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from attn_zoo.report.analysis.floor import near_marks
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore
from attn_zoo.report.figures.curves import Picture
from attn_zoo.report.figures.labels import EndLabel, label_width
from attn_zoo.report.figures.style import INK, MUTED, Look, draw_title, new_figure, plain, styled
from attn_zoo.report.wording import outcome

__all__ = ["accuracy_picture"]

WIDTH = 8.0
ROW = 0.46
FLOOR_ROW = 0.17
NAME = 34
"""Characters of a name that are shown."""


def accuracy_picture(group: AccuracyGroup, look_of: Mapping[str, Look]) -> Picture | None:
    """Return one row per label: a point for each seed, the mean and its 95 % interval, chance and floors as lines.

    None where no run finished.
    """
    metric = group.metric
    scores = group.ranked
    values = [value for score in scores for value in score.values.values()]
    if not values:
        return None
    ends = [end for score in scores for end in (score.low, score.high) if end is not None]
    near, far = near_marks([*values, *ends], group.marks, metric)
    marks = [(plain(name.replace("_", " "), 22), value) for name, value in near.items()]
    title = f"{metric.title}: {group.title}"
    subtitle = wrap(group.how, 116, break_on_hyphens=False)
    head, foot = 0.71 + 0.17 * len(subtitle), 0.6
    floor_rows = FLOOR_ROW * len(marks) + (0.12 if marks else 0)
    height = ROW * len(scores) + floor_rows
    total = head + height + foot
    with styled():
        figure = new_figure(WIDTH, total)
        draw_title(figure, title)
        note = "large: mean over seeds with its 95 % t-interval; small: each seed; dashed: chance and trivial models"
        if far:
            note += f"; off the scale: {', '.join(f'{name} {metric.show(value)}' for name, value in far.items())}"
        for row, line in enumerate([*subtitle, note]):
            top = 1 - (0.53 + 0.17 * row) / total
            figure.text(0.14 / WIDTH, top, plain(line, 130), fontsize=8.5, color=MUTED, va="center")
        words = [EndLabel("", _words(score, group), INK, 0, 0) for score in scores]
        right = label_width(figure, words) + 0.3
        left = label_width(figure, [EndLabel(plain(score.name, NAME), "", INK, 0, 0) for score in scores]) + 0.34
        axes = figure.add_axes((left / WIDTH, foot / total, (WIDTH - left - right) / WIDTH, height / total))
        rows = len(scores)
        axes.set_ylim(rows - 0.5 + floor_rows / ROW, -0.5)
        axes.set_yticks(range(rows), ["" for _ in scores])
        axes.yaxis.grid(visible=True)
        axes.tick_params(axis="y", length=0)
        _value_limits(axes, [*values, *ends, *(value for _, value in marks)], metric)
        _draw_floors(axes, marks, rows, metric)
        for row, score in enumerate(scores):
            _draw_row(axes, row, score, look_of[score.label], _words(score, group))
        axes.set_xlabel(f"{metric.axis} on test", fontsize=9.5)
    said = "; ".join(f"{score.name}: {_words(score, group)}" for score in scores)
    floors = "; ".join(f"{name}: {metric.show(value)}" for name, value in group.marks.items())
    return Picture(f"accuracy-{group.name}", title, f"{title}, {group.how}. {said}. {floors}.", figure)


def _value_limits(axes: Axes, values: list[float], metric: Metric) -> None:
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.02 * (abs(high) or 1.0)
    axes.set_xlim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: metric.tick(value)))


def _draw_floors(axes: Axes, marks: list[tuple[str, float]], rows: int, metric: Metric) -> None:
    """Draw a dashed line for each, labelled on a line of its own below the rows, on the side that has room."""
    left, right = axes.get_xlim()
    middle = (left + right) / 2
    # A label must not cross the line of a later one: those that write to the right go outermost last, and mirrored.
    order = [mark for mark in reversed(marks) if mark[1] < middle] + [mark for mark in marks if mark[1] >= middle]
    for index, (name, value) in enumerate(order):
        level = rows - 0.5 + (0.1 + FLOOR_ROW * (index + 0.5)) / ROW
        axes.plot([value, value], [-0.5, level], color=MUTED, lw=1.0, ls=(0, (4, 2)), zorder=1)
        is_left_half = value < middle
        axes.annotate(
            f"{name} {metric.show(value)}",
            xy=(value, level),
            xytext=(4 if is_left_half else -4, 0),
            textcoords="offset points",
            ha="left" if is_left_half else "right",
            va="center",
            fontsize=8.2,
            color=MUTED,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )


def _draw_row(axes: Axes, row: int, score: LabelScore, look: Look, words: str) -> None:
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
    axes.annotate(
        plain(score.name, NAME),
        xy=(0, row),
        xytext=(-10, 0),
        ha="right",
        fontsize=10,
        fontweight="bold",
        color=look.colour,
        annotation_clip=False,
        **place,  # type: ignore[arg-type]
    )
    for value in score.values.values():
        axes.plot([value], [row + 0.24], marker=look.marker, ms=4.5, color=look.colour, alpha=0.55, mew=0, zorder=3)
    if score.mean is not None:
        if score.low is not None and score.high is not None:
            axes.plot([score.low, score.high], [row, row], color=look.colour, lw=2.2, zorder=2.5)
        axes.plot(
            [score.mean],
            [row],
            marker=look.marker,
            ms=9,
            mfc=look.colour if score.start else "white",
            mec=look.colour,
            mew=2,
            zorder=4,
        )
    axes.annotate(
        words,
        xy=(1, row),
        xytext=(8, 0),
        ha="left",
        fontsize=8.5,
        color=INK,
        annotation_clip=False,
        **place,  # type: ignore[arg-type]
    )


def _words(score: LabelScore, group: AccuracyGroup) -> str:
    if score.mean is None:
        return ", ".join(dict.fromkeys(outcome(status).brief for status, _ in score.failures)) or "no run"
    lost = f", {len(score.failures)} failed" if score.failures else ""
    return f"{group.metric.show(score.mean)} (n={len(score.values)}{lost})"
