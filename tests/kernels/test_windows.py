"""Windows: against loops over positions, ragged lengths, padding with garbage."""

import pytest
import torch

from attn_zoo.kernels.windows import pool_windows, window_counts, window_matrix


def looped(tokens: torch.Tensor, width: int, weight: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
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
