"""Figures as files and in the page draw what matplotlib draws, follow the colour scheme and carry what marks say."""

import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from attn_zoo.report.figures.page import WIDTH, Page
from attn_zoo.report.figures.style import COLOURS, DARK, EXACT_COLOURS, INK, MUTED, PAPER, styled
from attn_zoo.report.figures.svg import Tag, inline_figures, render
from tests.report.synthetic import pictures_of

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


def plain_svg(figure):
    """Return what matplotlib itself writes."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return ElementTree.fromstring(buffer.getvalue())


def named(root):
    return {element.get("id"): element for element in root.iter() if element.get("id")}


def written(root):
    return [element.text for element in root.iter() if element.tag.rpartition("}")[2] == "text"]


def test_files_and_page_draw_and_say_what_matplotlib_does(analysis):
    every = pictures_of(analysis)
    definitions, drawings = inline_figures([render(picture.figure, "svg") for picture in every])
    shared = named(ElementTree.fromstring(f"<defs>{definitions}</defs>"))
    for picture, drawing in zip(every, drawings, strict=True):
        root, file = plain_svg(picture.figure), ElementTree.fromstring(render(picture.figure, "svg"))
        page = ElementTree.fromstring(f"<svg>{drawing.markup}</svg>")
        everywhere = {"stroke-linejoin": "round", "stroke-linecap": "butt"}
        expected = drawn(root, named(root), everywhere)
        assert drawing.view_box == root.get("viewBox") == file.get("viewBox")
        assert len(expected) > 20
        for svg, definitions_of in ((file, named(file)), (page, shared)):
            got = drawn(svg, definitions_of, everywhere)
            assert [letters for letters, *_ in got] == [letters for letters, *_ in expected]
            for one, two in zip(got, expected, strict=True):
                assert np.abs(one[1] - two[1]).max(initial=0) < 0.03
                assert dict(one[2]) == dict(two[2])
                assert one[3] == pytest.approx(two[3], abs=0.2) if two[3] else one[3] is None
            assert written(svg) == written(root)


def test_words_are_text_that_can_be_searched(analysis):
    figure = render(pictures_of(analysis, "time")[0].figure, "svg").decode()
    for words in (">bigbird<", ">sequence length (tokens)<", ">Time against sequence length: forward"):
        assert words in figure


def test_what_figures_have_in_common_is_there_once(analysis):
    figure = render(pictures_of(analysis, "time")[0].figure, "svg")
    definitions, (one, two) = inline_figures([figure, figure])
    assert one == two
    assert inline_figures([figure])[0] == definitions
    names = re.findall(r'id="(\w+)"', definitions)
    assert len(names) == len(set(names)) > 3


def test_nothing_to_draw_is_nothing():
    assert inline_figures([]) == ("", [])


def test_every_colour_of_ours_has_a_dark_form_that_can_be_seen():
    def light(colour):
        parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    paper = light(DARK[PAPER])
    for colour in (INK, MUTED, *EXACT_COLOURS, *COLOURS):
        assert (light(DARK[colour]) + 0.05) / (paper + 0.05) >= 4.5, colour
    assert len({DARK[colour] for colour in (*EXACT_COLOURS, *COLOURS)}) == len(EXACT_COLOURS) + len(COLOURS)


def test_a_file_follows_the_colour_scheme_with_the_colours_that_it_has(analysis):
    figure = render(pictures_of(analysis, "time")[0].figure, "svg").decode()
    rules = figure[figure.index("<style>") : figure.index("</style>")]
    assert f'[fill="{INK}"]{{fill:{DARK[INK]}}}' in rules
    assert set(re.findall(r'"(#\w+)"', rules)) == {colour for colour in DARK if f'="{colour}"' in figure}


def test_tags_become_attributes_and_tooltips_and_names_harm_nobody():
    evil = "</title></script><script>\u2028\ufffe'\"&"
    with styled():
        page = Page("title", "note")
        (axes,) = page.panels(height=2.0)
        axes.set_title("$x^2$")
        axes.set(xscale="log", xlim=(1, 100), ylim=(0, 5))
        (line,) = axes.plot([1, 10, 100], [1, 2, 3], marker="o")
        Tag(of=evil, tips=("one", evil, "three")).put_on(line)
        page.may_be_linear(axes)
        page.describe("")
    root = ElementTree.fromstring(render(page.figure, "svg"))
    (curve,) = (element for element in root.iter() if element.get("data-of"))
    shown = "</title></script><script> \ufffd'\"&"
    assert curve.get("data-of") == shown
    assert [element.text for element in curve.iter("{http://www.w3.org/2000/svg}title")] == ["one", shown, "three"]
    (held,) = (element.attrib["data-axes"] for element in root.iter() if element.get("data-axes"))
    left, top, right, bottom, *rest = held.split()
    assert rest == ["log", "1", "100", "linear", "0", "5"]
    assert (float(left), float(right)) == pytest.approx((72 * 0.82, 72 * (WIDTH - 0.3)))
    assert float(bottom) - float(top) == pytest.approx(72 * 2.0)
