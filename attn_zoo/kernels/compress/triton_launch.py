"""Launches of the compression's Triton kernels. How they are cut is worked out once for each set of sizes.

Under torch's compiler they are operators that it takes whole: `torch.ops.attn_zoo.compress` and its two gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_zoo.kernels.compress import triton_kernels as kernels
from attn_zoo.kernels.compress.products import CompressCall
from attn_zoo.kernels.compress.triton_tiles import (
    HOPPER_PROCESSORS,
    HOPPER_SHARED_BYTES,
    Tiles,
    forward_tiles,
    matrix_tiles,
    num_splits,
    token_tiles,
)

ADD_ROWS, ADD_BLOCK = 8, 256


class _Sizes(NamedTuple):
    """What decides how a call is cut: sizes of the call, and of the device."""

    batch_size: int
    groups: int
    length: int
    head_dim: int
    matrix_batches: int  # B, or 1 where sequences share a matrix
    blocks: int  # G, or 1 where heads share a matrix: blocks of heads that do
    rank: int
    num_tokens: int
    num_matrices: int
    item_bytes: int
    slots: int  # multiprocessors
    shared_bytes: int  # shared memory of each

    @property
    def heads(self) -> int:
        """Heads that share a matrix."""
        return self.groups // self.blocks

    @property
    def num_results(self) -> int:
        """Pairs of tokens and a matrix."""
        return max(self.num_tokens, self.num_matrices)

    @property
    def result_size(self) -> int:
        """Numbers in one result."""
        return self.batch_size * self.groups * self.rank * self.head_dim

    @property
    def sizing(self) -> tuple[int, int, int, int]:
        """Arguments of the tile rules."""
        return self.rank, self.heads * self.head_dim, self.item_bytes, self.shared_bytes


class _Cut(NamedTuple):
    """How one launch is cut."""

    grid: tuple[int, int, int]
    width: int  # positions of one program, or 0 where it has one tile of them
    options: dict[str, Any]  # what the kernel is compiled for


@lru_cache
def _device(device: torch.device) -> tuple[int, int]:
    """Return multiprocessors and shared memory of a device, those of an H200 in Triton's interpreter."""
    if device.type != "cuda":
        return HOPPER_PROCESSORS, HOPPER_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def _sizes(call: CompressCall) -> _Sizes:
    first, matrix = call.tokens[0], call.matrices[0]
    batch_size, groups, length, head_dim = first.shape
    return _Sizes(
        batch_size,
        groups,
        length,
        head_dim,
        matrix.shape[0],
        matrix.shape[1],
        matrix.shape[3],
        len(call.tokens),
        len(call.matrices),
        first.element_size(),
        *_device(first.device),
    )


