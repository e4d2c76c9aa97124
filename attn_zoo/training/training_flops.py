"""Floating-point operations of a training run, counted as it runs.

Forward = the variant's own formula in every layer, its projections included, plus 2 x inputs x outputs for every linear
map outside the mixers. Backward = twice the linear maps (each product has two), and the variant's own ratio of its
formula. Norms, activations and embeddings are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attn_zoo.attention.contract import AbstractMixer, Mixed
from attn_zoo.metadata import LINEAR_BACKWARD_RATIO


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put a model's buffers back afterwards: running statistics must not see a forward that is no training."""
    kept = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.detach().copy_(value)


class FlopCounter:
    """Counts every forward of a model in training mode, by hooks that cost microseconds."""

    def __init__(self, model: nn.Module) -> None:
        self._forward, self._total = 0, 0.0
        self._handles: list[RemovableHandle] = []
        self._has_formula = True
        inside = {id(m) for part in model.modules() if isinstance(part, AbstractMixer) for m in part.modules()}
        for part in model.modules():
            if isinstance(part, AbstractMixer):
                self._handles.append(part.register_forward_hook(self._count_mixer, with_kwargs=True))
            elif isinstance(part, nn.Linear) and id(part) not in inside:
                self._handles.append(part.register_forward_hook(self._count_linear))

    @property
    def training_flops(self) -> float | None:
        """Total so far, or None where the variant has no formula."""
        return self._total if self._has_formula else None

    @property
    def forward_flops(self) -> int | None:
        """Of the forwards counted here alone, or None where the variant has no formula."""
        return self._forward if self._has_formula else None

    def restore(self, training_flops: float | None) -> None:
        """Continue from the total of an interrupted run."""
        self._total = training_flops or 0.0

    def _add(self, forward: int, backward_ratio: float) -> None:
        self._forward += forward
        self._total += forward * (1.0 + backward_ratio)

    def remove(self) -> None:
        """Take the hooks off; the total stays."""
        for handle in self._handles:
            handle.remove()

    def _count_linear(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG002
        assert isinstance(module, nn.Linear)
        if module.training:
            self._add(2 * module.in_features * output.numel(), LINEAR_BACKWARD_RATIO)

    def _count_mixer(
        self, module: nn.Module, inputs: tuple[Tensor, ...], named: Mapping[str, Any], output: Tensor | Mixed
    ) -> None:
        assert isinstance(module, AbstractMixer)
        del output
        context = named.get("context")
        (batch_size, query_len), keys = inputs[0].shape[:2], inputs[0] if context is None else context
        shape = module.build.shape(batch_size, query_len, keys.shape[1], module.config, "mixer")
        variant = module.variant
        flops = None if variant is None else variant.flops(shape)
        if variant is None or flops is None:
            self._has_formula = False
        elif module.training:
            self._add(flops, variant.backward_ratio(shape) or 0.0)


class CompiledFlopCounter(FlopCounter):
    """Counts by the shapes of the inputs, for a model that runs compiled: there hooks would be compiled along.

    Each new shape costs one forward of the model as it was written.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.remove()
        self._model = model
        self._known: dict[Hashable, FlopCounter] = {}

    def add(self, shapes: Hashable, forward: Callable[[], object]) -> None:
        """Count one update; `forward` runs the model on inputs of these shapes, if none such were seen before."""
        if shapes not in self._known:
            self._known[shapes] = self._counted(forward)
        one = self._known[shapes]
        self._has_formula &= one._has_formula
        self._forward += one._forward
        self._total += one._total

    @torch.no_grad()
    def _counted(self, forward: Callable[[], object]) -> FlopCounter:
        counter = FlopCounter(self._model)
        with buffers_kept(self._model):
            forward()
        counter.remove()
        return counter
