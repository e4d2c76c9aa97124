"""ListOps: the value of a nested expression over digits, ten classes.

Levels (how they are drawn, and balanced: `attn_zoo.tasks.expressions.tree_splits`):
    short: for CPUs: the same grammar with short, shallow trees.
    short_balanced: the same, with as many examples for every pair of root operator and label.
    lra: generated exactly as Long Range Arena does (lengths 501 to 1999, at most 9 nested operators; 96 000 / 2 000 /
        2 000), but seeded, in order, and without examples shared by splits. The release was drawn without a seed.
    lra_balanced: the same, with as many examples for every pair of root operator and label.
    lra_sm_med: the same as lra with SM and MED alone, whose value a few arguments hardly ever decide.
    lra_release: the published files basic_{train,val,test}.tsv.

Token ids are fixed: 0 padding, 1 to 10 the digits, 11 [MIN, 12 [MAX, 13 [MED, 14 [SM, 15 the closing bracket. (Long
Range Arena numbers its 15 symbols in the order of a set, so that its ids differ from run to run, and adds one for
unknown symbols.)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

from torch import Tensor

from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import AbstractTask, Example, Split, SplitName, TaskSpec
from attn_zoo.tasks.cached_splits import cached_splits
from attn_zoo.tasks.expressions.grammar import VOCAB_SIZE, Grammar
from attn_zoo.tasks.expressions.partial_reading import Rung, has_whole_trees, ladder
from attn_zoo.tasks.expressions.published_text import export_tsv, read_tsv, show_tokens, words_of
from attn_zoo.tasks.expressions.tree_splits import STREAMS, ListOpsLevel, generate_splits, padded
from attn_zoo.tasks.floors.lookup_rules import lookup_floor, majority_floor
from attn_zoo.tasks.sources.source import Source

__all__ = ["ListOps"]

_CACHED_FROM = 50_000  # examples; fewer are drawn faster than a file is checked
_DEEPEST_RUNG = 3
_SHORT = Grammar(max_depth=4, max_args=5, min_len=9, max_len=64)
_URL = "https://storage.googleapis.com/long-range-arena/lra_release/listops-1000/"
_FILES: Mapping[str, str] = MappingProxyType(
    {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
)
_RELEASE = Source(
    name="ListOps of Long Range Arena",
    folder="listops-1000",
    files=_FILES,
    hint="They are in lra_release.gz of Long Range Arena, folder listops-1000, and on their own, some 640 MB: "
    "attn-zoo data fetch listops",
    terms="none stated with the files; the code that drew them is under Apache-2.0",
    urls={split: _URL + file for split, file in _FILES.items()},
    num_bytes=640_000_000,
)


@final
@register_task("listops")
class ListOps(AbstractTask):
    """ListOps at one level.

    Args:
        level: one of `levels`.
        data_dir: folder with the published files, or above the folder `listops-1000` of them; for `lra_release` only.
    """

    name: ClassVar[str] = "listops"
    version: ClassVar[int] = 1
    levels: ClassVar[Mapping[str, ListOpsLevel]] = MappingProxyType(
        {
            "short": ListOpsLevel(grammar=_SHORT, num_train=40_000, num_validation=1_000, num_test=2_000),
            "short_balanced": ListOpsLevel(
                grammar=_SHORT, num_train=40_000, num_validation=1_000, num_test=2_000, is_balanced=True
            ),
            "lra": ListOpsLevel(),
            "lra_balanced": ListOpsLevel(is_balanced=True),
            "lra_sm_med": ListOpsLevel(grammar=Grammar(operators=("[MED", "[SM"))),
            "lra_release": ListOpsLevel(is_release=True),
        }
    )
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "cpu-small": {"pretrain_mask_prob": 0.1},
            "lra-small": {
                "batch_size": 32,
                "num_steps": 5_000,
                "warmup_steps": 1_000,
                "eval_every": 50,
                "pretrain_mask_prob": 0.1,
            },
            "lra-original": {
                "pretrain_mask_prob": 0.1,
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
    def source(cls, level: str) -> Source | None:
        return _RELEASE if cls.levels[level].is_release else None

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
        """Return the majority class, and the most frequent label of the root operator, which reads one token."""
        train, test = self.split("train"), self.split("test")
        labels = train.labels.numpy(), test.labels.numpy()
        first = train.tokens[:, 0].numpy(), test.tokens[:, 0].numpy()
        return {
            "majority": majority_floor(*labels),
            "root_operator": lookup_floor(first[0], labels[0], first[1], labels[1]),
        }

    def references(self) -> dict[str, float]:
        """Return what reading the tree to some depth gives: rungs of the `ladder` that do not read the whole tree."""
        rungs = self.ladder(min(_DEEPEST_RUNG, self.config.grammar.max_depth - 2))[1:]
        return {f"reads_depth_{rung.depth}": rung.accuracy for rung in rungs}

    def ladder(self, deepest: int = 8) -> list[Rung]:
        """Return what reading the tree to each depth from 0 to `deepest` gives; nothing where rows are cut short."""
        train, test = self.split("train"), self.split("test")
        if not (has_whole_trees(train) and has_whole_trees(test)):
            return []
        return ladder(train, test, range(deepest + 1))

    def show(self, example: Example) -> str:
        return f"{show_tokens(example.tokens.tolist())} = {int(example.label)}"

    def symbols(self, tokens: Tensor) -> list[str]:
        return words_of(tokens.tolist())

    def export(self, name: SplitName, out: Path) -> list[Path]:
        """Write a split in the form that Long Range Arena publishes, columns Source and Target."""
        return export_tsv(self.split(name), out)

    def _load(self) -> dict[SplitName, Split]:
        if self.config.is_release:
            paths = _RELEASE.locate(self.data_dir)
            return {name: padded(*read_tsv(paths[name]), self.spec.max_seq_len) for name in STREAMS}
        if self.config.num_train < _CACHED_FROM:
            return generate_splits(self.config)
        name = f"{self.name}-{self.level}-{self.digest(self.level)}"
        return cached_splits(name, lambda: generate_splits(self.config))
