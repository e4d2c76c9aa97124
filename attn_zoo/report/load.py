"""Read results folders into one flat table: `run.json` and `cells/<key>.json`. Nothing is ever written here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from attn_zoo.errors import ConfigError, StoreError
from attn_zoo.records import SCHEMA_VERSION, Ceilings, Environment, Record
from attn_zoo.report.ceilings import read_ceilings
from attn_zoo.report.flat import COLUMNS, INTEGER_COLUMNS, NUMBER_COLUMNS, TEXT_COLUMNS, flat_row

__all__ = ["Claim", "Results", "Run", "load_runs", "read_results", "read_run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a variant says about itself, as stored with the run (the report never loads a variant).

    Args:
        time_exponent: power of the sequence length that time grows with.
        memory_exponent: likewise for memory, inputs and outputs included.
        time: display string, such as `"B H L S D"`.
        memory: likewise.
        is_exact: equals softmax attention up to rounding, so it can serve as a baseline.
    """

    time_exponent: float | None = None
    memory_exponent: float | None = None
    time: str = ""
    memory: str = ""
    is_exact: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One results folder.

    Args:
        name: of the run, for people.
        matrices: what was run into the folder, resolved, oldest first.
        environments: by digest.
        claims: by variant.
        ceilings: what the machines could do; empty in folders of older versions.
        records: what could be read, ordered by key.
        warnings: what could not be read, one sentence each.
    """

    name: str
    matrices: tuple[Mapping[str, Any], ...] = ()
    environments: Mapping[str, Environment] = field(default_factory=dict)
    claims: Mapping[str, Claim] = field(default_factory=dict)
    ceilings: tuple[Ceilings, ...] = ()
    records: tuple[Record, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Several runs read together.

    Args:
        frame: one row per observation, see `COLUMNS`.
        runs: the folders, in the order given.
        warnings: of all of them.
    """

    frame: pd.DataFrame
    runs: tuple[Run, ...]
    warnings: tuple[str, ...] = ()

    def claim(self, variant: str) -> Claim | None:
        """Return the claim of `variant` from the first run that stored one."""
        return next((run.claims[variant] for run in self.runs if variant in run.claims), None)

    def ceilings(self, environment: str, device: str, dtype: str, threads: int | None) -> Ceilings | None:
        """Return what a machine could do, from the first run that measured it."""
        every = (one for run in self.runs for one in run.ceilings)
        return next((one for one in every if one.subject == (environment, device, dtype, threads)), None)

    @property
    def environments(self) -> dict[str, Environment]:
        """All machines by digest."""
        return {digest: environment for run in self.runs for digest, environment in run.environments.items()}


def load_runs(dirs: Iterable[str | Path]) -> pd.DataFrame:
    """Return one flat row per observation of all `dirs`; see `attn_zoo.report.flat.COLUMNS`.

    Raises:
        ConfigError: a directory is not a results folder.
    """
    return read_results(dirs).frame


def read_results(dirs: Iterable[str | Path]) -> Results:
    """Read all `dirs` (results folders).

    Raises:
        ConfigError: no directory was given, or one is not a results folder.
    """
    paths = [Path(entry) for entry in dirs]
    if not paths:
        raise ConfigError("report", [("", "expected at least one results folder; got none")])
    unique = list({path.resolve(): path for path in paths}.values())
    runs = tuple(read_run(path) for path in unique)
    rows = [flat_row(record, run.name, _environment_of(record, run)) for run in runs for record in run.records]
    frame = pd.DataFrame.from_records(rows, columns=list(COLUMNS))
    frame = frame.astype(dict.fromkeys(INTEGER_COLUMNS, "Int64") | dict.fromkeys(NUMBER_COLUMNS, "float64"))
    frame[list(TEXT_COLUMNS)] = frame[list(TEXT_COLUMNS)].fillna("")
    frame["label"] = _distinct_labels(frame)
    warnings = [warning for run in runs for warning in run.warnings]
    repeated = int(frame["key"].duplicated().sum())
    if repeated:
        warnings.append(f"{repeated} cells occur in more than one folder; their samples are pooled")
    return Results(frame=frame, runs=runs, warnings=tuple(warnings))


def read_run(path: str | Path) -> Run:
    """Read one results folder; records that cannot be read become warnings.

    Raises:
        ConfigError: `path` is not a results folder, or its `run.json` cannot be read.
    """
    path = Path(path)
    head = path / "run.json"
    if not head.is_file():
        raise ConfigError(str(path), [("", _not_a_results_folder(path))])
    try:
        data = _read_object(head)
    except StoreError as error:
        raise ConfigError(str(head), [("", str(error))]) from None
    warnings: list[str] = []
    records = []
    for file in sorted((path / "cells").glob("*.json")):
        try:
            records.append(_read_record(file))
        except StoreError as error:
            warnings.append(f"{path.name}/cells/{file.name} was skipped: {error}")
    matrices = [matrix for matrix in _listed(data.get("matrices")) if isinstance(matrix, dict)]
    names = dict.fromkeys(str(matrix["name"]) for matrix in matrices if matrix.get("name"))
    return Run(
        name=" + ".join(names) or path.resolve().name,
        matrices=tuple(matrices),
        environments=_environments(data.get("environments"), path.name, warnings),
        claims=_claims(data.get("claims"), path.name, warnings),
        ceilings=read_ceilings(path, warnings),
        records=tuple(records),
        warnings=tuple(warnings),
    )


