"""Exact attention over stretches of queries, one after another: softmax goes row by row, so each attends by itself.

Recomputed in backward: linear memory where no fused kernel serves. Two uses: a mask or bias that differs between rows
(ALiBi, a causal mask with L != S) is made for one chunk only, and dropout on CPU, which torch's fused kernel lacks.
Backward runs each chunk again (Chen et al. 2016, arXiv 1604.06174), so forward and backward together cost 4.5 forward
passes instead of 3.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_zoo.kernels.dropout_draws import draw, keep_share
from attn_zoo.kernels.once_differentiable import once_differentiable
from attn_zoo.kernels.trace import note_path

CHUNK_SCORES = 1 << 21
"""Scores (or mask entries) of one chunk: 8 MiB in float32. Backward adds to all keys once a chunk, so chunks must not
be small; measured on one CPU core up to L = 4096, larger ones are no faster."""

MIN_CHUNK_LEN = 16
"""Shorter chunks would spend their time on overhead; memory stays linear in S all the same."""

Attend = Callable[[Tensor, Tensor, Tensor, range], Tensor]
"""(query rows, visible keys, visible values, which rows) -> output rows; the same whenever it is called again."""


def chunk_len_for(scores_per_row: int) -> int:
    """Return how many query rows to take at once when each needs so many scores or mask entries."""
    return max(MIN_CHUNK_LEN, CHUNK_SCORES // max(scores_per_row, 1))


def guard_empty_rows(bias: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return `bias` with rows that hide every key opened up, and which rows those are (`[.., rows, 1]`).

    The softmax over nothing is NaN in some kernels, forward or backward; the caller zeroes these rows of the output.
    None stands for no such row, which is only asked where the answer costs nothing: on a CPU.
    """
    is_empty = bias.isneginf().all(-1, keepdim=True)
    if bias.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(is_empty.any()):
        return bias, None
    return bias.masked_fill(is_empty, 0.0), is_empty


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, attend: Attend, chunk_len: int, is_causal: bool
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.attend, ctx.chunk_len, ctx.is_causal = attend, chunk_len, is_causal
        device = query.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        output: Tensor | None = None
        for rows, num_keys in _chunks(query.shape[2], key.shape[2], chunk_len, is_causal):
            part = attend(query[:, :, rows.start : rows.stop], key[:, :, :num_keys], value[:, :, :num_keys], rows)
            if output is None:
                output = torch.empty_like(query, dtype=part.dtype)  # autocast may have narrowed it
            output[:, :, rows.start : rows.stop] = part
        assert output is not None
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        # Sums over many chunks need more digits than a 16-bit type has.
        wide = torch.promote_types(key.dtype, torch.float32)
        grad_key, grad_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        for rows, num_keys in _chunks(query.shape[2], key.shape[2], ctx.chunk_len, ctx.is_causal):
            leaves = [
                x.detach().requires_grad_()
                for x in (query[:, :, rows.start : rows.stop], key[:, :, :num_keys], value[:, :, :num_keys])
            ]
            device, dtype, enabled = ctx.autocast
            with torch.enable_grad(), torch.autocast(device, dtype, enabled=enabled):
                output = ctx.attend(*leaves, rows)
            grads = torch.autograd.grad(output, leaves, grad_output[:, :, rows.start : rows.stop])
            grad_query[:, :, rows.start : rows.stop] = grads[0]
            grad_key[:, :, :num_keys] += grads[1]
            grad_value[:, :, :num_keys] += grads[2]
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _chunks(query_len: int, key_len: int, chunk_len: int, is_causal: bool) -> list[tuple[range, int]]:
    """Return (rows, number of keys the last of them sees) for each chunk."""
    chunks = []
    for start in range(0, query_len, chunk_len):
        stop = min(start + chunk_len, query_len)
        chunks.append((range(start, stop), stop + key_len - query_len if is_causal else key_len))
    return chunks


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, attend: Attend, *, scores_per_row: int, is_causal: bool
) -> Tensor:
    """Return `attend` over all rows, as many at once as fit; with one chunk, autograd works as usual.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, G, S, D]`.
        value: `[B, G, S, D]`.
        attend: computes some rows.
        scores_per_row: scores or mask entries it holds for each row, over all batch entries and heads.
        is_causal: the last row of a chunk sees keys up to its own position, bottom right; the rest are not passed.
            Needs L <= S.
    """
    chunk_len = chunk_len_for(scores_per_row)
    if chunk_len >= query.shape[2]:
        return attend(query, key, value, range(query.shape[2]))
    note_path("chunked")
    output: Tensor = _Rows.apply(query, key, value, attend, chunk_len, is_causal)
    return output


def weights_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, rows: range, *, bias: Tensor | None, dropout_p: float, seed: Tensor
) -> Tensor:
    """Return dense attention of some rows with inverted dropout on the softmax weights (Srivastava et al. 2014).

    The kept weights depend on `seed` and the rows alone, so that backward draws the same ones again. The probability
    is rounded to a multiple of 2^-16 and the output divided by what was really kept on average, so nothing is biased.

    Args:
        query: `[B, H, rows, D]`.
        key: `[B, H, num_keys, D]`.
        value: `[B, H, num_keys, D]`.
        rows: which rows these are.
        bias: added to the scaled scores, broadcastable to `[B, H, rows, num_keys]`, or None.
        dropout_p: probability of dropping a weight.
        seed: of this call, an integer on the CPU.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    keep_p = keep_share(dropout_p)
    with torch.autocast(query.device.type, enabled=False):  # backward runs outside autocast: both must compute alike
        scores = (query.to(wide) * query.shape[-1] ** -0.5) @ key.to(wide).transpose(-1, -2)  # [B, H, rows, num_keys]
        is_empty = None
        if bias is not None:
            bias, is_empty = guard_empty_rows(bias)
            scores = scores + bias
        weights = scores.softmax(-1)
        is_dropped = draw(weights, 1.0 - keep_p, seed, rows.start)
        output: Tensor = (weights.masked_fill(is_dropped, 0.0) @ value.to(wide) / keep_p).to(query.dtype)
    return output if is_empty is None else output.masked_fill(is_empty, 0.0)
