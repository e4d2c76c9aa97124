"""cosFormer: linear attention whose weights fall with distance, as a cosine, which splits into query and key.

Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention", arXiv 2202.08791.
    out_i = sum_j w_ij v_j / sum_j w_ij,   w_ij = relu(q_i) relu(k_j) cos(pi (i - j) / (2 M)),   M = max_seq_len
With a_i = pi i / (2 M), cos(a_i - a_j) = cos a_i cos a_j + sin a_i sin a_j: w_ij is the product of the 2 D features
    phi_i(x) = [relu(x) cos a_i, relu(x) sin a_i]
of query and key, none of which is negative, as all angles lie in [0, pi / 2).
The causal form sums j <= i, in chunks of C positions (`kernels.feature_sums`). The paper's N is our L, its d our D.
Cost: time O(B H L D^2), causal O(B H L (C + D) D); memory O(B H L D); decode state O(B G D^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import dropout

from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.masks import blank_padding, keep_mask
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.kernels import feature_sums
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention

CHUNK_LEN = 128
"""Positions of a chunk in the causal form. The carried sums then hold 2 D / C numbers per position and value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CosformerConfig(VariantConfig):
    """The paper leaves nothing to choose but what keeps the normaliser from zero.

    Args:
        eps: added to the normaliser. It matters only where hardly a feature of a query is positive together with one of
            a key.
    """

    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.eps <= 0:
            raise ValueError(f"eps: expected more than 0; got {self.eps}")


@dataclass(frozen=True, slots=True)
class CosformerState:
    """What decoding keeps.

    Args:
        sums: of phi(k) v^T and, in the last column, of phi(k), `[B, G, 2 D, D + 1]`, in float32 at least.
        position: of the next token.
    """

    sums: Tensor
    position: int = 0


def angles(count: int, first: int, max_seq_len: int, device: torch.device) -> Tensor:
    """Return a_i = pi i / (2 M) of `count` positions from `first` on, `[count]`, in float64."""
    at = torch.arange(first, first + count, dtype=torch.float64, device=device)
    return at * (math.pi / (2 * max_seq_len))


def cosformer_flops(shape: Shape) -> int:
    """Count the matrix products; the normaliser is what a value of 1 sums to."""
    chunk_len = CHUNK_LEN if shape.is_causal else None
    one = feature_sums.attend_flops(2 * shape.head_dim, shape.head_dim, shape.query_len, shape.key_len, chunk_len)
    return shape.batch_size * shape.num_heads * one


