# ruff: noqa: ANN001, ANN201, D417
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Block-sparse attention in Triton, backward, first part: the gradient of the queries, by rows.

Dao 2023, "FlashAttention-2", arXiv 2307.08691, algorithm 2, in two kernels, with `key_gradient.py`. Both
compute the weights again from the log-sum-exp of the forward pass: two matrix products more, but every sum has one
owner and one order, without atomic additions. Dense rows are cut into stretches of keys; the caller adds up their
float32 sums.
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
    row_list,
    sequence_start,
    table_of,
)
from attn_zoo.kernels.blocks.triton.kept_weights import is_kept, sequence_words

SIZES = [
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
def query_gradient_kernel(
    query,
    query_strides,
    key,
    key_strides,
    value,
    value_strides,
    output,
    output_strides,
    grad_output,
    grad_output_strides,
    grad_query,
    grad_query_strides,
    lse,
    grad_lse,
    workspace,
    delta_at,
    indices,
    counts,
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
    has_grad_lse: tl.constexpr,
):
    """Compute the gradient of one tile of queries; tiles and masks as in the forward kernel.

    Args:
        query: `[B, H, L, D]`; so `key`, `value`, `output`, `grad_output`, `grad_query`, whose strides follow.
        lse: float32 `[B, H, L]`, of the forward pass.
        grad_lse: float32 `[B, H, L]`, contiguous, or None.
        workspace: float32, written: the stretches' gradients of dense rows `[B, H, splits, dense tokens, D]`, and at
            `delta_at` the sum of output times gradient of each query, without `grad_lse`: `[B, H, L]`.
        indices: int32 `[B or 1, P, R, W]`; the further arguments are the forward kernel's.
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
    first_query = tile * block_m
    query_at = first_query + within
    standing = query_at + row_shift * block_size
    is_query = query_at < query_len
    start = sequence_start(query, query_strides, batch, head)
    queries = load_tile(start, query_strides.token, first_query, within, features, is_query, is_ragged)
    start = sequence_start(grad_output, grad_output_strides, batch, head)
    grads = load_tile(start, grad_output_strides.token, first_query, within, features, is_query, is_ragged)
    start = sequence_start(output, output_strides, batch, head)
    results = load_tile(start, output_strides.token, first_query, within, features, is_query, is_ragged)
    place = sequence.to(tl.int64) * query_len + query_at
    log_sum = base_2(tl.load(lse + place, mask=is_query, other=float("-inf")))
    deltas = tl.sum(results.to(tl.float32) * grads.to(tl.float32), 1)
    if has_grad_lse:  # it adds weight times gradient to the gradient of each score
        deltas -= tl.load(grad_lse + place, mask=is_query & (log_sum < float("inf")), other=0.0)
    num_owned = tl.where(is_split & (split > 0), 0, query_len)  # all stretches of a row find the same
    tl.store(workspace + delta_at + place, deltas, mask=query_at < num_owned)
    slope = 0.0
    if has_slopes:
        slope = tl.load(slopes + head).to(tl.float32) * LOG2_E
    if has_padding:
        padding += batch.to(tl.int64) * key_len

    words = (0, 0)
    if has_dropout:
        words = sequence_words(seed, sequence)

    score_scale = scale * LOG2_E
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
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * score_scale
            if has_slopes:
                scores = scores - slope * tl.abs(standing[:, None] - key_at[None, :])
            if is_masked:
                visible = is_visible(
                    standing[:, None], key_at[None, :], is_causal, reach, dilation, stride, num_global_tokens
                )
                scores = tl.where(visible & is_key[None, :], scores, float("-inf"))
            weights = tl.exp2(scores - log_sum[:, None])
            grad_weights = tl.dot(grads, tl.trans(values), input_precision="ieee")
            if has_dropout:
                kept = is_kept(words, query_at[:, None], key_at[None, :], drop_bound)
                grad_weights = tl.where(kept, grad_weights * keep_scale, 0.0)
            grad_scores = weights * (grad_weights - deltas[:, None])
            result = tl.dot(grad_scores.to(keys.dtype), keys, result, input_precision="ieee")

    result = result * scale
    if is_split:
        num_tokens = tl.minimum(num_dense_rows * block_size, query_len)
        token = (sequence.to(tl.int64) * num_splits + split) * num_tokens + query_at
        is_query = query_at < num_tokens
        tl.store(workspace + token[:, None] * head_dim + features[None, :], result, mask=is_query[:, None])
    else:
        target = sequence_start(grad_query, grad_query_strides, batch, head)
        target += query_at.to(tl.int64)[:, None] * grad_query_strides.token
        tl.store(target + features[None, :], result.to(grad_query.dtype.element_ty), mask=is_query[:, None])
