"""The README of a results folder, generated from its records: which machine, which run, what came out."""

from __future__ import annotations

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.figures.all_figures import Picture
from attn_zoo.report.pages.findings import completeness, findings, headline
from attn_zoo.report.pages.html import environment_rows
from attn_zoo.report.tables.front_table import front_table
from attn_zoo.report.tables.table import escape_markdown, to_markdown
from attn_zoo.report.units import some


def readme_text(analysis: Analysis, picture: Picture | None) -> str:
    """Return the Markdown text, two screens of it; its figure is linked as `figures/NAME.svg`."""
    observations = analysis.results.observations
    started = sorted(one.record.started[:10] for one in observations if one.record.started)
    when = f", measured {' to '.join(dict.fromkeys((started[0], started[-1])))}" if started else ""
    table, unfinished, warnings = front_table(analysis), completeness(analysis), analysis.results.warnings
    lines = [
        f"# {escape_markdown(analysis.title)}",
        "",
        f"**{escape_markdown(headline(analysis))}**",
        "",
        *([escape_markdown(unfinished), ""] if unfinished else []),
        *([f"![{escape_markdown(picture.alt)}](figures/{picture.name}.svg)", ""] if picture else []),
        *([to_markdown(table)] if table else []),
        *(f"- {escape_markdown(text)}" for text in findings(analysis)),
        "",
    ]
    if warnings:
        lines += [f"Warnings: {escape_markdown(some(warnings, joint='; '))}.", ""]
    for _, environment in sorted(analysis.results.environments.items()):
        rows = dict(environment_rows(environment))
        said = [rows[name] for name in ("GPU", "CPU", "versions") if name in rows]
        lines += [f"Measured on {escape_markdown('; '.join(said))}.", ""]
    where = "[report.html](report.html) has every answer, `figures/` and `tables/` the rest, `cells/` the records."
    lines += [f"{len(observations)} cells{when}. {where} Generated from the records; do not edit.", ""]
    return "\n".join(lines)
