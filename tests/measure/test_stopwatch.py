"""The GPU stopwatch against a stand-in for `torch.cuda`: order of work, units, and no waiting between samples."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from attn_zoo.measure.stopwatch import CudaStopwatch, stopwatch_for
from attn_zoo.measure.timing import Sampling


class FakeCuda:
    """A GPU with a queue: work advances `now_ms` when queued; events note it."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.log: list[str] = []

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return FakeEvent(self)

    def device(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        self.log.append("synchronize")

    def work(self, name: str, milliseconds: float) -> None:
        self.log.append(name)
        self.now_ms += milliseconds


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.at_ms = -1.0

    def record(self) -> None:
        self._cuda.log.append("event")
        self.at_ms = self._cuda.now_ms

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


def fake_stopwatch(cuda: FakeCuda) -> CudaStopwatch:
    return CudaStopwatch("cuda", lambda: cuda.work("flush", 0.07), cuda=cuda, clock=lambda: round(1e6 * cuda.now_ms))


def test_events_stand_tightly_around_the_call():
    cuda = FakeCuda()
    samples = fake_stopwatch(cuda).take(
        lambda: cuda.work("call", 0.5), lambda: cuda.work("setup", 9.0), count=2, loops=1
    )
    assert cuda.log == ["setup", "flush", "event", "call", "event"] * 2 + ["synchronize"]
    assert [sample.wall_s for sample in samples] == pytest.approx([0.5e-3, 0.5e-3])
    assert [sample.cpu_s for sample in samples] == [None, None]


def test_timing_on_gpu_takes_single_calls_in_batches():
    cuda = FakeCuda()
    timing = Sampling(lambda: cuda.work("call", 0.5), stopwatch=fake_stopwatch(cuda), max_samples=30).run()
    assert timing.samples_ms == pytest.approx([0.5] * 30)
    assert (timing.inner_loops, timing.timer, timing.process_cpu_ms) == (1, "cuda_event", None)
    assert timing.flags == ()
    num_waits = cuda.log.count("synchronize")
    assert num_waits == 2 * timing.num_warmup + 2  # 20 and 10 samples


def test_kernels_too_short_for_events_are_flagged():
    cuda = FakeCuda()
    timing = Sampling(lambda: cuda.work("call", 0.01), stopwatch=fake_stopwatch(cuda)).run()
    assert timing.flags == ("too_short",)


def test_loops_are_refused_where_the_cache_is_flushed():
    with pytest.raises(ValueError, match="loops"):
        fake_stopwatch(FakeCuda()).take(lambda: None, None, count=1, loops=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_time_grows_with_the_work():
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def work(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    one, four = (Sampling(lambda: work(count), device="cuda", budget_s=0.2).run() for count in (1, 4))  # noqa: B023
    assert 3 < four.median_ms / one.median_ms < 5
    assert one.timer == "cuda_event"
    assert stopwatch_for("cuda").name == "cuda_event"
