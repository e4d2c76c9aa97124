"""Replayed calls: the same numbers as Python's, bit for bit, and Python again wherever a call is not alike.

Kernels run in Triton's interpreter. In the place of CUDA's driver stands a function that finds the kernel by its
number, reads the addresses that the C++ gave, and has the interpreter compute on what lies there.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import struct
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attn_zoo import BuildContext, build_attention
from attn_zoo.kernels import replay as replay_module
from attn_zoo.kernels import trace
from attn_zoo.kernels.blocks import layout
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention
from attn_zoo.kernels.blocks.call import Backend
from attn_zoo.kernels.cached_launch import CachedLaunch, DriverLaunch
from attn_zoo.kernels.compress.attend import attend_compressed
from attn_zoo.kernels.replay import prepare, replaying
from attn_zoo.measure.environment import capture_environment
from tests.kernels.blocks.test_gather import make_layout
from tests.kernels.interpreter import IS_INTERPRETING, mend_interpreter, run_interpreted

_KERNEL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
_NUMBER = 2**40 + 7

of_triton = [
    pytest.mark.triton,
    pytest.mark.skipif(not IS_INTERPRETING, reason="run by the first test, in a process of its own"),
]

if not IS_INTERPRETING:

    @pytest.mark.slow
    @pytest.mark.triton
    @pytest.mark.timeout(600)
    @pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
    def test_in_the_interpreter():
        run_interpreted(Path(__file__), "-k", "interpreted")


class Driver:
    """Launches by number, in the interpreter; counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches, self.is_broken, self.refusals = 0, False, list[int]()
        self._known: list[tuple[CachedLaunch, list[tuple[torch.dtype, int] | None]]] = []
        self._launch, self._stream = _KERNEL(self.launch), _STREAM(lambda *_: 1)
        real, known = CachedLaunch._launch, self._known

        def launch(kernel: CachedLaunch, *tensors: Tensor | None) -> None:
            with _disable_current_modes():  # the interpreter copies
                real(kernel, *tensors)
            sizes = [
                None
                if x is None
                else (x.dtype, int(x.untyped_storage().nbytes()) - int(x.storage_offset()) * x.element_size())
                for x in tensors
            ]
            known.append((kernel, sizes))
            shape, count = (*(*kernel._grid, 1, 1)[:3], 128, 1, 1, 64), len(tensors)
            numbers = struct.pack("q", _NUMBER) + bytes(8)
            kernel.by_driver = DriverLaunch(len(known), shape, count, numbers, (*range(count + 2),))

        self._real = real
        monkeypatch.setattr(CachedLaunch, "_launch", launch)

    @property
    def addresses(self) -> tuple[int, int]:
        first, second = (ctypes.cast(each, ctypes.c_void_p).value for each in (self._launch, self._stream))
        assert first is not None
        assert second is not None
        return first, second

    def launch(self, function: int, *given: Any) -> int:
        try:
            *shape, _, arguments, extra = given
            kernel, sizes = self._known[function - 1]
            words = [ctypes.c_uint64.from_address(arguments[i]).value for i in range(len(sizes) + 2)]
            assert words[len(sizes) :] == [_NUMBER, 0]
            assert (*shape[:3], extra) == (*(*kernel._grid, 1, 1)[:3], None)
            assert shape[3:] == [128, 1, 1, 64]
            tensors = [
                None if size is None else torch.frombuffer((ctypes.c_char * size[1]).from_address(word), dtype=size[0])
                for word, size in zip(words, sizes, strict=False)
            ]
            if self.refusals:
                return self.refusals.pop()
            self.launches += 1
            if not self.is_broken:
                self._real(kernel, *tensors)
        except BaseException:  # ctypes would swallow it
            traceback.print_exc()
            return 1
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    from attn_zoo.kernels.compress import attend, compression

    mend_interpreter(monkeypatch)
    real = compression.path_of_pair
    for module in (attend, compression):
        monkeypatch.setattr(module, "path_of_pair", lambda one, other, mask, _: real(one, other, mask, "triton"))
    monkeypatch.setattr(compression, "_is_small", lambda *_: False)
    made = Driver(monkeypatch)
    with replaying(addresses=made.addresses):
        yield made


