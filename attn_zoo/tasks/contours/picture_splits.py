"""Whole splits of Pathfinder: drawn by all cores, kept in the cache.

Each picture has a random stream of its own (seed, split, index), so a split does not depend on how many processes draw
it, nor its first pictures on how many follow.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_zoo.tasks.abstract_task import SplitName
from attn_zoo.tasks.contours.pictures import draw_pictures
from attn_zoo.tasks.contours.scene import Scene
from attn_zoo.tasks.sources.tensor_cache import cached_tensors

__all__ = ["distinct_splits", "drawn_split", "generate"]

_VERSION = 1  # raise it when a seed would give other pictures
_STREAMS: dict[SplitName, int] = {"test": 0, "validation": 1, "train": 2}
_SPARE = 10  # one further picture for so many, to replace those that occurred before
_PICTURES_PER_CHUNK = 1_024
_FEW_CHUNKS = 4  # are drawn sooner than processes have started
_SAY_EVERY_S = 30.0

Grey = NDArray[np.uint8]


def _chunk(scene: Scene, seed: int, stream: int, first: int, count: int) -> tuple[int, Grey, Grey]:
    pictures = draw_pictures(scene, seed=seed, stream=stream, index=np.arange(first, first + count))
    return first, pictures.pixels.reshape(count, -1), pictures.labels


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def generate(
    scene: Scene, *, seed: int, stream: int, count: int, num_processes: int | None = None
) -> tuple[Grey, Grey]:
    """Draw the first `count` pictures of a stream: grey levels `[count, side^2]`, labels `[count]`.

    Args:
        scene: what they look like.
        seed: of the data.
        stream: names the split.
        count: of pictures.
        num_processes: that share the work; all cores by default. Where none can be started (in a daemon, or from a
            script without a main guard) this process does it all.
    """
    pixels, labels = np.empty((count, scene.side**2), np.uint8), np.empty(count, np.uint8)
    jobs = [
        (scene, seed, stream, first, min(_PICTURES_PER_CHUNK, count - first))
        for first in range(0, count, _PICTURES_PER_CHUNK)
    ]
    say = _progress(scene, count)
    done = 0

    def keep(first: int, grey: Grey, label: Grey) -> None:
        nonlocal done
        pixels[first : first + len(grey)], labels[first : first + len(grey)] = grey, label
        done += len(grey)
        say(done)

    if num_processes is None:
        num_processes = min(_num_cores(), len(jobs)) if len(jobs) > _FEW_CHUNKS else 1
    left = dict.fromkeys(jobs)
    if num_processes > 1:
        try:
            with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
                running = {pool.submit(_chunk, *job): job for job in jobs}
                for future in as_completed(running):
                    keep(*future.result())
                    del left[running[future]]
        except (BrokenProcessPool, AssertionError, OSError):
            pass  # what is left is drawn below
    for job in left:
        keep(*_chunk(*job))
    return pixels, labels


def _progress(scene: Scene, count: int) -> Callable[[int], None]:
    """Return a function that now and then says how far the drawing is, on standard error."""
    began = said = time.monotonic()

    def say(done: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _SAY_EVERY_S and done < count:
            said = now
            left = (now - began) / done * (count - done) / 60
            sys.stderr.write(
                f"pathfinder: {done:,} of {count:,} pictures of {scene.side} pixels drawn, about {left:.0f} min left "
                "(once; they are kept in the cache)\n"
            )

    return say


def drawn_split(scene: Scene, *, seed: int, name: SplitName, count: int) -> dict[str, Tensor]:
    """Return `tokens` uint8 `[count, side^2]` and `labels` uint8 `[count]` of a split; levels that share it share it.

    Args:
        scene: what the pictures look like.
        seed: of the data.
        name: of the split.
        count: of pictures.
    """

    def make() -> dict[str, Tensor]:
        pixels, labels = generate(scene, seed=seed, stream=_STREAMS[name], count=count)
        return {"tokens": torch.from_numpy(pixels), "labels": torch.from_numpy(labels)}

    described = json.dumps([_VERSION, asdict(scene), seed, count], sort_keys=True)
    mark = hashlib.sha256(described.encode()).hexdigest()[:16]
    return cached_tensors(f"pathfinder-{scene.side}-{name}-{mark}", make)


def distinct_splits(scene: Scene, *, seed: int, counts: Mapping[SplitName, int]) -> dict[SplitName, dict[str, Tensor]]:
    """Return splits without a picture that occurs twice or in two of them, for scenes so small that this happens.

    Pictures stay in the order of drawing; test is filled first, then validation, then train.

    Args:
        scene: what the pictures look like.
        seed: of the data.
        counts: pictures of each split.

    Raises:
        ValueError: the scene has fewer distinct pictures.
    """
    seen: set[bytes] = set()
    splits = {}
    for name in _STREAMS:
        count = counts[name]
        drawn = drawn_split(scene, seed=seed, name=name, count=count + count // _SPARE + _SPARE)
        rows: list[int] = []
        for row, picture in enumerate(drawn["tokens"].numpy()):
            mark = picture.tobytes()
            if len(rows) < count and mark not in seen:
                seen.add(mark)
                rows.append(row)
        if len(rows) < count:
            raise ValueError(f"expected {count} distinct pictures for {name}; {len(drawn['tokens'])} held {len(rows)}")
        splits[name] = {key: tensor[torch.tensor(rows)] for key, tensor in drawn.items()}
    return splits
