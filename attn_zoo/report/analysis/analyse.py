"""Everything computed once from the records, for tables, figures and pages alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from attn_zoo.folder import Claim
from attn_zoo.report.analysis.approximation_errors import ErrorGroup, make_error_groups
from attn_zoo.report.analysis.observations import Results, read_results
from attn_zoo.report.analysis.panels import Panel, choose_panels, make_panels, measured_size
from attn_zoo.report.analysis.scores import AccuracyGroup, make_accuracy_groups
from attn_zoo.report.analysis.series import Point, shown_doubts
from attn_zoo.report.analysis.task_means import Overview, make_overviews
from attn_zoo.units import human_length

MOST_PANELS, FEW_PANELS = 24, 6
"""A report of more panels than the first number has figures, and tables in its page, of the second only: four figures a
panel take a second and most of a MiB each, and nobody looks at a hundred."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Analysis:
    """All results, grouped and fitted.

    Args:
        results: the records.
        panels: scaling.
        errors: distances from exact attention.
        accuracy: training.
        overviews: of several tasks trained alike.
    """

    results: Results
    panels: tuple[Panel, ...]
    errors: tuple[ErrorGroup, ...]
    accuracy: tuple[AccuracyGroup, ...]
    overviews: tuple[Overview, ...]

    @property
    def title(self) -> str:
        """Names of the runs."""
        return ", ".join(dict.fromkeys(run.name for run in self.results.runs))

    @cached_property
    def variants(self) -> dict[str, str]:
        """Registered name of the variant behind each label."""
        return {one.label: one.cell.variant for one in (*self.results.observations, *self.results.left)}

    @cached_property
    def claims(self) -> dict[str, Claim]:
        """What the variant behind each label claims."""
        return {label: self.results.claim(variant) for label, variant in self.variants.items()}

    @property
    def controls(self) -> frozenset[str]:
        """Labels of variants that do without attention, which are never called the best."""
        return frozenset(label for label, claim in self.claims.items() if claim.is_control)

    @property
    def padded(self) -> frozenset[str]:
        """Labels of variants whose results may depend on how far a batch is padded."""
        return frozenset(label for label, claim in self.claims.items() if claim.depends_on_padding)

    @cached_property
    def shown(self) -> tuple[Panel, ...]:
        """The panels that a person reads at once, in order: all, or `FEW_PANELS` of those that say most."""
        if len(self.panels) <= MOST_PANELS:
            return self.panels
        ranked = sorted(self.panels, key=measured_size, reverse=True)
        chosen = {panel.name for panel in ranked[:FEW_PANELS]}
        return tuple(panel for panel in self.panels if panel.name in chosen)

    @cached_property
    def points(self) -> list[Point]:
        """All that was timed, in all panels."""
        return [point for panel in self.panels for point in panel.points]

    @cached_property
    def shown_doubts(self) -> frozenset[str]:
        """The doubts that get a mark in tables of all panels."""
        return shown_doubts(self.points)

    @property
    def caveats(self) -> list[str]:
        """What a reader must know of single variants in the panels, a sentence each."""
        return list(dict.fromkeys(f"Causal {caveat}." for panel in self.panels for caveat in panel.caveats))


def analyse(dirs: Iterable[str | Path], *, is_brief: bool = False) -> Analysis:
    """Read results folders and group what they say; if brief, of very many records in one those of a few panels.

    Raises:
        ConfigError: a directory is not a results folder.
    """
    return analysis_of(read_results(dirs, partial(choose_panels, most=FEW_PANELS) if is_brief else None))


def analysis_of(results: Results) -> Analysis:
    """Group what results say that were read already; see `analyse`."""
    panels = tuple(make_panels(results))
    groups = tuple(make_accuracy_groups(results))
    doubts = tuple(f"{group.title}: {warning}" for group in groups for warning in group.warnings)
    doubts += tuple(text for panel in panels for text in _impossible(panel))
    if len(panels) > MOST_PANELS:
        beside = "figures, and tables on the page, are of those with most curves; the folder tables has all"
        doubts += (f"{FEW_PANELS} of {len(panels)} panels are shown: {beside}",)
    for run in results.runs:
        if run.num_unread:
            read = f"{run.name}: {len(run.records):,} of {len(run.records) + run.num_unread:,} records were read"
            beside = "attn-zoo status says what failed elsewhere, attn-zoo export has every number"
            doubts += (f"{read}, those of the {FEW_PANELS} panels with most curves; {beside}",)
    return Analysis(
        results=replace(results, warnings=(*results.warnings, *doubts)),
        panels=panels,
        errors=tuple(make_error_groups(results)),
        accuracy=groups,
        overviews=tuple(make_overviews(groups)),
    )


def _impossible(panel: Panel) -> list[str]:
    """Return a sentence for each variant that is faster than the measured ceilings allow."""
    said = []
    for label, rows in panel.efficiency.items():
        doubtful = [row for row in rows if row.doubt]
        if doubtful:
            lengths = ", ".join(human_length(row.seq_len) for row in doubtful)
            most = max(doubtful, key=lambda row: row.roof_frac).doubt
            said.append(f"{label}, {panel.title}, at {lengths}: {'up to ' if len(doubtful) > 1 else ''}{most}")
    return said
