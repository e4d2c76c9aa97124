"""Exact attention over padded keys without their padding: flash attention on the tokens that are there, packed.

Dao 2023, "FlashAttention-2", arXiv 2307.08691: the kernel reads sequences of unlike lengths laid end to end, with the
places where they begin (the operator behind `torch.nn.attention.varlen`, which has dropout too). Keys and values are
sorted so that padding of any pattern comes last, where nothing is read. Only they are packed: queries at padded
positions have a result too. The cost is the share of the keys that are there, and moving keys and values twice.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from attn_zoo.kernels.trace import note_path


def _flash(*arguments: Any, scale: float) -> Tensor:
    output: Tensor = torch.ops.aten._flash_attention_forward(*arguments, scale=scale)[0]
    return output


def why_not(query: Tensor, *, needs_grad: bool) -> str | None:
    """Return why packed flash attention cannot run for this device, dtype and head size, or None; tried only once."""
    return _probe(query.device, query.dtype, query.shape[-1], needs_grad)


@functools.cache
def _probe(device: torch.device, dtype: torch.dtype, head_dim: int, needs_grad: bool) -> str | None:
    probe = torch.zeros(1, 2, 16, head_dim, device=device, dtype=dtype, requires_grad=needs_grad)
    padding = torch.zeros(1, 16, device=device, dtype=torch.bool)
    try:
        with torch.set_grad_enabled(needs_grad):
            output = _attend(probe, probe, probe, is_causal=False, key_padding_mask=padding, dropout_p=0.0)
            if needs_grad:
                output.sum().backward()
    except (NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].partition(". This could be")[0]
        return f"flash attention over packed sequences does not run on {device.type} in {dtype}: {reason}"
    return None


class _Packed(torch.autograd.Function):
    """Rows `[N, G, D]` in another order; what the padded ones get back is zero, whatever the kernel left there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, is_padding: Tensor) -> Tensor:
        ctx.save_for_backward(order, is_padding)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, is_padding = ctx.saved_tensors
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return grad[back].masked_fill(is_padding[:, None, None], 0.0), None, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    key_padding_mask: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Return exact attention `[B, H, L, D]`; rows that see no key are zero.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, G, S, D]`.
        value: `[B, G, S, D]`.
        is_causal: hide keys j > i + S - L; not together with padding, whose places would then matter.
        key_padding_mask: bool `[B, S]`, True = padding.
        dropout_p: probability of dropping a weight.
    """
    note_path("varlen.flash")
    return _attend(query, key, value, is_causal=is_causal, key_padding_mask=key_padding_mask, dropout_p=dropout_p)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, key_padding_mask: Tensor | None, dropout_p: float
) -> Tensor:
    batch_size, num_heads, query_len, head_dim = query.shape
    key_len, device = key.shape[2], query.device
    # [B, H, L, D] to [B * L, H, D]: a view, where heads come from one projection.
    queries, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    query_starts = torch.arange(batch_size + 1, device=device, dtype=torch.int32) * query_len
    key_starts = torch.arange(batch_size + 1, device=device, dtype=torch.int32) * key_len
    if key_padding_mask is not None:
        is_padding = key_padding_mask.flatten()
        order = is_padding.argsort(stable=True)
        keys, values = (_Packed.apply(rows, order, is_padding) for rows in (keys, values))
        num_keys = (~key_padding_mask).sum(1, dtype=torch.int32)
        key_starts = torch.cat([key_starts[:1], num_keys.cumsum(0, dtype=torch.int32)])
    # Lengths are upper bounds, so that the host need not know the real ones.
    rows = _flash(
        queries,
        keys,
        values,
        query_starts,
        key_starts,
        query_len,
        key_len,
        dropout_p,
        is_causal,
        False,
        scale=head_dim**-0.5,
    )
    return rows.view(batch_size, query_len, num_heads, head_dim).transpose(1, 2)
