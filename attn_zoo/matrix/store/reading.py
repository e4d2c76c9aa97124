"""Read what a results folder holds, strictly: what is damaged, foreign or newer is said to be so."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_zoo.errors import FolderError, StoreError
from attn_zoo.records import COMMIT_FIELDS, SCHEMA_VERSION, Ceilings, Environment, Record

__all__ = ["RunInfo", "Scan", "differences", "read_ceilings", "read_info", "read_record"]

_KEY_DIGITS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What `run.json` holds.

    Args:
        schema: version of the form.
        created: UTC time, ISO 8601.
        version: of attn_zoo that created it.
        matrices: every matrix that was run into the folder, resolved, oldest first.
        environments: by digest.
        claims: by variant, what it says of its cost and exactness; reports print it without loading the variant.
    """

    schema: int = SCHEMA_VERSION
    created: str = ""
    version: str = ""
    matrices: tuple[dict[str, Any], ...] = ()
    environments: dict[str, Environment] = field(default_factory=dict)
    claims: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What lies in `cells`.

    Args:
        records: by key.
        problems: file name and why it is no record of ours.
    """

    records: dict[str, Record]
    problems: dict[str, str]


def read_info(path: Path) -> RunInfo:
    """Return what `run.json` says; `FolderError` says why it cannot be used."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FolderError(f"{path.parent}: not a results folder (it has no run.json)") from None
    except (OSError, ValueError) as error:
        raise FolderError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise FolderError(f"{path}: not written by attn_zoo (it names no schema)")
    _refuse_newer(data["schema"], path)
    try:
        environments = {
            digest: Environment.from_dict(item, f"{path}: environments.{digest}")
            for digest, item in data["environments"].items()
        }
        return RunInfo(
            schema=data["schema"],
            created=data["created"],
            version=data["version"],
            matrices=tuple(data["matrices"]),
            environments=environments,
            claims=dict(data.get("claims") or {}),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise FolderError(f"{path}: damaged: {type(error).__name__} {error}") from None


def read_ceilings(path: Path) -> tuple[Ceilings, ...]:
    """Return what `ceilings.json` says, nothing where there is none; `StoreError` says why it cannot be used."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("ceilings"), list):
        raise StoreError(f'{path}: expected an object with a list "ceilings"')
    return tuple(Ceilings.from_dict(item if isinstance(item, dict) else {}, str(path)) for item in data["ceilings"])


def _refuse_newer(schema: int, source: Path) -> None:
    if schema > SCHEMA_VERSION:
        raise FolderError(
            f"{source}: written by a newer attn_zoo (schema {schema}; this one reads up to {SCHEMA_VERSION}): "
            "update attn_zoo, or use another folder"
        )


def read_record(path: Path, key: str = "") -> Record:
    """Return the record of a cell in a file named after the cell's key; `StoreError` says why it is none.

    Args:
        path: of the file.
        key: of the cell, where the file's name says more than that.
    """
    key = key or path.stem
    if path.suffix != ".json" or len(key) != _KEY_DIGITS:
        raise StoreError(f"not a record: left by an interrupted write or put here by hand ({path.name})")
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise StoreError(f"not a record: expected a JSON object; got {type(data).__name__}")
    if isinstance(data.get("schema"), int):
        _refuse_newer(data["schema"], path)
    record = Record.from_dict(data, "not a record")
    if record.cell.key != key:
        raise StoreError(f"foreign: the cell inside has the key {record.cell.key}")
    return record


def differences(old: Environment, new: Environment) -> list[str]:
    """Return what differs between two environments, for people; at most a few items."""
    before, after = old.to_dict(), new.to_dict()
    texts = []
    for name in before:
        if before[name] == after[name] or name in COMMIT_FIELDS:
            continue
        if isinstance(before[name], dict):
            keys = sorted({*before[name], *after[name]})
            pairs = [(f"{name}.{key}", before[name].get(key), after[name].get(key)) for key in keys]
        else:
            pairs = [(name, before[name], after[name])]
        texts += [f"{key}: then {was}, now {now}" for key, was, now in pairs if was != now]
    return texts[:4] + (["..."] if len(texts) > 4 else [])
