"""All tables of a report, in the order in which they are read."""

from __future__ import annotations

from attn_zoo.report.analysis import Analysis
from attn_zoo.report.growth_tables import crossover_table, exponent_table
from attn_zoo.report.length_tables import length_table, measurement_table
from attn_zoo.report.outcome_tables import accuracy_table, status_table
from attn_zoo.report.table import Table

__all__ = ["make_tables", "summary_tables"]


def summary_tables(analysis: Analysis) -> list[Table]:
    """Return the tables for people: wide ones, growth, crossovers, accuracy, and what did not run."""
    tables = [length_table(one, quantity) for quantity in ("time", "memory") for one in analysis.panels]
    if analysis.panels:
        tables += [exponent_table(analysis), crossover_table(analysis)]
    tables += [accuracy_table(group) for group in analysis.accuracy]
    return [*tables, status_table(analysis)]


def make_tables(analysis: Analysis) -> list[Table]:
    """Return the summary and, last, the long table of all measurements."""
    return [*summary_tables(analysis), *([measurement_table(analysis)] if analysis.panels else [])]
