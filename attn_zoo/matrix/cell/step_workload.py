"""What a cell of scope `"model"` measures: one training step of the backbone with the variant inside, update included.

What is timed is the step that a training repeats, `Updater.step`, on generated data that lie on the device. A variant
that brings a whole model of its own (`Variant.learner`) starts from the weights of ours, must say the same of the same
batch, and is then timed by the step its author wrote.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from attn_zoo.conformance import gate
from attn_zoo.conformance.tolerance import largest, largest_error, working_tolerance
from attn_zoo.errors import GateError
from attn_zoo.matrix.cell.workload import AbstractWorkload, Call
from attn_zoo.measure.memory import memory_of_update
from attn_zoo.records import Cell, Memory
from attn_zoo.registry import variants
from attn_zoo.training.learner import AbstractLearner, Learner

__all__ = ["StepWorkload"]

MAX_COMPILED = 200
"""Models that one process compiles at most: cells of a bundle, or of a lane."""


@final
class StepWorkload(AbstractWorkload):
    """One training step.

    Args:
        cell: of scope `"model"`.

    Raises:
        UnsupportedError: the variant, or training itself, refuses what the cell asks.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        ours = Learner(cell)
        own = variants[cell.variant].learner
        self._learner: AbstractLearner = ours if own is None else own(ours)
        self._ours: Learner | None = ours
        if self._learner.protocol.compile:
            _compile_every_cell()
        self._before = [parameter.detach().clone() for parameter in self._learner.model.parameters()]
        self.inputs: Sequence[Tensor] = ()  # the data are small, and the weights must not be shared

    def gate(self) -> tuple[str, ...]:
        """Check the mixer as every cell's, and a model that is not ours against ours."""
        cell, ours = self._cell, self._ours
        assert ours is not None
        config = ours.config
        build = config.build_context(is_causal=False, is_cross=False, num_positions=config.max_seq_len)
        checks = gate(
            cell.variant,
            cell.options,
            build,
            dtype=cell.dtype,
            device=cell.device,
            seq_len=config.max_seq_len,
            form="mixer",
        )
        return checks if self._learner is ours else (*checks, self._check_logits(ours))

    def _check_logits(self, ours: Learner) -> str:
        """Compare with ours in float64, from the same weights, on the first batch."""
        batch = ours.batch(1)
        objective, dtype = ours.trainer.objective, getattr(torch, self._cell.dtype)
        for learner in (ours, self._learner):
            learner.model.eval()
        with torch.enable_grad():  # without gradients modules may take other paths than those that train
            exact = objective.outputs(copy.deepcopy(ours.model).double(), batch).detach()
            plain, found = ours.logits(batch).detach(), self._learner.logits(batch).detach()
        for learner in (ours, self._learner):
            learner.model.train()
        error = largest_error(found, exact)
        allowed = working_tolerance(largest_error(plain, exact), largest(exact), batch.tokens.shape[1], dtype)
        if error > allowed:
            text = f"logits are off by {error:.2g} from those of our model with the same weights, allowed {allowed:.2g}"
            raise GateError("own_logits", f"{self._cell.variant}: {text}")
        return "own_logits"

    def make_call(self) -> tuple[Call, Call | None]:
        self._ours = None  # one of the two models is enough from here on
        return self._learner.step, None

    def check(self, output: object) -> tuple[str, ...]:  # noqa: ARG002 - it is the weights that tell
        """Check that the step learned something, everywhere: weights are finite, and where there is a gradient changed.

        A gradient no larger than what Adam adds to its square root may leave a weight as it was.
        """
        name, eps = self._cell.variant, self._learner.protocol.eps
        for (parameter, now), before in zip(self._learner.model.named_parameters(), self._before, strict=True):
            if not bool(torch.isfinite(now).all()):
                raise GateError("step_is_finite", f"{name}: {parameter} is not finite after one step")
            if not now.requires_grad:
                continue
            if now.grad is None:
                raise GateError("step_learns", f"{name}: {parameter} got no gradient")
            if largest(now.grad) > eps and torch.equal(now, before):
                raise GateError("step_learns", f"{name}: {parameter} has a gradient and did not change in one step")
        self._before = []
        return ("step_is_finite", "step_learns")

    def settle(self) -> None:
        self._learner.settle()

    def memory(self) -> Memory:
        self._learner.launch_singly()
        return memory_of_update(self._learner.step, self._held, device=self._cell.device)

    def _held(self) -> list[Tensor]:
        model = self._learner.model
        weights = [*model.parameters(), *model.buffers()]
        grads = [weight.grad for weight in weights if weight.grad is not None]
        averages = [item for state in self._learner.optimizer.state.values() for item in state.values()]
        return [*weights, *grads, *(item for item in averages if isinstance(item, Tensor)), *self._learner.data]

    @property
    def num_params(self) -> int:
        return sum(item.numel() for item in self._learner.model.parameters())

    @property
    def flops(self) -> int | None:
        return self._learner.forward_flops

    @property
    def pass_flops(self) -> float | None:
        return self._learner.step_flops

    def counted_flops(self) -> int | None:
        """Return None: formulas are checked where variants are timed alone."""
        return None

    def release(self) -> None:
        """Keep everything: weights and averages are what the next step needs."""


def _compile_every_cell() -> None:
    """Let this process compile the models of as many cells as it likes.

    They share their source, and torch compiles one source for so many models only: the next would run as written.
    """
    from torch._dynamo import config  # loads the compiler

    config.recompile_limit = max(config.recompile_limit, MAX_COMPILED)
    config.fail_on_recompile_limit_hit = True  # an error is better than the time of something else
