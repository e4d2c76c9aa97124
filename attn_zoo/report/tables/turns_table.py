"""Variants that were timed in turns: how much longer each takes than the fastest of its rounds."""

from __future__ import annotations

from typing import Any

from attn_zoo.report.analysis.analyse import Analysis, PanelAnalysis
from attn_zoo.report.analysis.series import Turn
from attn_zoo.report.tables.columns import number_column, text_column
from attn_zoo.report.tables.table import Column, Row, Table
from attn_zoo.report.tables.time_tables import interval_ms
from attn_zoo.report.units import human_length, human_ms, human_number, ratio
from attn_zoo.statistics import time_ratio

__all__ = ["turns_table"]


def turns_table(analysis: Analysis) -> Table | None:
    """Return one row for each variant of each bundle, the fastest first; None where nothing was timed in turns."""
    rows = [row for one in analysis.panels for row in _panel_rows(one)]
    if not rows:
        return None
    return Table(
        name="turns",
        title="Timed in turns",
        note=(
            "Each group was timed in one process, in rounds of one call each, and again in further processes. Beside "
            "the fastest: median over rounds of the ratio of two calls of one round, of several processes the "
            "geometric mean of theirs, with its 95 % interval over rounds and processes."
        ),
        columns=(
            text_column("pass", "pass", priority=0),
            number_column("length", "seq_len", human_length, priority=0),
            text_column("variant", "variant", priority=0),
            Column(heading="time", show=_time, brief=_brief_time, sort=lambda row: row["median_ms"], priority=1),
            Column(heading="beside the fastest", show=_ratio, brief=_brief_ratio, sort=_sort_ratio, priority=0),
            number_column("rounds", "num_rounds", str, priority=3),
            text_column("kernel", "kernel", priority=4),
        ),
        rows=tuple(rows),
        fields=tuple(rows[0]),
    )


def _panel_rows(one: PanelAnalysis) -> list[dict[str, Any]]:
    bundles: dict[tuple[int, str], list[Turn]] = {}
    for turn in one.panel.turns:
        bundles.setdefault((turn.seq_len, turn.bundle), []).append(turn)
    rows = []
    for (seq_len, bundle), members in sorted(bundles.items()):
        members.sort(key=lambda turn: (turn.median_ms, turn.label))
        fastest = members[0]
        for turn in members:
            compared = time_ratio(
                turn.samples_ms,
                fastest.samples_ms,
                is_paired=True,
                sizes_a=turn.process_sizes,
                sizes_b=fastest.process_sizes,
            )
            rows.append(
                {
                    "pass": one.panel.title,
                    "settings": one.panel.subtitle,
                    "seq_len": seq_len,
                    "variant": turn.label,
                    "median_ms": turn.median_ms,
                    "low_ms": turn.low_ms,
                    "high_ms": turn.high_ms,
                    "fastest": fastest.label,
                    "ratio": compared.value,
                    "ratio_low": compared.low,
                    "ratio_high": compared.high,
                    "num_rounds": compared.num_pairs,
                    "num_processes": max(1, len(turn.process_sizes)),
                    "kernel": turn.kernel,
                    "bundle": bundle,
                }
            )
    return rows


def _time(row: Row) -> str:
    return interval_ms(row["median_ms"], row["low_ms"], row["high_ms"])


def _brief_time(row: Row) -> str:
    return human_ms(row["median_ms"])


def _ratio(row: Row) -> str:
    if row["variant"] == row["fastest"]:
        return "fastest"
    return f"{ratio(row['ratio'])} [{human_number(row['ratio_low'])}, {human_number(row['ratio_high'])}]"


def _brief_ratio(row: Row) -> str:
    return "fastest" if row["variant"] == row["fastest"] else ratio(row["ratio"])


def _sort_ratio(row: Row) -> float:
    return float(row["ratio"])
