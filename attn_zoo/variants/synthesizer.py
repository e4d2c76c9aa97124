"""Synthesizer: attention whose scores come from positions, or from each token alone, and not from pairs of tokens.

Tay et al. 2020, "Synthesizer: Rethinking Self-Attention for Transformer Models", arXiv 2005.00743, section 3.
    out_i = sum_j softmax(S_i)_j x_j W_V,   S_i the scores of query i, a row of S numbers:
    random               S_i = R_i,               R a matrix [N, N] for each head, learned or fixed
    factorised random    S_i = (R_1 R_2^T)_i,     R_1 and R_2 [N, k]
    dense                S_i = W_2 relu(W_1 x_i + b_1) + b_2
    factorised dense     S_ij = a_(j div t) b_(j mod t),   a and b of x_i as in the dense one, ceil(N / t) and t numbers
    mixture              S = sum_m alpha_m S_m,   alpha_m >= 0, sum 1, learned; S_m may be Q K^T / sqrt(D) too
A shorter sequence takes the first rows and columns. Symbols: the paper's l is N = max_seq_len, its b is t = `tile_len`.
Cost: time O(B H L^2 D); memory O(B H L^2), without a batch where no score depends on tokens; weights up to O(H N^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, relu

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.contract import product_dtype
from attn_zoo.attention.masks import finite_padding, keep_mask, masked_softmax
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer

Scores = Literal["random", "factorized_random", "dense", "factorized_dense", "dot_product"]

_OF_POSITIONS: tuple[Scores, ...] = ("random", "factorized_random")


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthesizerConfig(VariantConfig):
    """The paper's choices.

    Args:
        scores: where scores come from; several are mixed. The released code of Long Range Arena runs `"random"` with
            `"dot_product"` in all five tasks: no configuration reaches the switch that leaves the latter out.
        rank: k, of `"factorized_random"`. Long Range Arena has 32.
        tile_len: t, of `"factorized_dense"`; the paper leaves it open.
        is_fixed: draw the matrices of positions once, by the seed, and learn none of them.
    """

    scores: tuple[Scores, ...] = ("random",)
    rank: int = 8
    tile_len: int = 16
    is_fixed: bool = False

    def __post_init__(self) -> None:
        for name in ("rank", "tile_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")
        if not self.scores or len(set(self.scores)) < len(self.scores):
            raise ValueError(f"scores: expected one or more, each once; got {list(self.scores)}")
        if self.is_fixed and not set(_OF_POSITIONS) & set(self.scores):
            raise ValueError(f"is_fixed: expected scores with matrices of positions; got {list(self.scores)}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return each kind of scores, alone or in a mixture."""
        return (
            {},
            {"scores": ("dense",)},
            {"scores": ("factorized_dense",), "tile_len": 7},
            {"scores": ("factorized_random", "dot_product"), "rank": 4},
            {"is_fixed": True},
        )


