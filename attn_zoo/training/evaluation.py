"""Scores of a model on a split: over all items, and for each group of examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from attn_zoo.records import LOWER_IS_BETTER
from attn_zoo.tasks import Metric
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.training.batches import Batch, Batcher, Feed
from attn_zoo.training.objective import AbstractObjective
from attn_zoo.training.ranks import ALONE, Ranks
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

    @property
    def num_effective(self) -> float:
        """Examples of equally many items that would settle the value as well (`records.Score`)."""
        counts = self.counts.double()
        return float(counts.sum() ** 2 / (counts**2).sum())


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


Scored = tuple[Tensor, ...]
"""Of each label of a batch: its loss (float64), whether the prediction is right, and whether it counts."""


@torch.no_grad()
def score_batch(
    model: nn.Module, objective: AbstractObjective, dtype: str, batch: Batch, *, is_test: bool = False
) -> Scored:
    """Score a batch without waiting for the device."""
    with precision(dtype, batch.tokens.device):
        outputs = objective.outputs(model, batch)
        predicted = objective.predictions(model, outputs, batch, is_test=is_test)
    return objective.losses(outputs, batch).double(), predicted == batch.labels, batch.labels != IGNORED_LABEL


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
    score_full: Callable[[Batch], Scored] | None = None,
    ranks: Ranks = ALONE,
    is_bucketed: bool = False,
) -> Evaluation:
    """Score a model as it is on all examples; the last batch may be smaller and counts like any other.

    Batches follow the order of the split or, where `is_bucketed`, that of the lengths. What depends on the padding of
    its batch (Nyström's landmarks) would else be scored under another than it was trained with. Of several ranks each
    scores every N-th batch, and all return the whole.

    Only with `is_test` may predictions cost more than one forward. The model is put into evaluation mode. `score_full`
    does for batches of `batch_size` examples what `score_batch` does, such as compiled.
    """
    model.eval()
    seed_everything(derive_seed(seed, "evaluation"))  # for variants that draw at evaluation too
    losses, correct, counts = [], [], []
    parts: list[Scored] = []
    order = torch.sort(feed.costs, stable=True).indices if is_bucketed else torch.arange(len(feed.lengths))
    batches = torch.split(order, batch_size)
    for rows in batches[ranks.rank :: ranks.size]:
        batch = batcher.batch(feed, rows)
        if score_full is not None and len(rows) == batch_size:
            parts.append(score_full(batch))
        else:
            parts.append(score_batch(model, objective, dtype, batch, is_test=is_test))
    for batch_losses, batch_correct, is_item in parts:  # the device has all of its work by now
        losses.append(batch_losses[is_item])
        correct.append(batch_correct[is_item])
        counts.append(is_item.view(len(is_item), -1).sum(1))
    all_losses = ranks.joined(losses, len(batches), torch.float64)
    all_correct = ranks.joined(correct, len(batches), torch.bool)
    all_counts = ranks.joined(counts, len(batches), torch.int64)
    if not len(all_losses):
        raise ValueError("evaluate: no label of the split is scored")
    places = torch.sort(order.repeat_interleave(all_counts), stable=True).indices  # back in the order of the split
    all_losses, all_correct, all_counts = all_losses[places], all_correct[places], all_counts[torch.argsort(order)]
    value = _value(batcher.spec.metric, all_losses, all_correct)
    return Evaluation(float(all_losses.mean()), value, all_losses, all_correct, all_counts)


NO_FLOORS: Mapping[int, Mapping[str, float]] = MappingProxyType({})


def breakdown(
    scored: Evaluation,
    groups: Tensor | None,
    axes: tuple[str, ...],
    metric: Metric,
    floors: Mapping[int, Mapping[str, float]] = NO_FLOORS,
) -> tuple[dict[str, float], ...]:
    """Return the metric for each combination of the values of `groups` `[N, A]`, in order of the values.

    Args:
        scored: of all examples.
        groups: properties of each.
        axes: their names.
        metric: of the task.
        floors: of each combination, by its place in that order; the best goes beside the score.
    """
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
            row = {**places, "value": value, "num_items": float(inside.sum())}
            if known := floors.get(index, {}).values():
                row["floor"] = min(known) if metric in LOWER_IS_BETTER else max(known)
            rows.append(row)
    return tuple(rows)
