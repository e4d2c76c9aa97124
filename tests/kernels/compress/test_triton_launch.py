"""The compression's Triton kernels: interpreted, compiled for a card that is not there, and on one that is."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo.kernels.compress.compression import compress, compress_pair
from attn_zoo.kernels.compress.products import CompressCall
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.memory import memory_of_pass
from tests.kernels.compress.test_compression import SHARINGS, checked, inputs, padding
from tests.kernels.interpreter import IS_INTERPRETING, run_interpreted

SHARED_BYTES = 227 * 1024  # of one program on sm_90
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8"}


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.timeout(1200)
def test_in_the_interpreter():
    run_interpreted(Path(__file__).with_name("test_triton_interpreted.py"))


class _Launch:
    """Stands for a kernel and notes how it is launched."""

    def __init__(self, kernel: Any, launches: list[Any]) -> None:
        self.kernel, self.launches, self.arg_names = kernel, launches, kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **named: self.launches.append((self.kernel, named))


def launches_of(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, *, num_tokens: int, num_matrices: int, has_mask: bool
) -> list[Any]:
    """Return the launches of one forward and backward at 65 536 positions, 16 heads, k = 256, in bfloat16."""
    from attn_zoo.kernels.compress import triton_kernels, triton_launch

    launches: list[Any] = []
    for name in ("sum_positions", "add_splits", "grad_tokens", "grad_matrix"):
        kernel = getattr(triton_kernels, name)
        monkeypatch.setattr(triton_kernels, name, _Launch(kernel, launches))
    for kept in ("_forwards", "_backwards"):
        monkeypatch.setattr(triton_launch, kept, {})
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    tokens = [torch.empty(1, 65536, 16, head_dim, **like).transpose(1, 2) for _ in range(num_tokens)]
    matrices = [torch.empty(1, 1, 65536, 256, **like) for _ in range(num_matrices)]
    mask = torch.empty(1, 65536, dtype=torch.bool, device="meta") if has_mask else None
    call = CompressCall(tuple(tokens), tuple(matrices), mask)
    out = triton_launch.compress(call)
    triton_launch.gradients(call, out, of_tokens=True, of_matrices=True)
    return launches


def compiled(launch: Any) -> Any:
    """Compile a launch for sm_90 as Triton would on the card."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, named = launch
    options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
    signature, constants, aligned = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value, parameter = named[name], kernel.params[index]
        if isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
            aligned[(index,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.triton
@pytest.mark.skipif(IS_INTERPRETING, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize(
    ("head_dim", "num_tokens", "num_matrices"), [(64, 2, 2), (128, 2, 2), (128, 2, 1), (128, 1, 2)]
)
def test_compiles_for_hopper_within_its_limits(
    head_dim: int,
    num_tokens: int,
    num_matrices: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Kernels of keys and values, of keys and values that share E, and of compress-first: nothing spills."""
    triton = pytest.importorskip("triton", reason="triton is not installed, so there is no compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # where nothing is, so that the assembler runs and says more
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
    sizes: dict[str, Any] = {"num_tokens": num_tokens, "num_matrices": num_matrices, "has_mask": num_matrices == 1}
    names = []
    for launch in launches_of(monkeypatch, head_dim, **sizes):
        binary, report = compiled(launch), capsys.readouterr().out
        names.append(binary.metadata.name)
        assert binary.metadata.shared <= SHARED_BYTES, names[-1]
        assert re.search(r"0 bytes spill stores, 0 bytes spill loads", report), f"{names[-1]}: {report}"
        if names[-1] != "add_splits":
            assert "wgmma.mma_async" in binary.asm["ptx"], names[-1]  # Hopper's matrix unit
            assert "cp.async.cg.shared.global" in binary.asm["ptx"], names[-1]  # 16 bytes, past the registers
    assert names == ["sum_positions", "add_splits", "grad_tokens", "grad_matrix"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize(("length", "rank"), [(1, 5), (37, 5), (4099, 256), (3000, 300)])
@pytest.mark.parametrize("is_padded", [False, True])
def test_right_and_repeatable_on_the_gpu(
    dtype: torch.dtype, sharing: tuple[int, int], length: int, rank: int, is_padded: bool
):
    tokens, matrix = (x.detach().cuda().requires_grad_() for x in inputs(sharing, length, rank, dtype))
    mask = padding(length).cuda() if is_padded else None
    given = tokens
    if mask is not None:
        given = tokens.detach().masked_fill(mask[:, None, :, None], float("nan")).requires_grad_()
    upstream = torch.randn(2, 3, rank, 4, device="cuda").to(dtype)

    def run() -> tuple[Tensor, ...]:
        out = compress(given, matrix, key_padding_mask=mask, path="triton")
        return (out, *torch.autograd.grad(out, (given, matrix), upstream))

    got = run()
    checked(got, [x.detach().double().requires_grad_() for x in (tokens, matrix)], upstream, mask)
    for once, again in zip(got, run(), strict=True):
        assert torch.equal(once, again)


def pair(length: int, *, shared: bool = False) -> Any:
    """Return keys and values of 16 heads as projections leave them, and E and F of k = 256, in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(0)
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    tokens = [torch.randn(1, length, 16, 64, **like).transpose(1, 2).requires_grad_() for _ in range(2)]
    matrices = [(torch.randn(1, 1, length, 256, **like) / length**0.5).requires_grad_() for _ in range(2)]
    return tuple(tokens), (matrices[0],) * 2 if shared else tuple(matrices)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["keys and values", "one matrix", "one source"])
def test_a_long_pair_on_the_gpu(kind: str):
    """At a real size the pair equals float64 as closely as one rounding allows, whatever is shared."""
    tokens, matrices = pair(20_000, shared=kind == "one matrix")
    if kind == "one source":
        tokens = tokens[:1] * 2
    with recording() as paths:
        out = compress_pair(tokens, matrices)
    assert paths == ["compress.triton"]
    upstream = [torch.randn_like(x) for x in out]
    leaves = list(dict.fromkeys((*tokens, *matrices)))
    got = (*out, *torch.autograd.grad(out, leaves, upstream))
    wide = {x: x.detach().double().requires_grad_() for x in leaves}
    truth = [
        torch.einsum("bgsk,bgsd->bgkd", wide[e].expand(-1, 16, -1, -1), wide[x])
        for x, e in zip(tokens, matrices, strict=True)
    ]
    want = (*truth, *torch.autograd.grad(truth, list(wide.values()), [x.double() for x in upstream]))
    eps = torch.finfo(torch.bfloat16).eps
    for mine, right in zip(got, want, strict=True):
        scale = right.square().mean().sqrt().item()
        torch.testing.assert_close(mine.double(), right, rtol=eps, atol=1e-4 * scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padding_of_a_source_that_meets_two_matrices_gets_exact_zeros_on_the_gpu(dtype: torch.dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    like: dict[str, Any] = {"device": "cuda", "dtype": dtype, "generator": generator}
    tokens = torch.randn(2, 1, 7, 256, **like).requires_grad_()
    matrices = [(torch.randn(1, 1, 7, 256, **like) / 16).requires_grad_() for _ in range(2)]
    mask = torch.tensor([[1, 0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 1, 0]], dtype=torch.bool, device="cuda")
    out = compress_pair((tokens, tokens), (matrices[0], matrices[1]), key_padding_mask=mask, path="triton")
    (grad,) = torch.autograd.grad(out, tokens, [torch.randn(x.shape, **like) for x in out])
    assert not grad[mask[:, None, :, None].expand_as(grad)].any()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "path"), [(torch.bfloat16, "triton"), (torch.float32, "split_k")])
@pytest.mark.parametrize("length", [1, 5000])
def test_the_path_on_the_gpu_depends_on_the_dtype_alone(dtype: torch.dtype, path: str, length: int):
    tokens, matrix = (x.detach().cuda() for x in inputs((1, 1), length, dtype=dtype))
    with recording() as paths:
        compress(tokens, matrix)
    assert paths == [f"compress.{path}"]


def _stacked(tokens: tuple[Tensor, Tensor], matrices: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack(compress_pair(tokens, matrices))


@pytest.mark.gpu
def test_memory_on_the_gpu_is_partial_sums_only():
    """Beyond inputs, output and gradients: partial tiles, which do not grow with the length; saved: inputs."""
    extra = []
    for length in (32_768, 131_072):
        tokens, matrices = pair(length)
        leaves = (*tokens, *matrices)
        forward = partial(_stacked, tokens, matrices)
        memory = memory_of_pass(forward, leaves, "fwd_bwd", device="cuda")
        assert memory.saved_bytes is not None
        assert memory.extra_bytes is not None
        assert memory.saved_bytes <= sum(x.numel() * x.element_size() for x in leaves)
        extra.append(memory.extra_bytes)
    assert max(extra) <= 64 * 2**20
    assert extra[1] <= extra[0] + 2**20


@pytest.mark.gpu
def test_replays_in_a_cuda_graph():
    tokens, matrices = pair(8192)
    leaves = (*tokens, *matrices)

    def run() -> list[Tensor]:  # nothing that is kept holds a graph: its leaves would belong to the stream it ran on
        out = compress_pair(tokens, matrices)
        grads = torch.autograd.grad(out, leaves, [torch.ones_like(x) for x in out])
        return [x.detach() for x in (*out, *grads)]

    want = run()  # compiles
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # backward once before, as torch's notes on graphs ask
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    for mine, right in zip(got, want, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.gpu
def test_compiles_whole_on_the_gpu():
    tokens, matrices = pair(4096)
    with torch.no_grad():
        want = compress_pair(tokens, matrices)
        got = torch.compile(compress_pair, fullgraph=True)(tokens, matrices)
    for mine, right in zip(got, want, strict=True):
        assert torch.equal(mine, right)
