"""The compression as matrix products of torch: chunk by chunk on a CPU, as one batch of chunks (split-K) on a GPU.

Heads that share a matrix are folded into the columns of one product, which is faster than a thin product for each head.
Sums over positions are wide (float32 at least), and chunks are added in a fixed order. Padded positions are blanked in
the copy of a chunk, so on a CPU nothing as long as the sequence is made beyond the results.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

CPU_CHUNK = 1024  # positions whose copy stays in the cache; 256 to 2048 measured alike
SMALL = 1 << 16  # numbers in the gradient of a matrix before it is summed over sequences and heads, B G S k
GPU_TILES = 264  # two tiles for each of 132 multiprocessors
GPU_TILE_SIDE = 128
GPU_MIN_CHUNK = 256


class CompressCall(NamedTuple):
    """One or two sources of tokens (keys and values), one or two matrices; what stands alone goes with both others.

    Args:
        tokens: each `[B, G, S, D]`, alike in shape, strides and dtype.
        matrices: each `[B or 1, G or 1, S, k]`, alike likewise; a 1 is shared along that dimension. Triton's kernels
            and `multiply` also take `[G or 1, N, k]`, shared by all sequences, of which the first S rows serve.
        mask: bool `[B, S]`, True = left out, or None.
        kind: the same for calls that are cut alike by the same kernels; None, and it is found where it is needed.
    """

    tokens: tuple[Tensor, ...]
    matrices: tuple[Tensor, ...]
    mask: Tensor | None
    kind: Hashable = None

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Which tokens meet which matrix: one pair for each result."""
        count = max(len(self.tokens), len(self.matrices))
        return [(self.tokens[i % len(self.tokens)], self.matrices[i % len(self.matrices)]) for i in range(count)]


def compress(call: CompressCall) -> list[Tensor]:
    """Return matrix^T tokens of each pair, `[B, G, k, D]`."""
    with _without_autocast(call):
        return [_sum(tokens, matrix, call.mask) for tokens, matrix in call.pairs]


def multiply(tokens: Tensor, matrix: Tensor, mask: Tensor | None) -> Tensor:
    """Return matrix^T tokens by one product, whose gradients are torch's own: a third of the calls.

    The gradient of a shared matrix is first made for every sequence and head, so this is for few numbers.
    """
    batch_size, groups, length, head_dim = tokens.shape
    tokens = _clean(tokens, mask, slice(0, length))
    if matrix.shape[-2] != length:
        matrix = matrix[..., :length, :]
    if matrix.dim() == 3 and matrix.shape[0] == 1:  # as `matmul` has it too, of which autograd has more to undo
        alike = matrix.mT.expand(batch_size * groups, -1, -1)
        return torch.bmm(alike, tokens.flatten(0, 1)).view(batch_size, groups, matrix.shape[-1], head_dim)
    return matrix.mT @ tokens


def gradients(call: CompressCall, grads: Sequence[Tensor], *, of_tokens: bool, of_matrices: bool) -> list[Tensor]:
    """Return the gradients that are wanted: those of the tokens, in their layout, zero in padding; of the matrices."""
    with _without_autocast(call):
        return [
            *(_grad_tokens(call, grads) if of_tokens else ()),
            *(_grad_matrices(call, grads) if of_matrices else ()),
        ]


def _without_autocast(call: CompressCall) -> AbstractContextManager[Any]:
    """Keep autocast from narrowing the wide sums again."""
    device = call.tokens[0].device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _grad_tokens(call: CompressCall, grads: Sequence[Tensor]) -> list[Tensor]:
    results = [torch.empty_like(x) for x in call.tokens]
    for index, (grad, (source, matrix)) in enumerate(zip(grads, call.pairs, strict=True)):
        folded = _fold(grad, _shared(matrix)).to(_short_sum(source))  # [R, k, X]
        flat, into = matrix.flatten(0, 1), results[index % len(results)]
        spans = _spans(source)
        buffer = folded.new_empty(flat.shape[0], spans[0].stop if spans else 0, folded.shape[2])
        for span in spans:
            part = buffer[:, : span.stop - span.start]  # of one chunk and the next: it stays in the cache
            torch.bmm(flat[:, span].to(folded.dtype), folded, out=part)
            piece = _clean(_unfold(part, _shared(matrix), *source.shape[:2]), call.mask, span)
            if index < len(results):
                into[:, :, span] = piece
            else:
                into[:, :, span] += piece
    return results


