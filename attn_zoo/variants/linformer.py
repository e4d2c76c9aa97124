"""Linformer: keys and values are compressed along the sequence to k rows before softmax attention.

Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv 2006.04768, equation 7:
    head_i = softmax(Q_i (E_i^T K_i)^T / sqrt(D)) (F_i^T V_i),   Q_i = X W_i^Q, K_i = X W_i^K, V_i = X W_i^V
Symbols: the paper's n is S (key_len, at most N = max_seq_len), k is `proj_len`, its k x n matrices are our E^T and F^T.
Cost: time O(B H (L + S) k D), memory beyond inputs and outputs O(S k + B H k D): linear, as k is a constant. A k that
grows with S (k = S / ratio) would be quadratic with a small constant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attn_zoo.attention import AbstractAttention, AbstractMixer, BuildContext, MultiHeadMixer
from attn_zoo.attention.masks import blank_padding, finite_padding, masked_softmax, score_bias, zero_padded_rows
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.kernels.compress.attend import attend_compressed
from attn_zoo.kernels.compress.compression import (
    Short,
    compress_pair,
    fit_rows,
    pool_windows,
    window_counts,
    window_matrix,
)
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.metadata import Capabilities, Complexity, Position, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class LinformerConfig(VariantConfig):
    """The paper's choices.

    Args:
        proj_len: k, rows after compression, or one k for each layer ("nonuniform projected dimension", section 4). No
            more than `max_seq_len` rows are made: they would cost and add nothing.
        sharing: `"none"`, E and F for each head; `"headwise"`, one E and one F for all heads of a layer; `"key_value"`,
            E = F as well; `"layerwise"`, one matrix for all layers, heads, keys and values.
        projection: `"linear"`, learned matrices; `"mean_pool"` or `"conv"` (kernel and stride ceil(max_seq_len / k)).
        layout: `"project_first"`, E^T (X W + b), as equation 7 is written; `"compress_first"`, (E^T X) W + (sum E) b,
            as in the authors' code, exact where heads share E and keys are not rotated; `"auto"`, the latter if exact.
        short: rows of E for n < max_seq_len unpadded positions. `"slice"`: the first, as in the authors' code.
            `"slice_renormalise"`: times sqrt(max_seq_len / n), which keeps the variance of independent tokens.
            `"interpolate"`: resampled to n rows, times max_seq_len / n, which keeps the sum over equal tokens.
    """

    proj_len: int | tuple[int, ...] = 256
    sharing: Literal["none", "headwise", "key_value", "layerwise"] = "headwise"
    projection: Literal["linear", "mean_pool", "conv"] = "linear"
    layout: Literal["auto", "project_first", "compress_first"] = "auto"
    short: Short = "slice"

    def __post_init__(self) -> None:
        ranks = self.ranks
        if not ranks or min(ranks) < 1:
            raise ValueError(f"proj_len: expected at least 1, or one such number for each layer; got {self.proj_len!r}")
        if self.sharing == "layerwise" and len(set(ranks)) > 1:
            raise ValueError(f"proj_len: all layers share one matrix, so one rank; got {self.proj_len!r}")
        if self.projection == "mean_pool" and self.sharing != "headwise":
            raise ValueError(f"sharing: mean_pool has no weights to share; leave it out; got {self.sharing!r}")
        if self.projection != "linear" and self.short != "slice":
            raise ValueError(f"short: windows of {self.projection} have one width at any length; got {self.short!r}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return each way of sharing, projecting and shortening at least once."""
        small: dict[str, Any] = {"proj_len": 12}
        return (
            small,
            small | {"sharing": "none", "short": "interpolate"},
            small | {"sharing": "key_value", "layout": "project_first", "short": "slice_renormalise"},
            small | {"sharing": "layerwise", "layout": "compress_first"},
            small | {"projection": "mean_pool"},
            small | {"projection": "conv", "sharing": "none"},
        )

    @classmethod
    def budgets(cls, seq_len: int) -> tuple[dict[str, Any], ...]:
        """Return finer and finer pooling; the last pools nothing. A learned E is exact only where it learns to be."""
        pooling = {"projection": "mean_pool", "sharing": "headwise", "short": "slice"}
        return tuple(pooling | {"proj_len": max(1, seq_len // part)} for part in (8, 2, 1))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank k of each layer, or one k for all."""
        return self.proj_len if isinstance(self.proj_len, tuple) else (self.proj_len,)


def _products(shape: Shape) -> tuple[float, float]:
    """Return FLOPs of the compression and of the attention to what is compressed; k is the mean over layers."""
    config = shape.config or LinformerConfig()
    rank = _mean_rank(config, shape)
    num_rows = {"linear": rank, "conv": 1.0, "mean_pool": 0.0}[config.projection]  # that one token is multiplied into
    if _is_compress_first(config, shape):  # hidden states and, for the bias, ones
        width = (shape.embed_dim + 1) * (1 if config.sharing in ("key_value", "layerwise") else 2)
    else:
        width = 2 * shape.num_kv_heads * shape.head_dim
    compression = 2 * shape.batch_size * shape.key_len * width * num_rows
    return compression, 4 * shape.batch_size * shape.num_heads * shape.query_len * shape.head_dim * rank


def linformer_flops(shape: Shape) -> int:
    """Count the compression of keys and values and both products of the attention; a pooling has no products."""
    return round(sum(_products(shape)))


def linformer_backward_ratio(shape: Shape) -> float:
    """Return 2 for the compression and 2.5 for the attention, which recomputes its scores."""
    compression, attention = _products(shape)
    return (2.0 * compression + 2.5 * attention) / (compression + attention)


def linformer_projection_flops(shape: Shape) -> int:
    """Count the four projections; compress-first applies those of keys and values to k rows."""
    config = shape.config or LinformerConfig()
    if not _is_compress_first(config, shape):
        return shape.multi_head_flops
    rank = _mean_rank(config, shape)
    rows = shape.query_len * shape.num_heads + rank * shape.num_kv_heads
    return round(4 * shape.batch_size * shape.embed_dim * shape.head_dim * rows)


def _why_not_compress_first(config: LinformerConfig, position: Position) -> str | None:
    """Return why E^T (X W) is not (E^T X) W, or None where it is."""
    if config.sharing == "none":
        return "each head has a matrix of its own, so there is no one E^T X for all"
    if position == "rotary":
        return "rotation acts on projected keys position by position, before they are mixed"
    return None


def _is_compress_first(config: LinformerConfig, shape: Shape) -> bool:
    is_exact = _why_not_compress_first(config, shape.position) is None
    return shape.form == "mixer" and config.layout != "project_first" and is_exact


def _mean_rank(config: LinformerConfig, shape: Shape) -> float:
    ranks = _ranks(config, shape)
    if config.projection != "linear":  # as many as there are windows
        ranks = [-(-shape.key_len // width) for width in _widths(config, shape)]
    return sum(ranks) / len(ranks)


def linformer_bytes(shape: Shape, itemsize: int) -> int:
    """Count queries, keys, values and E and F, or their filters, read once and the output written once."""
    config = shape.config or LinformerConfig()
    if config.projection == "linear":
        sizes = [shape.key_len * rank for rank in _ranks(config, shape)]
    else:  # a filter, or nothing, for each window
        sizes = [width if config.projection == "conv" else 0 for width in _widths(config, shape)]
    num_matrices = {"none": 2 * shape.num_kv_heads, "headwise": 2, "key_value": 1, "layerwise": 1}[config.sharing]
    return shape.io_bytes(itemsize) + round(num_matrices * sum(sizes) / len(sizes)) * itemsize


def _ranks(config: LinformerConfig, shape: Shape) -> list[int]:
    return [min(rank, shape.max_seq_len) for rank in config.ranks]


def _widths(config: LinformerConfig, shape: Shape) -> list[int]:
    """Return the positions of a window in each layer."""
    return [-(-shape.max_seq_len // rank) for rank in _ranks(config, shape)]


def make_linformer_mixer(config: LinformerConfig, build: BuildContext) -> AbstractMixer:
    """Return the mixer in the layout that `config` asks for; both have the same parameters under the same names.

    Raises:
        UnsupportedError: compress-first is asked for where it is not exact.
    """
    why_not = _why_not_compress_first(config, build.position)
    if config.layout == "compress_first" and why_not:
        raise UnsupportedError("layout", f"linformer: compress_first is not exact here: {why_not}")
    attention = LinformerAttention(replace(config, layout="project_first"), build)
    is_plain = config.layout == "project_first" or why_not is not None
    mixer = MultiHeadMixer(attention) if is_plain else CompressFirstMixer(attention)
    mixer.config = config
    return mixer


@register_attention(
    "linformer",
    config=LinformerConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=False,
        cross_attention=True,
        key_padding_mask=True,
        grouped_query=True,
        is_padding_invariant=True,
        dropout_unit="summaries",
        why={
            "causal": "each compressed key mixes all positions",
            "decode": "a new position changes every compressed key",
            "positions": "a bias by distance needs keys with a position, and a compressed key has none",
        },
    ),
    complexity=Complexity(
        time="B H (L + S) k D",
        memory="S k + B H k D",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1",
        max_path="1",
        flops=linformer_flops,
        projection_flops=linformer_projection_flops,
        bytes=linformer_bytes,
        backward_ratio=linformer_backward_ratio,
    ),
    reference=Reference(
        title="Linformer: Self-Attention with Linear Complexity",
        authors="Wang et al.",
        year=2020,
        url="https://arxiv.org/abs/2006.04768",
        equation="7",
        code="https://github.com/facebookresearch/fairseq/tree/main/examples/linformer",
        deviations=(
            "Padded positions count for nothing in what is compressed; the authors' code lets them in.",
            "Lengths below the maximum: slicing E is the authors' rule, the other two are ours; the paper is silent.",
            "conv is one filter over a window, the same for all channels; the paper gives kernel and stride only.",
            "Windows have ceil(N / k) positions, so there may be fewer than k; one that holds only padding is masked.",
            "Not in the paper: grouped heads, cross-attention, rotary positions (keys are mixed after rotation).",
        ),
    ),
    mixer=make_linformer_mixer,
)
class LinformerAttention(AbstractAttention):
    """Attention to compressed keys and values.

    Args:
        config: the variant's options.
        build: sizes; `build.shared` holds the matrix of layerwise sharing.

    Raises:
        ConfigError: as many ranks as layers are needed, and another number is given.
        UnsupportedError: compress-first is asked of projected heads.
    """

    def __init__(self, config: LinformerConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        if config.layout == "compress_first":
            raise UnsupportedError("layout", "linformer: projected heads cannot be compressed first: use build_mixer")
        ranks, layer = config.ranks, build.layer_index
        if isinstance(config.proj_len, tuple) and (len(ranks) != build.num_layers or layer >= len(ranks)):
            problem = f"expected one rank for each of {build.num_layers} layers; got {len(ranks)} at layer {layer}"
            raise ConfigError("linformer", [("proj_len", problem)])
        self.proj_len = min(ranks[layer if len(ranks) > 1 else 0], build.max_seq_len)
        self.width = -(-build.max_seq_len // self.proj_len)  # of a window
        self.compress_key: nn.Parameter | None = None
        self.compress_value: nn.Parameter | None = None  # None: that of the keys
        if config.sharing == "layerwise":  # the first layer to come makes it
            place = f"linformer {config.projection} {build.max_seq_len} to {self.proj_len}"
            if place not in build.shared:
                build.shared[place] = self._new_weight()
            self.compress_key = build.shared[place]
        elif config.projection != "mean_pool":
            self.compress_key = self._new_weight()
            self.compress_value = self._new_weight() if config.sharing != "key_value" else None

    def _new_weight(self) -> nn.Parameter:
        """Draw E `[G or 1, N, k]` or filters `[G or 1, width]`, so that compressed rows have about a token's variance.

        E as in the authors' code: Xavier uniform of gain 1 / sqrt(2), variance 1 / (N + k). The paper gives none.
        """
        is_linear = self.config.projection == "linear"
        sizes = (self.build.max_seq_len, self.proj_len) if is_linear else (self.width,)
        heads = self.build.num_kv_heads if self.config.sharing == "none" else 1
        return nn.Parameter(torch.empty(heads, *sizes).uniform_(-1, 1) * (3.0 / sum(sizes)) ** 0.5)

    @property
    def weights(self) -> tuple[Tensor | None, Tensor | None]:
        """E and F, the same tensor twice where keys and values share it; None for pooling."""
        e, f = self.compress_key, self.compress_value
        return e, e if f is None else f

    def compress(self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compress keys `[B, G, S, D]` by E and values by F to `[B, G, k, D]`; padded positions count for nothing."""
        e, f = self.weights
        if self.config.projection != "linear":
            filters = (None if weight is None else weight.to(key.dtype) for weight in (e, f))
            first, second = (
                pool_windows(tokens, self.width, weight, key_padding_mask=key_padding_mask)
                for tokens, weight in zip((key, value), filters, strict=True)
            )
            return first, second
        assert e is not None
        assert f is not None
        fitting = key.shape[2], self.config.short, key_padding_mask
        if e.dtype != key.dtype:
            is_shared, e = f is e, e.to(key.dtype)
            f = e if is_shared else f.to(key.dtype)
        key_rows, gain = fit_rows(e, *fitting)
        value_rows = key_rows if f is e else fit_rows(f, *fitting)[0]
        both = compress_pair((key, value), (key_rows, value_rows), key_padding_mask=key_padding_mask)
        if gain is not None:  # of the lengths: the same for E and F
            both = both[0] * gain.to(key.dtype), both[1] * gain.to(key.dtype)
        return both

    def dense_matrix(self, weight: Tensor | None, key_len: int, mask: Tensor | None, like: Tensor) -> Tensor:
        """Return the `[B or 1, G or 1, S, k]` that `compress` amounts to, zero in padded rows: for the reference."""
        weight = None if weight is None else weight.to(like.dtype)
        if weight is None or self.config.projection == "conv":
            return window_matrix(key_len, self.width, weight, key_padding_mask=mask, like=like)
        rows, gain = fit_rows(weight, key_len, self.config.short, key_padding_mask=mask)
        rows = rows if rows.dim() == 4 else rows[None, :, :key_len]
        rows = rows if gain is None else rows * gain.to(like.dtype)
        return rows if mask is None else rows.masked_fill(mask[:, None, :, None], 0.0)

    def _empty_rows(self, mask: Tensor | None) -> Tensor | None:
        """Return bool `[B, k]`, True = windows with padding only, which are no keys, or None where there are none.

        A learned matrix mixes every position into every row, so there no row is hidden.
        """
        if mask is None or self.config.projection == "linear":
            return None
        return window_counts(mask.shape[1], self.width, key_padding_mask=mask, device=mask.device) == 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        e, f = self.weights
        is_plain = self.config.projection == "linear" and self.config.short == "slice"
        has_dropout = self.training and self.build.dropout_p > 0
        if is_plain and not has_dropout and e is not None and f is not None and e.dtype == key.dtype:
            return attend_compressed(query, (key, value), (e, f), key_padding_mask=key_padding_mask)
        key, value = self.compress(key, value, key_padding_mask)
        return self.attend(query, key, value, key_padding_mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Attend from `[B, H, L, D]` to compressed `[B, G, k, D]`; the mask is that of the positions, `[B, S]`.

        A sequence that is all padding gets zeros: its values are compressed to zeros, or none of its windows is seen.
        """
        empty = self._empty_rows(key_padding_mask)
        dropout_p = self.build.dropout_p if self.training else 0.0
        return exact_attention(query, key, value, score_bias=score_bias, key_padding_mask=empty, dropout_p=dropout_p)

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute equation 7 with dense matrices."""
        key, value = (blank_padding(x, key_padding_mask) for x in (key, value))
        e, f = (self.dense_matrix(weight, key.shape[2], key_padding_mask, key) for weight in self.weights)
        key, value = e.mT @ key, f.mT @ value  # [B, G, k, D]
        key, value = (expand_kv_heads(x, query.shape[1]) for x in (key, value))
        scores = query @ key.mT / query.shape[-1] ** 0.5  # [B, H, L, k]
        empty = self._empty_rows(key_padding_mask)
        weights = masked_softmax(scores, None if empty is None else ~empty[:, None, None, :])
        return zero_padded_rows(weights @ value, key_padding_mask)


class CompressFirstMixer(MultiHeadMixer):
    """The multi-head mixer with keys and values projected after compression: E^T (X W + b) = (E^T X) W + (sum E) b.

    Two of the four projections then act on k rows, not on S, and X is compressed once where E = F. `reference` and the
    decoding of cross-attention project first, with equal results.
    """

    attention: LinformerAttention

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Mix positions; shapes as in `AbstractMixer.forward`."""
        if context is None:
            hidden = context = finite_padding(hidden, key_padding_mask)
        tokens = context[:, None]  # [B, 1, S, E]: one head as wide as the model
        if torch.is_autocast_enabled(device := tokens.device.type) and tokens.dtype == torch.float32:
            # What autocast does to a product; a norm hands on float32, which a GPU's fast kernels do not take.
            tokens = tokens.to(torch.get_autocast_dtype(device))
        ones = tokens.new_ones(*tokens.shape[:3], 1)
        compress = self.attention.compress
        (rows_e, rows_f), (sum_e, sum_f) = (compress(x, x, key_padding_mask) for x in (tokens, ones))
        build = self.build
        key, value = linear(rows_e, self.key_proj.weight), linear(rows_f, self.value_proj.weight)  # [B, 1, k, G D]
        key = key + (sum_e * self.key_proj.bias).to(key.dtype)  # wide under autocast, where the query is not
        value = value + (sum_f * self.value_proj.bias).to(value.dtype)
        key, value = (x[:, 0].unflatten(-1, (build.num_kv_heads, -1)).transpose(1, 2) for x in (key, value))
        query = self._heads(hidden, self.query_proj, build.num_heads)
        return self._merge(self.attention.attend(query, key, value, key_padding_mask))
