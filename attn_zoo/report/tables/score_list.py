"""Every score of every training run as one long table, breakdowns included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.score_groups import AccuracyGroup
from attn_zoo.report.analysis.training_runs import Training
from attn_zoo.report.tables.columns import number_column, text_column
from attn_zoo.report.tables.table import Column, Row, Table

__all__ = ["score_table"]

FIELDS = (
    *("variant", "task", "level", "protocol", "overrides", "is_causal", "dtype", "device", "start", "trial"),
    *("is_selected", "seed", "status", "metric", "part", "value", "num_items", "validation"),
)


def score_table(analysis: Analysis) -> Table:
    """Return one row per run and, below it, one per entry of its breakdown; `part` is empty for the whole test set."""
    rows = [row for group in analysis.accuracy for row in _group_rows(group)]
    return Table(
        name="scores",
        title="All scores",
        note="One row per training run; parts are scores for the test items with these properties.",
        columns=(
            text_column("variant", "variant", priority=0),
            Column(heading="task", show=lambda row: f"{row['task']} {row['level']}", align="left", priority=1),
            number_column("seed", "seed", "{:.0f}".format, priority=1),
            text_column("start", "start", priority=3),
            text_column("trial", "trial", priority=2),
            text_column("part", "part", priority=0),
            Column(heading="score", show=_score, sort=lambda row: row["value"], priority=0),
            number_column("items", "num_items", "{:,.0f}".format, priority=2),
            text_column("outcome", "status", priority=2),
        ),
        rows=tuple(rows),
        fields=FIELDS,
    )


def _score(row: Row) -> str:
    return "" if row["value"] is None else Metric(row["metric"]).show(row["value"])


def _group_rows(group: AccuracyGroup) -> list[dict[str, Any]]:
    rows = []
    for trials in group.trials.values():
        for trial in trials:
            for run in trial.runs:
                common = _common(group, run) | {"trial": trial.words, "is_selected": trial.is_selected}
                parts = [{"part": "", "value": run.value, "num_items": run.num_examples}]
                parts += [_part(entry) for entry in run.breakdown]
                rows += [{name: (common | part)[name] for name in FIELDS} for part in parts]
    return rows


def _common(group: AccuracyGroup, run: Training) -> dict[str, Any]:
    setting = group.setting
    return {
        "variant": run.label,
        "task": setting.task,
        "level": setting.level,
        "protocol": setting.protocol,
        "overrides": setting.overrides,
        "is_causal": setting.is_causal,
        "dtype": setting.dtype,
        "device": setting.device,
        "start": run.start or "scratch",
        "seed": run.seed,
        "status": run.status,
        "metric": group.metric.name,
        "validation": run.validation,
    }


def _part(entry: Mapping[str, float]) -> dict[str, Any]:
    axes = {name: value for name, value in entry.items() if name not in {"value", "num_items"}}
    said = ", ".join(f"{name}={value:g}" for name, value in axes.items())
    return {"part": said or json.dumps(axes), "value": entry.get("value"), "num_items": entry.get("num_items")}