# Three blocks: the fewest of which a layout hides some and has dense rows, listed rows and global columns.
LENGTH, WIDTH = 48, 16
LAYOUT = make_layout(LENGTH, num_window_blocks=1, num_global_blocks=1, num_random_blocks=0)


def leaves(*names: str, batch_size: int = 1) -> list[Tensor]:
    """Return query, key and value, of which those named want a gradient."""
    generator = torch.Generator().manual_seed(7)
    made = [torch.randn(batch_size, 1, LENGTH, WIDTH, generator=generator) for _ in range(3)]
    return [x.requires_grad_(name in names) for name, x in zip(("query", "key", "value"), made, strict=True)]


def apart(x: Tensor) -> Tensor:
    """Return the same numbers in rows that lie twice as far from each other."""
    return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]


def attend(given: list[Tensor], padding: Tensor | None = None) -> Tensor:
    query, key, value = given
    return block_sparse_attention(query, key, value, LAYOUT, key_padding_mask=padding)


def outcome(given: list[Tensor], padding: Tensor | None = None, grad: Tensor | None = None) -> list[Tensor]:
    """Return the output and the gradients that are wanted."""
    output = attend(given, padding)
    wanted = [x for x in given if x.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return [output]
    grad = torch.linspace(-1, 1, output.numel()).view_as(output) if grad is None else grad
    return [output.detach(), *torch.autograd.grad(output, wanted, grad)]


def are_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def learnt(driver: Driver, given: list[Tensor], padding: Tensor | None = None) -> list[Tensor]:
    """Make a call twice, which compiles and records; return what Python computed."""
    wanted = outcome(given, padding)
    assert driver.launches == 0
    assert are_same(outcome(given, padding), wanted)
    assert driver.launches > 0  # the program ran beside what it was recorded from
    driver.launches = 0
    return wanted


@pytest.mark.parametrize(
    ("names", "has_padding"), [(("query", "key", "value"), True), (("value",), False), ((), False)]
)
def test_interpreted_blocks_are_replayed_from_the_third_call_on(driver, names: tuple[str, ...], has_padding: bool):
    padding = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [LENGTH - 20]]) if has_padding else None
    given = leaves(*names, batch_size=2)
    wanted = learnt(driver, given, padding)
    for _ in range(2):
        driver.launches = 0
        assert are_same(outcome(given, padding), wanted)
        assert driver.launches == (5 if names else 2)
    # Other numbers at other places, by the same program.
    others = [(2 * x).detach().requires_grad_(x.requires_grad) for x in given]
    found = outcome(others, padding)
    assert not are_same(found, wanted)
    with trace.recording() as paths:
        assert are_same(outcome(others, padding), found)
    assert paths == ["block_sparse.triton", "replayed"]


def test_interpreted_calls_are_learnt_while_somebody_records(driver):
    given = leaves("query", "key", "value")
    wanted = outcome(given)
    with trace.recording() as outer, trace.recording() as paths:
        for _ in range(3):
            assert are_same(outcome(given), wanted)
    assert paths == outer
    assert "replayed" in paths


def test_interpreted_calls_that_are_not_alike_are_not_replayed(driver):
    given = leaves("query", "key", "value")
    wanted = learnt(driver, given)
    moved = [apart(x.detach()).requires_grad_() for x in given]
    shifted = [torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view_as(x).requires_grad_() for x in given]
    for others in (moved, shifted):
        assert are_same(outcome(others), wanted)
        assert driver.launches == 0
    with torch.no_grad():
        assert are_same(outcome(given), wanted[:1])
    query, key, value = given
    for _ in range(3):
        block_sparse_attention(query, key, value, LAYOUT, dropout_p=0.5)
    assert driver.launches == 0


class Sub(Tensor):
    """Plain memory, but maybe of another meaning."""


def test_interpreted_tensors_of_other_classes_stay_in_python(driver):
    given = leaves("query", "key", "value")
    wanted = learnt(driver, given)
    for _ in range(3):
        others = [x.detach().as_subclass(Sub).requires_grad_() for x in given]
        assert are_same(outcome(others), wanted)
    assert driver.launches == 0


