"""Group what was timed into series: one curve of a mechanism over lengths each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile
from statistics import fmean, median
from typing import get_args

from attn_zoo.folder import Claim
from attn_zoo.records import CallPass, Memory, Record, Timing, is_one_token
from attn_zoo.report.analysis.grouping import grouped
from attn_zoo.report.analysis.observations import NOT_RUN, Observation, Results
from attn_zoo.report.measurements import token_rates
from attn_zoo.report.wording import FLAG_MARKS, MARKS, worth_a_mark
from attn_zoo.statistics.pooling import pool_records

HOST_FACTOR = 1.5
"""A call on a GPU that takes no more than this times what the host alone needs waits for the host."""
FLAT_SLOPE = 0.6
"""A GPU that had work enough would take more than this power of the length longer for each doubling."""
BUSY_SLOPE = 0.9
"""A GPU that is busy takes at least this power of the length longer, and this share of the slope at the longest."""
LEAST_BUSY = 3
"""Lengths on one such line before all of them are taken to be the GPU's: two would lie on any."""
HIDDEN_MS = 0.03
"""A call follows a write of 256 MiB, while which the host may enqueue it: 0.03 ms at 8 TB/s, more on slower memory."""
UNEVEN = 1.15
"""A mean of this times the median: noise alone gave 1.07 in the calmest of five processes."""


_OF_CALLS = frozenset({"host", "short", "few"})
"""Doubts of the samples of calls, which replays have no part in."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured length of one series.

    Args:
        record: as stored, or several (seeds, repeated runs) with their samples pooled.
        is_waiting: for the host that launches it; see `waiting_lengths`.
        num_records: that were pooled.
    """

    record: Record
    is_waiting: bool = False
    num_records: int = 1

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
    def device_ms(self) -> float | None:
        """Time of the GPU alone: the same call replayed from a CUDA graph; None where that was not measured."""
        return self.timing.graph_ms

    @property
    def is_host_bound(self) -> bool:
        """Whether a GPU waits between two such calls: the host takes longer to enqueue one than the GPU to run it."""
        if self.timing.host_ms is None or self.device_ms is None:
            return self.is_waiting
        return self.timing.host_ms > self.device_ms

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput of a training step, padding excluded; None for a single call."""
        return token_rates(self.record).get("tokens_per_s")

    @property
    def num_processes(self) -> int:
        """In how many processes the samples were taken."""
        return max(1, len(self.timing.process_sizes))

    @property
    def kernel(self) -> str:
        """Paths that ran."""
        return " + ".join(self.record.kernels)

    @property
    def flags(self) -> str:
        """What makes the time doubtful."""
        return " + ".join(self.timing.flags)

    @property
    def _is_uneven(self) -> bool:
        """Whether some of the tokens that were decoded one after another are dearer, so that the median is not all."""
        return is_one_token(self.record.cell.pass_) and all(
            fmean(samples) >= UNEVEN * median(samples) for samples in self.timing.by_process
        )

    @property
    def device_samples_ms(self) -> tuple[float, ...]:
        """The time of the GPU alone in each process that has one."""
        return self.timing.graph_by_process_ms or (() if self.device_ms is None else (self.device_ms,))

    @property
    def device_doubts(self) -> tuple[str, ...]:
        """What a reader must know of the time of the GPU alone; older records know of their calls only."""
        found = {FLAG_MARKS[flag] for flag in self.timing.graph_flags if flag in FLAG_MARKS}
        return tuple(mark for mark in MARKS if mark in found | {*self.doubts} - _OF_CALLS)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What a reader must know of the time where it stands: names of `attn_zoo.report.wording.MARKS`."""
        found = {FLAG_MARKS[flag] for flag in self.timing.flags if flag in FLAG_MARKS}
        found |= {"host"} if self.is_waiting else set()
        found |= {"shared"} if self.record.num_jobs > 1 else set()
        found |= {"uneven"} if self._is_uneven else set()
        if self.num_processes == 1:  # of several, Student's t knows how few there are
            found |= {"alone", "few"} if "few_samples" in self.timing.flags else {"alone"}
        return tuple(mark for mark in MARKS if mark in found)


def joint_doubts(points: Iterable[Point], *, without: str = "", of_device: bool = False) -> tuple[str, ...]:
    """Return what makes a number doubtful that several times went into: what makes any of them so, less `without`.

    The times are those of the GPU alone with `of_device`.
    """
    found = {doubt for point in points for doubt in (point.device_doubts if of_device else point.doubts)}
    return tuple(mark for mark in MARKS if mark in found and mark != without)


