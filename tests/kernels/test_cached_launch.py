"""Launches from a cache: compiled once, then given the same arguments in the kernel's order; kinds tell calls apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_zoo import BuildContext, build_attention
from attn_zoo.kernels import cached_launch
from attn_zoo.kernels.cached_launch import CachedLaunch, kind_of, remembered


class Kernel:
    """Stands for a kernel under `triton.jit`: notes how it is launched, first by itself, then as what it compiled."""

    arg_names = ("query", "query_strides", "length", "output", "size")

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
    assert kernel.launched[1] == (4, 2, 1, of_cpu + 7, (second, (1, 2), 7, None, 64))


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
