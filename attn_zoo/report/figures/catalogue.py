"""The figures of a report, in the order in which they are read. A new figure is a module and an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.figures.breakdown_panels import breakdown_picture
from attn_zoo.report.figures.bubbles import bubble_picture, overview_picture
from attn_zoo.report.figures.learning_curves import learning_picture
from attn_zoo.report.figures.page import Picture
from attn_zoo.report.figures.roofline import roofline_picture
from attn_zoo.report.figures.scaling_curves import memory_picture, speed_up_picture, time_picture
from attn_zoo.report.figures.score_rows import score_picture
from attn_zoo.report.figures.style import Looks, make_looks
from attn_zoo.report.figures.tuning_curves import tuning_picture

__all__ = ["FIGURES", "FigureEntry", "make_pictures"]

Subject = Literal["panels", "overviews", "accuracy"]
"""Lists of `Analysis`: panels of scaling, overviews of several tasks, groups of trainings."""


@dataclass(frozen=True, slots=True)
class FigureEntry:
    """A figure that a report draws for each subject it can be drawn of.

    Args:
        name: start of the file name.
        subject: what one figure is about.
        question: that it answers.
        draw: from one subject and the looks of all labels; None where there is nothing to draw.
    """

    name: str
    subject: Subject
    question: str
    draw: Callable[[Any, Looks], Picture | None]


FIGURES = (
    FigureEntry(
        "time", "panels", "How does time grow with the length, and from where is a variant faster?", time_picture
    ),
    FigureEntry("speedup", "panels", "How much faster than the fastest exact kernel is it?", speed_up_picture),
    FigureEntry(
        "memory-peak",
        "panels",
        "How much memory must be free?",
        partial(memory_picture, quantity="peak_bytes"),
    ),
    FigureEntry(
        "memory-extra",
        "panels",
        "How much memory does the mechanism itself add?",
        partial(memory_picture, quantity="extra_bytes"),
    ),
    FigureEntry("roofline", "panels", "How much of what the machine can do does a kernel reach?", roofline_picture),
    FigureEntry("bubbles", "overviews", "What does speed cost in accuracy, over several tasks?", overview_picture),
    FigureEntry("accuracy", "accuracy", "Which variant scores best, and does it beat the floors?", score_picture),
    FigureEntry("bubbles", "accuracy", "What does speed cost in accuracy?", bubble_picture),
    FigureEntry("learning", "accuracy", "How fast does a variant learn, by steps, FLOPs and time?", learning_picture),
    FigureEntry("breakdown", "accuracy", "On which examples does a variant fail?", breakdown_picture),
    FigureEntry("tuning", "accuracy", "How much does the score hang on the learning rate?", tuning_picture),
)


def make_pictures(analysis: Analysis) -> list[Picture]:
    """Return what can be drawn from the records: nothing for an empty run."""
    exact = {series.label for one in analysis.panels for series in one.panel.series if series.is_exact}
    exact |= {group.baseline for group in analysis.accuracy}
    looks = make_looks(analysis.labels, sorted(exact))
    subjects: list[tuple[Subject, Any]] = [
        *(("panels", panel) for panel in analysis.panels),
        *(("overviews", overview) for overview in analysis.overviews),
        *(("accuracy", group) for group in analysis.accuracy),
    ]
    pictures = (entry.draw(subject, looks) for kind, subject in subjects for entry in FIGURES if entry.subject == kind)
    return [picture for picture in pictures if picture is not None]