def _split(sizes: _Sizes, programs: int, tiles: Tiles) -> tuple[int, int]:
    """Return into how many parts the positions are split, and the positions of each, in whole tiles."""
    count = num_splits(programs, sizes.length, sizes.slots * tiles.residents)
    width = -(-sizes.length // (count * tiles.positions)) * tiles.positions
    return -(-sizes.length // width), width


def _options(sizes: _Sizes, tiles: Tiles, **more: Any) -> dict[str, Any]:
    return {"dim": sizes.head_dim, "heads": sizes.heads, **more, **tiles.options}


@lru_cache(maxsize=1024)
def _cut_sum(sizes: _Sizes) -> _Cut:
    tiles = forward_tiles(*sizes.sizing)
    columns = sizes.heads * sizes.head_dim
    count = sizes.batch_size * sizes.blocks * -(-columns // tiles.columns) * -(-sizes.rank // tiles.rank)
    splits, width = _split(sizes, count * sizes.num_results, tiles)
    return _Cut((count, splits, sizes.num_results), width, _options(sizes, tiles))


@lru_cache(maxsize=1024)
def _cut_grad_tokens(sizes: _Sizes) -> _Cut:
    is_summed = sizes.num_tokens < sizes.num_matrices
    tiles = token_tiles(*sizes.sizing, is_summed=is_summed)
    count = sizes.batch_size * sizes.blocks * -(-sizes.heads * sizes.head_dim // tiles.columns)
    splits, width = _split(sizes, count * sizes.num_tokens, tiles)
    options = _options(
        sizes,
        tiles,
        num_summed=sizes.num_results // sizes.num_tokens,
        is_held=sizes.rank <= tiles.rank and not is_summed,
    )
    return _Cut((count, splits, sizes.num_tokens), width, options)


@lru_cache(maxsize=1024)
def _cut_grad_matrices(sizes: _Sizes) -> _Cut:
    tiles = matrix_tiles(*sizes.sizing)
    count = -(-sizes.length // tiles.positions) * -(-sizes.rank // tiles.rank)
    options = _options(sizes, tiles, num_summed=sizes.num_results // sizes.num_matrices)
    return _Cut((count, sizes.matrix_batches * sizes.blocks, sizes.num_matrices), 0, options)


def _mask(call: CompressCall) -> Tensor:
    """Return the mask as bytes, or something else to point at."""
    return call.tokens[0] if call.mask is None else call.mask.contiguous().view(torch.uint8)


def _matrix_strides(matrix: Tensor) -> tuple[int, ...]:
    """Return the strides; a matrix that is shared along a dimension does not move along it."""
    batches, blocks, *rest = matrix.stride()
    return 0 if matrix.shape[0] == 1 else batches, 0 if matrix.shape[1] == 1 else blocks, *rest


def _pair(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return tensors[0], tensors[-1]


def _compress(call: CompressCall, _: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return matrix^T tokens of each pair, `[B, G, k, D]`."""
    tokens, sizes = call.tokens, _sizes(call)
    cut, size = _cut_sum(sizes), sizes.result_size
    splits, count = cut.grid[1], sizes.num_results
    out = [tokens[0].new_empty(sizes.batch_size, sizes.groups, sizes.rank, sizes.head_dim) for _ in range(count)]
    sums, stride = out, 0
    if splits > 1:
        stride = count * size
        partial = out[0].new_empty(splits * stride, dtype=torch.float32)
        sums = [partial, partial[size:]] if count == 2 else [partial]
    with torch.cuda.device_of(tokens[0]):
        kernels.sum_positions[cut.grid](
            *_pair(tokens), *_pair(call.matrices), _mask(call), *_pair(sums),
            *tokens[0].stride(), *_matrix_strides(call.matrices[0]),
            sizes.blocks, sizes.length, cut.width, sizes.rank, stride,
            **cut.options, has_mask=call.mask is not None,
        )  # fmt: skip
        if splits > 1:
            kernels.add_splits[(-(-size // ADD_BLOCK), count)](
                *_pair(sums), *_pair(out), size, splits, stride,
                num_rows=ADD_ROWS, block_size=ADD_BLOCK, num_warps=4,
            )  # fmt: skip
    return out


def _grad_tokens(call: CompressCall, grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the tokens, in their layout, zero in padding."""
    sizes = _sizes(call)
    cut = _cut_grad_tokens(sizes)
    out = [torch.empty_like(x) for x in call.tokens]
    with torch.cuda.device_of(out[0]):
        kernels.grad_tokens[cut.grid](
            *_pair([x.contiguous() for x in grads]), *_pair(call.matrices), _mask(call), *_pair(out),
            *out[0].stride(), *_matrix_strides(call.matrices[0]),
            sizes.blocks, sizes.length, cut.width, sizes.rank,
            **cut.options, has_mask=call.mask is not None,
        )  # fmt: skip
    return out


def _grad_matrices(call: CompressCall, grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the matrices."""
    sizes = _sizes(call)
    cut = _cut_grad_matrices(sizes)
    out = [torch.empty_like(x) for x in call.matrices]
    with torch.cuda.device_of(out[0]):
        kernels.grad_matrix[cut.grid](
            *_pair(call.tokens), *_pair([x.contiguous() for x in grads]), _mask(call), *_pair(out),
            *call.tokens[0].stride(), *out[0].stride(),
            sizes.blocks, sizes.batch_size // sizes.matrix_batches, sizes.length, sizes.rank,
            **cut.options, has_mask=call.mask is not None,
        )  # fmt: skip
    return out


_Tensors = list[Tensor]
_library = torch.library.Library("attn_zoo", "FRAGMENT")


def _traceable(
    name: str, function: Callable[[CompressCall, Sequence[Tensor]], _Tensors], fake: Callable[..., _Tensors]
) -> Callable[..., _Tensors]:
    """Return `function`, which under torch's compiler is the operator `attn_zoo::name` that it takes whole.

    Args:
        name: of the operator.
        function: of a call and the gradients of its results, of which a forward has none.
        fake: makes results of the right sizes from the operator's arguments.
    """
    _library.define(f"{name}(Tensor[] tokens, Tensor[] matrices, Tensor? mask, Tensor[] grads) -> Tensor[]")

    def implementation(tokens: _Tensors, matrices: _Tensors, mask: Tensor | None, grads: _Tensors) -> _Tensors:
        return function(CompressCall(tuple(tokens), tuple(matrices), mask), grads)

    for key in ("CUDA", "CPU"):  # on a CPU Triton's interpreter
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"attn_zoo::{name}", fake, lib=_library)
    operator = getattr(torch.ops.attn_zoo, name)

    def run(call: CompressCall, grads: Sequence[Tensor] = ()) -> _Tensors:
        if torch.compiler.is_compiling():
            results: _Tensors = operator(list(call.tokens), list(call.matrices), call.mask, list(grads))
            return results
        return function(call, grads)

    run.__doc__ = function.__doc__
    return run


def _fake_results(tokens: _Tensors, matrices: _Tensors, mask: Any, grads: Any) -> _Tensors:  # noqa: ARG001
    batch_size, groups, _, head_dim = tokens[0].shape
    count = max(len(tokens), len(matrices))
    return [tokens[0].new_empty(batch_size, groups, matrices[0].shape[3], head_dim) for _ in range(count)]


def _fake_grad_tokens(tokens: _Tensors, matrices: Any, mask: Any, grads: Any) -> _Tensors:  # noqa: ARG001
    return [torch.empty_like(x) for x in tokens]


def _fake_grad_matrices(tokens: Any, matrices: _Tensors, mask: Any, grads: Any) -> _Tensors:  # noqa: ARG001
    return [torch.empty_like(x) for x in matrices]


compress = _traceable("compress", _compress, _fake_results)
grad_tokens = _traceable("compress_grad_tokens", _grad_tokens, _fake_grad_tokens)
grad_matrices = _traceable("compress_grad_matrices", _grad_matrices, _fake_grad_matrices)
