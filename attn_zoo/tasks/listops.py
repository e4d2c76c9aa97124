"""ListOps: the value of a nested expression over digits, ten classes.

Levels:
    lra: generated exactly as Long Range Arena does (lengths 501 to 1999, at most 9 nested operators; 96 000 / 2 000 /
        2 000), but seeded, in order, and without examples shared by splits. The release was drawn without a seed.
    lra_release: the published files basic_{train,val,test}.tsv, read from `data_dir`.
    short: for CPUs: the same grammar with short, shallow trees.

Token ids are fixed: 0 padding, 1 to 10 the digits, 11 [MIN, 12 [MAX, 13 [MED, 14 [SM, 15 the closing bracket. (Long
Range Arena numbers its 15 symbols in the order of a set, so that its ids differ from run to run, and adds one for
unknown symbols.)

Trees are drawn in chunks of a fixed number of roots, each from the stream (seed, split, chunk), and kept in order: the
first examples of a split do not depend on how many follow. Test is drawn first, then validation, then train; a tree
that occurred before is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.errors import ConfigError
from attn_zoo.registry import register_task
from attn_zoo.tasks.cache import cached_tensors
from attn_zoo.tasks.contract import AbstractTask, Example, Split, SplitName, TaskSpec
from attn_zoo.tasks.floors import lookup_floor, majority_floor
from attn_zoo.tasks.listops_grammar import VOCAB_SIZE, Bits, Grammar, draw_trees
from attn_zoo.tasks.listops_text import read_tsv, show_tokens

__all__ = ["ListOps", "ListOpsLevel", "generate_splits"]

_STREAMS: dict[SplitName, int] = {"test": 0, "validation": 1, "train": 2}  # in the order of drawing
_ROOTS_PER_CHUNK = 16_384
_CACHED_FROM = 50_000  # examples; fewer are drawn faster than a file is checked


@dataclass(frozen=True, kw_only=True, slots=True)
class ListOpsLevel:
    """One level.

    Args:
        grammar: distribution of the trees.
        num_train: examples.
        num_validation: examples.
        num_test: examples.
        seed: of the drawing.
        files: names of published files by split, instead of drawing.
    """

    grammar: Grammar = field(default_factory=Grammar)
    num_train: int = 96_000
    num_validation: int = 2_000
    num_test: int = 2_000
    seed: int = 0
    files: Mapping[SplitName, str] | None = None

    def count(self, name: SplitName) -> int:
        """Return the number of examples of a split."""
        return {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}[name]


def _padded(rows: list[NDArray[np.uint8]], values: NDArray[np.uint8], width: int) -> Split:
    """Return rows as a split, cut on the right to `width` and filled with padding."""
    lengths = np.array([min(len(row), width) for row in rows], np.int16)
    tokens = np.zeros((len(rows), int(lengths.max(initial=1))), np.uint8)
    for row, target, length in zip(rows, tokens, lengths, strict=True):
        target[:length] = row[:length]
    return Split(tokens=torch.from_numpy(tokens), lengths=torch.from_numpy(lengths), labels=torch.from_numpy(values))


def generate_splits(level: ListOpsLevel) -> dict[SplitName, Split]:
    """Draw the three splits of a level: distinct trees, none in two splits."""
    seen: set[bytes] = set()
    splits: dict[SplitName, Split] = {}
    for name, stream in _STREAMS.items():
        rows: list[NDArray[np.uint8]] = []
        values: list[int] = []
        chunk = 0
        while len(rows) < level.count(name):
            trees = draw_trees(Bits(level.seed, stream, chunk), _ROOTS_PER_CHUNK, level.grammar)
            chunk += 1
            for row, value in zip(np.split(trees.tokens, np.cumsum(trees.lengths)[:-1]), trees.values, strict=False):
                mark = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
                if len(rows) < level.count(name) and mark not in seen:
                    seen.add(mark)
                    rows.append(row)
                    values.append(int(value))
        splits[name] = _padded(rows, np.array(values, np.uint8), level.grammar.max_len)
    return splits


@final
@register_task("listops")
class ListOps(AbstractTask):
    """ListOps at one level.

    Args:
        level: one of `levels`.
        data_dir: folder (or its parent) with the published files, for `lra_release` only.
    """

    name: ClassVar[str] = "listops"
    version: ClassVar[int] = 1
    levels: ClassVar[Mapping[str, ListOpsLevel]] = MappingProxyType(
        {
            "short": ListOpsLevel(
                grammar=Grammar(max_depth=4, max_args=5, min_len=9, max_len=64),
                num_train=40_000,
                num_validation=1_000,
                num_test=2_000,
            ),
            "lra": ListOpsLevel(),
            "lra_release": ListOpsLevel(
                files={"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
            ),
        }
    )
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "lra-small": {"batch_size": 32, "num_steps": 5_000, "warmup_steps": 1_000, "eval_every": 50},
            "lra-original": {
                "num_layers": 4,
                "embed_dim": 512,
                "num_heads": 8,
                "ffn_dim": 1_024,
                "batch_size": 32,
                "num_steps": 5_000,
                "warmup_steps": 1_000,
                "eval_every": 200,
            },
        }
    )

    def __init__(self, level: str, *, data_dir: Path | None = None) -> None:
        super().__init__(level, data_dir=data_dir)
        self.config = self.levels[level]
        self._splits: dict[SplitName, Split] = {}

    @classmethod
    def digest(cls, level: str, *, data_dir: Path | None = None) -> str:
        digest = super().digest(level)
        if (files := cls.levels[level].files) is None:
            return digest
        content = hashlib.sha256(digest.encode())
        for path in _published(files, level, data_dir).values():
            with path.open("rb") as file:
                content.update(hashlib.file_digest(file, "sha256").digest())
        return content.hexdigest()[:16]

    @property
    def spec(self) -> TaskSpec:
        # The published maximum is 2000 although no tree is longer than 1999.
        return TaskSpec(
            vocab_size=VOCAB_SIZE,
            num_classes=10,
            max_seq_len=self.config.grammar.max_len,
            metric="accuracy",
            chance=0.1,
            kind="classification",
        )

    def split(self, name: SplitName) -> Split:
        if not self._splits:
            self._splits = self._load()
        return self._splits[name]

    def floors(self) -> dict[str, float]:
        """Return the majority class and "the most frequent label of the root operator", which reads one token."""
        train, test = self.split("train"), self.split("test")
        labels = train.labels.numpy(), test.labels.numpy()
        first = train.tokens[:, 0].numpy(), test.tokens[:, 0].numpy()
        return {
            "majority": majority_floor(*labels),
            "root_operator": lookup_floor(first[0], labels[0], first[1], labels[1]),
        }

    def show(self, example: Example) -> str:
        return f"{show_tokens(example.tokens.tolist())} = {int(example.label)}"

    def _load(self) -> dict[SplitName, Split]:
        if self.config.files is not None:
            paths = _published(self.config.files, self.level, self.data_dir)
            return {name: _padded(*read_tsv(path), self.spec.max_seq_len) for name, path in paths.items()}
        if self.config.num_train < _CACHED_FROM:
            return generate_splits(self.config)
        tensors = cached_tensors(
            f"{self.name}-{self.level}-{self.digest(self.level)}", lambda: _flat(generate_splits(self.config))
        )
        return {
            name: Split(**{key: tensors[f"{name}.{key}"] for key in ("tokens", "lengths", "labels")})
            for name in _STREAMS
        }


def _flat(splits: dict[SplitName, Split]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": tensor
        for name, split in splits.items()
        for key, tensor in (("tokens", split.tokens), ("lengths", split.lengths), ("labels", split.labels))
    }


def _published(files: Mapping[SplitName, str], level: str, data_dir: Path | None) -> dict[SplitName, Path]:
    """Return the path of each published file.

    Raises:
        ConfigError: no folder was given, or a file is missing.
    """
    wanted = ", ".join(files.values())
    if data_dir is None:
        raise ConfigError(f"listops {level}", [("data_dir", f"expected a folder that holds {wanted}; got none")])
    folder = next(
        (path for path in (data_dir, data_dir / "listops-1000") if (path / files["test"]).is_file()), data_dir
    )
    missing = [name for name in files.values() if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"listops {level}", [("data_dir", f"{folder} does not hold {', '.join(missing)}")])
    return {name: folder / file for name, file in files.items()}
