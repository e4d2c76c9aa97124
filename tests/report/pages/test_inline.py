"""Figures in the page draw what their files draw, and share what they have in common."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from attn_zoo.report.figures.all_figures import make_pictures
from attn_zoo.report.figures.style import render
from attn_zoo.report.pages.inline import inline_figures

INHERITED = ("fill", "stroke", "stroke-width", "stroke-linejoin", "stroke-linecap", "opacity", "stroke-dasharray")


def matrix(text):
    """Return the affine matrix of a `transform` attribute."""
    total = np.eye(3)
    for kind, arguments in re.findall(r"(\w+)\(([^)]*)\)", text):
        numbers = [float(number) for number in re.split(r"[ ,]+", arguments.strip())]
        step = np.eye(3)
        if kind == "translate":
            step[:2, 2] = [*numbers, 0.0][:2]
        elif kind == "scale":
            step[[0, 1], [0, 1]] = (numbers * 2)[:2]
        elif kind == "rotate":
            angle = np.deg2rad(numbers[0])
            step[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        else:
            raise AssertionError(kind)
        total = total @ step
    return total


def attributes_of(element, everywhere):
    found = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    pairs = (part.split(":") for part in found.pop("style", "").split(";") if part.strip())
    return everywhere | found | {name.strip(): value.strip() for name, value in pairs}


def drawn(root, named, everywhere):
    """Return every outline as it comes to stand on the page: letters of its commands, points, look, clip."""
    found = []

    def visit(element, at, look, clip):
        tag = element.tag.rpartition("}")[2]
        if tag in {"defs", "metadata", "style"}:
            return
        attributes = attributes_of(element, everywhere if tag in {"path", "use", "g", "rect"} else {})
        look = look | {name: attributes[name] for name in INHERITED if name in attributes}
        if "clip-path" in attributes:
            clip = region(named[attributes["clip-path"][5:-1]])
        at = at @ matrix(attributes.get("transform", ""))
        if tag == "use":
            moved = matrix(f"translate({attributes.get('x', 0)} {attributes.get('y', 0)})")
            visit(named[attributes["href"][1:]], at @ moved, look, clip)
            return
        if tag in {"path", "rect", "image"}:
            letters, points = outline(tag, attributes)
            pixels = attributes.get("href", "")
            found.append((letters + pixels, at[:2, :2] @ points + at[:2, 2:], tuple(sorted(look.items())), clip))
        for child in element:
            visit(child, at, look, clip)

    visit(root, np.eye(3), {}, None)
    return found


def outline(tag, attributes):
    if tag == "path":
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", attributes.get("d", ""))]
        return re.sub(r"[^A-Za-z]", "", attributes.get("d", "")), np.array(numbers).reshape(-1, 2).T
    x, y, width, height = (float(attributes.get(name, 0)) for name in ("x", "y", "width", "height"))
    return tag, np.array([[x, x + width], [y, y + height]])


def region(clip):
    (shape,) = clip
    _, points = outline(shape.tag.rpartition("}")[2], shape.attrib)
    return tuple(points.round(1).flatten())


def test_the_page_draws_what_the_files_draw(analysis):
    figures = [render(picture.figure, "svg") for picture in make_pictures(analysis)]
    definitions, drawings = inline_figures(figures)
    shared = {element.get("id"): element for element in ElementTree.fromstring(f"<defs>{definitions}</defs>")}
    assert any(b"<image" in figure for figure in figures) or len(figures) >= 5
    for figure, drawing in zip(figures, drawings, strict=True):
        root = ElementTree.fromstring(figure)
        own = {element.get("id"): element for element in root.iter() if element.get("id")}
        expected = drawn(root, own, {"stroke-linejoin": "round", "stroke-linecap": "butt"})
        got = drawn(ElementTree.fromstring(drawing.markup), shared, {})
        assert drawing.view_box == root.get("viewBox")
        assert len(expected) > 100
        assert [letters for letters, *_ in got] == [letters for letters, *_ in expected]
        for one, two in zip(got, expected, strict=True):
            assert np.abs(one[1] - two[1]).max(initial=0) < 0.03  # points: letters are rounded to some hundredths
            assert dict(one[2]) == dict(two[2])
            assert one[3] == pytest.approx(two[3], abs=0.2) if two[3] else one[3] is None


def test_what_figures_have_in_common_is_there_once(analysis):
    figure = render(make_pictures(analysis)[0].figure, "svg")
    _, (alone,) = inline_figures([figure])
    definitions, twice = inline_figures([figure, figure])
    assert twice[0] == twice[1]
    assert len(twice[0].markup) < len(alone.markup)  # its words moved to the definitions too
    assert inline_figures([figure] * 3)[0] == definitions
    assert len(definitions) + 2 * len(twice[0].markup) < len(figure)


def test_nothing_to_draw_is_nothing():
    assert inline_figures([]) == ("", [])
