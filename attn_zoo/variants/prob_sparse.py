"""ProbSparse attention: the queries whose scores stand out in a sample attend exactly, the others get the mean.

Zhou et al. 2021, "Informer: Beyond Efficient Transformer for Long Sequence Time-Series Forecasting",
arXiv 2012.07436, equations 3 and 6 and algorithm 1. With U = c ceil(ln S) keys drawn for each query, u = c ceil(ln L):
    M(q_i) = max_j q_i k_j / sqrt(D) - mean_j q_i k_j / sqrt(D),   j in the sample of i                (6)
    out_i = softmax(q_i K^T / sqrt(D)) V for the u queries of each head with the largest M             (3)
    out_i = mean of V for all others, whose weights are taken to be near uniform
Symbols: the paper's L_Q and L_K are our L and S, its sampling factor c is `factor`.
Cost: time O(B H (L + S) log(L) D); memory O(B H L D + L log L), the sample being one table for all heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import AbstractAttention, BuildContext
from attn_zoo.attention.masks import blank_padding, keep_mask, masked_softmax, score_bias
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.metadata import LINEAR_BACKWARD_RATIO, Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention

_BITS = 31  # of a draw, of which a share of 2^31 says which key; integers stay as they are in a module of 16 bits
_MOST_NUMBERS = 1 << 22  # of drawn keys that exist at a time, so that memory stays linear in the length


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbSparseConfig(VariantConfig):
    """The authors' default.

    Args:
        factor: c; both the keys drawn for a query and the queries chosen are c ceil(ln n) of n.
    """

    factor: int = 5

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"factor: expected at least 1; got {self.factor}")

    def count(self, length: int) -> int:
        """Return how many of so many tokens are drawn or chosen: at least one."""
        return min(length, max(1, self.factor * math.ceil(math.log(length))))

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return so few that most queries get the mean."""
        return ({"factor": 1},)

    @classmethod
    def budgets(cls, seq_len: int) -> tuple[dict[str, Any], ...]:
        """Return more and more queries; the last has them all."""
        return tuple({"factor": factor} for factor in (1, max(1, seq_len // 8), seq_len))


def _counts(shape: Shape) -> tuple[int, int]:
    """Return u and U."""
    config: ProbSparseConfig = shape.config or ProbSparseConfig()
    return config.count(shape.query_len), config.count(shape.key_len)


def prob_sparse_flops(shape: Shape) -> int:
    """Count the scores of the sample, and both products of the chosen queries with all keys."""
    num_chosen, num_drawn = _counts(shape)
    pairs = 2 * shape.query_len * num_drawn + 4 * num_chosen * shape.key_len
    return shape.batch_size * shape.num_heads * shape.head_dim * pairs


def prob_sparse_bytes(shape: Shape, itemsize: int) -> int:
    """Count inputs, output, and the draws, of 4 bytes each."""
    return shape.io_bytes(itemsize) + 4 * shape.query_len * _counts(shape)[1]


def prob_sparse_backward_ratio(shape: Shape) -> float:
    """Count five matrix products for two of the chosen queries, and none for the sample, which only chooses."""
    num_chosen, num_drawn = _counts(shape)
    attention = 4 * num_chosen * shape.key_len
    return 1.25 * LINEAR_BACKWARD_RATIO * attention / (attention + 2 * shape.query_len * num_drawn)


@register_attention(
    "prob_sparse",
    config=ProbSparseConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=False,
        cross_attention=True,
        key_padding_mask=True,
        grouped_query=True,
        attention_dropout=False,
        why={
            "causal": "which queries are chosen depends on all of them, and on keys that are drawn from the future",
            "decode": "a query is chosen among all others",
            "attention_dropout": "its authors drop none of its weights, most of which are one over the length",
            "is_permutation_invariant": "which keys are drawn for a query depends on their positions",
            "is_padding_invariant": "how many keys are drawn, and which, depends on the length with padding",
        },
    ),
    complexity=Complexity(
        time="B H (L + S) log(L) D",
        memory="B H L D + L log L",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1",
        max_path="1",
        flops=prob_sparse_flops,
        bytes=prob_sparse_bytes,
        backward_ratio=prob_sparse_backward_ratio,
    ),
    reference=Reference(
        title="Informer: Beyond Efficient Transformer for Long Sequence Time-Series Forecasting",
        authors="Zhou et al.",
        year=2021,
        url="https://arxiv.org/abs/2012.07436",
        equation="3 and 6; algorithm 1",
        code="https://github.com/zhouhaoyi/Informer2020",
        deviations=(
            "The masked form is left out: it chooses its queries with knowledge of the future.",
            "Which keys are drawn follows from the seed and the layer; the authors' code draws anew at every call.",
            "The mean in M is over the sample, as in algorithm 1; the authors' code divides its sum by S.",
            "Padded keys are in no maximum and no mean, and padded queries are never chosen before others.",
            "At least one query is chosen and one key drawn, where the authors' count is zero, at a length of 1.",
        ),
    ),
)
class ProbSparseAttention(AbstractAttention):
    """Exact softmax for the queries that need it, the mean of the values for the others.

    Args:
        config: the variant's options.
        build: sizes and direction; `seed` and `layer_index` decide which keys are drawn.
    """

    config: ProbSparseConfig
    draws: Tensor

    def __init__(self, config: ProbSparseConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        generator = torch.Generator().manual_seed(build.seed + 1009 * build.layer_index)
        shape = build.max_seq_len, config.count(build.max_seq_len)
        draws = torch.randint(2**_BITS, shape, generator=generator, dtype=torch.int32)
        self.register_buffer("draws", draws, persistent=False)

    def sample(self, query_len: int, key_len: int) -> Tensor:
        """Return the keys drawn for each query, with replacement, int64 `[L, U]`."""
        return self.draws[:query_len, : self.config.count(key_len)].long() * key_len >> _BITS

    @torch.no_grad()
    def route(self, query: Tensor, key: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the queries of each head that attend, int64 `[B, H, u]`."""
        wide = torch.promote_types(query.dtype, torch.float32)
        key = expand_kv_heads(blank_padding(key, key_padding_mask), query.shape[1])  # padding adds nothing to a sum
        sample = self.sample(query.shape[2], key.shape[2])
        total = torch.zeros(query.shape[:3], dtype=wide, device=query.device)
        largest = total + float("-inf")
        for drawn in sample.split(max(1, _MOST_NUMBERS // max(1, query.numel())), dim=1):
            scores = _scores(query.to(wide), key[:, :, drawn].to(wide))  # [B, H, L, some of U]
            total += scores.sum(-1)
            if key_padding_mask is not None:
                scores = scores.masked_fill(key_padding_mask[:, None, drawn], float("-inf"))
            largest = torch.maximum(largest, scores.amax(-1))
        if key_padding_mask is None:
            measure = largest - total / sample.shape[1]
        else:
            measure = largest - total / (~key_padding_mask[:, None, sample]).sum(-1).clamp(min=1)
            if not self.build.is_cross:
                measure = measure.masked_fill(key_padding_mask[:, None], float("-inf"))
        chosen: Tensor = measure.topk(self.config.count(query.shape[2]), sorted=False).indices
        return chosen

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        chosen = self.route(query, key, key_padding_mask=key_padding_mask)
        rows = chosen[..., None].expand(-1, -1, -1, query.shape[3])
        attended = exact_attention(
            query.gather(2, rows), key, value, score_bias=score_bias, key_padding_mask=key_padding_mask
        )
        mean = _mean(value, key_padding_mask)
        return expand_kv_heads(mean, query.shape[1]).expand_as(query).scatter(2, rows, attended)

    def reference(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        routing: Tensor | None = None,
    ) -> Tensor:
        """Compute equation 3 with dense weights, those of the others being uniform, under a routing or its own."""
        if routing is None:
            routing = self.route(query, key, key_padding_mask=key_padding_mask)
        key, value = (expand_kv_heads(blank_padding(x, key_padding_mask), query.shape[1]) for x in (key, value))
        is_chosen = torch.zeros(query.shape[:3], dtype=torch.bool, device=query.device).scatter(2, routing, value=True)
        scores = (query * query.shape[-1] ** -0.5 @ key.mT) * is_chosen[..., None]  # [B, H, L, S]; equal ones: the mean
        sizes = query.shape[2], key.shape[2]
        keep = keep_mask(*sizes, is_causal=False, key_padding_mask=key_padding_mask, device=query.device)
        return masked_softmax(scores, keep) @ value


@in_own_dtype
def _scores(query: Tensor, drawn: Tensor) -> Tensor:
    """Return the scores `[B, H, L, n]` of queries `[B, H, L, D]` and keys of their own `[B, H, L, n, D]`."""
    scores: Tensor = query[..., None, :] * query.shape[-1] ** -0.5 @ drawn.mT
    return scores.squeeze(-2)


def _mean(value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return the mean over the values that are not padding, `[B, G, 1, D]`; zero where there are none."""
    if key_padding_mask is None:
        return value.mean(2, keepdim=True)
    wide = torch.promote_types(value.dtype, torch.float32)
    count = (~key_padding_mask).sum(-1).clamp(min=1)[:, None, None, None]
    return (blank_padding(value, key_padding_mask).sum(2, keepdim=True, dtype=wide) / count).to(value.dtype)
