"""The draws of dropout as an operator that torch's compiler takes whole; loaded only where something is compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_zoo.kernels.chunked import draw

__all__ = ["draw_operator"]


@torch.library.custom_op("attn_zoo::dropout_draw", mutates_args=())
def draw_operator(like: Tensor, probability: float, seed: Tensor, offset: int) -> Tensor:
    """Return `kernels.chunked.draw` of the same arguments."""
    return draw(like, probability, seed, offset)


@draw_operator.register_fake
def _(like: Tensor, probability: float, seed: Tensor, offset: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(like, dtype=torch.bool)
