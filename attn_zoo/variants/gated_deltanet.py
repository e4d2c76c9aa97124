"""Gated DeltaNet: a recurrent memory that decays as a whole and is corrected one association at a time.

Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464,
equation 10, with the output of its section 3.4. For each head, transposed so that rows of S belong to keys:
    decay, write   S_t = alpha_t S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - alpha_t S_{t-1}^T k_t)
    read           o_t = S_t^T q_t / sqrt(D)
where u_t, what is new about v_t, is its difference from what the memory would answer to k_t. Gates, keys and queries:
    alpha_t = exp(-exp(A) softplus(w_a x_t + b)),   beta_t = sigmoid(w_b x_t)
    q_t, k_t = unit length of silu(conv(W x)_t),   v_t = silu(conv(W_V x)_t),   conv: causal, each feature its own
    out = (RMSNorm_h(o_1 .. o_H) * silu(x W_G)) W_O
A chunk of C positions at a time (`gated_delta_rule`) the u of a chunk solve one triangular system, as in Yang et al.
2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv 2406.06484.
Symbols: V = D `value_factor` is the width of values.
Cost: time O(B H L (C + D) (D + V)); memory O(B H L (C + D + V + D V / C)); decode state O(B H D V).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.masks import blank_padding
from attn_zoo.kernels.activations import softplus
from attn_zoo.kernels.chunked_recurrence import (
    chunk_sizes,
    decay_in_chunk,
    memories,
    memories_products,
    short_convolution,
    split_chunks,
)
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer

NORM_EPS = 1e-5
"""Of the norm of each head's output, as in the authors' code."""

LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys, likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltanetConfig(VariantConfig):
    """The authors' choices, but for the width of values.

    Args:
        chunk_len: C, positions of a chunk. The result does not depend on it.
        conv_len: positions that the short convolution sees, its own the last.
        value_factor: width of values and gate over that of queries and keys. The authors' models take 2, with queries
            and keys of three quarters of the model's width.
    """

    chunk_len: int = 64
    conv_len: int = 4
    value_factor: int = 1

    def __post_init__(self) -> None:
        for name in ("chunk_len", "conv_len", "value_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return chunks so small that there are many."""
        return {"chunk_len": 16}, {"chunk_len": 7, "conv_len": 2, "value_factor": 2}


@dataclass(frozen=True, slots=True)
class GatedDeltanetState:
    """What decoding keeps.

    Args:
        memory: S, `[B, H, D, V]`, in float32 at least.
        tail: what the short convolutions see of the positions so far, `[B, conv_len - 1, H (2 D + V)]`.
    """

    memory: Tensor
    tail: Tensor


@dataclass(frozen=True, slots=True)
class Writes:
    """What the recurrence is given for n positions, in float32 at least.

    Args:
        query: `[B, H, n, D]`, scaled.
        key: `[B, H, n, D]`, of unit length.
        value: `[B, H, n, V]`.
        log_decay: log alpha, `[B, H, n]`, at most 0.
        strength: beta, `[B, H, n]`, from 0 to 1.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    strength: Tensor


@in_own_dtype
def recur(writes: Writes, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Compute equation 10 position by position: the output `[B, H, n, V]` and the memory after the last."""
    outputs = []
    decay = writes.log_decay.exp()
    for t in range(writes.key.shape[2]):
        key = writes.key[:, :, t, :, None]  # [B, H, D, 1]
        memory = decay[:, :, t, None, None] * memory
        new = writes.strength[:, :, t, None, None] * (writes.value[:, :, t, None] - key.mT @ memory)  # u, [B, H, 1, V]
        memory = memory + key @ new
        outputs.append(writes.query[:, :, t, None] @ memory)
    return torch.cat(outputs, dim=2), memory


