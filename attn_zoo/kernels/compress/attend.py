"""Attention to compressed keys and values, as one node of autograd where our kernels serve all of it.

Apart, the compression and the attention are two nodes, and below some ten thousand tokens a GPU waits for the host,
which has as much to do for a node as for four launches. What comes between them is small, and is kept for backward.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_zoo.kernels.cached_launch import kind_of, places_of, remembered
from attn_zoo.kernels.compress.compression import HAS_TRITON, compress_pair, path_of_pair
from attn_zoo.kernels.compress.products import CompressCall
from attn_zoo.kernels.exact.sdpa import cuda_switches, exact_attention
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
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    replays = None if is_traced else replays_on(query.device.type)
    if replays is None or key is value or torch.is_autocast_enabled("cuda"):
        return _by_parts(query, tokens, matrices, key_padding_mask)
    learned = (e,) if e is f else matrices
    given = query, key, value, key_padding_mask, *learned
    token = remembered(_tokens, cuda_switches(), object)
    if (known := replays.replay(token, *given)) is not None:
        return known  # type: ignore[no-any-return]
    sizes = query, tokens, matrices, key_padding_mask
    kind = remembered(_kinds, kind_of(*given), lambda: _is_one_node(*sizes) and object())
    if kind is False:
        return _by_parts(*sizes)

    def forward() -> tuple[Tensor, tuple[Tensor | None, ...]]:
        rows, output = _forward(kind, query, key, value, key_padding_mask, learned)
        return output, (query, *rows, key_padding_mask, key, value, *learned)

    wanted = tuple([x is not None and x.requires_grad for x in given])
    output: Tensor | None = replays.learn(token, kind, given, forward, partial(_differentiate, kind, wanted))
    if output is None and torch.is_grad_enabled():
        output = _AttendCompressed.apply(kind, key_padding_mask, query, key, value, *learned)
    return _by_parts(*sizes) if output is None else output


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


def _forward(
    kind: Hashable, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, matrices: tuple[Tensor, ...]
) -> tuple[list[Tensor], Tensor]:
    """Return compressed keys and values, and the output."""
    from attn_zoo.kernels.compress.triton_launch import compress

    note_path("compress.triton")
    rows = compress(CompressCall((key, value), matrices, mask, kind))
    return rows, exact_attention(query, *rows, score_bias=_no_bias)


def _differentiate(
    kind: Hashable, wanted: Sequence[bool], saved: Sequence[Any], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value, mask and matrices.

    Args:
        kind: of the call; None where tensors were moved since.
        wanted: which of these want one.
        saved: query, keys and values as compressed, mask, key, value and matrices.
        grad: of the output.
    """
    from attn_zoo.kernels.compress.triton_launch import gradients
    from attn_zoo.kernels.exact import few_keys_gradient

    note_path("few_keys.triton")
    query, first, second, mask, key, value, *matrices = saved
    of_query, *of_rows = few_keys_gradient.gradients(grad, query, first, second)
    call = CompressCall((key, value), tuple(matrices), mask, kind)
    of_tokens, of_matrices = True in wanted[1:3], True in wanted[4:]
    found = gradients(call, of_rows, of_tokens=of_tokens, of_matrices=of_matrices)
    before = found[:2] if of_tokens else (None, None)
    after = found[len(found) - len(matrices) :] if of_matrices else (None,) * len(matrices)
    return of_query, *before, None, *after


class _AttendCompressed(torch.autograd.Function):
    """Keeps its inputs, and keys and values as compressed."""

    @staticmethod
    def forward(
        ctx: Any, kind: Hashable, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *matrices: Tensor
    ) -> Tensor:
        rows, output = _forward(kind, query, key, value, mask, matrices)
        ctx.save_for_backward(query, *rows, mask, key, value, *matrices)
        ctx.kind, ctx.places = kind, places_of(mask, key, value, *matrices)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        kind = ctx.kind if places_of(*saved[3:]) == ctx.places else None  # moved by hooks
        _, _, *needed = ctx.needs_input_grad
        wanted = *needed[:3], False, *needed[3:]
        of_query, of_key, of_value, _, *of_matrices = _differentiate(kind, wanted, saved, grad)
        return None, None, of_query, of_key, of_value, *of_matrices


def _no_bias(*_: object, **__: object) -> Tensor:
    raise AssertionError("nothing is hidden from compressed keys")
