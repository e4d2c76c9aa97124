"""Retention: attention without softmax whose weights decay with distance, so that it is a recurrence as well.

Sun et al. 2023, "Retentive Network: A Successor to Transformer for Large Language Models", arXiv 2307.08621,
equations 5 to 8. For each head, with queries and keys turned by angles proportional to their position (Theta):
    parallel (5)    Y = (Q K^T * D) V,   D_nm = gamma^(n-m) for n >= m, else 0
    recurrent (6)   S_n = gamma S_{n-1} + K_n^T V_n,   Y_n = Q_n S_n
    chunkwise (7)   the parallel form inside chunks of C positions, the recurrent one between them
    multi-scale (8) out = (swish(X W_G) * GroupNorm_h(Y_1 .. Y_H)) W_O,   gamma_h = 1 - 2^(-5-h), h = 0 .. H - 1
Symbols: the paper's chunk of B positions is our C, its d is our D; V = D `value_factor` is the width of values.
Cost: time O(B H L (C + D) V); memory O(B H L (C + V + D V / C)); decode state O(B H D V).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.masks import blank_padding, causal_keep
from attn_zoo.attention.rotary import require_pairs, rotate
from attn_zoo.kernels.chunked_sums import chunked_sums, chunked_sums_flops
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer

NORM_EPS = 1e-6
"""Of the group norm, as in the authors' code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionConfig(VariantConfig):
    """The paper's choices.

    Args:
        chunk_len: C, positions of a chunk in the chunkwise form. The result does not depend on it.
        value_factor: width of values and gate over that of queries and keys. 1 is equation 8 as written; the paper's
            models take 2 and a feed-forward network half as wide.
    """

    chunk_len: int = 128
    value_factor: int = 1

    def __post_init__(self) -> None:
        for name in ("chunk_len", "value_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return chunks so small that there are many."""
        return {"chunk_len": 16}, {"chunk_len": 7, "value_factor": 2}


@dataclass(frozen=True, slots=True)
class RetentionState:
    """What decoding keeps.

    Args:
        sums: S, `[B, H, D, V]`, in float32 at least.
        position: of the next token.
    """

    sums: Tensor
    position: int = 0


@in_own_dtype
def recur(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Compute equation 6 for one position: what it reads, `[B, H, 1, V]`, and the sums with it."""
    sums = decay[:, None, None] * sums + key.mT @ value
    return query @ sums, sums


def _options(shape: Shape) -> RetentionConfig:
    return shape.config or RetentionConfig()


def retention_flops(shape: Shape) -> int:
    """Count the products of the chunkwise form."""
    options, dim = _options(shape), shape.head_dim
    per_head = chunked_sums_flops(shape.query_len, options.chunk_len, dim, dim * options.value_factor)
    return shape.batch_size * shape.num_heads * per_head


def _num_weights(shape: Shape) -> int:
    """Count the weights of W_Q, W_K, W_V, W_G and W_O."""
    return shape.embed_dim * shape.num_heads * shape.head_dim * (2 + 3 * _options(shape).value_factor)


def retention_projection_flops(shape: Shape) -> int:
    """Count the five projections of every position."""
    return 2 * shape.batch_size * shape.query_len * _num_weights(shape)


def retention_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count the weights of the five projections, which have no biases."""
    return _num_weights(shape) * itemsize


def retention_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count one sum for each head, whatever the length; it is kept in 4 bytes at least."""
    per_head = shape.head_dim**2 * _options(shape).value_factor
    return shape.batch_size * shape.num_heads * per_head * max(4, itemsize)


@register_mixer(
    "retention",
    config=RetentionConfig,
    capabilities=Capabilities(
        bidirectional=False,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        decode="recurrent",
        attention_dropout=False,
        is_padding_invariant=True,
        positions=("none",),
        why={
            "bidirectional": "the paper defines decay towards the past only",
            "cross_attention": "decay is by a distance within one sequence",
            "grouped_query": "every head has a decay, and keys, of its own",
            "attention_dropout": "the paper drops none of its weights, which are not normalised",
            "positions": "it turns queries and keys itself, and its decay is its bias by distance",
        },
    ),
    complexity=Complexity(
        time="B H L (C + D) V",
        memory="B H L (C + V + D V / C)",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="sqrt(L)",
        max_path="1",
        flops=retention_flops,
        projection_flops=retention_projection_flops,
        projection_bytes=retention_projection_bytes,
        state_bytes=retention_state_bytes,
    ),
    reference=Reference(
        title="Retentive Network: A Successor to Transformer for Large Language Models",
        authors="Sun et al.",
        year=2023,
        url="https://arxiv.org/abs/2307.08621",
        equation="5-8",
        code="https://github.com/microsoft/torchscale",
        deviations=(
            "Of the paper's normalisations only 1 / sqrt(D) is applied: the group norm undoes the others.",
            "Sums are kept in float32 at least, whatever the dtype of the hidden states.",
            "The group norm subtracts the mean and has no learned scale; the authors' later code only divides.",
            "Theta is that of rotary embedding, 10000^(-2i/D), for pairs (i, i + D/2), from 1 to just above 1 / 10000.",
            "The authors' code pairs neighbours, and its last angle is 1 / 10000.",
            "Values are as wide as keys unless value_factor says otherwise; the initialisation is that of all models.",
            "Padded positions are set to zero: they add nothing, but time passes, and what came before them decays.",
        ),
    ),
)
class Retention(AbstractMixer):
    """Multi-scale retention with its five projections.

    Args:
        config: chunks and widths.
        build: sizes; always causal.

    Raises:
        ConfigError: `head_dim` is odd, so that pairs of features cannot be turned.
    """

    config: RetentionConfig

    def __init__(self, config: RetentionConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        require_pairs(build.head_dim)
        width = build.num_heads * build.head_dim
        wide = width * config.value_factor
        self.query_proj = nn.Linear(build.embed_dim, width, bias=False)
        self.key_proj = nn.Linear(build.embed_dim, width, bias=False)
        self.value_proj = nn.Linear(build.embed_dim, wide, bias=False)
        self.gate_proj = nn.Linear(build.embed_dim, wide, bias=False)
        self.out_proj = nn.Linear(wide, build.embed_dim, bias=False)

    def _decay(self, like: Tensor) -> Tensor:
        """Return gamma of each head, `[H]`."""
        head = torch.arange(self.build.num_heads, device=like.device, dtype=like.dtype)
        return 1.0 - 2.0 ** (-5.0 - head)

    def _project(self, hidden: Tensor, dtype: torch.dtype, position: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys `[B, H, L, D]`, turned, and values `[B, H, L, V]`."""
        heads = (self.build.num_heads, -1)
        query, key, value = (
            projection(hidden).unflatten(-1, heads).transpose(1, 2).to(dtype)
            for projection in (self.query_proj, self.key_proj, self.value_proj)
        )
        return rotate(query, position), rotate(key * self.build.head_dim**-0.5, position), value

    def _merge(self, retained: Tensor, hidden: Tensor) -> Tensor:
        """Normalise each head of each position, gate and project: equation 8."""
        normal = layer_norm(retained, retained.shape[-1:], eps=NORM_EPS).transpose(1, 2).flatten(2)
        merged: Tensor = self.out_proj(silu(self.gate_proj(hidden)) * normal.to(hidden.dtype))
        return merged

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the chunkwise form; shapes as in `AbstractMixer.forward`. Padded positions give zeros."""
        del context  # the contract refuses one
        note_path("retention.chunked")
        hidden = blank_padding(hidden, key_padding_mask)
        query, key, value = self._project(hidden, torch.promote_types(hidden.dtype, torch.float32))
        retained, _ = chunked_sums(query, key, value, chunk_len=self.config.chunk_len, decay=self._decay(query))
        return self._merge(retained, hidden)

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the parallel form, equation 5, dense, in float32 at least: in 16 bits 1 - 2^-12 is 1."""
        del context
        hidden = blank_padding(hidden, key_padding_mask)
        query, key, value = self._project(hidden, torch.promote_types(hidden.dtype, torch.float32))
        at = torch.arange(hidden.shape[1], device=hidden.device)
        distance = (at[:, None] - at).clamp(min=0)
        decay = self._decay(query)[:, None, None] ** distance * causal_keep(len(at), len(at), hidden.device)
        return self._merge((query @ key.mT * decay) @ value, hidden)

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> RetentionState:
        """Return the sums over nothing."""
        self._require_state(key_padding_mask, context)
        build, wide = self.build, torch.promote_types(dtype or self.out_proj.weight.dtype, torch.float32)
        sizes = (batch_size, build.num_heads, build.head_dim, build.head_dim * self.config.value_factor)
        return RetentionState(torch.zeros(sizes, device=device, dtype=wide))

    def step(self, hidden: Tensor, state: RetentionState) -> tuple[Tensor, RetentionState]:
        """Compute the recurrent form for one position `[B, 1, E]`: O(B H D V)."""
        self._require_batch(hidden, state.sums)
        query, key, value = self._project(hidden, state.sums.dtype, state.position)
        retained, sums = recur(query, key, value, self._decay(query), state.sums)
        return self._merge(retained, hidden), RetentionState(sums, state.position + 1)

    def prefill(self, hidden: Tensor, state: RetentionState | None = None) -> tuple[Tensor, RetentionState]:
        """Compute the chunkwise form for positions `[B, n, E]`, from the sums of those before."""
        if state is None:
            state = self.init_state(hidden.shape[0], device=hidden.device, dtype=hidden.dtype)
        self._require_batch(hidden, state.sums)
        query, key, value = self._project(hidden, state.sums.dtype, state.position)
        decay, chunk_len = self._decay(query), self.config.chunk_len
        retained, sums = chunked_sums(query, key, value, chunk_len=chunk_len, decay=decay, start=state.sums)
        return self._merge(retained, hidden), RetentionState(sums, state.position + hidden.shape[1])
