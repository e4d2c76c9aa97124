"""A task that a tiny model learns in seconds: the class of a sequence is its first token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import torch

from attn_zoo.records import Cell
from attn_zoo.registry import register_task, tasks
from attn_zoo.tasks import AbstractTask, Example, Split, SplitName, TaskKind, TaskSpec

__all__ = ["ToyLevel", "ToyTask", "cell", "toy_task"]

TINY = {
    "num_layers": 1,
    "embed_dim": 16,
    "num_heads": 2,
    "ffn_dim": 16,
    "num_steps": 40,
    "warmup_steps": 5,
    "eval_every": 10,
    "batch_size": 16,
    "base_lr": 0.01,
    "eval_batch_size": 50,
}


@dataclass(frozen=True, kw_only=True)
class ToyLevel:
    kind: TaskKind = "classification"
    seed: int = 0


@final
class ToyTask(AbstractTask):
    """Counts how often each split is asked for, over all instances."""

    name: ClassVar[str] = "toy"
    version: ClassVar[int] = 1
    levels: ClassVar[Mapping[str, ToyLevel]] = {
        "plain": ToyLevel(),
        "other": ToyLevel(seed=1),
        "tokens": ToyLevel(kind="causal_lm"),
    }
    settings: ClassVar[Mapping[str, Mapping[str, object]]] = {"lra-small": {"num_steps": 7, "eval_every": 7}}
    calls: ClassVar[Counter[str]] = Counter()
    sizes: ClassVar[dict[str, int]] = {"train": 200, "validation": 100, "test": 120}

    def __init__(self, level: str, *, data_dir: Path | None = None) -> None:
        super().__init__(level, data_dir=data_dir)
        self.config = self.levels[level]

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(
            vocab_size=6, num_classes=3, max_seq_len=20, metric="accuracy", chance=1 / 3, kind=self.config.kind
        )

    def split(self, name: SplitName) -> Split:
        self.calls[name] += 1
        generator = torch.Generator().manual_seed(10 * self.config.seed + len(name))
        tokens = torch.randint(1, 4, (self.sizes[name], 20), generator=generator).to(torch.uint8)
        lengths = torch.randint(3, 21, (self.sizes[name],), generator=generator)
        tokens[torch.arange(20) >= lengths[:, None]] = 0
        return Split(tokens=tokens, lengths=lengths, labels=tokens[:, 0] - 1)

    def floors(self) -> dict[str, float]:
        return {"constant": 0.4}

    def show(self, example: Example) -> str:
        return str(example.tokens.tolist())


@contextmanager
def toy_task() -> Iterator[type[ToyTask]]:
    """Register the toy task for the length of a test."""
    register_task("toy")(ToyTask)
    ToyTask.calls.clear()
    try:
        yield ToyTask
    finally:
        tasks.remove("toy")


def cell(level: str = "plain", *, variant: str = "full", seed: int = 0, **overrides: object) -> Cell:
    """Return an accuracy cell on the toy task with a tiny model."""
    return Cell(
        kind="accuracy",
        variant=variant,
        task="toy",
        level=level,
        protocol="cpu-small",
        seed=seed,
        overrides={**TINY, **overrides},
    )
