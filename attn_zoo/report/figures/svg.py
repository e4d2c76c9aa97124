"""Figures as files and inside a page: SVG whose text is text, that follows the reader's colour scheme, and PNG.

Matplotlib's SVG is rewritten: styles become attributes, because a page that forbids unknown styles forbids those of its
drawings too; numbers are rounded; what draws nothing goes. A `Tag` on an artist becomes attributes that the script of
the page reads, and the tooltips that a browser shows by itself.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from matplotlib.artist import Artist
from matplotlib.figure import Figure

from attn_zoo.errors import ConfigError
from attn_zoo.report.figures.style import DARK, FONTS, styled
from attn_zoo.units import clean
from attn_zoo.whole_files import write_whole

_DECIMALS = 2  # of a point: a hundredth of it is a fiftieth of a pixel on a page twice as wide as the figure
_NUMBER = re.compile(r"-?\d+\.\d+")
_COORDINATES = frozenset({"d", "x", "y", "width", "height", "points", "cx", "cy", "r"})
_TAG = "tag:"
_NOT_XML = re.compile("[\ufffe\uffff]")  # of what `clean` leaves


@dataclass(frozen=True, slots=True)
class Tag:
    """What an artist is, for the script of the page.

    Args:
        of: the curve that it belongs to and is hidden with.
        is_key: it names the curve: pressing it hides the curve.
        tips: what its marks say, one after the other.
        is_log: it has a place on logarithmic axes only.
        axes: of axes that may be drawn linearly: left, top, right and bottom edge in points, then the scale, `"log"`
            or `"linear"`, and the limits across, then those upwards.
    """

    of: str = ""
    is_key: bool = False
    tips: tuple[str, ...] = ()
    is_log: bool = False
    axes: tuple[float | str, ...] = ()

    def put_on(self, *artists: Artist) -> None:
        """Write the tag on artists: matplotlib carries an identifier through to its SVG, and this is one."""
        for artist in artists if self != NO_TAG else ():
            artist.set_gid(_TAG + json.dumps(asdict(self)))


NO_TAG = Tag()


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure: the view box of its `svg` element, and the markup that stands inside that."""

    view_box: str
    markup: str


def render(figure: Figure, kind: Literal["svg", "png"]) -> bytes:
    """Return the file of a figure; the same figure gives the same bytes (no date, no random identifiers)."""
    buffer = io.BytesIO()
    with styled():
        if kind == "png":
            figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
            return buffer.getvalue()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = _tidied(ElementTree.fromstring(buffer.getvalue()))  # noqa: S314 - our own figure
    style = Element("style")
    drawn = {value for element in svg.iter() for value in element.attrib.values()}
    style.text = dark_rules(colour for colour in DARK if colour in drawn)
    svg.insert(0, style)
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + _text(svg).encode()


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


def dark_rules(colours: Iterable[str]) -> str:
    """Return style rules that give these colours of ours their dark form on a dark screen."""
    rules = "".join(
        f'[{name}="{colour}"]{{{name}:{DARK[colour]}}}' for colour in colours for name in ("fill", "stroke")
    )
    return f"@media screen and (prefers-color-scheme:dark){{{rules}}}"


def inline_figures(figures: Sequence[bytes]) -> tuple[str, list[Drawing]]:
    """Return the shared definitions, markup for a `defs` element of the same page, and the figures that refer to them.

    In SVG that `render` wrote the identifier of a definition follows from what it draws: those of one name are one.
    """
    definitions: dict[str, str] = {}
    drawings = []
    for figure in figures:
        root = _plain_names(ElementTree.fromstring(figure))  # noqa: S314 - our own figures
        for child in list(root):
            if child.tag in {"defs", "style"}:
                root.remove(child)
                definitions |= {each.attrib["id"]: _text(each) for each in child}
        markup = "".join(_text(child) for child in root)
        drawings.append(Drawing(root.attrib["viewBox"], markup))
    return "".join(definitions.values()), drawings


def _xml_text(text: str) -> str:
    """Return `text` on one line with only characters that XML allows."""
    return _NOT_XML.sub("\ufffd", clean(text))


