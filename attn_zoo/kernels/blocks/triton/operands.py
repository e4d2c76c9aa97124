"""Block-sparse attention by our own Triton kernels: forward and backward, bit for bit repeatable, no recompilation.

The kernels are launched from two operators of PyTorch, so that a model around them can be compiled in one graph and
captured as a CUDA graph: nothing on the way waits for the device. Memory beyond inputs, outputs and gradients is
O(B H L): the log-sum-exp and, in backward, the sum of output times gradient; and the partial results of dense rows and
global columns, while their kernels run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_zoo.kernels.blocks.pattern import BlockPattern
from attn_zoo.kernels.blocks.triton.launch import launch_backward, launch_forward
from attn_zoo.kernels.trace import note_path

__all__ = ["operands", "triton_block_attention"]

_PATTERN = "Tensor indices, Tensor counts, Tensor rows, Tensor row_counts, int[] sizes, float scale, float dropout_p"


def _pattern(query: Tensor, key: Tensor, indices: Tensor, counts: Tensor, sizes: Sequence[int]) -> BlockPattern:
    """Return the pattern that an operator was given as tensors and numbers."""
    block_size, num_global, num_dense_rows, is_causal, reach = sizes
    return BlockPattern(
        query.shape[2],
        key.shape[2],
        block_size,
        num_global,
        num_dense_rows,
        indices,
        counts,
        bool(is_causal),
        None if reach < 0 else reach,
    )


@torch.library.custom_op(
    "attn_zoo::block_sparse_forward",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? padding, Tensor? slopes, Tensor? seed, {_PATTERN}) "
    "-> (Tensor, Tensor)",
)
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    slopes: Tensor | None,
    seed: Tensor | None,
    indices: Tensor,
    counts: Tensor,
    rows: Tensor,  # noqa: ARG001  # backward's
    row_counts: Tensor,  # noqa: ARG001
    sizes: Sequence[int],
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    note_path("block_sparse.triton")
    output = torch.empty_like(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    pattern = _pattern(query, key, indices, counts, sizes)
    launch_forward(query, key, value, output, lse, pattern, padding, slopes, scale, (dropout_p, seed))
    return output, lse


@_forward.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "attn_zoo::block_sparse_backward",
    mutates_args=(),
    schema="(Tensor grad_output, Tensor output, Tensor lse, Tensor query, Tensor key, Tensor value, "
    f"Tensor? padding, Tensor? slopes, Tensor? seed, {_PATTERN}) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    slopes: Tensor | None,
    seed: Tensor | None,
    indices: Tensor,
    counts: Tensor,
    rows: Tensor,
    row_counts: Tensor,
    sizes: Sequence[int],
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if grad_output.stride(-1) != 1:  # the gradient of a sum, for instance, is one number expanded
        grad_output = grad_output.contiguous()
    pattern = _pattern(query, key, indices, counts, sizes)
    launch_backward(
        grad_output,
        output,
        lse,
        query,
        key,
        value,
        grads,
        pattern,
        (rows, row_counts),
        padding,
        slopes,
        scale,
        (dropout_p, seed),
    )
    return grads


@_backward.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = given[3:6]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.sizes, ctx.scale, ctx.dropout_p = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 13
    return *_backward(grad_output, *ctx.saved_tensors, ctx.sizes, ctx.scale, ctx.dropout_p), *(None,) * 10


_forward.register_autograd(_differentiate, setup_context=_save)


def operands(pattern: BlockPattern) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
    """Return what both operators take of a pattern: its table by row and by column, and its sizes."""
    reach = -1 if pattern.reach is None else pattern.reach
    sizes = [pattern.block_size, pattern.num_global, pattern.num_dense_rows, int(pattern.is_causal), reach]
    return pattern.indices, pattern.counts, *pattern.transposed, sizes


def triton_block_attention(
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
    """Compute block-sparse attention by our Triton kernels; see `block_sparse_attention` for arguments and result.

    Sums are in float32, products of float32 inputs too (not in TensorFloat32). The first call of a kind compiles, not
    that of a length. The seed of dropout is drawn on the device.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    seed = torch.randint(1 << 62, (1,), device=query.device) if dropout_p else None
    output, _ = _forward(query, key, value, key_padding_mask, slopes, seed, *operands(pattern), scale, dropout_p)
    result: Tensor = output
    return result