def _grad_matrices(call: CompressCall, grads: Sequence[Tensor]) -> list[Tensor]:
    results = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in call.matrices]
    for index, (grad, (source, matrix)) in enumerate(zip(grads, call.pairs, strict=True)):
        folded = _fold(grad, _shared(matrix)).to(_short_sum(source)).mT  # [R, X, k]
        into = results[index % len(results)].flatten(0, 1)  # [R, S, k]
        for span in _spans(source):
            chunk = _fold(_clean(source[:, :, span], call.mask, span), _shared(matrix)).to(folded.dtype)
            if index >= len(results):
                into[:, span] += torch.bmm(chunk, folded)
            elif into.dtype == folded.dtype:
                torch.bmm(chunk, folded, out=into[:, span])
            else:
                into[:, span] = torch.bmm(chunk, folded)
    return results


def _sum(tokens: Tensor, matrix: Tensor, mask: Tensor | None) -> Tensor:
    """Return `[B, G, k, D]`, wide while it is summed."""
    shared, wide = _shared(matrix), _wide(tokens.dtype)
    batch_size, groups, length, head_dim = tokens.shape
    flat = matrix.flatten(0, 1)  # [R, S, k]
    if tokens.is_cuda:
        total = _split_k(flat, _fold(_clean(tokens, mask, slice(0, length)), shared))
    elif length <= CPU_CHUNK:
        chunk = _fold(_clean(tokens, mask, slice(0, length)), shared)
        total = torch.bmm(flat.to(wide).mT, chunk.to(wide))
    else:
        columns = batch_size * groups * head_dim // flat.shape[0]
        total = tokens.new_zeros((flat.shape[0], matrix.shape[3], columns), dtype=wide)
        for span in _spans(tokens):
            chunk = _fold(_clean(tokens[:, :, span], mask, span), shared)
            total += torch.bmm(flat[:, span].to(wide).mT, chunk.to(wide))  # baddbmm_ escapes FLOP counters
    return _unfold(total.to(tokens.dtype), shared, batch_size, groups)


def _shared(matrix: Tensor) -> tuple[int, int]:
    return matrix.shape[0], matrix.shape[1]


def _fold(tokens: Tensor, shared: tuple[int, int]) -> Tensor:
    """Return `[R, S, X]`: one block for each distinct matrix, and in its columns every (batch, head, D) that uses it.

    Args:
        tokens: `[B, G, S, D]`.
        shared: the first two sizes of the matrix, each 1 or the size of `tokens`.
    """
    batch_size, groups, length, head_dim = tokens.shape
    if shared == (1, 1):  # as below, with fewer views: the host's time at short lengths
        return tokens.permute(2, 0, 1, 3).reshape(1, length, -1)
    rows, heads = shared
    split = tokens.reshape(rows, batch_size // rows, heads, groups // heads, length, head_dim)
    return split.permute(0, 2, 4, 1, 3, 5).reshape(rows * heads, length, -1)


def _unfold(folded: Tensor, shared: tuple[int, int], batch_size: int, groups: int) -> Tensor:
    """Undo `_fold`: a view `[B, G, S, D]` or a copy."""
    rows, heads = shared
    split = folded.reshape(rows, heads, folded.shape[1], batch_size // rows, groups // heads, -1)
    return split.permute(0, 3, 1, 4, 2, 5).reshape(batch_size, groups, folded.shape[1], -1)


def _clean(tokens: Tensor, mask: Tensor | None, span: slice) -> Tensor:
    # Not a product: zero times the NaN or infinity that padding may hold is NaN.
    return tokens if mask is None else tokens.masked_fill(mask[:, None, span, None], 0.0)


def _spans(tokens: Tensor) -> list[slice]:
    """Return the positions to work on at a time: cache-sized on a CPU, all at once on a GPU."""
    length = tokens.shape[2]
    step = length if tokens.is_cuda else CPU_CHUNK
    return [slice(start, min(start + step, length)) for start in range(0, length, max(step, 1))]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _short_sum(tokens: Tensor) -> torch.dtype:
    """Return the dtype for sums over k or over columns: a GPU's own accumulators are wide enough for those.

    Half precision on a CPU is either slow or of unknown accumulation.
    """
    return tokens.dtype if tokens.is_cuda else _wide(tokens.dtype)


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
