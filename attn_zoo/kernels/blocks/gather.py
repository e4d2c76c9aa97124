"""Block-sparse attention by gathering keys and values, a few blocks of queries at a time.

Time and memory are linear in the length, forward and backward: a piece gathers its key and value blocks into a buffer
that stays in the cache, runs dense attention on it, and is forgotten. Saved for backward are the inputs alone (16-bit
types on a CPU: the output and one log-sum-exp per query too); backward gathers again, and adds into the gradients of
the keys by `index_add_`. A piece is computed by hand:

    P = softmax(scale Q K^T + mask),   out = (P * dropped) V
    dV = (P * dropped)^T dO,   dP = (dO V^T) * dropped,   dS = P * (dP - rowsum(dP * P))
    dQ = scale dS K,   dK = scale dS^T Q

(Dao et al. 2022, "FlashAttention", arXiv 2205.14135, appendix B.) It holds all keys of its queries, so backward
computes P again from them and nothing is saved. All of it is matrix products and softmax on buffers that are used
again, which on a CPU is faster than PyTorch's fused kernel: that one cuts blocks of 64 queries in halves. Only where
products are slow (16 bits on a CPU) the fused kernel does it, called below autograd because its backward is driven by
hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attn_zoo.kernels.blocks.call import BlockCall, wide_dtype
from attn_zoo.kernels.blocks.pattern import BlockPattern
from attn_zoo.kernels.blocks.pieces import Group, Part, pieces_of
from attn_zoo.kernels.dropout_draws import draw_dropped, keep_share
from attn_zoo.kernels.trace import note_path

_HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Dropout:
    """Dropout on attention weights, drawn again in backward instead of being saved.

    Args:
        keep_p: share of the weights that is kept, below 1; see `keep_share`.
        generator: source of the draws; forward and backward use one each, seeded alike, in the same order.
    """

    keep_p: float
    generator: torch.Generator

    def draw(self, weights: Tensor) -> Tensor:
        """Return which weights are dropped; the others are divided by `keep_p`."""
        return draw_dropped(weights, 1.0 - self.keep_p, self.generator)


class Scratch:
    """Buffers by name that all pieces of a call share.

    Fresh memory for each piece would be taken from the system and given back, which can cost as much as the work.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a contiguous tensor of any content, of the dtype and device of `like`, valid until taken again."""
        last = self._views.get(name)
        if last is not None and last.shape == shape:  # pieces mostly look alike
            return last
        size, buffer = math.prod(shape), self._buffers.get(name)
        if buffer is None or buffer.shape[0] < size:
            buffer = self._buffers[name] = like.new_empty(size)
        view = self._views[name] = buffer[:size].view(shape)
        return view


@dataclass(frozen=True)
class Piece:
    """What some queries need: themselves, and all keys that they see.

    Args:
        query: `[n, l, D]`.
        key: `[n, s, D]`.
        read_value: returns the values `[n, s, D]`; gathered no sooner, so that they are still near when they are used.
        mask: additive `[n or 1, l or 1, s]`, in the wide dtype; no row may be all minus infinity.
        masked: where among the n the mask belongs, if not to all.
        scale: of the scores.
        dropout: on the weights.
        is_fused: PyTorch's fused CPU kernel does it.
        scratch: buffers to use; a result may be one of them.
    """

    query: Tensor
    key: Tensor
    read_value: Callable[[], Tensor]
    mask: Tensor | None
    masked: slice
    scale: float
    dropout: Dropout | None
    is_fused: bool
    scratch: Scratch


def has_fused(tensor: Tensor, dropout: Dropout | None) -> bool:
    """Tell whether PyTorch's fused CPU kernel does the pieces.

    Args:
        tensor: of the call.
        dropout: of the call; the kernel has none.
    """
    return tensor.device.type == "cpu" and dropout is None and tensor.dtype in _HALF_DTYPES


def _product(left: Tensor, right: Tensor, scale: float, result: Tensor, *, adds: bool = False) -> Tensor:
    """Write scale times left times right, `[n, i, j]`, to `result`, or add it there."""
    return torch.baddbmm(result, left, right, beta=int(adds), alpha=scale, out=result)


def _weights(piece: Piece, lse: Tensor | None = None) -> Tensor:
    """Return P in the wide dtype, in a buffer; write the log-sum-exp of the scores `[n, l]` to `lse`."""
    query, key = piece.query, piece.key
    shape = (*query.shape[:2], key.shape[1])
    wide = wide_dtype(query.dtype)
    if query.dtype != wide:  # before the product: in 16 bits scores lose digits, and those beyond 65504 all of them
        query, key = query.to(wide), key.to(wide)
    scores = _product(query, key.mT, piece.scale, piece.scratch.take("scores", shape, query))
    if piece.mask is not None:
        scores[piece.masked] += piece.mask
    if lse is not None:
        torch.logsumexp(scores, dim=-1, out=lse)
    return torch.softmax(scores, dim=-1, out=scores)


def attend(piece: Piece, place: Tensor, lse: Tensor | None = None) -> None:
    """Compute the output.

    Args:
        piece: to compute.
        place: contiguous `[n, l, D]`; the output is put there.
        lse: the log-sum-exp of the scores `[n, l]` is put there.
    """
    if piece.is_fused:
        # As n batch entries of one head: the kernel puts heads inside tokens, and its results should stay contiguous.
        heads = (x[:, None] for x in (piece.query, piece.key, piece.read_value()))
        output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, attn_mask=None if piece.mask is None else piece.mask[:, None], scale=piece.scale
        )
        place.copy_(output[:, 0])
        if lse is not None:
            lse.copy_(sums[:, 0])
        return
    weights, scale = _weights(piece, lse), 1.0
    if piece.dropout is not None:
        weights, scale = weights.masked_fill_(piece.dropout.draw(weights), 0.0), 1.0 / piece.dropout.keep_p
    value = piece.read_value()
    _product(weights.to(value.dtype), value, scale, place)


def attend_backward(
    grad: Tensor,
    piece: Piece,
    place: Tensor,
    sums: Sequence[Tensor] | None,
    grad_lse: Tensor | None = None,
    output: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of query, key and value.

    Args:
        grad: of the output, `[n, l, D]`.
        piece: as in `attend`.
        place: contiguous; the gradient of the query is put there.
        sums: `[n, s, D]` each; the gradients of key and value are added there. Without them, those overwrite the keys
            and values of the piece, which must be copies.
        grad_lse: of a piece that is not fused, the gradient of the log-sum-exp `[n, l]`, or None.
        output: of a fused piece, what `attend` returned.
        lse: likewise.

    Returns:
        The buffers of the keys and values.
    """
    query, key, scratch = piece.query, piece.key, piece.scratch
    if piece.is_fused:
        value = piece.read_value()
        assert output is not None  # kept for every fused piece
        assert lse is not None
        heads = (x[:, None] for x in (grad, query, key, value, output, lse))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, 0.0, False, attn_mask=None if piece.mask is None else piece.mask[:, None], scale=piece.scale
        )
        place.copy_(gradients[0][:, 0])
        for index, addend in enumerate(gradients[1:]):
            if sums is None:
                (key, value)[index].copy_(addend[:, 0])
            else:
                sums[index].add_(addend[:, 0])
        return key, value

    def deliver(index: int, left: Tensor, right: Tensor, scale: float) -> None:
        if sums is None:
            _product(left, right, scale, (key, value)[index])
        elif sums[index].dtype == left.dtype:
            _product(left, right, scale, sums[index], adds=True)
        else:
            sums[index].add_(_product(left, right, scale, torch.empty_like(key)))

    weights = _weights(piece)
    value = piece.read_value()
    kept, scale = weights, 1.0
    if piece.dropout is not None:
        is_dropped, scale = piece.dropout.draw(weights), 1.0 / piece.dropout.keep_p
        kept = weights.masked_fill(is_dropped, 0.0)
    wide_grad, wide_value = (x.to(weights.dtype) for x in (grad, value))
    grad_weights = _product(wide_grad, wide_value.mT, scale, scratch.take("grad_weights", weights.shape, weights))
    if piece.dropout is not None:
        grad_weights.masked_fill_(is_dropped, 0.0)
    deliver(1, kept.to(grad.dtype).mT, grad, scale)  # values are not read again
    torch.ops.aten._softmax_backward_data.out(grad_weights, weights, -1, weights.dtype, grad_input=grad_weights)
    if grad_lse is not None:
        grad_weights.addcmul_(weights, grad_lse[..., None])
    grad_scores = grad_weights.to(query.dtype)
    _product(grad_scores, key, piece.scale, place)
    deliver(0, grad_scores.mT, query, piece.scale)
    return key, value


