"""Gated linear attention: a recurrent memory in which every feature of the keys decays at its own rate, by the data.

Yang, Wang, Shen, Panda and Kim 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training", arXiv
2312.06635, sections 4.1 to 4.4. For each head:
    decay, write   S_t = Diag(alpha_t) S_{t-1} + k_t^T v_t
    read           o_t = q_t S_t / sqrt(D)
    alpha_t = sigmoid(x_t W_1 W_2 + b)^(1 / tau),   W_1 of low rank
    out = (RMSNorm_h(o_1 .. o_H) * silu(x W_G)) W_O
In the parallel form the weight of v_i for q_t is sum_d q_td k_id alpha_{i+1,d} .. alpha_{t,d}, which is not one number
times the product of q_t and k_i. As the product of q_t alpha_1 .. alpha_t and k_i / (alpha_1 .. alpha_i) it divides by
what may have underflowed. Chunks of C positions are therefore put together from halves (`gated_sums`).
Symbols: V = D `value_factor` is the width of values, R the `gate_rank`.
Cost: time O(B H L (C (D + V) + D V)); memory O(B H L (C + D log C + V + D V / C)); decode state O(B H D V).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad, rms_norm, silu

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.masks import blank_padding
from attn_zoo.kernels.chunked_recurrence import memories, split_chunks
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer

NORM_EPS = 1e-5
"""Of the norm of each head's output, as in the authors' code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedLinearAttentionConfig(VariantConfig):
    """The paper's choices, but for the width of values.

    Args:
        chunk_len: C, positions of a chunk, rounded up to a power of two. The result does not depend on it.
        gate_rank: R, features between the two maps that decays come from.
        temperature: tau, by which logarithms of decays are divided: the higher, the slower memories decay.
        value_factor: width of values and gate over that of queries and keys. The paper takes 2, with queries and keys
            of half the model's width.
    """

    chunk_len: int = 64
    gate_rank: int = 16
    temperature: float = 16.0
    value_factor: int = 1

    def __post_init__(self) -> None:
        for name in ("chunk_len", "gate_rank", "value_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")
        if not self.temperature > 0:
            raise ValueError(f"temperature: expected a number above 0; got {self.temperature}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return chunks so small that there are many, and memories that forget soon."""
        return {"chunk_len": 16}, {"chunk_len": 7, "gate_rank": 3, "temperature": 0.5, "value_factor": 2}


@dataclass(frozen=True, slots=True)
class GatedLinearAttentionState:
    """What decoding keeps.

    Args:
        memory: S, `[B, H, D, V]`, in float32 at least.
    """

    memory: Tensor


@dataclass(frozen=True, slots=True)
class Writes:
    """What the recurrence is given for n positions, in float32 at least.

    Args:
        query: `[B, H, n, D]`, scaled.
        key: `[B, H, n, D]`.
        value: `[B, H, n, V]`.
        log_decay: log alpha, `[B, H, n, D]`, at most 0.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor


@in_own_dtype
def recur(writes: Writes, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the recurrence position by position: the output `[B, H, n, V]` and the memory after the last."""
    outputs = []
    decay = writes.log_decay.exp()
    for t in range(writes.key.shape[2]):
        memory = decay[:, :, t, :, None] * memory + writes.key[:, :, t, :, None] @ writes.value[:, :, t, None]
        outputs.append(writes.query[:, :, t, None] @ memory)
    return torch.cat(outputs, dim=2), memory


@in_own_dtype
def gated_sums(writes: Writes, memory: Tensor, *, chunk_len: int) -> tuple[Tensor, Tensor]:
    """Compute what `recur` does, a chunk at a time.

    For a block of h positions, 1 to h, let g = alpha_1 .. alpha_h and
        Q~_t = q_t alpha_1 .. alpha_t,   K~_i = k_i alpha_{i+1} .. alpha_h,   A_ti = weight of v_i for q_t
    With S before the block, O = A V + Q~ S, and S' = Diag(g) S + K~^T V after it. A position alone is a block. Two
    neighbours, the later one primed, are a block as well:
        A <- [[A, 0], [Q~' K~^T, A']],   Q~ <- [Q~, Q~' * g],   K~ <- [K~ * g', K~'],   g <- g * g'
    So decays are products of numbers up to 1, each over the very positions between two tokens: one that underflows is
    itself nothing, nothing is divided, and in the backward no gradient is a difference of others. The paper has two
    levels, chunks and chunks inside them, where pairs in one of the smallest take a product for each feature; here
    there are log2(C), and products of matrices only.

    Args:
        writes: of n positions.
        memory: S before the first, `[B, H, D, V]`.
        chunk_len: C.
    """
    length = writes.key.shape[2]
    count, size = _chunks(length, chunk_len)
    # What fills up the last chunk has neither decay nor keys, so that it changes no memory.
    query, key, value, log_decay = (
        split_chunks(x, count, size) for x in (writes.query, writes.key, writes.value, writes.log_decay)
    )  # [B, H, n, C, D or V]
    weights = (query * key).sum(-1)[..., None, None]  # A, [B, H, n, C / h, h, h]
    decay = log_decay.exp()[..., None, :]  # g, [B, H, n, C / h, 1, D]
    query, key = query[..., None, :] * decay, key[..., None, :]  # Q~ and K~, [B, H, n, C / h, h, D]
    num_levels = size.bit_length() - 1
    for level in range(num_levels):
        (early_query, late_query), (early_key, late_key) = _pairs(query), _pairs(key)
        (early_decay, late_decay), (early, late) = _pairs(decay), _pairs(weights)
        between = late_query @ early_key.mT
        weights = torch.cat([pad(early, (0, 2**level)), torch.cat([between, late], dim=-1)], dim=-2)
        query = torch.cat([early_query, late_query * early_decay], dim=-2)
        key = torch.cat([early_key * late_decay, late_key], dim=-2)
        decay = early_decay * late_decay
    weights, query, key = weights[:, :, :, 0], query[:, :, :, 0], key[:, :, :, 0]  # of chunks
    # Decays just below 1 are rounded; over many chunks that would add up, so theirs come from sums of logarithms.
    kept = log_decay.sum(3, keepdim=True).exp()
    before, last = memories(kept, value.mT @ key, memory.mT)  # columns of the transposed belong to keys, as decays do
    output = weights @ value + query @ before.mT
    return output.flatten(2, 3)[:, :, :length], last.mT


def _pairs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the earlier and the later of each two neighbours in `[B, H, n, blocks, ...]`."""
    early, late = blocks.unflatten(3, (-1, 2)).unbind(4)
    return early, late


def _chunks(length: int, chunk_len: int) -> tuple[int, int]:
    """Return the number of chunks, and the positions of each: a power of two, and no larger than it need be.

    >>> [_chunks(length, 48) for length in (1, 5, 64, 130)]
    [(1, 1), (1, 8), (1, 64), (3, 64)]
    """
    size = 1
    while size < chunk_len and size < length:
        size *= 2
    return (length + size - 1) // size, size


def _options(shape: Shape) -> GatedLinearAttentionConfig:
    return shape.config or GatedLinearAttentionConfig()


def gated_linear_attention_flops(shape: Shape) -> int:
    """Count the products of the chunkwise form; between halves of a chunk, on all levels, C (C - 1) / 2 weights."""
    dim = shape.head_dim
    wide = dim * _options(shape).value_factor
    count, size = _chunks(shape.query_len, _options(shape).chunk_len)
    of_chunk = size * (size - 1) // 2 * dim + size**2 * wide + 2 * size * dim * wide
    return 2 * shape.batch_size * shape.num_heads * count * of_chunk


def _num_projected(shape: Shape) -> int:
    """Count the weights of the five projections, and of the two maps that decays come from."""
    options, width = _options(shape), shape.num_heads * shape.head_dim
    return shape.embed_dim * width * (2 + 3 * options.value_factor) + options.gate_rank * (shape.embed_dim + width)


def gated_linear_attention_projection_flops(shape: Shape) -> int:
    """Count the seven projections of every position."""
    return 2 * shape.batch_size * shape.query_len * _num_projected(shape)


def gated_linear_attention_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count the weights of the seven projections."""
    return _num_projected(shape) * itemsize


def gated_linear_attention_bytes(shape: Shape, itemsize: int) -> int:
    """Count input, output, b of each feature, and the scale of the norm."""
    num_weights = shape.num_heads * shape.head_dim + shape.head_dim * _options(shape).value_factor
    return shape.io_bytes(itemsize) + num_weights * itemsize


def gated_linear_attention_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count one memory for each head, whatever the length; it is kept in 4 bytes at least."""
    per_head = shape.head_dim**2 * _options(shape).value_factor
    return shape.batch_size * shape.num_heads * per_head * max(4, itemsize)


@register_mixer(
    "gated_linear_attention",
    config=GatedLinearAttentionConfig,
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
            "cross_attention": "it reads what positions of its own sequence have written",
            "grouped_query": "every head has decays and keys of its own",
            "attention_dropout": "the paper drops none of what is written",
            "positions": "the decay of its memory tells positions apart",
        },
    ),
    complexity=Complexity(
        time="B H L (C (D + V) + D V)",
        memory="B H L (C + D log C + V + D V / C)",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="L / C",
        max_path="L / C",
        flops=gated_linear_attention_flops,
        projection_flops=gated_linear_attention_projection_flops,
        bytes=gated_linear_attention_bytes,
        projection_bytes=gated_linear_attention_projection_bytes,
        state_bytes=gated_linear_attention_state_bytes,
    ),
    reference=Reference(
        title="Gated Linear Attention Transformers with Hardware-Efficient Training",
        authors="Yang et al.",
        year=2023,
        url="https://arxiv.org/abs/2312.06635",
        equation="sections 4.1 to 4.4",
        code="https://github.com/fla-org/flash-linear-attention",
        deviations=(
            "Queries are scaled by 1 / sqrt(D) as in the authors' code; the norm of the output undoes it.",
            "The norm divides by the root mean square, as in the authors' code, where the paper has a LayerNorm.",
            "The gate of the output has no bias, as in the authors' code, where the paper has one.",
            "Values are as wide as keys, and both as the model, unless value_factor says otherwise.",
            "Chunks are put together from halves down to single positions, where the paper has two levels of chunks.",
            "Between chunks memories are composed in groups, in O(sqrt(L / C)) steps, where the authors' take L / C.",
            "Memories are kept in float32 at least, whatever the dtype of the hidden states.",
            "Projections are initialised as in all models.",
            "Padded positions write nothing, but time passes, and the memory decays as for a token of zeros.",
        ),
    ),
)
class GatedLinearAttention(AbstractMixer):
    """Gated linear attention with its projections, decays, gate and norm.

    Args:
        config: chunks, decays and widths.
        build: sizes; always causal.
    """

    config: GatedLinearAttentionConfig

    def __init__(self, config: GatedLinearAttentionConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        width = build.num_heads * build.head_dim
        wide = width * config.value_factor
        self.query_proj = nn.Linear(build.embed_dim, width, bias=False)
        self.key_proj = nn.Linear(build.embed_dim, width, bias=False)
        self.value_proj = nn.Linear(build.embed_dim, wide, bias=False)
        self.rank_proj = nn.Linear(build.embed_dim, config.gate_rank, bias=False)
        self.decay_proj = nn.Linear(config.gate_rank, width)
        self.gate_proj = nn.Linear(build.embed_dim, wide, bias=False)
        self.out_proj = nn.Linear(wide, build.embed_dim, bias=False)
        self.norm_scale = nn.Parameter(torch.ones(build.head_dim * config.value_factor))

    def _writes(self, hidden: Tensor, dtype: torch.dtype) -> Writes:
        """Return what positions `[B, n, E]` write and read, in `dtype`."""
        query, key, value, decay = (
            rows.unflatten(-1, (self.build.num_heads, -1)).transpose(1, 2).to(dtype)
            for rows in (
                self.query_proj(hidden),
                self.key_proj(hidden),
                self.value_proj(hidden),
                self.decay_proj(self.rank_proj(hidden)),
            )
        )
        return Writes(
            query=query * self.build.head_dim**-0.5,
            key=key,
            value=value,
            log_decay=logsigmoid(decay) / self.config.temperature,
        )

    def _merge(self, read: Tensor, hidden: Tensor) -> Tensor:
        """Normalise each head of each position, gate and project."""
        normal = rms_norm(read, read.shape[-1:], self.norm_scale.to(read.dtype), NORM_EPS).transpose(1, 2).flatten(2)
        merged: Tensor = self.out_proj(silu(self.gate_proj(hidden)) * normal.to(hidden.dtype))
        return merged

    def _start(self, hidden: Tensor) -> GatedLinearAttentionState:
        """Return a memory of nothing, in float32 at least."""
        dim = self.build.head_dim
        sizes = (len(hidden), self.build.num_heads, dim, dim * self.config.value_factor)
        return GatedLinearAttentionState(
            hidden.new_zeros(sizes, dtype=torch.promote_types(hidden.dtype, torch.float32))
        )

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the chunkwise form; shapes as in `AbstractMixer.forward`. Padded positions give zeros."""
        del context  # the contract refuses one
        hidden = blank_padding(hidden, key_padding_mask)
        return self._chunked(hidden, self._start(hidden))[0]

    def _chunked(self, hidden: Tensor, state: GatedLinearAttentionState) -> tuple[Tensor, GatedLinearAttentionState]:
        note_path("gated_linear_attention.chunked")
        writes = self._writes(hidden, state.memory.dtype)
        read, memory = gated_sums(writes, state.memory, chunk_len=self.config.chunk_len)
        return self._merge(read, hidden), GatedLinearAttentionState(memory)

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the recurrence position by position, in float32 at least: in 16 bits slow decays are none."""
        del context
        hidden = blank_padding(hidden, key_padding_mask)
        memory = self._start(hidden).memory
        return self._merge(recur(self._writes(hidden, memory.dtype), memory)[0], hidden)

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> GatedLinearAttentionState:
        """Return a memory of nothing."""
        self._require_state(key_padding_mask, context)
        return self._start(torch.empty(batch_size, 0, device=device, dtype=dtype or self.norm_scale.dtype))

    def step(self, hidden: Tensor, state: GatedLinearAttentionState) -> tuple[Tensor, GatedLinearAttentionState]:
        """Compute the recurrence for one position `[B, 1, E]`: O(B H D V)."""
        self._require_batch(hidden, state.memory)
        read, memory = recur(self._writes(hidden, state.memory.dtype), state.memory)
        return self._merge(read, hidden), GatedLinearAttentionState(memory)

    def prefill(
        self, hidden: Tensor, state: GatedLinearAttentionState | None = None
    ) -> tuple[Tensor, GatedLinearAttentionState]:
        """Compute the chunkwise form for positions `[B, n, E]`, from the memory of those before."""
        if state is None:
            state = self._start(hidden)
        self._require_batch(hidden, state.memory)
        return self._chunked(hidden, state)
