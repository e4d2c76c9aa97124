"""What is trained and how it is scored, by kind of task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attn_zoo.errors import UnsupportedError
from attn_zoo.model import Classifier, ModelConfig
from attn_zoo.tasks import TaskKind, TaskSpec
from attn_zoo.training.batches import Batch

__all__ = ["AbstractObjective", "ClassificationObjective", "objective_for"]


class AbstractObjective(ABC):
    """Build the model of one kind of task, and say how good its outputs are.

    Args:
        spec: of the task.
    """

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec

    @abstractmethod
    def build_model(self, config: ModelConfig) -> nn.Module:
        """Return the model."""

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return what the model says about a batch."""

    @abstractmethod
    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each scored item; training minimises their mean."""

    @abstractmethod
    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return for each scored item, bool, whether it is right; the score is their mean."""


@final
class ClassificationObjective(AbstractObjective):
    """Cross-entropy on one class per example; accuracy."""

    def build_model(self, config: ModelConfig) -> nn.Module:
        return Classifier(config, self.spec.num_classes)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(batch.tokens, batch.key_padding_mask)
        return logits

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(outputs.float(), batch.labels, reduction="none")

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.argmax(-1) == batch.labels


_OBJECTIVES: dict[TaskKind, type[AbstractObjective]] = {"classification": ClassificationObjective}


def objective_for(spec: TaskSpec) -> AbstractObjective:
    """Return the objective for a task.

    Raises:
        UnsupportedError: tasks of this kind cannot be trained yet.
    """
    if spec.kind not in _OBJECTIVES:
        raise UnsupportedError("kind", f"training knows {', '.join(_OBJECTIVES)}; the task is of kind {spec.kind}")
    return _OBJECTIVES[spec.kind](spec)
