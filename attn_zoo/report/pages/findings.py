"""What the numbers say, in sentences a newcomer can read. Every number in them comes from the records."""

from __future__ import annotations

from attn_zoo.report.analysis.analyse import Analysis, PanelAnalysis
from attn_zoo.report.pages.score_findings import accuracy_findings, overview_finding
from attn_zoo.report.tables.growth_tables import crossing_text
from attn_zoo.report.units import human_length, human_ms

__all__ = ["EXPLANATION", "findings"]

EXPLANATION = (
    "Exact attention compares every token with every other one, so twice the length costs four times the time: "
    "quadratic, a line of slope 2 on these log-log figures. Linear variants compare each token with a fixed number of "
    "others or of summaries, so twice the length costs twice the time: slope 1, dearer for short sequences and cheaper "
    "beyond a crossover length."
)

MOST = 6
"""Variants named in one sentence; the tables have the rest."""


def findings(analysis: Analysis) -> list[str]:
    """Return a few sentences for each panel and accuracy group, and how many cells gave no measurement."""
    found = [text for one in analysis.panels if (text := _panel(one))]
    found += [overview_finding(overview) for overview in analysis.overviews]
    found += [text for group in analysis.accuracy for text in accuracy_findings(group)]
    frame = analysis.results.frame
    missing = int((frame["status"] != "ok").sum())
    if not len(frame):
        found.append("No cell has been run yet.")
    elif missing:
        found.append(f"{missing} of {len(frame)} cells gave no measurement; the reasons are below.")
    return found


def _panel(one: PanelAnalysis) -> str:
    measured = [series for series in one.panel.series if series.points]
    if not measured:
        return ""
    longest = max(series.lengths[-1] for series in measured)
    last = [series for series in measured if series.lengths[-1] == longest]
    fastest = min(last, key=lambda series: series.points[-1].median_ms)
    capital = one.panel.title[0].upper() + one.panel.title[1:]
    point = fastest.points[-1]
    rate = "" if point.tokens_per_s is None else f", {float(f'{point.tokens_per_s:.3g}'):,.0f} tokens/s"
    said = [f"at {human_length(longest)} tokens the fastest is {fastest.label} ({human_ms(point.median_ms)}{rate})"]
    grown = [found for found in one.time.values() if found.exponent is not None]
    if grown:
        powers = [f"{found.exponent.value:.2f} ({found.label})" for found in grown[:MOST] if found.exponent]
        said.append(f"time grows as N^k with k = {', '.join(powers)}")
    crossings = [found for found in one.crossings if found.is_fastest][:MOST]
    has_lengths = any(found.result is not None and len(found.result.lengths) > 1 for found in crossings)
    if has_lengths and one.panel.baseline is not None:
        wins = [f"{found.label} {crossing_text(found)}" for found in crossings]
        said.append(f"crossover with {one.panel.baseline.label}: {', '.join(wins)}")
    return f"{capital}: {'; '.join(said)}."