@dataclass(frozen=True)
class _Step:
    """One piece with its place.

    Args:
        blocks: where its queries are among the blocks of the part.
        source: rows of the gathered keys, or None for dense rows, which see the leading keys in place.
        piece: what to compute.
        is_dead: queries that see nothing, or None.
    """

    blocks: slice
    source: Tensor | None
    piece: Piece
    is_dead: Tensor | None


class _Walk:
    """Goes through the pieces of one call, forward and backward in the same order."""

    def __init__(self, call: BlockCall) -> None:
        self.call, self.pattern = call, call.pattern.per_head(call.query.shape[1])
        self._dropout: Dropout | None = None
        if call.seed is not None:
            generator = torch.Generator(call.query.device).manual_seed(int(call.seed))
            self._dropout = Dropout(keep_share(call.dropout_p), generator)
        self.is_fused = has_fused(call.query, self._dropout) and not call.has_lse
        self._pieces = pieces_of(call, self.pattern, has_scores=not self.is_fused)
        self._scratch = Scratch()

    def groups(self) -> Iterator[tuple[Group, Tensor, Tensor]]:
        """Yield groups of sequences with their keys and values as rows that can be gathered."""
        call, blocks, size = self.call, self.pattern.num_key_blocks, self.pattern.block_size
        for group in self._pieces.groups():
            keys, values = (group.read_keys(x, blocks, size, call.padding) for x in (call.key, call.value))
            yield group, keys, values

    def parts(self, group: Group, *results: Tensor) -> Iterator[tuple[Part, list[Tensor]]]:
        """Yield the parts of a group, each with the blocks of every result to write to, which are kept afterwards."""
        for part in self._pieces.parts(group):
            places, copies = [], []
            for index, result in enumerate(results):
                place = part.place(result)
                if place is None:
                    shape = (part.num_blocks, part.size, *result.shape[3:])
                    place = self._scratch.take(f"result {index}", shape, result)
                    copies.append((result, place))
                places.append(place)
            yield part, places
            for result, place in copies:
                part.write(result, place)

    def steps(self, part: Part, group: Group, keys: Tensor, values: Tensor) -> Iterator[_Step]:
        """Yield the pieces of a part; each is valid until the next."""
        queries, sources = part.read(self.call.query), self._pieces.source(group, part)
        for rows in part.pieces:
            mask, masked, is_dead = self._pieces.mask(part, rows)
            blocks = part.blocks(rows)
            source = None if sources is None else sources[blocks].view(-1)
            piece = Piece(
                query=queries[blocks],
                key=self._near("key", keys, source, group),
                read_value=partial(self._near, "value", values, source, group),
                mask=mask,
                masked=masked,
                scale=self.call.scale,
                dropout=self._dropout,
                is_fused=self.is_fused,
                scratch=self._scratch,
            )
            yield _Step(blocks, source, piece, is_dead)

    def _near(self, name: str, keys: Tensor, source: Tensor | None, group: Group) -> Tensor:
        """Return the keys (or values) that the queries of a piece see, `[sequences * blocks, keys, D]`."""
        pattern, head_dim = self.pattern, self.call.query.shape[-1]
        if source is None:
            return _leading(keys, group, head_dim, pattern)
        near = self._scratch.take(name, (source.shape[0], keys.shape[1]), keys)
        torch.index_select(keys, 0, source, out=near)
        return near.view(-1, pattern.table.shape[-1] * pattern.block_size, head_dim)


