"""Linear attention: softmax replaced by a positive feature map, so that keys and values are summed once.

Katharopoulos et al. 2020, "Transformers are RNNs", arXiv 2006.16236, equations 4 to 9.
    out_i = phi(q_i) (sum_j phi(k_j) v_j^T) / (phi(q_i) sum_j phi(k_j)),   phi(x) = elu(x) + 1
The causal form sums j <= i: within chunks of C positions by their C x C weights, across chunks by carried sums (Hua et
al. 2022, arXiv 2202.10447, section 3.2). Symbols: the paper's N is our L, its M and D our head_dim D.
Cost: time O(B H (L + S) D^2), causal O(B H L (C + D) D); memory O(B H L D); decode state O(B G D^2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, elu, pad

from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.masks import blank_padding, keep_mask
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention

CHUNK_LEN = 64
"""Positions of a chunk in the causal form. The carried sums then hold D / C numbers per position and feature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearAttentionConfig(VariantConfig):
    """The paper leaves nothing to choose but what keeps the normaliser from zero.

    Args:
        eps: added to the normaliser, as in the authors' code. It matters only where every feature has died out.
    """

    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.eps <= 0:
            raise ValueError(f"eps: expected more than 0; got {self.eps}")


@dataclass(frozen=True, slots=True)
class LinearState:
    """Sums over the positions so far, in float32 at least.

    Args:
        key_value: sum of phi(k) v^T, `[B, G, D, D]`.
        key: sum of phi(k), `[B, G, D, 1]`.
    """

    key_value: Tensor
    key: Tensor


def feature_map(heads: Tensor) -> Tensor:
    """Return phi(x) = elu(x) + 1, positive: x + 1 above zero and exp(x) below, to the last digit of 1."""
    return elu(heads) + 1.0


def linear_attention_flops(shape: Shape) -> int:
    """Count the matrix products: sums of keys and values, what queries read of them, and squares of causal chunks."""
    pairs = shape.batch_size * shape.num_heads
    summed = 2 * shape.key_len * shape.head_dim**2
    read = 2 * shape.query_len * shape.head_dim * (shape.head_dim + 1)
    squares = 4 * shape.query_len * min(CHUNK_LEN, shape.query_len) * shape.head_dim if shape.is_causal else 0
    return pairs * (summed + read + squares)


