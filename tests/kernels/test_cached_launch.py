"""Launches from a cache: compiled once, then given the same arguments in the kernel's order; kinds tell calls apart."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_zoo import BuildContext, build_attention
from attn_zoo.kernels import cached_launch
from attn_zoo.kernels.cached_launch import CachedLaunch, kind_of, places_of, remembered


class Kernel:
    """Stands for a kernel under `triton.jit`: notes how it is launched, first by itself, then as what it compiled."""

    arg_names: tuple[str, ...] = ("query", "query_strides", "length", "output", "size")

    def __init__(self, *, is_compiled: bool) -> None:
        self.is_compiled, self.launched = is_compiled, list[Any]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**named: Any) -> Any:
            self.launched.append((grid, named))
            return Compiled(self) if self.is_compiled else None

        return launch


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def run(self, *given: Any) -> None:
        *blocks, stream, function, metadata, of_launch, enter, leave = given[:9]
        assert (function, metadata, of_launch, enter, leave) == (self.function, self.packed_metadata, None, None, None)
        self.kernel.launched.append((*blocks, stream, given[9:]))


class Driver:
    """On whose devices the current streams are 7 more than their number."""

    def get_current_stream(self, device: int) -> int:
        return device + 7


def test_the_second_launch_goes_straight_to_what_was_compiled(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("triton.runtime").driver, "_active", Driver())
    kernel = Kernel(is_compiled=True)
    launch = CachedLaunch(kernel, (4, 2), {"size": 64, "length": 7, "query_strides": (1, 2), "num_warps": 4})
    first, second, out = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    launch(first, out)
    launch(second, None)
    rest = {"query_strides": (1, 2), "length": 7, "size": 64, "num_warps": 4}
    assert kernel.launched[0] == ((4, 2), {"query": first, "output": out, **rest})
    of_cpu = second.get_device()
    assert kernel.launched[1] == (4, 2, 1, of_cpu + 7, (second.data_ptr(), (1, 2), 7, 0, 64))


class OfCuda:
    """What Triton compiled for CUDA: two numbers of a tuple and a tensor are constants."""

    src = SimpleNamespace(
        signature={
            "query": "*bf16",
            "query_strides": ("i64", "constexpr", "i32"),
            "length": "i32",
            "mask": "constexpr",
            "scale": "fp32",
            "output": "*fp32",
            "is_causal": "i1",
            "size": "constexpr",
        }
    )
    metadata = SimpleNamespace(
        num_warps=8, launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0, profile_scratch_size=0
    )
    packed_metadata, function = (8, 1, 49152), 77

    def run(self, *_: Any) -> None:
        raise AssertionError("it goes to the driver")


class ForCuda(Kernel):
    """A kernel of which that is compiled; it notes its launches by Triton."""

    arg_names = tuple(OfCuda.src.signature)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**named: Any) -> Any:
            self.launched.append((grid, named))
            return OfCuda()

        return launch


REST = {"query_strides": (2**40, 1, -3), "length": 7, "scale": 0.125, "is_causal": True, "size": 64, "num_warps": 8}


def test_cuda_is_given_the_numbers_of_the_first_launch_and_the_addresses_of_this_one(monkeypatch):
    """As `cuLaunchKernel` reads them: where each argument lies, which are as wide as the kernel's types."""
    monkeypatch.setattr(pytest.importorskip("triton.runtime").driver, "_active", Driver())
    seen: list[Any] = []

    def driver(function: int, *given: Any) -> int:
        *shape, stream, places, extra = given
        kinds: list[Any] = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, ctypes.c_float]
        kinds += [ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p]  # the last two: scratch memory
        values = [kind.from_address(place).value for kind, place in zip(kinds, places, strict=False)]
        seen.append((function, shape, stream, extra, values))
        return 0

    monkeypatch.setattr(cached_launch, "_driver", lambda: driver)
    kernel = ForCuda(is_compiled=True)
    launch = CachedLaunch(kernel, (4, 2), REST)
    launch(torch.zeros(1), None, torch.zeros(1))
    kept = [[torch.zeros(1), torch.zeros(1)] for _ in range(2)]
    for query, output in kept:
        launch(query, None, output)
    assert len(kernel.launched) == 1
    for (query, output), (function, shape, stream, extra, values) in zip(kept, seen, strict=True):
        assert (function, shape, stream, extra) == (77, [4, 2, 1, 256, 1, 1, 49152], query.get_device() + 7, None)
        assert values == [query.data_ptr(), 2**40, -3, 7, 0.125, output.data_ptr(), True, None, None]


