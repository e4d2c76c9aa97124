"""Learning curves over steps, FLOPs and seconds, and the validation score that each variant had at equal cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Literal

from attn_zoo.report.analysis.label_score import LabelScore
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.score_groups import AccuracyGroup
from attn_zoo.report.analysis.training_runs import Training
from attn_zoo.report.tables.columns import number_column, text_column
from attn_zoo.report.tables.table import Column, Table
from attn_zoo.report.units import capital, human_flops, human_ms

__all__ = ["Axis", "What", "budgets", "equal_cost_table", "mean_curve", "seed_curves"]

Axis = Literal["steps", "flops", "seconds"]
What = Literal["validation", "train_loss"]
AXES: tuple[Axis, ...] = ("steps", "flops", "seconds")


@dataclass(frozen=True, slots=True)
class _Scale:
    """From a step to a place on an axis: `before` is what self-pretraining took, `per_step` what each step takes."""

    before: float
    per_step: float


def _scale(run: Training, axis: Axis) -> _Scale | None:
    """Return the scale, or None where the run does not know it. Steps of one run cost about the same."""
    if axis == "steps":
        return _Scale(0.0, 1.0)
    total, before = (run.train_flops, run.pretrain_flops) if axis == "flops" else (run.train_s, run.pretrain_s)
    if not total or not run.num_steps or (run.start and before is None):
        return None
    return _Scale(before or 0.0, total / run.num_steps)


def seed_curves(score: LabelScore, what: What, axis: Axis) -> list[list[tuple[float, float]]]:
    """Return one curve of (place on the axis, value) for each seed that finished and knows both."""
    curves = []
    for run in score.runs:
        scale = _scale(run, axis)
        if not run.is_scored or scale is None:
            continue
        points = [
            (scale.before + scale.per_step * entry["step"], entry[what])
            for entry in run.curve
            if "step" in entry and what in entry
        ]
        if points:
            curves.append(points)
    return curves


def mean_curve(score: LabelScore, what: What, axis: Axis) -> list[tuple[float, float]]:
    """Return the mean over seeds at the evaluations that all of them have; places on the axis are means, too."""
    places = seed_curves(score, what, axis)
    steps = seed_curves(score, what, "steps")
    if not places or len(places) != len(steps):
        return []
    by_step = [
        {step: point for (step, _), point in zip(own, curve, strict=True)}
        for own, curve in zip(steps, places, strict=True)
    ]
    common = sorted(set.intersection(*(set(found) for found in by_step)))
    return [(fmean(found[step][0] for found in by_step), fmean(found[step][1] for found in by_step)) for step in common]


def budgets(scores: Sequence[LabelScore]) -> dict[Axis, float]:
    """Return for each axis the most that every label with a curve has spent: what they can be compared at."""
    found: dict[Axis, float] = {}
    for axis in AXES:
        ends = [curve[-1][0] for score in scores if (curve := mean_curve(score, "validation", axis))]
        if len(ends) > 1 and len(ends) == sum(bool(mean_curve(score, "validation", "steps")) for score in scores):
            found[axis] = min(ends)
    return found


def _best_within(curve: Sequence[tuple[float, float]], budget: float, metric: Metric) -> float | None:
    """Return the best value up to `budget`: what would have been selected had training ended there."""
    values = [value for place, value in curve if place <= budget * (1 + 1e-9)]
    return list(accumulate(values, lambda one, other: metric.best((one, other))))[-1] if values else None


def equal_cost_table(group: AccuracyGroup) -> Table | None:
    """Return the validation score at equal steps, FLOPs and seconds; None where curves do not allow two labels."""
    limits = budgets(group.scores)
    if not limits:
        return None
    rows = []
    for score in group.scores:
        found: Mapping[Axis, list[float | None]] = {
            axis: [_best_within(curve, limits[axis], group.metric) for curve in seed_curves(score, "validation", axis)]
            for axis in limits
        }
        means = {
            axis: fmean(v for v in values if v is not None) if values and None not in values else None
            for axis, values in found.items()
        }
        rows.append({"variant": score.name, **{f"at_{axis}": means.get(axis) for axis in AXES}})
    rows.sort(key=lambda row: group.metric.order(row["at_" + next(iter(limits))]))  # type: ignore[arg-type]
    headings = {
        "steps": lambda value: f"at {value:,.0f} steps",
        "flops": lambda value: f"at {human_flops(value)}",
        "seconds": lambda value: f"at {human_ms(1e3 * value)}",
    }
    columns: list[Column] = [
        number_column(headings[axis](limit), f"at_{axis}", group.metric.show, priority=0)
        for axis, limit in limits.items()
    ]
    shared = " Times are of runs that shared their device." if group.is_shared and "seconds" in limits else ""
    return Table(
        name=f"equal-cost-{group.name}",
        title=f"Validation at equal cost: {group.heading}",
        note=(
            f"{capital(group.how)}. "
            "Best validation score within what every variant has spent, mean over seeds; self-pretraining counts as "
            "spent. FLOPs and seconds of an evaluation are those of the whole run times its share of the steps."
            + shared
        ),
        columns=(text_column("variant", "variant", priority=0), *columns),
        rows=tuple(rows),
        fields=tuple(rows[0]) if rows else ("variant",),
    )
