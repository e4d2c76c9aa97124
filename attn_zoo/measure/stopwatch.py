"""Two ways to time calls: the host's clock for CPU work, CUDA events for GPU work. `timing.py` decides what to time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 256 * 2**20
"""Larger than the second-level cache of every GPU we know (60 MB on H200)."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of all calls of one sample together: on the wall and, where known, of the processor over all threads."""

    wall_s: float
    cpu_s: float | None = None


class AbstractStopwatch(ABC):
    """Times calls. `setup`, where given, runs before every call and outside the timed region.

    Attributes:
        name: what `records.Timing.timer` calls it.
        resolution_s: smallest difference it can see.
        batch_size: how many samples to ask for at once; more than one where they are read after the fact.
        has_loops: whether one sample may hold several calls.
    """

    name: str
    resolution_s: float
    batch_size: int
    has_loops: bool

    @abstractmethod
    def once(self, call: Call, setup: Call | None) -> float:
        """Return the seconds of one call until its work is done, compilation and launch included."""

    @abstractmethod
    def take(self, call: Call, setup: Call | None, *, count: int, loops: int) -> list[Sample]:
        """Return `count` samples of `loops` calls each."""


class HostStopwatch(AbstractStopwatch):
    """The host's monotonic clock; caches stay warm between calls, as they do between the layers of a model.

    Releasing what a call returned belongs to the call.

    Args:
        clock: nanoseconds of wall time.
        cpu_clock: nanoseconds of processor time of this process, all threads.
    """

    name = "perf_counter"
    batch_size = 1
    has_loops = True

    def __init__(
        self, clock: Callable[[], int] = time.perf_counter_ns, cpu_clock: Callable[[], int] = time.process_time_ns
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self.resolution_s = time.get_clock_info("perf_counter").resolution

    def once(self, call: Call, setup: Call | None) -> float:
        return self._sample(call, setup, 1).wall_s

    def take(self, call: Call, setup: Call | None, *, count: int, loops: int) -> list[Sample]:
        return [self._sample(call, setup, loops) for _ in range(count)]

    def _sample(self, call: Call, setup: Call | None, loops: int) -> Sample:
        if setup is not None:  # the clock is read around every call, so that no setup is inside
            parts = [self._interval(call, setup, range(1)) for _ in range(loops)]
            return Sample(sum(wall for wall, _ in parts) * 1e-9, sum(cpu for _, cpu in parts) * 1e-9)
        wall_ns, cpu_ns = self._interval(call, None, range(loops))
        return Sample(wall_ns * 1e-9, cpu_ns * 1e-9)

    def _interval(self, call: Call, setup: Call | None, loop: range) -> tuple[int, int]:
        if setup is not None:
            setup()
        # The processor clock is a system call: read it outside the interval of the wall clock.
        cpu_before = self._cpu_clock()
        before = self._clock()
        for _ in loop:
            call()
        after = self._clock()
        return after - before, self._cpu_clock() - cpu_before


class CudaStopwatch(AbstractStopwatch):
    """CUDA events around single calls, queued behind a write that empties the cache and hides the cost of launching.

    The events of a batch are read after all its calls are queued: the host runs ahead, and the GPU's time is seen.

    Args:
        device: the GPU.
        flush: queues work that empties the second-level cache, before every call; None leaves it warm.
        cuda: what to use as `torch.cuda`.
        clock: nanoseconds of wall time.
    """

    name = "cuda_event"
    resolution_s = 0.5e-6  # of cudaEventElapsedTime, by its documentation
    batch_size = 20
    has_loops = False

    def __init__(
        self,
        device: torch.device | str,
        flush: Call | None,
        *,
        cuda: Any = torch.cuda,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._device = torch.device(device)
        self._flush = flush
        self._cuda = cuda
        self._clock = clock

    def once(self, call: Call, setup: Call | None) -> float:
        if setup is not None:
            setup()
        self._cuda.synchronize(self._device)
        before = self._clock()
        call()
        self._cuda.synchronize(self._device)
        return (self._clock() - before) * 1e-9

    def take(self, call: Call, setup: Call | None, *, count: int, loops: int) -> list[Sample]:
        if loops != 1:
            raise ValueError(f"loops: expected 1, because the cache is emptied before every call; got {loops}")
        with self._cuda.device(self._device):
            starts = [self._cuda.Event(enable_timing=True) for _ in range(count)]
            ends = [self._cuda.Event(enable_timing=True) for _ in range(count)]
            for start, end in zip(starts, ends, strict=True):
                if setup is not None:
                    setup()
                if self._flush is not None:
                    self._flush()
                start.record()
                call()
                end.record()
            self._cuda.synchronize(self._device)
        return [Sample(start.elapsed_time(end) * 1e-3) for start, end in zip(starts, ends, strict=True)]


def stopwatch_for(device: torch.device | str, *, flush_cache: bool = True) -> AbstractStopwatch:
    """Return the stopwatch for `device`.

    Args:
        device: `"cpu"` or a CUDA device.
        flush_cache: on GPU, empty the second-level cache before every sample (takes 256 MiB while it lives).

    Raises:
        ValueError: another kind of device.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return HostStopwatch()
    if kind != "cuda":
        raise ValueError(f"device: expected cpu or cuda; got {kind}")
    scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if flush_cache else None
    return CudaStopwatch(device, None if scratch is None else scratch.zero_)
