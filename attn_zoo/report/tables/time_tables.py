"""Tables of calls and training steps: by length, all measurements, steps, and what was timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.observations import Observation
from attn_zoo.report.analysis.panels import Panel
from attn_zoo.report.analysis.series import Failure, Point, Series
from attn_zoo.report.measurements import CALLS, token_rates
from attn_zoo.report.tables.table import Column, Row, Table, number_column, text_column, time_column, wide_table
from attn_zoo.report.units import human_bytes, human_length, human_ms, human_number, interval_ms, interval_rate, ratio
from attn_zoo.report.wording import doubt_words, held_words, outcome
from attn_zoo.statistics import time_ratio

_GRAPHS = "In parentheses, where a call is bound by its launches: the same call replayed from a CUDA graph, cache warm."


def length_table(panel: Panel, quantity: Literal["time", "memory"]) -> Table:
    """Return variants down, lengths across: median time with its interval, or peak memory."""
    title, how_to_read = {
        "time": ("Time", "Median, with the 95 % interval of the median in brackets."),
        "memory": ("Peak memory", f"Most bytes that tensors occupied at once, {held_words(panel.pass_)} included."),
    }[quantity]
    points = panel.points if quantity == "time" else []
    graphs = _GRAPHS if any(point.timing.graph_ms for point in points) else ""
    doubt = doubt_words(point.num_processes for point in points)
    show, brief, sort = _CELLS[quantity]
    return wide_table(
        f"{quantity}-{panel.name}",
        f"{title}, {panel.title}",
        " ".join(filter(None, (how_to_read, doubt, graphs, f"{panel.subtitle}."))),
        {series.label: series.outcomes for series in panel.series},
        (partial(_at, show=show), partial(_at, show=brief), partial(_sort_at, sort=sort)),
    )


def _at(outcome_at: Point | Failure, show: Callable[[Point], str]) -> str:
    return show(outcome_at) if isinstance(outcome_at, Point) else outcome(outcome_at.status).word


def _sort_at(outcome_at: Point | Failure, sort: Callable[[Point], float | None]) -> float | None:
    return sort(outcome_at) if isinstance(outcome_at, Point) else None


def _time(point: Point) -> str:
    text = interval_ms(point.median_ms, point.low_ms, point.high_ms)
    return f"{text} ({human_ms(point.timing.graph_ms)})" if point.timing.graph_ms else text


def _memory(point: Point) -> str:
    return "" if point.memory.peak_bytes is None else human_bytes(point.memory.peak_bytes)


_CELLS: Mapping[str, tuple[Callable[[Point], str], Callable[[Point], str], Callable[[Point], float | None]]] = {
    "time": (_time, lambda point: human_ms(point.median_ms), lambda point: point.median_ms),
    "memory": (_memory, _memory, lambda point: point.memory.peak_bytes),
}


_TIMES = ("median_ms", "low_ms", "high_ms", "q1_ms", "q3_ms")
_RATES = ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high")


def _row(panel: Panel, series: Series, point: Point | Failure) -> dict[str, Any]:
    """Return all that is known of one length: in files each of `CALLS` is a column, whatever a table shows of it."""
    row: dict[str, Any] = {
        "variant": series.label,
        "pass": panel.title,
        "settings": panel.subtitle,
        "seq_len": point.seq_len,
        "is_simulated": series.is_simulated,
    }
    extra = ("num_processes", "flops", "kernel", "flags", "is_compiled")
    if isinstance(point, Failure):
        names = (*_TIMES, *_RATES, *(each.name for each in CALLS), *extra)
        return row | {"status": point.status, "reason": point.reason, **dict.fromkeys(names)}
    rates = token_rates(point.record)
    return row | {
        "status": "ok",
        "reason": "",
        **{name: getattr(point.timing, name) for name in _TIMES},
        **{name: rates.get(name) for name in _RATES},
        **{each.name: each.read(point.record) for each in CALLS},
        "num_processes": point.num_processes,
        "flops": point.record.flops,
        "kernel": point.kernel,
        "flags": point.flags,
        "is_compiled": point.is_compiled,
    }


def _rows(panels: Iterable[Panel]) -> list[dict[str, Any]]:
    return [_row(panel, series, point) for panel in panels for series in panel.series for point in series.outcomes]


def _measured(rows: list[dict[str, Any]], table: Literal["scaling", "steps"]) -> list[Column]:
    """Return a column for each of `CALLS` that a table shows and at least one row knows."""
    shown = [each for each in CALLS if table in each.tables and any(row[each.name] is not None for row in rows)]
    return [number_column(each.heading, each.name, each.show, priority=each.priority) for each in shown]


def measurement_table(analysis: Analysis) -> Table:
    """Return every measured or failed length of every panel as one row."""
    rows = []
    for panel in analysis.panels:
        exact = {point.seq_len: point.median_ms for point in (panel.baseline.points if panel.baseline else ())}
        for row in _rows([panel]):
            is_comparable = row["seq_len"] in exact and bool(row["median_ms"])
            rows.append(row | {"speed_up": exact[row["seq_len"]] / row["median_ms"] if is_comparable else None})
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
            f"kept for backward. Speed-up: over the fastest exact kernel at the same length.{graphs} "
            f"{analysis.caveats}"
        ).strip(),
        columns=(
            text_column("variant", "variant", priority=0),
            text_column("pass", "pass", priority=0 if len(analysis.panels) > 1 else 5),
            number_column("length", "seq_len", human_length, priority=0),
            time_column("time", priority=0),
            number_column("speed-up", "speed_up", ratio, priority=3),
            *_measured(rows, "scaling"),
            number_column("processes", "num_processes", str, priority=5),
            text_column("kernel", "kernel", priority=7),
            text_column("flags", "flags", priority=8),
        ),
        rows=tuple(rows),
        fields_if_empty=("variant", "pass", "seq_len", "status", "median_ms"),
    )


def step_table(analysis: Analysis) -> Table | None:
    """Return one row for each variant and length of every panel of training steps, the fastest first; None without."""
    panels = [panel for panel in analysis.panels if panel.pass_ == "step"]  # noqa: S105 - a word of ours
    rows = [
        row
        for panel in panels
        for row in sorted(
            _rows([panel]), key=lambda row: (row["seq_len"], row["median_ms"] or float("inf"), row["variant"])
        )
    ]
    if not rows:
        return None
    doubt = doubt_words(row["num_processes"] for row in rows if row["num_processes"])
    subtitles = " ".join(f"{text}." for text in dict.fromkeys(panel.subtitle for panel in panels))
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
            time_column("time", priority=0),
            Column(
                heading="tokens/s",
                show=_rate,
                brief=lambda row: _rate(row).partition(" [")[0],
                sort=lambda row: row["tokens_per_s"],
                priority=0,
            ),
            *_measured(rows, "steps"),
        ),
        rows=tuple(rows),
    )


def _mode(row: Row) -> str:
    return "" if row["is_compiled"] is None else "compiled" if row["is_compiled"] else "eager"


def _rate(row: Row) -> str:
    return "" if row["tokens_per_s"] is None else interval_rate(*(row[name] for name in _RATES))


def turns_table(analysis: Analysis) -> Table | None:
    """Return one row for each variant of each bundle, the fastest first; None where nothing was timed in turns."""
    rows = [row for panel in analysis.panels for row in _turn_rows(panel)]
    if not rows:
        return None
    again = ", and again in further processes" if any(row["num_processes"] > 1 for row in rows) else ""
    several = ", of several processes the geometric mean of theirs" if again else ""
    over = "over rounds and processes" if again else "over rounds"
    return Table(
        name="turns",
        title="Timed in turns",
        note=(
            f"Each group was timed in one process, in rounds of one call each{again}. Beside the fastest: median over "
            f"rounds of the ratio of two calls of one round{several}, with its 95 % interval {over}. "
            f"{analysis.caveats}"
        ).strip(),
        columns=(
            text_column("pass", "pass", priority=0),
            number_column("length", "seq_len", human_length, priority=0),
            text_column("variant", "variant", priority=0),
            time_column("time", priority=1),
            Column(
                heading="beside the fastest",
                show=_ratio,
                brief=lambda row: _ratio(row).partition(" [")[0],
                sort=lambda row: float(row["ratio"]),
                priority=0,
            ),
            number_column("rounds", "num_rounds", str, priority=3),
            text_column("kernel", "kernel", priority=4),
        ),
        rows=tuple(rows),
    )


def _turn_rows(panel: Panel) -> list[dict[str, Any]]:
    bundles: dict[tuple[int, str], list[Observation]] = {}
    for turn in panel.turns:
        bundles.setdefault((turn.cell.seq_len or 0, turn.record.bundle), []).append(turn)
    rows = []
    for (seq_len, bundle), members in sorted(bundles.items()):
        timed = sorted(
            ((each.record.timing, each) for each in members if each.record.timing is not None),
            key=lambda pair: (pair[0].median_ms, pair[1].label),
        )
        fastest, fastest_label = timed[0][0], timed[0][1].label
        for timing, turn in timed:
            compared = time_ratio(
                timing.samples_ms,
                fastest.samples_ms,
                is_paired=True,
                sizes_a=timing.process_sizes,
                sizes_b=fastest.process_sizes,
            )
            rows.append(
                {
                    "pass": panel.title,
                    "settings": panel.subtitle,
                    "seq_len": seq_len,
                    "variant": turn.label,
                    "median_ms": timing.median_ms,
                    "low_ms": timing.low_ms,
                    "high_ms": timing.high_ms,
                    "fastest": fastest_label,
                    "ratio": compared.value,
                    "ratio_low": compared.low,
                    "ratio_high": compared.high,
                    "num_rounds": compared.num_pairs,
                    "num_processes": max(1, len(timing.process_sizes)),
                    "kernel": " + ".join(turn.record.kernels),
                    "bundle": bundle,
                }
            )
    return rows


def _ratio(row: Row) -> str:
    if row["variant"] == row["fastest"]:
        return "fastest"
    return f"{ratio(row['ratio'])} [{human_number(row['ratio_low'])}, {human_number(row['ratio_high'])}]"
