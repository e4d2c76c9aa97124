"""Attention with bounded-memory control (ABC): what tokens say goes into n slots, and queries attend to the slots.

Peng, Kasai, Pappas, Yogatama, Wu, Kong, Schwartz and Smith 2022, "ABC: Attention with Bounded-memory Control", arXiv
2110.02488, sections 2 to 4. For each head, with control phi_i of n numbers that token i makes of itself:
    phi_i = exp(W_phi x_i),   alpha_i = phi_i / sum_j phi_j, each slot by itself
    K~ = sum_i alpha_i (x) k_i,   V~ = sum_i alpha_i (x) v_i
    out = softmax(q K~^T / sqrt(D)) V~
Under a causal mask the sums end at the query, so that slots are a recurrence: with Z_t = phi_1 + .. + phi_t
    K~_t = diag(Z_{t-1} / Z_t) K~_{t-1} + (phi_t / Z_t) (x) k_t
All ratios are differences of logarithms, z_t = log Z_t, and none is more than 1: nothing overflows where one token's
control is a thousand more than that of all before it.
Symbols: n is `num_slots`.
Cost: bidirectional O(B H (L + S) n D) time; causal O(B H L (C (D + n) + n D)) in chunks of C; decode state O(B H n D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.masks import blank_padding, keep_mask, masked_softmax, score_bias
from attn_zoo.kernels.chunked_recurrence import memories, split_chunks
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer

NO_CONTROL = -1e30
"""Logarithm of the control of what writes nothing: finite, so that no difference of two is NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedMemoryConfig(VariantConfig):
    """The size of the memory.

    Args:
        num_slots: n, slots of each head; the paper takes 32 and 64.
        chunk_len: C, positions of a chunk of the causal form, rounded up to a power of two. The result does not depend
            on it.
    """

    num_slots: int = 64
    chunk_len: int = 64

    def __post_init__(self) -> None:
        for name in ("num_slots", "chunk_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return few slots, and chunks so small that there are many."""
        return {"num_slots": 8, "chunk_len": 16}, {"num_slots": 3, "chunk_len": 7}


@dataclass(frozen=True, slots=True)
class BoundedMemoryState:
    """What decoding keeps; in cross-attention what the context has written.

    Args:
        slots: K~ above V~, each transposed, `[B, H, 2 D, n]`, in float32 at least.
        log_control: z, `[B, H, n]`; minus infinity where nothing is written.
    """

    slots: Tensor
    log_control: Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """What m positions ask and write, in float32 at least.

    Args:
        query: scaled, `[B, H, m, D]`.
        rows: keys and values side by side, `[B, H, m, 2 D]`.
        log_control: log phi, `[B, H, m, n]`.
    """

    query: Tensor
    rows: Tensor
    log_control: Tensor


@in_own_dtype
def recur(tokens: Tokens, slots: Tensor, log_control: Tensor) -> tuple[Tensor, BoundedMemoryState]:
    """Compute the recurrence position by position: the output `[B, H, m, D]` and what is kept after the last."""
    outputs = []
    for t in range(tokens.query.shape[2]):
        control = tokens.log_control[:, :, t]
        now = torch.logaddexp(log_control, control)
        write = tokens.rows[:, :, t, :, None] * (control - now).exp()[:, :, None]
        slots = slots * (log_control - now).exp()[:, :, None] + write
        keys, values = slots.chunk(2, dim=-2)  # [B, H, D, n]
        outputs.append((tokens.query[:, :, t, None] @ keys).softmax(-1) @ values.mT)
        log_control = now
    return torch.cat(outputs, dim=2), BoundedMemoryState(slots, log_control)


@in_own_dtype
def causal_slots(
    tokens: Tokens, slots: Tensor, log_control: Tensor, *, chunk_len: int
) -> tuple[Tensor, BoundedMemoryState]:
    """Compute what `recur` does, a chunk at a time.

    The weight of token i in slot n for query t is exp(s_in - z_tn), s being log phi: not one number times the product
    of q_t and k_i. But where m lies between i and t, it is exp(s_in - z_mn) exp(z_mn - z_tn). So the second half of a
    chunk sees the first by products of matrices, m being the last of the first half; and so on down to one position.

    Args:
        tokens: m positions.
        slots: of those before, `[B, H, 2 D, n]`.
        log_control: of those before, `[B, H, n]`.
        chunk_len: C.
    """
    length = tokens.query.shape[2]
    size = 1
    while size < chunk_len and size < length:
        size *= 2
    count = (length + size - 1) // size
    control = pad(tokens.log_control, (0, 0, 0, count * size - length), value=NO_CONTROL)
    query, rows, control = (
        split_chunks(x, count, size) for x in (tokens.query, tokens.rows, control)
    )  # [B, H, chunks, C, D, 2 D or n]
    total = _totals(control, log_control)  # z
    end = total[:, :, :, -1:]
    start = torch.cat([log_control[:, :, None, None], end[:, :, :-1]], dim=2)
    before, last = memories((start - end).exp(), rows.mT @ (control - end).exp(), slots)
    own, since = (control - total).exp(), (start - total).exp()
    halves = [_of_halves(control, total, half) for half in (2**level for level in range(size.bit_length() - 1))]
    key, value = rows.chunk(2, dim=-1)
    keys, values = before.chunk(2, dim=-2)  # [B, H, chunks, D, n]
    scores = (query @ keys) * since + (query * key).sum(-1, keepdim=True) * own
    for first, second in halves:
        half = first.shape[-2]
        asked, written = _pairs(query, half)[1], _pairs(key, half)[0]
        scores = scores + pad((asked @ written.mT) @ first * second, (0, 0, half, 0)).flatten(3, 4)
    weights = scores.softmax(-1)
    output = (weights * since) @ values.mT + (weights * own).sum(-1, keepdim=True) * value
    for first, second in halves:
        half = first.shape[-2]
        read = (_pairs(weights, half)[1] * second) @ first.mT
        output = output + pad(read @ _pairs(value, half)[0], (0, 0, half, 0)).flatten(3, 4)
    return output.flatten(2, 3)[:, :, :length], BoundedMemoryState(
        last, end[:, :, -1, 0].clone()
    )  # a view would keep all of it


def _totals(control: Tensor, start: Tensor) -> Tensor:
    """Return z of every position from log phi, `[B, H, chunks, C, n]`, and z of what came before, `[B, H, n]`.

    Each step adds two numbers, and its gradients are weights of at most 1. The backward of torch's `logcumsumexp` is in
    logarithms as large as the control: it loses the digits that these take.
    """
    group = min(8, control.shape[3])
    rows = list(control.unflatten(3, (-1, group)).unbind(4))  # of a group side by side, [B, H, chunks, C / 8, n]
    for i in range(1, group):
        rows[i] = torch.logaddexp(rows[i - 1], rows[i])
    before = torch.cat([start[:, :, None], rows[-1].flatten(2, 3)[:, :, :-1]], dim=2)
    step = 1
    while step < before.shape[2]:
        before = torch.cat([before[:, :, :step], torch.logaddexp(before[:, :, :-step], before[:, :, step:])], dim=2)
        step *= 2
    before = before.unflatten(2, rows[0].shape[2:4])
    return torch.stack([torch.logaddexp(before, row) for row in rows], dim=4).flatten(3, 4)


def _pairs(chunks: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return the earlier and the later of each two blocks of `half` positions, `[B, H, chunks, blocks, half, ...]`."""
    early, late = chunks.unflatten(3, (-1, 2, half)).unbind(4)
    return early, late


def _of_halves(control: Tensor, total: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return the weights of tokens at the end of their block, and what is left of them at positions of the next."""
    middle = _pairs(total, half)[0][..., -1:, :]
    return (_pairs(control, half)[0] - middle).exp(), (middle - _pairs(total, half)[1]).exp()


def _options(shape: Shape) -> BoundedMemoryConfig:
    return shape.config or BoundedMemoryConfig()


def bounded_memory_flops(shape: Shape) -> int:
    """Count the products of tokens with slots and of queries with slots; in the causal form those of halves too."""
    dim, num_slots, query_len = shape.head_dim, _options(shape).num_slots, shape.query_len
    if not shape.is_causal:
        return 4 * shape.batch_size * shape.num_heads * num_slots * dim * (query_len + shape.key_len)
    size = 1
    while size < _options(shape).chunk_len and size < query_len:
        size *= 2
    of_chunk = size * (size - 1) * (dim + num_slots) + 4 * size * dim * num_slots
    return 2 * shape.batch_size * shape.num_heads * -(-query_len // size) * of_chunk


def bounded_memory_backward_ratio(shape: Shape) -> float:
    """Count two products for one, and five for two where scores are recomputed: those of queries with whole sums."""
    if shape.is_causal:
        return 2.0
    return (2 * shape.key_len + 2.5 * shape.query_len) / (shape.key_len + shape.query_len)


def _num_weights(shape: Shape) -> tuple[int, int]:
    """Return the weights that act on each query position, and on each key position."""
    width = shape.num_heads * shape.head_dim
    return 2 * shape.embed_dim * width, shape.embed_dim * (2 * width + shape.num_heads * _options(shape).num_slots)


def bounded_memory_projection_flops(shape: Shape) -> int:
    """Count the projections of queries, keys, values, control and output."""
    of_queries, of_keys = _num_weights(shape)
    return 2 * shape.batch_size * (shape.query_len * of_queries + shape.key_len * of_keys)


def bounded_memory_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count the weights of those projections, which have no biases."""
    return sum(_num_weights(shape)) * itemsize


def bounded_memory_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count n slots of keys and values and their z for each head, whatever the length; in 4 bytes at least."""
    per_head = _options(shape).num_slots * (2 * shape.head_dim + 1)
    return shape.batch_size * shape.num_heads * per_head * max(4, itemsize)


@register_mixer(
    "bounded_memory",
    config=BoundedMemoryConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=True,
        key_padding_mask=True,
        decode="recurrent",
        attention_dropout=False,
        is_permutation_invariant=True,
        is_padding_invariant=True,
        positions=("none",),
        why={
            "grouped_query": "every head has slots of its own",
            "attention_dropout": "a weight is that of a slot, which holds a part of every token",
            "positions": "a slot holds keys of many positions",
        },
    ),
    complexity=Complexity(
        time="B H L n D (causal: B H L (C (D + n) + n D))",
        memory="B H L (D + n) (causal: B H L (D + n log C + n D / C))",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1 (causal: L / C)",
        max_path="1 (causal: L / C)",
        flops=bounded_memory_flops,
        projection_flops=bounded_memory_projection_flops,
        projection_bytes=bounded_memory_projection_bytes,
        backward_ratio=bounded_memory_backward_ratio,
        state_bytes=bounded_memory_state_bytes,
    ),
    reference=Reference(
        title="ABC: Attention with Bounded-memory Control",
        authors="Peng et al.",
        year=2022,
        url="https://arxiv.org/abs/2110.02488",
        equation="sections 2 to 4",
        code="https://github.com/fla-org/flash-linear-attention",
        deviations=(
            "Of the paper's controls this is the learned one, with weights of each head's own, as in public code.",
            "Projections have no biases: in the control one would change nothing, as each slot is normalised.",
            "Under a causal mask chunks are put together from halves, in products of matrices.",
            "The code has rotary positions, a bound on the control, and a norm and a gate of the output, all off here.",
            "Slots are kept in float32 at least, whatever the dtype of the hidden states.",
            "The initialisation is that of all models.",
        ),
    ),
)
class BoundedMemory(AbstractMixer):
    """Slots with their control and projections.

    Args:
        config: slots and chunks.
        build: sizes and direction.
    """

    config: BoundedMemoryConfig

    def __init__(self, config: BoundedMemoryConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        width = build.num_heads * build.head_dim
        self.query_proj = nn.Linear(build.embed_dim, width, bias=False)
        self.key_proj = nn.Linear(build.embed_dim, width, bias=False)
        self.value_proj = nn.Linear(build.embed_dim, width, bias=False)
        self.control_proj = nn.Linear(build.embed_dim, build.num_heads * config.num_slots, bias=False)
        self.out_proj = nn.Linear(width, build.embed_dim, bias=False)

    def _heads(self, rows: Tensor) -> Tensor:
        """Return `[B, m, H d]` as `[B, H, m, d]`."""
        heads: Tensor = rows.unflatten(-1, (self.build.num_heads, -1)).transpose(1, 2)
        return heads

    def _tokens(self, hidden: Tensor, mask: Tensor | None = None) -> Tokens:
        """Return what positions `[B, m, E]` ask and write; padded ones, which are zeros, write nothing."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        query, key, value, control = (
            self._heads(projection(hidden)).to(wide)
            for projection in (self.query_proj, self.key_proj, self.value_proj, self.control_proj)
        )
        if mask is not None:
            control = control.masked_fill(mask[:, None, :, None], NO_CONTROL)
        return Tokens(query * self.build.head_dim**-0.5, torch.cat([key, value], dim=-1), control)

    def _memory(self, rows: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return K~ and V~ of a whole sequence `[B, S, E]`, both `[B, H, n, D]`."""
        rows = blank_padding(rows, mask)
        control = self._heads(self.control_proj(rows)).mT  # [B, H, n, S]
        keep = keep_mask(1, rows.shape[1], is_causal=False, key_padding_mask=mask, device=rows.device)
        alpha = masked_softmax(control.to(torch.promote_types(control.dtype, torch.float32)), keep).to(control.dtype)
        return alpha @ self._heads(self.key_proj(rows)), alpha @ self._heads(self.value_proj(rows))

    def _merge(self, heads: Tensor, hidden: Tensor) -> Tensor:
        merged: Tensor = self.out_proj(heads.to(hidden.dtype).transpose(1, 2).flatten(2))
        return merged

    def _start(self, hidden: Tensor) -> BoundedMemoryState:
        """Return slots in which nothing is written, in float32 at least."""
        sizes = (len(hidden), self.build.num_heads, 2 * self.build.head_dim, self.config.num_slots)
        slots = hidden.new_zeros(sizes, dtype=torch.promote_types(hidden.dtype, torch.float32))
        return BoundedMemoryState(slots, slots.new_full((*sizes[:2], sizes[-1]), -torch.inf))

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Attend to the slots of the whole sequence, or of all up to each position; as `AbstractMixer.forward`."""
        if self.build.is_causal and not self.build.is_cross:
            hidden = blank_padding(hidden, key_padding_mask)
            note_path("bounded_memory.chunked")
            read, _ = self._causal(self._tokens(hidden, key_padding_mask), self._start(hidden))
            return self._merge(read, hidden)
        if context is None:
            context = hidden = blank_padding(hidden, key_padding_mask)
        keys, values = self._memory(context, key_padding_mask)
        query = self._heads(self.query_proj(hidden))
        return self._merge(exact_attention(query, keys, values, score_bias=score_bias), hidden)

    def _causal(self, tokens: Tokens, state: BoundedMemoryState) -> tuple[Tensor, BoundedMemoryState]:
        return causal_slots(tokens, state.slots, state.log_control, chunk_len=self.config.chunk_len)

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the recurrence position by position; bidirectional the sums and dense weights."""
        if self.build.is_causal and not self.build.is_cross:
            hidden = blank_padding(hidden, key_padding_mask)
            start = self._start(hidden)
            tokens = self._tokens(hidden, key_padding_mask)
            return self._merge(recur(tokens, start.slots, start.log_control)[0], hidden)
        if context is None:
            context = hidden = blank_padding(hidden, key_padding_mask)
        keys, values = self._memory(context, key_padding_mask)
        scores = self.build.head_dim**-0.5 * (self._heads(self.query_proj(hidden)) @ keys.mT)
        return self._merge(scores.softmax(-1) @ values, hidden)

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> BoundedMemoryState:
        """Return slots in which nothing is written; in cross-attention those of the context."""
        empty = self._start(torch.empty(batch_size, 0, device=device, dtype=dtype or self.out_proj.weight.dtype))
        if not self.build.is_cross:
            self._require_state(key_padding_mask, context)
            return empty
        if context is None or context.shape[0] != batch_size:
            got = "none" if context is None else list(context.shape)
            raise ValueError(f"context: expected [B, S, E] with B = {batch_size} to decode across; got {got}")
        self._check(context.new_empty(batch_size, 1, self.build.embed_dim), context, key_padding_mask, None)
        slots = torch.cat(self._memory(context, key_padding_mask), dim=-1).mT
        return BoundedMemoryState(slots.to(empty.slots.dtype), empty.log_control)

    def step(self, hidden: Tensor, state: BoundedMemoryState) -> tuple[Tensor, BoundedMemoryState]:
        """Write one position `[B, 1, E]` into the slots and attend to them: O(B H n D)."""
        self._require_batch(hidden, state.slots)
        if self.build.is_cross:
            return self._read(hidden, state), state
        read, state = recur(self._tokens(hidden), state.slots, state.log_control)
        return self._merge(read, hidden), state

    def prefill(self, hidden: Tensor, state: BoundedMemoryState | None = None) -> tuple[Tensor, BoundedMemoryState]:
        """Compute the causal form for positions `[B, m, E]`, from the slots of those before."""
        if state is None:
            state = self.init_state(len(hidden), device=hidden.device, dtype=hidden.dtype)
        self._require_batch(hidden, state.slots)
        if self.build.is_cross:
            return self._read(hidden, state), state
        read, state = self._causal(self._tokens(hidden), state)
        return self._merge(read, hidden), state

    def _read(self, hidden: Tensor, state: BoundedMemoryState) -> Tensor:
        """Attend from positions `[B, m, E]` to the slots of a context."""
        keys, values = state.slots.chunk(2, dim=-2)
        query = self._heads(self.query_proj(hidden)).to(keys.dtype)
        return self._merge(((query @ keys) * self.build.head_dim**-0.5).softmax(-1) @ values.mT, hidden)
