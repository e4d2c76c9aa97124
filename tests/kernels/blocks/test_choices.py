"""Attention to chosen blocks: each choice has a place in a tile of its block, and gives that block's attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_zoo.attention.masks import masked_softmax
from attn_zoo.kernels.blocks.call import merge_attention
from attn_zoo.kernels.blocks.choices import (
    FixedBlocksLayout,
    attend_to_choices,
    best_choices,
    dispatch,
    num_tiles_of,
    tile_of,
)

SIZE = 32


def choices(length: int, num_choices: int = 2, num_heads: int = 4) -> Tensor:
    """Return different blocks for each query, some of them none."""
    generator = torch.Generator().manual_seed(length)
    num_blocks = -(-length // SIZE)
    order = torch.rand(2, num_heads, length, num_blocks, generator=generator).argsort(-1)[..., :num_choices]
    return order.masked_fill(torch.rand(order.shape, generator=generator) < 0.3, -1)


@pytest.mark.parametrize("length", [40, 96, 101])
def test_every_choice_has_its_place_in_a_tile_of_its_block(length: int):
    routing = choices(length)
    plan, tile = dispatch(routing, length, SIZE), tile_of(SIZE)
    place, token = plan.place.unflatten(2, routing.shape[2:]), plan.token
    for at in [(0, 0), (1, 3)]:
        is_chosen = routing[at] >= 0
        used = place[at][is_chosen].tolist()
        assert len(set(used)) == len(used)
        assert token[at][place[at][is_chosen]].tolist() == is_chosen.nonzero()[:, 0].tolist()
        for block, where in zip(routing[at][is_chosen].tolist(), used, strict=True):
            row = where // tile
            seen = plan.pattern.indices[at][row][: plan.pattern.counts[at][row]].tolist()
            assert seen == [block * (SIZE // tile) + each for each in range(SIZE // tile)]
        assert (plan.pattern.counts[at][place[at][~is_chosen] // tile] == 0).all()


def test_blocks_larger_than_a_tile_are_computed_in_tiles_that_divide_them():
    assert [tile_of(size) for size in (16, 64, 96, 512, 100)] == [16, 64, 32, 64, 4]
    routing = torch.zeros(1, 1, 256, 1, dtype=torch.long)
    plan = dispatch(routing, 256, 128)
    assert plan.token.shape[-1] == 64 * num_tiles_of(256, 2, 64)
    assert plan.pattern.indices[0, 0, 0].tolist() == [0, 1]


@pytest.mark.parametrize("length", [64, 101])
def test_parts_are_attention_to_each_block_and_merge_to_that_over_all(length: int):
    routing = choices(length, 3)
    query, key, value = (torch.randn(2, 4, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, 50:] = True
    outputs, lses = attend_to_choices(query, key, value, routing, SIZE, key_padding_mask=padding)
    block = torch.arange(length) // SIZE
    scores = query @ key.mT * 8**-0.5
    seen = torch.zeros(2, 4, length, length, dtype=torch.bool)
    for choice, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        keep = (routing[..., choice, None] == block) & ~padding[:, None, None]
        torch.testing.assert_close(output, masked_softmax(scores, keep) @ value, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, scores.masked_fill(~keep, -torch.inf).logsumexp(-1), rtol=0, atol=1e-12)
        seen |= keep
    merged, expected = merge_attention(outputs, lses), masked_softmax(scores, seen) @ value
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(merged)
    inputs = [query, key, value]
    for got, want in zip(
        torch.autograd.grad(merged, inputs, weights), torch.autograd.grad(expected, inputs, weights), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def test_no_choices_are_no_parts():
    rows = torch.randn(1, 1, 8, 4)
    assert attend_to_choices(rows, rows, rows, torch.empty(1, 1, 8, 0, dtype=torch.long), 4) == ((), ())


@pytest.mark.parametrize("block_size", [16, 96, 128])
@pytest.mark.parametrize(
    ("num_initial", "num_local", "is_causal"), [(0, 1, False), (0, 1, True), (1, 2, True), (3, 3, True)]
)
def test_fixed_blocks_are_the_first_and_the_last(block_size: int, num_initial: int, num_local: int, is_causal: bool):
    at = torch.arange(250)
    own, block = at[:, None] // block_size, at // block_size
    expected = (block < num_initial) | ((block > own - num_local) & (block <= own))
    if is_causal:
        expected = expected & (at <= at[:, None])
    layout = FixedBlocksLayout(
        query_len=250,
        block_size=block_size,
        num_initial_blocks=num_initial,
        num_local_blocks=num_local,
        is_causal=is_causal,
    )
    assert torch.equal(layout.pattern().to_dense()[0, 0], expected)


def test_the_best_are_those_of_a_sort_whatever_their_sign():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        liking = torch.randn(3, 5, 40, generator=generator, dtype=dtype) * 10.0 ** torch.arange(-20, 20)
        liking[0, 0, 3:] = -torch.inf
        found = best_choices(liking, 6)
        expected = liking.argsort(-1, descending=True)[..., :6]
        assert torch.equal(found[1:], expected[1:])
        assert set(found[0, 0].tolist()) == {0, 1, 2, -1}


def test_of_equal_ones_the_later_is_chosen_however_many_follow():
    liking = torch.zeros(64, 300)
    liking[:, 40:50] = 1e-30
    for length in (60, 61, 128, 300):
        rest = liking[:, :length].clone()
        rest[:, 60:] = -torch.inf
        assert best_choices(rest, 12).tolist() == [[49, 48, 47, 46, 45, 44, 43, 42, 41, 40, 59, 58]] * 64


def test_negative_zero_is_liked_as_zero_is():
    assert best_choices(torch.tensor([0.0, -0.0, 0.0, -0.0]), 2).tolist() == [3, 2]
