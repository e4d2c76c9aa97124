"""Figures of one accuracy group: scores of every seed with mean, interval and floors; and score against speed."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from attn_zoo.report.accuracy import AccuracyGroup, LabelScore
from attn_zoo.report.curves import Picture
from attn_zoo.report.labels import EndLabel, label_width
from attn_zoo.report.statuses import outcome
from attn_zoo.report.style import INK, MUTED, Look, new_figure, plain, styled

__all__ = ["accuracy_picture"]

WIDTH = 8.0
ROW = 0.46


def accuracy_picture(group: AccuracyGroup, look_of: Mapping[str, Look]) -> Picture | None:
    """Return one row per label: a point for each seed, the mean and its 95 % interval, chance and floors as lines.

    None where no run finished.
    """
    values = [value for score in group.scores for value in score.values.values()]
    if not values:
        return None
    marks = sorted(
        [
            *((plain(name.replace("_", " "), 22), value) for name, value in group.floors.items()),
            *([("chance", group.chance)] if group.chance is not None else []),
        ],
        key=lambda mark: mark[1],
    )
    scores = sorted(group.scores, key=lambda score: (score.mean is None, -(score.mean or 0.0)))
    title = f"{group.metric.capitalize()}: {group.title}"
    head, foot = 0.88, 0.6
    floor_rows = 0.17 * len(marks) + (0.12 if marks else 0)
    height = ROW * len(group.scores) + floor_rows
    total = head + height + foot
    is_fraction = group.metric.endswith("accuracy")
    with styled():
        figure = new_figure(WIDTH, total)
        figure.text(0.14 / WIDTH, 1 - 0.3 / total, plain(title, 78), fontsize=12.5, fontweight="bold", va="center")
        note = "large: mean over seeds with its 95 % t-interval; small: each seed; dashed: trivial models"
        figure.text(0.14 / WIDTH, 1 - 0.53 / total, plain(group.setting, 100), fontsize=8.5, color=MUTED, va="center")
        figure.text(0.14 / WIDTH, 1 - 0.69 / total, note, fontsize=8.5, color=MUTED, va="center")
        words = [EndLabel("", _words(score, is_fraction=is_fraction), INK, 0, 0) for score in scores]
        right = label_width(figure, words) + 0.3
        left = label_width(figure, [EndLabel(plain(score.label), "", INK, 0, 0) for score in scores]) + 0.34
        axes = figure.add_axes((left / WIDTH, foot / total, (WIDTH - left - right) / WIDTH, height / total))
        rows = len(group.scores)
        axes.set_ylim(rows - 0.5 + floor_rows / ROW, -0.5)
        axes.set_yticks(range(rows), ["" for _ in scores])
        axes.yaxis.grid(visible=True)
        axes.tick_params(axis="y", length=0)
        ends = [end for score in group.scores for end in (score.low, score.high) if end is not None]
        _value_limits(axes, [*values, *ends, *(value for _, value in marks)], is_fraction=is_fraction)
        _draw_floors(axes, marks, rows, is_fraction=is_fraction)
        for row, score in enumerate(scores):
            _draw_row(axes, row, score, look_of[score.label], is_fraction=is_fraction)
        axes.set_xlabel(f"{group.metric} on test", fontsize=9.5)
    said = "; ".join(f"{score.label}: {_words(score, is_fraction=is_fraction)}" for score in group.scores)
    floors = "; ".join(f"{name}: {_value(value, is_fraction=is_fraction)}" for name, value in marks)
    return Picture(f"accuracy-{group.name}", title, f"{title}, {group.setting}. {said}. {floors}.", figure)


def _value_limits(axes: Axes, values: list[float], *, is_fraction: bool) -> None:
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.02 * (abs(high) or 1.0)
    axes.set_xlim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    if is_fraction:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def _draw_floors(axes: Axes, marks: list[tuple[str, float]], rows: int, *, is_fraction: bool) -> None:
    """Draw a dashed line for each, labelled on a line of its own below the rows, on the side that has room."""
    left, right = axes.get_xlim()
    middle = (left + right) / 2
    # A label must not cross the line of a later one: those that write to the right go outermost last, and mirrored.
    order = [mark for mark in reversed(marks) if mark[1] < middle] + [mark for mark in marks if mark[1] >= middle]
    for index, (name, value) in enumerate(order):
        level = rows - 0.5 + (0.1 + 0.17 * (index + 0.5)) / ROW
        axes.plot([value, value], [-0.5, level], color=MUTED, lw=1.0, ls=(0, (4, 2)), zorder=1)
        is_left_half = value < middle
        axes.annotate(
            f"{name} {_value(value, is_fraction=is_fraction)}",
            xy=(value, level),
            xytext=(4 if is_left_half else -4, 0),
            textcoords="offset points",
            ha="left" if is_left_half else "right",
            va="center",
            fontsize=8.2,
            color=MUTED,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )


def _draw_row(axes: Axes, row: int, score: LabelScore, look: Look, *, is_fraction: bool) -> None:
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
    axes.annotate(
        plain(score.label),
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
        axes.plot([score.mean], [row], marker=look.marker, ms=9, mfc="white", mec=look.colour, mew=2, zorder=4)
    axes.annotate(
        _words(score, is_fraction=is_fraction),
        xy=(1, row),
        xytext=(8, 0),
        ha="left",
        fontsize=8.5,
        color=INK,
        annotation_clip=False,
        **place,  # type: ignore[arg-type]
    )


def _words(score: LabelScore, *, is_fraction: bool) -> str:
    if score.mean is None:
        return ", ".join(dict.fromkeys(outcome(status).brief for status, _ in score.failures)) or "no run"
    lost = f", {len(score.failures)} failed" if score.failures else ""
    return f"{_value(score.mean, is_fraction=is_fraction)} (n={len(score.values)}{lost})"


def _value(value: float, *, is_fraction: bool) -> str:
    return f"{100 * value:.1f} %" if is_fraction else f"{value:.3g}"
