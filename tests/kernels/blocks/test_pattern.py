"""The pattern record: built in the space of its entries, its dense form and its transpose agree with its lists."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_zoo.kernels.blocks.block_attention import block_sparse_attention
from attn_zoo.kernels.blocks.layout import BlockLayout
from attn_zoo.kernels.blocks.pattern import BlockPattern, make_pattern
from tests.kernels.blocks.tables import digest_of
from tests.kernels.blocks.test_gather import drawn_pattern

SMALL: dict[str, Any] = {"block_size": 8, "num_window_blocks": 3, "num_global_blocks": 2, "num_random_blocks": 2}

layouts = st.builds(
    BlockLayout,
    query_len=st.integers(1, 200),
    block_size=st.sampled_from([1, 5, 8, 16]),
    num_window_blocks=st.sampled_from([1, 3, 5]),
    num_global_blocks=st.integers(0, 3),
    num_random_blocks=st.integers(0, 4),
    is_causal=st.booleans(),
) | st.builds(
    BlockLayout,
    query_len=st.integers(1, 200),
    block_size=st.just(8),
    num_window_blocks=st.sampled_from([1, 3]),
    num_global_blocks=st.just(2),
    num_random_blocks=st.integers(0, 4),
    num_extra_tokens=st.just(16),
    is_permuted=st.booleans(),
)


def dense_by_loops(pattern: BlockPattern) -> list[list[list[bool]]]:
    """Write the record's definition out, query by query."""
    size, offset = pattern.block_size, pattern.key_len - pattern.query_len
    dense = []
    for head in range(pattern.num_heads):
        rows = []
        for query in range(pattern.query_len):
            row = query // size - pattern.num_dense_rows
            listed = set(range(pattern.num_key_blocks))
            if row >= 0:
                count = int(pattern.counts[0, head, row])
                listed = {*range(pattern.num_global), *pattern.indices[0, head, row, :count].tolist()}
            rows.append(
                [
                    key // size in listed and (not pattern.is_causal or key <= query + offset)
                    for key in range(pattern.key_len)
                ]
            )
        dense.append(rows)
    return dense


@settings(max_examples=40, deadline=None)
@given(layout=layouts)
def test_dense_form_and_pair_count(layout: BlockLayout):
    pattern = drawn_pattern(layout, 2, (3, 1))
    dense = pattern.to_dense()
    assert dense[0].tolist() == dense_by_loops(pattern)
    assert pattern.num_pairs == int(dense.sum())


@settings(max_examples=60, deadline=None)
@given(layout=layouts)
def test_lists_are_ascending_in_range_and_complete(layout: BlockLayout):
    pattern = drawn_pattern(layout, 2, (3, 1))
    reach, first, last = layout.num_window_blocks // 2, layout.num_leading, pattern.num_key_blocks
    assert pattern.num_rows == last - first
    for head in range(2):
        for row in range(pattern.num_rows):
            own = first + row
            end = own + 1 if layout.is_causal else last
            entries = pattern.indices[0, head, row, : pattern.counts[0, head, row]].tolist()
            assert entries == sorted(set(entries))
            assert all(first <= entry < end for entry in entries)
            window = set(range(max(first, own - reach), min(own + reach + 1, end)))
            assert window <= set(entries)
            free = end - first - len(window)
            assert len(entries) - len(window) == min(layout.num_random_blocks, free)


@settings(max_examples=40, deadline=None)
@given(layout=layouts)
def test_transpose_lists_the_same_pairs(layout: BlockLayout):
    pattern = drawn_pattern(layout, 2, (3, 1))
    rows, starts = pattern.transposed
    for head in range(2):
        listed = {
            (row, entry)
            for row in range(pattern.num_rows)
            for entry in pattern.indices[0, head, row, : pattern.counts[0, head, row]].tolist()
        }
        columns = [
            rows[0, head, starts[0, head, column] : starts[0, head, column + 1]].tolist()
            for column in range(pattern.num_key_blocks)
        ]
        assert all(column == sorted(column) for column in columns)
        assert {(row, number) for number, column in enumerate(columns) for row in column} == listed


def test_full_rows_are_those_that_need_no_mask():
    pattern = drawn_pattern(BlockLayout(query_len=203, **SMALL), 2, (0, 0))
    dense = pattern.to_dense()[0, :, pattern.num_dense_rows * 8 :]
    width = pattern.table.shape[-1] * 8
    for head in range(2):
        for row in range(pattern.num_rows):
            seen = int(dense[head, row * 8].sum())
            assert bool(pattern.is_full_row[0, head, row]) == (seen == width)
    assert 0.5 < pattern.is_full_row.float().mean() < 1


