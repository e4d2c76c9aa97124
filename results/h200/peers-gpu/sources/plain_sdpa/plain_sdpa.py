"""Peer: torch's scaled_dot_product_attention called plainly, as a user writes it: torch chooses the kernel."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_zoo import AbstractAttention, VariantConfig, register_attention
from attn_zoo.attention.oracle import softmax_attention
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities
from attn_zoo.registry import variants

FULL = variants["full"]


@register_attention(
    "plain_sdpa",
    config=VariantConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        is_exact=True,
        positions=("none",),
        why={
            "cross_attention": "its causal flag counts from the first key, ours from the last",
            "positions": "not wrapped here",
            "decode": "not wrapped here",
        },
    ),
    complexity=replace(FULL.complexity, memory="B H L, or B H L S where torch finds no fused kernel"),
    reference=replace(FULL.reference, code="https://github.com/pytorch/pytorch"),
)
class PlainSdpaAttention(AbstractAttention):
    """One call of torch, with the mask written as its documentation has it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        note_path("sdpa.default")
        keep, is_causal = None, self.build.is_causal
        if key_padding_mask is not None:
            keep = ~key_padding_mask[:, None, None]  # [B, 1, 1, S]
            if is_causal:  # a mask and the flag exclude one another
                square = keep.new_ones(query.shape[2], key.shape[2]).tril()
                keep, is_causal = keep & square, False
        dropout_p = self.build.dropout_p if self.training else 0.0
        return scaled_dot_product_attention(query, key, value, keep, dropout_p, is_causal)

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute equation 1 as written, in float64."""
        output = softmax_attention(query, key, value, is_causal=self.build.is_causal, key_padding_mask=key_padding_mask)
        return output.to(query.dtype)
