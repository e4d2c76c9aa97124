"""Gradients to few keys by our Triton kernel: interpreted against float64, compiled for Hopper, and on a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreter import IS_INTERPRETING, mend_interpreter, run_interpreted

triton = pytest.importorskip("triton", reason="the package triton is not installed")

SHARED_BYTES = 227 * 1024  # of a multiprocessor of sm_90, for one program
interpreted = [
    pytest.mark.triton,
    pytest.mark.skipif(not IS_INTERPRETING, reason="run by the test below, in a process of its own"),
]

if not IS_INTERPRETING:

    @pytest.mark.slow
    @pytest.mark.triton
    @pytest.mark.timeout(1200)
    def test_in_the_interpreter():
        """With those of the other kernels of exact attention: to start a process takes seconds."""
        here = Path(__file__)
        run_interpreted(here, str(here.with_name("test_unmasked.py")), "-k", "interpreted")


def draw(
    key_len: int,
    query_len: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    is_interleaved: bool = False,
    spread: float = 1.0,
    sequences: tuple[int, int] = (2, 2),
) -> list[Tensor]:
    """Return the gradient of the output, query, key and value; `spread` is about the scores' standard deviation."""
    generator = torch.Generator().manual_seed(key_len + query_len)
    drawn = []
    for length, scale in ((query_len, 1.0), (query_len, spread), (key_len, 1.0), (key_len, 1.0)):
        batch_size, num_heads = sequences
        shape = (batch_size, length, num_heads, head_dim) if is_interleaved else (*sequences, length, head_dim)
        tensor = (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)
        drawn.append(tensor.transpose(1, 2) if is_interleaved else tensor)
    return drawn


def truth(grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return what autograd says in float64."""
    wide = [x.double().requires_grad_() for x in (query, key, value)]
    scores = wide[0] @ wide[1].mT * query.shape[-1] ** -0.5
    return torch.autograd.grad(scores.softmax(-1) @ wide[2], wide, grad.double())


def check(got: tuple[Tensor, ...], want: tuple[Tensor, ...], inputs: list[Tensor], tolerance: float) -> None:
    """Compare norms: weights and slopes are rounded to the type of the inputs, twice and once, as are results."""
    for mine, right, given in zip(got, want, inputs, strict=True):
        assert mine.dtype == given.dtype
        assert mine.stride() == given.stride()
        assert ((mine.double() - right).norm() / right.norm()).item() < tolerance


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return our module, where what is allocated is full of NaN: nothing may depend on memory that was not written."""
    from attn_zoo.kernels.exact import few_keys_gradient

    monkeypatch.setattr(few_keys_gradient, "_kept", {})
    if IS_INTERPRETING:
        mend_interpreter(monkeypatch)
        # So few, and so little at a time, that few queries are stretches of several tiles, added in more than one step.
        monkeypatch.setattr(few_keys_gradient, "_device", lambda index: (9, 4))
        monkeypatch.setattr(few_keys_gradient, "_ADD_ROWS", 2)
        monkeypatch.setattr(few_keys_gradient, "_ADD_BLOCK", 1024)  # each program takes as long, whatever its size
        torch.use_deterministic_algorithms(True)
        yield few_keys_gradient
        torch.use_deterministic_algorithms(False)
    else:
        yield few_keys_gradient


class TestInterpreted:
    """The interpreter cuts bfloat16 off instead of rounding it, and cannot multiply it: that dtype is for the card."""

    pytestmark = interpreted

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("query_len", [128, 330])
    @pytest.mark.parametrize("key_len", [256, 200, 64, 17])
    def test_equals_float64(self, kernel, key_len, query_len, head_dim):
        grad, *inputs = draw(key_len, query_len, head_dim, sequences=(1, 2))
        check(kernel.gradients(grad, *inputs), truth(grad, *inputs), inputs, 2e-3)

    @pytest.mark.parametrize(("key_len", "query_len"), [(256, 64), (200, 1)])
    def test_one_stretch_is_written_at_once(self, kernel, key_len, query_len):
        grad, *inputs = draw(key_len, query_len, 64, is_interleaved=True)
        check(kernel.gradients(grad, *inputs), truth(grad, *inputs), inputs, 2e-3)
        (launches,) = kernel._kept.values()
        assert launches.add is None

    def test_one_key(self, kernel):
        grad, *inputs = draw(1, 70, 64)
        of_query, of_key, of_value = kernel.gradients(grad, *inputs)
        assert of_query.abs().max() < 1e-2  # zero, but for the slopes' rounding
        assert of_key.abs().max() < 1e-2
        torch.testing.assert_close(of_value, grad.sum(2, keepdim=True), rtol=2e-3, atol=2e-3)

    @pytest.mark.parametrize("has_short_products", [False, True])
    @pytest.mark.parametrize("spread", [1.0, 20.0])
    def test_heads_side_by_side_and_peaked_weights(self, kernel, monkeypatch, has_short_products, spread):
        if has_short_products:
            monkeypatch.setattr(kernel, "SHORT_PRODUCTS", {torch.float16})
        grad, *inputs = draw(200, 300, 64, is_interleaved=True, spread=spread)
        check(kernel.gradients(grad, *inputs), truth(grad, *inputs), inputs, 3e-3)

    def test_a_gradient_without_strides_of_its_own(self, kernel):
        grad, *inputs = draw(64, 128, 64)
        got = kernel.gradients(grad[:1, :1, :1, :1].expand_as(grad), *inputs)
        check(got, truth(grad[:1, :1, :1, :1].expand_as(grad), *inputs), inputs, 2e-3)

    def test_repeats_bit_for_bit(self, kernel):
        drawn = draw(256, 300, 64, sequences=(1, 2))
        first, second = (kernel.gradients(*drawn) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))

    def test_nothing_to_do(self, kernel):
        of_query, *others = kernel.gradients(*draw(64, 0, 64))
        assert of_query.numel() == 0
        assert not any(x.any() for x in others)

    def test_it_serves_what_it_is_made_for(self, kernel):
        assert kernel.why_not(torch.empty(1, 1, 5, 64).half(), torch.empty(1, 1, 256, 64).half()) is None


