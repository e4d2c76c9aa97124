"""Launches the Triton kernels of block-sparse attention: tiles, warps and stretches for a call.

Forward and backward are bit for bit repeatable, and nothing on the way waits for the device, so both can be captured as
a CUDA graph. Memory beyond inputs, outputs and gradients is O(B H L): the log-sum-exp and, in backward, the sum of
output times gradient; and the partial results of dense rows and global columns, while their kernels run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attn_zoo.kernels.blocks.call import BlockCall
from attn_zoo.kernels.blocks.triton.addressing import strides_of
from attn_zoo.kernels.blocks.triton.forward import forward_kernel
from attn_zoo.kernels.blocks.triton.kept_weights import dropout_options
from attn_zoo.kernels.blocks.triton.key_gradient import key_gradient_kernel
from attn_zoo.kernels.blocks.triton.query_gradient import query_gradient_kernel
from attn_zoo.kernels.blocks.triton.stretches import add_up_kernel, merge_kernel
from attn_zoo.kernels.cached_launch import CachedLaunch, kind_of, on_device_of, remembered
from attn_zoo.kernels.trace import note_path

# A stretch of a dense line has twice the blocks of a listed line with the usual 3 + 3 + 2, and starts first, so that it
# does not outlast the others. But no more stretches than these: for two dense blocks of 64, 16-bit inputs and up to
# 32 768 tokens, their results are a quarter as large as the queries, and beyond that they do not grow.
_SPLIT_BLOCKS = 16
_MAX_SPLITS = 32

_MERGE_TOKENS = 16  # dense tokens that one program merges: few, as they are few
_NO_RULE = {"reach": -1, "dilation": 1, "stride": 0, "num_global_tokens": 0}


Kernel = Literal["forward", "query_gradient", "key_gradient"]


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut and run.

    Args:
        block_m: queries of a tile.
        block_n: keys of a tile.
        num_warps: of a program.
        num_stages: of its pipeline.
        max_registers: of a thread where nothing is hidden; more would make one program less resident, which costs more
            than the few that do not fit.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def options(self, *, takes_registers: bool) -> dict[str, int]:
        """Return the options of a launch.

        Args:
            takes_registers: something is hidden anywhere, or drawn, or added to the scores.
        """
        limit = {} if self.max_registers is None or takes_registers else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}


# For 16-bit inputs and blocks of 64 or more, by kernel and head_dim (smaller ones as 64). Chosen from what the compiler
# says for Hopper (registers, shared memory, products as wgmma), then from times of an H100 (benchmarks/NOTES.md): eight
# warps take up to twice as long, tiles of 32 keys a sixth longer, a fourth stage costs a program. A tile of 64 queries
# is one wgmma of four warps. Three stages: keys are loaded two steps ahead. With fewer than 106 registers the assembler
# lets no two products be under way (its note C7512). Resident programs on a multiprocessor, as registers and shared
# memory allow:
_TILES: dict[tuple[Kernel, int], Tiles] = {
    ("forward", 64): Tiles(64, 64, 4, 3, max_registers=112),  # 110 registers, 56 KiB: 4
    ("forward", 128): Tiles(64, 64, 4, 3),  # 168, 112 KiB: 2
    ("query_gradient", 64): Tiles(64, 64, 4, 3),  # 124, 64 KiB: 3
    ("query_gradient", 128): Tiles(64, 64, 4, 2),  # 180, 96 KiB: 2
    ("key_gradient", 64): Tiles(64, 64, 4, 3, max_registers=168),  # 168 (more if it may), 65 KiB: 3
    ("key_gradient", 128): Tiles(32, 64, 4, 3),  # 226, 80 KiB: 2; with 64 queries it spills
}


def tiles_of(kernel: Kernel, block_size: int, head_dim: int, itemsize: int) -> Tiles:
    """Return the tiles of a kernel, which divide the blocks.

    Args:
        kernel: which.
        block_size: tokens in a block, a power of two from 16.
        head_dim: D.
        itemsize: bytes of an input number.
    """
    if itemsize == 4:  # exact float32 products run on the plain cores, with every factor in a register
        return Tiles(16, 16, 4, 2)
    if block_size < 64:
        warps = block_size // 16 * (2 if head_dim == 128 else 1)
        return Tiles(block_size, block_size, warps, 3)
    return _TILES[kernel, max(64, head_dim)]


def _splits(num_blocks: int) -> tuple[int, int]:
    """Return how many stretches a line of so many blocks is cut into, and the blocks of each."""
    length = max(_SPLIT_BLOCKS, math.ceil(num_blocks / _MAX_SPLITS))
    return max(1, math.ceil(num_blocks / length)), length


class _Forward(NamedTuple):
    """What a call launches."""

    attend: CachedLaunch
    merge: CachedLaunch | None  # where there are dense rows
    num_parts: int  # numbers that stretches of dense rows leave


class _Backward(NamedTuple):
    """What a backward pass launches."""

    query_gradient: CachedLaunch
    key_gradient: CachedLaunch
    add_up: CachedLaunch | None  # where there are dense rows or global columns
    workspace_size: int  # numbers


_forwards: dict[Hashable, _Forward] = {}
_backwards: dict[Hashable, _Backward] = {}


def _tensors(call: BlockCall, *table: Tensor) -> tuple[Tensor | None, ...]:
    """Return the last tensors of every kernel that attends: a table, padding, slopes and seed."""
    padding = None if call.padding is None else call.padding.contiguous().view(torch.uint8)
    return *table, padding, None if call.slopes is None else call.slopes.contiguous(), call.seed


def _sizes(call: BlockCall, kernel: Kernel) -> dict[str, Any]:
    """Return what all kernels that attend take beside tensors, their strides and stretches, by name."""
    pattern, (_, num_heads, query_len, head_dim) = call.pattern, call.query.shape
    size = pattern.block_size
    tiles = tiles_of(kernel, size, head_dim, call.query.element_size())
    is_ragged = query_len % size != 0 or pattern.key_len % size != 0
    is_masked = call.padding is not None or pattern.rule is not None
    takes_registers = is_ragged or is_masked or pattern.is_causal or call.dropout_p > 0 or call.slopes is not None
    return {
        "scale": call.scale,
        "num_heads": num_heads,
        "query_len": query_len,
        "key_len": pattern.key_len,
        "num_dense_rows": pattern.num_dense_rows,
        "num_global": pattern.num_global,
        "num_tables": pattern.num_heads,
        "row_shift": (pattern.key_len - query_len) // size,
        "block_size": size,
        "block_m": tiles.block_m,
        "block_n": tiles.block_n,
        "head_dim": head_dim,
        "is_causal": pattern.is_causal,
        "is_ragged": is_ragged,
        "has_batch_tables": pattern.indices.shape[0] > 1,
        **(_NO_RULE if pattern.rule is None else asdict(pattern.rule)),
        "has_padding": call.padding is not None,
        "has_slopes": call.slopes is not None,
        **dropout_options(call.dropout_p),
        **tiles.options(takes_registers=takes_registers),
    }


def _strides(**tensors: Tensor) -> dict[str, Any]:
    return {f"{name}_strides": strides_of(tensor) for name, tensor in tensors.items()}


def _grid(call: BlockCall, num_tiles: int) -> tuple[int, int, int]:
    """Return the grid of so many tiles for each sequence and head: those of one head run side by side."""
    batch_size, num_heads = call.query.shape[:2]
    return num_tiles, num_heads, batch_size


class _Lines(NamedTuple):
    """How dense rows or global columns are cut: stretches, blocks of a stretch, and their tokens."""

    num_splits: int
    split_blocks: int
    num_tokens: int


def _dense_rows(call: BlockCall) -> _Lines:
    pattern = call.pattern
    splits = _splits(-(-pattern.dense_key_len // pattern.block_size))
    return _Lines(*splits, min(pattern.num_dense_rows * pattern.block_size, pattern.query_len))


def _global_columns(call: BlockCall) -> _Lines:
    pattern = call.pattern
    return _Lines(*_splits(pattern.num_query_blocks), min(pattern.num_global * pattern.block_size, pattern.key_len))


def _cut_forward(call: BlockCall, output: Tensor) -> _Forward:
    pattern, lines, sizes = call.pattern, _dense_rows(call), _sizes(call, "forward")
    num_sequences, head_dim = call.query.shape[0] * call.query.shape[1], call.query.shape[3]
    row_tiles = pattern.block_size // sizes["block_m"]
    stretches = {"num_splits": lines.num_splits, "split_blocks": lines.split_blocks}
    rows = {"num_rows": pattern.num_rows, "width": pattern.indices.shape[-1], "num_sequences": num_sequences}
    strides = _strides(query=call.query, key=call.key, value=call.value, output=output)
    num_lines = pattern.num_dense_rows * lines.num_splits + pattern.num_rows
    attend = CachedLaunch(forward_kernel, _grid(call, num_lines * row_tiles), sizes | strides | stretches | rows)
    merge = None
    if lines.num_tokens:
        rest = {
            **_strides(output=output),
            "num_sequences": num_sequences,
            "num_heads": sizes["num_heads"],
            "query_len": pattern.query_len,
            "num_tokens": lines.num_tokens,
            "num_splits": lines.num_splits,
            "block_m": _MERGE_TOKENS,
            "head_dim": head_dim,
        }
        merge = CachedLaunch(merge_kernel, (num_sequences * -(-lines.num_tokens // _MERGE_TOKENS),), rest)
    return _Forward(attend, merge, num_sequences * lines.num_splits * lines.num_tokens * (head_dim + 1))


def triton_forward(call: BlockCall) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the scores, float32 `[B, H, L]`, -inf where a query sees nothing.

    Sums are in float32, products of float32 inputs too (not in TensorFloat32). The first call of a kind compiles, not
    that of a length.
    """
    note_path("block_sparse.triton")
    query, pattern = call.query, call.pattern
    output = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    tensors = _tensors(call, pattern.indices, pattern.counts)
    launches = remembered(_forwards, call.kind, lambda: _cut_forward(call, output))
    part = query.new_empty(launches.num_parts, dtype=torch.float32) if launches.num_parts else lse
    with on_device_of(query):
        launches.attend(query, call.key, call.value, output, lse, part, *tensors)
        if launches.merge is not None:
            launches.merge(part, output, lse)
    return output, lse


