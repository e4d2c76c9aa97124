"""Ways to time calls: the host's clock for CPU work, CUDA events for GPU work. `timing.py` decides what to time.

A GPU call of a few kernels that each take microseconds is as slow as the host launches them. So a GPU call has three
times: that of the single call, on the device, from a cold cache; the host's, until all is launched (`with_host_time`);
and the device's, of replays of the call captured once as a CUDA graph, which is launched as a whole
(`with_device_time`). They are reported apart. In replays the cache is warm, and training without graphs will not see
their time. The single call is queued behind the write that empties the cache, which takes the GPU about 0.1 ms: so much
of the host's time does not show in it, and it may be less than the host's. Eager code that calls again and again sees
the larger of the two.
"""

from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from attn_zoo.errors import first_line
from attn_zoo.measure.capture import capturing, note_failure
from attn_zoo.records import Timing

FLUSH_BYTES = 256 * 2**20
"""Larger than the second-level cache of every GPU we know (60 MB on H200)."""

LONGEST_CAPTURED_MS = 1_000.0
"""A longer call does not wait for its launches, and a graph of it would hold its memory a second time."""

NUM_WARMUP = 3
NUM_SAMPLES, FEW_SAMPLES = 10, 3
FEW_SAMPLES_MS = 100.0
"""Calls from here on are sampled less often, and warmed up by one; those that are not captured are launched once."""
IDLE_S = 0.02
"""Shorter calls are made once, untimed, before the samples: the first after a wait took an H100 0.1 to 0.6 ms more."""
SAMPLE_MS = 5.0
"""Replays that fill one sample take about this long."""
PROBED, MAX_REPLAYS = 10, 2000
"""Replays that tell how many fill a sample, and never more than so many."""
SHORT_REPLAY_MS, SEVERAL = 0.05, 16
"""Graphs of one call that are replayed faster than this wait for their own launch; graphs of several calls do not."""

Call = Callable[[], object]
Make = Callable[[], tuple[Call, Call | None]]


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
    def take(
        self, call: Call, setup: Call | None, *, count: int, loops: int, expected_s: float = math.inf
    ) -> list[Sample]:
        """Return `count` samples of `loops` calls each, which are expected to take so long."""