def _text(element: Element) -> str:
    return ElementTree.tostring(element, encoding="unicode").replace(" />", "/>")


def _plain_names(svg: Element) -> Element:
    for element in svg.iter():
        element.tag = element.tag.rpartition("}")[2]
    return svg


def _tidied(svg: Element) -> Element:
    """Return what matplotlib wrote, smaller, with one element of definitions."""
    _plain_names(svg)
    for element in svg.iter():
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        attributes |= _declarations(attributes.pop("style", ""))
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        if "font" in attributes:
            attributes |= _font(attributes.pop("font"))
        attributes.pop("font-family", None)
        if "font-size" in attributes:
            attributes["font-size"] = attributes["font-size"].removesuffix("px")
        if attributes.get("text-anchor") == "start":
            del attributes["text-anchor"]
        element.text = (element.text or "").strip() or None
        element.tail = None
        element.attrib.clear()
        element.attrib.update({name: _rounded(name, value) for name, value in attributes.items()})
    size = {name: svg.attrib[name] for name in ("width", "height", "viewBox")}
    look = {"font-family": FONTS, "stroke-linejoin": "round"}
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg"} | size | look)
    named = {name: each for defs in svg.iter("defs") for each in defs if (name := each.get("id"))}
    body = [child for child in svg if child.tag not in {"metadata", "defs"}]
    for part in body:
        _simplify(part)
    used = dict.fromkeys(name for part in body for each in part.iter() if (name := _reference(each)))
    if used:
        definitions = Element("defs")
        for name in used:
            named[name].set("id", name)
            definitions.append(named[name])
        root.append(definitions)
    root.extend(each for part in body for each in _unwrapped(part))
    return root


def _reference(element: Element) -> str:
    target = element.get("href", "") + element.get("clip-path", "").removeprefix("url(").removesuffix(")")
    return target[1:] if target.startswith("#") else ""  # others are the pixels of a heat map, in the figure


def _simplify(part: Element) -> None:
    """Turn tags into attributes and tooltips, and drop identifiers and groups that say nothing."""
    for element in part.iter():
        name = element.attrib.pop("id", "")
        if name.startswith(_TAG):
            _apply(json.loads(name.removeprefix(_TAG)), element)
    for element in list(part.iter()):
        element[:] = [kept for child in element for kept in _unwrapped(child)]


def _apply(tag: Mapping[str, Any], element: Element) -> None:
    if tag["of"]:
        element.set("data-key" if tag["is_key"] else "data-of", _xml_text(tag["of"]))
    if tag["is_log"]:
        element.set("data-log", "")
    if tag["axes"]:
        element.set("data-axes", " ".join(f"{each:g}" if isinstance(each, float) else each for each in tag["axes"]))
    for mark, words in zip(element.iter("use"), tag["tips"], strict=False):
        title = Element("title")
        title.text = _xml_text(words)
        mark.append(title)


def _unwrapped(element: Element) -> Iterator[Element]:
    if element.tag == "g" and not element.attrib:
        for child in element:
            yield from _unwrapped(child)
    elif element.tag != "defs":
        yield element


def _declarations(style: str) -> dict[str, str]:
    parts = (declaration.partition(":") for declaration in style.split(";") if declaration.strip())
    return {name.strip(): value.strip() for name, _, value in parts}


def _font(shorthand: str) -> dict[str, str]:
    """Return weight and size of a font, which older versions of matplotlib write as one."""
    weight, size = re.search(r"\b[1-9]00\b|\bbold\b", shorthand), re.search(r"[\d.]+px", shorthand)
    return ({"font-weight": weight[0]} if weight else {}) | ({"font-size": size[0]} if size else {})


def _rounded(name: str, value: str) -> str:
    def shorter(match: re.Match[str]) -> str:
        return f"{float(match[0]):.{_DECIMALS}f}".rstrip("0").rstrip(".")

    if name == "transform":  # a scale needs its digits
        return re.sub(r"(translate|rotate)\([^)]*\)", lambda match: _NUMBER.sub(shorter, match[0]), value)
    if name not in _COORDINATES:
        return value
    value = _NUMBER.sub(shorter, value)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", value) if name == "d" else value