def _cut_backward(
    call: BlockCall, output: Tensor, grad_output: Tensor, grads: tuple[Tensor, Tensor, Tensor], *, has_grad_lse: bool
) -> _Backward:
    pattern, dense, columns = call.pattern, _dense_rows(call), _global_columns(call)
    inputs = _strides(query=call.query, key=call.key, value=call.value, grad_output=grad_output)
    grad_query, grad_key, grad_value = grads

    sizes = _sizes(call, "query_gradient")
    num_sequences, head_dim, size = call.query.shape[0] * call.query.shape[1], call.query.shape[3], pattern.block_size
    # The workspace: what stretches leave of queries, keys and values, then the sums of output times gradient.
    parts = [num_sequences * each.num_splits * each.num_tokens * head_dim for each in (dense, columns, columns)]
    parts_at = {"key_part_at": parts[0], "value_part_at": parts[0] + parts[1]}
    delta_at = {"delta_at": sum(parts)}
    lines = pattern.num_dense_rows * dense.num_splits + pattern.num_rows
    query_gradient = CachedLaunch(
        query_gradient_kernel,
        _grid(call, lines * (size // sizes["block_m"])),
        {
            **(sizes | inputs | _strides(output=output, grad_query=grad_query) | delta_at),
            "num_rows": pattern.num_rows,
            "width": pattern.indices.shape[-1],
            "num_splits": dense.num_splits,
            "split_blocks": dense.split_blocks,
            "has_grad_lse": has_grad_lse,
        },
    )

    sizes = _sizes(call, "key_gradient")
    lines = pattern.num_global * columns.num_splits + pattern.num_key_blocks - pattern.num_global
    key_gradient = CachedLaunch(
        key_gradient_kernel,
        _grid(call, lines * (size // sizes["block_n"])),
        {
            **(sizes | inputs | _strides(grad_key=grad_key, grad_value=grad_value) | parts_at | delta_at),
            "num_columns": pattern.num_key_blocks,
            "table_size": pattern.indices.shape[-2] * pattern.indices.shape[-1],
            "num_splits": columns.num_splits,
            "split_blocks": columns.split_blocks,
        },
    )

    num_tiles = -(-dense.num_tokens // _MERGE_TOKENS) + -(-columns.num_tokens // _MERGE_TOKENS)
    rest = {
        **(_strides(grad_query=grad_query, grad_key=grad_key, grad_value=grad_value) | parts_at),
        "num_sequences": num_sequences,
        "num_heads": sizes["num_heads"],
        "num_dense_tokens": dense.num_tokens,
        "num_query_splits": dense.num_splits,
        "num_global_tokens": columns.num_tokens,
        "num_key_splits": columns.num_splits,
        "block_m": _MERGE_TOKENS,
        "head_dim": head_dim,
    }
    add_up = CachedLaunch(add_up_kernel, (num_sequences * num_tiles,), rest) if num_tiles else None
    return _Backward(query_gradient, key_gradient, add_up, sum(parts) + num_sequences * pattern.query_len)


def triton_backward(
    call: BlockCall,
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None = None,
    *,
    is_moved: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, from what `triton_forward` returned.

    Where nothing `is_moved` since, inputs and results lie as that call's kind says.
    """
    query, key, value, pattern = call.query, call.key, call.value, call.pattern
    grads = grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    tensors = _tensors(call, pattern.indices, pattern.counts)
    saved = (query, key, value, call.padding, output, lse) if is_moved else ()
    launches = remembered(
        _backwards,
        call.kind and (call.kind, kind_of(*saved, grad_output, grad_lse)),
        lambda: _cut_backward(call, output, grad_output, grads, has_grad_lse=grad_lse is not None),
    )
    workspace = query.new_empty(launches.workspace_size, dtype=torch.float32)
    with on_device_of(query):
        inputs = query, key, value
        launches.query_gradient(*inputs, output, grad_output, grad_query, lse, grad_lse, workspace, *tensors)
        tables = *pattern.transposed, *tensors[2:]
        launches.key_gradient(*inputs, grad_output, grad_key, grad_value, lse, workspace, *tables)
        if launches.add_up is not None:
            launches.add_up(workspace, *grads)
    return grads