def test_interpreted_who_watches_sees_python(driver, monkeypatch):
    given = leaves("query", "key", "value")
    wanted = learnt(driver, given)
    with FlopCounterMode(display=False):
        assert are_same(outcome(given), wanted)
    runtime = pytest.importorskip("triton.knobs").runtime
    runtime.launch_enter_hook.add(print)
    try:
        attend(given)
    finally:
        runtime.launch_enter_hook.remove(print)
    with torch.autograd.forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        attend([torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in given])
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_get_tracing_state", object)  # of torch.jit.trace
        assert are_same(outcome(given), wanted)
    assert driver.launches == 0
    assert are_same(outcome(given), wanted)
    assert driver.launches == 5


def test_interpreted_gradients_and_saved_tensors_may_lie_anyhow(driver):
    given = leaves("query", "key", "value", batch_size=2)
    grad = torch.linspace(-1, 1, given[0].numel()).view_as(given[0])
    wanted = learnt(driver, given)
    for num_launches in (2 + 3, 5):  # the first learns how gradients are computed where theirs lies so
        driver.launches = 0
        assert are_same(outcome(given, grad=apart(grad)), wanted)
        assert driver.launches == num_launches
    driver.launches = 0
    expanded = torch.ones(()).expand_as(grad)
    assert are_same(outcome(given, grad=expanded), outcome(given, grad=expanded.contiguous()))
    assert driver.launches == 5 + 5
    driver.launches = 0
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.mT.contiguous(), lambda x: x.mT):
        assert are_same(outcome(given), wanted)
    assert driver.launches == 5
    query, key, value = given
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.mT.contiguous(), lambda x: x.mT):
        for _ in range(3):  # one key for all of the batch, as for all heads of a group
            output = attend([query, key[:1].expand_as(key), value])
            found = torch.autograd.grad(output, given, grad)
    apart_from_it = attend([query, key[:1].expand_as(key).contiguous(), value])
    assert are_same([*found], [*torch.autograd.grad(apart_from_it, given, grad)])
    output = attend(given)
    given[1].detach().mul_(2)  # as torch tells of any operator: what backward needs was changed
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(grad)


def test_interpreted_gradients_that_always_lie_otherwise_are_learnt_so_many_times(driver, monkeypatch):
    """Such as slices of what is put together with other things, of ever other lengths."""
    monkeypatch.setattr(replay_module, "_MOST_LAYOUTS", 2)
    given = leaves("query", "key", "value")
    grad = torch.linspace(-1, 1, given[0].numel()).view_as(given[0])
    wanted = learnt(driver, given)
    for num_copies, num_launches in ((2, 2 + 3), (3, 2), (2, 5), (4, 2)):
        driver.launches = 0
        assert are_same(outcome(given, grad=torch.cat([grad] * num_copies, dim=-1)[..., :WIDTH]), wanted)
        assert driver.launches == num_launches


def test_interpreted_gradients_of_a_sum_are_replayed(driver):
    given = leaves("query", "key", "value")
    found = []
    for _ in range(3):
        driver.launches = 0
        found.append([*torch.autograd.grad(attend(given).sum(), given)])
    assert driver.launches == 5
    assert are_same(found[0], found[2])


def test_interpreted_calls_without_a_graph_and_calls_made_again_in_backward(driver):
    given = leaves("query", "key", "value")
    wanted = learnt(driver, given)
    again = checkpoint(lambda *tensors: attend([*tensors]), *given, use_reentrant=False)
    grad = torch.linspace(-1, 1, again.numel()).view_as(again)
    assert are_same([again.detach(), *torch.autograd.grad(again, given, grad)], wanted)
    assert driver.launches == 2 + 5
    for mode in (torch.no_grad, torch.no_grad, torch.inference_mode):
        with mode():
            driver.launches = 0
            output = attend(given)
        assert torch.equal(output, wanted[0])
        assert not output.requires_grad
    assert driver.launches == 2
    assert output.is_inference()


