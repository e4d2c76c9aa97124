"""Peer: the `linformer` package (lucidrains/linformer 0.2.3), as it is installed. `pip install attn-zoo[peers]`.

Its module projects first and stores the [L, k] weights; queries, keys and values have no bias. Everything else is the
mechanism of Wang et al. 2020, so `reference` is that equation with the package's own weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_zoo import AbstractMixer, BuildContext, UnsupportedError, VariantConfig, register_mixer
from attn_zoo.metadata import Capabilities, Complexity, Reference


@dataclass(frozen=True, kw_only=True, slots=True)
class LinformerPackageConfig(VariantConfig):
    """The package's only choice that matters here.

    Args:
        proj_len: k, rows after compression.
    """

    proj_len: int = 256


@register_mixer(
    "linformer_package",
    config=LinformerPackageConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=False,
        cross_attention=False,
        key_padding_mask=False,
        positions=("none",),
        why={
            "causal": "every compressed row mixes all positions",
            "cross_attention": "not wrapped here",
            "key_padding_mask": "the package has none",
            "decode": "every compressed row mixes all positions",
        },
    ),
    complexity=Complexity(
        time="B H L k D", memory="B H L k", time_exponent=1, memory_exponent=1, sequential_ops="1", max_path="1"
    ),
    reference=Reference(
        title="Linformer: Self-Attention with Linear Complexity",
        authors="Wang et al.",
        year=2020,
        url="https://github.com/lucidrains/linformer",
        equation="7",
        code="https://github.com/lucidrains/linformer",
        deviations=("queries, keys and values have no bias",),
    ),
)
class LinformerPackageMixer(AbstractMixer):
    """The package's self-attention module.

    Args:
        config: rank.
        build: sizes.

    Raises:
        UnsupportedError: the package is not installed.
    """

    config: LinformerPackageConfig

    def __init__(self, config: LinformerPackageConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        try:
            from linformer.linformer import LinformerSelfAttention
        except ImportError as error:
            raise UnsupportedError("requires", f"linformer_package: pip install 'attn-zoo[peers]' ({error})") from error
        self.inner = LinformerSelfAttention(
            build.embed_dim,
            build.max_seq_len,
            k=min(config.proj_len, build.max_seq_len),
            heads=build.num_heads,
            dropout=build.dropout_p,
        )

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        output: Tensor = self.inner(hidden)
        return output

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute equation 7 with the package's weights."""
        inner, rows = self.inner, hidden.shape[1]

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.build.num_heads, -1)).transpose(1, 2)  # [B, H, rows, D]

        query = heads(inner.to_q(hidden))
        key = heads(inner.proj_k[:rows].T @ inner.to_k(hidden))
        value = heads(inner.proj_v[:rows].T @ inner.to_v(hidden))
        weights = torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, dim=-1)
        output: Tensor = inner.to_out((weights @ value).transpose(1, 2).flatten(-2))
        return output
