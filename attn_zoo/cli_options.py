"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

VariantFiles = Annotated[
    list[Path] | None, typer.Option("--variant-file", help="Python file that registers variants; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
DataDir = Annotated[Path | None, typer.Option(envvar="ATTN_ZOO_DATA", help="Where tasks find local data.")]


def load_files(files: list[Path] | None) -> None:
    """Load the files of `--variant-file`."""
    from attn_zoo.registry import load_file

    for path in files or []:
        load_file(path)