@in_own_dtype
def gated_delta_rule(writes: Writes, memory: Tensor, *, chunk_len: int) -> tuple[Tensor, Tensor]:
    """Compute what `recur` does, a chunk at a time.

    In a chunk that begins with the memory S, where G_ti = alpha_{i+1} .. alpha_t and g_t = alpha_1 .. alpha_t:
        u_t = beta_t (v_t - g_t S^T k_t - sum_{i < t} G_ti (k_t k_i) u_i)
    which is triangular in u: (I + A) U = beta V - (beta g K) S, so U = U_0 - W S. Then
        S' = g_C S + (G_C K)^T U = P S + R,   P = g_C I - (G_C K)^T W,   R = (G_C K)^T U_0
        O  = (g Q) S + (Q K^T * G) U
    Everything but the S themselves is computed for all chunks at once.

    Args:
        writes: of n positions.
        memory: S before the first, `[B, H, D, V]`.
        chunk_len: C.
    """
    length, dim = writes.key.shape[2:]
    count, size = chunk_sizes(length, chunk_len)
    # What fills up the last chunk has neither decay nor strength, so that it changes no memory.
    query, key, value, log_decay, strength = (
        split_chunks(x, count, size)  # [B, H, n, C, ...]
        for x in (writes.query, writes.key, writes.value, writes.log_decay, writes.strength[..., None])
    )
    so_far, between = decay_in_chunk(log_decay)  # g, [B, H, n, C, 1], and G, [B, H, n, C, C]
    to_end = between[..., -1:, :].mT
    system = (strength * between * (key @ key.mT)).tril(-1)
    solved = torch.linalg.solve_triangular(
        system, strength * torch.cat([so_far * key, value], dim=-1), upper=False, unitriangular=True
    )  # [W U_0]
    carried = (to_end * key).mT @ solved  # [B, H, n, D, D + V]
    kept = so_far[..., -1:, :] * torch.eye(dim, dtype=key.dtype, device=key.device)
    before, last = memories(kept - carried[..., :dim], carried[..., dim:], memory)
    news = solved[..., dim:] - solved[..., :dim] @ before
    output = (so_far * query) @ before + (query @ key.mT * between) @ news
    return output.flatten(2, 3)[:, :, :length], last


def _unit(rows: Tensor) -> Tensor:
    """Return rows of length 1, and zeros for zeros.

    In float32 at least: the derivative of the root is 5e8 at a row of zeros, which is no float16.
    """
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + LENGTH_EPS)).to(rows.dtype)


def _options(shape: Shape) -> GatedDeltanetConfig:
    return shape.config or GatedDeltanetConfig()


def _products(shape: Shape) -> tuple[int, int]:
    """Return the multiply-adds of one head in the chunkwise form: of products, and of triangular systems."""
    dim = shape.head_dim
    wide = dim * _options(shape).value_factor
    count, size = chunk_sizes(shape.query_len, _options(shape).chunk_len)
    of_chunk = size**2 * (2 * dim + wide) + size * dim * (dim + wide) + 2 * size * dim * wide
    return count * of_chunk + memories_products(count, dim, wide), count * size**2 * (dim + wide) // 2


def gated_deltanet_flops(shape: Shape) -> int:
    """Count the products of the chunkwise form, its triangular systems among them."""
    return 2 * shape.batch_size * shape.num_heads * sum(_products(shape))


def gated_deltanet_backward_ratio(shape: Shape) -> float:
    """Count two products for one of matrices; for a triangular system another system and one whole product."""
    products, systems = _products(shape)
    return (2 * products + 3 * systems) / (products + systems)


def _num_projected(shape: Shape) -> int:
    """Count the weights of the seven projections."""
    width = shape.num_heads * shape.head_dim
    return shape.embed_dim * (width * (2 + 3 * _options(shape).value_factor) + 2 * shape.num_heads)


def gated_deltanet_projection_flops(shape: Shape) -> int:
    """Count the seven projections of every position."""
    return 2 * shape.batch_size * shape.query_len * _num_projected(shape)


