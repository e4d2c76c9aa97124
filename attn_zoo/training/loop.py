"""The training loop: plain, the same for every variant and task.

Weights are selected on validation: highest value, then lowest loss, then earliest. Every random draw is a function of
seed and step, so an interrupted run continues with the same results on the same machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attn_zoo.training.batches import Batcher, Feed
from attn_zoo.training.checkpoint import Numbers, load_checkpoint, save_checkpoint
from attn_zoo.training.flops import FlopCounter
from attn_zoo.training.objective import AbstractObjective
from attn_zoo.training.protocol import Protocol
from attn_zoo.training.schedule import learning_rate
from attn_zoo.training.seeding import batch_rows, derive_seed, seed_everything

__all__ = ["DivergedError", "Evaluation", "Trainer", "make_optimizer"]

_LOOK_EVERY = 20  # steps between looks at the device for non-finite values; the step is known exactly all the same


class DivergedError(Exception):
    """Loss or gradient became infinite or not a number.

    Attributes:
        step: the update at which it happened.
    """

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"{what} is not finite at step {step}")
        self.step = step


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean loss, mean score, and per example whether it was right."""

    loss: float
    value: float
    correct: Tensor


def make_optimizer(model: nn.Module, protocol: Protocol) -> torch.optim.Optimizer:
    """Return AdamW; matrices outside embeddings are decayed, all else is not."""
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    is_decayed = [parameter.ndim >= 2 and id(parameter) not in embeddings for parameter in trained]
    groups = [
        {"params": [p for p, is_in in zip(trained, is_decayed, strict=True) if is_in is decays], "weight_decay": decay}
        for decays, decay in ((True, protocol.weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=protocol.betas, eps=protocol.eps, fused=True)


class Trainer:
    """Train one model under one protocol.

    Args:
        model: on its device.
        objective: of the task.
        batcher: makes its batches.
        protocol: of the run.
        seed: of the run.
        dtype: `"bfloat16"` trains under autocast; other types are the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: AbstractObjective,
        batcher: Batcher,
        protocol: Protocol,
        *,
        seed: int,
        dtype: str,
    ) -> None:
        self.model, self.objective, self.batcher, self.protocol = model, objective, batcher, protocol
        self.seed, self.dtype = seed, dtype
        self.optimizer = make_optimizer(model, protocol)
        self.flops = FlopCounter(model)
        self.numbers = Numbers()
        self.best_weights: dict[str, Tensor] = {}
        self._first_bad = torch.zeros((), dtype=torch.int64, device=batcher.device)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=batcher.device)

    def resume(self, path: Path, identity: str) -> None:
        """Continue from the checkpoint at `path`, if there is one for this run."""
        found = load_checkpoint(path, identity)
        if found is None:
            return
        self.model.load_state_dict(found.weights)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": found.optimizer, "param_groups": groups})
        self.best_weights = {name: tensor.to(self.batcher.device) for name, tensor in found.best_weights.items()}
        self.numbers = found.numbers
        self.flops.restore(found.numbers.train_flops)

    def train(
        self,
        train: Feed,
        validation: Feed,
        after_evaluation: Callable[[Numbers], None] | None = None,
        after_step: Callable[[int], None] | None = None,
    ) -> None:
        """Make the updates that are left; afterwards the model holds the selected weights.

        Args:
            train: examples to learn from.
            validation: examples to select by.
            after_evaluation: called when the state is worth saving.
            after_step: called with the number of updates done.

        Raises:
            DivergedError: loss or gradient is not finite.
        """
        numbers, protocol = self.numbers, self.protocol
        while numbers.step < protocol.num_steps:
            stop = min(protocol.num_steps, (numbers.step // protocol.eval_every + 1) * protocol.eval_every)
            first = numbers.step + 1
            self._loss_sum.zero_()
            with self._timed():
                for step in range(first, stop + 1):
                    self._update(step, train)
                    if step % _LOOK_EVERY == 0 or step == stop:
                        self._look()
                    numbers.step = step
                    if after_step is not None:
                        after_step(step)
                train_loss = float(self._loss_sum) / (stop - first + 1)
            self._select(train_loss, self.evaluate(validation))
            numbers.train_flops = self.flops.training_flops
            if after_evaluation is not None:
                after_evaluation(numbers)
        self.model.load_state_dict(self.best_weights)

    def save(self, path: Path, identity: str) -> None:
        """Write a checkpoint."""
        save_checkpoint(path, identity, self.numbers, self.model, self.best_weights, self.optimizer)

    @torch.no_grad()
    def evaluate(self, feed: Feed) -> Evaluation:
        """Score the model as it is on all examples, in order."""
        self.model.eval()
        seed_everything(derive_seed(self.seed, "evaluation"))  # for variants that draw at evaluation too
        losses, correct = [], []
        for rows in torch.split(torch.arange(len(feed.lengths)), self.protocol.eval_batch_size):
            batch = self.batcher.batch(feed, rows)
            with self._precision():
                outputs = self.objective.outputs(self.model, batch)
            losses.append(self.objective.losses(outputs, batch).double())
            correct.append(self.objective.correct(outputs, batch))
        right = torch.cat(correct).cpu()
        return Evaluation(float(torch.cat(losses).mean()), float(right.double().mean()), right)

    def _update(self, step: int, feed: Feed) -> None:
        protocol = self.protocol
        self.model.train()
        batch = self.batcher.batch(feed, batch_rows(step, protocol.batch_size, len(feed.lengths), self.seed))
        seed_everything(derive_seed(self.seed, "dropout", step))
        with self._precision():
            outputs = self.objective.outputs(self.model, batch)
        loss = self.objective.losses(outputs, batch).mean()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), protocol.clip_norm or math.inf)
        rate = learning_rate(
            protocol.schedule,
            step,
            base_lr=protocol.base_lr,
            warmup_steps=protocol.warmup_steps,
            num_steps=protocol.num_steps,
            embed_dim=protocol.embed_dim,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        is_bad = ~(torch.isfinite(loss.detach()) & torch.isfinite(norm)) & (self._first_bad == 0)
        self._first_bad += is_bad * step
        self._loss_sum += loss.detach()
        self.numbers.num_tokens += batch.num_tokens

    def _look(self) -> None:
        if (step := int(self._first_bad)) > 0:
            raise DivergedError(step, "loss or gradient norm")

    def _select(self, train_loss: float, found: Evaluation) -> None:
        numbers = self.numbers
        if not math.isfinite(found.loss):
            raise DivergedError(numbers.step, "validation loss")
        if (found.value, -found.loss) > (numbers.best, -numbers.best_loss):
            numbers.best, numbers.best_loss, numbers.best_step = found.value, found.loss, numbers.step
            self.best_weights = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        numbers.curve.append(
            {
                "step": float(numbers.step),
                "train_loss": train_loss,
                "validation_loss": found.loss,
                "validation": found.value,
            }
        )

    def _precision(self) -> AbstractContextManager[object]:
        if self.dtype != "bfloat16":
            return nullcontext()
        return torch.autocast(self.batcher.device.type, torch.bfloat16)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = self._now()
        yield
        self.numbers.train_s += self._now() - start

    def _now(self) -> float:
        if self.batcher.device.type == "cuda":
            torch.cuda.synchronize(self.batcher.device)
        return time.perf_counter()
