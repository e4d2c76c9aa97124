# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Dropout inside the Triton kernels: which weights are kept follows from a seed and positions alone.

So every kernel finds the same weights kept, whatever tile they fall into, and nothing is saved; and the seed stays on
the device, where a CUDA graph draws a new one at every replay. A counter-based generator of full strength (Philox, ten
rounds: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") takes about sixty operations on integers for
a weight, several times what the tensor cores need for its products; this hash takes nine. It is the two-round
multiply-xorshift of 32 bits with Wellons' constants (2018, "Prospecting for hash functions"), over a word of the query
plus a word of the key, with a second word of the query between the rounds: two queries of which the first words
collide, and among millions some do, still differ.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_NUM_DRAWS = 1 << 32  # a draw is 32 bits


def dropout_options(dropout_p: float) -> dict[str, Any]:
    """Return what the kernels take beside the seed, int64 `[1]` on the device.

    The probability is rounded to a multiple of 2^-32, and weights are divided by what is really kept on average.

    Args:
        dropout_p: probability of dropping a weight, below 1; 0 stands for no dropout.
    """
    num_dropped = min(round(dropout_p * _NUM_DRAWS), _NUM_DRAWS - 1)
    return {
        "drop_bound": num_dropped - _NUM_DRAWS // 2,  # draws are compared as signed numbers
        "keep_scale": _NUM_DRAWS / (_NUM_DRAWS - num_dropped),
        "has_dropout": dropout_p > 0,
    }


@triton.jit
def mixed(word):
    """Return 32 bits that each depend on all of `word`."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def sequence_words(seed, sequence):
    """Return two words that name a sequence's draws under a seed."""
    bits = tl.load(seed)
    first = mixed(mixed(mixed(bits.to(tl.uint32)) + (bits >> 32).to(tl.uint32)) + sequence.to(tl.uint32))
    return first, mixed(first + 0x9E3779B9)


@triton.jit
def is_kept(words, query_at, key_at, drop_bound):
    """Return which weights are kept, as wide as queries and keys broadcast to; positions count within the sequence."""
    first, second = words
    queries = query_at.to(tl.uint32)
    row = queries * 0x9E3779B1 + first
    row = (row ^ (row >> 15)) * 0x846CA68B  # else pairs of positions on a lattice would share their first sums
    word = row + key_at.to(tl.uint32) * 0xC2B2AE3D
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15) ^ (queries * 0x85EBCA77 + second)) * 0x846CA68B
    return (word ^ (word >> 16)).to(tl.int32, bitcast=True) >= drop_bound
