"""What is trained and how it is scored, by kind of task.

An item is what a label belongs to: an example, or a position whose label is not `IGNORED_LABEL`. Loss and score are
means over items. Outputs, losses and predictions are shaped like the labels, so that shapes do not depend on data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attn_zoo.errors import UnsupportedError
from attn_zoo.model import Classifier, LanguageModel, ModelConfig, Retriever, Seq2Seq, TokenClassifier
from attn_zoo.model.stacks import Encoder
from attn_zoo.tasks import TaskKind, TaskSpec
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.training.batches import Batch


class AbstractObjective(ABC):
    """Build the model of one kind of task, and say how good its outputs are.

    Args:
        spec: of the task.
        is_causal: positions see the past only; for kinds that leave it open.

    Class attributes:
        has_only_items: every label is scored.
    """

    has_only_items: ClassVar[bool] = False

    def __init__(self, spec: TaskSpec, *, is_causal: bool = False) -> None:
        self.spec = spec
        self.is_causal = is_causal

    @abstractmethod
    def build_model(self, config: ModelConfig) -> nn.Module:
        """Return the model."""

    def encoder(self, model: nn.Module) -> Encoder:
        """Return the part of the model that pretraining shares.

        Raises:
            UnsupportedError: there is none.
        """
        if isinstance(model, Classifier | Retriever | TokenClassifier):
            return model.encoder
        raise UnsupportedError("pretrain", f"a model for {self.spec.kind} has no encoder over one input to pretrain")

    def prepare(self, batch: Batch, step: int) -> Batch:  # noqa: ARG002 - for objectives that draw
        """Return the batch as update `step` uses it."""
        return batch

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return logits, `[..., C]` for labels `[...]`."""
        logits: Tensor
        if batch.other_tokens is None:
            logits = model(batch.tokens, batch.key_padding_mask)
        else:
            logits = model(batch.tokens, batch.other_tokens, batch.key_padding_mask, batch.other_padding_mask)
        return logits

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy for each label; 0 for those that are not scored."""
        dtype = torch.promote_types(outputs.dtype, torch.float32)  # half precisions are widened, float64 is kept
        logits = outputs.to(dtype).flatten(0, -2)
        losses = cross_entropy(logits, batch.labels.flatten(), reduction="none", ignore_index=IGNORED_LABEL)
        return losses.view_as(batch.labels)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean over items, which training minimises; without waiting for the device."""
        losses = self.losses(outputs, batch)
        if self.has_only_items:
            return losses.mean()
        return losses.sum() / (batch.labels != IGNORED_LABEL).sum().clamp(min=1)

    def predictions(self, model: nn.Module, outputs: Tensor, batch: Batch, *, is_test: bool) -> Tensor:  # noqa: ARG002
        """Return the predicted labels. Only a test may be worth more than one forward."""
        return outputs.argmax(-1)


@final
class ClassificationObjective(AbstractObjective):
    """One class per example."""

    has_only_items: ClassVar[bool] = True

    def build_model(self, config: ModelConfig) -> nn.Module:
        return Classifier(config, self.spec.num_classes)


@final
class PairObjective(AbstractObjective):
    """One class per pair of sequences."""

    has_only_items: ClassVar[bool] = True

    def build_model(self, config: ModelConfig) -> nn.Module:
        return Retriever(config, self.spec.num_classes)


@final
class TokenObjective(AbstractObjective):
    """One class for each position that has a label."""

    def build_model(self, config: ModelConfig) -> nn.Module:
        return TokenClassifier(config, self.spec.num_classes, is_causal=self.is_causal)


@final
class LanguageObjective(AbstractObjective):
    """The next token."""

    def build_model(self, config: ModelConfig) -> nn.Module:
        return LanguageModel(config)


@final
class Seq2SeqObjective(AbstractObjective):
    """The next target token, given the source and the target so far.

    The decoder reads the true target in training and validation. In a test it reads what it wrote itself, greedily,
    from the target's first token on; predictions and labels are compared position by position.
    """

    def build_model(self, config: ModelConfig) -> nn.Module:
        return Seq2Seq(config)

    def predictions(self, model: nn.Module, outputs: Tensor, batch: Batch, *, is_test: bool) -> Tensor:
        if not is_test:
            return outputs.argmax(-1)
        assert isinstance(model, Seq2Seq)
        assert batch.other_tokens is not None
        return model.generate(
            batch.tokens,
            batch.labels.shape[1],
            start_token=batch.other_tokens[:, 0],
            source_padding_mask=batch.key_padding_mask,
        )


_OBJECTIVES: dict[TaskKind, type[AbstractObjective]] = {
    "classification": ClassificationObjective,
    "pair": PairObjective,
    "token_classification": TokenObjective,
    "causal_lm": LanguageObjective,
    "seq2seq": Seq2SeqObjective,
}


def objective_for(spec: TaskSpec, *, is_causal: bool = False) -> AbstractObjective:
    """Return the objective for a task; `is_causal` where its kind leaves the direction open."""
    return _OBJECTIVES[spec.kind](spec, is_causal=is_causal)
