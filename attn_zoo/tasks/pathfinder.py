"""Pathfinder: do two marked ends belong to one dashed contour? Two classes, a picture as a sequence of its pixels.

Linsley et al. 2018, arXiv 1805.08315; as a task for sequences Tay et al. 2020, "Long Range Arena", arXiv 2011.04006.

What is meant to be asked is whether one contour joins the markers; 50 % is chance. But where the markers lie tells it
to some degree without any contour (floor `marker_places`): 67 % at levels 32 and 32_intermediate, 77 % at 32_easy, 74 %
at 64, 80 % at short, 55 % at 128, and 68 % for the 12 000 pictures of the original generator. How far apart they lie
gives 53 to 58 %. Most of it is direction: turned and mirrored at random, pictures of 32 pixels give 57 %, ours and the
original's alike. A likely cause is that the generator rounds coordinates one way, so that its contours do not go in all
directions alike. (Fitted on 20 000 pictures at 32 and short, 12 000 at 32_intermediate and 32_easy, 9 000 of the
original's, 5 000 at 64, 3 000 at 128; scored on 1 000 to 5 000.)

Tokens are the grey levels 0 to 255 of the pixels, row by row. **No position is masked**: level 0 is black, not padding.
Long Range Arena's models mask every token whose id is 0, which hides two thirds of a picture of 32 pixels as keys;
scores obtained so are not comparable with ours.

Levels drawn by our generator (`attn_zoo.tasks.contours`), which follows the original, seeded, one stream a picture:
    32: the published task, contours of 14 paddles; 160 000 / 20 000 / 20 000, as published.
    32_intermediate, 32_easy: contours of 9 and 6 paddles, as many pictures.
    64: as 32 with 64 x 64 pixels; 40 000 / 5 000 / 5 000 (a picture takes about 30 times as long to draw as at 32).
    128: Path-X; 40 000 / 5 000 / 5 000, a quarter of what is published.
    short: for CPUs: 16 x 16 pixels and contours of 3 paddles; 20 000 / 1 000 / 2 000, none twice.
Levels read from files:
    lra_32, lra_64, lra_128: the folders of Long Range Arena. It names no split but "80 / 10 / 10 % of the order in
        which a library lists them"; ours is a seeded shuffle of all pictures.
    original_12000: pictures of 32 pixels made by the original generator, 9 600 / 1 200 / 1 200, a seeded shuffle.
    32_to_original: train and validation of `32`, tested on all of those 12 000.
    original_to_32: trained and validated on them (10 800 / 1 200), tested on the test split of `32`.
The last two should agree: if they do not, our generator is not the original's.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.errors import ConfigError
from attn_zoo.registry import register_task
from attn_zoo.tasks.abstract_task import AbstractTask, Example, Split, SplitName, TaskSpec
from attn_zoo.tasks.contours.geometry import Scene, marker_levels
from attn_zoo.tasks.contours.pictures import distinct_splits, drawn_split
from attn_zoo.tasks.floors.linear_model import linear_floor
from attn_zoo.tasks.floors.lookup_rules import lookup_floor, majority_floor
from attn_zoo.tasks.generated.draws import RowStreams, SplitSizes
from attn_zoo.tasks.picture_files import Published, export_images, listing_digest, read_folder, read_npz
from attn_zoo.tasks.sources.source import Source
from attn_zoo.tasks.sources.tensor_cache import cached_tensors

SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")

_SHUFFLE = 1_000  # a stream that no split uses
_LINE = 64  # grey levels from here on count as lit when a picture is shown
_MAX_TRAIN, _MAX_TEST = 20_000, 5_000
_MAX_LINEAR_TRAIN = 4_000
_MAX_LINEAR_PIXELS = 1_024  # more weights than that are not fitted within seconds
_MAX_TOKENS = 2**27  # looked at for markers
_PICTURES_AT_ONCE = 1_024
_DEGREE = 6  # of the polynomial: on a part of train that was not fitted, 3 and 4 do less well, 5 and 6 alike

# Parameters: the docstrings of google-research/long-range-arena, lra_benchmarks/data/pathfinder.py; for 9 and 6
# paddles, drewlinsley/pathfinder, snakes2_wrapper.py.
_HARD_32 = Scene()
_HARD_64 = Scene(
    side=64,
    seed_distance=12,
    distractor_paddles=22,
    paddle_length=5,
    paddle_thickness=1.0,
    marker_radius=2.5,
    continuity=1.8,
    snake_contrast=0.8,
    paddle_contrast=1.0,
)
_HARD_128 = Scene(
    side=128,
    seed_distance=20,
    distractor_paddles=35,
    paddle_length=5,
    paddle_thickness=1.5,
    margins=(2, 3),
    marker_radius=3.0,
    continuity=1.8,
    snake_contrast=0.9,
    paddle_contrast=1.0,
)
_SHORT = Scene(side=16, contour_length=3, seed_distance=3, distractor_paddles=2)

_FOLDER = "pathfinderN/curv_contour_length_14"  # hard; N is the side
_ARCHIVE = "https://storage.googleapis.com/long-range-arena/lra_release.gz"


def published(side: int) -> Source:
    """Return the folder of Long Range Arena with hard pictures of a size."""
    return Source(
        name=f"Pathfinder {side} of Long Range Arena",
        folder=_FOLDER.replace("N", str(side)),
        files={"metadata": "metadata/0.npy"},
        hint=f"Unpack {_ARCHIVE} (a gzipped tar) and give the folder that holds pathfinder{side} as --data-dir.",
        terms="none stated for the pictures; the generator is MIT",
    )


ORIGINAL = Source(
    name="12 000 pictures of the original Pathfinder generator",
    folder="pathfinder32-hard",
    files={"pictures": "pathfinder32_hard_12000.npz"},
    hint="Make them with drewlinsley/pathfinder (arrays x, uint8 [N, 32, 32], and y) and give their folder.",
    terms="generator MIT",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PathfinderLevel(SplitSizes):
    """One level.

    Args:
        scene: what is drawn; of read pictures only the side counts.
        seed: of the drawing, and of the split of read pictures.
        source: where pictures that are read come from.
        drawn: splits that are drawn; the read pictures are shared out among the others in the proportion 8 : 1 : 1.
        is_distinct: leave out drawn pictures that occurred before. Of 32 pixels and more none ever did.
    """

    scene: Scene = _HARD_32
    num_train: int = 160_000
    num_validation: int = 20_000
    num_test: int = 20_000
    seed: int = 0
    source: Literal["", "published", "original"] = ""
    drawn: tuple[SplitName, ...] = SPLITS
    is_distinct: bool = False


def _fewer(scene: Scene) -> PathfinderLevel:
    return PathfinderLevel(scene=scene, num_train=40_000, num_validation=5_000, num_test=5_000)


LEVELS: Mapping[str, PathfinderLevel] = MappingProxyType(
    {
        "short": PathfinderLevel(
            scene=_SHORT, num_train=20_000, num_validation=1_000, num_test=2_000, is_distinct=True
        ),
        "32": PathfinderLevel(),
        "32_intermediate": PathfinderLevel(scene=Scene(contour_length=9)),
        "32_easy": PathfinderLevel(scene=Scene(contour_length=6)),
        "64": _fewer(_HARD_64),
        "128": _fewer(_HARD_128),
        "lra_32": PathfinderLevel(source="published", drawn=()),
        "lra_64": PathfinderLevel(scene=_HARD_64, source="published", drawn=()),
        "lra_128": PathfinderLevel(scene=_HARD_128, source="published", drawn=()),
        "original_12000": PathfinderLevel(source="original", drawn=()),
        "32_to_original": PathfinderLevel(source="original", drawn=("train", "validation")),
        "original_to_32": PathfinderLevel(source="original", drawn=("test",)),
    }
)
"""Levels by name; the docstring of this module describes them."""


def _shared_out(pictures: Published, level: PathfinderLevel) -> dict[str, Tensor]:
    """Return the read pictures as the splits that are not drawn, shuffled by the seed.

    Raises:
        ConfigError: there are so few that a split would have none.
    """
    names = [name for name in SPLITS if name not in level.drawn]
    count, fewest = len(pictures.labels), 10 if len(names) > 1 else 1
    if count < fewest:
        raise ConfigError(
            "pathfinder", [("pictures", f"expected at least {fewest} for {', '.join(names)}; got {count}")]
        )
    # 80, 10, 10 %; 90, 10 % where test is drawn; all where only test is read.
    ends = [count - tenths * (count // 10) for tenths in reversed(range(len(names)))]
    order = RowStreams(level.seed, _SHUFFLE, np.arange(count)).words(np.arange(count), 1)[:, 0].argsort(kind="stable")
    tensors: dict[str, Tensor] = {"num_skipped": torch.tensor(pictures.num_skipped)}
    for name, rows in zip(names, np.split(order, ends[:-1]), strict=True):
        tensors[f"{name}.tokens"] = torch.from_numpy(pictures.pixels[rows])
        tensors[f"{name}.labels"] = torch.from_numpy(pictures.labels[rows])
    return tensors


_STEPS = {"num_steps": 62_400, "warmup_steps": 312, "eval_every": 312, "pretrain_mask_prob": 0.5}


@final
@register_task("pathfinder")
class Pathfinder(AbstractTask):
    """Pathfinder at one level.

    Settings are by task: those of `lra-original` are the published ones for 32 pixels. For 128 pixels Long Range Arena
    has one layer, 2 heads, learned positions, batches of 64, 500 000 steps with 2 500 of warm-up and gradients clipped
    at 1: set those in the matrix (`overrides`).
    """

    version: ClassVar[int] = 2
    levels: ClassVar[Mapping[str, PathfinderLevel]] = LEVELS
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "cpu-small": {"pretrain_mask_prob": 0.5},
            "lra-small": {"batch_size": 256, **_STEPS},
            "lra-original": {
                "num_layers": 4,
                "embed_dim": 32,
                "num_heads": 4,
                "head_dim": 4,
                "ffn_dim": 32,
                "position": "sinusoidal",
                "pooling": "mean",
                "dropout_p": 0.1,
                "resid_dropout_p": 0.2,
                "weight_decay": 0.0,
                "base_lr": 1e-3,
                "schedule": "cosine",
                "batch_size": 512,
                **_STEPS,
            },
        }
    )

    def __init__(self, level: str, *, data_dir: Path | None = None) -> None:
        super().__init__(level, data_dir=data_dir)
        self._splits: dict[SplitName, Split] = {}

    @classmethod
    def source(cls, level: str) -> Source | None:
        cls.check_level(level)
        config = cls.levels[level]
        if config.source == "published":
            return published(config.scene.side)
        return ORIGINAL if config.source == "original" else None

    @classmethod
    def digest(cls, level: str, *, data_dir: Path | None = None) -> str:
        digest = super().digest(level, data_dir=data_dir)
        if cls.levels[level].source != "published":
            return digest
        return hashlib.sha256((digest + listing_digest(cls._folder(level, data_dir))).encode()).hexdigest()[:16]

    @classmethod
    def _folder(cls, level: str, data_dir: Path | None) -> Path:
        """Return the published folder."""
        return published(cls.levels[level].scene.side).locate(data_dir)["metadata"].parent.parent

    @property
    def image_shape(self) -> tuple[int, int]:
        """Rows and columns of the picture behind a sequence."""
        return self.config.scene.side, self.config.scene.side

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(
            vocab_size=256,
            num_classes=2,
            max_seq_len=self.config.scene.side**2,
            metric="accuracy",
            chance=0.5,
            kind="classification",
            has_padding=False,
        )

    @property
    def num_skipped(self) -> int:
        """Pictures left out because their published file is empty."""
        return int(self._pictures["num_skipped"]) if self.config.source else 0

    def split(self, name: SplitName) -> Split:
        if name not in self._splits:
            level = self.config
            if name not in level.drawn:
                pictures = self._pictures
                self._splits[name] = Split.without_padding(pictures[f"{name}.tokens"], pictures[f"{name}.labels"])
            elif level.is_distinct:
                counts = {part: level.count(part) for part in SPLITS}
                every = distinct_splits(level.scene, seed=level.seed, counts=counts)
                self._splits = {part: Split.without_padding(**tensors) for part, tensors in every.items()}
            else:
                drawn = drawn_split(level.scene, seed=level.seed, name=name, count=level.count(name))
                self._splits[name] = Split.without_padding(**drawn)
        return self._splits[name]

    @cached_property
    def _pictures(self) -> dict[str, Tensor]:
        """The read pictures as splits."""
        side = self.config.scene.side
        if self.config.source == "original":
            return _shared_out(read_npz(ORIGINAL.locate(self.data_dir)["pictures"], side), self.config)

        def make() -> dict[str, Tensor]:
            pictures = read_folder(self._folder(self.level, self.data_dir), side)
            if pictures.num_skipped:
                sys.stderr.write(f"{self.name} {self.level}: {pictures.num_skipped} empty files skipped\n")
            return _shared_out(pictures, self.config)

        return cached_tensors(f"{self.name}-{self.level}-{self.digest(self.level, data_dir=self.data_dir)}", make)

    def floors(self) -> dict[str, float]:
        """Return what rules score that follow no contour; see `pathfinder_floors`."""
        return pathfinder_floors(self.split("train"), self.split("test"), self.config.scene)

    def show(self, example: Example) -> str:
        lit = example.tokens.numpy().reshape(self.image_shape) >= _LINE
        shades = lit[::2] + 2 * lit[1::2]  # a character shows one pixel above another
        rows = ["".join(" ▀▄█"[shade] for shade in row) for row in shades]
        answer = "one contour" if int(example.label) else "two contours"
        return "\n".join([*rows, f"= {answer}"])

    def export(self, name: SplitName, out: Path) -> list[Path]:
        return export_images(self.split(name), out, self.image_shape)


def find_markers(pictures: NDArray[np.uint8], scene: Scene) -> NDArray[np.int64]:
    """Return (row, column) of the two markers of each picture `[N, 2, 2]`, found in its pixels alone.

    A marker is where the darkest pixel of a full disk is brightest: lines are too thin for that. The second is the next
    best that does not touch the first.
    """
    middle = scene.side // 2
    rows, columns, levels = marker_levels(scene, middle, middle)
    core = np.argwhere(levels >= 250) + np.array([rows.start - middle, columns.start - middle])
    reach = int(abs(core).max())
    padded = np.pad(pictures, ((0, 0), (reach, reach), (reach, reach)))
    side = scene.side
    darkest = np.full(pictures.shape, 255, np.uint8)
    for row, column in core + reach:
        np.minimum(darkest, padded[:, row : row + side, column : column + side], out=darkest)
    markers = np.empty((len(pictures), 2, 2), np.int64)
    flat, every = darkest.reshape(len(pictures), -1), np.arange(len(pictures))
    first = flat.argmax(1)
    markers[:, 0] = np.stack(np.divmod(first, side), 1)
    near = math.ceil(scene.marker_radius)
    for row in range(-near, near + 1):
        for column in range(-near, near + 1):
            at = np.clip(markers[:, 0] + [row, column], 0, side - 1)
            flat[every, at[:, 0] * side + at[:, 1]] = 0
    markers[:, 1] = np.stack(np.divmod(flat.argmax(1), side), 1)
    return markers


def _marker_pairs(tokens: NDArray[np.uint8], scene: Scene) -> NDArray[np.float64]:
    """Return (row, column) of the marker nearer to the middle and the way from it to the other `[N, 2, 2]`, in pixels.

    Contours begin near the middle, so the nearer marker is more often the one at the beginning of a contour.
    """
    found = [
        find_markers(tokens[first : first + _PICTURES_AT_ONCE].reshape(-1, scene.side, scene.side), scene)
        for first in range(0, len(tokens), _PICTURES_AT_ONCE)
    ]
    markers = np.concatenate(found) - (scene.side - 1) / 2
    order = abs(markers).max(2).argsort(axis=1, kind="stable")
    nearer, further = np.take_along_axis(markers, order[:, :, None], 1).transpose(1, 0, 2)
    return np.stack([nearer, further - nearer], 1)


def _powers(pairs: NDArray[np.float64], scene: Scene) -> NDArray[np.float64]:
    """Return all products of one to six of the four numbers of each pair of markers, in half sides, `[N, 209]`."""
    numbers = pairs.reshape(-1, 4).T / (scene.side / 2)
    chosen = itertools.chain.from_iterable(
        itertools.combinations_with_replacement(range(4), degree) for degree in range(1, _DEGREE + 1)
    )
    return np.stack([numbers[list(factors)].prod(0) for factors in chosen], 1)


def pathfinder_floors(train: Split, test: Split, scene: Scene) -> dict[str, float]:
    """Return what rules score on test that follow no contour.

    `majority`. `marker_distance`: the most frequent label for the distance between the markers. `marker_places`:
    logistic regression on a polynomial of degree 6 of where both markers are. `linear_on_pixels`, to 32 pixels.

    Args:
        train: the first 20 000 pictures are used, fewer of large ones, and 4 000 by the linear model of pixels.
        test: the first 5 000, likewise; for the majority all.
        scene: what the pictures look like.
    """
    floors = {"majority": majority_floor(train.labels.numpy(), test.labels.numpy())}
    most = _MAX_TOKENS // scene.side**2
    parts = [(train, min(_MAX_TRAIN, most)), (test, min(_MAX_TEST, most))]
    (pixels, labels), (test_pixels, test_labels) = (
        (split.tokens[:count].numpy(), split.labels[:count].numpy()) for split, count in parts
    )
    pairs, test_pairs = _marker_pairs(pixels, scene), _marker_pairs(test_pixels, scene)
    distance, test_distance = (np.rint(np.hypot(*ways[:, 1].T)).astype(np.int64) for ways in (pairs, test_pairs))
    floors["marker_distance"] = lookup_floor(distance, labels, test_distance, test_labels)
    floors["marker_places"] = linear_floor(_powers(pairs, scene), labels, _powers(test_pairs, scene), test_labels)
    if scene.side**2 <= _MAX_LINEAR_PIXELS:
        some = slice(_MAX_LINEAR_TRAIN)
        features = pixels[some].astype(np.float32), test_pixels.astype(np.float32)
        floors["linear_on_pixels"] = linear_floor(features[0], labels[some], features[1], test_labels)
    return floors
