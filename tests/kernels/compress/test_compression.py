"""Compression over positions against plain float64 sums and loops: all ways to share, dtypes, garbage in padding."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.compress import products
from attn_zoo.kernels.compress.compression import (
    Path,
    compress,
    compress_pair,
    fit_rows,
    pool_windows,
    window_counts,
    window_matrix,
)
from attn_zoo.kernels.trace import recording

SHARINGS = [(1, 1), (1, 3), (2, 1), (2, 3)]


def inputs(sharing: tuple[int, int], length: int = 37, rank: int = 5, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 3, length, 4, generator=generator, dtype=torch.float64)
    matrix = torch.randn(*sharing, length, rank, generator=generator, dtype=torch.float64) / math.sqrt(length)
    return tokens.to(dtype).requires_grad_(), matrix.to(dtype).requires_grad_()


def plain(tokens: Tensor, matrix: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        tokens = tokens.masked_fill(mask[:, None, :, None], 0.0)
    return torch.einsum("bgsk,bgsd->bgkd", matrix.expand(*tokens.shape[:2], -1, -1), tokens)


def checked(got: tuple[Tensor, ...], wide: list[Tensor], upstream: Tensor, mask: Tensor | None = None) -> None:
    """Compare output and gradients with float64: one rounding to the dtype, plus the rounding of a float32 sum.

    The classical bound for a sum of n products is n eps sum |products|, whatever the order.
    """
    exact = plain(wide[0], wide[1], mask)
    truths = (exact, *torch.autograd.grad(exact, wide, upstream.double()))
    sizes = [x.detach().abs().requires_grad_() for x in wide]
    size = plain(sizes[0], sizes[1], mask)
    magnitudes = (size, *torch.autograd.grad(size, sizes, upstream.double().abs()))
    terms = (wide[0].shape[2], wide[1].shape[3], wide[0].numel() // wide[0].shape[2])
    for mine, truth, magnitude, count in zip(got, truths, magnitudes, terms, strict=True):
        info = torch.finfo(mine.dtype)
        sum_error = count * torch.finfo(torch.float32).eps * magnitude
        bound = info.eps / 2 * (truth.abs() + sum_error) + sum_error + info.tiny * info.eps
        assert ((mine.double() - truth).abs() <= bound).all()


def padding(length: int) -> Tensor:
    mask = torch.zeros(2, length, dtype=torch.bool)
    mask[0, length // 3 :] = True
    mask[1, ::2] = True
    return mask


@pytest.fixture(params=["one product", 1, 7, 37, 1024])
def _cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As little as this is not cut; then chunks of one position, ragged, exactly the length, and longer than it."""
    if request.param != "one product":
        monkeypatch.setattr(products, "SMALL", 0)
        monkeypatch.setattr(products, "CPU_CHUNK", request.param)


@pytest.mark.usefixtures("_cut")
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("is_padded", [False, True])
def test_equals_the_plain_sum_and_its_gradients(sharing: tuple[int, int], is_padded: bool):
    tokens, matrix = inputs(sharing)
    mask = padding(37) if is_padded else None
    out, expected = compress(tokens, matrix, key_padding_mask=mask), plain(tokens, matrix, mask)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(expected)
    got = torch.autograd.grad(out, (tokens, matrix), upstream)
    want = torch.autograd.grad(expected, (tokens, matrix), upstream)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_cut")
@pytest.mark.parametrize("sharing", SHARINGS)
def test_gradcheck(sharing: tuple[int, int]):
    tokens, matrix = inputs(sharing, length=6, rank=2)
    mask = padding(6)
    assert torch.autograd.gradcheck(lambda t, m: compress(t, m, key_padding_mask=mask), (tokens, matrix))


@pytest.mark.usefixtures("_cut")
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_padding_never_matters(garbage: float):
    tokens, matrix = inputs((1, 1))
    mask = padding(37)
    dirty = tokens.detach().masked_fill(mask[:, None, :, None], garbage).requires_grad_()
    clean_out, dirty_out = (compress(x, matrix, key_padding_mask=mask) for x in (tokens, dirty))
    assert torch.equal(clean_out, dirty_out)
    clean, soiled = (torch.autograd.grad(o.sum(), (x, matrix)) for o, x in ((clean_out, tokens), (dirty_out, dirty)))
    assert torch.equal(clean[1], soiled[1])
    assert torch.equal(clean[0], soiled[0])
    assert not soiled[0].masked_select(mask[:, None, :, None]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [3000, 20000])
