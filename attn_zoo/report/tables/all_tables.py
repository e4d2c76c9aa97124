"""All tables of a report, in the order in which they are read."""

from __future__ import annotations

from attn_zoo.errors import UnknownNameError
from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.scores import AccuracyGroup
from attn_zoo.report.tables.efficiency_tables import efficiency_table, flops_table, rate_table
from attn_zoo.report.tables.growth_tables import crossover_table, exponent_table
from attn_zoo.report.tables.published import published_table, sources_table
from attn_zoo.report.tables.score_tables import (
    accuracy_table,
    cost_table,
    equal_cost_table,
    overview_table,
    pretraining_table,
    trials_table,
)
from attn_zoo.report.tables.table import Column, Table, text_column
from attn_zoo.report.tables.time_tables import length_table, measurement_table, step_table, turns_table
from attn_zoo.report.units import human_length
from attn_zoo.report.wording import PASS_TITLES, outcome


def summary_tables(analysis: Analysis) -> list[Table]:
    """Return the tables for people: wide ones, growth, crossovers, accuracy, and what did not run."""
    # Steps of one length are in one table with all about them.
    wide = [panel for panel in analysis.panels if panel.pass_ != "step" or len(panel.lengths) > 1]  # noqa: S105
    tables = [length_table(panel, quantity) for quantity in ("time", "memory") for panel in wide]
    tables += [table for table in (step_table(analysis),) if table]
    if analysis.panels:
        tables += [exponent_table(analysis), crossover_table(analysis)]
    rates = [
        turns_table(analysis),
        efficiency_table(analysis, is_brief=True),
        *(rate_table(panel) for panel in analysis.panels),
    ]
    tables += [table for table in rates if table]
    tables += [overview_table(overview) for overview in analysis.overviews]
    tables += [table for group in analysis.accuracy for table in _accuracy(group, analysis)]
    sources = sources_table([group for group in analysis.accuracy if not group.metric.is_lower_better])
    return [*tables, *([sources] if sources else []), status_table(analysis)]


def _accuracy(group: AccuracyGroup, analysis: Analysis) -> list[Table]:
    tables = (
        accuracy_table(group),
        pretraining_table(group),
        cost_table(group),
        equal_cost_table(group),
        trials_table(group),
        published_table(group, analysis.variants),
    )
    return [table for table in tables if table is not None]


def make_tables(analysis: Analysis) -> list[Table]:
    """Return the summary and, last, the long tables: FLOPs, efficiency, where there is any, and all measurements."""
    rates = [table for table in (flops_table(analysis), efficiency_table(analysis)) if table]
    long = [*rates, *([measurement_table(analysis)] if analysis.panels else [])]
    return [*summary_tables(analysis), *long]


def find_table(analysis: Analysis, name: str) -> Table:
    """Return one table by its name.

    Raises:
        UnknownNameError: these results have no such table.
    """
    tables = {table.name: table for table in make_tables(analysis)}
    if name not in tables:
        raise UnknownNameError("table", name, list(tables), f"there are {', '.join(tables)}")
    return tables[name]


def status_table(analysis: Analysis) -> Table:
    """Return what did not run and why: one row per variant, outcome and reason, lengths joined."""
    grouped: dict[tuple[str, ...], list[int]] = {}
    for one in analysis.results.observations:
        cell, record = one.cell, one.record
        if record.status != "ok":
            training = f"{cell.task} {cell.level or ''}".strip()
            what = training if one.is_training else PASS_TITLES.get(cell.pass_ or "", "")
            key = (one.label, record.status, what, cell.dtype, cell.device, record.reason)
            grouped.setdefault(key, []).append(0 if one.is_training else cell.seq_len or 0)
    fields = ("variant", "status", "what", "dtype", "device", "reason", "num_cells", "lengths")
    rows = [
        dict(zip(fields, (*key, len(lengths), _length_list(lengths)), strict=True))
        for key, lengths in sorted(grouped.items())
    ]
    return Table(
        name="status",
        title="What did not run, and why",
        note="" if rows else "Every cell that was run gave a measurement.",
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
        fields_if_empty=fields,
    )


def _length_list(lengths: list[int]) -> str:
    known = sorted({length for length in lengths if length})
    if len(known) > 3:
        return f"{human_length(known[0])} to {human_length(known[-1])} ({len(known)})"
    return ", ".join(human_length(length) for length in known)