@pytest.mark.parametrize(
    ("dtype", "head_dim", "key_len", "reason"),
    [
        (torch.float32, 64, 256, "bfloat16 or float16"),
        (torch.bfloat16, 32, 256, "head_dim 64 or 128"),
        (torch.bfloat16, 64, 257, "1 to 256 keys"),
        (torch.bfloat16, 64, 0, "1 to 256 keys"),
        (torch.bfloat16, 64, 256, "need a GPU"),
    ],
)
def test_what_it_cannot_serve(kernel, monkeypatch, dtype, head_dim, key_len, reason):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    query, key = (torch.empty(1, 1, n, head_dim, dtype=dtype) for n in (5, key_len))
    assert reason in kernel.why_not(query, key)


@pytest.mark.parametrize(
    ("num_tiles", "num_sequences", "want"),
    [(16384, 8, (33, 497)), (128, 8, (16, 8)), (1, 8, (1, 1)), (16, 132, (1, 16)), (16, 5000, (1, 16))],
)
def test_stretches_fill_the_multiprocessors(kernel, num_tiles, num_sequences, want):
    assert kernel.stretches_of(num_tiles, num_sequences, 132) == want


@pytest.mark.triton
@pytest.mark.skipif(IS_INTERPRETING, reason="nothing is compiled here")
@pytest.mark.parametrize(
    ("head_dim", "key_len", "dtype", "most_spilled"),
    [
        (64, 256, "bf16", 128),
        (64, 128, "bf16", 256),
        (64, 64, "bf16", 0),
        (128, 128, "bf16", 0),
        (128, 256, "bf16", 400),
    ],
)
def test_it_compiles_for_hopper(kernel, head_dim, key_len, dtype, most_spilled, tmp_path):
    from tests.kernels.blocks.test_triton_compiled import compiled, spilled_bytes

    tiles = kernel.tiles_of(key_len, head_dim)
    for job in tiles.jobs:
        options = {"num_warps": tiles.num_warps, "num_stages": job["num_stages"]}
        constants = {
            "block_q": kernel.BLOCK_Q,
            "block_k": tiles.block_k,
            "head_dim": head_dim,
            "is_ragged": False,
            "is_masked": False,
            "is_whole": False,
            "of_keys": job["of_keys"],
            "of_values": job["of_values"],
            "has_short_products": dtype == "bf16",
        }
        built = compiled(kernel.few_keys_kernel, dtype, constants, options)
        assert "wgmma.mma_async" in built.asm["ptx"]
        assert "mma.sync" not in built.asm["ptx"]
        assert f"wgmma.mma_async.sync.aligned.m64n{min(tiles.block_k, 512 // tiles.num_warps * 2)}" in built.asm["ptx"]
        assert built.metadata.shared <= SHARED_BYTES // tiles.residents
        # A few spills cost less than a tile of half the queries, which would need none.
        assert spilled_bytes(built, tmp_path) <= most_spilled


@pytest.mark.triton
@pytest.mark.skipif(IS_INTERPRETING, reason="nothing is compiled here")
def test_the_sum_compiles(kernel, tmp_path):
    from tests.kernels.blocks.test_triton_compiled import compiled, spilled_bytes

    constants = {"block_k": 256, "head_dim": 64, "num_rows": 8, "block_size": 256}
    assert spilled_bytes(compiled(kernel.add_stretches_kernel, "bf16", constants, {"num_warps": 4}), tmp_path) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("key_len", [256, 200, 64, 17])
def test_on_a_card(kernel, dtype, head_dim, key_len):
    for query_len, spread in ((4096, 1.0), (1000, 20.0)):
        grad, *inputs = draw(
            key_len, query_len, head_dim, dtype=dtype, device="cuda", is_interleaved=True, spread=spread
        )
        want = truth(grad, *inputs)
        got = kernel.gradients(grad, *inputs)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3
        check(got, want, inputs, tolerance)
        again = kernel.gradients(grad, *inputs)
        assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))


@pytest.mark.gpu
def test_captured_as_a_graph(kernel):
    drawn = draw(256, 4096, 64, dtype=torch.bfloat16, device="cuda")
    want = kernel.gradients(*drawn)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kernel.gradients(*drawn)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
