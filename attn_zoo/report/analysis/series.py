"""Group what was timed into series: one curve of a mechanism over lengths each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any, TypeVar

from attn_zoo.folder import Claim
from attn_zoo.records import Memory, Record, Timing
from attn_zoo.report.analysis.observations import Observation, Results
from attn_zoo.report.measurements import token_rates
from attn_zoo.statistics import time_summary

Part = TypeVar("Part", Record, Timing, Memory)


@dataclass(frozen=True, slots=True)
class Point:
    """One measured length of one series.

    Args:
        record: as stored, or several (seeds, repeated runs) with their samples pooled.
        timing: of the record.
    """

    record: Record
    timing: Timing

    @property
    def seq_len(self) -> int:
        """Tokens."""
        return self.record.cell.seq_len or 0

    @property
    def memory(self) -> Memory:
        """Bytes; None where they were not measured."""
        return self.record.memory or Memory()

    @property
    def median_ms(self) -> float:
        """Median time."""
        return self.timing.median_ms

    @property
    def low_ms(self) -> float:
        """Lower end of the 95 % interval of the median."""
        return self.timing.low_ms

    @property
    def high_ms(self) -> float:
        """Upper end."""
        return self.timing.high_ms

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput of a training step, padding excluded; None for a single call."""
        return token_rates(self.record).get("tokens_per_s")

    @property
    def num_processes(self) -> int:
        """In how many processes the samples were taken."""
        return max(1, len(self.timing.process_sizes))

    @property
    def is_compiled(self) -> bool:
        """Whether it is a training step through `torch.compile`."""
        return self.record.cell.overrides.get("compile") is True

    @property
    def kernel(self) -> str:
        """Paths that ran."""
        return " + ".join(self.record.kernels)

    @property
    def flags(self) -> str:
        """What makes the time doubtful."""
        return " + ".join(self.timing.flags)


@dataclass(frozen=True, slots=True)
class Failure:
    """One length that gave no measurement."""

    record: Record

    @property
    def seq_len(self) -> int:
        """Tokens."""
        return self.record.cell.seq_len or 0

    @property
    def status(self) -> str:
        """What became of it."""
        return self.record.status

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        return self.record.reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve: a label over lengths, ascending."""

    label: str
    variant: str
    points: tuple[Point, ...]
    failures: tuple[Failure, ...]
    claim: Claim | None
    is_simulated: bool

    @property
    def lengths(self) -> list[int]:
        """Measured lengths in tokens."""
        return [point.seq_len for point in self.points]

    @property
    def outcomes(self) -> list[Point | Failure]:
        """What became of every length, shortest first."""
        return sorted((*self.points, *self.failures), key=lambda one: one.seq_len)

    @property
    def is_exact(self) -> bool:
        """Whether the variant claims to equal softmax attention."""
        return self.claim is not None and self.claim.is_exact


def make_series(label: str, members: Sequence[Observation], scope: str | None, results: Results) -> Series:
    """Return the curve of one label within one panel."""
    by_length: dict[int, list[Observation]] = {}
    for one in members:
        by_length.setdefault(one.cell.seq_len or 0, []).append(one)
    points, failures = [], []
    for _, same in sorted(by_length.items()):
        timed = [one.record for one in same if one.is_timed]
        if timed:
            points.append(_point(timed))
        else:
            failures.append(Failure(same[-1].record))
    variant = members[0].cell.variant
    claim = results.claim(variant)
    if claim is not None and scope == "model":  # the mechanism's claim does not say how a whole model grows
        claim = replace(claim, time_exponent=None, memory_exponent=None)
    return Series(
        label=label,
        variant=variant,
        points=tuple(points),
        failures=tuple(failures),
        claim=claim,
        is_simulated=any(one.record.is_simulated for one in members),
    )


def _point(records: Sequence[Record]) -> Point:
    """Return one record as it is, or several with their samples pooled: samples of two records are of two processes."""
    timings = [record.timing for record in records if record.timing is not None]
    timing = timings[0]
    if len(timings) > 1:
        samples = tuple(sample for one in timings for sample in one.samples_ms)
        sizes = tuple(size for one in timings for size in one.process_sizes or [len(one.samples_ms)] if size)
        flags = tuple(sorted({flag for one in timings for flag in one.flags}))
        timing = replace(_merged(timings), samples_ms=samples, process_sizes=sizes, flags=flags)
        timing = replace(timing, **(time_summary(samples, sizes) if samples else {}))
    memories = [record.memory for record in records if record.memory is not None]
    memory = _merged(memories) if memories else None
    return Point(replace(_merged(records), timing=timing, memory=memory), timing)


def _merged(parts: Sequence[Part]) -> Part:
    """Return the first of `parts` with the most of each count or number of bytes and the mean of each other number."""
    changes: dict[str, Any] = {}
    for field in fields(parts[0]) if len(parts) > 1 else ():
        known = [value for part in parts if (value := getattr(part, field.name)) is not None]
        if known and all(type(value) is int for value in known):
            changes[field.name] = max(known)
        elif known and all(type(value) in {int, float} for value in known):
            changes[field.name] = fmean(known)
    return replace(parts[0], **changes)


def fastest_exact(series: Sequence[Series]) -> Series | None:
    """Return a series made of the fastest exact point at each length, named after its members; None without any."""
    exact = [one for one in series if one.is_exact and one.points and not one.is_simulated]
    if not exact:
        return None
    best: dict[int, tuple[Point, str]] = {}
    for one in exact:
        for point in one.points:
            if point.seq_len not in best or point.median_ms < best[point.seq_len][0].median_ms:
                best[point.seq_len] = (point, one.label)
    fastest = [best[length] for length in sorted(best)]
    return Series(
        label=" / ".join(dict.fromkeys(label for _, label in fastest)),
        variant=exact[0].variant,
        points=tuple(point for point, _ in fastest),
        failures=(),
        claim=exact[0].claim,
        is_simulated=False,
    )
