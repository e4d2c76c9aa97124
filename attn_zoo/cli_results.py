"""The commands that read results: report, compare, verify and so on; `attn_zoo.cli` adds them to the command line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from attn_zoo import api, console
from attn_zoo.cli_options import AsJson
from attn_zoo.errors import ConfigError
from attn_zoo.units import MOST_LINES, clean, human_bytes
from attn_zoo.whole_files import write_whole

results = typer.Typer()

Folders = Annotated[
    list[Path],
    typer.Argument(help="Results folders of one or more runs; packed runs and exports too.", show_default=False),
]


@results.command()
def report(
    folders: Folders,
    out: Annotated[Path | None, typer.Option(help="Where to write; by default into the (first) folder.")] = None,
    readme: Annotated[bool, typer.Option(help="Also write README.md into the folder.")] = False,
    index: Annotated[
        bool,
        typer.Option(
            "--index", help="Instead write a front page (index.html, README.md) into a folder of results folders."
        ),
    ] = False,
) -> None:
    """Write tables, figures and one self-contained report.html; print the tables."""
    from attn_zoo.report.pages.write import print_report

    if index:
        from attn_zoo.report.pages.leaderboard import front_pages

        pages = front_pages(Path(folders[0])) if len(folders) == 1 and out is None and not readme else {}
        if not pages:
            raise ConfigError(
                "--index", [("", "expected one folder that has results folders in it, and no other option")]
            )
        for path, text in pages.items():
            write_whole(path, text)
            console.say(f"wrote {path}")
        return
    with console.told_if_slow("reading records and drawing figures"):
        loaded = api.load(folders)
        page = loaded.report(out, has_readme=readme)
    print_report(loaded.brief, console.out)
    console.out.print()
    console.say(f"wrote tables and figures; open {page}")


Source = Annotated[
    str,
    typer.Argument(
        help="Results folder, packed run, export, REV:FOLDER in git, or JSON of pytest-benchmark.", show_default=False
    ),
]


@results.command()
def compare(
    before: Source,
    after: Source,
    fail: Annotated[
        bool, typer.Option(help="Exit with code 3 if anything is called slower, larger or worse, or a cell failed.")
    ] = False,
    fail_above: Annotated[
        str | None,
        typer.Option(
            metavar="5%",
            help="Exit with code 3 if time, memory or a score is worse by more beyond doubt, or a cell failed.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="Compare all the same: environment, protocol or flagged; may be repeated.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a comment for a pull request.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two runs, times, memory, errors and scores: how far apart, and whether they agree within intervals."""
    from attn_zoo.report.compare import compare as compare_runs
    from attn_zoo.report.tables.table import to_terminal

    if markdown and as_json:
        raise ConfigError("--markdown", [("", "expected either --markdown or --json, not both")])
    found = compare_runs(before, after, allow=allow or (), limit=_share("--fail-above", fail_above))
    if as_json:
        console.print_json(found.rows)
    elif markdown:
        print(found.markdown())  # noqa: T201 # as it is, at any width
    else:
        for table in found.tables(most=MOST_LINES):
            to_terminal(table, console.out, "with --json")
        if found.agreement:
            console.say(found.agreement)
    _print_each("warning", found.warnings)
    worse = found.worse if fail_above else []
    if not markdown:
        _print_each("worse", worse)
    raise typer.Exit(3 if worse or (fail and found.is_worse) else 0)


def _print_each(what: str, texts: Sequence[str]) -> None:
    """Print texts on the standard error stream, each with what it is before it; of very many the first."""
    more = [f"{len(texts) - MOST_LINES:,} more"] if len(texts) > MOST_LINES else []
    for text in [*texts[:MOST_LINES], *more]:
        console.tell(f"{what}: {text}")


def _share(option: str, text: str | None) -> float | None:
    """Return `5%` or `0.05` as a number."""
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < (10 if text.endswith("%") else 1):
        raise ConfigError(option, [("", f"expected a share, such as 5% or 0.05; got {text!r}")])
    return share


