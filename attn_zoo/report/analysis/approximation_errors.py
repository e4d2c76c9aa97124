"""Distances from exact attention: a curve over lengths for each mechanism on each kind of inputs, means over seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import get_args

from attn_zoo.records import Approximation, Cell, InputKind, Record
from attn_zoo.report.analysis.grouping import grouped, varying
from attn_zoo.report.analysis.observations import NOT_RUN, Observation, Results
from attn_zoo.report.analysis.scores import mean_with_interval
from attn_zoo.report.wording import missing_word, setting_words
from attn_zoo.units import slug, unique_name

GROUP_FIELDS = (
    *("device", "dtype", "is_causal", "batch_size", "num_heads", "num_kv_heads", "head_dim", "protocol_version"),
)
"""Everything but mechanism, length, inputs and seed that decides an error."""

NEARER = 0.05
"""Share by which an error has to be below that of the mean of the values, or attention was of no use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorPoint:
    """The error at one length.

    Args:
        seq_len: tokens.
        value: mean over seeds; None where none gave a number.
        low: lower end of the 95 % t-interval; None for fewer than two seeds.
        high: upper end, likewise.
        records: of all seeds.
    """

    seq_len: int
    value: float | None
    low: float | None
    high: float | None
    records: tuple[Record, ...]

    @property
    def found(self) -> list[Approximation]:
        """What was measured, seed by seed."""
        return [record.approximation for record in self.records if record.approximation is not None]

    @property
    def values(self) -> dict[int, float]:
        """Errors by seed; only runs that finished."""
        return {one.cell.seed: one.approximation.error for one in self.records if one.approximation is not None}

    @property
    def failed_seeds(self) -> frozenset[int]:
        """Seeds that were run and gave no error."""
        return frozenset(one.cell.seed for one in self.records if one.status != NOT_RUN).difference(self.values)

    @property
    def record(self) -> Record:
        """That of the first seed with a number, which says what ran; of the first of all where none has one."""
        return next((record for record in self.records if record.approximation is not None), self.records[0])

    @property
    def word(self) -> str:
        """What a table says where there is no number."""
        return missing_word(next(record for record in self.records if record.approximation is None))


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorCurve:
    """One mechanism on one kind of inputs; `points` ascend."""

    label: str
    variant: str
    points: tuple[ErrorPoint, ...]
    is_exact: bool

    @property
    def measured(self) -> tuple[ErrorPoint, ...]:
        """The points with a number."""
        return tuple(point for point in self.points if point.value is not None)

    @property
    def has_budget(self) -> bool:
        """Whether options of the variant become exact where their budget grows."""
        return any(found.has_budget for point in self.points for found in point.found)

    @property
    def family(self) -> tuple[str, str, str]:
        """Equal for sets of options of one variant that differ in numbers only, which are its budget."""
        cell = self.points[0].records[0].cell
        words = {name: value for name, value in cell.options.items() if isinstance(value, str)}
        return self.variant, cell.variant_digest, str(sorted(words.items()))

    def at(self, seq_len: int) -> ErrorPoint | None:
        """Return the point of a length."""
        return next((point for point in self.points if point.seq_len == seq_len), None)

    def value(self, seq_len: int) -> float | None:
        """Return the error at a length."""
        point = self.at(seq_len)
        return point.value if point is not None else None

    def flops(self, seq_len: int) -> int | None:
        """Return the FLOPs of one forward at a length, by the variant's formula."""
        point = self.at(seq_len)
        return point.record.flops if point is not None else None


