"""How sensitive each variant is to the learning rate: validation against the rate, where it was tuned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attn_zoo.errors import counted
from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import AccuracyGroup
from attn_zoo.report.analysis.training_runs import Trial
from attn_zoo.report.figures.axes import ON_WHITE, annotate, draw_curve, score_axis, set_ticks
from attn_zoo.report.figures.labels import EndLabel, draw_end_labels, label_room
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.style import DASHED, MUTED, SOLID, Looks, plain
from attn_zoo.report.figures.svg import Tag
from attn_zoo.report.wording import outcome

RATE = "base_lr"


def draw_tuning(group: AccuracyGroup, looks: Looks) -> Page | None:
    """Return validation against the learning rate; None where fewer than two rates were tried.

    Of several trials with one rate the best on validation counts. A rate at which no seed finished is marked at the
    lower edge.
    """
    if RATE not in group.setting.tuned:
        return None
    metric = group.metric
    curves = [(score, _best_by_rate(group.trials[score.label, score.start], metric)) for score in group.scores]
    rates = sorted({rate for _, curve in curves for rate in curve})
    values = [value for _, curve in curves for _, value in _scored(curve)]
    if len(rates) < 2 or not values:
        return None
    others = [name for name in group.setting.tuned if name != RATE]
    note = f"{group.how}; ringed: selected" + (f"; best over {', '.join(others)} at each rate" if others else "")
    labels = []
    for score, curve in curves:
        if points := _scored(curve):
            detail, colour = counted(score.num_trials, "trial"), looks[score.label].colour
            labels.append(EndLabel(plain(score.name, 30), (detail,), colour, *points[-1], score.name))
    page = Page(f"Sensitivity to the learning rate: {group.title}", note)
    (axes,) = page.panels(height=max(3.0, 0.4 * len(curves)), right=0.2 + label_room(labels))
    axes.set_xscale("log")
    for score, curve in curves:
        look = looks[score.label]
        points = _scored(curve)
        tips = tuple(f"{score.name}, rate {rate:g}: {metric.show(value)}" for rate, value in points)
        draw_curve(axes, points, look, DASHED if score.start else SOLID, tag=Tag(of=score.name, tips=tips))
        for rate, trial in curve.items():
            if trial.is_selected and trial.validation is not None:
                axes.plot([rate], [trial.validation], marker="o", ms=12, mfc="none", mec=look.colour, mew=1.5)
    lost = [(score, curve) for score, curve in curves if len(_scored(curve)) < len(curve)]
    if lost:
        worst, best = max(values, key=metric.order), metric.best(values)
        edge = worst + 0.12 * ((worst - best) or 0.02 * abs(best))
        axes.axhline(edge, color=MUTED, lw=0.6, zorder=1)
        step = 0.02 * math.log(rates[-1] / rates[0])
        for place, (score, curve) in enumerate(lost):
            # Side by side, or those of several variants at one rate would be one cross.
            aside = math.exp(step * (place - (len(lost) - 1) / 2))
            failed = [rate * aside for rate, trial in curve.items() if trial.validation is None]
            edges = [edge] * len(failed)
            axes.plot(failed, edges, marker="x", ms=6, mew=1.8, lw=0, color=looks[score.label].colour, zorder=4)
        trials = [trial for _, curve in lost for trial in curve.values() if trial.validation is None]
        reasons = sorted({outcome(status).word for trial in trials for status in trial.failures})
        style: dict[str, Any] = {"ha": "left", "va": "bottom", "zorder": 1.5, "bbox": ON_WHITE}
        annotate(axes, f"no score: {', '.join(reasons)}", (0.0, edge), (4, 2), is_share=True, **style)
    set_ticks(axes.xaxis, rates, lambda value: f"{value:g}")
    axes.set_xlabel("learning rate (base_lr)")
    score_axis(axes.yaxis, metric, f"validation {metric.axis}")
    draw_end_labels(axes, labels)
    words = [
        f"{score.name}: "
        + ", ".join(
            f"{rate:g} {'no score' if trial.validation is None else metric.show(trial.validation)}"
            for rate, trial in sorted(curve.items())
        )
        for score, curve in curves
    ]
    return page.describe(words)


def _scored(curve: dict[float, Trial]) -> list[tuple[float, float]]:
    return [(rate, trial.validation) for rate, trial in sorted(curve.items()) if trial.validation is not None]


def _best_by_rate(trials: Sequence[Trial], metric: Metric) -> dict[float, Trial]:
    """Return one trial for each rate: the selected one, or else the best on validation."""
    rated = (trial for trial in trials if isinstance(trial.values.get(RATE), int | float))
    by_rate = grouped(rated, lambda trial: float(trial.values[RATE]))
    return {
        rate: min(own, key=lambda one: (not one.is_selected, metric.order(one.validation)))
        for rate, own in by_rate.items()
    }
