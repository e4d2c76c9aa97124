"""Launches of the compression's Triton kernels, as operators that torch's compiler takes whole.

`torch.ops.attn_zoo.compress` and its two gradients. One or two tokens of equal shape and strides (keys and values) meet
one or two matrices of equal shape and strides; one that stands alone is used with both of the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_zoo.kernels.compress import triton_kernels as kernels
from attn_zoo.kernels.compress.triton_tiles import (
    HOPPER_PROCESSORS,
    HOPPER_SHARED_BYTES,
    Tiles,
    forward_tiles,
    matrix_tiles,
    num_splits,
    token_tiles,
)

__all__ = ["compress", "grad_matrices", "grad_tokens"]

ADD_ROWS, ADD_BLOCK = 8, 256

LIBRARY = torch.library.Library("attn_zoo", "FRAGMENT")
LIBRARY.define("compress(Tensor[] tokens, Tensor[] matrices, Tensor? mask) -> Tensor[]")
LIBRARY.define("compress_grad_tokens(Tensor[] grads, Tensor[] tokens, Tensor[] matrices, Tensor? mask) -> Tensor[]")
LIBRARY.define("compress_grad_matrices(Tensor[] grads, Tensor[] tokens, Tensor[] matrices, Tensor? mask) -> Tensor[]")


def _device(tokens: Tensor) -> tuple[int, int]:
    """Return multiprocessors and shared memory of the device, those of an H200 in Triton's interpreter."""
    if not tokens.is_cuda:
        return HOPPER_PROCESSORS, HOPPER_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(tokens.device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


class _Call:
    """What the launches have in common: sizes, strides and flags of one set of sources."""

    def __init__(self, tokens: list[Tensor], matrices: list[Tensor], mask: Tensor | None) -> None:
        first, matrix = tokens[0], matrices[0]
        self.batch_size, self.groups, self.length, self.head_dim = first.shape
        self.rank = matrix.shape[3]
        self.matrix_batches, self.blocks = matrix.shape[:2]
        self.heads = self.groups // self.blocks
        self.columns = self.heads * self.head_dim  # of one program's sequence and matrix
        self.size = self.batch_size * self.groups * self.rank * self.head_dim
        self.sources = max(len(tokens), len(matrices))
        self.slots, self.shared_bytes = _device(first)
        self.sizing = (self.rank, self.columns, first.element_size(), self.shared_bytes)
        # A matrix shared along a dimension does not move along it.
        shared = [0 if size == 1 else stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True)]
        self.matrix_strides = (*shared[:2], *matrix.stride()[2:])
        self.mask = first if mask is None else mask.contiguous().view(torch.uint8)  # something to point at
        self.flags = {
            "dim": self.head_dim,
            "heads": self.heads,
            "has_mask": mask is not None,
        }

    def splits(self, programs: int, tiles: Tiles) -> tuple[int, int]:
        """Return into how many parts the positions are split, and the positions of each, in whole tiles."""
        count = num_splits(programs, self.length, self.slots * tiles.residents)
        width = -(-self.length // (count * tiles.positions)) * tiles.positions
        return -(-self.length // width), width


def _pair(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    return tensors[0], tensors[-1]


def _compress(tokens: list[Tensor], matrices: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    call = _Call(tokens, matrices, mask)
    out = _compress_fake(tokens, matrices, mask)
    tiles = forward_tiles(*call.sizing)
    count = call.batch_size * call.blocks * -(-call.columns // tiles.columns) * -(-call.rank // tiles.rank)
    splits, width = call.splits(count * call.sources, tiles)
    sums, stride = out, 0
    if splits > 1:
        stride = call.sources * call.size
        partial = out[0].new_empty(splits * stride, dtype=torch.float32)
        sums = [partial, partial[call.size :]] if call.sources == 2 else [partial]
    with torch.cuda.device_of(tokens[0]):
        kernels.sum_positions[(count, splits, call.sources)](
            *_pair(tokens), *_pair(matrices), call.mask, *_pair(sums), *tokens[0].stride(), *call.matrix_strides,
            call.blocks, call.length, width, call.rank, stride,
            **call.flags, **tiles.options,
        )  # fmt: skip
        if splits > 1:
            kernels.add_splits[(-(-call.size // ADD_BLOCK), call.sources)](
                *_pair(sums), *_pair(out), call.size, splits, stride,
                num_rows=ADD_ROWS, block_size=ADD_BLOCK, num_warps=4,
            )  # fmt: skip
    return out


def _grad_tokens(
    grads: list[Tensor], tokens: list[Tensor], matrices: list[Tensor], mask: Tensor | None
) -> list[Tensor]:
    call = _Call(tokens, matrices, mask)
    out = [torch.empty_like(x) for x in tokens]
    is_summed = len(tokens) < len(matrices)
    tiles = token_tiles(*call.sizing, is_summed=is_summed)
    count = call.batch_size * call.blocks * -(-call.columns // tiles.columns)
    splits, width = call.splits(count * len(tokens), tiles)
    with torch.cuda.device_of(tokens[0]):
        kernels.grad_tokens[(count, splits, len(tokens))](
            *_pair([x.contiguous() for x in grads]), *_pair(matrices), call.mask, *_pair(out),
            *out[0].stride(), *call.matrix_strides, call.blocks, call.length, width, call.rank,
            **call.flags, num_summed=call.sources // len(tokens),
            is_held=call.rank <= tiles.rank and not is_summed,
            **tiles.options,
        )  # fmt: skip
    return out


def _grad_matrices(
    grads: list[Tensor], tokens: list[Tensor], matrices: list[Tensor], mask: Tensor | None
) -> list[Tensor]:
    call = _Call(tokens, matrices, mask)
    out = [torch.empty_like(x) for x in matrices]
    tiles = matrix_tiles(*call.sizing)
    count = -(-call.length // tiles.positions) * -(-call.rank // tiles.rank)
    with torch.cuda.device_of(tokens[0]):
        kernels.grad_matrix[(count, call.matrix_batches * call.blocks, len(matrices))](
            *_pair(tokens), *_pair([x.contiguous() for x in grads]), call.mask, *_pair(out),
            *tokens[0].stride(), *out[0].stride(), call.blocks, call.batch_size // call.matrix_batches,
            call.length, call.rank, **call.flags, num_summed=call.sources // len(matrices),
            **tiles.options,
        )  # fmt: skip
    return out


def _compress_fake(tokens: list[Tensor], matrices: list[Tensor], mask: Tensor | None) -> list[Tensor]:  # noqa: ARG001
    rank = matrices[0].shape[3]
    batch_size, groups, _, head_dim = tokens[0].shape
    count = max(len(tokens), len(matrices))
    return [tokens[0].new_empty(batch_size, groups, rank, head_dim) for _ in range(count)]


def _grad_tokens_fake(grads: Any, tokens: list[Tensor], matrices: Any, mask: Any) -> list[Tensor]:  # noqa: ARG001
    return [torch.empty_like(x) for x in tokens]


def _grad_matrices_fake(grads: Any, tokens: Any, matrices: list[Tensor], mask: Any) -> list[Tensor]:  # noqa: ARG001
    return [torch.empty_like(x) for x in matrices]


for name, implementation, fake in (
    ("compress", _compress, _compress_fake),
    ("compress_grad_tokens", _grad_tokens, _grad_tokens_fake),
    ("compress_grad_matrices", _grad_matrices, _grad_matrices_fake),
):
    for key in ("CUDA", "CPU"):  # on a CPU Triton's interpreter
        LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"attn_zoo::{name}", fake, lib=LIBRARY)

compress: Any = torch.ops.attn_zoo.compress
grad_tokens: Any = torch.ops.attn_zoo.compress_grad_tokens
grad_matrices: Any = torch.ops.attn_zoo.compress_grad_matrices
