"""Attention to compressed keys and values, as one node of autograd where our kernels serve all of it.

Apart, the compression and the attention are two nodes, and below some ten thousand tokens a GPU waits for the host,
which has as much to do for a node as for four launches. What comes between them is small, and is kept for backward.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from attn_zoo.kernels.cached_launch import kind_of, places_of, remembered
from attn_zoo.kernels.compress.compression import HAS_TRITON, compress_pair, path_of_pair
from attn_zoo.kernels.compress.products import CompressCall
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.kernels.once_differentiable import once_differentiable
from attn_zoo.kernels.trace import note_path


def attend_compressed(
    query: Tensor,
    tokens: tuple[Tensor, Tensor],
    matrices: tuple[Tensor, Tensor],
    *,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Return softmax(Q (E^T K)^T / sqrt(D)) (F^T V), `[B, H, L, D]`.

    Args:
        query: `[B, H, L, D]`.
        tokens: K and V, `[B, G, S, D]`.
        matrices: E and F, as `compress_pair` takes them, with k rows of results.
        key_padding_mask: bool `[B, S]`, True = padding, whatever is stored there.

    Raises:
        ValueError: shapes, dtypes or devices of what is compressed do not fit.
    """
    (key, value), (e, f) = tokens, matrices
    if torch.is_grad_enabled() and (query.is_cuda or _IS_INTERPRETED) and not torch.compiler.is_compiling():
        signature = e is f, kind_of(query, key, value, e, f, key_padding_mask)
        kind = remembered(
            _kinds, signature, lambda: _is_one_node(query, tokens, matrices, key_padding_mask) and object()
        )
        if kind is not False and key is not value and not torch.is_autocast_enabled("cuda"):
            learned = (e,) if e is f else matrices
            output: Tensor = _AttendCompressed.apply(kind, key_padding_mask, query, key, value, *learned)
            return output
    key, value = compress_pair(tokens, matrices, key_padding_mask=key_padding_mask)
    return exact_attention(query, key, value, score_bias=_no_bias)


_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_kinds: dict[Hashable, Hashable] = {}


def _is_one_node(
    query: Tensor, tokens: tuple[Tensor, Tensor], matrices: tuple[Tensor, Tensor], mask: Tensor | None
) -> bool:
    if not HAS_TRITON or path_of_pair(tokens, matrices, mask, "auto") != "triton":
        return False
    from attn_zoo.kernels.exact import few_keys_gradient

    key, rank = tokens[0], matrices[0].shape[-1]
    is_alike = query.dtype == key.dtype and query.shape[:2] == key.shape[:2] and query.stride(-1) == 1
    compressed = key.new_empty(*key.shape[:2], rank, key.shape[3])
    return is_alike and few_keys_gradient.why_not(query, compressed) is None


class _AttendCompressed(torch.autograd.Function):
    """Forward as its two parts are; keeps its inputs, and keys and values as compressed."""

    @staticmethod
    def forward(
        ctx: Any, kind: Hashable, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *matrices: Tensor
    ) -> Tensor:
        from attn_zoo.kernels.compress.triton_launch import compress

        note_path("compress.triton")
        rows = compress(CompressCall((key, value), matrices, mask, kind))
        ctx.save_for_backward(query, *rows, mask, key, value, *matrices)
        ctx.kind, ctx.places = kind, places_of(mask, key, value, *matrices)
        return exact_attention(query, *rows, score_bias=_no_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from attn_zoo.kernels.compress.triton_launch import gradients
        from attn_zoo.kernels.exact import few_keys_gradient

        note_path("few_keys.triton")
        query, first, second, mask, key, value, *matrices = ctx.saved_tensors
        kind = ctx.kind if places_of(mask, key, value, *matrices) == ctx.places else None  # moved by hooks
        of_query, *of_rows = few_keys_gradient.gradients(grad, query, first, second)
        call = CompressCall((key, value), tuple(matrices), mask, kind)
        _, _, _, *needed = ctx.needs_input_grad
        of_tokens, of_matrices = True in needed[:2], True in needed[2:]
        found = gradients(call, of_rows, of_tokens=of_tokens, of_matrices=of_matrices)
        before = () if of_tokens else (None, None)
        after = () if of_matrices else (None,) * len(matrices)
        return None, None, of_query, *before, *found, *after


def _no_bias(*_: object, **__: object) -> Tensor:
    raise AssertionError("nothing is hidden from compressed keys")
