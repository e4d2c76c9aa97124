"""Turn pydantic's findings into sentences a user can act on: the key's path, what was expected, what was given."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ValidationError

from attn_zoo.errors import suggestion
from attn_zoo.matrix.kinds.all_kinds import KINDS
from attn_zoo.matrix.kinds.kind import Problem

_GROUPS = {kind.name: kind.group for kind in KINDS}


def _key_path(parts: tuple[int | str, ...]) -> str:
    """Return the path as users write it: `scaling[0].dtypes[1]`."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def shown(value: Any) -> str:
    """Return the value as Python writes it, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def unknown_key(key: str, model: type[BaseModel]) -> str:
    """Return the sentence for a key that `model` does not have; `defaults` and `source` of a matrix are special."""
    known = set(model.model_fields)
    if "source" in known:
        known = known - {"source"} | {"defaults"}
    return f"unknown key{suggestion(key, known)}  (keys are {', '.join(sorted(known))})"


def sentences(error: ValidationError, root: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[Problem]:
    """Turn pydantic's findings into our sentences: expected this; got that."""
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        parts = tuple(detail["loc"])
        got, context = shown(detail["input"]), detail.get("ctx", {})
        match detail["type"]:
            case "extra_forbidden" if len(parts) > 1 and parts[-3:-2] == ("variants",):
                keys = ", ".join(_GROUPS[str(parts[0])].entry.model_fields)
                text = f"unknown key  (keys of a variant's table are {keys})"
            case "extra_forbidden":
                text = unknown_key(str(parts[-1]), _GROUPS.get(str(parts[0]), root) if len(parts) > 1 else root)
            case "missing":
                text = "this key is required"
            case "literal_error":
                choices = context["expected"].replace(" or ", ", ").replace("'", "")
                hint = suggestion(str(detail["input"]), choices.split(", ")) if isinstance(detail["input"], str) else ""
                text = f"expected one of {choices}; got {got}{hint}"
            case "greater_than_equal":
                text = f"expected at least {context['ge']}; got {got}"
            case "greater_than":
                text = f"expected more than {context['gt']:g}; got {got}"
            case "less_than_equal":
                text = f"expected at most {context['le']}; got {got}"
            case "less_than":
                text = f"expected less than {context['lt']:g}; got {got}"
            case "too_short":
                text = "expected at least one value; got none"
            case "value_error":
                text = str(context["error"])
            case "string_pattern_mismatch":
                text = f"expected letters, digits and . _ - (a label may also have spaces and + = ( )); got {got}"
            case "int_type" | "float_type" | "bool_type" | "string_type" | "dict_type" | "model_type":
                words = {"int": "an integer", "float": "a number", "bool": "true or false", "string": "a string"}
                kind = words.get(detail["type"].removesuffix("_type"), "a table")
                text = f"expected {kind}; got {got}"
            case _:
                text = f"{detail['msg'][:1].lower()}{detail['msg'][1:]}; got {got}"
        problems.append((_key_path((*prefix, *parts)), text))
    return problems


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
