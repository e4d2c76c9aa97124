"""Convolutions of features with kernels as long as the sequence, and the recurrences that they stand for.

Memories x_t = a x_{t-1} + u_t that are read as y_t = w x_t are a convolution, y = K * u with K_l = w a^l, which is a
product of Fourier transforms: all positions at once, in O(L log L). Powers up to L are made in two levels, l = b c + p
with c about sqrt(L): a^l is a product of a^(b c) and a^p.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_zoo.kernels.chunked_recurrence import group_size
from attn_zoo.kernels.own_dtype import in_own_dtype


def two_levels(length: int) -> tuple[int, int]:
    """Return the number of blocks of a sequence, and the positions c of each, a power of two about sqrt(L).

    >>> two_levels(1), two_levels(1000), two_levels(4096)
    ((1, 1), (32, 32), (64, 64))
    """
    size = group_size(length)
    return (length + size - 1) // size, size


def _to_waves(rows: Tensor, size: int) -> Tensor:
    if rows.shape[0] == 0:  # the library transforms no empty batch
        zeros = rows.new_zeros(*rows.shape[:-1], size // 2 + 1)
        return torch.complex(zeros, zeros)
    waves: Tensor = torch.fft.rfft(rows, size, norm="ortho")
    return waves


def _from_waves(waves: Tensor, size: int, length: int) -> Tensor:
    if waves.shape[0] == 0:
        return waves.real.new_zeros(*waves.shape[:-1], length)
    rows: Tensor = torch.fft.irfft(waves, size, norm="ortho")
    return rows[..., :length]


class _ToWaves(torch.autograd.Function):
    """The Fourier transform of real rows `[..., L]`, filled up to n numbers, with length kept: `[..., n / 2 + 1]`.

    All but the first and last wave stand for their conjugates too. With gradients of waves that mean both, this and
    the way back are each other's adjoint. Autograd's own gradients mean one, and take a complex transform, twice the
    cost. Between the two may stand what multiplies waves one by one.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, size: int) -> Tensor:
        ctx.length, ctx.size = rows.shape[-1], size
        return _to_waves(rows, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rows: Tensor = _FromWaves.apply(grads[0], ctx.size, ctx.length)
        return rows, None


class _FromWaves(torch.autograd.Function):
    """The first L of n real numbers whose waves are given."""

    @staticmethod
    def forward(ctx: Any, waves: Tensor, size: int, length: int) -> Tensor:
        ctx.size = size
        return _from_waves(waves, size, length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        waves: Tensor = _ToWaves.apply(grads[0], ctx.size)
        return waves, None, None


def transform_size(length: int) -> int:
    """Return n, at least 2 L, so that nothing wraps around; its factors are 2 and at most sqrt(L)."""
    count, size = two_levels(length)
    return 2 * count * size


@in_own_dtype
def convolve(tokens: Tensor, kernels: Tensor) -> Tensor:
    """Convolve each feature with its kernels by Fourier transforms.

    Args:
        tokens: u, `[B, E, L]`.
        kernels: `[1, E, L]` of the positions so far, its own first; `[2, E, L]`: and of the later ones, the next first.

    Returns:
        `[B, E, L]`.
    """
    length, size = tokens.shape[-1], transform_size(tokens.shape[-1])
    kernel = kernels[0]
    if kernels.shape[0] == 2:  # later positions lie before the first, around the circle
        kernel = torch.cat([pad(kernel, (0, size - 2 * length + 1)), kernels[1, :, : length - 1].flip(-1)], dim=-1)
    if torch._C._are_functorch_transforms_active():  # no autograd.Function without `setup_context`, which takes longer
        to_waves, from_waves = _to_waves, _from_waves
    else:
        to_waves, from_waves = _ToWaves.apply, _FromWaves.apply
    return from_waves(to_waves(tokens, size) * to_waves(size**0.5 * kernel, size), size, length)


def convolve_flops(batch_size: int, num_features: int, length: int) -> float:
    """Count 2.5 n log2 n for each real transform: of tokens and kernels, and back."""
    size = transform_size(length)
    return 2.5 * (2 * batch_size + 1) * num_features * size * math.log2(size)


def remember(tokens: Tensor, decay: Tensor) -> Tensor:
    """Compute the memories x_t = a x_{t-1} + u_t after every position.

    By doubling: a memory of the last `span` tokens, and an earlier one that has decayed since, are one of twice as
    many. So no step waits for L others.

    Args:
        tokens: u, `[B, L, E]`.
        decay: a of the N memories of each feature, real or complex, `[E, N]`.

    Returns:
        `[B, L, E, N]`, as the decay is.
    """
    memory, span = tokens[..., None] + torch.zeros_like(decay), 1
    while span < tokens.shape[1]:
        earlier = torch.cat([torch.zeros_like(memory[:, :span]), memory[:, :-span]], dim=1)
        memory, decay, span = memory + decay * earlier, decay * decay, 2 * span
    return memory
