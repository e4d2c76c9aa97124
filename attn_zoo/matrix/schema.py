"""Read a matrix from TOML: every problem at once, each with its key's path, what was expected, and near matches."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attn_zoo.errors import AttnZooError, ConfigError, UnknownNameError, suggestion
from attn_zoo.matrix.groups import GROUPS, MAX_CELLS, AccuracyGroup, Matrix
from attn_zoo.matrix.sentences import Problem, sentences, shown, unknown_key
from attn_zoo.registry import Registry, make_config, tasks, variants

__all__ = ["Matrix", "load_matrix", "parse_matrix", "restore_matrix"]

MAX_FILE_BYTES = 1_000_000
_OWN_KEYS = ("variants", "task")  # what a group is about cannot be a default


def load_matrix(path: Path | str) -> Matrix:
    """Return the matrix that a TOML file describes, checked down to the options of every variant.

    Args:
        path: of the file. Variants of `--variant-file` must be loaded before.

    Raises:
        ConfigError: the file cannot be read or says something impossible; all problems at once.
    """
    path = Path(path)
    source = path.name
    try:
        if path.is_dir():
            raise ConfigError(str(path), [("", "expected a TOML file; this is a folder")])
        content = path.read_bytes()
    except FileNotFoundError:
        nearby = sorted(item.name for item in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        raise ConfigError(str(path), [("", f"no such file{suggestion(path.name, nearby)}")]) from None
    except OSError as error:
        raise ConfigError(str(path), [("", f"cannot be read: {error.strerror}")]) from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(source, [("", f"expected at most {MAX_FILE_BYTES:,} bytes; got {len(content):,}")])
    try:
        data = tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(source, [("", f"expected UTF-8 text; byte {error.start} (line {line}) is not")]) from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(source, [("", f"not valid TOML: {error or 'nested too deeply'}")]) from None
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(source, [("", f"not valid TOML: {error}")]) from None
    return parse_matrix(data, source)


def parse_matrix(data: Mapping[str, Any], source: str) -> Matrix:
    """Return the matrix that plain data describe; `source` starts the message. Raises as `load_matrix`."""
    defaults, problems = _defaults(data.get("defaults", {}))
    resolved: dict[str, Any] = {key: value for key, value in data.items() if key != "defaults"}
    resolved["source"] = source
    if "source" in data:
        problems.append(("source", unknown_key("source", Matrix)))
    for kind, model in GROUPS.items():
        groups = data.get(kind, [])
        if not isinstance(groups, list):
            problems.append((kind, f"expected a list of groups, written [[{kind}]]; got {shown(groups)}"))
            resolved[kind] = ()
            continue
        usable = {key: value for key, value in defaults.items() if key in model.model_fields}
        resolved[kind] = tuple({**usable, **group} if isinstance(group, dict) else group for group in groups)
    matrix: Matrix | None = None
    try:
        matrix = Matrix.model_validate(resolved)
    except ValidationError as error:
        problems += sentences(error, Matrix)
    problems += _names(data, defaults)
    told = {path for path, _ in problems}
    problems += [problem for kind in GROUPS for problem in _plain(data.get(kind), kind) if problem[0] not in told]
    if matrix is not None:
        problems += _whole(matrix)
    if problems or matrix is None:
        raise ConfigError(source, list(dict.fromkeys(problems)))
    return matrix


def restore_matrix(stored: Mapping[str, Any]) -> Matrix:
    """Return a matrix as `run.json` keeps it: resolved, with the file it came from. Raises as `load_matrix`."""
    data = {key: value for key, value in stored.items() if key != "source"}
    return parse_matrix(data, str(stored.get("source") or "run.json"))


def _defaults(raw: Any) -> tuple[dict[str, Any], list[Problem]]:
    """Return the usable defaults and what is wrong with the others, so that each is reported once and at its place."""
    if not isinstance(raw, dict):
        return {}, [("defaults", f"expected a table, written [defaults]; got {shown(raw)}")]
    known = {key for model in GROUPS.values() for key in model.model_fields} - set(_OWN_KEYS)
    problems: list[Problem] = []
    usable: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            keys = ", ".join(sorted(known))
            problems.append((f"defaults.{key}", f"unknown key{suggestion(key, known)}  (keys are {keys})"))
            continue
        model = next(model for model in GROUPS.values() if key in model.model_fields)
        try:
            # Only this field matters here; the others of the group are not given yet.
            model.model_validate({key: value})
        except ValidationError as error:
            found = [problem for problem in sentences(error, model, ("defaults",)) if _starts(problem[0], key)]
            if found:
                problems += found
                continue
        usable[key] = value
    return usable, problems


def _starts(path: str, key: str) -> bool:
    return path.removeprefix("defaults.").partition("[")[0].partition(".")[0] == key


def _lookup(registry: Registry[Any], name: str) -> Problem | None:
    try:
        registry[name]
    except UnknownNameError as error:
        return ("", str(error))
    return None


def _groups(data: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in GROUPS:
        groups = data.get(kind)
        for index, group in enumerate(groups if isinstance(groups, list) else []):
            if isinstance(group, dict):
                yield f"{kind}[{index}]", group


def _names(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Problem]:
    """Check names of variants and tasks, and variants' options, on the raw data: also where the rest is wrong."""
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
            missing = _lookup(variants, name)
            if missing:
                problems.append((path, missing[1]))
            elif isinstance(entry, dict) and isinstance(entry.get("options"), dict):
                base = shared.get(name, {})
                merged = {**base, **entry["options"]} if isinstance(base, dict) else entry["options"]
                problems += _options(name, merged, f"{path}.options")
        if isinstance(group.get("task"), str):
            problems += _task({**defaults, **group}, where)
    return problems