def test_interpreted_inference_mode_learns_nothing_and_spends_no_try(driver):
    """A watch sees torch's public attention whole there, not the kernel that it takes."""
    given = leaves("query", "key", "value")
    for mode, counts in ((torch.inference_mode, [0] * 6), (torch.no_grad, [0, 4, 2]), (torch.inference_mode, [2])):
        for count in counts:
            driver.launches = 0
            with mode():
                attend(given)
            assert driver.launches == count


def test_interpreted_of_more_kinds_than_are_kept_one_warning_tells(driver, monkeypatch, caplog):
    monkeypatch.setattr(replay_module, "_MOST_CALLS", 1)
    replay_module._warn_of_many.cache_clear()
    wanted = learnt(driver, given := leaves("query", "key", "value"))
    for _ in range(3):
        with torch.no_grad():
            attend(given)
    assert driver.launches == 0
    assert are_same(outcome(given), wanted)
    assert driver.launches == 5
    assert [record.message for record in caplog.records].count(
        "attn_zoo: 1 kinds of calls are replayed; those of other kinds stay slower, through Python"
    ) == 1


def test_interpreted_nothing_is_replayed_that_was_not_checked(driver):
    """A checkpoint ends the call that it makes again as soon as that has saved what it looks for."""
    given = leaves("query", "key", "value")
    grad = torch.linspace(-1, 1, given[0].numel()).view_as(given[0])
    wanted = outcome(given)
    replay_module._tries.clear()
    driver.is_broken = True
    for _ in range(3):
        again = checkpoint(lambda *tensors: attend([*tensors]), *given, use_reentrant=False)
        assert are_same([again.detach(), *torch.autograd.grad(again, given, grad)], wanted)
    assert are_same(outcome(given), wanted)
    assert driver.launches > 0


def test_interpreted_too_little_memory_to_learn_is_no_error(driver, monkeypatch):
    given = leaves("query", "key", "value")
    wanted = outcome(given)

    def out_of_memory(*_: object) -> bool:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(replay_module, "_are_same", out_of_memory)
        for _ in range(2):
            assert are_same(outcome(given), wanted)
    assert are_same(outcome(given), wanted)  # learns it
    driver.launches = 0
    assert are_same(outcome(given), wanted)
    assert driver.launches == 5


def test_interpreted_an_error_of_what_is_learnt_is_said_and_python_goes_on(driver, caplog):
    given = leaves("query", "key", "value")
    wanted = outcome(given)
    driver.refusals = [1, 1]
    assert are_same(outcome(given), wanted)
    assert "a call was not learnt, so it is made by Python: cuLaunchKernel: error 1" in caplog.text


def test_interpreted_a_pattern_that_is_made_anew_is_known(driver):
    given = leaves("query", "key", "value")
    wanted = learnt(driver, given)
    layout._kept_pattern.cache_clear()
    assert are_same(outcome(given), wanted)
    assert driver.launches == 5


def test_interpreted_a_backend_that_was_named_is_not_replayed_where_none_is(driver):
    """Exact attention serves a layout that hides nothing, unless our kernels are asked for."""
    query, key, value = leaves("query", "key", "value")
    whole = make_layout(LENGTH, num_window_blocks=2 * LENGTH - 1)
    for named, paths in (("triton", ["block_sparse.triton", "replayed"]), ("auto", ["sdpa.flash"])):
        backend = cast(Backend, named)
        for _ in range(3):
            with trace.recording() as found:
                block_sparse_attention(query, key, value, whole, backend=backend)
        assert found == paths


def test_interpreted_who_watches_backward_alone_sees_python(driver):
    given = leaves("query", "key", "value")
    wanted = learnt(driver, given)
    grad = apart(torch.linspace(-1, 1, given[0].numel()).view_as(given[0]))
    output = attend(given)
    driver.launches = 0
    runtime = pytest.importorskip("triton.knobs").runtime
    runtime.launch_enter_hook.add(print)
    try:
        found = torch.autograd.grad(output, given, grad, retain_graph=True)
    finally:
        runtime.launch_enter_hook.remove(print)
    assert are_same([output.detach(), *found], wanted)
    for _ in range(5):
        with FlopCounterMode(display=False):
            found = torch.autograd.grad(output, given, grad, retain_graph=True)
        assert are_same([output.detach(), *found], wanted)
    assert driver.launches == 0
    for num_launches in (3, 6):  # those were no tries to learn it
        assert are_same([output.detach(), *torch.autograd.grad(output, given, grad, retain_graph=True)], wanted)
        assert driver.launches == num_launches


