"""The commands that draw maps of trained models; `attn_zoo.cli` adds them to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_zoo import console
from attn_zoo.cli_options import HereDataDir, VariantFiles, load_files, one_of
from attn_zoo.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

maps = typer.Typer(help="Draw what trained models look at, their positions, learning rates.", no_args_is_help=True)

CellPattern = Annotated[
    str | None, typer.Option("--cell", help="Which cell, by id or key, such as 'full/*/seed0'; may have wildcards.")
]
Out = Annotated[Path, typer.Option(help="File to write, .png or .svg.", show_default=False)]


def _know(folder: Path | None, files: list[Path] | None) -> None:
    """Load the files that were named, and what the folder keeps of variants that are not known otherwise."""
    from attn_zoo.matrix.store.kept_sources import load_kept

    load_files(files)
    for path in load_kept(folder) if folder else []:
        text = f"not loaded: {path} was not measured by you; if it is needed, read it and say --variant-file {path}"
        console.tell(text)


def _write(figure: Figure, out: Path) -> None:
    from attn_zoo.report.figures.svg import save_figure

    save_figure(figure, out)
    console.say(f"wrote {out}")


@maps.command()
def attention(
    folder: Annotated[Path, typer.Argument(help="Results folder of a run that kept its weights.", show_default=False)],
    out: Out,
    cell: CellPattern = None,
    example: Annotated[int | None, typer.Option(min=0, help="Example of the test split; by default the first.")] = None,
    text: Annotated[str | None, typer.Option(help="A text of your own instead of an example.")] = None,
    layer: Annotated[list[int] | None, typer.Option(help="Show this layer only, from 1; may be repeated.")] = None,
    head: Annotated[list[int] | None, typer.Option(help="Show this head only, from 1; may be repeated.")] = None,
    pool: Annotated[
        str, typer.Option(help="What a square that stands for several positions shows: max or mean.")
    ] = "max",
    other: Annotated[bool, typer.Option("--other", help="Of a pair of inputs, the second one.")] = False,
    data_dir: HereDataDir = None,
    files: VariantFiles = None,
) -> None:
    """Draw which positions each head of a trained model looks at: the weights that it really uses."""
    from attn_zoo.maps.attention import attention_map
    from attn_zoo.maps.head_panels import Pool
    from attn_zoo.report.figures.svg import format_of

    format_of(out)
    squares: Pool = one_of(Pool, "pool", pool)
    if text is not None and example is not None:
        raise ConfigError("--text", [("", "expected either --text or --example, not both")])
    _know(folder, files)
    figure = attention_map(
        folder,
        cell,
        example=example or 0,
        text=text,
        layers=layer or (),
        heads=head or (),
        pool=squares,
        of_other=other,
        data_dir=data_dir,
    )
    _write(figure, out)


@maps.command()
def positions(
    out: Out,
    folder: Annotated[Path | None, typer.Argument(help="Results folder of a run that kept its weights.")] = None,
    cell: CellPattern = None,
    kind: Annotated[str | None, typer.Option(help="Without a folder: sinusoidal or learned.")] = None,
    length: Annotated[int | None, typer.Option("--len", help="Without a folder: positions; default 128.")] = None,
    dim: Annotated[int | None, typer.Option(help="Without a folder: features; default 64.")] = None,
    data_dir: HereDataDir = None,
    files: VariantFiles = None,
) -> None:
    """Draw the positions that a model adds to its embeddings, and how alike they are."""
    from attn_zoo.maps.position_table import AddedPosition, position_map
    from attn_zoo.report.figures.svg import format_of

    format_of(out)
    added: AddedPosition = one_of(AddedPosition, "kind of positions", kind or "sinusoidal")
    if folder is not None:
        given = {"--kind": kind, "--len": length, "--dim": dim}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ConfigError(", ".join(wrong), [("", "a trained model has its own; leave out either these or FOLDER")])
    elif cell is not None:
        raise ConfigError("--cell", [("", "expected a results folder that keeps it")])
    _know(folder, files)
    figure = position_map(
        folder,
        cell,
        kind=added,
        length=128 if length is None else length,
        dim=64 if dim is None else dim,
        data_dir=data_dir,
    )
    _write(figure, out)


@maps.command()
def schedule(
    protocol: Annotated[str, typer.Argument(help="Name of a training protocol.", show_default=False)],
    out: Out,
    task: Annotated[str | None, typer.Option(help="Take the settings of this task.")] = None,
) -> None:
    """Draw the learning rate of a protocol against the update, warm-up marked."""
    from attn_zoo.maps.rate_curve import schedule_map
    from attn_zoo.report.figures.svg import format_of

    format_of(out)
    _write(schedule_map(protocol, task), out)
