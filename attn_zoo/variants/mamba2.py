"""Mamba-2: a state space model whose recurrence is attention without softmax, its decay chosen by each token.

Dao and Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
Duality", arXiv 2405.21060, equations 1, 6 and 7, and section 7.1. For each head:
    recurrent   h_t = a_t h_{t-1} + B_t (dt_t x_t)^T,   y_t = h_t^T C_t + D x_t,   a_t = exp(-exp(A) dt_t)
    dual        Y = (C B^T * M) (dt X) + D X,   M_ti = a_{i+1} .. a_t for t >= i, else 0
In the words of attention C are the queries, B the keys, one for all heads, and x the values. Around it, with
projections z, x, B, C and dt of the hidden states:
    x, B, C = silu(conv(.)),   conv: causal, each feature its own;   dt = softplus(w x + b)
    out = RMSNorm(Y * silu(z)) W_O
The chunkwise form (section 6) is dual inside chunks of Q positions, recurrent between them.
Symbols: the paper's chunk of Q positions is our C where no key is meant, its head width P our V = D `expand`; N is the
`state_dim`.
Cost: time O(B L (C (N + H V) + N H V)); memory O(B L (H (C + V + N V / C) + N)); decode state O(B H N V).
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
    short_convolution,
    split_chunks,
)
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer

NORM_EPS = 1e-5
"""As in the authors' code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Config(VariantConfig):
    """The authors' choices, but for the chunk.

    Args:
        state_dim: N, numbers that a head keeps for each feature of its values.
        expand: width of the values over that of the model.
        conv_len: positions that the short convolution sees, its own the last.
        chunk_len: positions of a chunk. The result does not depend on it; the authors' kernels take 256.
    """

    state_dim: int = 128
    expand: int = 2
    conv_len: int = 4
    chunk_len: int = 64

    def __post_init__(self) -> None:
        for name in ("state_dim", "expand", "conv_len", "chunk_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return chunks so small that there are many, and states that keep less than a value has."""
        return {"chunk_len": 16, "state_dim": 8}, {"chunk_len": 7, "state_dim": 3, "conv_len": 2, "expand": 1}


@dataclass(frozen=True, slots=True)
class Mamba2State:
    """What decoding keeps.

    Args:
        memory: h of all heads, `[B, 1, N, H V]`, in float32 at least.
        tail: what the short convolution sees of the positions so far, `[B, conv_len - 1, H V + 2 N]`.
    """

    memory: Tensor
    tail: Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the recurrence is given for n positions, in float32 at least.

    Args:
        value: x, `[B, n, H, V]`.
        key: B, `[B, n, N]`.
        query: C, `[B, n, N]`.
        step: dt, `[B, n, H]`, positive.
        log_decay: log a, `[B, n, H]`, at most 0.
    """

    value: Tensor
    key: Tensor
    query: Tensor
    step: Tensor
    log_decay: Tensor


@in_own_dtype
def recur(inputs: Inputs, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Compute equation 1 position by position: the outputs `[B, n, H, V]`, and the memory after the last."""
    outputs = []
    written, decay = inputs.step[..., None] * inputs.value, inputs.log_decay.exp()
    for t in range(inputs.key.shape[1]):
        kept = decay[:, t].repeat_interleave(written.shape[3], dim=-1)[:, None, None]  # [B, 1, 1, H V]
        memory = kept * memory + inputs.key[:, t, None, :, None] * written[:, t].flatten(1)[:, None, None]
        outputs.append(inputs.query[:, t, None, None] @ memory)  # [B, 1, 1, H V]
    return torch.cat(outputs, dim=1).view_as(written), memory


@in_own_dtype
def state_space_dual(inputs: Inputs, memory: Tensor, *, chunk_len: int) -> tuple[Tensor, Tensor]:
    """Compute what `recur` does, a chunk at a time.

    Heads share keys and queries, so the memories of all are written and read by one product: they stand side by side,
    `[B, 1, n, N, H V]`.

    Args:
        inputs: of n positions.
        memory: before the first, `[B, 1, N, H V]`.
        chunk_len: positions of a chunk.
    """
    length, (num_heads, width) = inputs.value.shape[1], inputs.value.shape[2:]
    count, size = chunk_sizes(length, chunk_len)
    # What fills up the last chunk has neither keys nor decay, so that it changes no memory.
    query, key = (split_chunks(x[:, None], count, size) for x in (inputs.query, inputs.key))  # [B, 1, n, C, N]
    so_far, between = decay_in_chunk(split_chunks(inputs.log_decay.mT, count, size))  # [B, H, n, C, 1 or C]
    written = split_chunks((inputs.step[..., None] * inputs.value).transpose(1, 2), count, size)  # [B, H, n, C, V]
    addition = key.mT @ _side_by_side(between[..., -1:, :].mT * written)  # [B, 1, n, N, H V]
    kept = _side_by_side(so_far[..., -1:, :].expand(-1, -1, -1, -1, width))  # [B, 1, n, 1, H V]
    before, last = memories(kept, addition, memory)
    carried = (query @ before).view(-1, count, size, num_heads, width).permute(0, 3, 1, 2, 4)  # [B, H, n, C, V]
    output = (query @ key.mT * between) @ written + so_far * carried
    return output.flatten(2, 3)[:, :, :length].transpose(1, 2), last


def _side_by_side(heads: Tensor) -> Tensor:
    """Return `[B, H, n, C, V]` as `[B, 1, n, C, H V]`."""
    return heads.permute(0, 2, 3, 1, 4).flatten(3)[:, None]


def _options(shape: Shape) -> Mamba2Config:
    return shape.config or Mamba2Config()


def _widths(shape: Shape) -> tuple[int, int]:
    """Return H V, and the width of what is convolved."""
    options = _options(shape)
    wide = shape.num_heads * shape.head_dim * options.expand
    return wide, wide + 2 * options.state_dim


def mamba2_flops(shape: Shape) -> int:
    """Count the products of the chunkwise form; those of queries and keys are shared by all heads."""
    options, (wide, _) = _options(shape), _widths(shape)
    count, size = chunk_sizes(shape.query_len, options.chunk_len)
    return 2 * shape.batch_size * count * size * (size * (options.state_dim + wide) + 2 * options.state_dim * wide)


def _num_projected(shape: Shape) -> int:
    """Count the weights of the projections of z and of what is convolved, of dt, and of the output."""
    wide, convolved = _widths(shape)
    return shape.embed_dim * (2 * wide + convolved + shape.num_heads)


def mamba2_projection_flops(shape: Shape) -> int:
    """Count the projections of every position."""
    return 2 * shape.batch_size * shape.query_len * _num_projected(shape)


def mamba2_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count the weights of the projections, which have no biases."""
    return _num_projected(shape) * itemsize


def mamba2_bytes(shape: Shape, itemsize: int) -> int:
    """Count input, output, the short convolution with its bias, A, b and D of each head, and the scale of the norm."""
    wide, convolved = _widths(shape)
    num_weights = convolved * (_options(shape).conv_len + 1) + 3 * shape.num_heads + wide
    return shape.io_bytes(itemsize) + num_weights * itemsize


def mamba2_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count one memory for each head, in 4 bytes at least, and the last positions for the short convolution."""
    options, (wide, convolved) = _options(shape), _widths(shape)
    memory = options.state_dim * wide * max(4, itemsize)
    return shape.batch_size * (memory + (options.conv_len - 1) * convolved * itemsize)


@register_mixer(
    "mamba2",
    config=Mamba2Config,
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
            "grouped_query": "all heads share their keys and queries as it is",
            "attention_dropout": "the paper drops none of what is written",
            "positions": "the decay of its memory tells positions apart",
        },
    ),
    complexity=Complexity(
        time="B L (C (N + H V) + N H V)",
        memory="B L (H (C + V + N V / C) + N)",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="L / C",
        max_path="L / C",
        flops=mamba2_flops,
        projection_flops=mamba2_projection_flops,
        bytes=mamba2_bytes,
        projection_bytes=mamba2_projection_bytes,
        state_bytes=mamba2_state_bytes,
    ),
    reference=Reference(
        title="Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space "
        "Duality",
        authors="Dao and Gu",
        year=2024,
        url="https://arxiv.org/abs/2405.21060",
        equation="1, 6, 7",
        code="https://github.com/state-spaces/mamba",
        deviations=(
            "It stands where attention stands, with a feed-forward network after it; the paper's blocks have none.",
            "Heads are as many as the model's and as wide as those times expand, where the authors' have 64 features.",
            "All heads share one group of B and C, as in the authors' default.",
            "Memories are kept in float32 at least, whatever the dtype of the hidden states.",
            "Projections are initialised as in all models; the convolution, A, b and D as in the authors' code.",
            "Padded positions write nothing, but time passes, and the memory decays.",
        ),
    ),
)
class Mamba2(AbstractMixer):
    """The state space dual form with its projections, short convolution, gate and norm.

    Args:
        config: state, widths, convolution and chunks.
        build: sizes; always causal.
    """

    config: Mamba2Config

    def __init__(self, config: Mamba2Config, build: BuildContext) -> None:
        super().__init__(config, build)
        wide = build.num_heads * build.head_dim * config.expand
        convolved = wide + 2 * config.state_dim
        self.gate_proj = nn.Linear(build.embed_dim, wide, bias=False)
        self.conv_proj = nn.Linear(build.embed_dim, convolved, bias=False)  # x, B and C
        self.step_proj = nn.Linear(build.embed_dim, build.num_heads, bias=False)
        self.out_proj = nn.Linear(wide, build.embed_dim, bias=False)
        bound = config.conv_len**-0.5
        self.conv = nn.Parameter(torch.empty(config.conv_len, convolved).uniform_(-bound, bound))
        self.conv_bias = nn.Parameter(torch.empty(convolved).uniform_(-bound, bound))
        # Rates exp(A) from 1 to 16, and steps softplus(b) from 0.001 to 0.1, even in their logarithm.
        self.log_rate = nn.Parameter(torch.empty(build.num_heads).uniform_(1, 16).log())
        first_step = torch.empty(build.num_heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.step_bias = nn.Parameter(first_step + torch.log(-torch.expm1(-first_step)))  # softplus undone
        self.skip = nn.Parameter(torch.ones(build.num_heads))
        self.norm_scale = nn.Parameter(torch.ones(wide))

    def _inputs(
        self, hidden: Tensor, tail: Tensor, dtype: torch.dtype, padding: Tensor | None = None
    ) -> tuple[Inputs, Tensor]:
        """Return what positions `[B, n, E]` write and read, in `dtype`, and the tail for those after them."""
        mixed, tail = short_convolution(self.conv_proj(hidden), self.conv, tail)
        mixed = blank_padding(silu(mixed + self.conv_bias), padding).to(dtype)
        size = self.config.state_dim
        value, key, query = mixed.split([mixed.shape[-1] - 2 * size, size, size], dim=-1)
        step = softplus(self.step_proj(hidden).to(dtype) + self.step_bias.to(dtype))
        return Inputs(
            value=value.unflatten(-1, (self.build.num_heads, -1)),
            key=key,
            query=query,
            step=step,
            log_decay=-self.log_rate.to(dtype).exp() * step,
        ), tail

    def _merge(self, read: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        """Add what skips the memory, gate, normalise over all heads, and project."""
        output = (read + self.skip.to(read.dtype)[:, None] * value).flatten(2)
        gated = output * silu(self.gate_proj(hidden)).to(read.dtype)
        normal = rms_norm(gated, gated.shape[-1:], self.norm_scale.to(read.dtype), NORM_EPS)
        merged: Tensor = self.out_proj(normal.to(hidden.dtype))
        return merged

    def _start(self, hidden: Tensor, dtype: torch.dtype) -> Mamba2State:
        """Return what there is before the first position: nothing was written, and zeros were seen."""
        conv_len, convolved = self.conv.shape
        sizes = (len(hidden), 1, self.config.state_dim, len(self.norm_scale))
        return Mamba2State(hidden.new_zeros(sizes, dtype=dtype), hidden.new_zeros(len(hidden), conv_len - 1, convolved))

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the chunkwise form; shapes as in `AbstractMixer.forward`. Padded positions give zeros."""
        del context  # the contract refuses one
        hidden = blank_padding(hidden, key_padding_mask)
        return self._chunked(hidden, None, key_padding_mask)[0]

    def _chunked(
        self, hidden: Tensor, state: Mamba2State | None, padding: Tensor | None = None
    ) -> tuple[Tensor, Mamba2State]:
        note_path("mamba2.chunked")
        if state is None:
            state = self._start(hidden, torch.promote_types(hidden.dtype, torch.float32))
        inputs, tail = self._inputs(hidden, state.tail, state.memory.dtype, padding)
        read, memory = state_space_dual(inputs, state.memory, chunk_len=self.config.chunk_len)
        return self._merge(read, inputs.value, hidden), Mamba2State(memory, tail)

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the recurrence position by position, in the dtype of the input."""
        del context
        hidden = blank_padding(hidden, key_padding_mask)
        start = self._start(hidden, hidden.dtype)
        inputs, _ = self._inputs(hidden, start.tail, hidden.dtype, key_padding_mask)
        return self._merge(recur(inputs, start.memory)[0], inputs.value, hidden)

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Mamba2State:
        """Return a memory of nothing."""
        self._require_state(key_padding_mask, context)
        nothing = torch.empty(batch_size, 0, device=device, dtype=dtype or self.conv.dtype)
        return self._start(nothing, torch.promote_types(nothing.dtype, torch.float32))

    def step(self, hidden: Tensor, state: Mamba2State) -> tuple[Tensor, Mamba2State]:
        """Compute the recurrence for one position `[B, 1, E]`: O(B H N V)."""
        inputs, tail = self._inputs(hidden, state.tail, state.memory.dtype)
        read, memory = recur(inputs, state.memory)
        return self._merge(read, inputs.value, hidden), Mamba2State(memory, tail)

    def prefill(self, hidden: Tensor, state: Mamba2State | None = None) -> tuple[Tensor, Mamba2State]:
        """Compute the chunkwise form for positions `[B, n, E]`, from the memory of those before."""
        return self._chunked(hidden, state)
