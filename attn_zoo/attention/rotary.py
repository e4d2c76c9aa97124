"""Rotary position embedding: queries and keys are rotated by an angle proportional to their position.

Su et al. 2021, "RoFormer", arXiv 2104.09864, equation 34. Pairs are (x_i, x_{i + D/2}), the common half-split order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_zoo.errors import ConfigError


def require_pairs(head_dim: int) -> None:
    """Raise `ConfigError` unless D = `head_dim` features are pairs, which `rotate` turns."""
    if head_dim % 2:
        message = f"expected an even number for rotary positions; got {head_dim}"
        raise ConfigError("BuildContext", [("head_dim", message)])


def rotate(heads: Tensor, first_position: int = 0, base: float = 10_000.0) -> Tensor:
    """Return `[B, H, L, D]` rotated for positions first_position .. first_position + L - 1.

    Args:
        heads: queries or keys `[B, H, L, D]`, D even.
        first_position: position of the first row.
        base: theta of the paper.
    """
    half = heads.shape[-1] // 2
    # Angles in float32 at least: positions beyond 2048 are not exact in bfloat16.
    wide = torch.promote_types(heads.dtype, torch.float32)
    frequency = base ** (-torch.arange(half, device=heads.device, dtype=wide) / half)
    position = torch.arange(first_position, first_position + heads.shape[-2], device=heads.device, dtype=wide)
    angle = position[:, None] * frequency  # [L, D / 2]
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    left, right = heads[..., :half], heads[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
