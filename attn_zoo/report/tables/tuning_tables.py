"""What was tuned, and what self-pretraining changed: the choices behind a score, side by side."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Any

from attn_zoo.report.analysis.label_score import LabelScore, mean_with_interval, pair
from attn_zoo.report.analysis.score_groups import AccuracyGroup
from attn_zoo.report.statuses import outcome
from attn_zoo.report.tables.columns import interval_column, number_column, text_column
from attn_zoo.report.tables.table import Column, Row, Table
from attn_zoo.report.units import capital, human_ms

__all__ = ["pretraining_table", "trials_table"]


def trials_table(group: AccuracyGroup) -> Table | None:
    """Return every trial of every label with its validation score; None where nothing was tuned."""
    if not group.setting.tuned:
        return None
    names = {(score.label, score.start): score.name for score in group.scores}
    rows = []
    for key, trials in group.trials.items():
        for trial in trials:
            validation, low, high = mean_with_interval(
                [run.validation for run in trial.scored if run.validation is not None]
            )
            failed = Counter(outcome(run.status).word for run in trial.runs if not run.is_scored)
            tests = [run.value for run in trial.scored if run.value is not None]
            rows.append(
                {
                    "variant": names[key],
                    "trial": trial.words,
                    "values": ", ".join(str(trial.values.get(name, "")) for name in group.setting.tuned),
                    "validation": validation,
                    "validation_low": low,
                    "validation_high": high,
                    "num_seeds": len(trial.scored),
                    "test": fmean(tests) if tests and trial.is_selected else None,
                    "failed": ", ".join(f"{word} {n} of {len(trial.runs)}" for word, n in sorted(failed.items())),
                    "is_selected": trial.is_selected,
                }
            )
    counts = sorted({len(trials) for trials in group.trials.values()})
    how_many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return Table(
        name=f"tuning-{group.name}",
        title=f"Tuning: {group.heading}",
        note=(
            f"{capital(group.how)}. "
            f"{how_many} trial{'s' if counts != [1] else ''} for each variant. Selected (*): best mean validation over "
            "seeds, among those with most finished seeds; only its test score is shown."
        ),
        columns=(
            text_column("variant", "variant", priority=0),
            Column(heading=", ".join(group.setting.tuned), show=_trial, align="left", priority=0),
            interval_column("validation", "validation", group.metric.show, priority=0, show_end=group.metric.end),
            number_column("seeds", "num_seeds", "{:.0f}".format),
            number_column("test", "test", group.metric.show, priority=1),
            *([text_column("no score", "failed", priority=1)] if any(row["failed"] for row in rows) else []),
        ),
        rows=tuple(rows),
        fields=tuple(rows[0]) if rows else ("variant", "trial", "validation"),
    )


def _trial(row: Row) -> str:
    return f"{row['values']} *" if row["is_selected"] else str(row["values"])


def pretraining_table(group: AccuracyGroup) -> Table | None:
    """Return scores from scratch beside self-pretrained ones, with the gain; None where only one of the two ran."""
    others = [start for start in group.starts if start]
    if not others or "" not in group.starts:
        return None
    labels = list(dict.fromkeys(score.label for score in group.ranked))
    rows = [_gains(group, label, others) for label in labels]
    metric = group.metric
    columns: list[Column] = [
        text_column("variant", "variant", priority=0),
        interval_column("from scratch", "scratch", metric.show, priority=0, show_end=metric.end),
    ]
    for index, start in enumerate(others):
        said = f" ({start})" if len(others) > 1 else ""
        columns += [
            interval_column(f"self-pretrained{said}", f"after_{index}", metric.show, priority=0, show_end=metric.end),
            interval_column(f"gain, {metric.unit}", f"gain_{index}", metric.signed, priority=1),
            number_column("more time", f"extra_s_{index}", lambda value: human_ms(1e3 * value), priority=2),
        ]
    learned = f" What was learned before: {others[0]}." if len(others) == 1 else ""
    return Table(
        name=f"pretraining-{group.name}",
        title=f"From scratch and self-pretrained: {group.heading}",
        note=(
            f"{capital(group.how)}. "
            "Self-pretraining learns from the inputs of the same training set before the labels are seen. Gain: better "
            f"by so much, paired by seed, with its 95 % interval. More time: self-pretraining itself.{learned}"
        ),
        columns=tuple(columns),
        rows=tuple(rows),
        fields=tuple(rows[0]) if rows else ("variant", "scratch"),
    )


def _gains(group: AccuracyGroup, label: str, starts: list[str]) -> dict[str, Any]:
    scratch = group.find(label)
    row: dict[str, Any] = {"variant": label, **_interval("scratch", scratch)}
    for index, start in enumerate(starts):
        after = group.find(label, start)
        gain = pair(after.runs, scratch.runs) if after and scratch else None
        # Positive is better, whatever the direction of the metric.
        ends = [None, None, None] if gain is None else [gain.mean, gain.low, gain.high]
        if group.metric.is_lower_better:
            ends = [None if end is None else -end for end in (ends[0], ends[2], ends[1])]
        row |= {
            f"start_{index}": start,
            **_interval(f"after_{index}", after),
            **dict(zip((f"gain_{index}", f"gain_{index}_low", f"gain_{index}_high"), ends, strict=True)),
            f"extra_s_{index}": after.pretrain_s if after else None,
        }
    return row


def _interval(key: str, score: LabelScore | None) -> dict[str, Any]:
    found = (score.mean, score.low, score.high) if score else (None, None, None)
    return dict(zip((key, f"{key}_low", f"{key}_high"), found, strict=True))
