"""The compression's Triton kernels in Triton's interpreter, against float64: all ways to share, padding, strides.

The interpreter cuts bfloat16 off instead of rounding it; that dtype is compiled in test_triton_launch.py and computed
on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo.kernels.compress import triton_launch, triton_tiles
from attn_zoo.kernels.compress.compression import Path, compress, compress_pair
from attn_zoo.kernels.trace import recording
from tests.kernels.compress.test_compression import SHARINGS, check_longer_matrix, checked, padding
from tests.kernels.interpreter import IS_INTERPRETING, mend_interpreter

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not IS_INTERPRETING, reason="run by test_triton_launch.py in a process of its own"),
]
TRITON: Path = "triton"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make tiles as small as they may be, so that small inputs take several in every direction, and several splits.

    What is allocated is full of NaN: nothing may depend on memory that was not written.
    """
    mend_interpreter(monkeypatch)
    torch.use_deterministic_algorithms(True)
    for name, value in {"MAX_RANK": 16, "MAX_COLUMNS": 16, "MAX_PLAIN": 16, "MIN_SPLIT": 64, "SPLIT_COST": 1}.items():
        monkeypatch.setattr(triton_tiles, name, value)
    forget_cuts()
    yield
    forget_cuts()
    torch.use_deterministic_algorithms(False)


def forget_cuts() -> None:
    """Forget how launches are cut: it was worked out for tiles of another size."""
    for kept in (triton_launch._forwards, triton_launch._backwards):
        kept.clear()


def draw(sharing: tuple[int, int], dtype: torch.dtype, length: int = 150, rank: int = 20, dim: int = 8) -> Any:
    """Return tokens `[2, 3, S, D]` of interleaved heads, as projections leave them, and a matrix."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randn(2, length, 3, dim, generator=generator).to(dtype).transpose(1, 2)
    matrix = torch.randn(*sharing, length, rank, generator=generator) / math.sqrt(length)
    return tokens.requires_grad_(), matrix.to(dtype).requires_grad_()


def spoil(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens.detach().masked_fill(mask[:, None, :, None], float("nan")).requires_grad_()


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize(("dtype", "is_padded"), [(torch.float32, True), (torch.float16, True), (torch.float16, False)])
def test_equals_float64(sharing: tuple[int, int], dtype: torch.dtype, is_padded: bool):
    tokens, matrix = draw(sharing, dtype)
    mask = padding(150) if is_padded else None
    given = tokens if mask is None else spoil(tokens, mask)
    with recording() as paths:
        out = compress(given, matrix, key_padding_mask=mask, path=TRITON)
    assert paths == ["compress.triton"]
    upstream = torch.randn(out.shape).to(dtype)
    got = (out, *torch.autograd.grad(out, (given, matrix), upstream))
    assert got[1].stride() == given.stride()
    checked(got, [x.detach().double().requires_grad_() for x in (tokens, matrix)], upstream, mask)


@pytest.mark.parametrize(("length", "rank", "dim"), [(1, 1, 1), (64, 16, 16), (65, 33, 5), (130, 3, 40)])
def test_ragged_sizes(length: int, rank: int, dim: int):
    tokens, matrix = draw((1, 1), torch.float32, length, rank, dim)
    out = compress(tokens, matrix, path=TRITON)
    upstream = torch.randn(out.shape)
    got = (out, *torch.autograd.grad(out, (tokens, matrix), upstream))
    checked(got, [x.detach().double().requires_grad_() for x in (tokens, matrix)], upstream)


@pytest.mark.parametrize("shared", ["nothing", "matrix", "tokens"])
@pytest.mark.parametrize("max_rank", [16, 32])
def test_a_pair_is_two_compressions(shared: str, max_rank: int, monkeypatch: pytest.MonkeyPatch):
    """With one rank tile and with two, which the gradient of tokens reads in steps."""
    monkeypatch.setattr(triton_tiles, "MAX_RANK", max_rank)
    forget_cuts()
    tokens, matrix = draw((1, 1), torch.float16)
    other_tokens = tokens if shared == "tokens" else (tokens.detach() * 2).requires_grad_()
    other_matrix = matrix if shared == "matrix" else (matrix.detach() - 0.1).requires_grad_()
    mask = padding(150)
    leaves = list(dict.fromkeys((tokens, other_tokens, matrix, other_matrix)))
    results = []
    upstream = [torch.randn(2, 3, 20, 8).half() for _ in range(2)]
    for path, dtype in ((TRITON, torch.float16), ("chunked", torch.float64)):
        wide = {x: x.detach().to(dtype).requires_grad_() for x in leaves}
        pairs = (wide[tokens], wide[other_tokens]), (wide[matrix], wide[other_matrix])
        out = compress_pair(*pairs, key_padding_mask=mask, path=path)
        results.append((*out, *torch.autograd.grad(out, list(wide.values()), [x.to(dtype) for x in upstream])))
    for mine, truth in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=2e-3, atol=2e-3 * truth.abs().max().item())


def test_padding_of_a_source_that_meets_two_matrices_gets_exact_zeros():
    """As a mixer that compresses first has it: one head of several tiles, E and F, padding with garbage."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 40, generator=generator).half()
    matrices = [(torch.randn(1, 1, 7, 40, generator=generator) / 6).half().requires_grad_() for _ in range(2)]
    mask = torch.tensor([[1, 0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 1, 0]], dtype=torch.bool)
    tokens = spoil(hidden[:, None], mask)
    out = compress_pair((tokens, tokens), (matrices[0], matrices[1]), key_padding_mask=mask, path=TRITON)
    (grad,) = torch.autograd.grad(out, tokens, [torch.randn(x.shape, generator=generator).half() for x in out])
    assert not grad[mask[:, None, :, None].expand_as(grad)].any()
    assert grad[~mask[:, None, :, None].expand_as(grad)].all()


