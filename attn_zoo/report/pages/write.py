"""Write a report: tables as CSV and Markdown, figures as SVG and PNG, one self-contained page, a README if asked."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from attn_zoo.errors import FolderError, counted
from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.figures.all_figures import Picture, draw_pictures, front_picture
from attn_zoo.report.figures.page import NO_FIGURE
from attn_zoo.report.figures.svg import render
from attn_zoo.report.pages.findings import completeness, findings, headline
from attn_zoo.report.pages.html import build_page, environment_rows, imported_packages
from attn_zoo.report.tables.all_tables import MOST_ROWS, make_tables, shown_tables, summary_tables, tables_by_question
from attn_zoo.report.tables.front_table import front_table
from attn_zoo.report.tables.score_tables import score_table
from attn_zoo.report.tables.table import escape_markdown, to_csv, to_markdown, to_terminal
from attn_zoo.units import MOST_LINES, clean, some
from attn_zoo.whole_files import refuse_links, require_writable, write_whole


def require_place(out: str | Path) -> None:
    """Raise `StoreError` if a report cannot be written into a folder: before the work, which may take minutes."""
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise FolderError(f"{out}: expected a folder for the report; there is a file of this name")
    refuse_links(out)
    require_writable(out / "report.html")


def write_analysis(analysis: Analysis, out: str | Path, *, has_readme: bool = False) -> list[Path]:
    """Write tables, figures and `report.html` under `out`, with a `README.md` if asked; return the paths, page first.

    Whoever makes the analysis asks `require_place` before. The same records give the same bytes. Figures and tables
    that an earlier report wrote and this one does not have are deleted, unless they were changed.
    """
    out = Path(out)
    by_question, tables = tables_by_question(analysis), make_tables(analysis)
    pictures: list[tuple[Picture, bytes]] = []
    files = {out / "report.html": b""}
    for picture in draw_pictures(analysis, panels=analysis.shown):
        svg = files[out / "figures" / f"{picture.name}.svg"] = render(picture.figure, "svg")
        files[out / "figures" / f"{picture.name}.png"] = render(picture.figure, "png")
        pictures.append((replace(picture, figure=NO_FIGURE), svg))
    shown = {question: shown_tables(analysis, every, MOST_ROWS) for question, every in by_question.items()}
    files[out / "report.html"] = build_page(analysis, shown, pictures).encode()
    for table in tables:
        whole = table if table.is_view else table.cut(MOST_ROWS)
        files[out / "tables" / f"{table.name}.md"] = to_markdown(whole).encode()
    for table in [*tables, *([score_table(analysis)] if analysis.accuracy else [])]:
        if not table.is_view:
            files[out / "tables" / f"{table.name}.csv"] = to_csv(table).encode()
    listed = {path.relative_to(out).as_posix(): _digest(content) for path, content in files.items()}
    listed.pop("report.html")
    files[out / "report.html"] += f"{_LISTED}{json.dumps(listed)}{_END}".encode()
    before = _listed(out / "report.html")
    if has_readme:
        files[out / "README.md"] = _readme(analysis, front_picture(analysis, [one for one, _ in pictures])).encode()
    for path, content in files.items():
        write_whole(path, content)
    for path in (out / name for name in before if out / name not in files):
        with suppress(OSError):
            if not path.is_symlink() and _digest(path.read_bytes()) == before[path.relative_to(out).as_posix()]:
                path.unlink()
    return list(files)


_LISTED, _END = "<!-- files: ", " -->\n"
"""Around the files of a report, with digests, at the end of its page."""


def _listed(page: Path) -> dict[str, str]:
    """Return the digests of the figures and tables that an earlier report wrote, by name; nothing where none says."""
    try:
        _, start, rest = page.read_text(encoding="utf-8").rpartition(_LISTED)
        found = json.loads(rest.removesuffix(_END)) if start else {}
    except (OSError, ValueError):
        return {}
    named = found.items() if isinstance(found, dict) else ()
    return {name: digest for name, digest in named if re.fullmatch(r"(figures|tables)/[^/\\]+\.(svg|png|md|csv)", name)}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _readme(analysis: Analysis, picture: Picture | None) -> str:
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
    if imported := imported_packages(analysis):
        lines += [f"Variants import {escape_markdown(imported)}.", ""]
    where = "[report.html](report.html) has every answer, `figures/` and `tables/` the rest, `cells/` the records."
    num_cells = len(observations) + sum(run.num_unread for run in analysis.results.runs)
    lines += [f"{counted(num_cells, 'cell')}{when}. {where} Generated from the records; do not edit.", ""]
    return "\n".join(lines)


def print_report(analysis: Analysis, console: Console) -> None:
    """Print the answer, what to know beside it, all tables and warnings in the width of `console`."""
    for text in (headline(analysis), completeness(analysis), *(f"- {text}" for text in findings(analysis))):
        if text:
            console.print(clean(text), markup=False, highlight=False)
    front = front_table(analysis)
    for table in [*([front] if front else []), *shown_tables(analysis, summary_tables(analysis), MOST_LINES)]:
        console.print()
        to_terminal(table, console)
    for warning in analysis.results.warnings:
        console.print(f"warning: {clean(warning)}", markup=False, highlight=False)