@dataclass(frozen=True, kw_only=True)
class ErrorPanel:
    """All mechanisms on one kind of inputs, by label."""

    inputs: InputKind
    curves: tuple[ErrorCurve, ...]

    @cached_property
    def lengths(self) -> list[int]:
        """The lengths that were measured, ascending."""
        return sorted({point.seq_len for curve in self.curves for point in curve.measured})

    def _mean(self, name: str) -> dict[int, float]:
        every = grouped((point for curve in self.curves for point in curve.measured), lambda point: point.seq_len)
        return {size: fmean(getattr(one, name) for each in every[size] for one in each.found) for size in self.lengths}

    @cached_property
    def mean_error(self) -> dict[int, float]:
        """The error of the mean of the values, by length."""
        return self._mean("mean_error")

    @property
    def floor(self) -> float:
        """The error of the mean of the values at `front_len`."""
        return self.mean_error[self.front_len]

    @cached_property
    def num_effective_keys(self) -> dict[int, float]:
        """Over how many keys the exact weights of a row spread, by length."""
        return self._mean("num_effective_keys")

    @cached_property
    def front_len(self) -> int:
        """The longest length that half of the approximations have, which ranks them; 0 where nothing was measured."""
        judged = [curve for curve in self._several if curve.measured and not curve.is_exact]
        counts = Counter(point.seq_len for curve in judged for point in curve.measured)
        most = [length for length, count in counts.items() if 2 * count >= len(judged)]
        return max(most or counts or self.lengths, default=0)

    @property
    def _several(self) -> Sequence[ErrorCurve]:
        return [curve for curve in self.curves if len(curve.points) > 1] or self.curves

    @cached_property
    def over_lengths(self) -> list[ErrorCurve]:
        """The curves of more than one length, or all where none has; exact ones first, then the nearest at `front_len`.

        What is exact is there however many it has: the others stand beside it.
        """
        every = [curve for curve in self.curves if curve.is_exact or curve in self._several]

        def place(curve: ErrorCurve) -> tuple[bool, float, str]:
            value = curve.value(self.front_len)
            return not curve.is_exact, math.inf if value is None else value, curve.label

        return sorted(every, key=place)

    @property
    def ranked(self) -> list[ErrorCurve]:
        """Those of `over_lengths` that are not exact and were measured at `front_len`, the nearest first."""
        return [each for each in self.over_lengths if not each.is_exact and each.value(self.front_len) is not None]

    @property
    def absent(self) -> list[str]:
        """Labels of those that were measured, but not at `front_len`."""
        absent = [each for each in self.over_lengths if each.measured and each.value(self.front_len) is None]
        return [curve.label for curve in absent if not curve.is_exact]

    @property
    def num_seeds(self) -> int:
        """The fewest that one of `nearest` has, or of `ranked` where none is; 0 where that is empty too."""
        named = self.nearest or self.ranked
        points = [point for curve in named if (point := curve.at(self.front_len)) is not None]
        return min((len(point.found) for point in points), default=0)

    def _ends(self, curve: ErrorCurve) -> tuple[float, float]:
        """Return the interval of a ranked curve at `front_len`; of one seed its error alone."""
        point = curve.at(self.front_len)
        assert point is not None and point.value is not None  # noqa: PT018  else it has no rank
        return (point.value, point.value) if point.low is None or point.high is None else (point.low, point.high)

    @property
    def level(self) -> list[ErrorCurve]:
        """The nearest of `ranked`, and those that the intervals do not tell from it."""
        return [curve for curve in self.ranked if self._ends(curve)[0] <= self._ends(self.ranked[0])[1]]

    @property
    def useless(self) -> list[ErrorCurve]:
        """Those of `ranked` whose whole interval is not nearer than the mean of the values by `NEARER`."""
        least = (1 - NEARER) * self.floor if self.ranked else 0.0
        return [curve for curve in self.ranked if self._ends(curve)[0] >= least]

    @property
    def nearest(self) -> list[ErrorCurve]:
        """The first of `level`, and those that are nearer than the mean of the values; none where the first is useless.

        Of few seeds intervals are so wide that they hold curves which have found nothing.
        """
        useless = self.useless
        able = [curve for curve in self.level if curve not in useless]
        beside = [curve for curve in able[1:] if (curve.value(self.front_len) or 0.0) < self.floor]
        return [*able[:1], *beside] if self.ranked[:1] == able[:1] else []