def test_sums_are_kept_in_float32_and_rounded_once(dtype: torch.dtype, length: int):
    tokens, matrix = inputs((1, 1), length, dtype=dtype)
    out = compress(tokens, matrix)
    assert out.dtype == dtype
    upstream = torch.randn(out.shape).to(dtype)
    got = (out, *torch.autograd.grad(out, (tokens, matrix), upstream))
    checked(got, [x.detach().double().requires_grad_() for x in (tokens, matrix)], upstream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_sum_does_not_stall(dtype: torch.dtype):
    """A running sum of ones in bfloat16 stalls at 256, in float16 at 2048."""
    ones = torch.ones(1, 1, 65536, 1, dtype=dtype)
    assert compress(ones, ones / 1024).item() == 64.0


def test_autocast_does_not_narrow_the_sum():
    tokens, matrix = inputs((1, 1), length=3000, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compress(tokens, matrix)
    assert torch.equal(out, compress(tokens, matrix))


@pytest.mark.parametrize(("length", "is_cut"), [(37, False), (5000, True)])
def test_only_what_is_little_is_one_product_with_torchs_own_gradients(length: int, is_cut: bool):
    tokens, matrix = inputs((1, 1), length)
    with recording() as paths:
        node = compress_pair((tokens, tokens), (matrix, matrix))[0].grad_fn
    assert paths == ["compress.chunked"]
    assert ("_Compress" in type(node).__name__) == is_cut


def test_repeats_bit_for_bit_and_notes_its_path():
    tokens, matrix = inputs((1, 1), length=5000, dtype=torch.float32)
    with recording() as paths:
        first = compress(tokens, matrix)
    assert paths == ["compress.chunked"]
    assert torch.equal(first, compress(tokens, matrix))


def test_keeps_only_its_inputs_for_the_backward_pass():
    tokens, matrix = inputs((1, 1), length=5000)
    mask, saved = padding(5000), []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compress(tokens, matrix, key_padding_mask=mask)
    assert set(saved) == {tokens.data_ptr(), matrix.data_ptr(), mask.data_ptr()}


@pytest.mark.usefixtures("_cut")
def test_frozen_inputs_get_no_gradient():
    tokens, matrix = inputs((1, 1))
    compress(tokens.detach(), matrix).sum().backward()
    compress(tokens, matrix.detach()).sum().backward()
    assert tokens.grad is not None
    assert matrix.grad is not None


@pytest.mark.usefixtures("_cut")
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("shared", ["nothing", "matrix", "tokens", "both"])
def test_a_pair_is_two_compressions(sharing: tuple[int, int], shared: str):
    """What is given twice has one gradient: the sum of both."""
    generator = torch.Generator().manual_seed(1)
    tokens, matrix = inputs(sharing)
    others = [torch.randn(x.shape, generator=generator, dtype=x.dtype).requires_grad_() for x in (tokens, matrix)]
    second = tokens if shared in ("tokens", "both") else others[0]
    other = matrix if shared in ("matrix", "both") else others[1]
    mask = padding(37)
    leaves = [tokens, matrix, *(x for x in others if x is second or x is other)]
    got = compress_pair((tokens, second), (matrix, other), key_padding_mask=mask)
    want = plain(tokens, matrix, mask), plain(second, other, mask)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    upstream = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in want]
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves, upstream),
        torch.autograd.grad(want, leaves, upstream),
        rtol=1e-12,
        atol=1e-12,
    )


