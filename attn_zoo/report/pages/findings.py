"""What the numbers say, in sentences a newcomer can read. Every number in them comes from the records."""

from __future__ import annotations

from collections.abc import Sequence

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.contradictions import contradicted_exponents, flops_ratios
from attn_zoo.report.analysis.floor import floor_words
from attn_zoo.report.analysis.panels import Panel
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore, pair
from attn_zoo.report.analysis.task_means import Overview
from attn_zoo.report.tables.growth_tables import crossing_text
from attn_zoo.report.units import capital, human_length, human_ms

EXPLANATION = (
    "Exact attention compares every token with every other one, so twice the length costs four times the time: "
    "quadratic, a line of slope 2 on these log-log figures. Linear variants compare each token with a fixed number of "
    "others or of summaries, so twice the length costs twice the time: slope 1, more expensive for short sequences and "
    "cheaper beyond a crossover length."
)

MOST = 6
"""Variants named in one sentence; the tables have the rest."""
ENOUGH = 3
"""Seeds below which no difference is called settled."""


def findings(analysis: Analysis) -> list[str]:
    """Return a few sentences for each panel and accuracy group, and how many cells gave no measurement."""
    sentences = [text for panel in analysis.panels if (text := _panel(panel))]
    sentences += _contradictions(analysis)
    sentences += [overview_finding(overview) for overview in analysis.overviews]
    sentences += [text for group in analysis.accuracy for text in accuracy_findings(group)]
    statuses = [one.record.status for one in analysis.results.observations]
    missing = sum(status != "ok" for status in statuses)
    if not statuses:
        sentences.append("No cell has been run yet.")
    elif missing:
        sentences.append(f"{missing} of {len(statuses)} cells gave no measurement; the reasons are below.")
    return sentences


def _panel(panel: Panel) -> str:
    measured = [series for series in panel.series if series.points]
    if not measured:
        return ""
    longest = max(series.lengths[-1] for series in measured)
    last = [series for series in measured if series.lengths[-1] == longest]
    fastest = min(last, key=lambda series: series.points[-1].median_ms)
    point = fastest.points[-1]
    rate = "" if point.tokens_per_s is None else f", {float(f'{point.tokens_per_s:.3g}'):,.0f} tokens/s"
    said = [f"at {human_length(longest)} tokens the fastest is {fastest.label} ({human_ms(point.median_ms)}{rate})"]
    grown = [growth for growth in panel.time.values() if growth.exponent is not None]
    if grown:
        powers = [f"{growth.exponent.value:.2f} ({growth.label})" for growth in grown[:MOST] if growth.exponent]
        said.append(f"time grows as N^k with k = {', '.join(powers)}")
    crossings = [crossing for crossing in panel.crossings if crossing.is_fastest][:MOST]
    has_lengths = any(crossing.result is not None and len(crossing.result.lengths) > 1 for crossing in crossings)
    if has_lengths and panel.baseline is not None:
        wins = [f"{crossing.label} {crossing_text(crossing)}" for crossing in crossings]
        said.append(f"crossover with {panel.baseline.label}: {', '.join(wins)}")
    return f"{capital(panel.title)}: {'; '.join([*said, *panel.caveats])}."


def _contradictions(analysis: Analysis) -> list[str]:
    """Return a sentence on claims that measurements contradict, and one on FLOPs that are claimed and did not run."""
    exponents = contradicted_exponents(analysis.panels)
    flops = [
        f"{one.label} ({one.setting}) {one.ratios} times at {one.span} tokens"
        for one in flops_ratios(analysis.results.observations)
        if one.is_too_many
    ]
    said = (("Measurements contradict claims", exponents), ("More FLOPs are claimed than ran", flops))
    return [
        f"{what}: {'; '.join([*found[:MOST], *([f'{len(found) - MOST} more in the tables'] * (len(found) > MOST))])}."
        for what, found in said
        if found
    ]


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
    sentences = ["; ".join(said) + "."]
    sentences += [text for text in (_floors(group, scored), _differences(group), _gains(group), _failed(group)) if text]
    return sentences


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
    said = [f"{score.name} {score.failed}" for score in failed]
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
