"""Which variant is the fastest at each length, as far as the intervals tell, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.series import Point, Series, joint_doubts
from attn_zoo.statistics.medians import Ratio, time_ratio

Rival = tuple[Point, str]
"""What was timed, with its label."""


@dataclass(frozen=True, slots=True)
class Winner:
    """The fastest at one length.

    Each rival is compared with it by an interval of that pair, not corrected for how many there are. By simulation, of
    ten that are equally fast, in three processes, one is left out of `labels` in 7 % of cases, of twenty in 10 %.

    Args:
        labels: its own, then those that the intervals do not tell from it.
        rivals: all that were measured, with their labels: it, then the others by their medians.
    """

    seq_len: int
    labels: tuple[str, ...]
    rivals: tuple[Rival, ...]


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """A point beside exact attention of the same length.

    Args:
        against: label of the exact one.
        exact: its point; where the two were timed in turns that of the same rounds, as is `point`.
        point: of the variant.
    """

    against: str
    exact: Point
    point: Point

    @property
    def factor(self) -> Ratio:
        """How many times as fast the variant is; once, where it is the exact one itself."""
        if self.is_itself:
            return Ratio(value=1.0, low=1.0, high=1.0, num_pairs=0)
        return times_faster(self.exact, self.point)

    @property
    def device_factor(self) -> float | None:
        """Likewise of the GPU alone; None where that was not measured of both."""
        both = self.exact.device_ms, self.point.device_ms
        return both[0] / both[1] if both[0] and both[1] else None

    @property
    def is_itself(self) -> bool:
        """Whether it is the exact one that everything is compared with."""
        return self.exact is self.point

    @property
    def is_in_turns(self) -> bool:
        """Whether both were timed in turns, so that what slowed a round slowed both."""
        return is_paired(self.exact, self.point)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What makes either of the two doubtful."""
        return joint_doubts((self.exact, self.point))


def times_faster(slow: Point, fast: Point) -> Ratio:
    """Return how many times the time of one point is that of the other; pairs count where both were timed in turns."""
    samples = (point.timing.samples_ms or (point.median_ms,) for point in (slow, fast))
    sizes_a, sizes_b = slow.timing.process_sizes, fast.timing.process_sizes
    return time_ratio(*samples, is_paired=is_paired(slow, fast), sizes_a=sizes_a, sizes_b=sizes_b)


def is_paired(one: Point, other: Point) -> bool:
    """Whether both were timed in turns, in as many processes."""
    has_as_many = len(one.timing.process_sizes) == len(other.timing.process_sizes)
    return one.record.bundle == other.record.bundle != "" and has_as_many


def winners(every: Sequence[Series]) -> list[Winner]:
    """Return the fastest of each length that is judged at all, shortest first."""
    judged = ((point, series.label) for series in every if series.is_judged for point in series.points)
    measured = (rival for rival in judged if rival[0].median_ms > 0)
    found = []
    for length, rivals in sorted(grouped(measured, lambda rival: rival[0].seq_len).items()):
        best, label = fastest_of(rivals)
        others = sorted((one for one in rivals if one[1] != label), key=lambda rival: (rival[0].median_ms, rival[1]))
        level = [other for point, other in others if times_faster(point, best).low <= 1.0]
        found.append(Winner(length, (label, *level), ((best, label), *others)))
    return found


def fastest_of(rivals: Sequence[Rival]) -> Rival:
    """Return the point with the lowest median and its label, or one that beats it in the rounds that both took part in.

    What is slower spends its budget in fewer rounds. Where the machine gets slower or faster meanwhile, its median is
    of other times than that of the others.
    """
    best, *others = sorted(rivals, key=lambda rival: (rival[0].median_ms, rival[1]))
    for rival in others:
        if is_paired(rival[0], best[0]) and times_faster(rival[0], best[0]).high < 1.0:
            best = rival
    return best
