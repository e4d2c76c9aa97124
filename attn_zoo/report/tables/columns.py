"""Kinds of columns: text, one number, a number with its interval."""

from __future__ import annotations

from collections.abc import Callable

from attn_zoo.report.tables.table import Column, Row

__all__ = ["interval_column", "number_column", "text_column"]


def text_column(heading: str, key: str, priority: float = 1) -> Column:
    """Return a column of text, to the left."""
    return Column(heading=heading, show=lambda row: str(row[key] or ""), align="left", priority=priority)


def number_column(heading: str, key: str, show: Callable[[float], str], priority: float = 1) -> Column:
    """Return a column of one number; empty where it is None."""
    return Column(
        heading=heading,
        show=lambda row: "" if row[key] is None else show(row[key]),
        sort=lambda row: row[key],
        priority=priority,
    )


def interval_column(
    heading: str,
    key: str,
    show: Callable[[float], str],
    priority: float = 1,
    *,
    show_end: Callable[[float], str] | None = None,
) -> Column:
    """Return a column of `value [low, high]`, brief `value`; the ends may be written shorter than the value."""
    end = show_end or show

    def full(row: Row) -> str:
        if row[key] is None:
            return ""
        ends = (row[f"{key}_low"], row[f"{key}_high"])
        return show(row[key]) + ("" if None in ends else f" [{end(ends[0])}, {end(ends[1])}]")

    return Column(
        heading=heading,
        show=full,
        brief=lambda row: "" if row[key] is None else show(row[key]),
        sort=lambda row: row[key],
        priority=priority,
    )
