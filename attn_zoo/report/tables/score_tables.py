"""Tables of scores: what training bought, what it cost, what was tuned, all tasks, and every score."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from attn_zoo.errors import counted
from attn_zoo.records import AS_TRAINED
from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.breakdown import NOT_AXES, num_items
from attn_zoo.report.analysis.floor import CHANCE
from attn_zoo.report.analysis.learning import AXES, COMPILED_FIRST, Axis, best_within, budgets, compiles, seed_curves
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import AccuracyGroup, Difference, LabelScore, mean_with_interval, pair
from attn_zoo.report.analysis.task_means import Overview
from attn_zoo.report.analysis.training_runs import TrainingRun, Trial
from attn_zoo.report.measurements import COSTS, Measurement
from attn_zoo.report.tables.table import (
    BRACKETS,
    Column,
    Note,
    Remark,
    Row,
    Table,
    interval_column,
    interval_values,
    number_column,
    text_column,
)
from attn_zoo.units import Units, capital, human_flops, human_s


def _row(group: AccuracyGroup, score: LabelScore) -> dict[str, Any]:
    difference, standing = score.difference, score.standing
    return {
        "variant": score.sized_name,
        "name": score.name,
        "label": score.label,
        "start": group.words_of(score.start),
        "tuned": score.trial.words,
        "num_trials": score.num_trials,
        **mean_values("score", score),
        "size_error": score.size_error,
        "validation": score.trial.validation,
        "num_seeds": len(score.values),
        "num_runs": len(score.runs),
        **mean_values("difference", difference),
        "num_paired": difference.num_paired if difference else None,
        "is_settled": difference.is_settled if difference else None,
        "best_floor": standing.floor if standing else "",
        "best_floor_score": standing.value if standing else None,
        "gain_over_floor": standing.gain if standing else None,
        "stands": standing.brief if standing else "",
        "verdict": standing.words if standing else "",
        "failed": score.trial.failed,
        "params": score.other_size,
        "params_excess_frac": score.params_excess,
        **score.costs,
        "is_time_shared": score.is_shared,
    }


def mean_values(key: str, found: LabelScore | Difference | None) -> dict[str, Any]:
    """Return what a row holds of a mean for `interval_column`."""
    return interval_values(key, *((found.mean, found.low, found.high) if found else (None, None, None)))


def _floor_rows(group: AccuracyGroup, fields: tuple[str, ...]) -> list[Row]:
    """Return references, then chance and the floors, as rows of a table with these fields, best first."""
    references = sorted(group.references.items(), key=lambda mark: group.metric.order(mark[1]))
    marks = [(f"reference: {name}", value) for name, value in references]
    marks += [(name if name == CHANCE else f"floor: {name}", value) for name, value in reversed(group.marks.items())]
    return [{**dict.fromkeys(fields), "variant": name, "score": value} for name, value in marks]


def group_table(
    group: AccuracyGroup, kind: str, title: str, notes: Note, columns: Iterable[Column], rows: Iterable[Row]
) -> Table:
    """Return a table of one group; its note begins with what all its runs share."""
    return Table(
        name=f"{kind}-{group.name}",
        title=f"{title}: {group.heading}",
        notes=(f"{capital(group.how)}.", *notes),
        columns=tuple(columns),
        rows=tuple(rows),
    )


_REFERENCE = (
    "Reference: no floor and no rival, so nothing is judged by it: a model that needs no attention but is not trivial, "
    "or that is given what a trained one has to find."
)


def _reference(group: AccuracyGroup) -> str:
    trained = (
        f" {capital(AS_TRAINED)}: the same models with {group.setting.replaces}." if group.setting.replaces else ""
    )
    return f"{_REFERENCE}{trained}" if group.references else ""


def _padding(group: AccuracyGroup, padded: Container[str]) -> str:
    named = [score.name for score in group.scores if score.label in padded]
    return f"Not declared to be the same however far a batch is padded: {', '.join(named)}." if named else ""


def accuracy_table(group: AccuracyGroup, padded: Container[str] = ()) -> Table:
    """Return mean score over seeds with interval, beside floors and the exact baseline; best first.

    Args:
        group: scores that may be compared.
        padded: labels whose results may depend on how far a batch is padded, which the note says.
    """
    rows = [_row(group, score) for score in group.ranked]
    metric = group.metric
    against = f"vs {group.baseline}" if group.baseline else "vs exact"
    difference, over = f"{against}, {metric.unit}", f"over floor, {metric.unit}"
    alike = " with the same start" if len(group.starts) > 1 else ""
    errors = [score.size_error for score in group.scores if score.size_error]
    size = counted(group.num_examples, "test example") if group.num_examples else ""
    if errors and size:
        size += f" alone make a standard error of up to {metric.show(max(errors))}"
    tuned = f"Tuned: {', '.join(group.setting.tuned)}; of each variant the trial best on validation, shown on test."
    return group_table(
        group,
        "accuracy",
        metric.title,
        notes=(
            Remark(tuned, heading="tuned"),
            "Mean over seeds.",
            Remark("In brackets: 95 % t-interval over seeds; one seed has none.", sign="["),
            Remark(
                f"{against}{alike}: difference paired by seed (its interval over test items where there is one seed), "
                "each for itself, not corrected for the number of variants.",
                heading=difference,
            ),
            Remark(
                "Over floor: better than the best of chance and the trivial models by so much, which counts only "
                "beyond both errors together: over seeds, and from the size of the test set.",
                heading=over,
            ),
            f"{size}." if size else "",
            _padding(group, padded),
            _reference(group),
        ),
        columns=(
            text_column("variant", priority=0),
            interval_column(metric.words, "score", metric.show, priority=0, show_end=metric.end),
            Column(heading="seeds", show=_seeds, sort=lambda row: row["num_seeds"]),
            interval_column(difference, "difference", metric.signed, priority=1.5),
            number_column(over, "gain_over_floor", metric.signed, priority=3),
            text_column("no score", "failed", priority=3.1),
            text_column("tuned", priority=3.5),
            text_column("best floor", "stands", priority=4),
            *([number_column("error of test size", "size_error", metric.show, priority=5)] if errors else []),
        ),
        rows=(*rows, *_floor_rows(group, tuple(rows[0]))),
    )


def cost_table(group: AccuracyGroup) -> Table:
    """Return what each score cost: parameters, FLOPs, time, memory, padding."""
    rows = [_row(group, score) for score in group.ranked]
    sizes = f"Parameters: what is more than 10 % away from {group.baseline} says so."
    machines = f"Runs come from {group.num_machines} machines: their times do not compare."
    return group_table(
        group,
        "cost",
        "What it cost",
        notes=(
            "Means over seeds; of memory the most.",
            Remark(sizes if group.baseline else "", heading="parameters"),
            "Self-pretraining is additional." if any(group.starts) else "",
            Remark("(shared): other cells ran on the device meanwhile; these do not compare.", sign="(shared)"),
            machines if group.num_machines > 1 else "",
        ),
        columns=(
            text_column("variant", "name", priority=0),
            number_column(group.metric.words, "score", group.metric.show, priority=0),
            *(_cost_column(cost, rows) for cost in COSTS),
        ),
        rows=rows,
    )


def _seeds(row: Row) -> str:
    if row["num_seeds"] is None:
        return ""
    return f"{row['num_seeds']}" + (f" of {row['num_runs']}" if row["num_runs"] > row["num_seeds"] else "")


def _is_known(cost: Measurement, row: Row) -> bool:
    """Whether a row says something of a cost; no time at all is that of something that was not done."""
    return row[cost.name] is not None and not (cost.is_of_time and row[cost.name] == 0)


def _cost_column(cost: Measurement, rows: Sequence[Row]) -> Column:
    show = cost.show.fixed(row[cost.name] for row in rows) if isinstance(cost.show, Units) else cost.show

    def noted(row: Row) -> str:
        if not _is_known(cost, row):
            return ""
        extra = row["params"] if cost.name == "num_params" else ""
        if cost.is_of_time and row["is_time_shared"]:
            extra = "shared"
        return show(row[cost.name]) + (f" ({extra})" if extra else "")

    return Column(heading=cost.heading, show=noted, sort=lambda row: row[cost.name], priority=cost.priority)


def equal_cost_table(group: AccuracyGroup) -> Table | None:
    """Return the validation score at equal steps, FLOPs and seconds; None where curves do not allow two labels."""
    limits = budgets(group.scores)
    if group.is_shared:
        limits.pop("seconds", None)  # they compare nothing
    if not limits:
        return None
    rows = [
        {"variant": score.name} | {f"at_{axis}": _mean_within(score, axis, limits, group.metric) for axis in AXES}
        for score in group.scores
    ]
    rows.sort(key=lambda row: group.metric.order(row["at_" + next(iter(limits))]))  # type: ignore[arg-type]
    headings = {
        "steps": lambda value: f"at {value:,.0f} steps",
        "flops": lambda value: f"at {human_flops(value)}",
        "seconds": lambda value: f"at {human_s(value)}",
    }
    spent = capital(" and ".join({"flops": "FLOPs", "seconds": "seconds"}[axis] for axis in limits if axis != "steps"))
    columns: list[Column] = [
        number_column(headings[axis](limit), f"at_{axis}", group.metric.show, priority=0)
        for axis, limit in limits.items()
    ]
    return group_table(
        group,
        "equal-cost",
        "Validation at equal cost",
        notes=(
            "Best validation score within what every variant has spent, mean over seeds.",
            "Steps are those after self-pretraining; other costs count it." if any(group.starts) else "",
            f"{spent} of an evaluation are those of the whole run times its share of the steps." if spent else "",
            f"{capital(COMPILED_FIRST)}." if "seconds" in limits and compiles(group.scores) else "",
        ),
        columns=(text_column("variant", priority=0), *columns),
        rows=rows,
    )


def _mean_within(score: LabelScore, axis: Axis, limits: Mapping[Axis, float], metric: Metric) -> float | None:
    """Return the mean over seeds of the best score within a limit, or None where a seed has none."""
    curves = seed_curves(score, "validation", axis) if axis in limits else []
    values = [best_within(curve, limits[axis], metric) for curve in curves]
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def trials_table(group: AccuracyGroup) -> Table | None:
    """Return every trial of every label with its validation score; None where nothing was tuned."""
    if not group.setting.tuned:
        return None
    rows = []
    for score in group.scores:
        for trial in group.trials[score.label, score.start]:
            mean, *ends = mean_with_interval([run.score.validation for run in trial.runs if run.score])
            rows.append(
                {
                    "variant": score.name,
                    "trial": trial.words,
                    "values": ", ".join(str(trial.values.get(name, "")) for name in group.setting.tuned),
                    **interval_values("validation", mean, *(group.metric.inside(end) for end in ends)),
                    "num_seeds": len(trial.scored),
                    "test": score.mean if trial.is_selected else None,
                    "failed": trial.failed,
                    "is_selected": trial.is_selected,
                }
            )
    counts = sorted({len(trials) for trials in group.trials.values()})
    how_many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return group_table(
        group,
        "tuning",
        "Tuning",
        notes=(
            f"{how_many} trial{'s' if counts != [1] else ''} for each variant.",
            (
                "Selected (*): best mean validation over seeds, among those with most finished seeds; only its test "
                "score is shown."
            ),
            BRACKETS,
        ),
        columns=(
            text_column("variant", priority=0),
            Column(
                heading=", ".join(group.setting.tuned),
                show=lambda row: f"{row['values']}{' *' if row['is_selected'] else ''}",
                align="left",
                priority=0,
            ),
            interval_column("validation", "validation", group.metric.show, priority=0, show_end=group.metric.end),
            number_column("seeds", "num_seeds", "{:.0f}".format),
            number_column("test", "test", group.metric.show, priority=1),
            text_column("no score", "failed", priority=1),
        ),
        rows=rows,
    )


def pretraining_table(group: AccuracyGroup) -> Table | None:
    """Return scores from scratch beside self-pretrained ones, with the gain; None where only one of the two ran."""
    others = [start for start in group.starts if start]
    if not others or "" not in group.starts:
        return None
    labels = list(dict.fromkeys(score.label for score in group.ranked))
    rows = [_gains(group, label, others) for label in labels]
    metric = group.metric
    columns: list[Column] = [
        text_column("variant", priority=0),
        interval_column("from scratch", "scratch", metric.show, priority=0, show_end=metric.end),
    ]
    for index, start in enumerate(others):
        said = f" ({start})" if len(others) > 1 else ""
        columns += [
            interval_column(f"self-pretrained{said}", f"after_{index}", metric.show, priority=0, show_end=metric.end),
            interval_column(f"gain, {metric.unit}", f"gain_{index}", metric.signed, priority=1),
            number_column("more time", f"extra_s_{index}", human_s, priority=2),
        ]
    learned = f"What was learned before: {others[0]}." if len(others) == 1 else ""
    return group_table(
        group,
        "pretraining",
        "From scratch and self-pretrained",
        notes=(
            "Self-pretraining learns from the inputs of the same training set before the labels are seen.",
            "Gain: better by so much, paired by seed.",
            BRACKETS,
            Remark("More time: self-pretraining itself.", heading="more time"),
            learned,
        ),
        columns=columns,
        rows=rows,
    )


def _gains(group: AccuracyGroup, label: str, starts: list[str]) -> dict[str, Any]:
    scratch = group.find(label)
    row: dict[str, Any] = {"variant": label, **mean_values("scratch", scratch)}
    for index, start in enumerate(starts):
        after = group.find(label, start)
        gain = pair(after.runs, scratch.runs) if after and scratch else None
        ends = [gain.mean, gain.low, gain.high] if gain else [None, None, None]
        if group.metric.is_lower_better:  # positive is better, whatever the direction of the metric
            ends = [None if end is None else -end for end in (ends[0], ends[2], ends[1])]
        row |= {
            f"start_{index}": start,
            **mean_values(f"after_{index}", after),
            **interval_values(f"gain_{index}", *ends),
            f"extra_s_{index}": after.costs["pretrain_s"] if after else None,
        }
    return row


def overview_table(overview: Overview) -> Table:
    """Return one row per label and one column per task; a missing score stays missing and enters no mean."""
    everyone = sorted({*overview.labels, *overview.without})
    show = overview.metric.show
    rows: list[Row] = []
    has_mean = len(overview.common) > 1
    for label in sorted(everyone, key=lambda label: (overview.metric.order(overview.mean(label)), label)):
        cells = {group.task_title: group.find(label, group.starts[0]) for group in overview.groups}
        rows.append(
            {
                "variant": label,
                **interval_values("mean", overview.mean(label), *overview.interval(label)),
                **{title: score.mean if score else None for title, score in cells.items()},
                **{f"no score: {title}": score.trial.failed if score else "" for title, score in cells.items()},
            }
        )
    best = {group.task_title: group.best_mark[1] if group.best_mark else None for group in overview.groups}
    chance = {group.task_title: group.chance for group in overview.groups}
    for name, marks in (("best floor", best), ("chance", chance)):
        shared = [marks[group.task_title] for group in overview.common]
        known = [value for value in shared if value is not None]
        mean = fmean(known) if has_mean and len(known) == len(shared) else None
        rows.append({**dict.fromkeys(rows[0]), "variant": name, "mean": mean, **marks})
    scope = overview.scope() if has_mean else "no mean: fewer than two tasks have a score of every variant"
    return Table(
        name=f"overview-{overview.name}",
        title=f"{overview.title} on all tasks, {overview.groups[0].setting.protocol}",
        notes=(
            f"{capital(overview.how)}. Means over seeds; {scope}. A missing score is never counted as 0.",
            Remark("In brackets: 95 % t-interval over seeds, each task with its own spread.", sign="["),
        ),
        columns=(
            text_column("variant", priority=0),
            interval_column("mean", "mean", show, priority=0, show_end=overview.metric.end),
            *(
                # What the mean is over goes last: nobody could tell whence it comes.
                _task_column(group.task_title, overview.metric, 1 + index / 100 + (group not in overview.common))
                for index, group in enumerate(overview.groups)
            ),
        ),
        rows=tuple(rows),
    )


def _task_column(title: str, metric: Metric, priority: float) -> Column:
    def show(row: Row) -> str:
        if row[title] is None:
            return str(row[f"no score: {title}"] or "")
        return metric.show(row[title])

    return Column(heading=title, show=show, sort=lambda row: row[title], priority=priority)


_SCORE_FIELDS = (
    *("variant", "task", "level", "protocol", "overrides", "is_causal", "dtype", "device", "start", "trial"),
    *("is_selected", "seed", "status", "metric", "part", "value", "num_items", "num_examples", "validation"),
)


def score_table(analysis: Analysis) -> Table:
    """Return, for files only, one row per run that counts (see `by_seed`) and one per entry of its breakdown.

    The column `part` is empty for the whole test set. `num_items` counts scored items in every row, of which an example
    may have several, and is empty where they were not kept; `num_examples` is known of the whole test set only.
    """
    return Table(
        name="scores",
        title="All scores",
        notes=("One row per training run; parts are scores for the test items with these properties.",),
        columns=(),
        rows=tuple(
            row
            for group in analysis.accuracy
            for trials in group.trials.values()
            for trial in trials
            for run in trial.runs
            for row in _score_rows(group, trial, run)
        ),
    )


def _score_rows(group: AccuracyGroup, trial: Trial, run: TrainingRun) -> list[Row]:
    score = run.score
    common = {name: getattr(group.setting, name, None) for name in _SCORE_FIELDS} | {
        "variant": run.label,
        "start": group.words_of(run.start),
        "trial": trial.words,
        "is_selected": trial.is_selected,
        "seed": run.seed,
        "status": run.record.status,
        "metric": group.metric.name,
        "part": "",
        "value": score.value if score else None,
        "num_items": num_items(score) if score else None,
        "num_examples": score.num_examples if score else None,
        "validation": score.validation if score else None,
    }
    return [common, *(common | _part(entry) for entry in (score.breakdown if score else ()))]


def _part(entry: Mapping[str, float]) -> dict[str, Any]:
    axes = [f"{name}={value:g}" for name, value in entry.items() if name not in NOT_AXES]
    items = entry.get("num_items")
    return {
        "part": ", ".join(axes) or "{}",
        "value": entry.get("value"),
        "num_items": None if items is None else round(items),
        "num_examples": None,
    }
