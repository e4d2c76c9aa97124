"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from attn_zoo import api, console
from attn_zoo.errors import UnknownNameError

VariantFiles = Annotated[
    list[Path] | None, typer.Option("--variant-file", help="Python file that registers variants; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
_DATA: Any = {"envvar": "ATTN_ZOO_DATA", "help": "Where tasks find local data."}
DataDir = Annotated[Path | None, typer.Option(**_DATA)]
HereDataDir = Annotated[
    Path | None, typer.Option(callback=lambda given: api.data_folder(given, must_exist=True), **_DATA)
]
"""Of commands that read data in this process: else other places would be searched without a word."""


def one_of(choices: Any, kind: str, text: str) -> Any:
    """Return a text that is one of the choices of a `Literal`; `kind` says what it is, for the message."""
    if text not in get_args(choices):
        raise UnknownNameError(kind, text, get_args(choices), f"there are {', '.join(get_args(choices))}")
    return text


def load_files(files: list[Path] | None) -> None:
    """Load the files of `--variant-file`."""
    from attn_zoo.registry import load_file

    for path in files or []:
        # Each of the two loads torch, which alone may take seconds.
        with console.told_if_slow(f"loading {path}: in a process of its own, as it may crash, then in this one"):
            load_file(path)
