"""Reformer: tokens attend to those that fall into the same bucket of a locality-sensitive hash.

Kitaev et al. 2020, "Reformer: The Efficient Transformer", arXiv 2001.04451, section 2 and appendix A.
    h(x) = argmax([x R; -x R])            one R of shape [D, b / 2] for each of `num_rounds` rounds r
    P_i^r = tokens j of the same bucket, h_r(q_j) = h_r(q_i), in the same chunk or the one before
    P_i = union of all P_i^r without i itself, or i alone where nothing else is left; causal only j <= i
    out_i = softmax over j in P_i of (q_i k_j) v_j,   k_j = q_j / |q_j|
Chunks are C consecutive tokens of the order by bucket, then position. Queries are their own keys, so that there is one
projection less. A query's norm is its temperature: scores have no factor 1 / sqrt(D), which the paper leaves out "for
clarity" and the authors' code makes up for by keys of length sqrt(D).
Rounds are computed one by one and merged by their log-sum-exp. A pair that several rounds see is left to the first of
them; the appendix divides it by their number in each, which is the same sum. Symbols: the paper's l is our L, its m our
C, its n_buckets b = 2 L / C.
Cost: time O(B H R L (C + L / C) D), R = `num_rounds`: hashing is the second term, as large as the first at 4 C^2
tokens, and linear where b is fixed; memory O(B H R L (C + D)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.masks import blank_padding, causal_keep, masked_softmax
from attn_zoo.kernels.blocks.call import merge_attention
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer

EPS = 1e-6
"""Added to the mean square of a query before its key is divided by the root, as in the authors' code."""

_MOST_PRODUCTS = 1 << 22  # of one head's hashes that exist at a time, so that memory stays linear in the length
_NOWHERE = -2  # place of a key that no query sees


@dataclass(frozen=True, kw_only=True, slots=True)
class ReformerConfig(VariantConfig):
    """The authors' options for ImageNet64.

    Args:
        chunk_len: C, tokens in a chunk; the last one may be shorter.
        num_rounds: hashes, of which each is another chance to meet. The paper tries 1 to 8, with which "it already
            almost matches full attention".
        num_buckets: b of one hash, an even number; 0 for the paper's 2 L / C, with L rounded up to whole chunks.
    """

    chunk_len: int = 128
    num_rounds: int = 2
    num_buckets: int = 0

    def __post_init__(self) -> None:
        for name in ("chunk_len", "num_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")
        if self.num_buckets < 0 or self.num_buckets % 2:
            raise ValueError(f"num_buckets: expected an even number, or 0 for 2 L / C; got {self.num_buckets}")

    def num_columns(self, length: int) -> int:
        """Return b / 2, the columns of R; each makes a bucket for either sign."""
        return self.num_buckets // 2 or -(-length // self.chunk_len)

    def claim(self, complexity: Complexity) -> Complexity:
        """Return linear time where the number of buckets is fixed."""
        return replace(complexity, time_exponent=1) if self.num_buckets else complexity

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return short chunks, with as many buckets as the length says and with few that fill several chunks."""
        return {"chunk_len": 8}, {"chunk_len": 5, "num_rounds": 3, "num_buckets": 4}


def _options(shape: Shape) -> ReformerConfig:
    return shape.config or ReformerConfig()


def _num_rotated(shape: Shape) -> int:
    """Return the columns of all rounds' R."""
    return _options(shape).num_rounds * _options(shape).num_columns(shape.query_len)


