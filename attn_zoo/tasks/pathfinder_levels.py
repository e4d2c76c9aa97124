"""The levels of Pathfinder, and where pictures come from that are read.

Parameters of the scenes: the docstrings of google-research/long-range-arena, lra_benchmarks/data/pathfinder.py; for 9
and 6 paddles, drewlinsley/pathfinder, snakes2_wrapper.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from attn_zoo.tasks.abstract_task import SplitName
from attn_zoo.tasks.contours.scene import Scene
from attn_zoo.tasks.sources.source import Source

__all__ = ["LEVELS", "ORIGINAL", "SPLITS", "PathfinderLevel", "published"]

SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")

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
class PathfinderLevel:
    """One level.

    Args:
        scene: what is drawn; of read pictures only the side counts.
        num_train: pictures drawn.
        num_validation: pictures drawn.
        num_test: pictures drawn.
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

    def count(self, name: SplitName) -> int:
        """Return the number of examples of a split that is drawn."""
        return {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}[name]


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
"""By name; what they are stands in the docstring of the task."""
