"""One training run: a cell in, a score out.

Self-pretraining comes first where the protocol asks for it: before it sees a label, a model learns to denoise the
task's own training inputs (Amos, Berant, Gupta 2024, "Never Train from Scratch", arXiv 2310.02980: no other data, the
same model, then fine-tuning from the weights). `"masked"` hides a share of the tokens and asks for them; `"causal"`
asks for each next token, with attention that sees the past only. The token head and the embedding of the hidden token
are thrown away afterwards. Ours differs from the paper in two points: the loss is the cross-entropy of tokens for
images too (the paper's is L1 on grey levels), and the weights are those of the last step, since no example beyond train
is looked at.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn

from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.kernels.trace import recording
from attn_zoo.model import Denoiser, ModelConfig
from attn_zoo.records import Cell, Score, Status
from attn_zoo.registry import tasks
from attn_zoo.tasks import AbstractTask, TaskSpec
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.tasks.floors.lookup_rules import floors_of, floors_of_groups, references_of
from attn_zoo.tasks.promises import checked_split
from attn_zoo.training.batches import Batch, Batcher, Feed, send
from attn_zoo.training.checkpoint import Numbers
from attn_zoo.training.evaluation import Evaluation, breakdown
from attn_zoo.training.loop import Trainer, make_trainer
from attn_zoo.training.objective import AbstractObjective
from attn_zoo.training.protocol import Protocol, protocol_of, weight_dtype
from attn_zoo.training.ranks import ALONE, Ranks, joined_ranks
from attn_zoo.training.seeding import derive_seed
from attn_zoo.training.updates import DivergedError, Updater
from attn_zoo.training.weights import save_weights

_MOST_CORRECT = 100_000  # items of a test; a longer string would bloat the record

PhaseName = Literal["pretrain", "train"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a run.

    Args:
        step: updates done in this phase.
        num_steps: updates in this phase.
        validation: latest validation value, or None before the first.
        phase: `"pretrain"`, which comes first where the protocol asks for it, or `"train"`.
    """

    step: int
    num_steps: int
    validation: float | None = None
    phase: PhaseName = "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingResult:
    """Outcome of a run.

    Args:
        status: `ok`, `unsupported` or `diverged`.
        reason: one sentence for every status but `ok`.
        score: for `ok`, of the first rank.
        kernels: paths that ran, in order of first use.
        checks: names of what was checked of a compiled model.
        num_params: trainable parameters, where a model was built.
    """

    status: Status
    reason: str = ""
    score: Score | None = None
    kernels: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    num_params: int | None = None


def run_training(
    cell: Cell,
    *,
    data_dir: Path | None = None,
    checkpoint_dir: Path | None = None,
    weights_path: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    before_training: Callable[[nn.Module, bool], object] | None = None,
    after_evaluation: Callable[[str, Mapping[str, float]], object] | None = None,
) -> TrainingResult:
    """Train and score the variant of an accuracy cell.

    Weights are selected on validation; test is scored once, with the selected weights.

    A cell with `data_parallel` = N is trained by N processes that `torchrun` starts and that all call this: see
    `attn_zoo.training.ranks`. The first alone writes, checks and gives a score.

    Args:
        cell: of kind `"accuracy"`, with task, level and protocol.
        data_dir: where tasks find local data.
        checkpoint_dir: where the run saves its state at every evaluation and continues from; None saves nothing. The
            files are removed when the run has ended.
        weights_path: where to write the selected weights; None writes none.
        progress: called after every update.
        before_training: called with each model that is about to train, and whether its batches are padded.
        after_evaluation: called with the phase and its newest entry of the curve.

    Raises:
        UnknownNameError: variant, task, level or protocol does not exist.
        ConfigError: the cell is not of kind accuracy, an option or override is wrong, or this is not one of as many
            processes as it asks for.
        GateError: the compiled model has other gradients than the model as written.
    """
    if cell.kind != "accuracy" or cell.task is None or cell.level is None or cell.protocol is None:
        raise ConfigError(cell.id, [("", "expected a cell of kind accuracy with task, level and protocol")])
    task_class: type[AbstractTask] = tasks[cell.task]
    task = task_class(cell.level, data_dir=data_dir)
    protocol = protocol_of(cell)
    if protocol.compile is None:
        protocol = replace(protocol, compile=torch.device(cell.device).type == "cuda")
    kernels: list[str] = []
    gc.collect()  # models refer to themselves: one that this process trained before is no part of what this one takes
    try:
        with recording() as kernels, joined_ranks(cell) as ranks:
            hooks = _Hooks(progress, before_training, after_evaluation)
            if not ranks.is_first:
                hooks, weights_path = _Hooks(progress), None
            return _train(cell, task, protocol, kernels, checkpoint_dir, weights_path, hooks, ranks)
    except UnsupportedError as error:
        return TrainingResult(status="unsupported", reason=error.reason, kernels=tuple(kernels))


