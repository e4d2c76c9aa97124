"""Our Triton kernels of block-sparse attention: refused with reasons where they cannot run, right where they can.

Without a GPU, Triton's interpreter runs them (`test_triton_interpreted.py`, in a process of its own, as the
choice is made when triton is imported), and the compiler builds them for a card that is not there
(`test_triton_compiled.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention
from attn_zoo.kernels.blocks.call import why_not_triton
from attn_zoo.kernels.blocks.pattern import BlockPattern
from attn_zoo.kernels.trace import recording
from tests.exactness import assert_exact
from tests.kernels.blocks.test_gather import band_pattern, drawn_pattern, make_layout, value_and_gradients
from tests.kernels.blocks.test_triton_dropout import kept_factor
from tests.kernels.interpreter import run_interpreted

HERE = Path(__file__).parent


def dense_attention(
    inputs: Sequence[Tensor],
    pattern: BlockPattern,
    padding: Tensor | None = None,
    slopes: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """Softmax under the dense mask, in the dtype of the inputs; rows that see nothing are zero.

    Its weights are multiplied by `factor` `[B, H, L, S]`, which is dropout.
    """
    query, key, value = inputs
    keep = pattern.to_dense()
    if padding is not None:
        keep = keep & ~padding[:, None, None]
        key, value = (x.masked_fill(padding[:, None, :, None], 0.0) for x in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if slopes is not None:
        standing = torch.arange(pattern.query_len)[:, None] + pattern.key_len - pattern.query_len
        scores = scores - slopes[:, None, None].to(scores.dtype) * (standing - torch.arange(pattern.key_len)).abs()
    scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1) * keep
    output: Tensor = (weights if factor is None else weights * factor.to(weights.dtype)) @ value
    return output


def make_inputs(pattern: BlockPattern, sizes: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return random query, key, value for B, H and D."""
    batch_size, num_heads, head_dim = sizes
    generator = torch.Generator().manual_seed(0)
    lengths = (pattern.query_len, pattern.key_len, pattern.key_len)
    return [torch.randn(batch_size, num_heads, n, head_dim, generator=generator).to(dtype) for n in lengths]


