# ruff: noqa: ANN001, ANN201, D417
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Block-sparse attention in Triton, forward: softmax online over the blocks of one row, in base 2 and in float32.

Dao 2023, "FlashAttention-2", arXiv 2307.08691, algorithm 1, over a list of blocks instead of all; dense rows are cut
into stretches of keys, which run side by side and are merged by their log-sum-exp, in order, so that results repeat.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_zoo.kernels.blocks.triton.addressing import (
    LN_2,
    LOG2_E,
    block_at,
    find_tile,
    is_visible,
    load_tile,
    row_list,
    sequence_start,
    table_of,
)
from attn_zoo.kernels.blocks.triton.kept_weights import is_kept, sequence_words

# Lengths and counts of a pattern change from call to call, and must not compile anew.
SIZES = [
    "num_sequences",
    "num_heads",
    "query_len",
    "key_len",
    "num_dense_rows",
    "num_rows",
    "num_global",
    "width",
    "num_tables",
    "row_shift",
    "num_splits",
    "split_blocks",
    "drop_bound",
]


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    query,
    query_strides,
    key,
    key_strides,
    value,
    value_strides,
    output,
    output_strides,
    lse,
    part,
    indices,
    counts,
    padding,
    slopes,
    seed,
    drop_bound,
    keep_scale,
    scale,
    num_sequences,
    num_heads,
    query_len,
    key_len,
    num_dense_rows,
    num_rows,
    num_global,
    width,
    num_tables,
    row_shift,
    num_splits,
    split_blocks,
    block_size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    head_dim: tl.constexpr,
    is_causal: tl.constexpr,
    is_ragged: tl.constexpr,
    has_batch_tables: tl.constexpr,
    reach: tl.constexpr,
    dilation: tl.constexpr,
    stride: tl.constexpr,
    num_global_tokens: tl.constexpr,
    has_padding: tl.constexpr,
    has_slopes: tl.constexpr,
    has_dropout: tl.constexpr,
):
    """Attend from one tile of a listed row to its list, or from one of a dense row to a stretch of keys.

    Only the last block of a list can be ragged or cut by the diagonal; a rule and padding may hide keys anywhere.

    Args:
        query: `[B, H, L, D]`; so `key`, `value`, `output`, whose strides follow.
        lse: float32 `[B, H, L]`, written: natural log-sum-exp of the scores, -inf where a query sees nothing.
        part: float32, written: outputs of the stretches `[B, H, splits, dense tokens, D]`; behind them their
            log-sum-exps in base 2, `[B, H, splits, dense tokens]`.
        indices: int32 `[B or 1, P, R, W]`.
        counts: int32 `[B or 1, P, R]`.
        padding: uint8 `[B, S]`, 1 = padding.
        slopes: float `[H]`.
        seed: int64 `[1]`, of dropout; `drop_bound` and `keep_scale` as `dropout_options` gives them.
        row_shift: blocks that a query's position is further along than its number.
    """
    row_tiles: tl.constexpr = block_size // block_m
    is_split, tile, split = find_tile(tl.program_id(0), num_dense_rows * row_tiles, num_splits)
    head, batch = tl.program_id(1), tl.program_id(2)
    sequence = batch * num_heads + head
    block = tile // row_tiles
    first_place, last_place, num_leading, entries = row_list(
        indices,
        counts,
        table_of(batch, head, num_heads, num_tables, has_batch_tables),
        block,
        split,
        is_split,
        key_len,
        num_dense_rows,
        num_rows,
        num_global,
        width,
        row_shift,
        split_blocks,
        block_size,
        is_causal,
    )
    bound = num_leading + tl.where(is_split, 0, width)

    within, features = tl.arange(0, block_m), tl.arange(0, head_dim)
    query_at = tile * block_m + within
    standing = query_at + row_shift * block_size
    is_query = query_at < query_len
    queries = load_tile(
        sequence_start(query, query_strides, batch, head),
        query_strides.token,
        tile * block_m,
        within,
        features,
        is_query,
        is_ragged,
    )
    slope = 0.0
    if has_slopes:
        slope = tl.load(slopes + head).to(tl.float32) * LOG2_E
    if has_padding:
        padding += batch.to(tl.int64) * key_len

    words = (0, 0)
    if has_dropout:
        words = sequence_words(seed, sequence)

    score_scale = scale * LOG2_E
    highest = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    result = tl.zeros([block_m, head_dim], tl.float32)
    key_start, value_start = (
        sequence_start(key, key_strides, batch, head),
        sequence_start(value, value_strides, batch, head),
    )
    key_within = tl.arange(0, block_n)
    key_tiles: tl.constexpr = block_size // block_n
    is_masked_everywhere: tl.constexpr = has_padding or reach >= 0
    is_masked_somewhere: tl.constexpr = has_padding or reach >= 0 or is_causal or is_ragged
    middle_place = last_place
    if is_masked_everywhere:
        middle_place = first_place
    elif is_masked_somewhere:
        middle_place = tl.maximum(first_place, last_place - 1)
    depth: tl.constexpr = None if is_masked_everywhere else 1  # one block more needs no buffers of its own
    for is_masked in tl.static_range(1 if is_masked_everywhere else 0, 2 if is_masked_somewhere else 1):
        start, stop = middle_place if is_masked else first_place, last_place if is_masked else middle_place
        key_block = block_at(entries, start, num_leading, bound, 0)
        for step in tl.range(start * key_tiles, stop * key_tiles, num_stages=depth if is_masked else None):
            first = key_block * block_size + step % key_tiles * block_n
            key_block = block_at(entries, (step + 1) // key_tiles, num_leading, bound, 0)
            key_at = first + key_within
            is_key = key_at < key_len
            if has_padding:
                is_key = is_key & (tl.load(padding + key_at, mask=is_key, other=1) == 0)
            keys = load_tile(key_start, key_strides.token, first, key_within, features, is_key, is_masked)
            values = load_tile(value_start, value_strides.token, first, key_within, features, is_key, is_masked)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            if is_masked or has_slopes:
                scores = scores * score_scale
                if has_slopes:
                    scores = scores - slope * tl.abs(standing[:, None] - key_at[None, :])
                if is_masked:
                    visible = is_visible(
                        standing[:, None], key_at[None, :], is_causal, reach, dilation, stride, num_global_tokens
                    )
                    scores = tl.where(visible & is_key[None, :], scores, float("-inf"))
                now_highest = tl.maximum(highest, tl.max(scores, 1))
                pivot = tl.where(now_highest == float("-inf"), 0.0, now_highest)  # a query that has seen nothing yet
                weights = tl.exp2(scores - pivot[:, None])
            else:  # the product with the scale and the difference are one instruction
                now_highest = tl.maximum(highest, tl.max(scores, 1) * score_scale)
                pivot = now_highest
                weights = tl.exp2(scores * score_scale - pivot[:, None])
            fading = tl.exp2(highest - pivot)
            highest = now_highest
            total = total * fading + tl.sum(weights, 1)
            if has_dropout:  # after the sum: it is weights of the softmax that are dropped
                weights = tl.where(is_kept(words, query_at[:, None], key_at[None, :], drop_bound), weights, 0.0)
            result = tl.dot(weights.to(values.dtype), values, result * fading[:, None], input_precision="ieee")

    is_dead = total == 0.0
    last_scale = 1.0 / tl.where(is_dead, 1.0, total)  # a division for each row, not for each number
    if has_dropout:
        last_scale = last_scale * keep_scale
    result = result * last_scale[:, None]
    log_sum = highest + tl.log2(tl.where(is_dead, 1.0, total))
    if is_split:
        num_tokens = tl.minimum(num_dense_rows * block_size, query_len)
        token = (sequence.to(tl.int64) * num_splits + split) * num_tokens + query_at
        is_query = query_at < num_tokens
        tl.store(part + token[:, None] * head_dim + features[None, :], result, mask=is_query[:, None])
        part_lse = part + num_sequences.to(tl.int64) * num_splits * num_tokens * head_dim
        tl.store(part_lse + token, log_sum, mask=is_query)
    else:
        target = (
            sequence_start(output, output_strides, batch, head) + query_at.to(tl.int64)[:, None] * output_strides.token
        )
        tl.store(target + features[None, :], result.to(output.dtype.element_ty), mask=is_query[:, None])
        tl.store(lse + sequence.to(tl.int64) * query_len + query_at, log_sum * LN_2, mask=is_query)