def _not_a_results_folder(path: Path) -> str:
    if not path.exists():
        return "no such directory; expected a results folder"
    if not path.is_dir():
        return "expected a results folder; got a file"
    inside = sorted(str(found.parent.relative_to(path)) for found in path.glob("*/run.json"))
    inside += sorted(str(found.parent.relative_to(path)) for found in path.glob("*/*/run.json"))
    hint = f"; it contains {', '.join(inside[:3])}: name one of these" if inside else ""
    return f"not a results folder: it has no run.json{hint}"


def _read_object(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"not readable as JSON ({type(error).__name__}: {error})") from None
    if not isinstance(data, dict):
        raise StoreError(f"expected a JSON object; got {type(data).__name__}")
    return data


def _read_record(file: Path) -> Record:
    data = _read_object(file)
    schema = data.get("schema")
    if isinstance(schema, int) and schema > SCHEMA_VERSION:
        raise StoreError(f"it has schema {schema}, this version reads up to {SCHEMA_VERSION}; update attn-zoo")
    return Record.from_dict(data, source="record")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _environments(data: Any, run: str, warnings: list[str]) -> dict[str, Environment]:
    found = {}
    for digest, entry in data.items() if isinstance(data, dict) else ():
        try:
            found[str(digest)] = Environment.from_dict(entry if isinstance(entry, dict) else {})
        except StoreError as error:
            warnings.append(f"{run}/run.json: environment {digest} was skipped: {error}")
    return found


def _claims(data: Any, run: str, warnings: list[str]) -> dict[str, Claim]:
    found = {}
    for variant, entry in data.items() if isinstance(data, dict) else ():
        if not isinstance(entry, dict):
            warnings.append(f"{run}/run.json: the claim of {variant} was skipped: expected an object")
            continue
        found[str(variant)] = Claim(
            time_exponent=_number(entry.get("time_exponent")),
            memory_exponent=_number(entry.get("memory_exponent")),
            time=str(entry.get("time") or ""),
            memory=str(entry.get("memory") or ""),
            is_exact=entry.get("is_exact") is True,
        )
    return found


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _environment_of(record: Record, run: Run) -> str:
    """Return the record's environment; a cell that never started has none and belongs to the run's most common one."""
    if record.environment:
        return record.environment
    used = [other.environment for other in run.records if other.environment]
    return max(sorted(set(used)), key=used.count) if used else next(iter(run.environments), "")


def _distinct_labels(frame: pd.DataFrame) -> Sequence[str]:
    """Return labels, made longer where one label stands for several mechanisms (options or versions of the source)."""
    labels = _compiled_apart(frame)
    identity = list(zip(*(frame[name].tolist() for name in ("variant", "options", "variant_digest")), strict=True))
    variants: dict[str, set[tuple[str, ...]]] = {}
    for label, one in zip(labels, identity, strict=True):
        variants.setdefault(label, set()).add(one)
    return [
        label if len(variants[label]) == 1 else _longer(label, one, variants[label])
        for label, one in zip(labels, identity, strict=True)
    ]


def _compiled_apart(frame: pd.DataFrame) -> list[str]:
    """Return labels; a training step that is compiled gets one of its own where that label is also timed eagerly."""
    is_compiled = [json.loads(overrides).get("compile") is True for overrides in frame["overrides"]]
    rows = list(zip(map(str, frame["label"]), frame["scope"] == "model", is_compiled, strict=True))
    eager = {label for label, is_step, is_fast in rows if is_step and not is_fast}
    return [
        f"{label} (compiled)" if is_step and is_fast and label in eager else label for label, is_step, is_fast in rows
    ]


def _longer(label: str, parts: tuple[str, ...], others: set[tuple[str, ...]]) -> str:
    columns = list(zip(*others, strict=True))
    extra = []
    if len(set(columns[0])) > 1:
        extra.append(parts[0])
    if len(set(columns[1])) > 1:
        options = json.loads(parts[1])
        extra.append(", ".join(f"{name}={value}" for name, value in options.items()) or "defaults")
    if len(set(columns[2])) > 1:
        extra.append(f"source {parts[2][:6] or 'unknown'}")
    return f"{label} ({'; '.join(extra)})"
