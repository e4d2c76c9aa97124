"""Retrieval: does one of two papers cite the other? Long Range Arena's task on the ACL Anthology Network, in bytes.

Radev et al. 2013, "The ACL Anthology Network Corpus"; pairs as released by Long Range Arena in
new_aan_pairs.{train,eval,test}.tsv (147 086 / 18 090 / 17 437 rows, 10 GB): no header, columns label (0.0 or 1.0), id1,
id2, text1, text2 separated by tabs, no quoting. The release reads them by these rules too, so a row with another number
of columns cannot be told right from wrong and is an error. So is a last row without a line end: the file was cut short.

Levels:
    4000: the first 4 000 bytes of each paper. The release cuts at 10 000 bytes before; at this length that is idle.
    short: for CPUs: 256 bytes, the first 20 000 / 1 000 / 2 000 rows.

Scores are over all rows; the release drops the last partial batch of each split.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from attn_zoo.errors import ConfigError
from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import AbstractFileTask, Example, Split, SplitName, TaskSpec
from attn_zoo.tasks.byte_text import TextRows, byte_spec, byte_symbols, text_of
from attn_zoo.tasks.floors.text_models import pair_floors, pair_references
from attn_zoo.tasks.sources.source import Source

PAPERS = Source(
    name="AAN pairs of Long Range Arena",
    folder="tsv_data",
    files={
        "train": "new_aan_pairs.train.tsv",
        "validation": "new_aan_pairs.eval.tsv",
        "test": "new_aan_pairs.test.tsv",
    },
    hint="They are in lra_release.gz of Long Range Arena, tsv_data, 10.6 GB; the hub has copies in OpenNLPLab/lra.",
    terms="of the archive: not stated; the hub's copy claims Apache-2.0",
    hub="OpenNLPLab/lra",
    hub_files={
        "train": "data/aan/new_aan_pairs.train.tsv",
        "validation": "data/aan/new_aan_pairs.eval.tsv",
        "test": "data/aan/new_aan_pairs.test.tsv",
    },
    url="https://storage.googleapis.com/long-range-arena/lra_release.gz",
    num_bytes=10_620_000_000,
)

_COLUMNS = ("label", "id1", "id2", "text1", "text2")
_NUM_ROWS = (147_086, 18_090, 17_437)  # whole files; whether their last rows have a line end is not known
_LABELS = {b"0": 0, b"1": 1, b"0.0": 0, b"1.0": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalLevel:
    """One level.

    Args:
        max_len: bytes kept of each paper.
        max_rows: rows read of each split, from the top; 0 reads all.
    """

    max_len: int
    max_rows: Mapping[SplitName, int] | None = None


def read_pairs(path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield label, first and second text of each row, one line in memory at a time.

    Raises:
        ConfigError: a row is not of the published form, or the last one was cut short; names the line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            columns = line.rstrip(b"\r\n").split(b"\t")
            problem = ""
            if not line.endswith(b"\n") and number not in _NUM_ROWS:
                problem = "expected a line end; the file was cut short"
            elif len(columns) != len(_COLUMNS):
                problem = (
                    f"expected {len(_COLUMNS)} columns ({', '.join(_COLUMNS)}) separated by tabs; got {len(columns)}"
                )
            elif columns[0] not in _LABELS:
                problem = f"expected 0.0 or 1.0 as label; got {columns[0][:20].decode(errors='replace')!r}"
            elif b"\xff" in line:
                problem = "expected UTF-8; got the byte 0xff"
            if problem:
                raise ConfigError(str(path), [(f"line {number}", problem)])
            yield _LABELS[columns[0]], columns[3], columns[4]


def _split(path: Path, max_len: int, max_rows: int) -> Split:
    """Read one file."""
    first, second, labels = TextRows(max_len), TextRows(max_len), bytearray()
    for label, one, two in itertools.islice(read_pairs(path), max_rows or None):
        labels.append(label)
        first.add(one)
        second.add(two)
    if not labels:
        raise ConfigError(str(path), [("", "expected pairs of papers; the file is empty")])
    return pair_split(first.tensors(), second.tensors(), torch.frombuffer(labels, dtype=torch.uint8))


def pair_split(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], labels: Tensor) -> Split:
    """Return pairs of texts, each given as ids `[N, L]` and lengths `[N]`."""
    (tokens, lengths), (other_tokens, other_lengths) = first, second
    return Split(tokens=tokens, lengths=lengths, labels=labels, other_tokens=other_tokens, other_lengths=other_lengths)


class AbstractTextPairs(AbstractFileTask):
    """A yes-or-no question about two texts as bytes.

    Class attributes:
        words: what label 0 and label 1 mean.
    """

    words: ClassVar[tuple[str, str]]

    @property
    def spec(self) -> TaskSpec:
        return byte_spec(self.config.max_len, "pair")

    def floors(self) -> dict[str, float]:
        """Return what `pair_floors` finds: models that ignore order and position."""
        return pair_floors(self.split("train"), self.split("test"))

    def references(self) -> dict[str, float]:
        """Return what `pair_references` finds: words in common, without order."""
        return pair_references(self.split("train"), self.split("test"))

    def show(self, example: Example) -> str:
        assert example.other_tokens is not None
        texts = f"{text_of(example.tokens)}\n---\n{text_of(example.other_tokens)}"
        return f"{texts}\n= {self.words[int(example.label)]}"

    def symbols(self, tokens: Tensor) -> list[str]:
        return byte_symbols(tokens)


@final
@register_task("retrieval")
class Retrieval(AbstractTextPairs):
    """Citation between two papers from their bytes, at one level."""

    version: ClassVar[int] = 1
    files: ClassVar[Source] = PAPERS
    words: ClassVar[tuple[str, str]] = ("no citation", "one cites the other")
    levels: ClassVar[Mapping[str, RetrievalLevel]] = MappingProxyType(
        {
            "short": RetrievalLevel(max_len=256, max_rows={"train": 20_000, "validation": 1_000, "test": 2_000}),
            "4000": RetrievalLevel(max_len=4_000),
        }
    )
    # The release warms up for longer than it trains, so its rate never peaks; and it classifies the two pooled vectors
    # a, b alone, where our head, as that of most later work, also sees a * b and a - b (no field of a protocol).
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "lra-small": {"batch_size": 32, "num_steps": 30_000, "warmup_steps": 800, "eval_every": 300},
            "lra-original": {
                "num_layers": 4,
                "embed_dim": 128,
                "num_heads": 4,
                "ffn_dim": 512,
                "batch_size": 32,
                "num_steps": 5_000,
                "warmup_steps": 8_000,
                "eval_every": 100,
            },
        }
    )

    @property
    def is_slow(self) -> bool:
        return True

    def read(self, paths: dict[str, Path]) -> dict[SplitName, Split]:
        max_rows: Mapping[SplitName, int] = self.config.max_rows or {}
        names: tuple[SplitName, ...] = ("train", "validation", "test")
        return {name: _split(paths[name], self.config.max_len, max_rows.get(name, 0)) for name in names}
