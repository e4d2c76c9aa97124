"""What did not run, and why."""

from __future__ import annotations

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.statuses import outcome
from attn_zoo.report.tables.columns import text_column
from attn_zoo.report.tables.table import Column, Table
from attn_zoo.report.units import human_length
from attn_zoo.report.wording import PASS_TITLES

__all__ = ["status_table"]


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
