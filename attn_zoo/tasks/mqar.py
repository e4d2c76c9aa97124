"""Multi-query associative recall: pairs of key and value, then keys alone; answer each with its value.

Arora et al. 2023, "Zoology: Measuring and Improving Recall in Efficient Language Models", arXiv 2312.04927; the drawing
is that of HazyResearch/zoology, zoology/data/multiquery_ar.py, without its random fillers:
    k1 v1 ... kn vn stand first; of the S = (N - 2n) / 2 slots that follow, n are drawn without replacement, slot j with
    probability proportional to a j^(a - 1), a = 0.01 (so most questions come soon); the i-th key is put into the i-th
    slot drawn, and its value is the label there. All else is filler. Keys and values of a row are distinct.

The value stands nowhere but beside its key, so a model that sees later tokens gains nothing.

Levels:
    short: for CPUs: 64 tokens, 2 to 16 pairs, small vocabulary; accuracy against the number of pairs.
    pairs: 256 tokens, 4 to 64 pairs; accuracy against the number of pairs, where a state of fixed size must give out.
    distance: for CPUs: 128 tokens, 8 pairs; all keys are asked in random order in one block that begins `distance`
        tokens after the first pair. Accuracy against distance: attention that sees w tokens back in each of n layers
        must fail beyond n w. Hard to begin with: two layers of full attention left its plateau in one of two runs of
        2 000 steps under `cpu-small`, and did not solve it.
    n64, n128, n256, n512: the published settings (figure 2: 4, 8, 16, 64 pairs; 8 192 symbols; 100 000 / 3 000).
    based: the mixture of Arora et al. 2024, arXiv 2402.18668, figure 2: test has lengths and numbers of pairs that
        training has not. Accuracy against length and number of pairs. Training ends at 256 tokens and test at 1 024:
        learned positions beyond 256 are never trained (the override `position = "sinusoidal"` has none).

Token ids: 0 padding, 1 filler, then V / 2 - 1 keys, then V / 2 values; class c is the c-th value. Chance is uniform
over the values of the vocabulary. Validation, which the publication does not have, is drawn like test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np
from torch import Tensor

from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import IGNORED_LABEL, Example, Split, TaskSpec
from attn_zoo.tasks.floors.lookup_rules import context_floors, vote_floor
from attn_zoo.tasks.generated.draws import Draws
from attn_zoo.tasks.generated.generated_task import PAD, AbstractGeneratedTask, GeneratedLevel, Part, Rows, grid

_FILLER, _FIRST_KEY = 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallPart(Part):
    """Examples with one number of pairs.

    Args:
        num_pairs: n.
        distance: from the first pair to the first question; 0 draws the places of the questions as published.

    Raises:
        ValueError: pairs and questions do not fit.
    """

    num_pairs: int
    distance: int = 0

    def __post_init__(self) -> None:
        if self.seq_len % 2 or self.seq_len < 4 * self.num_pairs:
            raise ValueError(f"expected an even seq_len of at least 4 num_pairs; got {self}")
        if self.distance and not 2 * self.num_pairs <= self.distance <= self.seq_len - 2 * self.num_pairs:
            raise ValueError(f"expected 2 num_pairs <= distance <= seq_len - 2 num_pairs; got {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallLevel(GeneratedLevel[RecallPart]):
    """One level.

    Args:
        num_symbols: V: filler, keys and values; even.
        power: a of the power law.
    """

    num_symbols: int = 8_192
    power: float = 0.01


_PUBLISHED = (100_000, 3_000, 3_000)
_BASED_TEST = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1_024, 256))


def _parts(*sizes: tuple[int, int], examples: tuple[int, int, int] = _PUBLISHED) -> tuple[RecallPart, ...]:
    """Return a part for each pair of length and number of pairs."""
    return tuple(
        part for length, pairs in sizes for part in grid(RecallPart, examples, seq_len=length, num_pairs=pairs)
    )


@final
@register_task("mqar")
class MultiQueryRecall(AbstractGeneratedTask[RecallPart]):
    """Multi-query associative recall at one level."""

    version: ClassVar[int] = 1
    levels: ClassVar[Mapping[str, RecallLevel]] = MappingProxyType(
        {
            "short": RecallLevel(
                parts=grid(RecallPart, (10_000, 250, 500), seq_len=64, num_pairs=(2, 4, 8, 16)),
                axes=("num_pairs",),
                num_symbols=64,
            ),
            "pairs": RecallLevel(
                parts=grid(RecallPart, (10_000, 200, 400), seq_len=256, num_pairs=(4, 8, 16, 32, 64)),
                axes=("num_pairs",),
                num_symbols=256,
            ),
            "distance": RecallLevel(
                parts=grid(
                    RecallPart, (8_000, 200, 400), seq_len=128, num_pairs=8, distance=(16, 24, 32, 48, 64, 96, 112)
                ),
                axes=("distance",),
                num_symbols=64,
            ),
            "n64": RecallLevel(parts=_parts((64, 4))),
            "n128": RecallLevel(parts=_parts((128, 8))),
            "n256": RecallLevel(parts=_parts((256, 16))),
            "n512": RecallLevel(parts=_parts((512, 64))),
            "based": RecallLevel(
                parts=(
                    *_parts((64, 4), examples=(100_000, 0, 0)),
                    *_parts((128, 8), (256, 16), (256, 32), (256, 64), examples=(20_000, 0, 0)),
                    *_parts(*_BASED_TEST, examples=(0, 1_000, 1_000)),
                ),
                axes=("seq_len", "num_pairs"),
            ),
        }
    )
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {"cpu-small": {"batch_size": 64, "base_lr": 2e-3, "num_steps": 2_000, "eval_every": 250}}
    )
    config: RecallLevel

    @property
    def spec(self) -> TaskSpec:
        return self.drawn_spec(self.config.num_symbols + 1, self.config.num_symbols // 2)

    @property
    def _first_value(self) -> int:
        return self.config.num_symbols // 2 + 1

    def draw(self, draws: Draws, part: RecallPart, count: int) -> Rows:
        pairs, length = part.num_pairs, part.seq_len
        keys = draws.distinct(self.config.num_symbols // 2 - 1, pairs, count) + _FIRST_KEY
        values = draws.distinct(self.config.num_symbols // 2, pairs, count)
        if part.distance:
            asked = part.distance + 2 * draws.distinct(pairs, pairs, count)
        else:
            slots = np.arange(1, (length - 2 * pairs) // 2 + 1, dtype=np.float64)
            asked = 2 * pairs + 2 * draws.weighted(slots ** (self.config.power - 1.0), pairs, count)
        tokens = np.full((count, length), _FILLER, np.int64)
        labels = np.full((count, length), IGNORED_LABEL, np.int64)
        tokens[:, 0 : 2 * pairs : 2] = keys
        tokens[:, 1 : 2 * pairs : 2] = values + self._first_value
        np.put_along_axis(tokens, asked, keys, 1)
        np.put_along_axis(labels, asked, values, 1)
        return Rows(tokens, labels)

    def floors_on(self, test: Split) -> dict[str, float]:
        """Return rules that name a value without looking at the key that is asked.

        `asked_in_order`: the value of the first pair for the first question, and so on. The law by which questions are
        placed, drawn pair after pair, favours early slots, so early pairs tend to be asked first. `vote_of_places`
        says how often: of the r-th question it knows how likely it asks for each pair.
        """
        train = self.split("train")
        options, labels = test.tokens.numpy().astype(np.int64) - self._first_value, test.labels.numpy()
        floors = context_floors(options, labels, train.labels.numpy(), self.spec.num_classes)
        is_question = labels != IGNORED_LABEL
        number = np.where(is_question, is_question.cumsum(1) - 1, 0)
        in_order = np.take_along_axis(options, 2 * number + 1, 1) == labels
        # Values stand at odd positions, questions at even ones.
        vote = vote_floor(
            train, test, lambda tokens: tokens[:, 1::2].astype(np.int64) - self._first_value, self.spec.num_classes
        )
        return {**floors, "asked_in_order": float(in_order[is_question].mean()), "vote_of_places": vote}

    def show(self, example: Example) -> str:
        """Return such as `k3 v7 k5 v1 . . k5? -> v1`."""
        words = self.symbols(example.tokens)
        labels = example.label.tolist()[: len(words)]
        answers = ["" if label == IGNORED_LABEL else f"? -> v{label}" for label in labels]
        return " ".join(word + answer for word, answer in zip(words, answers, strict=True))

    def symbols(self, tokens: Tensor) -> list[str]:
        return [self._symbol(token) for token in tokens.tolist()]

    def _symbol(self, token: int) -> str:
        if token < _FIRST_KEY:
            return "_" if token == PAD else "."
        return f"v{token - self._first_value}" if token >= self._first_value else f"k{token - _FIRST_KEY}"
