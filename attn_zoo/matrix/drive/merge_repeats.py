"""One record out of those of several processes that measured the same cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attn_zoo.records import Record
from attn_zoo.statistics import quartiles, time_summary


def merge_repeats(records: Sequence[Record]) -> Record:
    """Return the first record with the samples of all, and an interval that covers what differs between processes.

    Gate, memory and the like are of the first process. Flags are those of any; `kernels_differ` is added where the
    processes did not run the same paths. Durations and phases are sums.

    Args:
        records: of one cell, all ok, in the order of their processes.

    Raises:
        ValueError: they were measured in several environments.
    """
    if len({record.environment for record in records}) > 1:
        raise ValueError(f"{records[0].cell.id}: expected records of one environment")
    first, timings = records[0], [record.timing for record in records if record.timing is not None]
    if len(timings) < 2 or len(timings) < len(records):
        return first
    samples = tuple(sample for timing in timings for sample in timing.samples_ms)
    sizes = tuple(len(timing.samples_ms) for timing in timings)
    flags = list(dict.fromkeys(flag for timing in timings for flag in timing.flags))
    if len({record.kernels for record in records}) > 1:
        flags.append("kernels_differ")
    processor = [timing.process_cpu_ms for timing in timings if timing.process_cpu_ms is not None]
    timing = replace(
        timings[0],
        samples_ms=samples,
        process_sizes=sizes,
        process_cpu_ms=quartiles(processor)[1] if processor else None,
        flags=tuple(flags),
        **time_summary(samples, sizes),
    )
    names = dict.fromkeys(name for record in records for name in record.phases)
    return replace(
        first,
        timing=timing,
        kernels=tuple(dict.fromkeys(path for record in records for path in record.kernels)),
        attempt=max(record.attempt for record in records),
        duration_s=round(sum(record.duration_s for record in records), 4),
        phases={name: round(sum(record.phases.get(name, 0.0) for record in records), 4) for name in names},
    )
