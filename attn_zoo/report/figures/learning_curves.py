"""Learning curves: training loss by step; validation score by step, by FLOPs and by seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from attn_zoo.report.analysis.learning import COMPILED_FIRST, Axis, What, compiles, mean_curve, seed_curves
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore
from attn_zoo.report.figures.axes import draw_mark, score_axis
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import DASHED, SOLID, Looks, plain
from attn_zoo.report.figures.svg import Tag
from attn_zoo.units import human_flops, human_number, some

UNITS: Mapping[Axis, tuple[tuple[float, str], ...]] = {
    "steps": ((1.0, "step"),),
    "flops": ((1.0, "training FLOPs"),),
    "seconds": ((1.0, "seconds of training"), (60.0, "minutes of training"), (3600.0, "hours of training")),
}
"""Units of each axis with their names, smallest first."""


def draw_learning(group: AccuracyGroup, looks: Looks) -> Page | None:
    """Return four panels at most; None where no run kept two evaluations."""
    scores = [score for score in group.ranked if len(mean_curve(score, "validation", "steps")) > 1]
    if not scores:
        return None
    axes_of = [axis for axis in UNITS if any(mean_curve(score, "validation", axis) for score in scores)]
    has_loss = any(mean_curve(score, "train_loss", "steps") for score in scores)
    note = f"{group.how}; bold: mean over seeds, thin: each seed"
    if any(score.start for score in scores):
        note += "; dashed: self-pretrained, which begins where its self-pretraining ends"
    if group.best_mark:  # trivial models are scored on the test set only, the curves on validation
        name, value = group.best_mark
        on_test = " on test" if name in group.floors else ""
        note += f"; level line: {name.replace('_', ' ')}, {group.metric.show(value)}{on_test}"
    if "seconds" in axes_of and compiles(scores):
        note += f"; {COMPILED_FIRST}"
    if group.is_shared and "seconds" in axes_of:
        note += "; times are of runs that shared their device"
    lost = [f"{score.name} {num_lost}" for score in group.scores if (num_lost := len(score.trial.failures))]
    if lost:
        note += f"; runs without a curve: {', '.join(lost)}"
    shown = {score.name for score in scores}
    if bare := [score.name for score in group.ranked if score.mean is not None and score.name not in shown]:
        note += f"; no curve was kept of {some(bare)}"
    partial = [
        UNITS[axis][0][1] for axis in axes_of if not all(mean_curve(each, "validation", axis) for each in scores)
    ]
    if partial:
        note += f"; {' and '.join(partial)}: only of those that know them"
    page = Page(f"Learning curves: {group.title}", note)
    page.legend([_legend_entry(score, looks) for score in scores], keys=[score.name for score in scores])
    panels = page.panels(len(axes_of) + has_loss, height=2.2, columns=2, left=0.78, right=0.2, above=0.1)
    if has_loss:
        first, *panels = panels
        _draw_curves(first, scores, looks, "train_loss", "steps", lambda value: f"training loss {value:.3f}")
        first.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        first.set_ylabel("training loss")
    for panel, axis in zip(panels, axes_of, strict=True):
        _draw_curves(panel, scores, looks, "validation", axis, group.metric.show)
        if group.best_mark:  # so that a curve that never leaves it is seen
            draw_mark(panel, group.best_mark[1])
        score_axis(panel.yaxis, group.metric, f"validation {group.metric.words}")
    return page.describe(_alt(score, group) for score in scores)


def _legend_entry(score: LabelScore, looks: Looks) -> Line2D:
    look = looks[score.label]
    mark = {"marker": look.marker, "ms": 5, "mfc": "white", "mec": look.colour}
    line = DASHED if score.start else SOLID
    return Line2D([], [], color=look.colour, ls=line, lw=1.9, label=plain(score.name, 30), **mark)  # type: ignore[arg-type]


def _draw_curves(
    panel: Axes, scores: Sequence[LabelScore], looks: Looks, what: What, axis: Axis, show: Callable[[float], str]
) -> None:
    curves = [(score, curve) for score in scores if (curve := mean_curve(score, what, axis))]
    longest = max(curve[-1][0] for _, curve in curves)
    factor, words = [unit for unit in UNITS[axis] if longest >= 2 * unit[0] or unit is UNITS[axis][0]][-1]
    for score, curve in curves:  # not clipped: where scores end, at the edge of the axes, half a line would be
        look, own, lines = looks[score.label], Tag(of=score.name), []
        for points in seed_curves(score, what, axis):
            seed = [x / factor for x, _ in points], [y for _, y in points]
            lines += panel.plot(*seed, color=look.colour, lw=0.7, alpha=0.4, clip_on=False)
        x, y = [place / factor for place, _ in curve], [value for _, value in curve]
        style: dict[str, Any] = {"lw": 1.9, "ls": DASHED if score.start else SOLID, "zorder": 3, "clip_on": False}
        lines += panel.plot(x, y, color=look.colour, **style)
        own.put_on(*lines)
        mark: dict[str, Any] = {"marker": look.marker, "mfc": "white", "mec": look.colour, "clip_on": False}
        end = panel.plot(x[-1:], y[-1:], ms=5, mew=1.4, zorder=4, **mark)
        replace(own, tips=(f"{score.name}: {show(y[-1])} at the end",)).put_on(*end)
    panel.set_xlim(left=0)
    panel.set_xlabel(words)
    panel.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _place(value, axis)))


def _place(value: float, axis: Axis) -> str:
    if axis == "flops":
        return human_flops(value).replace("FLOP", "") if value else "0"
    return f"{human_number(value / 1000)}k" if value >= 10_000 else f"{value:g}"


def _alt(score: LabelScore, group: AccuracyGroup) -> str:
    step, value = mean_curve(score, "validation", "steps")[-1]
    return f"{score.name}: {group.metric.show(value)} on validation at step {step:,.0f}"
