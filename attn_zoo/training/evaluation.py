"""Scores of a model on a split: over all items, and for each group of examples."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attn_zoo.records import LOWER_IS_BETTER
from attn_zoo.tasks import Metric
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.training.batches import Batcher, Feed
from attn_zoo.training.objective import AbstractObjective
from attn_zoo.training.seeding import derive_seed, seed_everything


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a model scores on a split; tensors on the host.

    Args:
        loss: mean over items.
        value: the metric over items.
        losses: float64, of each item.
        correct: bool, of each item.
        counts: int64 `[N]`, items of each example, which follow one another.
    """

    loss: float
    value: float
    losses: Tensor
    correct: Tensor
    counts: Tensor


def precision(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a model runs: bfloat16 under autocast, other types as the model's own."""
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def _value(metric: Metric, losses: Tensor, correct: Tensor) -> float:
    if metric == "bits_per_byte":
        return float(losses.mean()) / math.log(2)
    return float(correct.double().mean())


def is_better(metric: str, one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether (value, loss) `one` is to be preferred to `other`: a better value, or the same and a lower loss."""
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    return (sign * one[0], -one[1]) > (sign * other[0], -other[1])


@torch.no_grad()
def evaluate(
    model: nn.Module,
    objective: AbstractObjective,
    batcher: Batcher,
    feed: Feed,
    *,
    batch_size: int,
    seed: int,
    dtype: str = "float32",
    is_test: bool = False,
) -> Evaluation:
    """Score a model as it is on all examples, in order; the last batch may be smaller and counts like any other.

    Only with `is_test` may predictions cost more than one forward. The model is put into evaluation mode.
    """
    model.eval()
    seed_everything(derive_seed(seed, "evaluation"))  # for variants that draw at evaluation too
    losses, correct, counts = [], [], []
    for rows in torch.split(torch.arange(len(feed.lengths)), batch_size):
        batch = batcher.batch(feed, rows)
        with precision(dtype, batcher.device):
            outputs = objective.outputs(model, batch)
            predicted = objective.predictions(model, outputs, batch, is_test=is_test)
        is_item = batch.labels != IGNORED_LABEL
        losses.append(objective.losses(outputs, batch).double()[is_item])
        correct.append((predicted == batch.labels)[is_item])
        counts.append(is_item.view(len(rows), -1).sum(1))
    all_losses, all_correct = torch.cat(losses).cpu(), torch.cat(correct).cpu()
    if not len(all_losses):
        raise ValueError("evaluate: no label of the split is scored")
    value = _value(batcher.spec.metric, all_losses, all_correct)
    return Evaluation(float(all_losses.mean()), value, all_losses, all_correct, torch.cat(counts).cpu())


def breakdown(
    scored: Evaluation, groups: Tensor | None, axes: tuple[str, ...], metric: Metric
) -> tuple[dict[str, float], ...]:
    """Return the metric for each combination of the values of `groups` `[N, A]`, in order of the values."""
    if groups is None:
        return ()
    values, group_of = torch.unique(groups.double(), dim=0, return_inverse=True)
    group_of = group_of.repeat_interleave(scored.counts)
    rows = []
    for index, combination in enumerate(values.tolist()):
        inside = group_of == index
        if bool(inside.any()):
            value = _value(metric, scored.losses[inside], scored.correct[inside])
            # float32 holds decimal fractions such as 0.1 to seven digits; what is shown are those.
            places = {axis: float(f"{place:.7g}") for axis, place in zip(axes, combination, strict=True)}
            rows.append({**places, "value": value, "num_items": float(inside.sum())})
    return tuple(rows)
