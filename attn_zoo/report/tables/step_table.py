"""Training steps: time, tokens per second and memory of each, compiled or as written."""

from __future__ import annotations

from typing import Any

from attn_zoo.report.analysis.analyse import Analysis, PanelAnalysis
from attn_zoo.report.analysis.series import Failure, Point, Series
from attn_zoo.report.statuses import outcome
from attn_zoo.report.tables.columns import number_column, text_column
from attn_zoo.report.tables.table import Column, Row, Table
from attn_zoo.report.tables.time_tables import interval_ms, outcomes
from attn_zoo.report.units import human_bytes, human_length, human_ms, interval_rate
from attn_zoo.report.wording import doubt_words

__all__ = ["step_table"]

_FIELDS = ("median_ms", "low_ms", "high_ms", "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", "num_processes")
_MORE = ("peak_bytes", "saved_bytes", "first_ms", "is_compiled")


def step_table(analysis: Analysis) -> Table | None:
    """Return one row for each variant and length of every panel of training steps, the fastest first; None without."""
    panels = [one for one in analysis.panels if one.panel.pass_ == "step"]  # noqa: S105 - a word of ours
    rows = [row for one in panels for row in _panel_rows(one)]
    if not rows:
        return None
    doubt = doubt_words(row["num_processes"] for row in rows if row["num_processes"])
    subtitles = " ".join(f"{text}." for text in dict.fromkeys(one.panel.subtitle for one in panels))
    return Table(
        name="steps",
        title="Training steps",
        note=(
            "A step: forward, loss, backward, clipping and update. Median time, and tokens per second without padding "
            f"(k: 1000), each with its 95 % interval. {doubt} Peak memory: weights, gradients, averages and data "
            "included. Saved: what autograd keeps from forward to backward, weights and data included. First step: "
            f"compilation included, of which a cache may have spared a part. {subtitles}"
        ),
        columns=(
            text_column("variant", "variant", priority=0),
            *([text_column("pass", "pass", priority=0)] if len(panels) > 1 else []),
            number_column("length", "seq_len", human_length, priority=0),
            Column(heading="mode", show=_mode, align="left", priority=3),
            Column(heading="time", show=_time, brief=_brief_time, sort=lambda row: row["median_ms"], priority=0),
            Column(heading="tokens/s", show=_rate, brief=_brief_rate, sort=lambda row: row["tokens_per_s"], priority=0),
            number_column("peak memory", "peak_bytes", human_bytes, priority=1),
            number_column("saved", "saved_bytes", human_bytes, priority=2),
            number_column("first step", "first_ms", human_ms, priority=4),
        ),
        rows=tuple(rows),
        fields=tuple(rows[0]),
    )


def _panel_rows(one: PanelAnalysis) -> list[dict[str, Any]]:
    rows = [_row(one, series, found) for series in one.panel.series for found in outcomes(series)]
    return sorted(rows, key=lambda row: (row["seq_len"], row["median_ms"] or float("inf"), row["variant"]))


def _row(one: PanelAnalysis, series: Series, found: Point | Failure) -> dict[str, Any]:
    is_failure = isinstance(found, Failure)
    measured = {name: None if is_failure else getattr(found, name) for name in (*_FIELDS, *_MORE)}
    return {
        "variant": series.label,
        "pass": one.panel.title,
        "settings": one.panel.subtitle,
        "seq_len": found.seq_len,
        "status": found.status if isinstance(found, Failure) else "ok",
        **measured,
    }


def _mode(row: Row) -> str:
    return "" if row["is_compiled"] is None else "compiled" if row["is_compiled"] else "eager"


def _rate(row: Row) -> str:
    value = row["tokens_per_s"]
    return "" if value is None else interval_rate(value, row["tokens_per_s_low"], row["tokens_per_s_high"])


def _brief_rate(row: Row) -> str:
    return _rate(row).partition(" [")[0]


def _time(row: Row) -> str:
    if row["median_ms"] is None:
        return outcome(row["status"]).word
    return interval_ms(row["median_ms"], row["low_ms"], row["high_ms"])


def _brief_time(row: Row) -> str:
    return outcome(row["status"]).word if row["median_ms"] is None else human_ms(row["median_ms"])
