"""The front page of many results folders: what is how fast on which machine, each number linked to its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from attn_zoo.errors import ConfigError, FolderError, counted
from attn_zoo.folder import missing_shards
from attn_zoo.records import Record
from attn_zoo.report.analysis.analyse import Analysis, analyse
from attn_zoo.report.analysis.approximation_errors import NEARER, ErrorGroup, ErrorPanel
from attn_zoo.report.analysis.floor import floor_words
from attn_zoo.report.analysis.panels import Panel, lead_panel
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore, pair
from attn_zoo.report.analysis.series import Point, Series
from attn_zoo.report.pages.findings import accuracy_findings, completeness, findings, headline, nearest_line
from attn_zoo.report.pages.html import render_page
from attn_zoo.report.tables.error_tables import error_interval, error_text
from attn_zoo.report.tables.front_table import LENGTHS
from attn_zoo.report.tables.growth_tables import crossing_text
from attn_zoo.report.tables.table import MISSING, escape_markdown, marked, say
from attn_zoo.report.tables.time_tables import (
    by_importance,
    control_words,
    factor_text,
    time_caveats,
    unjudged_words,
    weights_words,
)
from attn_zoo.report.wording import NO_RECORD, marks_of, missing_word
from attn_zoo.units import capital, clean, human_bytes, human_length, human_ms, human_number, percent

MOST_LENGTHS = 6
FORWARD = ("infer", "fwd")
MOST_FINDINGS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One cell of a board.

    Args:
        text: what it says.
        href: of its record, or of the table it comes from; empty for none.
        sort: what it is sorted by; None for its text.
        is_best: the best of its column, as far as intervals tell.
        is_words: no number: set to the left, on several lines if need be.
    """

    text: str
    href: str = ""
    sort: float | None = None
    is_best: bool = False
    is_words: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """Mechanisms that were measured alike.

    Args:
        title: what was measured.
        note: how to read it, and everything else that is equal for all.
        headings: above the entries; the mechanism's own first.
        rows: one a mechanism, the best first.
        variants: registered name behind each row.
        quantity: times, errors or scores.
        is_folded: others of the run say more.
    """

    title: str
    note: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    variants: tuple[str, ...]
    quantity: Literal["time", "error", "score"]
    is_folded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPage:
    """What one results folder says.

    Args:
        name: of its folder.
        where: that folder, relative to the front page, as a link.
        page: its page for readers of Markdown, likewise: its `README.md`, or the report where none was asked for.
        answers: pairs of a question and what the run answers.
        said: what to know beside the first answer, a line each.
        unfinished: what is left; empty for nothing.
        cells: how many records, in words.
        measured: day of the first of them.
        boards: the one that says most first.
    """

    name: str
    where: str
    page: str
    answers: tuple[tuple[str, str], ...]
    said: tuple[str, ...]
    unfinished: str
    cells: str
    measured: str
    boards: tuple[Board, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """All runs in the folder of one machine, or on one where folders are not by machine: its `name` is empty then.

    `words` say which processor or card it has.
    """

    name: str
    words: str
    runs: tuple[RunPage, ...]


def read_machines(folder: Path) -> tuple[Machine, ...]:
    """Return every run below a folder laid out as `RUN/run.json`, or as `MACHINE/RUN/run.json`.

    Raises:
        ConfigError: there is none, or one cannot be read.
    """
    machines: dict[tuple[str, str], list[RunPage]] = {}
    first: dict[str, str] = {}
    for head in sorted([*folder.glob("*/run.json"), *folder.glob("*/*/run.json")]):
        run, analysis = head.parent, analyse([head.parent])
        name, words = "" if run.parent == folder else run.parent.name, _machine_words(analysis)
        words = first.setdefault(name, words) if name else words
        page = _run_page(run, quote(run.relative_to(folder).as_posix()), analysis)
        machines.setdefault((name, words), []).append(page)
    if not machines:
        raise ConfigError(
            str(folder), [("", "expected results folders in it, as RUN/run.json or MACHINE/RUN/run.json")]
        )
    return tuple(Machine(name=name, words=words, runs=tuple(runs)) for (name, words), runs in machines.items())


_MARKS = {"README.md": "Generated by `attn-zoo report --index`", "index.html": "attn_zoo</title>"}
"""By which our own front pages are known."""


def front_pages(folder: Path) -> dict[Path, str]:
    """Return what the front page of the results folders below `folder` says, by file: Markdown and HTML.

    Raises:
        ConfigError: as `read_machines`.
        FolderError: a file of that name is there which this did not write.
    """
    machines = read_machines(folder)
    for name, mark in _MARKS.items():
        path = folder / name
        if path.exists() and mark not in path.read_text(encoding="utf-8", errors="replace"):
            raise FolderError(f"{path}: not written by `attn-zoo report --index`, and it would be replaced: move it")
    return {folder / "README.md": leaderboard_readme(machines), folder / "index.html": leaderboard_page(machines)}


def leaderboard_page(machines: Sequence[Machine]) -> str:
    """Return the HTML of the front page: the answers, then a section for each machine."""
    return render_page("leaderboard.html.j2", machines=machines)


def leaderboard_readme(machines: Sequence[Machine]) -> str:
    """Return the Markdown of the front page: questions and answers, by machine."""
    lines = [
        "# Results",
        "",
        "What was measured, by machine. [index.html](index.html) has the numbers of every mechanism, each linked to",
        "its record; the page of a run has its figure and its table. Generated by `attn-zoo report --index`.",
        "",
    ]
    for machine in machines:
        beside = f" ({escape_markdown(machine.name)})" if machine.name else ""
        lines += [f"## {escape_markdown(machine.words)}{beside}", ""]
        for run in machine.runs:
            name = f"{machine.name}/{run.name}" if machine.name else run.name  # two machines may have runs of one name
            page = f"[{escape_markdown(name)}]({run.page})"
            for question, answer in run.answers:
                lines += [f"**{question}** {escape_markdown(answer)} ({page})", ""]
            unfinished = [run.unfinished] if run.unfinished else []
            lines += [*(f"- {escape_markdown(text)}" for text in [*unfinished, *run.said]), ""]
    return "\n".join(lines)


def _machine_words(analysis: Analysis) -> str:
    environments = list(analysis.results.environments.values())
    if not environments:
        return "an unknown machine"
    first = environments[0]
    return clean(first.gpu or f"{first.cpu}, {counted(first.num_cores, 'core')}")


def _run_page(folder: Path, where: str, analysis: Analysis) -> RunPage:
    observations = analysis.results.observations
    answers = []
    lead = lead_panel(analysis.panels)
    if lead is not None:
        answers.append((_question(lead), headline(analysis)))
    told = [texts[0] for group in analysis.accuracy if (texts := accuracy_findings(group))]
    if told:
        answers.append(("What does it buy in accuracy?", told[0] if lead is not None else headline(analysis)))
    near = [text for group in analysis.errors if (text := nearest_line(group))]
    answers += [("How near does it come to exact attention?", text) for text in near[:1]]
    has_left = analysis.results.left or any(missing_shards(run.shards) for run in analysis.results.runs)
    return RunPage(
        name=clean(folder.name),
        where=where,
        page=f"{where}/{'README.md' if (folder / 'README.md').is_file() else 'report.html'}",
        answers=tuple(answers) or (("What came out?", headline(analysis)),),
        said=tuple(findings(analysis)[:MOST_FINDINGS] if lead or not told else told),
        unfinished=completeness(analysis) if has_left else "",
        cells=counted(len(observations), "cell"),
        measured=min((one.record.started[:10] for one in observations if one.record.started), default=""),
        boards=tuple(_boards(folder, where, analysis)),
    )


_QUESTIONS = {
    "step": "What does a training step take?",
    "prefill": "How soon is the first token there?",
    "decode": "What does the next token take?",
}


def _question(panel: Panel) -> str:
    if panel.pass_ in _QUESTIONS:
        return _QUESTIONS[panel.pass_]
    return "Which is faster, timed in turns?" if panel.turns else "Which is the fastest?"


def _boards(folder: Path, where: str, analysis: Analysis) -> Iterator[Board]:
    measured = [panel for panel in analysis.panels if panel.points]
    panels = [panel for panel in measured if panel.pass_ in FORWARD] or measured
    lead = lead_panel(panels)
    for panel in sorted(panels, key=lambda panel: panel is not lead):
        yield _scaling_board(folder, where, analysis, panel, is_folded=panel is not lead)
    yield from (_error_board(where, analysis, group) for group in analysis.errors if group.ranked)
    groups = [group for group in analysis.accuracy if group.means]
    if groups:
        yield _accuracy_board(where, analysis, groups)


def _scaling_board(folder: Path, where: str, analysis: Analysis, panel: Panel, *, is_folded: bool) -> Board:
    lengths = panel.lengths
    if len(lengths) > MOST_LENGTHS:
        usual = [length for length in lengths if length in LENGTHS or length == lengths[-1]]
        lengths = usual if len(usual) > 2 else sorted(by_importance(lengths)[:MOST_LENGTHS])
    exact = panel.baseline.label if panel.baseline else ""
    beside = (f"cheaper than {exact}",) if exact else ()
    best = {one.seq_len: one.labels for one in panel.winners if len(one.rivals) > 1}

    def link(one: Point | Record) -> str:
        # No record has the number of several.
        record, is_own = (one.record, one.num_records == 1) if isinstance(one, Point) else (one, True)
        file = f"cells/{quote(record.cell.key)}.json"
        return f"{where}/{file}" if is_own and (folder / file).is_file() else f"{where}/report.html"

    def row(series: Series) -> tuple[Entry, ...]:
        entries = [Entry(text=series.label)]
        for length in lengths:
            one = series.outcomes.get(length)
            if isinstance(one, Point):
                time = human_ms.interval(one.median_ms, one.low_ms, one.high_ms)
                text = marked(time, marks_of(one.doubts, panel.shown_doubts))
                if one.device_ms is not None and one.is_waiting:
                    text += f", GPU alone {human_number(one.device_ms)} ms"
                is_best = series.label in best.get(length, ())
                entries.append(Entry(text=text, href=link(one), sort=one.median_ms, is_best=is_best))
            else:
                entries.append(Entry(text=NO_RECORD) if one is None else Entry(text=missing_word(one), href=link(one)))
        if exact:
            href = f"{where}/report.html#table-crossovers"
            entries.append(Entry(text=_cheaper(panel, series), href=href, is_words=True))
        return (*entries, _memory(series, link))

    rows = [series for series in panel.ranked if series.outcomes]
    entries = tuple(map(row, rows))
    note = (f"{capital(panel.subtitle)}.", _BEST, *time_caveats(panel), *unjudged_words(panel))
    return Board(
        title=capital(panel.title),
        note=say(note, (), [[entry.text for entry in each] for each in entries]),
        headings=("variant", *map(human_length, lengths), *beside, "peak memory"),
        rows=entries,
        variants=tuple(analysis.variants[series.label] for series in rows),
        quantity="time",
        is_folded=is_folded,
    )


_BEST = "Bold: the fastest of its length, and all that the intervals do not tell from it."


def _cheaper(panel: Panel, series: Series) -> str:
    """Return where a variant gets cheaper than exact attention; of one length that was timed in turns, by how much."""
    if series.is_exact or series.is_simulated:
        return "exact" if series.is_exact else "not judged"
    common = [point for point in series.points if point.seq_len in panel.exact]
    if panel.turns and len(common) == 1 and (found := panel.speed_up(series, common[0].seq_len)) is not None:
        return f"{factor_text(found, panel.shown_doubts)} as fast at {human_length(common[0].seq_len)}"
    crossing = panel.crossing(series.label)
    if crossing is None:
        return MISSING
    alone = panel.crossing(series.label, is_device=True)
    than = "" if panel.is_baseline(crossing.against) else f" (than {crossing.against})"
    beside = f"; the GPU alone {crossing_text(alone, panel.shown_doubts)}" if alone else ""
    return f"{crossing_text(crossing, panel.shown_doubts)}{than}{beside}"


def _memory(series: Series, link: Callable[[Point], str]) -> Entry:
    known = [point for point in series.points if point.memory.peak_bytes]
    if not known:
        return Entry(text="not measured" if series.points else MISSING, is_words=True)
    point = known[-1]
    peak = point.memory.peak_bytes or 0
    weights = weights_words(series)
    text = f"{human_bytes(peak)} at {human_length(point.seq_len)}" + (f"; weights grow: {weights}" if weights else "")
    return Entry(text=text, href=link(point), sort=peak, is_words=True)


def _error_board(where: str, analysis: Analysis, group: ErrorGroup) -> Board:
    panels = [panel for panel in group.panels if panel.ranked]

    def entry(panel: ErrorPanel, label: str) -> Entry:
        curve = next((one for one in panel.over_lengths if one.label == label), None)
        point = curve.at(panel.front_len) if curve else None
        if curve is None or point is None:
            return Entry(text=NO_RECORD)
        is_best = curve in panel.nearest
        href = f"{where}/report.html#table-{group.name}-{panel.inputs}"
        return Entry(text=error_interval(point), href=href, sort=point.value, is_best=is_best)

    means = [f"{panel.inputs} {error_text(panel.floor)}" for panel in panels]
    lengths = dict.fromkeys(human_length(panel.front_len) for panel in panels)
    return Board(
        title="Error beside exact attention",
        note=(
            f"Norm of the difference over the norm of the exact output, at {' and '.join(lengths)} tokens, mean over "
            f"seeds with its 95 % interval. The mean of the values, which needs no attention: {', '.join(means)}. "
            "Bold: the nearest and all that the intervals do not tell from it, where they are "
            f"{percent(NEARER)} nearer than that. "
            f"{capital(group.subtitle)}."
        ),
        headings=("variant", *(panel.inputs for panel in panels)),
        rows=tuple((Entry(text=label), *(entry(panel, label) for panel in panels)) for label in group.ranked),
        variants=tuple(analysis.variants[label] for label in group.ranked),
        quantity="error",
    )


def _accuracy_board(where: str, analysis: Analysis, groups: Sequence[AccuracyGroup]) -> Board:
    by_mean = (label for each in analysis.overviews for label in each.means)
    known = dict.fromkeys(score.name for group in groups for score in group.ranked)
    names = list(dict.fromkeys([*(name for name in by_mean if name in known), *known]))
    labels = {score.name: score.label for group in groups for score in group.scores}
    best = {group.name: _level_scores(group, analysis.controls) for group in groups}
    controls = control_words(sorted(analysis.controls & {group.ranked[0].label for group in groups}))

    def entry(group: AccuracyGroup, name: str) -> Entry:
        score = next((one for one in group.scores if one.name == name), None)
        if score is None:
            return Entry(text="not in this run")
        href = f"{where}/report.html#table-accuracy-{group.name}"
        if score.mean is None:
            return Entry(text=score.trial.failed or MISSING, href=href)
        return Entry(text=_score(group, score), href=href, sort=score.mean, is_best=name in best[group.name])

    return Board(
        title="Accuracy over the best floor",
        note=(
            "Mean over seeds on test with its 95 % interval, and by how much it beats the best of chance and what "
            "trivial models score. Bold: of what beats its floor the best, and all that is not told from it. "
            + " ".join([*filter(None, [controls]), *(f"{group.title}: {_setting(group)}." for group in groups)])
        ),
        headings=("variant", *(group.title for group in groups)),
        rows=tuple((Entry(text=name), *(entry(group, name) for group in groups)) for name in names),
        variants=tuple(analysis.variants[labels[name]] for name in names),
        quantity="score",
    )


def _score(group: AccuracyGroup, score: LabelScore) -> str:
    metric, mean, standing = group.metric, score.mean, score.standing
    assert mean is not None
    ends = () if score.low is None or score.high is None else (metric.end(score.low), metric.end(score.high))
    text = metric.show(mean) + (f" [{', '.join(ends)}]" if ends else ", one seed")
    text += f" (params {score.other_size})" if score.other_size else ""
    if standing is None:
        return text
    if standing.verdict == "not beaten":
        return f"{text}, not beaten"
    doubt = {"not settled": " (not clearly)", "unknown": " (uncertain)"}.get(standing.verdict, "")
    return f"{text}, {metric.signed(standing.gain)}{doubt}"


def _setting(group: AccuracyGroup) -> str:
    floor = [f"best floor {group.metric.show(value)}, {floor_words(name)}" for name, value in group.marks.items()][-1:]
    return "; ".join([group.metric.axis, *floor, group.how])


def _level_scores(group: AccuracyGroup, controls: frozenset[str]) -> frozenset[str]:
    """Return the best above the floor, and those that are not told from it; of one seed nothing is said.

    Their intervals overlap with its, and no difference by seed is settled.
    """
    judged = (one for one in group.ranked if one.label not in controls)
    above = (one for one in judged if one.standing is None or one.standing.verdict == "beaten")
    able = [(one, one.low, one.high) for one in above if one.low is not None and one.high is not None]
    near = [one for one, low, high in able if low <= able[0][2] and able[0][1] <= high]
    differences = ((one.name, pair(one.runs, near[0].runs)) for one in near)
    return frozenset(name for name, difference in differences if difference is None or not difference.is_settled)