@results.command()
def export(
    folders: Folders,
    out: Annotated[Path, typer.Option(help="File to write.", show_default=False)],
    fmt: Annotated[
        str | None,
        typer.Option("--format", help="csv, jsonl, parquet, markdown or latex; by default what the name ends in."),
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="Only this table of the report, such as exponents; csv, markdown or latex.")
    ] = None,
) -> None:
    """Write all observations as one flat file, one row each; or the tables of the report."""
    from attn_zoo.report.export import SUFFIXES
    from attn_zoo.report.export import export as export_runs

    warnings: list[str] = []
    end = out.suffix.lower()  # one that is no format's is refused: it may be a typing error
    path = export_runs(folders, fmt or SUFFIXES.get(end) or end[1:] or "csv", out, table, warnings.append)
    _print_each("warning", warnings)
    console.say(f"wrote {path}")


@results.command()
def verify(
    source: Annotated[str, typer.Argument(help="Results folder, packed run or REV:FOLDER in git.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Check results as a reviewer would: whole, possible, gated, on equal terms; exit code 1 if something is wrong.

    Models of another size than the baseline's are told of, and no mistake.
    """
    from attn_zoo.report.verify import CHECKS, TOLD
    from attn_zoo.report.verify import verify as verify_results

    faults = verify_results(source)
    if as_json:
        console.print_json([asdict(fault) for fault in faults])
    else:
        by_check = {name: [fault for fault in faults if fault.check == name] for name in CHECKS}
        counts = {name: len(found) for name, found in by_check.items()}
        most = MOST_LINES // max(1, sum(map(bool, counts.values())))
        reasons = {name: set(list(dict.fromkeys(fault.text for fault in by_check[name]))[:most]) for name in by_check}
        shown = [fault for name, found in by_check.items() for fault in found if fault.text in reasons[name]]
        hidden = len(faults) - len(shown)
        if shown:
            hidden += console.print_reasons((fault.check, clean(fault.text), clean(fault.where)) for fault in shown)
            console.out.print()
        if hidden:
            console.say(f"{len(faults) - hidden} of {len(faults):,} shown; --json has all")
        words = {name: f"{count} {'told' if name in TOLD else 'wrong'}" for name, count in counts.items() if count}
        console.say("; ".join(f"{name}: {words.get(name, 'passed')}" for name in counts))
    raise typer.Exit(int(any(fault.check not in TOLD for fault in faults)))


@results.command()
def share(
    folder: Annotated[Path, typer.Argument(help="Results folder.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="File to write, .zip; by default the folder's name, here.")] = None,
) -> None:
    """Pack a run into one file that report, compare, export, verify and merge open; without logs and weights."""
    from attn_zoo.packed_run import share as share_folder

    path = share_folder(folder, out)
    console.say(f"wrote {path} ({human_bytes(path.stat().st_size)}); attn-zoo report {shlex.quote(str(path))} opens it")


@results.command()
def merge(
    sources: Annotated[
        list[Path], typer.Argument(help="Results folders or packed runs of shards.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Results folder to make.", show_default=False)],
) -> None:
    """Make one results folder of the shards of one plan; refuse unlike plans and cells that were measured twice."""
    from attn_zoo.folder import read_info
    from attn_zoo.matrix.store.merge import merge as merge_folders

    path = merge_folders(sources, out)
    missing = f"; {text}" if (text := read_info(path, has_plan=False).missing_shards) else ""
    console.say(f"wrote {path}{missing}; next: attn-zoo status {shlex.quote(str(out))}")


@results.command()
def history(
    folder: Annotated[str, typer.Argument(help="Results folder of the git repository here.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Figure to write, .png or .svg.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    pass_: Annotated[str | None, typer.Option("--pass", help="By default the most frequent.")] = None,
    length: Annotated[int | None, typer.Option(help="In tokens; by default the longest that most have.")] = None,
    last: Annotated[int, typer.Option(min=1, help="Commits, the latest.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Show the times of a results folder over the commits that changed it, with intervals."""
    from attn_zoo.report.figures.svg import save_figure
    from attn_zoo.report.history import history as history_of
    from attn_zoo.report.tables.table import to_terminal

    found = history_of(folder, variants=variant or (), pass_=pass_, seq_len=length, most=last)
    if out is not None:
        save_figure(found.page().figure, out)
    if as_json:
        console.print_json(list(found.table().rows))
        return
    to_terminal(found.table(), console.out, "with --json")
    if out is not None:
        console.say(f"wrote {out}")
