"""Learning curves: training loss by step; validation score by step, by FLOPs and by seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from attn_zoo.report.analysis.learning import Axis, What, mean_curve, seed_curves
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore
from attn_zoo.report.figures.curves import Picture
from attn_zoo.report.figures.panels import legend_entry, make_panels_figure
from attn_zoo.report.figures.style import MUTED, Look, plain, styled
from attn_zoo.report.units import human_flops, human_number

__all__ = ["learning_picture"]

HEIGHT = 2.2
UNITS: Mapping[Axis, tuple[tuple[float, str], ...]] = {
    "steps": ((1.0, "step"),),
    "flops": ((1.0, "training FLOPs"),),
    "seconds": ((1.0, "seconds of training"), (60.0, "minutes of training"), (3600.0, "hours of training")),
}
"""Units of each axis, smallest first, with what people call it."""


def learning_picture(group: AccuracyGroup, look_of: Mapping[str, Look]) -> Picture | None:
    """Return four panels at most; None where no run kept two evaluations."""
    scores = [score for score in group.ranked if len(mean_curve(score, "validation", "steps")) > 1]
    if not scores:
        return None
    axes_of = [axis for axis in UNITS if any(mean_curve(score, "validation", axis) for score in scores)]
    loss = any(mean_curve(score, "train_loss", "steps") for score in scores)
    metric = group.metric
    title = f"Learning curves: {group.title}"
    said = f"{group.how}; bold: mean over seeds, thin: each seed"
    if any(score.start for score in scores):
        said += "; dashed: self-pretrained, which begins where its self-pretraining ends"
    if group.is_shared and "seconds" in axes_of:
        said += "; seconds are of runs that shared their device"
    lost = [f"{score.name} {len(score.failures)}" for score in group.scores if score.failures]
    if lost:
        said += f"; runs without a curve: {', '.join(lost)}"
    with styled():
        entries = [legend_entry(score.name, look_of[score.label], is_dashed=bool(score.start)) for score in scores]
        count = len(axes_of) + loss
        figure, panels = make_panels_figure(title, said, entries, count=count, columns=2, height=HEIGHT)
        if loss:
            first, panels = panels[0], panels[1:]
            _draw(first, scores, look_of, "train_loss", "steps")
            first.set_ylabel("training loss", fontsize=9.5)
        for panel, axis in zip(panels, axes_of, strict=True):
            _draw(panel, scores, look_of, "validation", axis)
            panel.set_ylabel(f"validation {metric.words}", fontsize=9.5)
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: metric.tick(value)))
            _draw_marks(panel, group)
    return Picture(f"learning-{group.name}", title, f"{title}, {said}. {_alt(scores, metric)}", figure)


def _draw(panel: Axes, scores: Sequence[LabelScore], look_of: Mapping[str, Look], what: What, axis: Axis) -> None:
    curves = {score.name: curve for score in scores if (curve := mean_curve(score, what, axis))}
    longest = max(curve[-1][0] for curve in curves.values())
    factor, words = [unit for unit in UNITS[axis] if longest >= 2 * unit[0] or unit is UNITS[axis][0]][-1]
    for score in scores:
        if score.name not in curves:
            continue
        look = look_of[score.label]
        for points in seed_curves(score, what, axis):
            x, y = zip(*points, strict=True)
            panel.plot([place / factor for place in x], y, color=look.colour, lw=0.7, alpha=0.4, zorder=2)
        x, y = zip(*curves[score.name], strict=True)
        x = tuple(place / factor for place in x)
        panel.plot(x, y, color=look.colour, lw=1.9, ls=(0, (2, 1)) if score.start else "-", zorder=3)
        panel.plot(x[-1:], y[-1:], marker=look.marker, ms=5, mfc="white", mec=look.colour, mew=1.4, lw=0, zorder=4)
    panel.set_xlim(left=0)
    panel.set_xlabel(words, fontsize=9.5)
    panel.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _place(value, axis)))


def _place(value: float, axis: Axis) -> str:
    if axis == "flops":
        return human_flops(value).replace("FLOP", "") if value else "0"
    return f"{human_number(value / 1000)}k" if value >= 10_000 else f"{value:g}"


def _draw_marks(panel: Axes, group: AccuracyGroup) -> None:
    """Draw the best floor as a dashed line, so that a curve that never leaves it is seen."""
    if not group.marks:
        return
    name, value = list(group.marks.items())[-1]
    panel.axhline(value, color=MUTED, lw=0.9, ls=(0, (4, 2)), zorder=1)
    low, high = panel.get_ylim()
    is_high = value > (low + high) / 2
    panel.annotate(
        plain(name.replace("_", " "), 24),
        xy=(1, value),
        xycoords=("axes fraction", "data"),
        xytext=(-2, -2 if is_high else 2),
        textcoords="offset points",
        ha="right",
        va="top" if is_high else "bottom",
        fontsize=7.8,
        color=MUTED,
        zorder=1.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    )


def _alt(scores: Sequence[LabelScore], metric: Metric) -> str:
    ends = []
    for score in scores:
        step, value = mean_curve(score, "validation", "steps")[-1]
        ends.append(f"{score.name}: {metric.show(value)} on validation at step {step:,.0f}")
    return "; ".join(ends) + "."
