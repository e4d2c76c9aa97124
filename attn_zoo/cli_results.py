"""The commands that read results; `attn_zoo.cli` adds them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attn_zoo.cli_options import AsJson

Folders = Annotated[list[Path], typer.Argument(help="Results folders of one or more runs.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (report, compare, export):
        app.command()(command)


def report(
    folders: Folders,
    out: Annotated[Path | None, typer.Option(help="Where to write; by default into the (first) folder.")] = None,
    readme: Annotated[bool, typer.Option(help="Also write README.md into the folder.")] = False,
) -> None:
    """Write tables, figures and one self-contained report.html; print the tables."""
    from attn_zoo.console import out as console
    from attn_zoo.errors import ConfigError
    from attn_zoo.report import analyse, print_report
    from attn_zoo.report.pages.write import write_analysis

    if readme and (len(folders) > 1 or out is not None):
        raise ConfigError(
            "--readme", [("", "expected one results folder and no --out: it describes the folder itself")]
        )
    analysis = analyse(folders)
    paths = write_analysis(analysis, out or folders[0], has_readme=readme)
    print_report(analysis, console)
    console.print()
    console.print(f"wrote {len(paths)} files; open {paths[0]}", markup=False, soft_wrap=True)


def compare(
    before: Annotated[Path, typer.Argument(help="Results folder, the reference.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="Results folder, the candidate.", show_default=False)],
    fail: Annotated[bool, typer.Option(help="Exit with code 3 if a cell became slower.")] = False,
    allow_other_env: Annotated[bool, typer.Option(help="Compare across machines or versions all the same.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two runs cell by cell: how far apart, and whether they agree within their intervals."""
    from attn_zoo.console import out as console
    from attn_zoo.console import print_json
    from attn_zoo.report.compare import agreement, compare_table
    from attn_zoo.report.compare import compare as compare_runs
    from attn_zoo.report.tables.table import to_terminal

    frame = compare_runs(before, after, allow_other_environment=allow_other_env)
    table = compare_table(frame)
    if as_json:
        print_json(frame.astype(object).where(frame.notna(), None).to_dict(orient="records"))
    else:
        to_terminal(table, console)
        console.print(agreement(frame), soft_wrap=True)
    raise typer.Exit(3 if fail and (frame["verdict"] == "slower").any() else 0)


def export(
    folders: Folders,
    out: Annotated[Path, typer.Option(help="File to write.", show_default=False)],
    fmt: Annotated[str, typer.Option("--format", help="csv, jsonl, parquet, markdown or latex")] = "csv",
) -> None:
    """Write all observations as one flat file, one row each."""
    from attn_zoo.console import out as console
    from attn_zoo.report.export import export as export_runs

    path = export_runs(folders, fmt, out)
    console.print(f"wrote {path}", markup=False, soft_wrap=True)
