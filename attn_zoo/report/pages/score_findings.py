"""What the scores say, in sentences: which differences are settled, and what does not beat a trivial model."""

from __future__ import annotations

from collections.abc import Sequence

from attn_zoo.report.analysis.floor import floor_words
from attn_zoo.report.analysis.label_score import LabelScore, pair
from attn_zoo.report.analysis.score_groups import AccuracyGroup
from attn_zoo.report.analysis.task_means import Overview
from attn_zoo.report.tables.score_tables import failure_words

__all__ = ["accuracy_findings", "overview_finding"]

MOST = 6
"""Variants named in one sentence; the tables have the rest."""
ENOUGH = 3
"""Seeds below which no difference is called settled."""


def accuracy_findings(group: AccuracyGroup) -> list[str]:
    """Return the ranking, the differences to the baseline, what does not beat the floors, and what failed."""
    scored = [score for score in group.ranked if score.mean is not None]
    if not scored:
        return []
    metric = group.metric
    means = [f"{score.name} {metric.show(score.mean or 0.0)} (n={len(score.values)})" for score in scored[:MOST]]
    if len(scored) > MOST:
        means.append(f"{len(scored) - MOST} more below")
    said = [f"{metric.title} on {group.title}: {', '.join(means)}"]
    if group.marks:
        name, value = list(group.marks.items())[-1]
        said.append(f"the best that needs no attention is {floor_words(name)} with {metric.show(value)}")
    found = ["; ".join(said) + "."]
    found += [text for text in (_floors(group, scored), _differences(group), _gains(group), _failed(group)) if text]
    return found


def _floors(group: AccuracyGroup, scored: Sequence[LabelScore]) -> str:
    below = [score for score in scored if score.standing and score.standing.verdict == "not above"]
    if not below:
        return ""
    floor = below[0].standing
    assert floor is not None
    verb = "does" if len(below) == 1 else "do"
    return f"On {group.title}, {_names(below)} {verb} not beat {floor_words(floor.floor)} by more than the uncertainty."


def _differences(group: AccuracyGroup) -> str:
    compared = [score for score in group.ranked if score.difference]
    if not compared:
        return ""
    few = [score for score in compared if score.difference and score.difference.num_paired < ENOUGH]
    settled = [score for score in compared if score.difference and score.difference.is_settled]
    noise = [score for score in compared if score not in settled and score not in few]
    said = [_settled(group, score) for score in settled[:MOST]]
    if len(settled) > MOST:
        said.append(f"{len(settled) - MOST} more differ as well")
    if noise:
        said.append(f"{_names(noise)} within what seeds and test set explain")
    if few:
        least = min(score.difference.num_paired for score in few if score.difference)
        seeds = "one seed" if least == 1 else f"{least} seeds"
        said.append(f"{_names(few)} not settled: {seeds} in common, {ENOUGH} are needed")
    return f"On {group.title} against {group.baseline}: {'; '.join(said)}."


def _settled(group: AccuracyGroup, score: LabelScore) -> str:
    assert score.difference is not None
    gain = group.metric.gain(score.difference.mean, 0.0)
    size = f"{group.metric.size(gain)} {group.metric.unit}"
    return f"{score.name} {'better' if gain > 0 else 'worse'} by {size} ({score.difference.num_paired} seeds)"


def _gains(group: AccuracyGroup) -> str:
    said = []
    for score in group.scores:
        scratch = group.find(score.label) if score.start else None
        gain = pair(score.runs, scratch.runs) if scratch else None
        if gain is not None:
            certain = "" if gain.is_settled else ", not settled"
            better = group.metric.gain(gain.mean, 0.0)
            said.append(f"{score.label} {group.metric.signed(better)}{certain}")
    return f"Self-pretraining on {group.title} gains, in {group.metric.unit}: {', '.join(said[:MOST])}." if said else ""


def _failed(group: AccuracyGroup) -> str:
    failed = [score for score in group.scores if score.failures]
    said = [f"{score.name} {failure_words(score)}" for score in failed]
    return f"Runs without a score on {group.title}: {'; '.join(said)}." if said else ""


def _names(scores: Sequence[LabelScore]) -> str:
    names = [score.name for score in scores[:MOST]]
    if len(scores) > MOST:
        names.append(f"{len(scores) - MOST} more")
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def overview_finding(overview: Overview) -> str:
    """Return the ranking by the mean over the tasks that every variant has, or that there is no such mean."""
    ranked = sorted(overview.labels, key=lambda label: overview.metric.order(overview.mean(label)))
    means = [(label, mean) for label in ranked if (mean := overview.mean(label)) is not None][:MOST]
    if not means:
        return f"No mean over tasks ({overview.how}): fewer than two of them have a score of every variant."
    said = ", ".join(f"{label} {overview.metric.show(mean)}" for label, mean in means)
    floor = overview.floor()
    beside = f"; {floor[0]}: {overview.metric.show(floor[1])}" if floor else ""
    return f"{overview.metric.title}, {overview.scope()}: {said}{beside}."