def make_padding(batch_size: int, key_len: int) -> Tensor:
    """The first entry is padded at its end and within, the last of several wholly."""
    padding = torch.zeros(batch_size, key_len, dtype=torch.bool)
    padding[0, key_len // 2 :] = True
    padding[0, 1:3] = True
    if batch_size > 1:
        padding[-1] = True
    return padding


def check_against_dense(
    run: Callable[[list[Tensor]], Tensor],
    inputs: Sequence[Tensor],
    pattern: BlockPattern,
    padding: Tensor | None = None,
    slopes: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    """Compare output and gradients of `run` with dense attention in float64, by the error of the same in its dtype."""

    def dense(tensors: Sequence[Tensor]) -> Tensor:
        return dense_attention(tensors, pattern, padding, slopes, factor)

    with recording() as paths:
        found = value_and_gradients(run, inputs)
    assert paths == ["block_sparse.triton"]
    plain = value_and_gradients(dense, inputs)
    exact = value_and_gradients(dense, [x.double() for x in inputs])
    # In base 2 a slope is rounded once more before it meets a distance, which makes it three roundings of what may be
    # hundreds, where the equation as written has two.
    times = 2.0 if slopes is None else 3.0
    for what, actual, rough, wanted in zip(("output", "query", "key", "value"), found, plain, exact, strict=True):
        assert actual.dtype == inputs[0].dtype
        assert_exact(actual, rough, wanted, what, times=times)


def refusal(query: Tensor, pattern: BlockPattern, **options: Any) -> str:
    reason = why_not_triton(query.device, query.dtype, query.shape[-1], pattern.block_size, **options)
    assert reason is not None
    return reason


def test_without_a_gpu_a_named_backend_is_refused_and_auto_gathers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pattern = drawn_pattern(make_layout(64), 1, (1, 0))
    query = torch.randn(1, 1, 64, 16)
    with pytest.raises(UnsupportedError, match="'triton' needs a CUDA device; got cpu") as caught:
        block_sparse_attention(query, query, query, pattern, backend="triton")
    assert caught.value.capability == "backend"
    with recording() as paths:
        block_sparse_attention(query, query, query, pattern)
    assert paths == ["block_sparse.gather"]


def test_what_the_kernels_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    pattern, query = drawn_pattern(make_layout(64), 1, (1, 0)), torch.randn(1, 1, 64, 16)
    assert why_not_triton(query.device, query.dtype, 16, 16) is None
    assert "got torch.float64" in refusal(query.double(), pattern)
    assert "head_dim in (16, 32, 64, 128); got 8" in refusal(query[..., :8], pattern)
    assert "head_dim in (16, 32, 64, 128); got 24" in refusal(torch.randn(1, 1, 64, 24), pattern)
    small = drawn_pattern(make_layout(64, block_size=8), 1, (1, 0))
    assert "block_size in (16, 32, 64, 128); got 8" in refusal(query, small)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in refusal(query, pattern)


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    reason = why_not_triton(torch.device("cuda"), torch.float32, 16, 16)
    assert reason is not None
    assert "compute capability 8.0; got 7.5" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_not_triton(torch.device("cuda"), torch.float32, 16, 16) is None


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.timeout(600)
def test_the_interpreter_agrees():
    run_interpreted(HERE / "test_triton_interpreted.py")


GPU_CASES = [
    # length, block_size, options of the layout, padding, slopes
    (512, 64, {}, False, False),
    (2048, 64, {"num_random_blocks": 3}, False, False),
    (500, 64, {}, True, False),
    (512, 64, {"is_causal": True}, False, False),
    (500, 64, {"is_causal": True}, True, True),
    (1000, 64, {"num_extra_tokens": 128}, True, True),
    (1000, 64, {"num_extra_tokens": 128, "is_causal": True}, False, False),
    (1024, 128, {}, False, False),
    (1000, 128, {"is_causal": True}, True, False),
    (300, 32, {}, False, True),
    (300, 16, {"is_causal": True}, True, False),
    (70, 64, {}, False, False),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.float32, 16), (torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 32)],
)
@pytest.mark.parametrize(("length", "block_size", "options", "has_padding", "has_slopes"), GPU_CASES)
def test_gpu_agrees_with_dense_attention(
    dtype: torch.dtype,
    head_dim: int,
    length: int,
    block_size: int,
    options: dict[str, Any],
    has_padding: bool,
    has_slopes: bool,
):
    pattern = drawn_pattern(make_layout(length, block_size=block_size, **options), 3, (2, 1))
    padding = make_padding(2, pattern.key_len) if has_padding else None
    slopes = torch.tensor([0.5, 0.1, 0.02]) if has_slopes else None
    check_against_dense(
        on_gpu(pattern, padding, slopes), make_inputs(pattern, (2, 3, head_dim), dtype), pattern, padding, slopes
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("reach", [1, 40, 128])
def test_gpu_bands_agree_with_dense_attention(dtype: torch.dtype, is_causal: bool, reach: int):
    pattern = band_pattern(500, reach, 64, is_causal=is_causal)
    padding = make_padding(2, 500)
    check_against_dense(on_gpu(pattern, padding, None), make_inputs(pattern, (2, 3, 64), dtype), pattern, padding)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("length", "options"), [(512, {}), (500, {"is_causal": True}), (1000, {"num_extra_tokens": 128})]
)
@pytest.mark.parametrize("has_padding", [False, True])
def test_gpu_dropout_agrees_weight_by_weight(
    dtype: torch.dtype, length: int, options: dict[str, Any], has_padding: bool
):
    pattern = drawn_pattern(make_layout(length, block_size=64, **options), 3, (2, 1))
    padding = make_padding(2, pattern.key_len) if has_padding else None
    torch.manual_seed(7)
    seed = int(torch.randint(1 << 62, (1,), device="cuda"))
    factor = kept_factor(seed, (2, 3, length, pattern.key_len), 0.2)
    plain = on_gpu(pattern, padding, None, dropout_p=0.2)

    def run(tensors: list[Tensor]) -> Tensor:
        torch.manual_seed(7)
        return plain(tensors)

    check_against_dense(run, make_inputs(pattern, (2, 3, 64), dtype), pattern, padding, None, factor)


def on_gpu(
    pattern: BlockPattern, padding: Tensor | None, slopes: Tensor | None, **options: Any
) -> Callable[[list[Tensor]], Tensor]:
    """Return the Triton path on the GPU, from and to the CPU."""
    there = pattern.to("cuda")

    def run(tensors: list[Tensor]) -> Tensor:
        query, key, value = (x.cuda() for x in tensors)
        output = block_sparse_attention(
            query,
            key,
            value,
            there,
            key_padding_mask=None if padding is None else padding.cuda(),
            slopes=None if slopes is None else slopes.cuda(),
            backend="triton",
            **options,
        )
        return output.cpu()

    return run


