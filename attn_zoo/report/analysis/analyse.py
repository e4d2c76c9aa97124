"""Everything computed once from the records, for tables, figures and pages alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from attn_zoo.report.analysis.efficiency import Efficiency, efficiencies
from attn_zoo.report.analysis.fits import Crossing, Growth, crossings, growth
from attn_zoo.report.analysis.observations import Results, read_results
from attn_zoo.report.analysis.scores import AccuracyGroup, make_accuracy_groups
from attn_zoo.report.analysis.series import Panel, make_panels
from attn_zoo.report.analysis.task_means import Overview, make_overviews
from attn_zoo.report.units import human_length

__all__ = ["Analysis", "PanelAnalysis", "analyse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelAnalysis:
    """One panel with its fits.

    Args:
        panel: the curves.
        time: growth of time, by label.
        memory: growth of peak memory, by label.
        crossings: in time, against the fastest exact series (and each exact one).
        memory_crossings: in peak memory, likewise.
        efficiency: rates beside the ceilings of the machine, by label; empty where the run has not measured those.
    """

    panel: Panel
    time: dict[str, Growth]
    memory: dict[str, Growth]
    crossings: tuple[Crossing, ...]
    memory_crossings: tuple[Crossing, ...]
    efficiency: dict[str, list[Efficiency]]

    def crossing(self, label: str) -> Crossing | None:
        """Return where `label` gets faster than the fastest exact series, if both were measured."""
        return next((one for one in self.crossings if one.is_fastest and one.label == label), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """All results, grouped and fitted.

    Args:
        results: the records.
        panels: scaling.
        accuracy: training.
        overviews: of several tasks trained alike.
        labels: of everything, sorted: the position decides colour, marker and line style in every figure.
    """

    results: Results
    panels: tuple[PanelAnalysis, ...]
    accuracy: tuple[AccuracyGroup, ...]
    overviews: tuple[Overview, ...]
    labels: tuple[str, ...]

    @property
    def title(self) -> str:
        """Names of the runs."""
        return ", ".join(dict.fromkeys(run.name for run in self.results.runs))

    @property
    def variants(self) -> dict[str, str]:
        """Registered name of the variant behind each label."""
        return {one.label: one.cell.variant for one in self.results.observations}


def analyse(dirs: Iterable[str | Path]) -> Analysis:
    """Read results folders and compute all fits.

    Raises:
        ConfigError: a directory is not a results folder.
    """
    results = read_results(dirs)
    panels = tuple(
        PanelAnalysis(
            panel=panel,
            time={series.label: growth(series, "time") for series in panel.series},
            memory={series.label: growth(series, "peak_bytes") for series in panel.series},
            crossings=tuple(crossings(panel, "time")),
            memory_crossings=tuple(crossings(panel, "peak_bytes")),
            efficiency=efficiencies(panel),
        )
        for panel in make_panels(results)
    )
    groups = tuple(make_accuracy_groups(results))
    doubts = tuple(warning for group in groups for warning in group.warnings)
    doubts += tuple(text for one in panels for text in _impossible(one))
    return Analysis(
        results=replace(results, warnings=(*results.warnings, *doubts)),
        panels=panels,
        accuracy=groups,
        overviews=tuple(make_overviews(groups)),
        labels=tuple(sorted({one.label for one in results.observations}, key=lambda label: (label.casefold(), label))),
    )


def _impossible(one: PanelAnalysis) -> list[str]:
    """Return a sentence for each variant that is faster than the measured ceilings allow."""
    said = []
    for label, rows in one.efficiency.items():
        doubtful = [row for row in rows if row.doubt]
        if doubtful:
            lengths = ", ".join(human_length(row.seq_len) for row in doubtful)
            said.append(
                f"{label}, {one.panel.title}, at {lengths}: {max(doubtful, key=lambda row: row.roof_frac).doubt}"
            )
    return said
