"""Native sparse attention: compressed keys of everything, blocks that they recommend, and a window, mixed by gates.

Yuan et al. 2025, "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention", arXiv 2502.11089,
equations 5 to 12. Each of three branches has keys and values of its own; g are sigmoids of the hidden state.
    out_t = sum over c of g_t^c softmax(q_t K^c^T / sqrt(D)) V^c,   c = compressed, selected, window
    compressed   K_i = phi(k_{i d} .. k_{i d + l - 1}), V_i likewise; those that end at t or before
    selected     all keys of n blocks of l' tokens: the first ones, the last ones, and those of the highest importance;
                 importance_t(block j) = sum over compressed i, over heads of a group, of p_ti |i and j share| / d
    window       the last w keys, t's own among them
where p_t are the weights of the compressed branch, and |i and j share| counts tokens (equation 9: 1, 2, 2, 2, 1 for
l = 32, d = 16, l' = 64). phi is an MLP over the block's rows, each with a vector for its place in the block.
Symbols: l `compress_len`, d `compress_stride`, l' `block_size`, n `num_blocks`, w `window_size`; S compressed rows
exist for S d + l - d tokens. Routing is causal: only whole compressed rows of the past are scored.
Cost: time O(B H L (L / d + n l' + w) D), memory O(B H L n D); a decoded token O(B H (L / d + n l' + w) D).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.contract import product_dtype
from attn_zoo.attention.decode import KVCache
from attn_zoo.attention.masks import blank_padding, masked_softmax, score_bias
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.attention.rotary import require_pairs, rotate
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention, block_sparse_attention_with_lse
from attn_zoo.kernels.blocks.call import Backend, merge_attention
from attn_zoo.kernels.blocks.choices import FixedBlocksLayout, attend_to_choices, best_choices, num_tiles_of, tile_of
from attn_zoo.kernels.blocks.layout import TokenLayout
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer

# Scores of all heads that exist at a time: few stay in the cache of a CPU, and many are few launches on a GPU.
_CPU_SCORES = 1 << 18
_GPU_SCORES = 1 << 24
_MIN_ROWS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class NsaConfig(VariantConfig):
    """The paper's sizes.

    Args:
        compress_len: l, tokens that one compressed row stands for.
        compress_stride: d, tokens between the starts of two of them; divides l and l'.
        block_size: l', tokens of a block that is selected, at least l; the last one may be shorter.
        num_blocks: n, blocks that a query selects, the first and the last ones among them.
        num_initial_blocks: first blocks of the sequence, always selected.
        num_local_blocks: last blocks up to the query's own, always selected.
        window_size: w, tokens of the window, the query's own the last.
        backend: of the selected blocks and the window: `"gather"` runs anywhere, `"flex"` is FlexAttention on a GPU,
            `"triton"` are our own kernels on a GPU; `"auto"` takes one on a GPU where it can serve the call. A named
            one runs or is refused.
    """

    compress_len: int = 32
    compress_stride: int = 16
    block_size: int = 64
    num_blocks: int = 16
    num_initial_blocks: int = 1
    num_local_blocks: int = 2
    window_size: int = 512
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        for name in ("compress_len", "compress_stride", "block_size", "num_local_blocks", "window_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")
        if self.num_initial_blocks < 0:
            raise ValueError(f"num_initial_blocks: expected at least 0; got {self.num_initial_blocks}")
        for name in ("compress_len", "block_size"):
            if getattr(self, name) % self.compress_stride:
                got = f"{getattr(self, name)} and {self.compress_stride}"
                raise ValueError(f"{name}: expected a multiple of compress_stride; got {got}")
        if self.block_size < self.compress_len:
            raise ValueError(f"block_size: expected at least compress_len = {self.compress_len}; got {self.block_size}")
        if self.num_blocks < self.num_fixed:
            raise ValueError(f"num_blocks: expected at least the {self.num_fixed} always taken; got {self.num_blocks}")

    def narrow(self, capabilities: Capabilities) -> Capabilities:
        """Return less for FlexAttention, which has no dropout."""
        if self.backend != "flex":
            return capabilities
        return capabilities.without(attention_dropout="backend 'flex' has none")

    @property
    def num_fixed(self) -> int:
        """Blocks that are always selected."""
        return self.num_initial_blocks + self.num_local_blocks

    def num_compressed(self, length: int) -> int:
        """Return S, the compressed rows that `length` tokens have: those of whole blocks of l."""
        return max(0, (length - self.compress_len) // self.compress_stride + 1)

    def num_choices(self, key_len: int) -> int:
        """Return how many blocks the last of `key_len` tokens chooses beside those always selected."""
        last = (key_len - 1) // self.block_size
        return min(self.num_blocks - self.num_fixed, max(0, last + 1 - self.num_fixed))

    def fixed(self, query_len: int) -> FixedBlocksLayout:
        """Return the blocks that are always selected, as a layout."""
        return FixedBlocksLayout(
            query_len=query_len,
            block_size=self.block_size,
            num_initial_blocks=self.num_initial_blocks,
            num_local_blocks=self.num_local_blocks,
        )

    def window(self, query_len: int) -> TokenLayout:
        """Return the window, as a layout of blocks of 16 to 64 tokens."""
        tile = max(16, min(64, 1 << max(0, (self.window_size // 2).bit_length() - 1)))
        return TokenLayout(query_len=query_len, block_size=tile, reach=self.window_size - 1, is_causal=True)

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return sizes small enough to choose among many blocks, also rows as long as blocks and no initial one."""
        small = {"compress_len": 8, "compress_stride": 4, "block_size": 16, "num_blocks": 4, "window_size": 12}
        odd = {"compress_len": 6, "compress_stride": 2, "block_size": 6, "num_blocks": 3, "window_size": 5}
        return small, {**odd, "num_initial_blocks": 0, "num_local_blocks": 1}


