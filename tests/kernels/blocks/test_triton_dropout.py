"""The draws of dropout in the Triton kernels, written again in NumPy: as good as random.

The kernels are held to these draws, weight by weight, by the tests that run them (in Triton's interpreter, on a GPU).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]
LOW = np.uint64(0xFFFFFFFF)
SIDE = 256


def product(word: Words, factor: int) -> Words:
    return (word * np.uint64(factor)) & LOW


def xor_shift(word: Words, shift: int) -> Words:
    return word ^ (word >> np.uint64(shift))


def mixed(word: Words) -> Words:
    return xor_shift(product(xor_shift(product(xor_shift(word, 16), 0x7FEB352D), 15), 0x846CA68B), 16)


def draws(seed: int, sequence: int, queries: Words, keys: Words) -> Words:
    """Return the 32 bits of each pair, `[queries, keys]`."""
    halves = [np.array([part], np.uint64) for part in (seed & int(LOW), seed >> 32, sequence)]
    first = mixed(mixed(mixed(halves[0]) + halves[1] & LOW) + halves[2] & LOW)
    second = mixed(first + np.uint64(0x9E3779B9) & LOW)
    row = product(xor_shift(product(queries, 0x9E3779B1) + first & LOW, 15), 0x846CA68B)[:, None]
    other = (product(queries, 0x85EBCA77) + second & LOW)[:, None]
    word = product(xor_shift(row + product(keys, 0xC2B2AE3D)[None] & LOW, 16), 0x7FEB352D)
    return xor_shift(product(xor_shift(word, 15) ^ other, 0x846CA68B), 16)


def kept_factor(seed: int, sizes: tuple[int, int, int, int], dropout_p: float) -> Tensor:
    """Return what weights `[B, H, L, S]` are multiplied by: 0, or one over the share that is kept, in float64."""
    batch_size, num_heads, query_len, key_len = sizes
    queries, keys = (np.arange(n, dtype=np.uint64) for n in (query_len, key_len))
    bound = round(dropout_p * 2**32)
    # The kernel compares signed numbers, which turns the order of the two halves around.
    signed = [
        draws(seed, sequence, queries, keys).astype(np.uint32).view(np.int32)
        for sequence in range(batch_size * num_heads)
    ]
    kept = torch.from_numpy(np.stack(signed).astype(np.int64) >= bound - 2**31)
    return kept.view(sizes).double() / (1.0 - bound / 2**32)


def dropped(case: int, dropout_p: float) -> NDArray[np.float64]:
    """Return which weights of a square far into some sequence are dropped, less the mean, over the deviation."""
    rng = np.random.default_rng(case)
    seed, sequence, query, key = (int(rng.integers(n)) for n in (1 << 62, 4096, 1 << 20, 1 << 20))
    square = draws(seed, sequence, *(np.arange(at, at + SIDE, dtype=np.uint64) for at in (query, key)))
    share = (square.astype(np.uint32).view(np.int32) < round(dropout_p * 2**32) - 2**31).astype(np.float64)
    found: NDArray[np.float64] = (share - dropout_p) / np.sqrt(dropout_p * (1 - dropout_p))
    return found


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_draws_look_random(dropout_p: float):
    """Share, neighbours at every distance and waves of every length, as of independent draws; 64 squares in all."""
    shares, waves, lags = [], [], []
    for case in range(32):
        square = dropped(case, dropout_p)
        power = np.abs(np.fft.fft2(square)) ** 2 / square.size
        shares.append(square.mean() * SIDE)
        power[0, 0] = 0.0
        waves.append(power.max())
        # Correlations of all distances, in standard deviations. Real squares have each distance twice.
        lags.append(np.abs(np.fft.ifft2(power).real.ravel()[1:]).max() * SIDE)
    assert np.abs(shares).max() < 4  # of 32 normal numbers: p = 0.002
    assert np.std(shares) < 1.4
    # Exponential numbers, half of SIDE squared in each square: exp(-20) is reached once in 15 000 squares.
    assert max(waves) < 20
    assert max(lags) < 6.5  # 32 * 32768 normal numbers: p = 1e-4


def test_a_lattice_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    """The same statistics of positions that are only multiplied and added, as in the first step alone."""

    def plain(seed: int, sequence: int, queries: Words, keys: Words) -> Words:
        found: Words = product(queries, 0x9E3779B1)[:, None] + product(keys, 0xC2B2AE3D)[None] & LOW
        return found

    monkeypatch.setitem(globals(), "draws", plain)
    square = dropped(0, 0.5)
    assert (np.abs(np.fft.fft2(square)) ** 2 / square.size).max() > 1000


def test_seeds_sequences_and_positions_have_draws_of_their_own():
    at = np.arange(SIDE, dtype=np.uint64)
    far = at + np.uint64(1 << 20)
    squares = [
        draws(seed, sequence, queries, keys)
        for seed, sequence, queries, keys in (
            (5, 0, at, at),
            (6, 0, at, at),
            (5, 1, at, at),
            (5 + (1 << 32), 0, at, at),
            (5, 0, far, at),
            (5, 0, at, far),
        )
    ]
    squares.append(squares[0].T)
    halves = [(square >> np.uint64(31)).astype(np.float64).ravel() * 2 - 1 for square in squares]
    correlations = np.asarray(np.corrcoef(halves))[np.triu_indices(len(halves), 1)] * SIDE
    assert np.abs(correlations).max() < 4.5
