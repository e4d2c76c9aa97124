"""Write a figure in the format that its name asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from matplotlib.figure import Figure

from attn_zoo.errors import ConfigError
from attn_zoo.report.figures.style import render
from attn_zoo.whole_files import write_whole

__all__ = ["check_name", "save_figure"]


def check_name(path: Path) -> Literal["png", "svg"]:
    """Return the format of a figure by its suffix.

    Raises:
        ConfigError: it is neither of the two that there are.
    """
    suffix = path.suffix.lower()
    if suffix == ".png":
        return "png"
    if suffix == ".svg":
        return "svg"
    raise ConfigError("--out", [("", f"expected a name that ends in .png or .svg; got {path.name!r}")])


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure, whole or not at all; the same figure gives the same bytes.

    Raises:
        ConfigError: the name ends in neither .png nor .svg.
        FolderError: it cannot be written there.
    """
    write_whole(path, render(figure, check_name(path)))