def test_threads_that_launch_the_same_kernel_do_not_exchange_their_addresses(monkeypatch):
    """One writes them while the other is between that and the driver."""
    monkeypatch.setattr(pytest.importorskip("triton.runtime").driver, "_active", Driver())
    seen: list[tuple[int, int]] = []

    def driver(*given: Any) -> int:
        query = ctypes.c_void_p.from_address(given[9][0])
        before = query.value
        time.sleep(0.002)  # who writes meanwhile is seen
        seen.append((before or 0, query.value or 0))
        return 0

    monkeypatch.setattr(cached_launch, "_driver", lambda: driver)
    launch = CachedLaunch(ForCuda(is_compiled=True), (4, 2), REST)
    launch(torch.zeros(1), None, torch.zeros(1))
    kept = [torch.zeros(1) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for query in kept * 5:
            pool.submit(launch, query, None, kept[0])
    assert len(seen) == 40
    assert all(before == after for before, after in seen)
    assert {before for before, _ in seen} == {query.data_ptr() for query in kept}


@pytest.mark.parametrize(
    "change", [{"launch_pdl": True}, {"global_scratch_size": 128}, {"launch_cooperative_grid": True}]
)
def test_what_wants_more_of_a_launch_than_a_grid_goes_through_triton(monkeypatch, change: dict[str, Any]):
    monkeypatch.setattr(pytest.importorskip("triton.runtime").driver, "_active", Driver())
    monkeypatch.setattr(cached_launch, "_driver", lambda: pytest.fail)
    compiled = OfCuda()
    compiled.metadata = SimpleNamespace(**(vars(OfCuda.metadata) | change))
    assert cached_launch._by_driver(compiled, (1, 1, 1), dict.fromkeys(ForCuda.arg_names)) is None
    compiled.metadata, compiled.packed_metadata = OfCuda.metadata, (8, 2, 0)  # a cluster of two
    assert cached_launch._by_driver(compiled, (1, 1, 1), dict.fromkeys(ForCuda.arg_names)) is None


def test_a_launch_that_the_driver_refuses_is_made_by_triton_which_says_why(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("triton.runtime").driver, "_active", Driver())
    monkeypatch.setattr(cached_launch, "_driver", lambda: lambda *_: 201)  # CUDA_ERROR_INVALID_CONTEXT
    kernel = ForCuda(is_compiled=True)
    launch = CachedLaunch(kernel, (4,), REST)
    for _ in range(2):
        launch(torch.zeros(1), None, torch.zeros(1))
    assert len(kernel.launched) == 2


def test_a_launch_that_was_made_before_is_seen_by_who_watches(monkeypatch):
    """Else a count of FLOPs would take a kernel that it cannot see into for nothing."""
    monkeypatch.setattr(pytest.importorskip("triton.runtime").driver, "_active", Driver())
    runtime = pytest.importorskip("triton.knobs").runtime
    kernel = Kernel(is_compiled=True)
    launch = CachedLaunch(kernel, (4,), {"size": 64, "length": 7, "query_strides": (1, 2)})
    tensors = torch.zeros(1), None
    launch(*tensors)
    runtime.launch_enter_hook.add(print)
    try:
        launch(*tensors)
    finally:
        runtime.launch_enter_hook.remove(print)
    launch(*tensors)
    by_triton, watched, straight = kernel.launched
    assert by_triton == watched
    assert straight[:3] == (4, 1, 1)


def test_the_interpreter_compiles_nothing_and_is_asked_each_time():
    kernel = Kernel(is_compiled=False)
    launch = CachedLaunch(kernel, (4,), {"size": 64, "length": 7, "query_strides": (1, 2)})
    for _ in range(2):
        launch(torch.zeros(1), None)
    assert [grid for grid, _ in kernel.launched] == [(4,), (4,)]
    with pytest.raises(ValueError, match="shorter"):  # a tensor is missing
        launch(torch.zeros(1))


def test_a_kind_is_all_that_a_kernel_is_compiled_for():
    base = torch.zeros(64)
    aligned, shifted = base[:32].view(4, 8), base[1:33].view(4, 8)
    kinds = [aligned, shifted, aligned.T, aligned[:2], aligned.double(), aligned.to("meta"), None]
    assert len({kind_of(x) for x in kinds}) == len(kinds)
    assert kind_of(base[4:36].view(4, 8)) == kind_of(aligned)  # 16 bytes further
    assert kind_of(aligned, None) != kind_of(None, aligned)


def test_who_comes_back_to_the_same_address_laid_out_otherwise_was_moved():
    base = torch.zeros(64)
    assert places_of(base, None) == places_of(base.view(64), None)
    places = [places_of(base.view(8, 8)), places_of(base.view(8, 8).T[:, :1]), places_of(base[1:]), places_of(None)]
    assert len(set(places)) == 4


def test_no_more_than_so_many_kinds_are_remembered(monkeypatch):
    monkeypatch.setattr(cached_launch, "MAX_KINDS", 2)
    kept: dict[Any, int] = {}
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return len(made)

    assert [remembered(kept, kind, make) for kind in ("a", "a", "b", "a", "c", "a")] == [1, 1, 2, 1, 3, 4]
    assert len(kept) == 2
    assert remembered(kept, None, make) != remembered(kept, None, make)  # no kind: nothing is kept


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bigbird", "local_window"])
def test_tensors_that_begin_anywhere_are_served_after_aligned_ones_on_the_gpu(name: str):
    build = BuildContext(embed_dim=128, num_heads=2, max_seq_len=1024)
    attention = build_attention(name, build, backend="triton").cuda()
    stores = [torch.randn(2 * 1024 * 64 + 8, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    plain = [x[:-8].view(1, 2, 1024, 64) for x in stores]
    wanted = attention(*plain)
    for shift in (1, 4):
        moved = [torch.empty_like(x)[shift : shift + plain[0].numel()].view_as(plain[0]).copy_(y)
                 for x, y in zip(stores, plain, strict=True)]  # fmt: skip
        torch.testing.assert_close(attention(*moved), wanted)
        assert torch.equal(attention(*plain), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bigbird", "linformer", "local_window"])
def test_calls_whose_like_was_made_before_go_to_the_driver_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch):
    """Forward and backward, which another thread launches; with results that are the same bit for bit."""
    build = BuildContext(embed_dim=128, num_heads=2, max_seq_len=1024)
    attention = build_attention(name, build).to("cuda", torch.bfloat16)
    inputs = [torch.randn(1, 2, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    learned = [*inputs, *attention.parameters()]
    grad = torch.randn_like(inputs[0])

    def call() -> list[torch.Tensor]:
        output = attention(*inputs)
        return [output, *torch.autograd.grad(output, learned, grad)]

    first, _ = call(), call()
    monkeypatch.setattr("triton.runtime.jit.JITFunction.run", lambda *_, **__: pytest.fail("Triton launches it"))
    monkeypatch.setattr("triton.backends.nvidia.driver.CudaLauncher.__call__", lambda *_: pytest.fail("so it does"))
    third = call()
    assert all(torch.equal(one, other) for one, other in zip(first, third, strict=True))
