"""Block-sparse attention on a GPU by FlexAttention, with the block mask written down directly from the pattern's table.

Dong et al. 2024, "Flex Attention", arXiv 2412.05496. Three parts keep every list short, and time and memory linear:

* dense rows are one call of PyTorch's attention;
* the other rows attend to their listed blocks under a block mask of fixed width, both ways;
* and, in a second call, to the global columns, whose lists of rows would otherwise be as long as the sequence. The two
  are merged by their log-sum-exp.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torch.nn.functional import pad, scaled_dot_product_attention

from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.blocks.call import BlockCall, merge_attention
from attn_zoo.kernels.blocks.pattern import BlockPattern, transpose_table
from attn_zoo.kernels.exact.flex_attention import run_compiled
from attn_zoo.kernels.trace import note_path

_MAX_PATTERNS = 64  # whose lists are kept
_TILE = 64

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _compact(table: Tensor, is_kept: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Move the kept entries of each row to its front: int32 `[B or 1, P, R, width]` and counts `[B or 1, P, R]`."""
    order = is_kept.int().argsort(dim=-1, descending=True, stable=True)
    kept = table.gather(-1, order) * is_kept.gather(-1, order)
    padded = pad(kept, (0, width - kept.shape[-1]))
    return padded.int().contiguous(), is_kept.sum(-1, dtype=torch.int32)


def _by_column(
    sides: list[tuple[Tensor, Tensor]], num_columns: int, *, is_dynamic: bool
) -> list[tuple[Tensor, Tensor]]:
    """Return the rows of each column, of one width for both sides: int32 `[B or 1, P, columns, width]`, and counts.

    The width is that of the longest list, which waits for the device, or R where the table is made of the data.
    """
    lists = [transpose_table(indices, counts, num_columns) for indices, counts in sides]
    counts = [starts.diff() for _, starts in lists]
    width = sides[0][0].shape[2] if is_dynamic else max(int(x.max()) if x.numel() else 0 for x in counts)
    width = max(1, width)
    slots = torch.arange(width, device=sides[0][0].device)
    columns = []
    for (rows, starts), count in zip(lists, counts, strict=True):
        place = (starts[..., :-1, None] + slots).clamp(max=rows.shape[-1] - 1)
        listed = rows[..., None, :].expand(*place.shape[:-1], -1).gather(-1, place.long())
        columns.append(((listed * (slots < count[..., None])).int().contiguous(), count))
    return columns