class NoGradient(torch.autograd.Function):
    """What follows says nothing of its gradient."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *__: Tensor) -> None:
        return None


def test_interpreted_no_gradient_of_the_output_gives_zeros_however_it_is_computed(driver):
    for _ in range(3):
        given = leaves("query", "key", "value")
        NoGradient.apply(attend(given)).sum().backward()
        assert all(x.grad is not None and not x.grad.any() for x in given)
    assert driver.launches > 0


def test_interpreted_second_derivatives_are_refused(driver):
    given = leaves("query", "key", "value")
    learnt(driver, given)
    (of_query,) = torch.autograd.grad(attend(given).square().sum(), given[:1], create_graph=True)
    assert of_query.requires_grad
    with pytest.raises(RuntimeError, match="expected one derivative; got a second"):
        of_query.sum().backward()
    assert driver.launches == 5


def test_interpreted_a_program_that_computes_otherwise_is_given_up(driver):
    given = leaves("query", "key", "value")
    wanted = outcome(given)
    driver.is_broken = True
    for _ in range(6):
        assert are_same(outcome(given), wanted)
    tried = driver.launches
    assert 0 < tried <= 20  # four times: then Python keeps it
    driver.is_broken = False
    assert are_same(outcome(given), wanted)
    assert driver.launches == tried


def test_interpreted_a_thread_without_a_context_gets_one_and_other_errors_are_told(driver):
    given = leaves("query")
    wanted = learnt(driver, given)
    driver.refusals = [201]
    assert are_same(outcome(given), wanted)
    driver.refusals = [1, 1]
    with pytest.raises(RuntimeError, match="cuLaunchKernel: error 1 in a replayed call"):
        outcome(given)


@pytest.mark.parametrize(
    "compute", ["drawn", "added", "given by nobody", "kept in another place", "saved as integers", "launched"]
)
def test_interpreted_what_is_more_than_launches_is_not_learnt(driver, compute: str):
    kernel, token, kept = CachedLaunch(Copy(), (1,), {}), object(), torch.zeros(4)

    def forward() -> tuple[Tensor, list[Tensor]]:
        output = torch.rand_like(given) if compute == "drawn" else torch.empty_like(given)
        reads = {
            "added": lambda: given + 1,
            "given by nobody": lambda: kept,
            "kept in another place": lambda: given[2:],
        }
        kernel(reads.get(compute, lambda: given)(), output)
        return output, [given.view(torch.int32)] if compute == "saved as integers" else []

    given = torch.ones(4)
    for _ in range(2):
        found = replay_module.learn(token, "kind", [given], forward, lambda saved, grad: (grad,))
    assert (found is not None) is (compute == "launched")
    assert (replay_module.replay(token, given) is not None) is (compute == "launched")


def test_interpreted_a_program_that_is_given_up_keeps_no_tables(driver):
    kernel, token, given, table = CachedLaunch(Copy(), (1,), {}), object(), torch.ones(4), torch.zeros(4)
    kept = weakref.ref(table)

    def forward(table: Tensor) -> tuple[Tensor, list[Tensor]]:
        output = torch.empty_like(given)
        kernel(table, output)
        return output, []

    driver.is_broken = True
    for _ in range(2):
        learnt = partial(forward, table)
        assert replay_module.learn(token, "kind", [given], learnt, lambda saved, grad: (grad,), [table]) is None
    assert driver.launches == 1
    del table, learnt
    gc.collect()
    assert kept() is None


def test_interpreted_an_operator_keeps_what_it_is_given_by_name(driver):
    given, token = [torch.randn(1, 2, 8, 16) for _ in range(3)], object()

    def forward() -> tuple[Tensor, list[Tensor]]:
        output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, False, scale=0.3)
        return output, []

    for _ in range(2):
        replay_module.learn(token, "kind", given, forward, lambda saved, grad: (grad, None, None))
    found = replay_module.replay(token, *given)
    assert found is not None
    assert torch.equal(found, forward()[0])
    query, key, value = given
    assert not torch.allclose(found, torch.nn.functional.scaled_dot_product_attention(query, key, value))


def test_interpreted_an_operator_that_is_given_a_part_is_not_learnt(driver):
    """It begins where the whole does, which a replay would give it; of zeros the result is the same."""
    given, token = [torch.zeros(1, 2, 8, 16) for _ in range(3)], object()

    def forward() -> tuple[Tensor, list[Tensor]]:
        query, *pair = given
        output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, *[x[:, :, :4] for x in pair])
        return output, []

    for _ in range(2):
        found = replay_module.learn(token, "kind", given, forward, lambda saved, grad: (grad, None, None))
        assert found is None


def test_interpreted_other_threads_run_while_a_launch_waits(monkeypatch):
    """A full queue may wait for what another thread is to launch. Here a launch sleeps as long as its number says."""
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    assert sleep is not None

    def launch(kernel: CachedLaunch, *_: Tensor) -> None:
        kernel.by_driver = DriverLaunch(400_000, (1, 1, 1, 32, 1, 1, 0), 2, bytes(8), (0, 1))

    def forward() -> tuple[Tensor, list[Tensor]]:
        output = torch.empty_like(given)
        kernel(given, output)
        return output, []

    monkeypatch.setattr(CachedLaunch, "_launch", launch)
    monkeypatch.setattr(replay_module, "_are_same", lambda *_: True)
    kernel, token, given = CachedLaunch(Copy(), (1,), {}), object(), torch.ones(4)
    with replaying(addresses=(sleep, sleep)), ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            replay_module.learn(token, "kind", [given], forward, lambda saved, grad: (grad,))
        call, num_turns = pool.submit(replay_module.replay, token, given), 0
        while not call.done():
            num_turns += 1
            time.sleep(0.001)
        assert call.result() is not None
    assert num_turns > 20


def test_interpreted_an_error_of_python_in_backward_stays_what_it_is(driver):
    kernel, token = CachedLaunch(Copy(), (1,), {}), object()
    given = torch.ones(4, requires_grad=True)

    def forward() -> tuple[Tensor, list[Tensor]]:
        output = torch.empty_like(given)
        kernel(given, output)
        return output, []

    def backward(*_: object) -> tuple[Tensor]:
        raise torch.OutOfMemoryError("of this device")

    for _ in range(2):
        found = replay_module.learn(token, "kind", [given], forward, backward)
    assert found is not None
    with pytest.raises(torch.OutOfMemoryError, match="of this device"):
        found.sum().backward()


class Copy:
    """A kernel of two tensors."""

    arg_names = ("given", "output")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(given: Tensor, output: Tensor) -> None:
            output[: len(given)].copy_(given[: len(output)])

        return launch


@pytest.mark.parametrize(
    ("wants", "shares", "has_mask"),
    [("all", False, True), ("all", True, False), ("tokens", False, False), ("matrices", True, True), ("", True, False)],
)
def test_interpreted_compressed_keys_are_replayed(driver, wants: str, shares: bool, has_mask: bool):
    generator = torch.Generator().manual_seed(3)
    length = 72

    def leaf(*shape: int, kind: str) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).half().requires_grad_(wants in ("all", kind))

    tokens = [leaf(2, 1, length, 64, kind="tokens") for _ in range(3)]
    learned = [leaf(1, length + 8, 16, kind="matrices") for _ in range(1 if shares else 2)]
    matrices = [nn.Parameter(x.detach(), x.requires_grad) for x in learned]
    mask = torch.arange(length) >= torch.tensor([[length], [length - 20]]) if has_mask else None
    grad = torch.randn(2, 1, length, 64, generator=generator).half()

    def call() -> list[Tensor]:
        output = attend_compressed(
            tokens[0], (tokens[1], tokens[2]), (matrices[0], matrices[-1]), key_padding_mask=mask
        )
        leaves = [x for x in (*tokens, *matrices) if x.requires_grad]
        return [output.detach(), *(torch.autograd.grad(output, leaves, grad) if leaves else ())]

    wanted = call()
    for _ in range(3):
        driver.launches = 0
        assert are_same(call(), wanted)
    assert driver.launches >= {"all": 4, "tokens": 3, "matrices": 3, "": 1}[wants]
    driver.launches, tokens[2] = 0, tokens[1]
    call()
    assert driver.launches == 0, "what is both key and value is compressed once"


def test_interpreted_a_backward_pass_that_is_the_first_of_its_sizes_is_learnt_at_once(driver):
    """What it works out of sizes, on the device of no memory, is no part of what is replayed."""
    query, key, value = (torch.randn(1, 1, 88, 64).half().requires_grad_() for _ in range(3))
    matrix = nn.Parameter(torch.randn(1, 88, 16).half())
    for _ in range(3):
        output = attend_compressed(query, (key, value), (matrix, matrix))
    for _ in range(2):  # beside Python, and in its place
        driver.launches = 0
        output.sum().backward(retain_graph=True)
        assert driver.launches == 4


def test_without_cuda_calls_stay_in_python_and_say_why(monkeypatch):
    monkeypatch.setattr(replay_module, "_native", None)
    monkeypatch.setattr(replay_module, "_why_not", "")
    if not torch.cuda.is_available():
        assert "not a CUDA build" in str(prepare())
    monkeypatch.setenv("ATTN_ZOO_REPLAY", "0")
    assert prepare(addresses=(1, 1)) == "ATTN_ZOO_REPLAY is 0"
    assert replay_module.replay(LAYOUT, torch.zeros(1)) is None


def test_a_compiler_that_is_missing_or_fails_is_named(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(replay_module, "_native", None)
    monkeypatch.setattr(replay_module, "_why_not", "")
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "attn_zoo"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    later = "not compiled on this machine yet; the first run on its GPU does it"
    assert prepare(addresses=(1, 1), compiles=False) == later
    assert replay_module._why_not == ""  # so a call may still have it compiled
    assert "no C++ compiler" in str(prepare(addresses=(1, 1)))
    assert "attn_zoo: calls are not replayed, so the host takes longer for each: no C++" in caplog.messages.pop()
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 'replay.cpp:1: error: no such header' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    assert str(prepare(addresses=(1, 1))).endswith("failed: replay.cpp:1: error: no such header")
    assert not list((tmp_path / "attn_zoo").iterdir())
    compiling, failed = caplog.messages[-2:]
    assert compiling == "attn_zoo: compiling what replays a GPU's calls, once on this machine: half a minute ..."
    assert failed.endswith("error: no such header")


def test_threads_that_compile_at_once_do_not_disturb_each_other(monkeypatch, tmp_path):
    slow = tmp_path / "slow"
    script = 'while [ "$1" != -o ]; do shift; done', 'echo begun > "$2"', "sleep 0.5", 'echo ended >> "$2"'
    slow.write_text("\n".join(["#!/bin/sh", *script, ""]))
    slow.chmod(0o755)
    target = tmp_path / "cache" / "module.so"
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda _: replay_module._compile_by(str(slow), target, lambda _: None), range(2))]
    assert found == [None, None]
    assert target.read_text() == "begun\nended\n"
    assert [*target.parent.iterdir()] == [target]
    before = target.stat().st_ino  # who has loaded it from a shared home would miss the file
    assert replay_module._compile_by(str(slow), target, lambda _: None) is None
    assert target.stat().st_ino == before


def test_a_program_of_ones_own_compiles_when_a_call_comes_again(monkeypatch):
    """Not for the first call of a kind, and only once where it cannot be."""
    tried: list[Path] = []

    def compile_(place: Path, _: object) -> str:
        tried.append(place)
        return "no room"

    monkeypatch.setattr(replay_module, "_native", None)
    monkeypatch.setattr(replay_module, "_why_not", "")
    monkeypatch.setattr(replay_module, "_found", lambda _: (1, 1))
    monkeypatch.setattr(replay_module, "_place", lambda: Path("nowhere"))
    monkeypatch.setattr(replay_module, "_compile", compile_)
    token, given = object(), torch.ones(2)
    for num_tried in (0, 1, 1, 1):
        found = replay_module.learn(token, "kind", [given], lambda: (given, []), lambda saved, grad: (grad,))
        assert found is None
        assert len(tried) == num_tried
    assert replay_module._why_not == "no room"


def test_a_run_compiles_before_it_measures_or_says_why_not(monkeypatch):
    said: list[str] = []

    def load(_: object, *, compiles: bool, say: Callable[[str], object]) -> None:
        assert compiles
        say("compiling")
        monkeypatch.setattr(replay_module, "_native", object())

    monkeypatch.setattr(replay_module, "_native", None)
    monkeypatch.setattr(replay_module, "_why_not", "")
    monkeypatch.setenv("ATTN_ZOO_REPLAY", "")  # so that whatever is set from here on is undone
    monkeypatch.delenv("ATTN_ZOO_REPLAY")
    monkeypatch.setattr(replay_module, "_found", lambda _: (1, 1))
    monkeypatch.setattr(replay_module, "_load", load)
    for _ in range(2):
        replay_module.prepare_run(said.append)
        assert said == ["compiling"]
    assert "ATTN_ZOO_REPLAY" not in os.environ
    monkeypatch.setattr(replay_module, "_found", lambda _: "no driver")
    replay_module.prepare_run(said.append)
    assert said[1:] == ["calls are not replayed, so the host takes longer for each: no driver"]
    assert os.environ["ATTN_ZOO_REPLAY"] == "0"
    assert capture_environment().variables["ATTN_ZOO_REPLAY"] == "0"


def test_what_was_compiled_elsewhere_and_cannot_be_loaded_is_said(monkeypatch, tmp_path):
    """As in a home that nodes of a cluster share: else some processes of a run would replay."""
    said: list[str] = []
    monkeypatch.setattr(replay_module, "_native", None)
    monkeypatch.setattr(replay_module, "_why_not", "")
    monkeypatch.setenv("ATTN_ZOO_REPLAY", "")  # so that whatever is set from here on is undone
    monkeypatch.delenv("ATTN_ZOO_REPLAY")
    monkeypatch.setattr(replay_module, "_found", lambda _: (1, 1))
    monkeypatch.setattr(replay_module, "_place", lambda: tmp_path / "module.so")
    (tmp_path / "module.so").write_text("of another machine")
    replay_module.prepare_run(said.append)
    (line,) = said
    assert "so the host takes longer for each: what is compiled cannot be loaded" in line
    assert os.environ["ATTN_ZOO_REPLAY"] == "0"


def test_to_record_a_call_does_not_load_the_compiler():
    """Which takes seconds, and would be a part of a time."""
    pytest.importorskip("triton")
    script = """
