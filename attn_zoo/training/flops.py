"""Floating-point operations of a training run, counted as it runs.

Forward = the variant's own formula in every layer, plus 2 x inputs x outputs for every linear map outside it. Backward
counts twice the forward. Norms, activations and embeddings are left out, and so is a linear map of which a mixer takes
the weights without calling it (a compress-first layout applies its key and value maps to the few compressed rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from attn_zoo.attention.contract import AbstractAttention, AbstractMixer

__all__ = ["FlopCounter"]

FORWARD_AND_BACKWARD = 3


class FlopCounter:
    """Counts every forward of a model in training mode.

    Args:
        model: gets hooks; they cost microseconds.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forward = 0
        self._has_formula = True
        inside = {id(m) for part in model.modules() if isinstance(part, AbstractAttention) for m in part.modules()}
        for part in model.modules():
            if isinstance(part, AbstractMixer):
                part.register_forward_hook(self._count_mixer, with_kwargs=True)
            elif isinstance(part, nn.Linear) and id(part) not in inside:
                part.register_forward_hook(self._count_linear)

    @property
    def training_flops(self) -> float | None:
        """Total so far, or None where the variant has no formula."""
        return float(FORWARD_AND_BACKWARD * self._forward) if self._has_formula else None

    def restore(self, training_flops: float | None) -> None:
        """Continue from the total of an interrupted run."""
        self._forward = int((training_flops or 0.0) / FORWARD_AND_BACKWARD)

    def _count_linear(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG002
        assert isinstance(module, nn.Linear)
        if module.training:
            self._forward += 2 * module.in_features * output.numel()

    def _count_mixer(
        self, module: nn.Module, inputs: tuple[Tensor, ...], named: Mapping[str, Any], output: Tensor
    ) -> None:
        assert isinstance(module, AbstractMixer)
        formula = None if module.variant is None else module.variant.complexity.flops
        if formula is None:
            self._has_formula = False
        elif module.training:
            context = named.get("context")
            keys = inputs[0] if context is None else context
            batch_size, query_len = output.shape[:2]
            self._forward += formula(module.build.shape(batch_size, query_len, keys.shape[1], module.config))
