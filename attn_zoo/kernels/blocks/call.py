"""Block-sparse attention: the engine behind every variant whose pattern is made of blocks.

A variant makes a `BlockPattern` and calls `block_sparse_attention`. Three paths compute it:

* `gather`: any device and dtype, linear in time and memory, dropout and ALiBi included (`gather/walk.py`);
* `flex`: PyTorch's FlexAttention on a GPU, with a block mask built directly from the table (`flex.py`);
* `triton`: our own kernels on a GPU, dropout and ALiBi included, compiled once for all lengths (`triton/operands.py`).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.blocks.gather.walk import gather_attention
from attn_zoo.kernels.blocks.layout import BlockLayout, layout_pattern
from attn_zoo.kernels.blocks.pattern import BlockPattern

__all__ = [
    "Backend",
    "block_sparse_attention",
    "choose_path",
    "layout_attention",
    "why_not_flex",
    "why_not_triton",
]

Backend = Literal["auto", "gather", "flex", "triton"]

# What `auto` tries, in order. Of the two on a GPU, FlexAttention compiles for every length and computes the global
# columns in a second pass whose result it merges; neither has been timed against the other yet.
_ORDER: tuple[Backend, ...] = ("triton", "flex", "gather")

_GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLEX_MIN_HEAD_DIM = 16
_FLEX_MIN_BLOCK_SIZE = 16
_TRITON_SIZES = (16, 32, 64, 128)  # a matrix product has 16 rows at least, and tiles have to fit into shared memory
_TRITON_CAPABILITY = (8, 0)  # Ampere, for bfloat16 and asynchronous copies


def why_not_flex(query: Tensor, pattern: BlockPattern, dropout_p: float) -> str | None:
    """Return the sentence that says why FlexAttention cannot serve a call, or None when it can."""
    if query.device.type != "cuda":
        return f"FlexAttention needs a CUDA device, as it has no backward elsewhere; got {query.device.type}"
    if importlib.util.find_spec("triton") is None:
        return "FlexAttention needs the package triton, which is not installed"
    if dropout_p:
        return f"FlexAttention has no dropout; got dropout_p = {dropout_p}"
    if query.dtype not in _GPU_DTYPES:
        return f"FlexAttention runs in float32, bfloat16 and float16; got {query.dtype}"
    if query.shape[-1] < _FLEX_MIN_HEAD_DIM:
        return f"FlexAttention needs head_dim >= {_FLEX_MIN_HEAD_DIM}; got {query.shape[-1]}"
    if pattern.block_size < _FLEX_MIN_BLOCK_SIZE or pattern.block_size & (pattern.block_size - 1):
        return f"FlexAttention needs block_size a power of two >= {_FLEX_MIN_BLOCK_SIZE}; got {pattern.block_size}"
    return None


def why_not_triton(query: Tensor, pattern: BlockPattern, scale: float | None = None) -> str | None:
    """Return the sentence that says why our Triton kernels cannot serve a call, or None when they can."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if query.device.type != "cuda" and not is_interpreted:
        return f"backend 'triton' needs a CUDA device; got {query.device.type}"
    if importlib.util.find_spec("triton") is None:
        return "backend 'triton' needs the package triton, which is not installed"
    if not is_interpreted and torch.cuda.get_device_capability(query.device) < _TRITON_CAPABILITY:
        least, found = _TRITON_CAPABILITY, torch.cuda.get_device_capability(query.device)
        return f"backend 'triton' needs a GPU of compute capability {least[0]}.{least[1]}; got {found[0]}.{found[1]}"
    if query.dtype not in _GPU_DTYPES:
        return f"backend 'triton' runs in float32, bfloat16 and float16; got {query.dtype}"
    if query.shape[-1] not in _TRITON_SIZES:
        return f"backend 'triton' needs head_dim in {_TRITON_SIZES}; got {query.shape[-1]}"
    if pattern.block_size not in _TRITON_SIZES:
        return f"backend 'triton' needs block_size in {_TRITON_SIZES}; got {pattern.block_size}"
    if scale is not None and scale <= 0:
        return f"backend 'triton' needs scale > 0, as it scales the greatest score; got {scale}"
    return None


