"""Attention to few keys in parts is the same attention: values, gradients, layouts."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_zoo.kernels.exact.row_chunks import attend_in_parts, num_parts


def tensors(is_interleaved: bool, batch_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (48, 5, 5)
    drawn = [torch.randn(batch_size, 3, n, 4, generator=generator, dtype=torch.float64) for n in lengths]
    if is_interleaved:
        drawn = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn]
    return [x.requires_grad_() for x in drawn]


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("parts", [1, 2, 16])
def test_parts_change_nothing(is_interleaved: bool, batch_size: int, parts: int):
    query, key, value = tensors(is_interleaved, batch_size)
    want = scaled_dot_product_attention(query, key, value)
    got = attend_in_parts(query, key, value, scaled_dot_product_attention, parts)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
    gradients = [torch.autograd.grad(x, (query, key, value), upstream) for x in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("is_interleaved", "batch_size"), [(True, 1), (True, 2), (False, 1)])
def test_queries_are_not_copied(is_interleaved: bool, batch_size: int):
    query, key, value = (x.detach() for x in tensors(is_interleaved, batch_size))
    seen = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append(query.data_ptr())
        return query

    out = attend_in_parts(query, key, value, attend, 4)
    assert seen == [query.data_ptr()] == [out.data_ptr()]
    assert torch.equal(out, query)


def test_a_cpu_needs_no_parts():
    assert num_parts(torch.empty(1, 16, 65536, 64, device="meta"), torch.empty(1, 16, 256, 64, device="meta")) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "length", "key_len", "parts"),
    [(16, 65536, 256, 16), (16, 2048, 256, 2), (16, 1000, 256, 1), (16, 65537, 256, 1), (512, 65536, 256, 1)],
)
def test_parts_fill_the_gpu(heads: int, length: int, key_len: int, parts: int):
    query, key = (torch.empty(1, heads, n, 8, device="cuda", dtype=torch.bfloat16) for n in (length, key_len))
    assert num_parts(query, key) == parts
