# ruff: noqa: ANN001, ANN201, D417
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Gradients of exact attention to few keys, in Triton: all keys in one program, which needs no result of the forward.

Dao 2023, "FlashAttention-2", arXiv 2307.08691, algorithm 2, computes a tile of the scores again from queries and keys,
and reads the log-sum-exp and the sum of output times gradient of each query, which earlier kernels left, because a tile
sees a few of the keys only. With at most 256 keys a tile sees them all, so both sums are its own: neither the output
nor a log-sum-exp is read or kept, and the gradient of the queries is final, so it is written once and in 16 bits.

A program holds keys and values in shared memory and walks over a stretch of queries, 64 at a time; sums over queries
stay in registers, float32. They fill half of a multiprocessor's registers with 256 keys of 64 features; with 128
features they would fill all, so there one program sums up for the values and another for the keys, at the price of one
product in six. Stretches are added by a second kernel in a fixed order, so results repeat bit for bit.

Loaded only where it is used: it needs the package triton.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_zoo.kernels.blocks.triton.addressing import LOG2_E, load_tile, sequence_start, strides_of
from attn_zoo.kernels.cached_launch import CachedLaunch, kind_of, on_device_of, remembered

MAX_KEYS = 256
HEAD_DIMS = (64, 128)
BLOCK_Q = 64  # queries of a tile: rows of one wgmma; twice as many would not leave registers for the sums
HOPPER = 9  # compute capability that the tiles are made for: 227 KiB of shared memory, products of four warps
HOPPER_PROCESSORS = 132

# Sums of one kind, of keys or of values, that one program keeps beside those of the other kind.
_MAX_SUMS = MAX_KEYS * 64

# What a stretch costs beside its tiles, in tiles, each of which takes about 3 us: to load keys and values and to write
# its sums; and what every program's sums cost the kernel that adds them.
_STRETCH_COST = 2.0
_SUMS_COST = 0.015
_MAX_WAVES = 4  # of programs; what they leave to be added is 70 MB at most

# Types whose products of weights and slopes are rounded twice, which takes fewer registers: the range of bfloat16 is
# that of float32, while a slope that is not yet multiplied with its weight may be too large for float16.
SHORT_PRODUCTS = {torch.bfloat16}

_ADD_ROWS, _ADD_BLOCK = 8, 256