def parts_of(first: int, query_len: int, config: NsaConfig, most_scores: int) -> Iterator[tuple[slice, int]]:
    """Yield the queries whose choices are made together, and how many compressed rows the last of them sees.

    Args:
        first: position of the first query.
        query_len: L.
        config: sizes.
        most_scores: of one head, as far as that is more than a few rows.
    """
    step = max(_MIN_ROWS, most_scores // max(1, config.num_compressed(first + query_len)))
    if query_len <= step:  # no loop over a length that a compiler keeps symbolic
        yield slice(0, query_len), config.num_compressed(first + query_len)
        return
    for start in range(0, query_len, step):
        stop = min(start + step, query_len)
        yield slice(start, stop), config.num_compressed(first + stop)


def choose_blocks(
    query: Tensor, compressed: Tensor, config: NsaConfig, *, padding: Tensor | None = None, first: int = 0
) -> Tensor:
    """Return the blocks that each group of queries chooses beside those always selected; -1 for none (equation 9, 10).

    Scores are in float32 at least. A block of padding alone is never chosen.

    Args:
        query: `[B, H, L, D]`, at the positions from `first` on.
        compressed: keys `[B, G, S, D]`.
        config: sizes.
        padding: bool `[B, first + L]`, True = padding, or None.
        first: position of the first query.

    Returns:
        int64 `[B, G, L, choices]`.
    """
    (batch_size, _, query_len, _), groups, key_len = query.shape, compressed.shape[1], first + query.shape[2]
    num_choices, num_blocks = config.num_choices(key_len), -(-key_len // config.block_size)
    if num_choices == 0:
        return torch.empty(batch_size, groups, query_len, 0, dtype=torch.long, device=query.device)
    block = torch.arange(num_blocks, device=query.device)
    is_filled = torch.ones(1, num_blocks, dtype=torch.bool, device=query.device)
    if padding is not None:
        is_filled = ~pad(padding, (0, num_blocks * config.block_size - key_len), value=True)
        is_filled = is_filled.unflatten(1, (num_blocks, -1)).any(-1)
    hidden = compressed_padding(padding, config)
    position = torch.arange(first, key_len, device=query.device)
    most_scores = (_CPU_SCORES if query.device.type == "cpu" else _GPU_SCORES) // max(1, batch_size * query.shape[1])
    routing = []
    for rows, num_seen in parts_of(first, query_len, config, most_scores):
        keep = visible_rows(position[rows], num_seen, config)
        if hidden is not None:
            keep = keep & ~hidden[:, None, None, None, :num_seen]  # [B, 1, 1, some of L, S]
        weights = _weights(query[:, :, rows].unflatten(1, (groups, -1)), compressed[:, :, :num_seen], keep)
        last = position[rows, None] // config.block_size - config.num_local_blocks
        is_choice = (block >= config.num_initial_blocks) & (block <= last) & is_filled[:, None, None]
        liking = importance(weights.sum(2), num_blocks, config).masked_fill(~is_choice, float("-inf"))
        routing.append(best_choices(liking, num_choices))
    return routing[0] if len(routing) == 1 else torch.cat(routing, dim=2)


def visible_rows(position: Tensor, num_rows: int, config: NsaConfig) -> Tensor:
    """Return bool `[L, S]`: True where a compressed row ends at the query's position or before."""
    end = torch.arange(num_rows, device=position.device) * config.compress_stride + config.compress_len - 1
    return end <= position[:, None]


def compressed_padding(padding: Tensor | None, config: NsaConfig) -> Tensor | None:
    """Return bool `[B, S]`: True for compressed rows of padding alone; None where there is no padding."""
    if padding is None or padding.shape[1] < config.compress_len:
        return None if padding is None else padding[:, :0]
    return padding.unfold(1, config.compress_len, config.compress_stride).all(-1)


@in_own_dtype
def _weights(query: Tensor, key: Tensor, keep: Tensor) -> Tensor:
    """Return softmax weights `[B, G, H / G, L, S]` in float32 at least; zeros for a query that sees nothing."""
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = (query.to(wide) * query.shape[-1] ** -0.5).flatten(2, 3)  # of all heads of a group: a key is read once
    return masked_softmax((rows @ key.to(wide).mT).unflatten(2, query.shape[2:4]), keep)


def importance(weights: Tensor, num_blocks: int, config: NsaConfig) -> Tensor:
    """Return the importance of each block from weights `[.., S]` of compressed rows (equation 9).

    A row's weight counts once for each part of d tokens that it shares with a block.
    """
    per_row, per_block = (size // config.compress_stride for size in (config.compress_len, config.block_size))
    num_parts = num_blocks * per_block
    padded = pad(weights, (per_row - 1, num_parts - weights.shape[-1]))
    parts = padded[..., :num_parts]
    for shift in range(1, per_row):  # the rows over each part
        parts = parts + padded[..., shift : shift + num_parts]
    of_blocks: Tensor = parts.unflatten(-1, (num_blocks, per_block)).sum(-1)
    return of_blocks


def selection_mask(routing: Tensor, key_len: int, config: NsaConfig) -> Tensor:
    """Return bool `[B, G, L, S]`, True = selected: blocks always taken and chosen ones, up to the query itself."""
    position = torch.arange(key_len, device=routing.device)
    standing = position[key_len - routing.shape[2] :, None]
    block = position // config.block_size
    is_fixed = (block < config.num_initial_blocks) | (block > standing // config.block_size - config.num_local_blocks)
    is_chosen = (routing[..., None, :] == block[:, None]).any(-1)
    return (is_fixed | is_chosen) & (position <= standing)


class Compression(nn.Module):
    """phi: an MLP over the rows of each block, which know their place in it.

    Args:
        config: l and d.
        head_dim: D, also the width of its hidden layer.
    """

    def __init__(self, config: NsaConfig, head_dim: int) -> None:
        super().__init__()
        self.size, self.stride = config.compress_len, config.compress_stride
        self.places = nn.Parameter(torch.randn(config.compress_len, head_dim) * head_dim**-0.5)
        self.hidden_proj = nn.Linear(config.compress_len * head_dim, head_dim)
        self.out_proj = nn.Linear(head_dim, head_dim, bias=False)  # what is added to all keys moves no weight

    def forward(self, rows: Tensor) -> Tensor:
        """Return `[B, G, S, D]` from keys or values `[B, G, L, D]`."""
        if rows.shape[2] < self.size:
            return rows[:, :, :0]
        blocks = rows.unfold(2, self.size, self.stride).mT + self.places  # [B, G, S, l, D]
        compressed: Tensor = self.out_proj(silu(self.hidden_proj(blocks.flatten(3))))
        return compressed


class Heads(NamedTuple):
    """What n positions bring.

    Args:
        query: `[B, H, n, D]`, of the compressed branch, and of the others without rotary positions.
        turned: `[B, H, n, D]`, of the others.
        keys: `[3, B, G, n, D]`, of the branches: compressed, selected, window.
        values: likewise.
        gates: `[3, B, H, n, 1]`, from 0 to 1.
    """

    query: Tensor
    turned: Tensor
    keys: Tensor
    values: Tensor
    gates: Tensor


@dataclass(frozen=True, slots=True)
class NsaState:
    """Decode state.

    Args:
        selected: keys and values of the selected branch, of all positions.
        compressed: those of all whole blocks of l.
        pending_keys: `[B, G, n, D]`, from the start of the next such block on.
        pending_values: likewise.
        window: those of the last w positions.
    """

    selected: KVCache
    compressed: KVCache
    pending_keys: Tensor
    pending_values: Tensor
    window: KVCache


def _options(shape: Shape) -> NsaConfig:
    return shape.config or NsaConfig()


def _pairs(shape: Shape) -> tuple[int, int, float, int]:
    """Return one head's visible pairs in the compressed, selected and window branch, and those scored to choose."""
    config, length = _options(shape), shape.query_len
    num_rows, stride = config.num_compressed(length), config.compress_stride
    # Row i is seen by all positions from its last one on.
    compressed = num_rows * (length - config.compress_len + 1) - stride * num_rows * (num_rows - 1) // 2
    block = np.arange(-(-length // config.block_size))
    size = np.minimum(config.block_size, length - block * config.block_size)
    start = np.maximum(0, block + 1 - config.num_local_blocks)
    fixed = np.minimum(config.num_initial_blocks, start) + block - start  # before its own
    chosen = np.minimum(config.num_blocks - config.num_fixed, block + 1 - config.num_fixed).clip(0)
    selected = int((size * (fixed + chosen) * config.block_size + size * (size + 1) // 2).sum())
    scored = compressed if config.num_choices(length) else 0
    return compressed, selected, config.window(length).mean_pairs, scored


def _compression_products(shape: Shape) -> int:
    """Return the multiply-adds of phi for all keys and values of one batch entry."""
    config, dim = _options(shape), shape.head_dim
    return 2 * shape.num_kv_heads * config.num_compressed(shape.query_len) * dim * dim * (config.compress_len + 1)


def nsa_flops(shape: Shape) -> int:
    """Count both products of three attentions over visible pairs, the scores that choose, and phi."""
    compressed, selected, window, scored = _pairs(shape)
    of_head = shape.head_dim * (4 * (compressed + selected + window) + 2 * scored)
    return round(shape.batch_size * (shape.num_heads * of_head + 2 * _compression_products(shape)))


def nsa_backward_ratio(shape: Shape) -> float:
    """Count five products for two of attention, none of the scores that choose, and two for one of phi.

    Hidden pairs are computed too: in the compressed branch those of later rows, in the others what fills up a tile.
    """
    config, length = _options(shape), shape.query_len
    num_rows, size = config.num_compressed(length), config.block_size
    pairs, scored = num_rows * num_rows * config.compress_stride, 0
    for layout in (config.fixed(length), config.window(length)):
        pattern = layout.pattern()
        num_listed = -(-length // pattern.block_size) - pattern.num_dense_rows
        width = pattern.indices.shape[-1] + pattern.num_global
        pairs += (num_listed * width + pattern.num_dense_rows) * pattern.block_size**2
    if num_choices := config.num_choices(length):
        tile = tile_of(size)
        pairs += num_tiles_of(length * num_choices, -(-length // size), tile) * tile * size
        parts = parts_of(0, length, config, _CPU_SCORES // (shape.batch_size * shape.num_heads))
        scored = sum((rows.stop - rows.start) * num_seen for rows, num_seen in parts)
    attention, chosen = (shape.num_heads * shape.head_dim * each for each in (4 * pairs, 2 * scored))
    compression = 2 * _compression_products(shape)
    return (2.5 * attention + 2 * compression) / (attention + chosen + compression)


def _num_projected(shape: Shape) -> int:
    """Count the weights of the projections of queries, keys, values, gates and output."""
    width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return shape.embed_dim * (2 * width + 6 * kv_width + 3 * shape.num_heads)


def nsa_projection_flops(shape: Shape) -> int:
    """Count those projections of every position."""
    return 2 * shape.batch_size * shape.query_len * _num_projected(shape)


def nsa_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count the weights of those projections, which have no biases."""
    return _num_projected(shape) * itemsize


def nsa_bytes(shape: Shape, itemsize: int) -> int:
    """Count input, output, and phi of keys and of values where there is something to compress."""
    config, dim = _options(shape), shape.head_dim
    if not config.num_compressed(shape.query_len):
        return shape.io_bytes(itemsize)
    of_phi = config.compress_len * dim * (dim + 1) + dim * (dim + 1)
    return shape.io_bytes(itemsize) + 2 * of_phi * itemsize


def _state_row_bytes(shape: Shape, itemsize: int) -> int:
    """Return the bytes of one key and one value of all groups."""
    return 2 * shape.batch_size * shape.num_kv_heads * shape.head_dim * itemsize


def nsa_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count keys and values of all positions, of compressed blocks, of those to be compressed, and of the window."""
    config, length = _options(shape), shape.key_len
    num_rows = config.num_compressed(length)
    pending = length - num_rows * config.compress_stride
    return _state_row_bytes(shape, itemsize) * (length + num_rows + pending + min(length, config.window_size))


def nsa_step_bytes(shape: Shape, itemsize: int) -> int:
    """Count the compressed rows, the window, and the blocks that are selected, once for all heads of a group."""
    config, length = _options(shape), shape.key_len
    num_rows = config.num_compressed(length)
    start = max(0, length // config.block_size + 1 - config.num_local_blocks) * config.block_size
    fixed = min(config.num_initial_blocks * config.block_size, start) + length - start
    chosen = config.num_choices(length + 1) * config.block_size
    num_read = num_rows + fixed + chosen + min(length, config.window_size - 1)
    return _state_row_bytes(shape, itemsize) * num_read


@register_mixer(
    "nsa",
    config=NsaConfig,
    capabilities=Capabilities(
        bidirectional=False,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        decode="kv_cache",
        grouped_query=True,
        is_padding_invariant=True,
        why={
            "bidirectional": "compressed rows and the last blocks are those of the past",
            "cross_attention": "the window and the last blocks are places in one sequence",
            "positions": "queries are sorted by the block they chose, which loses their distances",
            "is_permutation_invariant": "blocks are made of neighbours",
        },
    ),
    complexity=Complexity(
        time="B H L (L / d + n l' + w) D",
        memory="B H L n D",
        time_exponent=2,  # of the compressed branch, which leads from about d (n l' + w) tokens on: see the formula
        memory_exponent=1,
        sequential_ops="1",
        max_path="1",
        flops=nsa_flops,
        projection_flops=nsa_projection_flops,
        backward_ratio=nsa_backward_ratio,
        bytes=nsa_bytes,
        projection_bytes=nsa_projection_bytes,
        state_bytes=nsa_state_bytes,
        step_bytes=nsa_step_bytes,
    ),
    reference=Reference(
        title="Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention",
        authors="Yuan et al.",
        year=2025,
        url="https://arxiv.org/abs/2502.11089",
        equation="5-12",
        deviations=(
            "The paper does not size phi: ours has one hidden layer of width D, SiLU, and is shared by all groups.",
            "The gates are one linear map, a number for each head; the paper says an MLP.",
            "With rotary positions, selection and window compare turned queries and keys, compression those before.",
            "Projections have no biases, so that padding is zero; a block of padding alone is never chosen.",
            "Equation 8 is scaled by 1 / sqrt(D), as the branch is; equation 9 credits a block with the rows over it.",
            "Queries and keys are as wide as values.",
        ),
    ),
)
class Nsa(AbstractMixer):
    """Three attentions over keys of their own, mixed by gates.

    Args:
        config: sizes of the branches.
        build: sizes; always causal.
    """

    config: NsaConfig

    def __init__(self, config: NsaConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        if build.position == "rotary":
            require_pairs(build.head_dim)
        width, kv_width = build.num_heads * build.head_dim, build.num_kv_heads * build.head_dim
        self.query_proj = nn.Linear(build.embed_dim, width, bias=False)
        self.key_proj = nn.Linear(build.embed_dim, 3 * kv_width, bias=False)
        self.value_proj = nn.Linear(build.embed_dim, 3 * kv_width, bias=False)
        self.gate_proj = nn.Linear(build.embed_dim, 3 * build.num_heads, bias=False)
        self.out_proj = nn.Linear(width, build.embed_dim, bias=False)
        self.compress_keys = Compression(config, build.head_dim)
        self.compress_values = Compression(config, build.head_dim)

    def _heads(self, hidden: Tensor, position: int = 0) -> Heads:
        """Project positions `[B, n, E]`, of which the first is at `position`."""
        build = self.build
        query = self.query_proj(hidden).unflatten(-1, (build.num_heads, -1)).transpose(1, 2)
        keys, values = (
            projection(hidden).unflatten(-1, (3, build.num_kv_heads, -1)).permute(2, 0, 3, 1, 4)
            for projection in (self.key_proj, self.value_proj)
        )
        gates = self.gate_proj(hidden).sigmoid().unflatten(-1, (3, -1)).permute(2, 0, 3, 1)[..., None]
        if build.position != "rotary":
            return Heads(query, query, keys, values, gates)
        turned = torch.cat([keys[:1], rotate(keys[1:], position)])
        return Heads(query, rotate(query, position), turned, values, gates)

    def _merge(self, branches: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
        """Gate the branches `[B, H, n, D]`, and project their sum."""
        mixed = sum(gate * branch for gate, branch in zip(gates, branches, strict=True))
        merged: Tensor = self.out_proj(torch.as_tensor(mixed).transpose(1, 2).flatten(2))
        return merged

    def route(self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the blocks chosen beside those always selected, int64 `[B, G, L, choices]`; -1 for none."""
        del context
        with torch.no_grad():
            heads = self._heads(blank_padding(hidden, key_padding_mask))
            return choose_blocks(heads.query, self.compress_keys(heads.keys[0]), self.config, padding=key_padding_mask)

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the three branches; shapes as in `AbstractMixer.forward`. Padded positions are read as zeros."""
        del context  # the contract refuses one
        heads = self._heads(blank_padding(hidden, key_padding_mask))
        compressed = self.compress_keys(heads.keys[0]), self.compress_values(heads.values[0])
        dropout_p = self.build.dropout_p if self.training else 0.0
        return self._attend(heads, *compressed, key_padding_mask, dropout_p)

    def _attend(
        self,
        heads: Heads,
        keys: Tensor,
        values: Tensor,
        padding: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Attend from the first position on, with compressed keys and values `[B, G, S, D]`."""
        config, num_heads, length = self.config, self.build.num_heads, heads.query.shape[2]
        options: dict[str, Any] = {
            "key_padding_mask": padding,
            "dropout_p": dropout_p,
            "backend": config.backend,
        }
        with torch.no_grad():
            routing = choose_blocks(heads.query, keys, config, padding=padding)
        key, value = (expand_kv_heads(x[1], num_heads) for x in (heads.keys, heads.values))
        output, lse = block_sparse_attention_with_lse(heads.turned, key, value, config.fixed(length), **options)
        chosen = expand_kv_heads(routing, num_heads)
        outputs, lses = attend_to_choices(heads.turned, key, value, chosen, config.block_size, **options)
        near_key, near_value = (expand_kv_heads(x[2], num_heads) for x in (heads.keys, heads.values))
        branches = (
            self._attend_compressed(heads.query, keys, values, compressed_padding(padding, config), dropout_p),
            merge_attention([output, *outputs], [lse, *lses]),
            block_sparse_attention(heads.turned, near_key, near_value, config.window(length), **options),
        )
        return self._merge(branches, heads.gates)

    def _attend_compressed(
        self, query: Tensor, keys: Tensor, values: Tensor, padding: Tensor | None, dropout_p: float
    ) -> Tensor:
        """Attend to the compressed rows that end before each query, or at it.

        Queries l - 1 .. l - 1 + d - 1 see row 0, the next d rows 0 and 1, and so on. So the queries of one place among
        those d are a causal attention of S queries to S keys: d heads for one, under a kernel's own causal flag.
        """
        (_, num_heads, query_len, _), num_rows = query.shape, keys.shape[2]
        first, stride = self.config.compress_len - 1, self.config.compress_stride
        if num_rows == 0:
            return torch.zeros_like(query)
        rows = pad(query[:, :, first:], (0, 0, 0, num_rows * stride - (query_len - first)))
        folded = rows.unflatten(2, (num_rows, stride)).transpose(2, 3).flatten(1, 2)  # [B, H d, S, D]
        output = exact_attention(
            folded,
            keys,
            values,
            score_bias=score_bias,
            is_causal=True,
            key_padding_mask=padding,
            dropout_p=dropout_p,
        )
        output = output.unflatten(1, (num_heads, stride)).transpose(2, 3).flatten(2, 3)
        return pad(output[:, :, : query_len - first], (0, 0, first, 0))

    def reference(
        self,
        hidden: Tensor,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        routing: Tensor | None = None,
    ) -> Tensor:
        """Compute softmax under the dense mask of each branch, by default with its own routing, without dropout."""
        del context
        if routing is None:
            routing = self.route(hidden, key_padding_mask=key_padding_mask)
        config, length, num_heads = self.config, hidden.shape[1], self.build.num_heads
        heads = self._heads(blank_padding(hidden, key_padding_mask))
        position = torch.arange(length, device=hidden.device)
        distance = position[:, None] - position
        keeps = [
            visible_rows(position, config.num_compressed(length), config),
            expand_kv_heads(selection_mask(routing, length, config), num_heads),
            (distance >= 0) & (distance < config.window_size),
        ]
        if key_padding_mask is not None:
            hidden_rows = compressed_padding(key_padding_mask, config)
            for branch, padding in enumerate((hidden_rows, key_padding_mask, key_padding_mask)):
                assert padding is not None
                keeps[branch] = keeps[branch] & ~padding[:, None, None]
        keys = self.compress_keys(heads.keys[0]), *heads.keys[1:]
        values = self.compress_values(heads.values[0]), *heads.values[1:]
        branches = []
        for query, key, value, keep in zip((heads.query, heads.turned, heads.turned), keys, values, keeps, strict=True):
            scores = query @ expand_kv_heads(key, num_heads).mT * query.shape[-1] ** -0.5
            branches.append(masked_softmax(scores, keep) @ expand_kv_heads(value, num_heads))
        return self._merge((branches[0], branches[1], branches[2]), heads.gates)

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> NsaState:
        """Return empty caches."""
        self._require_state(key_padding_mask, context)
        weight = self.key_proj.weight
        dtype = product_dtype(dtype or weight.dtype, weight.device)
        selected, compressed, window = (
            KVCache.empty(batch_size, self.build.num_kv_heads, self.build.head_dim, device=device, dtype=dtype)
            for _ in range(3)
        )
        return NsaState(selected, compressed, compressed.key, compressed.value, window)

    def _continued(self, heads: Heads, state: NsaState) -> NsaState:
        """Return the state with the keys and values of n more positions."""
        config = self.config
        if (length := state.selected.length + heads.query.shape[2]) > self.build.max_seq_len:
            raise ValueError(f"expected at most max_seq_len = {self.build.max_seq_len} tokens; this makes {length}")
        keys, values = (
            torch.cat([old, new[0]], dim=2)
            for old, new in ((state.pending_keys, heads.keys), (state.pending_values, heads.values))
        )
        compressed = state.compressed
        if num_new := config.num_compressed(keys.shape[2]):
            compressed = compressed.append(self.compress_keys(keys), self.compress_values(values))
            done = num_new * config.compress_stride
            keys, values = (x[:, :, done:].clone() for x in (keys, values))  # a view would keep the others alive
        near_keys, near_values = (
            torch.cat([old, new[2]], dim=2)[:, :, -config.window_size :].clone()
            for old, new in ((state.window.keys, heads.keys), (state.window.values, heads.values))
        )
        window = KVCache(near_keys, near_values, near_keys.shape[2])
        selected = state.selected.append(heads.keys[1], heads.values[1])
        return NsaState(selected, compressed, keys, values, window)

    def step(self, hidden: Tensor, state: NsaState) -> tuple[Tensor, NsaState]:
        """Mix one new position `[B, 1, E]`: O(B H (L / d + n l' + w) D)."""
        config, position = self.config, state.selected.length
        heads = self._heads(hidden, position)
        state = self._continued(heads, state)
        chosen = choose_blocks(heads.query, state.compressed.keys, config, first=position)[:, :, 0]  # [B, G, choices]
        start = max(0, position // config.block_size + 1 - config.num_local_blocks) * config.block_size
        initial = min(config.num_initial_blocks * config.block_size, start)
        batch, group = (torch.arange(n, device=hidden.device) for n in chosen.shape[:2])
        place = batch[:, None, None], group[:, None], chosen
        keys, values = (
            torch.cat(
                [x[:, :, :initial], x[:, :, start:], _blocks(x[:, :, :start], config)[place].flatten(2, 3)], dim=2
            )
            for x in (state.selected.keys, state.selected.values)
        )
        branches = (
            _attend_to_all(heads.query, state.compressed.keys, state.compressed.values),
            _attend_to_all(heads.turned, keys, values),
            _attend_to_all(heads.turned, state.window.keys, state.window.values),
        )
        return self._merge(branches, heads.gates), state

    def prefill(self, hidden: Tensor, state: NsaState | None = None) -> tuple[Tensor, NsaState]:
        """Mix n new positions `[B, n, E]`: at once where nothing came before, else step by step."""
        if state is None:
            state = self.init_state(hidden.shape[0], device=hidden.device, dtype=hidden.dtype)
        if state.selected.length:
            return super().prefill(hidden, state)
        heads = self._heads(hidden)
        state = self._continued(heads, state)
        return self._attend(heads, state.compressed.keys, state.compressed.values), state


def _blocks(rows: Tensor, config: NsaConfig) -> Tensor:
    """Return whole blocks `[B, G, blocks, l', D]` of `[B, G, S, D]`, as a view."""
    blocks: Tensor = rows.unflatten(2, (rows.shape[2] // config.block_size, config.block_size))
    return blocks


def _attend_to_all(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention of one query `[B, H, 1, D]` to keys `[B, G, S, D]`; zeros where there are none."""
    grouped = query.unflatten(1, (key.shape[1], -1)).squeeze(3) * query.shape[-1] ** -0.5  # [B, G, H / G, D]
    attended: Tensor = (grouped @ key.mT).softmax(-1) @ value
    return attended.flatten(1, 2)[:, :, None]
