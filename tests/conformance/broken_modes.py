"""Variants that compute less where they are timed than where they are checked: in one mode, one dtype, one size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.conformance.broken import Broken, Softmax


class Lazy(Softmax):
    """Returns the values as they are where `is_lazy` says so."""

    def is_lazy(self, query: Tensor) -> bool:
        raise NotImplementedError

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return value * 1.0 if self.is_lazy(query) else super().attend(query, key, value, mask)


class WithReference(Lazy):
    """The same with a readable reference that is right."""

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return Softmax.attend(self, query, key, value, key_padding_mask)


class LazyInTraining(Lazy):
    def is_lazy(self, query: Tensor) -> bool:
        return self.training


class LazyInTrainingWithReference(WithReference):
    def is_lazy(self, query: Tensor) -> bool:
        return self.training


class LazyWithoutGraph(Lazy):
    def is_lazy(self, query: Tensor) -> bool:
        return not torch.is_grad_enabled()


class LazyWithoutGraphWithReference(WithReference):
    def is_lazy(self, query: Tensor) -> bool:
        return not torch.is_grad_enabled()


class LazyInHalf(Lazy):
    def is_lazy(self, query: Tensor) -> bool:
        return query.dtype == torch.bfloat16


class LazyInHalfWithReference(WithReference):
    def is_lazy(self, query: Tensor) -> bool:
        return query.dtype == torch.bfloat16


class NoKeyGradientInTraining(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key.detach() if self.training else key, value, mask)


class _HalvedBelowFloat64(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient if gradient.dtype == torch.float64 else 0.5 * gradient


class HalvesAGradientBelowFloat64(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, _HalvedBelowFloat64.apply(key), value, mask)


class NoisyInTraining(Softmax):
    """Adds noise to its scores, as mechanisms with a random choice do; only dropout can be declared."""

    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        return super().weights(scores + 0.3 * torch.randn_like(scores) if self.training else scores, keep)


HALF = {"dtypes": ("float64", "float32", "bfloat16")}

MODES = (
    Broken(cls=LazyInTraining, check="modes"),
    Broken(cls=LazyInTrainingWithReference, check="modes"),
    Broken(cls=LazyWithoutGraph, check="modes", also=frozenset("*")),
    Broken(cls=LazyWithoutGraphWithReference, check="modes", also=frozenset("*")),
    Broken(cls=LazyInHalf, check="modes", capabilities=HALF),
    Broken(cls=LazyInHalfWithReference, check="modes", also=frozenset({"matches_reference"}), capabilities=HALF),
    Broken(cls=NoKeyGradientInTraining, check="modes"),
    Broken(cls=NoisyInTraining, check="modes"),
)
GRADIENTS = (Broken(cls=HalvesAGradientBelowFloat64, check="modes"),)  # a half is lost in what 16 bits allow
