"""Group series into panels: one figure of each kind, with growth, crossovers and efficiency."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from attn_zoo.metadata import ROUTING_SEES_FUTURE
from attn_zoo.records import Ceilings, Cell
from attn_zoo.report.analysis.efficiency import Efficiency, efficiencies
from attn_zoo.report.analysis.fits import Crossing, Growth, crossings, growth
from attn_zoo.report.analysis.grouping import grouped, varying
from attn_zoo.report.analysis.observations import Observation, Results
from attn_zoo.report.analysis.series import Point, Series, make_series, shown_doubts
from attn_zoo.report.analysis.winners import Rival, SpeedUp, Winner, fastest_of, is_paired, winners
from attn_zoo.report.wording import PANEL_FIELDS, PASS_TITLES, panel_name, panel_subtitle, panel_title
from attn_zoo.units import unique_name


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Series that differ in nothing but the mechanism; what is fitted to them is fitted when it is asked for.

    Args:
        title: what is timed, such as `"forward + backward"`.
        subtitle: everything else that all series share, and the caveats.
        caveats: what a reader must know of single causal series, one half-sentence each.
        name: for file names; unique among the panels of one report.
        series: ordered by label.
        pass_: what is timed, as recorded.
        ceilings: of the machine, or None where the run has not measured them.
        members: the observations, and planned cells that have none.
    """

    title: str
    subtitle: str
    caveats: tuple[str, ...]
    name: str
    series: tuple[Series, ...]
    pass_: str
    ceilings: Ceilings | None
    members: tuple[Observation, ...]

    @cached_property
    def time(self) -> dict[str, Growth]:
        """Growth of time, by label."""
        return {each.label: growth(each, "time") for each in self.series}

    @cached_property
    def memory(self) -> dict[str, Growth]:
        """Growth of peak memory, by label."""
        return {each.label: growth(each, "peak_bytes") for each in self.series}

    @cached_property
    def crossings(self) -> list[Crossing]:
        """In time, against the exact series timed in turns with it all along, else the fastest (and each exact one)."""
        return crossings(self.series, self.baseline, "time", self._pairs)

    def _pairs(self, series: Series, exact: Series) -> dict[int, SpeedUp]:
        """Return two curves beside each other, timed in turns where they were.

        Beside the fastest one what was timed in turns counts only if all of it was, with one exact variant: else the
        curves would cross where it is another one that is compared with.
        """
        if exact is not self.baseline:
            return self._beside(series, dict.fromkeys(self.lengths, exact))
        found = self._beside(series, {})
        if not any(one.is_in_turns for one in found.values()):
            return found
        if all(one.is_in_turns for one in found.values()) and len({one.against for one in found.values()}) == 1:
            return found
        return self._beside(series, self._fastest_exact)

    def _beside(self, series: Series, over: Mapping[int, Series]) -> dict[int, SpeedUp]:
        lengths = [point.seq_len for point in series.points]
        found = {length: self.speed_up(series, length, over.get(length)) for length in lengths}
        return {length: one for length, one in found.items() if one is not None}

    @cached_property
    def device_crossings(self) -> list[Crossing]:
        """In the time of the GPU alone, where that was measured."""
        return crossings(self.series, self.baseline, "device")

    @cached_property
    def memory_crossings(self) -> list[Crossing]:
        """In peak memory."""
        return crossings(self.series, self.baseline, "peak_bytes")

    @cached_property
    def winners(self) -> list[Winner]:
        """The fastest of each length."""
        return winners(self.series)

    @cached_property
    def efficiency(self) -> dict[str, list[Efficiency]]:
        """Rates beside the ceilings of the machine, by label; empty where the run has not measured those."""
        return efficiencies(self.series, self.speed_up, self.pass_, self.ceilings)

    @cached_property
    def points(self) -> list[Point]:
        """All measured lengths of all series."""
        return [point for series in self.series for point in series.points]

    @cached_property
    def shown_doubts(self) -> frozenset[str]:
        """The doubts of its points that get a mark beside their number."""
        return shown_doubts(self.points)

    @cached_property
    def lengths(self) -> list[int]:
        """All lengths, measured or failed, ascending."""
        return sorted({length for series in self.series for length in series.outcomes})

    @cached_property
    def judged(self) -> frozenset[str]:
        """Labels of the series that may be called the fastest."""
        return frozenset(series.label for series in self.series if series.is_judged)

    @cached_property
    def ranked(self) -> list[Series]:
        """The fastest at the longest length first; who is not judged comes last."""
        return self.ranked_by(lambda point: point.median_ms)

    def ranked_by(self, cost: Callable[[Point], float | None]) -> list[Series]:
        """Return the series with the least cost at the longest length first; who is not judged comes last."""

        def standing(series: Series) -> tuple[float, ...]:
            costs = {point.seq_len: found for point in series.points if (found := cost(point)) is not None}
            return not series.is_judged, *(costs.get(length, math.inf) for length in reversed(self.lengths))

        return sorted(self.series, key=standing)

    @cached_property
    def _fastest_exact(self) -> dict[int, Series]:
        """Who is the fastest of the exact ones, by length."""
        exact = (one for one in self.series if one.is_exact and not one.is_simulated)
        rivals = grouped(((point, one) for one in exact for point in one.points), lambda rival: rival[0].seq_len)
        return {length: min(rivals[length], key=lambda rival: rival[0].median_ms)[1] for length in sorted(rivals)}

    @cached_property
    def exact(self) -> dict[int, Point]:
        """The fastest exact point of each length."""
        every = ((length, point) for length, one in self._fastest_exact.items() for point in one.points)
        return {length: point for length, point in every if point.seq_len == length}

    @cached_property
    def baseline(self) -> Series | None:
        """These points as one series, named after those whose they are; None where the run has no exact one."""
        if not self.exact:
            return None
        first, *others = self._fastest_exact.values()
        label = " / ".join(dict.fromkeys(one.label for one in (first, *others)))
        return replace(first, label=label, points=tuple(self.exact.values()), failures={})

    def is_baseline(self, label: str) -> bool:
        """Whether the fastest exact series has this label, so that words need not name what is compared with."""
        return self.baseline is not None and label == self.baseline.label

    @cached_property
    def turns(self) -> tuple[Observation, ...]:
        """What was timed in turns with others: not pooled, because samples are of their rounds."""
        return tuple(one for one in self.members if one.is_timed and one.record.bundle)

    @cached_property
    def bundles(self) -> dict[tuple[int, str], list[Rival]]:
        """What was timed in turns, by length and name of the bundle."""
        waiting = {series.label: series.waiting for series in self.series}
        every = [(Point(turn.record, turn.cell.seq_len in waiting[turn.label]), turn.label) for turn in self.turns]
        return dict(sorted(grouped(every, lambda rival: (rival[0].seq_len, rival[0].record.bundle)).items()))

    def speed_up(self, series: Series, length: int, over: Series | None = None) -> SpeedUp | None:
        """Return a variant beside exact attention; None for an exact one, and where either was not measured.

        It is compared with `over`, by default an exact one that was timed in turns with it, else the fastest.
        """
        return None if series.is_exact else self.beside_exact(series, length, over)

    def beside_exact(self, series: Series, length: int, over: Series | None = None) -> SpeedUp | None:
        """Return what `speed_up` does, and of an exact series itself beside the fastest one of that length."""
        over = over or (self._fastest_exact.get(length) if series.is_exact else None)
        point, baseline = series.outcomes.get(length), over or self.baseline
        if not isinstance(point, Point):
            return None
        rivals = {one.label for one in self.series if one.is_exact and not one.is_simulated and over in (None, one)}
        pairs = []
        for members in (turns for (seq_len, _), turns in self.bundles.items() if seq_len == length):
            for own in (turn for turn, label in members if label == series.label):
                able = [(turn, label) for turn, label in members if label in rivals and is_paired(turn, own)]
                pairs += [SpeedUp(label, exact, own) for exact, label in able and [fastest_of(able)]]
        if pairs:
            return max(pairs, key=lambda one: len(one.point.timing.samples_ms))
        fastest = baseline.outcomes.get(length) if baseline is not None else None
        return SpeedUp(baseline.label, fastest, point) if baseline is not None and isinstance(fastest, Point) else None

    @cached_property
    def peak_len(self) -> int:
        """The longest length at which the peak memory of a curve is known; the longest of all where none is."""
        return max((point.seq_len for point in self.points if point.memory.peak_bytes), default=self.lengths[-1])

    @property
    def peaks(self) -> dict[str, int]:
        """Peak memory of each curve at `peak_len`, by label."""
        points = ((series.label, series.outcomes.get(self.peak_len)) for series in self.series)
        longest = [(label, point.memory.peak_bytes) for label, point in points if isinstance(point, Point)]
        return {label: peak for label, peak in longest if peak}

    def crossing(self, label: str, *, is_device: bool = False) -> Crossing | None:
        """Return where `label` gets faster, as calls or on the GPU alone, than what its speed-up is over, if known."""
        every = self.device_crossings if is_device else self.crossings
        return next((one for one in every if one.is_main and one.label == label), None)


