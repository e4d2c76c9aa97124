"""Word convolution: every position sees a window of k tokens through a gated kernel. The convolution before attention.

Gehring, Auli, Grangier, Yarats, Dauphin 2017, "Convolutional Sequence to Sequence Learning", arXiv 1705.03122,
section 3.2, with the gated linear unit of Dauphin et al. 2017, arXiv 1612.08083:
    out_i = A sigmoid(B),   [A B] = W [x_(i - left d) .. x_i .. x_(i + right d)] + b,   left + right = k - 1
Both sides see as far where k is odd; causal: right = 0. Tokens beyond the ends, and padding, are zeros. With a
dilation d that doubles from layer to layer, stacked layers reach further (Kalchbrenner et al. 2016, ByteNet, arXiv
1610.10099).
Symbols: the papers' d channels are our E, their kernel width our kernel_size k.
Cost: time O(B L k E^2), memory O(B L E); decode state O(B k d E): the last (k - 1) d tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, glu, pad

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer


@dataclass(frozen=True, kw_only=True, slots=True)
class WordConvolutionConfig(VariantConfig):
    """The kernel.

    Args:
        kernel_size: k, tokens that one output sees; 3 as in the paper's deep models.
        max_dilation: largest distance between neighbours in the kernel, a power of two. Layer n has distance 2^n, and
            after the largest starts again at 1. 1 (the paper) never dilates; ByteNet has 16.
    """

    kernel_size: int = 3
    max_dilation: int = 1

    def __post_init__(self) -> None:
        if self.kernel_size < 2:
            raise ValueError(f"kernel_size: expected at least 2, as 1 mixes no tokens; got {self.kernel_size}")
        if self.max_dilation < 1 or self.max_dilation & (self.max_dilation - 1):
            raise ValueError(f"max_dilation: expected a power of two; got {self.max_dilation}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return the paper's kernel and one of even size."""
        return {}, {"kernel_size": 4, "max_dilation": 4}

    def dilation(self, layer_index: int) -> int:
        """Return d of a layer.

        >>> [WordConvolutionConfig(max_dilation=4).dilation(layer) for layer in range(5)]
        [1, 2, 4, 1, 2]
        """
        return int(2 ** (layer_index % self.max_dilation.bit_length()))


def word_convolution_flops(shape: Shape) -> int:
    """Count the products of k tokens with both halves of the gated unit."""
    config: WordConvolutionConfig = shape.config or WordConvolutionConfig()
    return 4 * shape.batch_size * shape.query_len * config.kernel_size * shape.embed_dim**2


def word_convolution_bytes(shape: Shape, itemsize: int) -> int:
    """Count input, output, kernel and bias."""
    config: WordConvolutionConfig = shape.config or WordConvolutionConfig()
    return shape.io_bytes(itemsize) + 2 * shape.embed_dim * (config.kernel_size * shape.embed_dim + 1) * itemsize


def word_convolution_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count the tokens that the next position sees beside itself, whatever the length."""
    config: WordConvolutionConfig = shape.config or WordConvolutionConfig()
    num_tokens = (config.kernel_size - 1) * config.dilation(shape.layer_index)
    return shape.batch_size * num_tokens * shape.embed_dim * itemsize


@register_mixer(
    "word_convolution",
    config=WordConvolutionConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        decode="recurrent",
        is_padding_invariant=True,
        positions=("none",),
        dropout_unit="outputs",
        why={
            "cross_attention": "a window needs positions that both sequences share",
            "grouped_query": "it has no heads to group",
            "positions": "it has no queries and keys to rotate, and no scores to bias",
        },
    ),
    complexity=Complexity(
        time="B L k E^2",
        memory="B L E",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1",
        max_path="L / k",
        flops=word_convolution_flops,
        bytes=word_convolution_bytes,
        state_bytes=word_convolution_state_bytes,
    ),
    reference=Reference(
        title="Convolutional Sequence to Sequence Learning",
        authors="Gehring et al.",
        year=2017,
        url="https://arxiv.org/abs/1705.03122",
        equation="section 3.2",
        code="https://github.com/facebookresearch/fairseq",
        deviations=(
            "It is no approximation of softmax attention: no budget makes the two equal.",
            "No residual connection of its own, as the backbone has one, and no weight normalisation.",
            "There are no attention weights: dropout acts on the output, where the paper drops inputs of a block.",
            "Dilation is that of ByteNet, whose residual blocks have no gated linear unit.",
        ),
    ),
)
class WordConvolution(AbstractMixer):
    """One gated convolution over tokens.

    Args:
        config: the variant's options.
        build: sizes, direction and layer.
    """

    config: WordConvolutionConfig

    def __init__(self, config: WordConvolutionConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.dilation = config.dilation(build.layer_index)
        self.span = (config.kernel_size - 1) * self.dilation  # tokens beside the one in question
        self.left = self.span if build.is_causal else (config.kernel_size - 1) // 2 * self.dilation
        self.conv = nn.Conv1d(build.embed_dim, 2 * build.embed_dim, config.kernel_size, dilation=self.dilation)
        # The gate leaves a quarter of the variance, so the paper starts with four times as much (section 3.5).
        nn.init.normal_(self.conv.weight, std=math.sqrt(4.0 / (config.kernel_size * build.embed_dim)))
        nn.init.zeros_(self.conv.get_parameter("bias"))

    def _gated(self, tokens: Tensor) -> Tensor:
        """Convolve tokens `[B, L + span, E]`, those around the sequence included; return `[B, L, E]`."""
        note_path("convolution.gated")
        return glu(self.conv(tokens.mT), dim=1).mT

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Convolve; shapes as in `AbstractMixer.forward`. Padding is zero, as what lies beyond the ends."""
        del context  # the contract refuses one
        if key_padding_mask is not None:
            hidden = hidden.masked_fill(key_padding_mask[..., None], 0.0)
        output = self._gated(pad(hidden, (0, 0, self.left, self.span - self.left)))
        return dropout(output, self.build.dropout_p, self.training)

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the equation with the k tokens of every window written out, without dropout."""
        del context
        if key_padding_mask is not None:
            hidden = hidden.masked_fill(key_padding_mask[..., None], 0.0)
        length, tokens = hidden.shape[1], pad(hidden, (0, 0, self.left, self.span - self.left))
        windows = torch.stack([tokens[:, start : start + length] for start in self._offsets()], dim=-1)  # [B, L, E, k]
        both = windows.flatten(2) @ self.conv.weight.flatten(1).T + self.conv.get_parameter("bias")  # [B, L, 2 E]
        value, gate = both.chunk(2, dim=-1)
        return value * gate.sigmoid()

    def _offsets(self) -> range:
        return range(0, self.span + 1, self.dilation)

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return what lies before the first token: `(k - 1) d` zeros, `[B, (k - 1) d, E]`."""
        self._require_state(key_padding_mask, context)
        dtype = dtype or self.conv.weight.dtype
        return torch.zeros(batch_size, self.span, self.build.embed_dim, device=device, dtype=dtype)

    def step(self, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve one token `[B, 1, E]` with those before it, O(B k E^2)."""
        return self.prefill(hidden, state)

    def prefill(self, hidden: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve n tokens `[B, n, E]` with those before them; the state is the last `(k - 1) d` tokens."""
        if state is None:
            state = self.init_state(hidden.shape[0], device=hidden.device, dtype=hidden.dtype)
        tokens = torch.cat([state, hidden], dim=1)
        kept = tokens[:, -self.span :].to(state.dtype)  # autocast concatenates in the wider type
        return self._gated(tokens), kept.contiguous()