@dataclass(frozen=True, slots=True)
class SynthesizerState:
    """What decoding keeps.

    Args:
        value: of all positions so far, `[B, H, S, D]`.
        key: likewise, where scores are dot products, too; else None.
    """

    value: Tensor
    key: Tensor | None


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of one kind of scores: its products, its linear maps from E to H D and those with a bias, other weights."""

    flops: int
    num_maps: int
    num_biases: int
    num_weights: int


def _config(shape: Shape) -> SynthesizerConfig:
    return shape.config or SynthesizerConfig()


def _costs(shape: Shape) -> list[_Cost]:
    config, heads, length, dim = _config(shape), shape.num_heads, shape.key_len, shape.head_dim
    in_row, of_matrix = 2 * shape.batch_size * heads * length * dim, 2 * heads * length * config.rank
    num_factors = -(-length // config.tile_len) + min(config.tile_len, length)
    costs = {
        "random": _Cost(0, 0, 0, heads * length**2),
        "factorized_random": _Cost(of_matrix * length, 0, 0, of_matrix),
        "dense": _Cost(in_row * length, 1, 1, heads * length * (dim + 1)),
        "factorized_dense": _Cost(in_row * num_factors, 1, 1, heads * num_factors * (dim + 1)),
        "dot_product": _Cost(in_row * length, 2, 1, 0),
    }
    return [costs[name] for name in config.scores]


def _mixing_flops(shape: Shape) -> int:
    """Count the product of weights and values, under a causal mask, too, which hides half."""
    return 2 * shape.batch_size * shape.num_heads * shape.key_len**2 * shape.head_dim


def synthesizer_flops(shape: Shape) -> int:
    """Count the products of scores and that of weights and values."""
    return _mixing_flops(shape) + sum(cost.flops for cost in _costs(shape))


def synthesizer_backward_ratio(shape: Shape) -> float:
    """Return 2, or less where scores are fixed: no product leads to them, and none to weights of nothing else."""
    config, scores = _config(shape), _config(shape).scores
    is_learned = [not (config.is_fixed and name in _OF_POSITIONS) for name in scores]
    to_scores = sum(2 * cost.flops for cost, learned in zip(_costs(shape), is_learned, strict=True) if learned)
    has_weight_gradient = any(is_learned) or len(scores) > 1
    return ((2 if has_weight_gradient else 1) * _mixing_flops(shape) + to_scores) / synthesizer_flops(shape)


def synthesizer_bytes(shape: Shape, itemsize: int) -> int:
    """Count the input, the output, the rows and columns that are read, and the weights of a mixture."""
    num_weights = sum(cost.num_weights for cost in _costs(shape))
    num_mixed = len(_config(shape).scores)
    return shape.io_bytes(itemsize) + (num_weights + (num_mixed if num_mixed > 1 else 0)) * itemsize


def _num_maps(shape: Shape) -> int:
    """Count the linear maps between E and H D: to values, to the output, and those that scores need."""
    return 2 + sum(cost.num_maps for cost in _costs(shape))


def synthesizer_projection_flops(shape: Shape) -> int:
    """Count all linear maps of every position."""
    width = shape.num_heads * shape.head_dim
    return 2 * shape.batch_size * shape.query_len * shape.embed_dim * width * _num_maps(shape)


def synthesizer_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count their weights and biases."""
    width, num_biases = shape.num_heads * shape.head_dim, 1 + sum(cost.num_biases for cost in _costs(shape))
    return (_num_maps(shape) * width * shape.embed_dim + num_biases * width + shape.embed_dim) * itemsize


