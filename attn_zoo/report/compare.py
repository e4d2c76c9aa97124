"""Compare two runs: times cell by cell, scores task by task, with intervals, and whether the runs agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from attn_zoo.errors import ConfigError
from attn_zoo.records import Environment
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.observations import Results, read_results
from attn_zoo.report.analysis.scores import (
    LEAST_SEEDS,
    AccuracyGroup,
    Difference,
    LabelScore,
    make_accuracy_groups,
    pair,
)
from attn_zoo.report.export import flat_frame
from attn_zoo.report.tables.table import Column, Row, Table, interval_values, text_column, time_column
from attn_zoo.report.units import human_length, human_number
from attn_zoo.report.wording import PANEL_FIELDS, doubt_words

_MATCH = ("label", "seq_len", *(name for name in PANEL_FIELDS if name != "environment"))
_SHOWN = ("label", "seq_len", "pass", "dtype", "device", "scope", "is_causal", "has_padding", "batch_size", "num_heads")
_ENDS = ("low_ms", "high_ms", "num_processes")


def compare(dir_a: str | Path, dir_b: str | Path, *, allow_other_environment: bool = False) -> pd.DataFrame:
    """Return one row for each scaling cell that both runs have (whatever the version of the variant's source).

    `ratio` is the median of b over the median of a; `ratio_low` and `ratio_high` are what the two 95 % intervals leave
    possible (low over high and high over low), which is wider than an interval of the ratio itself. `verdict` is about
    b: `faster` or `slower` only where the two intervals do not touch, else `same`: then the runs agree, and 1 is in the
    interval of the ratio. `cannot say` is where they do not touch either, but one is of a single process
    (`num_processes_a`, `num_processes_b`) and knows nothing of what differs between two runs of the same code. `only in
    a` and `only in b` are cells that one side did not measure.

    Args:
        dir_a: results folder, the reference.
        dir_b: results folder, the candidate.
        allow_other_environment: compare across machines or versions of software; otherwise that is an error.

    Raises:
        ConfigError: not a results folder, or the environments differ and that was not allowed.
    """
    a, b = read_results([dir_a]), read_results([dir_b])
    differences = _environment_differences(a, b)
    if differences and not allow_other_environment:
        raise ConfigError(
            "compare", [("", f"the two runs differ in environment ({differences}); allow that to compare anyway")]
        )
    left, right = (_measured(results) for results in (a, b))
    merged = left.merge(right, on=list(_MATCH), how="outer", suffixes=("_a", "_b"))
    merged["ratio"] = merged["median_ms_b"] / merged["median_ms_a"]
    merged["ratio_low"] = merged["low_ms_b"] / merged["high_ms_a"]
    merged["ratio_high"] = merged["high_ms_b"] / merged["low_ms_a"]
    merged["verdict"] = [
        _verdict(*ends) for ends in zip(*(merged[f"{name}_{side}"] for side in "ab" for name in _ENDS), strict=True)
    ]
    numbers = ("median_ms_a", "median_ms_b", "ratio", "ratio_low", "ratio_high", "flags_a", "flags_b", "verdict")
    columns = [*_SHOWN, *numbers, *(f"{name}_{side}" for name in _ENDS for side in "ab")]
    columns += [name for name in _MATCH if name not in _SHOWN]
    return merged[columns].sort_values(list(_SHOWN), ignore_index=True)


def compare_scores(dir_a: str | Path, dir_b: str | Path) -> list[dict[str, Any]]:
    """Return one row for each variant of each task that a side has trained; scores are paired by seed.

    `difference` is b minus a, with its 95 % interval. `verdict` is about b: `better` or `worse` only where that is more
    than seeds and the choice of test examples explain, else `same`, and `cannot say` below three common seeds.

    Args:
        dir_a: results folder, the reference.
        dir_b: results folder, the candidate.

    Raises:
        ConfigError: not a results folder.
    """
    sides = [
        {(group.setting, score.label, score.start): (score, group) for group in groups for score in group.scores}
        for groups in (make_accuracy_groups(read_results([folder])) for folder in (dir_a, dir_b))
    ]
    rows = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        setting, label, start = key
        group = (sides[0].get(key) or sides[1][key])[1]
        first, second = (side[key][0] if key in side else None for side in sides)
        found = pair(second.runs, first.runs) if first is not None and second is not None else None
        row = {name: getattr(setting, name) for name in _SCORE_MATCH if name not in {"label", "start"}}
        rows.append(
            row
            | {"label": label, "start": start or "scratch", "metric": group.metric.name}
            | {"score_a": first.mean if first else None, "score_b": second.mean if second else None}
            | interval_values("difference", *((found.mean, found.low, found.high) if found else (None, None, None)))
            | {"num_paired": found.num_paired if found else 0, "verdict": _score_verdict(first, second, found, group)}
        )
    return rows


_SCORE_MATCH = (
    *("label", "start", "task", "level", "protocol", "overrides", "tuned", "is_causal", "dtype", "device", "threads"),
    *("protocol_version", "data_digest"),
)


def _score_verdict(
    first: LabelScore | None, second: LabelScore | None, found: Difference | None, group: AccuracyGroup
) -> str:
    if first is None or first.mean is None:
        return "only in b"
    if second is None or second.mean is None:
        return "only in a"
    if found is None or found.num_paired < LEAST_SEEDS:
        return "cannot say"
    if not found.is_settled:
        return "same"
    return "better" if group.metric.gain(found.mean, 0.0) > 0 else "worse"


def compare_tables(frame: pd.DataFrame, scores: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return what both runs have, for people: times, and scores.

    Raises:
        ConfigError: they have nothing in common; the message names what differs.
    """
    common = frame[~frame["verdict"].isin(_ALONE)]
    both = [row for row in scores if row["verdict"] not in _ALONE]
    if common.empty and not both:
        timed = [{str(name): value for name, value in row.items()} for row in frame.to_dict(orient="records")]
        why = _why_apart(timed, _MATCH) if timed else _why_apart(scores, _SCORE_MATCH)
        sides = (frame[frame["verdict"] == f"only in {side}"] for side in "ab")
        examples = [_example(side) for side in sides]
        if not timed and scores:
            examples = [_score_example([row for row in scores if row["verdict"] == alone]) for alone in _ALONE]
        text = f"expected two runs with cells in common; the first has {examples[0]}, the second {examples[1]}"
        raise ConfigError("compare", [("", f"{text}{f': they differ in {why}' if why else ''}")])
    tables = [] if common.empty else [_time_table(common)]
    return [*tables, *([_compared_scores(both)] if both else [])]


_ALONE = ("only in a", "only in b")


def _why_apart(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the fields of which no value occurs on both sides, with their values; else those of the nearest pair."""
    sides = [[row for row in rows if row["verdict"] == alone] for alone in _ALONE]
    if not all(sides):
        return ""

    def differing(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> list[str]:
        said = []
        for name in names:
            own, other = ({str(row[name]) for row in side} for side in (first, second))
            if not own & other:
                shown = (", ".join(sorted(values)[:3]) or "none" for values in (own, other))
                said.append(f"{name} ({' against '.join(shown)})")
        return said

    found = differing(*sides)
    if not found:
        pairs = ([one] for one in sides[0][:50])
        found = min((differing(one, [two]) for one in pairs for two in sides[1][:50]), key=len)
    return ", ".join(found[:4])


def _compared_scores(rows: Sequence[Mapping[str, Any]]) -> Table:
    def difference(row: Row) -> str:
        metric = Metric(row["metric"])
        ends = (row["difference_low"], row["difference_high"])
        text = metric.signed(row["difference"])
        return text if None in ends else f"{text} [{metric.signed(ends[0])}, {metric.signed(ends[1])}]"

    first, second = (
        Column(
            heading=heading,
            show=lambda row, key=key: Metric(row["metric"]).show(row[key]),  # type: ignore[misc]
            priority=1,
        )
        for heading, key in (("first", "score_a"), ("second", "score_b"))
    )
    return Table(
        name="compare-scores",
        title="Two runs, score by score",
        note=(
            "Mean scores on test; the difference is the second minus the first, paired by seed, with its 95 % "
            f"interval. Better or worse only where it is more than seeds and test set explain; {LEAST_SEEDS} common "
            "seeds are needed."
        ),
        columns=(
            text_column("variant", "label", priority=0),
            text_column("task", "task", priority=0),
            text_column("start", "start", priority=3),
            first,
            second,
            Column(heading="difference", show=difference, sort=lambda row: row["difference"], priority=0),
            Column(heading="verdict", show=_verdict_word, align="left", priority=0),
        ),
        rows=tuple(rows),
    )


def _score_example(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "none that was measured"
    return f"{len(rows)}, such as {rows[0]['label']} on {rows[0]['task']} by {rows[0]['protocol']}"


def _time_table(common: pd.DataFrame) -> Table:
    counts = [int(count) for side in "ab" for count in common[f"num_processes_{side}"]]
    return Table(
        name="compare",
        title="Two runs, cell by cell",
        note=(
            "Ratio: time of the second over that of the first, with what their two 95 % intervals leave possible. They "
            "agree where the intervals overlap. Cannot say: they do not, but one is of a single process, and two runs "
            f"of the same code differ by more than that. {doubt_words(counts)}"
        ),
        columns=(
            text_column("variant", "label", priority=0),
            text_column("pass", "pass", priority=0),
            Column(heading="length", show=_length, sort=lambda row: row["seq_len"], priority=0),
            *([text_column("dtype", "dtype", priority=0)] if len(set(common["dtype"])) > 1 else []),
            time_column("first", suffix="_a", priority=2),
            time_column("second", suffix="_b", priority=2),
            Column(heading="ratio", show=_ratio, sort=lambda row: row["ratio"], priority=0),
            Column(heading="verdict", show=_verdict_word, align="left", priority=0),
        ),
        rows=tuple({str(name): value for name, value in row.items()} for row in common.to_dict(orient="records")),
        fields_if_empty=tuple(common.columns),
    )


def agreement(frame: pd.DataFrame) -> str:
    """Return in one line in how many cells the two runs agree, and how much that says: wide intervals agree easily."""
    counts = frame["verdict"].value_counts()
    alone = int(counts.get("only in a", 0)), int(counts.get("only in b", 0))
    said = f"{counts.get('same', 0)} of {len(frame) - sum(alone)} cells agree"
    factor = ((frame["ratio_high"] / frame["ratio_low"]) ** 0.5).median()
    if not math.isnan(factor):
        said += f", with ratios known to a factor of {factor:.2f} either way (median)"
    others = [
        f"{count} {words}"
        for count, words in (
            (counts.get("slower", 0), "slower in the second"),
            (counts.get("faster", 0), "faster in the second"),
            (counts.get("cannot say", 0), "apart, but of one process, so that nobody can say"),
            (alone[0], "only in the first"),
            (alone[1], "only in the second"),
        )
        if count
    ]
    rows = [{str(name): value for name, value in row.items()} for row in frame.to_dict(orient="records")]
    why = _why_apart(rows, ("protocol", "protocol_version"))
    return "; ".join([said, *others]) + (f": they differ in {why}" if why else "")


def _example(side: pd.DataFrame) -> str:
    if side.empty:
        return "none that was measured"
    row = side.iloc[0]
    return f"{len(side)}, such as {row['label']} {row['pass']} L{row['seq_len']} {row['dtype']} on {row['device']}"


def _length(row: Row) -> str:
    return human_length(row["seq_len"])


def _ratio(row: Row) -> str:
    return f"{human_number(row['ratio'])} [{human_number(row['ratio_low'])}, {human_number(row['ratio_high'])}]"


def _verdict_word(row: Row) -> str:
    return "agree" if row["verdict"] == "same" else str(row["verdict"])


def _measured(results: Results) -> pd.DataFrame:
    frame = flat_frame([one for one in results.observations if one.is_timed])
    frame["num_processes"] = [max(1, len(sizes)) for sizes in frame["process_sizes"]]
    # The latest of repeated cells; a null never equals a null in a merge key of this type, so give it a value.
    frame = frame[[*_MATCH, "median_ms", "flags", *_ENDS]].drop_duplicates(list(_MATCH), keep="last")
    return frame.fillna({name: -1 for name in _MATCH if frame[name].dtype == "Int64"})


def _verdict(low_a: float, high_a: float, processes_a: float, low_b: float, high_b: float, processes_b: float) -> str:
    if math.isnan(low_a):
        return "only in b"
    if math.isnan(low_b):
        return "only in a"
    if high_b >= low_a and low_b <= high_a:
        return "same"
    if min(processes_a, processes_b) < 2:
        return "cannot say"
    return "faster" if high_b < low_a else "slower"


def _environment_differences(a: Results, b: Results) -> str:
    """Return the names of the fields that differ, or an empty string."""
    used_a, used_b = ({one.environment for one in results.observations} - {""} for results in (a, b))
    if used_a == used_b:
        return ""
    first, second = _first_known(used_a, a.environments), _first_known(used_b, b.environments)
    if first is None or second is None:
        return "not described in run.json"
    own, other = first.deciding(), second.deciding()
    return ", ".join(name for name in own if own[name] != other[name])


def _first_known(used: set[str], known: Mapping[str, Environment]) -> Environment | None:
    return next((known[digest] for digest in sorted(used) if digest in known), None)
