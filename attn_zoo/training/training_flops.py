"""Floating-point operations of a training run, counted as it runs.

Forward = the variant's own formula in every layer, plus 2 x inputs x outputs for every linear map outside it. Backward
counts twice the forward. Norms, activations and embeddings are left out, and so is a linear map of which a mixer takes
the weights without calling it (a compress-first layout applies its key and value maps to the few compressed rows).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attn_zoo.attention.contract import AbstractAttention, AbstractMixer

__all__ = ["FORWARD_AND_BACKWARD", "CompiledFlopCounter", "FlopCounter"]

FORWARD_AND_BACKWARD = 3
"""FLOPs of an update in forwards."""


class FlopCounter:
    """Counts every forward of a model in training mode.

    Args:
        model: gets hooks; they cost microseconds.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forward = 0
        self._handles: list[RemovableHandle] = []
        self._has_formula = True
        inside = {id(m) for part in model.modules() if isinstance(part, AbstractAttention) for m in part.modules()}
        for part in model.modules():
            if isinstance(part, AbstractMixer):
                self._handles.append(part.register_forward_hook(self._count_mixer, with_kwargs=True))
            elif isinstance(part, nn.Linear) and id(part) not in inside:
                self._handles.append(part.register_forward_hook(self._count_linear))

    @property
    def training_flops(self) -> float | None:
        """Total so far, or None where the variant has no formula."""
        return float(FORWARD_AND_BACKWARD * self._forward) if self._has_formula else None

    def restore(self, training_flops: float | None) -> None:
        """Continue from the total of an interrupted run."""
        self._forward = int((training_flops or 0.0) / FORWARD_AND_BACKWARD)

    def remove(self) -> None:
        """Take the hooks off; the total stays."""
        for handle in self._handles:
            handle.remove()

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


class CompiledFlopCounter(FlopCounter):
    """Counts by the shapes of the inputs, for a model that runs compiled: there hooks would be compiled along.

    Each new shape costs one forward of the model as it was written.

    Args:
        model: has hooks during such a forward only.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.remove()
        self._model = model
        self._known: dict[Hashable, int | None] = {}

    def add(self, shapes: Hashable, forward: Callable[[], object]) -> None:
        """Count one update; `forward` runs the model on inputs of these shapes, if none such were seen before."""
        if shapes not in self._known:
            self._known[shapes] = self._counted(forward)
        flops = self._known[shapes]
        self._has_formula &= flops is not None
        self._forward += flops or 0

    @torch.no_grad()
    def _counted(self, forward: Callable[[], object]) -> int | None:
        kept = [buffer.clone() for buffer in self._model.buffers()]  # running statistics must not see it
        counter = FlopCounter(self._model)
        forward()
        counter.remove()
        for buffer, value in zip(self._model.buffers(), kept, strict=True):
            buffer.copy_(value)
        return counter._forward if counter._has_formula else None
