"""All figures of a report, in the order in which they are read."""

from __future__ import annotations

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.figures.breakdown_panels import breakdown_picture
from attn_zoo.report.figures.bubbles import bubble_picture, overview_picture
from attn_zoo.report.figures.curves import Picture
from attn_zoo.report.figures.learning_curves import learning_picture
from attn_zoo.report.figures.roofline import roofline_picture
from attn_zoo.report.figures.scaling_curves import memory_picture, speed_up_picture, time_picture
from attn_zoo.report.figures.score_rows import accuracy_picture
from attn_zoo.report.figures.style import looks
from attn_zoo.report.figures.tuning_curves import tuning_picture

__all__ = ["Picture", "make_pictures"]


def make_pictures(analysis: Analysis) -> list[Picture]:
    """Return what can be drawn from the records: nothing for an empty run."""
    exact = {series.label for one in analysis.panels for series in one.panel.series if series.is_exact}
    exact |= {group.baseline for group in analysis.accuracy}
    look_of = looks(analysis.labels, sorted(exact))
    pictures: list[Picture | None] = []
    for one in analysis.panels:
        pictures += [
            time_picture(one, look_of),
            speed_up_picture(one, look_of),
            memory_picture(one, look_of, "peak_bytes"),
            memory_picture(one, look_of, "extra_bytes"),
            roofline_picture(one, look_of),
        ]
    pictures += [overview_picture(overview, look_of) for overview in analysis.overviews]
    kinds = (accuracy_picture, bubble_picture, learning_picture, breakdown_picture, tuning_picture)
    pictures += [kind(group, look_of) for group in analysis.accuracy for kind in kinds]
    return [picture for picture in pictures if picture is not None]
