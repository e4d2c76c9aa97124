"""All tasks of one run side by side, with a mean over exactly those tasks that every variant has a score for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore
from attn_zoo.statistics.paired import interval_of_means
from attn_zoo.units import slug, unique_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """Tasks trained under one protocol with the same metric.

    Args:
        name: for file names.
        how: protocol, dtype and device.
        groups: one for each task and level, at least two.
        common: those that every label in `labels` has a score for.
        labels: with a score in at least two tasks, sorted.
        without: labels left out of the mean, because fewer than two tasks have a score of theirs.
        apart: what of `how` tells it from the others of the report; empty for a single one.
    """

    name: str
    how: str
    metric: Metric
    groups: tuple[AccuracyGroup, ...]
    common: tuple[AccuracyGroup, ...]
    labels: tuple[str, ...]
    without: tuple[str, ...]
    apart: str

    @property
    def title(self) -> str:
        """Return what all scores are, and whether of models with an exchanged mechanism."""
        return ", ".join(filter(None, (self.metric.title, self.groups[0].setting.exchange)))

    def scores(self, label: str) -> list[LabelScore]:
        """Return the scores of `label` in the common tasks."""
        return [score for group in self.common if (score := _scored(group, label)) is not None]

    def mean(self, label: str) -> float | None:
        """Return the mean over the common tasks; None for a label without a score in one of them."""
        values = [score.mean for score in self.scores(label) if score.mean is not None]
        return fmean(values) if len(values) == len(self.common) and len(values) > 1 else None

    def interval(self, label: str) -> tuple[float | None, float | None]:
        """Return the ends of the 95 % t-interval of that mean, over seeds; None where a task has one seed."""
        if self.mean(label) is None:
            return None, None
        ends = interval_of_means([list(score.values.values()) for score in self.scores(label)]) or (None, None)
        return self.metric.inside(ends[0]), self.metric.inside(ends[1])

    def ends(self, label: str) -> tuple[float, float] | None:
        """Return what figures draw: that interval, or of one seed what the intervals of the tasks' scores give.

        How far the mean may lie below is the root of the sum of squares of how far they may, over their number, and
        above likewise (Zou and Donner 2008, "Construction of confidence limits about effect measures: a general
        approach"). None where a task has no interval.
        """
        mean, (low, high) = self.mean(label), self.interval(label)
        if low is not None and high is not None:
            return low, high
        parts = [(score.mean, *score.ends) for score in self.scores(label) if score.ends and score.mean is not None]
        if mean is None or len(parts) < len(self.common):
            return None
        below, above = (math.hypot(*(each[0] - each[end] for each in parts)) / len(parts) for end in (1, 2))
        return mean - below, mean + above

    def num_seeds(self, label: str) -> int:
        """Return the fewest seeds that one of the common tasks has; 0 for none."""
        return min((len(score.values) for score in self.scores(label)), default=0)

    @property
    def means(self) -> dict[str, float]:
        """The means that there are, by label, best first."""
        known = [(label, mean) for label in self.labels if (mean := self.mean(label)) is not None]
        return dict(sorted(known, key=lambda item: self.metric.order(item[1])))

    def speed(self, label: str) -> float | None:
        """Return the geometric mean of tokens per second over the common tasks, whose lengths differ."""
        speeds = [speed for score in self.scores(label) if (speed := score.costs["tokens_per_s"])]
        return math.exp(fmean(map(math.log, speeds))) if speeds and len(speeds) == len(self.common) else None

    def peak_bytes(self, label: str) -> float | None:
        """Return the most memory over the common tasks."""
        peaks = [score.costs["train_peak_bytes"] for score in self.scores(label)]
        return max(peak for peak in peaks if peak) if peaks and all(peaks) else None

    def floor(self) -> tuple[str, float] | None:
        """Return the mean over the common tasks of the best that needs no training, or None."""
        best = [group.best_mark[1] for group in self.common if group.best_mark]
        return ("mean of the best floors", fmean(best)) if best and len(best) == len(self.common) else None

    def scope(self) -> str:
        """Return in words which tasks the mean is over, and which it leaves out and why."""
        said = [f"mean over {', '.join(group.task_title for group in self.common)}"]
        for group in self.groups:
            lacking = [label for label in self.labels if _scored(group, label) is None]
            if lacking:
                said.append(f"not over {group.task_title}: no score of {', '.join(lacking)}")
        if self.without:
            said.append(f"without {', '.join(self.without)}")
        return "; ".join(said)


def _scored(group: AccuracyGroup, label: str) -> LabelScore | None:
    """Return the score of `label` from scratch (or from the only start of the group), if a run finished."""
    score = group.find(label, group.starts[0]) if group.starts else None
    return score if score is not None and score.mean is not None else None


def make_overviews(groups: Sequence[AccuracyGroup]) -> list[Overview]:
    """Return one overview for each protocol, metric and device under which at least two tasks were trained.

    Overrides may differ between tasks, as published settings do, unless a task occurs with several of them.
    """
    overviews: list[Overview] = []
    hows: list[tuple[str, ...]] = []
    names: set[str] = set()
    for how, members in _by_protocol(groups).items():
        metric = members[0].metric
        seen = {score.label for group in members for score in group.scores}
        counts = {label: sum(_scored(group, label) is not None for group in members) for label in seen}
        labels = tuple(sorted(label for label, count in counts.items() if count > 1))
        if len(members) < 2 or not labels:
            continue
        common = tuple(group for group in members if all(_scored(group, label) for label in labels))
        hows.append(how)
        overviews.append(
            Overview(
                name=unique_name(slug("tasks", metric.name, members[0].setting.protocol), names),
                how=", ".join(how),
                metric=metric,
                groups=tuple(members),
                common=common,
                labels=labels,
                without=tuple(sorted(seen - set(labels))),
                apart="",
            )
        )
    own = [[part for part in each if not all(part in other for other in hows)] for each in hows]
    return [replace(one, apart=", ".join(said)) for one, said in zip(overviews, own, strict=True)]


def _by_protocol(groups: Sequence[AccuracyGroup]) -> dict[tuple[str, ...], list[AccuracyGroup]]:
    # A mean has no meaning over bits of different data, whose scales differ.
    by_how = grouped((group for group in groups if group.means and not group.metric.is_lower_better), _how)
    split: dict[tuple[str, ...], list[AccuracyGroup]] = {}
    for how, members in by_how.items():
        is_repeated = len({group.task_title for group in members}) < len(members)
        for group in members:
            changes = group.setting.words({"overrides"}) if is_repeated else []
            split.setdefault((*how, *changes), []).append(group)
    return {how: members for how, members in split.items() if len({one.task_title for one in members}) == len(members)}


_SHARED = ("protocol", "dtype", "device", "data_parallel", "threads", "protocol_version", "tuned")


def _how(group: AccuracyGroup) -> tuple[str, ...]:
    # Where nothing was trained from scratch the only other start counts, and does not mix with scratch elsewhere.
    start = [f"self-pretrained ({group.starts[0]})"] if group.starts[0] else []
    return (*group.setting.words(_SHARED), *start, *group.setting.words({"replaces"}))
