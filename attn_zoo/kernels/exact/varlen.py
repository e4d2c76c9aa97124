"""Exact attention over padded keys without their padding: flash attention on the tokens that are there, packed.

Dao 2023, "FlashAttention-2", arXiv 2307.08691: the kernel reads sequences of unlike lengths laid end to end, with the
places where they begin (the operator behind `torch.nn.attention.varlen`, which has dropout too). Keys and values are
moved there whatever the pattern of the padding, which is moved nowhere and may hold anything. Only they are packed:
queries at padded positions have a result too. The cost is the share of the keys that are there, and moving keys and
values, as blanking them for a mask does.
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
    except torch.OutOfMemoryError:  # which passes: no reason to be remembered
        raise
    except (NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].partition(". This could be")[0]
        return f"flash attention over packed sequences does not run on {device.type} in {dtype}: {reason}"
    return None


class _Packed(torch.autograd.Function):
    """Heads `[B, G, S, D]` as rows `[B S, G, D]` at their places, which are counted from 1; all padding has place 0.

    Rows of no place are what memory held. Padding gets a gradient of zero, whatever the kernel left there. Arguments
    are named one by one: without a gradient torch's compiler goes by their number, and would take stars for one.
    """

    @staticmethod
    def forward(ctx: Any, places: Tensor, is_padding: Tensor, key: Tensor, value: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(places, is_padding)
        packed = []
        for x in (key,) if value is None else (key, value):
            rows = x.new_empty(places.numel() + 1, x.shape[1], x.shape[3])
            packed.append(rows.index_put_((places,), x.transpose(1, 2))[1:])
        return tuple(packed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        places, is_padding = ctx.saved_tensors
        rows, hidden = places - 1, is_padding[..., None, None]
        found = [grad[rows].masked_fill_(hidden, 0.0).transpose(1, 2) for grad in grads]
        return None, None, found[0], found[1] if len(found) > 1 else None


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
    if key_padding_mask is None:
        keys, values = _rows(key), _rows(value)
        key_starts = _starts(batch_size, key_len, device)
    else:
        is_there = ~key_padding_mask
        count = is_there.flatten().cumsum(0)  # over all sequences
        places = count.view(batch_size, key_len) * is_there
        packed = _Packed.apply(places, key_padding_mask, key, None if key is value else value)
        keys, values = packed[0], packed[-1]
        key_starts = torch.zeros(batch_size + 1, device=device, dtype=torch.int32)
        key_starts[1:] = count[key_len - 1 :: key_len]
    # Lengths are upper bounds, so that the host need not know the real ones.
    rows = _flash(
        _rows(query),
        keys,
        values,
        _starts(batch_size, query_len, device),
        key_starts,
        query_len,
        key_len,
        dropout_p,
        is_causal,
        False,
        scale=head_dim**-0.5,
    )
    return rows.view(batch_size, query_len, num_heads, head_dim).transpose(1, 2)


def _rows(heads: Tensor) -> Tensor:
    """Return `[B, H, L, D]` as `[B L, H, D]`: a view, where heads come from one projection."""
    return heads.transpose(1, 2).flatten(0, 1)


def _starts(count: int, length: int, device: torch.device) -> Tensor:
    """Return where sequences of one length begin, and where the last ends."""
    return torch.arange(0, (count + 1) * length, length, device=device, dtype=torch.int32)