def measured_size(panel: Panel) -> tuple[int, int]:
    """Return how much a panel says: measured curves, then points."""
    return sum(bool(series.points) for series in panel.series), len(panel.points)


def lead_panel(panels: Sequence[Panel]) -> Panel | None:
    """Return the panel that says most, or None where nothing was measured."""
    return max((panel for panel in panels if panel.points), key=measured_size, default=None)


def _setting(cell: Cell, environment: str = "") -> tuple[Any, ...] | None:
    """Return the values of `PANEL_FIELDS` of a cell; None for one that is of no panel."""
    if cell.kind == "accuracy" or cell.inputs or cell.seq_len is None:
        return None
    given = {"environment": environment, "pass": cell.pass_ or "", "protocol": cell.protocol or ""}
    return tuple(given[name] if name in given else getattr(cell, name) for name in PANEL_FIELDS)


def choose_panels(cells: Iterable[Cell], most: int) -> Callable[[Cell], bool]:
    """Return what tells whether a cell is of one of the panels with most curves, so many of them, or of no panel."""
    panels = grouped(cells, _setting)
    panels.pop(None, None)

    def size(setting: tuple[Any, ...] | None) -> tuple[int, int]:
        return len({cell.label or cell.variant for cell in panels[setting]}), len(panels[setting])

    chosen = {None, *sorted(panels, key=size, reverse=True)[:most]}
    return lambda cell: _setting(cell) in chosen


