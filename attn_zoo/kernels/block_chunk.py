"""Dense attention on one small piece, forward and backward by hand: the inner step of the block-sparse gather path.

    P = softmax(scale Q K^T + mask),   out = (P * dropped) V
    dV = (P * dropped)^T dO,   dP = (dO V^T) * dropped,   dS = P * (dP - rowsum(dP * P))
    dQ = scale dS K,   dK = scale dS^T Q

(Dao et al. 2022, "FlashAttention", arXiv 2205.14135, appendix B.) A piece holds all keys of its queries, so backward
computes P again from them and nothing is saved. Pieces of a few blocks are matrix products and softmax on buffers that
are used again: their scores stay in the cache, and on a CPU that is faster than PyTorch's fused kernel, which cuts
blocks of 64 queries in halves. Where the scores of a piece are many (dense rows) or the products slow (16 bits on a
CPU), the fused kernel does it, called below autograd because its backward is driven by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Dropout", "Piece", "Scratch", "attend", "attend_backward", "has_fused", "wide_dtype"]

_HALF_DTYPES = (torch.bfloat16, torch.float16)
_WIDE_DTYPES = (torch.float32, torch.float64)


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


class Scratch:
    """Buffers by name that all pieces of a call share.

    Fresh memory for each piece would be taken from the system and given back, which can cost as much as the work.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a contiguous tensor of any content, of the dtype and device of `like`, valid until taken again."""
        size, buffer = math.prod(shape), self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = like.new_empty(size)
        return buffer[:size].view(shape)


@dataclass(frozen=True)
class Piece:
    """What some queries need: themselves, and all keys that they see.

    Args:
        query: `[n, l, D]`.
        key: `[n, s, D]`.
        value: `[n, s, D]`.
        mask: additive `[n or 1, l or 1, s]`, in the wide dtype; no row may be all minus infinity.
        scale: of the scores.
        dropout: on the weights.
        is_fused: PyTorch's fused CPU kernel does it.
        scratch: buffers to use; a result may be one of them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    dropout: Dropout | None
    is_fused: bool
    scratch: Scratch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that sums of `dtype` are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def has_fused(tensor: Tensor, dropout: Dropout | None, *, is_dense: bool) -> bool:
    """Tell whether PyTorch's fused CPU kernel does the piece.

    Args:
        tensor: of the call.
        dropout: of the call; the kernel has none.
        is_dense: the piece is made of rows that see all keys.
    """
    dtypes = (*_WIDE_DTYPES, *_HALF_DTYPES) if is_dense else _HALF_DTYPES
    return tensor.device.type == "cpu" and dropout is None and tensor.dtype in dtypes


def _product(name: str, left: Tensor, right: Tensor, scale: float, scratch: Scratch) -> Tensor:
    """Return scale times left times right, `[n, i, j]`, in a buffer."""
    result = scratch.take(name, (*left.shape[:2], right.shape[2]), left)
    return torch.baddbmm(result, left, right, beta=0, alpha=scale, out=result)


def _weights(piece: Piece) -> Tensor:
    """Return P in the wide dtype, in a buffer."""
    scores = _product("scores", piece.query, piece.key.mT, piece.scale, piece.scratch)
    scores = scores.to(wide_dtype(scores.dtype))
    if piece.mask is not None:
        scores += piece.mask
    return torch.softmax(scores, dim=-1, out=scores)


def attend(piece: Piece) -> tuple[Tensor, Tensor | None]:
    """Return the output `[n, l, D]` and, if fused, the log-sum-exp of the scores `[n, l]`, which backward needs."""
    if piece.is_fused:
        # As n batch entries of one head: the kernel puts heads inside tokens, and its results should stay contiguous.
        heads = (x[:, None] for x in (piece.query, piece.key, piece.value))
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, attn_mask=None if piece.mask is None else piece.mask[:, None], scale=piece.scale
        )
        return output[:, 0], lse[:, 0]
    weights = _weights(piece)
    if piece.dropout is not None:
        weights = weights.mul_(piece.dropout.draw(weights))
    return _product("output", weights.to(piece.value.dtype), piece.value, 1.0, piece.scratch), None


def attend_backward(grad: Tensor, piece: Piece, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    Args:
        grad: of the output, `[n, l, D]`.
        piece: as in `attend`.
        output: what `attend` returned; only a fused piece reads it, and the next.
        lse: log-sum-exp.
    """
    query, key, value, scratch = piece.query, piece.key, piece.value, piece.scratch
    if piece.is_fused:
        heads = (x[:, None] for x in (grad, query, key, value, output, lse))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, 0.0, False, attn_mask=None if piece.mask is None else piece.mask[:, None], scale=piece.scale
        )
        grad_query, grad_key, grad_value = (x[:, 0] for x in gradients)
        return grad_query, grad_key, grad_value
    weights = _weights(piece)
    grad_weights = _product("grad_weights", grad, value.mT, 1.0, scratch).to(weights.dtype)
    dropped = weights
    if piece.dropout is not None:
        factor = piece.dropout.draw(weights)
        dropped, grad_weights = weights * factor, grad_weights.mul_(factor)
    grad_value = _product("grad_value", dropped.to(grad.dtype).mT, grad, 1.0, scratch)
    torch.ops.aten._softmax_backward_data.out(grad_weights, weights, -1, weights.dtype, grad_input=grad_weights)
    grad_scores = grad_weights.to(query.dtype)
    grad_query = _product("grad_query", grad_scores, key, piece.scale, scratch)
    return grad_query, _product("grad_key", grad_scores.mT, query, piece.scale, scratch), grad_value
