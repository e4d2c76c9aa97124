"""Group what was timed into series: one curve of a mechanism over lengths each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attn_zoo.folder import Claim
from attn_zoo.records import Memory, Record, Timing
from attn_zoo.report.analysis.observations import Observation, Results
from attn_zoo.report.measurements import token_rates
from attn_zoo.statistics import pool_records


@dataclass(frozen=True, slots=True)
class Point:
    """One measured length of one series.

    Args:
        record: as stored, or several (seeds, repeated runs) with their samples pooled.
    """

    record: Record

    @property
    def timing(self) -> Timing:
        """Of the record."""
        assert self.record.timing is not None  # a record without is a failure
        return self.record.timing

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
            points.append(Point(pool_records(timed)))
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