def test_size_is_linear_and_no_tensor_is_quadratic():
    sizes = []
    for length in (1 << 19, 1 << 20):
        layout = BlockLayout(
            query_len=length, block_size=64, num_window_blocks=3, num_global_blocks=2, num_random_blocks=3
        )
        pattern = drawn_pattern(layout, 2, (0, 0))
        rows, starts = pattern.transposed
        blocks = length // 64
        tensors = (pattern.indices, pattern.counts, pattern.table, pattern.is_entry, rows, starts)
        assert all(tensor.numel() <= 2 * blocks * 8 for tensor in tensors)
        sizes.append(sum(tensor.numel() for tensor in tensors))
    assert 1.99 < sizes[1] / sizes[0] < 2.01


def test_digest_is_the_same_in_another_process():
    text = (
        "from attn_zoo.kernels.blocks.layout import BlockLayout; from tests.kernels.blocks.tables import digest_of;"
        "print(digest_of(BlockLayout(query_len=1000, block_size=16, num_window_blocks=3, num_global_blocks=2,"
        " num_random_blocks=3, num_heads=4, seed=11, layer_index=2).pattern()))"
    )
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "b0974d708f7a16aa"


def test_digest_tells_patterns_apart():
    base = BlockLayout(query_len=200, **SMALL)
    variations = [
        drawn_pattern(base, 2, (0, 0)),
        drawn_pattern(base, 2, (1, 0)),
        drawn_pattern(base, 2, (0, 1)),
        drawn_pattern(base, 3, (0, 0)),
        drawn_pattern(BlockLayout(query_len=201, **SMALL), 2, (0, 0)),
        drawn_pattern(BlockLayout(query_len=200, is_causal=True, **SMALL), 2, (0, 0)),
    ]
    assert len({digest_of(pattern) for pattern in variations}) == len(variations)
    heads = variations[0].indices[0]
    assert not torch.equal(heads[0], heads[1])


def test_patterns_are_kept():
    layout = BlockLayout(query_len=200, **SMALL)
    again = BlockLayout(query_len=200, **SMALL)
    assert drawn_pattern(layout, 2, (0, 0)) is drawn_pattern(again, 2, (0, 0))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [([[[1, 1]]], "twice"), ([[[0, 2]]], "expected key blocks 1 .. 3"), ([[[2, 4]]], "expected key blocks 1 .. 3")],
)
def test_impossible_lists_are_refused(blocks: list[list[list[int]]], message: str):
    entries = torch.tensor(blocks)
    with pytest.raises(ValueError, match=message):
        make_pattern(
            entries,
            torch.ones_like(entries, dtype=torch.bool),
            query_len=8,
            key_len=16,
            block_size=4,
            num_global=1,
            num_dense_rows=1,
            is_causal=False,
        )


def test_causal_rows_must_end_in_their_own_block():
    entries = torch.tensor([[[1], [1]]])
    with pytest.raises(ValueError, match="stands in"):
        make_pattern(
            entries,
            torch.ones_like(entries, dtype=torch.bool),
            query_len=12,
            key_len=12,
            block_size=4,
            num_global=1,
            num_dense_rows=1,
            is_causal=True,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_pattern_made_on_a_gpu_is_the_one_made_on_the_cpu(is_causal: bool):
    layout = BlockLayout(query_len=5000, is_causal=is_causal, **SMALL)
    pattern = drawn_pattern(layout, 3, (4, 1), "cuda")
    assert pattern.indices.is_cuda
    assert digest_of(pattern) == digest_of(drawn_pattern(layout, 3, (4, 1)))


def test_rows_that_need_no_mask_are_asked_for_once():
    """A call on a GPU would wait for the answer each time."""
    pattern = drawn_pattern(BlockLayout(query_len=203, **SMALL), 2, (5, 5))
    query, key, value = torch.randn(3, 1, 2, 203, 16).unbind()
    before = block_sparse_attention(query, key, value, pattern, backend="gather")
    assert pattern.full_rows == [bool(rows.all()) for rows in pattern.is_full_row[0].T]
    assert 0 < sum(pattern.full_rows) < len(pattern.full_rows)
    pattern.__dict__["is_full_row"] = None  # whoever asks again fails
    assert torch.equal(block_sparse_attention(query, key, value, pattern, backend="gather"), before)
