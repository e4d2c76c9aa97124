"""Attention to blocks of keys that each query chose by the data: queries are sorted by block, and blocks stay whole.

Lu et al. 2025, "MoBA", arXiv 2502.13189, algorithm 1: one tile of queries that all chose the same block is dense
attention to it. A query is in as many tiles as it chose blocks; the parts are merged by their log-sum-exp
(`merge_attention`). So a choice costs a query 2 C D multiply-adds, whichever it is, and no key is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_zoo.kernels.blocks.block_attention import block_sparse_attention_with_lse
from attn_zoo.kernels.blocks.call import Backend
from attn_zoo.kernels.blocks.layout import PatternLayout
from attn_zoo.kernels.blocks.pattern import BlockPattern, make_pattern

_LARGEST_TILE = 64  # tokens that the engine's blocks have at most
_PLACE_BITS = 20  # of a double's 52: more than the digits of float32 are left


def tile_of(block_size: int) -> int:
    """Return the tokens of the tiles that are computed: they divide the blocks that are chosen."""
    return math.gcd(block_size, _LARGEST_TILE)


def best_choices(liking: Tensor, num_choices: int) -> Tensor:
    """Return the blocks that are liked best, int64 `[.., num_choices]`, the best first; -1 for minus infinity.

    Of two that are liked equally the later one. `topk` alone takes one that depends on how many blocks there are, which
    in a causal form is the future. Ties are common where weights are sharp: all that underflows to zero is equal.

    Args:
        liking: `[.., blocks]`, minus infinity for what cannot be chosen.
        num_choices: at most as many as there are blocks.
    """
    bits = liking.double().view(torch.int64)
    ascending = torch.where(bits < 0, torch.iinfo(torch.int64).min - bits, bits)  # integers as the numbers; -0.0 is 0
    place = torch.arange(liking.shape[-1], device=liking.device)
    blocks = ((ascending & -(1 << _PLACE_BITS)) | place).topk(num_choices, dim=-1).indices
    return blocks.masked_fill(liking.gather(-1, blocks).isneginf(), -1)


@dataclass(frozen=True, kw_only=True)
class FixedBlocksLayout(PatternLayout):
    """What every query sees without a choice, in tiles that divide the blocks: its own block and some more.

    Args:
        query_len: L, tokens.
        block_size: C, of the blocks that are chosen.
        num_initial_blocks: first blocks of the sequence.
        num_local_blocks: last blocks up to the query's own.
        is_causal: hide later keys. Else a query sees all of its own block, and there are no other local blocks.
    """

    query_len: int
    block_size: int
    num_initial_blocks: int = 0
    num_local_blocks: int = 1
    is_causal: bool = True

    def make(self, device: str) -> BlockPattern:
        """Return the pattern: initial blocks are global columns, and their rows dense."""
        tile = tile_of(self.block_size)
        per_block, num_tiles = self.block_size // tile, -(-self.query_len // tile)
        num_global = min(self.num_initial_blocks * per_block, num_tiles)
        rows = torch.arange(num_global, num_tiles, device=device)[:, None]
        first = (rows // per_block - self.num_local_blocks + 1) * per_block
        tiles = first + torch.arange(self.num_local_blocks * per_block, device=device)
        return make_pattern(
            tiles[None],
            (tiles >= num_global) & (tiles <= rows if self.is_causal else tiles < num_tiles),
            query_len=self.query_len,
            key_len=self.query_len,
            block_size=tile,
            num_global=num_global,
            num_dense_rows=num_global,
            is_causal=self.is_causal,
        )


@dataclass(frozen=True)
class Dispatch:
    """Where each (query, chosen block) is computed: in tiles of queries that share one block.

    Args:
        place: int64 `[B, H, L * choices]`, the place of each among the tiles' queries; of none, the last place.
        token: int64 `[B, H, places]`, the query at each place; 0 where there is none.
        pattern: what each tile sees.
    """

    place: Tensor
    token: Tensor
    pattern: BlockPattern


def num_tiles_of(num_pairs: int, num_blocks: int, tile: int) -> int:
    """Return how many tiles of queries there can be at most, and one more that takes the places of no choice."""
    return num_pairs // tile + num_blocks + 1


def dispatch(routing: Tensor, key_len: int, block_size: int) -> Dispatch:
    """Sort queries by chosen block, each block's into tiles of their own, without waiting for the device.

    Tiles are as many as there can be at most; those left over see nothing.

    Args:
        routing: int64 `[B, H, L, choices]`, blocks; -1 for none.
        key_len: S.
        block_size: C, of the blocks that are chosen; the last one may be shorter.
    """
    batch_size, num_heads, query_len, num_choices = routing.shape
    num_pairs, num_blocks, tile = query_len * num_choices, -(-key_len // block_size), tile_of(block_size)
    num_tiles = num_tiles_of(num_pairs, num_blocks, tile)
    chosen = routing.flatten(2)
    block, order = torch.where(chosen < 0, num_blocks, chosen).sort(dim=-1, stable=True)  # [B, H, pairs]
    bounds = torch.arange(num_blocks + 1, device=routing.device).expand(batch_size, num_heads, -1).contiguous()
    starts = torch.searchsorted(block.contiguous(), bounds)  # of each block's pairs; the last is that of none
    tiles = (starts.diff() + tile - 1) // tile
    ends = tiles.cumsum(-1)
    first_tile = pad(ends - tiles, (0, 1))
    rank = torch.arange(num_pairs, device=routing.device) - starts.gather(-1, block)
    place = first_tile.gather(-1, block) * tile + rank
    place = place.masked_fill(block == num_blocks, num_tiles * tile - 1)
    token = torch.zeros(batch_size, num_heads, num_tiles * tile, dtype=torch.long, device=routing.device)
    token.scatter_(-1, place, order // num_choices)
    number = torch.arange(num_tiles, device=routing.device).expand(batch_size, num_heads, -1).contiguous()
    block_of_tile = torch.searchsorted(ends, number, right=True)[..., None]  # [B, H, tiles, 1]
    per_block = block_size // tile
    seen = block_of_tile * per_block + torch.arange(per_block, device=routing.device)
    pattern = make_pattern(
        seen,
        (block_of_tile < num_blocks) & (seen < -(-key_len // tile)),
        query_len=num_tiles * tile,
        key_len=key_len,
        block_size=tile,
        is_dynamic=True,
        is_sorted=True,
    )
    return Dispatch(torch.zeros_like(place).scatter_(-1, order, place), token, pattern)


def attend_to_choices(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    routing: Tensor,
    block_size: int,
    *,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: Backend = "auto",
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Attend from each query to each of its blocks by itself.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, H, S, D]`.
        value: `[B, H, S, D]`.
        routing: int64 `[B, H, L, choices]`, blocks; -1 for none.
        block_size: C, of those blocks.
        key_padding_mask: bool `[B, S]`, True = padding.
        dropout_p: probability of dropping an attention weight.
        backend: as in `block_sparse_attention`.

    Returns:
        For each choice the output `[B, H, L, D]` and the log-sum-exp `[B, H, L]`, minus infinity for none: what
        `merge_attention` takes.
    """
    num_choices, head_dim = routing.shape[-1], query.shape[-1]
    if num_choices == 0:
        return (), ()
    plan = dispatch(routing, key.shape[2], block_size)
    routed = query.gather(2, plan.token[..., None].expand(-1, -1, -1, head_dim))
    outputs, lses = block_sparse_attention_with_lse(
        routed, key, value, plan.pattern, key_padding_mask=key_padding_mask, dropout_p=dropout_p, backend=backend
    )
    outputs = outputs.gather(2, plan.place[..., None].expand(-1, -1, -1, head_dim))
    lses = lses.gather(2, plan.place)
    return outputs.unflatten(2, (-1, num_choices)).unbind(3), lses.unflatten(2, (-1, num_choices)).unbind(3)
