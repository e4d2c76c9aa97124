"""Differential attention: the difference of two softmax maps, in which what both attend to alike cancels out.

Ye et al. 2024, "Differential Transformer", arXiv 2410.05258, equations 1 to 3. For each head:
    out = (softmax(Q_1 K_1^T / sqrt(d)) - lambda softmax(Q_2 K_2^T / sqrt(d))) V                       (1)
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init                     (2)
    head = (1 - lambda_init) RMSNorm(out),   lambda_init = 0.8 - 0.6 exp(-0.3 l),   l = 0, 1, ..       (3)
The two maps share the features of a head: D = 2 d, so that it has as many parameters as `full`. l is the layer.
A query that is zero in the features of the other map has the scores of its own map alone. So both maps are exact
attention (`kernels.exact`) of twice as many query heads to the same keys and values.
Cost: time O(B H L S D), twice that of `full`; memory O(B H L D).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm

from attn_zoo.attention import AbstractAttention, BuildContext
from attn_zoo.attention.decode import KVCache
from attn_zoo.attention.masks import blank_padding, score_bias
from attn_zoo.attention.oracle import attention_weights, expand_kv_heads
from attn_zoo.errors import ConfigError
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention

NORM_EPS = 1e-5
"""Of the norm of a head, as in the authors' code."""

LAMBDA_STD = 0.1
"""Of the vectors that lambda is made of, as they are drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferentialConfig(VariantConfig):
    """How much of the second map is taken off at the start: `lambda_init` - `lambda_drop` exp(-0.3 l) in layer l.

    Args:
        lambda_init: that of a layer far up.
        lambda_drop: how much less that of the first layer is; 0 is the paper's ablation, the same in all layers.
    """

    lambda_init: float = 0.8
    lambda_drop: float = 0.6

    def __post_init__(self) -> None:
        if not self.lambda_init < 1:
            raise ValueError(
                f"lambda_init: expected less than 1, as heads are scaled by the rest; got {self.lambda_init}"
            )
        if not 0 <= self.lambda_drop <= self.lambda_init:
            raise ValueError(f"lambda_drop: expected 0 to lambda_init = {self.lambda_init}; got {self.lambda_drop}")

    def start(self, layer_index: int) -> float:
        """Return lambda_init of a layer."""
        return self.lambda_init - self.lambda_drop * math.exp(-0.3 * layer_index)

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return the same share in all layers, as in the paper's ablation."""
        return ({"lambda_init": 0.5, "lambda_drop": 0.0},)


def differential_flops(shape: Shape) -> int:
    """Count a multiply and an add for each visible pair and feature, in two matrix products for each of two maps."""
    query_len, key_len = shape.query_len, shape.key_len
    pairs = query_len * key_len
    if shape.is_causal:
        num_seeing = min(query_len, key_len)  # the last one sees every key, each before it one fewer
        pairs = num_seeing * (2 * key_len - num_seeing + 1) // 2
    return 8 * shape.batch_size * shape.num_heads * shape.head_dim * pairs


def differential_bytes(shape: Shape, itemsize: int) -> int:
    """Count inputs, output, the vectors of lambda, the gain of the norm, and a byte for each feature of either map."""
    return shape.io_bytes(itemsize) + 3 * shape.head_dim * itemsize + 2 * shape.head_dim


