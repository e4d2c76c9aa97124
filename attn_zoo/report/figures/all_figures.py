"""The figures of a report, in the order in which they are read. A new figure is a module and an entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.figure import Figure

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.panels import Panel, lead_panel
from attn_zoo.report.figures.breakdown_panels import draw_breakdown
from attn_zoo.report.figures.bubbles import draw_bubbles, draw_task_means
from attn_zoo.report.figures.error_curves import draw_error_costs, draw_errors
from attn_zoo.report.figures.exchanges import draw_exchanges
from attn_zoo.report.figures.learning_curves import draw_learning
from attn_zoo.report.figures.page import Page
from attn_zoo.report.figures.roofline import draw_roofline
from attn_zoo.report.figures.scaling_curves import draw_energy, draw_memory, draw_speed_up, draw_time
from attn_zoo.report.figures.score_rows import draw_scores
from attn_zoo.report.figures.style import Looks, make_looks, styled
from attn_zoo.report.figures.tuning_curves import draw_tuning
from attn_zoo.report.tables.front_table import front_errors

Subject = Literal["panel", "errors", "overview", "accuracy"]
"""A panel of scaling, distances from exact attention, an overview of several tasks, a group of trainings."""


@dataclass(frozen=True, slots=True)
class FigureEntry:
    """A figure that a report draws for each subject it can be drawn of.

    Args:
        name: start of the file name; the name of the subject follows.
        subject: what one figure is about.
        section: of the report; see `attn_zoo.report.tables.all_tables.QUESTIONS`.
        question: that it answers.
        draw: from one subject and the looks of all labels, inside `styled()`; None where there is nothing to draw.
    """

    name: str
    subject: Subject
    section: str
    question: str
    draw: Callable[[Any, Looks], Page | None]


FIGURES = (
    FigureEntry("time", "panel", "time", "How long does it take, by length?", draw_time),
    FigureEntry("speedup", "panel", "growth", "How many times as fast is it as exact attention?", draw_speed_up),
    FigureEntry("memory-peak", "panel", "memory", "How much memory must there be?", draw_memory),
    FigureEntry("energy", "panel", "efficiency", "How many joules does a call take?", draw_energy),
    FigureEntry("roofline", "panel", "efficiency", "How near does a kernel come to the machine's roof?", draw_roofline),
    FigureEntry("approximation", "errors", "approximation", "How near is it to exact attention?", draw_errors),
    FigureEntry("approximation-cost", "errors", "approximation", "What does nearness cost?", draw_error_costs),
    FigureEntry("bubbles", "overview", "accuracy", "What does speed cost in accuracy over tasks?", draw_task_means),
    FigureEntry("accuracy", "accuracy", "accuracy", "Which scores best, and does it beat the floors?", draw_scores),
    FigureEntry("exchange", "accuracy", "accuracy", "What does another mechanism cost the model?", draw_exchanges),
    FigureEntry("bubbles", "accuracy", "accuracy", "What does speed cost in accuracy?", draw_bubbles),
    FigureEntry("learning", "accuracy", "accuracy", "How fast does it learn, by steps, FLOPs and time?", draw_learning),
    FigureEntry("breakdown", "accuracy", "accuracy", "On which examples does it fail?", draw_breakdown),
    FigureEntry("tuning", "accuracy", "accuracy", "How much does the score depend on the learning rate?", draw_tuning),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A finished figure with what a reader who cannot see it needs.

    Args:
        name: file name stem.
        section: of the report that it belongs to.
        title: one line.
        question: that it answers.
        alt: what it shows, in words and numbers.
        figure: not yet rendered.
    """

    name: str
    section: str
    title: str
    question: str
    alt: str
    figure: Figure


def front_picture(analysis: Analysis, pictures: Sequence[Picture]) -> Picture | None:
    """Return the one figure for the top of a report: times of the panel that says most, else the first scores."""
    panel = lead_panel(analysis.panels)
    groups = sorted(analysis.accuracy, key=lambda group: -len(group.means))
    wanted = f"time-{panel.name}" if panel is not None else f"accuracy-{groups[0].name}" if groups else ""
    if not wanted and (errors := front_errors(analysis)) is not None:
        wanted = f"approximation-{errors.name}"
    return next((picture for picture in pictures if picture.name == wanted), None)


def _subjects(analysis: Analysis, panels: Sequence[Panel]) -> list[tuple[FigureEntry, str, Any]]:
    """Return what may be drawn, each with the name of its figure."""
    subjects: list[tuple[Subject, str, Any]] = [
        *(("panel", panel.name, panel) for panel in panels if panel.points),
        *(("errors", group.name, group) for group in analysis.errors),
        *(("overview", overview.name, overview) for overview in analysis.overviews),
        *(("accuracy", group.name, group) for group in analysis.accuracy),
    ]
    return [
        (entry, f"{entry.name}-{name}", subject)
        for kind, name, subject in subjects
        for entry in FIGURES
        if entry.subject == kind
    ]


def figure_names(analysis: Analysis) -> list[str]:
    """Return the names of figures that these results may have."""
    return [name for _, name, _ in _subjects(analysis, analysis.panels)]


def draw_pictures(analysis: Analysis, start: str = "", panels: Sequence[Panel] | None = None) -> Iterator[Picture]:
    """Yield what can be drawn from the records: nothing for an empty run.

    Drawn are figures whose names begin with `start`; of scaling those of `panels`, by default of every one.
    """
    exact = {label for label, claim in analysis.claims.items() if claim.is_exact}
    labels = sorted(analysis.claims, key=lambda label: (label.casefold(), label))
    looks = make_looks(labels, exact, analysis.controls)
    for entry, name, subject in _subjects(analysis, analysis.panels if panels is None else panels):
        if name.startswith(start):
            with styled():
                page = entry.draw(subject, looks)
            if page is not None:
                yield Picture(name, entry.section, page.title, entry.question, page.alt, page.figure)
