"""Scores by properties of the test examples: one axis makes a curve, two make a heat map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from attn_zoo.records import Score
from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore
from attn_zoo.statistics.paired import mean_interval

NOT_AXES = frozenset({"value", "num_items", "floor"})
"""Keys of an entry of a breakdown that are no property of the examples."""


@dataclass(frozen=True, slots=True)
class Part:
    """Mean score of one label over seeds, with the ends of its 95 % t-interval, at a place: one value for each axis."""

    place: tuple[float, ...]
    mean: float
    ends: tuple[float, float] | None


def axes_of(group: AccuracyGroup) -> tuple[str, ...]:
    """Return the names of the axes that every breakdown of the group has, the one with the largest values first.

    Records keep no order of axes. Lengths are larger than shares, so that this puts lengths before depths.
    """
    entries = [entry for score in group.scores for run in score.runs if run.score for entry in run.score.breakdown]
    if not entries:
        return ()
    names = set.intersection(*(set(entry) - NOT_AXES for entry in entries))
    return tuple(sorted(names, key=lambda name: (-max(entry[name] for entry in entries), name)))


def parts(score: LabelScore, axes: Sequence[str]) -> list[Part]:
    """Return the scores of one label by their place on `axes`, ascending.

    Where a breakdown has further axes the mean over them counts every item once. Seeds without a place do not enter its
    mean.
    """
    every = [_by_place(run.score.breakdown, axes, "value") for run in score.runs if run.score]
    made = []
    for place in sorted({place for own in every for place in own}):
        values = [own[place] for own in every if place in own]
        made.append(Part(place, fmean(values), mean_interval(values)))
    return made


def _by_place(entries: Iterable[Mapping[str, float]], axes: Sequence[str], what: str) -> dict[tuple[float, ...], float]:
    found = {}
    for place, own in grouped(entries, lambda entry: tuple(entry[name] for name in axes)).items():
        scored = [(entry[what], entry.get("num_items", 1.0)) for entry in own]
        items = sum(count for _, count in scored)
        total = sum(value * count for value, count in scored)
        found[place] = total / items if items else fmean(value for value, _ in scored)
    return found


def num_items(score: Score) -> int | None:
    """Return how many scored items the whole test set has, as its parts count them; None where they were not kept."""
    counts = [entry["num_items"] for entry in score.breakdown if "num_items" in entry]
    if counts and len(counts) == len(score.breakdown):
        return round(sum(counts))
    return len(score.correct) or None


def floors_by_place(group: AccuracyGroup, axes: Sequence[str]) -> dict[tuple[float, ...], float]:
    """Return the best floor of each place on `axes`, ascending; nothing where no record has them, as older ones."""
    scores = (run.score for score in group.scores for run in score.runs if run.score and run.score.breakdown)
    known = (score.breakdown for score in scores if all("floor" in entry for entry in score.breakdown))
    return dict(sorted(_by_place(next(known, ()), axes, "floor").items()))
