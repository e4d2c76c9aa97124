"""What a TOML file in `benchmarks/` may say, as frozen models. Unknown keys are errors; nothing is coerced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from attn_zoo.records import CallPass

__all__ = ["GROUPS", "MAX_CELLS", "AccuracyGroup", "Entry", "Matrix", "ScalingGroup", "StepEntry", "StepGroup"]

MAX_CELLS = 20_000
"""More is a typing error, or belongs into several matrices."""

MAX_LEN = 2**26
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
_Value = TypeVar("_Value")


def _as_axis(value: Any) -> Any:
    """Return a tuple: TOML has no tuples, and one value is an axis of one."""
    return tuple(value) if isinstance(value, list) else (value,)


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    repeated = sorted({repr(value) for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"expected each value once; {', '.join(repeated)} occurs more than once")
    return values


def _as_entry(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict | Entry):
        raise ValueError(f"expected a variant's name or a table {{name, label, options}}; got {value!r}")  # noqa: TRY004
    return value


Axis = Annotated[tuple[_Value, ...], BeforeValidator(_as_axis), AfterValidator(_distinct), Field(min_length=1)]
Length = Annotated[int, Field(ge=1, le=MAX_LEN)]
Small = Annotated[int, Field(ge=1, le=65_536)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Entry(_Model):
    """A variant in a group.

    Args:
        name: registered name.
        label: what plots and ids call it; needed where one variant occurs with several sets of options.
        options: over those of `[options.<variant>]`.
    """

    name: str
    label: str = Field(default="", max_length=40, pattern=r"^[\w.+=() -]*$")
    options: dict[str, Any] = {}


class StepEntry(Entry):
    """A variant whose training steps are timed.

    Args:
        compile: train through `torch.compile`, on a GPU as CUDA graphs.
    """

    compile: bool = False


class _Group(_Model):
    """What all kinds of group may say.

    Args:
        variants: names, or tables `{name, label, options}`.
        dtypes: floating-point types.
        seeds: one cell for each.
        device: `"auto"` takes the GPU if there is one.
        threads: CPU threads of a cell; torch decides if absent.
        timeout_s: seconds one cell may take.
    """

    variants: Annotated[tuple[Annotated[Entry, BeforeValidator(_as_entry)], ...], BeforeValidator(_as_axis)] = Field(
        min_length=1
    )
    dtypes: Axis[Dtype] = ("float32",)
    seeds: Axis[Seed] = (0,)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None


class _TimedGroup(_Group):
    """What groups that are timed over lengths may say.

    Args:
        seq_len: tokens.
        has_padding: the last quarter of every second sequence is padding.
        isolation: a process for each cell, one for all lengths of a lane, or one in which all variants of the group are
            timed in turns (`"interleaved"`): the way to compare peers.
        repeats: how many processes time each cell; with several, intervals cover what differs between them. They are
            far apart in time: the run goes over all cells once, then again; only those that are timed in turns follow
            each other. Two say little (Student's t has one degree of freedom then): take three or more.
        timeout_s: seconds one repeat of a cell may take.
        budget_s: seconds of sampling per cell, shared by its repeats; fewer samples, wider intervals.
        has_energy: also measure the energy of a call: some seven seconds more per cell, on a GPU that tells.
    """

    seq_len: Axis[Length]
    has_padding: Axis[bool] = (False,)
    isolation: Literal["cell", "lane", "interleaved"] = "cell"
    repeats: Annotated[int, Field(ge=1, le=20)] = 1
    timeout_s: Seconds = 600.0
    budget_s: Seconds = 1.0
    has_energy: bool = False

    @property
    def repeat_budget_s(self) -> float:
        """Seconds of sampling in each process."""
        return self.budget_s / self.repeats


class ScalingGroup(_TimedGroup):
    """Time and memory of one call over lengths. Where several values are given, every combination is a cell.

    Args:
        passes: what is timed; see `attn_zoo.records.PASSES`.
        batch_size: B; fixed while the length grows, so that exponents mean something.
        num_heads: H.
        num_kv_heads: G; default H.
        head_dim: D.
        scope: heads in and out (`"attention"`), or hidden states with projections (`"mixer"`).
        is_causal: later keys hidden.
        dropout_p: on attention weights.
    """

    passes: Axis[CallPass] = ("fwd",)
    batch_size: Axis[Small] = (1,)
    num_heads: Axis[Small] = (8,)
    num_kv_heads: Small | None = None
    head_dim: Axis[Small] = (64,)
    scope: Axis[Literal["attention", "mixer"]] = ("attention",)
    is_causal: Axis[bool] = (False,)
    dropout_p: Axis[Annotated[float, Field(ge=0, lt=1)]] = (0.0,)

    @property
    def num_cells(self) -> int:
        """How many cells the group expands to."""
        count = len(self.variants) * len(self.seeds) * len(self.dtypes)
        for axis in (self.seq_len, self.passes, self.batch_size, self.num_heads, self.head_dim, self.scope):
            count *= len(axis)
        return count * len(self.is_causal) * len(self.has_padding) * len(self.dropout_p)


class StepGroup(_TimedGroup):
    """Time and memory of one training step of the backbone around each variant: batch, forward, loss, backward, update.

    The protocol decides the sizes of the model, dropout and optimiser.

    Args:
        variants: names, or tables `{name, label, options, compile}`.
        protocol: named training protocol.
        batch_size: B; the protocol's own if absent.
    """

    variants: Annotated[tuple[Annotated[StepEntry, BeforeValidator(_as_entry)], ...], BeforeValidator(_as_axis)] = (
        Field(min_length=1)
    )
    protocol: str = "lra-small"
    batch_size: Axis[Small] | None = None

    @property
    def num_cells(self) -> int:
        """How many cells the group expands to."""
        count = len(self.variants) * len(self.seeds) * len(self.dtypes)
        return count * len(self.seq_len) * len(self.has_padding) * len(self.batch_size or (None,))


class AccuracyGroup(_Group):
    """Training runs: variants x seeds on tasks. Where several values are given, every combination is a cell.

    Args:
        task: registered name.
        level: difficulty of the task; every task of the group must have it.
        is_causal: later tokens hidden. A choice for `token_classification` only; absent, every task has its own
            direction, and `token_classification` both sides.
        protocol: named training protocol.
        overrides: fields of the protocol that this group changes; part of the cell's key.
        grid: values to try for further fields of the protocol: every combination, the same for every variant.
        keep_weights: store what was trained, as `weights/<key>.safetensors` in the results folder.
        timeout_s: seconds one training may take.
    """

    task: Axis[str]
    level: Axis[str] = ("short",)
    is_causal: Axis[bool] | None = None
    protocol: str = "cpu-small"
    overrides: dict[str, Any] = {}
    grid: dict[str, Axis[Any]] = {}
    keep_weights: bool = False
    timeout_s: Seconds = 7 * 86_400.0

    @property
    def num_trials(self) -> int:
        """How many combinations the grid has."""
        return math.prod(len(values) for values in self.grid.values())

    @property
    def num_cells(self) -> int:
        """How many cells the group expands to."""
        count = len(self.variants) * len(self.seeds) * len(self.dtypes) * len(self.task) * len(self.level)
        return count * len(self.is_causal or (None,)) * self.num_trials

    def trials(self) -> Iterator[dict[str, Any]]:
        """Yield the overrides of each combination of the grid, those of the group included."""
        for values in itertools.product(*self.grid.values()):
            yield {**self.overrides, **dict(zip(self.grid, values, strict=True))}


AnyGroup = ScalingGroup | StepGroup | AccuracyGroup
GROUPS: dict[str, type[AnyGroup]] = {"scaling": ScalingGroup, "step": StepGroup, "accuracy": AccuracyGroup}
"""Kinds of group by the key that holds them."""


class Matrix(_Model):
    """A whole matrix.

    Args:
        name: letters, digits and `._-`; results folders are named after it.
        description: one sentence.
        options: options of each variant, for all groups.
        scaling: groups measured over lengths.
        step: groups of training steps, measured over lengths.
        accuracy: groups of training runs.
        source: the file it came from.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    description: str = ""
    options: dict[str, dict[str, Any]] = {}
    scaling: tuple[ScalingGroup, ...] = ()
    step: tuple[StepGroup, ...] = ()
    accuracy: tuple[AccuracyGroup, ...] = ()
    source: str = ""

    @property
    def groups(self) -> tuple[AnyGroup, ...]:
        """All of them, in the order they run."""
        return (*self.scaling, *self.step, *self.accuracy)

    @property
    def num_cells(self) -> int:
        """How many cells the matrix expands to, before cells that occur twice are merged."""
        return sum(group.num_cells for group in self.groups)
