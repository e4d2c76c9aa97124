"""The oracle: exact softmax attention in float64, dense and slow, that everything else is compared with.

Vaswani et al. 2017, "Attention Is All You Need", arXiv 1706.03762, equation 1:
    out = softmax(Q K^T / sqrt(D)) V
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_zoo.attention.masks import blank_padding, keep_mask, masked_softmax


def expand_kv_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Repeat grouped key or value heads `[B, G, S, D]` to `[B, H, S, D]`; head h uses group h // (H / G)."""
    groups = tensor.shape[1]
    return tensor if groups == num_heads else tensor.repeat_interleave(num_heads // groups, dim=1)


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the softmax weights `[B, H, L, S]` in the dtype of `query`; rows without any visible key are zero.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, G, S, D]`.
        is_causal: hide keys j > i + S - L.
        key_padding_mask: bool `[B, S]`, True = padding.
        scale: of the scores; None means D ** -0.5.
        bias: added to the scaled scores, broadcastable to `[B, H, L, S]`.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key = expand_kv_heads(blank_padding(key, key_padding_mask), query.shape[1])
    scores = query @ key.transpose(-1, -2) * scale  # [B, H, L, S]
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    keep = keep_mask(
        query.shape[-2], key.shape[-2], is_causal=is_causal, key_padding_mask=key_padding_mask, device=query.device
    )
    return masked_softmax(scores, keep)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return exact attention `[B, H, L, D]` computed in float64, differentiable; arguments as `attention_weights`.

    Returns:
        float64, whatever the inputs are; rows without any visible key are zero.

    >>> x = torch.ones(1, 1, 3, 2)
    >>> softmax_attention(x, x, x).tolist()
    [[[[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]]]
    """
    query, key, value = query.double(), key.double(), value.double()
    weights = attention_weights(
        query, key, is_causal=is_causal, key_padding_mask=key_padding_mask, scale=scale, bias=bias
    )
    return torch.matmul(weights, expand_kv_heads(blank_padding(value, key_padding_mask), query.shape[1]))