def check_longer_matrix(groups: int, dtype: torch.dtype, path: Path) -> None:
    """Check a learned matrix with more rows than there are tokens: those beyond them get zeros as their gradient."""
    tokens, rows = inputs((1, groups), dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    longer = torch.cat((rows[0].detach(), torch.randn(groups, 300, 5, generator=generator, dtype=dtype)), 1)
    longer.requires_grad_()
    mask = padding(37)
    out, want = (compress(tokens, x, key_padding_mask=mask, path=path) for x in (longer, rows))
    torch.testing.assert_close(out, want)
    upstream = torch.randn(out.shape, generator=generator, dtype=dtype)
    got = torch.autograd.grad(out, (tokens, longer), upstream)
    of_tokens, of_rows = torch.autograd.grad(want, (tokens, rows), upstream)
    torch.testing.assert_close(got[0], of_tokens)
    torch.testing.assert_close(got[1][:, :37], of_rows[0])
    assert not got[1][:, 37:].any()


@pytest.mark.usefixtures("_cut")
@pytest.mark.parametrize("groups", [1, 3])
def test_a_learned_matrix_serves_shorter_sequences_with_its_first_rows(groups: int):
    check_longer_matrix(groups, torch.float64, "auto")


def test_a_pair_of_different_layouts_is_two_compressions():
    tokens, matrix = inputs((1, 1))
    strided = tokens.detach().transpose(1, 2).contiguous().transpose(1, 2)
    first, second = compress_pair((tokens, strided), (matrix, matrix))
    assert torch.equal(first, second)


@pytest.mark.parametrize("groups", [1, 3])
def test_a_little_pair_takes_the_first_rows_of_longer_matrices(groups: int):
    tokens, _ = inputs((1, groups))
    longer = torch.randn(groups, 50, 5, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, *tokens.shape[:2], 5, tokens.shape[3], dtype=torch.float64)
    rows = longer[None, :, : tokens.shape[2]]
    ours = torch.stack(compress_pair((tokens, 2 * tokens), (longer, longer)))
    plainly = torch.stack([plain(tokens, rows, None), plain(2 * tokens, rows, None)])
    results = [(out, *torch.autograd.grad(out, (tokens, longer), upstream)) for out in (ours, plainly)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("place", [0, 1])
def test_a_pair_that_does_not_fit_is_refused(place: int):
    tokens, matrix = inputs((1, 1))
    others = [tokens, tokens]
    others[place] = tokens.float()
    with pytest.raises(ValueError, match="expected dtype and device of tokens"):
        compress_pair((others[0], others[1]), (matrix, matrix))


@pytest.mark.parametrize(
    ("path", "message"),
    [("split_k", "tokens are on cpu"), ("triton", "no kernel for torch.float64|not installed")],
)
def test_a_named_path_that_cannot_run_is_refused(path: Any, message: str):
    tokens, matrix = inputs((1, 1))
    with pytest.raises(UnsupportedError, match=message):
        compress(tokens, matrix, path=path)


def test_strides_do_not_matter():
    tokens, matrix = inputs((1, 1))
    strided = tokens.detach().transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(compress(strided, matrix), compress(tokens, matrix))


@pytest.mark.parametrize("sharing", SHARINGS)
def test_an_empty_batch_gives_an_empty_result(sharing: tuple[int, int]):
    tokens, matrix = inputs(sharing)
    empty, rows = tokens[:0], matrix if matrix.shape[0] == 1 else matrix[:0]
    output = compress(empty, rows, key_padding_mask=padding(37)[:0])
    assert output.shape == (0, tokens.shape[1], matrix.shape[3], tokens.shape[3])
    (gradient,) = torch.autograd.grad(output.sum(), rows)
    assert torch.equal(gradient, torch.zeros_like(rows))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matrix": torch.zeros(1, 1, 9, 2)}, r"matrix: expected \[B or 1, G or 1, S, k\]"),
        ({"matrix": torch.zeros(1, 2, 37, 2)}, r"matrix: expected \[B or 1, G or 1, S, k\]"),
        ({"matrix": torch.zeros(1, 1, 38, 2)}, r"matrix: expected \[B or 1, G or 1, S, k\]"),
        ({"matrix": torch.zeros(1, 36, 2)}, r"or \[G or 1, N, k\] with N >= 37; got \[1, 36, 2\]"),
        ({"matrix": torch.zeros(2, 37, 2)}, r"or \[G or 1, N, k\]"),
        ({"matrix": torch.zeros(37, 2)}, r"matrix: expected \[B or 1, G or 1, S, k\]"),
        ({"matrix": torch.zeros(1, 1, 37, 2, dtype=torch.bfloat16)}, "matrix: expected dtype"),
        ({"key_padding_mask": torch.zeros(2, 36, dtype=torch.bool)}, "key_padding_mask: expected bool"),
        ({"key_padding_mask": torch.zeros(2, 37)}, "key_padding_mask: expected bool"),
    ],
)
def test_wrong_calls_are_explained(change: dict[str, Any], message: str):
    tokens, matrix = inputs((1, 1))
    with pytest.raises(ValueError, match=message):
        compress(tokens, **{"matrix": matrix, **change})