def _task(group: dict[str, Any], where: str) -> list[Problem]:
    """Check task, level, protocol and overrides of an accuracy group."""
    missing = _lookup(tasks, group["task"])
    if missing:
        return [(f"{where}.task", missing[1])]
    from attn_zoo.training.protocol import resolve_protocol  # imports the model, so only where there is training

    problems: list[Problem] = []
    task, fields = tasks[group["task"]], AccuracyGroup.model_fields
    level, protocol = (group.get(key, fields[key].default) for key in ("level", "protocol"))
    overrides = group.get("overrides", {})
    try:
        if isinstance(level, str):
            task.check_level(level)
    except UnknownNameError as error:
        problems.append((f"{where}.level", str(error)))
    try:
        if isinstance(protocol, str) and isinstance(overrides, dict):
            resolve_protocol(protocol, task_settings=task.settings.get(protocol), overrides=overrides)
    except UnknownNameError as error:
        problems.append((f"{where}.protocol", str(error)))
    except ConfigError as error:
        path = f"{where}.overrides"
        problems += [(f"{path}.{key}" if key else path, text) for key, text in error.problems]
    return problems


def _options(name: str, options: Any, path: str) -> list[Problem]:
    missing = _lookup(variants, name)
    if missing:
        return [(path, missing[1])]
    if not isinstance(options, dict):
        return []  # the model says so already
    plain = _plain(options, path)
    if plain:
        return plain
    try:
        make_config(variants[name].config, options, name)
    except ConfigError as error:
        return [(f"{path}.{where}" if where else path, text) for where, text in error.problems]
    except AttnZooError as error:
        return [(path, str(error))]
    return []


def _plain(value: Any, path: str) -> list[Problem]:
    """Refuse what JSON cannot hold exactly: dates, NaN and infinities."""
    if isinstance(value, dict):
        return [problem for key, item in value.items() for problem in _plain(item, f"{path}.{key}")]
    if isinstance(value, list):
        return [problem for index, item in enumerate(value) for problem in _plain(item, f"{path}[{index}]")]
    if isinstance(value, float) and not math.isfinite(value):
        return [(path, f"expected a finite number; got {value}")]
    if not isinstance(value, str | int | float | None):
        return [(path, f"expected a string, number, true or false; got {shown(value)}")]
    return []


def _whole(matrix: Matrix) -> list[Problem]:
    """Check what no single key can: something to do, not too much of it, divisible heads, labels with one meaning."""
    problems: list[Problem] = []
    if not matrix.scaling and not matrix.accuracy:
        problems.append(("", "expected at least one group, [[scaling]] or [[accuracy]]; got none"))
    if matrix.num_cells > MAX_CELLS:
        worst = max(
            (
                (f"{kind}[{index}]", group.num_cells)
                for kind in GROUPS
                for index, group in enumerate(getattr(matrix, kind))
            ),
            key=lambda pair: pair[1],
        )
        problems.append((worst[0], f"expected at most {MAX_CELLS:,} cells in all; this group alone has {worst[1]:,}"))
    for index, group in enumerate(matrix.scaling):
        for heads in group.num_heads:
            if group.num_kv_heads and heads % group.num_kv_heads:
                text = f"expected a divisor of num_heads = {heads}; got {group.num_kv_heads}"
                problems.append((f"scaling[{index}].num_kv_heads", text))
    meaning: dict[str, tuple[str, dict[str, Any]]] = {}
    for kind in GROUPS:
        for index, any_group in enumerate(getattr(matrix, kind)):
            for position, entry in enumerate(any_group.variants):
                options = {**matrix.options.get(entry.name, {}), **entry.options}
                label = entry.label or entry.name
                if meaning.setdefault(label, (entry.name, options)) != (entry.name, options):
                    text = (
                        f"label {label!r} already means {meaning[label][0]} with other options; give this one a label"
                    )
                    problems.append((f"{kind}[{index}].variants[{position}]", text))
    return problems
