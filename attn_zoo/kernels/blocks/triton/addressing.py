# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""What the Triton kernels of block-sparse attention share: which tile a program works on, loads, and masks.

Rows and columns of a pattern are alike: some leading lines meet every line of the other side, and are cut into
stretches; the others meet a few leading ones and their entries of a table. So one addressing serves the forward pass,
the gradient of the queries (by rows) and those of keys and values (by columns).

Functions under `triton.jit` carry no annotations but `tl.constexpr`, which Triton itself reads.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Strides(NamedTuple):
    """Of a tensor `[B, H, tokens, D]` whose features lie side by side.

    They are specialised on being multiples of 16, which loads of 16 bytes need; lengths are not in here. That of tokens
    is known to the compiler (a model has one or two), so that addresses of rows take fewer instructions and registers.
    """

    batch: int
    head: int
    token: tl.constexpr


def strides_of(tensor: Tensor) -> Strides:
    """Return the strides of `tensor` `[B, H, tokens, D]` as a kernel takes them."""
    assert tensor.stride(-1) == 1
    batch, head, token = tensor.stride()[:3]
    return Strides(batch, head, tl.constexpr(token))


@triton.jit
def find_tile(program, num_split_tiles, num_splits):
    """Return what a program works on in its sequence: whether the tile's line is split, the tile and the stretch.

    Split lines come first: their programs have the most to do. And they bring the whole other side of the sequence into
    the cache, for the listed lines that follow.
    """
    num_split = num_split_tiles * num_splits
    is_split = program < num_split
    tile = tl.where(is_split, program // num_splits, program - num_split + num_split_tiles)
    return is_split, tile, program % num_splits


@triton.jit
def sequence_start(data, strides, batch, head):
    """Return a pointer to the first token of a batch entry and head, computed in 64 bits."""
    return data + batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head


@triton.jit
def base_2(lse):
    """Return a log-sum-exp in base 2, or +inf where a query sees nothing, so that each of its weights is zero."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@triton.jit
def block_at(entries, place, num_leading, bound, shift):
    """Return the block at a place of a line's list: first the leading ones in order, then entries of the table.

    A step of a loop asks for the block of the next one. Were it to load its own, the pipeline would spend a stage on
    that and wait in every step for all that is under way: tiles would come only when they are needed.

    Args:
        entries: the line's entries.
        place: in the list, or behind its end, where any number may be returned.
        num_leading: leading blocks, the first of which is number 0.
        bound: place from which nothing may be read.
        shift: what an entry counts from.
    """
    is_entry = (place >= num_leading) & (place < bound)
    return tl.load(entries + (place - num_leading), mask=is_entry, other=place - shift) + shift


@triton.jit
def table_of(batch, head, num_heads, num_tables, has_batch_tables: tl.constexpr):
    """Return the number of the table that serves a batch entry and head."""
    table = head * num_tables // num_heads
    if has_batch_tables:
        table += batch * num_tables
    return table


@triton.jit
def row_list(
    indices,
    counts,
    table,
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
    block_size: tl.constexpr,
    is_causal: tl.constexpr,
):
    """Return a query block's list of key blocks: first place, last place (exclusive), leading blocks, and entries.

    Of a dense row it is one stretch of all key blocks up to the one it stands in, or to the last.
    """
    line = table * num_rows + tl.where(is_split, 0, block - num_dense_rows)
    num_entries = tl.load(counts + line, mask=block >= num_dense_rows, other=0)
    first_place, last_place = 0, num_global + num_entries
    num_leading = num_global
    if is_split:
        last_place = tl.cdiv(key_len, block_size)
        if is_causal:
            last_place = tl.minimum(last_place, block + row_shift + 1)
        first_place = split * split_blocks
        last_place = tl.minimum(last_place, first_place + split_blocks)
        num_leading = last_place
    return first_place, last_place, num_leading, indices + line.to(tl.int64) * width


@triton.jit
def load_tile(start, token_stride, first, within, features, is_token, is_masked: tl.constexpr):
    """Load tokens `first + within` as `[tokens, D]`; those that `is_token` excludes are zeros, whatever they hold."""
    place = start + first.to(tl.int64) * token_stride + within[:, None] * token_stride + features[None, :]
    if is_masked:
        return tl.load(place, mask=is_token[:, None], other=0.0)
    return tl.load(place)


@triton.jit
def is_visible(
    standing,
    key_at,
    is_causal: tl.constexpr,
    reach: tl.constexpr,
    dilation: tl.constexpr,
    stride: tl.constexpr,
    num_global_tokens: tl.constexpr,
):
    """Return where a query at key position `standing` may see the key at `key_at`; both broadcast.

    The last four are a `TokenRule`, or a `reach` of -1 stands for none.
    """
    distance = standing - key_at
    visible = distance == distance
    if reach >= 0:
        visible = tl.abs(distance) <= reach
        if dilation > 1:
            visible = visible & (distance % dilation == 0)  # of either sign: a multiple leaves nothing
        if stride > 0:
            visible = visible | (distance % stride == 0)
        if num_global_tokens > 0:
            visible = visible | (standing < num_global_tokens) | (key_at < num_global_tokens)
    if is_causal:
        visible = visible & (distance >= 0)
    return visible
