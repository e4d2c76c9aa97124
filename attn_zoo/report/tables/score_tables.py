"""What training bought and what it cost: two tables for each group, one row per label and start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from attn_zoo.report.analysis.label_score import LabelScore
from attn_zoo.report.analysis.score_groups import AccuracyGroup
from attn_zoo.report.statuses import outcome
from attn_zoo.report.tables.columns import interval_column, number_column, text_column
from attn_zoo.report.tables.table import Column, Row, Table
from attn_zoo.report.units import capital, human_bytes, human_flops, human_ms

__all__ = ["accuracy_table", "cost_table", "failure_words", "floor_rows", "params_words"]


def failure_words(score: LabelScore) -> str:
    """Return what became of the runs without a score, such as `diverged 1 of 3`."""
    counts = Counter(outcome(status).word for status, _ in score.failures)
    return ", ".join(f"{word} {count} of {len(score.runs)}" for word, count in sorted(counts.items()))


def params_words(score: LabelScore) -> str:
    """Return how far the number of parameters is from the baseline's, where that is more than a tenth."""
    if not score.has_other_size or score.params_excess is None:
        return ""
    return f"{'+' if score.params_excess > 0 else chr(0x2212)}{100 * abs(score.params_excess):.0f} %"


def _row(score: LabelScore) -> dict[str, Any]:
    difference, standing = score.difference, score.standing
    extra = params_words(score)
    return {
        "variant": f"{score.name} (params {extra})" if extra else score.name,
        "name": score.name,
        "label": score.label,
        "start": score.start or "scratch",
        "tuned": score.trial,
        "num_trials": score.num_trials,
        "score": score.mean,
        "score_low": score.low,
        "score_high": score.high,
        "size_error": score.size_error,
        "validation": score.validation,
        "num_seeds": len(score.values),
        "num_runs": len(score.runs),
        "difference": difference.mean if difference else None,
        "difference_low": difference.low if difference else None,
        "difference_high": difference.high if difference else None,
        "num_paired": difference.num_paired if difference else None,
        "is_settled": difference.is_settled if difference else None,
        "best_floor": standing.floor if standing else "",
        "best_floor_score": standing.value if standing else None,
        "gain_over_floor": standing.gain if standing else None,
        "stands": standing.brief if standing else "",
        "verdict": standing.words if standing else "",
        "failed": failure_words(score),
        "num_params": score.num_params,
        "params": extra,
        "params_excess_frac": score.params_excess,
        "train_flops": score.train_flops,
        "pretrain_flops": score.pretrain_flops,
        "train_s": score.train_s,
        "pretrain_s": score.pretrain_s,
        "tokens_per_s": score.tokens_per_s,
        "train_peak_bytes": score.train_peak_bytes,
        "padding_frac": score.padding_frac,
        "is_time_shared": score.is_shared,
    }


def floor_rows(group: AccuracyGroup, fields: tuple[str, ...]) -> list[Row]:
    """Return references, then chance and the floors, as rows of a table with these fields, best first."""
    empty: dict[str, Any] = dict.fromkeys(fields)
    known = sorted(group.references.items(), key=lambda mark: group.metric.order(mark[1]))
    references = [{**empty, "variant": f"reference: {name}", "score": value} for name, value in known]
    return references + [
        {**empty, "variant": "chance" if name == "chance" else f"floor: {name}", "score": value}
        for name, value in reversed(group.marks.items())
    ]


