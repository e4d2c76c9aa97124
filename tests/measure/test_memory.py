"""Memory of computations whose bytes can be counted by hand."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

from attn_zoo.measure import memory
from attn_zoo.measure.memory import SavedTensors, memory_of_pass, memory_of_update
from attn_zoo.records import CallPass, Memory

N = 128
UNIT = 4 * N * N  # bytes of one float32 matrix
PASSES: tuple[CallPass, ...] = ("infer", "fwd", "bwd", "fwd_bwd")


@pytest.fixture
def x():
    return torch.rand(N, N, requires_grad=True)


def units(measured: Memory) -> dict[str, float | None]:
    fields = ("peak_bytes", "extra_bytes", "saved_bytes", "input_bytes", "output_bytes")
    return {
        name.removesuffix("_bytes"): None if getattr(measured, name) is None else getattr(measured, name) / UNIT
        for name in fields
    }


def test_a_product_needs_its_operands_and_its_result():
    a, b = (torch.rand(N, N, requires_grad=True) for _ in range(2))
    expected = {
        "infer": {"peak": 3, "extra": 0, "saved": 0, "input": 2, "output": 1},
        "fwd": {"peak": 3, "extra": 0, "saved": 2, "input": 2, "output": 1},
        "bwd": {"peak": 5, "extra": 0, "saved": 2, "input": 2, "output": 1},
        "fwd_bwd": {"peak": 5, "extra": 0, "saved": 2, "input": 2, "output": 1},
    }
    for pass_ in PASSES:
        assert units(memory_of_pass(lambda: a @ b, [a, b], pass_)) == expected[pass_], pass_


def test_a_chain_keeps_what_backward_reads(x: Tensor) -> None:
    """exp saves its result; between the two products one temporary gradient lives."""
    expected = {
        "infer": {"peak": 3, "extra": 1, "saved": 0, "input": 1, "output": 1},
        "fwd": {"peak": 3, "extra": 1, "saved": 2, "input": 1, "output": 1},
        "bwd": {"peak": 5, "extra": 2, "saved": 2, "input": 1, "output": 1},
        "fwd_bwd": {"peak": 5, "extra": 2, "saved": 2, "input": 1, "output": 1},
    }
    for pass_ in PASSES:
        assert units(memory_of_pass(lambda: x.exp().exp(), [x], pass_)) == expected[pass_], pass_


@pytest.mark.parametrize("num_elements", [1, 1000, 3_000_000])
def test_a_temporary_of_known_size_is_extra(x: Tensor, num_elements: int) -> None:
    def forward() -> Tensor:
        temporary = torch.empty(num_elements, dtype=torch.uint8)
        result = x.neg()
        del temporary
        return result

    measured = memory_of_pass(forward, [x], "infer")
    assert measured.extra_bytes == num_elements
    assert measured.peak_bytes == 2 * UNIT + num_elements


def test_a_temporary_that_is_gone_before_the_peak_costs_nothing(x: Tensor) -> None:
    def forward() -> Tensor:
        temporary = torch.empty(UNIT, dtype=torch.uint8)
        del temporary
        return x.neg()

    assert memory_of_pass(forward, [x], "infer").extra_bytes == 0


def test_backward_alone_does_not_count_the_temporaries_of_forward(x: Tensor) -> None:
    def forward() -> Tensor:
        temporary = torch.empty(10 * UNIT, dtype=torch.uint8)
        result = x.neg()
        del temporary
        return result

    assert units(memory_of_pass(forward, [x], "bwd")) == {"peak": 3, "extra": 0, "saved": 0, "input": 1, "output": 1}
    assert units(memory_of_pass(forward, [x], "fwd_bwd"))["extra"] == 9  # the gradient comes after it


def test_attention_by_hand_saves_its_square_and_checkpointing_does_not():
    q = torch.rand(1, 1, 256, 8, requires_grad=True)

    def dense() -> Tensor:
        return torch.softmax(q @ q.mT, -1) @ q

    plain = memory_of_pass(dense, [q], "fwd")
    square, small = 4 * 256 * 256, 4 * 256 * 8
    assert plain.saved_bytes == square + small  # softmax's result, twice, counts once
    recomputed = memory_of_pass(lambda: checkpoint(dense, use_reentrant=False), [q], "fwd")
    assert recomputed.saved_bytes is not None
    assert recomputed.saved_bytes <= small


def test_custom_functions_are_seen_and_dead_graphs_are_not(x: Tensor) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            ctx.save_for_backward(value, value.clone())
            return value * value

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            value, _ = ctx.saved_tensors
            result: Tensor = 2 * value * grad
            return result

    with SavedTensors() as saved:
        output = Square.apply(x)
        x.exp()  # saved and dropped at once
    assert saved.num_bytes == 2 * UNIT
    output.backward(torch.ones_like(x))
    assert torch.equal(torch.as_tensor(x.grad), 2 * x)
    assert saved.num_bytes == 0  # backward freed them


def test_an_update_is_weighed_with_all_that_it_holds():
    weight, box = torch.rand(N, N), [torch.rand(N, N)]

    def update() -> None:
        box.clear()  # as gradients are: released and allocated again
        box.append(weight + 1)
        weight.copy_((weight * 2) * box[0])  # two temporaries

    memory = memory_of_update(update, lambda: [weight, *box])
    assert units(memory) == {"peak": 4, "extra": 2, "saved": None, "input": 2, "output": None}, "no backward, no number"


def test_every_update_that_is_measured_begins_from_where_it_is_settled():
    """Whatever settling takes is no part of it, and how often it is called is nobody's concern."""
    box: list[Tensor] = []

    def settle() -> None:
        torch.rand(5, N, N)
        box[:] = [torch.zeros(N, N)]

    def update() -> None:
        box.append(torch.zeros(len(box), N, N))  # ever larger

    memory = memory_of_update(update, lambda: box, settle=settle)
    assert units(memory) == {"peak": 3, "extra": 1, "saved": None, "input": 2, "output": None}


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_what_an_update_saves_is_counted_when_its_backward_begins(x: Tensor, is_compiled: bool) -> None:
    """exp saves its result, and the product its first operand; what was freed before is not counted with it."""
    data, num_graphs = torch.rand(N, N), 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return aot_eager(graph, inputs)

    def loss() -> Tensor:
        return (data @ x).exp().sum()

    called = torch.compile(loss, backend=backend) if is_compiled else loss
    called().backward()

    def update(num_backwards: int) -> None:
        (x.exp() * x.exp()).sum()  # a graph that nobody asks for gradients
        for _ in range(num_backwards):
            called().backward()

    for num_backwards in (1, 2):
        memory = memory_of_update(partial(update, num_backwards), lambda: [x])
        assert memory.saved_bytes == 2 * UNIT
    assert num_graphs == is_compiled, "what is watched is the graph that was timed"
    torch.compiler.reset()