@triton.jit(do_not_specialize=["num_heads", "query_len", "key_len", "num_stretches", "num_tiles"])
def few_keys_kernel(
    query,
    query_strides,
    key,
    key_strides,
    value,
    value_strides,
    grad_output,
    grad_output_strides,
    grad_query,
    grad_query_strides,
    grad_key,
    grad_key_strides,
    grad_value,
    grad_value_strides,
    part,
    scale,
    num_heads,
    query_len,
    key_len,
    num_stretches,
    num_tiles,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
    head_dim: tl.constexpr,
    is_ragged: tl.constexpr,
    is_masked: tl.constexpr,
    is_whole: tl.constexpr,
    has_short_products: tl.constexpr,
    of_keys: tl.constexpr,
    of_values: tl.constexpr,
):
    """Compute all gradients from one stretch of queries of one sequence and head.

    Args:
        query: `[B, H, L, D]`; so `grad_output`, `grad_query`.
        key: `[B, H, S, D]`; so `value`, `grad_key`, `grad_value`, whose strides follow.
        part: float32 `[B, H, stretches, 2, S, D]`, written unless `is_whole`: sums of keys, then of values, with S
            rounded up.
        num_tiles: of a stretch.
        is_ragged: the last tile has fewer queries.
        is_masked: there are fewer keys than `block_k`.
        is_whole: a sequence is one stretch, whose sums are the gradients.
        has_short_products: multiply weights and slopes in the type of the inputs.
        of_keys: write the gradients of keys and of queries.
        of_values: write the gradient of values.
    """
    program = tl.program_id(0)
    sequence, stretch = program // num_stretches, program % num_stretches
    batch, head = sequence // num_heads, sequence % num_heads
    features, within, key_at = tl.arange(0, head_dim), tl.arange(0, block_q), tl.arange(0, block_k)
    is_key = key_at < key_len
    keys = load_tile(
        sequence_start(key, key_strides, batch, head), key_strides.token, batch * 0, key_at, features, is_key, is_masked
    )
    # Turned here: where they are used, Triton 3.9 would keep them in registers and write them to shared memory anew for
    # each tile, with ten times as many spills.
    turned_keys = tl.trans(keys)
    if of_keys:
        values = load_tile(
            sequence_start(value, value_strides, batch, head),
            value_strides.token,
            batch * 0,
            key_at,
            features,
            is_key,
            is_masked,
        )
        turned_values = tl.trans(values)
    query_start = sequence_start(query, query_strides, batch, head)
    grad_start = sequence_start(grad_output, grad_output_strides, batch, head)
    target_start = sequence_start(grad_query, grad_query_strides, batch, head)

    # A product whose result goes into another one, in code that always runs, gets a layout that gives every warp rows
    # of its own, of which 64 queries have too few: half of the warps would compute what the others do. The compiler
    # does not look through what a condition leaves, and cannot know that this one always holds.
    always = num_heads > 0
    score_scale = scale * LOG2_E
    key_sums = tl.zeros([head_dim, block_k], tl.float32)
    value_sums = tl.zeros([head_dim, block_k], tl.float32)
    start = stretch * num_tiles * block_q
    for step in tl.range(0, tl.minimum(num_tiles, tl.cdiv(query_len - start, block_q))):
        first = start + step * block_q
        is_query = first + within < query_len
        queries = load_tile(query_start, query_strides.token, first, within, features, is_query, is_ragged)
        grads = load_tile(grad_start, grad_output_strides.token, first, within, features, is_query, is_ragged)
        weights = tl.zeros([block_q, block_k], query.dtype.element_ty)
        if always:
            scores = tl.dot(queries, turned_keys)
            if is_masked:
                scores = tl.where(is_key[None, :], scores, float("-inf"))
            exponentials = tl.exp2(scores * score_scale - (tl.max(scores, 1) * score_scale)[:, None])
            weights = (exponentials * (1.0 / tl.sum(exponentials, 1))[:, None]).to(queries.dtype)
        if of_values:
            value_sums = tl.dot(tl.trans(grads), weights, value_sums)
        if of_keys:
            slopes = weights  # of the scores; in the registers of the weights, of which nothing is left to do
            if always:
                of_weights = tl.dot(grads, turned_values)
                delta = tl.sum(weights.to(tl.float32) * of_weights, 1)
                if has_short_products:
                    slopes = weights * (of_weights - delta[:, None]).to(queries.dtype)
                else:
                    slopes = (weights.to(tl.float32) * (of_weights - delta[:, None])).to(queries.dtype)
            key_sums = tl.dot(tl.trans(queries), slopes, key_sums)
            result = tl.trans(tl.dot(turned_keys, tl.trans(slopes))) * scale
            place = target_start + first.to(tl.int64) * grad_query_strides.token
            place += within[:, None] * grad_query_strides.token + features[None, :]
            if is_ragged:
                tl.store(place, result.to(queries.dtype), mask=is_query[:, None])
            else:
                tl.store(place, result.to(queries.dtype))

    key_sums *= scale
    if is_whole:
        if of_keys:
            place = sequence_start(grad_key, grad_key_strides, batch, head) + features[:, None]
            place += key_at[None, :] * grad_key_strides.token
            tl.store(place, key_sums.to(key.dtype.element_ty), mask=is_key[None, :])
        if of_values:
            place = sequence_start(grad_value, grad_value_strides, batch, head) + features[:, None]
            place += key_at[None, :] * grad_value_strides.token
            tl.store(place, value_sums.to(key.dtype.element_ty), mask=is_key[None, :])
    else:
        size: tl.constexpr = head_dim * block_k
        place = part + program.to(tl.int64) * (2 * size) + features[:, None] + key_at[None, :] * head_dim
        if of_keys:
            tl.store(place, key_sums)
        if of_values:
            tl.store(place + size, value_sums)


