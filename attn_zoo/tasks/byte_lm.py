"""Language modelling on the bytes of "tiny Shakespeare": predict each byte from those before it; bits per byte.

The text (1 115 394 bytes; karpathy/char-rnn, data/tinyshakespeare/input.txt) is split in order: the first 90 % train,
the next 5 % validation, the last 5 % test. Each split is cut into chunks of L predictions, so that every byte of it is
predicted exactly once: the input of the first prediction is the byte before the split (train, which has none, does not
predict its first byte), and the last chunk reaches back over bytes already predicted, which are not scored again. No
chunk sees what stands before it.

Levels: short (L = 128, for CPUs), 512, 2048.

Tokens are bytes, without padding. Chance is 8 bits: all 256 bytes equally likely.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.errors import ConfigError
from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import IGNORED_LABEL, AbstractTask, Example, Split, SplitName, TaskSpec
from attn_zoo.tasks.sources.archive import gunzip
from attn_zoo.tasks.sources.source import Source

_NUM_BYTES = 256
MAX_ORDER: Final = 7
"""Of an n-gram model: a byte and its context must fit into 56 bits."""


def read_packed(path: Path, where: str) -> bytes:
    """Return the content of a file, unpacked if its name ends in `.gz`; messages begin with `where`.

    Raises:
        ConfigError: it cannot be read, or is not what its name says.
    """
    try:
        return gunzip(path) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(where, [(str(path), f"cannot be read: {error}")]) from None


@dataclass(frozen=True, kw_only=True)  # without slots: super() in a method needs the class that was written down
class PackedSource(Source):
    """Like `Source`, but each folder is also searched for the files under their names with `.gz` added."""

    def _paths(self, at: Path) -> dict[str, Path]:
        """Return each file in one folder, by the plain name if there is one; nothing unless all are there."""
        plain = {key: at / file for key, file in self.files.items()}
        paths = {key: path if path.is_file() else path.with_name(f"{path.name}.gz") for key, path in plain.items()}
        return paths if all(path.is_file() for path in paths.values()) else {}

    def missing(self, data_dir: Path | None) -> list[str]:
        return [] if self.found(data_dir) is not None else super().missing(data_dir)

    def found(self, data_dir: Path | None) -> Path | None:
        return next((at for at in self.folders(data_dir) if self._paths(at)), None)

    def locate(self, data_dir: Path | None) -> dict[str, Path]:
        at = self.found(data_dir)
        return self._paths(at) if at is not None else super().locate(data_dir)

    def digest(self, data_dir: Path | None) -> str:
        """Return a hash of the unpacked content of all files; raises as `hashes`."""
        self.hashes(data_dir)
        content = hashlib.sha256()
        for key, path in sorted(self.locate(data_dir).items()):
            content.update(key.encode() + hashlib.sha256(read_packed(path, self.name)).digest())
        return content.hexdigest()


TEXT = PackedSource(
    name="tiny Shakespeare",
    folder="tinyshakespeare",
    files={"input": "input.txt"},
    urls={"input": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"},
    sha256={"input": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    hint="It is data/tinyshakespeare/input.txt of karpathy/char-rnn; input.txt.gz is read too.",
    terms="plays in the public domain",
    num_bytes=1_115_394,
)
"""The text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteLevel:
    """One level.

    Args:
        seq_len: L.
        train_percent: of the text.
        validation_percent: of the text; the rest is test.
    """

    seq_len: int
    train_percent: int = 90
    validation_percent: int = 5


