"""The columns of an export and of everything the report computes from: one row per observation."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from attn_zoo.records import Memory, Record, Timing
from attn_zoo.statistics import time_summary

__all__ = ["COLUMNS", "INTEGER_COLUMNS", "NUMBER_COLUMNS", "TEXT_COLUMNS", "flat_row"]

_TIMING = tuple(field.name for field in fields(Timing) if field.name not in {"samples_ms", "flags"})
_MEMORY = tuple(field.name for field in fields(Memory))
_SCORE = (
    "metric",
    "value",
    "validation",
    "num_examples",
    "chance",
    "best_step",
    "num_steps",
    "train_flops",
    "train_s",
    "tokens_per_s",
    "padding_frac",
    "pretrain",
    "pretrain_s",
    "pretrain_flops",
)
_RATE_ENDS = ("tokens_per_s_low", "tokens_per_s_high")
_SCORE_JSON = ("floors", "references", "breakdown", "curve", "settings")

COLUMNS: tuple[str, ...] = (
    *("variant", "label", "kind", "seq_len", "batch_size", "num_heads", "num_kv_heads", "head_dim", "dtype", "device"),
    *("pass", "scope", "is_causal", "has_padding", "dropout_p", "status", "reason", *_TIMING, *_MEMORY),
    *(
        "flops",
        "min_bytes",
        "backward_ratio",
        "counted_flops",
        "energy_joules",
        "kernel",
        "is_simulated",
        "num_params",
        "task",
        "level",
        *_SCORE,
        *_RATE_ENDS,
        "num_tokens",
    ),
    *("train_peak_bytes", "floors", "references", "seed", "threads", "protocol", "overrides", "grid"),
    *("protocol_version", "options", "variant_digest", "data_digest", "environment", "run", "key", "started"),
    *(
        "duration_s",
        "overhead_s",
        "phases",
        "isolation",
        "bundle",
        "attempt",
        "exit_code",
        "num_jobs",
        "gate",
        "flags",
        "num_samples",
        "samples_ms",
    ),
    *("breakdown", "curve", "settings", "correct"),
)
"""Every column, in the order of the export. Units are in the suffixes; what was not measured is empty."""

INTEGER_COLUMNS: tuple[str, ...] = (
    *("seq_len", "batch_size", "num_heads", "num_kv_heads", "head_dim", "seed", "threads", "protocol_version"),
    *(
        *_MEMORY,
        "flops",
        "min_bytes",
        "counted_flops",
        "num_params",
        "num_warmup",
        "inner_loops",
        "num_examples",
        "best_step",
    ),
    *("num_steps", "attempt", "exit_code", "num_samples", "num_jobs", "train_peak_bytes"),
)

NUMBER_COLUMNS: tuple[str, ...] = (
    *("median_ms", "q1_ms", "q3_ms", "low_ms", "high_ms", "first_ms", "process_cpu_ms", "graph_ms", "dropout_p"),
    *("energy_joules", "backward_ratio"),
    *("value", "validation", "chance", "train_flops", "train_s", "tokens_per_s", "duration_s", "overhead_s"),
    *("padding_frac", "pretrain_s", "pretrain_flops", *_RATE_ENDS, "num_tokens"),
)

TEXT_COLUMNS: tuple[str, ...] = (
    "pass",
    "scope",
    "task",
    "level",
    "metric",
    "protocol",
    "timer",
    "pretrain",
    "graph_reason",
)

_FROM_CELL = (
    "variant",
    "kind",
    "seq_len",
    "batch_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "dtype",
    "device",
    "scope",
    "is_causal",
    "has_padding",
    "dropout_p",
    "task",
    "level",
    "seed",
    "threads",
    "protocol",
    "protocol_version",
    "variant_digest",
    "data_digest",
    "num_tokens",
    "key",
)
_FROM_RECORD = (
    "status",
    "reason",
    "flops",
    "min_bytes",
    "backward_ratio",
    "counted_flops",
    "energy_joules",
    "is_simulated",
    "started",
    "duration_s",
    "overhead_s",
    "isolation",
    "bundle",
    "attempt",
    "exit_code",
    "num_jobs",
)


def flat_row(record: Record, run: str, environment: str) -> dict[str, Any]:
    """Return `record` as one flat row; nested values become JSON text or lists joined by ` + `.

    Args:
        record: what became of one cell.
        run: name of the run it belongs to.
        environment: digest of the machine it ran (or would have run) on.
    """
    cell, timing, memory, score = record.cell, record.timing, record.memory, record.score
    if timing is not None and timing.process_sizes:
        # Records made before 2026-11-22 hold the median of all samples, which leans to the process that took most.
        timing = replace(timing, **time_summary(timing.samples_ms, timing.process_sizes))
    row: dict[str, Any] = {name: getattr(cell, name) for name in _FROM_CELL}
    row |= {name: getattr(record, name) for name in _FROM_RECORD}
    row |= {name: getattr(timing, name, None) for name in _TIMING}
    row |= {name: getattr(memory, name, None) for name in _MEMORY}
    row |= {name: getattr(score, name, None) for name in _SCORE}
    row |= {name: json.dumps(getattr(score, name), sort_keys=True) if score else "" for name in _SCORE_JSON}
    row |= _token_rates(cell.num_tokens, timing)
    row |= {
        "label": cell.label or cell.variant,
        "pass": cell.pass_,
        "kernel": " + ".join(record.kernels),
        "num_params": record.num_params if score is None else score.num_params,
        "train_peak_bytes": score.peak_bytes if score else None,
        "options": json.dumps(cell.options, sort_keys=True),
        "overrides": json.dumps(cell.overrides, sort_keys=True),
        "grid": json.dumps(cell.grid),
        "environment": environment,
        "run": run,
        "gate": " + ".join(record.gate),
        "flags": " + ".join(timing.flags) if timing else "",
        "num_samples": len(timing.samples_ms) if timing else None,
        "samples_ms": list(timing.samples_ms) if timing else [],
        "correct": score.correct if score else "",
        "phases": json.dumps(record.phases, sort_keys=True),
        "process_sizes": list(timing.process_sizes) if timing else [],
    }
    return row


def _token_rates(num_tokens: float | None, timing: Timing | None) -> dict[str, float]:
    """Return the throughput of a training step that was timed, and its interval: what the time's interval says."""
    if num_tokens is None or timing is None:
        return {}
    ends = {"tokens_per_s": timing.median_ms, "tokens_per_s_low": timing.high_ms, "tokens_per_s_high": timing.low_ms}
    return {name: 1e3 * num_tokens / value_ms for name, value_ms in ends.items() if value_ms > 0}
