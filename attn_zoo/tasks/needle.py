"""Needle in a haystack, with tokens: values hidden in filler, each under a key, one of which is asked at the end.

The token-level form of the retrieval tasks of RULER (Hsieh et al. 2024, arXiv 2404.06654) for models trained from
scratch:
    the haystack is random filler and k needles; a needle is one token that binds a value to a key, as RULER's is one
    sentence; all keys and all values of a row are different
    the last token asks for a key, and its label is the value of that needle (no other position has a label)
    depth: place of the asked needle, 0 % at the start and 100 % at the end; drawn uniformly within a band, and shown
    by the middle of the band. The other needles lie anywhere.
One look at the right place is enough: what is tested is how far a mechanism sees, not whether it learns to look twice.
Nor does it test whether order or distance is known: key and value are one token, so a bag of the tokens holds the
answer (reference `bag_of_tokens`: a linear model for each question, 100 %). A mechanism fails where it does not see the
needle, or cannot tell it from so much filler.

Levels, all with accuracy against length and depth (a heat map), 4 needles:
    short: for CPUs: 32 to 128 tokens, 5 bands of depth.
    2k: 512 to 2 048 tokens, 10 bands.
    8k: 2 048 to 8 192 tokens, 10 bands.

Token ids: 0 padding, then filler, needles (all values of the first key, of the second, ...), questions; class c is the
c-th value. Chance is uniform over the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import IGNORED_LABEL, Example, Split, SplitName, TaskSpec
from attn_zoo.tasks.floors.linear_model import byte_histogram, linear_floor
from attn_zoo.tasks.floors.lookup_rules import context_floors
from attn_zoo.tasks.generated.draws import Draws
from attn_zoo.tasks.generated.generated_task import AbstractGeneratedTask, GeneratedLevel, Part, Rows, grid

_FIRST_FILLER = 1
_MOST_FITTED = 3_000  # rows of train for each question: there are some 150 tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedlePart(Part):
    """Examples with the needle in one band of depth.

    Args:
        depth_percent: middle of the band.
        band_percent: width of the band.
        num_needles: k, the asked one included.

    Raises:
        ValueError: the band leaves the haystack, or the needles do not fit.
    """

    depth_percent: float
    band_percent: float
    num_needles: int

    def __post_init__(self) -> None:
        first, last = self.depth_percent - self.band_percent / 2, self.depth_percent + self.band_percent / 2
        if first < 0 or last > 100 or self.num_needles > self.num_slots or self.band[1] < 1:
            raise ValueError(f"expected a band inside 0 to 100 % and room for the needles; got {self}")

    @property
    def num_slots(self) -> int:
        """Places in the haystack."""
        return self.seq_len - 1

    @property
    def band(self) -> tuple[int, int]:
        """First place of the band, and how many."""
        ends = [self.depth_percent - self.band_percent / 2, self.depth_percent + self.band_percent / 2]
        first, stop = (round(end * self.num_slots / 100) for end in ends)
        return first, stop - first


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedleLevel(GeneratedLevel[NeedlePart]):
    """One level.

    Args:
        num_fillers: different symbols of the haystack.
        num_keys: different keys.
        num_values: different values.
    """

    num_fillers: int = 16
    num_keys: int = 8
    num_values: int = 16


def _bands(lengths: tuple[int, ...], num_bands: int, num_train: int, num_test: int) -> tuple[NeedlePart, ...]:
    width = 100 / num_bands
    return grid(
        NeedlePart,
        (num_train, num_test // 2, num_test),
        seq_len=lengths,
        depth_percent=tuple((band + 0.5) * width for band in range(num_bands)),
        band_percent=width,
        num_needles=4,
    )


@final
@register_task("needle")
class Needle(AbstractGeneratedTask[NeedlePart]):
    """Needle in a haystack at one level."""

    version: ClassVar[int] = 1
    levels: ClassVar[Mapping[str, NeedleLevel]] = MappingProxyType(
        {
            "short": NeedleLevel(parts=_bands((32, 64, 128), 5, 3_000, 150), axes=("seq_len", "depth_percent")),
            "2k": NeedleLevel(parts=_bands((512, 1_024, 2_048), 10, 1_000, 100), axes=("seq_len", "depth_percent")),
            "8k": NeedleLevel(parts=_bands((2_048, 4_096, 8_192), 10, 500, 50), axes=("seq_len", "depth_percent")),
        }
    )
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {"cpu-small": {"batch_size": 64, "base_lr": 3e-3, "num_steps": 1_000, "eval_every": 100}}
    )
    config: NeedleLevel

    @property
    def spec(self) -> TaskSpec:
        return self.drawn_spec(self._first_question + self.config.num_keys, self.config.num_values)

    @property
    def _first_needle(self) -> int:
        return _FIRST_FILLER + self.config.num_fillers

    @property
    def _first_question(self) -> int:
        return self._first_needle + self.config.num_keys * self.config.num_values

    def draw(self, draws: Draws, part: NeedlePart, count: int) -> Rows:
        first, width = part.band
        asked = first + draws.below(width, count)
        others = draws.distinct(part.num_slots - 1, part.num_needles - 1, count)
        others += others >= asked[:, None]  # every place but the asked one
        slots = np.concatenate([asked[:, None], others], axis=1)
        keys = draws.distinct(self.config.num_keys, part.num_needles, count)
        values = draws.distinct(self.config.num_values, part.num_needles, count)
        tokens = draws.below(self.config.num_fillers, count, part.seq_len) + _FIRST_FILLER
        np.put_along_axis(tokens, slots, self._first_needle + keys * self.config.num_values + values, 1)
        tokens[:, -1] = self._first_question + keys[:, 0]
        labels = np.full((count, part.seq_len), IGNORED_LABEL, np.int64)
        labels[:, -1] = values[:, 0]
        return Rows(tokens, labels)

    def floors_on(self, test: Split) -> dict[str, float]:
        """Return rules that name a value of the haystack without looking at the key that is asked."""
        train = self.split("train")
        tokens = test.tokens.numpy().astype(np.int64)
        is_needle = (tokens >= self._first_needle) & (tokens < self._first_question)
        options = np.where(is_needle, (tokens - self._first_needle) % self.config.num_values, -1)
        return context_floors(options, test.labels.numpy(), train.labels.numpy(), self.config.num_values)

    def references(self) -> dict[str, float]:
        """Return `bag_of_tokens`: logistic regression on how often each token occurs, one for each question asked.

        Fitted on at most 3 000 evenly spaced rows of train for each question.
        """
        counts, asked, labels = self._bags("train")
        test_counts, test_asked, test_labels = self._bags("test")
        right = 0.0
        for question in np.unique(test_asked):
            known, wanted = np.flatnonzero(asked == question), test_asked == question
            known = known[:: -(-len(known) // _MOST_FITTED)]  # of all lengths and depths, which follow each other
            right += wanted.sum() * linear_floor(counts[known], labels[known], test_counts[wanted], test_labels[wanted])
        return {"bag_of_tokens": float(right / len(test_asked))}

    def _bags(self, name: SplitName) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
        """Return how often each token occurs in each row, which question it asks, and the answer."""
        split = self.split(name)
        tokens, lengths = split.tokens.numpy(), split.lengths.numpy()
        last = np.arange(len(tokens)), lengths - 1
        counts = byte_histogram(tokens, self.spec.vocab_size) * lengths[:, None].astype(np.float32)
        return counts, tokens[last].astype(np.int64), split.labels.numpy()[last].astype(np.int64)

    def show(self, example: Example) -> str:
        """Return such as `.. k3v7 .. k5v1 .. k3? -> v7`; two dots are any amount of filler."""
        words: list[str] = []
        for word in self.symbols(example.tokens):
            if not word.startswith("f"):
                words.append(word)
            elif words[-1:] != [".."]:
                words.append("..")
        return f"{' '.join(words)} -> v{int(example.label[len(example.tokens) - 1])}"

    def symbols(self, tokens: Tensor) -> list[str]:
        config = self.config
        names = ["_", *(f"f{index}" for index in range(config.num_fillers))]
        names += [f"k{key}v{value}" for key in range(config.num_keys) for value in range(config.num_values)]
        names += [f"k{key}?" for key in range(config.num_keys)]
        return [names[token] for token in tokens.tolist()]