@final
@register_task("byte_lm")
class ByteLanguageModelling(AbstractTask):
    """Bytes of "tiny Shakespeare" at one length."""

    version: ClassVar[int] = 1
    levels: ClassVar[Mapping[str, ByteLevel]] = MappingProxyType(
        {"short": ByteLevel(seq_len=128), "512": ByteLevel(seq_len=512), "2048": ByteLevel(seq_len=2_048)}
    )
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {"cpu-small": {"batch_size": 32, "base_lr": 3e-3, "num_steps": 3_000, "eval_every": 250}}
    )

    @classmethod
    def source(cls, level: str) -> PackedSource:
        cls.check_level(level)
        return TEXT

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(
            vocab_size=_NUM_BYTES,
            num_classes=_NUM_BYTES,
            max_seq_len=self.config.seq_len,
            metric="bits_per_byte",
            chance=8.0,
            kind="causal_lm",
            has_padding=False,
        )

    def text(self, name: SplitName) -> NDArray[np.uint8]:
        """Return the bytes of a split after one that is read but not predicted.

        Raises:
            ConfigError: the text is missing, or so short that a split has no chunk.
        """
        total, config = len(self._text), self.config
        ends = [total * config.train_percent // 100, total * (config.train_percent + config.validation_percent) // 100]
        start, stop = {"train": (0, ends[0]), "validation": (ends[0] - 1, ends[1]), "test": (ends[1] - 1, total)}[name]
        if stop - start <= config.seq_len:
            problem = f"a text of {total} bytes leaves {stop - start} for {name}; level {self.level} needs more than"
            raise ConfigError(TEXT.name, [("data_dir", f"{problem} {config.seq_len}")])
        return self._text[start:stop]

    @cached_property
    def _text(self) -> NDArray[np.uint8]:
        return np.frombuffer(read_packed(TEXT.locate(self.data_dir)["input"], TEXT.name), np.uint8)

    def split(self, name: SplitName) -> Split:
        """Return the chunks of a split, in the order of the text."""
        length = self.config.seq_len
        text = self.text(name)
        num_predicted = len(text) - 1
        starts = np.arange(0, num_predicted, length)
        last = num_predicted - length  # the last chunk reaches back
        num_known = starts[-1] - min(starts[-1], last)
        starts[-1] -= num_known
        places = starts[:, None] + np.arange(length)
        labels = text[places + 1].astype(np.int16)
        labels[-1, :num_known] = IGNORED_LABEL
        return Split.without_padding(torch.from_numpy(text[places]), torch.from_numpy(labels))

    def floors(self) -> dict[str, float]:
        """Return the bits per byte of n-gram models counted on train. They see across the borders of chunks."""
        train, test = self.text("train"), self.text("test")
        orders = {"unigram": 1, "bigram": 2, "trigram": 3, "5-gram": 5}
        return {name: ngram_bits(train, test, order, num_context=1) for name, order in orders.items()}

    def show(self, example: Example) -> str:
        """Return the chunk as text; the byte to predict last stands after the bar."""
        decoded = bytes(example.tokens.tolist()).decode("utf-8", "backslashreplace")
        return f"{decoded}|{_symbol(int(example.label[-1]))}"

    def symbols(self, tokens: Tensor) -> list[str]:
        return [_symbol(token) for token in tokens.tolist()]


def _symbol(byte: int) -> str:
    """Return a byte as one visible character, or in hexadecimal."""
    return {10: "↵", 32: "␣"}.get(byte, chr(byte) if 33 <= byte < 127 else f"{byte:02x}")


def _codes(text: NDArray[np.uint8], order: int) -> NDArray[np.int64]:
    """Return, for each place from `order - 1` on, the `order` bytes that end there as one integer."""
    codes = np.zeros(len(text) - order + 1, np.int64)
    for offset in range(order):
        codes = (codes << 8) | text[offset : offset + len(codes)]
    return codes


def _counts_of(codes: NDArray[np.int64], known: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the count of each code, 0 for those that are not known; `known` is sorted."""
    place = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.where(known[place] == codes, counts[place], 0)


def ngram_bits(train: NDArray[np.uint8], test: NDArray[np.uint8], order: int, num_context: int = 0) -> float:
    """Return the mean bits per byte of `test` under the interpolated Witten-Bell n-gram model of `train`.

    Witten and Bell 1991, "The zero-frequency problem", as in Chen and Goodman 1999, section 2.4; for a context h of k
    bytes that was followed c(h) times by t(h) different bytes, and h' its last k - 1 bytes,
        p(b | h) = (c(h b) + t(h) p(b | h')) / (c(h) + t(h)),   p(b | no context at all) = 1 / 256
    An unseen h leaves p(b | h') as it is. Nothing is tuned.

    Args:
        train: text to count in, at least `order` bytes.
        test: text to predict.
        order: n, 1 to 7; a byte is predicted from the n - 1 bytes before it, fewer at the start.
        num_context: bytes at the start of `test` that are read but not predicted.

    Raises:
        ValueError: the order is out of range, or a text is too short.

    >>> round(ngram_bits(np.full(100, 7, np.uint8), np.full(10, 7, np.uint8), 1), 3)  # p = (100 + 1 / 256) / 101
    0.014
    """
    if not 1 <= order <= MAX_ORDER:
        raise ValueError(f"expected an order from 1 to {MAX_ORDER}; got {order}")
    if len(train) < order or len(test) <= num_context:
        raise ValueError(f"expected texts of at least {order} and {num_context + 1} bytes")
    prob = np.full(len(test), 1 / 256)
    for n in range(1, min(order, len(test)) + 1):
        known, counts = np.unique(_codes(train, n), return_counts=True)
        contexts, first = np.unique(known >> 8, return_index=True)
        totals, types = np.add.reduceat(counts, first), np.diff(np.append(first, len(known)))
        codes = _codes(test, n)
        seen = _counts_of(codes, known, counts)
        total, distinct = _counts_of(codes >> 8, contexts, totals), _counts_of(codes >> 8, contexts, types)
        lower = prob[n - 1 :]
        prob[n - 1 :] = np.where(total > 0, (seen + distinct * lower) / np.maximum(total + distinct, 1), lower)
    return float(-np.log2(prob[num_context:]).mean())
