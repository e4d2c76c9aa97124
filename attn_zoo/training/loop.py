"""The training loop: plain, the same for every variant and task.

Weights are selected on validation: best value, then lowest loss, then earliest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attn_zoo.training.batches import Feed
from attn_zoo.training.checkpoint import Numbers
from attn_zoo.training.evaluation import Evaluation, evaluate, is_better
from attn_zoo.training.updates import DivergedError, Updater

__all__ = ["Trainer"]


class Trainer(Updater):
    """Train one model under one protocol; arguments as in `Updater`."""

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
        order = self.order(train)
        while self.numbers.step < self.num_steps:
            train_loss = self.advance(train, order, after_step)
            self._select(train_loss, self.evaluate(validation))
            if after_evaluation is not None:
                after_evaluation(self.numbers)
        self.model.load_state_dict(self.best_weights)

    def evaluate(self, feed: Feed, *, is_test: bool = False) -> Evaluation:
        """Score the model as it is."""
        return evaluate(
            self.model,
            self.objective,
            self.batcher,
            feed,
            batch_size=self.protocol.eval_batch_size,
            seed=self.seed,
            dtype=self.dtype,
            is_test=is_test,
        )

    def _select(self, train_loss: float, found: Evaluation) -> None:
        numbers = self.numbers
        if not math.isfinite(found.loss):
            raise DivergedError(numbers.step, "validation loss")
        metric = self.batcher.spec.metric
        is_first = numbers.best is None
        if is_first or is_better(metric, (found.value, found.loss), (numbers.best or 0.0, numbers.best_loss)):
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
