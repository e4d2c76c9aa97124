"""Check results as a reviewer would: are the records whole, possible, comparable, and is anything missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from statistics import geometric_mean, median

from attn_zoo.errors import ConfigError, counted
from attn_zoo.folder import Run, missing_shards, read_run
from attn_zoo.packed_run import opened
from attn_zoo.records import Approximation, Cell, Timing
from attn_zoo.report.analysis.approximation_errors import GROUP_FIELDS
from attn_zoo.report.analysis.efficiency import pass_flops
from attn_zoo.report.analysis.observations import Observation, Results, read_results
from attn_zoo.report.analysis.scores import PARAMS_TOLERANCE, AccuracyGroup, make_accuracy_groups
from attn_zoo.units import human_flop_rate, human_ms

ABOVE_MEASURED = 1.25
"""How far a rate may lie above the ceiling that the run measured, which a busy host measures too low; the one on a data
sheet is never exceeded."""

_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is wrong with results: which of `CHECKS` says so, where (file, id of a cell, title of a group), and what."""

    check: str
    where: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    run: Run
    results: Results
    groups: tuple[AccuracyGroup, ...]

    @property
    def timed(self) -> Iterator[tuple[Observation, Timing]]:
        """Records of calls and steps that were measured."""
        for one in self.results.observations:
            if one.is_timed and one.record.timing is not None:
                yield one, one.record.timing


def verify(source: str | Path) -> list[Fault]:
    """Return what is wrong with a results folder or packed run, in the order of `CHECKS`; nothing where nothing is.

    Raises:
        ConfigError: there is no results folder, or a newer version of this package wrote it.
    """
    with opened(source) as folder:
        if folder.is_file():
            why = "an export has neither a plan nor machines to hold its records against"
            raise ConfigError(
                str(source), [("", f"expected a results folder, a packed run (.zip) or REV:FOLDER; {why}")]
            )
        if not (folder / "run.json").is_file():
            read_run(folder)  # says what else it is
        results = read_results([folder])
    subject = _Subject(run=results.runs[0], results=results, groups=tuple(make_accuracy_groups(results)))
    return [
        Fault(check=name, where=where, text=text) for name, (_, find) in CHECKS.items() for where, text in find(subject)
    ]


Found = Iterator[tuple[str, str]]


def _schema(subject: _Subject) -> Found:
    yield from subject.run.problems


def _digests(subject: _Subject) -> Found:
    run = subject.run
    for name, key in run.foreign.items():
        yield f"cells/{name}", f"foreign: the cell inside has the key {key}"
    for record in run.records:
        if record.environment and record.environment not in run.environments:
            yield record.cell.id, f"its environment {record.environment} is not described in run.json"
        if record.cell.key in run.strays:
            yield record.cell.id, "no cell of the plan: its source or data changed, or it belongs to another run"


def _complete(subject: _Subject) -> Found:
    if missing := missing_shards(subject.run.shards):
        yield "run.json", missing
    for one in subject.results.left:
        why = f" ({one.record.reason})" if one.record.reason else ""
        yield one.cell.id, f"planned, and has no record{why}"


def _numbers(subject: _Subject) -> Found:
    for record in subject.run.records:  # as they are stored: observations have a summary of today
        timing, score = record.timing, record.score
        if record.status == "ok" and timing is not None:
            if not timing.samples_ms:
                yield record.cell.id, "expected positive samples; got none"
            elif not any(isclose(timing.median_ms, each, rel_tol=_ROUNDING) for each in _medians(timing)):
                yield record.cell.id, f"its median, {human_ms(timing.median_ms)}, is not that of its samples"
            elif not timing.low_ms * (1 - _ROUNDING) <= timing.median_ms <= timing.high_ms * (1 + _ROUNDING):
                interval = " to ".join(map(human_ms, (timing.low_ms, timing.high_ms)))
                yield record.cell.id, f"its interval, {interval}, leaves out its median, {human_ms(timing.median_ms)}"
        if score is not None and not score.is_lower_better and not 0 <= score.value <= 1:
            yield record.cell.id, f"a score of {score.value:g} is no share of what was right"
        elif score is not None and score.correct:
            share = score.correct.count("1") / len(score.correct)
            if not isclose(share, score.value, abs_tol=_ROUNDING):
                yield record.cell.id, f"its score, {score.value:g}, is not that of its answers, {share:g}"
    yield from _inputs(subject)


