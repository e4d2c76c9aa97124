"""Block-sparse attention on a GPU by FlexAttention, with the block mask written down directly from the pattern's table.

Dong et al. 2024, "Flex Attention", arXiv 2412.05496. Three parts keep every list short, and time and memory linear:

* dense rows are one call of PyTorch's attention;
* the other rows attend to their listed blocks under a block mask of fixed width, both ways;
* and, in a second call, to the global columns, whose lists of rows would otherwise be as long as the sequence. The two
  are merged by their log-sum-exp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.blocks.pattern import BlockPattern, transpose_table
from attn_zoo.kernels.trace import note_path

__all__ = ["flex_block_attention", "global_block_mask", "listed_block_mask"]

_MAX_KERNELS = 256  # compiled variants kept, one for each shape; beyond it compilation raises, never falls back
_MAX_PATTERNS = 64  # whose lists are kept
_TILE = 64

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _compact(table: Tensor, is_kept: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Move the kept entries of each row to its front: int32 `[P, R, width]` and counts `[P, R]`."""
    order = is_kept.int().argsort(dim=-1, descending=True, stable=True)
    kept = table.gather(-1, order) * is_kept.gather(-1, order)
    padded = pad(kept, (0, width - kept.shape[-1]))
    return padded.int().contiguous(), is_kept.sum(-1, dtype=torch.int32)


