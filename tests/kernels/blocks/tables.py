"""Digests of patterns; tables made of the data: any number of blocks a row, for each batch entry and group of heads."""

from __future__ import annotations

import hashlib
from dataclasses import astuple

import torch
from torch import Tensor

from attn_zoo.kernels.blocks.pattern import BlockPattern, make_pattern


def digest_of(pattern: BlockPattern) -> str:
    """Return 16 hexadecimal digits that are equal exactly for equal patterns, on every machine."""
    names = ("query_len", "key_len", "block_size", "num_global", "num_dense_rows", "is_causal")
    head = [getattr(pattern, name) for name in names]
    head += [] if pattern.rule is None else astuple(pattern.rule)
    shape = tuple(pattern.indices.shape)
    state = hashlib.sha256(repr((*head, shape if shape[0] > 1 else shape[1:])).encode())
    for tensor in (pattern.counts, pattern.indices):
        state.update(tensor.cpu().numpy().astype("<i4").tobytes())
    return state.hexdigest()[:16]


def random_lists(
    batch_size: int, num_tables: int, query_len: int, *, block_size: int = 16, is_causal: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return blocks and which of them count, `[B, P, rows, columns]`: about a third, and none in every fourth row."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-query_len // block_size)
    shape = (batch_size, num_tables, num_blocks, num_blocks)
    order = torch.rand(shape, generator=generator).argsort(-1)  # every row in an order of its own
    is_entry = torch.rand(shape, generator=generator) < 0.4
    is_entry[:, :, 1::4] = False
    if is_causal:
        own = torch.arange(num_blocks)[:, None]
        is_entry &= order <= own
        is_entry[:, :, ::2] |= (order == own)[:, :, ::2]  # others do not see their own block
    return order, is_entry


def random_table(
    batch_size: int,
    num_tables: int,
    query_len: int,
    *,
    block_size: int = 16,
    is_causal: bool = False,
    seed: int = 0,
    has_global: bool = False,
) -> BlockPattern:
    """Return a pattern of such lists; with `has_global`, its first block sees and is seen by all."""
    blocks, is_entry = random_lists(
        batch_size, num_tables, query_len, block_size=block_size, is_causal=is_causal, seed=seed
    )
    first = int(has_global)
    return make_pattern(
        blocks[:, :, first:],
        is_entry[:, :, first:] & (blocks[:, :, first:] >= first),
        query_len=query_len,
        key_len=query_len,
        block_size=block_size,
        num_global=first,
        num_dense_rows=first,
        is_causal=is_causal,
        is_dynamic=True,
    )


def cross_table(query_len: int, key_len: int, num_tables: int = 1) -> BlockPattern:
    """Return a pattern of any two lengths: rows that need not stand anywhere, each with about a third of the blocks."""
    generator = torch.Generator().manual_seed(query_len)
    shape = (1, num_tables, -(-query_len // 16), -(-key_len // 16))
    order = torch.rand(shape, generator=generator).argsort(-1)
    is_entry = torch.rand(shape, generator=generator) < 0.4
    is_entry[:, :, 0] = order[:, :, 0] == shape[-1] - 1  # a row with the ragged block alone
    return make_pattern(order, is_entry, query_len=query_len, key_len=key_len, block_size=16, is_dynamic=True)
