"""Image: which of ten things does a grey picture show, read pixel by pixel? CIFAR-10 as in Long Range Arena.

Krizhevsky 2009. Each of 32 x 32 pixels is a token 0..255, row after row; no normalisation, no augmentation. Nothing is
padding: level 0 is a black pixel. (Long Range Arena and its ports mask token 0, so no position attends to black.)

Levels:
    lra: 1 024 tokens; the last tenth of train is validation, 45 000 / 5 000 / 10 000. In the hub's order of rows, which
        is not proven to be the one of TensorFlow Datasets.
    short: for CPUs: means of 2 x 2 pixels, 256 tokens, at most 10 000 / 1 000 / 2 000.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray

from attn_zoo.errors import ConfigError
from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import Example, Split, SplitName, TaskSpec
from attn_zoo.tasks.file_task import AbstractFileTask
from attn_zoo.tasks.floors.linear_model import linear_floor
from attn_zoo.tasks.floors.lookup_rules import majority_floor
from attn_zoo.tasks.grey import block_picture, grey_levels, halved
from attn_zoo.tasks.labelled import class_labels, require_columns
from attn_zoo.tasks.picture_files import export_images
from attn_zoo.tasks.sources.parquet import read_parquet
from attn_zoo.tasks.sources.source import Source

if TYPE_CHECKING:
    import datasets

__all__ = ["PICTURES", "Image", "ImageLevel"]

PICTURES = Source(
    name="CIFAR-10",
    folder="cifar10/plain_text",
    files={"train": "train-00000-of-00001.parquet", "test": "test-00000-of-00001.parquet"},
    hint="The hub has them as uoft-cs/cifar10, 144 MB: attn-zoo data fetch image",
    terms="no licence known; cite Krizhevsky 2009",
    sha256={
        "train": "8428b53a88a11ac374111006708df51469e315a22ac6d66470afd9c78d2ae883",
        "test": "841389e6f2d64f28bf17310e430aebac20ec3ba611a3c5e231dc93c645ce84de",
    },
    hub="uoft-cs/cifar10",
    revision="0b2714987fa478483af9968de7c934580d0bb9a2",
    hub_files={
        "train": "plain_text/train-00000-of-00001.parquet",
        "test": "plain_text/test-00000-of-00001.parquet",
    },
    num_bytes=143_646_105,
)

_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_COLUMN = "img"
_SIDE = 32
_VALIDATION_SHARE = 10  # the last of so many parts of train


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLevel:
    """One level.

    Args:
        is_halved: pixels are means of 2 x 2.
        max_train: pictures, from the first; 0 takes all.
        max_validation: likewise.
        max_test: likewise.
    """

    is_halved: bool = False
    max_train: int = 0
    max_validation: int = 0
    max_test: int = 0


def _greys(path: Path, table: datasets.Dataset) -> NDArray[np.uint8]:
    """Return the grey levels of all pictures, `[N, 32, 32]`, decoding one at a time."""
    greys = np.empty((len(table), _SIDE, _SIDE), np.uint8)
    rows = iter(table.select_columns([_COLUMN]))
    for row in range(len(table)):
        expected = f"expected 8-bit colours ({_SIDE}, {_SIDE}, 3) in row {row}"
        try:
            picture = next(rows)[_COLUMN]
            colours = None if picture is None else np.asarray(picture)
        except (OSError, SyntaxError) as error:  # what Pillow raises at broken files
            raise ConfigError(PICTURES.name, [(str(path), f"{expected}; it cannot be decoded: {error}")]) from None
        if colours is None or colours.shape != (_SIDE, _SIDE, 3) or colours.dtype != np.uint8:
            got = "nothing" if colours is None else f"{colours.dtype} {colours.shape}"
            raise ConfigError(PICTURES.name, [(str(path), f"{expected}; got {got}")])
        greys[row] = grey_levels(colours)
    return greys


@final
@register_task("image")
class Image(AbstractFileTask):
    """Ten classes of pictures from their grey levels, at one level.

    Args:
        level: one of `levels`.
        data_dir: folder with the pictures, where they were not fetched.
    """

    name: ClassVar[str] = "image"
    version: ClassVar[int] = 1
    files: ClassVar[Source] = PICTURES
    is_slow: ClassVar[bool] = True
    levels: ClassVar[Mapping[str, ImageLevel]] = MappingProxyType(
        {
            "short": ImageLevel(is_halved=True, max_train=10_000, max_validation=1_000, max_test=2_000),
            "lra": ImageLevel(),
        }
    )
    # The release has queries, keys and values 64 wide in all beside embeddings of 128: 8 heads of 8. Its one cycle of
    # the cosine counts from step 0; ours runs from the end of warm-up.
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "cpu-small": {"pretrain_mask_prob": 0.5},
            "lra-small": {
                "batch_size": 256,
                "num_steps": 35_000,
                "warmup_steps": 175,
                "eval_every": 175,
                "pretrain_mask_prob": 0.5,
            },
            "lra-original": {
                "pretrain_mask_prob": 0.5,
                "num_layers": 1,
                "embed_dim": 128,
                "num_heads": 8,
                "head_dim": 8,
                "ffn_dim": 128,
                "position": "learned",
                "dropout_p": 0.2,
                "resid_dropout_p": 0.3,
                "weight_decay": 0.0,
                "base_lr": 5e-4,
                "schedule": "cosine",
                "batch_size": 256,
                "num_steps": 35_000,
                "warmup_steps": 175,
                "eval_every": 175,
            },
        }
    )

    @property
    def image_shape(self) -> tuple[int, int]:
        """Rows and columns of the picture behind a sequence."""
        side = _SIDE // 2 if self.config.is_halved else _SIDE
        return side, side

    @property
    def spec(self) -> TaskSpec:
        rows, columns = self.image_shape
        return TaskSpec(
            vocab_size=256,
            num_classes=len(_CLASSES),
            max_seq_len=rows * columns,
            metric="accuracy",
            chance=1 / len(_CLASSES),
            kind="classification",
            has_padding=False,
        )

    def read(self, paths: dict[str, Path]) -> dict[SplitName, Split]:
        tables = read_parquet(PICTURES.name, paths)
        greys, labels = {}, {}
        for key, table in tables.items():
            require_columns(PICTURES.name, paths[key], table, {_COLUMN: "Image("})
            labels[key] = class_labels(PICTURES.name, paths[key], table, _CLASSES)
            greys[key] = _greys(paths[key], table)
        held_out = len(labels["train"]) // _VALIDATION_SHARE
        first = len(labels["train"]) - held_out
        return {
            "train": self._split(greys["train"][:first], labels["train"][:first], self.config.max_train),
            "validation": self._split(greys["train"][first:], labels["train"][first:], self.config.max_validation),
            "test": self._split(greys["test"], labels["test"], self.config.max_test),
        }

    def _split(self, greys: NDArray[np.uint8], labels: NDArray[np.uint8], max_count: int) -> Split:
        greys, labels = greys[: max_count or None], labels[: max_count or None]
        pixels = halved(greys) if self.config.is_halved else greys
        tokens = torch.from_numpy(np.ascontiguousarray(pixels.reshape(len(pixels), -1)))
        lengths = torch.full((len(tokens),), tokens.shape[1], dtype=torch.int16)
        return Split(tokens=tokens, lengths=lengths, labels=torch.from_numpy(labels.copy()))

    def floors(self) -> dict[str, float]:
        """Return the majority class and logistic regression on pixels."""
        train, test = self.split("train"), self.split("test")
        labels = train.labels.numpy(), test.labels.numpy()
        pixels = train.tokens.numpy().astype(np.float32), test.tokens.numpy().astype(np.float32)
        return {
            "majority": majority_floor(*labels),
            "linear_on_pixels": linear_floor(pixels[0], labels[0], pixels[1], labels[1]),
        }

    def export(self, name: SplitName, out: Path) -> list[Path]:
        return export_images(self.split(name), out, self.image_shape)

    def show(self, example: Example) -> str:
        picture = block_picture(example.tokens.numpy().reshape(self.image_shape))
        return f"{picture}\n= {_CLASSES[int(example.label)]}"