def test_gradients_are_read_where_they_lie():
    """Heads interleaved, as kernels of attention leave them; what the kernels cannot read so is copied."""
    tokens, matrix = draw((1, 1), torch.float32)
    out = compress(tokens, matrix, path=TRITON)
    drawn = torch.randn(out.shape)
    interleaved, sideways = drawn.transpose(1, 2).contiguous().transpose(1, 2), drawn.mT.contiguous().mT
    want, *got = (
        torch.autograd.grad(out, (tokens, matrix), x, retain_graph=True) for x in (drawn, interleaved, sideways)
    )
    assert [x.has_copies for x in triton_launch._backwards.values()] == [False, False, True]
    for each in got:
        assert all(torch.equal(mine, right) for mine, right in zip(each, want, strict=True))
    (of_one,) = torch.autograd.grad(out.sum(), tokens)  # one number, expanded
    assert torch.equal(
        of_one, torch.autograd.grad(compress(tokens, matrix, path=TRITON), tokens, torch.ones_like(out))[0]
    )


@pytest.mark.parametrize("groups", [1, 3])
def test_a_learned_matrix_serves_shorter_sequences_with_its_first_rows(groups: int):
    check_longer_matrix(groups, torch.float32, TRITON)


def test_splits_are_added_in_order():
    tokens, matrix = draw((1, 1), torch.float32, 500)
    first, second = (compress(tokens, matrix, path=TRITON) for _ in range(2))
    assert triton_tiles.num_splits(4, 500) == 7
    assert torch.equal(first, second)


@pytest.mark.parametrize("is_padded", [False, True])
def test_operators_are_registered_as_torch_expects(is_padded: bool):
    tokens, matrix = draw((1, 1), torch.float32, 20, rank=5)
    grad = torch.randn(2, 3, 5, 8)
    tensors, mask = ([tokens.detach()], [matrix.detach()]), padding(20) if is_padded else None
    operators = torch.ops.attn_zoo
    for operator, given in (
        (operators.compress, (*tensors, mask)),
        (operators.compress_gradients, (*tensors, mask, [grad], True, True)),
        (operators.compress_gradients, (*tensors, mask, [grad], False, True)),
        (operators.compress_gradients, (*tensors, mask, [grad], True, False)),
    ):
        torch.library.opcheck(operator.default, given)


def test_compiled_whole():
    """Traced by torch's compiler without a break, forward and backward: operators are opaque to it."""
    tokens, matrix = draw((1, 1), torch.float32, 70)
    matrix = torch.cat((matrix[0].detach(), torch.ones(1, 9, 20)), 1).requires_grad_()  # for longer sequences too

    def loss(tokens: Tensor, matrix: Tensor) -> Tensor:
        return compress(tokens, matrix, path=TRITON).square().sum()

    want = torch.autograd.grad(loss(tokens, matrix), (tokens, matrix))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(tokens, matrix), (tokens, matrix))
    torch.testing.assert_close(got, want)


def test_forward_derivatives_are_refused():
    tokens, matrix = (x.detach() for x in draw((1, 1), torch.float32))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tokens, torch.ones_like(tokens))
        with pytest.raises(RuntimeError, match="forward mode AD"):
            compress(dual, matrix, path=TRITON)
