"""Block-sparse attention by gathering keys and values, a few blocks of queries at a time.

Time and memory are linear in the length, forward and backward: a piece gathers its key and value blocks into a buffer
that stays in the cache, runs dense attention on it, and is forgotten. Saved for backward are the inputs, the output and
one log-sum-exp per query; backward gathers again and adds into the gradients of the keys by `index_add_`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attn_zoo.kernels.block_chunk import Dropout, attend, attend_backward, is_fused, wide_dtype
from attn_zoo.kernels.block_pattern import BlockPattern
from attn_zoo.kernels.block_pieces import Group, Pieces
from attn_zoo.kernels.trace import note_path

__all__ = ["gather_attention"]


@dataclass(frozen=True)
class _Plan:
    """What forward and backward share beside tensors."""

    pattern: BlockPattern
    scale: float
    slopes: Tensor | None
    dropout_p: float
    seed: int

    def dropout(self, device: torch.device) -> Dropout | None:
        if not self.dropout_p:
            return None
        return Dropout(self.dropout_p, torch.Generator(device).manual_seed(self.seed))

    def pieces(self, query: Tensor, padding: Tensor | None, dropout: Dropout | None) -> Pieces:
        has_scores = not is_fused(query, dropout)
        return Pieces(query, self.pattern, padding, self.slopes, has_scores=has_scores)


class _GatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, plan: _Plan) -> Tensor:
        pattern, dropout = plan.pattern, plan.dropout(query.device)
        note_path("block_sparse.gather" if is_fused(query, dropout) else "block_sparse.gather_unfused")
        pieces = plan.pieces(query, padding, dropout)
        key_reader, value_reader, head_dim = _Near(pattern), _Near(pattern), query.shape[-1]
        output = torch.empty_like(query)
        lse = torch.empty(query.shape[:3], dtype=wide_dtype(query.dtype), device=query.device)
        for group in pieces.groups():
            keys, values = (
                group.read_keys(x, pattern.num_key_blocks, pattern.block_size, padding) for x in (key, value)
            )
            for chunk in pieces.chunks():
                source = pieces.source(group, chunk)
                block = group.read(query, chunk.start, chunk.stop, chunk.size)
                near_keys = key_reader.read(keys, source, group, head_dim)
                near_values = value_reader.read(values, source, group, head_dim)
                mask, is_dead = pieces.mask(group, chunk)
                out, out_lse = attend(block, near_keys, near_values, mask, plan.scale, dropout)
                if is_dead is not None:
                    out = out.masked_fill(is_dead, 0.0)
                group.write(output, chunk.start, out)
                group.write(lse, chunk.start, out_lse)
        ctx.save_for_backward(query, key, value, padding, output, lse)
        ctx.plan = plan
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, padding, output, lse = ctx.saved_tensors
        plan: _Plan = ctx.plan
        if grad_output.stride(-1) != 1:  # the gradient of a sum, for instance, is one number expanded
            grad_output = grad_output.contiguous()
        pattern, dropout = plan.pattern, plan.dropout(query.device)
        pieces, wide = plan.pieces(query, padding, dropout), wide_dtype(query.dtype)
        key_reader, value_reader, head_dim = _Near(pattern), _Near(pattern), query.shape[-1]
        grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
        for group in pieces.groups():
            keys, values = (
                group.read_keys(x, pattern.num_key_blocks, pattern.block_size, padding) for x in (key, value)
            )
            key_sum, value_sum = (torch.zeros_like(x, dtype=wide) for x in (keys, values))
            for chunk in pieces.chunks():
                source = pieces.source(group, chunk)
                block, out, out_lse, grad = (
                    group.read(x, chunk.start, chunk.stop, chunk.size) for x in (query, output, lse, grad_output)
                )
                near_keys = key_reader.read(keys, source, group, head_dim)
                near_values = value_reader.read(values, source, group, head_dim)
                mask, is_dead = pieces.mask(group, chunk)
                if is_dead is not None:
                    grad = grad.masked_fill(is_dead, 0.0)
                part, key_part, value_part = attend_backward(
                    grad, block, near_keys, near_values, out, out_lse, mask, plan.scale, dropout
                )
                group.write(grad_query, chunk.start, part)
                for total, addend in ((key_sum, key_part), (value_sum, value_part)):
                    if source is None:
                        _leading(total, group, head_dim, pattern).add_(addend)
                    else:
                        total.index_add_(0, source, addend.reshape(len(source), -1).to(wide))
            for result, total in ((grad_key, key_sum), (grad_value, value_sum)):
                group.write(result, 0, total.view(len(total), pattern.block_size, -1))
        return grad_query, grad_key, grad_value, None, None


class _Near:
    """Reads the keys (or values) that the queries of a piece see, into a buffer that is used again.

    Fresh memory for each piece would be taken from the system and given back, which costs as much as the copy.
    """

    def __init__(self, pattern: BlockPattern) -> None:
        self._pattern = pattern
        self._buffer: Tensor | None = None

    def read(self, keys: Tensor, source: Tensor | None, group: Group, head_dim: int) -> Tensor:
        """Return `[sequences * blocks, keys, D]`, valid until the next read."""
        if source is None:
            return _leading(keys, group, head_dim, self._pattern)
        if self._buffer is None or len(self._buffer) < len(source):
            self._buffer = keys.new_empty(len(source), keys.shape[1])
        gathered = torch.index_select(keys, 0, source, out=self._buffer[: len(source)])
        return gathered.view(-1, self._pattern.table.shape[-1] * self._pattern.block_size, head_dim)


def _leading(keys: Tensor, group: Group, head_dim: int, pattern: BlockPattern) -> Tensor:
    """Return the keys that dense rows see, `[sequences, keys, D]`: a view."""
    return keys.view(group.num_sequences, -1, head_dim)[:, : pattern.dense_key_len]


def gather_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: BlockPattern,
    *,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    slopes: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute block-sparse attention by gathering; see `block_sparse_attention` for arguments and result."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # The fused kernel wants features side by side.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    # The seed comes from PyTorch's generator, as dropout does; the draws that follow are repeatable from it.
    seed = int(torch.randint(1 << 62, ())) if dropout_p else 0
    output: Tensor = _GatherAttention.apply(
        query, key, value, key_padding_mask, _Plan(pattern, scale, slopes, dropout_p, seed)
    )
    return output
