"""One self-contained page: no request leaves it, no script runs in it but ours."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment as Jinja
from jinja2 import StrictUndefined
from markupsafe import Markup

from attn_zoo.errors import counted
from attn_zoo.folder import Run
from attn_zoo.records import Environment
from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.figures.all_figures import Picture, front_picture
from attn_zoo.report.figures.style import DARK, FONTS
from attn_zoo.report.figures.svg import dark_rules, inline_figures
from attn_zoo.report.pages.findings import (
    EXPLANATION_OF_ERRORS,
    accuracy_findings,
    completeness,
    error_findings,
    explanation,
    findings,
    headline,
    memory_findings,
    overview_finding,
    panel_findings,
)
from attn_zoo.report.tables.all_tables import QUESTIONS
from attn_zoo.report.tables.front_table import front_table
from attn_zoo.report.tables.table import Column, Row, Table
from attn_zoo.units import clean, human_bytes


def build_page(
    analysis: Analysis, tables: Mapping[str, Sequence[Table]], pictures: Sequence[tuple[Picture, bytes]]
) -> str:
    """Return the HTML text: the answer on top, all else folded away under it by question (see `QUESTIONS`)."""
    definitions, drawings = inline_figures([svg for _, svg in pictures])
    figures = [(picture, drawing) for (picture, _), drawing in zip(pictures, drawings, strict=True)]
    front = front_picture(analysis, [picture for picture, _ in pictures])
    scores = [overview_finding(overview) for overview in analysis.overviews]
    scores += [text for group in analysis.accuracy for text in accuracy_findings(group)]
    errors = [text for group in analysis.errors for text in error_findings(group)]
    sentences = {"time": panel_findings(analysis), "memory": memory_findings(analysis)}
    sentences |= {"approximation": [EXPLANATION_OF_ERRORS, *errors], "accuracy": scores}
    return render_page(
        "report.html.j2",
        fonts=FONTS,
        title=clean(analysis.title) or "no results",
        headline=headline(analysis),
        completeness=completeness(analysis),
        findings=findings(analysis),
        explanation=explanation(analysis),
        warnings=analysis.results.warnings,
        definitions=definitions,
        front_figures=[figure for figure in figures if figure[0] is front],
        front_table=_table(table) if (table := front_table(analysis)) is not None else None,
        sections=[
            {
                "name": name,
                "question": question,
                "sentences": sentences.get(name, []),
                "figures": [pair for pair in figures if pair[0].section == name and pair[0] is not front],
                "tables": [_table(table) for table in tables.get(name, [])],
            }
            for name, question in QUESTIONS.items()
            if tables.get(name)
        ],
        environments=[
            {"name": _environment_name(digest, analysis), "rows": environment_rows(environment)}
            for digest, environment in sorted(analysis.results.environments.items())
        ],
        runs=[
            {
                "name": run.name,
                "cells": counted(len(run.records), "cell"),
                "tasks": ", ".join(_tasks(run)),
                "matrix": _matrix(run),
            }
            for run in analysis.results.runs
        ],
        imported=imported_packages(analysis),
        versions=_versions(analysis),
    )


def render_page(template: str, **content: Any) -> str:
    """Return a page from one of our templates: all text is cleaned and escaped, only our style and script are let in.

    What a template calls safe was made by an XML writer, which escapes every word.
    """
    folder = files("attn_zoo.report.pages") / "templates"
    style, script, text = (
        (folder / name).read_text(encoding="utf-8") for name in ("report.css", "report.js", template)
    )
    style += dark_rules(DARK)
    jinja = Jinja(autoescape=True, finalize=_finished, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return jinja.from_string(text).render(
        policy=(
            f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        style=Markup(style),  # noqa: S704  # our own packaged files, no user's text in them
        script=Markup(script),  # noqa: S704
        **content,
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _environment_name(digest: str, analysis: Analysis) -> str:
    """Return the digest that records name; folders of older versions have several for one environment."""
    names = {name for run in analysis.results.runs for name in run.environment_names.get(digest, ())}
    return ", ".join(sorted(names)) or digest


def _tasks(run: Run) -> list[str]:
    return sorted({record.cell.task for record in run.records if record.cell.task})


def _matrix(run: Run) -> str:
    """Return what matrices say of themselves, which may be more than was run."""
    return " ".join(dict.fromkeys(str(one["description"]) for one in run.matrices if one.get("description")))


def _versions(analysis: Analysis) -> str:
    """Return the versions that the records name: of their schema, and of the protocol of each kind of cell."""
    records = [one.record for one in analysis.results.observations]
    found = {"record schema": {record.schema for record in records}}
    for kind, own in sorted(grouped(records, lambda record: record.cell.kind).items()):
        found[f"{kind} protocol"] = {record.cell.protocol_version for record in own}
    return ", ".join(f"{what} {' and '.join(map(str, sorted(each)))}" for what, each in found.items() if each)


def imported_packages(analysis: Analysis) -> str:
    """Return what variants import beyond what every environment names, with the versions that were measured."""
    found = {item for one in analysis.results.observations for item in one.record.packages.items()}
    return ", ".join(f"{package} {version}" for package, version in sorted(found))


def _finished(value: Any) -> Any:
    return _with_units(clean(value)) if isinstance(value, str) and not isinstance(value, Markup) else value


def _with_units(text: str) -> str:
    """Return `text` with every number on one line with its unit."""
    return re.sub(r"(\d) (%|[nµm]?s|min|h|[KMGT]?i?B)(?!\w)", "\\1\u00a0\\2", text)


def _table(table: Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "title": table.title,
        "note": table.note,
        "columns": [(column.heading, f"{column.align}{_extra(column)}") for column in table.columns],
        "unprinted": ", ".join(column.heading for column in table.columns if _extra(column)),
        "rows": [
            [_entry(column, text, row) for column, text in zip(table.columns, texts, strict=True)]
            for row, texts in zip(table.rows, table.texts(), strict=True)
        ],
    }


PAPER = 4
"""Columns of this priority and above are not printed: see `Column`."""
ONE_LINE = 48
"""Characters of words beside numbers that are not broken: a wide table is scrolled anyway."""


def _entry(column: Column, text: str, row: Row) -> tuple[str, Markup, str]:
    """Return the classes, the text and what to sort by of one entry."""
    classes = f"{column.align} short" if column.align == "left" and len(text) <= ONE_LINE else column.align
    words = _whole_intervals(text)
    if column.is_address:
        words = Markup('<a href="{}">{}</a>').format(text, text.removeprefix("https://"))
    return f"{classes}{_extra(column)}", words, _sort_value(column.sort(row) if column.sort else None)


def _whole_intervals(text: str) -> Markup:
    """Return `text` with its intervals on one line each, as far as there is room: on paper there is less."""
    parts = re.split(r"(\[[^\[\]]{1,40}\](?: \S)?)", _with_units(text))
    span = Markup('<span class="ends">{}</span>')
    return Markup("").join(span.format(part) if place % 2 else part for place, part in enumerate(parts))


def _extra(column: Column) -> str:
    """Return the class of a column that paper has no room for."""
    return " extra" if column.priority >= PAPER else ""


def _sort_value(value: float | str | None) -> str:
    if isinstance(value, float) and math.isinf(value):
        value = math.copysign(1e300, value)  # JavaScript does not read "inf"
    return "" if value is None else str(value)


def environment_rows(environment: Environment) -> list[tuple[str, str]]:
    """Return what a reader needs to judge or repeat the numbers, as pairs of heading and text."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(environment.versions.items()))
    variables = ", ".join(f"{name}={value}" for name, value in sorted(environment.variables.items()))
    gpu = environment.gpu or ""
    if gpu and environment.gpu_memory_bytes:
        gpu += f", {human_bytes(environment.gpu_memory_bytes)}"
    commits = (*environment.earlier_commits, environment.commit)
    commit = ", ".join(each[:12] for each in commits) + (" with uncommitted changes" if environment.is_dirty else "")
    rows = [
        ("CPU", f"{environment.cpu}, {counted(environment.num_cores, 'core')}"),
        ("threads", str(environment.threads)),
        ("memory", human_bytes(environment.memory_bytes)),
        ("GPU", gpu),
        ("driver", environment.driver or ""),
        ("platform", environment.platform),
        ("versions", versions),
        ("commit", commit),
        ("variables", variables),
    ]
    return [(heading, text) for heading, text in rows if text.strip()]
