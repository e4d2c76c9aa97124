"""Time and memory by length: wide for people (variants down, lengths across), long for sorting and machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from attn_zoo.report.analysis.analyse import Analysis, PanelAnalysis
from attn_zoo.report.analysis.series import Failure, Point, Series
from attn_zoo.report.statuses import outcome
from attn_zoo.report.tables.columns import number_column, text_column
from attn_zoo.report.tables.table import Column, Row, Table
from attn_zoo.report.units import human_bytes, human_length, human_ms, human_number, ratio, time_unit
from attn_zoo.report.wording import doubt_words, held_words

__all__ = ["interval_ms", "length_table", "measurement_table", "outcomes"]


_GRAPHS = "In parentheses, where a call is bound by its launches: the same call replayed from a CUDA graph, cache warm."


def length_table(one: PanelAnalysis, quantity: str) -> Table:
    """Return variants down, lengths across: median time with its interval, or peak memory.

    Args:
        one: the panel.
        quantity: `"time"` or `"memory"`.
    """
    panel = one.panel
    lengths = sorted({found.seq_len for series in panel.series for found in outcomes(series)})
    rows: list[Row] = []
    for series in panel.series:
        cells: dict[str, Any] = {str(found.seq_len): found for found in outcomes(series)}
        rows.append({"variant": series.label, **{str(length): cells.get(str(length)) for length in lengths}})
    show, brief, sort = _CELLS[quantity]
    columns = [text_column("variant", "variant", priority=0)]
    for rank, length in enumerate(_by_importance(lengths)):
        key = str(length)
        columns.append(
            Column(
                heading=human_length(length),
                show=partial(_at, key=key, show=show),
                brief=partial(_at, key=key, show=brief),
                sort=partial(_sort_at, key=key, sort=sort),
                priority=1 + rank / (len(lengths) + 1),
            )
        )
    columns[1:] = sorted(
        columns[1:], key=lambda column: [human_length(length) for length in lengths].index(column.heading)
    )
    words = {
        "time": ("Time", "Median, with the 95 % interval of the median in brackets."),
        "memory": ("Peak memory", f"Most bytes that tensors occupied at once, {held_words(panel.pass_)} included."),
    }[quantity]
    points = [point for series in panel.series for point in series.points] if quantity == "time" else []
    graphs = _GRAPHS if any(point.graph_ms for point in points) else ""
    doubt = doubt_words(point.num_processes for point in points)
    note = " ".join(filter(None, (words[1], doubt, graphs, f"{panel.subtitle}.")))
    return Table(
        name=f"{quantity}-{panel.name}",
        title=f"{words[0]}, {panel.title}",
        note=note,
        columns=tuple(columns),
        rows=tuple(rows),
        fields=("variant", *map(str, lengths)),
    )


def outcomes(series: Series) -> list[Point | Failure]:
    """Return what became of every length, shortest first."""
    found: list[Point | Failure] = [*series.points, *series.failures]
    return sorted(found, key=lambda one: one.seq_len)


def _by_importance(lengths: list[int]) -> list[int]:
    """Order lengths so that any first few of them span the range: longest, shortest, then middles of the gaps."""
    order = [lengths[-1], lengths[0]] if len(lengths) > 1 else list(lengths)
    rest = [length for length in lengths if length not in order]
    while rest:
        best = max(rest, key=lambda length: min(abs(lengths.index(length) - lengths.index(used)) for used in order))
        order.append(best)
        rest.remove(best)
    return order


def _at(row: Row, key: str, show: Callable[[Point], str]) -> str:
    found = row[key]
    if isinstance(found, Failure):
        return outcome(found.status).word
    return show(found) if isinstance(found, Point) else ""


def _sort_at(row: Row, key: str, sort: Callable[[Point], float | None]) -> float | None:
    found = row[key]
    return sort(found) if isinstance(found, Point) else None


def interval_ms(median_ms: float, low_ms: float, high_ms: float) -> str:
    """Return median and interval in the unit of the median, such as `12.3 ms [12.1, 12.6]`."""
    unit, factor = time_unit(median_ms)
    median, low, high = (human_number(value * factor) for value in (median_ms, low_ms, high_ms))
    return f"{median} {unit} [{low}, {high}]"


def _time(point: Point) -> str:
    text = interval_ms(point.median_ms, point.low_ms, point.high_ms)
    return f"{text} ({human_ms(point.graph_ms)})" if point.graph_ms else text


def _memory(point: Point) -> str:
    return "" if point.peak_bytes is None else human_bytes(point.peak_bytes)


_CELLS: Mapping[str, tuple[Callable[[Point], str], Callable[[Point], str], Callable[[Point], float | None]]] = {
    "time": (
        _time,
        lambda point: human_ms(point.median_ms),
        lambda point: point.median_ms,
    ),
    "memory": (_memory, _memory, lambda point: point.peak_bytes),
}


def measurement_table(analysis: Analysis) -> Table:
    """Return every measured or failed length of every panel as one row."""
    rows = [row for one in analysis.panels for row in _panel_rows(one)]
    has_graphs = any(row["graph_ms"] for row in rows)
    graphs = " From a graph: the same call replayed from a CUDA graph, cache warm." if has_graphs else ""
    is_step = any(row["tokens_per_s"] for row in rows)
    steps = f"; of a training step without {held_words('step')}" if is_step else ""
    return Table(
        name="scaling",
        title="All measurements",
        note=(
            f"Median with 95 % interval. {doubt_words(row['num_processes'] for row in rows if row['num_processes'])} "
            f"Extra memory: peak without inputs, output and gradients of the inputs{steps}. Saved: "
            f"kept for backward. Speed-up: over the fastest exact kernel at the same length.{graphs}"
        ),
        columns=(
            text_column("variant", "variant", priority=0),
            text_column("pass", "pass", priority=0 if len(analysis.panels) > 1 else 5),
            number_column("length", "seq_len", human_length, priority=0),
            Column(heading="time", show=_row_time, brief=_row_brief, sort=lambda row: row["median_ms"], priority=0),
            *([number_column("from a graph", "graph_ms", human_ms, priority=4)] if has_graphs else []),
            number_column("speed-up", "speed_up", ratio, priority=3),
            number_column("peak memory", "peak_bytes", human_bytes, priority=1),
            number_column("extra memory", "extra_bytes", human_bytes, priority=5),
            number_column("saved", "saved_bytes", human_bytes, priority=6),
            number_column("processes", "num_processes", str, priority=5),
            text_column("kernel", "kernel", priority=7),
            text_column("flags", "flags", priority=8),
        ),
        rows=tuple(rows),
        fields=tuple(rows[0]) if rows else ("variant", "pass", "seq_len", "status", "median_ms"),
    )


def _panel_rows(one: PanelAnalysis) -> list[Row]:
    exact = {point.seq_len: point for point in (one.panel.baseline.points if one.panel.baseline else ())}
    return [
        {
            "variant": series.label,
            "pass": one.panel.title,
            "settings": one.panel.subtitle,
            "seq_len": found.seq_len,
            **_measured(found, exact.get(found.seq_len)),
            "is_simulated": series.is_simulated,
        }
        for series in one.panel.series
        for found in outcomes(series)
    ]


_MEASURED = (
    *(
        "median_ms",
        "low_ms",
        "high_ms",
        "q1_ms",
        "q3_ms",
        "tokens_per_s",
        "tokens_per_s_low",
        "tokens_per_s_high",
        "num_processes",
        "graph_ms",
        "peak_bytes",
        "extra_bytes",
        "saved_bytes",
        "flops",
    ),
    *("kernel", "flags"),
)


def _measured(found: Point | Failure, exact: Point | None) -> dict[str, Any]:
    if isinstance(found, Failure):
        return {"status": found.status, "reason": found.reason, **dict.fromkeys((*_MEASURED, "speed_up"))}
    speed_up = exact.median_ms / found.median_ms if exact is not None and found.median_ms > 0 else None
    values = {name: getattr(found, name) for name in _MEASURED}
    return {"status": "ok", "reason": "", **values, "speed_up": speed_up}


def _row_brief(row: Row) -> str:
    return outcome(row["status"]).word if row["median_ms"] is None else human_ms(row["median_ms"])


def _row_time(row: Row) -> str:
    if row["median_ms"] is None:
        return outcome(row["status"]).word
    return interval_ms(row["median_ms"], row["low_ms"], row["high_ms"])
