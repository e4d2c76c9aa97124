"""Compare what two runs have of several seeds each: scores, and errors beside exact attention, paired by seed.

The same seed draws the same weights, and the same inputs, in both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, TypeVar

from attn_zoo.records import Score
from attn_zoo.report.analysis.approximation_errors import GROUP_FIELDS, ErrorGroup, ErrorPoint
from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import LEAST_SEEDS, AccuracyGroup, Difference, LabelScore, pair
from attn_zoo.report.tables.score_tables import mean_values
from attn_zoo.report.tables.table import interval_values
from attn_zoo.statistics.paired import mean_interval

ERROR_MATCH = ("label", "inputs", "seq_len", *GROUP_FIELDS)

SCORE_MATCH = (
    *("label", "start", "task", "level", "protocol", "overrides", "tuned", "is_causal", "dtype", "device", "threads"),
    *("data_parallel", "protocol_version", "data_digest", "replaces", "adapt_steps"),
)

ROUNDING = 1e-14
"""An error below is rounding in any dtype: the `rounding_error` of float64 is 0."""

_Seeds = LabelScore | ErrorPoint
_Item = TypeVar("_Item", tuple[LabelScore, AccuracyGroup], tuple[ErrorPoint, str])
_Key = TypeVar("_Key", bound=Hashable)


def _by_mechanism(every: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, _Item]:
    """Return what there is of each key: what must agree before two may be compared, for a label says less, or more.

    Of a variant whose source changed meanwhile, the latest with a number counts.
    """

    def age(item: _Item) -> tuple[bool, str]:
        return bool(item[0].values), max(record.started for record in item[0].records)

    return {own: max(same, key=age) for own, same in grouped(every, key).items()}


def _mean_beside(own: _Seeds | None, other: _Seeds | None) -> float | None:
    """Return the mean over the seeds that both have, as their difference is; where they share none, over all."""
    values = own.values if own is not None else {}
    common = values.keys() & (other.values.keys() if other is not None else ())
    return fmean(values[seed] for seed in common or values) if values else None


def _num_lost(first: _Seeds | None, second: _Seeds | None) -> int:
    return len(first.values.keys() & second.failed_seeds) if first is not None and second is not None else 0


def _one_sided(first: _Seeds | None, second: _Seeds | None) -> str:
    """Return the verdict where one of them has no number; empty where both have."""
    for side, found, other in (("a", first, "b"), ("b", second, "a")):
        if found is None or not found.values:
            return f"failed in {side}" if found is not None and found.failed_seeds else f"only in {other}"
    return ""


def compare_scores(
    a: Sequence[AccuracyGroup], b: Sequence[AccuracyGroup], allowed: set[str], limit: float
) -> list[dict[str, Any]]:
    """Return one row for each variant of each task that a side has a score of; see `Comparison`."""

    def key(item: tuple[LabelScore, AccuracyGroup]) -> tuple[Any, ...]:
        (score, group), cell = item, item[0].runs[0].cell
        setting = replace(group.setting, protocol_version=0) if "protocol" in allowed else group.setting
        return setting, cell.variant, json.dumps(cell.options, sort_keys=True), score.start

    sides = [_by_mechanism(((score, group) for group in own for score in group.scores), key) for own in (a, b)]
    rows = []
    for own in dict.fromkeys([*sides[0], *sides[1]]):
        known, group = sides[1].get(own) or sides[0][own]
        first, second = (side[own][0] if own in side else None for side in sides)
        before, after = _mean_beside(first, second), _mean_beside(second, first)
        if before is None and after is None:
            continue
        found = pair(second.runs, first.runs) if first is not None and second is not None else None
        row = {name: getattr(group.setting, name) for name in SCORE_MATCH if name not in {"label", "start"}}
        rows.append(
            row
            | {"label": known.label, "start": group.words_of(known.start), "metric": group.metric.name}
            | {"score_a": before, "score_b": after}
            | mean_values("difference", found)
            | {"num_paired": found.num_paired if found else 0, "loss_low": _least_loss(before, found, group.metric)}
            | {"num_lost": _num_lost(first, second)}
            | {"verdict": _one_sided(first, second) or _score_verdict(first, second, found, group.metric, limit)}
        )
    return rows


def _least_loss(before: float | None, found: Difference | None, metric: Metric) -> float | None:
    """Return the share of its score that b lost at least, as far as the interval knows; negative for a gain."""
    if not before or found is None or found.low is None or found.high is None:
        return None
    return min(metric.gain(0.0, found.low), metric.gain(0.0, found.high)) / abs(before)


def _score_verdict(
    first: LabelScore | None, second: LabelScore | None, found: Difference | None, metric: Metric, limit: float
) -> str:
    assert first is not None and second is not None and first.mean is not None  # noqa: PT018  both have a score
    if _scored(first) == _scored(second):  # a run beside itself, however few its seeds
        return "same"
    if found is None or found.num_paired < LEAST_SEEDS:
        return "cannot say"
    if not found.is_settled:
        is_small = found.half is not None and abs(found.mean) + found.half <= limit * abs(first.mean)
        return "same" if is_small else "cannot say"
    return "better" if metric.gain(found.mean, 0.0) > 0 else "worse"


def _scored(score: LabelScore) -> list[tuple[int, Score | None]]:
    return sorted(((run.seed, run.score) for run in score.runs), key=lambda pair: pair[0])


def compare_errors(
    a: Sequence[ErrorGroup], b: Sequence[ErrorGroup], allowed: set[str], limit: float
) -> list[dict[str, Any]]:
    """Return one row for each mechanism, kind of inputs and length that a side measured; see `Comparison`."""
    names = [name for name in GROUP_FIELDS if name != "protocol_version" or "protocol" not in allowed]

    def key(item: tuple[ErrorPoint, str]) -> tuple[Any, ...]:
        cell = item[0].record.cell
        own = cell.variant, json.dumps(cell.options, sort_keys=True), cell.inputs, cell.seq_len
        return *own, *(getattr(cell, name) for name in names)

    def points(groups: Sequence[ErrorGroup]) -> Iterable[tuple[ErrorPoint, str]]:
        curves = (curve for group in groups for panel in group.panels for curve in panel.curves)
        return ((point, curve.label) for curve in curves for point in curve.points)

    sides = [_by_mechanism(points(own), key) for own in (a, b)]
    rows = []
    for own in dict.fromkeys([*sides[0], *sides[1]]):
        point, label = sides[1].get(own) or sides[0][own]
        first, second = (side[own][0] if own in side else None for side in sides)
        before, after = _mean_beside(first, second), _mean_beside(second, first)
        if before is None and after is None:
            continue
        cell = point.record.cell
        ratio, num_paired = _ratio(first, second)
        rows.append(
            {name: getattr(cell, name) for name in GROUP_FIELDS}
            | {"label": label, "inputs": cell.inputs, "seq_len": cell.seq_len}
            | {"error_a": before, "error_b": after}
            | interval_values("ratio", *ratio)
            | {"num_paired": num_paired, "num_lost": _num_lost(first, second)}
            | {"verdict": _one_sided(first, second) or _error_verdict(first, second, ratio, num_paired, limit)}
        )
    return rows


_Ratio = tuple[float | None, float | None, float | None]


def _ratio(before: ErrorPoint | None, after: ErrorPoint | None) -> tuple[_Ratio, int]:
    """Return the geometric mean over common seeds of b's error over a's with its 95 % interval, and their number."""
    first, second = (point.values if point is not None else {} for point in (before, after))
    common = [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]
    logs = [math.log(b / a) for a, b in common if a > 0 and b > 0]
    if not logs:
        return (None, None, None), len(common)
    value, ends = math.exp(sum(logs) / len(logs)), mean_interval(logs)
    return (value, math.exp(ends[0]), math.exp(ends[1])) if ends else (value, None, None), len(logs)


def _is_rounding(point: ErrorPoint) -> bool:
    return all(found.error <= max(2 * found.rounding_error, ROUNDING) for found in point.found)


def is_within(low: float, high: float, share: float) -> bool:
    """Return whether the interval of a ratio excludes a change by more than a share."""
    return low >= 1 / (1 + share) and high <= 1 + share


def _error_verdict(
    first: ErrorPoint | None, second: ErrorPoint | None, ratio: _Ratio, num_paired: int, limit: float
) -> str:
    assert first is not None and second is not None  # noqa: PT018  both have an error
    value, low, high = ratio
    if first.value == second.value or (_is_rounding(first) and _is_rounding(second)):
        return "same"
    if value is None or low is None or high is None or num_paired < LEAST_SEEDS:
        return "cannot say"
    if is_within(low, high, limit):
        return "same"
    if low <= 1.0 <= high:
        return "cannot say"
    return "worse" if low > 1.0 else "better"
