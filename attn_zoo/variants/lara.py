"""LARA: softmax attention, estimated from C samples that the sequence itself proposes and each query weighs for itself.

Zheng, Wang and Kong 2022, "Linear Complexity Randomized Self-attention Mechanism", arXiv 2204.04667, section 4.
    exp(q k) = E_w [ xi(q, w) xi(k, w) ],   xi(x, w) = exp(w x - |x|^2 / 2),   w ~ N(0, I),   q and k over D^(1/4)
    w_c from N(mu_c, I),   mu_c = q_c + k_c, the landmarks of C segments;   p_c = N(w; mu_c, I), p_0 = N(w; 0, I)
    out_n = sum_c g_nc (sum_m xi(k_m, w_c) v_m) / sum_c g_nc (sum_m xi(k_m, w_c))
    g_nc = a_nc xi(q_n, w_c) p_0(w_c) / p_c(w_c)
    a_nc = p_c(w_c) / sum_c' p_c'(w_c) + beta (t_nc - mean_c t_nc),   t_nc = exp(q_n q_c) / sum_n' exp(q_n' q_c)
As p_c(w) / p_0(w) = xi(mu_c, w), all of it is xi, whose logarithms are kept until the largest of a sum is known. A
landmark is the mean of LN(W x + b) over its segment. The paper's N is our L, its sample omega_c our w_c.
Cost: time O(B H (L C D + L D^2 + C^2 D)); memory O(B H (L C + L D + C^2)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from attn_zoo.attention import AbstractAttention, BuildContext
from attn_zoo.attention.masks import blank_padding, zero_padded_rows
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.kernels.compress.compression import compress
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention

LEAST_SHARE = 1e-8
"""Of a sample in a query's weighing, a_nc, which may come out negative; as in the authors' code."""

WEIGHT_STD = 0.02
"""Of W where it starts; as in the authors' code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaraConfig(VariantConfig):
    """Where samples come from, and how they are weighed.

    Args:
        num_landmarks: C; a shorter sequence has one at each position. The authors take 49 of pictures, and 8 to 32 of
            sentences. No C makes the estimate exact.
        landmarks: `"projected"`, as the authors have them for sequences; `"pooled"`, means of the queries and keys as
            they are, without weights: for attention that was trained as softmax attention.
        samples: `"mean"`: w_c = mu_c, as the authors have it in evaluation. `"drawn"`: as the equations say, by the
            seed. The error of a drawn one falls with C where queries and keys are short; where they are not, few
            samples have all the weight, and those at the means come nearer to softmax attention.
        query_weight: beta, of what is the query's own in its weighing; 0 for the balance heuristic, the same for all.
            For pictures the authors take 2.
    """

    num_landmarks: int = 64
    landmarks: Literal["projected", "pooled"] = "projected"
    samples: Literal["mean", "drawn"] = "mean"
    query_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.num_landmarks < 1:
            raise ValueError(f"num_landmarks: expected at least 1; got {self.num_landmarks}")
        if not 0.0 <= self.query_weight < float("inf"):
            raise ValueError(f"query_weight: expected a finite number, at least 0; got {self.query_weight}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return few landmarks, and each kind of them and of samples."""
        return (
            {"num_landmarks": 12},
            {"num_landmarks": 7, "landmarks": "pooled", "samples": "drawn", "query_weight": 2.0},
            {"num_landmarks": 16, "samples": "drawn", "query_weight": 0.0},
        )


def _options(shape: Shape) -> LaraConfig:
    return shape.config or LaraConfig()


def lara_flops(shape: Shape) -> int:
    """Count W of queries and keys, and all products with landmarks and samples; t is not computed where beta is 0."""
    config, dim, length = _options(shape), shape.head_dim, shape.query_len
    count = min(config.num_landmarks, length)
    with_tokens = 4 + (config.query_weight > 0)  # of samples with queries and keys, q_c with queries, both sums
    attending = 2 * shape.num_heads * dim * count * (with_tokens * length + count)
    projecting = 2 * (shape.num_heads + shape.num_kv_heads) * length * dim**2 if config.landmarks == "projected" else 0
    return shape.batch_size * (attending + projecting)


def lara_bytes(shape: Shape, itemsize: int) -> int:
    """Count queries, keys, values, weights and draws read once and the output written once."""
    config, dim = _options(shape), shape.head_dim
    weights = 2 * (dim**2 + 3 * dim) if config.landmarks == "projected" else 0
    drawn = shape.num_heads * min(config.num_landmarks, shape.query_len) * dim if config.samples == "drawn" else 0
    return shape.io_bytes(itemsize) + (weights + drawn) * itemsize


class Proposals(NamedTuple):
    """What a sequence proposes; vectors are over D^(1/4).

    Args:
        query_marks: q_c `[B, H, C, D]`.
        centres: mu_c, likewise.
        samples: w_c, likewise.
        empty: bool `[B, C]`, True = a segment of padding only, or None without padding.
    """

    query_marks: Tensor
    centres: Tensor
    samples: Tensor
    empty: Tensor | None


class Projection(nn.Module):
    """LN(W x + b), the same for all heads, in the dtype of x.

    Args:
        dim: D.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        nn.init.trunc_normal_(self.linear.weight, std=WEIGHT_STD)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        weight, bias, scale, shift = (
            x.to(tokens.dtype) for x in (self.linear.weight, self.linear.bias, self.norm.weight, self.norm.bias)
        )
        return layer_norm(linear(tokens, weight, bias), scale.shape, scale, shift, self.norm.eps)


@register_attention(
    "lara",
    config=LaraConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=False,
        cross_attention=False,
        key_padding_mask=True,
        grouped_query=True,
        attention_dropout=False,
        is_padding_invariant=True,
        why={
            "causal": "a sample is proposed by a whole segment and sums up all keys, later positions included",
            "cross_attention": "a proposal adds the landmarks of queries and keys of one segment of one sequence",
            "decode": "a new position changes the landmarks, and with them every sample",
            "attention_dropout": "weights of single keys are never computed, and the authors drop nothing else here",
            "positions": "a bias by |i - j| does not split into a factor of the query and one of the key",
            "is_permutation_invariant": "segments are made of neighbours",
        },
    ),
    complexity=Complexity(
        time="B H (L C D + L D^2 + C^2 D)",
        memory="B H (L C + L D + C^2)",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1",
        max_path="1",
        flops=lara_flops,
        bytes=lara_bytes,
    ),
    reference=Reference(
        title="Linear Complexity Randomized Self-attention Mechanism",
        authors="Zheng et al.",
        year=2022,
        url="https://arxiv.org/abs/2204.04667",
        equation="section 4",
        code="https://github.com/HKUNLP/efficient-attention",
        deviations=(
            "Samples are at their means in training too; the authors draw them anew in each call of the training.",
            "Drawn ones are drawn once, for each head and landmark, by the seed, and serve in evaluation too.",
            "A draw has variance 1 beside q over D^(1/4), as the estimate needs; the authors' code adds it to q.",
            "t sums over queries, as in the authors' code.",
            "Of their ways to make proposals those for sequences are here: not the grids of pictures, nor mixed ones.",
            "There is one sample of each proposal; their code can also draw two, or one and its mirror image.",
            "Padded positions are in no landmark and no sum; in the authors' code they are in all but those over keys.",
            "Logarithms and sums are kept in float32 at least, whatever the dtype of queries, keys and values.",
            "Not in the paper: grouped heads, rotary positions (landmarks are made of turned queries and keys).",
        ),
    ),
)
class Lara(AbstractAttention):
    """Attention by samples from the neighbourhood of landmarks.

    Args:
        config: the variant's options.
        build: sizes; `seed` and `layer_index` decide what is drawn.
    """

    config: LaraConfig
    noise: Tensor | None

    def __init__(self, config: LaraConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.query_mark: nn.Module = nn.Identity()
        self.key_mark: nn.Module = nn.Identity()
        if config.landmarks == "projected":
            self.query_mark, self.key_mark = Projection(build.head_dim), Projection(build.head_dim)
        noise = None
        if config.samples == "drawn":
            generator = torch.Generator().manual_seed(build.seed + 1009 * build.layer_index)
            noise = torch.randn(build.num_heads, config.num_landmarks, build.head_dim, generator=generator)
        self.register_buffer("noise", noise)  # stored with the weights, which fit no other

    def _proposals(self, query_marks: Tensor, key_marks: Tensor, empty: Tensor | None) -> Proposals:
        """Return what landmarks `[B, H or G, C, D]` propose."""
        scale: float = self.build.head_dim**-0.25
        query_marks, key_marks = query_marks * scale, expand_kv_heads(key_marks, self.build.num_heads) * scale
        samples = centres = query_marks + key_marks
        if self.noise is not None:
            samples = centres + self.noise[:, : centres.shape[2]].to(centres.dtype)
        return Proposals(query_marks, centres, samples, empty)

    def _shares(self, query: Tensor, proposals: Proposals, mask: Tensor | None) -> Tensor:
        """Return a_nc less its first term, `[B, H, L, C]`."""
        lowest = torch.finfo(query.dtype).min
        closeness = query @ proposals.query_marks.mT
        if mask is not None:
            closeness = closeness.masked_fill(mask[:, None, :, None], lowest)
        closeness = closeness.softmax(2)
        if proposals.empty is None:
            mean = closeness.mean(-1, keepdim=True)
        else:
            filled = (~proposals.empty)[:, None, None, :].to(query.dtype)
            mean = (closeness @ filled.mT) / filled.sum(-1, keepdim=True).clamp(min=1.0)
        return self.config.query_weight * (closeness - mean)

    def _sums(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what each sample makes of the keys, as two factors.

        Args:
            query: `[B, H, L, D]`, in float32 at least, and zero at padding.
            key: `[B, G, L, D]`, likewise.
            value: likewise.
            mask: bool `[B, L]`, True = padding, or None.

        Returns:
            Logarithms of g_nc sum_m xi(k_m, w_c) but for -|q_n|^2 / 2, which cancels, `[B, H, L, C]`, and the values'
            mean under xi(k_m, w_c), `[B, H, C, D]`.
        """
        count = min(self.config.num_landmarks, query.shape[2])
        places = None if mask is None else segments(mask, count)
        query_marks = landmarks(self.query_mark(query), count, places)
        key_marks = landmarks(self.key_mark(key), count, places)
        proposals = self._proposals(query_marks, key_marks, None if places is None else ~places.any(1))
        scale: float = self.build.head_dim**-0.25
        query, key = query * scale, expand_kv_heads(key, self.build.num_heads) * scale
        lowest = torch.finfo(query.dtype).min

        of_keys = log_xi(proposals.samples, key)  # [B, H, C, S]
        if mask is not None:
            of_keys = of_keys.masked_fill(mask[:, None, None, :], lowest)
        total = of_keys.logsumexp(-1)  # [B, H, C]
        summaries = of_keys.softmax(-1) @ expand_kv_heads(value, self.build.num_heads)  # [B, H, C, D]

        of_proposals = log_xi(proposals.samples, proposals.centres)  # of p_c' at w_c, [B, H, C, C']
        own = of_proposals.diagonal(dim1=-2, dim2=-1)
        if proposals.empty is not None:
            others = ~torch.eye(count, dtype=torch.bool, device=query.device)
            of_proposals = of_proposals.masked_fill(proposals.empty[:, None, None, :] & others, lowest)
        shares = (own - of_proposals.logsumexp(-1)).exp()[:, :, None]  # [B, H, 1, C]
        if self.config.query_weight:
            shares = shares + self._shares(query, proposals, mask)
        weights = query @ proposals.samples.mT + (total - own)[:, :, None]
        weights = weights + shares.clamp(min=LEAST_SHARE).log()
        if proposals.empty is not None:
            weights = weights.masked_fill(proposals.empty[:, None, None, :], lowest)
        return weights, summaries

    @in_own_dtype
    def _estimate(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        weights, summaries = self._sums(query, key, value, mask)
        return weights.softmax(-1) @ summaries

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        note_path("lara")
        wide = torch.promote_types(query.dtype, torch.float32)
        given = query, key, value
        rows, keys, values = (blank_padding(x.to(wide), key_padding_mask) for x in given)
        return self._estimate(rows, keys, values, key_padding_mask).to(query.dtype)

    @in_own_dtype
    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute the weights of all pairs from the densities, dense, in float32 at least."""
        mask, dtype, num_heads = key_padding_mask, query.dtype, query.shape[1]
        wide = torch.promote_types(dtype, torch.float32)
        query, key, value = (blank_padding(x.to(wide), mask) for x in (query, key, value))
        padding = query.new_zeros(query.shape[0], query.shape[2], dtype=torch.bool) if mask is None else mask
        places = segments(padding, min(self.config.num_landmarks, query.shape[2]))  # [B, L, C]
        shares = places.to(wide) / places.sum(1, keepdim=True).clamp(min=1)
        query_marks, key_marks = (shares.mT[:, None] @ x for x in (self.query_mark(query), self.key_mark(key)))
        empty = ~places.any(1)
        proposals = self._proposals(query_marks, key_marks, empty)
        query, key = (x * self.build.head_dim**-0.25 for x in (query, expand_kv_heads(key, num_heads)))
        samples, lowest = proposals.samples, torch.finfo(wide).min

        log_base = -samples.square().sum(-1) / 2  # of p_0, [B, H, C]
        away = torch.cdist(samples, proposals.centres, compute_mode="donot_use_mm_for_euclid_dist")  # [B, H, C, C']
        log_densities = -away.square() / 2
        own = log_densities.diagonal(dim1=-2, dim2=-1)
        is_own = torch.eye(own.shape[-1], dtype=torch.bool, device=own.device)
        log_densities = log_densities.masked_fill(empty[:, None, None, :] & ~is_own, lowest)
        weighing = log_densities.softmax(-1).diagonal(dim1=-2, dim2=-1)[:, :, None]  # [B, H, 1, C]
        weighing = (weighing + self._shares(query, proposals, padding)).clamp(min=LEAST_SHARE)
        of_keys = log_xi(samples, key).masked_fill(padding[:, None, None, :], lowest)  # [B, H, C, S]
        of_queries = weighing.log() + log_xi(samples, query).mT + (log_base - own)[:, :, None]  # [B, H, L, C]
        of_queries = (of_queries + of_keys.logsumexp(-1)[:, :, None]).masked_fill(empty[:, None, None, :], lowest)
        weights = of_queries.softmax(-1) @ of_keys.softmax(-1)  # of keys, [B, H, L, S]
        return zero_padded_rows(weights @ expand_kv_heads(value, num_heads), mask).to(dtype)


def log_xi(samples: Tensor, tokens: Tensor) -> Tensor:
    """Return w x - |x|^2 / 2 of samples `[B, H, C, D]` and tokens `[B, H, L, D]`, `[B, H, C, L]`."""
    return samples @ tokens.mT - tokens.square().sum(-1)[:, :, None] / 2


def segments(padding: Tensor, count: int) -> Tensor:
    """Return bool `[B, L, C]`: which segment a token is in, none where it is padding.

    A sequence has C segments, the last of them longer by one where C does not divide its length, or as many as tokens
    where these are fewer: padding does not count.

    Args:
        padding: bool `[B, L]`, True = padding.
        count: C.

    >>> segments(torch.tensor([[False, False, True, False]]), 2).int().tolist()
    [[[1, 0], [0, 1], [0, 0], [0, 1]]]
    """
    real = ~padding
    rank, length = real.cumsum(-1) - 1, real.sum(-1, keepdim=True)
    width = (length // count).clamp(min=1)
    shorter = count - (length - count * width).clamp(min=0)  # segments of so many tokens
    place = torch.where(rank < shorter * width, rank // width, shorter + (rank - shorter * width) // (width + 1))
    return (place[..., None] == torch.arange(count, device=padding.device)) & real[..., None]


def landmarks(tokens: Tensor, count: int, places: Tensor | None) -> Tensor:
    """Return means over segments of tokens `[B, G, L, D]`, `[B, G, C, D]`; zero where nothing is.

    Args:
        tokens: finite.
        count: C, at most L.
        places: of `segments`, or None without padding.
    """
    if places is not None:
        shares = places.to(tokens.dtype) / places.sum(1, keepdim=True).clamp(min=1)
        return compress(tokens, shares[:, None])
    length = tokens.shape[2]
    width, longer = length // count, length % count  # the compiler has no divmod of lengths that vary
    shorter = (count - longer) * width
    means: Tensor = tokens[:, :, :shorter].unflatten(2, (count - longer, width)).mean(3)
    if not longer:
        return means
    return torch.cat([means, tokens[:, :, shorter:].unflatten(2, (longer, width + 1)).mean(3)], dim=2)
