"""Tables made of the data in every call: right on every path, and never read on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from attn_zoo.kernels.blocks import pieces
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention, block_sparse_attention_with_lse
from attn_zoo.kernels.blocks.call import BlockCall
from attn_zoo.kernels.blocks.flex import flex_forward, listed_block_mask
from attn_zoo.kernels.blocks.pattern import BlockPattern, make_pattern
from attn_zoo.kernels.exact import flex_attention
from tests.exactness import assert_exact
from tests.kernels.blocks.tables import cross_table, random_lists, random_table
from tests.kernels.blocks.test_flex import dense_of, plain_kernel
from tests.kernels.blocks.test_gather import value_and_gradients

BATCH, HEADS, DIM = 2, 4, 16


def inputs_for(length: int, dtype: torch.dtype = torch.float64, head_dim: int = DIM) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shape = (BATCH, HEADS, length, head_dim)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


def padding_for(length: int) -> Tensor:
    padding = torch.zeros(BATCH, length, dtype=torch.bool)
    padding[0, 2 * length // 3 :] = True
    padding[1, ::5] = True
    return padding


def visible(pattern: BlockPattern, padding: Tensor | None) -> Tensor:
    """Return bool `[B, H, L, S]` from the lists alone."""
    size, group = pattern.block_size, HEADS // pattern.num_heads
    keep = torch.zeros(BATCH, HEADS, pattern.query_len, pattern.key_len, dtype=torch.bool)
    for entry in range(BATCH):
        for head in range(HEADS):
            table = min(entry, pattern.indices.shape[0] - 1), head // group
            for row in range(pattern.num_query_blocks):
                seen = list(range(pattern.num_key_blocks))
                if row >= pattern.num_dense_rows:
                    place = (*table, row - pattern.num_dense_rows)
                    seen = [*range(pattern.num_global), *pattern.indices[place][: pattern.counts[place]].tolist()]
                for block in seen:
                    keep[entry, head, row * size : (row + 1) * size, block * size : (block + 1) * size] = True
    if pattern.is_causal:
        keep = keep.tril()
    return keep if padding is None else keep & ~padding[:, None, None]


def dense(inputs: Sequence[Tensor], pattern: BlockPattern, padding: Tensor | None, slopes: Tensor | None) -> Tensor:
    query, key, value = inputs
    keep = visible(pattern, padding)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if slopes is not None:
        at = torch.arange(query.shape[2])
        scores = scores - slopes[:, None, None].to(scores.dtype) * (at[:, None] - at).abs()
    weights = scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(-1) * keep
    output: Tensor = weights @ value
    return output


CASES = [
    # length, tables in a batch entry, causal, padding, slopes, global
    (64, 4, False, False, False, False),
    (90, 4, False, True, False, False),
    (90, 2, True, False, False, False),
    (90, 2, True, True, True, False),
    (128, 1, True, False, False, True),
    (75, 1, False, True, True, True),
    (9, 4, True, True, False, False),
]


@pytest.mark.parametrize(("length", "tables", "is_causal", "has_padding", "has_slopes", "has_global"), CASES)
@pytest.mark.parametrize("entries", [1, BATCH])
@pytest.mark.parametrize("piece_bytes", [1 << 13, 1 << 19])
def test_gather_equals_dense_attention(
    length: int,
    tables: int,
    is_causal: bool,
    has_padding: bool,
    has_slopes: bool,
    has_global: bool,
    entries: int,
    piece_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(pieces, "_CPU_PIECE_BYTES", piece_bytes)
    pattern = random_table(entries, tables, length, is_causal=is_causal, has_global=has_global)
    padding = padding_for(length) if has_padding else None
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.0]) if has_slopes else None

    def run(x: list[Tensor]) -> Tensor:
        query, key, value = x
        return block_sparse_attention(
            query, key, value, pattern, key_padding_mask=padding, slopes=slopes, backend="gather"
        )

    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        inputs = inputs_for(length, dtype)
        actual = value_and_gradients(run, inputs)
        plain = value_and_gradients(lambda x: dense(x, pattern, padding, slopes), inputs)
        exact = value_and_gradients(lambda x: dense(x, pattern, padding, slopes), [x.double() for x in inputs])
        for what, one, rough, wanted in zip(("output", "query", "key", "value"), actual, plain, exact, strict=True):
            assert one.isfinite().all()
            assert_exact(one, rough, wanted, what)


@pytest.mark.parametrize(("length", "tables", "is_causal", "has_padding", "has_slopes", "has_global"), CASES)
@pytest.mark.parametrize("entries", [1, BATCH])
def test_flex_equals_dense_attention(
    length: int,
    tables: int,
    is_causal: bool,
    has_padding: bool,
    has_slopes: bool,
    has_global: bool,
    entries: int,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(flex_attention, "_compiled", lambda: plain_kernel)
    pattern = random_table(entries, tables, length, is_causal=is_causal, has_global=has_global)
    padding = padding_for(length) if has_padding else None
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.0], dtype=torch.float64) if has_slopes else None

    def run(x: list[Tensor]) -> Tensor:
        query, key, value = x
        return flex_forward(BlockCall(query, key, value, padding, pattern, slopes, DIM**-0.5))[0]

    actual = value_and_gradients(run, inputs_for(length))
    expected = value_and_gradients(lambda x: dense(x, pattern, padding, slopes), inputs_for(length))
    for one, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_block_masks_say_the_table_both_ways(is_causal: bool):
    pattern = random_table(BATCH, HEADS, 90, is_causal=is_causal)
    assert torch.equal(dense_of(listed_block_mask(pattern, None), BATCH), visible(pattern, None))


def test_the_dense_form_and_the_pairs_are_the_lists():
    for is_causal in (False, True):
        pattern = random_table(BATCH, HEADS, 90, is_causal=is_causal)
        assert torch.equal(pattern.to_dense(), visible(pattern, None))
        assert pattern.num_pairs == int(visible(pattern, None).sum())
        rows, starts = pattern.transposed
        for place in [(0, 0), (1, 3)]:
            counted = zip(pattern.indices[place], pattern.counts[place], strict=True)
            table = [row[:count].tolist() for row, count in counted]
            for column in range(pattern.num_key_blocks):
                listed = rows[place][starts[place][column] : starts[place][column + 1]].tolist()
                assert listed == [number for number, entries in enumerate(table) if column in entries]


def test_empty_rows_are_zero_and_have_no_gradient():
    pattern = random_table(BATCH, HEADS, 64)
    leaves = [x.requires_grad_() for x in inputs_for(64)]
    query, key, value = leaves
    output = block_sparse_attention(query, key, value, pattern)
    empty = pattern.counts[:, :, 1] == 0
    assert empty.all()
    assert output[:, :, 16:32].abs().max() == 0
    gradients = torch.autograd.grad(output.square().sum() + output.sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0][:, :, 16:32].abs().max() == 0


def test_a_table_of_nothing_is_zero():
    nothing = torch.zeros(1, 1, 4, 3, dtype=torch.bool)
    for width in (0, 3):
        pattern = make_pattern(
            torch.arange(3).expand(1, 1, 4, 3)[..., :width],
            nothing[..., :width],
            query_len=64,
            key_len=64,
            block_size=16,
            is_dynamic=True,
        )
        query, key, value = (x.requires_grad_() for x in inputs_for(64))
        output = block_sparse_attention(query, key, value, pattern)
        results = [output.detach(), *torch.autograd.grad(output.sum(), (query, key, value))]
        assert all(float(x.abs().max()) == 0.0 for x in results)


def test_dropout_has_the_gradient_of_what_it_computed():
    pattern, inputs = random_table(BATCH, 2, 50, is_causal=True), inputs_for(50)
    weights, direction = torch.randn(2, *inputs[0].shape, dtype=torch.float64).unbind()

    def run(tensors: Sequence[Tensor]) -> Tensor:
        torch.manual_seed(3)
        query, key, value = tensors
        return block_sparse_attention(query, key, value, pattern, dropout_p=0.3)

    leaves = [x.clone().requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(run(leaves), leaves, weights)
    for index, gradient in enumerate(gradients):
        sides = []
        for step in (1e-5, -1e-5):
            moved = [x + step * direction if place == index else x for place, x in enumerate(inputs)]
            sides.append(float((run(moved) * weights).sum()))
        slope = (sides[0] - sides[1]) / 2e-5
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-6, abs=1e-6)


def select(query: Tensor, key: Tensor, count: int) -> BlockPattern:
    """Choose key blocks by pooled scores: a table of the data."""
    size, num_blocks = 16, query.shape[2] // 16
    pooled = (x.unflatten(2, (num_blocks, size)).mean(3) for x in (query, key))
    scores = torch.matmul(*(x.mT if index else x for index, x in enumerate(pooled)))
    blocks = scores.topk(count, dim=-1).indices
    return make_pattern(
        blocks,
        torch.ones_like(blocks, dtype=torch.bool),
        query_len=query.shape[2],
        key_len=key.shape[2],
        block_size=size,
        is_dynamic=True,
    )


def test_nothing_waits_for_the_device():
    """Whatever reads a tensor's content on the host raises in torch's fake mode."""
    with FakeTensorMode():
        query, key, _ = (torch.randn(BATCH, HEADS, 128, DIM) for _ in range(3))
        pattern = select(query, key, 3)
        assert len(pattern.transposed) == 2
        listed_block_mask(pattern, None)
        assert pattern.full_rows == [False] * 8
        assert pattern.has_empty_rows
        with pytest.raises(DataDependentOutputException):
            float(pattern.counts[0, 0, 0])


def test_a_model_that_makes_its_table_compiles_in_one_graph():
    def model(tensors: list[Tensor]) -> Tensor:
        query, key, value = (2 * x for x in tensors)
        return block_sparse_attention(query, key, value, select(query, key, 3), backend="gather") + 1

    inputs = inputs_for(128)
    wanted = value_and_gradients(model, inputs)
    actual = value_and_gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs)
    torch.compiler.reset()
    assert all(torch.equal(one, other) for one, other in zip(actual, wanted, strict=True))


@pytest.mark.parametrize("shape", [(3, 1), (1, 3)])
def test_tables_for_other_sizes_are_refused(shape: tuple[int, int]):
    blocks, is_entry = random_lists(*shape, 64)
    sizes: dict[str, Any] = {"query_len": 64, "key_len": 64, "block_size": 16, "is_dynamic": True}
    query, key, value = inputs_for(64)
    with pytest.raises(ValueError, match="expected one for L = 64, S = 64, H = 4, B = 2"):
        block_sparse_attention(query, key, value, make_pattern(blocks, is_entry, **sizes))


def test_values_and_masks_of_other_sizes_are_refused():
    """A kernel would read past their end."""
    query, key, value = inputs_for(64)
    pattern = random_table(BATCH, 2, 64, has_global=True)
    for name, wrong in (("value", value[:, :, :48]), ("value", value[..., :8]), ("key", key[:, :1])):
        given = {"key": key, "value": value} | {name: wrong}
        with pytest.raises(ValueError, match=f"{name}: expected"):
            block_sparse_attention(query, given["key"], given["value"], pattern)
    with pytest.raises(ValueError, match=r"key_padding_mask: expected \[B, S\] = \[2, 64\]"):
        block_sparse_attention(query, key, value, pattern, key_padding_mask=torch.zeros(BATCH, 48, dtype=torch.bool))


@pytest.mark.parametrize("length", [64, 70])
def test_dense_rows_and_global_columns_of_tables_of_the_batch_without_padding(length: int):
    """Dense rows need no mask there, while listed ones have one for each entry of the batch."""
    pattern = random_table(BATCH, 2, length, has_global=True)
    query, key, value = inputs_for(length)
    output, lse = block_sparse_attention_with_lse(query, key, value, pattern, backend="gather")
    found = torch.cat([output, lse.masked_fill(lse.isneginf(), 0.0)[..., None]], dim=-1)
    torch.testing.assert_close(found, lse_of([query, key, value], pattern, None), rtol=1e-5, atol=1e-5)


def test_sorted_lists_make_the_same_table_unsorted_ones_do():
    sizes: dict[str, Any] = {"query_len": 70, "key_len": 70, "block_size": 16, "is_dynamic": True}
    blocks = torch.arange(5).expand(2, 3, 5, 5).transpose(2, 3).mT  # of strides that no kernel reads
    is_entry = blocks < torch.arange(5)[:, None]  # what counts comes first; of the first row, nothing
    found, wanted = make_pattern(blocks, is_entry, **sizes, is_sorted=True), make_pattern(blocks, is_entry, **sizes)
    assert torch.equal(found.indices, wanted.indices)
    assert torch.equal(found.counts, wanted.counts)
    assert found.indices.dtype == torch.int32
    assert found.indices.is_contiguous()


def test_keys_of_groups_are_refused_with_what_repeats_them():
    query, key, value = inputs_for(64)
    pattern = make_pattern(*random_lists(1, 2, 64), query_len=64, key_len=64, block_size=16, is_dynamic=True)
    with pytest.raises(ValueError, match=r"B = 2, H = 4; got \[2, 2, 64, \d+\]: .* \(expand_kv_heads\)"):
        block_sparse_attention(query, key[:, ::2], value[:, ::2], pattern)


def lse_of(inputs: Sequence[Tensor], pattern: BlockPattern, padding: Tensor | None) -> Tensor:
    """Return output and log-sum-exp in one tensor `[B, H, L, D + 1]`, where nothing is seen 0, densely."""
    query, key, _ = inputs
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~visible(pattern, padding), float("-inf"))
    is_dead = scores.isneginf().all(-1, keepdim=True)
    lse = scores.masked_fill(is_dead, 0.0).logsumexp(-1, keepdim=True).masked_fill(is_dead, 0.0)
    return torch.cat([dense(inputs, pattern, padding, None), lse], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["gather", "flex", "compiled"])
def test_the_log_sum_exp_and_its_gradient(dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flex_attention, "_compiled", lambda: plain_kernel)
    pattern, padding = random_table(BATCH, 2, 70, is_causal=True), padding_for(70)

    def run(x: list[Tensor]) -> Tensor:
        query, key, value = x
        if path == "flex":
            call = BlockCall(query, key, value, padding, pattern, None, DIM**-0.5, has_lse=True)
            output, lse = flex_forward(call)
            assert lse is not None
        else:
            output, lse = block_sparse_attention_with_lse(query, key, value, pattern, key_padding_mask=padding)
        return torch.cat([output, lse.masked_fill(lse.isneginf(), 0.0)[..., None].to(output.dtype)], dim=-1)

    inputs = inputs_for(70, dtype)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    actual = value_and_gradients(compiled if path == "compiled" else run, inputs)
    torch.compiler.reset()
    plain = value_and_gradients(lambda x: lse_of(x, pattern, padding), inputs)
    exact = value_and_gradients(lambda x: lse_of(x, pattern, padding), [x.double() for x in inputs])
    for what, one, rough, wanted in zip(("output", "query", "key", "value"), actual, plain, exact, strict=True):
        assert_exact(one, rough, wanted, what)


def test_a_gradient_of_the_log_sum_exp_alone():
    pattern, leaves = random_table(BATCH, 2, 70), [x.requires_grad_() for x in inputs_for(70)]
    query, key, value = leaves
    _, lse = block_sparse_attention_with_lse(query, key, value, pattern)
    keep = ~lse.isneginf()
    actual = torch.autograd.grad(lse[keep].sum(), [query, key])
    wanted = torch.autograd.grad(lse_of(leaves, pattern, None)[..., -1].sum(), [query, key])
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("query_len", "key_len"), [(64, 70), (75, 64), (30, 100)])
@pytest.mark.parametrize("path", ["gather", "flex"])
def test_any_two_lengths(query_len: int, key_len: int, path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flex_attention, "_compiled", lambda: plain_kernel)
    pattern = cross_table(query_len, key_len, 2)
    inputs = [inputs_for(query_len)[0], *inputs_for(key_len)[1:]]

    def run(x: list[Tensor]) -> Tensor:
        query, key, value = x
        if path == "flex":
            return flex_forward(BlockCall(query, key, value, None, pattern))[0]
        return block_sparse_attention(query, key, value, pattern)

    actual = value_and_gradients(run, inputs)
    expected = value_and_gradients(lambda x: dense(x, pattern, None, None), inputs)
    for one, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="slopes: expected key_len - query_len to be a multiple of 16"):
        block_sparse_attention(inputs[0], inputs[1], inputs[2], pattern, slopes=torch.ones(HEADS))
