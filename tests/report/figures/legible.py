"""What the tests of figures share: pictures of invented records, and whether they can be read."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from tests.report.synthetic import analysed, pictures_of

LONG = "a_very_long_name_of_a_mechanism_that_nobody_would_type_twice_but_somebody_will"
MANY = ["full", *(f"variant_{index}" for index in range(9)), LONG, "<b>注意</b> $x_1$ 🚀"]


def pictures(tmp_path, records, start="", **more):
    return pictures_of(analysed(tmp_path, records, **more), start)


def one_picture(start, tmp_path, records, **more):
    """Return the last whose name begins so. Draw no others: that takes most of the time of a test of one."""
    return pictures(tmp_path, records, start, **more)[-1]


def texts(figure) -> list[tuple[str, Bbox]]:
    """Return every visible text with its box in pixels; rotated ones (on reference lines) are left out."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    if figure.stale:  # it has not been drawn as it is
        canvas.draw()
    beyond = set()  # ticks outside the limits exist but are not drawn
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            beyond |= {id(tick.label1) for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    shown = []
    for text in figure.findobj(lambda artist: isinstance(artist, Text) and id(artist) not in beyond):
        if text.get_visible() and text.get_text().strip() and not text.get_rotation():
            # The box of an annotation includes its arrow; only its words matter here.
            box = Text.get_window_extent(text) if isinstance(text, Annotation) else text.get_window_extent()
            shown.append((text.get_text(), box))
    return shown


def assert_legible(figure):
    shown = texts(figure)
    frame = figure.bbox
    for text, box in shown:
        assert box.x0 >= frame.x0 - 1, text
        assert box.x1 <= frame.x1 + 1, text
        assert box.y0 >= frame.y0 - 1, text
        assert box.y1 <= frame.y1 + 1, text
    for (one, first), (other, second) in combinations(shown, 2):
        both = Bbox.intersection(first, second)
        if both is not None and both.width > 1 and both.height > 2.5:
            pytest.fail(f"{one!r} and {other!r} overlap by {both.width:.0f} x {both.height:.0f} pixels")
    assert_whole_marks(figure)


def assert_whole_marks(figure):
    """Check that the frame cuts no mark of a point which lies within it."""
    for axes in figure.axes:
        for line in axes.lines:
            if line.get_marker() in {"None", "", " ", None} or not line.get_clip_on():
                continue
            radius = line.get_markersize() / 2 * figure.dpi / 72
            points = line.get_transform().transform(line.get_xydata().astype(float))
            low, high = axes.bbox.get_points()
            depth = np.minimum(points - low, high - points).min(axis=1)  # in pixels; below 0 outside, where nothing is
            assert not ((depth > -0.5) & (depth < radius - 0.5)).any(), f"a mark of {line.get_label()} is cut"


def words(figure):
    return " ".join(text for text, _ in texts(figure))
