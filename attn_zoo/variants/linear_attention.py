"""Linear attention: softmax replaced by a positive feature map, so that keys and values are summed once.

Katharopoulos et al. 2020, "Transformers are RNNs", arXiv 2006.16236, equations 4 to 9.
    out_i = phi(q_i) (sum_j phi(k_j) v_j^T) / (phi(q_i) sum_j phi(k_j)),   phi(x) = elu(x) + 1
The causal form sums j <= i, in chunks of C positions (`kernels.feature_sums`). Symbols: the paper's N is our L, its M
and D our head_dim D.
Cost: time O(B H (L + S) D^2), causal O(B H L (C + D) D); memory O(B H L D); decode state O(B G D^2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.masks import blank_padding, keep_mask
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.kernels import feature_sums
from attn_zoo.kernels.activations import elu
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


def feature_map(heads: Tensor) -> Tensor:
    """Return phi(x) = elu(x) + 1, positive: x + 1 above zero and exp(x) below, to the last digit of 1."""
    return elu(heads) + 1.0


def linear_attention_flops(shape: Shape) -> int:
    """Count the matrix products; the normaliser is what a value of 1 sums to."""
    chunk_len = CHUNK_LEN if shape.is_causal else None
    one = feature_sums.attend_flops(shape.head_dim, shape.head_dim, shape.query_len, shape.key_len, chunk_len)
    return shape.batch_size * shape.num_heads * one


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
        dropout_unit="tokens",
        why={"positions": "its weights are no exponentials of scores, to which a bias by distance could be added"},
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
        note_path("linear.chunked" if self.build.is_causal else "linear.sum")
        features = self._features(query, key, value, key_padding_mask)
        chunk_len = CHUNK_LEN if self.build.is_causal else None
        return feature_sums.attend(*features, eps=self.config.eps, chunk_len=chunk_len).to(query.dtype)

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute equation 4 with its weights written out, dense, without dropout; in float32 at least."""
        dtype = query.dtype
        query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
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
        return ((products / (products.sum(-1, keepdim=True) + self.config.eps)) @ value).to(dtype)

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return sums over nothing: of phi(k) v^T and, in the last column, of phi(k), `[B, G, D, D + 1]`."""
        self._require_state()
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        sizes = (batch_size, self.build.num_kv_heads, self.build.head_dim, self.build.head_dim + 1)
        return torch.zeros(sizes, device=device, dtype=wide)

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        """Add one position to the sums and read them: equations 18 to 20 of the paper, O(B H D^2)."""
        output, state = feature_sums.step(*self._wide(query, key, value, state), state, eps=self.config.eps)
        return output.to(query.dtype), state

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, Tensor]:
        """Read new positions in chunks, as `forward` does, from the sums of those before."""
        if state is None:
            state = self.init_state(query.shape[0], device=query.device, dtype=query.dtype)
        wide = self._wide(query, key, value, state)
        output, state = feature_sums.prefill(*wide, state, eps=self.config.eps, chunk_len=CHUNK_LEN)
        return output.to(query.dtype), state

    def _wide(self, query: Tensor, key: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return phi(Q), phi(K) and the values in the dtype of the state."""
        self._require_batch(query, state)
        return feature_map(query.to(state.dtype)), feature_map(key.to(state.dtype)), value.to(state.dtype)
