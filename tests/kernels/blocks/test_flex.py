"""The FlexAttention path: its block masks say the pattern, both ways, and its three parts add up to it.

Without a GPU the compiled kernel is replaced by a plain one that reads nothing but the block mask's lists, as the
kernel does. With one, the real path is compared with dense attention, forward and backward.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask

from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.blocks import call
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention
from attn_zoo.kernels.blocks.call import BlockCall, _backward_tile, why_not_flex
from attn_zoo.kernels.blocks.flex import flex_forward, global_block_mask, listed_block_mask
from attn_zoo.kernels.blocks.pattern import BlockPattern
from attn_zoo.kernels.exact import flex_attention
from attn_zoo.kernels.trace import recording
from tests.kernels.blocks.test_gather import (
    BATCH,
    HEADS,
    dense_attention,
    drawn_pattern,
    make_inputs,
    make_layout,
    make_padding,
    value_and_gradients,
)

CASES = [
    (length, is_causal, extra) for length in (33, 64, 100, 200) for is_causal in (False, True) for extra in (0, 32)
]


def blocks_of(counts: Tensor | None, indices: Tensor | None, num_columns: int) -> Tensor:
    """Return bool `[B or 1, P, rows, columns]` from a block mask's lists."""
    assert counts is not None
    assert indices is not None
    blocks = torch.zeros(*counts.shape, num_columns, dtype=torch.bool)
    for entry, head, row in np.ndindex(*counts.shape):
        for column in indices[entry, head, row, : counts[entry, head, row]].tolist():
            assert not blocks[entry, head, row, column]
            blocks[entry, head, row, column] = True
    return blocks


def dense_of(mask: BlockMask, batch_size: int) -> Tensor:
    """Return bool `[B, P, queries, keys]` that a kernel reading the block mask would see."""
    (num_queries, num_keys), (size, _) = mask.seq_lengths, mask.BLOCK_SIZE
    columns = -(-num_keys // size)
    partial = blocks_of(mask.kv_num_blocks, mask.kv_indices, columns)
    full = blocks_of(mask.full_kv_num_blocks, mask.full_kv_indices, columns)
    assert not (partial & full).any()
    rows = partial.shape[2]
    assert torch.equal(partial, blocks_of(mask.q_num_blocks, mask.q_indices, rows).mT)
    assert torch.equal(full, blocks_of(mask.full_q_num_blocks, mask.full_q_indices, rows).mT)
    partial, full = (
        x.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, :num_queries, :num_keys] for x in (partial, full)
    )
    batch, head = torch.arange(batch_size)[:, None, None, None], torch.zeros(1, 1, 1, 1, dtype=torch.long)
    query_at, key_at = torch.arange(num_queries)[:, None], torch.arange(num_keys)
    inside = mask.mask_mod(batch, head, query_at, key_at)
    return full | (partial & inside)


def expected_masks(pattern: BlockPattern, padding: Tensor | None) -> Tensor:
    keep = pattern.to_dense().expand(BATCH, -1, -1, -1)
    if padding is not None:
        keep = keep & ~padding[:, None, None]
    return keep[:, :, pattern.num_dense_rows * pattern.block_size :]


@pytest.mark.parametrize(("length", "is_causal", "extra"), CASES)
@pytest.mark.parametrize("has_padding", [False, True])
def test_block_masks_say_the_pattern_both_ways(length: int, is_causal: bool, extra: int, has_padding: bool):
    pattern = drawn_pattern(make_layout(length, is_causal=is_causal, num_extra_tokens=extra), HEADS, (2, 1))
    padding = make_padding(pattern.key_len) if has_padding else None
    expected = expected_masks(pattern, padding)
    split = pattern.num_global * pattern.block_size
    listed = dense_of(listed_block_mask(pattern, padding), BATCH)
    assert not listed[..., :split].any()
    assert torch.equal(listed.expand_as(expected)[..., split:], expected[..., split:])
    if padding is not None:
        columns = dense_of(global_block_mask(pattern, padding), BATCH)
        assert torch.equal(columns.expand(BATCH, HEADS, -1, -1), expected[..., :split])
    else:
        assert expected[..., :split].all()


