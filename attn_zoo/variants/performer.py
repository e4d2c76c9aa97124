"""Performer: the weights of softmax attention, estimated by positive random features (FAVOR+).

Choromanski et al. 2021, "Rethinking Attention with Performers", arXiv 2009.14794, equations 4, 5 and 7.
    exp(q k / sqrt(D)) = E_w [ phi_w(q) phi_w(k) ],   phi_w(x) = exp(w x - |x|^2 / 2),   x over D^(1/4),   w ~ N(0, 1)^D
    out_i = sum_r phi_r(q_i) (sum_j phi_r(k_j) v_j) / (sum_r phi_r(q_i) sum_j phi_r(k_j)),   r = 1 .. m
The rows w_r are orthogonal within each block of D (section 2.4), which lowers the variance. `"relu"` replaces the
estimate by weights of their own, phi_r(x) = max(w_r x, 0) + 0.001: the paper's generalised attention.
The causal form (equation 2) sums j <= i, in chunks of C positions (`kernels.feature_sums`). The paper's d is our D.
Cost: time O(B H (L + S) m D), causal O(B H L (m + C) (m + D)); memory O(B H L m); decode state O(B G m D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import dropout

from attn_zoo.attention import AbstractAttention, BuildContext
from attn_zoo.attention.masks import blank_padding, keep_mask
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.kernels import feature_sums
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention

CHUNK_LEN = 128
"""Positions of a chunk in the causal form. The carried sums then hold m D / C numbers per position."""

RELU_FLOOR = 1e-3
"""Added to features of `"relu"`, so that no query is left without a weight; the authors' `kernel_epsilon`."""

LARGEST_EXPONENT = 60.0
"""Of a causal key's feature; exp(60) leaves room in float32 for sums over a million positions. Of a row w no key
exceeds |w|^2 / 2, so it takes D above 120, and a key that lies along a row, to be cut here."""

EPS = 1e-30
"""Added to the normaliser, for rows that see no key, or only keys whose features have died out in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerformerConfig(VariantConfig):
    """What is drawn.

    Args:
        num_features: m, rows w_r. The error of an estimated weight falls as 1 / sqrt(m), so no m makes it exact; and it
            grows as exp(|q + k|^2 / (2 sqrt(D))) (lemma 2): for unit normal queries and keys with D = 16 it takes
            65 536 rows to halve the error of the output.
        kernel: `"softmax"`, the estimate of softmax attention; `"relu"`, the generalised attention that did best in the
            paper's experiments on proteins. In Nyströmformer's table of Long Range Arena Performer is `"softmax"`: its
            code asks for `relu` and never turns generalised attention on.
    """

    num_features: int = 256
    kernel: Literal["softmax", "relu"] = "softmax"

    def __post_init__(self) -> None:
        if self.num_features < 1:
            raise ValueError(f"num_features: expected at least 1; got {self.num_features}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return both kernels, with fewer rows than one block of orthogonal ones, and with more."""
        return {"num_features": 24}, {"num_features": 5, "kernel": "relu"}


def _products(shape: Shape) -> tuple[int, int]:
    """Return FLOPs of the projections onto w, and of sums over keys and their reading."""
    config: PerformerConfig = shape.config or PerformerConfig()
    count, dim = config.num_features, shape.head_dim
    tokens = shape.num_heads * shape.query_len + shape.num_kv_heads * shape.key_len
    chunk_len = CHUNK_LEN if shape.is_causal else None
    one = feature_sums.attend_flops(count, dim, shape.query_len, shape.key_len, chunk_len)
    return 2 * shape.batch_size * tokens * dim * count, shape.batch_size * shape.num_heads * one


def performer_flops(shape: Shape) -> int:
    """Count all matrix products; the normaliser is what a value of 1 sums to."""
    return sum(_products(shape))


def performer_backward_ratio(shape: Shape) -> float:
    """Return 1 for the projections, as w has no gradient, and 2 for the rest."""
    projecting, rest = _products(shape)
    return (projecting + 2 * rest) / (projecting + rest)


