"""Exact attention by torch's FlexAttention, compiled: masks and biases are code inside the kernel, never stored.

Dong et al. 2024, "Flex Attention", arXiv 2412.05496. The block mask is written down directly: building one by
evaluating the mask costs O(L S). Uncompiled FlexAttention computes the dense scores, so it is never used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.compiled_code import MAX_COMPILED, keep_compiled_code_apart, short_vectors_for
from attn_zoo.kernels.trace import note_path

BLOCK_SIZE = 128  # the kernels' own default


def why_not(query: Tensor, *, needs_grad: bool, dropout_p: float) -> str | None:
    """Return why FlexAttention cannot serve a call with this query, or None."""
    if dropout_p > 0:
        return "FlexAttention has no dropout"
    if query.dtype == torch.float64:
        return "FlexAttention has no float64 kernel"
    if query.device.type == "cpu" and needs_grad:
        return "FlexAttention on CPU has no backward (torch 2.13); run it under torch.no_grad(), or on CUDA"
    return None


def causal_blocks(query_len: int, key_len: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return (partial, full): bool `[L / 128, S / 128]`, which blocks are masked inside and which are wholly visible.

    Blocks that hang over the end of either sequence count as partial.
    """
    first_query = torch.arange(0, query_len, BLOCK_SIZE, device=device)[:, None]
    last_query = (first_query + BLOCK_SIZE).clamp(max=query_len) - 1
    first_key = torch.arange(0, key_len, BLOCK_SIZE, device=device)
    last_key = first_key + BLOCK_SIZE - 1
    offset = key_len - query_len
    is_live = first_key <= last_query + offset
    is_full = (last_key <= first_query + offset) & (last_key < key_len) & (first_query + BLOCK_SIZE <= query_len)
    return is_live & ~is_full, is_full


def has_full_blocks(query_len: int, key_len: int) -> bool:
    """Return whether `causal_blocks` has a wholly visible one, without asking the device.

    If there is one, the first block of keys is one for the last whole block of queries.
    """
    last_query_block = query_len // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
    return last_query_block >= 0 and min(last_query_block + key_len - query_len, key_len - 1) >= BLOCK_SIZE - 1


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (count, indices) of the true entries of each row, live ones first, with two dimensions in front."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def _block_mask(
    query_len: int, key_len: int, is_causal: bool, key_padding_mask: Tensor | None, device: torch.device
) -> BlockMask | None:
    # Without a mask, the CPU kernel of torch 2.13 reads uninitialised memory if the last block is not full: of 200
    # tokens the first rows were wrong by 0.4 or NaN, in some processes. With one it is right.
    is_ragged = bool(query_len % BLOCK_SIZE or key_len % BLOCK_SIZE)
    if not is_causal and key_padding_mask is None and not (is_ragged and device.type == "cpu"):
        return None
    offset = key_len - query_len
    partial, full = causal_blocks(query_len, key_len, device)
    if not is_causal:
        partial, full = torch.ones_like(partial), torch.zeros_like(full)
    elif key_padding_mask is not None:  # padding may lie in any block
        partial, full = partial | full, torch.zeros_like(full)

    def is_visible(batch: Tensor, head: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:  # noqa: ARG001
        visible = key_at <= query_at + offset if is_causal else key_at >= 0
        if key_padding_mask is not None:
            visible = visible & ~key_padding_mask[batch, key_at]
        return visible

    num_partial, partial_at = _lists(partial)
    has_full = is_causal and key_padding_mask is None and has_full_blocks(query_len, key_len)
    num_full, full_at = _lists(full) if has_full else (None, None)
    return BlockMask.from_kv_blocks(
        num_partial,
        partial_at,
        num_full,
        full_at,
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=is_visible,
        seq_lengths=(query_len, key_len),
    )


@functools.cache
def _compiled() -> Callable[..., Any]:
    keep_compiled_code_apart()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def run_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask | None,
    slopes: Tensor | None,
    offset: int,
    **options: Any,
) -> Any:
    """Return what compiled FlexAttention does; the first call of a shape compiles.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, H, S, D]`.
        value: `[B, H, S, D]`.
        mask: which blocks are computed, and what is hidden inside.
        slopes: `[H]` of ALiBi.
        offset: key position at which the first query stands.
        **options: others of torch's function.

    Raises:
        UnsupportedError: the compiler cannot make a kernel for this call.
    """

    def alibi(score: Tensor, batch: Tensor, head: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:  # noqa: ARG001
        assert slopes is not None
        return score - slopes[head] * (query_at + offset - key_at).abs()

    score_mod = None if slopes is None else alibi
    try:
        # One for each shape; beyond the limit `fullgraph` has it raise, and never fall back.
        with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED), short_vectors_for(query.dtype):
            return _compiled()(query, key, value, score_mod=score_mod, block_mask=mask, **options)
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedError("backend", f"backend 'flex' cannot be compiled here: {reason}") from error


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    key_padding_mask: Tensor | None,
    slopes: Tensor | None,
) -> Tensor:
    """Return exact attention `[B, H, L, D]` by compiled FlexAttention; the first call of a shape compiles.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, H, S, D]`.
        value: `[B, H, S, D]`.
        is_causal: hide keys j > i + S - L.
        key_padding_mask: bool `[B, S]`, True = padding.
        slopes: `[H]` of ALiBi.

    Raises:
        UnsupportedError: the compiler cannot make a kernel for this call.
    """
    query_len, key_len = query.shape[2], key.shape[2]
    note_path("flex")
    if not torch.is_grad_enabled():  # the CPU kernel refuses leaves of a graph even where none is recorded
        query, key, value = query.detach(), key.detach(), value.detach()
    mask = _block_mask(query_len, key_len, is_causal, key_padding_mask, query.device)
    output: Tensor = run_compiled(query, key, value, mask=mask, slopes=slopes, offset=key_len - query_len)
    return output
