"""Read several results folders into one flat table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from attn_zoo.errors import ConfigError
from attn_zoo.folder import Claim, Run, read_run
from attn_zoo.records import Ceilings, Environment, Record
from attn_zoo.report.flat import COLUMNS, INTEGER_COLUMNS, NUMBER_COLUMNS, TEXT_COLUMNS, flat_row

__all__ = ["Results", "load_runs", "read_results"]


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