def performer_bytes(shape: Shape, itemsize: int) -> int:
    """Count queries, keys, values and the rows w read once and the output written once."""
    config: PerformerConfig = shape.config or PerformerConfig()
    return shape.io_bytes(itemsize) + config.num_features * shape.head_dim * itemsize


def performer_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count both sums, whatever the length; they are kept in 4 bytes at least."""
    config: PerformerConfig = shape.config or PerformerConfig()
    return shape.batch_size * shape.num_kv_heads * config.num_features * (shape.head_dim + 1) * max(4, itemsize)


def draw_rows(count: int, dim: int, seed: int) -> Tensor:
    """Return w `[count, dim]`, float64: blocks of `dim` orthogonal rows, each as long as a normal vector's draw.

    Each row alone is normal, so the estimate keeps its mean; the QR decomposition of a normal matrix, with the signs of
    R's diagonal, is uniform over orthogonal ones (Mezzadri 2007, arXiv math-ph/0609050).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(dim, dim, generator=generator, dtype=torch.float64)

    blocks = []
    for _ in range(-(-count // dim)):
        directions, upper = torch.linalg.qr(normal())
        directions = directions * upper.diagonal().sign()
        blocks.append(directions.mT * torch.linalg.vector_norm(normal(), dim=-1, keepdim=True))
    return torch.cat(blocks)[:count]


@register_attention(
    "performer",
    config=PerformerConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=True,
        key_padding_mask=True,
        decode="recurrent",
        grouped_query=True,
        is_permutation_invariant=True,
        is_padding_invariant=True,
        dropout_unit="tokens",
        why={"positions": "a bias by |i - j| does not split into a factor of the query and one of the key"},
    ),
    complexity=Complexity(
        time="B H (L + S) m D (causal: B H L (m + C) (m + D))",
        memory="B H L m",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1 (causal: log(L / C))",
        max_path="1",
        flops=performer_flops,
        backward_ratio=performer_backward_ratio,
        bytes=performer_bytes,
        state_bytes=performer_state_bytes,
    ),
    reference=Reference(
        title="Rethinking Attention with Performers",
        authors="Choromanski et al.",
        year=2021,
        url="https://arxiv.org/abs/2009.14794",
        equation="2, 4, 5, 7",
        code="https://github.com/google-research/google-research/tree/master/performer",
        deviations=(
            "The rows w are drawn once, for each layer, by the seed; the authors' code draws them anew in every call.",
            "Nothing is added to features of the softmax kernel; the authors' code adds 0.000001 to each.",
            "A feature is divided by its largest key's, where the authors' code divides all by the largest of all.",
            "Causal features are not divided, as that key may be a later one.",
            "So those of causal keys with |k|^2 above 200 sqrt(D) die out, and rows that see no others are near zero.",
            "Generalised attention projects x over D^(1/4); by default the authors' code does neither.",
            "Dropout on attention weights drops keys for all queries of a head alike, as single weights never exist.",
            "Features and sums are kept in float32 at least, whatever the dtype of queries, keys and values.",
        ),
    ),
)
class Performer(AbstractAttention):
    """Attention whose weights are products of random features.

    Args:
        config: the variant's options.
        build: sizes and direction; `seed` and `layer_index` decide the rows w.
    """

    config: PerformerConfig
    rows: Tensor

    def __init__(self, config: PerformerConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        rows = draw_rows(config.num_features, build.head_dim, build.seed + 1009 * build.layer_index)
        self.register_buffer("rows", rows.to(torch.get_default_dtype()))  # stored with the weights, which fit no others

    @in_own_dtype
    def _project(self, heads: Tensor) -> Tensor:
        """Return w x of x = heads / D^(1/4), `[B, H or G, tokens, m]`."""
        scale: float = self.build.head_dim**-0.25
        return heads @ (self.rows.to(heads.dtype) * scale).mT

    def _phi(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return phi(Q) `[B, H, L, m]` and phi(K) `[B, G, S, m]`, zero at padding.

        Those of the softmax kernel are up to factors that the quotient cancels: of each query, and in the bidirectional
        form of each feature. What keys lose there in exp(-c) queries gain, so that one weight of each row is at least
        1, however large keys are.
        """
        scale: float = self.build.head_dim**-0.5
        half_square = key.square().sum(-1, keepdim=True) * (scale / 2)  # |x|^2 / 2
        query, key = self._project(query), self._project(key)
        if self.config.kernel == "relu":
            return query.relu() + RELU_FLOOR, blank_padding(key.relu() + RELU_FLOOR, mask)
        key = key - half_square
        if mask is not None:
            key = key.masked_fill(mask[:, None, :, None], float("-inf"))
        if self.build.is_causal:  # the largest key may be a later one
            key = key.clamp(max=LARGEST_EXPONENT)
        else:
            largest = key.detach().amax(2, keepdim=True)  # c [B, G, 1, m]
            largest = largest.masked_fill(largest.isneginf(), 0.0)  # all is padding
            key, query = key - largest, query + expand_kv_heads(largest, self.build.num_heads)
        return (query - query.detach().amax(-1, keepdim=True)).exp(), key.exp()

    def _features(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return phi(Q), phi(K), zero at padding, and the values that dropout left, all in float32 at least."""
        wide = torch.promote_types(query.dtype, torch.float32)
        key, value = (blank_padding(x.to(wide), mask) for x in (key, value))
        value = expand_kv_heads(value, self.build.num_heads)
        if self.training and self.build.dropout_p > 0:
            value = value * dropout(torch.ones_like(value[..., :1]), self.build.dropout_p)
        query, key = self._phi(query.to(wide), key, mask)
        return query, expand_kv_heads(key, self.build.num_heads), value

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        note_path("performer.chunked" if self.build.is_causal else "performer.sum")
        features = self._features(query, key, value, key_padding_mask)
        chunk_len = CHUNK_LEN if self.build.is_causal else None
        return feature_sums.attend(*features, eps=EPS, chunk_len=chunk_len).to(query.dtype)

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute equation 4 with its weights written out, dense, without dropout; in float32 at least."""
        dtype = query.dtype
        query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
        key, value = (expand_kv_heads(blank_padding(x, key_padding_mask), query.shape[1]) for x in (key, value))
        query, key = self._phi(query, key, key_padding_mask)
        weights = query @ key.mT  # [B, H, L, S]
        keep = keep_mask(
            query.shape[2],
            key.shape[2],
            is_causal=self.build.is_causal,
            key_padding_mask=key_padding_mask,
            device=query.device,
        )
        if keep is not None:
            weights = weights.masked_fill(~keep, 0.0)
        return ((weights / (weights.sum(-1, keepdim=True) + EPS)) @ value).to(dtype)

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return sums over nothing: of phi(k) v^T and, in the last column, of phi(k), `[B, G, m, D + 1]`."""
        self._require_state()
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        sizes = (batch_size, self.build.num_kv_heads, self.config.num_features, self.build.head_dim + 1)
        return torch.zeros(sizes, device=device, dtype=wide)

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        """Add one position to the sums and read them, O(B H m D)."""
        output, state = feature_sums.step(*self._wide(query, key, value, state), state, eps=EPS)
        return output.to(query.dtype), state

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, Tensor]:
        """Read new positions in chunks, as `forward` does, from the sums of those before."""
        if state is None:
            state = self.init_state(query.shape[0], device=query.device, dtype=query.dtype)
        wide = self._wide(query, key, value, state)
        output, state = feature_sums.prefill(*wide, state, eps=EPS, chunk_len=CHUNK_LEN)
        return output.to(query.dtype), state

    def _wide(self, query: Tensor, key: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return phi(Q), phi(K) and the values in the dtype of the state."""
        self._require_batch(query, state)
        query, key, value = (x.to(state.dtype) for x in (query, key, value))
        return *self._phi(query, key), value
