"""What became of each cell that was to be timed in one run, for whoever compares runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from attn_zoo.records import Cell
from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.observations import Observation, Results, distinct_labels
from attn_zoo.report.analysis.series import Point
from attn_zoo.report.wording import PANEL_FIELDS
from attn_zoo.statistics.pooling import pool_records

MATCH = ("label", "options", "overrides", "seq_len", *(name for name in PANEL_FIELDS if name != "environment"))
"""What must agree before two times may be compared, beside the environment."""

SIDE = ("median_ms", "low_ms", "high_ms", "num_processes", "flags", "doubts", "kernel", "peak_bytes")
"""What a row says of one run: of a cell that was not timed, None throughout."""


def timed_cells(results: Results, allowed: set[str]) -> dict[tuple[Any, ...], Observation]:
    """Return what a run timed or failed at: several seeds or repeats of a cell are one.

    Of a variant whose source changed meanwhile, the latest counts.
    """
    timed = (one for one in results.observations if one.is_timing)
    found = {}
    for key, every in grouped(timed, lambda one: _identity(one, allowed)).items():
        able = [one for one in every if one.is_timed] or every
        last = max(able, key=lambda one: one.record.started)
        same = [one for one in able if _version(one) == _version(last)]
        record = pool_records([one.record for one in same]) if last.is_timed else last.record
        found[key] = replace(last, record=record)
    labels = distinct_labels([one.cell for one in found.values()], has_versions=False)
    return {key: replace(one, label=label) for (key, one), label in zip(found.items(), labels, strict=True)}


def side_of(one: Observation) -> dict[str, Any]:
    """Return what a row says of one run: see `SIDE`."""
    if not one.is_timed:
        return dict.fromkeys(SIDE)
    point = Point(one.record)
    return {name: getattr(point.memory if name == "peak_bytes" else point, name) for name in SIDE}


def _version(one: Observation) -> tuple[str, str]:
    return one.cell.variant_digest, one.environment


def setting_of(cell: Cell, names: Iterable[str] = MATCH) -> dict[str, Any]:
    """Return fields of a cell by their names in tables; of what is no field of cells, None. Mappings become JSON."""
    said = {name: getattr(cell, "pass_" if name == "pass" else name, None) for name in names}
    return {
        name: json.dumps(value, sort_keys=True) if isinstance(value, dict) else value for name, value in said.items()
    }


def _identity(one: Observation, allowed: set[str]) -> tuple[Any, ...]:
    """Return what must agree before two times may be compared."""
    said = setting_of(one.cell) | {"label": one.cell.variant, "environment": one.environment}
    ignored = {"protocol_version"} if "protocol" in allowed else set()
    ignored |= {"environment"} if "environment" in allowed else set()
    return tuple(value for name, value in sorted(said.items()) if name not in ignored)