def gather_forward(call: BlockCall) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the log-sum-exp of the scores `[B, H, L]` where it is wanted or backward needs it.

    Where a query sees nothing, a wanted one is minus infinity.
    """
    note_path("block_sparse.gather")
    walk, query = _Walk(call), call.query
    output = torch.empty_like(query)
    lse: Tensor | None = None
    if walk.is_fused or call.has_lse:
        lse = query.new_empty(query.shape[:3], dtype=wide_dtype(query.dtype))
    for group, keys, values in walk.groups():
        for part, places in walk.parts(group, output, *(() if lse is None else (lse,))):
            for step in walk.steps(part, group, keys, values):
                attend(step.piece, *(place[step.blocks] for place in places))
                if step.is_dead is not None:
                    places[0][step.blocks].masked_fill_(step.is_dead, 0.0)
                    if call.has_lse:
                        places[1][step.blocks].masked_fill_(step.is_dead[..., 0], float("-inf"))
    return output, lse


def gather_backward(
    call: BlockCall,
    grad_output: Tensor,
    output: Tensor | None,
    lse: Tensor | None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    Args:
        call: as in `gather_forward`.
        grad_output: `[B, H, L, D]`, features side by side.
        output: what `gather_forward` returned; not read, and None may be, where no log-sum-exp is needed.
        lse: what it returned beside it; likewise.
        grad_lse: of a wanted log-sum-exp, or None.
    """
    walk = _Walk(call)
    pattern, head_dim = walk.pattern, call.query.shape[-1]
    saved = (output, lse) if walk.is_fused and output is not None and lse is not None else ()
    grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (call.query, call.key, call.value))
    for group, keys, values in walk.groups():
        totals = [_zeros(group, result, keys, pattern) for result in (grad_key, grad_value)]
        leading = [_leading(total, group, head_dim, pattern) for total in totals]
        for part, (place,) in walk.parts(group, grad_query):
            blocks = [part.read(x) for x in (grad_output, *saved)]
            lse_blocks = None if grad_lse is None else part.read(grad_lse)
            for step in walk.steps(part, group, keys, values):
                grad, *forward = (x[step.blocks] for x in blocks)
                if step.is_dead is not None:
                    grad = grad.masked_fill(step.is_dead, 0.0)
                sums = leading if step.source is None else None
                further = None if lse_blocks is None else lse_blocks[step.blocks]
                if further is not None and step.is_dead is not None:
                    further = further.masked_fill(step.is_dead[..., 0], 0.0)
                gradients = attend_backward(grad, step.piece, place[step.blocks], sums, further, *forward)
                if step.source is not None:
                    for total, rows in zip(totals, gradients, strict=True):
                        total.index_add_(0, step.source, rows.view(-1, keys.shape[1]).to(total.dtype))
        for result, total in zip((grad_key, grad_value), totals, strict=True):
            if total.data_ptr() != result[group.batch, group.head].data_ptr():
                group.write(result, 0, total.view(total.shape[0], pattern.block_size, -1))
    return grad_query, grad_key, grad_value


def _zeros(group: Group, result: Tensor, rows: Tensor, pattern: BlockPattern) -> Tensor:
    """Return zeros like the rows of keys, in the wide dtype: in place of the result where that is laid out so."""
    wide = wide_dtype(result.dtype)
    place = group.place(result, 0, pattern.key_len, pattern.block_size)
    if place is None or result.dtype != wide:
        return torch.zeros_like(rows, dtype=wide)
    return place.view(rows.shape).zero_()


def _leading(keys: Tensor, group: Group, head_dim: int, pattern: BlockPattern) -> Tensor:
    """Return the keys that dense rows see, `[sequences, keys, D]`: a view."""
    return keys.view(group.num_sequences, -1, head_dim)[:, : pattern.dense_key_len]
