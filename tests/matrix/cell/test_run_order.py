"""One cell in this process: right inputs, right numbers, every exception a status; and memory limits, for real."""

import errno
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.discovery import own_files
from attn_zoo.errors import AttnZooError, GateError, UnsupportedError
from attn_zoo.matrix.cell import run_order, trial
from attn_zoo.matrix.cell.conditions import Conditions
from attn_zoo.matrix.cell.outcomes import outcome_of, short_trace
from attn_zoo.matrix.cell.trial import _refuse_impossible
from attn_zoo.matrix.claimed_costs import Claims
from attn_zoo.matrix.kinds.scaling import CallWorkload, normal, padding_of
from attn_zoo.matrix.limits import available_bytes, resident_bytes
from attn_zoo.matrix.plan import source_digest as module
from attn_zoo.matrix.plan.source_digest import CALL_ROOMS, source_digest
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.measure import capture
from attn_zoo.measure.energy import Clocks
from attn_zoo.measure.stopwatch import HostStopwatch
from attn_zoo.records import Cell, Record
from attn_zoo.registry import variants
from attn_zoo.training import TrainingResult
from tests.conformance.broken import Broken, Softmax, registered
from tests.matrix.conftest import run_cell, run_cells_in_turns, tiny_plan

ROOT = Path(__file__).parents[3]


def cell(**changes) -> Cell:
    (item,) = tiny_plan(["full"], seq_len=[16]).cells
    return replace(item.cell, **changes)


def test_a_workload_computes_what_the_cell_says():
    wanted = cell(batch_size=2, num_heads=4, num_kv_heads=2, is_causal=True, has_padding=True, dtype="float64")
    work = CallWorkload(wanted)
    query, key, value = work.leaves[:3]
    assert query.shape == (2, 4, 16, 8)
    assert key.shape == value.shape == (2, 2, 16, 8)
    assert query.dtype == torch.float64
    mask = padding_of(2, 16, "cpu")
    assert mask.sum(-1).tolist() == [4, 0], "the last quarter of every second sequence"
    assert mask[0].tolist() == [False] * 12 + [True] * 4
    expected = softmax_attention(query, key, value, is_causal=True, key_padding_mask=mask)
    torch.testing.assert_close(work.forward(), expected)
    again = CallWorkload(wanted)
    assert torch.equal(again.leaves[0], query)
    assert not torch.equal(CallWorkload(replace(wanted, seed=1)).leaves[0], query)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it of inputs that are no leaves
def test_a_variant_that_compiles_for_each_shape_is_never_timed_as_it_is_written():
    """Beyond its limit, which the gate alone may reach, torch would go on without the compiler and without a word."""
    shapes: list[torch.Size] = []

    def backend(graph, examples):
        shapes.extend(x.shape for x in examples if isinstance(x, torch.Tensor))
        return graph.forward

    class Compiles(Softmax):
        def __init__(self, config, build):
            super().__init__(config, build)
            self.product = torch.compile(torch.matmul, backend=backend, dynamic=False)

        def attend(self, query, key, value, mask):
            scores = self.product(query, key.mT) * query.shape[-1] ** -0.5
            return self.product(self.weights(scores, self.keep(query, key, mask)), self.hide(value, mask))

    lengths = [16 + step for step in range(5)]
    torch.compiler.reset()
    with (
        torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=False),
        registered(Broken(cls=Compiles, check="")) as name,
    ):
        for item in tiny_plan([name], seq_len=lengths).cells:
            shapes.clear()
            record = run_cell(item.cell)
            assert record.status == "ok", record.reason
        assert torch._dynamo.config.recompile_limit > 3
        assert torch._dynamo.config.fail_on_recompile_limit_hit
        assert any(shape[-2:] == (20, 20) for shape in shapes), "the last length was compiled too"
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_the_same_for_any_number_of_threads(dtype, monkeypatch):
    monkeypatch.setattr("attn_zoo.matrix.kinds.scaling.BLOCK_LEN", 1000)
    drawn = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        drawn.append(normal((3, 7001), (5, 0), dtype))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    numbers = drawn[0].float()
    assert abs(float(numbers.mean())) < 0.02
    assert abs(float(numbers.std()) - 1) < 0.02
    blocks = numbers.flatten()[:21000].view(21, 1000)
    alike = torch.corrcoef(blocks) - torch.eye(21)
    assert float(alike.abs().max()) < 0.2, "every block has numbers of its own"
    assert not torch.equal(normal((3, 7001), (5, 1), dtype), drawn[0])
    assert not torch.equal(normal((3, 7001), (6, 0), dtype), drawn[0])


