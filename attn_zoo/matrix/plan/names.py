"""Check the names in a matrix, of variants, options and tasks, on the raw data: also where the rest is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from attn_zoo.errors import AttnZooError, ConfigError, UnknownNameError
from attn_zoo.matrix.kinds.accuracy_problems import training_problems
from attn_zoo.matrix.kinds.step import step_problems
from attn_zoo.matrix.plan.groups import GROUPS
from attn_zoo.matrix.plan.sentences import Problem, shown
from attn_zoo.registry import make_config, variants

__all__ = ["name_problems", "plain_problems"]


def _unknown(name: str) -> str | None:
    """Return the sentence for a variant that is not registered."""
    try:
        variants[name]
    except UnknownNameError as error:
        return str(error)
    return None


def _groups(data: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in GROUPS:
        groups = data.get(kind)
        for index, group in enumerate(groups if isinstance(groups, list) else []):
            if isinstance(group, dict):
                yield f"{kind}[{index}]", group


def name_problems(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Problem]:
    """Return what is wrong with names of variants and tasks, variants' options, and what trainings are told.

    Args:
        data: of the matrix, as read.
        defaults: of its groups, those that are usable.
    """
    problems: list[Problem] = []
    shared = data.get("options", {})
    shared = shared if isinstance(shared, dict) else {}
    for name, options in shared.items():
        problems += _options(name, options, f"options.{name}")
    for where, group in _groups(data):
        entries = group.get("variants", [])
        for index, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            name = entry.get("name") if isinstance(entry, dict) else entry
            path = f"{where}.variants[{index}]"
            if not isinstance(name, str):
                continue
            if missing := _unknown(name):
                problems.append((path, missing))
            elif isinstance(entry, dict) and isinstance(entry.get("options"), dict):
                base = shared.get(name, {})
                merged = {**base, **entry["options"]} if isinstance(base, dict) else entry["options"]
                problems += _options(name, merged, f"{path}.options")
        if "task" in group:
            problems += training_problems({**defaults, **group}, where)
        if where.startswith("step"):
            problems += step_problems({**defaults, **group}, where)
    return problems


def _options(name: str, options: Any, path: str) -> list[Problem]:
    if missing := _unknown(name):
        return [(path, missing)]
    if not isinstance(options, dict):
        return []  # the model says so already
    plain = plain_problems(options, path)
    if plain:
        return plain
    try:
        make_config(variants[name].config, options, name)
    except ConfigError as error:
        return [(f"{path}.{where}" if where else path, text) for where, text in error.problems]
    except AttnZooError as error:
        return [(path, str(error))]
    return []


def plain_problems(value: Any, path: str) -> list[Problem]:
    """Return what JSON cannot hold exactly: dates, NaN and infinities.

    Args:
        value: any part of a matrix.
        path: of its key.
    """
    if isinstance(value, dict):
        return [problem for key, item in value.items() for problem in plain_problems(item, f"{path}.{key}")]
    if isinstance(value, list):
        return [problem for index, item in enumerate(value) for problem in plain_problems(item, f"{path}[{index}]")]
    if isinstance(value, float) and not math.isfinite(value):
        return [(path, f"expected a finite number; got {value}")]
    if not isinstance(value, str | int | float | None):
        return [(path, f"expected a string, number, true or false; got {shown(value)}")]
    return []
