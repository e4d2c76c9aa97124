"""What the numbers say, in sentences a newcomer can read. Every number in them comes from the records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from attn_zoo.errors import counted
from attn_zoo.folder import Run, missing_shards
from attn_zoo.records import TRAINING_VERSION, is_one_token
from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.approximation_errors import NEARER, ErrorGroup
from attn_zoo.report.analysis.contradictions import contradicted_exponents, flops_ratios
from attn_zoo.report.analysis.fits import GROWTH_WORDS, NOT_SETTLED, Crossing
from attn_zoo.report.analysis.floor import floor_words
from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.panels import Panel, lead_panel
from attn_zoo.report.analysis.scores import LEAST_SEEDS, AccuracyGroup, LabelScore, pair
from attn_zoo.report.analysis.series import Series
from attn_zoo.report.analysis.task_means import Overview
from attn_zoo.report.analysis.winners import Winner
from attn_zoo.report.tables.error_tables import error_text
from attn_zoo.report.tables.front_table import LEVEL, shown_groups
from attn_zoo.report.tables.growth_tables import crossing_text
from attn_zoo.report.tables.table import marked
from attn_zoo.report.tables.time_tables import factor_text, weights_words
from attn_zoo.report.wording import MARKS, doubt_counts, doubt_list, machine_words, marks_of, one_seed, outcome
from attn_zoo.units import (
    FEW,
    capital,
    human_bytes,
    human_joules,
    human_length,
    human_ms,
    human_number,
    percent,
    some,
)

EXPLANATION = (
    "Exact attention compares every token with every other one, so twice the length costs four times the time: "
    "quadratic, a line of slope 2 on these log-log figures. Linear variants compare each token with a fixed number of "
    "others or of summaries, so twice the length costs twice the time: slope 1, more expensive for short sequences and "
    "cheaper beyond a crossover length."
)

EXPLANATION_OF_DECODING = (
    "A token is decoded from what a mechanism keeps of all tokens before it. Exact attention keeps their keys and "
    "values and reads them all, so after twice as many tokens the next one costs twice the time: slope 1 on these "
    "log-log figures. A window, or a state of fixed size, costs the same after any number of tokens: slope 0."
)

EXPLANATION_OF_ERRORS = (
    "An error is the distance from what exact attention computes on the same queries, keys and values, as a share of "
    "it: 0 is exact, and zeros would have 1. Equal weights for all keys, which give the mean of the values, need no "
    "attention: what is no nearer than that has found nothing on such inputs."
)

WHY_LINEAR = (
    "Exact attention's memory is linear here: its fused kernels never store the scores of all pairs, only a running "
    "maximum and sum for each token."
)

MOST = 6
"""Variants named in one sentence; the tables have the rest."""
MOST_BULLETS = 7
MOST_SCORES = 5
"""Tasks with a bullet where nothing was timed."""
MOST_PLACES = 3
"""Lengths at which variants get cheaper that one sentence names."""


def headline(analysis: Analysis) -> str:
    """Return the answer in one sentence: which variant is the fastest at which lengths, or scores best."""
    panel = lead_panel(analysis.panels)
    if panel is not None:
        machine = machine_words(analysis.results.environments.get(panel.points[0].record.environment))
        where = "" if machine in panel.title else f" on {machine}"
        return f"{capital(panel.title)}{where}: {_winners(panel)}."
    best = [text for each in analysis.overviews if (text := _mean_line(each))]
    best += [text for group in analysis.accuracy if (text := _score_line(group))]
    best += [text for group in analysis.errors if (text := nearest_line(group))]
    if best:
        return best[0]
    if any(panel.lengths for group in analysis.errors for panel in group.panels):
        return "Nothing that is not exact gave a number."
    if analysis.results.observations:
        return "No cell gave a measurement."
    problems = [name for run in analysis.results.runs for name, _ in run.problems if name.startswith("cells/")]
    if problems:
        return f"{counted(len(problems), 'record')} could not be read; no other cell has been run yet."
    return "No cell has been run yet."


def _mean_line(overview: Overview) -> str:
    floor = overview.floor()
    beside = f"; {floor[0]} {overview.metric.show(floor[1])}" if floor else ""
    means = overview.means.items()
    said = some(f"{label} {overview.metric.show(mean)}{one_seed(overview.num_seeds(label))}" for label, mean in means)
    over = some((group.task_title for group in overview.common), joint=" and ")
    apart = f" ({overview.apart})" if overview.apart not in overview.title else ""
    level = [group.task_title for group in overview.common if not any(_is_above(score) for score in group.scores)]
    beside += f"; nothing clearly beats the floor of {some(level, joint=' and ')}" if level else ""
    return f"{overview.title}, mean over {over}{apart}: {said}{beside}." if said else ""


def _is_above(score: LabelScore) -> bool:
    return score.standing is None or score.standing.verdict in ("beaten", "unknown")


def nearest_line(group: ErrorGroup) -> str:
    """Return which approximation is nearest to exact attention on each kind of inputs, at one length."""
    said, panels = [], [panel for panel in group.panels if panel.ranked]
    for panel in panels:
        value, mean = (error_text(each) for each in (panel.ranked[0].value(panel.front_len) or 0.0, panel.floor))
        if panel.nearest:
            names = some((curve.label for curve in panel.nearest), joint=" or ")
            said.append(f"{panel.inputs}: {names} {value} (mean of the values {mean})")
        else:
            said.append(f"{panel.inputs}: none {percent(NEARER)} nearer than the mean of the values, {mean}")
    absent = dict.fromkeys(label for panel in panels for label in panel.absent)
    said += [f"not measured there: {some(absent)}"] if absent else []
    lengths = {panel.front_len for panel in panels}
    at = f" at {human_length(lengths.pop())} tokens" if len(lengths) == 1 else ""
    num_seeds = min((panel.num_seeds for panel in panels), default=LEAST_SEEDS)
    few = [counted(num_seeds, "seed")] if num_seeds < LEAST_SEEDS else []
    at += f" ({', '.join([group.apart] * bool(group.apart) + few)})" if group.apart or few else ""
    return f"Nearest to exact attention{at}, by error on inputs of each kind: {'; '.join(said)}." if said else ""


def error_findings(group: ErrorGroup) -> list[str]:
    """Return what is nearest, and what is hardly nearer than the mean of the values, which needs no attention."""
    useless = {panel.inputs: [curve.label for curve in panel.useless] for panel in group.panels if panel.lengths}
    said = [f"on {inputs} inputs {some(labels)}" for inputs, labels in useless.items() if labels]
    apart = f" ({group.apart})" if group.apart else ""
    floor = f"Not {percent(NEARER)} nearer than the mean of the values{apart}: {'; '.join(said)}." if said else ""
    return [text for text in (nearest_line(group), floor) if text]


def _winners(panel: Panel) -> str:
    """Return who is the fastest from which length to which, and by how much at the longest."""
    every = panel.winners
    judged = [one for one in every if len(one.rivals) > 1]
    at = _at(panel)
    unjudged = [
        f"{series.label} ({'dense scores underneath' if series.is_simulated else 'a control'})"
        for series in panel.series
        if series.points and not series.is_judged
    ]
    beside = f"; not judged: {some(unjudged)}" if unjudged else ""
    if not judged:
        lengths, labels = [human_length(one.seq_len) for one in every], {one.labels[0] for one in every}
        if len(labels) != 1:
            return ("no two were measured at one length" if labels else "nothing to compare") + beside
        alone = "has no rival" if unjudged else "alone was measured"
        return f"{every[0].labels[0]} {alone}, {at} {_span(lengths)} tokens{beside}"
    reigns, waiting = _reigns(judged), _waiting(panel)
    who = "by single calls the fastest is" if waiting else "the fastest is"
    first, last = ([human_length(one.seq_len) for one in reigns[end]] for end in (0, -1))
    if len(reigns) == 1:
        said = [f"{who} {_reign(reigns[0], f'{at} {_span(first)} tokens')}"]
    else:
        where = at if len(first) == 1 else "up to"  # nothing shorter was measured
        said = [f"{who} {_reign(reigns[0], f'{where} {first[-1]} tokens')}"]
        between = reigns[1:-1]
        if len(between) > 2:
            names = dict.fromkeys(label for own in between for label in _steady(own)[:1])
            said.append(f"{some(names, joint=' and ')} by turns up to {human_length(between[-1][-1].seq_len)}")
        else:
            said += [_reign(own, f"from {human_length(own[0].seq_len)}") for own in between]
        said.append(_reign(reigns[-1], f"from {last[0]}"))
    return ", ".join(said) + _by_how_much(panel, judged, _steady(reigns[-1])) + _holes(panel) + beside + waiting


def _holes(panel: Panel) -> str:
    """Return who has no time at a length between others of its own, where somebody else may lead for that reason."""
    said = []
    for series in panel.series:
        own = {point.seq_len for point in series.points} if series.is_judged else set()
        holes = [length for length in panel.lengths if own and min(own) < length < max(own) and length not in own]
        said += [f"{series.label} at {some(map(human_length, holes), joint=' and ')}"] if holes else []
    return f"; no time of {some(said)}" if said else ""


def _at(panel: Panel) -> str:
    """Return the word before a length: a token is decoded after so many others."""
    return "after" if is_one_token(panel.pass_) else "at"


def _reigns(judged: Sequence[Winner]) -> list[list[Winner]]:
    """Cut the lengths into as few stretches as can be, with one variant among the fastest all over each of them."""
    reigns: list[list[Winner]] = []
    for one in judged:
        if reigns and _steady([*reigns[-1], one]):
            reigns[-1].append(one)
        else:
            reigns.append([one])
    return reigns


def _steady(own: Sequence[Winner]) -> list[str]:
    """Return who is among the fastest at all of these lengths, the fastest at the longest first."""
    return [label for label in own[-1].labels if all(label in one.labels for one in own)]


def _reign(own: Sequence[Winner], where: str) -> str:
    """Return who is the fastest of one stretch, and who is not told from it at some of its lengths."""
    steady = _steady(own)
    rivals = dict.fromkeys(label for one in own for label in one.labels if label not in steady)
    lengths = {rival: tuple(human_length(one.seq_len) for one in own if rival in one.labels) for rival in rivals}
    unsettled = [
        f"against {some(names, joint=' and ')} at {some(at, joint=' and ')}"
        for at, names in grouped(rivals, lengths.__getitem__).items()
    ]
    return f"{_either(steady)} {where}" + (f" ({NOT_SETTLED} {some(unsettled)})" if unsettled else "")


def _waiting(panel: Panel) -> str:
    """Return up to which lengths it is the host that is compared, not the mechanisms, and how these compare."""
    last = [
        (series.label, [point for point in series.points if point.is_waiting][-1])
        for series in panel.series
        if series.is_judged and series.waiting
    ]
    # Where the GPU alone was not timed, waiting is inferred, and longer calls may wait unseen.
    said = [
        f"{label} {'at least ' if point.device_ms is None else ''}up to {human_length(point.seq_len)}"
        for label, point in last
    ]
    if not said:
        return ""
    alone = [f"{one.label} {crossing_text(one, panel.shown_doubts)}" for one in panel.device_crossings if one.is_main]
    beside = (
        f"; on the GPU alone cheaper than {panel.baseline.label}: {some(alone)}" if panel.baseline and alone else ""
    )
    return f"; calls wait for the host: {some(said)}{beside}"


def _span(lengths: Sequence[str]) -> str:
    return lengths[0] if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"


def _either(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{some(labels, joint=' or ')} ({NOT_SETTLED})"


def _by_how_much(panel: Panel, judged: Sequence[Winner], named: Sequence[str]) -> str:
    """Return how many times as fast as exact attention the fastest is, at the longest length that both have."""
    common = next((one for one in reversed(judged) if one.seq_len in panel.exact), None)
    exact = {one.label for one in panel.series if one.is_exact}
    if common is None or exact & set(common.labels):
        return ""
    label, length = common.labels[0], human_length(common.seq_len)
    found = panel.speed_up(next(one for one in panel.series if one.label == label), common.seq_len)
    assert found is not None  # it was measured there, and so was exact attention
    beside = [doubt_list(found.doubts, panel.shown_doubts)]
    if "alone" in found.doubts and "alone" not in panel.shown_doubts:  # said once on a page, but this is read by itself
        beside.append(MARKS["alone"][1])
    beside += ["not timed in turns with it"] if panel.turns and not found.is_in_turns else []
    why = f" ({', '.join(filter(None, beside))})" if any(beside) else ""
    who = "" if [label] == named else f"{label} "
    than = "exact attention" if panel.is_baseline(found.against) else found.against
    return f"; {_at(panel)} {length} {who}{factor_text(found, panel.shown_doubts)} as fast as {than}{why}"


def completeness(analysis: Analysis) -> str:
    """Return how much of what was planned was run, and what is left; empty where all of it was.

    Where only a part of a matrix was planned, or some of its shards have not run, that is said too.
    """
    # Folders of shards may be read together.
    missing = missing_shards(shard for run in analysis.results.runs for shard in run.shards)
    said = [f"{capital(missing)}."] if missing else []
    for run in analysis.results.runs:
        where = f"{run.name}: " if len(analysis.results.runs) > 1 else ""
        if part := _part_of_matrix(run):
            said.append(f"{where}{part}")
        if run.planned is None:
            gaps = some(text for panel in analysis.panels for text in _gaps(panel, run))
            beside = f"; no record, where others of the panel have one: {gaps}" if gaps else ""
            said.append(f"{where}{counted(len(run.records), 'cell')}; how many were planned is not known{beside}.")
        elif run.left:
            left = [one for one in analysis.results.left if one.run == run.name]
            why = f" ({run.stopped})" if run.stopped else ""
            num_begun = len({record.cell.key for record in run.begun} & {cell.key for cell in run.left})
            begun = f"{num_begun} with fewer processes than planned, shown all the same" if num_begun else ""
            listed = "; ".join(part for part in (begun, some(one.cell.id for one in left)) if part)
            listed = f": {listed}" if listed else ""
            said.append(f"{where}{run.planned - len(run.left)} of {counted(run.planned, 'cell')}; left{why}{listed}.")
    return " ".join(said)


def _gaps(panel: Panel, run: Run) -> Iterator[str]:
    """Yield the lengths that some curve of a run has and another one of the same run and panel lacks."""
    own = [one for one in panel.members if one.run == run.name]
    lengths = {one.cell.seq_len for one in own if one.cell.seq_len is not None}
    for series in panel.series:
        if any(one.label == series.label for one in own):
            for length in sorted(lengths - series.outcomes.keys()):
                yield f"{series.label} {panel.title} at {human_length(length)}"


def _part_of_matrix(run: Run) -> str:
    """Return how many of the trainings of its matrix a run planned, and of which tasks none; empty for all of them.

    Of several matrices nobody knows which trainings they share.
    """
    if run.planned is None or len(run.matrices) != 1:
        return ""
    counts: Counter[str] = Counter()
    for group in run.matrices[0].get("accuracy") or ():
        axes = (
            *(group.get(name) or () for name in ("variants", "level", "dtypes", "seeds")),
            group.get("is_causal") or (None,),
            *(group.get("grid") or {}).values(),
        )
        for task in group.get("task") or ():
            counts[task] += math.prod(map(len, axes))
    own = (record.cell for record in run.records if record.cell.key not in run.strays)
    planned = [cell for cell in (*own, *run.left) if cell.task]
    if not counts or run.num_unread or len(planned) >= counts.total():
        return ""
    without = sorted(counts.keys() - {cell.task for cell in planned})
    none = f", none of {', '.join(without)}" if without else ""
    return f"Planned were {len(planned)} of the {counts.total()} trainings of its matrix{none}."


def findings(analysis: Analysis) -> list[str]:
    """Return what to know beside the headline, the most important first, a line each: seven at most."""
    panel = lead_panel(analysis.panels)
    said = analysis.caveats[:2] + _contradictions(analysis)
    if panel is not None:
        lines = _growth_line, _crossing_line, _memory_line, _energy_line, _weights_line
        said += [line(panel) for line in lines]
    columns = shown_groups(analysis) if panel is None else ()
    beside = sorted(analysis.accuracy, key=lambda group: group in columns)  # the table beside it has the others
    said += [_score_line(group) for group in beside[: 2 if panel is not None else MOST_SCORES]]
    said += [text for group in analysis.errors[:1] for text in error_findings(group) if text != headline(analysis)]
    said += [_doubt_line(analysis), _missing_line(analysis)]
    said = [text for text in said if text]
    return said[:MOST_BULLETS]


def _growth_line(panel: Panel) -> str:
    shown = panel.shown_doubts
    grown = [panel.time[series.label] for series in _judged(panel) if panel.time[series.label].slopes]
    by_words = grouped(grown, lambda growth: growth.words)
    unsettled = by_words.pop(NOT_SETTLED, [])
    said = [
        f"{words}: {some(marked(growth.label, marks_of(growth.doubts, shown)) for growth in by_words[words])}"
        for words in GROWTH_WORDS
        if words in by_words
    ]
    reasons = {growth.why for growth in unsettled}
    why = f" ({reasons.pop()})" if len(reasons) == 1 else ""
    if unsettled and not said:
        return f"How time grows is {NOT_SETTLED}{why}."
    if unsettled:
        said.append(f"{NOT_SETTLED}: {some(growth.label for growth in unsettled)}{why}")
    return f"Growth of time: {'; '.join(said)}." if said else ""


def _judged(panel: Panel) -> list[Series]:
    """Return the curves that are judged, or all where none is, the fastest at the longest length first."""
    return [series for series in panel.ranked if series.is_judged] or panel.ranked


def _crossing_line(panel: Panel) -> str:
    places, shown = {series.label: place for place, series in enumerate(_judged(panel))}, panel.shown_doubts
    every = [one for one in panel.crossings if one.is_main and one.result and len(one.result.lengths) > 1]
    every = sorted((one for one in every if one.label in places), key=lambda one: (one.rank, places[one.label]))

    def where(one: Crossing) -> str:
        alone = panel.crossing(one.label, is_device=True)
        beside = f", on the GPU alone {crossing_text(alone, shown)}" if alone else ""
        return crossing_text(one, shown) + beside

    said = []
    for against, own in grouped(every, lambda one: one.against).items():
        by_place = list(grouped(own, where).items())
        texts = [f"{some(one.label for one in same)} {text}" for text, same in by_place[:MOST_PLACES]]
        if rest := sum(len(same) for _, same in by_place[MOST_PLACES:]):
            texts.append(f"{rest} more, the last {by_place[-1][1][-1].label} {by_place[-1][0]}")
        said.append(f"than {against}: {'; '.join(texts)}")
    return f"Cheaper {'; '.join(said)}." if said else ""


def _memory_line(panel: Panel) -> str:
    judged = _judged(panel)
    ranked = sorted((panel.peaks[series.label], series.label) for series in judged if series.label in panel.peaks)
    if not ranked:
        return ""
    said = [f"{label} {human_bytes(peak)}" for peak, label in ranked]
    named, beside, largest = {label for _, label in ranked[:FEW]}, [], ranked[-1][0]
    if len(ranked) > 1 and largest <= LEVEL * ranked[0][0]:
        said = [f"{some(label for _, label in ranked)} {human_bytes(largest)} each"]
    elif len(ranked) > FEW and largest > LEVEL * ranked[FEW - 1][0]:
        most = [label for peak, label in ranked if LEVEL * peak >= largest]
        beside, named = [f"the most: {some(most)} {human_bytes(largest)}"], {*named, *most}
        exact = {one.label for one in panel.series if one.is_exact}
        others = [text for text, (_, label) in zip(said, ranked, strict=True) if label in exact]
        beside = [f"exact: {some(others)}", *beside] if others and not exact & named else beside
    for series in judged:  # what has no record at the longest length may have needed more before
        for last in series.points[-1:]:
            if (peak := last.memory.peak_bytes or 0) > largest:
                beside.append(f"{series.label} {human_bytes(peak)} at {human_length(last.seq_len)}")
    linear = ["exact attention's is linear too: fused kernels store no scores"] if _has_linear_memory(panel) else []
    where = f"{_at(panel)} {human_length(panel.peak_len)}"
    return f"Peak memory {where}: {'; '.join([', '.join(said[:FEW]), *beside, *linear])}."


def _energy_line(panel: Panel) -> str:
    length = panel.lengths[-1]
    known = sorted(
        (point.record.energy_joules, series.label, MARKS["host"][0] if point.is_host_bound else "")
        for series in _judged(panel)
        for point in series.points
        if point.seq_len == length and point.record.energy_joules
    )
    said = [f"{label} {marked(human_joules(joules), mark)}" for joules, label, mark in known]
    most = [f"the most: {said[-1]}"] if len(said) > FEW else []
    text = "; ".join([", ".join(said[:FEW]), *most])
    return f"Energy of a call {_at(panel)} {human_length(length)}: {text}." if said else ""


def _weights_line(panel: Panel) -> str:
    grown = [f"{series.label} {words}" for series in panel.series if (words := weights_words(series))]
    return f"Weights grow with the length, of a layer: {some(grown)}." if grown else ""


def _score_line(group: AccuracyGroup) -> str:
    means = [
        f"{score.sized_name} {group.metric.show(score.mean)}{one_seed(len(score.values))}"
        for score in group.ranked
        if score.mean is not None
    ]
    said = [some(means)]
    for verdict, words in _FLOORS.items():
        names = [score.name for score in group.ranked if score.standing and score.standing.verdict == verdict]
        if names:
            said.append(f"{words}: {some(names)}")
    if (version := group.setting.training_version) < TRAINING_VERSION:
        said.append(f"floors of training version {version}; those of {TRAINING_VERSION} may be stronger")
    return f"{group.metric.title} on {group.title}: {'; '.join(said)}." if means else ""


_FLOORS = {"not beaten": "best floor not beaten", "not settled": "best floor not clearly beaten"}


def _doubt_line(analysis: Analysis) -> str:
    shown = {doubt for panel in analysis.panels for doubt in panel.shown_doubts}
    said = doubt_counts([point.doubts for point in analysis.points], shown)
    return f"{capital(said)}." if said else ""


def _missing_line(analysis: Analysis) -> str:
    counts = Counter(outcome(one.record.status).legend for one in analysis.results.observations)
    counts.pop("measured", None)
    ranked = counts.most_common()
    said = [f"{count} {words}" for words, count in ranked[:FEW]]
    said += [f"{sum(count for _, count in ranked[FEW:])} for other reasons"] if len(ranked) > FEW else []
    total = len(analysis.results.observations)
    read = " that were read" if any(run.num_unread for run in analysis.results.runs) else ""
    return (
        f"{sum(counts.values())} of {counted(total, 'cell')}{read} gave no measurement: {', '.join(said)}."
        if said
        else ""
    )


def memory_findings(analysis: Analysis) -> list[str]:
    """Return why the memory of exact attention is linear, where it is."""
    return [WHY_LINEAR] if any(_has_linear_memory(panel) for panel in analysis.panels) else []


def explanation(analysis: Analysis) -> str:
    """Return what slopes mean, of whole sequences and of decoded tokens; empty where nothing was timed."""
    said = {False: EXPLANATION, True: EXPLANATION_OF_DECODING}
    return " ".join(said[each] for each in sorted({is_one_token(panel.pass_) for panel in analysis.panels}))


def _has_linear_memory(panel: Panel) -> bool:
    """Whether exact attention keeps no scores: of a whole call, as what it decodes from is linear anyway."""
    exact = (panel.memory[one.label] for one in panel.series if one.is_exact)
    return not is_one_token(panel.pass_) and any(one.verdict == "linear" for one in exact)


def panel_findings(analysis: Analysis) -> list[str]:
    """Return a sentence for each panel: who wins at which lengths, as far as that is settled."""
    return [_panel(panel) for panel in analysis.panels if panel.points]


def _panel(panel: Panel) -> str:
    said = [_winners(panel), *(text for each in panel.winners[-1:] if (text := _rate(panel, each)))]
    return f"{capital(panel.title)}: {'; '.join([*said, *panel.caveats])}."


def _rate(panel: Panel, winner: Winner) -> str:
    """Return what a training step or a decoded token of the fastest takes; empty for a single call."""
    point, label = winner.rivals[0]
    if (rate := point.tokens_per_s) is None:
        return ""
    tokens = f"{float(f'{rate:.3g}'):,.0f}" if rate >= 100 else human_number(rate)
    of = "token" if is_one_token(panel.pass_) else "step"
    where = f"{label} {_at(panel)} {human_length(winner.seq_len)}"
    return f"{where} takes {human_ms(point.median_ms)} a {of}, {tokens} tokens/s"


def _contradictions(analysis: Analysis) -> list[str]:
    """Return a sentence on claims that measurements contradict, and one on FLOPs that are claimed and did not run."""
    exponents = contradicted_exponents(analysis.panels)
    flops = [
        f"{one.variant} ({one.setting}) {one.ratios} times at {one.lengths} tokens"
        for one in flops_ratios(analysis.results.observations)
        if one.is_too_many
    ]
    said = (("Measurements contradict claims", exponents), ("More FLOPs are claimed than ran", flops))
    return [f"{what}: {some(found, MOST, '; ')}." for what, found in said if found]


def accuracy_findings(group: AccuracyGroup) -> list[str]:
    """Return the ranking, the differences to the baseline, what does not beat the floors, and what failed."""
    scored = [score for score in group.ranked if score.mean is not None]
    if not scored:
        return []
    metric = group.metric
    means = [f"{score.sized_name} {metric.show(score.mean or 0.0)} (n={len(score.values)})" for score in scored]
    said = [f"{metric.title} on {group.title}: {some(means, MOST)}"]
    if group.best_mark:
        name, value = group.best_mark
        said.append(f"to beat: {floor_words(name)} with {metric.show(value)}")
    sentences = ["; ".join(said) + "."]
    sentences += [text for text in (_floors(group, scored), _differences(group), _gains(group), _failed(group)) if text]
    return sentences


def _floors(group: AccuracyGroup, scored: Sequence[LabelScore]) -> str:
    said = []
    for verdict, how in (("not beaten", ""), ("not settled", "clearly ")):
        names = [score for score in scored if score.standing and score.standing.verdict == verdict]
        if names and group.best_mark:
            verb = "does" if len(names) == 1 else "do"
            said.append(f"{_names(names)} {verb} not {how}beat {floor_words(group.best_mark[0])}")
    return f"On {group.title}, {'; '.join(said)}." if said else ""


def _differences(group: AccuracyGroup) -> str:
    compared = [score for score in group.ranked if score.difference]
    if not compared:
        return ""
    few = [score for score in compared if score.difference and score.difference.num_paired < LEAST_SEEDS]
    settled = [score for score in compared if score.difference and score.difference.is_settled]
    noise = [score for score in compared if score not in settled and score not in few]
    said = [_settled(group, score) for score in settled[:MOST]]
    if len(settled) > MOST:
        said.append(f"{len(settled) - MOST} more differ as well")
    if noise:
        counts = sorted({score.difference.num_paired for score in noise if score.difference})
        seeds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        said.append(f"{_names(noise)} not told apart from it by {seeds} seeds")
    if few:
        least = min(score.difference.num_paired for score in few if score.difference)
        seeds = "one seed" if least == 1 else f"{least} seeds"
        said.append(f"{_names(few)} not settled: {seeds} in common, {LEAST_SEEDS} are needed")
    return f"On {group.title} against {group.baseline}: {'; '.join(said)}."


def _settled(group: AccuracyGroup, score: LabelScore) -> str:
    assert score.difference is not None
    gain = group.metric.gain(score.difference.mean, 0.0)
    size = f"{group.metric.end(abs(gain))} {group.metric.unit}"
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
    return f"Self-pretraining on {group.title} gains, in {group.metric.unit}: {some(said, MOST)}." if said else ""


def _failed(group: AccuracyGroup) -> str:
    said = [f"{score.name} {words}" for score in group.scores if (words := score.trial.failed)]
    return f"Runs without a score on {group.title}: {'; '.join(said)}." if said else ""


def _names(scores: Sequence[LabelScore]) -> str:
    names = [score.name for score in scores[:MOST]]
    if len(scores) > MOST:
        names.append(f"{len(scores) - MOST} more")
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def overview_finding(overview: Overview) -> str:
    """Return the ranking by the mean over the tasks that every variant has, or that there is no such mean."""
    means = [f"{label} {overview.metric.show(mean)}" for label, mean in overview.means.items()]
    if not means:
        return f"No mean over tasks ({overview.how}): fewer than two of them have a score of every variant."
    floor = overview.floor()
    beside = f"; {floor[0]}: {overview.metric.show(floor[1])}" if floor else ""
    return f"{overview.title}, {overview.scope()}: {some(means, MOST)}{beside}."
