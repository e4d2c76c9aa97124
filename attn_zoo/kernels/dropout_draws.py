"""Random draws of dropout: fast on a CPU, and the same again from the same seed, so that backward can repeat them."""

from __future__ import annotations

import torch
from torch import Tensor

_NUM_DRAWS = 1 << 16  # a draw is 16 bits


def keep_share(dropout_p: float) -> float:
    """Return the share of weights that is kept where their probability of being dropped is a multiple of 2^-16."""
    return 1.0 - min(round(dropout_p * _NUM_DRAWS), _NUM_DRAWS - 1) / _NUM_DRAWS


def draw_dropped(like: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Return bool of the shape of `like`, True with the given probability, a multiple of 2^-16.

    Four draws from each 64-bit number: five times as fast on CPU as `bernoulli_`, which dominated the whole call.
    """
    count = like.numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=like.device)
    words.random_(-(1 << 63), None, generator=generator)
    draws: Tensor = words.view(torch.int16)[:count].view(like.shape)  # uniform in -32768 .. 32767
    return draws < int(probability * _NUM_DRAWS) - _NUM_DRAWS // 2


def draw(like: Tensor, probability: float, seed: Tensor, offset: int) -> Tensor:
    """Return what `draw_dropped` draws from a generator seeded with `seed + offset`; torch's compiler takes it whole.

    Args:
        like: has the shape and the device.
        probability: of True, a multiple of 2^-16.
        seed: an integer on the CPU.
        offset: tells several draws of one seed apart.
    """
    if torch.compiler.is_compiling():  # the compiler cannot trace generators
        dropped: Tensor = _draw_operator(like, probability, seed, offset)
        return dropped
    return _draw(like, probability, seed, offset)


def _draw(like: Tensor, probability: float, seed: Tensor, offset: int) -> Tensor:
    return draw_dropped(like, probability, torch.Generator(like.device).manual_seed(int(seed) + offset))


_draw_operator = torch.library.custom_op("attn_zoo::dropout_draw", _draw, mutates_args=())


@_draw_operator.register_fake
def _(like: Tensor, probability: float, seed: Tensor, offset: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(like, dtype=torch.bool)
