"""Launches the Triton kernels of block-sparse attention: tiles, warps and stretches for a call.

Forward and backward are bit for bit repeatable, and nothing on the way waits for the device, so both can be captured as
a CUDA graph. Memory beyond inputs, outputs and gradients is O(B H L): the log-sum-exp and, in backward, the sum of
output times gradient; and the partial results of dense rows and global columns, while their kernels run.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from attn_zoo.kernels.blocks.call import BlockCall
from attn_zoo.kernels.blocks.pattern import BlockPattern
from attn_zoo.kernels.blocks.triton.addressing import tokens
from attn_zoo.kernels.blocks.triton.forward import forward_kernel, merge_kernel
from attn_zoo.kernels.blocks.triton.kept_weights import dropout_options
from attn_zoo.kernels.blocks.triton.key_gradient import key_gradient_kernel
from attn_zoo.kernels.blocks.triton.query_gradient import delta_kernel, query_gradient_kernel
from attn_zoo.kernels.trace import note_path

# A stretch of a dense line has twice the blocks of a listed line with the usual 3 + 3 + 2, and starts first, so that it
# does not outlast the others. But no more stretches than these: for two dense blocks of 64, 16-bit inputs and up to
# 32 768 tokens, their results are a quarter as large as the queries, and beyond that they do not grow.
_SPLIT_BLOCKS = 16
_MAX_SPLITS = 32

_MERGE_TOKENS = 16  # dense tokens that one program merges: few, as they are few
_DELTA_TOKENS = 64
_NO_RULE = {"reach": -1, "dilation": 1, "stride": 0, "num_global_tokens": 0}


Kernel = Literal["forward", "query_gradient", "key_gradient"]


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut and run: queries and keys of a tile, warps of a program, stages of its pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# For 16-bit inputs and blocks of 64 or more, by kernel and head_dim (smaller ones as 64). Chosen from what the compiler
# says for Hopper (registers, shared memory, no spills, products as wgmma), not yet from times. A tile of 64 queries is
# one wgmma of four warps. Three stages, because the pipeline spends one on the table: keys are loaded one step ahead,
# their block number two. Resident programs on a multiprocessor, as registers and shared memory allow:
_TILES: dict[tuple[Kernel, int], Tiles] = {
    ("forward", 64): Tiles(64, 64, 4, 3),  # 112 registers, 40 KiB: 4
    ("forward", 128): Tiles(64, 64, 4, 3),  # 159, 80 KiB: 2
    ("query_gradient", 64): Tiles(64, 64, 4, 3),  # 126, 48 KiB: 4
    ("query_gradient", 128): Tiles(64, 64, 4, 3),  # 202, 96 KiB: 2
    ("key_gradient", 64): Tiles(64, 64, 4, 3),  # 216, 49 KiB: 2
    ("key_gradient", 128): Tiles(32, 64, 4, 3),  # 234, 64 KiB: 2; with 64 queries it spills
}


def tiles_of(kernel: Kernel, block_size: int, head_dim: int, itemsize: int) -> Tiles:
    """Return the tiles of a kernel, which divide the blocks.

    Args:
        kernel: which.
        block_size: tokens in a block, a power of two from 16.
        head_dim: D.
        itemsize: bytes of an input number.
    """
    if itemsize == 4:  # exact float32 products run on the plain cores, with every factor in a register
        return Tiles(16, 16, 4, 2)
    if block_size < 64:
        warps = block_size // 16 * (2 if head_dim == 128 else 1)
        return Tiles(block_size, block_size, warps, 3)
    return _TILES[kernel, max(64, head_dim)]


def _splits(num_blocks: int) -> tuple[int, int]:
    """Return how many stretches a line of so many blocks is cut into, and the blocks of each."""
    length = max(_SPLIT_BLOCKS, math.ceil(num_blocks / _MAX_SPLITS))
    return max(1, math.ceil(num_blocks / length)), length


def _options(call: BlockCall, kernel: Kernel) -> dict[str, Any]:
    """Return what all kernels take, by name."""
    query, pattern = call.query, call.pattern
    make = _fixed_options.__wrapped__ if pattern.is_dynamic else _fixed_options
    has_padding, has_slopes = call.padding is not None, call.slopes is not None
    return {
        **make(pattern, query.shape, query.element_size(), kernel, has_padding=has_padding, has_slopes=has_slopes),
        "padding": None if call.padding is None else call.padding.contiguous().view(torch.uint8),
        "slopes": call.slopes,
        "scale": call.scale,
        **dropout_options(call.dropout_p, call.seed),
    }


@lru_cache(maxsize=256)
def _fixed_options(
    pattern: BlockPattern, shape: torch.Size, itemsize: int, kernel: Kernel, *, has_padding: bool, has_slopes: bool
) -> dict[str, Any]:
    """Return those that depend on the pattern and on sizes."""
    batch_size, num_heads, _, head_dim = shape
    size, tiles = pattern.block_size, tiles_of(kernel, pattern.block_size, head_dim, itemsize)
    return {
        "num_sequences": batch_size * num_heads,
        "num_heads": num_heads,
        "query_len": pattern.query_len,
        "key_len": pattern.key_len,
        "num_dense_rows": pattern.num_dense_rows,
        "num_global": pattern.num_global,
        "num_tables": pattern.num_heads,
        "row_shift": (pattern.key_len - pattern.query_len) // size,
        "block_size": size,
        "block_m": tiles.block_m,
        "block_n": tiles.block_n,
        "head_dim": head_dim,
        "is_causal": pattern.is_causal,
        "is_ragged": pattern.query_len % size != 0 or pattern.key_len % size != 0,
        "has_batch_tables": pattern.indices.shape[0] > 1,
        **(_NO_RULE if pattern.rule is None else asdict(pattern.rule)),
        "has_padding": has_padding,
        "has_slopes": has_slopes,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def triton_forward(call: BlockCall) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the scores, float32 `[B, H, L]`.

    It is in base 2, and +inf where a query sees nothing; or, where it is wanted, natural and -inf there.

    Sums are in float32, products of float32 inputs too (not in TensorFloat32). The first call of a kind compiles, not
    that of a length.
    """
    note_path("block_sparse.triton")
    query, pattern = call.query, call.pattern
    output = torch.empty_like(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    options = _options(call, "forward")
    num_sequences, row_tiles = options["num_sequences"], pattern.block_size // options["block_m"]
    num_splits, split_blocks = _splits(-(-pattern.dense_key_len // pattern.block_size))
    num_dense = min(pattern.num_dense_rows * pattern.block_size, pattern.query_len)
    part = query.new_empty((num_sequences, num_splits, num_dense, query.shape[-1]), dtype=torch.float32)
    part_lse = query.new_empty((num_sequences, num_splits, num_dense), dtype=torch.float32)
    with torch.cuda.device_of(query):
        num_programs = num_sequences * row_tiles * (pattern.num_dense_rows * num_splits + pattern.num_rows)
        forward_kernel[(num_programs,)](
            *map(tokens, (query, call.key, call.value, output)),
            lse,
            part,
            part_lse,
            pattern.indices,
            pattern.counts,
            num_rows=pattern.num_rows,
            width=pattern.indices.shape[-1],
            num_splits=num_splits,
            split_blocks=split_blocks,
            **options,
        )
        if num_dense:
            merge_kernel[(num_sequences * -(-num_dense // _MERGE_TOKENS),)](
                part,
                part_lse,
                tokens(output),
                lse,
                query.shape[1],
                pattern.query_len,
                num_dense,
                num_splits,
                block_m=_MERGE_TOKENS,
                head_dim=query.shape[-1],
            )
    return output, (torch.where(lse.isinf(), -torch.inf, lse * math.log(2)) if call.has_lse else lse)


def triton_backward(
    call: BlockCall, grad_output: Tensor, output: Tensor, lse: Tensor, grad_lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, from what `triton_forward` returned."""
    query, key, value, pattern = call.query, call.key, call.value, call.pattern
    grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
    batch_size, num_heads, query_len, head_dim = query.shape
    num_sequences, size = batch_size * num_heads, pattern.block_size
    if call.has_lse:
        lse = torch.where(lse.isinf(), torch.inf, lse / math.log(2))
    delta = torch.empty_like(lse)
    with torch.cuda.device_of(query):
        delta_kernel[(num_sequences * -(-query_len // _DELTA_TOKENS),)](
            *map(tokens, (output, grad_output)),
            delta,
            num_heads,
            query_len,
            block_m=_DELTA_TOKENS,
            head_dim=head_dim,
        )
        if grad_lse is not None:  # adds weight times gradient to the gradient of each score
            delta -= grad_lse.masked_fill(lse.isinf(), 0.0)
        rows, row_starts = pattern.transposed
        options = _options(call, "key_gradient")
        num_splits, split_blocks = _splits(pattern.num_query_blocks)
        num_global = min(pattern.num_global * size, pattern.key_len)
        parts = query.new_empty((2, batch_size, num_heads, num_splits, num_global, head_dim), dtype=torch.float32)
        key_part, value_part = parts.unbind()
        lines = pattern.num_global * num_splits + pattern.num_key_blocks - pattern.num_global
        key_gradient_kernel[(num_sequences * lines * (size // options["block_n"]),)](
            *map(tokens, (query, key, value, grad_output, grad_key, grad_value)),
            lse,
            delta,
            key_part,
            value_part,
            rows,
            row_starts,
            num_columns=pattern.num_key_blocks,
            table_size=rows.shape[-1],
            num_splits=num_splits,
            split_blocks=split_blocks,
            **options,
        )
        if num_global:
            grad_key[:, :, :num_global], grad_value[:, :, :num_global] = parts.sum(3).unbind()
        del parts, key_part, value_part  # before the next partial results are allocated
        options = _options(call, "query_gradient")
        num_splits, split_blocks = _splits(-(-pattern.dense_key_len // size))
        num_dense = min(pattern.num_dense_rows * size, query_len)
        part = query.new_empty((batch_size, num_heads, num_splits, num_dense, head_dim), dtype=torch.float32)
        lines = pattern.num_dense_rows * num_splits + pattern.num_rows
        query_gradient_kernel[(num_sequences * lines * (size // options["block_m"]),)](
            *map(tokens, (query, key, value, grad_output, grad_query)),
            lse,
            delta,
            part,
            pattern.indices,
            pattern.counts,
            num_rows=pattern.num_rows,
            width=pattern.indices.shape[-1],
            num_splits=num_splits,
            split_blocks=split_blocks,
            **options,
        )
        if num_dense:
            grad_query[:, :, :num_dense] = part.sum(2)
    return grad_query, grad_key, grad_value
