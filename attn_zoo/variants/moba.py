"""MoBA: each query attends to the block it stands in and to the k - 1 blocks whose mean key it likes best.

Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs", arXiv 2502.13189, equations 2 to 6 and
algorithm 1.
    out_i = softmax(q_i K_N(i)^T / sqrt(D)) V_N(i),   N(i) = keys of the chosen blocks, causal only j <= i
    score of block n for query i = <q_i, mean of the keys of block n>; minus infinity for blocks of the future
Symbols: the paper's block size B is `block_size` C, its k is `top_k`, the own block among them.
Routing is causal: only whole blocks of the past are scored, and the own block is taken without a score, so that its
mean, which holds later keys, decides nothing.
Cost: time O(B H L (k C + L / C) D): the scores of blocks are the second term, as large as the first at about 2 k C^2
tokens; memory O(B H L k D). A decoded token O(B H (k C + L / C) D), from keys, values and the means of whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.decode import KVCache
from attn_zoo.attention.masks import blank_padding, masked_softmax, zero_padded_rows
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention_with_lse
from attn_zoo.kernels.blocks.call import Backend, merge_attention
from attn_zoo.kernels.blocks.choices import FixedBlocksLayout, attend_to_choices, best_choices, num_tiles_of, tile_of
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention

_MOST_SCORES = 1 << 22  # of one head that exist at a time, so that memory stays linear in the length


@dataclass(frozen=True, kw_only=True, slots=True)
class MobaConfig(VariantConfig):
    """The paper's scaling-law models: blocks of 512 tokens, of which a query sees 3.

    Args:
        block_size: C, tokens in a block of keys; the last one may be shorter.
        top_k: k, blocks that a query sees, its own among them.
        backend: `"gather"` runs anywhere, `"flex"` is FlexAttention on a GPU, `"triton"` are our own kernels on a GPU;
            `"auto"` takes one on a GPU where it can serve the call. A named one runs or is refused.
    """

    block_size: int = 512
    top_k: int = 3
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if min(self.block_size, self.top_k) < 1:
            least = min(self.block_size, self.top_k)
            raise ValueError(f"block_size, top_k: expected at least 1; got {least}")

    def narrow(self, capabilities: Capabilities) -> Capabilities:
        """Return less for FlexAttention, which has no dropout."""
        if self.backend != "flex":
            return capabilities
        return capabilities.without(attention_dropout="backend 'flex' has none")

    def claim(self, complexity: Complexity) -> Complexity:
        """Return linear time where each query sees its own block alone, and no block is scored."""
        return replace(complexity, time_exponent=1) if self.top_k == 1 else complexity

    def num_choices(self, key_len: int) -> int:
        """Return how many blocks a query sees at most beside its own."""
        return min(self.top_k, -(-key_len // self.block_size)) - 1

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return blocks small enough to leave keys unseen, also such as are not a power of two."""
        return {"block_size": 16, "top_k": 3}, {"block_size": 12, "top_k": 2}

    @classmethod
    def budgets(cls, seq_len: int) -> tuple[dict[str, Any], ...]:
        """Return more and more blocks; the last has them all."""
        return tuple({"block_size": 8, "top_k": count} for count in (1, 4, -(-seq_len // 8)))


def choose_blocks(query: Tensor, key: Tensor, config: MobaConfig, *, is_causal: bool, padding: Tensor | None) -> Tensor:
    """Return the blocks that each query sees beside its own, int64 `[B, H, L, min(k, blocks) - 1]`; -1 for none.

    Scores are in float32 at least, as the authors'. A block without a key that is not padding is never chosen.

    Args:
        query: `[B, H, L, D]`, the last L of the S positions.
        key: `[B, H, S, D]`.
        config: block size and k.
        is_causal: choose among the blocks before the query's own.
        padding: bool `[B, S]`, True = padding, or None.
    """
    (batch_size, num_heads, query_len, head_dim), key_len, size = query.shape, key.shape[2], config.block_size
    num_blocks = -(-key_len // size)
    num_choices = config.num_choices(key_len)
    if num_choices == 0:
        return torch.empty(*query.shape[:3], 0, dtype=torch.long, device=query.device)
    wide = torch.promote_types(query.dtype, torch.float32)
    is_key = torch.ones(1, key_len, dtype=torch.bool, device=key.device) if padding is None else ~padding
    is_key = torch.nn.functional.pad(is_key, (0, num_blocks * size - key_len)).unflatten(1, (num_blocks, size))
    keys = torch.nn.functional.pad(blank_padding(key, padding).to(wide), (0, 0, 0, num_blocks * size - key_len))
    sums = keys.view(batch_size, num_heads, num_blocks, size, head_dim).sum(3)
    counts = is_key.sum(-1)[:, None, :, None]  # [B or 1, 1, blocks, 1]
    means = (sums / counts.clamp(min=1)).mT  # [B, H, D, blocks]
    own = torch.arange(key_len - query_len, key_len, device=key.device) // size
    block = torch.arange(num_blocks, device=key.device)
    step = max(1, _MOST_SCORES // num_blocks)
    routing = []
    for queries, own_block in zip(query.split(step, dim=2), own.split(step), strict=True):
        is_choice = block < own_block[:, None] if is_causal else block != own_block[:, None]
        is_choice = is_choice & (counts[..., 0] > 0)[:, :, None]
        scores = _liking(queries, means).masked_fill(~is_choice, float("-inf"))  # [B, H, some of L, blocks]
        routing.append(best_choices(scores, num_choices))
    return routing[0] if len(routing) == 1 else torch.cat(routing, dim=2)


@in_own_dtype
def _liking(query: Tensor, means: Tensor) -> Tensor:
    """Return the scores of blocks with the means `[.., D, blocks]`, in their dtype."""
    return query.to(means.dtype) @ means


def routing_mask(routing: Tensor, key_len: int, config: MobaConfig, *, is_causal: bool) -> Tensor:
    """Return bool `[B, H, L, S]`, True = may be seen: the own block and the chosen ones."""
    batch_size, num_heads, query_len, _ = routing.shape
    position = torch.arange(key_len, device=routing.device)
    standing = position[key_len - query_len :, None]
    own = (standing // config.block_size).expand(batch_size, num_heads, -1, -1)
    chosen = torch.cat([own, routing], dim=-1)  # [B, H, L, k]
    blocks = torch.zeros(
        (*routing.shape[:3], -(-key_len // config.block_size) + 1), dtype=torch.bool, device=routing.device
    )
    blocks.scatter_(-1, chosen + 1, value=True)  # the first place is for none
    keep = blocks[..., 1:].repeat_interleave(config.block_size, -1)[..., :key_len]
    return keep & (position <= standing) if is_causal else keep


def moba_pairs(shape: Shape) -> float:
    """Return the pairs of query and key that see each other in one head.

    Exact but for a shorter last block in the bidirectional form, which counts as chosen as often as the others.
    """
    config: MobaConfig = shape.config or MobaConfig()
    length, size, choices = shape.query_len, config.block_size, config.top_k - 1
    num_whole, rest = divmod(length, size)
    if shape.is_causal:
        few = min(choices, num_whole)  # the first blocks have fewer before them than there are choices
        chosen = few * (few - 1) // 2 + (num_whole - few) * choices
        own = num_whole * size * (size + 1) // 2 + rest * (rest + 1) // 2
        return own + chosen * size * size + rest * min(choices, num_whole) * size
    num_others = num_whole - (rest == 0)  # blocks to choose from
    choices, own = min(choices, num_others), num_whole * size * size + rest * rest
    if num_others < 1:
        return own
    seen_from_whole = (length - size) / num_others  # tokens of a block, in the mean
    return own + num_whole * size * choices * seen_from_whole + rest * choices * size


def _gate_products(shape: Shape, config: MobaConfig) -> int:
    """Return the pairs of query and block that are scored in one head."""
    return shape.query_len * -(-shape.key_len // config.block_size) if config.num_choices(shape.key_len) else 0


def moba_flops(shape: Shape) -> int:
    """Count a multiply and an add for each visible pair and feature in both products, and for the scores of blocks."""
    config: MobaConfig = shape.config or MobaConfig()
    products = 4 * moba_pairs(shape) + 2 * _gate_products(shape, config)
    return round(shape.batch_size * shape.num_heads * shape.head_dim * products)


def moba_backward_ratio(shape: Shape) -> float:
    """Count five matrix products for two where attention is computed, and none for the scores of blocks.

    Attention is computed in whole tiles, of which there are as many as the routing can need at most.
    """
    config: MobaConfig = shape.config or MobaConfig()
    tile = tile_of(config.block_size)
    num_rows = -(-shape.query_len // tile)
    pairs = num_rows * min(num_rows, config.block_size // tile) * tile * tile
    if num_choices := config.num_choices(shape.key_len):
        num_blocks = -(-shape.key_len // config.block_size)
        num_tiles = num_tiles_of(shape.query_len * num_choices, num_blocks, tile)
        pairs += num_tiles * tile * config.block_size
    return 2.5 * 4 * pairs / (4 * pairs + 2 * _gate_products(shape, config))


def moba_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count the keys and values of all positions so far, and the means of whole blocks in float32 at least."""
    config: MobaConfig = shape.config or MobaConfig()
    num_means = shape.key_len // config.block_size
    per_feature = 2 * shape.key_len * itemsize + num_means * max(itemsize, 4)
    return shape.batch_size * shape.num_kv_heads * shape.head_dim * per_feature


def moba_step_bytes(shape: Shape, itemsize: int) -> int:
    """Count the block that a token stands in, those it chooses, once for all heads of a group, and all means."""
    config: MobaConfig = shape.config or MobaConfig()
    num_past, num_own = divmod(shape.key_len, config.block_size)
    num_chosen = min(config.top_k - 1, num_past)
    per_feature = 2 * (num_own + num_chosen * config.block_size) * itemsize
    per_feature += num_past * max(itemsize, 4) if num_chosen else 0
    return shape.batch_size * shape.num_kv_heads * shape.head_dim * per_feature


@dataclass(frozen=True, slots=True)
class MobaState:
    """Decode state.

    Args:
        cache: keys and values so far.
        means: of the keys of each whole block, `[B, G, whole blocks, D]`, in float32 at least.
    """

    cache: KVCache
    means: Tensor

    def append(self, key: Tensor, value: Tensor, block_size: int) -> MobaState:
        """Return the state with `[B, G, n, D]` more positions; this one stays as it is."""
        cache, num_known = self.cache.append(key, value), self.means.shape[2]
        num_whole = cache.length // block_size
        if num_whole == num_known:
            return MobaState(cache, self.means)
        fresh = cache.keys[:, :, num_known * block_size : num_whole * block_size].to(self.means.dtype)
        means = fresh.unflatten(2, (-1, block_size)).mean(3)
        return MobaState(cache, torch.cat([self.means, means], dim=2))


@register_attention(
    "moba",
    config=MobaConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        decode="kv_cache",
        grouped_query=True,
        is_padding_invariant=True,
        why={
            "cross_attention": "a query always sees the block it stands in, and stands in none of another sequence",
            "positions": "queries are sorted by the block they chose, which loses their distances",
            "is_permutation_invariant": "blocks are made of neighbours",
        },
    ),
    complexity=Complexity(
        time="B H L (k C + L / C) D",
        memory="B H L k D",
        time_exponent=2,  # of the scores of blocks, which lead from about 2 k C^2 tokens on: see the formula
        memory_exponent=1,
        sequential_ops="1",
        max_path="depends on the data",
        flops=moba_flops,
        backward_ratio=moba_backward_ratio,
        state_bytes=moba_state_bytes,
        step_bytes=moba_step_bytes,
    ),
    reference=Reference(
        title="MoBA: Mixture of Block Attention for Long-Context LLMs",
        authors="Lu et al.",
        year=2025,
        url="https://arxiv.org/abs/2502.13189",
        equation="2-6; algorithm 1",
        code="https://github.com/MoonshotAI/MoBA",
        deviations=(
            "The bidirectional form is ours, the paper has the causal one: all blocks but the own are scored.",
            "A block of padding alone is never chosen, and means are over keys that are not padding.",
        ),
    ),
)
class MobaAttention(AbstractAttention):
    """Exact softmax over the own block and the chosen ones.

    Args:
        config: the variant's options.
        build: sizes and direction.
    """

    config: MobaConfig

    def route(self, query: Tensor, key: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the blocks that each query sees beside its own, `[B, H, L, choices]`; -1 for none."""
        with torch.no_grad():
            return choose_blocks(
                query,
                expand_kv_heads(key, self.build.num_heads),
                self.config,
                is_causal=self.build.is_causal,
                padding=key_padding_mask,
            )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return self._attend(query, key, value, key_padding_mask, self.build.dropout_p if self.training else 0.0)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        build, config = self.build, self.config
        routing = self.route(query, key, key_padding_mask=key_padding_mask)
        key, value = (expand_kv_heads(x, build.num_heads) for x in (key, value))
        options: dict[str, Any] = {
            "key_padding_mask": key_padding_mask,
            "dropout_p": dropout_p,
            "backend": config.backend,
        }
        own = FixedBlocksLayout(query_len=query.shape[2], block_size=config.block_size, is_causal=build.is_causal)
        output, lse = block_sparse_attention_with_lse(query, key, value, own, **options)
        outputs, lses = attend_to_choices(query, key, value, routing, config.block_size, **options)
        return merge_attention([output, *outputs], [lse, *lses])

    def reference(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        routing: Tensor | None = None,
    ) -> Tensor:
        """Compute softmax under the dense mask of the routing, by default its own, without dropout."""
        if routing is None:
            routing = self.route(query, key, key_padding_mask=key_padding_mask)
        key, value = (expand_kv_heads(blank_padding(x, key_padding_mask), query.shape[1]) for x in (key, value))
        keep = routing_mask(routing, key.shape[2], self.config, is_causal=self.build.is_causal)
        if key_padding_mask is not None:
            keep = keep & ~key_padding_mask[:, None, None]
        scores = query * query.shape[-1] ** -0.5 @ key.mT  # [B, H, L, S]; scaled first: float16 ends at 65504
        return zero_padded_rows(masked_softmax(scores, keep) @ value, key_padding_mask)

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> MobaState:
        """Return an empty cache of keys and values, and no block.

        Raises:
            UnsupportedError: built bidirectional.
        """
        self._require_state()
        groups, head_dim = self.build.num_kv_heads, self.build.head_dim
        cache = KVCache.empty(batch_size, groups, head_dim, device=device, dtype=dtype)
        wide = torch.promote_types(cache.key.dtype, torch.float32)
        return MobaState(cache, torch.empty(batch_size, groups, 0, head_dim, device=device, dtype=wide))

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, MobaState]:
        """Attend from one new position to its block so far and to the blocks it chooses, O(B H (k C + L / C) D).

        Whole blocks of the past alone are scored, so that nothing has to be masked.
        """
        state, size = self._continued(key, value, state), self.config.block_size
        cache, num_past = state.cache, (state.cache.length - 1) // size  # blocks before the one it stands in
        query = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # [B, G, H / G, D]
        scaled, own = query * query.shape[-1] ** -0.5, slice(num_past * size, cache.length)
        scores = scaled @ cache.keys[:, :, own].mT  # [B, G, H / G, own]
        num_chosen = min(self.config.top_k - 1, num_past)
        if num_chosen == 0:
            return (scores.softmax(-1) @ cache.values[:, :, own]).flatten(1, 2)[:, :, None], state
        liking = _liking(query, state.means[:, :, :num_past].mT)
        chosen = best_choices(liking, num_chosen)  # [B, G, H / G, chosen]
        batch, group = (torch.arange(n, device=query.device) for n in query.shape[:2])
        place = batch[:, None, None, None], group[:, None, None], chosen
        blocks = (x[:, :, : own.start].unflatten(2, (num_past, size)) for x in (cache.key, cache.value))
        keys, values = (x[place] for x in blocks)  # [B, G, H / G, chosen, C, D]
        far = (scaled[..., None, :] @ keys.flatten(3, 4).mT).squeeze(-2)  # [B, G, H / G, chosen C]
        weights = torch.cat([far, scores], dim=-1).softmax(-1)
        at_far, at_own = weights.split([far.shape[-1], scores.shape[-1]], dim=-1)
        output = (at_far[..., None, :] @ values.flatten(3, 4)).squeeze(-2) + at_own @ cache.values[:, :, own]
        return output.flatten(1, 2)[:, :, None], state

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, MobaState]:
        """Attend from new positions, at once where nothing came before, else densely under the mask of the routing."""
        if state is None:
            state = self.init_state(query.shape[0], device=query.device, dtype=query.dtype)
        is_start = state.cache.length == 0
        state = self._continued(key, value, state)
        run = self._attend if is_start and query.shape[2] > 1 else self.reference
        return run(query, state.cache.keys, state.cache.values), state

    def _continued(self, key: Tensor, value: Tensor, state: MobaState) -> MobaState:
        if (length := state.cache.length + key.shape[2]) > self.build.max_seq_len:
            raise ValueError(f"expected at most max_seq_len = {self.build.max_seq_len} tokens; this makes {length}")
        return state.append(key, value, self.config.block_size)