class HostStopwatch(AbstractStopwatch):
    """The host's monotonic clock; caches stay warm between calls, as they do between the layers of a model.

    Releasing what a call returned belongs to the call.
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

    def take(
        self,
        call: Call,
        setup: Call | None,
        *,
        count: int,
        loops: int,
        expected_s: float = math.inf,  # noqa: ARG002 - the host does not wait
    ) -> list[Sample]:
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
    Before them a short call is made untimed: after a wait the host's caches are cold, and the GPU has nothing to do.

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

    def take(
        self, call: Call, setup: Call | None, *, count: int, loops: int, expected_s: float = math.inf
    ) -> list[Sample]:
        if loops != 1:
            raise ValueError(f"loops: expected 1, because the cache is emptied before every call; got {loops}")
        with self._cuda.device(self._device):
            starts = [self._cuda.Event(enable_timing=True) for _ in range(count)]
            ends = [self._cuda.Event(enable_timing=True) for _ in range(count)]
            if expected_s < IDLE_S:
                self._ready(setup)
                call()
            for start, end in zip(starts, ends, strict=True):
                self._ready(setup)
                start.record()
                call()
                end.record()
            self._cuda.synchronize(self._device)
        return [Sample(start.elapsed_time(end) * 1e-3) for start, end in zip(starts, ends, strict=True)]

    def _ready(self, setup: Call | None) -> None:
        if setup is not None:
            setup()
        if self._flush is not None:
            self._flush()


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


def with_host_time(
    timing: Timing,
    make: Make,
    device: torch.device | str,
    *,
    cuda: Any = torch.cuda,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Timing:
    """Return a GPU's `timing` with the host's time until a call is launched; arguments as in `with_device_time`."""
    if timing.timer != "cuda_event":
        return timing
    return replace(timing, host_ms=_host_ms(make, torch.device(device), timing.median_ms, cuda, clock))


def with_device_time(
    timing: Timing, make: Make, device: torch.device | str, why_not: str = "", *, cuda: Any = torch.cuda
) -> Timing:
    """Return a GPU's `timing` with the device's time by a CUDA graph.

    Not every call can be captured: one that waits for the GPU, or asks it for a number, cannot. Then the timing carries
    the reason, and nothing else about it changes.

    Args:
        timing: of single calls.
        make: returns the call and what runs before each (see `passes.make_pass`). It is called on the stream that is
            captured, because a backward runs on the stream of its forward. No tensor of an earlier graph may be alive
            that shares its leaves.
        device: of the call.
        why_not: why it is not to be captured; empty to try.
        cuda: what to use as `torch.cuda`.
    """
    if timing.timer != "cuda_event":
        return timing
    if not why_not and timing.median_ms > LONGEST_CAPTURED_MS:
        why_not = f"calls of over {LONGEST_CAPTURED_MS:g} ms are not captured"
    if why_not:
        return replace(timing, graph_reason=why_not)
    try:
        return replace(timing, graph_ms=_graph_ms(make, torch.device(device), timing.median_ms, cuda))
    except Exception as error:  # whatever a foreign call does: the time of single calls stands
        try:
            cuda.synchronize(torch.device(device))
        except Exception:  # an error of the device stays with the process
            note_failure()
        return replace(timing, graph_reason=f"{type(error).__name__}: {first_line(error)}")


def _num_samples(call_ms: float) -> int:
    if call_ms > LONGEST_CAPTURED_MS:
        return 1
    return NUM_SAMPLES if call_ms < FEW_SAMPLES_MS else FEW_SAMPLES


def _num_warmup(call_ms: float) -> int:
    return NUM_WARMUP if call_ms < FEW_SAMPLES_MS else 1


def _host_ms(make: Make, device: torch.device, call_ms: float, cuda: Any, clock: Callable[[], int]) -> float:
    """Return the median time until a call has returned to the host, the device being idle before it."""
    spans = []
    with cuda.device(device):
        call, setup = make()
        for _ in range(_num_samples(call_ms)):
            if setup is not None:
                setup()
            cuda.synchronize(device)
            before = clock()
            call()
            spans.append(clock() - before)
        cuda.synchronize(device)
    return statistics.median(spans) * 1e-6


def _graph_ms(make: Make, device: torch.device, call_ms: float, cuda: Any) -> float:
    with cuda.device(device):
        outer, stream = cuda.current_stream(), _side_stream(cuda, cuda.current_device())
        stream.wait_stream(outer)
        try:
            with cuda.stream(stream):
                call, setup = make()
                for _ in range(_num_warmup(call_ms)):
                    _once(call, setup)
                replay_ms = _replay_ms(_captured(call, setup, 1, stream, cuda), call_ms, cuda)
                if replay_ms < SHORT_REPLAY_MS:
                    several = _captured(call, setup, SEVERAL, stream, cuda)
                    replay_ms = _replay_ms(several, SEVERAL * replay_ms, cuda) / SEVERAL
                return replay_ms
        finally:
            cuda.synchronize()


@cache
def _side_stream(cuda: Any, device: int) -> Any:
    """Return the stream that is captured, one for each device: every stream keeps a workspace of cuBLAS for ever."""
    return cuda.Stream(device)


def _once(call: Call, setup: Call | None) -> None:
    if setup is not None:
        setup()
    call()


def _captured(call: Call, setup: Call | None, count: int, stream: Any, cuda: Any) -> Any:
    """Return a graph of so many calls. What runs before each must leave the device alone, or it would be in the graph.

    The call must live as long as the graph, which reads what the call holds.
    """
    graph = cuda.CUDAGraph()
    if setup is not None:  # nothing of a call before is freed into the memory of the graph
        setup()
    with capturing(graph, stream, cuda=cuda):
        for _ in range(count):
            _once(call, setup)
    return graph


def _replay_ms(graph: Any, replay_ms: float, cuda: Any) -> float:
    """Return the median over samples of many replays each, all queued before any of them is read.

    The samples are sized by what a first one says: `replay_ms` is no less than one replay takes.
    """

    def sample(count: int, num_replays: int) -> list[float]:
        starts = [cuda.Event(enable_timing=True) for _ in range(count)]
        ends = [cuda.Event(enable_timing=True) for _ in starts]
        for start, end in zip(starts, ends, strict=True):
            start.record()
            for _ in range(num_replays):
                graph.replay()
            end.record()
        cuda.synchronize()
        return [float(start.elapsed_time(end)) / num_replays for start, end in zip(starts, ends, strict=True)]

    for _ in range(_num_warmup(replay_ms)):
        graph.replay()
    count = _num_samples(replay_ms)
    (replay_ms,) = sample(1, PROBED if replay_ms < SAMPLE_MS else 1)
    return statistics.median(sample(count, min(math.ceil(SAMPLE_MS / max(replay_ms, 1e-6)), MAX_REPLAYS)))