def choose_path(
    query: Tensor, pattern: BlockPattern, *, dropout_p: float, scale: float | None = None, backend: Backend
) -> Backend:
    """Return the path that serves a call; see `block_sparse_attention` for arguments and errors."""
    reasons: dict[str, Callable[[], str | None]] = {
        "triton": lambda: why_not_triton(query, pattern, scale),
        "flex": lambda: why_not_flex(query, pattern, dropout_p),
        "gather": lambda: None,
    }
    if backend == "auto":
        return next(path for path in _ORDER if reasons[path]() is None)
    if (reason := reasons[backend]()) is not None:
        raise UnsupportedError("backend", reason)
    return backend


def layout_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: BlockLayout,
    draw: Sequence[int],
    *,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    slopes: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute `block_sparse_attention` under the pattern of a layout; to torch's compiler it is one operator.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, H, S, D]`.
        value: `[B, H, S, D]`.
        layout: for L and S.
        draw: 1 or H, for how many heads blocks are drawn, and the numbers that name the draw, such as seed and layer.
        key_padding_mask: bool `[B, S]`, True = padding.
        dropout_p: probability of dropping an attention weight.
        slopes: ALiBi's `[H]`.
        backend: a path, or `"auto"`.

    Returns:
        `[B, H, L, D]`; zeros where a query sees no key that is not padding.

    Raises:
        UnsupportedError: `backend` names a path that cannot serve the call.
    """
    if torch.compiler.is_compiling():
        from attn_zoo.kernels.blocks.operator import operator_attention

        return operator_attention(
            query,
            key,
            value,
            layout,
            draw,
            key_padding_mask=key_padding_mask,
            dropout_p=dropout_p,
            slopes=slopes,
            backend=backend,
        )
    return block_sparse_attention(
        query,
        key,
        value,
        layout_pattern(layout, draw[0], tuple(draw[1:]), str(query.device)),
        key_padding_mask=key_padding_mask,
        dropout_p=dropout_p,
        slopes=slopes,
        backend=backend,
    )


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: BlockPattern,
    *,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    slopes: Tensor | None = None,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute softmax attention over the pairs that `pattern` shows.

    Cost: time O(pairs D); memory beyond inputs, outputs and gradients O(B H L) and buffers of about one head.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, H, S, D]`.
        value: `[B, H, S, D]`.
        pattern: for L and S, and 1 or H heads, on the device of `query`.
        key_padding_mask: bool `[B, S]`, True = padding.
        dropout_p: probability of dropping an attention weight.
        slopes: ALiBi's `[H]`; the bias of a pair is minus the slope times the distance of the positions.
        scale: of the scores; None means D ** -0.5.
        backend: a path; `"auto"` takes the first of `"triton"`, `"flex"` and `"gather"` that can serve the call.

    Returns:
        `[B, H, L, D]`; zeros where a query sees no key that is not padding.

    Raises:
        ValueError: the pattern is for other sizes.
        UnsupportedError: `backend` names a path that cannot serve the call; it is never replaced by the other.
    """
    heads = pattern.counts.shape[0]
    if (query.shape[2], key.shape[2]) != (pattern.query_len, pattern.key_len) or heads not in (1, query.shape[1]):
        raise ValueError(
            f"pattern: expected one for L = {query.shape[2]}, S = {key.shape[2]}, H = {query.shape[1]}; "
            f"got L = {pattern.query_len}, S = {pattern.key_len}, H = {heads}"
        )
    backend = choose_path(query, pattern, dropout_p=dropout_p, scale=scale, backend=backend)
    if backend == "triton":
        from attn_zoo.kernels.blocks.triton.operands import triton_block_attention

        return triton_block_attention(
            query,
            key,
            value,
            pattern,
            key_padding_mask=key_padding_mask,
            dropout_p=dropout_p,
            slopes=slopes,
            scale=scale,
        )
    if backend == "flex":
        from attn_zoo.kernels.blocks.flex import flex_block_attention

        return flex_block_attention(
            query, key, value, pattern, key_padding_mask=key_padding_mask, slopes=slopes, scale=scale
        )
    return gather_attention(
        query,
        key,
        value,
        pattern,
        key_padding_mask=key_padding_mask,
        dropout_p=dropout_p,
        slopes=slopes,
        scale=scale,
    )