def gated_deltanet_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count the weights of the seven projections, which have no biases."""
    return _num_projected(shape) * itemsize


def _num_convolved(shape: Shape) -> int:
    return shape.num_heads * shape.head_dim * (2 + _options(shape).value_factor)


def gated_deltanet_bytes(shape: Shape, itemsize: int) -> int:
    """Count input, output, the short convolutions, A and b of each head, and the scale of the norm."""
    options = _options(shape)
    num_weights = _num_convolved(shape) * options.conv_len + 2 * shape.num_heads + shape.head_dim * options.value_factor
    return shape.io_bytes(itemsize) + num_weights * itemsize


def gated_deltanet_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count one memory for each head, in 4 bytes at least, and the last positions for the short convolutions."""
    options = _options(shape)
    memory = shape.num_heads * shape.head_dim**2 * options.value_factor * max(4, itemsize)
    return shape.batch_size * (memory + (options.conv_len - 1) * _num_convolved(shape) * itemsize)


@register_mixer(
    "gated_deltanet",
    config=GatedDeltanetConfig,
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
            "bidirectional": "its memory is of the past",
            "cross_attention": "queries read a memory that keys of their own positions have written",
            "grouped_query": "every head has gates and keys of its own",
            "attention_dropout": "the paper drops none of what is written",
            "positions": "the decay of its memory tells positions apart",
        },
    ),
    complexity=Complexity(
        time="B H L (C + D) (D + V)",
        memory="B H L (C + D + V + D V / C)",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="L / C",
        max_path="L / C",
        flops=gated_deltanet_flops,
        projection_flops=gated_deltanet_projection_flops,
        backward_ratio=gated_deltanet_backward_ratio,
        bytes=gated_deltanet_bytes,
        projection_bytes=gated_deltanet_projection_bytes,
        state_bytes=gated_deltanet_state_bytes,
    ),
    reference=Reference(
        title="Gated Delta Networks: Improving Mamba2 with Delta Rule",
        authors="Yang et al.",
        year=2024,
        url="https://arxiv.org/abs/2412.06464",
        equation="10",
        code="https://github.com/NVlabs/GatedDeltaNet",
        deviations=(
            "Queries are scaled by 1 / sqrt(D) as in the authors' code; the norm of the output undoes it.",
            "Values are as wide as keys, and both as the model, unless value_factor says otherwise.",
            "Memories and triangular systems are kept in float32 at least, whatever the dtype of the hidden states.",
            "Between chunks memories are composed in groups, in O(sqrt(L / C)) steps, where the authors' take L / C.",
            "Projections are initialised as in all models; convolutions, A and b as in the authors' code.",
            "Padded positions write nothing, but time passes, and the memory decays.",
        ),
    ),
)
class GatedDeltanet(AbstractMixer):
    """The gated delta rule with its projections, short convolutions, gates and norm.

    Args:
        config: chunks, convolution and widths.
        build: sizes; always causal.
    """

    config: GatedDeltanetConfig

    def __init__(self, config: GatedDeltanetConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        width = build.num_heads * build.head_dim
        wide = width * config.value_factor
        self.query_proj = nn.Linear(build.embed_dim, width, bias=False)
        self.key_proj = nn.Linear(build.embed_dim, width, bias=False)
        self.value_proj = nn.Linear(build.embed_dim, wide, bias=False)
        self.decay_proj = nn.Linear(build.embed_dim, build.num_heads, bias=False)
        self.strength_proj = nn.Linear(build.embed_dim, build.num_heads, bias=False)
        self.gate_proj = nn.Linear(build.embed_dim, wide, bias=False)
        self.out_proj = nn.Linear(wide, build.embed_dim, bias=False)
        bound = config.conv_len**-0.5
        self.conv = nn.Parameter(torch.empty(config.conv_len, 2 * width + wide).uniform_(-bound, bound))
        # As Mamba's: rates exp(A) up to 16, and steps softplus(b) from 0.001 to 0.1, even in their logarithm.
        self.log_rate = nn.Parameter(torch.empty(build.num_heads).uniform_(0, 16).log())
        first_step = torch.empty(build.num_heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.step_bias = nn.Parameter(first_step + torch.log(-torch.expm1(-first_step)))  # softplus undone
        self.norm_scale = nn.Parameter(torch.ones(build.head_dim * config.value_factor))

    def _writes(
        self, hidden: Tensor, tail: Tensor, dtype: torch.dtype, padding: Tensor | None = None
    ) -> tuple[Writes, Tensor]:
        """Return what positions `[B, n, E]` write and read, in `dtype`, and the tail for those after them."""
        projected = torch.cat([self.query_proj(hidden), self.key_proj(hidden), self.value_proj(hidden)], dim=-1)
        mixed, tail = short_convolution(projected, self.conv, tail)
        width = self.build.num_heads * self.build.head_dim
        query, key, value = (
            part.unflatten(-1, (self.build.num_heads, -1)).transpose(1, 2).to(dtype)
            for part in silu(mixed).split([width, width, width * self.config.value_factor], dim=-1)
        )
        step = softplus(self.decay_proj(hidden).to(dtype) + self.step_bias.to(dtype))
        # The convolution sees what stands before a padded position, so that keys and values there are not nothing.
        strength = blank_padding(self.strength_proj(hidden).to(dtype).sigmoid(), padding)
        writes = Writes(
            query=_unit(query) * self.build.head_dim**-0.5,
            key=_unit(key),
            value=value,
            log_decay=-(self.log_rate.to(dtype).exp() * step).mT,
            strength=strength.mT,
        )
        return writes, tail

    def _merge(self, read: Tensor, hidden: Tensor) -> Tensor:
        """Normalise each head of each position, gate and project."""
        normal = rms_norm(read, read.shape[-1:], self.norm_scale.to(read.dtype), NORM_EPS).transpose(1, 2).flatten(2)
        merged: Tensor = self.out_proj(silu(self.gate_proj(hidden)) * normal.to(hidden.dtype))
        return merged

    def _start(self, hidden: Tensor, dtype: torch.dtype) -> GatedDeltanetState:
        """Return what there is before the first position: nothing was written, and zeros were seen."""
        (batch_size, _, _), build, (conv_len, num_convolved) = hidden.shape, self.build, self.conv.shape
        wide = build.head_dim * self.config.value_factor
        return GatedDeltanetState(
            memory=hidden.new_zeros(batch_size, build.num_heads, build.head_dim, wide, dtype=dtype),
            tail=hidden.new_zeros(batch_size, conv_len - 1, num_convolved),
        )

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the chunkwise form; shapes as in `AbstractMixer.forward`. Padded positions give zeros."""
        del context  # the contract refuses one
        return self._chunked(blank_padding(hidden, key_padding_mask), None, key_padding_mask)[0]

    def _chunked(
        self, hidden: Tensor, state: GatedDeltanetState | None, padding: Tensor | None = None
    ) -> tuple[Tensor, GatedDeltanetState]:
        note_path("gated_deltanet.chunked")
        if state is None:
            state = self._start(hidden, torch.promote_types(hidden.dtype, torch.float32))
        writes, tail = self._writes(hidden, state.tail, state.memory.dtype, padding)
        read, memory = gated_delta_rule(writes, state.memory, chunk_len=self.config.chunk_len)
        return self._merge(read, hidden), GatedDeltanetState(memory, tail)

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute equation 10 position by position, in the dtype of the input."""
        del context
        hidden = blank_padding(hidden, key_padding_mask)
        start = self._start(hidden, hidden.dtype)
        writes, _ = self._writes(hidden, start.tail, hidden.dtype, key_padding_mask)
        return self._merge(recur(writes, start.memory)[0], hidden)

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> GatedDeltanetState:
        """Return a memory of nothing."""
        self._require_state(key_padding_mask, context)
        nothing = torch.empty(batch_size, 0, 0, device=device, dtype=dtype or self.conv.dtype)
        return self._start(nothing, torch.promote_types(nothing.dtype, torch.float32))

    def step(self, hidden: Tensor, state: GatedDeltanetState) -> tuple[Tensor, GatedDeltanetState]:
        """Compute equation 10 for one position `[B, 1, E]`: O(B H D V)."""
        writes, tail = self._writes(hidden, state.tail, state.memory.dtype)
        read, memory = recur(writes, state.memory)
        return self._merge(read, hidden), GatedDeltanetState(memory, tail)

    def prefill(self, hidden: Tensor, state: GatedDeltanetState | None = None) -> tuple[Tensor, GatedDeltanetState]:
        """Compute the chunkwise form for positions `[B, n, E]`, from the memory of those before."""
        return self._chunked(hidden, state)
