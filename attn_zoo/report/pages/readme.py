"""The README of a results folder, generated from its records: which machine, which run, what came out."""

from __future__ import annotations

from collections.abc import Iterable

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.figures.all_figures import Picture
from attn_zoo.report.pages.findings import EXPLANATION, findings
from attn_zoo.report.pages.html import environment_rows
from attn_zoo.report.tables.all_tables import summary_tables
from attn_zoo.report.tables.table import escape_markdown, to_markdown


def readme_text(analysis: Analysis, pictures: Iterable[Picture]) -> str:
    """Return the Markdown text; figures are linked as `figures/NAME.svg`."""
    observations = analysis.results.observations
    started = sorted(one.record.started[:10] for one in observations if one.record.started)
    when = (
        "" if not started else f", measured {started[0]}" + (f" to {started[-1]}" if started[-1] != started[0] else "")
    )
    lines = [
        f"# {escape_markdown(analysis.title)}",
        "",
        f"{len(observations)} cells{when}. Generated from the records in `cells/`; do not edit.",
        "",
        *(f"- {escape_markdown(text)}" for text in findings(analysis)),
        "",
        *([EXPLANATION, ""] if analysis.panels else []),
        "## Figures",
        "",
    ]
    for picture in pictures:
        lines += [f"![{escape_markdown(picture.alt)}](figures/{picture.name}.svg)", ""]
    lines += [
        "## Tables",
        "",
        *(to_markdown(table) for table in summary_tables(analysis)),
        "## Machine and software",
        "",
    ]
    for digest, environment in sorted(analysis.results.environments.items()):
        lines += [f"Environment `{digest}`:", ""]
        lines += [f"- {heading}: {escape_markdown(text)}" for heading, text in environment_rows(environment)]
        lines.append("")
    if analysis.results.warnings:
        lines += ["## Warnings", "", *(f"- {escape_markdown(text)}" for text in analysis.results.warnings), ""]
    return "\n".join(lines)
