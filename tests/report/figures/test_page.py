"""The page: panels stand where they were asked for, titles fit, and nothing else lays out a figure."""

import re
from pathlib import Path

import pytest
from matplotlib.lines import Line2D

import attn_zoo
from attn_zoo.report.figures.labels import covered
from attn_zoo.report.figures.page import WIDTH, Page
from attn_zoo.report.figures.style import styled
from tests.report.figures.legible import assert_legible


def inches(page, axes):
    """Return left, top, width and height of axes, in inches from the top left corner."""
    box = axes.get_window_extent()
    width, height = page.figure.get_size_inches()
    assert width == page.width
    left, low, right, up = (edge / page.figure.dpi for edge in box.extents)
    return pytest.approx((left, height - up, right - left, up - low))


def test_rows_of_panels_keep_their_places_while_the_page_grows():
    page = Page("title", "note")
    top = page.bottom
    first, second, third = page.panels(3, columns=2, height=2.0, left=1.0, right=0.5, gap=0.5, above=0.1, below=0.4)
    width = (WIDTH - 1.0 - 0.5 - 0.5) / 2
    assert (1.0, top + 0.1, width, 2.0) == inches(page, first)
    assert (1.5 + width, top + 0.1, width, 2.0) == inches(page, second)
    assert (1.0, top + 2.6, width, 2.0) == inches(page, third)
    bar = page.beside(second, gap=0.1, width=0.2, max_height=1.5)
    assert (1.6 + 2 * width, top + 0.1, 0.2, 1.5) == inches(page, bar)
    (last,) = page.panels(height=1.0, above=0.0)
    assert (0.82, top + 5.0, WIDTH - 0.82 - 0.3, 1.0) == inches(page, last)
    assert (1.0, top + 0.1, width, 2.0) == inches(page, first)


@pytest.mark.parametrize("title", ["", "short", "WIDE LETTERS " * 9, "i" * 120])
def test_titles_notes_and_legends_fit_the_page(title):
    with styled():
        page = Page(title, "a note of many words " * 20 + "\nanother line")
        page.legend([Line2D([], [], label=f"a label of some length {index}") for index in range(9)])
        page.panels(2, columns=2, height=1.0)
        page.legend([Line2D([], [], label="below")])
        assert_legible(page.figure)


def test_covered_sums_the_shared_areas():
    boxes = [(0.0, 0.0, 2.0, 2.0), (5.0, 5.0, 6.0, 6.0)]
    assert covered(boxes, [(1.0, 1.0, 3.0, 3.0), (0.0, 0.0, 1.0, 2.0)]).tolist() == [3.0, 0.0]
    assert covered(boxes, []).tolist() == [0.0, 0.0]


def test_only_the_page_makes_figures_and_places_axes():
    root = Path(attn_zoo.__file__).parent
    makers = [path for path in root.rglob("*.py") if re.search(r"\b(add_axes|Figure|subplots)\(", path.read_text())]
    assert [path.name for path in makers] == ["page.py"]
