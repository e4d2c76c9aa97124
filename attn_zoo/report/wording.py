"""How a panel of curves is called: the settings its curves share, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from attn_zoo.records import PASSES
from attn_zoo.report.analysis.observations import Results
from attn_zoo.report.units import slug

__all__ = ["PANEL_FIELDS", "PASS_TITLES", "doubt_words", "held_words", "panel_name", "panel_subtitle", "panel_title"]

PASS_TITLES: Mapping[str, str] = {pass_.name: pass_.title for pass_ in PASSES.values()}

_SCOPES = {"attention": "attention only", "mixer": "mixer with projections", "model": "whole model"}

PANEL_FIELDS = (
    *("environment", "device", "dtype", "pass", "scope", "is_causal", "has_padding", "dropout_p", "batch_size"),
    *("num_heads", "num_kv_heads", "head_dim", "protocol", "threads", "protocol_version"),
)
"""Everything but variant and length that decides a timing: within one panel only those two differ."""


_WORDS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    ("dtype", str),
    ("scope", lambda value: _SCOPES.get(value, value)),
    ("protocol", lambda value: f"protocol {value}" if value else ""),
    ("is_causal", lambda value: "causal" if value else "bidirectional"),
    ("batch_size", lambda value: f"batch {value}"),
    ("num_heads", lambda value: f"{value} head{'s' if value != 1 else ''}"),
    ("num_kv_heads", lambda value: f"{value} key/value heads"),
    ("head_dim", lambda value: f"head size {value}"),
    ("has_padding", lambda value: "a quarter of every second sequence padded" if value else ""),
    ("dropout_p", lambda value: f"dropout {value:g}" if value else ""),
    ("threads", lambda value: f"{value} thread{'s' if value != 1 else ''}"),
)


def _say(setting: Mapping[str, Any], names: set[str]) -> list[str]:
    said = [say(setting[name]) for name, say in _WORDS if name in names and not _is_missing(setting[name])]
    return [word for word in said if word]


def panel_subtitle(setting: dict[str, Any], results: Results, varying: set[str]) -> str:
    """Return machine and every setting."""
    environment = results.environments.get(setting["environment"])
    machine = str(setting["device"]).upper()
    if environment is not None:
        machine = environment.gpu or machine if setting["device"] == "cuda" else f"{machine} ({environment.cpu})"
    if "environment" in varying:
        machine += f" [{setting['environment'] or 'unknown environment'}]"
    names = {name for name, _ in _WORDS}
    if setting["num_kv_heads"] == setting["num_heads"]:
        names.remove("num_kv_heads")
    return ", ".join([machine, *_say(setting, names)])


def panel_title(setting: dict[str, Any], varying: set[str]) -> str:
    """Return what is timed, with whatever else tells this panel from the others of the report."""
    title = PASS_TITLES.get(setting["pass"], setting["pass"] or "unknown pass")
    extra = _say(setting, varying)
    if "device" in varying:
        extra.append(str(setting["device"]).upper())
    return ", ".join([title, *extra])


def panel_name(setting: dict[str, Any], varying: set[str]) -> str:
    """Return pass, dtype and device, and whatever else differs between the panels of this report."""
    parts = [str(setting[name]) for name in ("pass", "dtype", "device")]
    parts += _say(setting, varying - {"dtype"})
    if "environment" in varying:
        parts.append(str(setting["environment"]))
    return slug(*parts)


def held_words(pass_: str) -> str:
    """Return what is there before a call, and counts towards its peak memory: of a training step more than inputs."""
    return "weights, gradients, averages and data" if pass_ == "step" else "inputs"  # noqa: S105 - a word of ours


def doubt_words(process_counts: Iterable[int]) -> str:
    """Return the sentence that says what intervals of times know, or an empty string where there are none.

    Args:
        process_counts: in how many processes each time was sampled.
    """
    counts = sorted(set(process_counts))
    if not counts:
        return ""
    within = "the doubt within one process only: another run may lie outside"
    if counts[-1] == 1:
        return f"The interval is {within}."
    few = next(count for count in counts if count > 1)
    many = f"{few} to {counts[-1]}" if counts[-1] > few else str(few)
    covers = (
        "A time of several processes is the geometric mean of their medians, so that all count alike; the interval "
        f"covers what differs between the {many} processes that took the samples"
    )
    return f"{covers}; of a single one it is {within}." if counts[0] == 1 else f"{covers}."


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and np.isnan(value))
