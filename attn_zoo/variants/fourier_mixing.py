"""Fourier mixing: the real part of a Fourier transform over positions and features. No parameters, no attention.

Lee-Thorp et al. 2021, "FNet: Mixing Tokens with Fourier Transforms", arXiv 2105.03824, equation 3.
    Y = Re(F_seq(F_hidden(X))),   F(x)_k = sum_n exp(-2 pi i n k / N) x_n   (equation 1, not normalised)
Written out, Y = C_L X C_E - S_L X S_E with the symmetric matrices C_nk = cos(2 pi nk / N) and S_nk = sin(2 pi nk / N),
so the map is its own adjoint: the gradient is the same transform. Symbols: the paper's d_h is our E.
Cost: time O(B L E log(L E)); memory O(B L E).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import AbstractMixer
from attn_zoo.attention.masks import blank_padding
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import register_mixer


def fourier_mixing_flops(shape: Shape) -> int:
    """Count 5 N log2 N for each transform of N = L E points, half of it as they are real."""
    size = shape.query_len * shape.embed_dim
    return round(2.5 * shape.batch_size * size * math.log2(size))


def _transform(hidden: Tensor) -> Tensor:
    """Return Y = Re(F_seq(F_hidden(X))) of `[B, L, E]`, whose gradient is the same transform."""
    if torch._C._are_functorch_transforms_active():  # no autograd.Function without `setup_context`, which takes longer
        return _real_fourier(hidden)
    mixed: Tensor = _RealFourier.apply(hidden)
    return mixed


def _real_fourier(hidden: Tensor) -> Tensor:
    length, width = hidden.shape[-2:]
    if hidden.shape[0] == 0:  # the library transforms no empty batch
        return hidden.clone()
    half = torch.fft.rfft2(hidden).real  # [B, L, E // 2 + 1]
    # The other features are the conjugates of these at negative frequencies: (-n mod L, -k mod E).
    mirrored = half[..., 1 : (width + 1) // 2].flip(-1)
    mirrored = torch.cat([mirrored[:, :1], mirrored[:, 1:].flip(1)], dim=1) if length > 1 else mirrored
    return torch.cat([half, mirrored], dim=-1)


class _RealFourier(torch.autograd.Function):
    """The transform in both directions by that of real numbers.

    Autograd's own backward of that is a complex one, which costs twice as much.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:  # noqa: ARG004
        return _real_fourier(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        mixed: Tensor = _RealFourier.apply(grads[0])
        return mixed


@register_mixer(
    "fourier_mixing",
    capabilities=Capabilities(
        bidirectional=True,
        causal=False,
        cross_attention=False,
        key_padding_mask=True,
        variable_seq_len=False,
        attention_dropout=False,
        positions=("none",),
        dtypes=("float32", "bfloat16", "float64"),
        why={
            "causal": "every output is a sum over all positions",
            "cross_attention": "it transforms one sequence",
            "decode": "a new position changes every output",
            "variable_seq_len": "a frequency means something else at every length",
            "grouped_query": "it has no heads to group",
            "attention_dropout": "its weights are the fixed waves of the transform",
            "positions": "it has no queries and keys to rotate, and no scores to bias",
            "dtypes": "it sums all L E inputs, and float16 ends at 65504",
        },
    ),
    complexity=Complexity(
        time="B L E log(L E)",
        memory="B L E",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="1",
        max_path="1",
        flops=fourier_mixing_flops,
        backward_ratio=1.0,  # the same transform
    ),
    reference=Reference(
        title="FNet: Mixing Tokens with Fourier Transforms",
        authors="Lee-Thorp et al.",
        year=2021,
        url="https://arxiv.org/abs/2105.03824",
        equation="3",
        code="https://github.com/google-research/google-research/tree/master/f_net",
        deviations=(
            "Padded positions are set to zero before the transform; the paper has no mask.",
            "bfloat16 inputs are transformed in float32.",
        ),
    ),
)
class FourierMixing(AbstractMixer):
    """The real part of the two-dimensional Fourier transform.

    Args:
        config: there are no options.
        build: sizes; the module takes sequences of exactly `max_seq_len` positions.
    """

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Transform; shapes as in `AbstractMixer.forward`. At padded positions, too, stands what all others sum to."""
        del context  # the contract refuses one
        note_path("fourier.rfft")
        tokens = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        mixed = _transform(blank_padding(tokens, key_padding_mask))
        return mixed.to(hidden.dtype)

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute equation 3 by the matrices of both transforms, dense, in the dtype of the input."""
        del context
        cos_seq, sin_seq = _waves(hidden.shape[1], hidden)
        cos_hidden, sin_hidden = _waves(hidden.shape[2], hidden)
        tokens = blank_padding(hidden, key_padding_mask)
        return cos_seq @ tokens @ cos_hidden - sin_seq @ tokens @ sin_hidden


def _waves(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of 2 pi n k / N, `[N, N]`, in the dtype and on the device of `like`."""
    index = torch.arange(size, device=like.device)
    turns = (index[:, None] * index) % size  # whole turns do not matter, and would cost digits
    angle = turns.double() * (2 * math.pi / size)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)
