"""Bands in the block-sparse engine: the pattern, its counts, and the masks that both paths make of it."""

from __future__ import annotations

import pytest
import torch

from attn_zoo.kernels.blocks import pieces as block_pieces
from attn_zoo.kernels.blocks.call import BlockCall
from attn_zoo.kernels.blocks.flex import listed_block_mask
from attn_zoo.kernels.blocks.layout import TokenLayout
from attn_zoo.kernels.blocks.pattern import BlockPattern
from tests.kernels.blocks.tables import digest_of
from tests.kernels.blocks.test_flex import dense_of
from tests.kernels.blocks.test_gather import (
    BATCH,
    HEADS,
    band_pattern,
    dense_attention,
    engine,
    make_inputs,
    make_padding,
    value_and_gradients,
)

CASES = [(1, 4), (16, 3), (40, 0), (64, 40), (64, 500), (100, 5), (100, 16), (129, 40), (129, 500)]


def band(length: int, reach: int, is_causal: bool) -> BlockPattern:
    return band_pattern(length, reach, 16, is_causal=is_causal)


@pytest.mark.parametrize(("length", "reach"), CASES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_pattern_is_the_band(length: int, reach: int, is_causal: bool):
    pattern = band(length, reach, is_causal)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    expected = (distance.abs() <= reach) & ((distance >= 0) | (not is_causal))
    assert torch.equal(pattern.to_dense(), expected[None, None])
    layout = TokenLayout(query_len=length, reach=reach, block_size=16, is_causal=is_causal)
    assert pattern.num_pairs == layout.mean_pairs == int(expected.sum())


@pytest.mark.parametrize(("length", "reach"), CASES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("piece_bytes", [1 << 14, 1 << 19])
def test_equals_dense_attention(
    length: int, reach: int, is_causal: bool, has_padding: bool, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(block_pieces, "_CPU_PIECE_BYTES", piece_bytes)
    pattern, padding = band(length, reach, is_causal), make_padding(length) if has_padding else None
    inputs = make_inputs(pattern)
    fast = value_and_gradients(lambda x: engine(x, pattern, key_padding_mask=padding), inputs)
    slow = value_and_gradients(lambda x: dense_attention(x, pattern, padding), inputs)
    for one, other in zip(fast, slow, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("length", "reach"), CASES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_no_row_of_a_mask_hides_everything(length: int, reach: int, is_causal: bool, has_padding: bool):
    # Which the inner step asks for: softmax over nothing is NaN. The filling of a last block may see no key at all.
    pattern = band(length, reach, is_causal)
    query, key, value = make_inputs(pattern)
    call = BlockCall(query, key, value, make_padding(length) if has_padding else None, pattern)
    pieces = block_pieces.Pieces(call, pattern, has_scores=False, budget=1 << 19)
    for group in pieces.groups():
        for part in pieces.parts(group):
            for rows in part.pieces:
                mask, _, _ = pieces.mask(part, rows)
                assert mask is not None
                assert not mask.isneginf().all(-1).any()


@pytest.mark.parametrize(("length", "reach"), CASES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_block_masks_for_the_gpu_say_the_same(length: int, reach: int, is_causal: bool, has_padding: bool):
    pattern, padding = band(length, reach, is_causal), make_padding(length) if has_padding else None
    expected = pattern.to_dense().expand(BATCH, -1, -1, -1)
    if padding is not None:
        expected = expected & ~padding[:, None, None]
    assert torch.equal(dense_of(listed_block_mask(pattern, padding), BATCH).expand_as(expected), expected)


def test_only_blocks_at_the_ends_of_the_band_are_masked():
    mask = listed_block_mask(band(16 * 64, 40, False), None)  # 3 blocks either side; blocks 2 and 3 away are cut
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks[0, 0, 10] == 3
    assert mask.kv_num_blocks[0, 0, 10] == 4


def test_digests_tell_bands_apart():
    digests = {digest_of(band(100, reach, causal)) for reach in (33, 34, 48) for causal in (False, True)}
    assert len(digests) == 6
    assert HEADS > 1  # one table serves all heads in the tests above
