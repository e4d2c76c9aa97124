"""Tasks that a tiny model learns in seconds, one level for each kind: they all ask for the first token or copy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from attn_zoo.records import Cell
from attn_zoo.registry import register_task, tasks
from attn_zoo.tasks import AbstractTask, Example, Split, SplitName, TaskKind, TaskSpec
from attn_zoo.tasks.abstract_task import IGNORED_LABEL

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
    "bucket_batches": 0,
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
        "tokens": ToyLevel(kind="token_classification"),
        "language": ToyLevel(kind="causal_lm"),
        "pair": ToyLevel(kind="pair"),
        "seq2seq": ToyLevel(kind="seq2seq"),
    }
    settings: ClassVar[Mapping[str, Mapping[str, object]]] = {"lra-small": {"num_steps": 7, "eval_every": 7}}
    calls: ClassVar[Counter[str]] = Counter()
    sizes: ClassVar[dict[str, int]] = {"train": 200, "validation": 100, "test": 120}

    def __init__(self, level: str, *, data_dir: Path | None = None) -> None:
        super().__init__(level, data_dir=data_dir)
        self.config = self.levels[level]

    @property
    def spec(self) -> TaskSpec:
        kind = self.config.kind
        is_language = kind == "causal_lm"
        return TaskSpec(
            vocab_size=6,
            num_classes={"classification": 3, "pair": 2, "token_classification": 3}.get(kind, 6),
            max_seq_len=20,
            metric="bits_per_byte" if is_language else "accuracy",
            chance=math.log2(6) if is_language else 1 / 3,
            kind=kind,
            other_max_seq_len={"pair": 20, "seq2seq": 5}.get(kind, 0),
            group_axes=("parity", "tenth") if kind == "token_classification" else (),
        )

    def split(self, name: SplitName) -> Split:
        self.calls[name] += 1
        generator = torch.Generator().manual_seed(10 * self.config.seed + len(name))
        tokens, lengths = _sequences(self.sizes[name], 20, generator)
        plain = Split(tokens=tokens, lengths=lengths, labels=tokens[:, 0] - 1)
        return {
            "classification": lambda: plain,
            "token_classification": lambda: _tokens(plain),
            "causal_lm": lambda: _language(plain),
            "pair": lambda: _pair(plain, generator),
            "seq2seq": lambda: _copy(plain),
        }[self.config.kind]()

    def floors_on(self, test: Split) -> dict[str, float]:
        return {"share": len(test) / len(self.split("test"))}

    def floors(self) -> dict[str, float]:
        return {"constant": 0.4}

    def show(self, example: Example) -> str:
        return str(example.tokens.tolist())


def _sequences(num: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 4, (num, width), generator=generator).to(torch.uint8)
    lengths = torch.randint(3, width + 1, (num,), generator=generator)
    tokens[torch.arange(width) >= lengths[:, None]] = 0
    return tokens, lengths


def _tokens(plain: Split) -> Split:
    """Every odd position asks for the first token; groups are the parity of the length and a tenth of it."""
    labels = plain.labels.long()[:, None].expand(plain.tokens.shape).clone()
    labels[plain.tokens == 0] = IGNORED_LABEL
    labels[:, ::2] = IGNORED_LABEL
    groups = torch.stack([plain.lengths % 2, plain.lengths // 10 / 10], dim=1).float()
    return replace(plain, labels=labels, groups=groups)


def _language(plain: Split) -> Split:
    """The first token over and over: all but the first can be predicted."""
    tokens = torch.where(plain.tokens > 0, plain.tokens[:, :1], 0)
    labels = torch.full(tokens.shape, IGNORED_LABEL)
    labels[:, :-1] = torch.where(tokens[:, 1:] > 0, tokens[:, 1:].long(), IGNORED_LABEL)
    return replace(plain, tokens=tokens, labels=labels)


def _pair(plain: Split, generator: torch.Generator) -> Split:
    """Whether both sequences consist of the same token."""
    other, lengths = _sequences(len(plain), 20, generator)
    one = torch.where(plain.tokens > 0, plain.tokens[:, :1], 0)
    two = torch.where(other > 0, torch.where(other[:, 1:2] > 1, other[:, :1], plain.tokens[:, :1]), 0)
    same = one[:, 0] == two[:, 0]
    return replace(plain, tokens=one, labels=same.long(), other_tokens=two, other_lengths=lengths)


def _copy(plain: Split) -> Split:
    """The first three or four tokens, after a start token (5)."""
    lengths = plain.lengths.clamp(max=4)
    labels = plain.tokens[:, :5].long()
    labels[torch.arange(5) >= lengths[:, None]] = IGNORED_LABEL
    read = torch.cat([torch.full((len(plain), 1), 5), plain.tokens[:, :4].long()], dim=1)
    read[torch.arange(5) >= lengths[:, None]] = 0
    return replace(plain, labels=labels, other_tokens=read, other_lengths=lengths)


@contextmanager
def toy_task() -> Iterator[type[ToyTask]]:
    """Register the toy task for the length of a test."""
    register_task("toy")(ToyTask)
    ToyTask.calls.clear()
    try:
        yield ToyTask
    finally:
        tasks.remove("toy")


def cell(level: str = "plain", *, variant: str = "full", seed: int = 0, **overrides: Any) -> Cell:
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
