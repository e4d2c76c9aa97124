"""Launches of the compression's Triton kernels. How they are cut is worked out once for each set of sizes.

Under torch's compiler they are operators that it takes whole: `torch.ops.attn_zoo.compress` and its two gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_zoo.kernels.cached_launch import CachedLaunch, kind_of, on_device_of, remembered
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
    rows: int  # of a matrix, `length` or more
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

    @property
    def common(self) -> dict[str, int]:
        """Arguments of all three kernels."""
        sizes = {"blocks": self.blocks, "length": self.length, "rank": self.rank}
        return {**sizes, "dim": self.head_dim, "heads": self.heads}


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
    blocks, rows, rank = matrix.shape[-3:]
    return _Sizes(
        batch_size,
        groups,
        length,
        head_dim,
        matrix.shape[0] if matrix.dim() == 4 else 1,
        blocks,
        rows,
        rank,
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


def _mask(call: CompressCall) -> Tensor:
    """Return the mask as bytes, or something else to point at."""
    return call.tokens[0] if call.mask is None else call.mask.contiguous().view(torch.uint8)


def _kind(call: CompressCall, *grads: Tensor) -> Hashable:
    if call.kind is not None:
        return call.kind, kind_of(*grads)
    tensors = *call.tokens, *call.matrices, call.mask, *grads
    return len(call.tokens), len(call.matrices), kind_of(*tensors)


def _strides(name: str, letters: str, tensor: Tensor) -> dict[str, int]:
    """Return the first strides of a tensor as a kernel takes them: `name` and a letter for each."""
    return {f"{name}_{letter}": stride for letter, stride in zip(letters, tensor.stride(), strict=False)}


def _matrix_strides(matrix: Tensor) -> dict[str, int]:
    """Return the strides; a matrix that is shared along a dimension does not move along it."""
    batched = matrix if matrix.dim() == 4 else matrix[None]
    shared = {name: 0 for name, size in zip(("matrix_n", "matrix_g"), batched.shape[:2], strict=True) if size == 1}
    return _strides("matrix", "ngsk", batched) | shared


class _Forward(NamedTuple):
    """What a call launches, and the sizes of what it allocates."""

    sum_positions: CachedLaunch
    add_splits: CachedLaunch | None  # where the positions are split
    num_partial: int
    shape: tuple[int, int, int, int]  # of one result
    num_results: int


def _cut_forward(call: CompressCall) -> _Forward:
    sizes = _sizes(call)
    count, size = sizes.num_results, sizes.result_size
    tiles = forward_tiles(*sizes.sizing)
    columns = sizes.heads * sizes.head_dim
    programs = sizes.batch_size * sizes.blocks * -(-columns // tiles.columns) * -(-sizes.rank // tiles.rank)
    splits, width = _split(sizes, programs * count, tiles)
    is_split = splits > 1
    rest = {
        **_strides("token", "ngsd", call.tokens[0]),
        **_matrix_strides(call.matrices[0]),
        **sizes.common,
        "width": width,
        "sums_split": count * size if is_split else 0,
        "sums_source": size if is_split else 0,
        "has_mask": call.mask is not None,
        **tiles.options,
    }
    sum_positions = CachedLaunch(kernels.sum_positions, (programs, splits, count), rest)
    add_splits = None
    if is_split:
        rest = {"size": size, "splits": splits, "sums_split": count * size}
        rest |= {"num_rows": ADD_ROWS, "block_size": ADD_BLOCK, "num_warps": 4}
        add_splits = CachedLaunch(kernels.add_splits, (-(-size // ADD_BLOCK), count), rest)
    shape = sizes.batch_size, sizes.groups, sizes.rank, sizes.head_dim
    return _Forward(sum_positions, add_splits, splits * count * size if is_split else 0, shape, count)


def _compress(call: CompressCall) -> list[Tensor]:
    tokens = call.tokens[0]
    launches = remembered(_forwards, _kind(call), lambda: _cut_forward(call))
    out = [tokens.new_empty(launches.shape) for _ in range(launches.num_results)]
    inputs = tokens, call.tokens[-1], call.matrices[0], call.matrices[-1], _mask(call)
    with on_device_of(tokens):
        if launches.add_splits is None:
            launches.sum_positions(*inputs, out[0], out[-1])
        else:
            sums = tokens.new_empty(launches.num_partial, dtype=torch.float32)
            launches.sum_positions(*inputs, sums, sums)
            launches.add_splits(sums, out[0], out[-1])
    return out


class _Backward(NamedTuple):
    """What a backward pass launches."""

    grad_tokens: CachedLaunch
    grad_matrix: CachedLaunch
    has_copies: bool  # gradients are read from contiguous copies


def _cut_backward(call: CompressCall, grads: Sequence[Tensor]) -> _Backward:
    sizes = _sizes(call)
    has_copies = not _are_read_in_place(grads)
    common = {
        **sizes.common,
        **_strides("grad", "ngk", grads[0].contiguous() if has_copies else grads[0]),
        "has_mask": call.mask is not None,
    }

    is_summed = sizes.num_tokens < sizes.num_matrices
    tiles = token_tiles(*sizes.sizing, is_summed=is_summed)
    count = sizes.batch_size * sizes.blocks * -(-sizes.heads * sizes.head_dim // tiles.columns)
    splits, width = _split(sizes, count * sizes.num_tokens, tiles)
    rest = {
        **_strides("token", "ngsd", torch.empty_like(call.tokens[0], device="meta")),
        **_matrix_strides(call.matrices[0]),
        **common,
        "width": width,
        "num_summed": sizes.num_results // sizes.num_tokens,
        "is_held": sizes.rank <= tiles.rank and not is_summed,
        **tiles.options,
    }
    grad_tokens = CachedLaunch(kernels.grad_tokens, (count, splits, sizes.num_tokens), rest)

    tiles = matrix_tiles(*sizes.sizing)
    count = -(-sizes.rows // tiles.positions) * -(-sizes.rank // tiles.rank)
    rest = {
        **_strides("token", "ngsd", call.tokens[0]),
        **_matrix_strides(torch.empty_like(call.matrices[0], device="meta")),
        **common,
        "rows": sizes.rows,
        "batches": sizes.batch_size // sizes.matrix_batches,
        "num_summed": sizes.num_results // sizes.num_matrices,
        **tiles.options,
    }
    grid = count, sizes.matrix_batches * sizes.blocks, sizes.num_matrices
    return _Backward(grad_tokens, CachedLaunch(kernels.grad_matrix, grid, rest), has_copies)


def _are_read_in_place(grads: Sequence[Tensor]) -> bool:
    """Tell whether the kernels can read gradients where they lie: alike, channels side by side, offsets in 32 bits."""
    first, last = grads[0], grads[-1]
    _, *strides = first.stride()
    extent = sum((size - 1) * stride for size, stride in zip(first.shape[1:], strides, strict=True))
    return first.stride() == last.stride() and strides[-1] == 1 and extent < 2**31


def _gradients(call: CompressCall, grads: Sequence[Tensor], *, of_tokens: bool, of_matrices: bool) -> list[Tensor]:
    launches = remembered(_backwards, _kind(call, *grads), lambda: _cut_backward(call, grads))
    if launches.has_copies:
        grads = [x.contiguous() for x in grads]
    tokens, matrices, mask = call.tokens, call.matrices, _mask(call)
    results: list[Tensor] = []
    with on_device_of(mask):
        if of_tokens:
            out = [torch.empty_like(x) for x in tokens]
            launches.grad_tokens(grads[0], grads[-1], matrices[0], matrices[-1], mask, out[0], out[-1])
            results += out
        if of_matrices:
            out = [torch.empty_like(x) for x in matrices]
            launches.grad_matrix(tokens[0], tokens[-1], grads[0], grads[-1], mask, out[0], out[-1])
            results += out
    return results


_forwards: dict[Hashable, _Forward] = {}
_backwards: dict[Hashable, _Backward] = {}


# --- the same as operators, which torch's compiler takes whole ---

_Tensors = list[Tensor]
_library = torch.library.Library("attn_zoo", "FRAGMENT")


def _define(name: str, schema: str, implementation: Callable[..., _Tensors], fake: Callable[..., _Tensors]) -> Any:
    _library.define(f"{name}{schema}")
    for key in ("CUDA", "CPU"):  # on a CPU Triton's interpreter
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"attn_zoo::{name}", fake, lib=_library)
    return getattr(torch.ops.attn_zoo, name)


def _fake_results(tokens: _Tensors, matrices: _Tensors, mask: Any) -> _Tensors:  # noqa: ARG001
    batch_size, groups, _, head_dim = tokens[0].shape
    count = max(len(tokens), len(matrices))
    return [tokens[0].new_empty(batch_size, groups, matrices[0].shape[-1], head_dim) for _ in range(count)]


def _fake_gradients(
    tokens: _Tensors,
    matrices: _Tensors,
    mask: Any,  # noqa: ARG001
    grads: Any,  # noqa: ARG001
    of_tokens: bool,
    of_matrices: bool,
) -> _Tensors:
    return [torch.empty_like(x) for x in (*(tokens if of_tokens else ()), *(matrices if of_matrices else ()))]


def _call_of(tokens: _Tensors, matrices: _Tensors, mask: Tensor | None) -> CompressCall:
    return CompressCall(tuple(tokens), tuple(matrices), mask)


_compress_operator = _define(
    "compress",
    "(Tensor[] tokens, Tensor[] matrices, Tensor? mask) -> Tensor[]",
    lambda *given: _compress(_call_of(*given)),
    _fake_results,
)
_gradients_operator = _define(
    "compress_gradients",
    "(Tensor[] tokens, Tensor[] matrices, Tensor? mask, Tensor[] grads, bool of_tokens, bool of_matrices) -> Tensor[]",
    lambda tokens, matrices, mask, grads, of_tokens, of_matrices: _gradients(
        _call_of(tokens, matrices, mask), grads, of_tokens=of_tokens, of_matrices=of_matrices
    ),
    _fake_gradients,
)


def compress(call: CompressCall) -> list[Tensor]:
    """Return matrix^T tokens of each pair, `[B, G, k, D]`."""
    if torch.compiler.is_compiling():
        results: _Tensors = _compress_operator(list(call.tokens), list(call.matrices), call.mask)
        return results
    return _compress(call)


def gradients(call: CompressCall, grads: Sequence[Tensor], *, of_tokens: bool, of_matrices: bool) -> list[Tensor]:
    """Return the gradients that are wanted: those of the tokens, in their layout, zero in padding; of the matrices."""
    if torch.compiler.is_compiling():
        given = list(call.tokens), list(call.matrices), call.mask, list(grads)
        results: _Tensors = _gradients_operator(*given, of_tokens, of_matrices)
        return results
    return _gradients(call, grads, of_tokens=of_tokens, of_matrices=of_matrices)
