# ruff: noqa: ANN001, ANN201, D417
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Block-sparse attention in Triton: merges what the stretches of dense rows and global columns found, in order.

One kernel each for the forward and the backward pass: few tokens, so what counts is the time to launch them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_zoo.kernels.blocks.triton.addressing import LN_2, sequence_start


@triton.jit(do_not_specialize=["num_sequences", "num_heads", "query_len", "num_tokens", "num_splits"])
def merge_kernel(
    part,
    output,
    output_strides,
    lse,
    num_sequences,
    num_heads,
    query_len,
    num_tokens,
    num_splits,
    block_m: tl.constexpr,
    head_dim: tl.constexpr,
):
    """Merge the stretches of some dense tokens of one sequence; see `forward_kernel` for the arguments."""
    num_tiles = tl.cdiv(num_tokens, block_m)
    sequence, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    features = tl.arange(0, head_dim)
    query_at = tile * block_m + tl.arange(0, block_m)
    is_query = query_at < num_tokens
    part_lse = part + num_sequences.to(tl.int64) * num_splits * num_tokens * head_dim
    first = sequence.to(tl.int64) * num_splits * num_tokens + query_at
    highest = tl.full([block_m], float("-inf"), tl.float32)
    for split in range(num_splits):
        log_sum = tl.load(part_lse + first + split * num_tokens, mask=is_query, other=float("-inf"))
        highest = tl.maximum(highest, log_sum)
    pivot = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([block_m], tl.float32)
    result = tl.zeros([block_m, head_dim], tl.float32)
    for split in range(num_splits):
        place = first + split * num_tokens
        share = tl.exp2(tl.load(part_lse + place, mask=is_query, other=float("-inf")) - pivot)
        addend = tl.load(part + place[:, None] * head_dim + features[None, :], mask=is_query[:, None], other=0.0)
        total += share
        result += share[:, None] * addend
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    batch, head = sequence // num_heads, sequence % num_heads
    place = sequence_start(output, output_strides, batch, head) + query_at.to(tl.int64)[:, None] * output_strides.token
    tl.store(place + features[None, :], result.to(output.dtype.element_ty), mask=is_query[:, None])
    log_sum = highest + tl.log2(tl.where(total == 0.0, 1.0, total))
    tl.store(lse + sequence.to(tl.int64) * query_len + query_at, log_sum * LN_2, mask=is_query)


@triton.jit
def add_up(
    part,
    target,
    strides,
    sequence,
    tile,
    num_heads,
    num_tokens,
    num_splits,
    block_m: tl.constexpr,
    head_dim: tl.constexpr,
):
    """Write the sum of the stretches' gradients of one tile of tokens."""
    features = tl.arange(0, head_dim)
    at = tile * block_m + tl.arange(0, block_m)
    is_token = (at < num_tokens)[:, None]
    total = tl.zeros([block_m, head_dim], tl.float32)
    for split in range(num_splits):
        place = (sequence.to(tl.int64) * num_splits + split) * num_tokens + at
        total += tl.load(part + place[:, None] * head_dim + features[None, :], mask=is_token, other=0.0)
    start = sequence_start(target, strides, sequence // num_heads, sequence % num_heads)
    place = start + at.to(tl.int64)[:, None] * strides.token + features[None, :]
    tl.store(place, total.to(target.dtype.element_ty), mask=is_token)


@triton.jit(
    do_not_specialize=[
        "num_sequences", "num_heads", "num_dense_tokens", "num_query_splits", "num_global_tokens", "num_key_splits"
    ]
)  # fmt: skip
def add_up_kernel(
    workspace,
    key_part_at,
    value_part_at,
    grad_query,
    grad_query_strides,
    grad_key,
    grad_key_strides,
    grad_value,
    grad_value_strides,
    num_sequences,
    num_heads,
    num_dense_tokens,
    num_query_splits,
    num_global_tokens,
    num_key_splits,
    block_m: tl.constexpr,
    head_dim: tl.constexpr,
):
    """Add up the gradients of dense tokens or, in later programs, of global keys and values.

    Args:
        workspace: float32, of queries `[B, H, query splits, dense tokens, D]`, then, at `key_part_at`, of keys
            `[B, H, key splits, global tokens, D]`; so, at `value_part_at`, of values.
        grad_query: `[B, H, L, D]`, written; so `grad_key`, `grad_value`, whose strides follow.
    """
    program = tl.program_id(0)
    num_tiles = tl.cdiv(num_dense_tokens, block_m)
    num_query_programs = num_sequences * num_tiles
    if program < num_query_programs:
        sequence, tile = program // num_tiles, program % num_tiles
        sizes = (num_heads, num_dense_tokens, num_query_splits)
        add_up(workspace, grad_query, grad_query_strides, sequence, tile, *sizes, block_m, head_dim)
    else:
        program -= num_query_programs
        num_tiles = tl.cdiv(num_global_tokens, block_m)
        sequence, tile = program // num_tiles, program % num_tiles
        sizes = (num_heads, num_global_tokens, num_key_splits)
        add_up(workspace + key_part_at, grad_key, grad_key_strides, sequence, tile, *sizes, block_m, head_dim)
        add_up(workspace + value_part_at, grad_value, grad_value_strides, sequence, tile, *sizes, block_m, head_dim)
