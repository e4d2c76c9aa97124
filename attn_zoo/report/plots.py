"""All figures of a report, in the order in which they are read."""

from __future__ import annotations

from attn_zoo.report.accuracy_plots import accuracy_picture
from attn_zoo.report.analysis import Analysis
from attn_zoo.report.curves import Picture
from attn_zoo.report.scaling_plots import memory_picture, speed_up_picture, time_picture
from attn_zoo.report.style import looks

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
        ]
    pictures += [accuracy_picture(group, look_of) for group in analysis.accuracy]
    return [picture for picture in pictures if picture is not None]
