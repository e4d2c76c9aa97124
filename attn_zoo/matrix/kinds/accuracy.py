"""`[[accuracy]]`: training runs, variants x seeds on tasks; refused before anything trains where they cannot be.

What a variant refuses is asked with the same words as when the model is built, so that nothing trains for hours beside
cells that were never possible. Whether weights pretrained in one direction fit the other is seen when both are built,
as `attn-zoo plan` does.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from torch import nn

from attn_zoo.conformance import gate_model
from attn_zoo.errors import AttnZooError, ConfigError, UnknownNameError, UnsupportedError, suggestion
from attn_zoo.matrix.cell.outcomes import run_one
from attn_zoo.matrix.cell.tracking import tracked
from attn_zoo.matrix.cell.trial import in_phase
from attn_zoo.matrix.kinds.kind import (
    AbstractKind,
    Axis,
    Forecast,
    Group,
    Member,
    Problem,
    Seconds,
    as_axis,
    combinations,
)
from attn_zoo.matrix.plan.estimate import Estimate, training_estimate
from attn_zoo.matrix.plan.planned_cell import PlannedCell, Refusal
from attn_zoo.matrix.plan.source_digest import TRAINING_ROOMS, source_digest
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.records import TRAINING_VERSION, Cell, Record
from attn_zoo.registry import capabilities_of, tasks, variants

if TYPE_CHECKING:
    from attn_zoo.tasks import AbstractTask, TaskKind, TaskSpec
    from attn_zoo.training.protocol import Protocol

MAX_TRIALS = 256
"""More combinations than that are a search, not a grid."""

_PRETRAINING = {"pretrain_steps": ("masked", "causal"), "pretrain_mask_prob": ("masked",)}
"""Fields that say something of these kinds of pretraining only."""


def _is_idle(name: str, pretrain: str | None) -> bool:
    """Tell whether a field of a protocol changes nothing beside a kind of pretraining; None where that is not known."""
    return pretrain is not None and name in _PRETRAINING and pretrain not in _PRETRAINING[name]


class TaskGroup(Group):
    """What groups may say whose models are trained on tasks.

    Args:
        task: registered name.
        level: difficulty of the task; every task of the group must have it.
        is_causal: later tokens hidden. A choice for `token_classification` only; absent, every task has its own
            direction, and `token_classification` both sides.
        protocol: named training protocol.
        overrides: fields of the protocol that this group changes; part of the cell's key.
        timeout_s: seconds one training may take.
    """

    task: Axis[str]
    level: Axis[str] = ("short",)
    is_causal: Axis[bool] | None = None
    protocol: str = "cpu-small"
    overrides: dict[str, Any] = Field(default_factory=dict)
    timeout_s: Seconds = 7 * 86_400.0

    @property
    def num_cells(self) -> int:
        return super().num_cells * len(self.task) * len(self.level) * len(self.is_causal or (None,))


class AccuracyGroup(TaskGroup):
    """Training runs: variants x seeds on tasks. Where several values are given, every combination is a cell.

    Args:
        grid: values to try for further fields of the protocol: every combination, the same for every variant.
        data_parallel: processes that train a model together, on one device each, by `torchrun`: the same batches,
            learning rates and evaluations, so the same training up to rounding and what dropout draws. `threads` is of
            each; absent, they share the cores.
        keep_weights: store what was trained, as `weights/<key>.safetensors` in the results folder.
    """

    grid: dict[str, Axis[Any]] = Field(default_factory=dict)
    data_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    keep_weights: bool = False

    @property
    def num_cells(self) -> int:
        return super().num_cells * math.prod(len(values) for values in self.grid.values())

    def trials(self) -> list[dict[str, Any]]:
        """Return the overrides of each combination of the grid, the group's included; of equal trainings the first."""
        distinct: dict[str, dict[str, Any]] = {}
        for trial in combinations(self.grid):
            overrides = {**self.overrides, **trial}
            says = {name: value for name, value in overrides.items() if not _is_idle(name, overrides.get("pretrain"))}
            distinct.setdefault(repr(sorted(says.items())), overrides)
        return list(distinct.values())