def test_interpolated_rows_at_full_length_are_the_matrix_itself():
    weight = torch.randn(2, 9, 3, dtype=torch.float64)
    rows, gain = fit_rows(weight, 9, "interpolate")
    assert torch.equal(rows[0], weight)
    assert gain is not None
    assert gain.item() == 1.0


def test_interpolated_rows_keep_the_compression_of_a_constant_sequence():
    """A matrix linear in position is resampled without error, so its sum over a constant sequence stays the same."""
    weight = (torch.arange(64, dtype=torch.float64) + 1)[None, :, None]
    for length in (1, 7, 32, 63):
        rows, gain = fit_rows(weight, length, "interpolate")
        assert gain is not None
        torch.testing.assert_close((rows.sum() * gain).item(), weight.sum().item(), rtol=1e-12, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("length", [1, 37, 4099])
def test_split_k_on_the_gpu(dtype: torch.dtype, sharing: tuple[int, int], length: int):
    assert not torch.backends.cuda.matmul.allow_tf32, "float32 has all of its digits"
    tokens, matrix = (x.detach().cuda().requires_grad_() for x in inputs(sharing, length, dtype=dtype))
    mask = padding(length).cuda()
    with recording() as paths:
        out = compress(tokens, matrix, key_padding_mask=mask, path="split_k")
    assert paths == ["compress.split_k"]
    upstream = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, (tokens, matrix), upstream))
    checked(got, [x.detach().double().requires_grad_() for x in (tokens, matrix)], upstream, mask)
    assert torch.equal(out, compress(tokens, matrix, key_padding_mask=mask, path="split_k"))


def looped(tokens: Tensor, width: int, weight: Tensor | None, mask: Tensor | None) -> Tensor:
    batch_size, groups, length, head_dim = tokens.shape
    out = torch.zeros(batch_size, groups, -(-length // width), head_dim, dtype=tokens.dtype)
    for b in range(batch_size):
        for window in range(out.shape[2]):
            inside = [
                j
                for j in range(window * width, min((window + 1) * width, length))
                if mask is None or not bool(mask[b, j])
            ]
            for g in range(groups):
                for j in inside:
                    share = 1 / len(inside) if weight is None else weight[g % weight.shape[0], j - window * width]
                    out[b, g, window] += share * tokens[b, g, j]
    return out


@pytest.mark.parametrize("length", [1, 4, 6, 13])
@pytest.mark.parametrize("kind", ["mean", "shared", "per_head"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_equals_loops(length: int, kind: str, is_padded: bool):
    torch.manual_seed(0)
    tokens = torch.randn(2, 3, length, 2, dtype=torch.float64, requires_grad=True)
    rows = {"mean": 0, "shared": 1, "per_head": 3}[kind]
    weight = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True) if rows else None
    mask = torch.rand(2, length) < 0.5 if is_padded else None
    leaves = [tokens] if weight is None else [tokens, weight]
    expected = looped(tokens, 4, weight, mask)
    out = pool_windows(tokens, 4, weight, key_padding_mask=mask)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    dense = window_matrix(length, 4, weight, key_padding_mask=mask, like=tokens)
    torch.testing.assert_close(dense.mT @ tokens, expected, rtol=1e-12, atol=1e-12)
    if expected.requires_grad:
        upstream = torch.randn_like(out)
        got, want = (torch.autograd.grad(x, leaves, upstream) for x in (out, expected))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_padding_never_matters_and_empty_windows_are_zero():
    tokens = torch.randn(1, 1, 6, 2)
    mask = torch.tensor([[False, True, True, True, True, True]])
    dirty = tokens.masked_fill(mask[:, None, :, None], float("nan"))
    out = pool_windows(dirty, 2, key_padding_mask=mask)
    assert torch.equal(out[0, 0, 0], tokens[0, 0, 0])
    assert not out[0, 0, 1:].any()
    assert window_counts(6, 2, key_padding_mask=mask, device=mask.device).tolist() == [[1, 0, 0]]


def test_means_of_many_positions_are_exact_in_bfloat16():
    """Four thousand ones summed in bfloat16 would stall at 256."""
    out = pool_windows(torch.ones(1, 1, 4096, 1, dtype=torch.bfloat16), 4096)
    assert out.dtype == torch.bfloat16
    assert out.item() == 1.0