@dataclass(frozen=True, slots=True)
class _Hooks:
    """What the caller wants to hear of; see `run_training`."""

    progress: Callable[[Progress], None] | None
    before_training: Callable[[nn.Module, bool], object] | None = None
    after_evaluation: Callable[[str, Mapping[str, float]], object] | None = None


def _train(
    cell: Cell,
    task: AbstractTask,
    protocol: Protocol,
    kernels: list[str],
    checkpoint_dir: Path | None,
    weights_path: Path | None,
    hooks: _Hooks,
    ranks: Ranks,
) -> TrainingResult:
    trainer, config = make_trainer(cell, task.spec, protocol, ranks)
    objective, batcher, model = trainer.objective, trainer.batcher, trainer.model
    pretrainer = None
    if protocol.pretrain:
        pretrainer = make_pretrainer(config, batcher, protocol, seed=cell.seed, dtype=cell.dtype, ranks=ranks)
        pretrainer.check(objective.encoder(model))
    if hooks.before_training is not None:
        hooks.before_training(model, batcher.has_mask)
        if pretrainer is not None:
            hooks.before_training(pretrainer.model, batcher.has_mask)

    identity = _identity(cell, task, protocol)

    def path(name: PhaseName) -> Path | None:
        return None if checkpoint_dir is None else checkpoint_dir / f"{cell.key}.{name}.safetensors"

    def phase(updater: Updater, name: PhaseName) -> _Phase:
        return _Phase(updater, name, path(name), f"{identity}/{name}", kernels, hooks)

    now = phase(trainer, "train")
    num_params = _num_params(model)
    try:
        has_begun = now.resume()
        train = batcher.feed(checked_split(task, "train"))
        if pretrainer is not None:
            if not has_begun:
                before = phase(pretrainer, "pretrain")
                before.resume()
                pretrainer.pretrain(train, objective.encoder(model), before.after_evaluation, before.after_step)
                trainer.numbers.take_pretraining(pretrainer.numbers)
                del before
            del pretrainer
            gc.collect()  # it refers to itself; its model, optimiser and graphs are no part of what training takes
        trainer.train(train, batcher.feed(checked_split(task, "validation")), now.after_evaluation, now.after_step)
        score = _score_on_test(task, trainer)
    except DivergedError as error:
        result = TrainingResult(status="diverged", reason=str(error))
    else:
        if weights_path is not None:
            save_weights(weights_path, cell, config, model)
        result = TrainingResult(status="ok", score=score)
    for name in get_args(PhaseName):
        if (saved := path(name)) is not None and ranks.is_first:
            saved.unlink(missing_ok=True)
    return replace(result, kernels=tuple(kernels), checks=tuple(trainer.numbers.checks), num_params=num_params)


def _score_on_test(task: AbstractTask, trainer: Trainer) -> Score | None:
    """Score the selected weights on test, which nothing else reads; a loss that is not finite has diverged.

    Of several ranks the first gives the score.
    """
    feed = trainer.batcher.feed(checked_split(task, "test"))
    test = trainer.evaluate(feed, is_test=True)
    numbers = trainer.numbers
    if not math.isfinite(test.loss):
        raise DivergedError(numbers.best_step, "test loss")
    if not trainer.ranks.is_first:
        return None  # floors take time
    assert numbers.best is not None  # there is an evaluation after the last update
    return score_of(
        test,
        feed,
        trainer,
        floors_of_groups(task),
        validation=numbers.best,
        floors=floors_of(task),
        references=references_of(task),
        best_step=numbers.best_step,
        num_steps=numbers.step,
        train_flops=numbers.train_flops,
        train_s=numbers.train_s,
        compile_s=numbers.compile_s,
        eval_s=numbers.eval_s,
        eval_compile_s=numbers.eval_compile_s,
        tokens_per_s=numbers.tokens_per_s,
        curve=tuple(numbers.curve),
        peak_bytes=numbers.peak_bytes,
        padding_frac=1.0 - numbers.num_tokens / numbers.num_positions,
        pretrain=trainer.protocol.pretrain,
        pretrain_s=numbers.pretrain_s,
        pretrain_flops=numbers.pretrain_flops,
    )


