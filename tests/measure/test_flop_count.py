"""Counts against products of known size, and None wherever the counter is blind."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import shape_wrapper

from attn_zoo.measure import flop_count
from attn_zoo.measure.flop_count import Operations, count_flops, count_operations


def test_products_count_two_per_multiply_add():
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    assert count_flops(lambda: a @ b) == 2 * 3 * 5 * 7
    assert count_flops(lambda: F.linear(a, b.T, torch.randn(7))) == 2 * 3 * 5 * 7
    batch = torch.randn(2, 4, 6, 8)
    assert count_flops(lambda: torch.einsum("bhld,bhsd->bhls", batch, batch)) == 2 * 2 * 4 * 6 * 6 * 8
    assert count_flops(lambda: a.exp().sum()) == 0


def test_products_with_vectors_and_in_place_count_too():
    a, b, vector = torch.randn(3, 5), torch.randn(5, 7), torch.randn(5)
    wide, tall = torch.randn(2, 3, 5), torch.randn(2, 5, 7)
    assert count_flops(lambda: a @ vector) == 2 * 3 * 5
    assert count_flops(lambda: wide @ vector) == 2 * 2 * 3 * 5
    assert count_flops(lambda: torch.addmv(torch.zeros(3), a, vector)) == 2 * 3 * 5
    assert count_flops(lambda: vector @ vector) == 2 * 5
    assert count_flops(lambda: torch.zeros(3, 7).addmm_(a, b)) == 2 * 3 * 5 * 7
    assert count_flops(lambda: torch.zeros(2, 3, 7).baddbmm_(wide, tall)) == 2 * 2 * 3 * 5 * 7
    assert count_flops(lambda: torch.addbmm(torch.zeros(3, 7), wide, tall)) == 2 * 2 * 3 * 5 * 7


@pytest.mark.parametrize("is_left", [True, False])
def test_a_triangular_system_counts_half_a_product_and_its_backward_three_halves(is_left: bool):
    matrix = torch.randn(2, 5, 5).requires_grad_()
    right = torch.randn((2, 5, 7) if is_left else (2, 7, 5)).requires_grad_()

    def solve() -> Any:
        return torch.linalg.solve_triangular(matrix, right, upper=False, left=is_left, unitriangular=True)

    assert count_operations(solve) == Operations(2 * 5 * 5 * 7, 0)
    both = count_operations(lambda: solve().sum().backward())
    assert both is not None
    assert both.products == (1 + 1 + 2) * 2 * 5 * 5 * 7


@pytest.mark.parametrize(
    "solve",
    [
        torch.linalg.inv,
        torch.linalg.pinv,
        torch.linalg.qr,
        torch.matrix_exp,
        torch.cholesky_inverse,
        lambda x: torch.linalg.solve(x, x),
        lambda x: torch.cdist(x, x),
        lambda x: torch._int_mm(x.to(torch.int8), x.to(torch.int8)),
        lambda x: F.bilinear(x, x, torch.randn(3, 32, 32)),
    ],
)
def test_what_no_formula_knows_is_unknown_and_not_nothing(solve):
    assert count_flops(lambda: solve(torch.eye(32))) is None
    assert count_flops(lambda: torch.linalg.vector_norm(torch.eye(32))) == 0


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_counts_its_two_products_whatever_the_kernel(backend, is_causal):
    q = torch.randn(2, 4, 16, 8)
    k, v = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 16, 8)

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    assert count_flops(forward) == 2 * 2 * (2 * 4 * 16 * 16 * 8)  # a causal kernel counts as dense


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("convolve", [F.conv1d, F.conv_transpose1d])
def test_each_gradient_of_a_convolution_counts_as_much_as_its_forward(convolve, groups):
    tokens = torch.randn(2, 4, 9, requires_grad=True)
    weight = torch.randn(4, 4 // groups, 3, requires_grad=True)

    def forward() -> Tensor:
        result: Tensor = convolve(tokens, weight, groups=groups)
        return result

    places = 9 if convolve is F.conv_transpose1d else 7
    expected = 2 * 2 * places * weight.numel()
    assert count_flops(forward) == expected
    both = count_operations(lambda: forward().sum().backward())
    assert both is not None
    assert both.products == 3 * expected


def test_no_graph_is_built_and_leaves_stay_untouched():
    x = torch.randn(4, 4, requires_grad=True)
    outputs: list[Tensor] = []
    assert count_flops(lambda: outputs.append(x @ x)) == 128
    assert not outputs[0].requires_grad
    assert x.grad is None


def test_flex_attention_is_not_mistaken_for_dense(monkeypatch):
    q = torch.randn(1, 2, 64, 16)
    with pytest.warns(UserWarning, match="flex_attention called without"):
        assert count_flops(lambda: flex_attention(q, q, q)) is None


def test_what_is_compiled_is_counted_as_written_and_still_compiled_afterwards():
    """Under a mode the compiler gives a function up: later shapes would be timed as they are written."""
    graphs: list[object] = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph

    def product(x: Tensor) -> Tensor:
        return x @ x

    compiled = torch.compile(product, backend=backend, dynamic=False)
    x, larger = torch.ones(4, 4), torch.ones(5, 5)
    compiled(x)
    assert count_flops(lambda: compiled(x)) == 2 * 4**3
    assert count_flops(lambda: compiled(torch.ones(6, 6))) == 2 * 6**3
    assert len(graphs) == 1
    compiled(larger)
    compiled(x)
    assert len(graphs) == 2


COUNTED_FIRST = """
import sys
import torch
from attn_zoo.measure.flop_count import count_flops