def test_passes_decide_mode_and_gradients_and_scopes_decide_inputs():
    infer = CallWorkload(cell(pass_="infer"))
    assert not infer.module.training
    assert not any(leaf.requires_grad for leaf in infer.leaves[:3])
    train = CallWorkload(cell(pass_="fwd_bwd"))
    assert train.module.training
    assert all(leaf.requires_grad for leaf in train.leaves)
    mixer = CallWorkload(cell(scope="mixer", num_heads=2))
    assert mixer.leaves[0].shape == (1, 16, 16)
    assert len(mixer.leaves) == 1 + 8, "hidden states, four projections with biases"
    assert mixer.forward().shape == (1, 16, 16)


@pytest.mark.parametrize("pass_", ["infer", "fwd", "bwd", "fwd_bwd"])
def test_every_pass_is_measured(pass_):
    record = run_cell(cell(pass_=pass_), budget_s=0.01, environment="abc", isolation="lane", attempt=2)
    assert record.status == "ok", record.reason + record.trace
    assert record.timing is not None
    assert record.timing.median_ms > 0
    assert record.memory is not None
    assert record.memory.peak_bytes is not None
    assert record.kernels != ()
    assert record.flops == 4 * 8 * 16 * 16
    assert (record.environment, record.isolation, record.attempt) == ("abc", "lane", 2)


def test_a_cell_has_the_threads_that_it_asks_for(monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert [run_cell(cell(threads=threads)).status for threads in (3, None)] == ["ok"] * 2
    assert asked == [3]


def test_counting_flops_can_be_left_out_and_agrees_with_the_formula():
    assert run_cell(cell(), budget_s=0.01, has_count=False).counted_flops is None
    counted = run_cell(cell(), budget_s=0.01)
    assert counted.counted_flops == counted.flops


class Untold(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (UnsupportedError("causal", "no causal form"), "unsupported", "no causal form"),
        (GateError("causality", "token 3 leaks"), "gate_failed", "causality: token 3 leaks"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "oom_device", "CUDA out of memory. Tried"),
        (RuntimeError("CUDA error: out of memory"), "oom_device", "CUDA error: out of memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "oom_device", "Triton Error [CUDA]: out of memory"),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
            "oom_device",
            "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        ),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
            "oom_device",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        ),
        (
            RuntimeError("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried"),
            "oom_device",
            "OutOfMemoryError: CUDA out of memory. Tried",
        ),
        (MemoryError(), "oom_host", "out of host memory: an allocation failed; 4 GiB were free when the cell began"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes."),
            "oom_host",
            "out of host memory: an allocation of 1 MiB failed; 4 GiB were free when the cell began",
        ),
        (
            RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904, 2]"),
            "oom_host",
            "out of host memory: a tensor of more bytes than can be counted; 4 GiB were free when the cell began",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom_host", "out of host memory: an allocation failed"),
        (SystemExit(3), "error", "the variant called sys.exit(3)"),
        (RuntimeError("CUDA error: device-side assert triggered"), "error", "RuntimeError: CUDA error: device-side"),
        (ValueError(), "error", "ValueError: (no message)"),
        (ValueError("x" * 5_000_000), "error", f"ValueError: {'x' * 2_000} ... (5,000,000 letters)"),
        (ValueError("x" * 5_000 + " CUDA out of memory"), "oom_device", "xxx"),
        (Untold(), "error", "Untold: (its message cannot be had: RuntimeError)"),
    ],
)
def test_every_exception_has_a_status_and_one_line(error, status, reason):
    found = outcome_of(error, 2**32)
    assert found[0] == status
    assert found[1].startswith(reason)
    assert "\n" not in found[1]


