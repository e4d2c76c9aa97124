"""Multi-head latent attention: keys and values of all heads come from one short vector, and decoding keeps only that.

DeepSeek-AI 2024, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", arXiv
2405.04434, equations 9 to 19. For a position's hidden state h:
    latent (9)               c = RMSNorm(W_DKV h)
    keys, values (10, 11)    k_i^C = W_UK^i c,   v_i = W_UV^i c
    rotary keys (15)         k^R = RoPE(W_KR h), one for all heads
    queries (14, 16)         q_i = [q_i^C; RoPE(q_i^R)],   [q_i^C; q_i^R] = W_Q^i h
    attention (17 to 19)     out = W_O [o_1 .. o_H],   o_i = softmax(q_i^T [k_i^C; k^R] / sqrt(D)) v_i
Or queries come from a latent of their own, W_UQ^i RMSNorm(W_DQ h) in place of W_Q^i h (12, 13).
Decoding never makes keys or values (section 2.1.2): q^T W_UK c is a product of W_UK^T q with c itself, and the sum of
values W_UV times the sum of latents. So each head reads the same rows [c; k^R], as in multi-query attention.
Symbols: C is the paper's d_c, R its d_h^R.
Cost: time O(B H L S D); memory O(B H L D); decode state O(B (C + R)) for each position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.contract import product_dtype
from attn_zoo.attention.decode import KVCache
from attn_zoo.attention.masks import blank_padding, finite_padding, keep_mask, masked_softmax, score_bias
from attn_zoo.attention.oracle import attention_weights
from attn_zoo.attention.rotary import rotate
from attn_zoo.errors import ConfigError
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer

NORM_EPS = 1e-6
"""Of the norms of latents, as in the authors' code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaConfig(VariantConfig):
    """Widths of the latents over that of a head.

    Args:
        latent_factor: C / D. The paper's models have 128 heads of 128 features and take 4.
        query_latent_factor: width of the latent of queries over D, the paper's 12; 0 projects queries straight, as the
            smaller of its models does.
    """

    latent_factor: int = 4
    query_latent_factor: int = 0

    def __post_init__(self) -> None:
        for name, least in (("latent_factor", 1), ("query_latent_factor", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}; got {getattr(self, name)}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return latents narrower than all keys and values, of queries too."""
        return {"latent_factor": 1}, {"latent_factor": 2, "query_latent_factor": 1}


def rotary_dim(head_dim: int) -> int:
    """Return R: a third of the D features of a head, as in the paper (64 beside 128), in whole pairs.

    >>> [rotary_dim(head_dim) for head_dim in (16, 32, 64, 192)]
    [4, 10, 20, 64]
    """
    return head_dim // 6 * 2


@dataclass(frozen=True, slots=True)
class MlaState:
    """What decoding keeps.

    Args:
        rows: [c; k^R] of each position. A cache has two tensors of one width: keys are the first half of the features
            and values the second.
        position: of the next token.
        key_padding_mask: bool `[B, S]` of the context, in cross-attention.
    """

    rows: KVCache
    position: int = 0
    key_padding_mask: Tensor | None = None


def _options(shape: Shape) -> MlaConfig:
    return shape.config or MlaConfig()


def _num_turned(shape: Shape) -> int:
    return rotary_dim(shape.head_dim) if shape.position == "rotary" else 0


def mla_flops(shape: Shape) -> int:
    """Count a multiply and an add for each visible pair and feature, in both matrix products."""
    pairs = shape.query_len * shape.key_len
    if shape.is_causal:  # of one sequence
        pairs = shape.query_len * (shape.query_len + 1) // 2
    return 4 * shape.batch_size * shape.num_heads * shape.head_dim * pairs


def _num_weights(shape: Shape) -> tuple[int, int]:
    """Return the weights that act on each query position, and on each key position."""
    options, dim, embed_dim = _options(shape), shape.head_dim, shape.embed_dim
    turned, width, latent = _num_turned(shape), shape.num_heads * dim, options.latent_factor * dim
    query_latent = options.query_latent_factor * dim
    of_queries = query_latent * (embed_dim + width) if query_latent else embed_dim * width
    of_keys = embed_dim * (latent + turned) + latent * (2 * width - shape.num_heads * turned)
    return of_queries + width * embed_dim, of_keys


def mla_projection_flops(shape: Shape) -> int:
    """Count the projections to latents, from latents to heads, and of the output."""
    of_queries, of_keys = _num_weights(shape)
    return 2 * shape.batch_size * (shape.query_len * of_queries + shape.key_len * of_keys)


def mla_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count the weights of those projections, which have no biases."""
    return sum(_num_weights(shape)) * itemsize


def mla_bytes(shape: Shape, itemsize: int) -> int:
    """Count inputs, output, and the gains of the norms of latents."""
    options = _options(shape)
    gains = (options.latent_factor + options.query_latent_factor) * shape.head_dim
    return shape.io_bytes(itemsize) + gains * itemsize


def mla_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count one latent and one rotary key for each position, whatever the number of heads."""
    per_position = _options(shape).latent_factor * shape.head_dim + _num_turned(shape)
    return shape.batch_size * shape.key_len * per_position * itemsize


class LatentNorm(nn.RMSNorm):
    """The norm of a latent; under autocast that has fewer bits than the gain."""

    def forward(self, latent: Tensor) -> Tensor:
        return rms_norm(latent, self.weight.shape, self.weight.to(latent.dtype), NORM_EPS)


@register_mixer(
    "mla",
    config=MlaConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=True,
        key_padding_mask=True,
        decode="kv_cache",
        is_permutation_invariant=True,
        is_padding_invariant=True,
        why={"grouped_query": "all heads share one latent, from which each makes keys and values of its own"},
    ),
    complexity=Complexity(
        time="B H L S D",
        memory="B H L D",
        time_exponent=2,
        memory_exponent=1,
        sequential_ops="1",
        max_path="1",
        flops=mla_flops,
        projection_flops=mla_projection_flops,
        bytes=mla_bytes,
        projection_bytes=mla_projection_bytes,
        backward_ratio=2.5,  # five matrix products for two: the scores are recomputed
        state_bytes=mla_state_bytes,
    ),
    reference=Reference(
        title="DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
        authors="DeepSeek-AI",
        year=2024,
        url="https://arxiv.org/abs/2405.04434",
        equation="9 to 19",
        code="https://github.com/deepseek-ai/DeepSeek-V3",
        deviations=(
            "The rotary features are among the D of a head, so that scores cost what those of full attention do.",
            "They are there where the model's positions are rotary; else all D come from the latent.",
            "Rotary pairs are (i, i + R/2), and nothing is stretched for longer contexts; the authors' are neighbours.",
            "The norms of latents, which the paper names beside its equations, are where the authors' code has them.",
            "The initialisation is that of all models.",
        ),
    ),
)
class Mla(AbstractMixer):
    """Latent attention with its projections.

    Args:
        config: widths.
        build: sizes, direction and positions.

    Raises:
        ConfigError: heads are too narrow for a rotary pair, or a latent has an odd number of features, which the cache
            of decoding cannot halve.
    """

    config: MlaConfig

    def __init__(self, config: MlaConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        dim, width = build.head_dim, build.num_heads * build.head_dim
        self.latent_dim = config.latent_factor * dim
        self.num_turned = rotary_dim(dim) if build.position == "rotary" else 0
        if build.position == "rotary" and not self.num_turned:
            raise ConfigError("mla", [("head_dim", f"expected at least 6, of which 2 are a rotary pair; got {dim}")])
        if self.latent_dim % 2:
            problem = f"expected an even width of the latent, latent_factor * head_dim; got {self.latent_dim}"
            raise ConfigError("mla", [("latent_factor", problem)])
        self.down_proj = nn.Linear(build.embed_dim, self.latent_dim + self.num_turned, bias=False)
        self.latent_norm = LatentNorm(self.latent_dim)
        self.up_proj = nn.Linear(self.latent_dim, 2 * width - build.num_heads * self.num_turned, bias=False)
        self.query_proj: nn.Module = nn.Linear(build.embed_dim, width, bias=False)
        if config.query_latent_factor:
            query_dim = config.query_latent_factor * dim
            self.query_proj = nn.Sequential(
                nn.Linear(build.embed_dim, query_dim, bias=False),
                LatentNorm(query_dim),
                nn.Linear(query_dim, width, bias=False),
            )
        self.out_proj = nn.Linear(width, build.embed_dim, bias=False)

    def _turn(self, rows: Tensor, position: int) -> Tensor:
        """Turn the last R features of `[B, H, L, ...]`."""
        if not self.num_turned:
            return rows
        content, turning = rows.tensor_split([rows.shape[-1] - self.num_turned], dim=-1)
        return torch.cat([content, rotate(turning, position)], dim=-1)

    def _queries(self, hidden: Tensor, position: int = 0) -> Tensor:
        """Return `[q_i^C; q_i^R]` of each head, `[B, H, L, D]`."""
        query: Tensor = self.query_proj(hidden)
        return self._turn(query.unflatten(-1, (self.build.num_heads, -1)).transpose(1, 2), position)

    def _rows(self, hidden: Tensor, position: int = 0) -> Tensor:
        """Return what decoding keeps of positions `[B, S, E]`: [c; k^R], `[B, 1, S, C + R]`."""
        rows: Tensor = self.down_proj(hidden)
        latent = self.latent_norm(rows[..., : self.latent_dim])
        return self._turn(torch.cat([latent, rows[..., self.latent_dim :]], dim=-1)[:, None], position)

    def _keys_and_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys `[k_i^C; k^R]` and values of each head, both `[B, H, S, D]`: equations 10, 11 and 17."""
        num_heads, dim = self.build.num_heads, self.build.head_dim
        latent, turned = rows[..., : self.latent_dim], rows[..., self.latent_dim :]
        up = self.up_proj(latent[:, 0]).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        content, value = up.split([dim - self.num_turned, dim], dim=-1)
        return torch.cat([content, turned.expand(-1, num_heads, -1, -1)], dim=-1), value

    def _merge(self, heads: Tensor) -> Tensor:
        merged: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return merged

    def _attend(
        self, query: Tensor, rows: Tensor, *, is_causal: bool, mask: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor:
        """Attend with keys and values made for each head."""
        key, value = self._keys_and_values(rows)
        return exact_attention(
            query,
            key,
            value,
            score_bias=score_bias,
            is_causal=is_causal,
            key_padding_mask=mask,
            dropout_p=dropout_p,
        )

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Attend to all positions; shapes as in `AbstractMixer.forward`."""
        keys = finite_padding(hidden if context is None else context, key_padding_mask)
        query = self._queries(keys if context is None else hidden)
        dropout_p = self.build.dropout_p if self.training else 0.0
        is_causal = self.build.is_causal
        return self._merge(
            self._attend(query, self._rows(keys), is_causal=is_causal, mask=key_padding_mask, dropout_p=dropout_p)
        )

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the same with dense weights, without dropout."""
        keys = finite_padding(hidden if context is None else context, key_padding_mask)
        key, value = self._keys_and_values(self._rows(keys))
        weights = attention_weights(
            self._queries(keys if context is None else hidden),
            key,
            is_causal=self.build.is_causal,
            key_padding_mask=key_padding_mask,
        )
        return self._merge(weights @ blank_padding(value, key_padding_mask))

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> MlaState:
        """Return the rows of nothing; in cross-attention those of the context."""
        weight = self.down_proj.weight
        dtype = product_dtype(dtype or weight.dtype, weight.device)
        half = (self.latent_dim + self.num_turned) // 2
        rows = KVCache.empty(batch_size, 1, half, device=device, dtype=dtype)
        if not self.build.is_cross:
            self._require_state(key_padding_mask, context)
            return MlaState(rows)
        if context is None or context.shape[0] != batch_size:
            got = "none" if context is None else list(context.shape)
            raise ValueError(f"context: expected [B, S, E] with B = {batch_size} to decode across; got {got}")
        self._check(context.new_empty(batch_size, 1, self.build.embed_dim), context, key_padding_mask, None)
        read = self._rows(finite_padding(context, key_padding_mask))
        return MlaState(rows.append(*read.chunk(2, dim=-1)), key_padding_mask=key_padding_mask)

    def _read(self, hidden: Tensor, state: MlaState) -> tuple[Tensor, MlaState]:
        """Return the queries of new positions `[B, n, E]`, and the state with their rows."""
        if self.build.is_cross:
            return self._queries(hidden, state.position), state
        self._require_batch(hidden, state.rows.key)
        position = state.position + hidden.shape[1]
        if position > self.build.max_seq_len:
            raise ValueError(f"expected at most max_seq_len = {self.build.max_seq_len} tokens; this makes {position}")
        rows = state.rows.append(*self._rows(hidden, state.position).chunk(2, dim=-1))
        return self._queries(hidden, state.position), MlaState(rows, position)

    def step(self, hidden: Tensor, state: MlaState) -> tuple[Tensor, MlaState]:
        """Attend from one new position to latents as they are kept: O(B H (C + R)) for each."""
        query, state = self._read(hidden, state)
        dim, cache = self.build.head_dim, state.rows
        key_weight, value_weight = self.up_proj.weight.unflatten(0, (self.build.num_heads, -1)).split(
            [dim - self.num_turned, dim], dim=1
        )
        content, turned = query.tensor_split([dim - self.num_turned], dim=-1)
        # The heads are rows of one product with what they share, [B, 1, H, C + R].
        asked = dim**-0.5 * torch.cat([content @ key_weight, turned], dim=-1).transpose(1, 2)
        first, second = asked.chunk(2, dim=-1)
        scores = first @ cache.keys.mT + second @ cache.values.mT
        wide, padding = torch.promote_types(scores.dtype, torch.float32), state.key_padding_mask
        keep = keep_mask(1, cache.length, is_causal=False, key_padding_mask=padding, device=hidden.device)
        weights = masked_softmax(scores.to(wide), keep).to(scores.dtype)
        latent = torch.cat([weights @ cache.keys, weights @ cache.values], dim=-1)[..., : self.latent_dim]
        return self._merge(latent.transpose(1, 2) @ value_weight.mT), state

    def prefill(self, hidden: Tensor, state: MlaState | None = None) -> tuple[Tensor, MlaState]:
        """Attend from new positions to those so far, with keys and values made for each head."""
        if state is None:
            state = self.init_state(hidden.shape[0], device=hidden.device, dtype=hidden.dtype)
        query, state = self._read(hidden, state)
        rows = torch.cat([state.rows.keys, state.rows.values], dim=-1)
        is_causal = not self.build.is_cross and hidden.shape[1] > 1
        return self._merge(self._attend(query, rows, is_causal=is_causal, mask=state.key_padding_mask)), state
