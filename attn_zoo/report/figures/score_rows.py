"""The scores of one accuracy group: every seed with mean and interval, beside chance and the floors."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from attn_zoo.report.analysis.floor import near_marks
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore
from attn_zoo.report.figures.axes import ON_WHITE, annotate, score_axis
from attn_zoo.report.figures.page import Page, text_size
from attn_zoo.report.figures.style import INK, MARK, MUTED, Look, Looks, plain
from attn_zoo.report.wording import outcome

ROW = 0.46
FLOOR_ROW = 0.17
NAME_LETTERS = 34
NAME_FONT, WORDS_FONT = 10, 8.5


def draw_scores(group: AccuracyGroup, looks: Looks) -> Page | None:
    """Return one row per label: a point for each seed, the mean and its 95 % interval, chance and floors as lines.

    None where no run finished.
    """
    metric, scores = group.metric, group.ranked
    values = [value for score in scores for value in score.values.values()]
    if not values:
        return None
    values += [end for score in scores for end in (score.low, score.high) if end is not None]
    near, far = near_marks(values, group.marks, metric)
    marks = [(plain(name.replace("_", " "), 22), value) for name, value in near.items()]
    note = (
        f"{group.how}\nlarge: mean over seeds with its 95 % t-interval; small: each seed; dashed: chance and trivial "
    )
    note += "models"
    if far:
        note += f"; off the scale: {', '.join(f'{name} {metric.show(value)}' for name, value in far.items())}"
    words = [_words(score, group) for score in scores]
    floor_rows = FLOOR_ROW * len(marks) + (0.12 if marks else 0)
    page = Page(f"{metric.title}: {group.title}", note)
    left = max(text_size(plain(score.name, NAME_LETTERS), NAME_FONT, "bold")[0] for score in scores) + 0.34
    right = max(text_size(text, WORDS_FONT)[0] for text in words) + 0.36
    (axes,) = page.panels(height=ROW * len(scores) + floor_rows, left=left, right=right)
    axes.set_ylim(len(scores) - 0.5 + floor_rows / ROW, -0.5)
    axes.set_yticks(range(len(scores)), ["" for _ in scores])
    axes.tick_params(axis="y", length=0)
    values += [value for _, value in marks]
    margin = 0.06 * (max(values) - min(values)) or 0.02 * (abs(values[0]) or 1.0)
    axes.set_xlim(min(values) - margin, max(values) + margin)
    score_axis(axes.xaxis, metric, f"{metric.axis} on test", num_ticks=7)
    _draw_floors(axes, marks, len(scores), metric)
    for row, (score, text) in enumerate(zip(scores, words, strict=True)):
        _draw_row(axes, row, score, looks[score.label], text)
    said = "; ".join(f"{score.name}: {text}" for score, text in zip(scores, words, strict=True))
    floors = "; ".join(f"{name}: {metric.show(value)}" for name, value in group.marks.items())
    return page.describe(f"{said}. {floors}" if floors else said)


def _draw_floors(axes: Axes, marks: Sequence[tuple[str, float]], rows: int, metric: Metric) -> None:
    """Draw a dashed line for each, labelled on a line of its own below the rows, on the side that has room."""
    middle = sum(axes.get_xlim()) / 2
    # A label must not cross the line of a later one: those that write to the right go outermost last, and mirrored.
    order = [mark for mark in reversed(marks) if mark[1] < middle] + [mark for mark in marks if mark[1] >= middle]
    for index, (name, value) in enumerate(order):
        level = rows - 0.5 + (0.1 + FLOOR_ROW * (index + 0.5)) / ROW
        axes.plot([value, value], [-0.5, level], color=MUTED, lw=1.0, ls=MARK, zorder=1)
        is_left_half = value < middle
        ha, offset = ("left", 4) if is_left_half else ("right", -4)
        annotate(axes, f"{name} {metric.show(value)}", (value, level), (offset, 0), ha=ha, bbox=ON_WHITE)


def _draw_row(axes: Axes, row: int, score: LabelScore, look: Look, words: str) -> None:
    name, colour = plain(score.name, NAME_LETTERS), look.colour
    annotate(
        axes, name, (0, row), (-10, 0), is_share=True, ha="right", fontsize=NAME_FONT, fontweight="bold", color=colour
    )
    annotate(axes, words, (1, row), (8, 0), is_share=True, fontsize=WORDS_FONT, color=INK)
    for value in score.values.values():
        axes.plot([value], [row + 0.24], marker=look.marker, ms=4.5, color=look.colour, alpha=0.55, mew=0, zorder=3)
    if score.mean is None:
        return
    if score.low is not None and score.high is not None:
        axes.plot([score.low, score.high], [row, row], color=look.colour, lw=2.2, zorder=2.5)
    face = look.colour if score.start else "white"
    axes.plot([score.mean], [row], marker=look.marker, ms=9, mfc=face, mec=look.colour, mew=2, zorder=4)


def _words(score: LabelScore, group: AccuracyGroup) -> str:
    if score.mean is None:
        return ", ".join(dict.fromkeys(outcome(status).brief for status, _ in score.failures)) or "no run"
    lost = f", {len(score.failures)} failed" if score.failures else ""
    return f"{group.metric.show(score.mean)} (n={len(score.values)}{lost})"
