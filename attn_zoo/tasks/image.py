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
from attn_zoo.tasks.abstract_task import AbstractFileTask, Example, Split, SplitName, TaskSpec
from attn_zoo.tasks.floors.linear_model import linear_floor
from attn_zoo.tasks.floors.lookup_rules import majority_floor
from attn_zoo.tasks.picture_files import decode_picture, export_images
from attn_zoo.tasks.sources.parquet import class_labels, picture_bytes, read_parquet, require_columns
from attn_zoo.tasks.sources.source import Source

if TYPE_CHECKING:
    import datasets

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
    hub_files={"train": "plain_text/train-00000-of-00001.parquet", "test": "plain_text/test-00000-of-00001.parquet"},
    num_bytes=143_646_105,
)

_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_COLUMN = "img"
_SHADES = " ░▒▓█"
_WEIGHTS = np.array([0.2989, 0.5870, 0.1140], np.float32)
_SIDE = 32
_VALIDATION_SHARE = 10  # the last tenth of train


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
    """Return the grey levels of all pictures, `[N, 32, 32]`, decoding one at a time.

    Only the bytes in the table are read: its `path` may be an address, which `datasets` would fetch.
    """
    greys = np.empty((len(table), _SIDE, _SIDE), np.uint8)
    for row, stored in enumerate(picture_bytes(table, _COLUMN)):
        try:
            greys[row] = grey_levels(decode_picture(stored or b"", "RGB", (_SIDE, _SIDE)))
        except ValueError as error:
            raise ConfigError(PICTURES.name, [(str(path), f"row {row}: {error}")]) from None
    return greys


def grey_levels(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return grey levels 0..255 `[..., rows, columns]` of colours `[..., rows, columns, 3]`.

    0.2989 red + 0.5870 green + 0.1140 blue of colours scaled to [0, 1], times 255.5, cut to an integer, in float32:
    `tf.image.rgb_to_grayscale`, on which Long Range Arena's Image rests. Pillow's "L" has other weights and rounds; on
    CIFAR-10 one pixel in five differs, by one level.

    >>> grey_levels(np.array([[[255, 255, 255], [255, 0, 0]]], np.uint8)).tolist()
    [[255, 76]]
    """
    scaled = pictures.astype(np.float32) * np.float32(1.0 / 255.0)
    grey = scaled[..., 0] * _WEIGHTS[0] + scaled[..., 1] * _WEIGHTS[1] + scaled[..., 2] * _WEIGHTS[2]
    levels: NDArray[np.uint8] = (grey * np.float32(255.5)).astype(np.uint8)
    return levels


def halved(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the mean of each square of four pixels, halves rounded up, `[..., rows / 2, columns / 2]`.

    >>> halved(np.array([[0, 1], [1, 0]], np.uint8)).tolist()
    [[1]]
    """
    *front, rows, columns = pictures.shape
    squares = pictures.reshape(*front, rows // 2, 2, columns // 2, 2).astype(np.uint16)
    means: NDArray[np.uint8] = ((squares.sum((-3, -1)) + 2) // 4).astype(np.uint8)
    return means


def block_picture(levels: NDArray[np.integer]) -> str:
    """Return grey levels `[rows, columns]` as text, two block characters for each pixel.

    >>> block_picture(np.array([[255, 64]]))
    '██░░'
    """
    shades = levels.astype(np.int64) * len(_SHADES) // 256
    return "\n".join("".join(_SHADES[shade] * 2 for shade in row) for row in shades)


_STEPS = {"num_steps": 35_000, "warmup_steps": 175, "eval_every": 175, "pretrain_mask_prob": 0.5}


@final
@register_task("image")
class Image(AbstractFileTask):
    """Ten classes of pictures from their grey levels, at one level."""

    version: ClassVar[int] = 1
    files: ClassVar[Source] = PICTURES
    levels: ClassVar[Mapping[str, ImageLevel]] = MappingProxyType(
        {
            "short": ImageLevel(is_halved=True, max_train=10_000, max_validation=1_000, max_test=2_000),
            "lra": ImageLevel(),
        }
    )
    # The release has queries, keys and values 64 wide in all beside embeddings of 128: 8 heads of 8. Its
    # cosine, too, begins at the end of warm-up, but is as long as the whole training; ours ends with the last step.
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "cpu-small": {"pretrain_mask_prob": 0.5},
            "lra-small": {"batch_size": 256, **_STEPS},
            "lra-original": {
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
                **_STEPS,
            },
        }
    )

    @property
    def is_slow(self) -> bool:
        return True

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
        if not held_out:
            problem = f"expected at least {_VALIDATION_SHARE} pictures; got {len(labels['train'])}"
            raise ConfigError(PICTURES.name, [(str(paths["train"]), problem)])
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
        return Split.without_padding(tokens, torch.from_numpy(labels.copy()))

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
