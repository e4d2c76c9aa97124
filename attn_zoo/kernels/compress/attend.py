"""Attention to compressed keys and values, as one node of autograd where our kernels serve all of it.

Apart, the compression and the attention are two nodes, and below some ten thousand tokens a GPU waits for the host,
which has as much to do for a node as for four launches. What comes between them is small, and is kept for backward.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from attn_zoo.kernels.cached_launch import kind_of, places_of, remembered
from attn_zoo.kernels.compress.compression import HAS_TRITON, compress_pair, path_of_pair
from attn_zoo.kernels.compress.products import CompressCall
from attn_zoo.kernels.exact.sdpa import _cuda_switches, exact_attention
from attn_zoo.kernels.gpu_replays import replays_on
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
    replays = None if torch.compiler.is_compiling() else replays_on(query.device.type)
    if replays is None or torch.is_autocast_enabled("cuda"):
        return _by_parts(query, tokens, matrices, key_padding_mask)
    learned = (e,) if e is f else matrices
    given = query, key, value, key_padding_mask, *learned
    token = remembered(_tokens, _cuda_switches(), object)
    if (known := replays.replay(token, *given)) is not None:
        return known  # type: ignore[no-any-return]
    sizes = query, tokens, matrices, key_padding_mask
    kind = remembered(_kinds, kind_of(*given), lambda: _is_one_node(*sizes) and object())
    if kind is False or key is value:
        return _by_parts(*sizes)
    recording = replays.recording_of(token, kind, given)
    needs_grad = any(x is not None and x.requires_grad for x in given)
    if torch.is_grad_enabled() and (needs_grad or recording is None):
        output: Tensor = _AttendCompressed.apply(kind, recording, key_padding_mask, query, key, value, *learned)
        return output
    if recording is None:
        return _by_parts(*sizes)
    (output,) = recording.forward(lambda: (_by_parts(*sizes),))
    recording.learn_forward()
    return output


def _by_parts(
    query: Tensor, tokens: tuple[Tensor, Tensor], matrices: tuple[Tensor, Tensor], mask: Tensor | None
) -> Tensor:
    key, value = compress_pair(tokens, matrices, key_padding_mask=mask)
    return exact_attention(query, key, value, score_bias=_no_bias)


_kinds: dict[Hashable, Hashable] = {}
_tokens: dict[Hashable, object] = {}  # by what decides which kernel of torch attends


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
        ctx: Any,
        kind: Hashable,
        recording: Any,
        mask: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *matrices: Tensor,
    ) -> Tensor:
        from attn_zoo.kernels.compress.triton_launch import compress

        def compute() -> tuple[Tensor, ...]:
            note_path("compress.triton")
            rows = compress(CompressCall((key, value), matrices, mask, kind))
            return exact_attention(query, *rows, score_bias=_no_bias), *rows

        output, *rows = compute() if recording is None else recording.forward(compute)
        ctx.save_for_backward(query, *rows, mask, key, value, *matrices)
        ctx.kind, ctx.recording, ctx.places = kind, recording, places_of(mask, key, value, *matrices)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from attn_zoo.kernels.compress.triton_launch import gradients
        from attn_zoo.kernels.exact import few_keys_gradient

        query, first, second, mask, key, value, *matrices = saved = ctx.saved_tensors
        kind = ctx.kind if places_of(mask, key, value, *matrices) == ctx.places else None  # moved by hooks
        call = CompressCall((key, value), tuple(matrices), mask, kind)
        _, _, _, _, *needed = ctx.needs_input_grad
        of_tokens, of_matrices = True in needed[:2], True in needed[2:]

        def compute() -> tuple[Tensor | None, ...]:
            """Return the gradients of query, key, value, mask and matrices."""
            note_path("few_keys.triton")
            of_query, *of_rows = few_keys_gradient.gradients(grad, query, first, second)
            found = gradients(call, of_rows, of_tokens=of_tokens, of_matrices=of_matrices)
            before = found[:2] if of_tokens else (None, None)
            after = found[len(found) - len(matrices) :] if of_matrices else (None,) * len(matrices)
            return of_query, *before, None, *after

        found = compute() if ctx.recording is None else ctx.recording.backward(saved, grad, compute)
        return None, None, None, *found[:3], *found[4:]


def _no_bias(*_: object, **__: object) -> Tensor:
    raise AssertionError("nothing is hidden from compressed keys")
