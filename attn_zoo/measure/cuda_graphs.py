"""The time of a GPU call without its launches: the same call captured once as a CUDA graph, and replayed.

A call of a few kernels that each take microseconds is as slow as the host launches them. A graph is launched as a
whole, so its replays show what the GPU itself needs. Two things differ from the time of single calls, and are why it is
reported apart: the cache is warm, and training without graphs will not see it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attn_zoo.records import Timing

LAUNCH_BOUND_MS = 0.1
"""A call whose median is below this waits for its launches more than for its work."""

NUM_WARMUP = 3
NUM_SAMPLES = 10
SAMPLE_MS = 5.0
"""Replays that fill one sample take about this long, going by the single call."""
MAX_REPLAYS = 2000

Call = Callable[[], object]
Make = Callable[[], tuple[Call, Call | None]]


def with_graph_time(timing: Timing, make: Make, device: torch.device | str, *, cuda: Any = torch.cuda) -> Timing:
    """Return `timing` with the time of the same call replayed from a CUDA graph, if it is a GPU's and launch-bound.

    Not every call can be captured: one that waits for the GPU, or asks it for a number, cannot. Then the timing carries
    the reason, and nothing else about it changes.

    Args:
        timing: of single calls.
        make: returns the call and what runs before each (see `passes.make_pass`). It is called on the stream that is
            captured, because a backward runs on the stream of its forward. No tensor of an earlier graph may be alive
            that shares its leaves.
        device: of the call.
        cuda: what to use as `torch.cuda`.
    """
    if timing.timer != "cuda_event" or timing.median_ms >= LAUNCH_BOUND_MS:
        return timing
    try:
        return replace(timing, graph_ms=_graph_ms(make, torch.device(device), timing.median_ms, cuda))
    except Exception as error:  # whatever a foreign call does: the time of single calls stands
        first = (str(error).strip().splitlines() or [""])[0]
        return replace(timing, graph_reason=f"{type(error).__name__}: {first}")


def _graph_ms(make: Make, device: torch.device, call_ms: float, cuda: Any) -> float:
    num_replays = min(math.ceil(SAMPLE_MS / max(call_ms, 1e-6)), MAX_REPLAYS)
    with cuda.device(device):
        # A capture that fails leaves the generator believing that it goes on, and later random numbers would fail.
        generator = cuda.default_generators[cuda.current_device()]
        before, outer, stream = generator.clone_state(), cuda.current_stream(), cuda.Stream()
        stream.wait_stream(outer)
        try:
            with cuda.stream(stream):
                graph = _capture(make, stream, cuda)
                return _replay_ms(graph, num_replays, cuda)
        except Exception:
            generator.graphsafe_set_state(before)
            raise
        finally:
            cuda.synchronize()


def _capture(make: Make, stream: Any, cuda: Any) -> Any:
    call, setup = make()
    for _ in range(NUM_WARMUP):
        if setup is not None:
            setup()
        call()
    if setup is not None:
        setup()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, stream=stream):
        call()
    return graph


def _replay_ms(graph: Any, num_replays: int, cuda: Any) -> float:
    """Return the median over samples of `num_replays` replays each, all queued before any of them is read."""
    starts = [cuda.Event(enable_timing=True) for _ in range(NUM_SAMPLES)]
    ends = [cuda.Event(enable_timing=True) for _ in range(NUM_SAMPLES)]
    for _ in range(NUM_WARMUP):
        graph.replay()
    for start, end in zip(starts, ends, strict=True):
        start.record()
        for _ in range(num_replays):
            graph.replay()
        end.record()
    cuda.synchronize()
    spans = [float(start.elapsed_time(end)) for start, end in zip(starts, ends, strict=True)]
    return statistics.median(spans) / num_replays
