"""Sinkhorn attention: each block of queries sees its own block of keys, and one that a learned sorting brings to it.

Tay et al. 2020, "Sparse Sinkhorn Attention", arXiv 2002.11296, section 3.
    out_i = softmax(q_i [K'_n, K_n]^T / sqrt(D)) [V'_n, V_n],   n the block of i
    K'_n = sum_m S_nm K_m,   V'_n = sum_m S_nm V_m,   S = balance(R / tau)
    R_nm = w_m sum_{j in block n} k_j,   w_m learned for each place of a block and each head
    balance(X): exp(X), its rows and then its columns divided by their sums, k times: almost a permutation of blocks
Causal: S_nm = softmax over m < n of w_m sum_{j up to the first of block n} k_j / tau: rows alone are normalised. Below
the diagonal, rows and columns that all sum to one leave one matrix, the shift by one block, and nothing to learn.
Symbols: the paper's block length b is `block_size` C, its N_B is L / C, its k is `num_iterations`.
Cost: time O(B H L (C + L / C) D): to sort is the second term, the larger one from about 2 C^2 tokens on; memory
O(B H L D + B H (L / C)^2). A decoded token O(B H C D), the first of each block O(B H L D), to sort one for all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attn_zoo.attention import AbstractAttention, BuildContext
from attn_zoo.attention.decode import KVCache
from attn_zoo.attention.masks import blank_padding, causal_keep, masked_softmax, score_bias, zero_padded_rows
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention
from attn_zoo.kernels.blocks.call import Backend
from attn_zoo.kernels.blocks.layout import PatternLayout
from attn_zoo.kernels.blocks.pattern import BlockPattern, make_pattern
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkhornConfig(VariantConfig):
    """The paper's choices.

    Args:
        block_size: C, tokens of a block; the last one may be shorter. Long Range Arena has 50 and 64.
        temperature: tau, by which scores of blocks are divided: the lower, the nearer to a permutation.
        num_iterations: k, of balancing; the causal form has none.
        backend: `"gather"` runs anywhere, `"flex"` is FlexAttention on a GPU, `"triton"` are our own kernels on a GPU;
            `"auto"` takes one on a GPU where it can serve the call. A named one runs or is refused.
    """

    block_size: int = 64
    temperature: float = 0.75
    num_iterations: int = 5
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        for name in ("block_size", "num_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")
        if not self.temperature > 0:
            raise ValueError(f"temperature: expected a number above 0; got {self.temperature}")

    def narrow(self, capabilities: Capabilities) -> Capabilities:
        """Return less for FlexAttention, which has no dropout."""
        if self.backend != "flex":
            return capabilities
        return capabilities.without(attention_dropout="backend 'flex' has none")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return blocks small enough that there are several, also of a size that is no power of two."""
        return {"block_size": 16}, {"block_size": 12, "num_iterations": 2, "temperature": 2.0}

    @classmethod
    def budgets(cls, seq_len: int) -> tuple[dict[str, Any], ...]:
        """Return larger and larger blocks; a single one is all there is."""
        return tuple({"block_size": size} for size in (8, -(-seq_len // 2), seq_len))


@dataclass(frozen=True, kw_only=True)
class SortedLayout(PatternLayout):
    """Each block of queries sees its own block of keys and one of the sorted ones, which stand before all others.

    A single block sees itself alone, as it is what is sorted to it; causal the first one does, to which nothing is.

    Args:
        query_len: L, tokens.
        block_size: C, tokens in a block; the last one may be shorter, but not the sorted one.
        is_causal: hide later keys of the own block.
    """

    query_len: int
    block_size: int
    is_causal: bool

    @property
    def num_blocks(self) -> int:
        """Blocks of queries, the ragged last one included."""
        return -(-self.query_len // self.block_size)

    def make(self, device: str) -> BlockPattern:
        """Return the pattern: two entries for each block, or one."""
        rows = torch.arange(self.num_blocks, device=device)[:, None]
        sees_sorted = rows > 0 if self.is_causal else torch.full_like(rows, self.num_blocks > 1, dtype=torch.bool)
        return make_pattern(
            torch.cat([rows, rows + self.num_blocks], dim=1)[None],
            torch.cat([sees_sorted, torch.ones_like(sees_sorted)], dim=1),
            query_len=self.query_len,
            key_len=self.num_blocks * self.block_size + self.query_len,
            block_size=self.block_size,
            is_causal=self.is_causal,
        )


def _layout(shape: Shape) -> SortedLayout:
    size = (shape.config or SinkhornConfig()).block_size
    return SortedLayout(query_len=shape.query_len, block_size=size, is_causal=shape.is_causal)


def _sorting_flops(shape: Shape) -> int:
    """Count the scores of blocks, and the products of S with keys and with values."""
    layout = _layout(shape)
    per_pair = 2 * shape.head_dim * (1 + 2 * layout.block_size)
    return shape.batch_size * shape.num_kv_heads * layout.num_blocks**2 * per_pair


def _attending_flops(shape: Shape) -> int:
    """Count both products over whole blocks, also where a causal mask hides a part of them."""
    layout = _layout(shape)
    pairs = layout.num_blocks * layout.block_size**2 * min(layout.num_blocks, 2)
    return 4 * shape.batch_size * shape.num_heads * shape.head_dim * pairs


def sinkhorn_flops(shape: Shape) -> int:
    """Count sorting, and attention to the own block and to the sorted one."""
    return _sorting_flops(shape) + _attending_flops(shape)


def sinkhorn_backward_ratio(shape: Shape) -> float:
    """Return 2 for sorting and 2.5 for the attention, which recomputes its scores."""
    sorting, attending = _sorting_flops(shape), _attending_flops(shape)
    return (2.0 * sorting + 2.5 * attending) / (sorting + attending)


def sinkhorn_bytes(shape: Shape, itemsize: int) -> int:
    """Count queries, keys, values and the weights of as many places as there are, and the output."""
    return shape.io_bytes(itemsize) + shape.num_kv_heads * _layout(shape).num_blocks * shape.head_dim * itemsize


def _token_bytes(shape: Shape, itemsize: int) -> int:
    """Return the bytes of the keys and values of one position."""
    return 2 * shape.batch_size * shape.num_kv_heads * shape.head_dim * itemsize


def sinkhorn_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count keys and values of all positions so far, and of the block that was sorted to the last one's."""
    size, length = _layout(shape).block_size, shape.key_len
    return (length + (size if length > size else 0)) * _token_bytes(shape, itemsize)


def sinkhorn_step_bytes(shape: Shape, itemsize: int) -> int:
    """Count the sorted block and what its own block has so far; the first token of a block reads everything."""
    size, length = _layout(shape).block_size, shape.key_len
    num_own = length % size
    num_read = num_own + (size if length > size else 0) if num_own else length
    return num_read * _token_bytes(shape, itemsize)


@dataclass(frozen=True, slots=True)
class SinkhornState:
    """Decode state.

    Args:
        cache: keys and values so far.
        sorted_key: K' of the block that the last position stands in, `[B, G, C, D]`; `[B, G, 0, D]` in the first one.
        sorted_value: V', likewise.
    """

    cache: KVCache
    sorted_key: Tensor
    sorted_value: Tensor


@register_attention(
    "sinkhorn",
    config=SinkhornConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        decode="kv_cache",
        grouped_query=True,
        is_padding_invariant=True,
        dropout_unit="summaries",
        why={
            "cross_attention": "a query sees the block it stands in, and stands in none of another sequence",
            "positions": "a bias by distance needs keys with a position, and a sorted one is a mean over blocks",
            "is_permutation_invariant": "blocks are made of neighbours",
        },
    ),
    complexity=Complexity(
        time="B H L (C + L / C) D",
        memory="B H L D + B H (L / C)^2",
        time_exponent=2,
        memory_exponent=2,
        sequential_ops="1",
        max_path="1",
        flops=sinkhorn_flops,
        backward_ratio=sinkhorn_backward_ratio,
        bytes=sinkhorn_bytes,
        state_bytes=sinkhorn_state_bytes,
        step_bytes=sinkhorn_step_bytes,
    ),
    reference=Reference(
        title="Sparse Sinkhorn Attention",
        authors="Tay et al.",
        year=2020,
        url="https://arxiv.org/abs/2002.11296",
        equation="section 3",
        code="https://github.com/google-research/long-range-arena",
        deviations=(
            "No Gumbel noise is added to R in training: without dropout a call draws nothing.",
            "The sorting network is one linear map of keys, as in the authors' code; the paper's has layers and ReLU.",
            "It has no bias: balanced to the end, S would not depend on one; after k steps, or causal, it would.",
            "The causal form normalises rows alone; the paper balances columns too, whose sums hold later rows.",
            "One softmax over both blocks; as printed, their scores are added; the authors' code adds two attentions.",
            "In that code S shares no index with the blocks, so that each sorted block is the sum of all of them.",
            "Padding is zero in what is sorted, and hidden where every block has it; blocks of padding stay in place.",
            "No SortCut, which attends to the first sorted blocks only, and no mixture with softmax attention.",
            "Not in the paper: grouped heads, rotary positions (keys are sorted after rotation).",
        ),
    ),
)
class SinkhornAttention(AbstractAttention):
    """Attention to the own block and a sorted one.

    Args:
        config: the variant's options.
        build: sizes and direction; `max_seq_len` says how many places blocks can have.
    """

    config: SinkhornConfig

    def __init__(self, config: SinkhornConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        num_places = -(-build.max_seq_len // config.block_size)
        drawn = torch.randn(build.num_kv_heads, num_places, build.head_dim) * build.head_dim**-0.5
        self.places = nn.Parameter(drawn)  # w

    def _blocks(self, tokens: Tensor) -> Tensor:
        """Return keys or values `[B, G, L, D]` as `[B, G, N, C, D]`, zeros behind the last."""
        size = self.config.block_size
        blocks: Tensor = pad(tokens, (0, 0, 0, -tokens.shape[2] % size)).unflatten(2, (-1, size))
        return blocks

    def _no_token(self, mask: Tensor) -> Tensor:
        """Return bool `[B, N, C]`, True where `mask` `[B, L]` is, and behind the last token."""
        size = self.config.block_size
        blocks: Tensor = pad(mask, (0, -mask.shape[1] % size), value=True).unflatten(1, (-1, size))
        return blocks

    def _sorting(self, blocks: Tensor, mask: Tensor | None) -> Tensor:
        """Return S `[B, G, N, N]` in float32 at least, of keys `[B, G, N, C, D]` without padding."""
        count = blocks.shape[2]
        blocks = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
        sums = blocks.sum(3)  # [B, G, N, D]
        if self.build.is_causal:
            sums = sums.cumsum(2) - sums + blocks[:, :, :, 0]
        scores = self._scores(sums, count)
        is_empty = None if mask is None else self._no_token(mask).all(-1)[:, None]  # [B, 1, N]
        if self.build.is_causal:
            keep = causal_keep(count, count, scores.device).tril(-1)
            return masked_softmax(scores, keep if is_empty is None else keep & ~is_empty[:, :, None])
        if is_empty is not None:
            stays = torch.eye(count, dtype=torch.bool, device=scores.device)
            is_real = ~(is_empty[..., None] | is_empty[..., None, :])
            scores = scores.masked_fill(~(is_real | stays), float("-inf"))
        return balance(scores, self.config.num_iterations)

    @in_own_dtype
    def _scores(self, sums: Tensor, count: int) -> Tensor:
        """Return R / tau `[B, G, N, count]` of sums of keys `[B, G, N, D]`, in their dtype."""
        scores: Tensor = sums @ self.places[:, :count].to(sums.dtype).mT / self.config.temperature
        return scores

    def _nothing_sorted(self, mask: Tensor) -> Tensor:
        """Return bool `[B, N C]`, True where no block that may be sorted to a place has a token."""
        no_token = self._no_token(mask)
        if not self.build.is_causal:
            return no_token.all(1, keepdim=True).expand_as(no_token).flatten(1)
        num_tokens = (~no_token).long().cumsum(1)
        return pad(num_tokens[:, :-1] == 0, (0, 0, 1, 0), value=True).flatten(1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return self._attend(query, key, value, key_padding_mask, self.build.dropout_p if self.training else 0.0)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor:
        build, config = self.build, self.config
        layout = SortedLayout(query_len=query.shape[2], block_size=config.block_size, is_causal=build.is_causal)
        blocks = [self._blocks(blank_padding(x, mask)) for x in (key, value)]
        sorting = self._sorting(blocks[0], mask).to(key.dtype)
        key, value = (
            torch.cat([(sorting @ x.flatten(3)).unflatten(3, x.shape[3:]).flatten(2, 3), own], dim=2)
            for x, own in zip(blocks, (key, value), strict=True)
        )  # [B, G, N C + L, D]
        if mask is not None:
            mask = torch.cat([self._nothing_sorted(mask), mask], dim=1)
        return block_sparse_attention(
            query,
            expand_kv_heads(key, build.num_heads),
            expand_kv_heads(value, build.num_heads),
            layout,
            key_padding_mask=mask,
            dropout_p=dropout_p,
            backend=config.backend,
        )

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute softmax over all sorted keys and all keys under a dense mask of blocks, in float32 at least."""
        dtype, (_, num_heads, length, head_dim), size = query.dtype, query.shape, self.config.block_size
        query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
        key, value = (self._blocks(blank_padding(x, key_padding_mask)) for x in (key, value))
        mask = key_padding_mask
        if mask is None:
            mask = torch.zeros(len(query), length, dtype=torch.bool, device=query.device)
        sorting = torch.kron(self._sorting(key, mask), torch.eye(size, dtype=key.dtype, device=key.device))
        key, value, sorting = (expand_kv_heads(x, num_heads) for x in (key.flatten(2, 3), value.flatten(2, 3), sorting))
        scores = query @ torch.cat([sorting @ key, key], dim=2).mT * head_dim**-0.5  # [B, H, L, 2 N C]
        at = torch.arange(key.shape[2], device=key.device)
        is_same = at[:length, None] // size == at // size
        sees_own = is_same & (at <= at[:length, None]) if self.build.is_causal else is_same
        sees_sorted = is_same & (length > size)  # a single block is what would be sorted to it
        hidden = torch.cat([self._nothing_sorted(mask), self._no_token(mask).flatten(1)], dim=1)
        keep = torch.cat([sees_sorted, sees_own], dim=1) & ~hidden[:, None, None]
        output = masked_softmax(scores, keep) @ torch.cat([sorting @ value, value], dim=2)
        return zero_padded_rows(output, key_padding_mask).to(dtype)

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> SinkhornState:
        """Return an empty cache and nothing that was sorted.

        Raises:
            UnsupportedError: built bidirectional.
        """
        self._require_state()
        build = self.build
        cache = KVCache.empty(batch_size, build.num_kv_heads, build.head_dim, device=device, dtype=dtype)
        return SinkhornState(cache, cache.key.clone(), cache.value.clone())

    def _appended(self, state: SinkhornState, key: Tensor, value: Tensor) -> SinkhornState:
        """Return the state with `[B, G, n, D]` more positions; the first of a block decides what is sorted to it."""
        cache, size = state.cache.append(key, value), self.config.block_size
        if cache.length > self.build.max_seq_len:
            most = self.build.max_seq_len
            raise ValueError(f"expected at most max_seq_len = {most} tokens; this makes {cache.length}")
        block = (cache.length - 1) // size  # that of the last position
        if block == max(state.cache.length - 1, 0) // size:
            return SinkhornState(cache, state.sorted_key, state.sorted_value)
        whole = (x[:, :, : block * size].unflatten(2, (block, size)).flatten(3) for x in (cache.keys, cache.values))
        wide = torch.promote_types(key.dtype, torch.float32)
        sums = cache.keys[:, :, : block * size + 1].sum(2, keepdim=True, dtype=wide)
        shares = self._scores(sums, block).softmax(-1).to(key.dtype)  # [B, G, 1, block]
        return SinkhornState(cache, *((shares @ x).unflatten(-1, (size, -1)).squeeze(2) for x in whole))

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, SinkhornState]:
        """Attend from one new position to its block so far and to the sorted one: O(B H C D), the first O(B H L D)."""
        state = self._appended(state, key, value)
        start = (state.cache.length - 1) // self.config.block_size * self.config.block_size
        keys = torch.cat([state.sorted_key, state.cache.keys[:, :, start:]], dim=2)
        values = torch.cat([state.sorted_value, state.cache.values[:, :, start:]], dim=2)
        return exact_attention(query, keys, values, score_bias=score_bias), state

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, SinkhornState]:
        """Attend from n new positions at once, behind queries of nothing in the place of those before."""
        if state is None:
            state = self.init_state(query.shape[0], device=query.device, dtype=query.dtype)
        past, state = state.cache.length, self._appended(state, key, value)
        output = self._attend(pad(query, (0, 0, past, 0)), state.cache.keys, state.cache.values)
        return output[:, :, past:], state


def balance(scores: Tensor, num_iterations: int) -> Tensor:
    """Return exp(scores) `[..., N, N]`, rows and columns divided by their sums in turn (Sinkhorn and Knopp 1967).

    Each row and column needs a finite score; minus infinity stays a zero.
    """
    for _ in range(num_iterations):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores.exp()
