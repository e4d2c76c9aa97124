"""What a timed training step trains: our trainer on generated data, or a whole model from elsewhere.

A step is what a run repeats: take the next batch from the data on the device, forward, loss, backward, update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from attn_zoo.errors import ConfigError
from attn_zoo.records import Cell
from attn_zoo.tasks import Split, TaskSpec
from attn_zoo.training.batches import Batch, Feed
from attn_zoo.training.evaluation import precision
from attn_zoo.training.loop import make_trainer
from attn_zoo.training.protocol import Protocol, resolve_protocol
from attn_zoo.training.seeding import derive_seed

NUM_CLASSES, VOCAB_SIZE = 10, 18  # sizes of ListOps
NUM_BATCHES = 8
NUM_STEPS = 1_000_000  # so that no schedule ends while steps are timed


class AbstractLearner(ABC):
    """A model that is trained step by step.

    Attributes:
        model: on its device, in training mode.
        optimizer: of its parameters.
        protocol: what it follows.
        data: what it learns from, on the device.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    protocol: Protocol
    data: Sequence[Tensor]

    @abstractmethod
    def step(self) -> None:
        """Make the next update, and leave without waiting for the device."""

    @abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of a batch, `[B, C]`, in the model's mode and by the code that trains."""

    @property
    def forward_flops(self) -> int | None:
        """FLOPs of a forward by formulas, after at least one step; None where there are none."""
        return None

    @property
    def step_flops(self) -> float | None:
        """FLOPs of a step, likewise."""
        return None

    def check(self) -> tuple[str, ...]:
        """Check what is compiled against the model as written; return the names of what was checked.

        Raises:
            GateError: it is wrong.
        """
        return ()

    def settle(self) -> None:  # noqa: B027 - most have nothing to settle
        """Make the steps that run otherwise than all that follow, such as the one in which a CUDA graph is captured."""

    def launch_singly(self) -> None:  # noqa: B027 - most use none
        """Use no CUDA graph from here on: what happens inside one is hidden from the allocator's statistics."""


def step_spec(seq_len: int, *, has_padding: bool) -> TaskSpec:
    """Return what generated data are: one class a sequence; with padding, the last quarter of every second one."""
    return TaskSpec(
        kind="classification",
        metric="accuracy",
        chance=1 / NUM_CLASSES,
        vocab_size=VOCAB_SIZE,
        num_classes=NUM_CLASSES,
        max_seq_len=seq_len,
        has_padding=has_padding,
    )


def step_protocol(cell: Cell) -> Protocol:
    """Return the protocol of a cell whose training steps are timed: every batch has one size.

    Raises:
        ConfigError: the cell names no protocol.
        UnknownNameError: there is none of that name.
    """
    if cell.protocol is None or cell.batch_size is None:
        raise ConfigError(cell.id, [("", "expected a cell of scope model with protocol and batch_size")])
    fixed = {"batch_size": cell.batch_size, "is_full_length": True, "pad_multiple": 1, "num_steps": NUM_STEPS}
    protocol = resolve_protocol(cell.protocol, overrides={**cell.overrides, **fixed})
    return replace(protocol, compile=bool(protocol.compile))


def _generated(spec: TaskSpec, protocol: Protocol, seed: int) -> Split:
    """Return random tokens and labels: a few batches, so that consecutive updates see different data."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "data"))
    count, seq_len = NUM_BATCHES * protocol.batch_size, spec.max_seq_len
    tokens = torch.randint(1, spec.vocab_size, (count, seq_len), dtype=torch.uint8, generator=generator)
    lengths = torch.full((count,), seq_len)
    if spec.has_padding:
        lengths[::2] -= seq_len // 4
    labels = torch.randint(spec.num_classes, (count,), generator=generator)
    return Split(tokens=tokens, lengths=lengths, labels=labels)


@final
class Learner(AbstractLearner):
    """Ours: the trainer of every run, around the cell's variant. A step includes making the batch.

    Args:
        cell: of scope `"model"`.

    Raises:
        UnsupportedError: the variant, or training itself, refuses what the cell asks.
    """

    def __init__(self, cell: Cell) -> None:
        self.protocol = step_protocol(cell)
        assert cell.seq_len is not None
        spec = step_spec(cell.seq_len, has_padding=cell.has_padding)
        self.trainer, self.config = make_trainer(cell, spec, self.protocol)
        self.model, self.optimizer = self.trainer.model.train(), self.trainer.optimizer
        self.feed: Feed = self.trainer.batcher.feed(_generated(spec, self.protocol, cell.seed))
        self._order = self.trainer.order(self.feed)
        self.data = tuple(self.feed.tensors.values())

    def batch(self, step: int) -> Batch:
        """Return the batch of update `step` (1 is the first)."""
        return self.trainer.batcher.batch(self.feed, self._order.rows(step))

    def step(self) -> None:
        self.trainer.step(self.feed, self._order)

    def logits(self, batch: Batch) -> Tensor:
        with precision(self.trainer.dtype, self.trainer.batcher.device):
            return self.trainer.objective.outputs(self.model, batch)

    @property
    def forward_flops(self) -> int | None:
        total, steps = self.trainer.flops.forward_flops, self.trainer.numbers.step
        return None if total is None or steps == 0 else round(total / steps)

    @property
    def step_flops(self) -> float | None:
        total, steps = self.trainer.flops.training_flops, self.trainer.numbers.step
        return None if total is None or steps == 0 else total / steps

    def check(self) -> tuple[str, ...]:
        return self.trainer.check_compiled(self.feed, self._order) if self.protocol.compile else ()

    def settle(self) -> None:
        while self.trainer.numbers.step < self.trainer.num_unlike:
            self.step()

    def launch_singly(self) -> None:
        self.trainer.launch_singly()
