"""Which variant is the fastest at each length, as far as the intervals tell, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_zoo.report.analysis.panels import Panel
from attn_zoo.report.analysis.series import Point
from attn_zoo.statistics import Ratio, time_ratio


@dataclass(frozen=True, slots=True)
class Winner:
    """The fastest at one length.

    Args:
        seq_len: tokens.
        labels: the fastest first, then all that the intervals do not tell from it.
        num_rivals: measured at this length, the winners included.
    """

    seq_len: int
    labels: tuple[str, ...]
    num_rivals: int


def lead_panel(panels: Sequence[Panel]) -> Panel | None:
    """Return the panel that says most: with most curves, then most points; None where nothing was measured."""
    measured = [panel for panel in panels if panel.points]
    return max(measured, key=lambda one: (sum(bool(s.points) for s in one.series), len(one.points)), default=None)


def times_faster(slow: Point, fast: Point) -> Ratio:
    """Return how many times the time of one point is that of the other; pairs count where both were timed in turns."""
    sizes = (slow.timing.process_sizes, fast.timing.process_sizes)
    is_paired = slow.record.bundle == fast.record.bundle != "" and len(sizes[0]) == len(sizes[1])
    samples = (point.timing.samples_ms or (point.median_ms,) for point in (slow, fast))
    return time_ratio(*samples, is_paired=is_paired, sizes_a=sizes[0], sizes_b=sizes[1])


def winners(panel: Panel) -> list[Winner]:
    """Return the fastest of each length, shortest first; one that computes dense scores underneath is not judged."""
    by_length: dict[int, list[tuple[Point, str]]] = {}
    for series in panel.series:
        for point in series.points:
            if not series.is_simulated and point.median_ms > 0:
                by_length.setdefault(point.seq_len, []).append((point, series.label))
    found = []
    for length, rivals in sorted(by_length.items()):
        best, *others = sorted(rivals, key=lambda rival: (rival[0].median_ms, rival[1]))
        level = [label for point, label in others if times_faster(point, best[0]).low <= 1.0]
        found.append(Winner(length, (best[1], *level), len(rivals)))
    return found
