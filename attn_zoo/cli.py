"""The command line: a thin shell over the library. Every command says what to do next."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import shlex
import sys
import tomllib
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_zoo import api, console
from attn_zoo.cli_data import data
from attn_zoo.cli_maps import maps
from attn_zoo.cli_options import AsJson, DataDir, VariantFiles, load_files
from attn_zoo.cli_results import results
from attn_zoo.errors import AttnZooError, ConfigError, StoreError, UnknownNameError
from attn_zoo.whole_files import DISK_FULL

if TYPE_CHECKING:
    from attn_zoo.displays import Run

app = typer.Typer(
    name="attn-zoo",
    help="Compare attention mechanisms: are they right, what do they cost as sequences grow, what do they buy?",
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit it
    pretty_exceptions_enable=False,
)

Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; by default what the matrix says, or else a GPU where there is one.")
]
MatrixFile = Annotated[
    str, typer.Argument(help="TOML file, or the name of a shipped matrix: attn-zoo list matrices.", show_default=False)
]
Folder = Annotated[Path, typer.Argument(help="Results folder of a run.")]
TimeLimit = Annotated[
    float | None, typer.Option(metavar="MIN", min=0.0, help="Minutes after which no further cell starts.")
]


def _no_file(name: str) -> str:
    if name.endswith(".py"):
        registered = "a file is given by --variant-file, and NAME is what it registers"
        raise ConfigError("NAME", [("", f"expected the name of a variant; got {name!r}: {registered}")])
    return name


VariantName = Annotated[
    str, typer.Argument(help="Of the variant: attn-zoo list.", show_default=False, callback=_no_file)
]
MixedEnv = Annotated[bool, typer.Option(help="Go on in a folder measured in another environment.")]

_UNUSABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
"""What is wrong with a path that a user names, and not with this program."""


def main() -> None:
    """Run the command line; our own errors become one message and an exit code, without a stack trace."""
    atexit.register(gc.freeze)  # looking for garbage in all of torch before the end takes a quarter of a second
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `>&-`: what is said goes nowhere, exit codes stay
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows Latin-1 only
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where it can still be said that it failed
    except AttnZooError as error:
        console.tell(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `attn-zoo list | head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.filename is not None and error.errno in _UNUSABLE:
            console.tell(f"{error.filename}: {error.strerror}")
            sys.exit(AttnZooError.exit_code)
        if error.errno not in DISK_FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere, not into a trace
        where = error.filename or f"standard output or a file in {gettempdir()}"  # neither has a name
        console.tell(f"{where}: cannot be written: {error.strerror}")
        sys.exit(StoreError.exit_code)
    except (KeyboardInterrupt, SystemExit) as stop:
        if not _is_interrupt(stop):
            raise
        console.tell("interrupted")
        sys.exit(130)


def _is_interrupt(error: BaseException | None) -> bool:
    """Tell whether Ctrl-C is what ends the program: Typer makes an exit of it, without a word."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or _is_interrupt(error.__context__))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        import attn_zoo

        console.say(f"attn-zoo {attn_zoo.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compare attention mechanisms: are they right, what do they cost as sequences grow, what do they buy?"""


@app.command("list")
def list_command(
    what: Annotated[str, typer.Argument(help="variants, tasks, matrices, protocols or checks")] = "variants",
    files: VariantFiles = None,
    as_json: AsJson = False,
) -> None:
    """List what there is by name: variants, tasks, matrices, protocols, checks."""
    from attn_zoo.registry import tasks, variants

    load_files(files)
    if what != "variants":
        rows = _summaries(what)
        if as_json:
            found = [{"name": name, "summary": summary} for name, summary in rows]
            console.print_json(_with_settings(found) if what == "protocols" else found)
        else:
            console.print_table("", (_LISTS[what], "what it is"), rows)
            console.print_failures(tasks.failures if what == "tasks" else [])
        return
    from attn_zoo.attention import describe

    infos = [describe(name) for name in variants]
    if as_json:
        every = [console.variant_data(info) for info in infos]
        console.print_json({"variants": every, "failures": variants.failures})
    else:
        console.print_variants(infos, variants.failures)


def _with_settings(protocols: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the protocols with all their fields, which a matrix may override."""
    from attn_zoo.training.protocol import PROTOCOLS

    return [{**one, "settings": asdict(PROTOCOLS[one["name"]])} for one in protocols]


_LISTS = {"tasks": "task", "matrices": "matrix", "protocols": "protocol", "checks": "check"}


def _summaries(what: str) -> list[tuple[str, str]]:
    """Return (name, one line) of everything of a kind."""
    if what == "tasks":
        from attn_zoo.registry import tasks

        documents = {name: sys.modules[tasks[name].__module__].__doc__ or tasks[name].__doc__ or "" for name in tasks}
        return [(name, text.strip().partition("\n")[0]) for name, text in documents.items()]
    if what == "matrices":
        from attn_zoo.matrix.plan.schema import shipped_matrices

        texts = {name: path.read_text(encoding="utf-8") for name, path in shipped_matrices().items()}
        return [(name, tomllib.loads(text).get("description", "")) for name, text in texts.items()]
    if what == "protocols":
        from attn_zoo.training.protocol import PROTOCOLS

        return [(name, one.summary) for name, one in PROTOCOLS.items()]
    if what == "checks":
        from attn_zoo.conformance import CHECKS

        return [(one.name, one.summary) for one in CHECKS]

    known = ["variants", *_LISTS]
    raise UnknownNameError("list", what, known, see=f"there are {', '.join(known)}")


@app.command()
def show(
    name: VariantName,
    files: VariantFiles = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure how cost, sequential operations and path length grow (seconds).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show everything known about a variant: source, claims, capabilities, options."""
    from attn_zoo.attention import describe

    load_files(files)
    info = describe(name)
    rows = None
    if measure:
        from attn_zoo.conformance import measure_complexity

        with console.told_if_slow(f"measuring how {name} grows with the length"):
            rows = measure_complexity(name)
    if as_json:
        console.print_json(
            console.variant_data(info) | ({} if rows is None else {"measured": [asdict(row) for row in rows]})
        )
        return
    console.print_variant(info)
    console.print_complexity(rows or ())


@app.command()
def check(
    name: VariantName,
    files: VariantFiles = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    only: Annotated[list[str] | None, typer.Option("--only", help="Run this check only; may be repeated.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="Option of the variant, KEY=VALUE in TOML.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a variant against every promise it makes; exit code 1 if one is broken.

    Without options it is checked under the small ones that its config names, several sets where it has several ways.
    """
    from attn_zoo.registry import variants

    load_files(files)
    with console.told_if_slow("loading torch and all variants"):
        variants[name]  # or it is unknown, which is said before anything is checked
    console.tell(f"checking {name}")
    results = api.check(name, _options(option) or None, device=device, only=only or (), apart=True)
    if as_json:
        console.print_json([asdict(result) for result in results])
    else:
        console.print_checks(results)
    raise typer.Exit(int(not results.is_ok))


def _options(pairs: list[str] | None) -> dict[str, Any]:
    """Return options given as KEY=VALUE, values in TOML: `proj_len=128`, `sharing="headwise"` (or without quotes)."""
    options: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError("--option", [("", f"expected KEY=VALUE; got {pair!r}")])
        try:
            options[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            options[key.strip()] = value.strip()
    return options


OnlyCells = Annotated[list[str] | None, typer.Option("--only", help="Keep cells whose id matches, such as 'full/*'.")]
Add = Annotated[list[str] | None, typer.Option("--add", help="Add this variant to every group; may be repeated.")]
Jobs = Annotated[
    int, typer.Option("--jobs", "-j", help="Cells at once (per GPU or node with Ray); timings always run alone.")
]
AllowCells = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Take a matrix of more than 20 000 cells, up to N.")
]
EngineOption = Annotated[str, typer.Option("--engine", help="local or ray")]
Address = Annotated[str, typer.Option(help="Of the Ray cluster: HOST:PORT of its head node; local starts one here.")]
Track = Annotated[
    str | None,
    typer.Option(
        metavar="TRACKER[:PLACE]",
        help="Send curves of trainings to tensorboard, wandb or trackio too; PLACE is a folder or project.",
    ),
]
ShardOption = Annotated[str | None, typer.Option("--shard", metavar="I/N", help="Run the I-th of N parts only.")]


@app.command()
def plan(
    matrix: MatrixFile,
    files: VariantFiles = None,
    add: Add = None,
    only: OnlyCells = None,
    device: Device = None,
    shard: ShardOption = None,
    data_dir: DataDir = None,
    allow_cells: AllowCells = None,
    as_json: AsJson = False,
) -> None:
    """Show the cells of a matrix: what will run, what is refused and why, roughly what it takes. Runs nothing."""
    load_files(files)
    with console.told_if_slow(f"planning {matrix}: every variant is built once, in a process of its own"):
        planned = api.plan(
            matrix,
            variants=add or (),
            only=only or (),
            device=device,
            shard=shard,
            data_dir=data_dir,
            should_probe=True,
            allow_cells=allow_cells,
        )
    if as_json:
        console.print_json(
            [{"id": item.cell.id, "key": item.cell.key, "refusal": item.refusal} for item in planned.cells]
        )
    else:
        console.print_plan(planned)


@app.command()
def run(
    matrix: MatrixFile,
    out: Annotated[Path | None, typer.Option(help="Results folder; by default runs/NAME.")] = None,
    files: VariantFiles = None,
    add: Add = None,
    only: OnlyCells = None,
    device: Device = None,
    shard: ShardOption = None,
    time_limit: TimeLimit = None,
    retry: Annotated[list[str] | None, typer.Option(help="Run cells with this status again; may be repeated.")] = None,
    jobs: Jobs = 1,
    engine: EngineOption = "local",
    address: Address = "local",
    data_dir: DataDir = None,
    allow_mixed_env: MixedEnv = False,
    allow_cells: AllowCells = None,
    track: Track = None,
) -> None:
    """Measure what a matrix says. The same command goes on where it stopped; Ctrl-C is safe."""
    load_files(files)
    _finish(
        api.run(
            matrix,
            out=out,
            variants=add or (),
            only=only or (),
            device=device,
            shard=shard,
            time_limit_min=time_limit,
            retry=retry or (),
            jobs=jobs,
            engine=engine,
            address=address,
            data_dir=data_dir,
            allow_mixed_env=allow_mixed_env,
            allow_cells=allow_cells,
            track=track,
        )
    )


def _finish(done: Run) -> None:
    assert done.summary is not None  # `run` made it
    console.print_summary(done.summary)
    raise typer.Exit(done.summary.exit_code)


@app.command()
def status(folder: Folder, files: VariantFiles = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show what a results folder has, what is left, and what failed with which reason."""
    from attn_zoo.matrix.drive.machine_ceilings import ceilings_text
    from attn_zoo.matrix.store.store import Store
    from attn_zoo.records import Ceilings

    load_files(files)
    now, ceilings = api.status(folder, data_dir), list[Ceilings]()
    try:
        ceilings = list(Store(folder).ceilings())
    except StoreError as error:
        console.tell(f"warning: {error}")
    if as_json:
        done = [
            {"id": record.cell.id, "key": record.cell.key, "status": record.status, "reason": record.reason}
            for record in now.done
        ]
        left = [
            {"id": item.cell.id, "key": item.cell.key, "num_repeats": now.begun.get(item.cell.key, 0)}
            for item in now.left
        ]
        roofs = [one.to_dict() for one in ceilings]
        found = {"done": done, "left": left if now.has_plan else None, "left_s": now.left_s or None, "ceilings": roofs}
        doubts = {"doubt": now.doubt, "missing_shards": now.missing_shards, "problems": dict(now.problems)}
        console.print_json({**found, "stale": len(now.stale), **doubts})
    else:
        console.print_standing(now, [ceilings_text(one) for one in ceilings], folder, files or [])


@app.command()
def retry(
    folder: Folder,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Status to run again; by default every failure; may be repeated.")
    ] = None,
    files: VariantFiles = None,
    time_limit: TimeLimit = None,
    allow_mixed_env: MixedEnv = False,
    data_dir: DataDir = None,
    jobs: Jobs = 1,
    engine: EngineOption = "local",
    address: Address = "local",
    track: Track = None,
) -> None:
    """Run the cells of a folder again that failed. The old records are kept in its folder `replaced`."""
    load_files(files)
    _finish(
        api.run_again(
            folder,
            only or (),
            jobs=jobs,
            engine=engine,
            address=address,
            time_limit_min=time_limit,
            data_dir=data_dir,
            allow_mixed_env=allow_mixed_env,
            track=track,
        )
    )


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the variant; or the word matrix.", show_default=False)],
    matrix: Annotated[str | None, typer.Argument(metavar="[MATRIX]", help="After the word matrix: its name.")] = None,
    like: Annotated[
        str | None,
        typer.Option(help="Shipped matrix that a new one starts as a copy of (default: quick).", show_default=False),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where to write the file.")] = Path(),
) -> None:
    """Write a file to start from: `new NAME` a working variant, `new matrix NAME` a matrix."""
    from attn_zoo.scaffold import new_matrix, new_variant

    if name == "matrix":
        path = new_matrix(matrix or "my-matrix", folder, like or "quick")
        console.say(f"wrote {path}")
        console.say(f"next: attn-zoo plan {shlex.quote(str(path))}")
        return
    if matrix is not None:
        raise ConfigError("new", [("", f"expected one name, or `new matrix {matrix}`; got {name!r} before it")])
    if like is not None:
        raise ConfigError("new", [("--like", f"it is for matrices: new matrix NAME --like {like}")])
    path = new_variant(name, folder)
    console.say(f"wrote {path}")
    console.say(f"next: attn-zoo check {name} --variant-file {shlex.quote(str(path))}")


@app.command(hidden=True)
def docs(root: Path = Path()) -> None:
    """Write the generated tables of the documents and the index of results anew."""
    from attn_zoo.docs import DOCUMENTS, update_results_index, update_tables

    done = {name: update_tables(root / name) for name in DOCUMENTS}
    done["results"] = update_results_index(root / "results")
    for name, was_current in done.items():
        console.out.print(f"{name}: {'was current' if was_current else 'updated'}")


@app.command()
def doctor(
    as_json: AsJson = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for kernels that must be compiled, up to minutes each.")
    ] = False,
) -> None:
    """Say what works on this machine and, where something does not, why. Every kernel is tried, for 15 s in all."""
    console.tell("loading torch")
    from attn_zoo.doctor import print_diagnosis

    print_diagnosis(as_json=as_json, waits=wait)


app.add_typer(results)
app.add_typer(data, name="data")
app.add_typer(maps, name="maps")
