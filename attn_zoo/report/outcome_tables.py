"""What training bought, and what did not run and why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attn_zoo.report.accuracy import AccuracyGroup
from attn_zoo.report.analysis import Analysis
from attn_zoo.report.columns import interval_column, number_column, text_column
from attn_zoo.report.statuses import outcome
from attn_zoo.report.table import Column, Table
from attn_zoo.report.units import human_length, human_number
from attn_zoo.report.wording import PASS_TITLES

__all__ = ["accuracy_table", "status_table"]


MINUS = "\u2212"


def accuracy_table(group: AccuracyGroup) -> Table:
    """Return mean score over seeds with interval, difference to the exact baseline, and the floors as rows."""
    rows = []
    for score in group.scores:
        reasons = sorted({outcome(status).word for status, _ in score.failures})
        rows.append(
            {
                "variant": score.label,
                "score": score.mean,
                "score_low": score.low,
                "score_high": score.high,
                "num_seeds": len(score.values),
                "difference": score.difference,
                "difference_low": score.difference_low,
                "difference_high": score.difference_high,
                "num_paired": score.num_paired,
                "tokens_per_s": score.tokens_per_s,
                "num_params": score.num_params,
                "failed": f"{len(score.failures)} {', '.join(reasons)}" if score.failures else "",
            }
        )
    empty = dict.fromkeys(rows[0]) if rows else {}
    marks = [("chance", group.chance), *((f"floor: {name}", value) for name, value in group.floors.items())]
    floors = [{**empty, "variant": name, "score": value} for name, value in marks if value is not None]
    percent = _percent if group.metric.endswith("accuracy") else human_number
    against = f"vs {group.baseline}" if group.baseline else "vs exact"
    return Table(
        name=f"accuracy-{group.name}",
        title=f"{group.metric.capitalize()}: {group.title}, {group.setting}",
        note=(
            f"Mean over seeds with its 95 % t-interval (one seed has none). {against}: difference paired by seed, with "
            "its interval (over test examples where there is one seed). Floors: trivial models, same test set."
            + (f" {group.num_examples:,} test examples." if group.num_examples else "")
        ),
        columns=(
            text_column("variant", "variant", priority=0),
            interval_column(group.metric, "score", percent, priority=0),
            number_column("seeds", "num_seeds", "{:.0f}".format),
            interval_column(against, "difference", partial(_signed, percent), priority=2),
            number_column("tokens/s", "tokens_per_s", "{:,.0f}".format, priority=3),
            number_column("parameters", "num_params", "{:,.0f}".format, priority=4),
            *([text_column("no score", "failed", priority=2)] if any(row["failed"] for row in rows) else []),
        ),
        rows=(*rows, *floors),
        fields=tuple(rows[0]) if rows else ("variant", "score", "num_seeds"),
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _signed(show: Callable[[float], str], value: float) -> str:
    return f"{'+' if value >= 0 else MINUS}{show(abs(value))}"


def status_table(analysis: Analysis) -> Table:
    """Return what did not run and why: one row per variant, outcome and reason, lengths joined."""
    frame = analysis.results.frame
    failed = frame[frame["status"] != "ok"]
    grouped: dict[tuple[str, ...], list[int]] = {}
    for row in failed.to_dict("records"):
        what = PASS_TITLES.get(row["pass"], "") if row["kind"] == "scaling" else f"{row['task']} {row['level']}".strip()
        key = (row["label"], row["status"], str(what), row["dtype"], row["device"], row["reason"])
        grouped.setdefault(key, []).append(0 if row["kind"] != "scaling" else int(row["seq_len"] or 0))
    fields = ("variant", "status", "what", "dtype", "device", "reason", "num_cells", "lengths")
    rows = [
        dict(zip(fields, (*key, len(lengths), _length_list(lengths)), strict=True))
        for key, lengths in sorted(grouped.items())
    ]
    return Table(
        name="status",
        title="What did not run, and why",
        note="" if rows else "Every cell gave a measurement.",
        columns=(
            text_column("variant", "variant", priority=0),
            Column(
                heading="outcome",
                show=lambda row: outcome(row["status"]).legend,
                brief=lambda row: outcome(row["status"]).word,
                align="left",
                priority=0,
            ),
            text_column("of", "what", priority=3),
            text_column("lengths", "lengths", priority=1),
            text_column("reason", "reason", priority=2),
        ),
        rows=tuple(rows),
        fields=fields,
    )


def _length_list(lengths: list[int]) -> str:
    known = sorted({length for length in lengths if length})
    if len(known) > 3:
        return f"{human_length(known[0])} to {human_length(known[-1])} ({len(known)})"
    return ", ".join(human_length(length) for length in known)
