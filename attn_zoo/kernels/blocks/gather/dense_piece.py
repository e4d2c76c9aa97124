"""Dense attention on one small piece, forward and backward by hand: the inner step of the block-sparse gather path.

    P = softmax(scale Q K^T + mask),   out = (P * dropped) V
    dV = (P * dropped)^T dO,   dP = (dO V^T) * dropped,   dS = P * (dP - rowsum(dP * P))
    dQ = scale dS K,   dK = scale dS^T Q

(Dao et al. 2022, "FlashAttention", arXiv 2205.14135, appendix B.) A piece holds all keys of its queries, so backward
computes P again from them and nothing is saved. All of it is matrix products and softmax on buffers that are used
again, which on a CPU is faster than PyTorch's fused kernel: that one cuts blocks of 64 queries in halves. Only where
products are slow (16 bits on a CPU) the fused kernel does it, called below autograd because its backward is driven by
hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_zoo.kernels.dropout_draws import draw_dropped

_HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Dropout:
    """Dropout on attention weights, drawn again in backward instead of being saved.

    Args:
        keep_p: share of the weights that is kept, below 1; see `keep_share`.
        generator: source of the draws; forward and backward use one each, seeded alike, in the same order.
    """

    keep_p: float
    generator: torch.Generator

    def draw(self, weights: Tensor) -> Tensor:
        """Return which weights are dropped; the others are divided by `keep_p`."""
        return draw_dropped(weights, 1.0 - self.keep_p, self.generator)


class Scratch:
    """Buffers by name that all pieces of a call share.

    Fresh memory for each piece would be taken from the system and given back, which can cost as much as the work.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a contiguous tensor of any content, of the dtype and device of `like`, valid until taken again."""
        last = self._views.get(name)
        if last is not None and last.shape == shape:  # pieces mostly look alike
            return last
        size, buffer = math.prod(shape), self._buffers.get(name)
        if buffer is None or buffer.shape[0] < size:
            buffer = self._buffers[name] = like.new_empty(size)
        view = self._views[name] = buffer[:size].view(shape)
        return view


@dataclass(frozen=True)
class Piece:
    """What some queries need: themselves, and all keys that they see.

    Args:
        query: `[n, l, D]`.
        key: `[n, s, D]`.
        read_value: returns the values `[n, s, D]`; gathered no sooner, so that they are still near when they are used.
        mask: additive `[n or 1, l or 1, s]`, in the wide dtype; no row may be all minus infinity.
        masked: where among the n the mask belongs, if not to all.
        scale: of the scores.
        dropout: on the weights.
        is_fused: PyTorch's fused CPU kernel does it.
        scratch: buffers to use; a result may be one of them.
    """

    query: Tensor
    key: Tensor
    read_value: Callable[[], Tensor]
    mask: Tensor | None
    masked: slice
    scale: float
    dropout: Dropout | None
    is_fused: bool
    scratch: Scratch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that sums of `dtype` are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def has_fused(tensor: Tensor, dropout: Dropout | None) -> bool:
    """Tell whether PyTorch's fused CPU kernel does the pieces.

    Args:
        tensor: of the call.
        dropout: of the call; the kernel has none.
    """
    return tensor.device.type == "cpu" and dropout is None and tensor.dtype in _HALF_DTYPES


def _product(left: Tensor, right: Tensor, scale: float, result: Tensor, *, adds: bool = False) -> Tensor:
    """Write scale times left times right, `[n, i, j]`, to `result`, or add it there."""
    return torch.baddbmm(result, left, right, beta=int(adds), alpha=scale, out=result)


def _weights(piece: Piece, lse: Tensor | None = None) -> Tensor:
    """Return P in the wide dtype, in a buffer; write the log-sum-exp of the scores `[n, l]` to `lse`."""
    query, key = piece.query, piece.key
    shape = (*query.shape[:2], key.shape[1])
    scores = _product(query, key.mT, piece.scale, piece.scratch.take("scores", shape, query))
    wide = wide_dtype(scores.dtype)
    if scores.dtype != wide:
        scores = scores.to(wide)
    if piece.mask is not None:
        scores[piece.masked] += piece.mask
    if lse is not None:
        torch.logsumexp(scores, dim=-1, out=lse)
    return torch.softmax(scores, dim=-1, out=scores)


def attend(piece: Piece, place: Tensor, lse: Tensor | None = None) -> None:
    """Compute the output.

    Args:
        piece: to compute.
        place: contiguous `[n, l, D]`; the output is put there.
        lse: the log-sum-exp of the scores `[n, l]` is put there.
    """
    if piece.is_fused:
        # As n batch entries of one head: the kernel puts heads inside tokens, and its results should stay contiguous.
        heads = (x[:, None] for x in (piece.query, piece.key, piece.read_value()))
        output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, attn_mask=None if piece.mask is None else piece.mask[:, None], scale=piece.scale
        )
        place.copy_(output[:, 0])
        if lse is not None:
            lse.copy_(sums[:, 0])
        return
    weights, scale = _weights(piece, lse), 1.0
    if piece.dropout is not None:
        weights, scale = weights.masked_fill_(piece.dropout.draw(weights), 0.0), 1.0 / piece.dropout.keep_p
    value = piece.read_value()
    _product(weights.to(value.dtype), value, scale, place)


def attend_backward(
    grad: Tensor,
    piece: Piece,
    place: Tensor,
    sums: Sequence[Tensor] | None,
    grad_lse: Tensor | None = None,
    output: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of query, key and value.

    Args:
        grad: of the output, `[n, l, D]`.
        piece: as in `attend`.
        place: contiguous; the gradient of the query is put there.
        sums: `[n, s, D]` each; the gradients of key and value are added there. Without them, those overwrite the keys
            and values of the piece, which must be copies.
        grad_lse: of a piece that is not fused, the gradient of the log-sum-exp `[n, l]`, or None.
        output: of a fused piece, what `attend` returned.
        lse: likewise.

    Returns:
        The buffers of the keys and values.
    """
    query, key, scratch = piece.query, piece.key, piece.scratch
    if piece.is_fused:
        value = piece.read_value()
        assert output is not None  # kept for every fused piece
        assert lse is not None
        heads = (x[:, None] for x in (grad, query, key, value, output, lse))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, 0.0, False, attn_mask=None if piece.mask is None else piece.mask[:, None], scale=piece.scale
        )
        place.copy_(gradients[0][:, 0])
        for index, addend in enumerate(gradients[1:]):
            if sums is None:
                (key, value)[index].copy_(addend[:, 0])
            else:
                sums[index].add_(addend[:, 0])
        return key, value

    def deliver(index: int, left: Tensor, right: Tensor, scale: float) -> None:
        if sums is None:
            _product(left, right, scale, (key, value)[index])
        elif sums[index].dtype == left.dtype:
            _product(left, right, scale, sums[index], adds=True)
        else:
            sums[index].add_(_product(left, right, scale, torch.empty_like(key)))

    weights = _weights(piece)
    value = piece.read_value()
    kept, scale = weights, 1.0
    if piece.dropout is not None:
        is_dropped, scale = piece.dropout.draw(weights), 1.0 / piece.dropout.keep_p
        kept = weights.masked_fill(is_dropped, 0.0)
    grad_weights = _product(grad, value.mT, scale, scratch.take("grad_weights", weights.shape, grad)).to(weights.dtype)
    if piece.dropout is not None:
        grad_weights.masked_fill_(is_dropped, 0.0)
    deliver(1, kept.to(grad.dtype).mT, grad, scale)  # values are not read again
    torch.ops.aten._softmax_backward_data.out(grad_weights, weights, -1, weights.dtype, grad_input=grad_weights)
    if grad_lse is not None:
        grad_weights.addcmul_(weights, grad_lse[..., None])
    grad_scores = grad_weights.to(query.dtype)
    _product(grad_scores, key, piece.scale, place)
    deliver(0, grad_scores.mT, query, piece.scale)
    return key, value
