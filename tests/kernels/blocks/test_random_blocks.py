"""Random blocks: the generator is the published one, the draws are fair, distinct and the same everywhere."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_zoo.kernels.blocks.layout import BlockLayout, Candidates, counter_bits, permuted_blocks, uniform_blocks


def candidates(num_blocks: int, first: int, reach: int) -> Candidates:
    rows = np.arange(first, num_blocks)
    low, high = np.maximum(rows - reach, first), np.minimum(rows + reach + 1, num_blocks)
    return Candidates(first, low, high, np.full_like(rows, num_blocks))


def test_stream_is_splitmix64():
    # The first numbers of the reference implementation (prng.di.unimi.it/splitmix64.c) for seed 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert counter_bits((1234567,), torch.arange(4)).numpy().view(np.uint64).tolist() == expected


def test_every_word_of_the_key_changes_the_stream():
    counters = torch.arange(64)
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0), (0, 1), (1 << 63, 0, 0)]
    numbers = torch.cat([counter_bits(key, counters) for key in keys])
    assert len(set(numbers.tolist())) == len(numbers)  # nor is one stream a shift of another


def test_draws_are_the_same_on_every_machine():
    uniform, _ = uniform_blocks((7, 3, 40), 3, 3, candidates(40, 2, 1))
    permuted = permuted_blocks((7, 3, 40), 3, 3, 40, 2, 1)
    digests = [
        hashlib.sha256(np.asarray(draw).astype("<i8").tobytes()).hexdigest()[:16] for draw in (uniform, permuted)
    ]
    assert digests == ["6e100d10aba74708", "11cc3a5a420e897a"]


def plain_draw(key: tuple[int, ...], row: int, num_random: int, free: list[int]) -> set[int]:
    """Write the generator and Floyd's algorithm out in whole numbers."""
    top, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(number: int) -> int:
        number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & top
        number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & top
        return number ^ (number >> 31)

    state = key[0]
    for word in key[1:]:
        state = mix(mix((state + golden) & top) ^ word)
    taken: set[int] = set()
    count = min(num_random, len(free))
    for draw in range(count):
        last = len(free) - count + draw
        bits = mix((state + (row * num_random + draw + 1) * golden) & top)
        rank = ((bits >> 32) * (last + 1)) >> 32
        taken.add(last if rank in taken else rank)
    return {free[rank] for rank in taken}


def test_uniform_blocks_agree_with_a_plain_version():
    allowed = candidates(30, 2, 1)
    blocks, counts = uniform_blocks((9, 4, 30), 3, 4, allowed)
    for head in range(3):
        for row in range(28):
            free = [block for block in range(2, 30) if not allowed.low[row] <= block < allowed.high[row]]
            assert set(blocks[head, row, : counts[row]].tolist()) == plain_draw((9, 4, 30, head), row, 4, free)


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(1, 40),
    first=st.integers(0, 4),
    reach=st.integers(0, 3),
    num_random=st.integers(0, 8),
    seed=st.integers(0, 2**64),
)
def test_uniform_blocks_are_distinct_candidates(num_blocks: int, first: int, reach: int, num_random: int, seed: int):
    first = min(first, num_blocks)
    allowed = candidates(num_blocks, first, reach)
    blocks, counts = uniform_blocks((seed,), 2, num_random, allowed)
    for row in range(num_blocks - first):
        free = set(range(first, num_blocks)) - set(range(allowed.low[row], allowed.high[row]))
        assert counts[row] == min(num_random, len(free))
        for head in range(2):
            drawn = blocks[head, row, : counts[row]].tolist()
            assert len(set(drawn)) == counts[row]
            assert set(drawn) <= free


def test_uniform_blocks_are_uniform():
    # Row 0 of 2000 heads draws 2 of 7 candidates: each of the 21 subsets is expected 95 times, with deviation 9.5.
    blocks, _ = uniform_blocks((5,), 2000, 2, candidates(9, 0, 1))
    pairs = np.sort(blocks[:, 0].numpy(), axis=-1)
    _, counts = np.unique(pairs, axis=0, return_counts=True)
    assert len(counts) == 21
    chi_squared = float((((counts - 2000 / 21) ** 2) / (2000 / 21)).sum())
    assert chi_squared < 45.3  # 99.9 % quantile for 20 degrees of freedom


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    first=st.integers(0, 3),
    reach=st.integers(0, 3),
    num_random=st.integers(1, 6),
    seed=st.integers(0, 2**64),
)
def test_permutations_load_every_block_alike(rows: int, first: int, reach: int, num_random: int, seed: int):
    if rows < 2 * reach + 1 + num_random:
        with pytest.raises(ValueError, match="num_random"):
            permuted_blocks((seed,), 1, num_random, rows + first, first, reach)
        return
    blocks = permuted_blocks((seed,), 2, num_random, rows + first, first, reach)
    own = np.arange(first, rows + first)
    for head in blocks:
        assert (np.abs(head - own[:, None]) > reach).all()
        assert all(len(set(row)) == num_random for row in head.tolist())
        for draw in head.T:
            assert sorted(draw.tolist()) == own.tolist()


def test_permutations_reach_far_and_near():
    blocks = permuted_blocks((3,), 400, 1, 12, 0, 1)[:, 0, 0]
    # Row 0 may draw blocks 2 .. 10: 11 is outside the window too, as that is clipped, so 10 candidates in all.
    counts = np.bincount(blocks, minlength=12)
    assert counts[:2].tolist() == [0, 0]
    assert (counts[2:] > 0).all()
    assert counts[2:].max() < 4 * counts[2:].min()


def test_a_permutation_of_the_past_is_refused():
    sizes = {"block_size": 16, "num_window_blocks": 3, "num_global_blocks": 1, "num_random_blocks": 2}
    with pytest.raises(ValueError, match="is_permuted: expected False where is_causal"):
        BlockLayout(query_len=512, is_permuted=True, is_causal=True, **sizes).pattern()
