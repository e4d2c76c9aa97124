"""Which variant is the fastest at each length, as far as the intervals tell, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.series import Point, Series
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


def times_faster(slow: Point, fast: Point) -> Ratio:
    """Return how many times the time of one point is that of the other; pairs count where both were timed in turns."""
    sizes = (slow.timing.process_sizes, fast.timing.process_sizes)
    is_paired = slow.record.bundle == fast.record.bundle != "" and len(sizes[0]) == len(sizes[1])
    samples = (point.timing.samples_ms or (point.median_ms,) for point in (slow, fast))
    return time_ratio(*samples, is_paired=is_paired, sizes_a=sizes[0], sizes_b=sizes[1])


def winners(every: Sequence[Series]) -> list[Winner]:
    """Return the fastest of each length that is judged at all, shortest first."""
    judged = ((point, series.label) for series in every if series.is_judged for point in series.points)
    measured = (rival for rival in judged if rival[0].median_ms > 0)
    found = []
    for length, rivals in sorted(grouped(measured, lambda rival: rival[0].seq_len).items()):
        (best, label), *others = sorted(rivals, key=lambda rival: (rival[0].median_ms, rival[1]))
        near = [(point, other) for point, other in others if point.low_ms <= best.high_ms]  # the rest is clear
        level = [other for point, other in near if times_faster(point, best).low <= 1.0]
        found.append(Winner(length, (label, *level), len(rivals)))
    return found
