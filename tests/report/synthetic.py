"""Invented records for tests of the report. No number here was measured."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from attn_zoo.records import (
    AS_TRAINED,
    EQUAL_WEIGHTS,
    Approximation,
    Ceilings,
    Cell,
    Environment,
    Memory,
    Record,
    Replacement,
    Score,
    Status,
    Timing,
)
from attn_zoo.report.analysis.analyse import Analysis, analyse
from attn_zoo.report.analysis.scores import AccuracyGroup
from attn_zoo.report.figures.all_figures import Picture, draw_pictures

MACHINE = Environment(
    host="0123456789ab",
    platform="Linux-6.1-x86_64",
    cpu="Example CPU @ 2.0 GHz",
    num_cores=2,
    memory_bytes=8 * 2**30,
    threads=2,
    versions={"python": "3.11.9", "torch": "2.13.0"},
    commit="0123456789abcdef",
)

CLAIMS: dict[str, dict[str, Any]] = {
    "full": {"time_exponent": 2, "memory_exponent": 1, "time": "B H L S D", "memory": "B H L D", "is_exact": True},
    "linformer": {
        "time_exponent": 1,
        "memory_exponent": 1,
        "time": "B H L M D",
        "memory": "B H L M",
        "is_exact": False,
    },
    "bigbird": {"time_exponent": 1, "memory_exponent": 1, "time": "B H L W D", "memory": "B H L W", "is_exact": False},
}

COSTS = {"full": (0.1, 1e-3, 1.2e-5), "linformer": (0.4, 4e-3, 0.0), "bigbird": (1.2, 1.5e-2, 0.0)}
"""Milliseconds: constant, per token, per pair of tokens."""

DOUBLINGS = [512, 1024, 2048, 4096, 8192, 16384, 32768]


def timing(median_ms: float, seed: int = 0, spread: float = 0.02, count: int = 15) -> Timing:
    """Return invented samples around a median."""
    rng = random.Random(seed)
    samples = sorted(median_ms * (1 + spread * rng.uniform(-1, 1)) for _ in range(count - 1))
    samples = sorted([*samples, median_ms])
    middle = samples[len(samples) // 2]
    return Timing(
        samples_ms=tuple(samples),
        median_ms=middle,
        q1_ms=samples[count // 4],
        q3_ms=samples[3 * count // 4],
        low_ms=samples[count // 3],
        high_ms=samples[2 * count // 3],
        first_ms=3 * median_ms,
        num_warmup=2,
        inner_loops=1,
        timer="perf_counter",
    )


def scaling(
    variant: str,
    seq_len: int,
    median_ms: float | None = None,
    *,
    status: Status = "ok",
    reason: str = "",
    spread: float = 0.02,
    quadratic_memory: bool = False,
    **cell: Any,
) -> Record:
    """Return one scaling record; fields of the cell can be changed by keyword."""
    a, b, c = COSTS.get(variant, (0.2, 2e-3, 0.0))
    cost = a + b * seq_len + c * seq_len**2 if median_ms is None else median_ms
    inputs = 3 * 8 * seq_len * 64 * 4
    extra = 8 * seq_len**2 * 4 if quadratic_memory else 8 * seq_len * 256 * 4
    fields: dict[str, Any] = {
        "kind": "scaling",
        "variant": variant,
        "pass_": "fwd",
        "seq_len": seq_len,
        "batch_size": 1,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 64,
        "scope": "attention",
        "threads": 2,
    }
    is_ok = status == "ok"
    return Record(
        cell=Cell(**(fields | cell)),
        status=status,
        reason=reason,
        environment=MACHINE.digest if status != "unsupported" else "",
        kernels=("math",) if is_ok else (),
        flops=4 * 8 * seq_len**2 * 64,
        timing=timing(cost, seed=seq_len, spread=spread) if is_ok else None,
        memory=Memory(peak_bytes=inputs + extra, extra_bytes=extra, saved_bytes=inputs) if is_ok else None,
    )


def approximation(
    variant: str,
    seq_len: int,
    error: float,
    *,
    inputs: str = "peaked",
    seed: int = 0,
    status: Status = "ok",
    has_budget: bool = True,
    **cell: Any,
) -> Record:
    """Return one invented distance from exact attention."""
    sizes = {"batch_size": 1, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "scope": "attention"}
    fields: dict[str, Any] = {"kind": "approximation", "protocol_version": 1, "label": variant, **sizes, **cell}
    found = Approximation(
        error=error,
        mean_error=0.9,
        rounding_error=1e-7,
        num_effective_keys=seq_len / 100,
        num_rows=2048,
        has_budget=has_budget,
    )
    return Record(
        cell=Cell(**{"variant": variant, **fields}, seq_len=seq_len, inputs=inputs, seed=seed),  # type: ignore[arg-type]
        status=status,
        environment=MACHINE.digest,
        flops=seq_len**2 if variant == "full" else seq_len * 100,
        approximation=found if status == "ok" else None,
    )


def exchanged(
    variant: str, seed: int, value: float | None, *, error: float = 0.5, trained: float = 0.5, **cell: Any
) -> Record:
    """Return one invented score of a trained model with another mechanism; see `accuracy`."""
    marks = {"floors": {"majority": 0.17, EQUAL_WEIGHTS: 0.2}, "references": {AS_TRAINED: trained}}
    score = {"num_steps": 0, "best_step": 0, "train_s": 0.0, "tokens_per_s": None, "curve": (), **marks}
    fields = {"kind": "replacement", "replaces": "full", **cell}
    record = accuracy(variant, seed, value, score=score, **fields)
    layer = approximation("full", 64, error).approximation
    assert layer is not None
    layers = (layer, replace(layer, error=2 * error))
    found = Replacement(trained_value=trained, layers=layers, num_new_params=32 if variant == "linformer" else 0)
    return replace(record, replacement=None if value is None else found)


def costed(record: Record, flops: int, min_bytes: int, backward_ratio: float = 2.5) -> Record:
    """Return a scaling record with what the formulas of its variant say of one forward."""
    return replace(record, flops=flops, min_bytes=min_bytes, backward_ratio=backward_ratio)


def roof(**changes: Any) -> Ceilings:
    """Return invented ceilings that fit the cells of `scaling`: 100 GFLOP/s and 10 GB/s."""
    fields: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "threads": 2,
        "matmul_flops_per_s": 1e11,
        "copy_bytes_per_s": 1e10,
        "environment": MACHINE.digest,
    }
    return Ceilings(**(fields | changes))


def accuracy(
    variant: str,
    seed: int,
    value: float | None,
    *,
    status: Status = "ok",
    score: Mapping[str, Any] | None = None,
    num_jobs: int = 1,
    **cell: Any,
) -> Record:
    """Return one record of a training run; fields of the score are changed by `score`, of the cell by keyword."""
    fields: dict[str, Any] = {
        "kind": "accuracy",
        "variant": variant,
        "seed": seed,
        "task": "listops",
        "level": "short",
        "protocol": "cpu-small",
    }
    found = None
    if value is not None:
        rng = random.Random(f"{variant}{seed}")
        numbers: dict[str, Any] = {
            "metric": "accuracy",
            "value": value,
            "validation": value + 0.01,
            "num_examples": 200,
            "chance": 0.1,
            "floors": {"most_frequent": 0.17, "length_only": 0.21},
            "best_step": 300,
            "num_steps": 400,
            "num_params": 65_000,
            "train_s": 20.0,
            "tokens_per_s": 30_000.0 + 5000 * len(variant),
            "curve": ({"step": 0.0, "train_loss": 2.3},),
            "correct": "".join("1" if rng.random() < value else "0" for _ in range(200)),
        }
        found = Score(**(numbers | dict(score or {})))
    return Record(
        cell=Cell(**(fields | cell)),
        status=status,
        reason="" if status == "ok" else "the loss was not finite at step 120",
        environment=MACHINE.digest,
        num_jobs=num_jobs,
        score=found,
    )


def curve(start: float, end: float, *, num_steps: int = 400, count: int = 8) -> tuple[dict[str, float], ...]:
    """Return evaluations that approach `end` from `start`."""
    found = []
    for index in range(1, count + 1):
        share = 1 - (1 - index / count) ** 2
        value = start + share * (end - start)
        entry = {"step": num_steps * index / count, "train_loss": 2.3 - share, "validation_loss": 2.4 - share}
        found.append(entry | {"validation": value})
    return tuple(found)


def tuned(
    variant: str, rates: Mapping[float, Iterable[float | None]], *, overrides: Mapping[str, Any] | None = None
) -> list[Record]:
    """Return trials of one variant: validation scores by learning rate and seed; None is a run that diverged.

    The test score is the validation score minus 0.1, so that a test can tell which was looked at.
    """
    return [
        accuracy(
            variant,
            seed,
            None if validation is None else validation - 0.1,
            status="ok" if validation is not None else "diverged",
            score=None if validation is None else {"validation": validation},
            overrides={**(overrides or {}), "base_lr": rate},
            grid=("base_lr",),
        )
        for rate, validations in rates.items()
        for seed, validation in enumerate(validations)
    ]


def zoo(variants: Iterable[str] = tuple(COSTS), lengths: Iterable[int] = tuple(DOUBLINGS), **cell: Any) -> list[Record]:
    """Return the records of a small matrix: full runs out of memory at the longest length."""
    lengths = list(lengths)
    records = []
    for variant in variants:
        for length in lengths:
            if variant == "full" and length == lengths[-1] and len(lengths) > 2:
                reason = "needed 34.4 GB, 8.6 GB present"
                records.append(scaling(variant, length, status="oom_host", reason=reason, **cell))
            else:
                records.append(scaling(variant, length, **cell))
    return records


def trained(variants: Iterable[str] = tuple(COSTS), seeds: Iterable[int] = (0, 1, 2)) -> list[Record]:
    """Return training runs with invented scores."""
    base = {"full": 0.372, "linformer": 0.355, "bigbird": 0.366}
    return [
        accuracy(variant, seed, round(base.get(variant, 0.3) + 0.006 * seed, 4))
        for variant in variants
        for seed in seeds
    ]


def pictures_of(analysis: Analysis, start: str = "") -> list[Picture]:
    """Return the figures that a report shows and whose names begin with `start`: others are not even drawn."""
    return list(draw_pictures(analysis, start, panels=analysis.shown))


def write_run(
    path: Path,
    records: Iterable[Record],
    *,
    name: str = "quick",
    claims: Mapping[str, Any] | None = None,
    environment: Environment = MACHINE,
    ceilings: Iterable[Ceilings] = (),
    **extra: Any,
) -> Path:
    """Write a results folder as the store does and return its path."""
    cells = path / "cells"
    cells.mkdir(parents=True)
    head = {
        "schema": 1,
        "created": "2026-01-01T00:00:00+00:00",
        "version": "0.1.0",
        "matrices": [{"name": name}],
        "environments": {environment.digest: environment.to_dict()},
        "claims": CLAIMS if claims is None else claims,
        **extra,
    }
    (path / "run.json").write_text(json.dumps(head), encoding="utf-8")
    measured = [one.to_dict() for one in ceilings]
    if measured:
        (path / "ceilings.json").write_text(json.dumps({"schema": 1, "ceilings": measured}), encoding="utf-8")
    for record in records:
        (cells / f"{record.cell.key}.json").write_text(record.to_json(), encoding="utf-8")
    return path


def analysed(path: Path, records: Iterable[Record], **run: Any) -> Analysis:
    """Return the analysis of these records, written into a results folder below `path`."""
    return analyse([write_run(path / "run", records, **run)])


def group(path: Path, records: Iterable[Record]) -> tuple[AccuracyGroup, dict[str, Any]]:
    """Return the only group of these trainings, and its scores by name."""
    (found,) = analysed(path, records).accuracy
    return found, {score.name: score for score in found.scores}