def accuracy_table(group: AccuracyGroup) -> Table:
    """Return mean score over seeds with interval, beside floors and the exact baseline; best first."""
    rows = [_row(score) for score in group.ranked]
    fields = tuple(rows[0]) if rows else ("variant", "score", "num_seeds")
    metric = group.metric
    against = f"vs {group.baseline}" if group.baseline else "vs exact"
    alike = " with the same start" if len(group.starts) > 1 else ""
    errors = [score.size_error for score in group.scores if score.size_error]
    size = f"{group.num_examples:,} test examples" if group.num_examples else ""
    if errors and size:
        size += f" alone make a standard error of {metric.show(max(errors))}"
    tuned = f"Tuned: {', '.join(group.setting.tuned)}; of each variant the trial best on validation, shown on test. "
    return Table(
        name=f"accuracy-{group.name}",
        title=f"{metric.title}: {group.heading}",
        note=(
            f"{capital(group.how)}. "
            f"{tuned if group.setting.tuned else ''}Mean over seeds with its 95 % t-interval (one seed has none). "
            f"{against}{alike}: difference paired by seed, with its interval (over test items where there is one "
            "seed), each for itself, not corrected for the number of variants. Over floor: better than the best of "
            "chance and the trivial models by so much, which counts only beyond the wider of two intervals: over "
            "seeds, and from the size of the test set. "
            f"{size + '.' if size else ''}"
        ).strip(),
        columns=(
            text_column("variant", "variant", priority=0),
            interval_column(metric.words, "score", metric.show, priority=0, show_end=metric.end),
            Column(heading="seeds", show=_seeds, sort=lambda row: row["num_seeds"]),
            interval_column(f"{against}, {metric.unit}", "difference", metric.signed, priority=1.5),
            number_column(f"over floor, {metric.unit}", "gain_over_floor", metric.signed, priority=3),
            *([text_column("no score", "failed", priority=3.1)] if any(row["failed"] for row in rows) else []),
            *([text_column("tuned", "tuned", priority=3.5)] if group.setting.tuned else []),
            text_column("best floor", "stands", priority=4),
            *([number_column("error of test size", "size_error", metric.show, priority=5)] if errors else []),
        ),
        rows=(*rows, *floor_rows(group, fields)),
        fields=fields,
    )


def cost_table(group: AccuracyGroup) -> Table:
    """Return what each score cost: parameters, FLOPs, time, memory, padding."""
    rows = [_row(score) for score in group.ranked]
    pretrained = any(score.start for score in group.scores)
    notes = [f"{capital(group.how)}. Means over seeds; of memory the most."]
    if group.baseline:
        notes.append(f"Parameters: what is more than 10 % away from {group.baseline} says so.")
    if pretrained:
        notes.append("Self-pretraining is additional.")
    if group.is_shared:
        notes.append("Times marked (shared): other cells ran on the device meanwhile, so they compare nothing.")
    if group.num_machines > 1:
        notes.append(f"Runs come from {group.num_machines} machines: their times do not compare.")
    return Table(
        name=f"cost-{group.name}",
        title=f"What it cost: {group.heading}",
        note=" ".join(notes),
        columns=(
            text_column("variant", "name", priority=0),
            number_column(group.metric.words, "score", group.metric.show, priority=0),
            *(column for key, column in _COSTS.items() if any(row[key] is not None for row in rows)),
        ),
        rows=tuple(rows),
        fields=tuple(rows[0]) if rows else ("variant", "score"),
    )


def _seeds(row: Row) -> str:
    if row["num_seeds"] is None:
        return ""
    return f"{row['num_seeds']}" + (f" of {row['num_runs']}" if row["num_runs"] > row["num_seeds"] else "")


def _params(row: Row) -> str:
    if row["num_params"] is None:
        return ""
    return f"{row['num_params']:,.0f}" + (f" ({row['params']})" if row["params"] else "")


def _time(row: Row, key: str) -> str:
    return "" if row[key] is None else human_ms(1e3 * row[key]) + (" (shared)" if row["is_time_shared"] else "")


def _speed(row: Row) -> str:
    if row["tokens_per_s"] is None:
        return ""
    return f"{row['tokens_per_s']:,.0f}" + (" (shared)" if row["is_time_shared"] else "")


_COSTS: Mapping[str, Column] = {
    "num_params": Column(heading="parameters", show=_params, sort=lambda row: row["num_params"]),
    "train_flops": number_column("compute", "train_flops", human_flops, priority=1.5),
    "train_s": Column(heading="time", show=lambda row: _time(row, "train_s"), sort=lambda row: row["train_s"]),
    "pretrain_flops": number_column("pretraining", "pretrain_flops", human_flops, priority=2.5),
    "pretrain_s": Column(
        heading="its time", show=lambda row: _time(row, "pretrain_s"), sort=lambda row: row["pretrain_s"], priority=2.6
    ),
    "tokens_per_s": Column(heading="tokens/s", show=_speed, sort=lambda row: row["tokens_per_s"], priority=2),
    "train_peak_bytes": number_column("memory", "train_peak_bytes", human_bytes, priority=1.2),
    "padding_frac": number_column("padding", "padding_frac", lambda value: f"{100 * value:.0f} %", priority=2.2),
}
"""Columns of the costs, each shown where at least one run knows it."""
