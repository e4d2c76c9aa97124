"""The command line: a thin shell over the library. Every command says what to do next."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from attn_zoo.errors import AttnZooError

__all__ = ["app", "main"]

app = typer.Typer(
    name="attn-zoo",
    help="Compare attention mechanisms: are they right, what do they cost as sequences grow, what do they buy?",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)

VariantFiles = Annotated[
    list[Path] | None, typer.Option("--variant-file", help="Python file that registers variants; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default what the matrix says.")]
Folder = Annotated[Path, typer.Argument(help="Results folder of a run.")]
Folders = Annotated[list[Path], typer.Argument(help="Results folders of one or more runs.")]


def _load(files: list[Path] | None) -> None:
    from attn_zoo.discovery import load_file

    for path in files or []:
        load_file(path)


def main() -> None:
    """Run the command line; our own errors become one message and an exit code, without a stack trace."""
    from attn_zoo.console import err

    try:
        app()
    except AttnZooError as error:
        err.print(str(error), markup=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `attn-zoo list | head`
        sys.stderr.close()
        sys.exit(0)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)


@app.command("list")
def list_command(
    what: Annotated[str, typer.Argument(help="variants or tasks")] = "variants",
    files: VariantFiles = None,
    as_json: Json = False,
) -> None:
    """List what is registered, and what could not be loaded."""
    from attn_zoo.attention import describe
    from attn_zoo.console import print_json, print_table, print_variants, variant_data
    from attn_zoo.errors import UnknownNameError
    from attn_zoo.registry import tasks, variants

    _load(files)
    if what == "tasks":
        rows = [(name, (tasks[name].__doc__ or "").strip().partition("\n")[0]) for name in tasks]
        if as_json:
            print_json([{"name": name, "summary": summary} for name, summary in rows])
        else:
            print_table("", ("task", "what it is"), rows)
        return
    if what != "variants":
        raise UnknownNameError("list", what, ["variants", "tasks"])
    infos = [describe(name) for name in variants]
    failures = [(failure.provider, failure.reason) for failure in variants.failures]
    if as_json:
        print_json({"variants": [variant_data(info) for info in infos], "failures": failures})
    else:
        print_variants(infos, failures)


@app.command()
def show(name: str, files: VariantFiles = None, as_json: Json = False) -> None:
    """Show everything known about a variant: source, claims, capabilities, options."""
    from attn_zoo.attention import describe
    from attn_zoo.console import print_json, print_variant, variant_data

    _load(files)
    info = describe(name)
    if as_json:
        print_json(variant_data(info))
    else:
        print_variant(info)


@app.command()
def check(
    name: str,
    files: VariantFiles = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    only: Annotated[list[str] | None, typer.Option("--only", help="Run this check only; may be repeated.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="Option of the variant, KEY=VALUE in TOML.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a variant against every promise it makes; exit code 1 if one is broken."""
    from dataclasses import asdict

    from attn_zoo.conformance import exit_code, run_checks
    from attn_zoo.console import print_checks, print_json

    _load(files)
    results = run_checks(name, _options(option), device=device, checks=only or None)
    if as_json:
        print_json([asdict(result) for result in results])
    else:
        print_checks(name, results)
    raise typer.Exit(exit_code(results))


def _options(pairs: list[str] | None) -> dict[str, Any]:
    """Return options given as KEY=VALUE, values in TOML: `proj_len=128`, `sharing="headwise"` (or without quotes)."""
    import tomllib

    from attn_zoo.errors import ConfigError

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


@app.command()
def new(name: str, folder: Annotated[Path, typer.Option(help="Where to write the file.")] = Path()) -> None:
    """Write a file with a working variant to start from."""
    from attn_zoo.console import out
    from attn_zoo.scaffold import new_variant

    path = new_variant(name, folder)
    out.print(f"wrote {path}", markup=False, soft_wrap=True)
    out.print(f"next: attn-zoo check {name} --variant-file {path}", markup=False, soft_wrap=True)


@app.command(hidden=True)
def docs(path: Path = Path("README.md")) -> None:
    """Write the generated parts of the README anew."""
    from attn_zoo.console import out
    from attn_zoo.docs import update_readme

    out.print(f"{path}: {'was current' if update_readme(path) else 'updated'}")
