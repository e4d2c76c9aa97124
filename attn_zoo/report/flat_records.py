"""Records as flat rows, and back: the columns follow from the fields of records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from attn_zoo.errors import StoreError
from attn_zoo.records import Approximation, Cell, Memory, Record, Replacement, Score, Timing

_LEFT_OUT = {"label", "environment", "trace", "cell", "timing", "memory", "score", "approximation", "replacement"}
_RENAMED = {(Cell, "pass_"): "pass", (Record, "kernels"): "kernel", (Score, "peak_bytes"): "train_peak_bytes"}
_PARTS = (Cell, Record, Timing, Memory, Score, Approximation, Replacement)
_JOINED = {"kernel", "gate", "flags"}
_JOINT = " + "

Kind = Literal["number", "string", "list", "joined", "json"]


@dataclass(frozen=True, slots=True)
class Field:
    """One column that is a field of a record or of one of its parts; `kind` decides how it is written."""

    name: str
    part: type
    attribute: str
    kind: Kind
    hint: Any


def _stored() -> Iterator[Field]:
    for part in _PARTS:
        hints = get_type_hints(part)
        for attribute in (field.name for field in fields(part) if field.name not in _LEFT_OUT):
            name, hint = _RENAMED.get((part, attribute), attribute), hints[attribute]
            kind: Kind = "number"
            if name in _JOINED:
                kind = "joined"
            elif get_origin(hint) is tuple and set(get_args(hint)) & {int, float}:
                kind = "list"
            elif get_origin(hint) in {tuple, dict}:
                kind = "json"
            elif not {bool, int, float} & {hint, *get_args(hint)}:
                kind = "string"
            yield Field(name, part, attribute, kind, hint)


FIELDS = tuple(_stored())


def flat_row(record: Record) -> dict[str, Any]:
    """Return one value for each column of `FIELDS`; what is absent is None, or empty where the column holds text."""
    parts = record.cell, record, record.timing, record.memory, record.score, record.approximation, record.replacement
    values = {part: {} if one is None else one.values() for part, one in zip(_PARTS, parts, strict=True)}
    row: dict[str, Any] = {}
    for field in FIELDS:
        value, name = values[field.part].get(field.attribute), field.name
        if value is not None or name not in row:  # two parts may know a number, such as that of parameters
            row[name] = value if field.kind == "number" else _plain(value, field.kind)
    return row


def _plain(value: Any, kind: Kind) -> Any:
    if kind == "list":
        return list(value or ())
    if kind == "joined":
        return _JOINT.join(value or ())
    if kind == "json":
        return "" if value is None else json.dumps(value, sort_keys=True, default=asdict)
    return "" if value is None and kind == "string" else value


def record_of(row: Mapping[str, Any], source: str) -> Record:
    """Return the record that a row was made of, with the columns `label` and `environment` beside those of `FIELDS`.

    Lists and mappings may be JSON texts, as in a CSV file.

    Raises:
        StoreError: the row has not the columns of a record, or a value is of another type.
    """
    parts: dict[type, dict[str, Any]] = {part: {} for part in _PARTS}
    for field in FIELDS:
        value = row.get(field.name)
        if value is None or (isinstance(value, str) and value == "") or (isinstance(value, float) and value != value):
            continue  # absent: a NaN is not equal to itself
        try:
            parts[field.part][field.attribute] = _restored(value, field.kind)
        except (ValueError, TypeError):
            raise StoreError(f"{source}: {field.name}: expected a list or JSON; got {str(value)[:40]!r}") from None
    data: dict[str, Any] = {**parts[Record], "environment": row.get("environment") or ""}
    data["cell"] = {**parts[Cell], "label": row.get("label") or ""}
    # What a row has that has the part.
    for part, mark in ((Timing, "median_ms"), (Score, "metric"), (Approximation, "error"), (Replacement, "layers")):
        if mark in parts[part]:
            data[part.__name__.lower()] = parts[part]
    if parts[Memory]:
        data["memory"] = parts[Memory]
    return Record.from_dict(data, source, is_of_table=True)


def _restored(value: Any, kind: Kind) -> Any:
    if kind == "joined":
        return tuple(str(value).split(_JOINT))
    if kind in {"list", "json"}:
        return json.loads(value) if isinstance(value, str) else list(value)
    return value