@dataclass(frozen=True, kw_only=True)
class ErrorGroup:
    """Mechanisms that were compared alike, on several kinds of inputs.

    Args:
        name: for file names.
        subtitle: what all cells share.
        apart: what tells them from the other groups; empty for the only one.
        panels: one for each kind of inputs.
    """

    name: str
    subtitle: str
    apart: str
    panels: tuple[ErrorPanel, ...]

    @cached_property
    def ranked(self) -> list[str]:
        """The labels of `ErrorPanel.ranked`, the nearest first: by the mean over kinds of errors at `front_len`.

        Each counts as a share of the error of the mean of the values, and no more than that: what has found nothing may
        be off by any factor.
        """
        shares: dict[str, list[float]] = {}
        panels = [panel for panel in self.panels if panel.ranked]
        for panel in panels:
            for curve in panel.ranked:
                value = curve.value(panel.front_len)
                assert value is not None  # else it has no rank
                mean = panel.floor  # 0 of one token, which leaves nothing to find
                shares.setdefault(curve.label, []).append(value / mean if value < mean else 1.0)
        return sorted(shares, key=lambda label: (sum(shares[label]) + len(panels) - len(shares[label]), label))

    @cached_property
    def budget_len(self) -> int | None:
        """The length at which most families were measured with several budgets; None for none with two."""
        counts = Counter(
            length
            for panel in self.panels
            for own in grouped(panel.curves, lambda curve: curve.family).values()
            for length in panel.lengths
            if sum(each.value(length) is not None for each in own) > 1
        )
        return max(counts, key=lambda length: (counts[length], length), default=None)


def make_error_groups(results: Results) -> list[ErrorGroup]:
    """Return one group for each setting, in a stable order."""
    every = [one for one in (*results.observations, *results.left) if one.cell.inputs]
    groups, names = grouped(every, lambda one: _setting(one.cell)), set[str]()
    settings = {key: dict(zip(GROUP_FIELDS, key, strict=True)) for key in sorted(groups, key=repr)}
    differing = varying(GROUP_FIELDS, settings.values())
    found = []
    for key, setting in settings.items():
        usual = {"num_kv_heads"} if setting["num_kv_heads"] == setting["num_heads"] else set()
        words = setting_words(setting, {*GROUP_FIELDS} - usual - ({"protocol_version"} - differing))
        short = [str(setting[name]) for name in ("device", "dtype") if name in differing]
        short += ["causal" if setting["is_causal"] else "bidirectional"] if "is_causal" in differing else []
        device = str(setting["device"]).upper()
        apart = [*([device] if "device" in differing else []), *setting_words(setting, differing - usual)]
        by_inputs = grouped(groups[key], lambda one: one.cell.inputs)
        kinds = [kind for kind in get_args(InputKind) if kind in by_inputs]
        found.append(
            ErrorGroup(
                name=unique_name(slug("error", *short), names),
                subtitle=", ".join([device, *words]),
                apart=", ".join(apart),
                panels=tuple(ErrorPanel(inputs=kind, curves=_curves(by_inputs[kind], results)) for kind in kinds),
            )
        )
    return found


def _setting(cell: Cell) -> tuple[object, ...]:
    return tuple(getattr(cell, name) for name in GROUP_FIELDS)


def _curves(members: Sequence[Observation], results: Results) -> tuple[ErrorCurve, ...]:
    by_label = grouped(members, lambda one: one.label)
    return tuple(
        ErrorCurve(
            label=label,
            variant=by_label[label][0].cell.variant,
            points=tuple(_point(seq_len, own) for seq_len, own in sorted(grouped(by_label[label], _length).items())),
            is_exact=results.claim(by_label[label][0].cell.variant).is_exact,
        )
        for label in sorted(by_label)
    )


def _length(one: Observation) -> int:
    return one.cell.seq_len or 0


def _point(seq_len: int, members: Sequence[Observation]) -> ErrorPoint:
    latest = {one.cell.seed: one.record for one in sorted(members, key=lambda one: one.record.started)}
    records = tuple(latest[seed] for seed in sorted(latest))
    value, low, high = mean_with_interval(
        [record.approximation.error for record in records if record.approximation is not None]
    )
    return ErrorPoint(
        seq_len=seq_len, value=value, low=None if low is None else max(low, 0.0), high=high, records=records
    )
