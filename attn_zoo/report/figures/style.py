"""How figures look: colours that colour-blind readers can tell apart, with markers and line styles to match.

No pyplot: nothing global is changed, so a program that plots its own things is not disturbed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from attn_zoo.errors import ConfigError
from attn_zoo.report.units import clean, shorten
from attn_zoo.whole_files import write_whole

INK = "#1f2328"
MUTED = "#59636e"
PALE = "#d0d7de"

EXACT_COLOURS = ("#1f2328", "#6e7781", "#4d4d4d")
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c510a", "#6a3d9a"),
    *("#b2182b", "#8a8d0f", "#1b7f8c", "#f781bf"),  # further apart than a second round with other dashes
)
"""Okabe and Ito's set without black (exact baselines have it) and yellow (too pale on white), with brown and violet."""

Line = str | tuple[int, tuple[float, ...]]
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
LINES: tuple[Line, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.4, 1.2, 1.4)))
SOLID: Line = "-"
DASHED: Line = (0, (2, 1))
"""Curves of models that began with self-pretraining; the others of such a figure are solid."""
MARK: Line = (0, (4, 2))
"""Lines that are no measurement of a variant: chance, floors, slopes."""

_RC: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.5,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#eaeef2",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "attn-zoo",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.unicode_minus": True,
}


@dataclass(frozen=True, slots=True)
class Look:
    """Colour, marker and line style of one label in every figure."""

    colour: str
    marker: str
    line: Line


Looks = Mapping[str, Look]


def make_looks(labels: Sequence[str], exact: Sequence[str]) -> dict[str, Look]:
    """Return one look for each label: exact ones dark, the others coloured; no two alike below 88 of each."""
    first = [label for label in labels if label in exact]
    others = [label for label in labels if label not in exact]
    looks = {}
    for place, label in enumerate((*first, *others)):
        colours, index = (EXACT_COLOURS, place) if label in exact else (COLOURS, place - len(first))
        line = LINES[(place + index // len(colours)) % len(LINES)]
        looks[label] = Look(colours[index % len(colours)], MARKERS[place % len(MARKERS)], line)
    return looks


@contextmanager
def styled() -> Iterator[None]:
    """Apply our settings inside the block only."""
    with mpl.rc_context(_RC):  # type: ignore[arg-type]  # keys are literals in the stubs
        yield


def render(figure: Figure, kind: Literal["svg", "png"]) -> bytes:
    """Return the file of a figure; the same figure gives the same bytes (no date, no random identifiers)."""
    buffer = io.BytesIO()
    with styled():
        if kind == "svg":
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        else:
            figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
    return buffer.getvalue()


def format_of(path: Path) -> Literal["png", "svg"]:
    """Return the format of a figure by its suffix.

    Raises:
        ConfigError: it is neither `.png` nor `.svg`.
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
    write_whole(path, render(figure, format_of(path)))


@lru_cache(maxsize=1)
def _known_characters() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def plain(text: str, width: int = 24) -> str:
    """Return text as it may stand in a figure: short, without markup, and only with characters the font has."""
    known = _known_characters()
    text = "".join(character if ord(character) in known else "\ufffd" for character in clean(text))
    return shorten(text, width).replace("$", r"\$")