def score_of(
    test: Evaluation, feed: Feed, trainer: Trainer, group_floors: Mapping[int, Mapping[str, float]], **measured: Any
) -> Score:
    """Return the score of a model for what it gave on a test set; `measured` are fields that only its caller knows."""
    spec = trainer.objective.spec
    has_correct = spec.metric == "accuracy" and len(test.correct) <= _MOST_CORRECT
    return Score(
        metric=spec.metric,
        value=test.value,
        num_examples=len(feed.lengths),
        num_effective=test.num_effective,
        chance=spec.chance,
        num_params=_num_params(trainer.model),
        correct="".join("1" if is_right else "0" for is_right in test.correct.tolist()) if has_correct else "",
        breakdown=breakdown(test, feed.groups, spec.group_axes, spec.metric, group_floors),
        settings=json.loads(json.dumps(asdict(trainer.protocol))),
        **measured,
    )


def _num_params(model: nn.Module) -> int:
    return sum(part.numel() for part in model.parameters() if part.requires_grad)


@dataclass(frozen=True, slots=True)
class _Phase:
    """A part of a run with a checkpoint of its own."""

    updater: Updater
    name: PhaseName
    path: Path | None
    identity: str
    kernels: list[str]
    hooks: _Hooks

    def resume(self) -> bool:
        """Continue from the checkpoint; return whether there is one."""
        if self.path is None or not self.updater.resume(self.path, self.identity):
            return False
        known = set(self.kernels)
        self.kernels.extend(kernel for kernel in self.updater.numbers.kernels if kernel not in known)
        return True

    def after_evaluation(self, numbers: Numbers) -> None:
        numbers.kernels = list(self.kernels)
        if self.path is not None:
            self.updater.save(self.path, self.identity)
        if self.hooks.after_evaluation is not None:
            self.hooks.after_evaluation(self.name, numbers.curve[-1])

    def after_step(self, step: int) -> None:
        if self.hooks.progress is not None:
            curve = self.updater.numbers.curve
            validation = curve[-1].get("validation") if curve else None
            self.hooks.progress(
                Progress(phase=self.name, step=step, num_steps=self.updater.num_steps, validation=validation)
            )


def _identity(cell: Cell, task: AbstractTask, protocol: Protocol) -> str:
    """Return a hash of everything that must be equal for a run to be continued."""
    data = task.digest(task.level, data_dir=task.data_dir)
    text = json.dumps([cell.key, asdict(protocol), data, torch.__version__], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


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
        """Return the batch with tokens hidden, and with the labels of both inputs side by side, as `outputs` are."""
        task = self._next if self.is_causal else self._hidden
        tokens, labels = task(batch.tokens, batch.key_padding_mask, 2 * step)
        if batch.other_tokens is None:
            return replace(batch, tokens=tokens, labels=labels)
        other_tokens, other_labels = task(batch.other_tokens, batch.other_padding_mask, 2 * step + 1)
        labels = torch.cat([labels, other_labels], dim=1)
        return replace(batch, tokens=tokens, labels=labels, other_tokens=other_tokens)

    def _hidden(self, tokens: Tensor, padding: Tensor | None, draw: int) -> tuple[Tensor, Tensor]:
        # Drawn on the host and position by position, so that every machine hides the same tokens: how wide a batch is
        # padded differs between them.
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "hidden", draw))
        is_hidden = send(torch.rand(tokens.shape[::-1], generator=generator).mT < self.mask_prob, tokens.device)
        if padding is not None:
            is_hidden &= ~padding
        return tokens.masked_fill(is_hidden, self.spec.vocab_size), tokens.masked_fill(~is_hidden, IGNORED_LABEL)

    def _next(self, tokens: Tensor, padding: Tensor | None, draw: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        labels = torch.full_like(tokens, IGNORED_LABEL)
        labels[:, :-1] = tokens[:, 1:]
        if padding is not None:
            labels[:, :-1].masked_fill_(padding[:, 1:], IGNORED_LABEL)
        return tokens, labels

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return logits `[B, positions of both inputs, V]`."""
        return torch.cat([model(tokens, padding) for tokens, padding in _sequences(batch)], dim=1)


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
        """Make the updates that are left, then give the weights to `encoder`; labels are not looked at.

        Callbacks as in `make_updates`.

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


def make_pretrainer(
    config: ModelConfig, batcher: Batcher, protocol: Protocol, *, seed: int, dtype: str, ranks: Ranks = ALONE
) -> Pretrainer:
    """Return what pretrains a model under its protocol, from streams of random numbers of its own.

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
    steps = protocol.pretrain_steps
    return Pretrainer(model, objective, batcher, protocol, num_steps=steps, seed=seed, dtype=dtype, ranks=ranks)