def test_block_masks_are_compact():
    pattern = drawn_pattern(make_layout(16 * 512), HEADS, (2, 1))
    mask = listed_block_mask(pattern, None)
    for indices in (mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices):
        assert indices is not None
        assert indices.shape[-1] < 20
        assert indices.is_contiguous()
    assert int(mask.kv_num_blocks.sum()) == 0  # nothing is masked inside a block, so the kernel never runs the mask


def plain_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask | None,
    scale: float,
    kernel_options: dict[str, Any],
    return_aux: Any,
) -> tuple[Tensor, AuxOutput]:
    """Do what compiled FlexAttention does, reading only the block mask's lists."""
    assert return_aux.lse
    assert pytest.approx(16) == kernel_options["fwd_BLOCK_M"]
    scores = query @ key.mT * scale
    if score_mod is not None:
        batch, head, query_at, key_at = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
        scores = score_mod(scores, batch, head, query_at, key_at)
    if block_mask is not None:
        assert block_mask.seq_lengths == tuple(scores.shape[-2:])
        scores = scores.masked_fill(~dense_of(block_mask, len(query)), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
    return weights @ value, AuxOutput(lse=lse)


@pytest.mark.parametrize(("length", "is_causal", "extra"), [(1, False, 0), (20, True, 0), *CASES])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("has_slopes", [False, True])
def test_parts_add_up(
    length: int, is_causal: bool, extra: int, has_padding: bool, has_slopes: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(flex_attention, "_compiled", lambda: plain_kernel)
    pattern = drawn_pattern(make_layout(length, is_causal=is_causal, num_extra_tokens=extra), HEADS, (2, 1))
    inputs = make_inputs(pattern, torch.float64)
    padding = make_padding(pattern.key_len) if has_padding else None
    slopes = torch.tensor([0.5, 0.1, 0.02], dtype=torch.float64) if has_slopes else None

    def run(tensors: list[Tensor]) -> Tensor:
        query, key, value = tensors
        return flex_forward(BlockCall(query, key, value, padding, pattern, slopes))[0]

    with recording() as paths:
        output = run(inputs)
    assert paths == ["block_sparse.flex"]
    torch.testing.assert_close(output, dense_attention(inputs, pattern, padding, slopes), rtol=1e-12, atol=1e-12)


def test_merged_parts_have_the_right_gradient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flex_attention, "_compiled", lambda: plain_kernel)
    pattern = drawn_pattern(make_layout(100), HEADS, (2, 1))
    inputs = make_inputs(pattern, torch.float64)

    def run(tensors: list[Tensor]) -> Tensor:
        query, key, value = tensors
        return flex_forward(BlockCall(query, key, value, None, pattern))[0]

    expected = value_and_gradients(lambda x: dense_attention(x, pattern), inputs)
    for found, wanted in zip(value_and_gradients(run, inputs), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["flex", "gather"])
@pytest.mark.parametrize(
    ("length", "is_causal", "has_padding", "has_slopes"),
    [
        (512, False, False, False),
        (500, False, True, False),
        (512, True, False, False),
        (500, True, True, True),
        (1024, False, False, True),
    ],
)
def test_gpu_paths_agree_with_dense_attention(
    dtype: torch.dtype, backend: Any, length: int, is_causal: bool, has_padding: bool, has_slopes: bool
):
    block_size = 128 if dtype == torch.bfloat16 else 64  # what the backward accepts on Hopper
    pattern = drawn_pattern(make_layout(length, block_size=block_size, is_causal=is_causal), HEADS, (2, 1))
    padding = make_padding(pattern.key_len) if has_padding else None
    slopes = torch.tensor([0.5, 0.1, 0.02]) if has_slopes else None
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(BATCH, HEADS, length, 64, generator=generator).to(dtype) for _ in range(3)]

    def dense(tensors: list[Tensor]) -> Tensor:
        # The helper scales by its own small head_dim, which a factor on the queries makes up for.
        return dense_attention([tensors[0] * (8 / 64) ** 0.5, *tensors[1:]], pattern, padding, slopes)

    def run(tensors: list[Tensor]) -> Tensor:
        query, key, value = (x.cuda() for x in tensors)
        output = block_sparse_attention(
            query,
            key,
            value,
            pattern.to("cuda"),
            key_padding_mask=None if padding is None else padding.cuda(),
            slopes=None if slopes is None else slopes.cuda(),
            backend=backend,
        )
        return output.cpu()

    truth = value_and_gradients(dense, [x.double() for x in inputs])
    plain = value_and_gradients(dense, inputs)
    with recording() as paths:
        actual = value_and_gradients(run, inputs)
    assert paths == ["block_sparse.flex" if backend == "flex" else "block_sparse.gather"]
    for found, rough, wanted in zip(actual, plain, truth, strict=True):
        error, plain_error = (float((x.double() - wanted).abs().max()) for x in (found, rough))
        # TensorFloat32, which kernels may use for float32 products, keeps 10 bits.
        eps = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 2.0**-10
        assert error <= 2 * plain_error + 2 * eps * float(wanted.abs().max())