def differential_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count the keys and values of all positions so far, as many as those of `full`."""
    return 2 * shape.batch_size * shape.num_kv_heads * shape.key_len * shape.head_dim * itemsize


@register_attention(
    "differential",
    config=DifferentialConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=True,
        key_padding_mask=True,
        decode="kv_cache",
        grouped_query=True,
        attention_dropout=False,
        is_permutation_invariant=True,
        is_padding_invariant=True,
        why={"attention_dropout": "its authors drop none of its weights, and the norm would scale up what is left"},
    ),
    complexity=Complexity(
        time="B H L S D",
        memory="B H L D",
        time_exponent=2,
        memory_exponent=1,
        sequential_ops="1",
        max_path="1",
        flops=differential_flops,
        bytes=differential_bytes,
        backward_ratio=2.5,  # five matrix products for two: the scores are recomputed
        state_bytes=differential_state_bytes,
    ),
    reference=Reference(
        title="Differential Transformer",
        authors="Ye et al.",
        year=2024,
        url="https://arxiv.org/abs/2410.05258",
        equation="1 to 3",
        code="https://github.com/microsoft/unilm",
        deviations=(
            "A map has half the features of a head, whose number is the model's; the paper halves the heads instead.",
            "Of the rotary pairs of a head each map has every other one, so that both have high and low frequencies.",
            "Of keys in groups a head reads both maps in one group; the authors' code groups the maps as if heads.",
            "The difference is taken after the products with V, which is the same sum; weights are never stored.",
            "Lambda and the norm are computed in float32 at least.",
        ),
    ),
)
class DifferentialAttention(AbstractAttention):
    """Two exact maps over the same values, one subtracted from the other.

    Args:
        config: the variant's options.
        build: sizes, direction and layer.

    Raises:
        ConfigError: `head_dim` is no multiple of 4, two maps of whole rotary pairs.
    """

    config: DifferentialConfig
    features: Tensor

    def __init__(self, config: DifferentialConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        if build.head_dim % 4:
            problem = f"expected a multiple of 4, for two maps of whole rotary pairs; got {build.head_dim}"
            raise ConfigError("differential", [("head_dim", problem)])
        half = build.head_dim // 2
        pair = torch.arange(build.head_dim) % half  # rotary pairs are (i, i + D / 2)
        self.register_buffer("features", pair % 2 == torch.arange(2)[:, None], persistent=False)  # [2, D], of each map
        self.lambda_query = nn.Parameter(LAMBDA_STD * torch.randn(2, half))
        self.lambda_key = nn.Parameter(LAMBDA_STD * torch.randn(2, half))
        self.gain = nn.Parameter(torch.ones(build.head_dim))
        self.lambda_start = config.start(build.layer_index)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return self._attend(query, key, value, is_causal=self.build.is_causal, key_padding_mask=key_padding_mask)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        num_blind = max(0, query.shape[2] - key.shape[2]) if is_causal else 0  # the first of them precede every key
        query = query[:, :, num_blind:] * 2**0.5  # scores are scaled by D ** -0.5, which is to be d ** -0.5
        maps = exact_attention(
            (query[:, :, None] * self.features[:, None]).flatten(1, 2),  # [B, 2 H, L, D]
            key,
            value,
            score_bias=score_bias,
            is_causal=is_causal,
            key_padding_mask=key_padding_mask,
        )
        first, second = maps.unflatten(1, (-1, 2)).unbind(2)
        output = self._normalised(first, second)
        return pad(output, (0, 0, num_blind, 0)) if num_blind else output

    def _normalised(self, first: Tensor, second: Tensor) -> Tensor:
        """Compute equations 2 and 3 from what both maps make of the values, `[B, H, L, D]`."""
        wide = torch.promote_types(first.dtype, torch.float32)
        one, other = (self.lambda_query.to(wide) * self.lambda_key.to(wide)).sum(-1).exp()
        difference = first.to(wide) - (one - other + self.lambda_start) * second.to(wide)
        normal = rms_norm(difference, self.gain.shape, self.gain.to(wide), NORM_EPS)
        return ((1 - self.lambda_start) * normal).to(first.dtype)

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute equations 1 to 3 with dense maps."""
        value = expand_kv_heads(blank_padding(value, key_padding_mask), query.shape[1])
        first, second = (
            attention_weights(
                query[..., own], key[..., own], is_causal=self.build.is_causal, key_padding_mask=key_padding_mask
            )
            @ value
            for own in self.features
        )
        return self._normalised(first, second)

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> KVCache:
        """Return an empty cache of keys and values."""
        self._require_state()
        return KVCache.empty(batch_size, self.build.num_kv_heads, self.build.head_dim, device=device, dtype=dtype)

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, KVCache]:
        """Attend from one new position to all in the cache; it may hold `max_seq_len` positions."""
        return self.prefill(query, key, value, state)

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, KVCache]:
        """Attend from new positions to all in the cache and to those of them that came before."""
        if state is None:
            state = self.init_state(query.shape[0], device=query.device, dtype=query.dtype)
        if (length := state.length + query.shape[2]) > self.build.max_seq_len:
            raise ValueError(f"expected at most max_seq_len = {self.build.max_seq_len} tokens; this makes {length}")
        state = state.append(key, value)
        return self._attend(query, state.keys, state.values, is_causal=query.shape[2] > 1), state
