"""Rewriting a sequence: a task for encoder and decoder, whose cross-attention must look at the right place.

Two rules:
    reverse: the source backwards. The i-th target symbol stands at L - 1 - i: places must be known, over any distance.
    sort: the source is pairs of key and symbol, all keys different; the target is the symbols in the order of their
        keys. Places follow from content; each step must find the next larger key.
Symbols are uniform, so nothing can be said from the target so far: without the source only chance is left. The target
ends with an end token, which is scored too.

Levels:
    short: for CPUs: reverse 8 to 32 symbols; accuracy against length of the source.
    sort: for CPUs: sort 4 to 16 pairs; likewise.
    long: reverse 64 to 512 symbols; likewise.

Token ids of source and target alike: 0 padding, 1 start, 2 end, then symbols, then keys. The decoder reads the start
token first. Chance is uniform over the symbols and the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import IGNORED_LABEL, Example, Split, TaskSpec
from attn_zoo.tasks.floors.lookup_rules import context_floors, position_majority_floor, vote_floor
from attn_zoo.tasks.generated.draws import Draws
from attn_zoo.tasks.generated.generated_task import AbstractGeneratedTask, GeneratedLevel, Part, Rows, grid

Rule = Literal["reverse", "sort"]

_START, _END, _FIRST_SYMBOL = 1, 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RewritingLevel(GeneratedLevel[Part]):
    """One level.

    Args:
        rule: what the target is.
        num_symbols: different symbols.
        num_keys: different keys, for `sort`.

    Raises:
        ValueError: there are fewer keys than pairs, or half a pair.
    """

    rule: Rule
    num_symbols: int = 16
    num_keys: int = 0

    def __post_init__(self) -> None:
        longest = max(part.seq_len for part in self.parts)
        if self.rule == "sort" and (self.num_keys < longest // 2 or any(part.seq_len % 2 for part in self.parts)):
            raise ValueError(f"expected an even seq_len and at least {longest // 2} keys; got {self}")

    def target_len(self, seq_len: int) -> int:
        """Return the length of a target, end token included."""
        return 1 + (seq_len if self.rule == "reverse" else seq_len // 2)


_SHORT = grid(Part, (10_000, 125, 250), seq_len=(8, 16, 24, 32))
_LONG = grid(Part, (10_000, 125, 250), seq_len=(64, 128, 256, 512))


@final
@register_task("rewriting")
class Rewriting(AbstractGeneratedTask[Part]):
    """Rewriting at one level."""

    version: ClassVar[int] = 1
    levels: ClassVar[Mapping[str, RewritingLevel]] = MappingProxyType(
        {
            "short": RewritingLevel(rule="reverse", parts=_SHORT, axes=("seq_len",)),
            "sort": RewritingLevel(rule="sort", parts=_SHORT, axes=("seq_len",), num_keys=64),
            "long": RewritingLevel(rule="reverse", parts=_LONG, axes=("seq_len",)),
        }
    )
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {"cpu-small": {"batch_size": 64, "base_lr": 2e-3, "num_steps": 1_500, "eval_every": 250}}
    )
    config: RewritingLevel

    @property
    def spec(self) -> TaskSpec:
        num_classes = _FIRST_SYMBOL + self.config.num_symbols
        return self.drawn_spec(
            num_classes + self.config.num_keys,
            num_classes,
            kind="seq2seq",
            chance=1.0 / (self.config.num_symbols + 1),
            other_max_seq_len=max(self.config.target_len(part.seq_len) for part in self.config.parts),
        )

    def draw(self, draws: Draws, part: Part, count: int) -> Rows:
        num_targets = self.config.target_len(part.seq_len) - 1
        symbols = draws.below(self.config.num_symbols, count, num_targets) + _FIRST_SYMBOL
        if self.config.rule == "reverse":
            tokens, target = symbols, symbols[:, ::-1]
        else:
            keys = draws.distinct(self.config.num_keys, num_targets, count)
            tokens = np.empty((count, part.seq_len), np.int64)
            tokens[:, 0::2] = keys + _FIRST_SYMBOL + self.config.num_symbols
            tokens[:, 1::2] = symbols
            target = np.take_along_axis(symbols, np.argsort(keys, axis=1), 1)
        start, end = np.full((count, 1), _START), np.full((count, 1), _END)
        return Rows(tokens, np.concatenate([target, end], 1), np.concatenate([start, target], 1))

    def floors_on(self, test: Split) -> dict[str, float]:
        """Return rules that know the symbols of the source but not their order, and the best constant per position.

        The rules of the first kind also know where the end is. So does, for `sort`, `vote_of_places`, whose places are
        the keys: it knows that a small key tends to be an early one, and compares no two. `reverse` has no such floor:
        there, to know the place is all of the task.
        """
        train = self.split("train")
        labels = test.labels.numpy()
        tokens = test.tokens.numpy().astype(np.int64)
        is_symbol = (tokens >= _FIRST_SYMBOL) & (tokens < _FIRST_SYMBOL + self.config.num_symbols)
        size = self.spec.num_classes
        symbols = np.where(labels == _END, IGNORED_LABEL, labels)
        context = context_floors(np.where(is_symbol, tokens, -1), symbols, train.labels.numpy(), size)
        end_frac = float((labels == _END).sum() / (labels != IGNORED_LABEL).sum())
        if self.config.rule == "sort":
            asked, learnt = (
                replace(split, labels=split.labels.masked_fill(split.labels == _END, IGNORED_LABEL))
                for split in (test, train)
            )
            context["vote_of_places"] = vote_floor(learnt, asked, self._symbol_of_each_key, size)
        known = {name: end_frac + (1.0 - end_frac) * value for name, value in context.items() if name != "majority"}
        position = position_majority_floor(train.labels.numpy(), labels)
        return {"majority_of_position": position, **known}

    def _symbol_of_each_key(self, pairs: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return from sources `[n, L]` of `sort` the symbol of each key `[n, num_keys]`, -1 where it does not occur."""
        keys = pairs[:, 0::2].astype(np.int64) - _FIRST_SYMBOL - self.config.num_symbols
        symbols = np.full((len(pairs), self.config.num_keys), -1)
        np.put_along_axis(symbols, keys, pairs[:, 1::2].astype(np.int64), 1)
        return symbols

    def show(self, example: Example) -> str:
        """Return such as `s3 s7 s1 -> s1 s7 s3 .`."""
        answer = example.label[example.label != IGNORED_LABEL]
        return f"{' '.join(self.symbols(example.tokens))} -> {' '.join(self.symbols(answer))}"

    def symbols(self, tokens: Tensor) -> list[str]:
        names = ["_", "<", "."]  # padding, start, end
        for kind, count in (("s", self.config.num_symbols), ("k", self.config.num_keys)):
            names += [f"{kind}{index}" for index in range(count)]
        return [names[token] for token in tokens.tolist()]
