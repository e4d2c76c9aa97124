"""Peer: torch.nn.MultiheadAttention, the attention inside nn.TransformerEncoder, without returning its weights."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from attn_zoo import AbstractMixer, BuildContext, UnsupportedError, VariantConfig, register_mixer
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities
from attn_zoo.registry import variants

FULL = variants["full"]


@register_mixer(
    "torch_multihead",
    config=VariantConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=False,
        cross_attention=False,
        key_padding_mask=True,
        positions=("none",),
        why={
            "causal": "not wrapped here",
            "cross_attention": "not wrapped here",
            "positions": "not wrapped here",
            "decode": "not wrapped here",
        },
    ),
    complexity=replace(FULL.complexity, memory="B H L, or B H L S where torch finds no fused kernel"),
    reference=replace(
        FULL.reference, equation="1, section 3.2.2", code="https://github.com/pytorch/pytorch", deviations=()
    ),
)
class TorchMultiheadMixer(AbstractMixer):
    """The module as it is, projections included.

    Args:
        config: has no choices.
        build: sizes.

    Raises:
        UnsupportedError: the heads together are not as wide as the hidden states.
    """

    def __init__(self, config: VariantConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        if build.num_heads * build.head_dim != build.embed_dim:
            got = f"{build.num_heads} x {build.head_dim}, E = {build.embed_dim}"
            raise UnsupportedError("sizes", f"torch_multihead: expected H x D = E; got {got}")
        self.inner = nn.MultiheadAttention(build.embed_dim, build.num_heads, build.dropout_p, batch_first=True)

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        note_path("nn.MultiheadAttention")
        output: Tensor = self.inner(hidden, hidden, hidden, key_padding_mask=key_padding_mask, need_weights=False)[0]
        return output

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute section 3.2.2 as written with the module's own weights."""
        projected = nn.functional.linear(hidden, self.inner.in_proj_weight, self.inner.in_proj_bias)
        query, key, value = (
            part.unflatten(-1, (self.build.num_heads, -1)).transpose(1, 2) for part in projected.chunk(3, dim=-1)
        )
        heads = softmax_attention(query, key, value, key_padding_mask=key_padding_mask).to(hidden.dtype)
        output: Tensor = self.inner.out_proj(heads.transpose(1, 2).flatten(-2))  # [B, L, E]
        return output