def cosformer_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count both sums, whatever the length; they are kept in 4 bytes at least."""
    return shape.batch_size * shape.num_kv_heads * 2 * shape.head_dim * (shape.head_dim + 1) * max(4, itemsize)


@register_attention(
    "cosformer",
    config=CosformerConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        decode="recurrent",
        grouped_query=True,
        is_padding_invariant=True,
        dropout_unit="tokens",
        why={
            "cross_attention": "its weights depend on positions; queries decoded across come without theirs",
            "positions": "its weights are no exponentials of scores, to which a bias by distance could be added",
        },
    ),
    complexity=Complexity(
        time="B H L D^2 (causal: B H L (C + D) D)",
        memory="B H L D",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1 (causal: log(L / C))",
        max_path="1",
        flops=cosformer_flops,
        state_bytes=cosformer_state_bytes,
    ),
    reference=Reference(
        title="cosFormer: Rethinking Softmax in Attention",
        authors="Qin et al.",
        year=2022,
        url="https://arxiv.org/abs/2202.08791",
        code="https://github.com/OpenNLPLab/cosFormer",
        deviations=(
            "It is no approximation of softmax attention: no budget makes the two equal.",
            "M is max_seq_len; the authors' code takes the length of each batch, so that padding would change results.",
            "Cross-attention, which the authors' code has with positions from the first token of either, is refused.",
            "eps is added to the normaliser, where the authors' code raises it to eps at least.",
            "Dropout on attention weights drops keys for all queries of a head alike, as single weights never exist.",
            "Rotary positions (not in the paper) turn queries and keys before relu, so that no weight is negative.",
            "Sums are kept in float32 at least, whatever the dtype of queries, keys and values.",
            "Decoding ends at max_seq_len: beyond, the weights of the first keys would be negative.",
        ),
    ),
)
class Cosformer(AbstractAttention):
    """Attention whose weights are products of features that turn with the position.

    Args:
        config: the variant's options.
        build: sizes and direction; `max_seq_len` is M.
    """

    config: CosformerConfig

    def _phi(self, heads: Tensor, first: int = 0) -> Tensor:
        """Return phi(x) of positions from `first` on, `[..., n, 2 D]`."""
        at = angles(heads.shape[-2], first, self.build.max_seq_len, heads.device)
        turn = torch.stack([at.cos(), at.sin()], dim=-1).to(heads.dtype)  # [n, 2]
        return (heads.relu()[..., None, :] * turn[..., None]).flatten(-2)

    def _features(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return phi(Q), phi(K), zero at padding, and the values that dropout left, all in float32 at least."""
        wide = torch.promote_types(query.dtype, torch.float32)
        key, value = (blank_padding(x.to(wide), mask) for x in (key, value))
        value = expand_kv_heads(value, self.build.num_heads)
        if self.training and self.build.dropout_p > 0:
            value = value * dropout(torch.ones_like(value[..., :1]), self.build.dropout_p)
        return self._phi(query.to(wide)), expand_kv_heads(self._phi(key), self.build.num_heads), value

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        note_path("cosformer.chunked" if self.build.is_causal else "cosformer.sum")
        features = self._features(query, key, value, key_padding_mask)
        chunk_len = CHUNK_LEN if self.build.is_causal else None
        return feature_sums.attend(*features, eps=self.config.eps, chunk_len=chunk_len).to(query.dtype)

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Write the weights out, dense, cosine included, without dropout; in float32 at least."""
        dtype = query.dtype
        query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
        key, value = (expand_kv_heads(blank_padding(x, key_padding_mask), query.shape[1]) for x in (key, value))
        at = angles(key.shape[2], 0, self.build.max_seq_len, key.device)
        weights = (query.relu() @ key.relu().mT) * (at[:, None] - at).cos().to(query.dtype)  # [B, H, L, S]
        keep = keep_mask(
            query.shape[2],
            key.shape[2],
            is_causal=self.build.is_causal,
            key_padding_mask=key_padding_mask,
            device=query.device,
        )
        if keep is not None:
            weights = weights.masked_fill(~keep, 0.0)
        return ((weights / (weights.sum(-1, keepdim=True) + self.config.eps)) @ value).to(dtype)

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> CosformerState:
        """Return sums over nothing."""
        self._require_state()
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        sizes = (batch_size, self.build.num_kv_heads, 2 * self.build.head_dim, self.build.head_dim + 1)
        return CosformerState(torch.zeros(sizes, device=device, dtype=wide))

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: CosformerState) -> tuple[Tensor, CosformerState]:
        """Add one position to the sums and read them, O(B H D^2); there may be `max_seq_len` positions."""
        output, sums = feature_sums.step(*self._wide(query, key, value, state), state.sums, eps=self.config.eps)
        return output.to(query.dtype), CosformerState(sums, state.position + 1)

    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, state: CosformerState | None = None
    ) -> tuple[Tensor, CosformerState]:
        """Read new positions in chunks, as `forward` does, from the sums of those before."""
        if state is None:
            state = self.init_state(query.shape[0], device=query.device, dtype=query.dtype)
        wide = self._wide(query, key, value, state)
        output, sums = feature_sums.prefill(*wide, state.sums, eps=self.config.eps, chunk_len=CHUNK_LEN)
        return output.to(query.dtype), CosformerState(sums, state.position + query.shape[2])

    def _wide(self, query: Tensor, key: Tensor, value: Tensor, state: CosformerState) -> tuple[Tensor, Tensor, Tensor]:
        """Return phi(Q), phi(K) and the values in the dtype of the state."""
        self._require_batch(query, state.sums)
        if (length := state.position + query.shape[2]) > self.build.max_seq_len:
            raise ValueError(f"expected at most max_seq_len = {self.build.max_seq_len} tokens; this makes {length}")
        query, key, value = (x.to(state.sums.dtype) for x in (query, key, value))
        return self._phi(query, state.position), self._phi(key, state.position), value