def test_float32_is_measured_with_all_its_digits(monkeypatch):
    """On a GPU convolutions and recurrent layers alone would be rounded: torch lets cuDNN, but not products."""
    found = []
    monkeypatch.setattr(run_order, "run_order", lambda *_: found.append(torch.backends.cudnn.allow_tf32))
    digest = source_digest(variants["full"], CALL_ROOMS, "cuda")
    on_gpu = cell(device="cuda", variant_digest=digest)  # for one of a CPU this process would be limited
    run_order.answer(WorkOrder(cells=(on_gpu,), budget_s=0.1), lambda _: None)
    assert found == [False]
    assert torch.backends.cudnn.allow_tf32


def test_what_the_run_has_read_a_worker_does_not_read_again(monkeypatch):
    on_gpu = cell(device="cuda", variant_digest=source_digest(variants["full"], CALL_ROOMS, "cuda"))
    known = dict(own_files.KNOWN_PROGRAMS)
    order = WorkOrder(cells=(on_gpu,), programs=known)
    own_files.KNOWN_PROGRAMS.clear()
    module._digest.cache_clear()  # as another process begins
    read: list[bytes] = []

    def statements(text: bytes) -> Iterator[str]:
        read.append(text)
        yield ""

    monkeypatch.setattr(own_files, "_statements", statements)
    monkeypatch.setattr(run_order, "run_order", lambda *_: [])
    try:
        assert run_order.answer(order, lambda _: None) == []
        assert not read
    finally:
        own_files.KNOWN_PROGRAMS.update(known)


def test_traces_keep_the_end():
    def deep(count):
        return deep(count - 1) if count else 1 / 0

    try:
        deep(100)
    except ZeroDivisionError as error:
        trace = short_trace(error)
    assert trace.endswith("ZeroDivisionError: division by zero")
    assert len(trace.splitlines()) <= 14


def test_a_cell_without_sizes_is_an_error_that_names_them():
    record = run_cell(replace(cell(), head_dim=None))
    assert (record.status, record.reason) == ("error", "ValueError: a scaling cell needs head_dim")


