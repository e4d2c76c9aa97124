# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""Triton kernels of the compression: tokens read where they lie, each once; sums in float32, in a fixed order.

Forward: each program sums one stretch of positions for one tile of (rank, column), and a second kernel adds the
stretches in order: no atomics, so results repeat bit for bit. Backward: E grad is written straight to the layout of
the tokens, and tokens grad^T to that of the matrix; both sums are short. A column is one (head, channel) of a sequence,
found by strides, so heads that share a matrix stand side by side in one tile. The load itself leaves padding out: what
is stored there is never read. Keys and values are two sources of one launch: each program picks its own.

`triton_launch` calls these. Loaded only where it is used: it needs the package triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _columns(tile, block, heads: tl.constexpr, dim: tl.constexpr, tile_x: tl.constexpr):
    """Return head, channel and existence of the columns of a tile; a block is the heads that share a matrix."""
    column = tile * tile_x + tl.arange(0, tile_x)
    return block * heads + column // dim, column % dim, column < heads * dim


@triton.jit(do_not_specialize=["blocks", "length"])
def sum_positions(
    tokens, tokens_b, matrix, matrix_b, mask, sums, sums_b,
    token_n, token_g, token_s, token_d, matrix_n, matrix_g, matrix_s, matrix_k,
    blocks, length, width, rank, sums_split, sums_source,
    dim: tl.constexpr, heads: tl.constexpr, has_mask: tl.constexpr,
    tile_k: tl.constexpr, tile_x: tl.constexpr, tile_s: tl.constexpr,
):  # fmt: skip
    """Write sums[split, n, g, m, d] = sum over a split of matrix[j, m] tokens[n, g, j, d], `width` positions each.

    Those of the second source begin `sums_source` after `sums_b`.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    if tl.program_id(2) == 1:
        tokens, matrix, sums = tokens_b, matrix_b, sums_b
    rank_tiles, column_tiles = tl.cdiv(rank, tile_k), tl.cdiv(heads * dim, tile_x)
    row = (tile % rank_tiles) * tile_k + tl.arange(0, tile_k)
    tile = tile // rank_tiles
    block, n = (tile // column_tiles) % blocks, (tile // column_tiles // blocks).to(tl.int64)
    head, channel, is_column = _columns(tile % column_tiles, block, heads, dim, tile_x)

    first, stop = split * width, tl.minimum((split + 1) * width, length)
    within = tl.arange(0, tile_s)
    far = (first + within).to(tl.int64)[:, None]
    token_at = tokens + n * token_n + far * token_s + (head.to(tl.int64) * token_g + channel * token_d)[None, :]
    matrix += n * matrix_n + block.to(tl.int64) * matrix_g + first.to(tl.int64) * matrix_s
    matrix_at = within[:, None] * matrix_s + (row * matrix_k)[None, :]  # in 32 bits: registers are short here
    mask += n * length
    total = tl.zeros((tile_x, tile_k), dtype=tl.float32)  # rank along the long side of the matrix unit
    for start in range(first, stop, tile_s):
        is_position = start + within < stop
        is_token = is_position
        if has_mask:
            is_token = is_position & (tl.load(mask + start + within, mask=is_position, other=1) == 0)
        weights = tl.load(matrix + matrix_at, mask=is_position[:, None] & (row < rank)[None, :], other=0.0)
        values = tl.load(token_at, mask=is_token[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(tl.trans(values), weights, total, input_precision="ieee")
        token_at += tile_s * token_s
        matrix += tile_s * matrix_s
    at = ((n * (blocks * heads) + head) * rank)[:, None] + row[None, :]
    out = sums + tl.program_id(2) * sums_source + split.to(tl.int64) * sums_split + at * dim + channel[:, None]
    tl.store(out, total.to(sums.dtype.element_ty), mask=is_column[:, None] & (row < rank)[None, :])


@triton.jit(do_not_specialize=["splits"])
def add_splits(
    sums, out, out_b, size, splits, sums_split,
    num_rows: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """Write out[i] = sum over splits of sums[split, i], then those of `out_b`: always in the same order."""
    if tl.program_id(1) == 1:
        sums, out = sums + size, out_b
    index, row = tl.program_id(0) * block_size + tl.arange(0, block_size), tl.arange(0, num_rows)
    at = sums + row.to(tl.int64)[:, None] * sums_split + index[None, :]
    total = tl.zeros((num_rows, block_size), dtype=tl.float32)
    for start in range(0, splits, num_rows):
        total += tl.load(at, mask=(start + row < splits)[:, None] & (index < size)[None, :], other=0.0)
        at += num_rows * sums_split
    tl.store(out + index, tl.sum(total, 0).to(out.dtype.element_ty), mask=index < size)


@triton.jit(do_not_specialize=["blocks", "length"])
def grad_tokens(
    grad, grad_b, matrix, matrix_b, mask, out, out_b,
    token_n, token_g, token_s, token_d, matrix_n, matrix_g, matrix_s, matrix_k,
    blocks, length, width, rank,
    grad_n: tl.constexpr, grad_g: tl.constexpr, grad_k: tl.constexpr,
    dim: tl.constexpr, heads: tl.constexpr, num_summed: tl.constexpr, has_mask: tl.constexpr,
    is_held: tl.constexpr, tile_k: tl.constexpr, tile_x: tl.constexpr, tile_s: tl.constexpr,
):  # fmt: skip
    """Write out[n, g, j, d] = sum over m of matrix[j, m] grad[n, g, m, d], zero in padding, `width` positions each.

    Each source has a matrix of its own; where `num_summed` is 2, one source went through both matrices. Where the tile
    holds the whole rank (`is_held`), grad is loaded once and stays.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    if tl.program_id(2) == 1:
        grad, matrix, out = grad_b, matrix_b, out_b
    column_tiles = tl.cdiv(heads * dim, tile_x)
    block, n = (tile // column_tiles) % blocks, (tile // column_tiles // blocks).to(tl.int64)
    head, channel, is_column = _columns(tile % column_tiles, block, heads, dim, tile_x)

    row, within = tl.arange(0, tile_k), tl.arange(0, tile_s)
    first, stop = split * width, tl.minimum((split + 1) * width, length)
    grad_start = n * grad_n
    grad_at = (head * grad_g + channel)[None, :] + (row * grad_k)[:, None]
    out += n * token_n
    corner = n * matrix_n + block.to(tl.int64) * matrix_g + first.to(tl.int64) * matrix_s
    matrix_at = within[:, None] * matrix_s + (row * matrix_k)[None, :]
    mask += n * length
    if is_held:
        held = tl.load(grad + grad_start + grad_at, mask=(row < rank)[:, None] & is_column[None, :], other=0.0)
    for start in range(first, stop, tile_s):
        is_position = start + within < stop
        if is_held:
            weights = tl.load(matrix + corner + matrix_at, mask=is_position[:, None] & (row < rank)[None, :], other=0.0)
            total = tl.dot(weights, held, input_precision="ieee")
        else:
            total = tl.zeros((tile_s, tile_x), dtype=tl.float32)
            for source in tl.static_range(num_summed):
                if source == 1:
                    from_matrix, from_grad = matrix_b + corner, grad_b + grad_start
                else:
                    from_matrix, from_grad = matrix + corner, grad + grad_start
                for low in range(0, rank, tile_k):
                    is_row = low + row < rank
                    weights = tl.load(from_matrix + matrix_at, mask=is_position[:, None] & is_row[None, :], other=0.0)
                    values = tl.load(from_grad + grad_at, mask=is_row[:, None] & is_column[None, :], other=0.0)
                    total = tl.dot(weights, values, total, input_precision="ieee")
                    from_matrix += tile_k * matrix_k
                    from_grad += tile_k * grad_k
        if has_mask:
            is_padding = tl.load(mask + start + within, mask=is_position, other=1) != 0
            total = tl.where(is_padding[:, None], 0.0, total)
        far = (start + within).to(tl.int64)[:, None] * token_s
        out_at = out + far + (head.to(tl.int64) * token_g + channel * token_d)[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=is_position[:, None] & is_column[None, :])
        corner += tile_s * matrix_s


@triton.jit(do_not_specialize=["blocks", "batches", "length", "rows"])
def grad_matrix(
    tokens, tokens_b, grad, grad_b, mask, out, out_b,
    token_n, token_g, token_s, token_d, matrix_n, matrix_g, matrix_s, matrix_k,
    blocks, batches, length, rows, rank,
    grad_n: tl.constexpr, grad_g: tl.constexpr, grad_k: tl.constexpr,
    dim: tl.constexpr, heads: tl.constexpr, num_summed: tl.constexpr, has_mask: tl.constexpr,
    tile_k: tl.constexpr, tile_x: tl.constexpr, tile_s: tl.constexpr,
):  # fmt: skip
    """Write out[r, j, m] = sum over the `batches` and heads that share matrix r, and d, of tokens times grad.

    Each matrix has a source of its own; where `num_summed` is 2, one matrix served both sources. It has `rows`
    positions, `length` at least, and those beyond the tokens get zeros.
    """
    tile, shared = tl.program_id(0), tl.program_id(1)
    if tl.program_id(2) == 1:
        tokens, grad, out = tokens_b, grad_b, out_b
    rank_tiles, column_tiles = tl.cdiv(rank, tile_k), tl.cdiv(heads * dim, tile_x)
    row = (tile % rank_tiles) * tile_k + tl.arange(0, tile_k)
    position = (tile // rank_tiles) * tile_s + tl.arange(0, tile_s)
    block, batch = shared % blocks, shared // blocks
    is_position, is_row = position < length, row < rank
    steps = tl.where((tile // rank_tiles) * tile_s < length, batches * column_tiles, 0)
    far = position.to(tl.int64)[:, None]
    total = tl.zeros((tile_s, tile_k), dtype=tl.float32)
    for source in tl.static_range(num_summed):
        if source == 1:
            tokens, grad = tokens_b, grad_b
        for step in range(steps):
            n = (batch * batches + step // column_tiles).to(tl.int64)
            head, channel, is_column = _columns(step % column_tiles, block, heads, dim, tile_x)
            is_token = is_position
            if has_mask:
                is_token = is_position & (tl.load(mask + n * length + position, mask=is_position, other=1) == 0)
            token_at = tokens + n * token_n + far * token_s + (head.to(tl.int64) * token_g + channel * token_d)[None, :]
            grad_at = grad + (n * grad_n + head * grad_g + channel)[None, :] + (row * grad_k)[:, None]
            values = tl.load(token_at, mask=is_token[:, None] & is_column[None, :], other=0.0)
            weights = tl.load(grad_at, mask=is_row[:, None] & is_column[None, :], other=0.0)
            total = tl.dot(values, tl.trans(weights), total, input_precision="ieee")
    place = batch.to(tl.int64) * matrix_n + block.to(tl.int64) * matrix_g + far * matrix_s + (row * matrix_k)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(position < rows)[:, None] & is_row[None, :])
