"""Dense attention on one small piece, forward and backward by hand: the inner step of the block-sparse gather path.

    P = exp(scale Q K^T + mask - lse),   out = (P * dropped) V
    dV = (P * dropped)^T dO,   dP = (dO V^T) * dropped,   dS = P * (dP - rowsum(dO * out))
    dQ = scale dS K,   dK = scale dS^T Q

(Dao et al. 2022, "FlashAttention", arXiv 2205.14135, appendix B.) On a CPU without dropout PyTorch's fused kernel does
it, called below autograd because its backward is driven by hand; elsewhere a few matrix products do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Dropout", "attend", "attend_backward", "is_fused", "wide_dtype"]

_FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Dropout:
    """Dropout on attention weights, drawn again in backward instead of being saved.

    Args:
        p: probability of dropping a weight, above 0.
        generator: source of the draws; forward and backward use one each, seeded alike, in the same order.
    """

    p: float
    generator: torch.Generator

    def draw(self, weights: Tensor) -> Tensor:
        """Return what the weights are multiplied by: 0, or 1 / (1 - p)."""
        noise = torch.rand(weights.shape, generator=self.generator, device=weights.device)
        return (noise >= self.p).to(weights.dtype) / (1.0 - self.p)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that sums of `dtype` are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def is_fused(tensor: Tensor, dropout: Dropout | None) -> bool:
    """Tell whether PyTorch's fused CPU kernel can do the piece."""
    return tensor.device.type == "cpu" and dropout is None and tensor.dtype in _FUSED_DTYPES


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = (query @ key.transpose(-1, -2)).to(wide_dtype(query.dtype)).mul_(scale)
    return scores if mask is None else scores.add_(mask)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: Dropout | None
) -> tuple[Tensor, Tensor]:
    """Return the output `[n, l, D]` and the log-sum-exp of the scores `[n, l]`.

    Args:
        query: `[n, l, D]`.
        key: `[n, s, D]`.
        value: `[n, s, D]`.
        mask: additive `[n or 1, l or 1, s]`, in the wide dtype; no row may be all minus infinity.
        scale: of the scores.
        dropout: on the weights.
    """
    if is_fused(query, dropout):
        # As n batch entries of one head: the kernel puts heads inside tokens, and its results should stay contiguous.
        heads = (x[:, None] for x in (query, key, value))
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, attn_mask=None if mask is None else mask[:, None], scale=scale
        )
        return output[:, 0], lse[:, 0]
    scores = _scores(query, key, mask, scale)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse[..., None]).exp_()
    if dropout is not None:
        weights = weights * dropout.draw(weights)
    return weights.to(value.dtype) @ value, lse


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given that of the output; the rest as in `attend`."""
    if is_fused(query, dropout):
        heads = (x[:, None] for x in (grad, query, key, value, output, lse))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, 0.0, False, attn_mask=None if mask is None else mask[:, None], scale=scale
        )
        grad_query, grad_key, grad_value = (x[:, 0] for x in gradients)
        return grad_query, grad_key, grad_value
    wide = wide_dtype(query.dtype)
    weights = _scores(query, key, mask, scale).sub_(lse[..., None]).exp_()
    grad_weights = (grad @ value.transpose(-1, -2)).to(wide)
    dropped = weights
    if dropout is not None:
        factor = dropout.draw(weights)
        dropped, grad_weights = weights * factor, grad_weights * factor
    grad_value = dropped.to(grad.dtype).transpose(-1, -2) @ grad
    delta = (grad.to(wide) * output.to(wide)).sum(-1, keepdim=True)
    grad_scores = grad_weights.sub_(delta).mul_(weights).mul_(scale).to(query.dtype)
    return grad_scores @ key, grad_scores.transpose(-1, -2) @ query, grad_value