graphs = []
def backend(graph, _):
    graphs.append(graph)
    return graph

def product(x):
    return compiled(x)

def compiled(x):  # as FlexAttention does, which compiles in its first call
    global compiled
    compiled = torch.compile(lambda x: x @ x, backend=backend, dynamic=False)
    return compiled(x)

assert "torch._dynamo" not in sys.modules
assert count_flops(lambda: product(torch.ones(4, 4))) == 2 * 4**3
product(torch.ones(5, 5))
assert len(graphs) == 1, graphs
"""


def test_a_compiler_that_the_counted_call_loads_is_not_left_with_less():
    done = subprocess.run([sys.executable, "-c", COUNTED_FIRST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_operation_of_another_package_is_opaque_even_inside_a_fall_back():
    library = torch.library.Library("attn_zoo_test", "DEF")
    library.define("secret(Tensor x) -> Tensor")
    library.impl("secret", lambda x: x @ x, "CPU")
    x = torch.randn(4, 4)

    def with_fall_back() -> Tensor:
        try:
            result: Tensor = torch.ops.attn_zoo_test.secret(x)
        except Exception:
            result = x @ x
        return result

    assert count_flops(with_fall_back) is None
    assert count_flops(lambda: x @ x) == 128  # and the next count works


def test_a_triton_kernel_launched_by_hand_is_opaque(monkeypatch):
    calls: list[Any] = []
    chain = SimpleNamespace(add=calls.append, remove=calls.remove)
    fake = SimpleNamespace(knobs=SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=chain)))
    monkeypatch.setitem(sys.modules, "triton", fake)

    def launch() -> None:
        for hook in list(calls):
            hook({"name": "kernel"})

    assert count_flops(launch) is None
    assert calls == []
    assert count_flops(lambda: None) == 0


def test_what_a_formula_refuses_is_unknown_and_no_error_of_the_callable(monkeypatch):
    def for_equal_heads(query_shape: Any, key_shape: Any, *_: Any, **__: Any) -> int:
        assert query_shape == key_shape  # as torch asks of attention up to 2.11
        return 1

    aten, x = torch.ops.aten, torch.ones(2, 3)
    monkeypatch.setitem(flop_count._EXTRA_FORMULAS, aten.mm, shape_wrapper(for_equal_heads))
    assert count_flops(lambda: torch.ones(3, 3) @ torch.ones(3, 3)) == 1
    assert count_flops(lambda: x @ x.T) is None


def test_errors_of_the_callable_come_through():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        count_flops(lambda: torch.randn(2, 3) @ torch.randn(2, 3))


def test_transforms_and_recurrent_layers_are_counted():
    real, hidden = torch.randn(2, 64, 32), torch.randn(2, 10, 32)
    half = 5 * 2 * 32 * 64 * 6 // 2
    assert count_flops(lambda: torch.fft.fft(real.to(torch.complex64), dim=1)) == 2 * half
    assert count_flops(lambda: torch.fft.rfft(real, dim=1)) == half
    assert count_flops(lambda: torch.fft.irfft(torch.fft.rfft(real, dim=1), n=64, dim=1)) == 2 * half
    lstm = torch.nn.LSTM(32, 16, batch_first=True)
    forward = 2 * 2 * 10 * 4 * 16 * (32 + 16)
    assert count_flops(lambda: lstm(hidden)) == forward

    def both() -> None:
        lstm(hidden.requires_grad_())[0].sum().backward()

    counted = count_operations(both)
    assert counted is not None
    assert counted.products == 3 * forward


def test_sums_are_counted_apart():
    x = torch.randn(3, 5)
    assert count_operations(lambda: (x.sum(1), x.cumsum(0), x.mean())) == Operations(products=0, additions=45)


@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_a_backward_counts_what_its_kernel_recomputes(num_kv_heads):
    q = torch.randn(1, 2, 64, 32, requires_grad=True)
    k, v = torch.randn(2, 1, num_kv_heads, 64, 32, requires_grad=True).unbind()

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward()

    counted = count_operations(both)
    assert counted is not None
    assert counted.products == 3.5 * 4 * 2 * 64 * 64 * 32


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_the_kernels_of_a_gpu_count_grouped_queries_too(name):
    q, k = torch.empty(2, 4, 16, 8, device="meta"), torch.empty(2, 2, 32, 8, device="meta")
    v = torch.empty(2, 2, 32, 24, device="meta")
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward")
    formulas = flop_count._EXTRA_FORMULAS
    pairs = 2 * 4 * 16 * 32
    assert formulas[forward](q, k, v, 0.0, True, out_val=None) == 2 * pairs * (8 + 24)
    assert formulas[backward](q, q, k, v, q, q, out_val=None) == 2 * pairs * (3 * 8 + 2 * 24)
