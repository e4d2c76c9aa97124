"""Figures inside the page: what they have in common, above all letters and words, is defined once for all of them.

Matplotlib draws text as outlines, so that it looks alike everywhere, and gives each file the outlines it needs. A page
of forty figures would hold the alphabet forty times and the names of the variants in each legend.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

_DECIMALS = 2  # of a point: a hundredth of it is a fiftieth of a pixel on a page twice as wide as the figure
_NUMBER = re.compile(r"-?\d+\.\d+")
_COORDINATES = frozenset({"d", "x", "y", "width", "height", "points", "cx", "cy", "r"})


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure as markup.

    Args:
        view_box: of its `svg` element.
        markup: what stands inside that element.
    """

    view_box: str
    markup: str


@dataclass(slots=True)
class _Definitions:
    """Elements that others refer to, by their content: equal ones are one."""

    names: dict[str, str] = field(default_factory=dict)

    def name(self, element: Element) -> str:
        """Return the identifier under which `element` can be referred to."""
        return self.names.setdefault(_text(element), f"d{len(self.names)}")

    def markup(self) -> str:
        """Return all of them, each with its identifier."""
        return "".join(re.sub(r"^<(\w+)", rf'<\1 id="{name}"', text) for text, name in self.names.items())


def inline_figures(figures: Sequence[bytes]) -> tuple[str, list[Drawing]]:
    """Return the shared definitions, markup for a `defs` element of the same page, and the figures that refer to them.

    Styles become attributes, because a page that forbids unknown styles forbids those of its drawings too.

    Args:
        figures: SVG as matplotlib writes it.
    """
    definitions = _Definitions()
    roots = [_tidied(ElementTree.fromstring(figure)) for figure in figures]  # noqa: S314 - our own figures
    for root in roots:
        _take_definitions(root, definitions)
    words = Counter(_text(_word(group)) for root in roots for group in _groups_of_uses(root))
    for root in roots:
        for group in _groups_of_uses(root):
            if words[_text(_word(group))] > 1:
                name = definitions.name(_word(group))
                group.tag = "use"
                group[:] = []
                group.set("href", f"#{name}")
    drawings = [Drawing(root.attrib.pop("viewBox"), _text(root)) for root in roots]
    return definitions.markup(), drawings


def _text(element: Element) -> str:
    return ElementTree.tostring(element, encoding="unicode").replace(" />", "/>")


def _tidied(svg: Element) -> Element:
    """Return a group that draws what the figure draws, with plain names, attributes for styles and rounded numbers."""
    everywhere = {}
    for element in svg.iter():
        element.tag = element.tag.rpartition("}")[2]
        if element.tag == "style":  # matplotlib's only rule is for all elements
            everywhere = _declarations((element.text or "").strip().removeprefix("*{").removesuffix("}"))
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        attributes |= _declarations(attributes.pop("style", ""))
        element.attrib.clear()
        element.attrib.update({name: _rounded(name, value) for name, value in attributes.items()})
        element.text = element.tail = None
    root = Element("g", {"viewBox": svg.get("viewBox", "")} | everywhere)
    root.extend(child for child in svg if child.tag != "metadata")
    return root


def _declarations(style: str) -> dict[str, str]:
    parts = (declaration.partition(":") for declaration in style.split(";") if declaration.strip())
    return {name.strip(): value.strip() for name, _, value in parts}


def _rounded(name: str, value: str) -> str:
    def shorter(match: re.Match[str]) -> str:
        return f"{float(match[0]):.{_DECIMALS}f}".rstrip("0").rstrip(".")

    if name == "transform":  # a scale needs its digits
        return re.sub(r"translate\([^)]*\)", lambda match: _NUMBER.sub(shorter, match[0]), value)
    if name not in _COORDINATES:
        return value
    value = _NUMBER.sub(shorter, value)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", value) if name == "d" else value


def _take_definitions(root: Element, definitions: _Definitions) -> None:
    """Move what stands in `defs` to the definitions, let references follow, and drop groups that say nothing."""
    new_names = {}
    for defs in root.iter("defs"):
        for element in defs:
            if old_name := element.attrib.pop("id", None):
                new_names[old_name] = definitions.name(element)
    for element in root.iter():
        element.attrib.pop("id", None)
        if (target := element.get("href", "")).startswith("#"):  # others are the pixels of a heat map, in the figure
            element.set("href", f"#{new_names[target[1:]]}")
        if clip := element.get("clip-path"):
            element.set("clip-path", f"url(#{new_names[clip.removeprefix('url(#').removesuffix(')')]})")
    for element in list(root.iter()):
        element[:] = list(_unwrapped(element))


def _unwrapped(parent: Element) -> Iterator[Element]:
    for child in parent:
        if child.tag == "g" and not child.attrib:
            yield from _unwrapped(child)
        elif child.tag != "defs":
            yield child


def _groups_of_uses(root: Element) -> list[Element]:
    return [group for group in root.iter("g") if len(group) and all(child.tag == "use" for child in group)]


def _word(group: Element) -> Element:
    """Return the group without what is said about it as a whole: its place and colour."""
    word = Element("g")
    word.extend(group)
    return word
