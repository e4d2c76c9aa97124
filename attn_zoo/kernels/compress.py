"""Sequence compression: a learned matrix sums over positions, wide enough for long sequences and linear in memory.

    out[m] = sum_j matrix[j, m] tokens[j]          (Linformer's E^T K and F^T V)

This is a matrix product with a small result (k rows) and a very long sum (S terms). Three things are done about that.
Heads that share a matrix are folded into the columns of one product, which is faster than a thin product for each head.
Sums over positions are kept in float32 for bfloat16 and float16, chunk by chunk. On a GPU all chunks are one batched
product (split-K), because the result alone has too few tiles to keep the device busy. Chunks are added in a fixed order
and results repeat bit for bit. Padded positions are blanked in the copy of a chunk, so nothing more is stored.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from attn_zoo.kernels.trace import note_path

__all__ = ["Short", "compress", "fit_rows"]

Short = Literal["slice", "slice_renormalise", "interpolate"]

CPU_CHUNK = 1024  # positions whose copy stays in the cache; 256 to 2048 measured alike
GPU_TILES = 264  # two tiles for each of 132 multiprocessors
GPU_TILE_SIDE = 128
GPU_MIN_CHUNK = 256


def compress(tokens: Tensor, matrix: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
    """Sum `tokens` over positions, weighted by the columns of `matrix`.

    Args:
        tokens: `[B, G, S, D]`, of any strides.
        matrix: `[B or 1, G or 1, S, k]`; a 1 is shared along that dimension.
        key_padding_mask: bool `[B, S]`, True = left out, whatever is stored there (NaN and infinity too).

    Returns:
        `[B, G, k, D]` in the dtype of `tokens`; sums are kept in float32 at least. Differentiable once.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.

    >>> tokens = torch.tensor([[[[1.0], [2.0], [4.0]]]])
    >>> compress(tokens, torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]])).flatten().tolist()
    [3.0, 4.0]
    """
    batch_size, groups, key_len, _ = tokens.shape
    fits = matrix.dim() == 4 and matrix.shape[0] in (1, batch_size) and matrix.shape[1] in (1, groups)
    if not fits or matrix.shape[2] != key_len:
        raise ValueError(
            f"matrix: expected [B or 1, G or 1, S, k] = [{batch_size} or 1, {groups} or 1, {key_len}, k]; "
            f"got {list(matrix.shape)}"
        )
    if matrix.dtype != tokens.dtype or matrix.device != tokens.device:
        raise ValueError(
            f"matrix: expected dtype and device of tokens ({tokens.dtype}, {tokens.device}); "
            f"got {matrix.dtype}, {matrix.device}"
        )
    _check_mask(tokens, key_padding_mask)
    note_path("compress.split_k" if tokens.is_cuda else "compress.chunked")
    result: Tensor = _Compress.apply(tokens, matrix, key_padding_mask)
    return result


def fit_rows(
    weight: Tensor, key_len: int, rule: Short, *, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the rows of a learned matrix for sequences shorter than the length it was learned for.

    Lengths n are those without padding, so that padding a sequence further changes nothing.

    Args:
        weight: `[G or 1, N, k]`.
        key_len: S <= N.
        rule: `"slice"`, row j for position j; `"slice_renormalise"`, the same times sqrt(N / n); `"interpolate"`, the
            two rows nearest to (r + 1/2) N / n - 1/2 mixed linearly, r counting unpadded positions, times N / n.
        key_padding_mask: bool `[B, S]`, True = padding.

    Returns:
        Rows `[B or 1, G or 1, S, k]` and the factor `[B or 1, 1, 1, 1]` (float64) to apply after `compress`, or None.
        Only interpolation with padding needs rows of its own for each sequence: O(B S k) memory.
    """
    if rule == "slice":
        return weight[None, :, :key_len], None
    max_len = weight.shape[1]
    if key_padding_mask is None:
        valid = torch.ones(1, key_len, dtype=torch.bool, device=weight.device)
    else:
        valid = ~key_padding_mask
    # Positions in float64: beyond 2^24 / k they are not exact in float32, and the factor is part of the mathematics.
    stretch = max_len / valid.sum(-1, keepdim=True).clamp(min=1).double()  # [B or 1, 1]
    if rule == "slice_renormalise":
        return weight[None, :, :key_len], stretch.sqrt()[..., None, None]
    rank = valid.cumsum(-1) - 1
    source = ((rank + 0.5) * stretch - 0.5).clamp(0, max_len - 1)  # [B or 1, S]
    low = source.long()
    high = (low + 1).clamp(max=max_len - 1)
    rows = torch.lerp(weight[:, low], weight[:, high], (source - low)[..., None].to(weight.dtype))
    return rows.transpose(0, 1), stretch[..., None, None]


def _check_mask(tokens: Tensor, mask: Tensor | None) -> None:
    expected = (tokens.shape[0], tokens.shape[2])
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != expected):
        raise ValueError(
            f"key_padding_mask: expected bool [B, S] = {list(expected)}; got {mask.dtype} {list(mask.shape)}"
        )


