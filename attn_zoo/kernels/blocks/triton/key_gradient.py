# ruff: noqa: ANN001, ANN201, D417
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Block-sparse attention in Triton, backward, second part: the gradients of keys and values, by columns.

Algorithm and reasons as in `query_gradient.py`, over the transposed table. Global columns, which every row
adds to, are cut into stretches of queries, whose float32 sums `stretches.py` adds up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_zoo.kernels.blocks.triton.addressing import (
    LOG2_E,
    base_2,
    block_at,
    find_tile,
    is_visible,
    load_tile,
    sequence_start,
    table_of,
)
from attn_zoo.kernels.blocks.triton.kept_weights import is_kept, sequence_words

SIZES = [
    "num_heads",
    "query_len",
    "key_len",
    "num_dense_rows",
    "num_columns",
    "num_global",
    "table_size",
    "num_tables",
    "row_shift",
    "num_splits",
    "split_blocks",
    "drop_bound",
]


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(
    query,
    query_strides,
    key,
    key_strides,
    value,
    value_strides,
    grad_output,
    grad_output_strides,
    grad_key,
    grad_key_strides,
    grad_value,
    grad_value_strides,
    lse,
    workspace,
    key_part_at,
    value_part_at,
    delta_at,
    rows,
    row_starts,
    padding,
    slopes,
    seed,
    drop_bound,
    keep_scale,
    scale,
    num_heads,
    query_len,
    key_len,
    num_dense_rows,
    num_columns,
    num_global,
    table_size,
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
    """Compute the gradients of one tile of keys and values, over the rows that see them or a stretch of all rows.

    Keys that are padding or beyond the end need no mask on the way: they touch their own gradients alone, which are
    zeroed or not written. Queries beyond the end see nothing, hence weights of zero. Under a causal mask
    only the first block of a column can be cut by the diagonal.

    Args:
        query: `[B, H, L, D]`; so `key`, `value`, `grad_output`, `grad_key`, `grad_value`, whose strides follow.
        lse: float32 `[B, H, L]`, of the forward pass.
        workspace: float32, whose part at `delta_at` the gradient of the queries writes. Written: the stretches'
            gradients of global keys, at `key_part_at`, and values: `[B, H, splits, global tokens, D]`.
        rows: int32 `[B or 1, P, table_size]`, the transposed table: listed rows that see each key block in turn.
        row_starts: int32 `[B or 1, P, key blocks + 1]`, where those of each key block start; the further arguments are
            the forward kernel's.
    """
    column_tiles: tl.constexpr = block_size // block_n
    is_split, tile, split = find_tile(tl.program_id(0), num_global * column_tiles, num_splits)
    head, batch = tl.program_id(1), tl.program_id(2)
    sequence = batch * num_heads + head
    block = tile // column_tiles
    table = table_of(batch, head, num_heads, num_tables, has_batch_tables)
    starts = row_starts + table * (num_columns + 1) + block
    first_entry = tl.load(starts)
    num_entries = tl.load(starts + 1) - first_entry

    first_place, last_place, num_leading = 0, num_dense_rows + num_entries, num_dense_rows
    if is_causal:  # dense rows that stand before this block do not see it
        first_place = tl.minimum(tl.maximum(block - row_shift, 0), num_dense_rows)
    if is_split:
        last_place = tl.cdiv(query_len, block_size)
        first_place = split * split_blocks
        last_place = tl.minimum(last_place, first_place + split_blocks)
        if is_causal:
            first_place = tl.maximum(first_place, block - row_shift)
        num_leading = last_place

    key_within, features = tl.arange(0, block_n), tl.arange(0, head_dim)
    first_key = tile * block_n
    key_at = first_key + key_within
    is_key = key_at < key_len
    is_written = is_key
    if has_padding:
        is_key = is_key & (tl.load(padding + batch.to(tl.int64) * key_len + key_at, mask=is_key, other=1) == 0)
    is_cut: tl.constexpr = has_padding or is_ragged
    start = sequence_start(key, key_strides, batch, head)
    keys = load_tile(start, key_strides.token, first_key, key_within, features, is_key, is_cut)
    start = sequence_start(value, value_strides, batch, head)
    values = load_tile(start, value_strides.token, first_key, key_within, features, is_key, is_cut)
    slope = 0.0
    if has_slopes:
        slope = tl.load(slopes + head).to(tl.float32) * LOG2_E

    words = (0, 0)
    if has_dropout:
        words = sequence_words(seed, sequence)

    score_scale = scale * LOG2_E
    key_result = tl.zeros([block_n, head_dim], tl.float32)
    value_result = tl.zeros([block_n, head_dim], tl.float32)
    query_start = sequence_start(query, query_strides, batch, head)
    grad_start = sequence_start(grad_output, grad_output_strides, batch, head)
    entries = rows + table.to(tl.int64) * table_size + first_entry
    within = tl.arange(0, block_m)
    row_tiles: tl.constexpr = block_size // block_m
    first_of_sequence = sequence.to(tl.int64) * query_len
    middle_place = first_place
    if reach >= 0:
        middle_place = last_place
    elif is_causal:
        middle_place = tl.minimum(first_place + 1, last_place)
    depth: tl.constexpr = None if reach >= 0 else 1  # one block more needs no buffers of its own
    for is_plain in tl.static_range(0 if reach >= 0 or is_causal else 1, 1 if reach >= 0 else 2):
        start, stop = middle_place if is_plain else first_place, last_place if is_plain else middle_place
        query_block = block_at(entries, start, num_leading, last_place, num_dense_rows)
        for step in tl.range(start * row_tiles, stop * row_tiles, num_stages=None if is_plain else depth):
            first = query_block * block_size + step % row_tiles * block_m
            query_block = block_at(entries, (step + 1) // row_tiles, num_leading, last_place, num_dense_rows)
            query_at = first + within
            is_query = query_at < query_len
            queries = load_tile(query_start, query_strides.token, first, within, features, is_query, is_ragged)
            grads = load_tile(grad_start, grad_output_strides.token, first, within, features, is_query, is_ragged)
            if is_ragged:
                log_sum = tl.load(lse + first_of_sequence + query_at, mask=is_query, other=float("-inf"))
                deltas = tl.load(workspace + delta_at + first_of_sequence + query_at, mask=is_query, other=0.0)
            else:
                log_sum = tl.load(lse + first_of_sequence + query_at)
                deltas = tl.load(workspace + delta_at + first_of_sequence + query_at)
            log_sum = base_2(log_sum)
            scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * score_scale  # [keys, queries]
            standing = (query_at + row_shift * block_size)[None, :]
            if has_slopes:
                scores = scores - slope * tl.abs(standing - key_at[:, None])
            if not is_plain:
                visible = is_visible(standing, key_at[:, None], is_causal, reach, dilation, stride, num_global_tokens)
                scores = tl.where(visible, scores, float("-inf"))
            weights = tl.exp2(scores - log_sum[None, :])
            remaining = weights
            if has_dropout:
                kept = is_kept(words, query_at[None, :], key_at[:, None], drop_bound)
                remaining = tl.where(kept, weights, 0.0)
            value_result = tl.dot(remaining.to(grads.dtype), grads, value_result, input_precision="ieee")
            grad_weights = tl.dot(values, tl.trans(grads), input_precision="ieee")
            if has_dropout:
                grad_weights = tl.where(kept, grad_weights * keep_scale, 0.0)
            grad_scores = weights * (grad_weights - deltas[None, :])
            key_result = tl.dot(grad_scores.to(queries.dtype), queries, key_result, input_precision="ieee")

    key_result = key_result * scale
    if has_dropout:
        value_result = value_result * keep_scale
    if has_padding:
        key_result = tl.where(is_key[:, None], key_result, 0.0)
        value_result = tl.where(is_key[:, None], value_result, 0.0)
    if is_split:
        num_tokens = tl.minimum(num_global * block_size, key_len)
        token = (sequence.to(tl.int64) * num_splits + split) * num_tokens + key_at
        cell = token[:, None] * head_dim + features[None, :]
        tl.store(workspace + key_part_at + cell, key_result, mask=is_written[:, None])
        tl.store(workspace + value_part_at + cell, value_result, mask=is_written[:, None])
    else:
        place_at = key_at.to(tl.int64)[:, None]
        target = sequence_start(grad_key, grad_key_strides, batch, head) + place_at * grad_key_strides.token
        tl.store(target + features[None, :], key_result.to(grad_key.dtype.element_ty), mask=is_written[:, None])
        target = sequence_start(grad_value, grad_value_strides, batch, head) + place_at * grad_value_strides.token
        tl.store(target + features[None, :], value_result.to(grad_value.dtype.element_ty), mask=is_written[:, None])
