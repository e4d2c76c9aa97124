"""Read a matrix from TOML: every problem at once, each with its key's path, what was expected, and near matches."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attn_zoo.errors import ConfigError, suggestion
from attn_zoo.matrix.plan.groups import GROUPS, MAX_CELLS, Matrix, StepEntry
from attn_zoo.matrix.plan.names import name_problems, plain_problems
from attn_zoo.matrix.plan.sentences import Problem, sentences, shown, unknown_key

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
    problems += name_problems(data, defaults)
    told = {path for path, _ in problems}
    problems += [item for kind in GROUPS for item in plain_problems(data.get(kind), kind) if item[0] not in told]
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


def _whole(matrix: Matrix) -> list[Problem]:
    """Check what no single key can: something to do, not too much of it, divisible heads, labels with one meaning."""
    problems: list[Problem] = []
    if not matrix.groups:
        kinds = ", ".join(f"[[{kind}]]" for kind in GROUPS)
        problems.append(("", f"expected at least one group ({kinds}); got none"))
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
    meaning: dict[str, tuple[str, dict[str, Any], bool]] = {}
    for kind in GROUPS:
        for index, any_group in enumerate(getattr(matrix, kind)):
            for position, entry in enumerate(any_group.variants):
                options = {**matrix.options.get(entry.name, {}), **entry.options}
                label = entry.label or entry.name
                what = (entry.name, options, isinstance(entry, StepEntry) and entry.compile)
                if meaning.setdefault(label, what) != what:
                    text = (
                        f"label {label!r} already means {meaning[label][0]} with other options; give this one a label"
                    )
                    problems.append((f"{kind}[{index}].variants[{position}]", text))
    return problems
