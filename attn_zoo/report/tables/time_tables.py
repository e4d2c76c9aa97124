"""Tables of calls and training steps: by length, all measurements, steps, and what was timed in turns."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.fits import NOT_SETTLED
from attn_zoo.report.analysis.panels import Panel
from attn_zoo.report.analysis.series import Point, Series, joint_doubts, shown_doubts
from attn_zoo.report.analysis.winners import SpeedUp, fastest_of, times_faster
from attn_zoo.report.measurements import CALLS, token_rates
from attn_zoo.report.tables.table import (
    BRACKETS,
    MARK_REMARKS,
    Column,
    Note,
    Remark,
    Row,
    Table,
    interval_column,
    interval_values,
    marked,
    number_column,
    text_column,
    time_column,
    without_interval,
)
from attn_zoo.report.wording import MARKS, NO_RECORD, doubt_words, held_words, marks_of, missing_word
from attn_zoo.units import (
    Units,
    human_bytes,
    human_count,
    human_length,
    human_ms,
    human_number,
    human_rate,
    ratio,
    ratio_interval,
    some,
)

_REPLAYED = (
    "the same call replayed from a CUDA graph, cache warm: the time of the GPU alone. Replays one after another may "
    "lower its clock, and then take longer than a call."
)
_GRAPHS = Remark(f"In parentheses: {_REPLAYED}", sign=" (")


def length_table(panel: Panel, quantity: Literal["time", "memory"]) -> Table:
    """Return variants down, lengths across: median time with its interval and what makes it doubtful, or peak memory.

    The least at the longest length comes first. Where space is short, middle lengths go first. Weights that grow with
    the length stand beside the numbers.
    """
    order = by_importance(panel.lengths)
    unit = "median_ms" if quantity == "time" else "peak_bytes"
    outcomes = {series.label: series.outcomes for series in panel.series}

    def value(point: Point) -> float | None:
        return point.median_ms if quantity == "time" else point.memory.peak_bytes

    units = human_ms if quantity == "time" else human_bytes
    every = units.fixed(map(value, panel.points), least=0.1)  # one may read along rows too, where that hides no digit

    def column(length: int) -> Column:
        here = every.fixed(value(point) for point in panel.points if point.seq_len == length)

        def show(row: Row) -> str:
            one = outcomes[row["variant"]].get(length)
            if not isinstance(one, Point):
                return NO_RECORD if one is None else missing_word(one)
            if quantity == "time":
                return _time(one, panel.shown_doubts, here)
            return "not measured" if one.memory.peak_bytes is None else here(one.memory.peak_bytes)

        return Column(
            heading=human_length(length),
            show=show,
            brief=lambda text: without_interval(text).partition(" (")[0],  # nor the time of the GPU alone
            sort=lambda row: row[f"{unit}_{length}"],
            priority=1 + order.index(length) / (len(order) + 1),
        )

    weights = text_column("weights that grow", "weights", priority=2.5)
    return Table(
        name=f"{quantity}-{panel.name}",
        title=f"{'Time' if quantity == 'time' else 'Peak memory'}, {panel.title}",
        notes=(*_how_to_read(panel, quantity), f"{panel.subtitle}."),
        columns=(text_column("variant", priority=0), *map(column, panel.lengths), weights),
        rows=tuple(
            {"variant": series.label, "weights": weights_words(series)}
            | {
                f"{unit}_{length}": value(one) if isinstance(one := series.outcomes.get(length), Point) else None
                for length in panel.lengths
            }
            for series in panel.ranked_by(value)
        ),
        is_view=True,
    )


def _how_to_read(panel: Panel, quantity: Literal["time", "memory"]) -> Note:
    if quantity == "memory":
        room = (
            "A buffer of keys doubles when it is full, so up to half of it is empty." if panel.pass_ == "decode" else ""
        )
        return (f"Most bytes that tensors occupied at once, {held_words(panel.pass_)} included.", room)
    return ("Median time.", BRACKETS, *time_caveats(panel), _GRAPHS)


HIDDEN_LAUNCHES = (
    "A call is enqueued behind a write that empties the cache, which hides a part of the host's time. Calls in a loop "
    "take that time where it is longer (table of all measurements)."
)


def time_caveats(panel: Panel) -> Note:
    """Return what intervals of times know, what marks mean, and how we know of waiting calls."""
    caveats = [interval_remark(panel.points), *MARK_REMARKS]
    if any(point.is_waiting and point.device_ms is None for point in panel.points):
        text = "Where the GPU alone was not timed, waiting is inferred from times that hardly grow."
        caveats.append(Remark(text, sign=MARKS["host"][0]))
    if any(point.timing.host_ms is not None and point.timing.host_ms > point.median_ms for point in panel.points):
        caveats.append(HIDDEN_LAUNCHES)
    if any(series.may_wait for series in panel.series):
        caveats.append("Where the GPU alone was not timed, nobody knows whether short calls wait for the host.")
    return caveats


def interval_remark(points: Iterable[Point]) -> Remark:
    """Return what intervals of these times know."""
    return Remark(doubt_words(point.num_processes for point in points), sign="[")


def pass_columns(panels: Sequence[Panel], key: str = "") -> list[Column]:
    """Return the column of panels, none for one: their titles differ at the end, so a brief text names their files."""
    names = {panel.title: panel.name for panel in panels}
    column = text_column("pass", key, priority=0)
    return [replace(column, brief=lambda title: names.get(title, title))] if len(panels) > 1 else []


def unjudged_words(panel: Panel) -> list[str]:
    """Return which curves are never called the best, and why: a sentence for each reason."""
    simulated = [series.label for series in panel.series if series.is_simulated]
    controls = [series.label for series in panel.series if series.is_control and not series.is_simulated]
    said = [
        f"Not judged (dense scores underneath): {', '.join(simulated)}." if simulated else "",
        control_words(controls),
    ]
    return [text for text in said if text]


def control_words(labels: Sequence[str]) -> str:
    """Return why these are never called the best; empty for none."""
    return f"Not judged (a control, which does without attention): {', '.join(labels)}." if labels else ""


def factor_text(found: SpeedUp, shown: Container[str]) -> str:
    """Return how many times as fast a variant is, with the marks of what makes that doubtful."""
    factor = found.factor
    return marked(ratio_interval(factor.value, factor.low, factor.high), marks_of(found.doubts, shown))


def weights_words(series: Series) -> str:
    """Return how many parameters a layer has at the longest length, if they grow with the length."""
    counts = [(point.record.num_params or 0, point.seq_len) for point in series.points]
    if not counts or min(counts)[0] == max(counts)[0]:
        return ""
    most, length = max(counts)
    return f"{human_count(most)} parameters at {human_length(length)}"


def by_importance(lengths: Sequence[int]) -> list[int]:
    """Order lengths so that any first few of them span the range: longest, shortest, then middles of the gaps."""
    order = [lengths[-1], lengths[0]] if len(lengths) > 1 else list(lengths)
    rest = [length for length in lengths if length not in order]
    while rest:
        best = max(rest, key=lambda length: min(abs(lengths.index(length) - lengths.index(used)) for used in order))
        order.append(best)
        rest.remove(best)
    return order


def _time(point: Point, shown: frozenset[str], units: Units) -> str:
    marks = marks_of(point.doubts, shown)
    alone = f"({units(point.device_ms)})" if point.device_ms else ""
    return " ".join(filter(None, (units.interval(point.median_ms, point.low_ms, point.high_ms), marks, alone)))


_TIMES = ("median_ms", "low_ms", "high_ms", "q1_ms", "q3_ms")
_RATES = ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high")


def _row(panel: Panel, series: Series, length: int, shown: frozenset[str]) -> dict[str, Any]:
    """Return all that is known of one length: in files each of `CALLS` is a column, whatever a table shows of it."""
    point = series.outcomes[length]
    row: dict[str, Any] = {
        "variant": series.label,
        "pass": panel.title,
        "settings": panel.subtitle,
        "seq_len": length,
        "is_simulated": series.is_simulated,
    }
    extra = (
        *("num_processes", "num_params", "flops", "kernel", "flags", "marks"),
        *("is_waiting", "is_host_bound", "is_compiled"),
    )
    if not isinstance(point, Point):
        names = (*_TIMES, *_RATES, *(each.name for each in CALLS), *extra)
        said = {"status": point.status, "word": missing_word(point), "reason": point.reason}
        return row | said | dict.fromkeys(names)
    rates = token_rates(point.record)
    return row | {
        "status": "ok",
        "word": "ok",
        "reason": "",
        **{name: getattr(point.timing, name) for name in _TIMES},
        **{name: rates.get(name) for name in _RATES},
        **{each.name: each.read(point.record) for each in CALLS},
        "num_processes": point.num_processes,
        "num_params": point.record.num_params,
        "flops": point.record.flops,
        "kernel": point.kernel,
        "flags": point.flags,
        "marks": marks_of(point.doubts, shown),
        "is_waiting": point.is_waiting,
        "is_host_bound": point.is_host_bound,
        "is_compiled": point.record.cell.overrides.get("compile") is True,
    }


def _measured(table: Literal["scaling", "steps"]) -> list[Column]:
    """Return a column for each of `CALLS` that a table shows."""
    shown = (each for each in CALLS if table in each.tables)
    return [number_column(each.heading, each.name, each.show, priority=each.priority) for each in shown]


def _energy_remark(rows: Sequence[Row]) -> Remark:
    """Say of which calls the energy is, and where the GPU waited meanwhile."""
    known = [row for row in rows if row["energy_joules"] is not None and row["is_host_bound"]]
    bound = dict.fromkeys(f"{row['variant']} at {human_length(row['seq_len'])}" for row in known)
    said = "Energy: of one call of many as a user makes them, one after another."
    if bound:
        said += (
            f" Of {some(bound)} the host was the limit: the GPU waited between them, and what it drew meanwhile is "
            "counted."
        )
    return Remark(said, heading="energy")


def measurement_table(analysis: Analysis) -> Table:
    """Return every measured or failed length of every panel as one row."""
    rows, shown = [], analysis.shown_doubts
    for panel in analysis.panels:
        rows += [
            _row(panel, series, length, shown) | _times_as_fast(panel, series, length, shown)
            for series in panel.ranked
            for length in series.outcomes
        ]
    passes = {panel.pass_ for panel in analysis.panels}
    return Table(
        name="scaling",
        title="All measurements",
        notes=(
            "Median time.",
            BRACKETS,
            interval_remark(analysis.points),
            Remark(f"Extra memory: peak {_extra_words(passes)}.", heading="extra memory"),
            Remark("Saved: kept for backward.", heading="saved"),
            Remark("Tokens per second: read or written, of all sequences of the batch (k: 1000).", heading="tokens/s"),
            Remark("State: what a decoded token starts from, without the room in its buffers.", heading="state"),
            _energy_remark(rows),
            Remark(_SPEED_UP, heading="speed-up"),
            Remark("Host: what it takes to enqueue a call, which calls in a loop take at least.", heading="host"),
            Remark(f"From a graph: {_REPLAYED}", heading="from a graph"),
            *MARK_REMARKS,
            *analysis.caveats,
        ),
        columns=(
            text_column("variant", priority=0),
            *pass_columns(analysis.panels),
            number_column("length", "seq_len", human_length, priority=0),
            time_column("time", priority=0),
            interval_column("speed-up", "speed_up", ratio, 3, show_end=human_number, marks="speed_up_marks"),
            *([_TOKENS_PER_S] if passes & {"prefill", "decode"} else []),
            *_measured("scaling"),
            number_column("processes", "num_processes", str, priority=5),
            number_column("parameters", "num_params", "{:,.0f}".format, priority=6),
            text_column("kernel", priority=7),
            text_column("flags", priority=8),
        ),
        rows=tuple(rows),
    )


def _extra_words(passes: Collection[str]) -> str:
    """Say what extra memory is without: of the output of an update nobody knows whether it is there at the peak."""
    updates = {"step": "of a training step", "decode": "of a decoded token"}
    said = [] if passes and updates.keys() >= set(passes) else ["without inputs, output and gradients of the inputs"]
    said += [f"{words} without {held_words(pass_)}" for pass_, words in updates.items() if pass_ in passes]
    return "; ".join(said)


_SPEED_UP = (
    "Speed-up: how many times as fast as exact attention of the same length: the one that was timed in turns with it, "
    "by rounds, or else the fastest one, by medians."
)


def _times_as_fast(panel: Panel, series: Series, length: int, shown: frozenset[str]) -> dict[str, Any]:
    found = panel.beside_exact(series, length)
    if found is None or not found.point.median_ms or not found.exact.median_ms:
        return {**interval_values("speed_up", None, None, None), "speed_up_over": "", "speed_up_marks": ""}
    factor = found.factor
    ends = (None, None) if found.is_itself else (factor.low, factor.high)
    return {
        **interval_values("speed_up", factor.value, *ends),
        "speed_up_over": found.against,
        "speed_up_marks": marks_of(found.doubts, shown),
    }


def step_table(analysis: Analysis) -> Table | None:
    """Return one row for each variant and length of every panel of training steps, the fastest first; None without."""
    panels = [panel for panel in analysis.panels if panel.pass_ == "step"]
    points = [point for panel in panels for point in panel.points]
    shown = shown_doubts(points)
    rows = []
    for panel in panels:
        own = [_row(panel, series, length, shown) for series in panel.ranked for length in series.outcomes]
        rows += sorted(own, key=lambda row: (row["seq_len"], row["median_ms"] or float("inf"), row["variant"]))
    if not rows:
        return None
    subtitles = " ".join(f"{text}." for text in dict.fromkeys(panel.subtitle for panel in panels))
    return Table(
        name="steps",
        title="Training steps",
        notes=(
            "A step: forward, loss, backward, clipping and update.",
            "Median time, and tokens per second without padding (k: 1000).",
            BRACKETS,
            interval_remark(points),
            *MARK_REMARKS,
            Remark(f"Peak memory: {held_words('step')} included.", heading="peak memory"),
            Remark("Saved: what autograd keeps from forward to backward, weights and data included.", heading="saved"),
            _energy_remark(rows),
            Remark("First step: compilation included, of which a cache may have spared a part.", heading="first step"),
            subtitles,
        ),
        columns=(
            text_column("variant", priority=0),
            *pass_columns(panels),
            number_column("length", "seq_len", human_length, priority=0),
            Column(heading="mode", show=_mode, align="left", priority=3),
            time_column("time", priority=0),
            replace(_TOKENS_PER_S, priority=0),
            *_measured("steps"),
        ),
        rows=tuple(rows),
    )


def _mode(row: Row) -> str:
    return "" if row["is_compiled"] is None else "compiled" if row["is_compiled"] else "eager"


def _rate(row: Row) -> str:
    return "" if row["tokens_per_s"] is None else human_rate.interval(*(row[name] for name in _RATES))


_TOKENS_PER_S = Column(
    heading="tokens/s", show=_rate, brief=without_interval, sort=lambda row: row["tokens_per_s"], priority=2
)


def turns_table(analysis: Analysis) -> Table | None:
    """Return one row for each variant of each bundle, the fastest first; None where nothing was timed in turns."""
    every = (members for panel in analysis.panels for members in panel.bundles.values())
    shown = shown_doubts(point for members in every for point, _ in members)
    rows = [row for panel in analysis.panels for row in _turn_rows(panel, shown)]
    if not rows:
        return None
    again = ", and again in further processes" if any(row["num_processes"] > 1 for row in rows) else ""
    several = ", of several processes the geometric mean of theirs" if again else ""
    over = "over rounds and processes" if again else "over rounds"
    unjudged = dict.fromkeys(words for panel in analysis.panels if panel.bundles for words in unjudged_words(panel))
    return Table(
        name="turns",
        title="Timed in turns",
        notes=(
            f"Each group was timed in one process, in rounds of one call each{again}.",
            *unjudged,
            f"Beside the fastest: median over rounds of the ratio of two calls of one round{several}.",
            Remark(f"In brackets: 95 % interval {over}.", sign="["),
            *MARK_REMARKS,
            *analysis.caveats,
        ),
        columns=(
            text_column("variant", priority=0),
            *pass_columns(analysis.panels),
            number_column("length", "seq_len", human_length, priority=0),
            time_column("time", priority=1),
            Column(
                heading="beside the fastest",
                show=_ratio,
                brief=without_interval,
                sort=lambda row: float(row["ratio"]),
                priority=0,
            ),
            text_column("the fastest", "fastest", priority=2),
            number_column("rounds", "num_rounds", str, priority=3),
            text_column("kernel", priority=4),
        ),
        rows=tuple(rows),
    )


def _turn_rows(panel: Panel, shown: frozenset[str]) -> list[dict[str, Any]]:
    rows, judged = [], panel.judged
    for (seq_len, bundle), turns in panel.bundles.items():
        fastest, fastest_label = fastest_of([rival for rival in turns if rival[1] in judged] or turns)
        members = [(times_faster(point, fastest), point, label) for point, label in turns]
        members.sort(
            key=lambda member: (member[2] not in judged, member[2] != fastest_label, member[0].value, member[2])
        )
        level = {label for compared, _, label in members if label in judged and compared.low <= 1.0}
        for compared, point, label in members:
            rows.append(
                {
                    "pass": panel.title,
                    "settings": panel.subtitle,
                    "seq_len": seq_len,
                    "variant": label,
                    "median_ms": point.median_ms,
                    "low_ms": point.low_ms,
                    "high_ms": point.high_ms,
                    "fastest": fastest_label,
                    **interval_values("ratio", compared.value, compared.low, compared.high),
                    "is_level": label in level and len(level) > 1,
                    "num_rivals": len(turns) - 1,
                    "num_rounds": compared.num_pairs,
                    "num_processes": point.num_processes,
                    "kernel": point.kernel,
                    "marks": marks_of(point.doubts, shown),
                    "ratio_marks": marks_of(joint_doubts((point, fastest)), shown),
                    "bundle": bundle,
                }
            )
    return rows


def _ratio(row: Row) -> str:
    doubt = f", {NOT_SETTLED}" if row["is_level"] else ""
    if row["variant"] == row["fastest"]:
        return f"fastest{doubt}" if row["num_rivals"] else "alone"
    factor = ratio_interval(row["ratio"], row["ratio_low"], row["ratio_high"])
    return marked(f"{factor}{doubt}", row["ratio_marks"])
