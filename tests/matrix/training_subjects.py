"""Tiny tasks of every kind, and variants that misbehave when they are trained; loaded by `--variant-file`."""

import ctypes
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.oracle import attention_weights
from attn_zoo.metadata import Capabilities, Complexity, Reference
from attn_zoo.registry import register_attention, register_task
from attn_zoo.tasks import AbstractTask, Example, Source, Split, SplitName, TaskKind, TaskSpec

SIZES: dict[SplitName, int] = {"train": 64, "validation": 16, "test": 16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    kind: TaskKind = "classification"
    needs_file: bool = False


@register_task("fake_task")
class FakeTask(AbstractTask):
    """Is the first token 1 or 2? For other kinds there are no data: they are planned only."""

    name: ClassVar[str] = "fake_task"
    version: ClassVar[int] = 1
    levels: ClassVar[Mapping[str, Level]] = {
        "short": Level(),
        "recall": Level(kind="token_classification"),
        "text": Level(kind="causal_lm"),
        "copy": Level(kind="seq2seq"),
        "filed": Level(needs_file=True),
    }

    @classmethod
    def source(cls, level: str) -> Source | None:
        if not cls.levels[level].needs_file:
            return None
        return Source(name="Fake data", folder="fake", files={"all": "fake.txt"}, hint="Write fake.txt by hand.")

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(
            vocab_size=4,
            num_classes=3,
            max_seq_len=8,
            metric="accuracy",
            chance=0.5,
            kind=self.levels[self.level].kind,
            has_padding=False,
            other_max_seq_len=8 if self.level == "copy" else 0,
        )

    def split(self, name: SplitName) -> Split:
        count = SIZES[name]
        generator = torch.Generator().manual_seed(count)
        tokens = torch.randint(1, 4, (count, 8), generator=generator, dtype=torch.uint8)
        tokens[:, 0] = 1 + torch.arange(count) % 2
        return Split(tokens=tokens, lengths=torch.full((count,), 8, dtype=torch.int16), labels=tokens[:, 0].clone())

    def floors(self) -> dict[str, float]:
        return {"majority": 0.5}

    def show(self, example: Example) -> str:
        return " ".join(map(str, example.tokens.tolist()))


@register_task("fake_other_task")
class FakeOtherTask(FakeTask):
    """The same under another name."""

    name: ClassVar[str] = "fake_other_task"


def register(name: str, **capabilities: Any):
    """Register under `name` with harmless claims."""
    able = dict.fromkeys(("bidirectional", "causal", "cross_attention", "key_padding_mask", "is_exact"), True)
    return register_attention(
        name,
        capabilities=Capabilities(**{**able, **capabilities}),
        complexity=Complexity(
            time="B H L S D", memory="B H L S", time_exponent=2, memory_exponent=2, sequential_ops="1", max_path="1"
        ),
        reference=Reference(title="Misbehaviour", authors="Tests", year=2026, url="https://example.org"),
    )


BATCH_SIZE = 8
"""Of the trainings; no gate has as many sequences at once."""


class Plain(AbstractAttention):
    """Plain softmax attention that calls `misbehave` in training, and not in the gate before it."""

    def misbehave(self) -> None:
        """Do nothing."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        if self.training and query.shape[0] == BATCH_SIZE:
            self.misbehave()
        return attention_weights(query, key, is_causal=self.build.is_causal, key_padding_mask=key_padding_mask) @ value


@register("fake_train_ok")
class Fine(Plain):
    """Never misbehaves, and says how many threads it has."""

    def misbehave(self) -> None:
        os.write(1, f"{torch.get_num_threads()} threads\n".encode())


@register("fake_train_meets")
class Meets(Fine):
    """Goes on only when another process trains it too."""

    def misbehave(self) -> None:
        super().misbehave()
        marks, end = Path(os.environ["FAKE_MARKS"]), time.monotonic() + 90
        (marks / f"meets-{os.getpid()}").touch()
        while len(list(marks.glob("meets-*"))) < 2:
            assert time.monotonic() < end, "nobody came"
            time.sleep(0.05)


@register("fake_train_slow")
class Slow(Plain):
    """Takes its time."""

    def misbehave(self) -> None:
        time.sleep(0.1)


@register("fake_train_told")
class Told(Plain):
    """Says every step, and waits at the 20th until it may go on."""

    num_calls = 0

    def misbehave(self) -> None:
        os.write(1, b"step\n")
        self.num_calls += 1
        while self.num_calls >= 20 and not Path(os.environ["FAKE_MARK"]).exists():
            time.sleep(0.02)


@register("fake_train_hang")
class Hang(Plain):
    """Sleeps for minutes."""

    def misbehave(self) -> None:
        time.sleep(300)


@register("fake_train_segfault")
class Segfault(Plain):
    """Reads address 0."""

    def misbehave(self) -> None:
        ctypes.string_at(0)


@register("fake_train_nan")
class NotANumber(Plain):
    """Has a loss that is no number, in training."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        is_training = self.training and query.shape[0] == BATCH_SIZE
        exact = super().forward(query, key, value, key_padding_mask=key_padding_mask)
        return exact * float("nan") if is_training else exact


@register("fake_train_killed")
class Killed(Plain):
    """Is killed from outside the first time, as by an impatient administrator, and then left alone."""

    def misbehave(self) -> None:
        mark = Path(os.environ["FAKE_MARKS"]) / "killed"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@register("fake_train_rank_killed")
class RankKilled(Plain):
    """Has its second rank killed from outside the first time, and waits to be told to go on the second time."""

    def misbehave(self) -> None:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        rank, marks = os.environ.get("RANK"), Path(os.environ.get("FAKE_MARKS", "/"))
        if rank is None or (marks / "go").exists():
            return
        if not (marks / "killed").exists():
            if self.num_calls == 4 and rank == "1":
                (marks / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        elif self.num_calls == 1:
            (marks / f"waiting-{rank}").touch()
            time.sleep(300)


@register("fake_train_one_way", causal=False, cross_attention=False)
class OneWay(Plain):
    """Declares that it is bidirectional only."""


@register("fake_train_by_threes", key_padding_mask=False, seq_len_multiple=3)
class ByThrees(Plain):
    """Takes lengths that are multiples of 3, and no padding."""


@register("fake_train_no_cross", cross_attention=False)
class NoCross(Plain):
    """Declares that it has no cross-attention."""


@register("fake_train_lazy")
class Lazy(Plain):
    """Computes nothing in training."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        exact = super().forward(query, key, value, key_padding_mask=key_padding_mask)
        return value * 1.0 if self.training else exact