import sys, torch
from attn_zoo.kernels.replay import _Recording
given = torch.ones(2)
recording = _Recording([given], [])
recording.run(lambda: torch.empty_like(given))
assert recording.steps, recording.steps
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["bigbird", "linformer", "local_window"])
def test_calls_are_replayed_with_the_same_bits_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch):
    """From the third on, of a process's first from the fourth: in another stream and in a captured graph too."""
    assert prepare() is None
    build = BuildContext(embed_dim=128, num_heads=2, max_seq_len=1024)
    attention = build_attention(name, build).to("cuda", torch.bfloat16)
    inputs = [torch.randn(1, 2, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    learned = [*inputs, *attention.parameters()]
    grad = torch.randn_like(inputs[0])

    def call() -> list[Tensor]:
        output = attention(*inputs)
        return [output.detach(), *torch.autograd.grad(output, learned, grad)]

    # Of a process's first call of SDPA torch settles which kernel it prefers: a later one is of another kind.
    call()
    first, second = call(), call()
    monkeypatch.setattr(CachedLaunch, "__call__", lambda *_: pytest.fail("Python launches it"))
    found = [second, call()]
    torch.autograd.grad(attention(*inputs).sum(), learned)  # its gradient is one number expanded
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found.append(call())
    torch.cuda.current_stream().wait_stream(stream)
    with ThreadPoolExecutor(1) as pool:  # a thread in which CUDA has not run yet
        found.append(pool.submit(call).result())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    torch.cuda.synchronize()
    assert all(are_same(first, other) for other in (*found, captured))


for each in [value for name, value in dict(globals()).items() if name.startswith("test_interpreted_")]:
    for mark in of_triton:
        mark(each)