@triton.jit(do_not_specialize=["num_heads", "key_len", "num_stretches"])
def add_stretches_kernel(
    part,
    grad_key,
    grad_key_strides,
    grad_value,
    grad_value_strides,
    num_heads,
    key_len,
    num_stretches,
    block_k: tl.constexpr,
    head_dim: tl.constexpr,
    num_rows: tl.constexpr,
    block_size: tl.constexpr,
):
    """Write the sums of all stretches, always added in the same order; see `few_keys_kernel`."""
    size: tl.constexpr = block_k * head_dim
    sequence, is_value = tl.program_id(1) // 2, tl.program_id(1) % 2
    batch, head = sequence // num_heads, sequence % num_heads
    index, row = tl.program_id(0) * block_size + tl.arange(0, block_size), tl.arange(0, num_rows)
    part += sequence.to(tl.int64) * num_stretches * (2 * size) + is_value * size
    total = tl.zeros([num_rows, block_size], tl.float32)
    for first in range(0, num_stretches, num_rows):
        stretch = first + row
        place = part + stretch.to(tl.int64)[:, None] * (2 * size) + index[None, :]
        total += tl.load(place, mask=(stretch < num_stretches)[:, None], other=0.0)
    target, token_stride = sequence_start(grad_key, grad_key_strides, batch, head), grad_key_strides.token
    if is_value == 1:
        target, token_stride = sequence_start(grad_value, grad_value_strides, batch, head), grad_value_strides.token
    key_at = index // head_dim
    place = target + key_at * token_stride + index % head_dim
    tl.store(place, tl.sum(total, 0).to(grad_key.dtype.element_ty), mask=key_at < key_len)


class Tiles(NamedTuple):
    """How the kernel is cut and run.

    Args:
        block_k: keys of a tile, all of them: a power of two.
        num_warps: of a program.
        residents: programs that share a multiprocessor.
        jobs: what each launch writes, and the stages of its pipeline: with three, queries are loaded a whole tile
            ahead; with two they are loaded when the tile before is done, and waited for.
    """

    block_k: int
    num_warps: int
    residents: int
    jobs: list[dict[str, Any]]


def tiles_of(key_len: int, head_dim: int) -> Tiles:
    """Return the tiles for so many keys, at most 256, of `head_dim` features."""
    block_k = max(16, triton.next_power_of_2(key_len))
    if block_k * head_dim > _MAX_SUMS:  # 208 KiB of shared memory without a pipeline, and 192 KiB
        of_keys = {"of_keys": True, "of_values": False, "num_stages": 1}
        return Tiles(block_k, 8, 1, [of_keys, {"of_keys": False, "of_values": True, "num_stages": 3}])
    jobs = [{"of_keys": True, "of_values": True, "num_stages": 3}]
    if block_k <= 128 and head_dim == 64:  # at most 112 KiB: one program waits as the other works
        return Tiles(block_k, 4, 2, jobs)
    return Tiles(block_k, 8, 1, jobs)


def why_not(query: Tensor, key: Tensor) -> str | None:
    """Return why the kernel cannot serve `query` `[B, H, L, D]` and `key` `[B, H, S, D]`, or None if it can."""
    key_len, head_dim = key.shape[-2:]
    if query.dtype not in (torch.bfloat16, torch.float16) or key.dtype != query.dtype:
        return f"gradients to few keys are for bfloat16 or float16, not {query.dtype} and {key.dtype}"
    if head_dim not in HEAD_DIMS:
        return f"gradients to few keys are for head_dim 64 or 128, not {head_dim}"
    if not 1 <= key_len <= MAX_KEYS:
        return f"gradients to few keys are for 1 to {MAX_KEYS} keys, not {key_len}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not query.is_cuda:
        return f"gradients to few keys need a GPU, not a tensor on {query.device.type}"
    capability, _ = _device(query.get_device())
    if capability != HOPPER:
        return f"gradients to few keys are made for compute capability {HOPPER}.x, not {capability}.x"
    return None


@lru_cache
def _device(index: int) -> tuple[int, int]:
    """Return the major compute capability and the multiprocessors of a GPU; -1 is Triton's interpreter."""
    if index < 0:
        return HOPPER, HOPPER_PROCESSORS
    properties: Any = torch.cuda.get_device_properties(index)
    return properties.major, properties.multi_processor_count