def make_panels(results: Results) -> list[Panel]:
    """Return the panels of all that was to be timed, in a stable order."""
    every = (*results.observations, *results.left)
    found = grouped(every, lambda one: _setting(one.cell, one.environment))
    groups = {setting: members for setting, members in found.items() if setting is not None}
    passes = list(PASS_TITLES)

    def order(key: tuple[Any, ...]) -> tuple[Any, ...]:
        device, pass_ = (key[PANEL_FIELDS.index(name)] for name in ("device", "pass"))
        nulls_last = tuple((value is None, "" if value is None else value) for value in key)
        return device, passes.index(pass_) if pass_ in passes else len(passes), nulls_last

    settings = {key: dict(zip(PANEL_FIELDS, key, strict=True)) for key in sorted(groups, key=order)}
    by_pass = grouped(settings.values(), lambda setting: setting["pass"])
    differing = {pass_: varying(PANEL_FIELDS, members) for pass_, members in by_pass.items()}
    names: set[str] = set()
    panels = []
    for key, setting in settings.items():
        apart = differing[setting["pass"]]
        name = unique_name(panel_name(setting, results.environments, apart), names)
        panels.append(_panel(setting, groups[key], name, results, apart))
    return panels


def _panel(
    setting: Mapping[str, Any], members: Sequence[Observation], name: str, results: Results, apart: set[str]
) -> Panel:
    by_label = grouped(members, lambda one: one.label)
    series = [make_series(label, by_label[label], setting["pass"], results) for label in sorted(by_label)]
    caveats = [
        f"{each.label}: {ROUTING_SEES_FUTURE}"
        for each in series
        if setting["is_causal"] and each.points and each.claim.routing_sees_future
    ]
    return Panel(
        title=panel_title(setting, results.environments, apart),
        subtitle="; ".join([panel_subtitle(setting, results.environments, apart), *caveats]),
        caveats=tuple(caveats),
        name=name,
        series=tuple(series),
        pass_=setting["pass"],
        ceilings=results.ceilings(*(setting[name] for name in ("environment", "device", "dtype", "threads"))),
        members=tuple(members),
    )