def _inputs(subject: _Subject) -> Found:
    """Yield errors beside exact attention that stand side by side, and are of other queries, keys and values."""
    firsts: dict[tuple[object, ...], tuple[Cell, Approximation]] = {}
    for record in subject.run.records:
        if (found := record.approximation) is not None:
            cell = record.cell
            same = tuple(getattr(cell, name) for name in (*GROUP_FIELDS, "inputs", "seq_len", "seed"))
            other, known = firsts.setdefault((record.environment, *same), (cell, found))
            if not isclose(found.mean_error, known.mean_error, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
                off = f"off by {found.mean_error:.3g}, beside {other.id} by {known.mean_error:.3g}"
                yield cell.id, f"had other inputs: the mean of the values is {off}"


def _medians(timing: Timing) -> Iterator[float]:
    """Yield the median of all samples, which older records hold, and that which counts all processes alike."""
    yield median(timing.samples_ms)
    if timing.process_sizes:
        yield geometric_mean(map(median, timing.by_process))


def _limits(subject: _Subject) -> Found:
    for one, timing in subject.timed:
        cell = one.cell
        roof = subject.results.ceilings(one.environment, cell.device, cell.dtype, cell.threads)
        flops = pass_flops(one.record, cell.pass_ or "fwd")
        if roof is None or flops is None or one.record.is_simulated:
            continue
        fastest_ms = min(timing.median_ms, timing.graph_ms or timing.median_ms)
        rate = flops / max(fastest_ms * 1e-3, 1e-12)
        sheet, measured = roof.sheet_flops_per_s, ABOVE_MEASURED * roof.matmul_flops_per_s
        whose = "what a matrix product reached, and a quarter more" if sheet is None else "the data sheet"
        if rate > (limit := measured if sheet is None else sheet):
            yield cell.id, f"{human_flop_rate(rate)} is above {whose} ({human_flop_rate(limit)})"


def _gate(subject: _Subject) -> Found:
    for one, _ in subject.timed:
        if not one.record.gate:
            yield one.cell.id, "was timed without a correctness gate"
    for one in subject.results.observations:
        if one.record.approximation is not None and not one.record.gate:
            yield one.cell.id, "was compared with exact attention without a correctness gate"


def _floors(subject: _Subject) -> Found:
    for one in subject.results.observations:
        if one.record.score is not None and not one.record.score.floors:
            yield one.cell.id, "has no floor: nothing says what a trivial model scores"


def _budgets(subject: _Subject) -> Found:
    # A mechanism that was put into a model brings what it brings.
    for group in (group for group in subject.groups if not group.setting.replaces):
        for score in group.scores:
            if score.other_size and score.params_excess is not None:
                more = "more" if score.params_excess > 0 else "fewer"
                text = f"{100 * abs(score.params_excess):.2f} % {more} parameters than {group.baseline}"
                yield f"{score.name} on {group.title}", text


def _trials(subject: _Subject) -> Found:
    for group in subject.groups:
        yield from ((group.title, warning) for warning in group.warnings)
        able = (score for score in group.scores if any(run.record.status != "unsupported" for run in score.runs))
        counts = {score.name: len(score.runs) for score in able}
        most = max(counts.values(), default=0)
        for name, count in counts.items():
            if count < most:
                yield f"{name} on {group.title}", f"{counted(count, 'seed')}; others have {most}"


CHECKS: dict[str, tuple[str, Callable[[_Subject], Found]]] = {
    "schema": ("every file is a record of this version or an older one", _schema),
    "digests": ("a record is of the cell that its file is named after, of the plan, of a described machine", _digests),
    "complete": ("every planned cell has a record, and every shard has run", _complete),
    "numbers": ("the numbers of a record do not contradict each other", _numbers),
    "limits": ("nothing is faster than the machine can be", _limits),
    "gate": ("nothing was timed, or compared with exact attention, before it passed its correctness gate", _gate),
    "floors": ("beside each score stands what a trivial model scores", _floors),
    "budgets": (f"parameters are within {PARAMS_TOLERANCE:.0%} of the baseline's", _budgets),
    "trials": ("each variant got as many trials and seeds as the others, and each seed once", _trials),
}
"""What is looked at, by name: in one sentence, and how."""

TOLD = frozenset({"budgets"})
"""Checks of what reports tell of, too: a fact that a reader must know, and no mistake in the results."""