def test_ctrl_c_is_not_a_result(monkeypatch):
    def interrupt(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr("attn_zoo.matrix.kinds.scaling.CallWorkload", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell())


def test_an_accuracy_cell_is_a_training(monkeypatch, tmp_path):
    wanted = Cell(kind="accuracy", variant="full", task="listops", level="short", protocol="cpu-small")
    seen: dict[str, object] = {}

    def train(cell, **where):
        seen.update(cell=cell, **where)
        return TrainingResult(status="diverged", reason="loss is nan at step 3", kernels=("sdpa.math",), num_params=7)

    monkeypatch.setattr("attn_zoo.training.run_training", train)
    record = run_cell(wanted, data_dir=tmp_path, checkpoint_dir=tmp_path / "c", weights_dir=tmp_path / "w")
    weights = tmp_path / "w" / f"{wanted.key}.safetensors"
    assert callable(seen.pop("before_training"))  # the gate
    assert seen == {
        "cell": wanted,
        "data_dir": tmp_path,
        "checkpoint_dir": tmp_path / "c",
        "weights_path": weights,
        "after_evaluation": None,
    }
    assert (record.status, record.reason, record.num_params) == ("diverged", "loss is nan at step 3", 7)
    assert record.kernels == ("sdpa.math",)
    run_cell(wanted)
    assert seen["weights_path"] is None


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_under_the_memory_limit_an_allocation_fails_cleanly_and_small_ones_work():
    code = """
        import torch
        from unittest import mock
        from attn_zoo.matrix import limits
        from attn_zoo.matrix.cell.outcomes import outcome_of
        with mock.patch.object(limits, "available_bytes", lambda: 300 * 2**20):
            room = limits.limit_memory()
        small = torch.ones(10 * 2**20)
        try:
            torch.ones(100 * 2**20)
        except RuntimeError as error:
            print(outcome_of(error, room))
        print(small.sum().item())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "('oom_host', 'out of host memory: an allocation of 400 MiB failed; 285 MiB were free" in done.stdout
    assert "10485760.0" in done.stdout


def test_memory_of_this_machine_can_be_read():
    assert 0 < available_bytes() < 2**50
    assert resident_bytes(2**22 + 1) == 0


def test_without_a_gpu_a_cell_for_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    record = run_cell(cell(device="cuda"), budget_s=0.01)
    assert (record.status, record.reason) == ("unsupported", "no CUDA device here")


@pytest.mark.gpu
def test_a_cell_on_the_gpu_is_measured_with_clocks():
    record = run_cell(cell(device="cuda", dtype="bfloat16", seq_len=512, pass_="fwd_bwd"), budget_s=0.1)
    assert record.status == "ok", record.reason + record.trace
    assert record.timing is not None
    assert record.timing.timer == "cuda_event"
    assert record.memory is not None
    assert record.memory.reserved_bytes is not None


@pytest.mark.gpu
def test_out_of_memory_on_the_gpu_is_a_result():
    torch.cuda.set_per_process_memory_fraction(0.001)
    try:
        record = run_cell(cell(device="cuda", dtype="float32", seq_len=2**20, num_heads=8, head_dim=64))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert record.status == "oom_device", record.reason
    assert run_cell(cell(device="cuda"), budget_s=0.05).status == "ok"


def test_a_time_that_the_hardware_cannot_reach_is_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    on_gpu = replace(cell(), device="cuda", dtype="bfloat16")
    claims = Claims(flops=4 * 10**12)  # 4 ms at 1000 TFLOP/s, which is above the data sheet; 10 ms are fine
    _refuse_impossible(on_gpu, claims, 10.0)
    with pytest.raises(AttnZooError, match=r"rejected: .* is above the peak of NVIDIA H200"):
        _refuse_impossible(on_gpu, claims, 3.0)
    backward = replace(on_gpu, pass_="fwd_bwd")
    with pytest.raises(AttnZooError, match="rejected"):
        _refuse_impossible(backward, claims, 10.0)
    _refuse_impossible(replace(on_gpu, device="cpu"), claims, 3.0)
    padded = replace(on_gpu, has_padding=True)  # of which nine sixteenths may be all that is computed
    _refuse_impossible(padded, claims, 3.0)
    with pytest.raises(AttnZooError, match="rejected"):
        _refuse_impossible(padded, claims, 2.0)
    moving = Claims(flops=1, min_bytes=48 * 10**8)  # 1 ms at 4.8 TB/s, which is the data sheet's
    _refuse_impossible(on_gpu, moving, 1.1)
    for one, too_fast_ms in ((on_gpu, 0.9), (backward, 1.9), (padded, 0.5)):
        with pytest.raises(AttnZooError, match=r"rejected: .* is above the memory bandwidth of NVIDIA H200"):
            _refuse_impossible(one, moving, too_fast_ms)


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Times of the CPU pass for those of a GPU, whose host's time and time of replays come besides."""

    class Stopwatch(HostStopwatch):
        name = "cuda_event"

    monkeypatch.setattr(trial, "stopwatch_for", lambda _: Stopwatch())
    monkeypatch.setattr(trial, "with_host_time", lambda timing, *_: timing)


def test_the_time_from_a_graph_is_taken_after_the_samples_and_in_every_process(monkeypatch, as_on_gpu):
    calls = []

    def with_graph(timing, make, device, why_not):
        assert why_not == ""
        call, setup = make()
        calls.append((device, setup is not None, call().shape[-2]))
        return replace(timing, graph_ms=0.25)

    monkeypatch.setattr(trial, "with_device_time", with_graph)
    record = run_cell(cell(pass_="fwd_bwd"), budget_s=0.01)
    assert record.timing is not None, record.reason + record.trace
    assert record.timing.graph_ms == 0.25
    assert calls == [("cpu", True, 16)]
    (repeat,) = run_cells_in_turns([cell(pass_="fwd_bwd")], budget_s=0.01, is_repeat=True)
    assert repeat.timing is not None, repeat.reason + repeat.trace
    assert repeat.timing.graph_ms == 0.25
    assert calls == [("cpu", True, 16)] * 2


@pytest.mark.parametrize(("graph_ms", "flags"), [(0.25, ("throttled",)), (None, ())])
def test_what_disturbs_replays_is_a_flag_on_their_time_alone(monkeypatch, as_on_gpu, graph_ms, flags):
    met = [("loaded_host",), ("throttled",)]  # by the samples, and then by the replays

    class Planted(Conditions):
        def __exit__(self, *exc: object) -> None:
            self.flags = met.pop(0)

    monkeypatch.setattr(trial, "Conditions", Planted)
    monkeypatch.setattr(trial, "RETAKEN_S", (0.0, 0.0))
    monkeypatch.setattr(trial, "with_device_time", lambda timing, *_: replace(timing, graph_ms=graph_ms))
    record = run_cell(cell(), budget_s=0.01)
    assert record.timing is not None, record.reason + record.trace
    assert met == []
    assert record.timing.graph_flags == flags
    assert ("loaded_host" in record.timing.flags, "throttled" in record.timing.flags) == (True, False)


def test_a_cell_says_why_it_has_no_energy_where_it_was_asked_for():
    asked, other = run_cell(cell(), has_energy=True), run_cell(cell())
    assert (asked.status, asked.energy_joules, asked.energy_reason) == ("ok", None, "only that of GPUs is counted")
    assert other.energy_reason == ""
    data = other.to_dict()
    del data["energy_reason"]
    assert Record.from_dict(data) == other


def test_the_host_is_timed_before_memory_and_the_device_last(monkeypatch, as_on_gpu):
    """Measuring the memory of a training step ends its CUDA graph, and a capture that fails may spoil memory."""
    done: list[str] = []

    def host(timing, *_):
        done.append("host")
        return timing

    def device(timing, _make, _device, why_not):
        done.append(f"device {why_not}")
        return timing

    def weighed(self, memory=CallWorkload.memory):
        done.append("memory")
        return memory(self)

    monkeypatch.setattr(trial, "with_host_time", host)
    monkeypatch.setattr(trial, "with_device_time", device)
    monkeypatch.setattr(CallWorkload, "memory", weighed)
    for num_failed, why_not in ((0, ""), (1, "a capture before failed in this process")):
        monkeypatch.setattr(capture, "_num_failed", num_failed)
        assert run_cell(cell(), budget_s=0.01).status == "ok"
        assert done == ["host", "memory", f"device {why_not}"]
        done.clear()


def test_a_worker_that_times_calls_loads_neither_the_trainer_nor_triton():
    """Every process pays for what it loads."""
    code = """
        import sys
        import attn_zoo.matrix.cell.run_order
        from attn_zoo.registry import variants
        list(variants)
        print(sorted({"attn_zoo.training", "triton", "pandas", "scipy.stats"} & set(sys.modules)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_what_has_just_ended_on_the_gpu_is_waited_for_and_what_stays_is_a_flag(monkeypatch):
    steady = Clocks(sm_mhz=1000.0, temperature_c=None, power_w=None, throttles=())
    place = "attn_zoo.matrix.cell.conditions"
    monkeypatch.setattr(f"{place}.clocks", lambda _: steady)
    monkeypatch.setattr(f"{place}.SETTLING_S", 0.2)
    for counts, flags in (([2, 1, 0, 0], ()), ([1], ("other_gpu_process",))):
        left = iter(counts)
        monkeypatch.setattr(f"{place}.num_other_processes", lambda _, left=left, last=counts[-1]: next(left, last))
        with Conditions("cuda") as watched:
            pass
        assert [flag for flag in watched.flags if flag != "loaded_host"] == list(flags)
