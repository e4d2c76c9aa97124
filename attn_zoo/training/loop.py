"""The training loop: plain, the same for every variant and task.

Weights are selected on validation: best value, then lowest loss, then earliest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attn_zoo.model import ModelConfig
from attn_zoo.records import Cell
from attn_zoo.tasks import TaskSpec
from attn_zoo.training.batches import Batch, Batcher, Feed
from attn_zoo.training.checkpoint import Numbers
from attn_zoo.training.evaluation import Evaluation, Scored, evaluate, is_better, score_batch
from attn_zoo.training.graphed import Graphed
from attn_zoo.training.objective import objective_for
from attn_zoo.training.protocol import Protocol, capabilities_of_both, require, weight_dtype
from attn_zoo.training.ranks import ALONE, Ranks
from attn_zoo.training.seeding import derive_seed, seed_everything
from attn_zoo.training.updates import DivergedError, Updater


class Trainer(Updater):
    """Train one model under one protocol; arguments as in `Updater`."""

    _score: Callable[[Batch], Scored] | None = None

    def train(
        self,
        train: Feed,
        validation: Feed,
        after_evaluation: Callable[[Numbers], None] | None = None,
        after_step: Callable[[int], None] | None = None,
    ) -> None:
        """Make the updates that are left; afterwards the model holds the weights selected by `validation`.

        Callbacks as in `make_updates`.

        Raises:
            DivergedError: loss or gradient is not finite.
        """
        self.make_updates(
            train, lambda loss: self._select(loss, self.evaluate(validation)), after_evaluation, after_step
        )
        self.model.load_state_dict(self.best_weights)

    def evaluate(self, feed: Feed, *, is_test: bool = False) -> Evaluation:
        """Score the model as it is; compiled where it trains so, but for a test, whose predictions may take more."""
        start, compiling_s = self._now(), 0.0
        if self._score is None and self.protocol.compile:

            def score(batch: Batch) -> Scored:
                return score_batch(self.compiled, self.objective, self.dtype, self.tell_compiler(batch))

            self._score = Graphed(score, "scoring") if self.batcher.device.type == "cuda" else score

        def score_full(batch: Batch) -> Scored:
            nonlocal compiling_s
            assert self._score is not None
            if not self.is_unlike(batch, self._score):
                return self._score(batch)
            begun = self._now()
            scored = self._score(batch)
            compiling_s += self._now() - begun
            return scored

        scored = evaluate(
            self.model,
            self.objective,
            self.batcher,
            feed,
            batch_size=self.protocol.eval_batch_size,
            seed=self.seed,
            dtype=self.dtype,
            is_test=is_test,
            score_full=None if is_test or self._score is None else score_full,
            ranks=self.ranks,
            is_bucketed=self.protocol.bucket_batches > 1,
        )
        self.numbers.eval_s += self._now() - start
        self.numbers.eval_compile_s += compiling_s
        return scored

    def _select(self, train_loss: float, scored: Evaluation) -> None:
        numbers = self.numbers
        if not math.isfinite(scored.loss):
            raise DivergedError(numbers.step, "validation loss")
        metric = self.batcher.spec.metric
        is_first = numbers.best is None
        if is_first or is_better(metric, (scored.value, scored.loss), (numbers.best or 0.0, numbers.best_loss)):
            numbers.best, numbers.best_loss, numbers.best_step = scored.value, scored.loss, numbers.step
            self.best_weights = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        numbers.curve.append(
            {
                "step": float(numbers.step),
                "train_loss": train_loss,
                "validation_loss": scored.loss,
                "validation": scored.value,
            }
        )


def make_trainer(cell: Cell, spec: TaskSpec, protocol: Protocol, ranks: Ranks = ALONE) -> tuple[Trainer, ModelConfig]:
    """Return a trainer of a new model around the cell's variant, and what the model was made of.

    Raises:
        UnsupportedError: the variant, or training itself, refuses what this asks.
    """
    objective = objective_for(spec, is_causal=cell.is_causal)
    batcher = Batcher(spec, protocol, capabilities_of_both(cell, protocol), cell.device)
    require(cell, spec, protocol, has_mask=batcher.has_mask)
    config = protocol.model_config(
        variant=cell.variant,
        options=cell.options,
        vocab_size=spec.vocab_size,
        target_vocab_size=max(spec.vocab_size, spec.num_classes) if spec.kind == "seq2seq" else 0,
        max_seq_len=batcher.max_seq_len,
        seed=derive_seed(cell.seed, "init"),
    )
    seed_everything(config.seed)  # for variants that draw at construction without a generator of their own
    model = objective.build_model(config).to(cell.device, weight_dtype(cell.dtype))
    trainer = Trainer(
        model,
        objective,
        batcher,
        protocol,
        num_steps=protocol.num_steps,
        seed=cell.seed,
        dtype=cell.dtype,
        ranks=ranks,
    )
    return trainer, config
