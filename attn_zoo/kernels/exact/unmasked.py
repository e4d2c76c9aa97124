# ruff: noqa: ANN001, ANN201, ANN202, D417
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Exact attention over padded keys by a kernel that is given no mask: padding is made countable, and taken out again.

A fused kernel is slower under a mask, and packing keys without their padding leaves the fastest one. But softmax does
not change when one vector c is taken from every key, so let c be a mean of the keys that are there, and let padding be
zeros, keys and values alike. Then each padded key has score 0 in every row and adds nothing but 1 to the row's sum Z':

    Z = Z' - p        out = out' Z' / Z        log Z = log Z' + log(1 - p / Z')

with p padded keys. The scores of the n others have mean zero, so their exponentials have a mean of 1 or more (Jensen):
Z >= n, and the difference has digits enough as long as some of the keys are there. Rows of which less is left than
`LEAST_SHARE` are summed up anew.

Centred keys are rounded once more, as they were when they became 16 bits, but what they have in common takes no digits.
So that a few long keys do not take them from the others, the mean is weighted by a = 1 / (1 + |k|^2 / D), in which
tokens of about one length are alike. Then Z is at least sum(a) / max(a), so never below 1.

In the backward pass the kernel computes weights from log Z, so they are those of the keys that are there. What it finds
for padding, which is at most 1 as Z is at least that, meets a key of zero and adds nothing to the gradient of the
queries; the rest of it is left out. c needs no gradient: the result does not depend on it.

Loaded only where it is used: it needs the package triton.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_zoo.kernels.blocks.triton.addressing import sequence_start, strides_of
from attn_zoo.kernels.cached_launch import CachedLaunch, kind_of, on_device_of, remembered
from attn_zoo.kernels.exact.operators import Operator
from attn_zoo.kernels.once_differentiable import once_differentiable

LEAST_SHARE = 1 / 16
"""Of Z in Z': an error of Z', some 2^-20 where a kernel sums up in float32, is up to 16 times as much of Z."""

_SUM_NUMBERS = 1 << 14  # of a step: enough loads under way in a program
_PART = 1024  # keys of a part at least; a sequence has up to sixteen, so that few heads fill a GPU too
_TILE = 64


@triton.jit
def _keys_of_program(padding, num_heads, key_len, block_k: tl.constexpr):
    """Return batch entry, head, the keys of a program as a column, and which of them exist and which are there."""
    batch, head = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
    key_at = tl.program_id(0) * block_k + tl.arange(0, block_k)
    is_key = key_at < key_len
    is_there = tl.load(padding + batch.to(tl.int64) * key_len + key_at, mask=is_key, other=1) == 0
    return batch, head, key_at.to(tl.int64)[:, None], is_key[:, None], is_there[:, None]


@triton.jit(do_not_specialize=["num_heads", "key_len"])
def sum_kernel(
    key,
    key_strides,
    padding,
    sums,
    weights,
    counts,
    num_heads,
    key_len,
    head_dim: tl.constexpr,
    num_parts: tl.constexpr,
    block_d: tl.constexpr,
    block_k: tl.constexpr,
):
    """Write, of the keys that are there in a part of a sequence, the weighted sum, the weights' sum and the number.

    Args:
        key: `[B, H, S, D]`.
        padding: `[B, S]`, not 0 where there is padding.
        sums: float32 `[B, H, parts, D]`.
        weights: float32 `[B, H, parts]`.
        counts: int32 `[B, H, parts]`.
    """
    part, program = tl.program_id(0), tl.program_id(1)
    batch, head = program // num_heads, program % num_heads
    part_len = tl.cdiv(tl.cdiv(key_len, num_parts), block_k) * block_k
    features, within = tl.arange(0, block_d), tl.arange(0, block_k)
    start = sequence_start(key, key_strides, batch, head)
    padding += batch.to(tl.int64) * key_len
    total = tl.zeros([block_k, block_d], tl.float32)
    weight = tl.zeros([block_k], tl.float32)
    count = tl.zeros([block_k], tl.int32)
    for first in range(part * part_len, tl.minimum((part + 1) * part_len, key_len), block_k):
        key_at = first + within
        is_there = tl.load(padding + key_at, mask=key_at < key_len, other=1) == 0
        place = start + key_at.to(tl.int64)[:, None] * key_strides.token + features[None, :]
        keys = tl.load(place, mask=is_there[:, None] & (features < head_dim)[None, :], other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.sum(keys * keys, 1) / head_dim)
        total += keys * share[:, None]
        weight += tl.where(is_there, share, 0.0)
        count += is_there.to(tl.int32)
    to = program.to(tl.int64) * num_parts + part
    tl.store(weights + to, tl.sum(weight, 0))
    tl.store(counts + to, tl.sum(count, 0))
    tl.store(sums + to * head_dim + features, tl.sum(total, 0), mask=features < head_dim)


@triton.jit(do_not_specialize=["num_heads", "key_len"])
def centre_kernel(
    key,
    key_strides,
    value,
    value_strides,
    padding,
    sums,
    weights,
    centred,
    centred_strides,
    kept,
    kept_strides,
    num_heads,
    key_len,
    head_dim: tl.constexpr,
    num_parts: tl.constexpr,
    block_d: tl.constexpr,
    block_k: tl.constexpr,
):
    """Write keys less their mean, and values; zeros in padding, whatever it holds. `sum_kernel` has the arguments."""
    batch, head, far, is_key, is_there = _keys_of_program(padding, num_heads, key_len, block_k)
    features = tl.arange(0, block_d)
    is_feature = (features < head_dim)[None, :]
    is_read = is_there & is_feature
    part = tl.program_id(1).to(tl.int64) * num_parts + tl.arange(0, num_parts)
    found = tl.load(sums + part[:, None] * head_dim + features[None, :], mask=is_feature, other=0.0)
    mean = tl.sum(found, 0) / tl.maximum(tl.sum(tl.load(weights + part), 0), 1e-30)
    place = sequence_start(key, key_strides, batch, head) + far * key_strides.token + features[None, :]
    keys = tl.load(place, mask=is_read, other=0.0).to(tl.float32) - mean[None, :]
    keys = tl.where(is_there, keys, 0.0)
    place = sequence_start(centred, centred_strides, batch, head) + far * centred_strides.token + features[None, :]
    tl.store(place, keys.to(key.dtype.element_ty), mask=is_key & is_feature)
    place = sequence_start(value, value_strides, batch, head) + far * value_strides.token + features[None, :]
    values = tl.load(place, mask=is_read, other=0.0)
    place = sequence_start(kept, kept_strides, batch, head) + far * kept_strides.token + features[None, :]
    tl.store(place, values, mask=is_key & is_feature)


@triton.jit(do_not_specialize=["num_heads", "query_len", "key_len"])
def finish_kernel(
    query,
    query_strides,
    centred,
    centred_strides,
    padding,
    counts,
    output,
    output_strides,
    lse,
    scale,
    num_heads,
    query_len,
    key_len,
    head_dim: tl.constexpr,
    num_parts: tl.constexpr,
    block_d: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
    least_share: tl.constexpr,
):
    """Take padding out of the output and of the log-sum-exp, in place.

    Args:
        query: `[B, H, L, D]`; so `output`.
        centred: keys `[B, H, S, D]`, zeros in padding.
        counts: int32 `[B, H, parts]`, of the keys that are there.
        lse: float32 `[B, H, L]`.
        scale: of the scores.
        least_share: of a row's sum that must be left without padding, or it is made anew.
    """
    program = tl.program_id(1)
    batch, head = program // num_heads, program % num_heads
    features, query_at = tl.arange(0, block_d), tl.program_id(0) * block_q + tl.arange(0, block_q)
    is_query = query_at < query_len
    is_read, far = is_query[:, None] & (features < head_dim)[None, :], query_at.to(tl.int64)[:, None]
    count = tl.sum(tl.load(counts + program.to(tl.int64) * num_parts + tl.arange(0, num_parts)), 0)
    sums = lse + program.to(tl.int64) * query_len + query_at
    before = tl.load(sums, mask=is_query, other=0.0)
    share = tl.full([block_q], 1.0, tl.float32)
    if count < key_len:
        share -= (key_len - count).to(tl.float32) * tl.exp(-before)
    after = before + tl.log(tl.maximum(share, least_share))
    if tl.min(tl.where(is_query, share, 1.0), 0) < least_share:
        after = before  # of a sequence that is all padding: its values are zeros already
        if count > 0:
            place = sequence_start(query, query_strides, batch, head) + far * query_strides.token + features[None, :]
            queries = tl.load(place, mask=is_read, other=0.0)
            start = sequence_start(centred, centred_strides, batch, head)
            padding += batch.to(tl.int64) * key_len
            top = tl.full([block_q], float("-inf"), tl.float32)
            total = tl.zeros([block_q], tl.float32)
            for first in range(0, key_len, block_k):
                key_at = first + tl.arange(0, block_k)
                is_there = tl.load(padding + key_at, mask=key_at < key_len, other=1) == 0
                if tl.max(is_there.to(tl.int32), 0) > 0:
                    place = start + key_at.to(tl.int64)[:, None] * centred_strides.token + features[None, :]
                    keys = tl.load(place, mask=is_there[:, None] & (features < head_dim)[None, :], other=0.0)
                    scores = tl.where(is_there[None, :], tl.dot(queries, tl.trans(keys)) * scale, float("-inf"))
                    higher = tl.maximum(top, tl.max(scores, 1))
                    total = total * tl.exp(top - higher) + tl.sum(tl.exp(scores - higher[:, None]), 1)
                    top = higher
            after = top + tl.log(total)
    tl.store(sums, after, mask=is_query)
    place = sequence_start(output, output_strides, batch, head) + far * output_strides.token + features[None, :]
    found = tl.load(place, mask=is_read, other=0.0).to(tl.float32) * tl.exp(before - after)[:, None]
    tl.store(place, found.to(output.dtype.element_ty), mask=is_read)


@triton.jit(do_not_specialize=["num_heads", "key_len"])
def blank_kernel(
    grad_key,
    grad_key_strides,
    grad_value,
    grad_value_strides,
    padding,
    num_heads,
    key_len,
    head_dim: tl.constexpr,
    block_d: tl.constexpr,
    block_k: tl.constexpr,
):
    """Write zeros to the gradients of padding, `[B, H, S, D]`."""
    batch, head, far, is_key, is_there = _keys_of_program(padding, num_heads, key_len, block_k)
    features = tl.arange(0, block_d)
    is_written = is_key & (is_there == 0) & (features < head_dim)[None, :]
    zeros = tl.zeros([block_k, block_d], grad_key.dtype.element_ty)
    place = sequence_start(grad_key, grad_key_strides, batch, head) + far * grad_key_strides.token
    tl.store(place + features[None, :], zeros, mask=is_written)
    place = sequence_start(grad_value, grad_value_strides, batch, head) + far * grad_value_strides.token
    tl.store(place + features[None, :], zeros, mask=is_written)


class _Launches(NamedTuple):
    sum: CachedLaunch
    centre: CachedLaunch


_made: dict[Hashable, _Launches] = {}
_finished: dict[Hashable, CachedLaunch] = {}
_blanked: dict[Hashable, CachedLaunch] = {}


def _sizes(heads: Tensor) -> dict[str, int]:
    """Return what all kernels take of keys or queries `[B, H, tokens, D]`."""
    head_dim = heads.shape[3]
    return {
        "num_heads": heads.shape[1],
        "head_dim": head_dim,
        "block_d": max(16, triton.next_power_of_2(head_dim)),
    }


def _parts(key_len: int) -> int:
    parts: int = triton.next_power_of_2(-(-key_len // _PART))
    return min(16, max(2, parts))


def _strides(**tensors: Tensor) -> dict[str, Any]:
    return {f"{name}_strides": strides_of(tensor) for name, tensor in tensors.items()}


def _grid(heads: Tensor) -> tuple[int, int]:
    return -(-heads.shape[2] // _TILE), heads.shape[0] * heads.shape[1]


def _make(key: Tensor, value: Tensor, centred: Tensor, kept: Tensor) -> _Launches:
    parts = _parts(key.shape[2])
    sizes = {**_sizes(key), "key_len": key.shape[2], "num_parts": parts, "num_warps": 8}
    total = {**sizes, **_strides(key=key), "block_k": _SUM_NUMBERS // sizes["block_d"]}
    centre = {**sizes, **_strides(key=key, value=value, centred=centred, kept=kept), "block_k": _TILE, "num_warps": 4}
    grid = parts, key.shape[0] * key.shape[1]
    return _Launches(CachedLaunch(sum_kernel, grid, total), CachedLaunch(centre_kernel, _grid(key), centre))


def _finish(query: Tensor, centred: Tensor, output: Tensor) -> CachedLaunch:
    rest = {
        **_sizes(query),
        **_strides(query=query, centred=centred, output=output),
        "scale": query.shape[3] ** -0.5,
        "query_len": query.shape[2],
        "key_len": centred.shape[2],
        "num_parts": _parts(centred.shape[2]),
        "block_q": _TILE,
        "block_k": _TILE,
        "least_share": LEAST_SHARE,
        "num_warps": 4,
    }
    return CachedLaunch(finish_kernel, _grid(query), rest)


def _blank(of_key: Tensor, of_value: Tensor) -> CachedLaunch:
    strides = _strides(grad_key=of_key, grad_value=of_value)
    rest = {**_sizes(of_key), **strides, "key_len": of_key.shape[2], "block_k": _TILE, "num_warps": 4}
    return CachedLaunch(blank_kernel, _grid(of_key), rest)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor, operator: Operator, dropout_p: float
) -> tuple[Tensor, ...]:
    """Return centred keys, values without padding, and the operator's results, put right."""
    centred, kept = torch.empty_like(key), torch.empty_like(value)
    parts = (*key.shape[:2], _parts(key.shape[2]))
    sums, weights = (key.new_empty(shape, dtype=torch.float32) for shape in ((*parts, key.shape[3]), parts))
    counts = key.new_empty(parts, dtype=torch.int32)
    made = remembered(_made, kind_of(key, value, padding), lambda: _make(key, value, centred, kept))
    with on_device_of(key):
        made.sum(key, padding, sums, weights, counts)
        made.centre(key, value, padding, sums, weights, centred, kept)
        output, lse, *rest = operator.forward(query, centred, kept, dropout_p, False, True)
        assert lse.is_contiguous()
        kind = kind_of(query, centred, padding, output, lse)
        finish = remembered(_finished, kind, lambda: _finish(query, centred, output))
        finish(query, centred, padding, counts, output, lse)
    return centred, kept, output, lse, *rest


class _Unmasked(torch.autograd.Function):
    """Keeps its inputs, which lead on in the graph, and what the kernel was given in place of keys and values."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, padding: Tensor, operator: Operator, dropout_p: float
    ) -> Tensor:
        results = _forward(query, key, value, padding, operator, dropout_p)
        ctx.save_for_backward(query, key, value, padding, *results)
        ctx.operator, ctx.dropout_p = operator, dropout_p
        return results[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, _, _, padding, centred, kept, *results = ctx.saved_tensors
        of_query, of_key, of_value = ctx.operator.backward(grad, query, centred, kept, ctx.dropout_p, *results)
        blank = remembered(_blanked, kind_of(of_key, of_value, padding), lambda: _blank(of_key, of_value))
        with on_device_of(query):
            blank(of_key, of_value, padding)
        return of_query, of_key, of_value, None, None, None


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor, operator: Operator, dropout_p: float
) -> Tensor:
    """Return exact attention `[B, H, L, D]`; rows that see no key are zero.

    Args:
        query: `[B, H, L, D]`; features lie side by side in all three.
        key: `[B, H, S, D]`; at padded positions anything, NaN and infinities too.
        value: `[B, H, S, D]`, likewise.
        key_padding_mask: bool `[B, S]`, True = padding.
        operator: a kernel's, which returns the log-sum-exp `[B, H, L]` second.
        dropout_p: probability of dropping a weight.
    """
    padding = key_padding_mask.contiguous().view(torch.uint8)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        output: Tensor = _Unmasked.apply(query, key, value, padding, operator, dropout_p)
        return output
    return _forward(query, key, value, padding, operator, dropout_p)[2]