def synthesizer_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count the values of all positions so far, and their keys where scores are dot products, too."""
    per_token = shape.num_heads * shape.head_dim * (2 if "dot_product" in _config(shape).scores else 1)
    return shape.batch_size * shape.key_len * per_token * itemsize


@register_mixer(
    "synthesizer",
    config=SynthesizerConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        decode="kv_cache",
        is_padding_invariant=True,
        positions=("none",),
        why={
            "cross_attention": "scores belong to positions of one sequence",
            "grouped_query": "the paper has values, and scores, for each head",
            "positions": "its scores, which need no keys, know positions by themselves",
            "is_permutation_invariant": "a score belongs to a position, whatever token stands there",
        },
    ),
    complexity=Complexity(
        time="B H L^2 D",
        memory="B H L^2",
        time_exponent=2,
        memory_exponent=2,
        sequential_ops="1",
        max_path="1",
        flops=synthesizer_flops,
        backward_ratio=synthesizer_backward_ratio,
        projection_flops=synthesizer_projection_flops,
        bytes=synthesizer_bytes,
        projection_bytes=synthesizer_projection_bytes,
        state_bytes=synthesizer_state_bytes,
    ),
    reference=Reference(
        title="Synthesizer: Rethinking Self-Attention for Transformer Models",
        authors="Tay et al.",
        year=2020,
        url="https://arxiv.org/abs/2005.00743",
        equation="section 3",
        code="https://github.com/tensorflow/mesh",
        deviations=(
            "Random scores start with variance 1, also those of both factors; the authors' code starts near zero.",
            "W_2 is a matrix for each head, as in the paper; the authors' code shares one among heads, without bias.",
            "Factors a and b have one hidden layer in common.",
            "Tiling pairs each entry of a with each of b; if both were repeated whole, pairs could repeat.",
            "alpha is one softmax for all heads; the code of Long Range Arena adds scores without weights.",
            "Padded positions count for nothing; the code of Long Range Arena drops its mask without dot products.",
        ),
    ),
)
class Synthesizer(AbstractMixer):
    """Synthetic attention with its projections.

    Args:
        config: where scores come from.
        build: sizes and direction; `max_seq_len` is N. `seed` and `layer_index` decide matrices that are fixed.
    """

    config: SynthesizerConfig
    random: Tensor  # [H, N, N]
    random_rows: Tensor  # R_1 [H, N, k]
    random_columns: Tensor  # R_2 [H, N, k]

    def __init__(self, config: SynthesizerConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        heads, length, scores = build.num_heads, build.max_seq_len, config.scores
        width = heads * build.head_dim
        generator = None
        if config.is_fixed:
            generator = torch.Generator().manual_seed(build.seed + 1009 * build.layer_index)

        def draw(name: str, num_columns: int, std: float) -> None:
            drawn = torch.randn(heads, length, num_columns, generator=generator) * std
            if config.is_fixed:
                self.register_buffer(name, drawn)
            else:
                self.register_parameter(name, nn.Parameter(drawn))

        if "random" in scores:
            draw("random", length, 1.0)
        if "factorized_random" in scores:  # each product of k numbers has variance 1
            draw("random_rows", config.rank, config.rank**-0.25)
            draw("random_columns", config.rank, config.rank**-0.25)
        if "dense" in scores:
            self.dense_proj = nn.Linear(build.embed_dim, width)
            self.dense = _PerHead(heads, build.head_dim, length)
        if "factorized_dense" in scores:
            self.factor_proj = nn.Linear(build.embed_dim, width)
            self.tiles = _PerHead(heads, build.head_dim, -(-length // config.tile_len))  # a
            self.in_tile = _PerHead(heads, build.head_dim, min(config.tile_len, length))  # b
        self.key_proj: nn.Linear | None = None
        if "dot_product" in scores:
            self.query_proj = nn.Linear(build.embed_dim, width)
            self.key_proj = nn.Linear(build.embed_dim, width, bias=False)  # which would add the same to a row of scores
        if len(scores) > 1:
            self.mixture = nn.Parameter(torch.zeros(len(scores)))  # alpha before its softmax
        self.value_proj = nn.Linear(build.embed_dim, width)
        self.out_proj = nn.Linear(width, build.embed_dim)

    def _heads(self, hidden: Tensor, projection: nn.Linear) -> Tensor:
        heads: Tensor = projection(hidden).unflatten(-1, (self.build.num_heads, -1)).transpose(1, 2)
        return heads  # [B, H, L, D]

    def _scores(self, name: Scores, hidden: Tensor, key: Tensor | None, num_keys: int) -> Tensor:
        """Return scores of one kind, `[B or 1, H, L, S]`, of the last L of S positions."""
        start = num_keys - hidden.shape[1]
        match name:
            case "random":
                return self.random[None, :, start:num_keys, :num_keys]
            case "factorized_random":
                return (self.random_rows[:, start:num_keys] @ self.random_columns[:, :num_keys].mT)[None]
            case "dense":
                return self.dense.scores(relu(self._heads(hidden, self.dense_proj)), num_keys)
            case "factorized_dense":
                tile_len, inner = self.config.tile_len, relu(self._heads(hidden, self.factor_proj))
                a = self.tiles.scores(inner, -(-num_keys // tile_len))
                b = self.in_tile.scores(inner, min(tile_len, num_keys))
                return (a[..., :, None] * b[..., None, :]).flatten(-2)[..., :num_keys]
            case "dot_product":
                assert key is not None
                query = self._heads(hidden, self.query_proj) / math.sqrt(self.build.head_dim)  # float16 ends at 65504
                return query @ key.mT

    def _mix(
        self, hidden: Tensor, given: SynthesizerState, mask: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor:
        """Mix the last L of S positions, `hidden` `[B, L, E]`, with all that are `given`; return `[B, L, E]`."""
        length, num_keys = hidden.shape[1], given.value.shape[2]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        scores = [self._scores(name, hidden, given.key, num_keys).to(wide) for name in self.config.scores]
        if len(scores) > 1:
            shares = self.mixture.to(wide).softmax(0)
            scores = [share * score for share, score in zip(shares, scores, strict=True)]
        keep = keep_mask(length, num_keys, is_causal=self.build.is_causal, key_padding_mask=mask, device=hidden.device)
        weights = masked_softmax(reduce(torch.add, scores), keep)  # [B or 1, H, L, S]
        if dropout_p > 0:
            weights = dropout(weights.expand(len(hidden), -1, -1, -1), dropout_p)
        weights = weights.to(given.value.dtype)
        if len(weights) == len(hidden):
            mixed = weights @ given.value
        else:  # one matrix for all entries of the batch, of which a product would make copies
            mixed = torch.einsum("hls,bhsd->bhld", weights[0], given.value)
        output: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _read(self, hidden: Tensor) -> SynthesizerState:
        key = None if self.key_proj is None else self._heads(hidden, self.key_proj)
        return SynthesizerState(self._heads(hidden, self.value_proj), key)

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Mix positions; shapes as in `AbstractMixer.forward`."""
        del context  # the contract refuses one
        note_path("synthesizer")
        hidden = finite_padding(hidden, key_padding_mask)
        dropout_p = self.build.dropout_p if self.training else 0.0
        return self._mix(hidden, self._read(hidden), key_padding_mask, dropout_p)

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Write all N rows and columns of scores out for every sequence, dense, without dropout; then cut them."""
        del context
        hidden = finite_padding(hidden, key_padding_mask)
        read, length = self._read(hidden), hidden.shape[1]
        at = torch.arange(self.build.max_seq_len, device=hidden.device)
        kinds: list[Tensor] = []
        for name in self.config.scores:
            match name:
                case "random":
                    kinds.append(self.random)
                case "factorized_random":
                    kinds.append(torch.einsum("hik,hjk->hij", self.random_rows, self.random_columns))
                case "dense":
                    inner = relu(self._heads(hidden, self.dense_proj))
                    kinds.append(torch.einsum("bhid,hjd->bhij", inner, self.dense.weight) + self.dense.bias[:, None])
                case "factorized_dense":
                    inner, tile_len = relu(self._heads(hidden, self.factor_proj)), self.config.tile_len
                    a, b = (
                        torch.einsum("bhid,hcd->bhic", inner, factor.weight) + factor.bias[:, None]
                        for factor in (self.tiles, self.in_tile)
                    )
                    kinds.append(a[..., at // tile_len] * b[..., at % tile_len])
                case "dot_product":
                    query = self._heads(hidden, self.query_proj)
                    kinds.append(torch.einsum("bhid,bhjd->bhij", query, read.key) / math.sqrt(self.build.head_dim))
        shares = self.mixture.softmax(0) if len(kinds) > 1 else hidden.new_ones(1)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        scores = torch.zeros(len(hidden), self.build.num_heads, length, length, dtype=wide, device=hidden.device)
        for share, kind in zip(shares, kinds, strict=True):
            scores = scores + share * kind[..., :length, :length].to(wide)
        keep = keep_mask(
            length, length, is_causal=self.build.is_causal, key_padding_mask=key_padding_mask, device=hidden.device
        )
        weights = masked_softmax(scores, keep).to(read.value.dtype)
        output: Tensor = self.out_proj((weights @ read.value).transpose(1, 2).flatten(2))
        return output

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> SynthesizerState:
        """Return the values, and keys, of no position."""
        self._require_state(key_padding_mask, context)
        sizes, weight = (batch_size, self.build.num_heads, 0, self.build.head_dim), self.value_proj.weight
        value = torch.empty(sizes, device=device, dtype=product_dtype(dtype or weight.dtype, weight.device))
        return SynthesizerState(value, None if self.key_proj is None else value.clone())

    def step(self, hidden: Tensor, state: SynthesizerState) -> tuple[Tensor, SynthesizerState]:
        """Mix one position `[B, 1, E]` with those before it: O(B H S D)."""
        return self.prefill(hidden, state)

    def prefill(self, hidden: Tensor, state: SynthesizerState | None = None) -> tuple[Tensor, SynthesizerState]:
        """Mix positions `[B, n, E]`, each with all before it: their rows of scores begin where the state ends."""
        if state is None:
            state = self.init_state(hidden.shape[0], device=hidden.device, dtype=hidden.dtype)
        if (length := state.value.shape[2] + hidden.shape[1]) > self.build.max_seq_len:
            raise ValueError(f"expected at most max_seq_len = {self.build.max_seq_len} tokens; this makes {length}")
        new = self._read(hidden)
        key = None if state.key is None or new.key is None else torch.cat([state.key, new.key], dim=2)
        state = SynthesizerState(torch.cat([state.value, new.value], dim=2), key)
        return self._mix(hidden, state), state


class _PerHead(nn.Module):
    """A linear map from D features to N scores for each head, of which the first are taken.

    Args:
        num_heads: H.
        head_dim: D.
        num_scores: N.
    """

    def __init__(self, num_heads: int, head_dim: int, num_scores: int) -> None:
        super().__init__()
        bound = head_dim**-0.5  # as torch draws a linear map's
        self.weight = nn.Parameter(torch.empty(num_heads, num_scores, head_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_heads, num_scores).uniform_(-bound, bound))

    def scores(self, inner: Tensor, count: int) -> Tensor:
        """Return the first scores, `[B, H, L, count]`, of `[B, H, L, D]`."""
        return inner @ self.weight[:, :count].mT + self.bias[:, None, :count]