def _block_lists(
    table: Tensor, is_entry: Tensor, is_partial: Tensor, *, seq_lengths: tuple[int, int], block_size: int
) -> dict[str, Any]:
    """Return all of a block mask but its rule, in O(entries).

    `BlockMask.from_kv_blocks` would make a dense mask to transpose it. To transpose waits for the device.
    """
    num_columns = -(-seq_lengths[1] // block_size)
    # Both lists get one width: kernels of some versions of torch step through both by the strides of the first.
    width = max(1, table.shape[-1])
    sides = [_compact(table, is_entry & choice, width) for choice in (is_partial, ~is_partial)]
    q_sides = [transpose_table(indices, counts, num_columns) for indices, counts in sides]
    q_width = max(1, *(rows.shape[-1] for rows, _ in q_sides))
    q_sides = [(pad(rows, (0, q_width - rows.shape[-1])), counts) for rows, counts in q_sides]
    return {
        "seq_lengths": seq_lengths,
        "kv_num_blocks": sides[0][1][None],
        "kv_indices": sides[0][0][None],
        "full_kv_num_blocks": sides[1][1][None],
        "full_kv_indices": sides[1][0][None],
        "q_num_blocks": q_sides[0][1][None],
        "q_indices": q_sides[0][0][None],
        "full_q_num_blocks": q_sides[1][1][None],
        "full_q_indices": q_sides[1][0][None],
        "BLOCK_SIZE": (block_size, block_size),
    }


def _mask_mod(pattern: BlockPattern, num_rows_len: int, padding: Tensor | None) -> MaskMod:
    """Return what is visible inside a partial block, for queries counted from the first listed row."""
    key_len, is_causal, reach = pattern.key_len, pattern.is_causal, pattern.reach
    offset = key_len - num_rows_len

    def is_visible(batch: Tensor, head: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:  # noqa: ARG001
        visible = key_at <= query_at + offset if is_causal else key_at < key_len
        if reach is not None:
            visible = visible & ((query_at + offset - key_at).abs() <= reach)
        if padding is not None:
            visible = visible & ~padding[batch, key_at]
        return visible

    return is_visible


def listed_block_mask(pattern: BlockPattern, padding: Tensor | None) -> BlockMask:
    """Return the block mask of the listed rows and entries, without dense rows and global columns.

    A block that nothing is hidden in is full, so that the kernel skips the mask: all but the diagonal of a causal
    pattern, the ends of a band, the ragged ends, and, with padding, everything.

    Args:
        pattern: on the device of the call.
        padding: bool `[B, S]`, True = padding, or None.
    """
    rows_len = pattern.query_len - pattern.num_dense_rows * pattern.block_size
    lists = _listed(pattern, padding is not None)
    return BlockMask(**lists, mask_mod=_mask_mod(pattern, rows_len, padding))


@functools.lru_cache(maxsize=_MAX_PATTERNS)
def _listed(pattern: BlockPattern, has_padding: bool) -> dict[str, Any]:
    table = pattern.indices.long()
    is_entry = torch.arange(table.shape[-1], device=table.device) < pattern.counts[..., None]
    rows_len = pattern.query_len - pattern.num_dense_rows * pattern.block_size
    is_partial = torch.zeros_like(is_entry)
    if has_padding:
        is_partial = torch.ones_like(is_entry)
    own = (torch.arange(pattern.num_rows, device=table.device) + pattern.row_offset)[None, :, None]
    if pattern.is_causal:
        is_partial = is_partial | (table == own)
    if pattern.reach is not None:  # the two corners furthest apart
        is_partial = is_partial | ((table - own).abs() * pattern.block_size + pattern.block_size - 1 > pattern.reach)
    if pattern.key_len % pattern.block_size:
        is_partial = is_partial | (table == pattern.num_key_blocks - 1)
        is_partial[:, -1] = True
    return _block_lists(
        table, is_entry, is_partial, seq_lengths=(rows_len, pattern.key_len), block_size=pattern.block_size
    )


def global_block_mask(pattern: BlockPattern, padding: Tensor) -> BlockMask:
    """Return the block mask of the listed rows over the global columns, which padding makes necessary."""
    rows_len = pattern.query_len - pattern.num_dense_rows * pattern.block_size
    return BlockMask(**_global(pattern), mask_mod=_mask_mod(pattern, rows_len, padding))


@functools.lru_cache(maxsize=_MAX_PATTERNS)
def _global(pattern: BlockPattern) -> dict[str, Any]:
    table = torch.arange(pattern.num_global, device=pattern.indices.device).expand(1, pattern.num_rows, -1)
    everywhere = torch.ones_like(table, dtype=torch.bool)
    rows_len = pattern.query_len - pattern.num_dense_rows * pattern.block_size
    columns_len = min(pattern.num_global * pattern.block_size, pattern.key_len)
    return _block_lists(
        table, everywhere, everywhere, seq_lengths=(rows_len, columns_len), block_size=pattern.block_size
    )


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _kernel_options(block_size: int) -> dict[str, Any]:
    """Return tiles that divide the blocks; the defaults are made for blocks of 128."""
    tile = min(_TILE, block_size)
    names = ("fwd_BLOCK_M", "fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
    # The kernel for few queries splits keys by its own blocks, which need not divide ours.
    return {**dict.fromkeys(names, tile), "FORCE_USE_FLEX_ATTENTION": True}


def _merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge outputs over disjoint keys by their log-sum-exp; a query that sees nothing in any part gets zeros."""
    if len(parts) == 1:
        return parts[0][0]
    highest = torch.stack([lse.detach() for _, lse in parts]).amax(0)
    highest = highest.masked_fill(highest.isneginf(), 0.0)
    shares = [(lse - highest).exp()[..., None] for _, lse in parts]
    total = torch.stack(shares).sum(0).clamp_min(torch.finfo(highest.dtype).tiny)
    merged = sum(share / total * out.to(share.dtype) for share, (out, _) in zip(shares, parts, strict=True))
    return torch.as_tensor(merged).to(parts[0][0].dtype)


def _dense_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: BlockPattern,
    padding: Tensor | None,
    slopes: Tensor | None,
    scale: float,
) -> Tensor:
    """Attend from the dense rows to all keys they may see."""
    num_keys = pattern.dense_key_len
    keep: Tensor | None = None if padding is None else ~padding[:, None, None, :num_keys]
    standing = torch.arange(query.shape[2], device=query.device)[:, None] + pattern.key_len - pattern.query_len
    distance = standing - torch.arange(num_keys, device=query.device)
    if pattern.is_causal:
        keep = distance >= 0 if keep is None else keep & (distance >= 0)
    is_dead = None if keep is None else ~keep.any(-1, keepdim=True)
    mask = keep
    if keep is not None and is_dead is not None:
        mask = keep | is_dead
    if slopes is not None:
        bias = -slopes[None, :, None, None] * distance.abs()
        mask = (bias if mask is None else bias.masked_fill(~mask, float("-inf"))).to(query.dtype)
    output = scaled_dot_product_attention(query, key[:, :, :num_keys], value[:, :, :num_keys], mask, scale=scale)
    return output if is_dead is None else output.masked_fill(is_dead, 0.0)


def flex_block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: BlockPattern,
    *,
    key_padding_mask: Tensor | None = None,
    slopes: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute block-sparse attention by FlexAttention; see `block_sparse_attention` for arguments and result.

    The first call of a shape compiles.

    Raises:
        UnsupportedError: the compiler cannot make a kernel for this call.
    """
    note_path("block_sparse.flex")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if key_padding_mask is not None:  # a NaN or infinity in padding would survive a weight of zero
        key, value = (x.masked_fill(key_padding_mask[:, None, :, None], 0.0) for x in (key, value))
    dense_len = min(pattern.num_dense_rows * pattern.block_size, pattern.query_len)
    outputs: list[Tensor] = []
    if dense_len:
        dense = query[:, :, :dense_len]
        outputs.append(_dense_rows(dense, key, value, pattern, key_padding_mask, slopes, scale))
    if pattern.num_rows:
        rows = query[:, :, dense_len:]
        offset = pattern.key_len - rows.shape[2]

        def alibi(score: Tensor, batch: Tensor, head: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:  # noqa: ARG001
            assert slopes is not None
            return score - slopes[head] * (query_at + offset - key_at).abs()

        def attend(num_keys: int, mask: BlockMask | None) -> tuple[Tensor, Tensor]:
            output, extra = _compiled()(
                rows,
                key[:, :, :num_keys],
                value[:, :, :num_keys],
                score_mod=None if slopes is None else alibi,
                block_mask=mask,
                scale=scale,
                kernel_options=_kernel_options(pattern.block_size),
                return_aux=AuxRequest(lse=True),
            )
            return output, extra.lse

        try:
            with torch._dynamo.config.patch(recompile_limit=_MAX_KERNELS):
                parts = [attend(pattern.key_len, listed_block_mask(pattern, key_padding_mask))]
                if pattern.num_global:
                    mask = None if key_padding_mask is None else global_block_mask(pattern, key_padding_mask)
                    parts.append(attend(pattern.num_global * pattern.block_size, mask))
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise UnsupportedError("backend", f"backend 'flex' cannot be compiled here: {reason}") from error
        outputs.append(_merge(parts))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
