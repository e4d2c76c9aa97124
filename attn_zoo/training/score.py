"""The score of a finished training: the only place that reads test."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from attn_zoo.records import Score
from attn_zoo.tasks import AbstractTask
from attn_zoo.tasks.floors.lookup_rules import floors_of, references_of
from attn_zoo.training.evaluation import breakdown
from attn_zoo.training.loop import Trainer
from attn_zoo.training.updates import DivergedError

__all__ = ["score_on_test"]

_MOST_CORRECT = 100_000  # items of a test; a record with more digits than that is hard to carry about


def score_on_test(task: AbstractTask, trainer: Trainer) -> Score:
    """Score the selected weights on test.

    Args:
        task: gives the test and its floors.
        trainer: has trained.

    Raises:
        DivergedError: the loss on test is not finite.
    """
    feed = trainer.batcher.feed(task.split("test"))
    test = trainer.evaluate(feed, is_test=True)
    numbers, spec, protocol = trainer.numbers, task.spec, trainer.protocol
    if not math.isfinite(test.loss):
        raise DivergedError(numbers.best_step, "test loss")
    assert numbers.best is not None  # there is an evaluation after the last update
    has_correct = spec.metric == "accuracy" and len(test.correct) <= _MOST_CORRECT
    return Score(
        metric=spec.metric,
        value=test.value,
        validation=numbers.best,
        num_examples=len(feed.lengths),
        chance=spec.chance,
        floors=floors_of(task),
        references=references_of(task),
        best_step=numbers.best_step,
        num_steps=numbers.step,
        num_params=sum(part.numel() for part in trainer.model.parameters() if part.requires_grad),
        train_flops=numbers.train_flops,
        train_s=numbers.train_s,
        tokens_per_s=numbers.num_tokens / numbers.train_s,
        curve=tuple(numbers.curve),
        correct="".join("1" if is_right else "0" for is_right in test.correct.tolist()) if has_correct else "",
        breakdown=breakdown(test, feed.groups, spec.group_axes, spec.metric),
        settings=json.loads(json.dumps(asdict(protocol))),
        peak_bytes=numbers.peak_bytes,
        padding_frac=1.0 - numbers.num_tokens / numbers.num_positions,
        pretrain=protocol.pretrain,
        pretrain_s=numbers.pretrain_s,
        pretrain_flops=numbers.pretrain_flops,
    )
