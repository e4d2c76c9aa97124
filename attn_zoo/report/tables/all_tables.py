"""All tables of a report, in the order in which they are read."""

from __future__ import annotations

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.learning import equal_cost_table
from attn_zoo.report.analysis.score_groups import AccuracyGroup
from attn_zoo.report.analysis.task_means import overview_table
from attn_zoo.report.tables.efficiency_tables import efficiency_table, rate_table
from attn_zoo.report.tables.growth_tables import crossover_table, exponent_table
from attn_zoo.report.tables.outcome_tables import status_table
from attn_zoo.report.tables.published import published_table, sources_table
from attn_zoo.report.tables.score_list import score_table
from attn_zoo.report.tables.score_tables import accuracy_table, cost_table
from attn_zoo.report.tables.step_table import step_table
from attn_zoo.report.tables.table import Table
from attn_zoo.report.tables.time_tables import length_table, measurement_table
from attn_zoo.report.tables.tuning_tables import pretraining_table, trials_table
from attn_zoo.report.tables.turns_table import turns_table

__all__ = ["long_tables", "make_tables", "summary_tables"]


def summary_tables(analysis: Analysis) -> list[Table]:
    """Return the tables for people: wide ones, growth, crossovers, accuracy, and what did not run."""
    # Steps of one length are in one table with all about them.
    wide = [one for one in analysis.panels if one.panel.pass_ != "step" or len(one.panel.lengths) > 1]  # noqa: S105
    tables = [length_table(one, quantity) for quantity in ("time", "memory") for one in wide]
    tables += [table for table in (step_table(analysis),) if table]
    if analysis.panels:
        tables += [exponent_table(analysis), crossover_table(analysis)]
    rates = [
        turns_table(analysis),
        efficiency_table(analysis, is_brief=True),
        *(rate_table(one) for one in analysis.panels),
    ]
    tables += [table for table in rates if table]
    tables += [overview_table(overview) for overview in analysis.overviews]
    tables += [table for group in analysis.accuracy for table in _accuracy(group, analysis)]
    sources = sources_table([group for group in analysis.accuracy if not group.metric.is_lower_better])
    return [*tables, *([sources] if sources else []), status_table(analysis)]


def _accuracy(group: AccuracyGroup, analysis: Analysis) -> list[Table]:
    found = (
        accuracy_table(group),
        pretraining_table(group),
        cost_table(group),
        equal_cost_table(group),
        trials_table(group),
        published_table(group, analysis.variants),
    )
    return [table for table in found if table is not None]


def long_tables(analysis: Analysis) -> list[Table]:
    """Return the tables for programs only: too long for a page."""
    return [score_table(analysis)] if analysis.accuracy else []


def make_tables(analysis: Analysis) -> list[Table]:
    """Return the summary and, last, the long tables: efficiency, where ceilings were measured, and all measurements."""
    rates = efficiency_table(analysis)
    long = [*([rates] if rates else []), *([measurement_table(analysis)] if analysis.panels else [])]
    return [*summary_tables(analysis), *long]
