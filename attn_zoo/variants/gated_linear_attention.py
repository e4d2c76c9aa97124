"""Gated linear attention: a recurrent memory in which each feature of the keys forgets at a rate that the data sets.

Yang, Wang, Shen, Panda and Kim 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training", arXiv
2312.06635, section 4. For each head, with alpha_t of one number for each of the D features of a key:
    recurrent      S_t = Diag(alpha_t) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t / sqrt(D)                  (3)
    parallel       o_t = sum_{i <= t} (sum_d q_td k_id alpha_{i+1,d} .. alpha_td) v_i / sqrt(D)          (4)
    gate           alpha_t = sigmoid(W_2 W_1 x_t + b)^(1/tau),   W_1 to a few features
    output         out = (RMSNorm_h(o_1 .. o_H) * silu(x W_G)) W_O
Over a chunk of C positions the memory is kept by the products of its alphas; inside a chunk the decay between two
positions is another in each feature, and no matrix of [C, C]. But each pair is parted once as the chunk is halved, and
the halves again, and then its decay is that from i to the border, a factor of k_i, times that from the border to t, a
factor of q_t. So all pairs are products of matrices whose factors are at most 1 (`within_chunk`); the paper's secondary
chunks compute those of the smallest halves one by one.
Symbols: V = D `value_factor` is the width of values.
Cost: time O(B H L (C (D + V) + D V)); memory O(B H L (C + D log C + V + D V / C)); decode state O(B H D V).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, silu

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.masks import blank_padding
from attn_zoo.kernels.activations import softplus
from attn_zoo.kernels.chunked_recurrence import chunk_sizes, memories, split_chunks
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
        chunk_len: C, positions of a chunk; made a power of two, by adding. The result does not depend on it.
        gate_rank: features between the two projections of the gate.
        gate_temperature: tau; the larger, the slower a memory is forgotten.
        value_factor: width of values and output gate over that of queries and keys. The paper's models take 2, with
            queries and keys of half the model's width.
    """

    chunk_len: int = 64
    gate_rank: int = 16
    gate_temperature: float = 16.0
    value_factor: int = 1

    def __post_init__(self) -> None:
        for name in ("chunk_len", "gate_rank", "value_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")
        if not self.gate_temperature > 0:
            raise ValueError(f"gate_temperature: expected more than 0; got {self.gate_temperature}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return chunks so small that there are many, and a memory that forgets fast."""
        return {"chunk_len": 16}, {"chunk_len": 7, "gate_rank": 3, "gate_temperature": 1.0, "value_factor": 2}


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
    """Compute equation 3 position by position: the output `[B, H, n, V]` and the memory after the last.

    The memory is transposed, `[B, H, V, D]`, as in `gated_sums`.
    """
    outputs, decay = [], writes.log_decay.exp()
    for t in range(writes.key.shape[2]):
        here = slice(t, t + 1)
        memory = decay[:, :, here] * memory + writes.value[:, :, here].mT @ writes.key[:, :, here]
        outputs.append(writes.query[:, :, here] @ memory.mT)
    return torch.cat(outputs, dim=2), memory


def decay_until_end(log_decay: Tensor) -> Tensor:
    """Return alpha_{i+1} .. alpha_C for each position i of `[..., C, D]`: what is left of it at the end.

    Summed from the end, and not as a difference of sums from the start: behind tokens that forget almost all that has
    lost its digits (`kernels.chunked_recurrence.decay_in_chunk`).
    """
    later = pad(log_decay[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2).exp()


def within_chunk(writes: Writes) -> Tensor:
    """Compute equation 4 inside each chunk `[..., C, D]`, C a power of two, by halving: see the top of the file."""
    output = (writes.query * writes.key).sum(-1, keepdim=True) * writes.value  # i = t, of which nothing has decayed
    size = 1
    while size < writes.key.shape[-2]:
        query, key, value, log_decay = (
            x.unflatten(-2, (-1, 2, size)) for x in (writes.query, writes.key, writes.value, writes.log_decay)
        )
        early, late = log_decay.unbind(-3)  # [..., C / 2 size, size, D]
        asked = query[..., 1, :, :] * late.cumsum(-2).exp()
        left = key[..., 0, :, :] * decay_until_end(early)
        read = (asked @ left.mT) @ value[..., 0, :, :]
        output = output + torch.stack([torch.zeros_like(read), read], dim=-3).flatten(-4, -2)
        size *= 2
    return output


def _halving(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    power = 1
    while power < size:
        power *= 2
    return power


@in_own_dtype
def gated_sums(writes: Writes, memory: Tensor, *, chunk_len: int) -> tuple[Tensor, Tensor]:
    """Compute what `recur` does, a chunk at a time.

    In a chunk that begins with the memory S, where g_t = alpha_1 .. alpha_t and G_i = alpha_{i+1} .. alpha_C:
        S' = Diag(g_C) S + (G * K)^T V
        O  = (g * Q) S + what the chunk's own positions have written

    Args:
        writes: of n positions.
        memory: S^T before the first, `[B, H, V, D]`.
        chunk_len: C.
    """
    length = writes.key.shape[2]
    size = _halving(chunk_sizes(length, chunk_len)[1])
    count = (length + size - 1) // size
    # What fills up the last chunk has neither keys nor decay, so that it changes no memory.
    chunks = Writes(
        *(split_chunks(x, count, size) for x in (writes.query, writes.key, writes.value, writes.log_decay))
    )  # [B, H, n, C, ...]
    so_far = chunks.log_decay.cumsum(-2).exp()
    written = chunks.value.mT @ (chunks.key * decay_until_end(chunks.log_decay))  # [B, H, n, V, D]
    before, last = memories(so_far[..., -1:, :], written, memory)
    output = (chunks.query * so_far) @ before.mT + within_chunk(chunks)
    return output.flatten(2, 3)[:, :, :length], last


def _options(shape: Shape) -> GatedLinearAttentionConfig:
    return shape.config or GatedLinearAttentionConfig()


def gated_linear_attention_flops(shape: Shape) -> int:
    """Count the products with memories, and those of the halves of each chunk."""
    options, dim = _options(shape), shape.head_dim
    wide = dim * options.value_factor
    size = _halving(chunk_sizes(shape.query_len, options.chunk_len)[1])
    count = -(-shape.query_len // size)
    of_chunk = size * (size - 1) // 2 * (dim + wide) + 2 * size * dim * wide
    return 2 * shape.batch_size * shape.num_heads * count * of_chunk


def _num_projected(shape: Shape) -> int:
    """Count the weights of the seven projections."""
    options, width = _options(shape), shape.num_heads * shape.head_dim
    of_gate = options.gate_rank * (shape.embed_dim + width)
    return shape.embed_dim * width * (2 + 3 * options.value_factor) + of_gate


def gated_linear_attention_projection_flops(shape: Shape) -> int:
    """Count the seven projections of every position."""
    return 2 * shape.batch_size * shape.query_len * _num_projected(shape)


def gated_linear_attention_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count the weights of the seven projections, of which the second of the gate has biases."""
    return (_num_projected(shape) + shape.num_heads * shape.head_dim) * itemsize


def gated_linear_attention_bytes(shape: Shape, itemsize: int) -> int:
    """Count input, output, and the scale of the norm."""
    return shape.io_bytes(itemsize) + shape.head_dim * _options(shape).value_factor * itemsize


def gated_linear_attention_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count one memory for each head, whatever the length, in 4 bytes at least."""
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
            "cross_attention": "queries read a memory that keys of their own positions have written",
            "grouped_query": "every head has gates and keys of its own",
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
        equation="3, 4",
        code="https://github.com/fla-org/flash-linear-attention",
        deviations=(
            "The norm of a head subtracts no mean and its gate has no biases, as in the authors' code; the paper's do.",
            "Values are as wide as keys, and both as the model, unless value_factor says otherwise.",
            "Memories are kept in float32 at least, whatever the dtype of the hidden states.",
            "Between chunks memories are composed in groups, in O(sqrt(L / C)) steps, where the authors' take L / C.",
            "The initialisation is that of all models.",
            "Padded positions write nothing, but time passes, and the memory decays.",
        ),
    ),
)
class GatedLinearAttention(AbstractMixer):
    """Gated sums with their projections, gates and norm.

    Args:
        config: chunks, gate and widths.
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
        self.decay_down_proj = nn.Linear(build.embed_dim, config.gate_rank, bias=False)
        self.decay_up_proj = nn.Linear(config.gate_rank, width)
        self.gate_proj = nn.Linear(build.embed_dim, wide, bias=False)
        self.out_proj = nn.Linear(wide, build.embed_dim, bias=False)
        self.norm_scale = nn.Parameter(torch.ones(build.head_dim * config.value_factor))

    def _writes(self, hidden: Tensor, dtype: torch.dtype) -> Writes:
        """Return what positions `[B, n, E]` write and read, in `dtype`."""
        query, key, value, logit = (
            rows.unflatten(-1, (self.build.num_heads, -1)).transpose(1, 2).to(dtype)
            for rows in (
                self.query_proj(hidden),
                self.key_proj(hidden),
                self.value_proj(hidden),
                self.decay_up_proj(self.decay_down_proj(hidden)),
            )
        )
        log_decay = -softplus(-logit) / self.config.gate_temperature
        return Writes(query * self.build.head_dim**-0.5, key, value, log_decay)

    def _merge(self, read: Tensor, hidden: Tensor) -> Tensor:
        """Normalise each head of each position, gate and project."""
        normal = rms_norm(read, read.shape[-1:], self.norm_scale.to(read.dtype), NORM_EPS).transpose(1, 2).flatten(2)
        merged: Tensor = self.out_proj(silu(self.gate_proj(hidden)) * normal.to(hidden.dtype))
        return merged

    def _start(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what there is before the first position: nothing was written."""
        build = self.build
        wide = build.head_dim * self.config.value_factor
        return hidden.new_zeros(len(hidden), build.num_heads, wide, build.head_dim, dtype=dtype)

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the chunkwise form; shapes as in `AbstractMixer.forward`. Padded positions give zeros."""
        del context  # the contract refuses one
        return self.prefill(blank_padding(hidden, key_padding_mask))[0]

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute equation 3 position by position, in the dtype of the input."""
        del context
        hidden = blank_padding(hidden, key_padding_mask)
        return self._merge(recur(self._writes(hidden, hidden.dtype), self._start(hidden, hidden.dtype))[0], hidden)

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return a memory of nothing: S^T of each head, `[B, H, V, D]`, in float32 at least."""
        self._require_state(key_padding_mask, context)
        nothing = torch.empty(batch_size, 0, device=device, dtype=dtype or self.norm_scale.dtype)
        return self._start(nothing, torch.promote_types(nothing.dtype, torch.float32))

    def step(self, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute equation 3 for one position `[B, 1, E]`: O(B H D V)."""
        self._require_batch(hidden, state)
        read, memory = recur(self._writes(hidden, state.dtype), state)
        return self._merge(read, hidden), memory

    def prefill(self, hidden: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the chunkwise form for positions `[B, n, E]`, from the memory of those before."""
        note_path("gated_linear_attention.chunked")
        if state is None:
            state = self._start(hidden, torch.promote_types(hidden.dtype, torch.float32))
        self._require_batch(hidden, state)
        read, memory = gated_sums(self._writes(hidden, state.dtype), state, chunk_len=self.config.chunk_len)
        return self._merge(read, hidden), memory
