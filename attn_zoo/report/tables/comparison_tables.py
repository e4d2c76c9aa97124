"""Two runs side by side, for people: times cell by cell, errors by inputs, scores task by task."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from attn_zoo.errors import counted
from attn_zoo.report.analysis.grouping import varying
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import LEAST_SEEDS
from attn_zoo.report.tables.error_tables import error_text
from attn_zoo.report.tables.table import (
    MARK_REMARKS,
    Column,
    Note,
    Row,
    Table,
    interval_column,
    number_column,
    text_column,
    time_column,
)
from attn_zoo.report.wording import PANEL_FIELDS, doubt_words, marks_of, setting_words, worth_a_mark
from attn_zoo.units import human_length, human_number, with_ends

SAME_WITHIN = 0.02
"""A whole interval within this share of 1 is `same`: what lasts for a whole run differs by as much."""

RATIO = replace(interval_column("ratio", "ratio", human_number, priority=0), brief=str)
"""Of the time of the second run over that of the first; the interval is never left out."""


def _two_runs(
    name: str, what: str, notes: Note, cell: Iterable[Column], numbers: Iterable[Column], rows: Sequence[Row]
) -> Table:
    """Return a table of cells that both runs have: which they are, what each run has of them, and the verdict."""
    return Table(
        name=name,
        title=f"Two runs, {what}",
        notes=notes,
        columns=(
            text_column("variant", "label", priority=0),
            *cell,
            text_column("setting", priority=0),
            *numbers,
            Column(heading="verdict", show=_verdict_word, align="left", priority=0),
        ),
        rows=tuple({**row, "setting": setting} for row, setting in zip(rows, settings_apart(rows), strict=True)),
    )


def times_table(rows: Sequence[Row]) -> Table:
    """Return the times of cells that both runs have; see `attn_zoo.report.compare.Comparison`."""
    counts = [int(count) for row in rows for side in "ab" if (count := row[f"num_processes_{side}"])]
    shown = worth_a_mark(doubts for row in rows for side in "ab" if (doubts := row[f"doubts_{side}"]) is not None)
    return _two_runs(
        "compare",
        "cell by cell",
        notes=(
            "Ratio: time of the second over that of the first, with its 95 % interval.",
            (
                "They agree where a change by more than the limit is excluded. Cannot say: the interval is too wide "
                "for that, one is of a single process (two runs of the same code differ by more than it knows), or "
                "something else disturbed the machine."
            ),
            doubt_words(counts),
            *MARK_REMARKS,
        ),
        cell=(text_column("pass", priority=0), number_column("length", "seq_len", human_length, priority=0)),
        numbers=(
            time_column("first", suffix="_a", priority=2),
            time_column("second", suffix="_b", priority=2),
            RATIO,
            _MEMORY,
        ),
        rows=[
            {
                **row,
                "word": str(row["verdict"]).partition(" ")[0],
                **{f"marks_{side}": marks_of(row[f"doubts_{side}"] or (), shown) for side in "ab"},
            }
            for row in rows
        ],
    )


def settings_apart(rows: Sequence[Row]) -> list[str]:
    """Return for each row what tells its cell from those of other settings; empty where all have the same."""
    apart = varying((*PANEL_FIELDS, *_MORE), rows)
    more = {name: say for name, say in _MORE.items() if name in apart}
    said = [[*(say(row[name]) for name, say in more.items()), *setting_words(row, apart)] for row in rows]
    return [", ".join(filter(None, words)) for words in said]


_MORE: Mapping[str, Callable[[str], str]] = {
    "level": str,
    "device": str.upper,
    "start": str,
    "overrides": lambda text: ", ".join(f"{name}={value}" for name, value in json.loads(text).items()),
}


def _has_other_memory(row: Row) -> bool:
    return row["memory_ratio"] is not None and abs(row["memory_ratio"] - 1.0) > SAME_WITHIN


_MEMORY = Column(
    heading="memory",
    show=lambda row: human_number(row["memory_ratio"]) if _has_other_memory(row) else "",
    sort=lambda row: row["memory_ratio"],
    priority=1,
)


def _verdict_word(row: Row) -> str:
    word = "agree" if row["verdict"] == "same" else str(row["verdict"])
    if row.get("num_lost") and row["verdict"] != "failed in b":
        word += f", {counted(row['num_lost'], 'seed')} failed"
    kernels = [row.get(f"kernel_{side}") for side in "ab"]
    return f"{word}, {' -> '.join(map(str, kernels))}" if all(kernels) and kernels[0] != kernels[1] else word


def errors_table(rows: Sequence[Row]) -> Table:
    """Return the errors beside exact attention that both runs measured."""
    return _two_runs(
        "compare-errors",
        "error by error",
        notes=(
            (
                "Errors beside exact attention, means over common seeds; the ratio is that of the second over the "
                "first, paired by seed, with its 95 % interval."
            ),
            (
                f"Better or worse only where the interval excludes 1; {LEAST_SEEDS} common seeds are needed. They "
                "agree where a change by more than the limit is excluded, or where only rounding is left in both."
            ),
        ),
        cell=(text_column("inputs", priority=0), number_column("length", "seq_len", human_length, priority=0)),
        numbers=(
            number_column("first", "error_a", error_text, priority=1),
            number_column("second", "error_b", error_text, priority=1),
            RATIO,
        ),
        rows=rows,
    )


def scores_table(rows: Sequence[Row]) -> Table:
    """Return the scores of variants that both runs trained."""

    def difference(row: Row) -> str:
        if row["difference"] is None:
            return ""
        signed = Metric(row["metric"]).signed
        return with_ends(signed(row["difference"]), row["difference_low"], row["difference_high"], signed)

    def column(heading: str, key: str) -> Column:
        def show(row: Row) -> str:
            return "" if row[key] is None else Metric(row["metric"]).show(row[key])

        return Column(heading=heading, show=show, priority=1)

    return _two_runs(
        "compare-scores",
        "score by score",
        notes=(
            (
                "Mean scores on test, over common seeds; the difference is the second minus the first, paired by seed, "
                "with its 95 % interval."
            ),
            (
                f"Better or worse only where it is more than seeds and test set explain; {LEAST_SEEDS} common seeds "
                "are needed. They agree where a difference by more than the limit is excluded."
            ),
        ),
        cell=(text_column("task", priority=0),),
        numbers=(
            column("first", "score_a"),
            column("second", "score_b"),
            Column(heading="difference", show=difference, sort=lambda row: row["difference"], priority=0),
        ),
        rows=rows,
    )