def stretches_of(num_tiles: int, num_sequences: int, slots: int) -> tuple[int, int]:
    """Return into how many stretches a sequence is cut, and the tiles of each.

    Args:
        num_tiles: of queries in a sequence.
        num_sequences: batch times heads.
        slots: programs that run at a time.
    """

    def cost(count: int) -> float:
        programs = num_sequences * count
        waves = -(-programs // slots)
        return waves * (-(-num_tiles // count) + _STRETCH_COST) + (programs * _SUMS_COST if count > 1 else 0.0)

    count = min(range(1, max(1, min(num_tiles, _MAX_WAVES * slots // num_sequences)) + 1), key=cost)
    length = -(-num_tiles // count)
    return -(-num_tiles // length), length


class _Launches(NamedTuple):
    """What a backward pass launches."""

    walks: list[CachedLaunch]
    add: CachedLaunch | None  # where a sequence is more than one stretch
    num_parts: int  # numbers that stretches leave


_kept: dict[Hashable, _Launches] = {}


def _cut(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
) -> _Launches:
    query, key, value = inputs
    batch_size, num_heads, query_len, head_dim = query.shape
    key_len, num_sequences = key.shape[2], batch_size * num_heads
    tiles = tiles_of(key_len, head_dim)
    slots = _device(query.get_device())[1] * tiles.residents
    num_stretches, num_tiles = stretches_of(-(-query_len // BLOCK_Q), num_sequences, slots)
    tensors = {"query": query, "key": key, "value": value, "grad_output": grad}
    tensors |= dict(zip(("grad_query", "grad_key", "grad_value"), grads, strict=True))
    sizes = {"num_heads": num_heads, "key_len": key_len, "num_stretches": num_stretches}
    tile = {"block_k": tiles.block_k, "head_dim": head_dim}
    rest = {
        **{f"{name}_strides": strides_of(tensor) for name, tensor in tensors.items()},
        **sizes,
        **tile,
        "scale": head_dim**-0.5,
        "query_len": query_len,
        "num_tiles": num_tiles,
        "block_q": BLOCK_Q,
        "is_ragged": query_len % BLOCK_Q != 0,
        "is_masked": key_len < tiles.block_k,
        "is_whole": num_stretches == 1,
        "has_short_products": query.dtype in SHORT_PRODUCTS,
        "num_warps": tiles.num_warps,
    }
    walks = [CachedLaunch(few_keys_kernel, (num_sequences * num_stretches,), {**rest, **job}) for job in tiles.jobs]
    if num_stretches == 1:
        return _Launches(walks, None, 0)
    strides = {name: rest[name] for name in ("grad_key_strides", "grad_value_strides")}
    rest = {**sizes, **tile, **strides, "num_rows": _ADD_ROWS, "block_size": _ADD_BLOCK, "num_warps": 4}
    size = tiles.block_k * head_dim
    add = CachedLaunch(add_stretches_kernel, (size // _ADD_BLOCK, 2 * num_sequences), rest)
    return _Launches(walks, add, num_sequences * num_stretches * 2 * size)


def gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of softmax attention without a mask, each in its input's layout.

    Args:
        grad: of the output, `[B, H, L, D]`.
        query: `[B, H, L, D]`; features lie side by side in all inputs.
        key: `[B, H, S, D]`.
        value: `[B, H, S, D]`.
    """
    grads = grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if query.numel() == 0:
        return grad_query, grad_key.zero_(), grad_value.zero_()
    if grad.stride(-1) != 1:  # such as one number, expanded
        grad = grad.contiguous()
    inputs = query, key, value
    launches = remembered(_kept, kind_of(grad, *inputs), lambda: _cut(grad, inputs, grads))
    part = query.new_empty(launches.num_parts, dtype=torch.float32) if launches.num_parts else None
    with on_device_of(query):
        for walk in launches.walks:
            walk(*inputs, grad, *grads, part)
        if launches.add is not None:
            assert part is not None
            launches.add(part, grad_key, grad_value)
    return grads
