"""Turn pydantic's findings into sentences a user can act on: the key's path, what was expected, what was given."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from attn_zoo.errors import suggestion
from attn_zoo.matrix.plan.groups import GROUPS, Entry, Matrix, StepEntry

__all__ = ["Problem", "key_path", "sentences", "shown", "unknown_key"]

Problem = tuple[str, str]
"""Path of a key, such as `scaling[0].dtypes[1]`, and a sentence."""


def key_path(parts: tuple[int | str, ...]) -> str:
    """Return the path as users write it: `scaling[0].dtypes[1]`."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def shown(value: Any) -> str:
    """Return the value as Python writes it, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _model_at(parts: tuple[int | str, ...], root: type[BaseModel]) -> type[BaseModel]:
    for part in parts:
        if part in GROUPS:
            return GROUPS[str(part)]
    return root


def unknown_key(key: str, model: type[BaseModel]) -> str:
    """Return the sentence for a key that `model` does not have."""
    known = sorted(set(model.model_fields) - {"source"} | ({"defaults"} if model is Matrix else set()))
    return f"unknown key{suggestion(key, known)}  (keys are {', '.join(known)})"


def sentences(error: ValidationError, root: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[Problem]:
    """Turn pydantic's findings into our sentences: expected this; got that."""
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        parts = tuple(detail["loc"])
        got, context = shown(detail["input"]), detail.get("ctx", {})
        match detail["type"]:
            case "extra_forbidden" if len(parts) > 1 and parts[-3:-2] == ("variants",):
                keys = ", ".join(StepEntry.model_fields if parts[0] == "step" else Entry.model_fields)
                text = f"unknown key  (keys of a variant's table are {keys})"
            case "extra_forbidden":
                text = unknown_key(str(parts[-1]), _model_at(parts[:-1], root))
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
        problems.append((key_path((*prefix, *parts)), text))
    return problems
