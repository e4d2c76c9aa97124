"""The page: panels stand where they were asked for, titles fit, and nothing else lays out a figure."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.lines import Line2D

import attn_zoo
from attn_zoo.report.figures.labels import (
    POINT_NAME_SIZE,
    PointName,
    covered,
    draw_point_names,
    line_box,
    square,
)
from attn_zoo.report.figures.page import TITLE_SIZE, WIDTH, Page, text_size
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


WRAPPED = (
    "Peak memory against sequence length: forward + backward, bidirectional, batch 2, a quarter of every second "
    "sequence padded, 2 threads, CPU, Example CPU @ 2.0 GHz"
)
"""Whose first line is no narrower in letters that are a tenth smaller, as these are drawn on whole pixels."""


@pytest.mark.parametrize("title", ["", "short", "WIDE LETTERS " * 9, "i" * 120, WRAPPED])
def test_titles_notes_and_legends_fit_the_page(title):
    with styled():
        page = Page(title, "a note of many words " * 20 + "\nanother line")
        page.legend([Line2D([], [], label=f"a label of some length {index}") for index in range(9)])
        page.panels(2, columns=2, height=1.0)
        page.legend([Line2D([], [], label="below")])
        assert_legible(page.figure)


def test_a_wide_entry_of_a_legend_moves_to_the_left():
    with styled():
        page = Page("title", "")
        page.legend([Line2D([], [], label="a label that is about as wide as the page, " + "m" * 12)], left=1.5)
        assert_legible(page.figure)


def test_a_long_title_takes_the_lines_it_needs():
    """Of the padded panels of peers, whose titles were cut in the middle."""
    title = (
        "Speed-up over torch SDPA against sequence length: forward, no graph kept, attention only, a quarter of every "
        "second sequence padded"
    )
    with styled():
        page = Page(title, "a note")
        page.panels(height=1.0)
        assert_legible(page.figure)
        *lines, note = (text.get_text() for text in page.figure.texts)
        assert (" ".join(lines), note) == (title, "a note")
        assert all(float(text.get_fontsize()) > 0.85 * TITLE_SIZE for text in page.figure.texts[: len(lines)])


def test_the_name_of_a_point_keeps_off_other_marks():
    """A mark right beside the nearest free place would take the name for its own."""
    with styled():
        page = Page("a title", "a note")
        (axes,) = page.panels(height=3.0)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        x, y = axes.transData.transform((0.5, 0.5))
        width = 100 * text_size("mine", POINT_NAME_SIZE, "bold")[0]
        other = square(x + 3.0 * 100 / 72 + width + 12, y, 3.0)  # to the right of the first place
        inside = axes.get_window_extent()
        frame = inside.x0, inside.y0, inside.x1, inside.y1
        draw_point_names(axes, [PointName("mine", "black", 0.5, 0.5, 3.0)], frame, [other])
        (name,) = (text for text in page.figure.texts if text.get_text() == "mine")
        box = name.get_window_extent()
        away = max(other[0] - box.x1, box.x0 - other[2], other[1] - box.y1, box.y0 - other[3])
        assert away > 6


def test_the_line_to_the_name_of_a_point_is_not_taken_for_its_bars():
    """On a bar, or upright or level beside one, it would make the interval longer."""
    with styled():
        page = Page("a title", "a note")
        (axes,) = page.panels(height=3.0)
        inside = axes.get_window_extent()
        bars = [line_box(axes, (0.5, 0.4), (0.5, 0.6)), line_box(axes, (0.48, 0.5), (0.52, 0.5))]
        frame = inside.x0, inside.y0, inside.x1, inside.y1
        draw_point_names(axes, [PointName("a longer name", "black", 0.5, 0.5, 3.0)], frame, bars)
        (line,) = axes.get_lines()
        assert np.abs(np.diff(line.get_xydata(), axis=0)).min() > 0.01


def test_covered_sums_the_shared_areas():
    boxes = [(0.0, 0.0, 2.0, 2.0), (5.0, 5.0, 6.0, 6.0)]
    assert covered(boxes, [(1.0, 1.0, 3.0, 3.0), (0.0, 0.0, 1.0, 2.0)]).tolist() == [3.0, 0.0]
    assert covered(boxes, []).tolist() == [0.0, 0.0]


def test_only_the_page_makes_figures_and_places_axes():
    root = Path(attn_zoo.__file__).parent
    makers = [path for path in root.rglob("*.py") if re.search(r"\b(add_axes|Figure|subplots)\(", path.read_text())]
    assert [path.name for path in makers] == ["page.py"]
