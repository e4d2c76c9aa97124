"""One training run: a cell in, a score out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.kernels.trace import recording
from attn_zoo.metadata import Position, Request
from attn_zoo.records import Cell, Score, Status
from attn_zoo.registry import tasks, variants
from attn_zoo.tasks import AbstractTask
from attn_zoo.training.batches import Batcher
from attn_zoo.training.checkpoint import Numbers
from attn_zoo.training.loop import DivergedError, Trainer
from attn_zoo.training.objective import objective_for
from attn_zoo.training.protocol import Protocol, resolve_protocol
from attn_zoo.training.seeding import derive_seed, seed_everything

__all__ = ["Progress", "TrainingResult", "run_training"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}
"""Type of the weights by the cell's dtype: bfloat16 trains under autocast with float32 weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is.

    Args:
        step: updates done.
        num_steps: updates in all.
        validation: latest validation value, or None before the first.
    """

    step: int
    num_steps: int
    validation: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingResult:
    """What became of a run.

    Args:
        status: `ok`, `unsupported` or `diverged`.
        reason: one sentence for every status but `ok`.
        score: for `ok`.
        kernels: paths that ran, in order of first use.
        num_params: trainable parameters, where a model was built.
    """

    status: Status
    reason: str = ""
    score: Score | None = None
    kernels: tuple[str, ...] = ()
    num_params: int | None = None


def run_training(
    cell: Cell,
    *,
    data_dir: Path | None = None,
    checkpoint_dir: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> TrainingResult:
    """Train and score the variant of an accuracy cell.

    Weights are selected on validation; test is scored once, with the selected weights.

    Args:
        cell: of kind `"accuracy"`, with task, level and protocol.
        data_dir: where tasks find local data.
        checkpoint_dir: where the run saves its state at every evaluation and continues from; None saves nothing. The
            file is removed when the run has ended.
        progress: called after every update.

    Raises:
        UnknownNameError: variant, task, level or protocol does not exist.
        ConfigError: the cell is not of kind accuracy, or an option or override is wrong.
    """
    if cell.kind != "accuracy" or cell.task is None or cell.level is None or cell.protocol is None:
        raise ConfigError(cell.id, [("", "expected a cell of kind accuracy with task, level and protocol")])
    task_class: type[AbstractTask] = tasks[cell.task]
    task = task_class(cell.level, data_dir=data_dir)
    protocol = resolve_protocol(cell.protocol, task_settings=task.settings.get(cell.protocol), overrides=cell.overrides)
    kernels: list[str] = []
    try:
        with recording() as kernels:
            return _train(cell, task, protocol, kernels, checkpoint_dir, progress)
    except UnsupportedError as error:
        return TrainingResult(status="unsupported", reason=error.reason, kernels=tuple(kernels))


def _require(cell: Cell, task: AbstractTask, protocol: Protocol) -> None:
    """Raise `UnsupportedError` for what the variant refuses, before any data is made."""
    inside: Position = "none"
    if protocol.position == "rotary" or protocol.position == "alibi":
        inside = protocol.position
    variants[cell.variant].capabilities.require(
        cell.variant,
        Request(
            has_key_padding_mask=task.spec.has_padding,
            dropout_p=protocol.dropout_p,
            position=inside,
            dtype=cell.dtype,
            device=cell.device,
        ),
    )
    if cell.dtype not in _DTYPES:
        raise UnsupportedError("dtypes", f"training runs in {', '.join(_DTYPES)}; {cell.dtype} needs loss scaling")


def _train(
    cell: Cell,
    task: AbstractTask,
    protocol: Protocol,
    kernels: list[str],
    checkpoint_dir: Path | None,
    progress: Callable[[Progress], None] | None,
) -> TrainingResult:
    objective = objective_for(task.spec)
    _require(cell, task, protocol)
    batcher = Batcher(task.spec, protocol, variants[cell.variant].capabilities, cell.device)
    config = protocol.model_config(
        variant=cell.variant,
        options=cell.options,
        vocab_size=task.spec.vocab_size,
        max_seq_len=batcher.max_seq_len,
        seed=derive_seed(cell.seed, "init"),
    )
    seed_everything(config.seed)  # for variants that draw at construction without a generator of their own
    model = objective.build_model(config).to(cell.device, _DTYPES[cell.dtype])
    num_params = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    trainer = Trainer(model, objective, batcher, protocol, seed=cell.seed, dtype=cell.dtype)

    path = None if checkpoint_dir is None else checkpoint_dir / f"{cell.key}.safetensors"
    identity = _identity(cell, task, protocol)
    if path is not None:
        trainer.resume(path, identity)
        kernels.extend(trainer.numbers.kernels)

    def after_evaluation(numbers: Numbers) -> None:
        numbers.kernels = list(kernels)
        if path is not None:
            trainer.save(path, identity)

    def after_step(step: int) -> None:
        if progress is not None:
            curve = trainer.numbers.curve
            validation = curve[-1]["validation"] if curve else None
            progress(Progress(step=step, num_steps=protocol.num_steps, validation=validation))

    try:
        trainer.train(
            batcher.feed(task.split("train")), batcher.feed(task.split("validation")), after_evaluation, after_step
        )
    except DivergedError as error:
        result = TrainingResult(status="diverged", reason=str(error), kernels=tuple(kernels), num_params=num_params)
    else:
        score = _score(task, trainer, num_params)
        result = TrainingResult(status="ok", score=score, kernels=tuple(kernels), num_params=num_params)
    if path is not None:
        path.unlink(missing_ok=True)
    return result


def _identity(cell: Cell, task: AbstractTask, protocol: Protocol) -> str:
    """Return a hash of everything that must be equal for a run to be continued."""
    data = task.digest(task.level, data_dir=task.data_dir)
    text = json.dumps([cell.key, asdict(protocol), data, torch.__version__], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _score(task: AbstractTask, trainer: Trainer, num_params: int) -> Score:
    """Score test: the only place that reads it."""
    test = trainer.evaluate(trainer.batcher.feed(task.split("test")))
    numbers = trainer.numbers
    return Score(
        metric=task.spec.metric,
        value=test.value,
        validation=numbers.best,
        num_examples=len(test.correct),
        chance=task.spec.chance,
        floors=task.floors(),
        best_step=numbers.best_step,
        num_steps=numbers.step,
        num_params=num_params,
        train_flops=numbers.train_flops,
        train_s=numbers.train_s,
        tokens_per_s=numbers.num_tokens / numbers.train_s,
        curve=tuple(numbers.curve),
        correct="".join("1" if is_right else "0" for is_right in test.correct.tolist()),
    )