def shown_doubts(points: Iterable[Point]) -> frozenset[str]:
    """Return the doubts of these times, and of those of the GPU alone, that get a mark beside their number."""
    return worth_a_mark(doubts for point in points for doubts in (point.doubts, point.device_doubts))


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve: a label over lengths, ascending; `failures` are the lengths that gave no measurement."""

    label: str
    points: tuple[Point, ...]
    failures: dict[int, Record]
    claim: Claim
    is_simulated: bool

    @property
    def waiting(self) -> frozenset[int]:
        """Lengths at which a call waits for the host that launches it, so that its time is not the mechanism's."""
        return frozenset(point.seq_len for point in self.points if point.is_waiting)

    @property
    def may_wait(self) -> bool:
        """Whether calls on a GPU may wait for the host and nothing tells: too few lengths, no time of the GPU."""
        older = (point for point in self.points if point.device_ms is None and not point.timing.graph_reason)
        return len(self.points) < LEAST_BUSY and any(
            point.record.cell.device == "cuda" and not point.is_waiting for point in older
        )

    @cached_property
    def outcomes(self) -> dict[int, Point | Record]:
        """What became of every length, shortest first."""
        every: dict[int, Point | Record] = {point.seq_len: point for point in self.points}
        return dict(sorted((every | self.failures).items()))

    @property
    def is_exact(self) -> bool:
        """Whether the variant claims to equal softmax attention."""
        return self.claim.is_exact

    @property
    def is_control(self) -> bool:
        """Whether it shows what a model does without attention."""
        return self.claim.is_control

    @property
    def is_judged(self) -> bool:
        """Whether it may be called the fastest: neither a control nor dense scores underneath."""
        return not (self.is_simulated or self.is_control)


def waiting_lengths(points: Sequence[Point]) -> frozenset[int]:
    """Return the lengths of one curve, whose points ascend, at which a call on a GPU waits for the host.

    Where the time of the device alone is known, it decides, but of calls that are enqueued before they may begin: these
    take longer for other reasons, such as empty caches. Elsewhere: the host's time is that of the last length up to
    which time hardly grew, and every call that takes about as long waits for it, but for the longest ones, as far down
    as they lie on one line of a slope that the host's time, which does not grow, cannot have.
    """
    on_gpu = [point for point in points if point.record.cell.device == "cuda" and point.median_ms > 0]
    waiting, host_ms, slowest, before = set(), 0.0, 0.0, 0
    for point in on_gpu:
        own_ms = max(point.median_ms, slowest)
        if before and math.log(own_ms / slowest) < FLAT_SLOPE * math.log(point.seq_len / before):
            host_ms = own_ms
        slowest, before = own_ms, point.seq_len
    busy = _busy_lengths(on_gpu)
    for point in on_gpu:
        least_ms = host_ms if point.device_ms is None and point.seq_len not in busy else 0.0
        is_hidden = point.timing.host_ms is not None and point.timing.host_ms <= HIDDEN_MS
        is_longer = point.median_ms > HOST_FACTOR * (point.device_ms or math.inf) and not is_hidden
        if point.median_ms <= HOST_FACTOR * least_ms or is_longer:
            waiting.add(point.seq_len)
    return frozenset(waiting)


def _busy_lengths(points: Sequence[Point]) -> frozenset[int]:
    """Return the longest lengths of one curve that lie on one line, where those are enough to tell."""
    slopes = [
        math.log(after.median_ms / before.median_ms) / math.log(after.seq_len / before.seq_len)
        for before, after in pairwise(points)
    ]
    least = BUSY_SLOPE * max(1.0, slopes[-1]) if slopes else 0.0
    on_line = list(takewhile(lambda slope: slope >= least, reversed(slopes)))
    count = len(on_line) + 1
    return frozenset(point.seq_len for point in points[-count:]) if count >= LEAST_BUSY else frozenset()


def make_series(label: str, members: Sequence[Observation], pass_: str, results: Results) -> Series:
    """Return the curve of one label within one panel."""
    by_length = grouped(members, lambda one: one.cell.seq_len or 0)
    points, failures = [], {}
    for length, same in sorted(by_length.items()):
        timed = [one.record for one in same if one.is_timed]
        if timed:
            points.append(Point(pool_records(timed), num_records=len(timed)))
        else:
            run = [one for one in same if one.record.status != NOT_RUN] or same
            failures[length] = run[-1].record
    waiting = waiting_lengths(points)
    points = [replace(point, is_waiting=point.seq_len in waiting) for point in points]
    claim = results.claim(members[0].cell.variant)
    if pass_ not in get_args(CallPass):  # it does not say how one token grows, or a whole model
        claim = replace(claim, time_exponent=None, memory_exponent=None)
    return Series(
        label=label,
        points=tuple(points),
        failures=failures,
        claim=claim,
        is_simulated=any(one.record.is_simulated for one in members),
    )
