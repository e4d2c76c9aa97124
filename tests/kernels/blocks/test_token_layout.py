"""Rules for tokens: their table, their pairs, and every path that runs them on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_zoo.kernels.blocks import pieces
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention
from attn_zoo.kernels.blocks.call import BlockCall
from attn_zoo.kernels.blocks.flex import flex_forward
from attn_zoo.kernels.blocks.layout import TokenLayout
from attn_zoo.kernels.exact import flex_attention
from tests.kernels.blocks.test_flex import plain_kernel
from tests.kernels.blocks.test_gather import DIM, dense_attention, make_inputs, make_padding, value_and_gradients

layouts = st.builds(
    TokenLayout,
    query_len=st.integers(1, 120),
    block_size=st.sampled_from([1, 4, 5, 16]),
    reach=st.integers(0, 130),
    dilation=st.integers(1, 20),
    stride=st.integers(0, 40),
    num_global_tokens=st.integers(0, 20) | st.just(200),
    is_causal=st.booleans(),
)


def by_the_definition(layout: TokenLayout) -> Tensor:
    """Write the rule out, pair by pair."""
    first = layout.num_global_tokens

    def is_seen(i: int, j: int) -> bool:
        is_near = abs(i - j) <= layout.reach and (i - j) % layout.dilation == 0
        is_regular = layout.stride > 0 and (i - j) % layout.stride == 0
        return (not layout.is_causal or j <= i) and (is_near or is_regular or i < first or j < first)

    length = range(layout.query_len)
    return torch.tensor([[is_seen(i, j) for j in length] for i in length])


@settings(max_examples=120, deadline=None)
@given(layout=layouts)
def test_dense_form_pairs_and_table_are_the_rule(layout: TokenLayout):
    pattern, expected = layout.pattern(), by_the_definition(layout)
    assert torch.equal(pattern.to_dense()[0, 0], expected)
    assert pattern.num_pairs == layout.mean_pairs == int(expected.sum())
    size = layout.block_size
    for row in range(pattern.num_rows):
        query = (pattern.num_dense_rows + row) * size
        for column in pattern.indices[0, 0, row, : pattern.counts[0, 0, row]].tolist():
            # Whole blocks: a ragged last row may list one that only tokens beyond the end would see.
            if query + size <= layout.query_len and (column + 1) * size <= layout.query_len:
                assert expected[query : query + size, column * size : (column + 1) * size].any()


CASES: list[dict[str, Any]] = [
    {"query_len": 100, "reach": 12, "dilation": 4},
    {"query_len": 100, "reach": 20, "num_global_tokens": 3},
    {"query_len": 75, "reach": 5, "num_global_tokens": 20, "dilation": 2},
    {"query_len": 100, "reach": 8, "stride": 9},
    {"query_len": 130, "reach": 0, "stride": 40, "num_global_tokens": 1},
    {"query_len": 9, "reach": 3, "num_global_tokens": 40},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("path", ["gather", "small pieces", "flex"])
def test_paths_equal_dense_attention(
    options: dict[str, Any], is_causal: bool, has_padding: bool, path: str, monkeypatch: pytest.MonkeyPatch
):
    if path == "small pieces":
        monkeypatch.setattr(pieces, "_CPU_PIECE_BYTES", 1 << 13)
    monkeypatch.setattr(flex_attention, "_compiled", lambda: plain_kernel)
    pattern = TokenLayout(**options, block_size=16, is_causal=is_causal).pattern()
    inputs, padding = make_inputs(pattern), make_padding(pattern.key_len) if has_padding else None
    slopes = torch.tensor([0.5, 0.1, 0.02], dtype=torch.float64) if has_padding else None

    def run(x: list[Tensor]) -> Tensor:
        query, key, value = x
        if path == "flex":
            return flex_forward(BlockCall(query, key, value, padding, pattern, slopes, DIM**-0.5))[0]
        return block_sparse_attention(query, key, value, pattern, key_padding_mask=padding, slopes=slopes)

    expected = value_and_gradients(lambda x: dense_attention(x, pattern, padding, slopes), inputs)
    for one, wanted in zip(value_and_gradients(run, inputs), expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=0, atol=1e-12)


def test_windows_with_global_tokens_stay_linear():
    sizes = []
    for length in (1 << 15, 1 << 16):
        layout = TokenLayout(query_len=length, block_size=64, reach=256, num_global_tokens=70)
        pattern = layout.pattern()
        assert pattern.indices.shape == (1, 1, length // 64 - 2, 9)
        sizes.append(layout.mean_pairs)
    assert 1.99 < sizes[1] / sizes[0] < 2.01
