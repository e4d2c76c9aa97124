"""The weights that an attention really uses, found by watching it: nothing is asked of the variant.

For fixed queries and keys the output of most mechanisms is linear in the values, out = A V + c, where c comes from
elsewhere (learned extra tokens, for instance). Unit values show A, D columns in one call, as each of the D features
carries another position; values of zero show c. That A V + c is then what the attention gives for the real values is
checked, so that weights of a mechanism that is not linear are refused and never shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_zoo.attention.contract import AbstractAttention, AbstractMixer, evaluating
from attn_zoo.attention.masks import blank_padding
from attn_zoo.attention.multihead import MultiHeadMixer
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.errors import UnsupportedError

ERROR_UNITS = 64
"""How many times the rounding of one sum of products the check allows: the kernel, its softmax and ours add up."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What an attention over heads was given.

    Args:
        attention: the module.
        query: `[B, H, L, D]`.
        key: `[B, G, S, D]`.
        value: `[B, G, S, D]`.
        key_padding_mask: bool `[B, S]`, True = padding, or None.
    """

    attention: AbstractAttention
    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None

    def __call__(self, value: Tensor) -> Tensor:
        """Return the output `[B, H, L, D]` for other values `[B, G, S, D]`."""
        output: Tensor = self.attention(self.query, self.key, value, key_padding_mask=self.key_padding_mask)
        return output


@dataclass(frozen=True, slots=True)
class EffectiveWeights:
    """Output = weights @ values + offset.

    Args:
        weights: A, `[B, H, L, S]`; rows of softmax attention sum to 1, others may be negative. Zero at padding.
        offset: c, `[B, H, L, D]`: what does not come from the values.
    """

    weights: Tensor
    offset: Tensor


def _offset(call: AttentionCall) -> Tensor:
    return call(torch.zeros_like(call.value))


def weight_columns(call: AttentionCall) -> Iterator[Tensor]:
    """Yield the weights of keys 0 .. D - 1, D .. 2 D - 1 and so on, `[B, H, L, D]` and a shorter last piece.

    Cost: S / D + 2 calls of the attention, and the memory of one.

    Args:
        call: queries, keys and values that were really attended to.

    Raises:
        UnsupportedError: after the last piece, if the pieces and the real values do not add up to the real output.
    """
    with torch.no_grad(), evaluating(call.attention):
        offset, expected = _offset(call), call(call.value)
        values = expand_kv_heads(blank_padding(call.value, call.key_padding_mask), call.query.shape[1]).double()
    total, size = offset.double().clone(), offset.double().abs()
    key_len, width = call.key.shape[2], call.query.shape[-1]
    for start in range(0, key_len, width):
        count = min(width, key_len - start)
        with torch.no_grad(), evaluating(call.attention):
            units = torch.zeros_like(call.value)
            units[:, :, start : start + count, :count] = torch.eye(count, dtype=units.dtype, device=units.device)
            columns = (call(units) - offset)[..., :count]  # feature d carried position start + d
            part = values[:, :, start : start + count]
            total += columns.double() @ part
            size += columns.double().abs() @ part.abs()
        yield columns
    # Unit values round differently from real ones, so the error goes with the size of what is summed, not of the sum.
    allowed = ERROR_UNITS * torch.finfo(expected.dtype).eps * max(float(size.max()), 1e-30)
    error = float((total - expected.double()).abs().max())
    if not error <= allowed:
        name = "this attention" if call.attention.variant is None else call.attention.variant.name
        raise UnsupportedError(
            "effective_weights",
            f"{name}: its output is not linear in the values, so it has no weights to show: unit values predict an "
            f"output that is off by {error:.2g}, of which rounding explains {allowed:.2g}",
        )


def effective_weights(call: AttentionCall) -> EffectiveWeights:
    """Return all weights at once: O(B H L S) memory.

    Args:
        call: queries, keys and values that were really attended to.

    Raises:
        UnsupportedError: the output is not linear in the values.

    >>> from attn_zoo.attention import BuildContext, build_attention
    >>> build = BuildContext(embed_dim=4, num_heads=1, max_seq_len=3, is_causal=True)
    >>> heads = torch.zeros(1, 1, 3, 4)
    >>> found = effective_weights(AttentionCall(build_attention("full", build), heads, heads, heads))
    >>> found.weights[0, 0, 1].tolist()
    [0.5, 0.5, 0.0]
    """
    weights = torch.cat(list(weight_columns(call)), dim=-1)
    with torch.no_grad(), evaluating(call.attention):
        return EffectiveWeights(weights, _offset(call))


def attention_call(
    mixer: AbstractMixer, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
) -> AttentionCall:
    """Return the attention over heads that a mixer amounts to, checked against what the mixer computes.

    A mixer may take a shorter way (compressing before it projects, for instance), so the heads are made here by its own
    projections, and must lead to the same output.

    Args:
        mixer: a multi-head mixer, of any variant.
        hidden: `[B, L, E]` that it was given.
        context: `[B, S, E]`, in cross-attention.
        key_padding_mask: bool `[B, S]`, True = padding.

    Raises:
        UnsupportedError: the mixer has no heads, or does not compute what its projections and its attention do.
    """
    name = type(mixer).__name__ if mixer.variant is None else mixer.variant.name
    if not isinstance(mixer, MultiHeadMixer):
        raise UnsupportedError("effective_weights", f"{name}: it mixes hidden states without heads that attend")
    with torch.no_grad(), evaluating(mixer):
        query, key, value = mixer._project(hidden, context, key_padding_mask)
        call = AttentionCall(mixer.attention, query, key, value, key_padding_mask)
        expected = mixer(hidden, context=context, key_padding_mask=key_padding_mask)
        output = mixer._merge(call(value))
    scale = float(expected.abs().max()) + float(hidden.abs().max())
    error = float((output - expected).abs().max())
    if not error <= ERROR_UNITS * (hidden.shape[-1] + key.shape[2]) ** 0.5 * torch.finfo(hidden.dtype).eps * scale:
        raise UnsupportedError(
            "effective_weights",
            f"{name}: projecting and attending gives another output than its mixer: off by {error:.2g}",
        )
    return call
