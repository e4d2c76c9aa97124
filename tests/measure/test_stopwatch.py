"""The GPU stopwatch and replays of CUDA graphs against a stand-in for `torch.cuda`: order of work, streams, units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from attn_zoo.measure import capture
from attn_zoo.measure.passes import make_pass
from attn_zoo.measure.stopwatch import (
    FEW_SAMPLES,
    LONGEST_CAPTURED_MS,
    NUM_SAMPLES,
    NUM_WARMUP,
    PROBED,
    SEVERAL,
    CudaStopwatch,
    stopwatch_for,
    with_device_time,
    with_host_time,
)
from attn_zoo.measure.timing import Sampling
from attn_zoo.records import Timing


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
    timed = ["setup", "flush", "event", "call", "event"] * 2 + ["synchronize"]
    assert cuda.log == timed
    assert [sample.wall_s for sample in samples] == pytest.approx([0.5e-3, 0.5e-3])
    assert [sample.cpu_s for sample in samples] == [None, None]
    for expected_s, untimed in ((0.01, ["setup", "flush", "call"]), (0.1, [])):
        cuda.log.clear()
        watch, call = fake_stopwatch(cuda), lambda: cuda.work("call", 0.5)
        watch.take(call, lambda: cuda.work("setup", 9.0), count=2, loops=1, expected_s=expected_s)
        assert cuda.log == untimed + timed


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
def test_gpu_time_grows_with_the_work():
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def work(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    watch = stopwatch_for("cuda")
    one, four = (Sampling(lambda: work(count), stopwatch=watch, budget_s=0.2).run() for count in (1, 4))  # noqa: B023
    assert 3 < four.median_ms / one.median_ms < 5
    assert one.timer == watch.name == "cuda_event"


def single(median_ms: float, timer: str = "cuda_event") -> Timing:
    return Timing(
        samples_ms=(median_ms,),
        median_ms=median_ms,
        q1_ms=median_ms,
        q3_ms=median_ms,
        low_ms=median_ms,
        high_ms=median_ms,
        first_ms=median_ms,
        num_warmup=1,
        inner_loops=1,
        timer=timer,
    )


class FakeGenerator:
    def __init__(self) -> None:
        self.restored: list[str] = []

    def clone_state(self) -> str:
        return "before"

    def graphsafe_set_state(self, state: str) -> None:
        self.restored.append(state)


class FakeStream:
    def __init__(self, name: str, cuda: GraphCuda) -> None:
        self.name, self._cuda = name, cuda

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    """Takes 7 us to launch beside what its calls take."""

    def __init__(self, cuda: GraphCuda) -> None:
        self._cuda, self.num_calls = cuda, 0

    def replay(self) -> None:
        self._cuda.work("replay", 0.007 + self.num_calls * (self._cuda.replay_ms - 0.007))


class GraphCuda(FakeCuda):
    """A GPU whose capture records work without doing it, and fails as told; it never leaves its stream by itself."""

    def __init__(self, fails: bool = False, replay_ms: float = 0.06) -> None:
        super().__init__()
        self.fails, self.is_capturing, self.is_broken = fails, False, False
        self.num_streams, self.replay_ms = 0, replay_ms
        self.outer, self.default_generators = FakeStream("outer", self), [FakeGenerator()]
        self.stream_now = self.outer

    def Stream(self, _device: int) -> FakeStream:
        self.num_streams += 1
        return FakeStream("side", self)

    def current_stream(self) -> FakeStream:
        return self.stream_now

    def current_device(self) -> int:
        return 0

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    @contextmanager
    def graph(self, graph: FakeGraph, *, pool: object, stream: FakeStream) -> Iterator[None]:
        assert stream is self.stream_now
        assert pool is None
        self.is_capturing, self.graph_now = True, graph
        try:
            yield
        finally:
            self.is_capturing = False
            if self.is_broken:  # as torch does, before it makes the former stream the current one
                raise RuntimeError("operation failed due to a previous error during capture")

    def synchronize(self, *_device: object) -> None:
        super().synchronize(torch.device("cuda"))

    def work(self, name: str, milliseconds: float) -> None:
        if self.is_capturing:
            if self.fails:
                self.is_broken = True
                raise RuntimeError("operation not permitted when stream is capturing\nand more lines")
            self.log.append(f"captured {name}")
            self.graph_now.num_calls += 1
        else:
            super().work(name, milliseconds)


def make_for(cuda: GraphCuda) -> Any:
    def make() -> tuple[Any, Any]:
        stream = cuda.current_stream().name  # a backward runs on the stream of its forward
        cuda.log.append(f"made on {stream}")
        return lambda: cuda.work("call", 0.05), lambda: cuda.log.append("setup")

    return make


def split(timing: Timing, cuda: GraphCuda) -> Timing:
    make = make_for(cuda)
    hosted = with_host_time(timing, make, "cuda", cuda=cuda, clock=lambda: round(1e6 * cuda.now_ms))
    return with_device_time(hosted, make, "cuda", cuda=cuda)


@pytest.mark.parametrize("median_ms", [0.05, 20.0])
def test_a_call_is_launched_on_an_idle_device_then_captured_once_and_replayed(median_ms):
    cuda = GraphCuda()
    timing = split(single(median_ms), cuda)
    assert timing.graph_ms == pytest.approx(0.06)
    assert timing.host_ms == pytest.approx(0.05)  # the stand-in works while the host waits
    assert (timing.graph_reason, timing.median_ms, timing.flags) == ("", median_ms, ())
    host = ["made on outer", *["setup", "synchronize", "call"] * NUM_SAMPLES, "synchronize"]
    assert cuda.log[: len(host)] == host
    graph = cuda.log[len(host) :]
    assert graph[: 2 + 2 * NUM_WARMUP] == ["side waits for outer", "made on side", *["setup", "call"] * NUM_WARMUP]
    probe = ["event", *["replay"] * (PROBED if median_ms == 0.05 else 1), "event", "synchronize"]
    replays = 84  # 5 ms, whatever the single call takes
    assert graph[2 + 2 * NUM_WARMUP :] == [
        *("setup", "setup", "captured call"),
        *["replay"] * NUM_WARMUP,
        *probe,
        *["event", *["replay"] * replays, "event"] * NUM_SAMPLES,
        *("synchronize", "synchronize"),
    ]
    assert cuda.stream_now is cuda.outer
    assert cuda.default_generators[0].restored == []


def test_short_calls_are_captured_several_at_a_time():
    """Graphs of one of them would be replayed as fast as graphs are launched."""
    cuda = GraphCuda(replay_ms=0.012)
    timing = split(single(0.5), cuda)
    assert timing.graph_ms == pytest.approx(0.005 + 0.007 / SEVERAL)
    assert cuda.log.count("captured call") == 1 + SEVERAL
    again = split(single(0.5), cuda)
    assert again.graph_ms == pytest.approx(timing.graph_ms)
    assert cuda.num_streams == 1, "each stream keeps memory for ever"


def test_calls_of_a_second_have_a_host_time_and_a_reason():
    cuda = GraphCuda()
    timing = split(single(2 * LONGEST_CAPTURED_MS), cuda)
    assert (timing.graph_ms, timing.graph_reason) == (None, "calls of over 1000 ms are not captured")
    assert timing.host_ms == pytest.approx(0.05)
    assert cuda.log.count("call") == 1, "each takes seconds"


def test_calls_of_a_tenth_of_a_second_are_made_less_often():
    cuda = GraphCuda(replay_ms=500.0)
    assert split(single(500.0), cuda).graph_reason == ""
    assert cuda.log.count("call") == FEW_SAMPLES + 1
    assert cuda.log.count("replay") == FEW_SAMPLES + 2


def test_what_captures_itself_has_a_reason():
    cuda = GraphCuda()
    timing = with_device_time(single(0.05), make_for(cuda), "cuda", "a reason", cuda=cuda)
    assert (timing.graph_ms, timing.graph_reason) == (None, "a reason")
    assert cuda.log == []


def test_times_of_a_cpu_are_left_alone():
    cuda, timing = GraphCuda(), single(0.01, "perf_counter")
    assert split(timing, cuda) is timing
    assert cuda.log == []


class DyingCuda(GraphCuda):
    """Of which a replay is the end: whatever follows says so."""

    is_dead = False

    def work(self, name: str, milliseconds: float) -> None:
        super().work(name, milliseconds)
        self.is_dead |= name == "replay"

    def synchronize(self, *_device: object) -> None:
        super().synchronize()
        if self.is_dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_what_a_replay_broke_is_not_left_to_the_next_cell(monkeypatch):
    monkeypatch.setattr(capture, "_num_failed", 0)
    timing = split(single(0.05), DyingCuda())
    assert (timing.graph_ms, timing.median_ms) == (None, 0.05)
    assert timing.graph_reason == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert capture.num_failed() == 1


def test_a_capture_that_fails_is_a_reason_and_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(capture, "_num_failed", 0)
    cuda = GraphCuda(fails=True)
    assert split(single(0.05), GraphCuda()).graph_ms
    assert capture.num_failed() == 0
    timing = split(single(0.05), cuda)
    assert timing.graph_ms is None
    assert timing.graph_reason == "RuntimeError: operation not permitted when stream is capturing"
    assert (timing.median_ms, timing.flags) == (0.05, ())
    assert cuda.stream_now is cuda.outer
    assert cuda.default_generators[0].restored == ["before"], "later random numbers must not think of the capture"
    assert capture.num_failed() == 1


def test_passes_on_cpu_have_no_graph():
    leaf = torch.randn(4, requires_grad=True)
    call, setup = make_pass(lambda: leaf * 2, [leaf], "fwd_bwd")
    timing = Sampling(call, setup=setup, budget_s=0.01, stopwatch=stopwatch_for("cpu")).run()
    assert with_device_time(timing, lambda: make_pass(lambda: leaf * 2, [leaf], "fwd_bwd"), "cpu") is timing
    assert (timing.graph_ms, timing.graph_reason) == (None, "")


def test_records_of_before_have_no_graph_time():
    data = single(0.05).to_dict()
    del data["host_ms"], data["graph_ms"], data["graph_reason"]
    assert Timing.from_dict(data) == single(0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", ["infer", "fwd", "bwd", "fwd_bwd"])
def test_gpu_replays_beat_launches_in_every_pass(pass_):
    """Ten kernels of a microsecond each: a host that launches them one by one is slower than the GPU."""
    leaf = torch.randn(256, device="cuda", requires_grad=True)

    def forward() -> torch.Tensor:
        value = leaf
        for _ in range(10):
            value = value * 1.01
        return value

    call, setup = make_pass(forward, [leaf], pass_)
    for _ in range(3):
        if setup is not None:
            setup()
        call()
    del call, setup
    timing = with_host_time(single(0.09), lambda: make_pass(forward, [leaf], pass_), "cuda")
    timing = with_device_time(timing, lambda: make_pass(forward, [leaf], pass_), "cuda")
    assert timing.graph_reason == ""
    assert timing.graph_ms is not None
    assert 0.001 < timing.graph_ms < 0.09
    assert timing.host_ms is not None
    assert timing.host_ms > timing.graph_ms


@pytest.mark.gpu
def test_gpu_goes_on_after_a_capture_that_failed(monkeypatch):
    """Asking the GPU for a number cannot be captured; random numbers and new captures must still work afterwards."""
    monkeypatch.setattr(capture, "_num_failed", 0)  # other tests may capture
    noise = torch.randn(8, device="cuda")
    failed = with_device_time(single(0.05), lambda: (lambda: torch.rand(8, device="cuda").sum().item(), None), "cuda")
    assert failed.graph_ms is None
    assert "previous error" not in failed.graph_reason
    assert failed.graph_reason
    assert torch.isfinite(torch.randn(8, device="cuda")).all()
    again = with_device_time(single(0.05), lambda: (lambda: noise * 2, None), "cuda")
    assert again.graph_ms is not None
