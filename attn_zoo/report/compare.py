"""Compare two runs cell by cell: ratios with intervals, and a verdict only where the intervals separate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from attn_zoo.errors import ConfigError
from attn_zoo.records import Environment
from attn_zoo.report.load import Results, read_results
from attn_zoo.report.wording import PANEL_FIELDS

__all__ = ["compare"]

_MATCH = ("label", "seq_len", *(name for name in PANEL_FIELDS if name != "environment"))
_SHOWN = ("label", "seq_len", "pass", "dtype", "device", "scope", "is_causal", "has_padding", "batch_size", "num_heads")


def compare(dir_a: str | Path, dir_b: str | Path, *, allow_other_environment: bool = False) -> pd.DataFrame:
    """Return one row for each scaling cell that both runs have (whatever the version of the variant's source).

    `ratio` is the median of b over the median of a; `ratio_low` and `ratio_high` are what the two 95 % intervals leave
    possible (low over high and high over low), which is wider than an interval of the ratio itself. `verdict` is about
    b: `faster` or `slower` only where the two intervals do not touch, else `same`; `only in a` and `only in b` are
    cells that one side did not measure.

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
            "compare",
            [
                (
                    "",
                    f"the two runs differ in environment ({differences}); allow that to compare anyway",
                )
            ],
        )
    left, right = (_measured(results.frame) for results in (a, b))
    merged = left.merge(right, on=list(_MATCH), how="outer", suffixes=("_a", "_b"))
    merged["ratio"] = merged["median_ms_b"] / merged["median_ms_a"]
    merged["ratio_low"] = merged["low_ms_b"] / merged["high_ms_a"]
    merged["ratio_high"] = merged["high_ms_b"] / merged["low_ms_a"]
    merged["verdict"] = [
        _verdict(*ends)
        for ends in zip(merged["low_ms_a"], merged["high_ms_a"], merged["low_ms_b"], merged["high_ms_b"], strict=True)
    ]
    numbers = ("median_ms_a", "median_ms_b", "ratio", "ratio_low", "ratio_high", "flags_a", "flags_b", "verdict")
    columns = [*_SHOWN, *numbers]
    return merged[columns].sort_values(list(_SHOWN), ignore_index=True)


def _measured(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame[(frame["kind"] == "scaling") & (frame["status"] == "ok") & frame["median_ms"].notna()]
    rows = rows[[*_MATCH, "median_ms", "low_ms", "high_ms", "flags"]]
    # The latest of repeated cells; a null never equals a null in a merge key of this type, so give it a value.
    rows = rows.drop_duplicates(list(_MATCH), keep="last")
    return rows.fillna({name: -1 for name in _MATCH if rows[name].dtype == "Int64"})


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
    used_a, used_b = (set(results.frame["environment"]) - {""} for results in (a, b))
    if used_a == used_b:
        return ""
    first, second = _first_known(used_a, a.environments), _first_known(used_b, b.environments)
    if first is None or second is None:
        return "not described in run.json"
    own, other = first.to_dict(), second.to_dict()
    return ", ".join(name for name in own if own[name] != other[name] and name not in {"commit", "is_dirty"})


def _first_known(used: set[str], known: Mapping[str, Environment]) -> Environment | None:
    return next((known[digest] for digest in sorted(used) if digest in known), None)
