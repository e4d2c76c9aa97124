"""The cells of an accuracy group: every variant on every task, direction, trial and seed, refused where it cannot be.

What a variant refuses is asked here with the same words as when the model is built, so that nothing trains for hours
beside cells that were never possible.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.matrix.kinds.accuracy_problems import directions_of
from attn_zoo.matrix.plan.groups import AccuracyGroup
from attn_zoo.matrix.plan.planned import PlannedCell, Refusal
from attn_zoo.records import TRAINING_VERSION, Cell
from attn_zoo.registry import tasks
from attn_zoo.tasks import TaskSpec

__all__ = ["Known", "known_of", "trainings"]


@dataclass(frozen=True, slots=True)
class Known:
    """What can be known about a task at a level without making its data.

    Args:
        digest: of its data; empty where they are not here.
        spec: None where only the data could say.
        missing: why the data are not here, and how to get them.
    """

    digest: str = ""
    spec: TaskSpec | None = None
    missing: Refusal | None = None


def known_of(task: str, level: str, data_dir: Path | None) -> Known:
    """Return what can be known; hashes the files that the task reads, so ask once.

    Args:
        task: registered name.
        level: of the task.
        data_dir: where tasks find local data.
    """
    spec = None
    try:
        spec = tasks[task](level, data_dir=data_dir).spec
        return Known(tasks[task].digest(level, data_dir=data_dir), spec)
    except (UnsupportedError, ConfigError) as error:
        source = tasks[task].source(level)
        reason = source and source.why_missing(data_dir)  # without the folders of this machine: it goes into a record
        return Known(spec=spec, missing=("data", reason or str(error)))


def trainings(
    group: AccuracyGroup, common: Mapping[str, Any], known: Callable[[str, str], Known]
) -> Iterator[PlannedCell]:
    """Yield the cells of one variant in an accuracy group.

    Args:
        group: which group.
        common: fields of the cell that the caller knows: variant, label, options, digest, device, threads.
        known: `known_of` for a task and a level.
    """
    for task, level in itertools.product(group.task, group.level):
        data = known(task, level)
        own = directions_of(data.spec.kind)[:1] if data.spec else (False,)
        for is_causal, dtype, overrides in itertools.product(group.is_causal or own, group.dtypes, group.trials()):
            first = Cell(
                kind="accuracy",
                dtype=dtype,
                is_causal=is_causal,
                task=task,
                level=level,
                protocol=group.protocol,
                overrides=overrides,
                grid=tuple(sorted(group.grid)),
                data_digest=data.digest,
                protocol_version=TRAINING_VERSION,
                **common,
            )
            refusal = data.missing if data.spec is None else _refusal(first, data.spec) or data.missing
            for seed in group.seeds:
                yield PlannedCell(
                    # A copy of its own for every cell, without tuples, as it comes back from a file.
                    cell=replace(first, seed=seed, overrides=json.loads(json.dumps(overrides))),
                    refusal=refusal,
                    timeout_s=group.timeout_s,
                    keep_weights=group.keep_weights,
                )


def _refusal(cell: Cell, spec: TaskSpec) -> Refusal | None:
    """Return what the variants of a training, or training itself, refuse."""
    from attn_zoo.training.protocol import resolve_protocol  # imports the model, so only where there is training
    from attn_zoo.training.requirements import require

    assert cell.task is not None and cell.protocol is not None  # noqa: PT018  an accuracy cell has both
    settings = tasks[cell.task].settings.get(cell.protocol)
    protocol = resolve_protocol(cell.protocol, task_settings=settings, overrides=cell.overrides)
    try:
        require(cell, spec, protocol, has_mask=spec.has_padding)
    except UnsupportedError as error:
        return (error.capability, error.reason)
    return None