def _attending_flops(shape: Shape) -> int:
    """Count both products of every chunk with itself and the one before."""
    config, length = _options(shape), shape.query_len
    size = min(config.chunk_len, length)
    pairs = config.num_rounds * -(-length // size) * size * 2 * size
    return 4 * shape.batch_size * shape.num_heads * shape.head_dim * pairs


def reformer_flops(shape: Shape) -> int:
    """Count the products of chunks and the hashes of all rounds."""
    hashing = 2 * shape.batch_size * shape.num_heads * shape.query_len * shape.head_dim * _num_rotated(shape)
    return _attending_flops(shape) + hashing


def reformer_backward_ratio(shape: Shape) -> float:
    """Return 2 for the products of chunks; a hash has no gradient."""
    return 2.0 * _attending_flops(shape) / reformer_flops(shape)


def reformer_bytes(shape: Shape, itemsize: int) -> int:
    """Count input, output, and the columns of R that are read, which all heads share."""
    return shape.io_bytes(itemsize) + shape.head_dim * _num_rotated(shape) * itemsize


def _num_weights(shape: Shape) -> int:
    """Count those of the three projections, which have no biases."""
    return 3 * shape.embed_dim * shape.num_heads * shape.head_dim


def reformer_projection_flops(shape: Shape) -> int:
    """Count the three projections of every position."""
    return 2 * shape.batch_size * shape.query_len * _num_weights(shape)


def reformer_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count the weights of the three projections."""
    return _num_weights(shape) * itemsize


@in_own_dtype
def choose_buckets(query: Tensor, rotations: Tensor, config: ReformerConfig, padding: Tensor | None) -> Tensor:
    """Return h(q) of every round, int64 `[B, H, R, L]`: 0 to b - 1, and above them one bucket of all padding.

    Where b follows from the length, padding does not count: a sequence uses no more columns than it would alone.

    Args:
        query: `[B, H, L, D]`.
        rotations: `[R, D, n]`, n at least b / 2.
        config: chunks and buckets.
        padding: bool `[B, L]`, True = padding, or None.
    """
    wide, num_columns = torch.promote_types(query.dtype, torch.float32), config.num_columns(query.shape[2])
    matrix = rotations[..., :num_columns].to(wide).transpose(0, 1).flatten(1)  # [D, R n]
    is_spare = None
    if padding is not None and not config.num_buckets:
        num_used = -(-(~padding).sum(-1) // config.chunk_len)
        is_spare = (torch.arange(num_columns, device=query.device) >= num_used[:, None])[:, None, None, None]
    buckets = []
    for part in query.split(max(1, _MOST_PRODUCTS // matrix.shape[1]), dim=2):
        rotated = (part.to(wide) @ matrix).unflatten(-1, (-1, num_columns))  # [B, H, some of L, R, n]
        if is_spare is not None:
            rotated = rotated.masked_fill(is_spare, 0.0)
        high, low = rotated.max(-1), rotated.min(-1)
        buckets.append(torch.where(high.values >= -low.values, high.indices, num_columns + low.indices))
    routing = torch.cat(buckets, dim=2).movedim(-1, 2)
    return routing if padding is None else routing.masked_fill(padding[:, None, None], 2 * num_columns)


@register_mixer(
    "reformer",
    config=ReformerConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal="masked",
        cross_attention=False,
        key_padding_mask=True,
        is_padding_invariant=True,
        positions=("none",),
        why={
            "cross_attention": "queries are their own keys, so there is one sequence",
            "decode": "a new token moves the borders of all chunks after its bucket",
            "grouped_query": "queries are their own keys, so every head has keys of its own",
            "positions": "a hash finds vectors of one direction, which turning by position would drive apart; the "
            "paper adds positions to the hidden states",
            "is_permutation_invariant": "the order within a bucket decides which chunk a token falls into",
        },
    ),
    complexity=Complexity(
        time="B H R L (C + L / C) D",
        memory="B H R L (C + D)",
        time_exponent=2,  # of hashing, whose buckets grow with the length: see the formula
        memory_exponent=1,
        sequential_ops="log L",  # of sorting
        max_path="depends on the data",
        flops=reformer_flops,
        projection_flops=reformer_projection_flops,
        backward_ratio=reformer_backward_ratio,
        bytes=reformer_bytes,
        projection_bytes=reformer_projection_bytes,
    ),
    reference=Reference(
        title="Reformer: The Efficient Transformer",
        authors="Kitaev et al.",
        year=2020,
        url="https://arxiv.org/abs/2001.04451",
        equation="2-6, 11-16",
        code="https://github.com/google/trax",
        deviations=(
            "LSH attention alone; the paper's model also has reversible layers and feed-forward networks in chunks.",
            "R is drawn once, by the seed, for all heads of a layer; the authors draw for each head and each call.",
            "Keys are divided by the root of the mean square + 10^-6, and by sqrt(D), as in the authors' code.",
            "As printed, other buckets are hidden and no pair counts twice; the authors' later code does neither.",
            "A pair is shared by rounds whose chunks show it; the printed N_ij counts all where it has one bucket.",
            "The first chunk has none before it; in the authors' code that is the last one.",
            "One hash for any number of buckets; above 128 the authors' code combines two smaller ones.",
            "Dropout draws for every pair; the authors' code draws once for all chunks.",
            "Padding has a bucket of its own, which comes last, and does not count for the number of buckets.",
        ),
    ),
)
class Reformer(AbstractMixer):
    """LSH attention with its three projections.

    Args:
        config: chunks, rounds and buckets.
        build: sizes and direction; `seed` and `layer_index` decide the rotations.
    """

    config: ReformerConfig
    rotations: Tensor

    def __init__(self, config: ReformerConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        width = build.num_heads * build.head_dim
        self.query_proj = nn.Linear(build.embed_dim, width, bias=False)
        self.value_proj = nn.Linear(build.embed_dim, width, bias=False)
        self.out_proj = nn.Linear(width, build.embed_dim, bias=False)
        generator = torch.Generator().manual_seed(build.seed + 1009 * build.layer_index)
        sizes = (config.num_rounds, build.head_dim, config.num_columns(build.max_seq_len))
        self.register_buffer("rotations", torch.randn(sizes, generator=generator))  # stored: weights fit no others

    def _heads(self, hidden: Tensor, projection: nn.Linear) -> Tensor:
        heads: Tensor = projection(hidden).unflatten(-1, (self.build.num_heads, -1)).transpose(1, 2)
        return heads  # [B, H, L, D]

    def _merge(self, heads: Tensor) -> Tensor:
        merged: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return merged  # [B, L, E]

    @torch.no_grad()
    def _route(self, query: Tensor, padding: Tensor | None) -> Tensor:
        return choose_buckets(query, self.rotations, self.config, padding)

    def route(self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the bucket of each token in each round, `[B, H, R, L]`; see `choose_buckets`."""
        del context
        return self._route(self._heads(blank_padding(hidden, key_padding_mask), self.query_proj), key_padding_mask)

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Attend in sorted chunks, round by round; shapes as in `AbstractMixer.forward`.

        Padded positions are zeros that see only themselves, and give zeros.
        """
        del context  # the contract refuses one
        note_path("reformer.chunks")
        hidden = blank_padding(hidden, key_padding_mask)
        query, value = self._heads(hidden, self.query_proj), self._heads(hidden, self.value_proj)
        heads, buckets = (query, _normalised(query), value), self._route(query, key_padding_mask)
        order = buckets.argsort(dim=-1, stable=True)  # [B, H, R, L]: by bucket, then position
        rank = order.argsort(dim=-1)
        place = _places(buckets, rank, self.config.chunk_len)
        key_place = place if key_padding_mask is None else place.masked_fill(key_padding_mask[:, None, None], _NOWHERE)
        outputs, lses = [], []
        for index in range(self.config.num_rounds):
            places = (each[:, :, : index + 1] for each in (place, key_place))
            output, lse = self._round(*heads, order[:, :, index], rank[:, :, index], *places)
            outputs.append(output)
            lses.append(lse)
        return self._merge(merge_attention(outputs, lses))

    def _round(
        self, query: Tensor, key: Tensor, value: Tensor, order: Tensor, rank: Tensor, place: Tensor, key_place: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend to the pairs that this round is the first to see.

        Args:
            query: `[B, H, L, D]`.
            key: likewise, normalised.
            value: likewise.
            order: int64 `[B, H, L]`, the token at each place of the sorted order.
            rank: int64 `[B, H, L]`, the place of each token in it.
            place: int32 `[B, H, rounds up to this one, L]`, of `_places`.
            key_place: the same of tokens as keys.

        Returns:
            Output `[B, H, L, D]` and log-sum-exp of the scores `[B, H, L]`. A token sees itself, too, by a score so low
            that it counts only where no round shows it another one.
        """
        length, head_dim = query.shape[2:]
        size = min(self.config.chunk_len, length)
        num_chunks = -(-length // size)
        tail = num_chunks * size - length
        rows, at = order[..., None].expand(-1, -1, -1, head_dim), order[:, :, None].expand_as(place)
        queries = pad(query.gather(2, rows), (0, 0, 0, tail)).unflatten(2, (num_chunks, size))  # [B, H, n, C, D]
        places = pad(place.gather(3, at), (0, tail)).unflatten(3, (num_chunks, size))  # [B, H, rounds, n, C]
        # One chunk more at the start, which is nowhere, for the first to look back at.
        keys, values = (
            _with_the_one_before(pad(x.gather(2, rows), (0, 0, size, tail)).unflatten(2, (num_chunks + 1, size)), 2)
            for x in (key, value)
        )
        key_places = pad(key_place.gather(3, at), (size, tail), value=_NOWHERE)
        key_places = _with_the_one_before(key_places.unflatten(3, (num_chunks + 1, size)), 3)
        own = torch.arange(size, device=query.device)[:, None] + size  # where a token is among its keys
        among = torch.arange(2 * size, device=query.device)
        is_other = among < own if self.build.is_causal else among != own  # in a bucket, the order is by position
        *earlier, this = zip(places.unbind(2), key_places.unbind(2), strict=True)
        keep = _see_each_other(*this) & is_other
        for each in earlier:
            keep = keep & ~_see_each_other(*each)
        scores = (queries @ keys.mT).to(torch.promote_types(query.dtype, torch.float32))  # [B, H, n, C, 2 C]
        lowest = torch.finfo(scores.dtype).min
        floor = scores.new_full((size, 2 * size), lowest).masked_fill(among == own, lowest / 2)
        weights, lse = _SoftmaxWithLSE.apply(torch.where(keep, scores, floor))
        if self.training and self.build.dropout_p > 0:
            weights = dropout(weights, self.build.dropout_p)
        output, lse = (x.flatten(2, 3)[:, :, :length] for x in (weights.to(value.dtype) @ values, lse))
        return output.gather(2, rank[..., None].expand(-1, -1, -1, head_dim)), lse.gather(2, rank)

    def reference(
        self,
        hidden: Tensor,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        routing: Tensor | None = None,
    ) -> Tensor:
        """Compute softmax over P_i with a dense mask, in float32 at least, without dropout.

        Args:
            hidden: `[B, L, E]`.
            context: refused by the contract.
            key_padding_mask: bool `[B, L]`, True = padding.
            routing: buckets `[B, H, R, L]`; None means its own.
        """
        del context
        hidden = blank_padding(hidden, key_padding_mask)
        query, value = self._heads(hidden, self.query_proj), self._heads(hidden, self.value_proj)
        routing = self._route(query, key_padding_mask) if routing is None else routing
        chunk = routing.argsort(dim=-1, stable=True).argsort(dim=-1) // self.config.chunk_len
        query_chunk, key_chunk = chunk[..., :, None], chunk[..., None, :]
        is_near = (query_chunk == key_chunk) | (query_chunk == key_chunk + 1)  # [B, H, R, L, L]
        keep = (is_near & (routing[..., :, None] == routing[..., None, :])).any(2)
        if self.build.is_causal:
            keep = keep & causal_keep(keep.shape[2], keep.shape[3], keep.device)
        if key_padding_mask is not None:
            keep = keep & ~key_padding_mask[:, None, None]
        itself = torch.eye(keep.shape[-1], dtype=torch.bool, device=keep.device)
        others = keep & ~itself
        keep = torch.where(others.any(-1, keepdim=True), others, keep)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weights = masked_softmax(query.to(wide) @ _normalised(query.to(wide)).mT, keep)
        return self._merge((weights @ value.to(wide)).to(hidden.dtype))


def _normalised(query: Tensor) -> Tensor:
    """Return keys q / |q|, computed in float32 at least."""
    wide = query.to(torch.promote_types(query.dtype, torch.float32))
    scale: float = query.shape[-1] ** -0.5
    return (wide * (scale * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt())).to(query.dtype)


def _places(buckets: Tensor, rank: Tensor, chunk_len: int) -> Tensor:
    """Return int32 `[B, H, R, L]`, such that a query sees a key in a round exactly where the difference is 0 or 1.

    Within a bucket that is the number of chunks between them. Two more are added for each bucket, and neither number
    falls along the sorted order, so tokens of two buckets differ by two at least.
    """
    return (rank // chunk_len + 2 * buckets).int()


def _with_the_one_before(chunks: Tensor, dim: int) -> Tensor:
    """Return each chunk but the first behind the one before it; `dim` counts chunks, the next one their tokens."""
    count = chunks.shape[dim] - 1
    return torch.cat([chunks.narrow(dim, 0, count), chunks.narrow(dim, 1, count)], dim=dim + 1)


def _see_each_other(place: Tensor, key_place: Tensor) -> Tensor:
    """Return bool `[..., C, 2 C]`: the same bucket, in the same chunk or the key's one before."""
    query_at, key_at = place[..., :, None], key_place[..., None, :]
    return (query_at == key_at) | (query_at == key_at + 1)


class _SoftmaxWithLSE(torch.autograd.Function):
    """Softmax over the last dimension and the log-sum-exp, which keeps the weights alone for both gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor) -> tuple[Tensor, Tensor]:
        weights = scores.softmax(-1)
        return weights, scores.amax(-1) - weights.amax(-1).log()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG004
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor, grad_lse: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        grad: Tensor = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        return grad.addcmul(weights, grad_lse[..., None])