def _fold(tokens: Tensor, shared: tuple[int, int]) -> Tensor:
    """Return `[R, S, X]`: one block for each distinct matrix, and in its columns every (batch, head, D) that uses it.

    Args:
        tokens: `[B, G, S, D]`.
        shared: the first two sizes of the matrix, each 1 or the size of `tokens`.
    """
    batch_size, groups, length, head_dim = tokens.shape
    rows, heads = shared
    split = tokens.reshape(rows, batch_size // rows, heads, groups // heads, length, head_dim)
    return split.permute(0, 2, 4, 1, 3, 5).reshape(rows * heads, length, -1)


def _unfold(folded: Tensor, shared: tuple[int, int], batch_size: int, groups: int) -> Tensor:
    """Undo `_fold`: a view `[B, G, S, D]` or a copy."""
    rows, heads = shared
    split = folded.reshape(rows, heads, folded.shape[1], batch_size // rows, groups // heads, -1)
    return split.permute(0, 3, 1, 4, 2, 5).reshape(batch_size, groups, folded.shape[1], -1)


def _clean(tokens: Tensor, mask: Tensor | None) -> Tensor:
    # Not a product: zero times the NaN or infinity that padding may hold is NaN.
    return tokens if mask is None else tokens.masked_fill(mask[:, None, :, None], 0.0)


def _spans(tokens: Tensor) -> list[slice]:
    """Return the positions to work on at a time: cache-sized on a CPU, all at once on a GPU."""
    length = tokens.shape[2]
    step = length if tokens.is_cuda else CPU_CHUNK
    return [slice(start, min(start + step, length)) for start in range(0, length, max(step, 1))]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _split_k(matrix: Tensor, tokens: Tensor) -> Tensor:
    """Return the wide `[R, k, X]` product of `[R, S, k]` transposed and `[R, S, X]`, as one batch of chunks."""
    count, length, rank = matrix.shape
    tiles = count * -(-rank // GPU_TILE_SIDE) * -(-tokens.shape[2] // GPU_TILE_SIDE)
    num_chunks = max(1, min(GPU_TILES // tiles, length // GPU_MIN_CHUNK))
    width = -(-length // num_chunks)
    extra = num_chunks * width - length
    left, right = (pad(x, (0, 0, 0, extra)) if extra else x for x in (matrix, tokens))
    left = left.reshape(count * num_chunks, width, rank).mT
    right = right.reshape(count * num_chunks, width, -1)
    if tokens.dtype == _wide(tokens.dtype):
        partial = torch.bmm(left, right)
    else:
        partial = torch.bmm(left, right, out_dtype=torch.float32)
    total: Tensor = partial.unflatten(0, (count, num_chunks)).sum(dim=1)
    return total


class _Compress(torch.autograd.Function):
    """The learned compression. Keeps its inputs for the backward pass and nothing else."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, matrix: Tensor, mask: Tensor | None) -> Tensor:
        shared = (matrix.shape[0], matrix.shape[1])
        batch_size, groups, _, head_dim = tokens.shape
        rank, wide = matrix.shape[3], _wide(tokens.dtype)
        flat = matrix.flatten(0, 1)  # [R, S, k]
        columns = batch_size * groups * head_dim // flat.shape[0]
        with torch.autocast(tokens.device.type, enabled=False):  # it would narrow the wide sums again
            total = tokens.new_zeros((flat.shape[0], rank, columns), dtype=wide)
            for span in _spans(tokens):
                chunk = _fold(_clean(tokens[:, :, span], None if mask is None else mask[:, span]), shared)
                if tokens.is_cuda:
                    total = _split_k(flat[:, span], chunk)
                else:
                    total += torch.bmm(flat[:, span].to(wide).mT, chunk.to(wide))  # baddbmm_ escapes FLOP counters
        ctx.save_for_backward(tokens, matrix, mask)
        return _unfold(total.to(tokens.dtype), shared, batch_size, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        tokens, matrix, mask = ctx.saved_tensors
        needs_tokens, needs_matrix, _ = ctx.needs_input_grad
        shared = (matrix.shape[0], matrix.shape[1])
        flat = matrix.flatten(0, 1)  # [R, S, k]
        # The sums here are short (k, and the columns): the products' own accumulators are wide enough on a GPU, while
        # half precision on a CPU is either slow or of unknown accumulation.
        wide = tokens.dtype if tokens.is_cuda else _wide(tokens.dtype)
        with torch.autocast(tokens.device.type, enabled=False):
            folded = _fold(grad, shared).to(wide)  # [R, k, X]
            grad_tokens = torch.empty_like(tokens) if needs_tokens else None
            grad_flat = torch.empty_like(flat) if needs_matrix else None
            for span in _spans(tokens):
                chunk_mask = None if mask is None else mask[:, span]
                if grad_tokens is not None:
                    part = _unfold(flat[:, span].to(wide) @ folded, shared, *tokens.shape[:2])
                    grad_tokens[:, :, span] = _clean(part, chunk_mask)
                if grad_flat is not None:
                    chunk = _fold(_clean(tokens[:, :, span], chunk_mask), shared)
                    grad_flat[:, span] = chunk.to(wide) @ folded.mT
        return grad_tokens, None if grad_flat is None else grad_flat.view_as(matrix), None
