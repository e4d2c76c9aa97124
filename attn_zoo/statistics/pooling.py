"""One record out of several that measured the same: repeats in further processes, further seeds, further folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from attn_zoo.records import Memory, Record, Timing
from attn_zoo.statistics.medians import quartiles, time_summary

Part = TypeVar("Part", Record, Timing, Memory)


def pool_records(records: Sequence[Record]) -> Record:
    """Return the first record with the samples of all, and an interval that covers what differs between processes.

    Samples of two records are of two processes, and so are times of the device alone. Of counts and bytes the most is
    taken; durations and phases are sums; flags, kernels and bundles are those of any, and `kernels_differ` is added
    where not all ran the same. All else is of the first.

    Args:
        records: of one machine, all ok, in the order of their processes; where one is untimed, the first comes back.

    Raises:
        ValueError: they were measured in several environments.
    """
    if len({record.environment for record in records} - {""}) > 1:
        raise ValueError(f"{records[0].cell.id}: expected records of one environment")
    timings = [record.timing for record in records if record.timing is not None]
    if len(timings) < 2 or len(timings) < len(records):
        return records[0]
    samples = tuple(sample for timing in timings for sample in timing.samples_ms)
    sizes = tuple(size for timing in timings for size in timing.process_sizes or [len(timing.samples_ms)] if size)
    flags = dict.fromkeys(flag for timing in timings for flag in timing.flags)
    if len({record.kernels for record in records}) > 1:
        flags["kernels_differ"] = None
    processor = [timing.process_cpu_ms for timing in timings if timing.process_cpu_ms is not None]
    timing = replace(
        _with_most(timings),
        samples_ms=samples,
        process_sizes=sizes,
        process_cpu_ms=quartiles(processor)[1] if processor else None,
        flags=tuple(flags),
        **_of_device_alone(timings),
        **(time_summary(samples, sizes) if samples else {}),
    )
    bundles = [record.bundle for record in records]
    memories = [record.memory for record in records if record.memory is not None]
    phases = dict.fromkeys(name for record in records for name in record.phases)
    return replace(
        _with_most(records),
        timing=timing,
        bundle=" ".join(dict.fromkeys(bundles)) if all(bundles) else "",
        memory=_with_most(memories) if memories else None,
        kernels=tuple(dict.fromkeys(path for record in records for path in record.kernels)),
        duration_s=round(sum(record.duration_s for record in records), 4),
        phases={name: round(sum(record.phases.get(name, 0.0) for record in records), 4) for name in phases},
    )


def _of_device_alone(timings: Sequence[Timing]) -> dict[str, Any]:
    """Return the fields of a timing that are about replays: all processes that have such a time count alike."""
    known = [timing.graph_by_process_ms or (timing.graph_ms,) for timing in timings]
    medians = tuple(median for process in known for median in process if median is not None)
    reasons = [timing.graph_reason for timing in timings if timing.graph_reason]
    return {
        "graph_ms": quartiles(medians, [1] * len(medians))[1] if medians else None,
        "graph_by_process_ms": medians,
        "graph_reason": "" if medians or not reasons else reasons[0],
        "graph_flags": tuple(dict.fromkeys(flag for timing in timings for flag in timing.graph_flags)),
    }


def _with_most(parts: Sequence[Part]) -> Part:
    """Return the first of `parts` with the most of each count or number of bytes that any of them knows."""
    changes: dict[str, Any] = {}
    for field in fields(parts[0]):
        known = [value for part in parts if type(value := getattr(part, field.name)) is int]
        if known:
            changes[field.name] = max(known)
    return replace(parts[0], **changes)
