"""Training runs as the report reads them, sorted into groups whose scores may be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from attn_zoo.report.analysis.observations import Results

__all__ = ["Setting", "Training", "group_trainings"]

PRETRAINING = "pretrain"
"""What the names of all settings of self-pretraining begin with: runs that differ in those only stand side by side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What must agree before two scores may stand in one table.

    Args:
        task: with `level` and the digest of its data.
        protocol: with `overrides` (as JSON; neither tuned ones nor those of self-pretraining) and its version.
        grid: what the matrix tuned, as JSON: tuned and untuned results are not mixed.
    """

    task: str
    level: str
    protocol: str
    overrides: str
    grid: str
    is_causal: bool
    dtype: str
    device: str
    threads: int | None
    protocol_version: int
    data_digest: str

    @property
    def changes(self) -> dict[str, Any]:
        """Overrides by name."""
        return dict(json.loads(self.overrides))

    @property
    def tuned(self) -> tuple[str, ...]:
        """Names of the settings that were tuned."""
        return tuple(json.loads(self.grid))


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """One training run; numbers of runs that gave no score are None.

    Args:
        start: what the weights were before training: empty for random ones, else what was learned before.
        trial: values of the tuned settings, as JSON; `{}` where nothing was tuned.
        num_jobs: cells that shared the device.
        curve: evaluations in order.
        breakdown: scores by properties of the examples.
    """

    label: str
    variant: str
    seed: int
    start: str
    trial: str
    status: str
    reason: str
    environment: str
    num_jobs: int
    metric: str
    value: float | None
    validation: float | None
    num_examples: int | None
    chance: float | None
    num_steps: int | None
    num_params: int | None
    train_flops: float | None
    train_s: float | None
    tokens_per_s: float | None
    train_peak_bytes: int | None
    padding_frac: float | None
    pretrain_s: float | None
    pretrain_flops: float | None
    correct: str
    floors: Mapping[str, float] = field(default_factory=dict)
    references: Mapping[str, float] = field(default_factory=dict)
    curve: tuple[Mapping[str, float], ...] = ()
    breakdown: tuple[Mapping[str, float], ...] = ()

    @property
    def is_scored(self) -> bool:
        """Whether the run finished."""
        return self.status == "ok" and self.value is not None


_INTEGERS = ("num_examples", "num_steps", "num_params", "train_peak_bytes")
_FLOATS = (
    *("value", "validation", "chance", "train_flops", "train_s", "tokens_per_s"),
    *("padding_frac", "pretrain_s", "pretrain_flops"),
)


def group_trainings(results: Results) -> list[tuple[Setting, list[Training]]]:
    """Return all training runs, by setting in a stable order; of a cell that occurs twice, the last."""
    frame = results.frame
    rows = frame[frame["kind"] == "accuracy"].drop_duplicates("key", keep="last").to_dict("records")
    grouped: dict[Setting, list[Mapping[Any, Any]]] = {}
    for row in rows:
        grouped.setdefault(_setting(row), []).append(row)
    order = sorted(grouped, key=lambda setting: tuple(str(getattr(setting, name)) for name in setting.__slots__))
    return [(setting, _trainings(grouped[setting])) for setting in order]


def _parts(row: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the overrides of a row in three: tuned, of self-pretraining, and the rest."""
    overrides, grid = _json(row["overrides"], {}), _json(row["grid"], [])
    tuned = {name: value for name, value in overrides.items() if name in grid}
    before = {name: value for name, value in overrides.items() if name not in tuned and name.startswith(PRETRAINING)}
    return tuned, before, {name: value for name, value in overrides.items() if name not in {*tuned, *before}}


def _setting(row: Mapping[Any, Any]) -> Setting:
    return Setting(
        task=str(row["task"]),
        level=str(row["level"]),
        protocol=str(row["protocol"]),
        overrides=json.dumps(_parts(row)[2], sort_keys=True),
        grid=json.dumps(sorted(_json(row["grid"], []))),
        is_causal=bool(row["is_causal"]),
        dtype=str(row["dtype"]),
        device=str(row["device"]),
        threads=None if pd.isna(row["threads"]) else int(row["threads"]),
        protocol_version=int(row["protocol_version"]),
        data_digest=str(row["data_digest"]),
    )


def _trainings(rows: Sequence[Mapping[Any, Any]]) -> list[Training]:
    starts = _starts(rows)
    found = [
        Training(
            label=str(row["label"]),
            variant=str(row["variant"]),
            seed=int(row["seed"]),
            start=start,
            trial=json.dumps(_parts(row)[0], sort_keys=True),
            status=str(row["status"]),
            reason=str(row["reason"]),
            environment=str(row["environment"]),
            num_jobs=int(row["num_jobs"]),
            metric=str(row["metric"]),
            correct=str(row["correct"]),
            floors=_json(row["floors"], {}),
            references=_json(row["references"], {}),
            curve=tuple(_json(row["curve"], [])),
            breakdown=tuple(_json(row["breakdown"], [])),
            **_numbers(row),
        )
        for row, start in zip(rows, starts, strict=True)
    ]
    return sorted(found, key=lambda run: (run.label, run.start, run.trial, run.seed))


def _numbers(row: Mapping[Any, Any]) -> dict[str, Any]:
    whole = {name: None if pd.isna(row[name]) else int(row[name]) for name in _INTEGERS}
    return whole | {name: None if pd.isna(row[name]) else float(row[name]) for name in _FLOATS}


def _starts(rows: Sequence[Mapping[Any, Any]]) -> list[str]:
    """Return for each row what the model had learned before; several ways of it are told apart by their settings.

    A run that failed left no score to say so: it belongs to the finished ones with the same settings, or is judged by
    its settings where there is none.
    """
    before = [json.dumps(_parts(row)[1], sort_keys=True) for row in rows]
    known = {key: str(row["pretrain"]) for key, row in zip(before, rows, strict=True) if row["status"] == "ok"}
    kinds = [
        str(row["pretrain"]) if row["status"] == "ok" else known.get(key, _kind(json.loads(key)))
        for key, row in zip(before, rows, strict=True)
    ]
    settings = {kind: {key for key, other in zip(before, kinds, strict=True) if other == kind} for kind in kinds}
    return [
        f"{kind}: {_say(json.loads(key))}" if kind and len(settings[kind]) > 1 else kind
        for kind, key in zip(kinds, before, strict=True)
    ]


def _kind(before: Mapping[str, Any]) -> str:
    words = [value for value in before.values() if isinstance(value, str) and value]
    return words[0] if words else ("yes" if any(before.values()) else "")


def _say(settings: Mapping[str, Any]) -> str:
    items: Iterable[tuple[str, Any]] = sorted(settings.items())
    return ", ".join(f"{name}={value}" for name, value in items)


def _json(text: Any, default: Any) -> Any:
    return json.loads(text) if isinstance(text, str) and text else default