def attend(inputs: Sequence[Tensor], pattern: BlockPattern, backend: Any = "triton", **options: Any) -> Tensor:
    query, key, value = inputs
    return block_sparse_attention(query, key, value, pattern, backend=backend, **options)


def gpu_inputs(length: int, num_heads: int = 4, head_dim: int = 64) -> tuple[BlockPattern, list[Tensor]]:
    pattern = drawn_pattern(make_layout(length, block_size=64, num_random_blocks=3), num_heads, (2, 1))
    inputs = make_inputs(pattern, (1, num_heads, head_dim), torch.bfloat16)
    return pattern.to("cuda"), [x.cuda().requires_grad_() for x in inputs]


@pytest.mark.gpu
def test_gpu_long_rows_agree_with_the_gather_path():
    # Long enough for many stretches of dense rows and global columns.
    pattern, inputs = gpu_inputs(1 << 15)
    weights = torch.randn_like(inputs[0])
    runs = {}
    for backend, dtype in (("triton", torch.bfloat16), ("gather", torch.bfloat16), ("exact", torch.float32)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        output = attend(leaves, pattern, "gather" if backend == "exact" else backend)
        runs[backend] = [output, *torch.autograd.grad(output, leaves, weights.to(dtype))]
    for what, actual, rough, wanted in zip(("output", "query", "key", "value"), *runs.values(), strict=True):
        assert_exact(actual, rough, wanted, what)


@pytest.mark.gpu
def test_gpu_results_repeat_bit_for_bit():
    pattern, inputs = gpu_inputs(1 << 14)
    weights = torch.randn_like(inputs[0])
    runs = []
    for _ in range(5):
        output = attend(inputs, pattern)
        runs.append([output, *torch.autograd.grad(output, inputs, weights)])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.gpu
def test_gpu_passes_can_be_captured():
    pattern, inputs = gpu_inputs(1 << 12)
    weights = torch.randn_like(inputs[0])

    def step() -> list[Tensor]:  # nothing that is kept holds a graph: its leaves would belong to the stream it ran on
        output = attend(inputs, pattern)
        return [output.detach(), *torch.autograd.grad(output, inputs, weights)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for tensor in inputs:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    for found, wanted in zip(captured, step(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_gpu_a_captured_pass_drops_other_weights_at_every_replay():
    pattern, inputs = gpu_inputs(1 << 10)
    query, key, value = (x.detach() for x in inputs)
    value = torch.ones_like(value)

    def run() -> Tensor:
        return attend([query, key, value], pattern, dropout_p=0.5)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        graph.replay()
        found.append(captured.clone())
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert abs(float(found[0].float().mean()) - 1.0) < 0.01


@pytest.mark.gpu
def test_gpu_one_kernel_serves_all_lengths():
    from attn_zoo.kernels.blocks.triton.forward import forward_kernel

    def count() -> int:
        return sum(len(caches[0]) for caches in forward_kernel.device_caches.values())

    counts = []
    for length in (1 << 12, 3 << 10, 5 << 10, 7 << 10):
        pattern, inputs = gpu_inputs(length)
        attend(inputs, pattern).sum().backward()
        counts.append(count())
    assert len(set(counts)) == 1


@pytest.mark.gpu
def test_gpu_memory_is_linear_and_small():
    extra = []
    for length in (1 << 15, 1 << 16):
        pattern, inputs = gpu_inputs(length, num_heads=8)
        attend(inputs, pattern).sum().backward()  # compiles, and makes the gradients
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = attend(inputs, pattern)
        gradients = torch.autograd.grad(output, inputs, torch.ones_like(output))
        size = output.numel() * output.element_size()
        extra.append((torch.cuda.max_memory_allocated() - before - 5 * size) / size)  # output, its gradient, gradients
        del output, gradients, inputs
    # The partial gradients of two global blocks are half an output, those of two dense ones a quarter, log-sum-exp and
    # delta 6 %; the allocator rounds up. All are held at once, so that one kernel adds them up.
    assert max(extra) < 0.9
    assert extra[1] <= extra[0] + 0.02
