"""`[[step]]`: time and memory of one training step of the backbone with the variant inside, over lengths.

What is timed is the step that a training repeats, `Updater.step`, on generated data that lie on the device. A variant
that brings a whole model of its own (`Variant.learner`) starts from the weights of ours, must say the same of the same
batch, and is then timed by the step its author wrote. Steps are refused where a training would be.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from attn_zoo.conformance import gate_model
from attn_zoo.conformance.tolerance import largest, largest_error, working_tolerance
from attn_zoo.errors import GateError, UnknownNameError, UnsupportedError
from attn_zoo.matrix.cell.workload import AbstractWorkload, Call
from attn_zoo.matrix.claimed_costs import Claims
from attn_zoo.matrix.kinds.kind import Axis, Entry, Forecast, Problem, Size, Variants
from attn_zoo.matrix.kinds.timed import TimedForecast, TimedGroup, TimedKind
from attn_zoo.matrix.plan.estimate import COMPILE_S, Estimate, rough_seconds, step_estimate
from attn_zoo.matrix.plan.planned_cell import PlannedCell, Refusal
from attn_zoo.matrix.plan.source_digest import TRAINING_ROOMS
from attn_zoo.measure.memory import memory_of_update
from attn_zoo.measure.passes import num_unlike
from attn_zoo.records import STEP_VERSION, Cell, Memory
from attn_zoo.registry import variants

if TYPE_CHECKING:
    from attn_zoo.training.learner import AbstractLearner, Learner


class StepEntry(Entry):
    """A variant whose training steps are timed.

    Args:
        compile: train through `torch.compile`, on a GPU as CUDA graphs.
    """

    compile: bool = False

    def overrides(self) -> dict[str, Any]:
        return {"compile": True} if self.compile else {}


class StepGroup(TimedGroup):
    """Time and memory of one training step of the backbone around each variant: batch, forward, loss, backward, update.

    The protocol decides the sizes of the model, dropout and optimiser.

    Args:
        variants: names, or tables `{name, label, options, compile}`.
        protocol: named training protocol.
        batch_size: B; the protocol's own if absent.
        has_padding: the last quarter of every second sequence is padding, of the first one too.
    """

    entry: ClassVar[type[Entry]] = StepEntry

    variants: Variants[StepEntry]
    protocol: str = "lra-small"
    batch_size: Axis[Size] | None = None
    has_padding: Axis[bool] = (False,)

    def axes(self) -> dict[str, Sequence[Any]]:
        return {**super().axes(), "batch_size": self.batch_size or (None,), "has_padding": self.has_padding}


class Step(TimedKind):
    """One training step. Its cells are stored as scaling cells of scope `"model"`."""

    name = "step"
    group = StepGroup
    rooms = TRAINING_ROOMS

    def owns(self, cell: Cell) -> bool:
        return cell.kind == "scaling" and cell.scope == "model"

    def problems(self, group: Mapping[str, Any], where: str) -> list[Problem]:
        from attn_zoo.training.protocol import resolve_protocol  # loads the backbone: only where it trains

        try:
            resolve_protocol(str(group.get("protocol", StepGroup.model_fields["protocol"].default)))
        except UnknownNameError as error:
            return [(f"{where}.protocol", str(error))]
        return []

    def points(self, group: StepGroup) -> Iterator[dict[str, Any]]:
        from attn_zoo.training.protocol import resolve_protocol

        protocol = resolve_protocol(group.protocol)
        fixed = {
            "kind": "scaling",
            "scope": "model",
            "pass_": "step",
            "protocol": protocol.name,
            "protocol_version": STEP_VERSION,
            "num_heads": protocol.num_heads,
            "num_kv_heads": protocol.num_heads,
            "head_dim": protocol.head_dim or protocol.embed_dim // protocol.num_heads,
            "dropout_p": protocol.dropout_p,
        }
        for point in group.settings:
            yield {**fixed, **point, "batch_size": point["batch_size"] or protocol.batch_size}

    def refusals(self, cells: Sequence[Cell]) -> list[Refusal | None]:
        return [_refusal(cell) for cell in cells]

    def estimate(self, item: PlannedCell) -> Estimate:
        from attn_zoo.training.learner import step_protocol

        protocol = step_protocol(item.cell)
        flops, num_bytes = step_estimate(item, protocol)
        return Estimate(rough_seconds(flops, item) + (COMPILE_S if protocol.compile else 0.0), num_bytes)

    def forecast(self) -> Forecast:
        return TimedForecast(once=lambda _: 0.0)  # mixers of a model are probed at its own length too

    def workload(self, cell: Cell, inputs: Sequence[Tensor] | None) -> AbstractWorkload:  # noqa: ARG002
        return StepWorkload(cell)


def _refusal(cell: Cell) -> Refusal | None:
    from attn_zoo.training.learner import step_protocol, step_spec
    from attn_zoo.training.protocol import require

    assert cell.seq_len is not None  # every step has one
    try:
        spec = step_spec(cell.seq_len, has_padding=cell.has_padding)
        require(cell, spec, step_protocol(cell), has_mask=cell.has_padding)
    except UnsupportedError as error:
        return (error.capability, error.reason)
    return None


@final
class StepWorkload(AbstractWorkload):
    """One training step.

    Raises:
        UnsupportedError: the variant, or training itself, refuses what the cell asks.
    """

    why_not_captured = "a trainer captures its steps itself, where its protocol compiles them"

    def __init__(self, cell: Cell) -> None:
        from attn_zoo.training.learner import Learner

        self._cell = cell
        ours = Learner(cell)
        own = variants[cell.variant].learner
        self._learner: AbstractLearner = ours if own is None else own(ours)
        self._ours: Learner | None = ours
        self.module = self._learner.model
        self._before = [parameter.detach().clone() for parameter in self.module.parameters()]
        self.inputs: Sequence[Tensor] = ()  # the data are small, and the weights must not be shared

    def gate(self) -> tuple[str, ...]:
        """Check the mixers as every cell's, and a model that is not ours against ours."""
        cell, ours = self._cell, self._ours
        assert ours is not None
        checks = gate_model(ours.model, dtype=cell.dtype, device=cell.device, has_padding=cell.has_padding)
        return checks if self._learner is ours else (*checks, self._check_logits(ours))

    def _check_logits(self, ours: Learner) -> str:
        """Compare with ours in float64, from the same weights, on the first batch."""
        batch = ours.batch(1)
        objective, dtype = ours.trainer.objective, getattr(torch, self._cell.dtype)
        for learner in (ours, self._learner):
            learner.model.eval()
        with torch.enable_grad():  # without gradients modules may take other paths than those that train
            exact = objective.outputs(copy.deepcopy(ours.model).double(), batch).detach()
            plain, own = ours.logits(batch).detach(), self._learner.logits(batch).detach()
        for learner in (ours, self._learner):
            learner.model.train()
        error = largest_error(own, exact)
        allowed = working_tolerance(largest_error(plain, exact), largest(exact), batch.tokens.shape[1], dtype)
        if error > allowed:
            text = f"logits are off by {error:.2g} from those of our model with the same weights, allowed {allowed:.2g}"
            raise GateError("own_logits", f"{self._cell.variant}: {text}")
        return "own_logits"

    def make_call(self) -> tuple[Call, Call | None]:
        self._ours = None  # one of the two models is enough from here on
        return self._learner.step, None

    def check(self, output: object, *, is_repeat: bool) -> tuple[str, ...]:  # noqa: ARG002 - it is the weights that tell
        """Check that the step learned something, everywhere: weights are finite, and where there is a gradient changed.

        What is compiled is compared with the model as written, now that the first step, which compiles, is timed.
        A gradient no larger than what Adam adds to its square root may leave a weight as it was.
        """
        name, eps = self._cell.variant, self._learner.protocol.eps
        for (parameter, now), before in zip(self.module.named_parameters(), self._before, strict=True):
            if not bool(torch.isfinite(now).all()):
                raise GateError("step_is_finite", f"{name}: {parameter} is not finite after one step")
            if not now.requires_grad:
                continue
            if now.grad is None:
                raise GateError("step_learns", f"{name}: {parameter} got no gradient")
            if largest(now.grad) > eps and torch.equal(now, before):
                raise GateError("step_learns", f"{name}: {parameter} has a gradient and did not change in one step")
        self._before = []
        return ("step_is_finite", "step_learns", *(() if is_repeat else self._learner.check()))

    def settle(self) -> None:
        self._learner.settle()
        for _ in range(num_unlike(next(self.module.parameters()))):  # mixers as written are recorded each
            self._learner.step()

    def memory(self) -> Memory:
        self._learner.launch_singly()
        return memory_of_update(self._learner.step, self._held, device=self._cell.device)

    def _held(self) -> list[Tensor]:
        weights = [*self.module.parameters(), *self.module.buffers()]
        grads = [weight.grad for weight in weights if weight.grad is not None]
        averages = [item for state in self._learner.optimizer.state.values() for item in state.values()]
        return [*weights, *grads, *(item for item in averages if isinstance(item, Tensor)), *self._learner.data]

    def claims(self) -> Claims:
        forward, step = self._learner.forward_flops, self._learner.step_flops
        if not forward or step is None:
            return Claims(flops=forward)
        return Claims(flops=forward, backward_ratio=step / forward - 1)

    def counted_flops(self) -> int | None:
        """Return None: formulas are checked where variants are timed alone."""
        return None

    def release(self) -> None:
        """Keep everything: weights and averages are what the next step needs."""
