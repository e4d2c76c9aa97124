"""Self-pretraining: before it sees a label, a model learns to denoise the task's own training inputs.

Amos, Berant, Gupta 2024, "Never Train from Scratch", arXiv 2310.02980: no other data, the same model, then fine-tuning
from the weights. `"masked"` hides a share of the tokens and asks for them; `"causal"` asks for each next token, with
attention that sees the past only. The token head and the embedding of the hidden token are thrown away afterwards.

Ours differs from the paper in two points: the loss is the cross-entropy of tokens for images too (the paper's is L1 on
grey levels), and the weights are those of the last step, since no example beyond train is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from attn_zoo.errors import UnsupportedError
from attn_zoo.model import Denoiser, ModelConfig
from attn_zoo.tasks import TaskSpec
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.training.batches import Batch, Batcher, Feed, send
from attn_zoo.training.checkpoint import Numbers
from attn_zoo.training.objective import AbstractObjective
from attn_zoo.training.protocol import Protocol
from attn_zoo.training.requirements import weight_dtype
from attn_zoo.training.seeding import derive_seed
from attn_zoo.training.updates import DivergedError, Updater


@final
class DenoisingObjective(AbstractObjective):
    """The tokens that are hidden or, causally, the next ones; of both inputs where there are two.

    Args:
        spec: of the task.
        is_causal: ask for the next token instead of hidden ones.
        mask_prob: share of the tokens that are hidden; padding never is.
        has_cls: the model's encoder puts a learned vector in front.
        seed: of what is hidden.
    """

    def __init__(self, spec: TaskSpec, *, is_causal: bool, mask_prob: float, has_cls: bool, seed: int) -> None:
        super().__init__(spec, is_causal=is_causal)
        self.mask_prob, self.has_cls, self.seed = mask_prob, has_cls, seed

    def build_model(self, config: ModelConfig) -> Denoiser:
        return Denoiser(config, is_causal=self.is_causal, has_cls=self.has_cls)

    def prepare(self, batch: Batch, step: int) -> Batch:
        """Return the batch with tokens hidden, and with the labels of all sequences in one row, as `outputs` are."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "hidden", step))
        task = self._next if self.is_causal else self._hidden
        tokens, labels = task(batch.tokens, batch.key_padding_mask, generator)
        if batch.other_tokens is None:
            return replace(batch, tokens=tokens, labels=labels.flatten())
        other_tokens, other_labels = task(batch.other_tokens, batch.other_padding_mask, generator)
        labels = torch.cat([labels.flatten(), other_labels.flatten()])
        return replace(batch, tokens=tokens, labels=labels, other_tokens=other_tokens)

    def _hidden(self, tokens: Tensor, padding: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        # Drawn on the host, so that every machine hides the same tokens.
        is_hidden = send(torch.rand(tokens.shape, generator=generator) < self.mask_prob, tokens.device)
        if padding is not None:
            is_hidden &= ~padding
        return tokens.masked_fill(is_hidden, self.spec.vocab_size), tokens.masked_fill(~is_hidden, IGNORED_LABEL)

    def _next(self, tokens: Tensor, padding: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        labels = torch.full_like(tokens, IGNORED_LABEL)
        labels[:, :-1] = tokens[:, 1:]
        if padding is not None:
            labels[:, :-1].masked_fill_(padding[:, 1:], IGNORED_LABEL)
        return tokens, labels

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return logits `[positions of all sequences, V]`."""
        return torch.cat([model(tokens, padding).flatten(0, 1) for tokens, padding in _sequences(batch)])


def _sequences(batch: Batch) -> Iterator[tuple[Tensor, Tensor | None]]:
    yield batch.tokens, batch.key_padding_mask
    if batch.other_tokens is not None:
        yield batch.other_tokens, batch.other_padding_mask


class Pretrainer(Updater):
    """Pretrain the encoder of a model; arguments as in `Updater`, the model being a `Denoiser`."""

    model: Denoiser

    def check(self, encoder: nn.Module) -> None:
        """Raise `UnsupportedError` unless `encoder` can take the weights."""
        given = {name: tuple(tensor.shape) for name, tensor in self.model.encoder_weights().items()}
        taken = {name: tuple(tensor.shape) for name, tensor in encoder.state_dict().items()}
        if given != taken:
            wrong = sorted(name for name in given.keys() | taken.keys() if given.get(name) != taken.get(name))
            form = "causal" if self.objective.is_causal else "bidirectional"
            raise UnsupportedError("pretrain", f"pretrain: the {form} form has other weights: {', '.join(wrong[:3])}")

    def pretrain(
        self,
        train: Feed,
        encoder: nn.Module,
        after_evaluation: Callable[[Numbers], None] | None = None,
        after_step: Callable[[int], None] | None = None,
    ) -> None:
        """Make the updates that are left, then give the weights to `encoder`.

        Args:
            train: the task's own training examples; their labels are not looked at.
            encoder: of the model to be trained next.
            after_evaluation: called when the state is worth saving.
            after_step: called with the number of updates done.

        Raises:
            DivergedError: loss or gradient is not finite.
        """
        try:
            self.make_updates(train, self._record, after_evaluation, after_step)
        except DivergedError as error:
            raise DivergedError(error.step, "pretraining: loss or gradient norm") from None
        encoder.load_state_dict(self.model.encoder_weights())

    def _record(self, train_loss: float) -> None:
        self.numbers.curve.append({"step": float(self.numbers.step), "train_loss": train_loss})


def make_pretrainer(config: ModelConfig, batcher: Batcher, protocol: Protocol, *, seed: int, dtype: str) -> Pretrainer:
    """Return what pretrains a model under its protocol.

    Args:
        config: of the model.
        batcher: of the run.
        protocol: of the run, with `pretrain` set.
        seed: of the run; pretraining draws from streams of its own.
        dtype: of the cell.

    Raises:
        UnsupportedError: the variant has no such form.
    """
    seed = derive_seed(seed, "pretrain")
    objective = DenoisingObjective(
        batcher.spec,
        is_causal=protocol.pretrain == "causal",
        mask_prob=protocol.pretrain_mask_prob,
        has_cls=batcher.num_extra > 0,
        seed=seed,
    )
    model = objective.build_model(config).to(batcher.device, weight_dtype(dtype))
    return Pretrainer(model, objective, batcher, protocol, num_steps=protocol.pretrain_steps, seed=seed, dtype=dtype)