def linear_attention_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count both sums, whatever the length; they are kept in 4 bytes at least."""
    return shape.batch_size * shape.num_kv_heads * shape.head_dim * (shape.head_dim + 1) * max(4, itemsize)


@register_attention(
    "linear_attention",
    config=LinearAttentionConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=True,
        key_padding_mask=True,
        decode="recurrent",
        grouped_query=True,
        is_permutation_invariant=True,
        is_padding_invariant=True,
        why={"positions": "a bias by distance does not split into a factor of the query and one of the key"},
    ),
    complexity=Complexity(
        time="B H (L + S) D^2 (causal: B H L (C + D) D)",
        memory="B H L D",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1 (causal: log(L / C))",
        max_path="1",
        flops=linear_attention_flops,
        state_bytes=linear_attention_state_bytes,
    ),
    reference=Reference(
        title="Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
        authors="Katharopoulos et al.",
        year=2020,
        url="https://arxiv.org/abs/2006.16236",
        equation="4-9",
        code="https://github.com/idiap/fast-transformers",
        deviations=(
            "It is no approximation of softmax attention: no budget makes the two equal.",
            "Dropout on attention weights drops keys for all queries of a head alike, as single weights never exist.",
            "Rotary positions (not in the paper) turn queries and keys before phi, so that weights stay positive.",
            "Sums are kept in float32 at least, whatever the dtype of queries, keys and values.",
        ),
    ),
)
class LinearAttention(AbstractAttention):
    """Attention whose weights are products of positive features.

    Args:
        config: the variant's options.
        build: sizes and direction.
    """

    config: LinearAttentionConfig

    def _features(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return phi(Q), phi(K), zero at padding, and the values that dropout left, all in float32 at least."""
        wide = torch.promote_types(query.dtype, torch.float32)
        key, value = (blank_padding(x.to(wide), mask) for x in (key, value))
        value = expand_kv_heads(value, self.build.num_heads)
        if self.training and self.build.dropout_p > 0:
            value = value * dropout(torch.ones_like(value[..., :1]), self.build.dropout_p)
        key = expand_kv_heads(blank_padding(feature_map(key), mask), self.build.num_heads)
        return feature_map(query.to(wide)), key, value

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        dtype = query.dtype
        query, key, value = self._features(query, key, value, key_padding_mask)
        if self.build.is_causal:
            note_path("linear.chunked")
            return _causal(query, key, value, self.config.eps).to(dtype)
        note_path("linear.sum")
        total = query @ key.sum(-2)[..., None]  # [B, H, L, 1]
        return ((query @ (key.mT @ value)) / (total + self.config.eps)).to(dtype)

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute equation 4 with its weights written out, dense, in the dtype of the inputs, without dropout."""
        key, value = (expand_kv_heads(blank_padding(x, key_padding_mask), query.shape[1]) for x in (key, value))
        products = feature_map(query) @ feature_map(key).mT  # [B, H, L, S]
        keep = keep_mask(
            query.shape[2],
            key.shape[2],
            is_causal=self.build.is_causal,
            key_padding_mask=key_padding_mask,
            device=query.device,
        )
        if keep is not None:
            products = products.masked_fill(~keep, 0.0)
        return (products / (products.sum(-1, keepdim=True) + self.config.eps)) @ value

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> LinearState:
        """Return sums over nothing."""
        self._require_state()
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        sizes = (batch_size, self.build.num_kv_heads, self.build.head_dim)
        zeros = torch.zeros(*sizes, self.build.head_dim + 1, device=device, dtype=wide)
        return LinearState(zeros[..., :-1], zeros[..., -1:])

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, LinearState]:
        """Add one position to the sums and read them: equations 18 to 20 of the paper, O(B H D^2)."""
        if query.shape[2] != 1:
            raise ValueError(f"query: expected one new position [B, H, 1, D]; got {list(query.shape)}")
        wide = state.key.dtype
        features, read = feature_map(key.to(wide)), feature_map(query.to(wide))
        state = LinearState(state.key_value + features.mT @ value.to(wide), state.key + features.mT)
        sums = (expand_kv_heads(x, self.build.num_heads) for x in (state.key_value, state.key))
        weighted, total = (read @ x for x in sums)  # [B, H, 1, D], [B, H, 1, 1]
        return (weighted / (total + self.config.eps)).to(query.dtype), state

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, LinearState]:
        """Read new positions in chunks, as `forward` does, from the sums of those before."""
        if state is None:
            state = self.init_state(query.shape[0], device=query.device, dtype=query.dtype)
        wide, heads = state.key.dtype, self.build.num_heads
        features, value = feature_map(key.to(wide)), value.to(wide)
        start = LinearState(*(expand_kv_heads(x, heads) for x in (state.key_value, state.key)))
        key, many = (expand_kv_heads(x, heads) for x in (features, value))
        output = _causal(feature_map(query.to(wide)), key, many, self.config.eps, start).to(query.dtype)
        sums = LinearState(state.key_value + features.mT @ value, state.key + features.sum(-2)[..., None])
        return output, sums


def _causal(query: Tensor, key: Tensor, value: Tensor, eps: float, start: LinearState | None = None) -> Tensor:
    """Return causal linear attention `[B, H, L, D]` of features, positions aligned bottom right.

    Args:
        query: phi(Q) `[B, H, L, D]`.
        key: phi(K) `[B, H, S, D]`, zero where padded.
        value: `[B, H, S, D]`.
        eps: added to the normaliser.
        start: sums over positions before all of these, for H heads.
    """
    length, past = query.shape[2], key.shape[2] - query.shape[2]
    if past < 0:  # the first queries stand before every key
        return pad(_causal(query[:, :, -past:], key, value, eps), (0, 0, -past, 0))
    size = min(CHUNK_LEN, length)
    before, first = key[:, :, :past], value[:, :, :past]  # seen by every query
    query, key, value = (
        pad(x, (0, 0, 0, -length % size)).unflatten(2, (-1, size))
        for x in (query, key[:, :, past:], value[:, :, past:])
    )  # [B, H, n, C, D]
    seen, seen_key = before.mT @ first, before.sum(-2)[..., None]
    if start is not None:
        seen, seen_key = seen + start.key_value, seen_key + start.key
    carried = _carried(key.mT @ value, seen)  # [B, H, n, D, D]
    carried_key = _carried(key.sum(-2)[..., None], seen_key)  # [B, H, n, D, 1]
    weights = (query @ key.mT).tril()  # [B, H, n, C, C]
    total = weights.sum(-1, keepdim=True) + query @ carried_key
    output = (weights @ value + query @ carried) / (total + eps)
    return output.flatten(2, 3)[:, :, :length]


def _carried(parts: Tensor, start: Tensor) -> Tensor:
    """Return what each chunk finds: `start` `[B, H, ...]` and the parts `[B, H, n, ...]` of all chunks before it."""
    sums = torch.cat([start[:, :, None], parts[:, :, :-1]], dim=2)
    return sums.cumsum(2)
