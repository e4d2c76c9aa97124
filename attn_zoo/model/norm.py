"""Normalisation over features (LayerNorm, RMSNorm) or, as the contrast, over unpadded positions (BatchNorm)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_zoo.model.config import NormKind


class FeatureNorm(nn.Module):
    """LayerNorm or RMSNorm: each position by itself, so padding cannot matter.

    Args:
        norm: over the last dimension.
    """

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002 (see above)
        """Return `[B, L, E]`, normalised."""
        normal: Tensor = self.norm(hidden)
        return normal


class PositionBatchNorm(nn.Module):
    """BatchNorm (Ioffe and Szegedy 2015, arXiv 1502.03167) with statistics over unpadded positions only.

    Args:
        embed_dim: E.
        momentum: of the running statistics used in evaluation.
        eps: added to the variance.
    """

    def __init__(self, embed_dim: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(embed_dim))
        self.bias = nn.Parameter(torch.zeros(embed_dim))
        self.momentum, self.eps = momentum, eps
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(embed_dim))
        self.register_buffer("running_var", torch.ones(embed_dim))

    def forward(self, hidden: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return `[B, L, E]`; padded positions are normalised by the same statistics but do not enter them."""
        mean, var = self.running_mean, self.running_var
        if self.training:
            keep = hidden.new_ones(hidden.shape[:2]) if key_padding_mask is None else (~key_padding_mask).to(hidden)
            count = keep.sum().clamp(min=1.0)
            mean = (hidden * keep[..., None]).sum((0, 1)) / count
            var = ((hidden - mean).square() * keep[..., None]).sum((0, 1)) / count
            with torch.no_grad():
                unbiased = var * count / (count - 1).clamp(min=1.0)
                self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
                self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
        return (hidden - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


def make_norm(kind: NormKind, embed_dim: int) -> FeatureNorm | PositionBatchNorm:
    """Return the normalisation `kind` over E = `embed_dim` features."""
    if kind == "batch_norm":
        return PositionBatchNorm(embed_dim)
    return FeatureNorm(nn.LayerNorm(embed_dim) if kind == "layer_norm" else nn.RMSNorm(embed_dim))