def test_views_and_shared_storages_count_once(x: Tensor) -> None:
    whole = torch.rand(2, N, N, requires_grad=True)
    measured = memory_of_pass(lambda: whole.view(-1), [whole, whole], "fwd")
    assert (measured.input_bytes, measured.output_bytes, measured.extra_bytes) == (2 * UNIT, 0, 0)
    sliced = memory_of_pass(lambda: torch.cat([x, x])[:N], [x], "infer")
    assert (sliced.output_bytes, sliced.extra_bytes) == (UNIT, UNIT)  # half of what is held is no output


def test_gradients_that_are_parts_of_one_storage_are_all_gradients() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *parts: Tensor) -> Tensor:
            return torch.stack(parts).sum(0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad.expand(3, *grad.shape).clone().unbind()

    leaves = [torch.randn(N, N, requires_grad=True) for _ in range(3)]
    measured = memory_of_pass(lambda: Sum.apply(*leaves), leaves, "bwd")
    assert (measured.output_bytes, measured.extra_bytes) == (UNIT, 0)


def test_what_is_made_once_and_kept_does_not_count(x: Tensor) -> None:
    cache: list[Tensor] = []

    def forward() -> Tensor:
        if not cache:
            cache.append(torch.ones(5 * N, N))
        return x * cache[0][:N]

    assert memory_of_pass(forward, [x], "infer").extra_bytes == 0


def test_gradients_are_none_afterwards_even_after_an_error(x: Tensor) -> None:
    memory_of_pass(lambda: x * 2, [x], "fwd_bwd")
    assert x.grad is None
    x.grad = torch.ones_like(x)
    with pytest.raises(ValueError, match="cut off"):
        memory_of_pass(lambda: x.detach(), [x], "bwd")
    assert x.grad is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_high_water_of_the_process_follows_a_large_temporary(x: Tensor) -> None:
    def forward() -> Tensor:
        return x * torch.ones(16 * 2**20)[0]

    measured = memory_of_pass(forward, [x], "infer")
    if measured.process_bytes is None:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert 60 * 2**20 < measured.process_bytes < 90 * 2**20


def test_no_high_water_where_the_system_does_not_tell(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_reset_high_water", lambda: False)
    assert memory_of_pass(lambda: x * 2, [x], "infer").process_bytes is None


@pytest.mark.gpu
def test_gpu_agrees_with_the_count_by_hand():
    x = torch.rand(1024, 1024, device="cuda", requires_grad=True)
    unit = 4 * 1024 * 1024
    measured = memory_of_pass(lambda: x.exp().exp(), [x], "fwd_bwd", device="cuda")
    assert (measured.input_bytes, measured.output_bytes, measured.saved_bytes) == (unit, unit, 2 * unit)
    assert measured.peak_bytes == 5 * unit
    assert measured.extra_bytes == 2 * unit
    assert measured.process_bytes is None
    assert measured.reserved_bytes is not None
    assert measured.reserved_bytes >= 5 * unit
    assert memory_of_pass(lambda: x.exp().exp(), [x], "bwd", device="cuda").peak_bytes == 5 * unit