def _block_lists(
    table: Tensor,
    is_entry: Tensor,
    is_partial: Tensor,
    *,
    seq_lengths: tuple[int, int],
    block_size: int,
    is_dynamic: bool = False,
) -> dict[str, Any]:
    """Return all of a block mask but its rule; `BlockMask.from_kv_blocks` would make a dense mask to transpose it."""
    num_columns = -(-seq_lengths[1] // block_size)
    # Both lists get one width: kernels of some versions of torch step through both by the strides of the first.
    width = max(1, table.shape[-1])
    sides = [_compact(table, is_entry & choice, width) for choice in (is_partial, ~is_partial)]
    q_sides = _by_column(sides, num_columns, is_dynamic=is_dynamic)
    return {
        "seq_lengths": seq_lengths,
        "kv_num_blocks": sides[0][1],
        "kv_indices": sides[0][0],
        "full_kv_num_blocks": sides[1][1],
        "full_kv_indices": sides[1][0],
        "q_num_blocks": q_sides[0][1],
        "q_indices": q_sides[0][0],
        "full_q_num_blocks": q_sides[1][1],
        "full_q_indices": q_sides[1][0],
        "BLOCK_SIZE": (block_size, block_size),
    }


def _mask_mod(pattern: BlockPattern, num_rows_len: int, padding: Tensor | None) -> MaskMod:
    """Return what is visible inside a partial block, for queries counted from the first listed row."""
    key_len, is_causal, rule = pattern.key_len, pattern.is_causal, pattern.rule
    offset = key_len - num_rows_len

    def is_visible(batch: Tensor, head: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:  # noqa: ARG001
        visible = key_at <= query_at + offset if is_causal else key_at < key_len
        if rule is not None:
            visible = visible & rule.is_visible(query_at + offset, key_at)
        if padding is not None:
            visible = visible & ~padding[batch, key_at]
        return visible

    return is_visible


def _rows_len(pattern: BlockPattern) -> int:
    """Return the number of queries in listed rows."""
    return pattern.query_len - pattern.num_dense_rows * pattern.block_size


def listed_block_mask(pattern: BlockPattern, padding: Tensor | None) -> BlockMask:
    """Return the block mask of the listed rows and entries, without dense rows and global columns.

    A block that nothing is hidden in is full, so that the kernel skips the mask: all but the diagonal of a causal
    pattern, the blocks that a rule cuts, the ragged ends, and, with padding, everything.

    Args:
        pattern: on the device of the call.
        padding: bool `[B, S]`, True = padding, or None.
    """
    make = _listed.__wrapped__ if pattern.is_dynamic else _listed
    return BlockMask(**make(pattern, padding is not None), mask_mod=_mask_mod(pattern, _rows_len(pattern), padding))


@functools.lru_cache(maxsize=_MAX_PATTERNS)
def _listed(pattern: BlockPattern, has_padding: bool) -> dict[str, Any]:
    table, size, rule = pattern.indices.long(), pattern.block_size, pattern.rule
    is_entry = torch.arange(table.shape[-1], device=table.device) < pattern.counts[..., None]
    is_partial = torch.full_like(is_entry, has_padding or (rule is not None and rule.dilation > 1))
    own = (torch.arange(pattern.num_rows, device=table.device) + pattern.row_offset)[:, None]
    if pattern.is_causal:
        is_partial = is_partial | (table == own)
    if rule is not None:  # the two corners furthest apart
        is_partial = is_partial | ((table - own).abs() * size + size - 1 > rule.reach)
    if pattern.key_len % size:
        is_partial = is_partial | (table == pattern.num_key_blocks - 1)
        is_partial[:, :, -1] = True
    lengths = _rows_len(pattern), pattern.key_len
    return _block_lists(
        table, is_entry, is_partial, seq_lengths=lengths, block_size=size, is_dynamic=pattern.is_dynamic
    )


def global_block_mask(pattern: BlockPattern, padding: Tensor | None) -> BlockMask:
    """Return the block mask of the listed rows over the global columns, which padding or a rule makes necessary."""
    rows_len, device = _rows_len(pattern), pattern.counts.device
    lists = _global(pattern.num_global, pattern.num_rows, pattern.block_size, rows_len, pattern.key_len, device)
    return BlockMask(**lists, mask_mod=_mask_mod(pattern, rows_len, padding))


@functools.lru_cache(maxsize=_MAX_PATTERNS)
def _global(
    num_global: int, num_rows: int, block_size: int, rows_len: int, key_len: int, device: torch.device
) -> dict[str, Any]:
    table = torch.arange(num_global, device=device).expand(1, 1, num_rows, -1)
    everywhere = torch.ones_like(table, dtype=torch.bool)
    lengths = rows_len, min(num_global * block_size, key_len)
    return _block_lists(table, everywhere, everywhere, seq_lengths=lengths, block_size=block_size)


def _kernel_options(block_size: int) -> dict[str, Any]:
    """Return tiles of the forward that divide the blocks; those of the backward torch takes from its own table."""
    tile = min(_TILE, block_size)
    # The kernel for few queries splits keys by its own blocks, which need not divide ours.
    return {"fwd_BLOCK_M": tile, "fwd_BLOCK_N": tile, "FORCE_USE_FLEX_ATTENTION": True}


def _dense_rows(call: BlockCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend from the dense rows to all keys they may see."""
    pattern, slopes = call.pattern, call.slopes
    num_keys = pattern.dense_key_len
    keep: Tensor | None = None if call.padding is None else ~call.padding[:, None, None, :num_keys]
    standing = torch.arange(query.shape[2], device=query.device)[:, None] + pattern.key_len - pattern.query_len
    key_at = torch.arange(num_keys, device=query.device)
    rules = [standing >= key_at] if pattern.is_causal else []
    rules += [pattern.rule.is_visible(standing, key_at)] if pattern.rule is not None else []
    for rule in rules:
        keep = rule if keep is None else keep & rule
    is_dead = None if keep is None else ~keep.any(-1, keepdim=True)
    mask = keep
    if keep is not None and is_dead is not None:
        mask = keep | is_dead
    if slopes is not None:
        bias = -slopes[None, :, None, None] * (standing - key_at).abs()
        mask = (bias if mask is None else bias.masked_fill(~mask, float("-inf"))).to(query.dtype)
    output = scaled_dot_product_attention(query, key[:, :, :num_keys], value[:, :, :num_keys], mask, scale=call.scale)
    return output if is_dead is None else output.masked_fill(is_dead, 0.0)


def flex_forward(call: BlockCall) -> tuple[Tensor, Tensor | None]:
    """Return the output and, where the call wants it, the log-sum-exp. Autograd follows. The first of a shape compiles.

    Raises:
        UnsupportedError: the compiler cannot make a kernel for this call, or the log-sum-exp of dense rows is wanted.
    """
    note_path("block_sparse.flex")
    query, key, value, padding, slopes = call.query, call.key, call.value, call.padding, call.slopes
    pattern = call.pattern.per_head(query.shape[1])
    if padding is not None:  # a NaN or infinity in padding would survive a weight of zero
        key, value = (x.masked_fill(padding[:, None, :, None], 0.0) for x in (key, value))
    dense_len = min(pattern.num_dense_rows * pattern.block_size, pattern.query_len)
    if dense_len and call.has_lse:
        raise UnsupportedError("backend", "backend 'flex' has no log-sum-exp of dense rows")
    outputs: list[Tensor] = []
    lse: Tensor | None = None
    if dense_len:
        outputs.append(_dense_rows(call, query[:, :, :dense_len], key, value))
    if pattern.num_rows:
        rows = query[:, :, dense_len:]

        def attend(num_keys: int, mask: BlockMask | None) -> tuple[Tensor, Tensor]:
            output, extra = run_compiled(
                rows,
                key[:, :, :num_keys],
                value[:, :, :num_keys],
                mask=mask,
                slopes=slopes,
                offset=pattern.key_len - rows.shape[2],
                scale=call.scale,
                kernel_options=_kernel_options(pattern.block_size),
                return_aux=AuxRequest(lse=True),
            )
            return output, extra.lse

        with warnings.catch_warnings():
            # The compiler looks at `.grad` of its inputs, which are no leaves here.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            parts = [attend(pattern.key_len, listed_block_mask(pattern, padding))]
            if pattern.num_global:
                has_mask = padding is not None or pattern.rule is not None
                mask = global_block_mask(pattern, padding) if has_mask else None
                parts.append(attend(pattern.num_global * pattern.block_size, mask))
        outputs.append(merge_attention(*zip(*parts, strict=True)))
        if call.has_lse:
            lse = functools.reduce(torch.logaddexp, [each for _, each in parts])
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)), lse


def flex_backward(call: BlockCall, grad_output: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. FlexAttention has nothing to hand over, so it runs again."""
    leaves = [x.detach().requires_grad_() for x in (call.query, call.key, call.value)]
    with torch.enable_grad():
        output, lse = flex_forward(call._replace(query=leaves[0], key=leaves[1], value=leaves[2]))
    results, gradients = [output], [grad_output]
    if lse is not None and grad_lse is not None:
        results, gradients = [output, lse], [grad_output, grad_lse]
    grad_query, grad_key, grad_value = torch.autograd.grad(results, leaves, gradients)
    return grad_query, grad_key, grad_value
