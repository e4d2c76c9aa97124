"""Check what an `[[accuracy]]` group says of its trainings: tasks, levels, direction, protocol, overrides, grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from attn_zoo.errors import AttnZooError, ConfigError, UnknownNameError, suggestion
from attn_zoo.matrix.plan.groups import AccuracyGroup
from attn_zoo.matrix.plan.sentences import Problem
from attn_zoo.registry import tasks
from attn_zoo.tasks import AbstractTask, TaskKind

__all__ = ["MAX_TRIALS", "directions_of", "training_problems"]

MAX_TRIALS = 256
"""More combinations than that are a search, not a grid."""


def directions_of(kind: TaskKind) -> tuple[bool, ...]:
    """Return what `is_causal` may be for a kind of task, the default first."""
    if kind == "token_classification":
        return (False, True)
    return (kind == "causal_lm",)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def training_problems(group: dict[str, Any], where: str) -> list[Problem]:
    """Return what is wrong with an accuracy group beyond the types of its values; those are pydantic's business.

    Args:
        group: raw, with defaults.
        where: path of the group, such as `"accuracy[0]"`.
    """
    problems: list[Problem] = []
    given = group.get("level", list(AccuracyGroup.model_fields["level"].default))
    levels = [level for level in _as_list(given) if isinstance(level, str)]
    for index, name in enumerate(_as_list(group["task"])):
        if not isinstance(name, str):
            continue
        path = f"{where}.task[{index}]" if isinstance(group["task"], list) else f"{where}.task"
        try:
            task = tasks[name]
        except UnknownNameError as error:
            problems.append((path, str(error)))
            continue
        problems += _levels(task, levels, group.get("is_causal"), where)
        problems += _protocol(task, group, where)
    return list(dict.fromkeys(problems))


def _levels(task: type[AbstractTask], levels: list[str], is_causal: Any, where: str) -> Iterator[Problem]:
    for level in levels:
        try:
            kind = task(level).spec.kind  # makes no data
        except UnknownNameError as error:
            yield f"{where}.level", str(error)
            continue
        except AttnZooError:
            continue  # its data say how it is, and they are not here: the plan will refuse the cell
        allowed = directions_of(kind)
        for wanted in [] if is_causal is None else _as_list(is_causal):
            if isinstance(wanted, bool) and wanted not in allowed:
                text = f"expected {str(allowed[0]).lower()} or nothing, for {task.name} is of kind {kind}"
                yield f"{where}.is_causal", f"{text}; got {str(wanted).lower()}"


def _protocol(task: type[AbstractTask], group: dict[str, Any], where: str) -> list[Problem]:
    """Check the protocol with the overrides alone, then with every combination of the grid."""
    from attn_zoo.training.protocol import Protocol, resolve_protocol  # imports the model: only where there is training

    protocol = group.get("protocol", AccuracyGroup.model_fields["protocol"].default)
    overrides, grid = group.get("overrides", {}), group.get("grid", {})
    if not (isinstance(protocol, str) and isinstance(overrides, dict) and isinstance(grid, dict)):
        return []
    twice = sorted(set(overrides) & set(grid))
    problems = [(f"{where}.grid.{name}", "is in overrides too; a field is either set or tried") for name in twice]
    known = [item.name for item in fields(Protocol)]
    unknown = sorted(set(grid) - set(known))
    problems += [(f"{where}.grid.{name}", f"unknown field of a protocol{suggestion(name, known)}") for name in unknown]
    axes = {name: _as_list(grid[name]) for name in known if name in grid and name not in twice and grid[name] != []}
    count = math.prod(len(values) for values in axes.values())
    if count > MAX_TRIALS:
        problems.append((f"{where}.grid", f"expected at most {MAX_TRIALS:,} combinations; got {count:,}"))
        axes = {}
    settings = task.settings.get(protocol)
    try:
        resolve_protocol(protocol, task_settings=settings, overrides=overrides)
    except UnknownNameError as error:
        return [*problems, (f"{where}.protocol", str(error))]
    except ConfigError as error:
        path = f"{where}.overrides"
        return [*problems, *((f"{path}.{key}" if key else path, text) for key, text in error.problems)]
    for values in itertools.product(*axes.values()) if axes else ():
        trial = dict(zip(axes, values, strict=True))
        try:
            resolve_protocol(protocol, task_settings=settings, overrides={**overrides, **trial})
        except ConfigError as error:
            for key, text in error.problems:
                # A field may be wrong beside one that the grid sets; then it stands elsewhere.
                problems.append((f"{where}.grid.{key}", text) if key in axes else (f"{where}.grid", f"{key}: {text}"))
    return problems
