"""The table at the top of a report: who wins at which length, by how much, with what doubt, and what it buys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attn_zoo.report.analysis.analyse import Analysis
from attn_zoo.report.analysis.approximation_errors import ErrorGroup
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.panels import Panel, lead_panel
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore
from attn_zoo.report.analysis.series import Point, Series
from attn_zoo.report.analysis.task_means import Overview
from attn_zoo.report.tables.error_tables import error_overview_table
from attn_zoo.report.tables.table import BRACKETS, Column, Note, Remark, Table, marked, text_column, without_interval
from attn_zoo.report.tables.time_tables import (
    by_importance,
    control_words,
    factor_text,
    time_caveats,
    unjudged_words,
    weights_words,
)
from attn_zoo.report.wording import NO_RECORD, marks_of, missing_word, one_seed
from attn_zoo.units import capital, human_bytes, human_length, human_ms, some

LENGTHS = (1024, 4096, 32768, 262144, 1048576)
MOST_LENGTHS = 5
MOST_TASKS = 4
LEVEL = 1.005
"""Peaks that differ by less are written alike."""
NONE_ABOVE = "none clearly beats the floor"
NOT_TIMED = "not timed"
"""Of a label of the run that belongs to another panel, or was trained only."""


def front_table(analysis: Analysis) -> Table | None:
    """Return the fastest of each length, then one row per variant: speed-up, memory, weights, scores; None for nothing.

    The fastest at the longest length come first, or the best scores where nothing was timed.
    Speed-ups are over the fastest exact variant, whose row has the times themselves. Where nothing was timed or
    trained, these are the errors at the longest length.
    """
    if (group := front_errors(analysis)) is not None:
        front = error_overview_table(group)
        return replace(front, name="front") if front else None
    panel, scores = lead_panel(analysis.panels), _score_columns(analysis)
    if panel is None and not scores:
        return None
    lengths = _lengths(panel) if panel else []
    labels = sorted(
        {*(one.label for one in (panel.series if panel else ())), *(label for one in scores for label in one.texts)},
        key=lambda label: (_standing(label, panel, scores), label),
    )
    rows, ranks = [_row(label, panel, lengths) for label in labels], by_importance(lengths)
    columns = [
        text_column("variant", priority=0),
        *(_column(human_length(length), str(length), 0.1 * ranks.index(length)) for length in lengths),
    ]
    best = {"variant": "best"} | {one.key: one.best for one in scores}
    if panel is not None:
        fastest = {str(one.seq_len): some(one.labels, joint=" or ") for one in panel.winners if len(one.rivals) > 1}
        best |= {str(length): fastest.get(str(length), "no rival") for length in lengths}
        if peaks := panel.peaks:
            memory = _column(f"memory at {human_length(panel.peak_len)}", "memory", 1.0)
            columns.append(replace(memory, brief=lambda text: text.partition(";")[0]))
            judged = {one.label: peaks[one.label] for one in panel.series if one.is_judged and one.label in peaks}
            leading = [label for label, peak in judged.items() if peak <= LEVEL * min(judged.values())]
            best["memory"] = some(leading, joint=" or ") or "no rival"
    for one in scores:
        columns.append(replace(_column(one.heading, one.key, one.priority), brief=_brief_floor))
        for row in rows:
            missing = "no mean" if row["variant"] in one.without else "not trained"
            row[one.key] = one.texts.get(row["variant"], missing)
    rows.insert(0, best)
    return Table(
        name="front",
        title="Who wins, by how much" if panel else "What it scores",
        notes=_note(analysis, panel, labels, lengths),
        columns=tuple(columns),
        rows=tuple(rows),
        is_view=True,
    )


def front_errors(analysis: Analysis) -> ErrorGroup | None:
    """Return the errors at the top of the report of a run that neither timed nor trained anything."""
    if lead_panel(analysis.panels) is not None or _score_columns(analysis):
        return None
    return next((group for group in analysis.errors if any(panel.lengths for panel in group.panels)), None)


def _standing(label: str, panel: Panel | None, scores: Sequence[_Scores]) -> tuple[float, ...]:
    """Return what puts the best first: times at the longest lengths, or the first score; what is not judged is last."""
    timed = [series.label for series in panel.ranked] if panel else []
    if label in timed:
        return (timed.index(label),)
    return math.inf, next((float([*one.texts].index(label)) for one in scores if label in one.texts), math.inf)


def _lengths(panel: Panel) -> list[int]:
    """Return the lengths of `LENGTHS` that were measured and the longest of all, or others that span the range."""
    measured = sorted({point.seq_len for point in panel.points})
    usual = {*LENGTHS} & {*measured}
    return sorted(usual | {measured[-1]} if len(usual) > 2 else by_importance(measured)[:MOST_LENGTHS])


def _column(heading: str, key: str, priority: float) -> Column:
    """Return a column of what the row of a key holds; that of the best may hold several names, which stay whole."""
    return Column(
        heading=heading, show=lambda row: str(row[key]), brief=without_interval, priority=priority, is_whole=True
    )


def _row(label: str, panel: Panel | None, lengths: Sequence[int]) -> dict[str, Any]:
    series = next((one for one in panel.series if one.label == label), None) if panel else None
    if panel is None or series is None:
        return {"variant": label, "memory": NOT_TIMED, **{str(length): NOT_TIMED for length in lengths}}
    row = {"variant": label}
    for length in lengths:
        one = series.outcomes.get(length)
        if isinstance(one, Point):
            row[str(length)] = _time_or_factor(one, panel, series)
        else:
            row[str(length)] = NO_RECORD if one is None else missing_word(one)
    peaks, last, weights = panel.peaks, series.outcomes.get(panel.peak_len), weights_words(series)
    missing = NO_RECORD if last is None else "not measured" if isinstance(last, Point) else missing_word(last)
    row["memory"] = human_bytes.fixed(peaks.values())(peaks[label]) if label in peaks else missing
    row["memory"] += f"; weights {weights}" if weights else ""
    return row


def _time_or_factor(point: Point, panel: Panel, series: Series) -> str:
    beside = panel.speed_up(series, point.seq_len)
    if beside is None:
        return marked(human_ms(point.median_ms), marks_of(point.doubts, panel.shown_doubts))
    text = factor_text(beside, panel.shown_doubts)
    return f"{text} {NOT_IN_TURNS}" if panel.turns and not beside.is_in_turns else text


NOT_IN_TURNS = "(apart)"
"""Of a factor over an exact variant that was timed at another time, in a panel of variants that were timed in turns."""


@dataclass(frozen=True, slots=True)
class _Scores:
    """A column: its heading, what it says of each label, whose score is the best, and which labels have parts of one.

    A mean goes before the scores that it is made of.
    """

    key: str
    heading: str
    texts: dict[str, str]
    best: str
    without: frozenset[str] = frozenset()
    priority: float = 0.6


def _score_columns(analysis: Analysis) -> list[_Scores]:
    """Return a column for each task, or for each mean over tasks where there are many."""
    columns = []
    for each in _shown_overviews(analysis):
        means = each.means
        if means:
            texts = {label: each.metric.show(mean) + one_seed(each.num_seeds(label)) for label, mean in means.items()}
            best = _best({label: (label, mean) for label, mean in means.items()}, analysis)
            others = frozenset((*each.labels, *each.without))
            columns.append(_Scores(each.name, _mean_heading(each), texts, best or "none", others, priority=0.7))
    groups = shown_groups(analysis)
    has_one_kind = len({(group.setting.protocol, group.metric.name) for group in groups}) == 1
    for group in groups:
        texts = {one.name: one.trial.failed if one.mean is None else _score(one, group.metric) for one in group.ranked}
        above = (one for one in group.ranked if one.standing is None or one.standing.verdict == "beaten")
        best = _best({one.name: (one.label, one.mean) for one in above if one.mean is not None}, analysis)
        heading = group.title if has_one_kind else f"{group.heading}, {group.metric.words}"
        best = f"{best} (by mean)" if best else NONE_ABOVE
        columns.append(_Scores(group.name, heading, texts, best))
    return columns


def _best(means: Mapping[str, tuple[str, float]], analysis: Analysis) -> str:
    """Return the first of these names and those with the same mean, controls left out; empty for none.

    Args:
        means: label and mean by name, the best first.
        analysis: knows the controls.
    """
    able = {name: mean for name, (label, mean) in means.items() if label not in analysis.controls}
    return some((name for name, mean in able.items() if mean == next(iter(able.values()))), joint=" or ")


def _shown_overviews(analysis: Analysis) -> Sequence[Overview]:
    return analysis.overviews if len(analysis.accuracy) > MOST_TASKS else ()


def shown_groups(analysis: Analysis) -> Sequence[AccuracyGroup]:
    """Return the tasks that have a column: all with a score, or of many those that a mean is over."""
    common = [group for each in _shown_overviews(analysis) for group in each.common]
    return (common or [group for group in analysis.accuracy if group.means])[:MOST_TASKS]


def _mean_heading(overview: Overview) -> str:
    return f"mean, {overview.apart}" if overview.apart else "mean"


def _brief_floor(text: str) -> str:
    """Return a score with its floor in one word: what is cut in the middle might say the opposite."""
    for words, brief in _BRIEF.items():
        text = text.replace(f"({words})", f"({brief})")
    return text.replace(NONE_ABOVE, "none")


def _score(score: LabelScore, metric: Metric) -> str:
    said = metric.show(score.mean or 0.0) + one_seed(len(score.values))
    said += f" (params {score.other_size})" if score.other_size else ""
    doubt = _FLOORS.get(score.standing.verdict) if score.standing else None
    return f"{said} ({doubt})" if doubt else said


_FLOORS = {"not beaten": "floor not beaten", "not settled": "floor not clearly beaten"}
_BRIEF = {"floor not beaten": "floor", "floor not clearly beaten": "floor?", "one seed": "n=1"}


def _note(analysis: Analysis, panel: Panel | None, labels: Sequence[str], lengths: Sequence[int]) -> Note:
    said: list[str | Remark] = []
    if panel is not None:
        if panel.baseline is not None:
            said += [*_over(panel, lengths), BRACKETS]
        said += [*time_caveats(panel), *unjudged_words(panel), f"{capital(panel.title)}; {panel.subtitle}."]
    if shown_groups(analysis):
        timed = {one.label for one in panel.series} if panel is not None else set()
        said += [*_about_scores(analysis), control_words(sorted((analysis.controls & {*labels}) - timed))]
    return (*said, _label_words(analysis, labels))


def _label_words(analysis: Analysis, labels: Sequence[str]) -> str:
    """Say of each label of a row that a matrix gave which variant it is, with which options."""
    meant: dict[str, dict[str, None]] = {}
    for one in (*analysis.results.observations, *analysis.results.left):
        if one.label in labels and one.cell.label not in ("", one.cell.variant):
            options = ", ".join(f"{name}={value}" for name, value in sorted(one.cell.options.items()))
            meaning = one.cell.variant + (f" with {options}" if options else "")
            meant.setdefault(one.label, {})[meaning] = None
    said = [f"{label} is {' or '.join(meant[label])}" for label in sorted(meant)]
    return f"Labels: {'; '.join(said)}." if said else ""


def _about_scores(analysis: Analysis) -> Note:
    """Say what the scores are, what a mean is over, and which tasks have no column."""
    groups = shown_groups(analysis)
    kinds = dict.fromkeys(f"{group.metric.axis}, protocol {group.setting.protocol}" for group in groups)
    scores = f"Scores: {'; '.join(kinds)}; mean over seeds on test. Floor: the best of chance and trivial models."
    sizes = Remark("Params: how many more than the baseline of its task has.", sign="(params ")
    means = [
        Remark(f"{capital(heading)}: over {' and '.join(group.task_title for group in each.common)}.", heading=heading)
        for each in _shown_overviews(analysis)
        if (heading := _mean_heading(each))
    ]
    brief = [Remark(f"({brief}): {words}.", sign=f"({brief})") for words, brief in _BRIEF.items()]
    others = [group.title for group in analysis.accuracy if group not in groups]
    return (scores, sizes, *brief, *means, f"Not in this table: {', '.join(others)}." if others else "")


def _over(panel: Panel, lengths: Sequence[int]) -> Note:
    """Say what factors are over: one exact variant of the same rounds, or the fastest of all."""
    assert panel.baseline is not None
    found = [panel.speed_up(series, point.seq_len) for series in panel.series for point in series.points]
    in_turns = dict.fromkeys(one.against for one in found if one is not None and one.is_in_turns)
    alone = "" if all(length in panel.exact for length in lengths) else ", and where none was measured,"
    times = f"in rows of exact ones{alone} the median time."
    if not in_turns:
        return (f"Speed-up over {panel.baseline.label}, the fastest exact one; {times}",)
    apart = f"{NOT_IN_TURNS}: over {panel.baseline.label}, the fastest exact one, not timed in turns with it."
    return (f"Speed-up over {' or '.join(in_turns)}, timed in turns with it; {times}", Remark(apart, sign=NOT_IN_TURNS))
