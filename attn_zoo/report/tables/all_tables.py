"""All tables of a report, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from attn_zoo.errors import UnknownNameError
from attn_zoo.folder import missing_shards
from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.observations import Observation
from attn_zoo.report.analysis.scores import AccuracyGroup
from attn_zoo.report.tables.efficiency_tables import efficiency_table, flops_table
from attn_zoo.report.tables.error_tables import (
    all_errors_table,
    error_budget_table,
    error_overview_table,
    error_table,
)
from attn_zoo.report.tables.exchange_tables import exchange_table
from attn_zoo.report.tables.front_table import front_errors
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
from attn_zoo.report.wording import OUTCOMES, PASS_TITLES, outcome
from attn_zoo.units import human_length

MOST_ROWS = 1000
"""Of a table on the page."""

_ALL_RAN = "Every planned cell was run and gave a measurement."
_NONE_FAILED = "Every cell that was run gave a measurement; how many were planned is not known."
_NONE_READ_FAILED = "Every record that was read is a measurement; attn-zoo status says what failed elsewhere."
_OF_READ = "Of the records that were read; attn-zoo status has all."
_WORDS = {each.legend: each.word for each in OUTCOMES.values()}

QUESTIONS: Mapping[str, str] = {
    "time": "How long does it take?",
    "growth": "How does it grow, and from where is it cheaper than exact attention?",
    "memory": "How much memory does it take?",
    "efficiency": "How much of the machine does it use?",
    "approximation": "How near does it come to exact attention?",
    "accuracy": "What does it score?",
    "missing": "What did not run, and why?",
}
"""Of which a report answers one after the other, by name."""


@lru_cache(maxsize=1)  # the files, the page and the terminal ask one after the other
def tables_by_question(analysis: Analysis) -> dict[str, list[Table]]:
    """Return all tables by the name of the question that they answer; the last of time and efficiency are long."""
    # Steps of one length are in one table with all about them.
    wide = [panel for panel in analysis.panels if panel.pass_ != "step" or len(panel.lengths) > 1]
    found: dict[str, list[Table | None]] = {
        "time": [
            *(length_table(panel, "time") for panel in wide),
            step_table(analysis),
            turns_table(analysis),
            measurement_table(analysis) if analysis.panels else None,
        ],
        "growth": [exponent_table(analysis), crossover_table(analysis)] if analysis.panels else [],
        "memory": [length_table(panel, "memory") for panel in wide],
        "efficiency": [efficiency_table(analysis, is_brief=True), flops_table(analysis), efficiency_table(analysis)],
        "approximation": [
            *(error_overview_table(group) for group in analysis.errors if group is not front_errors(analysis)),
            *(error_table(group, panel) for group in analysis.errors for panel in group.panels),
            *(error_budget_table(group) for group in analysis.errors),
            all_errors_table(analysis),
        ],
        "accuracy": [
            *(overview_table(overview) for overview in analysis.overviews),
            *(table for group in analysis.accuracy for table in _accuracy(group, analysis)),
            sources_table(
                [
                    group
                    for group in analysis.accuracy
                    if not group.metric.is_lower_better and not group.setting.replaces
                ]
            ),
        ],
        "missing": [status_table(analysis)],
    }
    return {name: [table for table in tables if table is not None] for name, tables in found.items()}


def shown_tables(analysis: Analysis, tables: Iterable[Table], most: int) -> list[Table]:
    """Return of the tables of a report what a person reads at once, so many rows of each; their files have all."""
    hidden = {f"{quantity}-{panel.name}" for panel in analysis.panels for quantity in ("time", "memory")}
    hidden -= {f"{quantity}-{panel.name}" for panel in analysis.shown for quantity in ("time", "memory")}
    return [table.cut(most) for table in tables if table.name not in hidden]


def summary_tables(analysis: Analysis) -> list[Table]:
    """Return the tables for people: all but those with a row for every measurement."""
    long = {"efficiency", "flops", "scaling", "approximation"}
    return [table for table in make_tables(analysis) if table.name not in long]


def _accuracy(group: AccuracyGroup, analysis: Analysis) -> list[Table | None]:
    cost = cost_table(group) if group.means else None  # of no score there is none
    if group.setting.replaces:
        return [
            exchange_table(group),
            accuracy_table(group, analysis.padded),
            cost if group.setting.adapt_steps else None,
        ]
    return [
        accuracy_table(group, analysis.padded),
        pretraining_table(group),
        cost,
        equal_cost_table(group),
        trials_table(group),
        published_table(group, analysis.variants),
    ]


def make_tables(analysis: Analysis) -> list[Table]:
    """Return all tables, question by question."""
    return [table for tables in tables_by_question(analysis).values() for table in tables]


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
    """Return what did not run and why: a row for each variant, outcome and reason, passes and lengths joined."""
    every = (*analysis.results.observations, *analysis.results.left)
    found = grouped((one for one in every if one.record.status != "ok"), _why_missing)
    missing = sorted(
        found.items(), key=lambda item: (*item[0][:4], min(one.cell.seq_len or 0 for one in item[1]), item[0])
    )
    rows = [
        {
            "variant": label,
            "status": status,
            "what": ", ".join(what for (*_, what), _ in same if what),
            "dtype": dtype,
            "device": device,
            "reason": reason,
            "num_cells": sum(len(cells) for _, cells in same),
            "lengths": lengths,
        }
        for (label, status, dtype, device, reason, lengths), same in grouped(missing, _row_of).items()
    ]
    if any(run.num_unread for run in analysis.results.runs):
        note = _OF_READ if rows else _NONE_READ_FAILED
    else:
        runs = analysis.results.runs
        is_known = all(run.planned is not None for run in runs)
        is_known &= not missing_shards(shard for run in runs for shard in run.shards)
        note = "" if rows else _ALL_RAN if is_known else _NONE_FAILED
    return Table(
        name="status",
        title="Cells without a measurement",
        notes=(note,),
        columns=(
            text_column("variant", priority=0),
            Column(
                heading="outcome",
                show=lambda row: outcome(row["status"]).legend,
                brief=lambda legend: _WORDS.get(legend, legend),
                align="left",
                priority=0,
            ),
            text_column("of", "what", priority=3),
            text_column("lengths", priority=1),
            text_column("reason", priority=2),
        ),
        rows=tuple(rows),
        fields_if_empty=("variant", "status", "what", "dtype", "device", "reason", "num_cells", "lengths"),
    )


_Key = tuple[str, ...]


def _why_missing(one: Observation) -> _Key:
    """Return what tells rows apart, and what was to be measured last."""
    cell, record = one.cell, one.record
    training = f"{cell.task} {cell.level or ''}".strip()
    what = training if one.is_training else cell.inputs or PASS_TITLES.get(cell.pass_ or "", "")
    return one.label, record.status, cell.dtype, cell.device, record.reason, what


def _row_of(missing: tuple[_Key, Sequence[Observation]]) -> _Key:
    """Return what tells rows apart, and the lengths in words instead of what was to be measured."""
    (*rest, _), cells = missing
    known = sorted({one.cell.seq_len for one in cells if one.cell.seq_len and not one.is_training})
    lengths = [human_length(length) for length in known]
    return *rest, ", ".join(lengths) if len(known) < 4 else f"{lengths[0]} to {lengths[-1]} ({len(lengths)})"
