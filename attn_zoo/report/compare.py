"""Compare two runs cell by cell: ratios with intervals, and whether the runs agree: whether their intervals overlap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from attn_zoo.errors import ConfigError
from attn_zoo.records import COMMIT_FIELDS, Environment
from attn_zoo.report.analysis.observations import Results, read_results
from attn_zoo.report.export import flat_frame
from attn_zoo.report.tables.table import Column, Row, Table, text_column, time_column
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
    interval of the ratio. `only in a` and `only in b` are cells that one side did not measure. Intervals of a single
    process (`num_processes_a`, `num_processes_b`) know nothing of what differs between two runs.

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
        _verdict(*ends)
        for ends in zip(merged["low_ms_a"], merged["high_ms_a"], merged["low_ms_b"], merged["high_ms_b"], strict=True)
    ]
    numbers = ("median_ms_a", "median_ms_b", "ratio", "ratio_low", "ratio_high", "flags_a", "flags_b", "verdict")
    columns = [*_SHOWN, *numbers, *(f"{name}_{side}" for name in _ENDS for side in "ab")]
    return merged[columns].sort_values(list(_SHOWN), ignore_index=True)


def compare_table(frame: pd.DataFrame) -> Table:
    """Return the cells that both runs have, for people.

    Raises:
        ConfigError: they have none in common.
    """
    common = frame[~frame["verdict"].isin(["only in a", "only in b"])]
    if common.empty:
        sides = (frame[frame["verdict"] == f"only in {side}"] for side in "ab")
        first, second = (_example(side) for side in sides)
        text = f"expected two runs with cells in common; the first has {first}, the second {second}"
        raise ConfigError("compare", [("", text)])
    counts = [int(count) for side in "ab" for count in common[f"num_processes_{side}"]]
    return Table(
        name="compare",
        title="Two runs, cell by cell",
        note=(
            "Ratio: time of the second over that of the first, with what their two 95 % intervals leave possible. They "
            f"agree where the intervals overlap. {doubt_words(counts)}"
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
            (alone[0], "only in the first"),
            (alone[1], "only in the second"),
        )
        if count
    ]
    return "; ".join([said, *others])


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


def _verdict(low_a: float, high_a: float, low_b: float, high_b: float) -> str:
    if math.isnan(low_a):
        return "only in b"
    if math.isnan(low_b):
        return "only in a"
    if high_b < low_a:
        return "faster"
    return "slower" if low_b > high_a else "same"


def _environment_differences(a: Results, b: Results) -> str:
    """Return the names of the fields that differ, or an empty string."""
    used_a, used_b = ({one.environment for one in results.observations} - {""} for results in (a, b))
    if used_a == used_b:
        return ""
    first, second = _first_known(used_a, a.environments), _first_known(used_b, b.environments)
    if first is None or second is None:
        return "not described in run.json"
    own, other = first.to_dict(), second.to_dict()
    return ", ".join(name for name in own if own[name] != other[name] and name not in COMMIT_FIELDS)


def _first_known(used: set[str], known: Mapping[str, Environment]) -> Environment | None:
    return next((known[digest] for digest in sorted(used) if digest in known), None)
