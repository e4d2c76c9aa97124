"""How figures look: colours that colour-blind readers can tell apart, with markers and line styles to match.

A mechanism looks the same in every report: its look follows from its name alone.

No pyplot: nothing global is changed, so a program that plots its own things is not disturbed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import matplotlib as mpl
from matplotlib.font_manager import findfont, get_font

from attn_zoo.units import clean, shorten

INK = "#1f2328"
MUTED = "#59636e"
PALE = "#d0d7de"
GRID = "#eaeef2"
GUIDE = "#afb8c1"
STRIP = "#f6f8fa"
PAPER = "#ffffff"
WHITE, BLACK = "#fefefe", "#010101"
"""On colours of our own, such as those of a heat map: they stay what they are on a dark screen."""

EXACT_COLOURS = ("#6e7781", "#4d4d4d", "#1f2328")
CONTROL_COLOURS = ("#8c82ad",)
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c510a", "#6a3d9a"),
    *("#b2182b", "#8a8d0f", "#1b7f8c", "#f781bf"),  # further apart than a second round with other dashes
    *("#5fa81e", "#2f5d23", "#a21f86", "#bf8f63"),
    *("#3344e6", "#aa66ff", "#f08490", "#fc00e4", "#fc0078", "#480000", "#90a884", "#0000fc", "#3c3000", "#fc2430"),
)
"""Okabe and Ito's set without black (exact baselines have it) and yellow (too pale on white), with brown and violet."""

DARK: Mapping[str, str] = {
    INK: "#e6edf3",
    MUTED: "#9ea7b3",
    PALE: "#3d444d",
    GRID: "#21262d",
    GUIDE: "#5b6571",
    STRIP: "#161b22",
    PAPER: "#0d1117",
    "#6e7781": "#a9b4c0",
    "#4d4d4d": "#c9c9c9",
    "#8c82ad": "#b9b0d6",
    "#0072b2": "#3d9be0",
    "#d55e00": "#ff8a3d",
    "#009e73": "#2fc296",
    "#cc79a7": "#d88ab8",
    "#e69f00": "#f0b429",
    "#56b4e9": "#9bdcff",
    "#8c510a": "#c98a4b",
    "#6a3d9a": "#b48be8",
    "#b2182b": "#f0616f",
    "#8a8d0f": "#c3c63f",
    "#1b7f8c": "#3fb7c6",
    "#f781bf": "#ffa6d6",
    "#5fa81e": "#9ad85a",
    "#2f5d23": "#7fa876",
    "#a21f86": "#e667c8",
    "#bf8f63": "#dcbf9e",
    "#3344e6": "#8f98ff",
    "#aa66ff": "#b44bff",
    "#f08490": "#ffd0c8",
    "#fc00e4": "#fc0cd8",
    "#fc0078": "#fc0084",
    "#480000": "#fc0000",
    "#90a884": "#00fc00",
    "#0000fc": "#606cfc",
    "#3c3000": "#fcfc24",
    "#fc2430": "#fc0048",
}
"""What a dark screen shows instead: the same hue, light enough for a dark page."""

FONTS = "DejaVu Sans, Verdana, sans-serif"
"""Of the words in an SVG: the font that they are laid out in, one of the same widths, any that is narrower."""

_SALT, _LATER_SALTS = 268063432, (3745, 137, 755, 1386, 1359, 516, 578, 938, 1013, 3867)
"""Found by search: they give mechanisms that are drawn together colours of their own.

A colour that came later has a salt by which it takes one label of as many as there are colours with it. The others keep
theirs (Lamping and Veach 2014, arXiv 1406.2294), and all published figures their looks.
"""

Line = str | tuple[int, tuple[float, ...]]
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
LINES: tuple[Line, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.4, 1.2, 1.4)))
SOLID: Line = "-"
DASHED: Line = (0, (2, 1))
"""Curves of models that began with self-pretraining; the others of such a figure are solid."""
DOTTED: Line = (0, (1, 3))
"""Lines from a point to its name, across a panel."""
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
    "grid.color": GRID,
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
    "legend.frameon": False,
    "svg.fonttype": "none",
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


def make_looks(labels: Iterable[str], exact: Collection[str], controls: Collection[str] = ()) -> dict[str, Look]:
    """Return the look of each label: exact ones dark, controls pale, the others coloured.

    It follows from the label alone, so that a mechanism looks the same in every report. Of two that would look quite
    the same the later gets another marker, and of two exact ones, which have few colours, another line.
    """
    looks: dict[str, Look] = {}
    for label in labels:
        colour, marker, line = _numbers(_SALT, label)
        is_exact = label in exact
        few = EXACT_COLOURS if is_exact else CONTROL_COLOURS if label in controls else ()
        own = few[colour % len(few)] if few else _coloured(label)
        able = [
            Look(
                own,
                MARKERS[(marker + step) % len(MARKERS)],
                LINES[(line + step * is_exact) % len(LINES)],
            )
            for step in range(len(MARKERS))
        ]
        strokes = {(one.colour, one.line) for one in looks.values()} if is_exact else set()
        looks[label] = min(able, key=lambda one: (one in looks.values(), (one.colour, one.line) in strokes))
    return looks


def _numbers(salt: int, label: str) -> tuple[int, int, int]:
    digest = hashlib.sha256(f"{salt}:{label}".encode(errors="replace")).digest()
    colour, marker, line = (int.from_bytes(digest[start : start + 4]) for start in (0, 4, 8))
    return colour, marker, line


def _coloured(label: str) -> str:
    num_first = len(COLOURS) - len(_LATER_SALTS)
    place = _numbers(_SALT, label)[0] % num_first
    for later, salt in enumerate(_LATER_SALTS, start=num_first):
        if _numbers(salt, label)[0] % (later + 1) == 0:
            place = later
    return COLOURS[place]


@contextmanager
def styled() -> Iterator[None]:
    """Apply our settings inside the block only."""
    with mpl.rc_context(_RC):  # type: ignore[arg-type]  # keys are literals in the stubs
        yield


@lru_cache(maxsize=1)
def _known_characters() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def plain(text: str, width: int = 24) -> str:
    """Return text as it may stand in a figure: short, without markup, and only with characters the font has."""
    known = _known_characters()
    text = "".join(character if ord(character) in known else "\ufffd" for character in clean(text))
    return shorten(text, width).replace("$", r"\$")