@pytest.mark.gpu
def test_gpu_memory_is_linear_in_the_length():
    peaks = []
    for length in (1 << 14, 1 << 15):
        pattern = drawn_pattern(make_layout(length, block_size=128), HEADS, (2, 1)).to("cuda")
        query, key, value = (
            torch.randn(1, HEADS, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        for _ in range(2):  # the first pass compiles
            torch.cuda.reset_peak_memory_stats()
            block_sparse_attention(query, key, value, pattern, backend="flex").sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        del query, key, value
        torch.cuda.empty_cache()
    assert peaks[1] < 2.2 * peaks[0]


def test_blocks_that_the_backward_has_no_tiles_for_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Torch's table, asked as on a Hopper GPU: 16-bit types of 64 to 128 features have tiles of 128, float32 of 16."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    _backward_tile.cache_clear()
    cuda = torch.device("cuda")
    reason = why_not_flex(cuda, torch.bfloat16, 64, 64, needs_grad=True)
    assert reason == "FlexAttention's backward needs block_size a multiple of 128 on this device; got 64"
    assert why_not_flex(cuda, torch.bfloat16, 64, 64) is None  # forward has tiles of 64
    assert why_not_flex(cuda, torch.bfloat16, 64, 128, needs_grad=True) is None
    assert why_not_flex(cuda, torch.bfloat16, 32, 64, needs_grad=True) is None
    assert why_not_flex(cuda, torch.float32, 64, 16, needs_grad=True) is None
    _backward_tile.cache_clear()


def test_no_graph_of_the_compiler_holds_flex(monkeypatch: pytest.MonkeyPatch):
    """Its own gradient would not run inside: `auto` takes another path, and who names it is told."""
    monkeypatch.setattr(call, "why_not_flex", lambda *_, **__: None)
    query = torch.zeros(1, 2, 64, 48)
    rest = 64, 0.0
    assert call.choose_path(query, *rest, "auto", False, is_compiled=False) == "flex"
    assert call.choose_path(query, *rest, "auto", False, is_compiled=True) == "gather"
    with pytest.raises(UnsupportedError, match="no compiled graph can hold"):
        call.choose_path(query, *rest, "flex", False, is_compiled=True)


def test_a_grid_of_triton_holds_so_many_sequences_and_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(call, "why_not_triton", lambda *_: None)
    for shape, path in (
        ((65_535, 2, 16, 16), "triton"),
        ((65_536, 2, 16, 16), "gather"),
        ((2, 65_536, 16, 16), "gather"),
    ):
        query = torch.empty(shape, device="meta")
        assert call.choose_path(query, 16, 0.0, "auto", False, is_compiled=False) == path
    with pytest.raises(UnsupportedError, match="at most 65535 sequences and heads; got 65536"):
        call.choose_path(query, 16, 0.0, "triton", False, is_compiled=False)


def test_lists_are_made_once_for_a_pattern():
    """Making them waits for the device, and a training step must not."""
    pattern = drawn_pattern(make_layout(256), 2, (0, 0))
    paddings = [torch.zeros(1, 256, dtype=torch.bool) for _ in range(2)]
    for make in (listed_block_mask, global_block_mask):
        one, two = (make(pattern, padding) for padding in paddings)
        assert one.kv_indices is two.kv_indices
        assert one.q_indices is two.q_indices
        assert one.mask_mod is not two.mask_mod
    assert listed_block_mask(pattern, None).kv_indices is not listed_block_mask(pattern, paddings[0]).kv_indices
