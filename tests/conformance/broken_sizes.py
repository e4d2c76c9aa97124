"""Broken variants that go wrong in some sizes or layouts only: heads, features, layers, an empty batch, strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.errors import ConfigError, UnsupportedError
from tests.conformance.broken import Broken, Softmax, dressed


class RoundsHeadsToAPowerOfTwo(Softmax):
    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        heads = scores.shape[1]
        known = 1 << (heads.bit_length() - 1)
        return super().weights(torch.cat([scores[:, :known], 1.001 * scores[:, known:]], dim=1), keep)


class ReadsSixtyFourFeatures(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        known = torch.arange(query.shape[-1], device=query.device) < 64
        return super().attend(query, key * known, value, mask)


class DiffersInLaterLayers(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        return output * (1 + 1e-9) if self.build.layer_index else output


class CannotReshapeNothing(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query.reshape(query.shape[0], query.shape[1], query.shape[2], -1), key, value, mask)


class AddsAnEntryToNothing(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if query.shape[0] == 0:
            return query.new_zeros(1, *query.shape[1:])
        return super().attend(query, key, value, mask)


class ReadsKeysByStridesOfQueries(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if query.shape == key.shape and query.stride() != key.stride() and query.shape[2] > 1:
            key = query.new_zeros(key.shape)
        return super().attend(query, key, value, mask)


class _ReadsContiguousGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if 0 in gradient.stride() else gradient


class LosesExpandedGradients(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output: Tensor = _ReadsContiguousGradients.apply(super().attend(query, key, value, mask))
        return output


class FindsNoKernelForOneNumber(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if query.contiguous().stride(-1) != 1:
            raise RuntimeError("No available kernel")
        return super().attend(query, key, value, mask)


class SoundInFewSizes(Softmax):
    """Refuses sizes, as kernels and rotations do. Itself sound."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        if build.head_dim > 64 or build.head_dim < 8:
            raise UnsupportedError("head_dim", f"expected 8 to 64; got {build.head_dim}")
        if build.num_heads % 2 and build.num_heads > 1:
            raise ConfigError("BuildContext", [("num_heads", f"expected an even number; got {build.num_heads}")])
        if build.layer_index > 1:
            raise UnsupportedError("layer_index", "it is for the first two layers")


SIZES = (
    dressed(RoundsHeadsToAPowerOfTwo, "batch_and_head_sizes", is_known_bare=False),
    dressed(ReadsSixtyFourFeatures, "batch_and_head_sizes", is_known_bare=False),
    dressed(DiffersInLaterLayers, "batch_and_head_sizes", is_known_bare=False),
    dressed(CannotReshapeNothing, "batch_and_head_sizes"),
    dressed(AddsAnEntryToNothing, "batch_and_head_sizes"),
    dressed(ReadsKeysByStridesOfQueries, "non_contiguous"),
    dressed(LosesExpandedGradients, "non_contiguous"),
    dressed(FindsNoKernelForOneNumber, "non_contiguous"),
)

SOUND_SIZES = (Broken(cls=SoundInFewSizes, check=""),)