class Accuracy(AbstractKind):
    """One training run on one task."""

    name = "accuracy"
    group: ClassVar[type[Group]] = AccuracyGroup
    is_timed = False
    rooms = TRAINING_ROOMS

    def source_digest(self, cell: Cell) -> str:
        own, cross = super().source_digest(cell), cell.overrides.get("cross_variant")
        if not isinstance(cross, str) or cross not in variants or cross == cell.variant:
            return own
        return own[:8] + source_digest(variants[cross], self.rooms, cell.device)[:8]

    def problems(self, group: Mapping[str, Any], where: str) -> list[Problem]:
        problems: list[Problem] = []
        given = group.get("level", list(TaskGroup.model_fields["level"].default))
        levels = [level for level in as_axis(given) if isinstance(level, str)]
        names = group.get("task", ())
        for index, name in enumerate(as_axis(names)):
            if not isinstance(name, str):
                continue
            path = f"{where}.task[{index}]" if isinstance(names, list) else f"{where}.task"
            try:
                task = tasks[name]
            except UnknownNameError as error:
                problems.append((path, str(error)))
                own = _protocol_problems({}, group, where)  # values may be right under the task's settings, names not
                problems += [problem for problem in own if problem[1].startswith("unknown ")]
                continue
            problems += _level_problems(task, levels, group, where)
            problems += _protocol_problems(task.settings, group, where)
        return list(dict.fromkeys(problems))

    def expand(self, group: Any, members: Sequence[Member], data_dir: Path | None) -> Iterator[PlannedCell]:
        from attn_zoo.training.protocol import protocol_of  # loads the backbone: only where it trains

        known = cache(partial(_known_of, data_dir=data_dir))  # it hashes files
        for member, task, level in itertools.product(members, group.task, group.level):
            data = known(task, level)
            own = _directions_of(data.spec.kind)[:1] if data.spec else (False,)
            for is_causal, dtype, overrides in itertools.product(group.is_causal or own, group.dtypes, group.trials()):
                first = Cell(
                    kind=self.name,
                    device=group.device,
                    threads=group.threads,
                    data_parallel=group.data_parallel,
                    dtype=dtype,
                    is_causal=is_causal,
                    task=task,
                    level=level,
                    protocol=group.protocol,
                    overrides=overrides,
                    grid=tuple(sorted(group.grid)),
                    data_digest=data.digest,
                    protocol_version=TRAINING_VERSION,
                    **member,
                )
                protocol = protocol_of(first)
                # Equal cells must have equal keys, and 1 == 1.0 while their JSON differs: as the protocol has them.
                values = {name: getattr(protocol, name) for name in overrides}
                first = replace(first, overrides=values, variant_digest=self.source_digest(first))
                refusal = data.missing if data.spec is None else _refusal(first, data.spec, protocol) or data.missing
                for seed in group.seeds:
                    yield PlannedCell(
                        # A copy of its own for every cell, without tuples, as it comes back from a file.
                        cell=replace(first, seed=seed, overrides=json.loads(json.dumps(values))),
                        refusal=refusal,
                        timeout_s=group.timeout_s,
                        keep_weights=group.keep_weights,
                    )

    def estimate(self, item: PlannedCell) -> Estimate:
        from attn_zoo.training.protocol import protocol_of

        protocol = protocol_of(item.cell)
        spec = tasks[str(item.cell.task)](str(item.cell.level)).spec
        num_steps = protocol.num_steps + (protocol.pretrain_steps if protocol.pretrain else 0)
        return training_estimate(item, protocol, spec, num_steps)

    def is_probed(self, cell: Cell) -> bool:
        return bool(cell.overrides.get("pretrain"))

    def build_on_meta(self, cell: Cell) -> None:
        """Build both forms of what is pretrained: whether the weights of one fit the other nothing else can tell."""
        from attn_zoo.training.loop import make_trainer
        from attn_zoo.training.protocol import protocol_of
        from attn_zoo.training.run import make_pretrainer

        protocol = protocol_of(cell)
        if protocol.pretrain:
            spec = tasks[str(cell.task)](str(cell.level)).spec
            trainer, config = make_trainer(cell, spec, protocol)  # with memory, which is little
            pretrainer = make_pretrainer(config, trainer.batcher, protocol, seed=cell.seed, dtype=cell.dtype)
            pretrainer.check(trainer.objective.encoder(trainer.model))

    def forecast(self) -> Forecast:
        return TrainingForecast()

    def run(
        self,
        order: WorkOrder,
        records: Sequence[Record],
        tell: Callable[[int], object],  # noqa: ARG002 - there is one cell
        room_bytes: int | None,
    ) -> list[Record]:
        return run_one(records, partial(self.measure, order), room_bytes)

    def measure(self, order: WorkOrder, record: Record, phases: dict[str, float]) -> Record:
        """Return the record of a cell with what it gave; whatever stops it is raised."""
        require_same_data(record.cell, order)
        with in_phase(phases, "training"):
            return train(record, order)


