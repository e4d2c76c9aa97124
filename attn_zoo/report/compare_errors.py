"""Compare the errors beside exact attention that two runs measured: the same seeds draw the same inputs in both."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from attn_zoo.records import Record
from attn_zoo.report.analysis.approximation_errors import GROUP_FIELDS, ErrorGroup, ErrorPoint
from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.observations import NOT_RUN
from attn_zoo.report.analysis.scores import LEAST_SEEDS
from attn_zoo.report.tables.table import interval_values
from attn_zoo.statistics.paired import mean_interval

ROUNDING = 1e-14
"""An error below is rounding in any dtype: the `rounding_error` of float64 is 0."""

_Key = tuple[Any, ...]


def compare_errors(
    a: Sequence[ErrorGroup], b: Sequence[ErrorGroup], allowed: set[str], limit: float
) -> list[dict[str, Any]]:
    """Return one row for each mechanism, kind of inputs and length that a side measured; see `Comparison`."""
    sides = _by_mechanism(a, allowed), _by_mechanism(b, allowed)
    rows = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        first, second = (side.get(key) for side in sides)
        known = second or first
        assert known is not None
        label, point = known
        before, after = (side[1] if side else None for side in (first, second))
        if not any(each is not None and each.value is not None for each in (before, after)):
            continue
        cell = point.records[0].cell
        ratio, num_paired = _ratio(before, after)
        error_a, error_b = _shown(before, after), _shown(after, before)
        rows.append(
            {name: getattr(cell, name) for name in GROUP_FIELDS}
            | {"label": label, "inputs": cell.inputs, "seq_len": cell.seq_len}
            | {"error_a": error_a, "error_b": error_b}
            | interval_values("ratio", *ratio)
            | {"num_paired": num_paired, "num_lost": len(_by_seed(before).keys() & _failed_seeds(after))}
            | {"verdict": _verdict(before, after, ratio, num_paired, limit)}
        )
    return rows


def _by_mechanism(groups: Sequence[ErrorGroup], allowed: set[str]) -> dict[_Key, tuple[str, ErrorPoint]]:
    """Return label and point by what must agree before two errors may be compared: a label says less, or more.

    Of a variant whose source changed meanwhile, the latest with an error counts.
    """
    names = [name for name in GROUP_FIELDS if name != "protocol_version" or "protocol" not in allowed]

    def key(pair: tuple[str, ErrorPoint]) -> _Key:
        cell = pair[1].records[0].cell
        own = cell.variant, json.dumps(cell.options, sort_keys=True), cell.inputs, cell.seq_len
        return *own, *(getattr(cell, name) for name in names)

    panels = [panel for group in groups for panel in group.panels]
    every = [(curve.label, point) for panel in panels for curve in panel.curves for point in curve.points]
    return {own: max(same, key=_age) for own, same in grouped(every, key).items()}


def _age(pair: tuple[str, ErrorPoint]) -> tuple[bool, str]:
    return pair[1].value is not None, max(record.started for record in pair[1].records)


def _by_seed(point: ErrorPoint | None) -> dict[int, Record]:
    records = point.records if point is not None else ()
    return {record.cell.seed: record for record in records if record.approximation is not None}


def _failed_seeds(point: ErrorPoint | None) -> set[int]:
    """Return the seeds that were run and gave no error."""
    records = point.records if point is not None else ()
    return {one.cell.seed for one in records if one.status != NOT_RUN} - _by_seed(point).keys()


def _shown(point: ErrorPoint | None, other: ErrorPoint | None) -> float | None:
    """Return the mean over the seeds that both have, as the ratio is over these; where they share none, over all."""
    own, common = _by_seed(point), _by_seed(point).keys() & _by_seed(other).keys()
    found = [own[seed].approximation for seed in sorted(common or own)]
    return fmean(each.error for each in found if each is not None) if found else None


_Ratio = tuple[float | None, float | None, float | None]


def _ratio(before: ErrorPoint | None, after: ErrorPoint | None) -> tuple[_Ratio, int]:
    """Return the geometric mean over common seeds of b's error over a's with its 95 % interval, and their number."""
    first, second = _by_seed(before), _by_seed(after)
    common = [(first[seed].approximation, second[seed].approximation) for seed in sorted(first.keys() & second.keys())]
    logs = [math.log(b.error / a.error) for a, b in common if a and b and a.error > 0 and b.error > 0]
    if not logs:
        return (None, None, None), len(common)
    value, ends = math.exp(sum(logs) / len(logs)), mean_interval(logs)
    return (value, math.exp(ends[0]), math.exp(ends[1])) if ends else (value, None, None), len(logs)


def _is_rounding(point: ErrorPoint) -> bool:
    return all(found.error <= max(2 * found.rounding_error, ROUNDING) for found in point.found)


def _verdict(before: ErrorPoint | None, after: ErrorPoint | None, ratio: _Ratio, num_paired: int, limit: float) -> str:
    if before is None or after is None:
        return "only in a" if after is None else "only in b"
    if before.value is None:
        return "failed in a" if _failed_seeds(before) else "only in b"
    if after.value is None:
        return "failed in b" if _failed_seeds(after) else "only in a"
    value, low, high = ratio
    if before.value == after.value or (_is_rounding(before) and _is_rounding(after)):
        return "same"
    if value is None or low is None or high is None or num_paired < LEAST_SEEDS:
        return "cannot say"
    if low >= 1 / (1 + limit) and high <= 1 + limit:
        return "same"
    if low <= 1.0 <= high:
        return "cannot say"
    return "worse" if low > 1.0 else "better"
