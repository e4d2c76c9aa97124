"""Learning curves over steps, FLOPs and seconds, and the validation score that each variant had at equal cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal

from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import LabelScore
from attn_zoo.report.analysis.training_runs import TrainingRun

Axis = Literal["steps", "flops", "seconds"]
What = Literal["validation", "train_loss"]
COMPILED_FIRST = "seconds of compiling are counted before the first step"
AXES: tuple[Axis, ...] = ("steps", "flops", "seconds")


def _scale(run: TrainingRun, axis: Axis) -> tuple[float, float] | None:
    """Return what is spent before the first step and what each step takes, or None where the run does not know it.

    Self-pretraining and, of seconds, compiling come before; steps of one run cost about the same.
    """
    if axis == "steps":
        return 0.0, 1.0
    score = run.score
    if score is None:
        return None
    total, before = (score.train_flops, score.pretrain_flops) if axis == "flops" else (score.train_s, score.pretrain_s)
    if not total or not score.num_steps or (run.start and before is None):
        return None
    compiling = (score.compile_s or 0.0) if axis == "seconds" else 0.0
    return (before or 0.0) + compiling, (total - compiling) / score.num_steps


def compiles(scores: Iterable[LabelScore]) -> bool:
    """Tell whether seconds of any of these trainings are in part those of compiling."""
    return any(run.score is not None and run.score.compile_s for score in scores for run in score.runs)


def seed_curves(score: LabelScore, what: What, axis: Axis) -> list[list[tuple[float, float]]]:
    """Return one curve of (place on the axis, value) for each seed that finished and knows both."""
    curves = []
    for run in score.runs:
        scale = _scale(run, axis)
        if run.score is None or scale is None:
            continue
        before, per_step = scale
        points = [
            (before + per_step * entry["step"], entry[what])
            for entry in run.score.curve
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
    common = sorted(set.intersection(*(set(own) for own in by_step)))
    return [(fmean(own[step][0] for own in by_step), fmean(own[step][1] for own in by_step)) for step in common]


def budgets(scores: Sequence[LabelScore]) -> dict[Axis, float]:
    """Return for each axis the most that every label with a curve has spent: what they can be compared at."""
    limits: dict[Axis, float] = {}
    for axis in AXES:
        ends = [curve[-1][0] for score in scores if (curve := mean_curve(score, "validation", axis))]
        if len(ends) > 1 and len(ends) == sum(bool(mean_curve(score, "validation", "steps")) for score in scores):
            limits[axis] = min(ends)
    return limits


def best_within(curve: Sequence[tuple[float, float]], budget: float, metric: Metric) -> float | None:
    """Return the best value up to `budget`: what would have been selected had training ended there."""
    values = [value for place, value in curve if place <= budget * (1 + 1e-9)]
    return metric.best(values) if values else None