def data_dir_of(order: WorkOrder) -> Path | None:
    """Return where tasks find local data."""
    return Path(order.data_dir) if order.data_dir else None


def require_same_data(cell: Cell, order: WorkOrder) -> None:
    """Raise `ConfigError` if the data of a cell are no longer what the plan saw."""
    data_dir = data_dir_of(order)
    if cell.data_digest and tasks[str(cell.task)].digest(str(cell.level), data_dir=data_dir) != cell.data_digest:
        raise ConfigError(str(cell.task), [("", "its data were changed while the matrix ran; run again")])


def train(record: Record, order: WorkOrder, begin: Callable[[nn.Module], object] | None = None) -> Record:
    """Train and score the variant of a cell; `begin` is given the model before it is checked and trained."""
    from attn_zoo.training import run_training  # loads the backbone: only where it trains

    cell = record.cell
    checks: dict[str, None] = {}

    def check(model: nn.Module, has_padding: bool) -> None:
        if begin is not None:
            begin(model)
        held = gate_model(model, dtype=cell.dtype, device=cell.device, has_padding=has_padding)
        checks.update(dict.fromkeys(held))

    with tracked(cell) as log:
        result = run_training(
            cell,
            data_dir=data_dir_of(order),
            checkpoint_dir=Path(order.checkpoint_dir) if order.checkpoint_dir else None,
            weights_path=Path(order.weights_dir) / f"{cell.key}.safetensors" if order.weights_dir else None,
            before_training=check,
            after_evaluation=log,
        )
    return replace(
        record,
        status=result.status,
        reason=result.reason,
        gate=(*checks, *result.checks),
        score=result.score,
        kernels=tuple(result.kernels),
        num_params=result.num_params,
        is_simulated=capabilities_of(cell.variant, cell.options).is_simulated,
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """What can be known about a task at a level without making its data.

    Args:
        digest: of its data; empty where they are not here.
        spec: None where only the data could say.
        missing: why the data are not here, and how to get them.
    """

    digest: str = ""
    spec: TaskSpec | None = None
    missing: Refusal | None = None


def _known_of(task: str, level: str, data_dir: Path | None) -> _Known:
    """Return what can be known; hashes the files that the task reads, so ask once.

    Raises:
        ConfigError: the files are here, and are not what they should be.
    """
    spec = None
    try:
        spec = tasks[task](level, data_dir=data_dir).spec
        return _Known(tasks[task].digest(level, data_dir=data_dir), spec)
    except (UnsupportedError, ConfigError) as error:
        source = tasks[task].source(level)
        if isinstance(error, ConfigError) and source is not None and source.found(data_dir) is not None:
            raise
        reason = source and source.why_missing(data_dir)  # without the folders of this machine: it goes into a record
        return _Known(spec=spec, missing=("data", reason or str(error)))


def _refusal(cell: Cell, spec: TaskSpec, protocol: Protocol) -> Refusal | None:
    """Return what the variants of a training, or training itself, refuse."""
    from attn_zoo.training.batches import Batcher
    from attn_zoo.training.protocol import capabilities_of_both, require

    try:
        # A multiple of a length, or a CLS vector, may need padding that the task has not.
        batcher = Batcher(spec, protocol, capabilities_of_both(cell, protocol), cell.device)
        require(cell, spec, protocol, has_mask=batcher.has_mask)
    except UnsupportedError as error:
        return (error.capability, error.reason)
    return None


def _directions_of(kind: TaskKind) -> tuple[bool, ...]:
    """Return what `is_causal` may be for a kind of task, the default first."""
    if kind == "token_classification":
        return (False, True)
    return (kind == "causal_lm",)


def _level_problems(
    task: type[AbstractTask], levels: list[str], group: Mapping[str, Any], where: str
) -> Iterator[Problem]:
    from attn_zoo.training.batches import POOLED_KINDS

    is_causal = group.get("is_causal")
    for level in levels:
        try:
            kind = task(level).spec.kind  # makes no data
        except UnknownNameError as error:
            yield f"{where}.level", str(error)
            continue
        except AttnZooError:
            continue  # its data say how it is, and they are not here: the plan will refuse the cell
        allowed = _directions_of(kind)
        for wanted in () if is_causal is None else as_axis(is_causal):
            if isinstance(wanted, bool) and wanted not in allowed:
                text = f"expected {str(allowed[0]).lower()} or nothing, for {task.name} is of kind {kind}"
                yield f"{where}.is_causal", f"{text}; got {str(wanted).lower()}"
        for path, given in (("overrides", group.get("overrides")), ("grid", group.get("grid"))):
            if kind not in POOLED_KINDS and isinstance(given, Mapping) and "pooling" in given:
                text = f"expected nothing, for {task.name} is of kind {kind}, whose models pool nothing"
                yield f"{where}.{path}.pooling", f"{text}; got {given['pooling']!r}"


def _protocol_problems(settings: Mapping[str, Any], group: Mapping[str, Any], where: str) -> list[Problem]:
    """Check the protocol under a task's settings: with the overrides alone, then with every combination of the grid."""
    from attn_zoo.training.protocol import Protocol, resolve_protocol

    protocol = group.get("protocol", TaskGroup.model_fields["protocol"].default)
    overrides, grid = group.get("overrides", {}), group.get("grid", {})
    if not (isinstance(protocol, str) and isinstance(overrides, dict) and isinstance(grid, dict)):
        return []
    twice = sorted(set(overrides) & set(grid))
    problems = [(f"{where}.grid.{name}", "is in overrides too; a field is either set or tried") for name in twice]
    known = [item.name for item in fields(Protocol)]
    for path, given in (("overrides", overrides), ("grid", grid)):
        for name in given:
            if isinstance(name, str) and name not in known:
                text = f"unknown field of a protocol{suggestion(name, known)}  (attn-zoo list protocols --json has all)"
                problems.append((f"{where}.{path}.{name}", text))
    overrides = {name: value for name, value in overrides.items() if name in known}  # then the others are checked too
    axes = {name: as_axis(grid[name]) for name in known if name in grid and name not in twice and grid[name] != []}
    count = math.prod(len(values) for values in axes.values())
    if count > MAX_TRIALS:
        problems.append((f"{where}.grid", f"expected at most {MAX_TRIALS:,} combinations; got {count:,}"))
        axes = {}
    for path, name in [
        ("overrides", overrides.get("cross_variant")),
        *(("grid", n) for n in axes.get("cross_variant", ())),
    ]:
        if isinstance(name, str) and name not in variants:
            problems.append((f"{where}.{path}.cross_variant", f"unknown variant {name!r}{suggestion(name, variants)}"))
    trained: list[Protocol] = []  # of every combination
    wrong: list[Sequence[Problem]] = []  # of the overrides alone, then of each trial
    trials = combinations(axes) if axes else []
    for trial in [{}, *trials]:
        changes = {**overrides, **trial}
        resolve = partial(resolve_protocol, protocol, task_settings=settings.get(protocol))
        try:
            resolved = resolve(overrides=changes)
        except UnknownNameError as error:
            return [*problems, (f"{where}.protocol", str(error))]
        except ConfigError as error:
            wrong.append([*error.problems, *_further_problems(resolve, changes, error.problems)])
            continue
        wrong.append(())
        if trial or not axes:
            trained.append(resolved)
    # What is wrong with the overrides alone may be right beside a field that the grid sets.
    always = [
        problem
        for problem in wrong[0]
        if all(problem in of_trial or any(key in axes for key, _ in of_trial) for of_trial in wrong[1:])
    ]
    problems += [(f"{where}.overrides.{key}" if key else f"{where}.overrides", text) for key, text in always]
    for key, text in (problem for of_trial in wrong[1:] for problem in of_trial if problem not in always):
        # A field may be wrong beside one that the grid sets; then it stands elsewhere.
        problems.append((f"{where}.grid.{key}", text) if key in axes else (f"{where}.grid", f"{key}: {text}"))
    if not problems:
        for path, given in (("overrides", overrides), ("grid", axes)):
            problems += [(f"{where}.{path}.{name}", text) for name, text in _idle_problems(given, trained)]
    ranks = group.get("data_parallel", 1)
    smallest = min((each.batch_size for each in trained), default=math.inf)
    if isinstance(ranks, int) and ranks > smallest:
        text = f"expected at most batch_size, {smallest}, so that every process has an example; got {ranks}"
        problems.append((f"{where}.data_parallel", text))
    return problems


def _further_problems(
    resolve: Callable[..., Protocol], changes: Mapping[str, Any], told: Sequence[Problem]
) -> list[Problem]:
    """Return what is wrong beside the problems `told`: values are looked at only where all have their types.

    What names one of those fields may be wrong only because its value is the protocol's here.
    """
    known = {key.partition(".")[0] for key, _ in told}
    try:
        resolve(overrides={name: value for name, value in changes.items() if name not in known})
    except ConfigError as error:
        return [each for each in error.problems if known.isdisjoint(re.findall(r"\w+", " ".join(each)))]
    return []


def _idle_problems(given: Mapping[str, Any], trained: Sequence[Protocol]) -> Iterator[Problem]:
    """Yield which fields of a pretraining are given though no combination pretrains: they would change keys alone."""
    for name, needed in _PRETRAINING.items():
        if name in given and all(_is_idle(name, each.pretrain) for each in trained):
            got = ", ".join(sorted({repr(each.pretrain) for each in trained}))
            yield name, f"expected pretrain = {' or '.join(map(repr, needed))} beside it; got {got}"


class TrainingForecast(Forecast):
    """From the same training with another seed, or else from ever less similar ones, or the estimate of the plan."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def add(self, record: Record) -> None:
        if record.status == "ok" and record.score is not None:
            for likeness in self._likenesses(record.cell):
                self._seconds.setdefault(likeness, []).append(record.duration_s)

    def seconds(self, item: PlannedCell) -> float:
        known = (self._seconds[likeness] for likeness in self._likenesses(item.cell) if likeness in self._seconds)
        return mean(next(known, [item.estimate_s or 0.0]))

    @staticmethod
    def _likenesses(cell: Cell) -> Iterator[str]:
        """Yield what must be equal, most first: all but the seed, all but the trial too, task and protocol alone."""
        place = [cell.task, cell.level, cell.protocol, cell.device, cell.data_parallel]
        fixed = {name: value for name, value in cell.overrides.items() if name not in cell.grid}
        for extra in ([cell.label, cell.dtype, cell.overrides], [cell.label, cell.dtype, fixed], []):
            yield json.dumps([*place, *extra], sort_keys=True)
